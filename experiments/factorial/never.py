"""Held-out prompts that were never right before RL, and where runs take them.

Command:  python -m experiments.factorial.never

Runs of the claims in sparse again, by the settings and seeds of the page, with 32 draws
of each of the 128 held-out prompts before and after, in `results_never/`. `course`
follows the same prompts: from the posterior of their pass rates, by steps with which
RLOO ends where it was measured to here, from gradients as measured (`gradients.json` of
the map), and as if no two prompts shared anything.
"""

import json
import time
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np

from curax.compare import programs
from curax.config import override
from curax.runs import libraries
from curax.settings.tables import markdown
from curax.step import loops, validation
from curax.theory import course, expect
from experiments.factorial import predict, run
from experiments.map import course as map_course
from experiments.map import regimes
from experiments.map import run as map_run
from experiments.map.show import mean_gap, number, plus_minus

RESULTS = Path(__file__).parent / "results_never"
REGIME, ARMS = "sparse", (predict.BASE, "right-fixed-one")
SAMPLES, EVERY = 32, 20
FOLLOWED = 256  # draws from the posteriors, of each kind of prompt


def measure(arm: str) -> dict[str, Any]:
    """Right ones of each held-out prompt `[R][E]`, before and after."""
    setting = run.chosen(REGIME, arm)
    found = run.lane(REGIME, arm, setting, "claim")
    config = override(found.config, {"evaluation.samples": SAMPLES})
    made = (found._replace(config=config),)
    lanes = programs.lanes(programs.Sweep(made, (run.knob(arm), regimes.RATE)))
    examined = jax.jit(jax.vmap(partial(loops.held_out_outcomes, lanes.parts)))

    def right(state: Any) -> list[list[int]]:
        sampled, _ = jax.device_get(examined(state))
        rates = validation.pass_rates(lanes.parts, *sampled)
        return (rates * SAMPLES).round().astype(int).tolist()

    state = lanes.begin(map_run.warmed(REGIME, run.SEEDS))
    before, drawn = right(state), np.zeros(len(run.SEEDS))
    while drawn.min() < run.tokens(REGIME, "claim"):
        state, rows, _ = lanes.advance(state, EVERY)
        drawn += np.sum([row[programs.COUNTED["drawn"]] for row in rows], 0)
    return {"seeds": run.SEEDS, "before": before, "after": right(state)}


def read() -> dict[str, dict[str, Any]]:
    """What is measured, by arm."""
    return {arm: json.loads((RESULTS / f"{arm}.json").read_text()) for arm in ARMS}


def followed(found: dict[str, dict[str, Any]], by_shared: float) -> dict[str, Any]:
    """`[FOLLOWED]` pass rates of prompts never right, where the course takes them.

    Args:
        found: of `read`.
        by_shared: factor of the cosines of two prompts; the length is set without it.
    """
    counts = np.concatenate(found[predict.BASE]["before"])
    drawn = expect.spread(counts / SAMPLES, SAMPLES).reshape(-1, len(counts))
    random = np.random.default_rng(0)
    kinds = drawn[:, counts == 0].ravel(), drawn[:, counts > 0].ravel()
    share = float(np.mean(counts == 0))
    many = FOLLOWED, round(FOLLOWED * (1 - share) / share)
    pairs = zip(kinds, many, strict=True)
    rates = np.concatenate([random.choice(*pair, replace=False) for pair in pairs])
    end = np.mean(found[predict.BASE]["after"]) / SAMPLES
    begin, tokens = float(rates.mean()), run.tokens(REGIME, "claim")
    start = map_course.started(REGIME, begin, float(end), tokens)
    every, scales = predict.tabulated(REGIME), map_course.SCALES

    def run_of(arm: str, scale: Any, gradients: Any) -> course.Course:
        recipe = every[arm][f"n = {run.chosen(REGIME, arm).value:g}"]
        spent = {"budget": start.budget, "step": "length"}
        return course.course(recipe, rates, gradients, np.atleast_1d(scale), **spent)

    ends = run_of(predict.BASE, scales, start.gradients).mean[-1]
    place = course.reaching(ends, start.end)
    scale = np.interp(place, np.arange(len(scales)), scales)
    gradients = start.gradients.believed(by_shared, 1.0)
    return {arm: run_of(arm, scale, gradients).rates[0, :FOLLOWED] for arm in ARMS}


def table() -> str:
    """Markdown of where prompts end that were never right before, and others."""
    found = read()
    shared, alone = (followed(found, by) for by in (1.0, 0.0))
    body = []
    for arm, own in found.items():
        before, after = (np.array(own[x]) / SAMPLES for x in ("before", "after"))
        never = before == 0
        ends = [
            plus_minus(mean_gap(np.mean(after, 1, where=kind), np.zeros(len(after))))
            for kind in (never, ~never)
        ]
        still = np.mean(after[never] == 0)
        told = (number(float(ends[arm].mean())) for ends in (shared, alone))
        body.append(
            [arm, f"{never.mean():.0%}", ends[0], f"{still:.0%}", *told, ends[1]]
        )
    head = ["arm", "never right before", "they end at", "never right after"]
    head += ["by the course", "no cosine", "others end at"]
    return markdown(head, body)


def main() -> None:
    """Measure what is left."""
    libraries.set_up()
    for arm in ARMS:
        path = RESULTS / f"{arm}.json"
        if not path.exists():
            begun = time.monotonic()
            map_run.write(path, json.dumps(measure(arm)).encode() + b"\n")
            print(f"{arm}: {time.monotonic() - begun:.0f} s", flush=True)
    print(table())


if __name__ == "__main__":
    main()
