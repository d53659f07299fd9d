"""python -m benchmarks.score_norm: what the norm of a score costs, beside a rollout.

The rollout of a workload is drawn once; then every rule of `curax.score` measures the
completions. Medians of a few repeats, after one that compiles, all in one process.
"""

import argparse
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks import machine
from benchmarks.scaling import MODEL
from benchmarks.workload import WORKLOADS, Workload

CHOICES = WORKLOADS | {MODEL.name: MODEL}


def measure(
    work: Workload, rows: int, repeats: int
) -> Iterator[tuple[str, dict[str, Any]]]:
    """What a rollout costs, then each norm; a ratio is that to the rollout.

    Args:
        work: shapes; its model is tied, so no rule differentiates the head alone.
        rows: completions that are run through the model at a time.
        repeats: how often each is timed.
    """
    import jax
    import jax.numpy as jnp

    from benchmarks.recipe import config
    from curax import rollout, score
    from curax.types import Contexts, DrawRows

    recipe = config(work)
    task = recipe.task()
    model = recipe.model(vocab_size=task.vocab_size)
    params = jax.jit(model.init)(jax.random.key(0))
    prompts = task.prompts(jnp.arange(work.prompts, dtype=jnp.int32))
    contexts = Contexts(tokens=prompts.tokens, mask=prompts.mask)
    row = jnp.arange(work.rows, dtype=jnp.int32)
    prompt = row // work.group_size
    asked = DrawRows(
        prompt=prompt,
        member=row % work.group_size,
        context=prompt,
        exists=jnp.ones(work.rows, bool),
    )
    draw = partial(
        rollout.sample,
        model,
        how=rollout.Settings(
            max_tokens=work.max_tokens, end=task.end, pad=task.pad, slots=work.slots
        ),
    )
    some = {"micro_batches": work.rows // rows}
    by = partial(score.gradient, **some)
    norms = {
        "gradient by everything": partial(by, parameters=score.everything),
        "gradient by embedding": partial(by, parameters=score.embedding),
        "gradient by last_block": partial(by, parameters=score.last_block),
        "last_layer": partial(score.last_layer, **some),
        "logits": score.logits,
    }
    found, rollouts = timed(
        jax.jit(draw), params, contexts, asked, jax.random.key(1), repeats=repeats
    )
    yield "rollout", found | {"ratio": 1.0}
    seconds = found["seconds"]
    for name, norm in norms.items():
        run = jax.jit(partial(norm, model))
        found, _ = timed(run, params, contexts, rollouts, 1.0, repeats=repeats)
        yield name, found | {"ratio": found["seconds"] / seconds}


def timed(
    function: Callable[..., Any], *args: Any, repeats: int
) -> tuple[dict[str, Any], Any]:
    """Seconds of a call and of the first one, which compiles; what it returned."""
    import jax

    start = time.perf_counter()
    result = jax.block_until_ready(function(*args))
    first_s, load = time.perf_counter() - start, machine.Load()
    seconds = machine.repeated(lambda: jax.block_until_ready(function(*args)), repeats)
    return {
        "seconds": statistics.median(seconds),
        "all_seconds": seconds,
        "first_s": first_s,
        **load.told(),
    }, result


def main(argv: Sequence[str] | None = None) -> None:
    """Measure, print, and write what was found."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.score_norm", description="Measure norms of scores."
    )
    add = parser.add_argument
    add("--workload", choices=CHOICES, default="nano", help="(default: %(default)s)")
    add("--rows", type=int, default=4, help="at a time (default: %(default)s)")
    add("--repeats", type=int, default=5, help="of each (default: %(default)s)")
    add("--out", type=Path, default=Path("benchmarks/results"), help="folder")
    args = parser.parse_args(argv)
    results = machine.about(
        "python -m benchmarks.score_norm "
        f"--workload {args.workload} --rows {args.rows} --repeats {args.repeats}"
    )
    results["points"] = {}
    for name, found in measure(CHOICES[args.workload], args.rows, args.repeats):
        results["points"][name] = found
        mark = "  disturbed" if found["disturbed"] else ""
        print(
            f"{name:24s}{found['seconds']:9.4f} s {found['ratio']:8.3f} x{mark}",
            flush=True,
        )
    results["peak_rss_mib"] = machine.peak_rss_mib()
    machine.write(args.out / "score_norm.json", results)


if __name__ == "__main__":
    main()
