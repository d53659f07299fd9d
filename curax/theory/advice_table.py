"""Advice as text for a terminal: what is told apart, the sizes, what is assumed."""

import textwrap
from collections.abc import Mapping
from typing import Any

from curax.settings import tables

COLUMNS = {
    "at the end": "{apart}",
    "one step": "{gain_low:.2f}-{gain_high:.2f}",
    **{size: f"{{{size}}}" for size in ("prompts", "n", "most", "m", "pilots")},
    "draws": "{draws:.0f}",
    "trained": "{trained:.0f}",
    "recipe": "{recipe}",
}
GROUPS = ("above", "the baseline", "not told apart", "below", "not followed")
PLAIN = "asks for p"  # a remark that says nothing


def table(found: Mapping[str, Any]) -> str:
    """Lines on what is told apart from the baseline; sizes; beliefs.

    The best size of each recipe is a row, in groups, by name in each: nothing is said
    of the order within one.

    Args:
        found: of `advice.rank`.
    """
    a, b = found["cost"]
    visits = found["visits"]
    often = "visits by steps" if visits is None else f"{visits} visits to each"
    best: dict[str, dict[str, Any]] = {}
    for row in found["rows"]:
        best.setdefault(row["recipe"], row | {"pilots": row["pilots"] or None})
    base = next(row for row in best.values() if row["baseline"])
    groups = {
        told: sorted(name for name, row in best.items() if row["told"] == told)
        for told in GROUPS
    }
    lines = [
        f"Prompts: {found['population']}; {found['prompts']} to train on, {often}.",
        f"A step costs as much as {found['budget']} completions drawn and trained, at "
        f"{a:g} : {b:g} per token.",
        "",
        f"Where a run of {found['steps']} steps is predicted to end, held out, beside "
        f"{base['recipe']} with n = {base['n']}:",
    ]
    for told in ("above", "below"):
        names = f"  {told}: {', '.join(groups[told]) or 'none'}"
        lines += textwrap.wrap(names, 88, subsequent_indent="    ")
    lines.append(f"  not told apart: {len(groups['not told apart'])} others")
    lines += textwrap.wrap(
        "Measured of right completions alone (right_only) beside RLOO, at equal tokens "
        f"drawn and nearest to these pass rates: {found['measured']} "
        "(docs/choose_a_recipe.md says how).",
        88,
    )
    rows = [
        best[name] | {"apart": _apart(best[name])}
        for x in groups.values()
        for name in x
    ]
    head, *cells = tables.table(COLUMNS, rows, left=(len(COLUMNS) - 1,))
    lines += ["", head]
    group = ""
    for line, row in zip(cells, rows, strict=True):
        lines += [f"{row['told']}:"] * (row["told"] != group)
        group = row["told"]
        own = "" if row["remark"] == PLAIN else row["remark"]
        remark = f"{own}{_alike(found, row)}".strip()
        lines += [line, *[f"{'':14}{remark}"] * bool(remark)]
    return "\n".join([*lines, "", *_assumed(found, base["recipe"])])


def _apart(row: Mapping[str, Any]) -> str | None:
    """The interval of the gap at the end, with its error."""
    if row["baseline"] or row["beside"] is None:
        return None
    return f"{row['beside_low']:+.2f}..{row['beside_high']:+.2f}"


def _assumed(found: Mapping[str, Any], base: str) -> list[str]:
    """Lines on what the columns are, beliefs, and what is left out."""
    shared, share = (
        "by pass rate" if found["by_rate"] else f"{found[name]:g}"
        for name in ("shared", "explained")
    )
    solved = ", ".join(f"{share:.0%}" for share in found["solved"])
    fixed, drawn = found["errors"]
    said = (
        f"At the end: less where {base} ends, the least and the most over a tenth to "
        f"ten times --shared {shared} and --explained {share}, and over steps of a "
        f"length at which {base} solves {solved} of what is unsolved; widened by the "
        f"worst error that was seen (experiments/map), {fixed:g}, or {drawn:g} where "
        "a rule or pilots decide draws, or n = 1. Only the baseline is compared.",
        "One step: predicted progress per cost, over the baseline's, over the same "
        f"beliefs. Each row is at the size at which that is most. {found['caveat']}",
        f"Right completions vary {found['varied']:g} times as much as wrong ones "
        "(--varied; 0 where but one is right). What batches filled by drawing again "
        "need is not followed. docs/choose_a_recipe.md has the formulas.",
    )
    lines = [line for text in said for line in textwrap.wrap(text, 88)]
    notes = [f"Note: {text}" for text in found["notes"]]
    return [*lines, *notes, *(f"Left out: {text}" for text in found["skipped"])]


def _alike(found: Mapping[str, Any], row: Mapping[str, Any]) -> str:
    """Names of recipes with the same credit, in brackets."""
    others = ", ".join(found["alike"].get(row["recipe"], ()))
    return f" (also: {others})" if others else ""
