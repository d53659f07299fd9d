"""Pictures of a run's metrics, drawn for a light and a dark page.

A picture declares its panels, and a panel its marks; `figure` alone draws. A picture
without marks is left out. Curves are means over seeds with a 95% t-interval. Colours
are those of Okabe and Ito, distinct for colour-blind readers. No global state is used:
no pyplot, no rcParams.
"""

import io
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from curax.runs.record import (
    Run,
    column,
    count_text,
    duration_text,
    is_supervised,
    means,
    t_interval,
    times,
)
from curax.theory.frontier import frontier

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
        axes.spines[["top", "right"]].set_visible(False)
        axes.spines[["left", "bottom"]].set_color(style.muted)
        axes.tick_params(colors=style.muted, labelcolor=style.ink, labelsize=9.5)
        axes.grid(axis="y", color=style.grid, linewidth=0.8)
        axes.set_axisbelow(True)
    return figure, panels


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

    how: str | Callable[..., Any]  # method of `Axes`, or a function of them
    at: tuple[Any, ...] = ()
    options: Mapping[str, Any] = {}  # `color` and `colors` are those of a style


class Panel(NamedTuple):
    """Marks in a pair of axes."""

    x: str  # names of the axes
    y: str
    marks: Sequence[Mark]
    then: Sequence[Mark] = ()  # scales, when the marks are there


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
        for one in (*panel.marks, *panel.then):
            put(axes, one, style)
        label(axes, style, panel.x, panel.y)
    if sheet.legend:
        _draw_legend(made, sheet.legend, style)
    return made


def put(axes: "Axes", one: Mark, style: Style) -> None:
    """Draw a mark, colours by their names in a style."""
    options = dict(one.options)
    if "color" in options:
        options["color"] = getattr(style, options["color"], options["color"])
    if "colors" in options:
        options["colors"] = [getattr(style, name) for name in options["colors"]]
    if isinstance(one.how, str):
        getattr(axes, one.how)(*one.at, **options)
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


# The pictures


STEPS, COUNTS, PERCENT = mark(over_steps), mark(over_counts), mark(percent)


def rates_at(
    run: Run, metric: str, place: Mapping[float, float], *look: str
) -> list[Mark]:
    """The curve of a metric, where it has values, over places by step.

    Args:
        run: record of the run.
        metric: its name.
        place: horizontal position by step; other steps are left out.
        look: name, colour and dashes, as `curve` takes them.
    """
    steps, values = column(run.rows, metric)
    known = np.array([step in place for step in steps], bool)
    x = [place[step] for step in steps[known]]
    return [curve(x, values[known], *look)] if x else []


def _pass_rates(run: Run, place: Mapping[float, float]) -> list[Mark]:
    """Curves of held-out pass rates, sampled and greedy."""
    return [
        *rates_at(run, "eval/pass_rate", place, "sampled", "blue"),
        *rates_at(run, "eval/greedy_pass_rate", place, "greedy", "orange", "--"),
    ]


def _pass_rate(run: Run) -> Sheet:
    marks = _pass_rates(run, {row["step"]: row["step"] for row in run.rows})
    drawn = means(run.rows, "outcome/mean")
    if marks and drawn:
        thin = {"alpha": 0.5, "linewidth": 1, "label": "training", "zorder": 1.5}
        steps, rates = list(drawn), list(drawn.values())
        marks.append(mark("plot", steps, rates, color="muted", **thin))
    return Sheet([Panel("step", "pass rate", marks, (PERCENT, STEPS))])


def _pass_rate_tokens(run: Run) -> Sheet:
    marks = _pass_rates(run, means(run.rows, "rollout/tokens"))
    then = (PERCENT, COUNTS)
    return Sheet([Panel("generated tokens so far", "pass rate", marks, then)])


def _groups(run: Run) -> Sheet:
    marks = []
    sides = [means(run.rows, f"group/{end}_fraction") for end in ("failed", "solved")]
    if steps := sorted(sides[0].keys() & sides[1].keys()):
        low, high = ([side[step] for step in steps] for side in sides)
        area = {"colors": ("red", "blue"), "labels": ("all failed", "all solved")}
        marks = [mark("stackplot", steps, low, high, **area, alpha=0.75, linewidth=0)]
        if len(steps) == 1:  # an area needs two steps
            marks += [
                mark("bar", steps, low, 0.5, color="red", alpha=0.75),
                mark("bar", steps, high, 0.5, low, color="blue", alpha=0.75),
            ]
    dead = column(run.rows, "group/dead_fraction")
    if dead[0].size:
        marks.append(curve(*dead, "dead in all", "ink"))
    then = (mark("margins", x=0), PERCENT, mark("set_ylim", 0, 1), STEPS)
    return Sheet([Panel("step", "share of groups", marks, then)])


