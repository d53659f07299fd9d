"""python -m benchmarks.ahead: what a draw one step ahead of the update saves.

The workload `nano` of curax alone, with a verifier that sleeps, as one that waits for a
sandbox does: not at all, as long as a draw takes, and as long as draw and update. Each
with `sampling.ahead` 0 and 1 in turn, in one process; draw and update share the device.
With --halves there are two devices of the processor, and a third loop, in which one
draws while the other trains (`mesh.draw_share`).
"""

import argparse
import os
import statistics
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks import machine, recipe
from benchmarks.workload import WORKLOADS


class Sleeper:
    """Seconds that the verifier sleeps per step; set between measurements."""

    def __init__(self):
        """Do not sleep."""
        self.seconds = 0.0


def loops(sleeper: Sleeper, steps: int, *, halves: bool) -> dict[Any, Any]:
    """A loop from the host for each `sampling.ahead`, not yet compiled."""
    from curax import off_policy
    from curax.config import Mesh
    from curax.step.build import build
    from curax.step.loops import Staged

    config = recipe.config(WORKLOADS["nano"])
    made = config.task

    def task(**options: Any) -> Any:
        plain = made(**options)

        def verify_all(targets: Sequence[Any], completions: Sequence[Any]) -> list[Any]:
            time.sleep(sleeper.seconds)
            pairs = zip(targets, completions, strict=True)
            return [plain.verify(target, tokens) for target, tokens in pairs]

        return replace(plain, verify_all=verify_all)

    now = replace(config, task=task, steps=steps)
    weighed = replace(now.sampling, ahead=1, off_policy=off_policy.truncated_ratio)
    configs: dict[Any, Any] = {0: now, 1: replace(now, sampling=weighed)}
    if halves:
        configs = {n: replace(one, mesh=Mesh(data=2)) for n, one in configs.items()}
        cut = Mesh(data=2, draw_share=0.5)
        configs["1, on halves"] = replace(configs[1], mesh=cut)
    return {n: Staged(build(one)) for n, one in configs.items()}


def measure(repeats: int, *, halves: bool) -> dict[str, Any]:
    """Seconds of a step and what was hidden, by verifier and by `sampling.ahead`."""
    sleeper, found = Sleeper(), {}
    running = loops(sleeper, steps=10**6, halves=halves)
    states = {}
    for n, loop in running.items():
        with loop.context():
            states[n] = loop.begin(loop.initial())

    def steps(n: Any, times: int) -> tuple[list[float], list[dict[str, Any]]]:
        seconds, rows = [], []
        for _ in range(times):
            start = time.perf_counter()
            with running[n].context():
                states[n], new, _ = running[n].advance(states[n], 1)
            seconds.append(time.perf_counter() - start)
            rows += new
        return seconds, rows

    for n in running:
        steps(n, 3)  # compiles, and fills what is under way
    _, rows = steps(0, repeats)
    draw, update = (
        statistics.median(row[f"time/{stage}_s"] for row in rows)
        for stage in ("rollout", "update")
    )
    for name, seconds in {
        "none": 0.0,
        "as long as the draw": draw,
        "as long as draw and update": draw + update,
    }.items():
        sleeper.seconds = seconds
        for n in running:
            steps(n, 2)  # what was under way before is gone
            load = machine.Load()
            took, rows = steps(n, repeats)
            step = statistics.median(took)
            found[f"{name}, {n}"] = {
                "verifier": name,
                "sleeps_s": seconds,
                "ahead": n,
                "step_s": step,
                "all_s": took,
                "hidden": statistics.median(r["time/hidden_fraction"] for r in rows),
                "idle": max(1 - (draw + update) / step, 0.0),
                **load.told(),
            }
    return {"draw_s": draw, "update_s": update, "points": found}


def main(argv: Sequence[str] | None = None) -> None:
    """Measure, print, and write what was found."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.ahead", description="Measure a draw ahead."
    )
    add = parser.add_argument
    add("--repeats", type=int, default=7, help="steps of each (default: %(default)s)")
    add("--halves", action="store_true", help="two devices, one of which draws")
    add("--out", type=Path, default=Path("benchmarks/results"), help="folder")
    args = parser.parse_args(argv)
    if args.halves:  # before jax begins
        two = "--xla_force_host_platform_device_count=2"
        os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {two}"
    command = f"python -m benchmarks.ahead --repeats {args.repeats}"
    results = machine.about(command + " --halves" * args.halves)
    results |= measure(args.repeats, halves=args.halves)
    print(f"a draw {results['draw_s']:.2f} s, an update {results['update_s']:.2f} s")
    for name, one in results["points"].items():
        mark = "  disturbed" if one["disturbed"] else ""
        print(
            f"{name:32s}{one['step_s']:7.2f} s a step, {one['hidden']:5.0%} hidden, "
            f"{one['idle']:5.0%} idle{mark}",
            flush=True,
        )
    name = "ahead_halves.json" if args.halves else "ahead.json"
    machine.write(args.out / name, results)


if __name__ == "__main__":
    main()
