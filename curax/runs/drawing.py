"""Pictures drawn for a light and a dark page, from panels that are declared.

A picture declares its panels, and a panel its marks; `figure` alone draws. A picture
without marks is left out. Curves are means over seeds with a 95% t-interval. Colours
are those of Okabe and Ito, distinct for colour-blind readers. No global state is used:
no pyplot, no rcParams.
"""

import io
import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from operator import attrgetter
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from curax.runs.reading import count_text, t_interval

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


class Style(NamedTuple):
    """Colours of a page."""

    paper: str
    ink: str
    muted: str
    grid: str
    blue: str
    orange: str
    green: str
    red: str
    purple: str


LIGHT = Style(
    *("#ffffff", "#1b1f24", "#5b6470", "#e4e7eb"),
    *("#0072b2", "#e69f00", "#009e73", "#d55e00", "#cc79a7"),
)
# On dark paper blue and green are replaced by brighter hues.
DARK = Style(
    *("#171b21", "#e8eaed", "#9aa4b0", "#2c323a"),
    *("#56b4e9", "#e69f00", "#1fbf92", "#e8702a", "#cc79a7"),
)

HUES = ("blue", "red", "green", "orange", "purple", "#8b6cc4", "#9c7a3c", "muted")
DASHES = ("-", "--", ":", "-.")

# The leading underscore keeps bands out of the legend; the title row names them.
_BAND = "_mean, 95% t-interval,"

# House style


def grid(
    style: Style,
    rows: int,
    widths: Sequence[float],
    size: tuple[float, float],
    share: bool = False,
) -> "tuple[Figure, np.ndarray]":
    """An empty figure with panels `[rows, len(widths)]`, its size in inches.

    Args:
        style: colours.
        rows: of panels.
        widths: of the columns, beside each other.
        size: width and height of the figure, inches.
        share: panels have one vertical axis.
    """
    from matplotlib.figure import Figure

    figure = Figure(size, 120, facecolor=style.paper, layout="constrained")
    panels = figure.subplots(
        *(rows, len(widths)), squeeze=False, sharey=share, width_ratios=list(widths)
    )
    for axes in panels.flat:
        axes.set_facecolor(style.paper)
        _frame(axes, style, "left", "bottom")
        axes.grid(axis="y", color=style.grid, linewidth=0.8)
        axes.set_axisbelow(True)
    return figure, panels


def _frame(axes: "Axes", style: Style, *sides: str) -> None:
    """Show the lines of some sides of a panel alone, in colours of a style."""
    axes.spines[:].set_visible(False)
    axes.spines[list(sides)].set_visible(True)
    axes.spines[list(sides)].set_color(style.muted)
    axes.tick_params(colors=style.muted, labelcolor=style.ink, labelsize=9.5)


def canvas(style: Style, widths: Sequence[float] = (1,)) -> "tuple[Figure, list[Axes]]":
    """An empty figure of 6.4 by 3.6 inches with panels side by side."""
    figure, panels = grid(style, 1, widths, (6.4, 3.6))
    return figure, list(panels[0])


