"""Measure what `predict` predicts: the progress of a real step, before RL.

Command:  python -m experiments.map.step_progress --regime dense_fresh \\
              --steps 150 --recipes rloo:4 maxrl:8 ada_seq_positive_accepted:1

A recipe is named with the value of its knob, or with its variant: pods_exact:8of32.

At the warm start of seed 0, `--steps` steps of each recipe are drawn with prompts of
their own, and none is taken. g is the gradient of a step, grad J that of the mean pass
rate, from two probes of 512 other prompts, 32 completions each:

    progress = (grad J . E g)^2 / (|grad J|^2 E|g|^2)

with |grad J|^2 the product of both probes, so that their noise is not in it. Per 64
draws, for far below 1 it is proportional to the prompts of a step. Written
to `results/REGIME/progress.json`, with the standard error from that of grad J . E g.
"""

import argparse
import json
import sys
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from curax.runs import libraries
from curax.settings.cli import write_file
from curax.step import draw, drivers, states
from curax.step.build import build
from curax.step.types import Components, StepRollouts
from curax.theory import law_residual, probe
from curax.types import TrainState
from experiments.map import regimes, run
from experiments.map.regimes import RECIPES, Setting

PROBED, SAMPLES = 512, 32
LOSS = law_residual.STAGES.index("loss") - 1  # of `law_residual.updates`


def vector(tree: Any) -> np.ndarray:
    """All entries of a tree, `[parameters]` float64."""
    return np.concatenate([np.asarray(x, float).ravel() for x in jax.tree.leaves(tree)])


def gradient(parts: Components, state: TrainState, drawn: StepRollouts) -> Any:
    """The gradient of a step's loss, like params, before norm and optimizer."""
    return law_residual.updates(parts, state, drawn)[LOSS]


def started(regime: str, recipe: str, value: str) -> tuple[Components, TrainState]:
    """Components of a recipe at a knob or of a variant, and its state at the start."""
    if RECIPES[recipe].knob:
        setting = Setting(next(iter(RECIPES[recipe].variants)), float(value), 0.0)
    else:
        setting = Setting(value, None, 0.0)
    config = regimes.arm(regime, recipe, setting, "claim").config
    parts = build(replace(config, seed=0, seeds=1))
    warm = jax.tree.map(lambda x: x[0], run.warmed(regime, (0,)))
    return parts, jax.jit(partial(states.begin, parts))(warm)


def slopes(regime: str) -> np.ndarray:
    """`[2, parameters]`: grad J by two probes of different prompts."""
    parts, state = started(regime, "rloo", "4")
    rng = np.random.default_rng(0)
    ids = rng.choice(parts.task.num_prompts, (2, PROBED), replace=False)
    drive = drivers.Hosted()
    found = [
        probe.probe(parts, state, own.astype(np.int32), SAMPLES, drive=drive)
        for own in ids
    ]
    return np.stack([vector(one.gradient) for one in found])


def measured(
    regime: str, recipe: str, value: str, steps: int, slope: np.ndarray
) -> dict[str, float]:
    """Progress of a step of a recipe, and per 64 draws, with its standard error."""
    parts, state = started(regime, recipe, value)
    drive, count = drivers.Hosted(), parts.config.sampling.prompts
    along, squares, draws = [], [], []
    for number in range(steps):
        now = replace(
            state,
            step=state.step + jnp.int32(number),
            position=state.position + jnp.int32(number * count),
        )
        drawn = draw.attempt(drive, parts, now, None)
        own = vector(drive.call(gradient, parts, now, drawn))
        along.append(own @ slope.mean(0))
        squares.append(own @ own)
        draws.append(int(np.sum(np.asarray(drawn.rollouts.exists))))
    mean = float(np.mean(along))
    made = mean**2 / (float(slope[0] @ slope[1]) * float(np.mean(squares)))
    error = 2 * float(np.std(along, ddof=1)) / steps**0.5 / abs(mean)
    each = 64 / float(np.mean(draws))
    return {
        "draws": float(np.mean(draws)),
        "progress": made,
        "per_64_draws": made * each,
        "standard_error": made * each * error,
    }


def known(text: str) -> tuple[str, str]:
    """A recipe of the map and the value of its knob or its variant, of `NAME:KNOB`."""
    name, _, value = text.partition(":")
    own = RECIPES.get(name)
    number = value.replace(".", "", 1).isdigit()
    if own is None or not (number if own.knob else value in own.variants):
        raise argparse.ArgumentTypeError(
            f"{text} names no recipe of the map with the value of its knob, or with "
            "its variant where it has none; write rloo:4 or pods_exact:8of32, say"
        )
    return name, value


def main(argv: list[str] | None = None) -> int:
    """Exit status: 0 done, 2 bad input."""
    parser = argparse.ArgumentParser(prog="python -m experiments.map.step_progress")
    parser.add_argument("--regime", choices=list(regimes.REGIMES), required=True)
    parser.add_argument(
        "--recipes", nargs="+", type=known, metavar="NAME:KNOB", required=True
    )
    parser.add_argument("--steps", type=int, default=150)
    args = parser.parse_args(argv)
    libraries.set_up()
    slope, found = slopes(args.regime), {}
    for recipe, value in args.recipes:
        name = f"{recipe}:{value}"
        found[name] = measured(args.regime, recipe, value, args.steps, slope)
        print(f"{name}: {found[name]}", flush=True)
    path = regimes.RESULTS / args.regime / "progress.json"
    rows = {"steps": args.steps, "recipes": found}
    write_file(path, (json.dumps(rows, indent=1) + "\n").encode())
    return 0


if __name__ == "__main__":
    sys.exit(main())
