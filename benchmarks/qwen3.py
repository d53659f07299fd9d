"""python -m benchmarks.qwen3: steps of a policy of the shape of Qwen3-0.6B, 1.7B or 8B.

Random parameters, random prompts, a reward that costs nothing: what is measured is the
sampler and the update, at the real vocabulary of 151,936, beside the limits of the
device in the same process. `python -m benchmarks.gpu` is made of it.
"""

import argparse
import json
import shlex
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks import limits, machine
from benchmarks.workload import QWEN3, Workload

RESULTS = Path(__file__).parent / "results" / "qwen3.json"
SMALL = {
    **{"layers": 1, "width": 32, "heads": 2, "kv_heads": 1, "head_dim": 16},
    **{"mlp_width": 64, "vocab_size": 512},
}


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

    chunk = how.token_chunk
    recipe = config(work, micro_batches=how.micro_batches, token_chunk=chunk)
    options = {"scan_layers": True, "remat": True, "dtype": how.dtype}
    options["lora_rank"] = how.lora_rank
    own = override(recipe, {f"model.{name}": value for name, value in options.items()})
    shrunk = {"size": 2**16, "width": 64} if how.shrunken else {}
    most = limits.measured(how.dtype, **shrunk)
    load = machine.Load()
    loop = run.make_loop(own)
    rows = []
    with loop.context():
        state = loop.begin(loop.initial())
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
    forward = limits.forward_flops(work, new)
    read = limits.decoded_bytes(work, new, jnp.dtype(how.dtype).itemsize)
    return {
        "rollout_s": rollout,
        "update_s": update,
        "first_s": rows[0]["took"],
        "generated_tokens_per_s": new / rollout,
        "trained_tokens_per_s": new / update,
        "peak_mib": peak_mib(),
        "rollout_share_of_bandwidth": read / rollout / most.bytes_per_s,
        "rollout_share_of_flops": forward / rollout / most.flops_per_s,
        # Forward, and twice that backward; what remat repeats is not counted.
        "update_share_of_flops": 3 * forward / update / most.flops_per_s,
        "floor_gb_per_s": most.bytes_per_s / 1e9,
        "floor_gflop_per_s": most.flops_per_s / 1e9,
        "parameters": work.parameters,
        "device": jax.devices()[0].device_kind,
        "disturbed": load.others() > machine.QUIET,
    }


def main(argv: Sequence[str] | None = None) -> None:
    """Measure, print, and append to a file."""
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--size", default="qwen3-0.6b", choices=QWEN3)
    parser.add_argument("--prompts", type=int, default=4)
    parser.add_argument("--group-size", type=int, default=8)
    parser.add_argument("--prompt-tokens", type=int, default=64)
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--micro-batches", type=int, default=8)
    parser.add_argument("--token-chunk", type=int, default=512)
    parser.add_argument("--layers", type=int, help="fewer than the size has")
    parser.add_argument("--lora-rank", type=int, default=0, help="0: trained whole")
    parser.add_argument("--steps", type=int, default=3, help="measured")
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"))
    parser.add_argument(
        "--shrunken", action="store_true", help="a tiny model, to try the command"
    )
    parser.add_argument("--out", type=Path, default=RESULTS)
    argv = sys.argv[1:] if argv is None else argv
    how = parser.parse_args(argv)
    names = ("prompts", "group_size", "prompt_tokens", "max_tokens")
    sizes = {name: getattr(how, name) for name in names}
    if how.layers:
        sizes["layers"] = how.layers
    work = QWEN3[how.size](**sizes, slots=sizes["prompts"] * sizes["group_size"])
    if how.shrunken:
        work = replace(work, **SMALL)
    more = ("size", "micro_batches", "token_chunk", "steps", "dtype", "lora_rank")
    found = {**sizes, "layers": work.layers}
    found |= {name: getattr(how, name) for name in more}
    found |= measured(work, how)
    print(json.dumps(found, indent=1))
    about = machine.about(shlex.join(["python", "-m", "benchmarks.qwen3", *argv]))
    machine.write(how.out, about | {"points": [found]})


if __name__ == "__main__":
    main()
