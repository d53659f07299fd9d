"""Predict where the arms of the factorial end: pass rates followed along their runs.

Command:  python -m experiments.factorial.predict

As `experiments.map.course`: each arm at the best of the sizes that are tried, steps of
one length. It is set by where plain RLOO (centred, fixed, one) was measured to end; in
regimes where no arm had been measured, by where the map's `rloo` ended at as many
tokens.
In `results/REGIME/predicted.json`; what is there is not predicted again.
"""

import json
import sys

import numpy as np

from curax.runs import libraries
from curax.theory import course
from curax.theory import predict as theory
from curax.theory.summary import pass_rates
from experiments.factorial import hints, run, show
from experiments.map import course as map_course
from experiments.map import predict as forms
from experiments.map import show as map_show

BASE = "centred-fixed-one"
# Of sparse_wide no pass rates before RL were measured.
EVERY = (*run.REGIMES, hints.REGIME)
REGIMES = tuple(regime for regime in EVERY if regime != "sparse_wide")
BLIND = ("bimodal", *run.SHORT, hints.REGIME)  # predicted before an arm was claimed


def tabulated(regime: str) -> map_course.Recipes:
    """Moments and cost of the arms, by size and pass rate; the cost is of draws."""
    p, rates, found = pass_rates(), forms.population(regime).rates, map_course.Recipes()
    for arm in run.ARMS:
        for n in map(int, run.SIZES):
            config = run.plain(arm, n)
            seen = theory.predict(config, p, rates, often=0)
            made = course.of_prediction(seen, seen.draws, config.sampling.prompts)
            found.setdefault(arm, {})[f"n = {n}"] = made
    return found


def seen(regime: str) -> tuple[float, float]:
    """Mean held-out pass rates at which runs begin, and at which plain RLOO ends."""
    own = show.rates(regime, "claim")
    if own and regime not in BLIND:
        begin = [np.mean(show.read(regime, "claim", arm)["rate"][0]) for arm in own]
        return float(np.mean(begin)), float(own[BASE].mean())
    curve = map_show.curves(regime)["rloo"]
    end = map_show.rates_at(curve, run.tokens(regime, "claim"))
    return float(curve.rate[0].mean()), float(end.mean())


def main() -> int:
    """Exit status 0."""
    libraries.set_up()
    for regime in REGIMES:
        path = run.RESULTS / regime / "predicted.json"
        if path.exists():
            continue
        begin, end = seen(regime)
        tokens = run.tokens(regime, "claim")
        start = map_course.started(regime, begin, end, tokens)
        told = map_course.predicted(tabulated(regime), start, BASE)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(told, indent=1) + "\n")
        for arm, own in told.items():
            shown = f"{own['progress']:.3f} [{own['low']:.3f}, {own['high']:.3f}]"
            print(f"{regime} {arm}: {own['best']} {shown}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
