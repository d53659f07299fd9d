"""Memory of the KV cache in decoding, printed before a run draws anything."""

import jax

from curax.settings import machine
from curax.step import draw
from curax.step.loops import Loop

MIB, GIB = 2**20, 2**30


def line(loop: Loop) -> str | None:
    """Text such as `Cache: 3.1 of 9.6 GiB of a device ...`; None without a cache.

    Raises:
        ConfigError: `sampling.cache_gib` has no room for a completion.
    """
    found = draw.cache_size(loop.parts, loop.mesh)
    taken = loop.parts.config.seeds * found.bytes
    if not taken:
        return None
    sizes = loop.parts.config.sampling
    small = taken < 0.1 * GIB
    text = f"{taken / MIB:.2g} MiB" if small else f"{taken / GIB:.2g}"
    whole = f"{sizes.cache_gib or memory_of_device() / GIB:.2g} GiB of a device"
    slots = f"{found.slots} slots"
    if sizes.cache_gib:
        whole += " that sampling.cache_gib allows"
        slots = f"{found.slots} of {found.wanted} slots"
    return (
        f"Cache: {text} of {whole} for {slots} of {sizes.max_tokens:,} tokens, "
        f"and {found.contexts} prompts of {found.prompt:,}."
    )


def memory_of_device() -> int:
    """Bytes of memory of a device: its own, or this machine's for CPUs."""
    stats = jax.local_devices()[0].memory_stats() or {}
    return int(stats.get("bytes_limit", machine.memory()))
