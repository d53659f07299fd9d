"""python -m benchmarks.qwen3: steps of a policy of the shape of Qwen3-0.6B.

Random parameters, random prompts, a reward that costs nothing: what is measured is the
sampler and the update, at the real vocabulary of 151,936. Floors are measured in the
same process: how fast a large array is read and how fast large matrices are multiplied.
On a GPU: --dtype bfloat16 --prompts 32 --group-size 16 --max-tokens 512.
"""

import argparse
import datetime
import json
import shlex
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks import machine
from benchmarks.workload import Workload

SHAPE = partial(
    Workload,
    name="qwen3-0.6b",
    layers=28,
    width=1024,
    heads=16,
    kv_heads=8,
    head_dim=128,
    mlp_width=3072,
    vocab_size=151936,
)
REPEATS = 3  # of a floor; the best counts
RESULTS = Path(__file__).parent / "results" / "qwen3.json"


@dataclass(frozen=True)
class Floor:
    """What the device can do."""

    bytes_per_s: float  # read
    flops_per_s: float  # of a large product


def quickest(function: Callable[[], Any]) -> float:
    """Seconds, after a call that compiles."""
    import jax

    jax.block_until_ready(function())
    seconds = []
    for _ in range(REPEATS):
        start = time.perf_counter()
        jax.block_until_ready(function())
        seconds.append(time.perf_counter() - start)
    return min(seconds)


def floor(dtype: Any) -> Floor:
    """Measure it."""
    import jax
    import jax.numpy as jnp

    count = 2**28  # elements: beyond any cache
    x = jnp.ones(count, dtype)
    total, product = jax.jit(jnp.max), jax.jit(jnp.matmul)
    size = 8192 if jax.default_backend() == "gpu" else 2048
    a = jnp.ones((size, size), dtype)
    read, multiply = quickest(lambda: total(x)), quickest(lambda: product(a, a))
    return Floor(x.nbytes / read, 2 * size**3 / multiply)


def matmul_flops(work: Workload, tokens: int, keys: float, heads: int) -> float:
    """FLOPs of a forward pass.

    Args:
        work: shapes.
        tokens: run through the layers.
        keys: that each of them looks at, in the mean.
        heads: tokens of these whose logits are computed.
    """
    embedding = work.vocab_size * work.width
    attention = 4 * work.layers * work.heads * work.head_dim * keys
    layers = 2 * (work.parameters - embedding) + attention
    return tokens * layers + 2.0 * embedding * heads


def peak_mib() -> float:
    """Of the device where it says so, else of the process."""
    import jax

    told = jax.local_devices()[0].memory_stats() or {}
    if "peak_bytes_in_use" in told:
        return told["peak_bytes_in_use"] / 2**20
    return machine.peak_rss_mib()


def measured(work: Workload, how: argparse.Namespace) -> dict[str, Any]:
    """Steps of the staged loop; medians without the first, which compiles."""
    import jax
    import jax.numpy as jnp

    from benchmarks.recipe import config
    from curax.config import override
    from curax.runs import run

    dtype = getattr(jnp, how.dtype)
    recipe = config(work, micro_batches=how.micro_batches, token_chunk=how.token_chunk)
    options = {"scan_layers": True, "remat": True, "dtype": how.dtype}
    named = {f"model.{name}": value for name, value in options.items()}
    limits = floor(dtype)
    load = machine.Load()
    loop = run.make_loop(override(recipe, named))
    with loop.context():
        state = loop.begin(loop.initial())
        rows = []
        for step in range(1 + how.steps):
            start = time.perf_counter()
            state, (row,), _ = loop.advance(state, 1)
            took = time.perf_counter() - start
            rows.append(row | {"took": took})
            print(f"step {step}: {took:.1f} s, {peak_mib():.0f} MiB", file=sys.stderr)
    rollout, update = (
        statistics.median(float(row[f"time/{name}_s"]) for row in rows[1:])
        for name in ("rollout", "update")
    )
    new = work.rows * work.max_tokens
    context = work.prompts * work.prompt_tokens
    half = work.prompt_tokens + work.max_tokens / 2
    forward = matmul_flops(work, new, half, new)
    forward += matmul_flops(work, context, work.prompt_tokens / 2, work.prompts)
    weights = work.parameters * jnp.dtype(dtype).itemsize
    return {
        "rollout_s": rollout,
        "update_s": update,
        "first_s": rows[0]["took"],
        "generated_tokens_per_s": new / rollout,
        "trained_tokens_per_s": new / update,
        "peak_mib": peak_mib(),
        # Every step of decoding reads all weights once, whatever the batch.
        "rollout_share_of_bandwidth": work.max_tokens
        * weights
        / rollout
        / limits.bytes_per_s,
        "rollout_share_of_flops": forward / rollout / limits.flops_per_s,
        # Forward, and twice that backward; what remat repeats is not counted.
        "update_share_of_flops": 3 * forward / update / limits.flops_per_s,
        "floor_gb_per_s": limits.bytes_per_s / 1e9,
        "floor_gflop_per_s": limits.flops_per_s / 1e9,
        "parameters": work.parameters,
        "device": jax.devices()[0].device_kind,
        "disturbed": load.others() > machine.QUIET,
    }


def main(argv: Sequence[str] | None = None) -> None:
    """Measure, print, and append to a file."""
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--prompts", type=int, default=4)
    parser.add_argument("--group-size", type=int, default=8)
    parser.add_argument("--prompt-tokens", type=int, default=64)
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--micro-batches", type=int, default=8)
    parser.add_argument("--token-chunk", type=int, default=512)
    parser.add_argument("--layers", type=int, default=28)
    parser.add_argument("--steps", type=int, default=3, help="measured")
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"))
    parser.add_argument("--out", type=Path, default=RESULTS)
    argv = sys.argv[1:] if argv is None else argv
    how = parser.parse_args(argv)
    names = ("prompts", "group_size", "prompt_tokens", "max_tokens", "layers")
    sizes = {name: getattr(how, name) for name in names}
    work = SHAPE(**sizes, slots=sizes["prompts"] * sizes["group_size"])
    more = ("micro_batches", "token_chunk", "steps", "dtype")
    found = sizes | {name: getattr(how, name) for name in more}
    found |= measured(work, how)
    print(json.dumps(found, indent=1))
    about = {
        "date": datetime.date.today().isoformat(),
        "commit": machine.commit(),
        "machine": machine.describe(),
        "command": shlex.join(["python", "-m", "benchmarks.qwen3", *argv]),
        "points": [found],
    }
    how.out.write_text(json.dumps(about, indent=1) + "\n")


if __name__ == "__main__":
    main()
