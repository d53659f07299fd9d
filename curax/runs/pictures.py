"""The pictures of a run: what is drawn of its metrics, as `drawing` takes it."""

from collections.abc import Callable, Mapping, Sequence
from functools import reduce
from typing import TYPE_CHECKING, Any

import numpy as np

from curax.runs.drawing import (
    COUNTS,
    PERCENT,
    STEPS,
    Mark,
    Panel,
    Picture,
    Sheet,
    curve,
    mark,
)
from curax.runs.reading import (
    Row,
    Run,
    column,
    duration_text,
    is_supervised,
    means,
    times,
)
from curax.theory.frontier import frontier

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def rates_at(
    run: Run, metric: str, place: Mapping[float, float], *pen: str
) -> list[Mark]:
    """The curve of a metric, where it has values, over places by step.

    Args:
        run: the run as it was read.
        metric: its name.
        place: horizontal position by step; other steps are left out.
        pen: name, colour and dashes, as `curve` takes them.
    """
    steps, values = column(run.rows, metric)
    known = np.array([step in place for step in steps], bool)
    x = [place[step] for step in steps[known]]
    return [curve(x, values[known], *pen)] if x else []


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
    below = mark("xaxis.set_major_formatter", "{x:.0%}")
    then = (PERCENT, mark("set", **ends), below)
    names = "pass rate of a prompt", "share of prompts"
    return Sheet([Panel(*names, marks, then) for marks in shown])


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
    plain = mark("yaxis.set_major_formatter", "{x:g}")
    left = Panel("step", "seconds per step", curves, (scale, plain, STEPS))
    return Sheet([left, Panel("", "", bars, off)], (3, 2))


# (metric, name, hue); in place of a metric may stand its steps and values.
Curve = tuple[Any, str, str]
_FROM_ZERO = ("percent", "groups", "effective", "mean")  # axis names that start at 0


def _side_by_side(rows: Sequence[Row], *panels: tuple[Any, ...]) -> Sheet:
    """Panels over steps: the name of an axis, then its curves but for empty ones."""
    found = []
    for axis, *curves in panels:
        shown = [
            (column(rows, what) if isinstance(what, str) else what, name, hue)
            for what, name, hue in curves
        ]
        marks = [curve(x, y, name, hue) for (x, y), name, hue in shown if x.size]
        found.append(Panel("step", axis, marks, (STEPS, mark(_from_zero, axis))))
    return Sheet(found)


def _from_zero(axes: "Axes", name: str) -> None:
    """Let the vertical axis of this name begin at 0, and count in percent."""
    if name.startswith(_FROM_ZERO):
        axes.set_ylim(0, 1.05 * axes.dataLim.y1 or 1)
    if name.startswith("percent"):
        axes.yaxis.set_major_formatter(lambda value, _: f"{100 * value:g}")


def _lines(*panels: tuple[Any, ...], warm: bool = False) -> Callable[[Run], Sheet]:
    """Sheet of the panels of `_side_by_side`."""
    return lambda run: _side_by_side(run.warm if warm else run.rows, *panels)


def _hints(run: Run) -> Sheet:
    groups: list[Curve] = []
    opened: list[tuple[np.ndarray, np.ndarray]] = []
    hues = ("blue", "orange", "red")
    while (hinted := column(run.rows, f"hint/asked_{len(groups) + 1}"))[0].size:
        k = len(groups) + 1
        hue = hues[k - 1] if k <= len(hues) else "muted"
        groups.append((hinted, f"asked, level {k}", hue))
        opened.append(column(run.rows, f"hint/opened_{k}"))
    if opened:
        steps = reduce(np.intersect1d, [steps for steps, _ in opened])
        every = [values[np.isin(at, steps)] for at, values in opened]
        total = reduce(np.add, every)  # of rows that have all levels
        groups.append(((steps, total), "opened, any level", "green"))
    rates = (
        ("hint/pass_rate", "with a hint", "blue"),
        ("hint/plain_pass_rate", "without", "green"),
        ("hint/transfer_pass_rate", "hinted before", "purple"),
    )
    panels = ("groups per step", *groups), ("percent of completions right", *rates)
    return _side_by_side(run.rows, *panels)


def _turns(run: Run) -> Sheet:
    names = sorted({n for row in run.rows for n in row if n.startswith("environment/")})
    hues = ("green", "purple", "red")
    found = [
        (name, name.partition("/")[2], hue)
        for name, hue in zip(names, hues, strict=False)
    ]
    told = [
        ("turns/count", "turns", "blue"),
        ("turns/observed_tokens", "tokens observed", "orange"),
    ]
    right = [("outcome/mean", "right", "blue")]
    if not column(run.rows, "turns/count")[0].size:
        told, right = [], []
    return _side_by_side(
        run.rows,
        ("per completion", *told),
        ("what the environment measures", *found),
        ("percent of completions", *right),
    )


def _signal(run: Run) -> Sheet:
    groups = [
        ("group/dead_fraction", "dead", "red"),
        ("forecast/dead_fraction", "forecast", "blue"),
    ]
    # Without a forecast this panel would repeat the picture "groups".
    if not column(run.rows, "forecast/dead_fraction")[0].size:
        groups = []
    forms = ("format/effective_number", "held-out completions", "purple")
    panels = ("effective number of forms", forms), ("percent of groups", *groups)
    return _side_by_side(run.rows, *panels)


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
            ("tokens per completion", ("rollout/length_tokens", "length", "blue")),
            ("nats per token", ("policy/entropy_nats", "entropy", "green")),
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
                ("kl/behaviour_nats", "behaviour", "blue"),
                ("kl/ref_nats", "reference", "orange"),
            ),
            ("percent of tokens", ("ratio/clipped_fraction", "clipped", "red")),
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
        "turns",
        "Turns",
        "What the environment answered, completion by completion, what it measured "
        "there, and how many completions of the step were right.",
        _turns,
    ),
    Picture(
        "reflection",
        "Certainty of the reference answer",
        "The mean log-prob of the reference behind the thought, by the weights of the "
        "reward, should rise; thoughts that shrink meanwhile are a warning.",
        _lines(
            (
                "log-prob, nats per token",
                ("reflect/certainty_nats", "certainty", "blue"),
            ),
            (
                "mean tokens",
                ("reflect/thought_tokens", "thought", "green"),
                ("reflect/answer_tokens", "answer", "orange"),
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
                ("confidence/mean_nats", "mean", "blue"),
                ("confidence/lowest_nats", "lowest window", "red"),
                ("confidence/tail_nats", "tail", "green"),
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
            ("loss", ("loss/mean", "loss", "blue")),
            ("norm before clipping", ("gradient/norm", "gradient", "red")),
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
            ("loss, nats per token", ("warm/loss_nats", "loss", "purple")), warm=True
        ),
    ),
)