def _histogram(run: Run) -> Sheet:
    before = "trained" if is_supervised(run) else "before"
    sides = (before, run.before, "orange"), ("after", run.after, "blue")
    # A pass rate over k samples has k + 1 values: a bar for each up to k = 16.
    k = run.samples if 0 < run.samples <= 16 else 10
    edges = (np.arange(k + 2) - 0.5) / k if k == run.samples else np.arange(k + 1) / k
    bars, wide = (edges[:-1] + edges[1:]) / 2, 0.9 * np.diff(edges)
    tallest, shown = 0.0, []
    for name, rates, color in sides:
        if rates is None or not (rates := rates[np.isfinite(rates)]).size:
            continue
        share, mean = np.histogram(rates, edges)[0] / rates.size, rates.mean()
        tallest = max(tallest, share.max())
        label = f"{name}, mean {mean:.1%}"
        marks = [mark("bar", bars, share, wide, color=color, label=label)]
        shown.append([*marks, mark("axvline", mean, color="ink", linestyle=":")])
    ends = {"ylim": (0, 1.05 * tallest), "xlim": (edges[0] - 0.02, edges[-1] + 0.02)}
    then = (PERCENT, mark("set", **ends), mark(_percent_below))
    names = "pass rate of a prompt", "share of prompts"
    return Sheet([Panel(*names, marks, then) for marks in shown])


def _percent_below(axes: "Axes") -> None:
    axes.xaxis.set_major_formatter(axes.yaxis.get_major_formatter())


def _time(run: Run) -> Sheet:
    spent = times(run.rows)
    if not spent:
        return Sheet([])
    hues = ("blue", "orange", "green", "red", "purple", "muted")
    total = sum(seconds.sum() for _, seconds in spent.stages.values())
    curves, bars = [], []
    for i, (stage, (steps, seconds)) in enumerate(spent.stages.items()):
        hue, each = hues[min(i, len(hues) - 1)], seconds.sum()
        curves.append(curve(steps, seconds[:, None], "_" + stage, hue))
        name = f"{stage}: {duration_text(each)}, {each / max(total, 1e-9):.0%}"
        bars.append(mark("barh", i, each, 0.45, color=hue))
        bars.append(mark("text", 0, i - 0.3, name, fontsize=9.5, color="ink"))
    notes = [f"first steps, compiling: {duration_text(spent.first)}"]
    if spent.first == spent.total:
        notes = ["all in first steps, compiling"]
    notes += [
        f"{name}, timed once: {duration_text(s)}" for name, s in spent.once.items()
    ]
    lines = max(len(spent.stages), 3) + len(notes) / 2
    for i, note in enumerate(notes):
        place = lines - 0.5 - (len(notes) - i) / 2
        bars.append(mark("text", 0, place + 0.2, note, fontsize=9.5, color="muted"))
    every = np.concatenate([seconds for _, seconds in spent.stages.values()])
    wide = every.max() > 20 * every.min() > 0
    scale = mark("set", yscale="log") if wide else mark("set_ylim", bottom=0)
    off = (mark("set_ylim", lines - 0.5, -0.7), mark("set_axis_off"))
    left = Panel("step", "seconds per step", curves, (scale, mark(_plain), STEPS))
    return Sheet([left, Panel("", "", bars, off)], (3, 2))


def _plain(axes: "Axes") -> None:
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")


Curve = tuple[tuple[np.ndarray, np.ndarray], str, str]  # (steps, values), name, hue
_FROM_ZERO = ("percent", "groups", "effective", "mean")  # axis names that start at 0


def _side_by_side(panels: Sequence[tuple[str, Sequence[Curve]]]) -> Sheet:
    """Panels of curves over steps; empty curves are left out."""
    return Sheet(
        [
            Panel(
                *("step", axis),
                [curve(*both, name, hue) for both, name, hue in curves if both[0].size],
                (STEPS, mark(_from_zero, axis)),
            )
            for axis, curves in panels
        ]
    )


