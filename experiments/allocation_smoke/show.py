"""Table and picture of `results.json`.

Command:  python -m experiments.allocation_smoke.show
"""

import json
from pathlib import Path
from typing import Any

import numpy as np

from curax.comparison.experiment import arms
from curax.config import override
from curax.settings.tables import markdown
from curax.theory import expect, predict, stated_objective
from experiments import smoke
from experiments.allocation_smoke.experiment import get_experiment
from experiments.smoke import at, shown

HERE = Path(__file__).parent
EXPERIMENT = get_experiment()
RECIPES, TOKENS = EXPERIMENT.recipes, EXPERIMENT.tokens
AT = (TOKENS // 4, TOKENS // 2, TOKENS)
UPDATES = 200
STEPS = 200  # of a recipe
EARLY = 3  # updates that are compared with the prediction from the start
P = expect.RATES


def spent(found: dict[str, Any], of: str, axis: str, value: float) -> float:
    """Mean over seeds of tokens or updates where the other comes to a value."""
    x, y = np.array(found[axis]), np.array(found[of])
    return float(
        np.mean([np.interp(value, x[:, s], y[:, s]) for s in range(x.shape[-1])])
    )


def table(found: dict[str, Any]) -> str:
    """Every recipe at equal tokens, against GRPO, and at equal updates."""
    head = ["recipe", *(f"{tokens // 1000} k tokens" for tokens in AT)]
    head += [f"less GRPO, {AT[-1] // 1000} k", "updates then"]
    head += [f"{UPDATES} updates", "less GRPO", "tokens then"]
    rows = []
    grpo = found["grpo"]
    for name, own in found.items():
        same = at(own, "updates", UPDATES) - at(grpo, "updates", UPDATES)
        rows.append(
            [
                name,
                *(shown(at(own, "tokens", tokens)) for tokens in AT),
                shown(
                    at(own, "tokens", TOKENS) - at(grpo, "tokens", TOKENS), signed=True
                )
                if own is not grpo
                else "",
                f"{spent(own, 'updates', 'tokens', TOKENS):.0f}",
                shown(at(own, "updates", UPDATES)),
                shown(same, signed=True) if own is not grpo else "",
                f"{spent(own, 'tokens', 'updates', UPDATES) / 1000:.0f} k",
            ]
        )
    return markdown(head, rows)


def predictions(found: dict[str, Any]) -> str:
    """What the x-ray says of the first steps, beside what they were."""
    head = ["recipe", "signal", "predicted", "draws per update", "predicted"]
    head += ["w(.1) / w(.5)", "w(.9) / w(.5)", "noise at .1, .5, .9"]
    rows = []
    # As many visits of a prompt are foreseen as its recipe makes in a run by itself.
    steps = {"steps": STEPS}
    configs = {arm.recipe: override(arm.config, steps) for arm in arms(EXPERIMENT)}
    for name, own in found.items():
        config = configs[name]
        population = expect.spread(np.array(own["start"]), config.evaluation.samples)
        seen = predict.predict(config, P, population)
        weight = seen.weight / np.interp(0.5, P, seen.weight)
        each = mean(population, seen.draws * seen.attempts)
        _, plain = stated_objective.grpo(max(round(each), 2), P)
        noise = np.interp((0.1, 0.5, 0.9), P, seen.noise / plain)
        rows.append(
            [
                name,
                f"{np.mean(own['group']['signal'][:EARLY]):.2f}",
                f"{mean(population, seen.signal):.2f}",
                f"{np.mean(own['group']['draws'][:EARLY]):.0f}",
                f"{each * config.sampling.prompts:.0f}",
                f"{np.interp(0.1, P, weight):.2f}",
                f"{np.interp(0.9, P, weight):.2f}",
                ", ".join(f"{value:.2f}" for value in noise),
            ]
        )
    return markdown(head, rows)


def mean(population: np.ndarray, values: np.ndarray) -> float:
    """Over the prompts, of a function of the pass rate."""
    return float(np.interp(population, P, values).mean())


def main() -> None:
    """Print the tables, draw the picture."""
    results = json.loads((HERE / "results.json").read_text())
    found = {name: results[name] for name in RECIPES if name in results}
    print(table(found), end="\n\n")
    print(predictions(found))
    smoke.draw(HERE / "curves.png", found, "grpo", TOKENS)
    commits = {own["commit"] for own in found.values()}
    print(f"\ncommit {', '.join(sorted(commits))}")


if __name__ == "__main__":
    main()
