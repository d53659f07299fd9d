"""Pictures of a comparison, for a light and a dark page.

A sheet is a function of the results of `analysis.analyse` and of the entries behind
them; it has no panels where there is nothing to draw.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from curax.compare import analysis, statistics
from curax.compare.analysis import AXES, Entry, Question
from curax.runs.drawing import COUNTS, PERCENT, Mark, Panel, Picture, Sheet, mark, pens
from curax.runs.reading import count_text

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis

FEW_COUNTS = (mark("locator_params", axis="x", nbins=5), COUNTS)
WIDTHS = (6.4, 9.6)  # inches of one panel, and of several


class Shown(NamedTuple):
    """Data that the figures show: results, entries and settings of the analysis."""

    found: Mapping[str, Any]  # results of `analysis.analyse`
    entries: Sequence[Entry]
    question: Question

    @property
    def plain(self) -> list[Entry]:
        """Entries of the recipes, without swept values."""
        return [entry for entry in self.entries if not entry.setting]

    @property
    def styles(self) -> dict[str, tuple[str, str]]:
        """(colour, dashes) of each recipe; the baseline has the colour of the text."""
        found, base = self.found["recipes"], self.question.baseline
        others = pens(name for name in found if name != base)
        return {name: others.get(name, ("ink", "-")) for name in found}


def _sheet(
    panels: Sequence[Panel], columns: int, height: float, shown: Shown | None = None
) -> Sheet:
    """A sheet of equal panels, height in inches; given `shown`, with a legend."""
    size, legend = (WIDTHS[columns > 1], height), shown.styles if shown else {}
    return Sheet(panels, [1] * columns, size, share=True, legend=legend)


def _title(text: str) -> Mark:
    return mark("set_title", text, loc="left", fontsize=10, color="ink")


def _fitted(axes: "Axes") -> None:
    """Percent up the axis, as far as the curves go, which may lie close together."""
    low, high = axes.get_ylim()
    # The panels share this axis, and the next ones are still to be drawn.
    axes.set_ylim(max(low, -0.02), min(high, 1.02), auto=None)
    _in_percent(axes.yaxis)


def _in_percent(axis: "Axis") -> None:
    """Ticks as 80% and 82.5%, none beyond 0% and 100%."""
    axis.set_major_formatter(
        lambda x, _: analysis.percent_text(x) if -1e-9 < x < 1 + 1e-9 else ""
    )


# ----- the pictures


def _forest(
    shown: Shown,
    names: Sequence[str],
    x: str,
    triple: Callable[[str, str], Sequence[Any]],
    greedy: Callable[[str, str], Sequence[Any]],
    *scale: Mark,
) -> Sheet:
    """Forest plot: a row per recipe, a panel per axis, points with intervals.

    Below each point is a hollow one of greedy completions, where they are known.
    """
    panels = []
    for i, (axis, title) in enumerate(analysis.titles(shown.question.prices).items()):
        marks = []
        for y, name in enumerate(names):
            color = shown.styles[name][0]
            rows = (triple, y, 2.4, "full"), (greedy, y + 0.25, 1.2, "none")
            for of, at, width, fill in rows:
                middle, low, high = of(axis, name)
                bar = {"color": color, "linewidth": width}
                point = {"color": color, "markersize": 6, "fillstyle": fill}
                if low is not None:
                    marks.append(mark("plot", [low, high], [at, at], **bar))
                marks.append(mark("plot", [middle], [at], "o", **point))
        places = shown.found["places"][axis]
        where = f"{count_text(next(iter(places.values())))} {title}"
        then = [
            mark("grid", axis="x", color="grid", linewidth=0.8),
            mark("grid", axis="y", visible=False),
            mark("set_yticks", range(len(names)), names),
            mark("tick_params", axis="y", length=0),
            _title(where if len(places) == 1 else title),
            mark("set_ylim", len(names) - 0.5, -0.5),
            *scale,
        ]
        panels.append(Panel(x if i == 1 else "", "", marks, then))
    return _sheet(panels, len(AXES), 1.35 + 0.32 * len(names))


def _gaps(shown: Shown) -> Sheet:
    base = shown.question.baseline

    def triple(axis: str, name: str) -> Sequence[Any]:
        gap = shown.found["gaps"][axis][name]
        return gap["middle"], gap["low"], gap["high"]

    def greedy(axis: str, name: str) -> Sequence[Any]:
        return shown.found["gaps"][axis][name]["greedy"]

    def about_zero(axes: "Axes") -> None:
        far = 1.08 * max(map(abs, axes.get_xlim()))
        axes.set_xlim(-far, far)
        axes.xaxis.set_major_formatter("{x:+.2g}")

    names = [name for name in shown.found["recipes"] if name != base]
    x = f"held-out pass rate, less that of {base}"
    zero = mark("axvline", 0, color="ink", linewidth=1)
    return _forest(shown, names, x, triple, greedy, zero, mark(about_zero))


def _rates(shown: Shown) -> Sheet:
    def of(rate: str) -> Callable[[str, str], Sequence[Any]]:
        return lambda axis, name: shown.found["recipes"][name][axis][rate]

    names = list(shown.found["recipes"])
    percent = mark(lambda axes: _in_percent(axes.xaxis))
    x = "held-out pass rate"
    return _forest(shown, names, x, of("rate"), of("greedy"), percent)


def _curves(axis: str) -> Callable[[Shown], Sheet]:
    """The sheet of pass rates over an axis, a panel per condition."""

    def sheet(shown: Shown) -> Sheet:
        panels = []
        places, prices = shown.found["places"], shown.question.prices
        for condition in places[axis]:
            found = analysis.curves(
                shown.plain, axis, condition, places, shown.question
            )
            marks = []
            alpha = 0.2 if len(found) <= 3 else 0.07
            for name, (x, middle, low, high) in found.items():
                color, dashes = shown.styles[name]
                marks.append(
                    mark("plot", x, middle, dashes, color=color, linewidth=1.8)
                )
                if np.isfinite(low).any():
                    band = {"color": color, "linewidth": 0, "alpha": alpha}
                    marks.append(mark("fill_between", x, low, high, **band))
            y = "" if panels else "held-out pass rate"
            then = (mark(_fitted), *FEW_COUNTS, _title(condition))
            panels.append(Panel(analysis.titles(prices)[axis], y, marks, then))
        return _sheet(panels, len(panels), 4.6, shown)

    return sheet


def _waits(shown: Shown) -> Sheet:
    threshold = shown.question.threshold
    if threshold is None:
        return Sheet([])
    panels, prices = [], shown.question.prices
    conditions = list(shown.found["places"]["tokens"])
    for condition in conditions:
        for axis, title in analysis.titles(prices).items():
            marks = []
            for entry in shown.plain:
                history = entry.histories[condition]
                spent = history.spent(axis, prices)
                seen = statistics.waits(spent, history.rate, threshold)
                alive = statistics.survival(seen)
                x = np.concatenate([[0], alive.time, [spent[-1].max()]])
                y = np.concatenate([[0], 1 - alive.share, 1 - alive.share[-1:]])
                color, dashes = shown.styles[entry.recipe]
                line = {"where": "post", "color": color, "linewidth": 1.8}
                marks.append(mark("step", x, y, dashes, **line))
                # Runs that ended before they were there.
                ended = seen.time[~seen.reached]
                left = 1 - alive.share[np.searchsorted(alive.time, ended)]
                marks.append(mark("plot", ended, left, "|", color=color, markersize=9))
            at = analysis.percent_text(threshold)
            y = "" if len(panels) % len(AXES) else f"runs at {at}"
            then = (PERCENT, *FEW_COUNTS, _title(condition))
            panels.append(Panel(title, y, marks, then))
    return _sheet(panels, len(AXES), 1.2 + 2.8 * len(conditions), shown)


def _sensitivity(shown: Shown) -> Sheet:
    knobs, panels = shown.found["sensitivity"], []
    for i, axis in enumerate(AXES):
        short = AXES[axis].partition(",")[0].removeprefix("generated ")
        for j, (setting, recipes) in enumerate(knobs.items()):
            x = setting if i == len(AXES) - 1 else ""
            y = "" if j else f"pass rate, equal\n{short}"
            panels.append(Panel(x, y, *_sweep(recipes, axis, shown.styles)))
    return _sheet(panels, len(knobs), 1.1 + 2.3 * len(AXES), shown)


def _sweep(
    recipes: Any, axis: str, styles: Mapping[str, Any]
) -> tuple[list[Mark], list[Mark]]:
    """Pass rates over the values of a setting, a line per recipe, and the scale."""
    values = [point["value"] for points in recipes.values() for point in points]
    numbers = all(type(value) in (int, float) for value in values)
    labels: list[Any] = (
        sorted(set(values)) if numbers else list(dict.fromkeys(map(str, values)))
    )
    marks, then = [], []
    for name, points in recipes.items():
        color, dashes = styles[name]
        x = [p["value"] if numbers else labels.index(str(p["value"])) for p in points]
        spread = np.array([p[axis] for p in points], float)
        dots = {"color": color, "marker": "o", "markersize": 4}
        bars = {"color": color, "alpha": 0.45, "linewidth": 2}
        ring = {"color": color, "markersize": 9, "fillstyle": "none"}
        marks.append(mark("plot", x, spread[:, 0], dashes, **dots))
        marks.append(mark("vlines", x, spread[:, 1], spread[:, 2], **bars))
        marks += [
            mark("plot", [place], [middle], "o", **ring)
            for place, point, (middle, *_) in zip(x, points, spread, strict=True)
            if point["own"]
        ]
    if numbers and 0 < 4 * min(labels) < max(labels):
        then.append(mark("set_xscale", "log"))
    if numbers and len(labels) <= 6:
        then.append(mark("set_xticks", labels, [f"{value:g}" for value in labels]))
        then.append(mark("minorticks_off"))
    elif not numbers:
        then.append(mark("set_xticks", range(len(labels)), labels))
    return marks, [*then, mark("margins", x=0.1)]


PICTURES = (
    Picture(
        "gaps",
        "How far each recipe is from the baseline",
        "A point is the interquartile mean over seeds; right of the line is better. "
        "Intervals are widened for all comparisons of the page together: only one that "
        "leaves out 0 carries a claim. Hollow points are greedy completions, with 95% "
        "by itself.",
        _gaps,
    ),
    Picture(
        "rates",
        "Held-out pass rate of each recipe",
        "Interquartile means with 95% intervals of each recipe by itself; recipes that "
        "share seeds may be told apart above although these overlap. Hollow points are "
        "greedy completions.",
        _rates,
    ),
    *(
        Picture(
            f"curve_{axis}",
            f"Held-out pass rate over {AXES[axis].partition(',')[0]}",
            "Interquartile means and 95% intervals over seeds, as far as every run of "
            "every recipe has come.",
            _curves(axis),
        )
        for axis in AXES
    ),
    Picture(
        "waits",
        "Runs that have reached the threshold",
        "Share of runs, by Kaplan and Meier; a tick is a run that ended before it was "
        "there.",
        _waits,
    ),
    Picture(
        "sensitivity",
        "Sensitivity to each setting",
        "Each setting is changed alone; the ring is the value of the recipe, bars are "
        "95% intervals of each point by itself. The best of several points is the best "
        "partly by luck.",
        _sensitivity,
    ),
)
