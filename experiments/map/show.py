"""Table and picture of what is measured of the map.

Command:  python -m experiments.map.show

Of every regime, at the settings that tuning chose, 20 seeds that tuning has not seen:
the held-out pass rate where every recipe has spent the cost of the regime, its gap to
the tuned baseline of the same seed, and what it cost to get where the baseline ended.

    cost ratio = cost at which the mean curve is, for good, at the baseline's last mean
                 / cost of the baseline there

Its interval resamples seeds, the same of both. For good: from there on the curve never
falls below again, up to the end, so that a lucky evaluation does not count. A curve
that does not get there has no ratio, but as a bound: more than it spent.
"""

import itertools
import json
import math
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from scipy.stats import spearmanr

from curax.comparison import statistics
from curax.runs import record
from curax.runs.pictures import LIGHT, canvas, label, percent
from experiments.map import ablations, predict, regimes, run

HERE = Path(__file__).parent
COLORS = ("#1b1f24", "#5b6470", "#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00")
COLORS = (*COLORS, "#56b4e9", "#882255")
RESAMPLES = 2000


class Curve(NamedTuple):
    """Held-out pass rates of the runs of a recipe, `[K, R]` each."""

    spent: np.ndarray
    rate: np.ndarray


def curves(regime: str, cost: tuple[float, float]) -> dict[str, Curve]:
    """The claimed runs of all recipes of a regime, over what they spent."""
    found = {}
    for name in regimes.REGIMES[regime].recipes:
        path = run.Piece(regime, "claim", name).path
        if path.exists():
            own = json.loads(path.read_text())
            drawn, trained = (np.array(own[x], float) for x in ("drawn", "trained"))
            spent = cost[0] * drawn + cost[1] * trained
            found[name] = Curve(spent / max(cost), np.array(own["rate"], float))
    return found


def reached(curve: Curve, place: float, level: Any) -> np.ndarray:
    """`[...]` costs at which mean curves `[..., P]` get to levels for good; inf: never.

    Args:
        curve: `spent` `[P]` places, `rate` `[..., P]` means there.
        place: not read beyond it.
        level: `[...]`.
    """
    x, y = curve
    inside = x <= place
    x, y, level = x[inside], y[..., inside], np.asarray(level)[..., None]
    above = y >= level - 1e-9  # of means, which round
    good = np.flip(np.cumprod(np.flip(above, -1), -1), -1).astype(bool)
    there = good.any(-1)
    first = np.argmax(good, -1)
    before = np.maximum(first - 1, 0)
    take = np.take_along_axis
    y1, y0 = (take(y, i[..., None], -1)[..., 0] for i in (first, before))
    part = np.where(y1 > y0, (level[..., 0] - y0) / np.where(y1 > y0, y1 - y0, 1), 1.0)
    cost = x[before] + np.clip(part, 0, 1) * (x[first] - x[before])
    return np.where(there, cost, math.inf)


def ratio(ours: Curve, base: Curve) -> tuple[float, float, float, float]:
    """Cost ratio with a 95% interval, and how far it could have been seen.

    Returns:
        Ratio of all seeds, lower and upper end, inf where it is not reached; and the
        largest ratio that the runs were long enough for.
    """
    end = base.spent[-1].min()
    most = min(ours.spent[-1].min(), end)
    places = np.linspace(0, most, 401)
    mine = statistics.at(ours.spent, ours.rate, places)  # [P, R]
    last = statistics.at(base.spent, base.rate, end)  # [R]
    rng = np.random.default_rng(0)
    rows = rng.integers(0, len(last), (RESAMPLES, len(last)))
    rows[0] = np.arange(len(last))
    means = mine[:, rows].mean(-1).T  # [resamples, P]
    found = reached(Curve(places, means), most, last[rows].mean(-1)) / end
    low, high = np.quantile(found, (0.025, 0.975), method="closest_observation")
    return float(found[0]), float(low), float(high), float(most / end)


