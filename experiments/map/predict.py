"""Predict the order of recipes in each regime, before it is measured.

Command:  python -m experiments.map.predict

For every regime whose start is measured: the progress per cost of each recipe by the
formula of `curax xray --advise`, at the sizes among which tuning chooses, from pass
rates before RL, visits to a prompt and the cost of a token. In `results/REGIME`,
`predicted.json` takes right completions to vary as wrong ones do,
`predicted_one_right.json` knows that a chain has one right completion, so that right
ones do not vary (`--varied 0`), and `predicted_by_cosine.json` takes what gradients are
measured to be (`--measured`): those of seed 0 at its warm start, 512 prompts with 64
completions each, in `gradients.json`. `predicted_by_rate.json` is what that was up to
commit 611625e, which knew kappa and G^2 by pass rate and not rho, of 256 prompts; it is
kept. `predicted_by_steps.json` has no formula: it is the progress of steps that were
drawn and not taken (`step_progress`), per cost, of the recipes and sizes that were
drawn so. What is there is not predicted again. Git says which came first: prediction or
claim.
"""

import itertools
import json
import sys
from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np

from curax import stop
from curax.config import Config, load, override
from curax.runs import libraries
from curax.settings.cli import write_file
from curax.settings.recipes import recipes
from curax.theory import advice, advice_options, expect, gradients, sizes
from curax.theory.population import Population
from curax.theory.sizes import Size
from experiments.map import regimes, run, step_progress

# What the embedded task has elsewhere; lengths are taken to be alike.
BUDGET = regimes.ROWS
PROBED, SAMPLES = 512, 64  # prompts and completions of measured gradients
ASSUMED = {"predicted": 1.0, "predicted_one_right": 0.0}  # file and `--varied`
BY_COSINE, BY_STEPS = "predicted_by_cosine", "predicted_by_steps"
# Of `experiments.map.course`.
BY_COURSE, BY_BEST = "predicted_by_course", "predicted_by_best_course"
FORMS = (*ASSUMED, "predicted_by_rate", BY_COSINE, BY_STEPS, BY_COURSE, BY_BEST)


def population(regime: str) -> Population:
    """Pass rates of the prompts, freed of the noise of few samples.

    Args:
        regime: one whose start is measured.
    """
    own = json.loads(run.Piece(regime, "start").path.read_text())
    shares = np.arange(run.SAMPLES + 1) / run.SAMPLES
    rates = expect.spread(np.repeat(shares, own["right"]), run.SAMPLES)
    return Population(f"start of {regime}", np.sort(rates))


def measured(regime: str) -> dict[str, Any]:
    """Beliefs as gradients at the warm start of seed 0 say; measured once, and kept."""
    path = regimes.RESULTS / regime / "gradients.json"
    if not path.exists():
        parts, state = step_progress.started(regime, "rloo", "4")
        found = gradients.summarise(parts, state, PROBED, SAMPLES)
        del found["prompts"]  # a row of each
        write_file(path, (json.dumps(found, indent=1) + "\n").encode())
    return advice_options.beliefs(path)


def believed(regime: str, form: str) -> dict[str, Any]:
    """What a form of prediction takes for known, as fields of `advice.Known`."""
    return measured(regime) if form == BY_COSINE else {"varied": ASSUMED[form]}


def known(regime: str, form: str) -> advice.Known:
    """What is known of a regime before training; its visits are those of a claim."""
    own = json.loads(run.Piece(regime, "start").path.read_text())
    about = regimes.REGIMES[regime]
    drawn = about.tokens(regimes.RECIPES["rloo"], "claim") / own["length_mean"]
    return advice.Known(
        population=population(regime),
        prompts=own["prompts"],
        visits=int(drawn / 8 / own["prompts"]),
        cost=about.cost,
        budget=BUDGET,
        references=bool(about.task.get("hints")),
        **believed(regime, form),
    )


def tried(name: str) -> Iterator[tuple[str, Config, Size]]:
    """Settings of a recipe that a prediction tells apart: label, config and sizes.

    Those functions of the map that only make a knob traced give way to the recipe's
    own; learning rates and half-lives are no part of the formula.
    """
    recipe = regimes.RECIPES[name]
    config = load(recipes()[recipe.config])
    named = {"gate", "advantage"} & recipe.changes.keys()
    config = override(config, {name: recipe.changes[name] for name in named})
    if recipe.knob == "allocate.size":
        for n in map(int, recipe.values):
            yield f"n = {n}", config, Size(n, n, n, 0, 1)
    elif recipe.knob == "stop.rule.right":
        for k in map(int, recipe.values):
            rule = partial(stop.positives, right=k)
            yield f"{k} right", override(config, {"stop.rule": rule}), _own(config)
    elif recipe.config.startswith("pods"):
        for label in recipe.variants:
            m, n = map(int, label.split("of"))
            yield label, config, Size(n, n, m, 0, 1)
    elif recipe.variants.keys() != {""}:
        for label, changes in recipe.variants.items():
            yield label, override(config, changes), _own(config)
    else:
        draws = BUDGET // 8
        yield "", config, Size(draws, 4 * draws, 4 * draws, 0, 1)


def drawn(regime: str) -> dict[str, dict[str, object]]:
    """Progress of drawn steps, per the cost of 64 rows that are drawn and trained."""
    a, b = regimes.REGIMES[regime].cost
    path = regimes.RESULTS / regime / "progress.json"
    found: dict[str, dict[str, object]] = {}
    for label, own in json.loads(path.read_text())["recipes"].items():
        name, _, size = label.partition(":")
        cost = (a + b * regimes.RECIPES[name].share) / (a + b)
        made = own["per_64_draws"] / cost
        found[name] = {"best": size, "progress": made, "sizes": {size: made}}
    return found


def _own(config: Config) -> Size:
    return sizes.size_of(config)._replace(attempts=1)


def predicted(regime: str, form: str) -> dict[str, dict[str, object]]:
    """Best size of each recipe and its progress, or why there is no prediction."""
    about = known(regime, form)
    found: dict[str, dict[str, object]] = {}
    for name in regimes.REGIMES[regime].recipes:
        rows, why = {}, ""
        for label, config, size in tried(name):
            if config.hint or config.reflection:
                why = "hinted groups and rewards by references are not predicted"
                continue
            row = advice.predicted(config, size, about)
            if isinstance(row, str):
                why = row
            else:
                rows[label] = row["progress"]
        if rows:
            best = max(rows, key=lambda label: rows[label])
            found[name] = {"best": best, "progress": rows[best], "sizes": rows}
        else:
            found[name] = {"why": why}
    return found


def main() -> int:
    """Exit status 0. Gradients are measured where the regime's warm starts are."""
    libraries.set_up()
    forms = (*ASSUMED, BY_COSINE, BY_STEPS)
    for regime, form in itertools.product(regimes.SINGLE, forms):
        path = regimes.RESULTS / regime / f"{form}.json"
        if path.exists() or not run.Piece(regime, "start").path.exists():
            continue
        warm = all(p.path.exists() for p in run.pieces(regime) if p.kind == "warm")
        steps = regimes.RESULTS / regime / "progress.json"
        if (form == BY_COSINE and not warm) or (
            form == BY_STEPS and not steps.exists()
        ):
            continue
        found = drawn(regime) if form == BY_STEPS else predicted(regime, form)
        write_file(path, (json.dumps(found, indent=1) + "\n").encode())
        for name, own in found.items():
            print(f"{form} {regime} {name}: {own.get('best', own.get('why'))}", end=" ")
            print(f"{own['progress']:.4f}" if "progress" in own else "", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
