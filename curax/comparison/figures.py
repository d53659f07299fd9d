"""Pictures of a comparison, for a light and a dark page.

A picture is a function of the results of `analysis.analyse`, of the entries behind
them, and of a style; it is None where there is nothing to draw.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from curax.comparison import analysis, statistics
from curax.comparison.analysis import AXES, Entry, Question
from curax.runs import pictures
from curax.runs.pictures import Picture, Style, percent
from curax.runs.record import count_text

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

DASHES = ("-", "--", ":")
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


def _line_styles(shown: Shown, style: Style) -> dict[str, tuple[str, str]]:
    """(colour, line style) of each recipe; the baseline has the colour of the text."""
    hues = (style.blue, style.red, style.green, style.orange, style.purple)
    hues = (*hues, "#8b6cc4", "#9c7a3c", style.muted)
    styles, number = {}, 0
    for name in shown.found["recipes"]:
        if name == shown.question.baseline:
            styles[name] = style.ink, "-"
            continue
        styles[name] = hues[number % len(hues)], DASHES[number // len(hues) % 3]
        number += 1
    return styles


def _panels(
    style: Style, rows: int, columns: int, height: float
) -> "tuple[Figure, np.ndarray]":
    """An empty figure with a grid of panels, `[rows, columns]`; height in inches."""
    size = (WIDTHS[columns > 1], height)
    return pictures.grid(style, rows, [1] * columns, size, share=True)


def _title(axes: "Axes", style: Style, text: str) -> None:
    axes.set_title(text, loc="left", fontsize=10, color=style.ink)


def _name(axes: "Axes", style: Style, x: str = "", y: str = "") -> None:
    axes.set_xlabel(x, color=style.ink, fontsize=10)
    axes.set_ylabel(y, color=style.ink, fontsize=10)


def _legend(figure: "Figure", style: Style, styles: Mapping[str, Any]) -> None:
    """A legend of the recipes below all panels."""
    from matplotlib.lines import Line2D

    lines = [
        Line2D(
            *([], []),
            color=color,
            linestyle=dashes,
            linewidth=2,
            label=pictures.in_legend(name),
        )
        for name, (color, dashes) in styles.items()
    ]
    figure.legend(
        handles=lines,
        loc="outside lower center",
        ncols=min(5 if len(figure.axes) > 1 else 3, len(lines)),
        frameon=False,
        fontsize=9,
        labelcolor=style.ink,
    )


def _counts(axes: "Axes") -> None:
    from matplotlib.ticker import MaxNLocator

    axes.xaxis.set_major_locator(MaxNLocator(5))
    axes.xaxis.set_major_formatter(lambda value, _: count_text(value))


# ----- the pictures


def _forest(
    shown: Shown,
    style: Style,
    names: Sequence[str],
    triple: Callable[[str, str], Sequence[Any]],
) -> "tuple[Figure, np.ndarray]":
    """Forest plot: a row per recipe, a panel per axis, points with intervals."""
    styles = _line_styles(shown, style)
    figure, panels = _panels(style, 1, len(AXES), 1.35 + 0.32 * len(names))
    for axes, (axis, title) in zip(panels[0], AXES.items(), strict=True):
        for y, name in enumerate(names):
            middle, low, high = triple(axis, name)
            color = styles[name][0]
            if low is not None:
                axes.plot([low, high], [y, y], color=color, linewidth=2.4)
            axes.plot([middle], [y], "o", color=color, markersize=6)
        axes.grid(axis="x", color=style.grid, linewidth=0.8)
        axes.grid(axis="y", visible=False)
        axes.set_yticks(range(len(names)), names)
        axes.tick_params(axis="y", length=0)
        place = next(iter(shown.found["places"][axis].values()))
        where = f"{count_text(place)} {title.partition(',')[0]}"
        _title(axes, style, where if len(shown.found["places"][axis]) == 1 else title)
    panels[0][0].set_ylim(len(names) - 0.5, -0.5)
    return figure, panels


def _gaps(shown: Shown, style: Style) -> "Figure | None":
    names = [n for n in shown.found["recipes"] if n != shown.question.baseline]
    if not names:
        return None

    def triple(axis: str, name: str) -> Sequence[Any]:
        gap = shown.found["gaps"][axis][name]
        return gap["middle"], gap["low"], gap["high"]

    figure, panels = _forest(shown, style, names, triple)
    for axes in panels[0]:
        axes.axvline(0, color=style.ink, linewidth=1)
        far = 1.08 * max(map(abs, axes.get_xlim()))
        axes.set_xlim(-far, far)
        axes.xaxis.set_major_formatter(lambda value, _: f"{value:+.2g}")
    middle = panels[0][1]
    _name(middle, style, f"held-out pass rate, less that of {shown.question.baseline}")
    return figure


def _rates(shown: Shown, style: Style) -> "Figure | None":
    from matplotlib.ticker import PercentFormatter

    names = list(shown.found["recipes"])

    def triple(axis: str, name: str) -> Sequence[Any]:
        return shown.found["recipes"][name][axis]["rate"]

    figure, panels = _forest(shown, style, names, triple)
    for axes in panels[0]:
        axes.xaxis.set_major_formatter(PercentFormatter(1, decimals=0))
    _name(panels[0][1], style, "held-out pass rate")
    return figure


def _curves(axis: str) -> Callable[[Shown, Style], "Figure | None"]:
    """A drawing function of pass rates over an axis, a panel per condition."""

    def draw(shown: Shown, style: Style) -> "Figure | None":
        conditions = shown.found["places"][axis]
        styles = _line_styles(shown, style)
        figure, panels = _panels(style, 1, len(conditions), 4.6)
        for axes, condition in zip(panels[0], conditions, strict=True):
            found = analysis.curves(
                shown.plain, axis, condition, shown.found["places"], shown.question
            )
            for name, (x, middle, low, high) in found.items():
                color, dashes = styles[name]
                axes.plot(x, middle, dashes, color=color, linewidth=1.8)
                if np.isfinite(low).any():
                    axes.fill_between(
                        *(x, low, high),
                        color=color,
                        linewidth=0,
                        alpha=0.2 if len(found) <= 3 else 0.07,
                    )
            percent(axes)
            _counts(axes)
            _name(axes, style, AXES[axis])
            _title(axes, style, condition)
        _name(panels[0][0], style, AXES[axis], "held-out pass rate")
        _legend(figure, style, styles)
        return figure

    return draw


def _waits(shown: Shown, style: Style) -> "Figure | None":
    threshold = shown.question.threshold
    if threshold is None:
        return None
    conditions = list(shown.found["places"]["tokens"])
    styles = _line_styles(shown, style)
    rows = len(conditions)
    figure, panels = _panels(style, rows, len(AXES), 1.2 + 2.8 * rows)
    for row, condition in zip(panels, conditions, strict=True):
        for axes, axis in zip(row, AXES, strict=True):
            for entry in shown.plain:
                history = entry.histories[condition]
                spent = history.spent(axis, shown.question.prices)
                seen = statistics.waits(spent, history.rate, threshold)
                alive = statistics.survival(seen)
                x = np.concatenate([[0], alive.time, [spent[-1].max()]])
                y = np.concatenate([[0], 1 - alive.share, 1 - alive.share[-1:]])
                color, dashes = styles[entry.recipe]
                axes.step(x, y, dashes, where="post", color=color, linewidth=1.8)
                # Runs that ended before they were there.
                axes.plot(
                    seen.time[~seen.reached],
                    1
                    - alive.share[
                        np.searchsorted(alive.time, seen.time[~seen.reached])
                    ],
                    "|",
                    color=color,
                    markersize=9,
                )
            percent(axes)
            _counts(axes)
            _title(axes, style, condition)
            _name(axes, style, AXES[axis])
        _name(row[0], style, next(iter(AXES.values())), f"runs at {threshold:.0%}")
    _legend(figure, style, styles)
    return figure


def _sensitivity(shown: Shown, style: Style) -> "Figure | None":
    knobs = shown.found["sensitivity"]
    if not knobs:
        return None
    styles = _line_styles(shown, style)
    figure, panels = _panels(style, len(AXES), len(knobs), 1.1 + 2.3 * len(AXES))
    for column, (setting, recipes) in enumerate(knobs.items()):
        for axes, axis in zip(panels[:, column], AXES, strict=True):
            _sweep_panel(axes, recipes, axis, styles)
            if column == 0:
                short = AXES[axis].partition(",")[0].removeprefix("generated ")
                _name(axes, style, y=f"pass rate, equal\n{short}")
        _name(panels[-1, column], style, setting)
    _legend(figure, style, styles)
    return figure


def _sweep_panel(
    axes: "Axes", recipes: Any, axis: str, styles: Mapping[str, Any]
) -> None:
    """Draw pass rates over the values of a setting, a line per recipe, in a panel."""
    values = [point["value"] for points in recipes.values() for point in points]
    numbers = all(type(value) in (int, float) for value in values)
    labels: list[Any] = (
        sorted(set(values)) if numbers else list(dict.fromkeys(map(str, values)))
    )
    positive = numbers and min(labels) > 0
    wide = positive and max(labels) > 4 * min(labels)
    for name, points in recipes.items():
        color, dashes = styles[name]
        x = [p["value"] if numbers else labels.index(str(p["value"])) for p in points]
        spread = np.array([p[axis] for p in points], float)
        axes.plot(x, spread[:, 0], dashes, color=color, marker="o", markersize=4)
        axes.vlines(x, spread[:, 1], spread[:, 2], color=color, alpha=0.45, linewidth=2)
        for place, point, (middle, *_) in zip(x, points, spread, strict=True):
            if point["own"]:
                axes.plot(
                    [place], [middle], "o", color=color, markersize=9, fillstyle="none"
                )
    if wide:
        axes.set_xscale("log")
    if numbers and len(labels) <= 6:
        axes.set_xticks(labels, [f"{value:g}" for value in labels])
        axes.minorticks_off()
    elif not numbers:
        axes.set_xticks(range(len(labels)), labels)
    axes.margins(x=0.1)


PICTURES = (
    Picture(
        "gaps",
        "How far each recipe is from the baseline",
        "A point is the interquartile mean over seeds; right of the line is better. "
        "Intervals are widened for all comparisons of the page together: only one that "
        "leaves out 0 carries a claim.",
        _gaps,
    ),
    Picture(
        "rates",
        "Held-out pass rate of each recipe",
        "Interquartile means with 95% intervals of each recipe by itself; recipes that "
        "share seeds may be told apart above although these overlap.",
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