def rows(regime: str) -> list[list[str]]:
    """A row of the table for each recipe of a regime; the baseline comes first."""
    about = regimes.REGIMES[regime]
    found = curves(regime, about.cost)
    tuned = run.choose(regime) if found else {}
    if not set(about.baselines) <= set(found):
        return []
    base = max(about.baselines, key=lambda name: tuned[name]["rate"])
    place = min(curve.spent[-1].min() for curve in found.values())
    theirs = statistics.at(found[base].spent, found[base].rate, place)
    names = [base, *(name for name in found if name != base)]
    gaps = {}
    for name in names[1:]:
        ours = statistics.at(found[name].spent, found[name].rate, place)
        gaps[name] = statistics.gap([ours], [theirs], paired=True)
    levels = statistics.holm([float(gap.p_value()) for gap in gaps.values()])
    shown = []
    for name in names:
        ours = statistics.at(found[name].spent, found[name].rate, place)
        spread = statistics.center([ours])
        low, high = spread.interval()
        row = [regime, name, setting(name, tuned[name]["setting"])]
        row += [f"{spread.value:.3f} [{low:.3f}, {high:.3f}]"]
        if name == base:
            shown.append([*row, "baseline", "1"])
            continue
        level = levels[list(gaps).index(name)]
        low, high = gaps[name].interval(level)
        row += [f"{gaps[name].value:+.3f} [{low:+.3f}, {high:+.3f}]"]
        shown.append([*row, ratio_text(ratio(found[name], found[base]))])
    return shown


def order(
    regime: str, form: str
) -> tuple[list[list[str]], tuple[float, float, float] | None]:
    """Predicted beside measured: rows of a table, and their rank correlation.

    Args:
        regime: name of a regime.
        form: of `predict.FORMS`.

    Returns:
        A row for each recipe that is predicted and measured, the best measured first;
        and Spearman's correlation of predicted progress with the held-out pass rate at
        equal cost, with a 95% interval that resamples seeds, the same of all recipes;
        None where fewer than three recipes can be ordered.
    """
    path = regimes.RESULTS / regime / f"{form}.json"
    found = curves(regime, regimes.REGIMES[regime].cost)
    told = json.loads(path.read_text()) if path.exists() else {}
    names = [name for name in found if "progress" in told.get(name, {})]
    if len(names) < 3:
        return [], None
    place = min(found[name].spent[-1].min() for name in names)
    rates = np.array(
        [statistics.at(found[n].spent, found[n].rate, place) for n in names]
    )  # [recipes, seeds]
    progress = [told[name]["progress"] for name in names]
    rng = np.random.default_rng(0)
    rows = rng.integers(0, rates.shape[1], (RESAMPLES, rates.shape[1]))
    each = [spearmanr(progress, rates[:, own].mean(-1)).statistic for own in rows]
    low, high = np.quantile(each, (0.025, 0.975))
    middle = float(spearmanr(progress, rates.mean(-1)).statistic)
    tuned = run.choose(regime)
    shown = [
        [
            *(form, regime, names[i]),
            *(f"{rates[i].mean():.3f}", f"{progress[i]:.4f}"),
            *(told[names[i]]["best"], setting(names[i], tuned[names[i]]["setting"])),
        ]
        for i in np.argsort(-rates.mean(-1))
    ]
    return shown, (middle, float(low), float(high))


def ratio_text(found: tuple[float, float, float, float]) -> str:
    """A cost ratio with its interval, as `.62 [.55, .71]`."""
    *values, most = found

    def one(value: float) -> str:
        return f"{value:.2f}" if value < math.inf else f"> {most:.2f}"

    middle, low, high = map(one, values)
    if low.startswith(">"):
        return middle
    return f"{middle} [{low}, {high}]"


def setting(recipe: str, chosen: list[Any]) -> str:
    """What tuning chose, as `n 8, rate 3e-04`."""
    variant, value, rate = chosen
    own = regimes.RECIPES[recipe]
    knob = own.knob.rpartition(".")[2]
    told = {"size": "n"}.get(knob, knob)
    parts = [variant] if variant else []
    parts += [f"{told} {value:g}"] if own.knob else []
    return ", ".join([*parts, f"rate {rate:.0e}"])


