"""HTML report of a comparison: claims, tables and figures in one file."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from curax.compare import analysis, figures
from curax.compare.analysis import AXES, titles
from curax.runs.reading import count_text, plural
from curax.runs.templates import drawn, filled
from curax.settings.cli import write_file
from curax.settings.files import json_value


def write(workdir: Path, shown: figures.Shown) -> Path:
    """Write the pictures and report.html of a comparison; old ones are replaced.

    Args:
        workdir: folder of the comparison.
        shown: results, and the entries behind them.

    Returns:
        Path of the page.
    """
    pictures, files = drawn(figures.PICTURES, shown)
    for name, data in files.items():
        write_file(workdir / f"{name}.png", data)
    found = shown.found
    text = filled(
        "curax.compare/page.html",
        title=found["name"],
        claims=analysis.claims(found),
        without_claims=analysis.without_claims(found),
        asked=sum(len(gaps) for gaps in found["gaps"].values()),
        seeds=found["seeds"],
        plural=plural,
        tiles=list(_tiles(found)),
        axes=[_axis(found, axis) for axis in AXES],
        threshold=analysis.percent_text(found.get("threshold") or 0),
        waits=list(_waits(found)),
        wait_head=["recipe", "runs there", *titles(found["prices"]).values()],
        tuned=list(_tuned(found)),
        arms=list(_arm_rows(found)),
        about=f"curax {found['curax']}, JAX {found['jax']}, {found['device']}",
        **pictures,
    )
    path = workdir / "report.html"
    write_file(path, text)
    return path


def _tiles(found: Mapping[str, Any]) -> Iterator[tuple[str, str, str]]:
    """(name, value, note) of each key number."""
    drawn, trained = found["prices"]
    unit = drawn or trained
    how = "given"
    if found.get("measured"):
        how = f"measured on {found['measured']['device']}"
    arms = found["arms"]
    yield "Recipes", str(len(found["recipes"])), f"against {found['baseline']}"
    yield "Seeds", str(found["seeds"]), f"{plural(len(arms), 'arm')} in all"
    for axis, title in list(AXES.items())[:2]:
        ends = found["places"][axis]
        note = "where recipes are compared"
        if len(ends) > 1:
            note = ", ".join(f"{name}: {count_text(x)}" for name, x in ends.items())
        yield title.capitalize(), count_text(min(ends.values())), note
    ratio = f"{drawn / unit:.3g} : {trained / unit:.3g}"
    yield "Cost, drawn : trained token", ratio, how


def _axis(found: Mapping[str, Any], axis: str) -> dict[str, Any]:
    """Title, sentence, head and rows of the table of an axis, a sentence per recipe."""
    base, gaps = found["baseline"], found["gaps"][axis]
    title = "cost" if axis == "cost" else AXES[axis]
    ends = found["places"][axis]
    unit = titles(found["prices"])[axis].removeprefix("cost, in ")
    where = ", ".join(
        f"{count_text(place)} {unit}" + (f" ({name})" if name else "")
        for name, place in ends.items()
    )
    budget = found["budgets"].get(axis)
    if budget and min(ends.values()) < budget:
        where += f", for not every run came to {count_text(budget)} within its steps"
    others = [other for other in AXES if other != axis]
    head = ["recipe", "pass rate", "mean on the way", f"less {base}", "P(better)"]
    head += [f"{AXES[other].partition(',')[0]} then" for other in others]
    rows = []
    for name, recipe in found["recipes"].items():
        own, gap = recipe[axis], gaps.get(name)
        cells = [_spread(own["rate"]), _spread(own["average"]), "", ""]
        greedy = [_spread(own["greedy"]), "", ""]
        if gap:
            cells[2] = _spread([gap["middle"], gap["low"], gap["high"]], "+")
            cells[3] = _spread(gap["improvement"], digits=2)
            greedy[2] = _spread(gap["greedy"], "+")
        for other in others:
            spent = own["spent"][other].values()
            cells.append(" / ".join(_count(each) for each in spent))
        rows.append([name, *cells])
        rows.append([f"{name}, greedily", *greedy, *[""] * (1 + len(others))])
    return {
        "title": title,
        "where": f"{where}. {_pairing(gaps)}",
        "head": head,
        "rows": rows,
        "sentences": [
            analysis.sentence(name, base, axis, gap) for name, gap in gaps.items()
        ],
    }


def _pairing(gaps: Mapping[str, Any]) -> str:
    """Sentence on which gaps are paired by seed."""
    apart = [name for name, gap in gaps.items() if not gap["paired"]]
    if not gaps:
        return ""
    if not apart:
        return "Gaps are of the same seed, from the same warm start."
    return (
        "Gaps are of the same seed, from the same warm start; but for "
        f"{', '.join(apart)}, whose warm start is another: these are of all seeds "
        "against all."
    )


def _spread(triple: Any, sign: str = "", digits: int = 3) -> str:
    """Text of a number with its interval in brackets."""
    shown = ["-" if x is None else f"{x:{sign}.{digits}f}" for x in triple]
    return f"{shown[0]} [{shown[1]}, {shown[2]}]"


def _count(value: float | None) -> str:
    return "-" if value is None else count_text(round(value))


def _waits(found: Mapping[str, Any]) -> Iterator[list[str]]:
    """Rows of the table of times to the threshold; none without one."""
    if "waits" not in found:
        return
    for condition, recipes in found["waits"]["tokens"].items():
        for name, seen in recipes.items():
            label = f"{name} @ {condition}" if condition else name
            times = (found["waits"][axis][condition][name] for axis in AXES)
            reached = f"{seen['reached']} of {seen['runs']}"
            yield [label, reached, *map(analysis.wait_text, times)]


def _tuned(found: Mapping[str, Any]) -> Iterator[list[str]]:
    """Rows of what tuning took for each recipe; none where nothing was tuned."""
    for name, own in found.get("tuned", {}).items():
        texts = [analysis.settings_text(trial) for trial in own["trials"]]
        rates = [f"{trial['rate']:.3f}" for trial in own["trials"]]
        tried = "; ".join(map(": ".join, zip(texts, rates, strict=True)))
        ends = ", ".join(analysis.ends_taken(own))
        yield [name, texts[own["taken"]], rates[own["taken"]], tried, ends]


def _arm_rows(found: Mapping[str, Any]) -> Iterator[list[str]]:
    """Rows of each arm at its last evaluation, means over seeds."""
    for arm in found["arms"]:
        history = analysis.history_of(found["histories"][arm["name"]])
        last = json_value({n: x[-1].mean() for n, x in history._asdict().items()})
        rates = ["-" if last[n] is None else f"{last[n]:.3f}" for n in analysis.RATES]
        counts = [_count(last[name]) for name in ("drawn", "trained", "updates")]
        yield [arm["name"], *rates, *counts]