def _from_zero(axes: "Axes", name: str) -> None:
    """Let the vertical axis of this name begin at 0, and count in percent."""
    if name.startswith(_FROM_ZERO):
        axes.set_ylim(0, 1.05 * axes.dataLim.y1 or 1)
    if name.startswith("percent"):
        axes.yaxis.set_major_formatter(lambda value, _: f"{100 * value:g}")


def _lines(
    *panels: tuple[str, tuple[tuple[str, str, str], ...]], warm: bool = False
) -> Callable[[Run], Sheet]:
    """Sheet of panels: axis name, and (metric, name, hue) per curve."""

    def sheet(run: Run) -> Sheet:
        rows = run.warm if warm else run.rows
        shown = [
            (axis, [(column(rows, metric), name, hue) for metric, name, hue in curves])
            for axis, curves in panels
        ]
        return _side_by_side(shown)

    return sheet


def _hints(run: Run) -> Sheet:
    groups: list[Curve] = []
    opened: list[np.ndarray] = []
    hues = ("blue", "orange", "red")
    # Every row of a run has the metrics of all levels.
    while (hinted := column(run.rows, f"hint/asked_{len(groups) + 1}"))[0].size:
        k = len(groups) + 1
        hue = hues[k - 1] if k <= len(hues) else "muted"
        groups.append((hinted, f"asked, level {k}", hue))
        opened.append(column(run.rows, f"hint/opened_{k}")[1])
    if opened:
        groups.append(
            ((groups[0][0][0], np.sum(opened, axis=0)), "opened, any level", "green")
        )
    rates: list[Curve] = [
        (column(run.rows, f"hint/{metric}"), name, hue)
        for metric, name, hue in (
            ("pass_rate", "with a hint", "blue"),
            ("plain_pass_rate", "without", "green"),
            ("transfer_pass_rate", "hinted before", "purple"),
        )
    ]
    panels = ("groups per step", groups), ("percent of completions right", rates)
    return _side_by_side(panels)


def _signal(run: Run) -> Sheet:
    forms = column(run.rows, "format/effective_number")
    dead = column(run.rows, "group/dead_fraction")
    forecast = column(run.rows, "forecast/dead_fraction")
    groups = [(dead, "dead", "red"), (forecast, "forecast", "blue")]
    panels: list[tuple[str, list[Curve]]] = [
        ("effective number of forms", [(forms, "held-out completions", "purple")]),
        # Without a forecast this panel would repeat the picture "groups".
        ("percent of groups", groups if forecast[0].size else []),
    ]
    return _side_by_side(panels)


def _frontier(run: Run) -> Sheet:
    distance = means(run.rows, "distance/k3_token_nats")
    rates = means(run.rows, "eval/pass_rate")
    steps = [step for step in rates if step in distance]
    if not steps:
        return Sheet([])
    kl, rate = (np.array([by[step] for step in steps]) for by in (distance, rates))
    reached = frontier(kl, rate)
    line = {"color": "orange", "markersize": 8, "markerfacecolor": "none"}
    marks = [
        mark("plot", kl, rate, "o", color="blue", label="evaluations", markersize=5),
        mark("plot", reached.kl, reached.reward, "o-", label="frontier", **line),
    ]
    note = {"textcoords": "offset points", "xytext": (0, 8), "ha": "center"}
    for i in sorted({0, len(steps) - 1}):
        at = f"step {steps[i]:.0f}", (kl[i], rate[i])
        marks.append(mark("annotate", *at, fontsize=9, color="muted", **note))
    far = max(float(kl.max()), 1e-6)
    ends = min(0.0, float(kl.min())) - 0.05 * far, 1.08 * far
    then = (PERCENT, mark("set_ylim", top=1.08), mark("set_xlim", *ends))
    x = "KL to the start, nats per token (k3)"
    return Sheet([Panel(x, "held-out pass rate", marks, then)])


