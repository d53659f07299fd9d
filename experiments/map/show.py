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
from curax.runs.pictures import LIGHT, canvas
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


class Judged(NamedTuple):
    """A recipe in a regime, at the setting that tuning chose."""

    regime: str
    recipe: str
    setting: str
    rate: tuple[float, float, float]  # held-out pass rate at equal cost, its interval
    gap: tuple[float, float, float] | None  # to the baseline, which has none
    ratio: tuple[float, float, float, float] | None  # of `ratio`


def judged(regime: str) -> list[Judged]:
    """The recipes of a regime that are measured; the baseline comes first."""
    about = regimes.REGIMES[regime]
    found = curves(regime, about.cost)
    tuned = run.choose(regime) if found else {}
    if not set(about.baselines) <= set(found):
        return []
    base = max(about.baselines, key=lambda name: tuned[name]["rate"])
    place = min(curve.spent[-1].min() for curve in found.values())
    rates = {
        name: statistics.at(curve.spent, curve.rate, place)
        for name, curve in found.items()
    }
    names = [base, *(name for name in found if name != base)]
    gaps = {
        name: statistics.gap([rates[name]], [rates[base]], paired=True)
        for name in names[1:]
    }
    levels = statistics.holm([float(gap.p_value()) for gap in gaps.values()])
    shown = []
    for name in names:
        spread = statistics.center([rates[name]])
        rate = numbers(spread.value, spread.interval())
        gap = times = None
        if name != base:
            level = levels[list(gaps).index(name)]
            gap = numbers(gaps[name].value, gaps[name].interval(level))
            times = ratio(found[name], found[base])
        said = setting(name, tuned[name]["setting"])
        shown.append(Judged(regime, name, said, rate, gap, times))
    return shown


def numbers(value: Any, ends: Any) -> tuple[float, float, float]:
    """A value and the ends of its interval."""
    low, high = ends
    return float(value), float(low), float(high)


def row(one: Judged) -> list[str]:
    """A row of the table."""
    shown = [one.regime, one.recipe, one.setting, "{:.3f} [{:.3f}, {:.3f}]"]
    shown[-1] = shown[-1].format(*one.rate)
    if one.gap is None or one.ratio is None:
        return [*shown, "baseline", "1"]
    return [
        *shown,
        "{:+.3f} [{:+.3f}, {:+.3f}]".format(*one.gap),
        ratio_text(one.ratio),
    ]


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

    def correlation(own: np.ndarray) -> float:
        found: Any = spearmanr(progress, rates[:, own].mean(-1))
        return float(found.statistic)

    low, high = np.quantile([correlation(own) for own in rows], (0.025, 0.975))
    middle = correlation(np.arange(rates.shape[1]))
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
    """Markdown of a table."""
    lines = [head, ["---"] * len(head), *body]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def draw(path: Path, every: list[list[Judged]]) -> None:
    """Gaps to the baseline of each regime, and what it took to get where that ends."""
    lines = [one for own in every for one in own[1:]]
    figure, (left, right) = canvas(LIGHT, (3, 2))
    figure.set_size_inches(10.5, 0.9 + 0.24 * (len(lines) + len(every)))
    y, places, names = 0, [], []
    for own in every:
        base = f"{own[0].regime}, over {own[0].recipe}"
        places.append(y)
        names.append(base)
        y += 1
        for one in own[1:]:
            assert one.gap
            assert one.ratio
            sure = one.gap[1] > 0 or one.gap[2] < 0
            color = COLORS[0] if not sure else COLORS[2 if one.gap[0] > 0 else 3]
            interval(left, y, one.gap, color)
            *times, most = one.ratio
            interval(right, y, [min(x, most) for x in times], color)
            if times[2] == math.inf:
                right.plot(most, y, marker=">", color=color, markersize=4)
            places.append(y)
            names.append(one.recipe)
            y += 1
    for axes, middle in ((left, 0.0), (right, 1.0)):
        axes.axvline(middle, color=COLORS[1], linewidth=0.8)
        axes.set_ylim(y - 0.4, -0.8)
        axes.set_yticks(places, names if axes is left else [""] * len(names))
        axes.tick_params(axis="y", length=0, labelsize=8)
    right.axvline(0.6, color=COLORS[1], linewidth=0.8, linestyle=":")
    right.set_xlim(0, 1.1)
    for said in left.get_yticklabels():
        said.set_fontweight("bold" if ", over " in said.get_text() else "normal")
    left.set_xlabel("gap of the held-out pass rate, at equal cost", fontsize=9)
    right.set_xlabel("cost to get where the baseline ends; dots: the aim", fontsize=9)
    figure.savefig(path, metadata={"Software": None})


def interval(axes: Any, y: float, found: Any, color: str) -> None:
    """A value and its interval."""
    value, low, high = found
    axes.plot([low, high], [y, y], color=color, linewidth=1.6)
    axes.plot(value, y, marker="o", color=color, markersize=4)


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
    every = [own for regime in regimes.REGIMES if (own := judged(regime))]
    head = ["regime", "recipe", "tuned to", "rate", "gap to the baseline", "cost ratio"]
    print(markdown(head, [row(one) for own in every for one in own]), end="\n\n")
    both = {
        key: order(*key) for key in itertools.product(regimes.REGIMES, predict.FORMS)
    }
    head = ["form", "regime", "recipe", "measured", "predicted", "best size", "tuned"]
    print(markdown(head, [x for own, _ in both.values() for x in own]), end="\n\n")
    body = [
        [*key, str(len(own)), "{:+.2f} [{:+.2f}, {:+.2f}]".format(*found)]
        for key, (own, found) in both.items()
        if found
    ]
    print(markdown(["regime", "form", "recipes", "rank correlation"], body))
    print(ablated())
    if every:
        draw(HERE / "map.png", every)


if __name__ == "__main__":
    main()
