"""Memory of what a draw holds, printed before a run draws anything."""

import jax

from curax.config import ConfigError
from curax.settings import machine
from curax.step import room
from curax.step.loops import Loop

MIB, GIB = 2**20, 2**30


def lines(loop: Loop) -> list[str]:
    """Lines on the cache and on kept sets, if there are any.

    Raises:
        ConfigError: as `line` and `kept_sets`.
    """
    return [text for text in (line(loop), kept_sets(loop)) if text]


def kept_sets(loop: Loop) -> str | None:
    """Text such as `Kept sets: 0.3 of 80 GiB of a device, ...`; None: without any.

    They are those of all rows that are drawn, and of those that train once more.

    Raises:
        ConfigError: they take more than a device has.
    """
    parts = loop.parts
    if (one := room.kept_to_train(parts)) is None:
        return None
    sizes, cut = parts.config.sampling, dict(loop.mesh.shape) if loop.mesh else {}
    shards = cut.get("data", 1) * cut.get("fsdp", 1)
    rows = -(-parts.rows // shards) - (-parts.train_rows // shards)
    token = one.shape[0] * one.dtype.itemsize
    taken = parts.config.seeds * rows * sizes.max_tokens * token
    limit = device_bytes()
    if taken > limit:
        few = max(1, int(limit / taken * one.shape[0] / 2))
        raise ConfigError(
            f"sampling.replay_support=True notes {token:,} bytes of each token, "
            f"{gib(taken)} GiB of a device that has {gib(limit)}; set "
            f"sampling.top_k={few}, of which it notes ids alone, or "
            "sampling.replay_support to False."
        )
    return (
        f"Kept sets: {words(taken)} of {gib(limit)} GiB of a device, {token:,} "
        "bytes of each token."
    )


def line(loop: Loop) -> str | None:
    """Text such as `Cache: 3.1 of 9.6 GiB of a device ...`; None without a cache.

    Raises:
        ConfigError: `sampling.cache_gib` has no room for a completion.
    """
    found = room.cache_size(loop.parts, loop.mesh)
    taken = loop.parts.config.seeds * found.bytes
    if not taken:
        return None
    sizes = loop.parts.config.sampling
    limit = sizes.cache_gib * GIB if sizes.cache_gib else device_bytes()
    whole = f"{gib(limit)} GiB of a device"
    slots = f"{found.slots} slots"
    if sizes.cache_gib:
        whole += " that sampling.cache_gib allows"
        slots = f"{found.slots} of {found.wanted} slots"
    slots += f" of {sizes.max_tokens:,} tokens"
    if found.pages:
        slots += f", which share {found.pages} pages of {found.page}"
    return (
        f"Cache: {words(taken)} of {whole} for {slots}, and {found.contexts} prompts "
        f"of {found.prompt:,}."
    )


def words(taken: float) -> str:
    """Bytes in front of a number of GiB: with a unit of their own where few."""
    small = taken < 0.1 * GIB
    return f"{taken / MIB:.2g} MiB" if small else gib(taken)


def gib(taken: float) -> str:
    """Bytes as a number of GiB, to two digits, and whole from 100 on."""
    number = taken / GIB
    return f"{number:.2g}" if number < 99.5 else f"{number:,.0f}"


def device_bytes() -> int:
    """Bytes of memory of a device: its own, or this machine's for CPUs."""
    stats = jax.local_devices()[0].memory_stats() or {}
    return int(stats.get("bytes_limit", machine.ram()))