PICTURES = (
    Picture(
        "pass_rate",
        "Held-out pass rate over steps",
        "Higher is better: the share of right completions on held-out prompts, sampled "
        "and greedy; the thin line is training, on the prompts and groups it chose.",
        _pass_rate,
    ),
    Picture(
        "pass_rate_tokens",
        "Held-out pass rate over generated tokens",
        "The same rates against what they cost: compare runs here, at equal tokens.",
        _pass_rate_tokens,
    ),
    Picture(
        "histogram",
        "Held-out prompts by pass rate",
        "Mass that moves from the left edge to the right is prompts learnt; what stays "
        "at 0% was never solved in any sample.",
        _histogram,
    ),
    Picture(
        "groups",
        "Groups that teach nothing",
        "A group whose completions all fail, or all succeed, has no gradient: the less "
        "is shaded, the more of the rollouts teach.",
        _groups,
    ),
    Picture(
        "length_entropy",
        "Completion length and policy entropy",
        "A length at its limit means cut-off answers; an entropy near zero means the "
        "policy has stopped exploring.",
        _lines(
            ("tokens per completion", (("rollout/length_tokens", "length", "blue"),)),
            ("nats per token", (("policy/entropy_nats", "entropy", "green"),)),
        ),
    ),
    Picture(
        "kl",
        "How far the policy moves",
        "Near zero is on-policy: KL per token to the policy that sampled and to the "
        "reference, and the share of ratios that the loss clipped.",
        _lines(
            (
                "KL, nats per token",
                (
                    ("kl/behaviour_nats", "behaviour", "blue"),
                    ("kl/ref_nats", "reference", "orange"),
                ),
            ),
            ("percent of tokens", (("ratio/clipped_fraction", "clipped", "red"),)),
        ),
    ),
    Picture(
        "hints",
        "Hints",
        "Groups that had no signal were asked again with a hint, level by level: how "
        "many, how many of them opened, and the pass rates with and without. Hints "
        "have done their work when prompts that had one before are solved without.",
        _hints,
    ),
    Picture(
        "reflection",
        "Certainty of the reference answer",
        "The mean log-prob of the reference behind the thought, by the weights of the "
        "reward, should rise; thoughts that shrink meanwhile are a warning.",
        _lines(
            (
                "log-prob, nats per token",
                (("reflect/certainty_nats", "certainty", "blue"),),
            ),
            (
                "mean tokens",
                (
                    ("reflect/thought_tokens", "thought", "green"),
                    ("reflect/answer_tokens", "answer", "orange"),
                ),
            ),
        ),
    ),
    Picture(
        "signal",
        "Forms of completions, and forecasts of dead groups",
        "The effective number of forms of held-out completions: a fall to a half means "
        "that one form takes over. Beside it, once the difficulty memory knows the "
        "prompts of a step, dead groups as they were and as it expected them.",
        _signal,
    ),
    Picture(
        "confidence",
        "Confidence of held-out completions",
        "Minus the mean log-prob of the likeliest tokens: of whole completions, of "
        "their least sure window, and of their ends. The higher, the surer; a rise "
        "without one of the pass rate is a policy that stops looking for other ways.",
        _lines(
            (
                "nats per token",
                (
                    ("confidence/mean_nats", "mean", "blue"),
                    ("confidence/lowest_nats", "lowest window", "red"),
                    ("confidence/tail_nats", "tail", "green"),
                ),
            )
        ),
    ),
    Picture(
        "frontier",
        "Pass rate against distance to the start",
        "Each evaluation is a point, and the line is what is reached at each distance: "
        "of two runs the one further up and to the left got more for less.",
        _frontier,
    ),
    Picture(
        "learning",
        "Loss and gradient",
        "Watch for spikes of the gradient norm; the loss of a policy gradient hovers "
        "about zero and need not fall.",
        _lines(
            ("loss", (("loss/mean", "loss", "blue"),)),
            ("norm before clipping", (("gradient/norm", "gradient", "red"),)),
        ),
    ),
    Picture(
        "time",
        "Time per stage",
        "Seconds of each stage, step by step and in all. The first steps of a run, and "
        "its first evaluation, also compile: they are told apart, and are in no curve "
        "and no bar unless there are no others.",
        _time,
    ),
    Picture(
        "warm_start",
        "Loss of supervised training",
        "The loss of each supervised step, on a batch of its own: the warm start that "
        "came before reinforcement learning.",
        _lines(
            ("loss, nats per token", (("warm/loss_nats", "loss", "purple"),)), warm=True
        ),
    ),
)


def png(picture: Picture, of: Any, style: Style) -> bytes | None:
    """PNG bytes of a picture, None without data; equal data give equal bytes."""
    drawn = picture.draw(of, style)
    return drawn and as_png(drawn, picture.title, style)


def in_legend(name: str) -> str:
    """A name that legends show; they leave out what begins with an underscore."""
    return f" {name}" if name.startswith("_") else name


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
