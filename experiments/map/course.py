"""Predict where recipes end: pass rates followed along the runs of a regime.

Command:  python -m experiments.map.course

Of every recipe at each size among which tuning chooses, the mean held-out pass rate
where a run has spent the cost of the regime (`curax.theory.course`), the best of them;
by steps of one length, and in `predicted_by_best_course.json` by the best of a bound.
Known is the start: its pass rates, moved in log-odds by one number to the mean at which
held-out prompts begin, and gradients as measured at the warm start of seed 0, or kappa
= .3, rho = .02 and right completions that do not vary. The time scale of the steps is
the one free number, and it is set so that `rloo`, at its best size, ends where it was
measured to end. All that is thus hindsight of `rloo`, and of a regime that was seen.

In `results/REGIME/predicted_by_course.json`, with the least and the most over a tenth
to ten times rho and sigma^2, the length set anew for each. Where the best `rloo` of no
length gets as far, it is the length at which it gets furthest.
"""

import itertools
import json
import sys
from collections.abc import Mapping
from functools import cache
from typing import Any, NamedTuple

import numpy as np

from curax import gate
from curax.config import Config, ConfigError
from curax.runs import libraries
from curax.settings.cli import write_file
from curax.theory import advice, course, predict, sizes
from curax.theory.course import Gradients, Recipe
from curax.theory.summary import pass_rates
from experiments.map import predict as forms
from experiments.map import regimes, run, show

SCALES = np.geomspace(1e-4, 10, 50)  # time scales tried for steps of one length
FARTHER = np.geomspace(1e-4, 1e4, 80)  # and for best steps
QUARTER = course.POINTS // 4
Recipes = dict[str, dict[str, Recipe]]  # name -> size -> moments and cost


class Start(NamedTuple):
    """What is known of a regime before any recipe but `rloo` has run."""

    rates: np.ndarray  # [course.BINS]
    gradients: Gradients
    budget: float  # in completions drawn
    total: float
    end: float  # where `rloo` was measured to end


def moved_to(rates: np.ndarray, mean: float) -> np.ndarray:
    """Pass rates moved in log-odds by one number, so that they have this mean."""
    low, high, odds, found = -9.0, 9.0, course.log_odds(rates), rates
    for _ in range(50):
        by = (low + high) / 2
        found = 1 / (1 + np.exp(-odds - by))
        low, high = (by, high) if found.mean() < mean else (low, by)
    return found


def started(regime: str, begin: float, end: float, tokens: float) -> Start:
    """What is known of a regime, of which held-out prompts begin and `rloo` ends so."""
    own = json.loads(run.Piece(regime, "start").path.read_text())
    rates = course.binned(forms.population(regime).rates)
    known = {}
    if (regimes.RESULTS / regime / "gradients.json").exists():
        known = forms.measured(regime)
    if "by_rate" in known:
        gradients = course.of_rates(known["by_rate"], known["varied"])
    else:
        several = "ways" in regimes.REGIMES[regime].task  # right completions
        gradients = course.of_beliefs(0.3, float(several), 0.02)
    budget = tokens / own["length_mean"]
    return Start(moved_to(rates, begin), gradients, budget, own["prompts"], end)


def trained(config: Config, seen: predict.Prediction) -> np.ndarray:
    """`[R]` rows of a prompt that the gate lets train, by pass rate."""
    if config.gate is gate.accepted:
        return seen.draws * seen.p
    if config.gate is gate.zero_variance:
        return seen.draws * seen.signal
    kept = sizes.size_of(config)
    return np.minimum(seen.draws, kept.kept)


@cache
def prompts_of(name: str, label: str, draws: int) -> int:
    """Prompts of a step of a recipe at a size, as it runs."""
    own = regimes.RECIPES[name]
    if own.knob == "allocate.size":
        return regimes.ROWS // draws
    return int(own.variants.get(label, {}).get("sampling.prompts", 8))


