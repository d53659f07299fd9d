"""python -m benchmarks.scaling: how the cost of curax grows, and where its memory goes.

Each point is measured in a process of its own: three iterations after one that
compiles. The model is smaller than that of the peers' comparison, so that the largest
points take seconds.
"""

import argparse
import dataclasses
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks import machine
from benchmarks.workload import WORKLOADS, Workload

MODEL = Workload(
    name="tiny",
    layers=2,
    width=128,
    heads=4,
    kv_heads=2,
    head_dim=32,
    mlp_width=512,
    vocab_size=512,
)
CHUNK = 64  # tokens whose logits exist at a time, where chunks are used
REPEATS = 3
STEPS = 8  # of the vmapped run, and of its warm start


def doubling(low: int, high: int) -> list[int]:
    """`low`, twice that, and so on, up to `high`."""
    return [low << i for i in range((high // low).bit_length())]


MEMORY = {"prompts": 4, "group_size": 8}  # of the update whose memory is measured

# Every axis: its name, its points, and what each point is.
AXES: dict[str, list[dict[str, int]]] = {
    "rows": [
        {"x": n, "prompts": 16, "group_size": n // 16} for n in doubling(64, 4096)
    ],
    "length": [
        {"x": n, "prompts": 8, "group_size": 4, "max_tokens": n}
        for n in doubling(32, 1024)
    ],
    "prompts": [{"x": n, "prompts": n, "group_size": 4} for n in doubling(16, 1024)],
    "vocabulary": [
        {"x": n, "vocab_size": n, "chunk": chunk} | MEMORY
        for n in (512, 2048, 8192, 32768, 151936)
        for chunk in (0, CHUNK)
    ],
    "stages": [{"x": 1}],
    "seeds": [{"x": n} for n in doubling(1, 32)],
}


# ----- one point, in its own process


def measure(axis: str, point: dict[str, int]) -> dict[str, Any]:
    """What one point costs."""
    own = {f.name for f in dataclasses.fields(Workload)}
    work = dataclasses.replace(MODEL, **{k: v for k, v in point.items() if k in own})
    if axis == "seeds":
        return run_of_seeds(point["x"])
    if axis == "vocabulary":
        return update_alone(work, point["chunk"])
    if axis == "stages":
        return {"stages": list(stages())}
    return iterations(work)


def iterations(work: Workload) -> dict[str, Any]:
    """Seconds of rollout and update."""
    import jax

    from benchmarks.recipe import config
    from curax.step import build, loops

    start = time.perf_counter()
    loop = loops.Staged(build.build(config(work)))
    with loop.context():
        state = loop.begin(loop.initial())
        state, _, _ = jax.block_until_ready(loop.advance(state, 1))
        first_s = time.perf_counter() - start
        _, rows, _ = loop.advance(state, REPEATS)
    return {
        "first_s": first_s,
        "rollout_s": statistics.median(row["time/rollout_s"] for row in rows),
        "update_s": statistics.median(row["time/update_s"] for row in rows),
    }


def stages() -> Iterator[tuple[str, float]]:
    """Peak memory of the process, MiB, after each stage of the first nano iteration."""
    import jax
    import jax.numpy as jnp

    from benchmarks.recipe import config
    from curax.step import build, draw, drivers, learn, loops
    from curax.step.types import Graded

    yield "import", machine.peak_rss_mib()
    built = build.build(config(WORKLOADS["nano"]))
    loop = loops.Staged(built)
    state = jax.block_until_ready(loop.begin(loop.initial()))
    yield "parameters and optimizer", machine.peak_rss_mib()
    request = draw.next_request(drivers.Traced(), built, state)
    sample = jax.jit(partial(draw.draw, built)).lower(state, request).compile()
    yield "rollout compiled", machine.peak_rss_mib()
    rollouts = jax.block_until_ready(sample(state, request))
    yield "rollout", machine.peak_rss_mib()
    outcome = jnp.arange(built.rows, dtype=jnp.float32) % 2
    graded = Graded.of(request, rollouts, outcome)
    drawn = draw.collect(built, request, graded, None)
    update = jax.jit(partial(learn.learn, built), donate_argnums=0)
    update = update.lower(state, drawn).compile()
    yield "update compiled", machine.peak_rss_mib()
    jax.block_until_ready(update(state, drawn))
    yield "update", machine.peak_rss_mib()


def update_alone(work: Workload, chunk: int) -> dict[str, Any]:
    """Memory and seconds of an update over all rows at once."""
    import jax
    import jax.numpy as jnp

    from benchmarks.recipe import config
    from curax.step import build, draw, drivers, learn, states
    from curax.step.types import Graded, StepRollouts

    built = build.build(config(work, micro_batches=1, token_chunk=chunk))
    state = jax.jit(lambda seed: states.begin(built, states.initial(built, seed)))(
        jnp.uint32(0)
    )

    def drawn(key: jax.Array) -> StepRollouts:
        """Completions of the right shape and random tokens: no sampler is run."""
        request = draw.next_request(drivers.Traced(), built, state)
        like = jax.eval_shape(partial(draw.draw, built), state, request)
        rollouts = jax.tree.map(lambda leaf: jnp.ones(leaf.shape, leaf.dtype), like)
        row = jnp.arange(work.rows, dtype=jnp.int32)
        rollouts = dataclasses.replace(
            rollouts,
            tokens=jax.random.randint(key, rollouts.tokens.shape, 0, work.vocab_size),
            prompt=row // work.group_size,
            member=row % work.group_size,
            context=row // work.group_size,
        )
        outcome = (row % 2).astype(jnp.float32)
        graded = Graded.of(request, rollouts, outcome)
        return draw.collect(built, request, graded, None)

    completions = jax.block_until_ready(jax.jit(drawn)(jax.random.key(0)))
    before = machine.peak_rss_mib()
    update = jax.jit(lambda state, drawn: learn.learn(built, state, drawn)[0])
    update = update.lower(state, completions).compile()
    planned = update.memory_analysis()
    assert planned is not None
    bytes_ = planned.temp_size_in_bytes + planned.argument_size_in_bytes
    found = {"planned_mib": bytes_ / 2**20, "before_mib": before}
    if bytes_ > 0.6 * machine.available_bytes():
        return found | {"failure": "not run: it would not fit into memory."}
    seconds = machine.repeated(
        lambda: jax.block_until_ready(update(state, completions)), 1 + REPEATS
    )
    return found | {"update_s": statistics.median(seconds[1:])}


def run_of_seeds(seeds: int) -> dict[str, Any]:
    """Seconds of a short run of the quickstart, vmapped over seeds."""
    import jax
    import jax.numpy as jnp

    from curax.config import load, override
    from curax.step import build, loops

    recipe = load(machine.ROOT / "configs" / "quickstart.py")
    short = {"steps": STEPS, "warm_start.steps": STEPS}
    built = build.build(override(recipe, short))
    run = jax.jit(jax.vmap(partial(loops.run, built)))
    numbers = jnp.arange(seeds, dtype=jnp.uint32)
    seconds = machine.repeated(lambda: jax.block_until_ready(run(numbers)), 1 + REPEATS)
    return {"first_s": seconds[0], "run_s": statistics.median(seconds[1:])}


# ----- all points


def points(axes: Sequence[str]) -> Iterator[tuple[str, dict[str, int]]]:
    """All points of some axes."""
    for axis in axes:
        for point in AXES[axis]:
            yield axis, point


def in_process(axis: str, point: dict[str, int], limit: float) -> dict[str, Any]:
    """Measure a point in a fresh process; a failure becomes a sentence."""
    module = (sys.executable, "-m", "benchmarks.scaling")
    load = machine.Load()
    try:
        run = subprocess.run(
            (*module, "--point", json.dumps([axis, point])),
            cwd=machine.ROOT,
            capture_output=True,
            text=True,
            check=True,
            timeout=limit,
        )
        found = json.loads(run.stdout.splitlines()[-1])
    except subprocess.TimeoutExpired:
        found = {"failure": f"not finished within {limit:g} s."}
    except subprocess.CalledProcessError as error:
        last = (error.stderr.strip().splitlines() or [""])[-1]
        found = {"failure": machine.without_paths(f"status {error.returncode}: {last}")}
    return point | found | load.told()


def main(argv: Sequence[str] | None = None) -> None:
    """Measure all points, and write what was found."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.scaling", description="Measure how costs grow."
    )
    add = parser.add_argument
    add("--axes", default=",".join(AXES), help="which (default: %(default)s)")
    add("--limit", type=float, default=300, help="seconds per point, at most")
    add("--out", type=Path, default=Path("benchmarks/results"), help="folder")
    add("--point", help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.point:
        found = measure(*json.loads(args.point))
        print(json.dumps(found | {"peak_rss_mib": machine.peak_rss_mib()}))
        return
    axes = args.axes.split(",")
    file, start = args.out / "scaling.json", time.perf_counter()
    results = json.loads(file.read_text()) if file.exists() else {}
    plan = list(points(axes))
    command = f"python -m benchmarks.scaling --axes {args.axes}"
    for axis in axes:
        results[axis] = machine.about(command) | {"points": []}
    for number, (axis, point) in enumerate(plan, 1):
        found = in_process(axis, point, args.limit)
        results[axis]["points"].append(found)
        shown = {k: round(v, 2) for k, v in found.items() if isinstance(v, float)}
        print(
            f"{number}/{len(plan)}  {time.perf_counter() - start:4.0f} s  {axis} "
            f"{point['x']}  {shown} {found.get('failure', '')}",
            flush=True,
        )
        machine.write(file, results)


if __name__ == "__main__":
    main()