def start(regime: str) -> list[str]:
    """The numbers of a regime, as a row of the table."""
    about = regimes.REGIMES[regime]
    path = run.Piece(regime, "start").path
    a, b = about.cost
    task = about.task
    accepted = f"{task.get('accepted', 0):.0%}"
    if not path.exists():
        return [regime, about.says, *["not run"] * 5, f"{a:g} : {b:g}", accepted]
    own = json.loads(path.read_text())
    bars = " ".join(f"{share:.2f}" for share in own["histogram"])
    drawn = about.whole("claim") / sum(about.cost)
    visits = drawn / own["length_mean"] / 8 / own["prompts"]
    return [
        *(regime, about.says, f"{own['pass_rate']:.3f}", bars, f"{own['never']:.2f}"),
        f"{visits:.1f}" if visits > 0.5 else "0",
        f"{own['length_mean']:.1f}, {own['length_cv']:.2f}",
        *(f"{a:g} : {b:g}", accepted),
    ]


def markdown(head: list[str], body: list[list[str]]) -> str:
    """A table."""
    lines = [head, ["---"] * len(head), *body]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def draw(path: Path, names: list[str]) -> None:
    """A panel per regime: mean pass rates over cost, the band one of the mean."""
    figure, panels = canvas(LIGHT, (1,) * len(names))
    figure.set_size_inches(4.6 * len(names), 4.0)
    for regime, axes in zip(names, panels, strict=True):
        found = curves(regime, regimes.REGIMES[regime].cost)
        place = min(curve.spent[-1].min() for curve in found.values())
        places = np.linspace(0, place, 41)
        for color, (name, curve) in zip(COLORS, found.items(), strict=False):
            values = statistics.at(curve.spent, curve.rate, places)
            middle, half = record.t_interval(values)
            low, high = middle - half, middle + half
            axes.plot(places, middle, color=color, label=name, linewidth=1.6)
            axes.fill_between(places, low, high, color=color, alpha=0.1)
        axes.set_title(regime, fontsize=9)
        percent(axes)
        label(axes, LIGHT, "cost", "held-out pass rate")
        axes.legend(frameon=False, fontsize=7, loc="lower right")
        axes.xaxis.set_major_formatter(lambda value, _: record.count_text(value))
    figure.savefig(path, metadata={"Software": None})


def ablated() -> str:
    """Tables of the ablations that are whole: pass rates of arms, and differences."""
    names = list(ablations.ABLATIONS)
    arms = [row for name in names for row in ablations.arm_rows(name)]
    gaps = [row for name in names for row in ablations.rows(name)]
    if not gaps:
        return "\nNo ablation is whole."
    head = ["ablation", "arm", "rate", "tokens a step"]
    tables = [markdown(head, arms)]
    head = ["ablation", "what", "difference", "learning rate", "of the same seed"]
    return "\n\n".join(["", *tables, markdown(head, gaps)])


def main() -> None:
    """Print the tables; draw the picture of what is measured."""
    head = ["regime", "which", "right", "histogram", "never", "visits"]
    head += ["length, cv", "a : b", "wrongly passed"]
    print(markdown(head, [start(regime) for regime in regimes.REGIMES]), end="\n\n")
    every = {regime: rows(regime) for regime in regimes.REGIMES}
    head = ["regime", "recipe", "tuned to", "rate", "gap to the baseline", "cost ratio"]
    print(markdown(head, [row for own in every.values() for row in own]), end="\n\n")
    both = {
        key: order(*key) for key in itertools.product(regimes.REGIMES, predict.FORMS)
    }
    head = ["form", "regime", "recipe", "measured", "predicted", "best size", "tuned"]
    print(markdown(head, [row for own, _ in both.values() for row in own]), end="\n\n")
    body = [
        [*key, str(len(own)), "{:+.2f} [{:+.2f}, {:+.2f}]".format(*found)]
        for key, (own, found) in both.items()
        if found
    ]
    print(markdown(["regime", "form", "recipes", "rank correlation"], body))
    print(ablated())
    measured = [regime for regime, own in every.items() if own]
    if measured:
        draw(HERE / "map.png", measured)


if __name__ == "__main__":
    main()