def label(axes: "Axes", style: Style, x: str, y: str) -> None:
    """Label both axes, and put the legend in a line above the panel."""
    axes.set_xlabel(x, color=style.ink, fontsize=10)
    axes.set_ylabel(y, color=style.ink, fontsize=10)
    panels = len(axes.figure.axes)
    if axes.get_legend_handles_labels()[1]:
        axes.legend(
            frameon=False,
            fontsize=9,
            labelcolor=style.ink,
            loc="lower left",
            bbox_to_anchor=(-0.03, 1),
            ncols=max(1, 4 // panels),
            handlelength=1.6,
            columnspacing=1.2,
            borderaxespad=0.1,
        )


def over_steps(axes: "Axes") -> None:
    """Ticks at integers, for a panel over steps."""
    from matplotlib.ticker import MaxNLocator

    low, high = axes.get_xlim()
    if high - low < 1:  # a single step
        axes.set_xlim(round(low) - 1, round(low) + 1)
    axes.xaxis.set_major_locator(MaxNLocator(6, integer=True, min_n_ticks=1))


def over_counts(axes: "Axes") -> None:
    """Ticks in thousands and millions, for a panel over a count."""
    if axes.get_xlim()[1] < 1:  # nothing spent yet
        axes.set(xlim=(0, 1), xticks=[0])
    axes.xaxis.set_major_formatter(lambda value, _: count_text(value))


def percent(axes: "Axes") -> None:
    """Set the vertical axis to 0% to 100%."""
    from matplotlib.ticker import PercentFormatter

    axes.set_ylim(-0.02, 1.02)
    axes.yaxis.set_major_formatter(PercentFormatter(1, decimals=0))


# What is drawn, as data


class Mark(NamedTuple):
    """A call that draws in a panel, or sets how the panel is shown."""

    how: str | Callable[..., Any]  # method of `Axes`, as `xaxis.set_major_formatter`,
    # or a function of them
    at: tuple[Any, ...] = ()
    options: Mapping[str, Any] = {}  # `color` and `colors` are those of a style


class Panel(NamedTuple):
    """Marks in a pair of axes."""

    x: str  # names of the axes
    y: str
    marks: Sequence[Mark]
    then: Sequence[Mark] = ()  # scales, when the marks are there
    right: "Panel | None" = None  # in the same place, with its own axis on the right


class Sheet(NamedTuple):
    """Panels of a picture, row by row, each as long as `widths`."""

    panels: Sequence[Panel]
    widths: Sequence[float] = ()  # of the columns; empty: one row of equal panels
    size: tuple[float, float] = (6.4, 3.6)  # inches
    share: bool = False  # one vertical axis
    legend: Mapping[str, tuple[str, str]] = {}  # below: (colour, dashes) by name


class Picture(NamedTuple):
    """A picture of a page, of a run or of what else its function takes."""

    name: str  # of the PNG file
    title: str
    caption: str  # how to read it
    sheet: Callable[[Any], Sheet]  # without marks: no data

    def draw(self, of: Any, style: Style) -> "Figure | None":
        """The figure; None without data."""
        return figure(self.sheet(of), style)


def mark(how: str | Callable[..., Any], *at: Any, **options: Any) -> Mark:
    """A mark by its method of `Axes` or function, and their arguments."""
    return Mark(how, at, options)


def curve(
    x: Iterable[float], values: np.ndarray, name: str, color: str, dashes: str = "-"
) -> Mark:
    """Mean over seeds as a line, and its 95% t-interval as a band.

    Args:
        x: `[K]` horizontal positions.
        values: `[K, R]` values of R seeds, NaN where missing.
        name: label of the curve.
        color: colour of line and band.
        dashes: line style.
    """
    return mark(_draw_curve, np.array(x), values, dashes, label=name, color=color)


def figure(sheet: Sheet, style: Style) -> "Figure | None":
    """The panels of a sheet that have marks, drawn; None where none has."""
    panels = [panel for panel in sheet.panels if panel.marks]
    if not panels:
        return None
    widths = sheet.widths or [1] * len(panels)
    rows = len(panels) // len(widths)
    made, grids = grid(style, rows, widths, sheet.size, sheet.share)
    for axes, panel in zip(grids.flat, panels, strict=True):
        _draw(axes, panel, style)
    if sheet.legend:
        _draw_legend(made, sheet.legend, style)
    return made


def _draw(axes: "Axes", panel: Panel, style: Style) -> None:
    """Draw a panel in a pair of axes, and what has an axis on their right."""
    for one in (*panel.marks, *panel.then):
        put(axes, one, style)
    if panel.right:
        other: Any = axes.twinx()
        _frame(other, style, "right")
        _draw(other, panel.right, style)
    label(axes, style, panel.x, panel.y)


def put(axes: "Axes", one: Mark, style: Style) -> None:
    """Draw a mark, colours by their names in a style."""
    options = dict(one.options)
    if "color" in options:
        options["color"] = getattr(style, options["color"], options["color"])
    if "colors" in options:
        options["colors"] = [getattr(style, name) for name in options["colors"]]
    if isinstance(one.how, str):
        attrgetter(one.how)(axes)(*one.at, **options)
    else:
        one.how(axes, *one.at, **options)


def _draw_legend(
    made: "Figure", names: Mapping[str, tuple[str, str]], style: Style
) -> None:
    """Draw a legend below all panels."""
    from matplotlib.lines import Line2D

    lines = []
    for name, (color, dashes) in names.items():
        lines.append(Line2D([], [], color=getattr(style, color, color), linewidth=2))
        lines[-1].set(linestyle=dashes, label=in_legend(name))
    made.legend(
        handles=lines,
        loc="outside lower center",
        ncols=min(5 if len(made.axes) > 1 else 3, len(lines)),
        frameon=False,
        fontsize=9,
        labelcolor=style.ink,
    )


def _draw_curve(
    axes: "Axes", x: np.ndarray, values: np.ndarray, dashes: str, **shown: Any
) -> None:
    mean, half = t_interval(values)
    axes.plot(
        *(x, mean, dashes),
        **shown,
        linewidth=2 if len(x) <= 100 else 1.4,
        marker="o" if len(x) <= 30 else "",
        markersize=4,
    )
    if np.isfinite(half).any():
        shown["label"] = f"{_BAND} {values.shape[-1]} seeds"
        axes.fill_between(x, mean - half, mean + half, **shown, alpha=0.2, linewidth=0)


STEPS, COUNTS, PERCENT = mark(over_steps), mark(over_counts), mark(percent)


def png(picture: Picture, of: Any, style: Style) -> bytes | None:
    """PNG bytes of a picture, None without data; equal data give equal bytes."""
    drawn = picture.draw(of, style)
    return drawn and as_png(drawn, picture.title, style)


def in_legend(name: str) -> str:
    """A name that legends show; they leave out what begins with an underscore."""
    return f" {name}" if name.startswith("_") else name


def pens(names: Iterable[str]) -> dict[str, tuple[str, str]]:
    """(colour, dashes) of each name; other dashes where all colours are taken."""
    both = ((hue, dashes) for dashes in DASHES for hue in HUES)
    return dict(zip(names, itertools.cycle(both), strict=False))


def _show_as_written(figure: "Figure") -> None:
    """Escape `$`, which would begin a formula, and what the font lacks, in all texts.

    Names of runs, recipes and settings are the user's.
    """
    from matplotlib import font_manager
    from matplotlib.text import Text
    from matplotlib.ticker import FuncFormatter

    def escaped(text: str, like: Text) -> str:
        font = font_manager.get_font(font_manager.findfont(like.get_fontproperties()))
        shown = (
            letter
            if letter == "\n" or font.get_char_index(ord(letter))
            else letter.encode("unicode_escape").decode()
            for letter in text
        )
        return "".join(shown).replace("$", r"\$")

    for text in figure.findobj(Text):
        text.set_text(escaped(text.get_text(), text))
    both = (axis for axes in figure.axes for axis in (axes.xaxis, axes.yaxis))
    ticks = {axis.get_major_formatter(): axis.label for axis in both}
    for named, like in ticks.items():  # they set their texts when they are drawn
        if isinstance(named, FuncFormatter):
            own = named.func
            named.func = lambda *at, own=own, like=like: escaped(own(*at), like)


def as_png(figure: "Figure", title: str, style: Style) -> bytes:
    """PNG bytes of a figure under its title; equal figures give equal bytes."""
    figure.suptitle(
        title, x=0.015, ha="left", fontsize=11.5, fontweight="bold", color=style.ink
    )
    drawn = [artist.get_label() for axes in figure.axes for artist in axes.collections]
    for note in {str(name)[1:] for name in drawn if str(name).startswith(_BAND)}:
        figure.text(
            0.988, 0.972, note, ha="right", va="top", fontsize=9, color=style.muted
        )
    _show_as_written(figure)
    file = io.BytesIO()
    figure.savefig(file, format="png", metadata={"Software": None})
    return file.getvalue()