def tabulated(regime: str) -> Recipes:
    """Moments and cost of the recipes of a regime, by size and pass rate."""
    known, p = forms.known(regime, "predicted_one_right"), pass_rates()
    (a, b), found = known.cost, Recipes()
    for name in regimes.REGIMES[regime].recipes:
        for label, config, size in forms.tried(name):
            count = prompts_of(name, label, size.draws)
            if config.hint or config.reflection:
                continue
            try:
                sized = sizes.resized(config, size, count)
            except ConfigError:  # the recipe does not take it
                continue
            rates = known.population.rates
            seen = predict.predict(sized, p, rates, often=known.visits)
            made = course.of_prediction(
                seen, a * seen.draws + b * trained(sized, seen), count
            )
            if np.isfinite(np.stack(made.update)).all():
                found.setdefault(name, {})[label] = made
    return found


def followed(
    every: Recipes, start: Start, gradients: Gradients, step: str
) -> dict[str, Any]:
    """`[sizes, 3, SCALES]` mean pass rates of each recipe, by size.

    At the beginning, after a quarter of the cost and at the end.
    """
    scales = SCALES if step == "length" else FARTHER
    return {
        name: np.stack(
            [
                course.course(
                    *(own, start.rates, gradients, scales),
                    **{"budget": start.budget, "total": start.total, "step": step},
                ).mean[[0, QUARTER, -1]]
                for own in by.values()
            ]
        )
        for name, by in every.items()
    }


def calibrated(found: Mapping[str, Any], base: str, end: float) -> dict[str, Any]:
    """`[sizes, 3]` of `followed` where the best of the base ends at `end`.

    The shortest such step; where there is none, the one that gets nearest.
    """
    place = course.reaching(found[base][:, -1].max(0), end)
    low = int(place)
    high = min(low + 1, found[base].shape[-1] - 1)
    return {
        name: each[..., low] + (place - low) * (each[..., high] - each[..., low])
        for name, each in found.items()
    }


def predicted(
    every: Recipes, start: Start, base: str, step: str = "length"
) -> dict[str, dict[str, Any]]:
    """Where recipes are predicted to end, as JSON: "progress" is the pass rate."""
    lines = []
    for factors in itertools.product(advice.BELIEFS, repeat=2):
        found = followed(every, start, start.gradients.believed(*factors), step)
        lines.append((factors, calibrated(found, base, start.end)))
    told = {}
    for name, by in every.items():
        first, quarter, mine = dict(lines)[1.0, 1.0][name].T
        best = int(np.argmax(mine))
        most = [other[name][:, -1].max() for _, other in lines]
        gained = (quarter - first)[best] / (mine - first)[best]
        told[name] = {
            "best": list(by)[best],
            "progress": round(float(mine.max()), 4),
            "low": round(float(min(most)), 4),
            "high": round(float(max(most)), 4),
            "quarter": round(float(gained), 3),  # of the gain, after that of the cost
            "sizes": dict(zip(by, mine.round(4).tolist(), strict=True)),
        }
    return told


def main() -> int:
    """Exit status 0; what is there is not predicted again."""
    libraries.set_up()
    for regime in regimes.SINGLE:
        paths = {
            step: regimes.RESULTS / regime / f"{form}.json"
            for step, form in (("length", forms.BY_COURSE), ("best", forms.BY_BEST))
        }
        curves = show.curves(regime)
        if regime == "no_verifier" or all(path.exists() for path in paths.values()):
            continue
        place, every = show.budget(regime), tabulated(regime)
        begin = float(np.mean([curve.rate[0].mean() for curve in curves.values()]))
        end = float(show.rates_at(curves["rloo"], place).mean())
        start = started(regime, begin, end, regimes.REGIMES[regime].whole("claim"))
        for step, path in paths.items():
            told = predicted(every, start, "rloo", step)
            write_file(path, (json.dumps(told, indent=1) + "\n").encode())
            for name, own in told.items():
                print(f"{step} {regime} {name}: {own['progress']:.3f}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
