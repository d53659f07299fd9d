"""HTML report of a comparison: claims, tables and figures in one file."""

import html
import importlib.resources
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from curax.comparison import analysis, figures
from curax.comparison.analysis import AXES
from curax.runs import page
from curax.runs.page import table_row, tile
from curax.runs.pictures import png
from curax.runs.record import count_text, plural
from curax.settings.cli import write_file


def write(workdir: Path, shown: figures.Shown) -> Path:
    """Write the pictures and report.html of a comparison; old ones are replaced.

    Args:
        workdir: folder of the comparison.
        shown: results, and the entries behind them.

    Returns:
        Path of the page.
    """
    drawn, files = page.drawn(
        figures.PICTURES, lambda picture, style: png(picture, shown, style)
    )
    for name, data in files.items():
        write_file(workdir / f"{name}.png", data)
    found = shown.found
    parts = {
        "style": page.style(),
        "title": html.escape(found["name"]),
        "lead": "\n".join(_lead(found)),
        "tiles": "\n".join(_tiles(found)),
        "figures": "\n".join(drawn),
        "tables": "\n".join(_axis_section(found, axis) for axis in AXES),
        "waits": "\n".join(_times_table(found)),
        "arms": "\n".join(_arm_rows(found)),
        "footer": html.escape(
            f"curax {found['curax']}, JAX {found['jax']}, {found['device']}"
        ),
    }
    file = importlib.resources.files("curax.comparison") / "page.html.tmpl"
    text = file.read_text("utf-8")
    text = re.sub(r"\{\{(\w+)\}\}", lambda name: parts[name[1]], text)
    path = workdir / "report.html"
    write_file(path, text.encode("utf-8", "replace"))
    return path


def _lead(found: Mapping[str, Any]) -> Iterator[str]:
    """Yield HTML paragraphs: the claims, and the number of comparisons behind them."""
    claims = analysis.claims(found)
    asked = sum(len(gaps) for gaps in found["gaps"].values())
    first = "No difference that the intervals show."
    if not asked:
        first = "One recipe, and nothing to compare it with."
    if claims:
        first = f"{plural(len(claims), 'difference')} that the intervals show."
    yield f'<p class="lead">{first}</p>'
    for claim in claims:
        yield f'<p class="claim">{html.escape(claim)}</p>'
    if asked:
        yield (
            f"<p>In brackets: intervals over {plural(found['seeds'], 'seed')}, widened "
            f"(Holm) so that among all {plural(asked, 'comparison')} of this page the "
            "chance of any claim about a gap that is none is held to 5%.</p>"
        )


def _tiles(found: Mapping[str, Any]) -> Iterator[str]:
    """HTML of the tiles with the key numbers."""
    drawn, trained = found["prices"]
    unit = drawn or trained
    how = "given"
    if found.get("measured"):
        how = f"measured on {found['measured']['device']}"
    arms = found["arms"]
    yield tile("Recipes", str(len(found["recipes"])), f"against {found['baseline']}")
    yield tile("Seeds", str(found["seeds"]), f"{plural(len(arms), 'arm')} in all")
    for axis, title in list(AXES.items())[:2]:
        ends = found["places"][axis]
        note = "where recipes are compared"
        if len(ends) > 1:
            note = ", ".join(f"{name}: {count_text(x)}" for name, x in ends.items())
        yield tile(title.capitalize(), count_text(min(ends.values())), note)
    ratio = f"{drawn / unit:.3g} : {trained / unit:.3g}"
    yield tile("Cost, drawn : trained token", ratio, how)


def _axis_section(found: Mapping[str, Any], axis: str) -> str:
    """HTML of the table of an axis, and a sentence per recipe."""
    base, gaps = found["baseline"], found["gaps"][axis]
    title = "cost" if axis == "cost" else AXES[axis]
    ends = found["places"][axis]
    where = ", ".join(
        f"{count_text(place)} {'' if axis == 'cost' else title}"
        + (f" ({name})" if name else "")
        for name, place in ends.items()
    )
    if axis == "cost":
        where += "in drawn tokens"
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
        if gap:
            cells[2] = _spread([gap["middle"], gap["low"], gap["high"]], "+")
            cells[3] = _spread(gap["improvement"], digits=2)
        for other in others:
            spent = own["spent"][other].values()
            cells.append(" / ".join(_count(each) for each in spent))
        rows.append(table_row(name, cells))
    names, body = "".join(f"<th>{html.escape(n)}</th>" for n in head), "\n".join(rows)
    sentences = "".join(
        f"<li>{html.escape(analysis.sentence(name, base, axis, gap))}</li>"
        for name, gap in gaps.items()
    )
    return (
        f"<h2>At equal {title}</h2>\n<p>{html.escape(where)}. {_pairing(gaps)}</p>\n"
        f'<section class="panel wide"><table class="values"><thead><tr>{names}</tr>'
        f"</thead><tbody>\n{body}\n</tbody></table></section>\n"
        f"<ul>{sentences}</ul>"
    )


def _pairing(gaps: Mapping[str, Any]) -> str:
    """Sentence on which gaps are paired by seed."""
    apart = [name for name, gap in gaps.items() if not gap["paired"]]
    if not gaps:
        return ""
    if not apart:
        return "Gaps are of the same seed, from the same warm start."
    names = html.escape(", ".join(apart))
    return (
        f"Gaps are of the same seed, from the same warm start; but for {names}, whose "
        "warm start is another: these are of all seeds against all."
    )


def _spread(triple: Any, sign: str = "", digits: int = 3) -> str:
    """Text of a number with its interval in brackets."""
    shown = ["-" if x is None else f"{x:{sign}.{digits}f}" for x in triple]
    return f"{shown[0]} [{shown[1]}, {shown[2]}]"


def _count(value: float | None) -> str:
    return "-" if value is None else count_text(round(value))


def _times_table(found: Mapping[str, Any]) -> Iterator[str]:
    """HTML of the table of times to the threshold; nothing without one."""
    if "waits" not in found:
        return
    yield f"<h2>Until {found['threshold']:.0%} are solved</h2>"
    yield (
        "<p>Median over runs at their first evaluation at or above, by Kaplan and "
        "Meier; runs that ended before count as waiting until then. A dash: not "
        "reached.</p>"
    )
    names = "".join(f"<th>{html.escape(title)}</th>" for title in AXES.values())
    yield '<section class="panel wide"><table class="values"><thead><tr>'
    yield f"<th>recipe</th><th>runs there</th>{names}</tr></thead><tbody>"
    for condition, recipes in found["waits"]["tokens"].items():
        for name, seen in recipes.items():
            label = f"{name} @ {condition}" if condition else name
            cells = [f"{seen['reached']} of {seen['runs']}"]
            cells += [
                analysis.wait_text(found["waits"][axis][condition][name])
                for axis in AXES
            ]
            yield table_row(label, cells)
    yield "</tbody></table></section>"


def _arm_rows(found: Mapping[str, Any]) -> Iterator[str]:
    """HTML rows: each arm at its last evaluation, means over seeds."""
    for arm in found["arms"]:
        history = found["histories"][arm["name"]]
        last = {
            name: sum(history[name][-1]) / found["seeds"]
            for name in ("rate", "drawn", "trained", "updates")
        }
        cells = [f"{last['rate']:.3f}", *(_count(last[n]) for n in list(last)[1:])]
        yield table_row(arm["name"], cells)
