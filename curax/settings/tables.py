"""Tables as lines of text: aligned for a terminal, or in Markdown.

Only the standard library is imported.
"""

import string
from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import zip_longest
from typing import Any


class _Cell(string.Formatter):
    """Formats with a dash for None and NaN, and with texts as they are."""

    def format_field(self, value: Any, format_spec: str) -> str:
        if value is None or value != value:
            return "-"
        return value if isinstance(value, str) else format(value, format_spec)


def table(
    columns: Mapping[str, str], rows: Iterable[Mapping[str, Any]], **layout: Any
) -> list[str]:
    """Lines of a table with a head.

    Args:
        columns: head of each column, and the format of its cells by names of `rows`; a
            cell is empty where its row lacks a name.
        rows: values by name.
        layout: options of `aligned`.
    """

    def cell(form: str, row: Mapping[str, Any]) -> str:
        try:
            return _Cell().vformat(form, (), row)
        except KeyError:
            return ""

    cells = ([cell(form, row) for form in columns.values()] for row in rows)
    return aligned([list(columns), *cells], **layout)


def aligned(
    rows: Iterable[Sequence[str]],
    *,
    left: Collection[int] = (0,),
    least: Sequence[int] = (),
    gap: int = 2,
) -> list[str]:
    """Lines of cells, each column as wide as its widest cell.

    Args:
        rows: cells, equally many in each row.
        left: columns whose cells stand at the left; those of others stand at the right.
        least: least widths of the first columns, in characters.
        gap: spaces between columns.
    """
    rows = list(rows)
    own = (max(map(len, column)) for column in zip(*rows, strict=True))
    widths = [max(pair) for pair in zip_longest(own, least, fillvalue=0)]
    return [
        (" " * gap)
        .join(
            cell.ljust(width) if i in left else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        .rstrip()
        for row in rows
    ]


def markdown(
    head: Sequence[str], rows: Iterable[Sequence[str]], *, padded: bool = False
) -> str:
    """A table in Markdown; if padded, its columns are as wide as their cells."""
    lines, widths = [head, *rows], [0] * len(head)
    if padded:
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    lines.insert(1, ["-" * (width or 3) for width in widths])
    return "\n".join(
        f"| {' | '.join(map(str.ljust, cells, widths))} |" for cells in lines
    )
