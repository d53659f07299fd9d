"""Advice as text for a terminal: the best size of each recipe, then what is assumed."""

import textwrap
from collections.abc import Mapping
from typing import Any

from curax.settings import tables

COLUMNS = {
    "gain": "{gain:.2f}x",
    "range": "{gain_low:.2f}-{gain_high:.2f}",
    "at the end": "{apart}",
    **{size: f"{{{size}}}" for size in ("prompts", "n", "most", "m", "pilots")},
    "draws": "{draws:.0f}",
    "trained": "{trained:.0f}",
    "recipe": "{recipe}",
}


def table(found: Mapping[str, Any]) -> str:
    """Lines of gain, sizes, draws and rows trained by recipe, at its best size.

    Args:
        found: of `advice.rank`.
    """
    a, b = found["cost"]
    visits = found["visits"]
    often = "visits by steps" if visits is None else f"{visits} visits to each"
    lines = [
        f"Prompts: {found['population']}; {found['prompts']} to train on, {often}.",
        f"A step costs as much as {found['budget']} completions drawn and trained, at "
        f"{a:g} : {b:g} per token.",
        "",
    ]
    best: dict[str, Mapping[str, Any]] = {}
    for row in found["rows"]:
        apart = None
        if row.get("beside") is not None:
            apart = f"{row['beside_low']:+.2f}..{row['beside_high']:+.2f}"
        shown = row | {"pilots": row["pilots"] or None, "apart": apart}
        best.setdefault(row["recipe"], shown)
    head, *rows = tables.table(COLUMNS, best.values(), left=(len(COLUMNS) - 1,))
    lines.append(head)
    for line, (name, row) in zip(rows, best.items(), strict=True):
        lines += [line, f"{'':17}{row['remark']}{_alike(found, name)}"]
    shared, share = (
        "by pass rate" if found["by_rate"] else f"{found[name]:g}"
        for name in ("shared", "explained")
    )
    base = next(row for row in found["rows"] if row["baseline"])
    lines += [
        "",
        f"Gain: progress in pass rate per cost, over that of {base['recipe']} with n = "
        f"{base['n']}, the best with",
        "equal groups; every recipe at its best size. That step makes "
        f"{base['progress']:.1%} of the progress that",
        "the exact gradient would. Range: over a tenth to ten times these beliefs: "
        f"--shared {shared},",
        "the cosine of the gradients of two prompts, and --explained "
        f"{share}, the share of a",
        "score that lies along the outcome. Right completions vary "
        f"{found['varied']:g} times as much as wrong",
        "ones (--varied; 0 where but one is right). One update of plain gradient "
        "ascent at its best",
        "step size; docs/choose_a_recipe.md has the formula.",
    ]
    lines += textwrap.wrap(_told(found, list(best.values()), base["recipe"]), 88)
    lines += textwrap.wrap(found["caveat"], 88)
    lines += [f"Note: {text}" for text in found["notes"]]
    lines += [f"Left out: {text}" for text in found["skipped"]]
    return "\n".join(lines)


def _told(found: Mapping[str, Any], best: list[Mapping[str, Any]], base: str) -> str:
    """Text on where runs end: recipes that are told apart from the baseline."""
    followed = [row for row in best if row["beside"] is not None]
    above = [row["recipe"] for row in followed if row["beside_low"] > 0]
    below = [row["recipe"] for row in followed if row["beside_high"] < 0]
    solved = ", ".join(f"{share:.0%}" for share in found["solved"])
    return (
        f"At the end: where a run of {found['steps']} steps ends, held out, less where "
        f"{base} does: the least and the most over the same beliefs, and over steps "
        f"of a length at which {base} solves {solved} of what is unsolved, or as much "
        "of it as it gets, for nobody knows which. Intervals share their beliefs and "
        "lengths, so two that overlap may still be in one order throughout; only "
        f"{base} is compared. Above it at all that were tried: "
        f"{', '.join(above) or 'none'}; below it: {', '.join(below) or 'none'}. The "
        "error of the course itself is not in the interval, and on the map was up to "
        ".25. What fills batches by drawing again is not followed."
    )


def _alike(found: Mapping[str, Any], name: str) -> str:
    """Names of recipes with the same credit, in brackets."""
    others = ", ".join(found["alike"].get(name, ()))
    return f" (also: {others})" if others else ""
