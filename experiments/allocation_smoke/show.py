"""Table and picture of `results.json`.

Command:  python -m experiments.allocation_smoke.show
"""

import json
from typing import Any

import numpy as np

from curax import claims, expect, predict, record
from curax.pictures import LIGHT, canvas, label, percent
from experiments.allocation_smoke.run import HERE, RECIPES, SEEDS, TOKENS, sized

AT = (TOKENS // 4, TOKENS // 2, TOKENS)
UPDATES = 200
EARLY = 3  # updates that are compared with the prediction from the start
P = expect.RATES

COLORS = ("#1b1f24", "#882255", "#5b6470", "#d55e00", "#0072b2", "#009e73", "#cc79a7")
COLORS = (*COLORS, "#e69f00", "#56b4e9")


def at(found: dict[str, Any], axis: str, value: float) -> np.ndarray:
    """`[seeds]` held-out pass rates where tokens or updates come to a value."""
    x, rates = np.array(found[axis]), np.array(found["rate"])
    return np.array([np.interp(value, x[:, s], rates[:, s]) for s in range(SEEDS)])


def spent(found: dict[str, Any], of: str, axis: str, value: float) -> float:
    """Mean over seeds of tokens or updates where the other comes to a value."""
    x, y = np.array(found[axis]), np.array(found[of])
    return float(np.mean([np.interp(value, x[:, s], y[:, s]) for s in range(SEEDS)]))


def shown(values: np.ndarray, sign: str = "") -> str:
    """Mean and half of the 95% t-interval over seeds."""
    mean, half = record.interval(values)
    return f"{float(mean):{sign}.3f} ± {float(half):.3f}"


def table(found: dict[str, Any]) -> str:
    """Every recipe at equal tokens, against GRPO, and at equal updates."""
    head = ["recipe", *(f"{tokens // 1000} k tokens" for tokens in AT)]
    head += [f"less GRPO, {AT[-1] // 1000} k", "updates then"]
    head += [f"{UPDATES} updates", "less GRPO", "tokens then"]
    rows = [head, ["---"] * len(head)]
    grpo = found["grpo"]
    for name, own in found.items():
        same = at(own, "updates", UPDATES) - at(grpo, "updates", UPDATES)
        rows.append(
            [
                name,
                *(shown(at(own, "tokens", tokens)) for tokens in AT),
                shown(at(own, "tokens", TOKENS) - at(grpo, "tokens", TOKENS), "+")
                if own is not grpo
                else "",
                f"{spent(own, 'updates', 'tokens', TOKENS):.0f}",
                shown(at(own, "updates", UPDATES)),
                shown(same, "+") if own is not grpo else "",
                f"{spent(own, 'tokens', 'updates', UPDATES) / 1000:.0f} k",
            ]
        )
    return "\n".join("| " + " | ".join(row) + " |" for row in rows)


def predictions(found: dict[str, Any]) -> str:
    """What the x-ray says of the first steps, beside what they were."""
    head = ["recipe", "signal", "predicted", "draws per update", "predicted"]
    head += ["w(.1) / w(.5)", "w(.9) / w(.5)", "noise at .1, .5, .9"]
    rows = [head, ["---"] * len(head)]
    for name, own in found.items():
        config = sized(name, 1)
        population = expect.spread(np.array(own["start"]), config.evaluation.samples)
        seen = predict.predict(config, P, population)
        weight = seen.weight / np.interp(0.5, P, seen.weight)
        each = mean(population, seen.draws * seen.attempts)
        _, plain = claims.grpo(max(round(each), 2), P)
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
    return "\n".join("| " + " | ".join(row) + " |" for row in rows)


def mean(population: np.ndarray, values: np.ndarray) -> float:
    """Over the prompts, of a function of the pass rate."""
    return float(np.interp(population, P, values).mean())


def draw(found: dict[str, Any]) -> None:
    """Held-out pass rate over tokens: as it is, and less that of GRPO."""
    figure, (left, right) = canvas(LIGHT, (1, 1))
    figure.set_size_inches(11, 4.6)
    tokens = np.linspace(0, TOKENS, 41)
    plain = np.array([at(found["grpo"], "tokens", t) for t in tokens])
    for (name, own), color in zip(found.items(), COLORS, strict=False):
        rates = np.array([at(own, "tokens", t) for t in tokens])
        dashes = "--" if "published" in name else "-"
        left.plot(tokens, rates.mean(1), dashes, color=color, label=name, linewidth=1.8)
        if name != "grpo":
            middle, half = record.interval(rates - plain)
            right.plot(tokens, middle, dashes, color=color, linewidth=1.8)
            right.fill_between(
                tokens, middle - half, middle + half, color=color, alpha=0.08
            )
    right.axhline(0, color=LIGHT.ink, linewidth=1)
    percent(left)
    label(left, LIGHT, "generated tokens", "held-out pass rate")
    left.legend(frameon=False, fontsize=8, loc="lower right")
    label(right, LIGHT, "generated tokens", "less that of GRPO, 95% over seeds")
    for axes in (left, right):
        axes.xaxis.set_major_formatter(lambda value, _: record.count(value))
    figure.savefig(HERE / "curves.png", metadata={"Software": None})


def main() -> None:
    """Print the tables, draw the picture."""
    results = json.loads((HERE / "results.json").read_text())
    found = {name: results[name] for name in RECIPES if name in results}
    print(table(found), end="\n\n")
    print(predictions(found))
    draw(found)
    commits = {own["commit"] for own in found.values()}
    print(f"\ncommit {', '.join(sorted(commits))}")


if __name__ == "__main__":
    main()
