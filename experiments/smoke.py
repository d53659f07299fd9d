"""Tables and pictures of what the first comparisons on embedded tasks measured.

Their `results.json` has, per recipe, the held-out pass rate of every seed at every
tenth update, with the tokens and updates it took until then. `curax.compare` runs the
experiments again and writes results of its own.
"""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from curax.runs import reading
from curax.runs.drawing import LIGHT, canvas, label, percent
from curax.settings.tables import markdown

COLORS = ("#1b1f24", "#882255", "#5b6470", "#d55e00", "#0072b2", "#009e73", "#cc79a7")
COLORS = (*COLORS, "#e69f00", "#56b4e9")


def at(own: Mapping[str, Any], axis: str, place: float) -> np.ndarray:
    """Pass rates of the seeds where each had so many tokens or updates, `[seeds]`."""
    spent, rates = np.array(own[axis]), np.array(own["rate"])
    assert place <= spent[-1].min(), f"{axis}={place} was not reached by every seed"
    return np.array(
        [
            np.interp(place, spent[:, seed], rates[:, seed])
            for seed in range(rates.shape[-1])
        ]
    )


def shown(values: np.ndarray, *, signed: bool = False) -> str:
    """Mean and half a 95 % t-interval over seeds."""
    middle, half = reading.t_interval(values)
    return f"{middle:{'+' if signed else ''}.3f} ± {half:.3f}"


def table(found: Mapping[str, Any], base: str, tokens: Iterable[float], updates: int):
    """Rows of pass rates at equal tokens and at equal updates, beside those of base."""
    last = max(tokens)
    head = ["recipe", *(f"{reading.count_text(t)} tokens" for t in tokens)]
    head += [f"less {base}", f"{updates} updates", f"less {base}", "updates then"]
    lines = []
    for name, own in found.items():
        there, then = at(own, "tokens", last), at(own, "updates", updates)
        plain = found[base]
        gap = there - at(plain, "tokens", last)
        later = then - at(plain, "updates", updates)
        spent = np.array(own["tokens"]).mean(1)
        line = [name, *(shown(at(own, "tokens", t)) for t in tokens)]
        line += ["" if name == base else shown(gap, signed=True), shown(then)]
        line += ["" if name == base else shown(later, signed=True)]
        line += [f"{np.interp(last, spent, np.array(own['updates']).mean(1)):.0f}"]
        lines.append(line)
    return markdown(head, lines)


def draw(path: Path, found: Mapping[str, Any], base: str, tokens: float) -> None:
    """Held-out pass rate over tokens: as it is, and less that of base."""
    figure, (left, right) = canvas(LIGHT, (1, 1))
    figure.set_size_inches(11, 4.6)
    places = np.linspace(0, tokens, 41)
    plain = np.array([at(found[base], "tokens", t) for t in places])
    for (name, own), color in zip(found.items(), COLORS, strict=False):
        rates = np.array([at(own, "tokens", t) for t in places])
        left.plot(places, rates.mean(1), color=color, label=name, linewidth=1.8)
        if name != base:
            middle, half = reading.t_interval(rates - plain)
            right.plot(places, middle, color=color, linewidth=1.8)
            right.fill_between(
                places, middle - half, middle + half, color=color, alpha=0.08
            )
    right.axhline(0, color=LIGHT.ink, linewidth=1)
    percent(left)
    label(left, LIGHT, "generated tokens", "held-out pass rate")
    left.legend(frameon=False, fontsize=8, loc="lower right")
    label(right, LIGHT, "generated tokens", f"less that of {base}, 95% over seeds")
    for axes in (left, right):
        axes.xaxis.set_major_formatter(lambda value, _: reading.count_text(value))
    figure.savefig(path, metadata={"Software": None})
