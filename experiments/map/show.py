"""Table and picture of what is measured of the map.

Command:  python -m experiments.map.show

Of every regime, at the settings that tuning chose, 20 seeds that tuning has not seen:
the held-out pass rate where every recipe has spent the cost of the regime, its gap to
the tuned baseline of the same seed, and what it cost to get where the baseline ended.
Rates and gaps are interquartile means, and means beside them. What draws until one is
right is set beside its controls, which train right completions alone at a fixed n.

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
from scipy.stats import rankdata, t

from curax.compare import statistics
from curax.runs.drawing import LIGHT, canvas
from curax.settings.tables import markdown
from experiments.map import ablations, predict, regimes, run

HERE = Path(__file__).parent
COLORS = ("#1b1f24", "#5b6470", "#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00")
COLORS = (*COLORS, "#56b4e9", "#882255")
RESAMPLES = 2000
DRAWN = "ada_seq_positive_accepted"  # until one is right
AIM = 0.6, 0.8  # of a cost ratio, and below it the end of its interval
# Forms that were thought of, or measured, when the regime had been seen, or one of the
# same starts and seeds.
ALL_SEEN = ("sparse",)
SEEN = {
    "predicted_one_right": ("noisy", "dense_fresh"),
    "predicted_by_rate": ("noisy", "dense_fresh", "updates_dear"),
    predict.BY_COSINE: tuple(regimes.SINGLE),
    predict.BY_STEPS: tuple(regimes.SINGLE),
    predict.BY_COURSE: tuple(regimes.SINGLE),
    predict.BY_BEST: tuple(regimes.SINGLE),
}


AS_FEW = "by course, recipes of first"


class Curve(NamedTuple):
    """Held-out pass rates of the runs of a recipe, `[K, R]` each."""

    spent: np.ndarray
    rate: np.ndarray


def curves(regime: str, stage: str = "claim") -> dict[str, Curve]:
    """The runs of all recipes of a regime, over what they spent, in its larger cost."""
    about, found = regimes.REGIMES[regime], {}
    cost = about.cost
    for name in about.recipes:
        path = run.Piece(regime, stage, name).path
        if path.exists():
            own = json.loads(path.read_text())
            drawn, trained = (np.array(own[x], float) for x in ("drawn", "trained"))
            spent = cost[0] * drawn + cost[1] * trained
            found[name] = Curve(spent / max(cost), np.array(own["rate"], float))
    return found


def budget(regime: str, stage: str = "claim") -> float:
    """Where all runs of a regime are read, in its larger cost."""
    about = regimes.REGIMES[regime]
    return about.whole(stage) / max(about.cost)


def rates_at(curve: Curve, place: float, said: str = "a run") -> np.ndarray:  # [R]
    """Rates of the runs where each has spent `place`, which all have to have done."""
    assert curve.spent[-1].min() >= place, f"{said} stopped before {place}"
    return statistics.at(curve.spent, curve.rate, place)


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


def ratio(ours: Curve, base: Curve, place: float) -> tuple[float, float, float, float]:
    """Cost ratio with a 95% interval, and how far it could have been seen.

    Args:
        ours: of a recipe.
        base: of the baseline.
        place: cost at which the baseline ends.

    Returns:
        Ratio of all seeds, lower and upper end, inf where it is not reached; and the
        largest ratio that the runs were long enough for.
    """
    most = min(ours.spent[-1].min(), place)
    places = np.linspace(0, most, 401)
    mine = statistics.at(ours.spent, ours.rate, places)  # [P, R]
    last = statistics.at(base.spent, base.rate, place)  # [R]
    rng = np.random.default_rng(0)
    rows = rng.integers(0, len(last), (RESAMPLES, len(last)))
    rows[0] = np.arange(len(last))
    means = mine[:, rows].mean(-1).T  # [resamples, P]
    found = reached(Curve(places, means), most, last[rows].mean(-1)) / place
    low, high = np.quantile(found, (0.025, 0.975), method="closest_observation")
    return float(found[0]), float(low), float(high), float(most / place)


class Judged(NamedTuple):
    """A recipe in a regime, at the setting that tuning chose."""

    regime: str
    recipe: str
    setting: str
    rate: tuple[float, float, float]  # held-out pass rate at equal cost, its interval
    mean: float  # of the same; `rate` is an interquartile mean
    gap: tuple[float, float, float] | None  # to the baseline, which has none
    mean_gap: tuple[float, float] | None  # with the half of a 95% t-interval
    ratio: tuple[float, float, float, float] | None  # of `ratio`


def judged(regime: str) -> list[Judged]:
    """The recipes of a regime that are measured; the baseline comes first."""
    about = regimes.REGIMES[regime]
    found = curves(regime)
    tuned = run.choose(regime) if found else {}
    if not set(about.baselines) <= set(found):
        return []
    base = max(about.baselines, key=lambda name: tuned[name]["rate"])
    place = budget(regime)
    rates = {
        name: rates_at(curve, place, f"{regime} {name}")
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
        gap = mean = times = None
        if name != base:
            level = levels[list(gaps).index(name)]
            gap = numbers(gaps[name].value, gaps[name].interval(level))
            mean = mean_gap(rates[name], rates[base])
            times = ratio(found[name], found[base], place)
        said = setting(name, tuned[name]["setting"])
        own = float(rates[name].mean())
        shown.append(Judged(regime, name, said, rate, own, gap, mean, times))
    return shown


def mean_gap(ours: np.ndarray, theirs: np.ndarray) -> tuple[float, float]:
    """Mean difference of the same seeds, and half of its 95% t-interval."""
    gap = ours - theirs
    half = t.ppf(0.975, len(gap) - 1) * gap.std(ddof=1) / math.sqrt(len(gap))
    return float(gap.mean()), float(half)


def against(regime: str) -> list[list[str]]:
    """Right completions alone at a fixed n less drawing until one is right.

    Returns:
        A row for each control: mean difference of the same seeds at equal cost, with a
        95% t-interval that is widened for nothing; and the same at four times the
        tokens, where that was run.
    """
    if DRAWN not in curves(regime):
        return []
    shown = [[regime, name] for name in regimes.RIGHT]
    for stage in ("claim", "long"):
        found, place = curves(regime, stage), budget(regime, stage)
        for line in shown:
            pair = [rates_at(found[x], place) for x in (line[1], DRAWN) if x in found]
            line.append(plus_minus(mean_gap(*pair)) if len(pair) == 2 else "")
    return shown


def longer(regime: str) -> list[list[str]]:
    """Mean pass rates at four times the tokens, settings as claimed, and gaps there."""
    found, place = curves(regime, "long"), budget(regime, "long")
    base = regimes.BASELINES[0]
    if base not in found:
        return []
    rates = {name: rates_at(curve, place) for name, curve in found.items()}
    shown = []
    for name, own in rates.items():
        middle = float(statistics.center([own]).value)
        gap = "" if name == base else plus_minus(mean_gap(own, rates[base]))
        shown.append([regime, name, number(own.mean()), number(middle), gap])
    return shown


def controls() -> list[str]:
    """Markdown of what draws beside its controls, and of runs four times as long."""
    beside = [line for regime in regimes.SINGLE for line in against(regime)]
    longest = [line for regime in regimes.SINGLE for line in longer(regime)]
    head = ["regime", "recipe", "mean", "interquartile mean"]
    return [
        markdown(
            ["regime", "control", f"less {DRAWN}", "at four times the tokens"], beside
        ),
        markdown([*head, f"mean gap to {regimes.BASELINES[0]}"], longest),
    ]


def numbers(value: Any, ends: Any) -> tuple[float, float, float]:
    """A value and the ends of its interval."""
    low, high = ends
    return float(value), float(low), float(high)


def number(value: float, sign: str = "", digits: int = 3) -> str:
    """Digits without a leading zero, such as `.345` or `+.010`."""
    text = f"{value:{sign}.{digits}f}"
    if float(text) == 0:
        return "." + "0" * digits
    return text.replace("0.", ".", 1) if abs(float(text)) < 1 else text


def between(found: tuple[float, float, float], sign: str = "", digits: int = 3) -> str:
    """A value with its interval, as `.345 [.257, .434]`."""
    value, low, high = (number(x, sign, digits) for x in found)
    return f"{value} [{low}, {high}]"


def plus_minus(found: tuple[float, float]) -> str:
    """A difference and half of its interval, as `+.081 ± .039`."""
    return f"{number(found[0], '+')} ± {number(found[1])}"


def row(one: Judged) -> list[str]:
    """A row of the table."""
    shown = [one.recipe, one.setting, between(one.rate), number(one.mean)]
    if one.gap is None or one.mean_gap is None or one.ratio is None:
        return [*shown, "", "", "1"]
    times = ratio_text(one.ratio)
    if one.ratio[0] <= AIM[0] and one.ratio[2] < AIM[1]:
        times = f"**{times}**"
    return [*shown, between(one.gap, "+"), plus_minus(one.mean_gap), times]


def table(every: list[list[Judged]]) -> str:
    """Markdown of all recipes in all regimes; a regime is named once."""
    head = ["regime", "recipe", "tuned to", "held-out pass rate", "mean"]
    head += ["gap to the baseline", "of means", "cost ratio"]
    body = []
    for own in every:
        about = regimes.REGIMES[own[0].regime]
        asked = (*regimes.BASELINES, *regimes.RIGHT)  # of a verifier
        ceiling = [x for x in own if x.recipe in asked] * (
            about.baselines != regimes.BASELINES
        )
        lines = [x for x in own if x not in ceiling]
        for said, part in ((own[0].regime, lines), ("ceiling", ceiling)):
            body += [[said if i == 0 else "", *row(one)] for i, one in enumerate(part)]
    return markdown(head, body)


def order(
    regime: str, form: str, like: str = ""
) -> tuple[list[list[str]], tuple[float, float, float] | None]:
    """Predicted beside measured: rows of a table, and their rank correlation.

    Args:
        regime: name of a regime.
        form: of `predict.FORMS`.
        like: another, by whose recipes alone it is judged.

    Returns:
        A row for each recipe that is predicted and measured, the best measured first;
        and Spearman's correlation of predicted progress with the held-out pass rate at
        equal cost, with a 95% interval that resamples seeds, the same of all recipes;
        None where fewer than three recipes can be ordered.
    """
    found, told = curves(regime), told_by(regime, form)
    names = [name for name in found if "progress" in told.get(name, {})]
    if like:
        names = [name for name in names if name in told_by(regime, like)]
    if len(names) < 3:
        return [], None
    place = budget(regime)
    rates = np.array([rates_at(found[n], place) for n in names])  # [recipes, seeds]
    progress = [told[name]["progress"] for name in names]
    rng = np.random.default_rng(0)
    rows = rng.integers(0, rates.shape[1], (RESAMPLES, rates.shape[1]))
    rows = np.concatenate([[np.arange(rates.shape[1])], rows])
    ranks = rankdata(rates[:, rows].mean(-1), axis=0)  # [recipes, 1 + resamples]
    found = np.corrcoef(rankdata(progress), ranks.T)[0, 1:]
    middle = float(found[0])
    low, high = np.quantile(found[1:], (0.025, 0.975))
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


def told_by(regime: str, form: str) -> dict[str, Any]:
    """What a form predicts of the recipes of a regime; empty where it does not."""
    path = regimes.RESULTS / regime / f"{form}.json"
    return json.loads(path.read_text()) if path.exists() else {}


def ends() -> str:
    """Markdown of pass rates that the course predicts, beside those measured.

    And of the share of what is gained that is by the first quarter of the cost.
    """
    body, errors = [], []
    for regime in regimes.SINGLE:
        told, found = told_by(regime, predict.BY_COURSE), curves(regime)
        place = budget(regime)
        rates = {name: rates_at(found[name], place).mean() for name in told}
        early = {name: rates_at(found[name], place / 4).mean() for name in told}
        for name in sorted(told, key=lambda name: -rates[name]):
            own = told[name]
            range_ = own["progress"], own["low"], own["high"]
            cells = own["best"], between(range_), number(rates[name])
            error = range_[0] - rates[name]
            first = found[name].rate[0].mean()
            gained = (early[name] - first) / (rates[name] - first)
            parts = f"{own['quarter']:.0%}", f"{gained:.0%}"
            body.append([regime, name, *cells, number(error, "+"), *parts])
            errors += [abs(error)] * (name != regimes.BASELINES[0])
    mean = number(float(np.mean(errors)))
    body.append(["all but rloo", f"mean of {len(errors)}", *[""] * 3, mean, "", ""])
    head = ["regime", "recipe", "at", "predicted", "measured", "error"]
    return markdown([*head, "by the first quarter", "measured"], body)


def predicted() -> str:
    """Markdown of rank correlations, a form in a column; hindsight is in brackets.

    The last one has the recipes of the first form alone.
    """
    body = []
    for regime in regimes.SINGLE:
        every = {form: order(regime, form) for form in predict.FORMS}
        every[AS_FEW] = order(regime, predict.BY_COURSE, "predicted")
        most = max(len(rows) for rows, _ in every.values())
        cells = [regime, str(most)]
        for form, (rows, found) in every.items():
            text = between(found, "+", 2) if found else ""
            text += f", of {len(rows)}" if found and len(rows) < most else ""
            seen = form == AS_FEW or regime in (*ALL_SEEN, *SEEN.get(form, ()))
            cells.append(f"({text})" if text and seen else text)
        if most:
            body.append(cells)
    head = [form.removeprefix("predicted").strip("_") for form in predict.FORMS]
    head.append(AS_FEW)
    head = [name.replace("_", " ") or "first" for name in head]
    return markdown(["regime", "recipes", *head], body)


def ratio_text(found: tuple[float, float, float, float]) -> str:
    """A cost ratio with its interval, as `.62 [.55, above .71]`."""
    *values, most = found

    def one(value: float) -> str:
        text = f"{min(value, most):.2f}".removeprefix("0")
        return text if value < math.inf else f"above {text.removesuffix('.00')}"

    middle, low, high = map(one, values)
    return middle if low.startswith("above") else f"{middle} [{low}, {high}]"


def setting(recipe: str, chosen: list[Any]) -> str:
    """What tuning chose, as `n = 8, 3e-4`."""
    variant, value, rate = chosen
    own = regimes.RECIPES[recipe]
    knob = own.knob.rpartition(".")[2]
    said = {"size": "n = {:g}", "right": "{:g} right", "half_life": "half-life {:g}"}
    words = variant.replace("of32", " of 32").replace("n", "n = ")
    parts = [f"{words} of each" if words.isdigit() else words] if variant else []
    if own.knob:
        parts.append(said.get(knob, knob + " {:g}").format(value))
    return ", ".join([*parts, f"{rate:.0e}".replace("e-0", "e-")])


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
    print(markdown(head, [start(regime) for regime in regimes.SINGLE]), end="\n\n")
    every = [own for regime in regimes.SINGLE if (own := judged(regime))]
    print(table(every), end="\n\n")
    print(*controls(), sep="\n\n", end="\n\n")
    both = [order(*key)[0] for key in itertools.product(regimes.SINGLE, predict.FORMS)]
    head = ["form", "regime", "recipe", "measured", "predicted", "best size", "tuned"]
    print(markdown(head, [x for own in both for x in own]), end="\n\n")
    print(predicted(), ends(), sep="\n\n")
    print(ablated())
    if every:
        draw(HERE / "map.png", every)


if __name__ == "__main__":
    main()
