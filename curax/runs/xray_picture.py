"""Picture of a summary: weight, objective, signal with draws, and noise."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from curax.runs.drawing import LIGHT, PERCENT, Mark, Panel, Picture, Sheet, mark, png
from curax.settings.config_types import present
from curax.theory.population import SHOWN
from curax.theory.table import verdict

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Columns = Mapping[str, np.ndarray]  # [R] each, by name
RATE = "pass rate p"
WHOLE = mark("set_xlim", 0, 1)


def picture(name: str, found: Mapping[str, Any]) -> bytes:
    """Four panels over the pass rate, as PNG; the same summary gives the same bytes.

    Args:
        name: name of the recipe.
        found: result of `summary.summarise`.
    """
    title = f"{name} {verdict(found)}; it claims {found['claim']}"
    return present(png(Picture("xray", title, "", _sheet), found, LIGHT))


def _sheet(found: Mapping[str, Any]) -> Sheet:
    by = {key: np.array(v, float) for key, v in found["by_pass_rate"].items()}
    inside = (by["p"] >= SHOWN[0]) & (by["p"] <= SHOWN[-1])
    by = {key: values[inside] for key, values in by.items()}
    plain = None
    if "hints" in found:
        plain = np.array(found["hints"]["signal_without"], float)[inside]
    noise = [
        mark("plot", by["p"], by["noise_against_grpo"], color="red", linewidth=2),
        mark("axhline", 1, color="muted", linewidth=1, linestyle=":"),
    ]
    against = f"noise per draw, over GRPO of {found['grpo_group']}"
    panels = [
        *_weight(by),
        _signal(by, np.array(found["histogram"]), plain),
        Panel(RATE, against, [WHOLE, *noise], [mark(_logarithmic)]),
    ]
    return Sheet(panels, (1, 1), (9.6, 6.6))


def _weight(by: Columns) -> tuple[Panel, Panel]:
    """The weight over w(1/2) with its interval, and the objective from 0 to 1."""
    weight, objective, p = [WHOLE], [WHOLE], by["p"]
    middle = int(np.flatnonzero(p == 0.5)[0])
    for kind, color, dashes, text in (
        ("", "blue", "-", "real"),
        ("claimed_", "orange", "--", "claimed"),
    ):
        slope, values = by[f"{kind}weight"], by[f"{kind}objective"]
        if not (np.isfinite(slope).all() and slope[middle] > 0):
            continue
        how = {"color": color, "label": text, "linewidth": 2}
        weight.append(mark("plot", p, slope / slope[middle], dashes, **how))
        if (rise := values[-1] - values[0]) > 0:
            height = (values - values[0]) / rise
            objective.append(mark("plot", p, height, dashes, **how))
    real, half = by["weight"], by["half_interval"]
    if half.any() and real[middle] > 0:
        ends = (real - half) / real[middle], (real + half) / real[middle]
        band = {"color": "blue", "alpha": 0.2, "linewidth": 0}
        weight.append(mark("fill_between", p, *ends, **band))
    scale = [mark(_logarithmic)] if (real > 0).all() else []
    return (
        Panel(RATE, "weight w(p) / w(0.5)", weight, scale),
        Panel(RATE, "objective f(p), 0 to 1", objective),
    )


def _signal(by: Columns, share: np.ndarray, plain: np.ndarray | None) -> Panel:
    """Signal and histogram of the prompts, and draws on the right.

    Args:
        by: columns.
        share: `[bins]` of the prompts, over pass rates from 0 to 1.
        plain: `[R]` signal without hints; None: there are none.
    """
    p, bins = by["p"], len(share)
    bars = (np.arange(bins) + 0.5) / bins
    signal, draws = {"color": "green", "linewidth": 2}, {"color": "purple"}
    marks = [
        WHOLE,
        mark("bar", bars, share, 1 / bins, color="grid", label="prompts"),
        mark("plot", p, by["signal"], label="with signal", **signal),
    ]
    if plain is not None:
        marks.append(mark("plot", p, plain, ":", label="without hints", **signal))
    named = mark("plot", [], [], "--", label="draws, right", linewidth=2, **draws)
    drawn: list[Mark] = [mark("plot", p, by["draws"], "--", linewidth=2, **draws)]
    top = mark("set_ylim", 0, 1.08 * max(by["draws"].max(), 1))
    right = Panel("", "draws per prompt", drawn, [top])
    return Panel(RATE, "share of groups; of prompts", marks, [PERCENT, named], right)


def _logarithmic(axes: "Axes") -> None:
    """Make the vertical axis logarithmic, over a factor of 4 at least."""
    from matplotlib.ticker import LogLocator, NullLocator

    axes.set_yscale("log")
    low, high = axes.get_ylim()
    axes.set_ylim(min(low, 0.5), max(high, 2))
    every = (1, 2, 5) if high / low < 1000 else (1,)
    axes.yaxis.set_major_locator(LogLocator(subs=every))
    axes.yaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_formatter("{x:g}")
