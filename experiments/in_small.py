"""Tables of what the miniatures of the papers measured.

Command:  python -m experiments.in_small

Reads `results.json` of each paper's folder, as `python -m curax.compare` wrote it, and
writes its tables into the page of the folder, between two marks.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from curax.comparison.analysis import AXES
from curax.runs.reading import count_text
from curax.settings.cli import write_file
from experiments.map.show import markdown

HERE = Path(__file__).parent
BEGIN = "<!-- tables: python -m experiments.in_small -->"
END = "<!-- end of the tables -->"


def number(value: float, *, signed: bool = False) -> str:
    """Three digits after the point, without a zero before it."""
    value = round(value, 3) + 0.0  # no -.000
    text = f"{value:{'+' if signed else ''}.3f}"
    return text.replace("0.", ".", 1) if abs(value) < 1 else text


def interval(found: Sequence[float], *, signed: bool = False) -> str:
    """Text of (middle, low, high)."""
    middle, low, high = (number(value, signed=signed) for value in found)
    return f"{middle} [{low}, {high}]"


def rates(found: Mapping[str, Any]) -> Iterator[list[str]]:
    """Rows of pass rates at equal tokens, and of gaps to the baseline on each axis."""
    ends = {axis: found["places"][axis][""] for axis in AXES}
    base = found["baseline"]
    head = ["arm", f"held out at {count_text(ends['tokens'])} tokens"]
    head += [f"gap to `{base}`, tokens", f"gap, {ends['updates']:.0f} updates"]
    drawn, trained = found["prices"]
    head += [f"gap, cost {count_text(ends['cost'])} (1 : {trained / drawn:.2g})"]
    yield head
    for name, own in found["recipes"].items():
        line = [f"`{name}`", interval(own["tokens"]["rate"])]
        for axis in AXES:
            gap = found["gaps"][axis].get(name)
            line.append(
                interval([gap[x] for x in ("middle", "low", "high")], signed=True)
                if gap
                else ""
            )
        yield line


def significant(value: float) -> str:
    """Three significant digits, without a zero before the point."""
    text = f"{value:.3g}"
    return text.replace("0.", ".", 1) if 0 < abs(value) < 1 else text


def watched(found: Mapping[str, Any]) -> Iterator[list[str]]:
    """Rows of tokens to the threshold, and of metrics at the start and at the end.

    The end is where all arms are compared at equal tokens.
    """
    place = found["places"]["tokens"][""]
    histories = found["histories"]
    names = list(next(iter(histories.values()))["watched"])
    median = f"tokens to {number(found['threshold'])}" if "threshold" in found else ""
    yield ["arm", *[median] * bool(median), *(f"`{name}`" for name in names)]
    for arm, history in histories.items():
        line = [f"`{arm}`"]
        if median:
            wait = found["waits"]["tokens"][""][arm]
            half = wait["median"]
            line.append(
                count_text(half)
                if half is not None
                else f"not by half: {wait['reached']} of {wait['runs']}"
            )
        drawn = np.mean(np.array(history["drawn"], float), -1)
        last = int(np.searchsorted(drawn[1:], place, side="right")) - 1
        for name in names:
            values = np.array(history["watched"][name], float)
            first, then = np.nanmean(values[0]), np.nanmean(values[max(last, 0)])
            line.append(f"{significant(first)} → {significant(then)}")
        yield line


def tables(found: Mapping[str, Any]) -> str:
    """Markdown between the marks of a page."""
    every = [list(rates(found)), list(watched(found))]
    return "\n\n".join([BEGIN, *(markdown(x[0], x[1:]) for x in every), END])


def main() -> None:
    """Write the tables of all papers that were measured."""
    for path in sorted(HERE.glob("*/paper.toml")):
        results, page = path.parent / "results.json", path.parent / "README.md"
        if not results.exists():
            continue
        text = page.read_text("utf-8")
        head, _, rest = text.partition(BEGIN)
        _, _, tail = rest.partition(END)
        new = head + tables(json.loads(results.read_text())) + tail
        write_file(page, new.encode())


if __name__ == "__main__":
    main()
