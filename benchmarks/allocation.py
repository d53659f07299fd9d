"""python -m benchmarks.allocation: milliseconds to share out a budget, per allocator.

Each is compiled, then timed on one device of the CPU: the median of some repeats. The
prompts have been seen up to 40 times and differ in pass rate, norm and length.
"""

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks import machine
from curax.settings.tables import aligned

SIZES = (1, 100, 10_000, 100_000)  # prompts
MEAN, MOST = 16, 24  # completions per prompt: on average, and at most
TOKENS = 1000  # of a completion, on average


def allocators(prompts: int) -> dict[str, Callable[..., Any]]:
    """Every allocator, under the name by which it is reported."""
    from curax import allocate

    tokens = 0.8 * MEAN * TOKENS * prompts
    return {
        "uniform": allocate.uniform,
        "inverse_pass_rate": allocate.inverse_pass_rate,
        "inverse_root": allocate.inverse_root,
        "gvm": allocate.gvm,
        "gvm, exact": partial(allocate.gvm, exact=True),
        "gvm, groups of 4": partial(allocate.gvm, unit=4),
        "log_baseline": allocate.log_baseline,
        "bernoulli": allocate.bernoulli,
        "neyman": allocate.neyman,
        "neyman, per token": partial(allocate.neyman, per_token=True),
        "neyman_within_tokens": partial(
            allocate.neyman_within_tokens, token_budget=tokens
        ),
        "dynamo": allocate.dynamo,
        "skip_dead": allocate.skip_dead,
    }


def difficulty(prompts: int) -> Any:
    """Prompts of all kinds, always the same ones."""
    import jax.numpy as jnp
    import numpy as np

    from curax.types import Difficulty

    random = np.random.default_rng(0)
    draws = random.integers(0, 41, prompts)
    solved = random.binomial(draws, random.beta(0.5, 0.5, prompts))
    fields = {
        "draws": draws,
        "solved": solved,
        "pass_rate": (solved + 1) / (draws + 2),
        "norm": random.lognormal(0, 0.5, prompts),
        "tokens": random.integers(1, 2 * TOKENS, prompts),
    }
    return Difficulty(**{k: jnp.asarray(v, jnp.float32) for k, v in fields.items()})


def measure(prompts: int, repeats: int) -> list[dict[str, Any]]:
    """What every allocator costs for so many prompts."""
    import jax

    known, found = difficulty(prompts), []
    for name, allocate in allocators(prompts).items():
        run = jax.jit(partial(allocate, budget=MEAN * prompts, most=MOST))
        load, start = machine.Load(), time.perf_counter()
        compiled = run.lower(known).compile()
        compile_s = time.perf_counter() - start
        counts = jax.block_until_ready(compiled(known))
        seconds = machine.repeated(
            lambda rule=compiled: jax.block_until_ready(rule(known)), repeats
        )
        found.append(
            {
                "allocator": name,
                "prompts": prompts,
                "completions": int(counts.sum()),
                "compile_s": compile_s,
                "run_ms": 1e3 * statistics.median(seconds),
                **load.told(),
            }
        )
    return found


def main(argv: Sequence[str] | None = None) -> None:
    """Measure all sizes, print a table and write what was found."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.allocation",
        description="Measure what it costs to share out a budget.",
    )
    add = parser.add_argument
    sizes = ",".join(map(str, SIZES))
    add("--prompts", default=sizes, help="how many (default: %(default)s)")
    add("--repeats", type=int, default=20, help="per allocator and number of prompts")
    add("--out", type=Path, default=Path("benchmarks/results"), help="folder")
    args = parser.parse_args(argv)

    import jax

    jax.config.update("jax_platforms", "cpu")
    points, numbers = [], [int(text) for text in args.prompts.split(",")]
    for number in numbers:
        points += measure(number, args.repeats)
    results = machine.about(
        f"python -m benchmarks.allocation --prompts {args.prompts} "
        f"--repeats {args.repeats}"
    )
    results |= {"versions": {"jax": jax.__version__}, "points": points}
    machine.write(args.out / "allocation.json", results)
    rows = [["milliseconds, prompts", *(f"{n:,}" for n in numbers)]]
    for name in dict.fromkeys(point["allocator"] for point in points):
        own = [point["run_ms"] for point in points if point["allocator"] == name]
        rows.append([name, *(f"{ms:.3f}" for ms in own)])
    print("\n".join(aligned(rows)))
    compiling = [point["compile_s"] for point in points]
    print(f"compiled in {min(compiling):.2f} to {max(compiling):.2f} s each")
    if disturbed := sum(point["disturbed"] for point in points):
        print(f"disturbed: {disturbed} of {len(points)}")


if __name__ == "__main__":
    main()
