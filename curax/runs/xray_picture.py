"""Picture of a summary: weight, objective, signal with draws, and noise."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from curax.runs.pictures import LIGHT, as_png, grid, label, percent
from curax.theory.population import SHOWN
from curax.theory.table import verdict

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Columns = Mapping[str, np.ndarray]  # [R] each, by name
RATE = "pass rate p"


def picture(name: str, found: Mapping[str, Any]) -> bytes:
    """Four panels over the pass rate, as PNG; the same summary gives the same bytes.

    Args:
        name: name of the recipe.
        found: result of `summary.summarise`.
    """
    style = LIGHT
    by = {key: np.array(v, float) for key, v in found["by_pass_rate"].items()}
    inside = (by["p"] >= SHOWN[0]) & (by["p"] <= SHOWN[-1])
    by = {key: values[inside] for key, values in by.items()}
    plain = None
    if "hints" in found:
        plain = np.array(found["hints"]["signal_without"], float)[inside]
    figure, panels = grid(style, 2, (1, 1), (9.6, 6.6))
    for axes in panels.flat:
        axes.set_xlim(0, 1)
    (weight, objective), (signal, noise) = panels
    _draw_weight(weight, objective, by)
    _draw_signal(signal, by, np.array(found["histogram"]), plain)
    noise.plot(by["p"], by["noise_against_grpo"], color=style.red, linewidth=2)
    noise.axhline(1, color=style.muted, linewidth=1, linestyle=":")
    _logarithmic(noise)
    label(noise, style, RATE, f"noise per draw, over GRPO of {found['grpo_group']}")
    title = f"{name} {verdict(found)}; it claims {found['claim']}"
    return as_png(figure, title, style)


def _draw_weight(weight: "Axes", objective: "Axes", by: Columns) -> None:
    """Draw the weight over w(1/2) with its interval, and the objective from 0 to 1."""
    style, p = LIGHT, by["p"]
    middle = int(np.flatnonzero(p == 0.5)[0])
    for kind, color, dashes, text in (
        ("", style.blue, "-", "real"),
        ("claimed_", style.orange, "--", "claimed"),
    ):
        slope, values = by[f"{kind}weight"], by[f"{kind}objective"]
        if not (np.isfinite(slope).all() and slope[middle] > 0):
            continue
        how = {"color": color, "label": text, "linewidth": 2}
        weight.plot(p, slope / slope[middle], dashes, **how)
        if (rise := values[-1] - values[0]) > 0:
            objective.plot(p, (values - values[0]) / rise, dashes, **how)
    real, half = by["weight"], by["half_interval"]
    if half.any() and real[middle] > 0:
        low, high = (real - half) / real[middle], (real + half) / real[middle]
        weight.fill_between(p, low, high, color=style.blue, alpha=0.2, linewidth=0)
    if (real > 0).all():
        _logarithmic(weight)
    label(weight, style, RATE, "weight w(p) / w(0.5)")
    label(objective, style, RATE, "objective f(p), 0 to 1")


def _draw_signal(
    signal: "Axes", by: Columns, share: np.ndarray, plain: np.ndarray | None
) -> None:
    """Draw signal and histogram of the prompts, and draws on the right.

    Args:
        signal: the panel.
        by: columns.
        share: `[bins]` of the prompts, over pass rates from 0 to 1.
        plain: `[R]` signal without hints; None: there are none.
    """
    style, p, bins = LIGHT, by["p"], len(share)
    bars = (np.arange(bins) + 0.5) / bins
    signal.bar(bars, share, 1 / bins, color=style.grid, label="prompts")
    signal.plot(p, by["signal"], color=style.green, linewidth=2, label="with signal")
    if plain is not None:
        signal.plot(
            p, plain, ":", color=style.green, linewidth=2, label="without hints"
        )
    percent(signal)
    draws: Any = signal.twinx()
    draws.plot(p, by["draws"], "--", color=style.purple, linewidth=2)
    signal.plot([], [], "--", color=style.purple, linewidth=2, label="draws, right")
    draws.set_ylim(0, 1.08 * max(by["draws"].max(), 1))
    draws.spines[["top", "left", "bottom"]].set_visible(False)
    draws.spines["right"].set_color(style.muted)
    draws.tick_params(colors=style.muted, labelcolor=style.ink, labelsize=9.5)
    draws.set_ylabel("draws per prompt", color=style.ink, fontsize=10)
    label(signal, style, RATE, "share of groups; of prompts")


def _logarithmic(axes: "Axes") -> None:
    """Make the vertical axis logarithmic, over a factor of 4 at least."""
    from matplotlib.ticker import LogLocator, NullLocator

    axes.set_yscale("log")
    low, high = axes.get_ylim()
    axes.set_ylim(min(low, 0.5), max(high, 2))
    every = (1, 2, 5) if high / low < 1000 else (1,)
    axes.yaxis.set_major_locator(LogLocator(subs=every))
    axes.yaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
