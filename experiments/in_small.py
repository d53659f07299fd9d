"""Tables of what the miniatures of the papers, and other comparisons, measured.

Command:  python -m experiments.in_small

Reads `results.json` of each folder whose page has two marks, as `python -m
curax.compare` wrote it, and writes its tables between them.
"""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from curax.compare import statistics
from curax.compare.analysis import AXES
from curax.runs.reading import count_text
from curax.settings.cli import write_file
from experiments.map.show import markdown

HERE = Path(__file__).parent
BEGIN = "<!-- tables: python -m experiments.in_small -->"
END = "<!-- end of the tables -->"
CONTROL = "raft_plus_plus"  # right completions alone, of a fixed n


def number(value: float, *, signed: bool = False) -> str:
    """Three digits after the point, without a zero before it.

    Four where three are zeros and there is a sign: it says whether an interval shows.
    """
    digits = 4 if signed and round(value, 3) == 0 else 3
    value = round(value, digits) + 0.0  # no -.000
    digits = digits if value else 3
    text = f"{value:{'+' if signed else ''}.{digits}f}"
    return text.replace("0.", ".", 1) if abs(value) < 1 else text


def interval(found: Sequence[float], *, signed: bool = False) -> str:
    """Text of (middle, low, high)."""
    middle, low, high = (number(value, signed=signed) for value in found)
    return f"{middle} [{low}, {high}]"


def controlled(found: Mapping[str, Any]) -> dict[str, list[float]]:
    """Gaps of the same seed to RAFT++ at equal tokens, with Holm's intervals over them.

    Of no arm where it is the baseline, or none of the arms.
    """
    own = {
        name: [np.array(seen["tokens"]["values"][""], float)]
        for name, seen in found["recipes"].items()
    }
    if CONTROL not in own or found["baseline"] == CONTROL:
        return {}
    base = own.pop(CONTROL)
    gaps = {name: statistics.gap(x, base, paired=True) for name, x in own.items()}
    levels = statistics.holm([float(gap.p_value()) for gap in gaps.values()])
    return {
        name: [float(x) for x in (gap.value, *gap.interval(level))]
        for (name, gap), level in zip(gaps.items(), levels, strict=True)
    }


def rates(found: Mapping[str, Any]) -> Iterator[list[str]]:
    """Rows of pass rates at equal tokens, and of gaps to the baseline on each axis.

    And at equal tokens to RAFT++, the control, where that is another arm.
    """
    ends = {axis: found["places"][axis][""] for axis in AXES}
    base = found["baseline"]
    head = ["arm", f"held out at {count_text(ends['tokens'])} tokens"]
    head += [f"gap to `{base}`, tokens", f"gap, {ends['updates']:.0f} updates"]
    drawn, trained = found["prices"]
    head += [f"gap, cost {count_text(ends['cost'])} (1 : {trained / drawn:.2g})"]
    control = controlled(found)
    yield head + [f"gap to `{CONTROL}`, tokens"] * bool(control)
    for name, own in found["recipes"].items():
        line = [f"`{name}`", interval(own["tokens"]["rate"])]
        for axis in AXES:
            gap = found["gaps"][axis].get(name)
            line.append(
                interval([gap[x] for x in ("middle", "low", "high")], signed=True)
                if gap
                else ""
            )
        if control:
            line.append(interval(control[name], signed=True) if name in control else "")
        yield line


def trials(found: Mapping[str, Any]) -> Iterator[list[str]]:
    """Rows of mean rates of each trial of tuning; the one that was taken is bold."""
    tuned = found.get("tuned", {})
    for name, own in tuned.items():
        tried = own["trials"]
        if name == next(iter(tuned)):
            places = [" ".join(map(str, trial["settings"].values())) for trial in tried]
            yield [f"arm, at {' and '.join(tried[0]['settings'])}", *places]
        cells = [number(trial["rate"]) for trial in tried]
        cells[own["taken"]] = f"**{cells[own['taken']]}**"
        yield [f"`{name}`", *cells]


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
            if np.isnan(values).all():  # of methods that an arm does not have
                line.append("")
                continue
            first, then = np.nanmean(values[0]), np.nanmean(values[max(last, 0)])
            line.append(f"{significant(first)} → {significant(then)}")
        yield line


def tables(found: Mapping[str, Any]) -> list[str]:
    """Markdown of what was measured, between the marks of a page."""
    every = (list(rows(found)) for rows in (rates, watched, trials))
    return [markdown(rows[0], rows[1:]) for rows in every if rows]


def renewed(page: str, shown: Iterable[str], begin: str = BEGIN) -> str:
    """A page with other tables between its marks."""
    head, _, rest = page.partition(begin)
    _, _, tail = rest.partition(END)
    return head + "\n\n".join([begin, *shown, END]) + tail


def pages() -> Iterator[tuple[Path, dict[str, Any]]]:
    """Pages that have tables of this kind, each with the results beside it."""
    for page in sorted(HERE.glob("*/README.md")):
        if BEGIN in page.read_text("utf-8"):
            yield page, json.loads((page.parent / "results.json").read_text())


def main() -> None:
    """Write the tables of all that was measured."""
    for page, found in pages():
        write_file(page, renewed(page.read_text("utf-8"), tables(found)).encode())


if __name__ == "__main__":
    main()
