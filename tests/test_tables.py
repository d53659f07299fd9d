"""Tables as text: what stands in a cell, and where."""

from curax.settings import tables

ROWS = [{"name": "a", "x": 0.25, "y": [1, 2]}, {"name": "longer", "x": 10, "y": [3]}]


def test_columns_are_as_wide_as_their_cells_and_numbers_stand_at_the_right():
    columns = {"": "{name}", "x": "{x:.1f}", "first y": "{y[0]}"}
    assert tables.table(columns, ROWS) == [
        "           x  first y",
        "a        0.2        1",
        "longer  10.0        3",
    ]
    assert tables.table(columns, ROWS, left=(0, 2), least=(8,), gap=1) == [
        "            x first y",
        "a         0.2 1",
        "longer   10.0 3",
    ]
    assert tables.table(columns, []) == ["  x  first y"]


def test_what_is_not_known_is_a_dash_and_what_a_row_lacks_is_empty():
    columns = {"p": "{p:.2f}", "gap": "{low:.1f} to {high:.1f}", "n": "{n}"}
    rows = [
        {"p": "mean", "n": 3},
        {"p": float("nan"), "low": None, "high": 2, "n": None},
    ]
    assert tables.table(columns, rows) == [
        "p          gap  n",
        "mean            3",
        "-     - to 2.0  -",
    ]


def test_a_table_in_markdown_may_be_padded():
    rows = [("a", "10"), ("bcd", "2")]
    plain = "| x | y |\n| --- | --- |\n| a | 10 |\n| bcd | 2 |"
    assert tables.markdown(("x", "y"), rows) == plain
    padded = "| x   | y  |\n| --- | -- |\n| a   | 10 |\n| bcd | 2  |"
    assert tables.markdown(("x", "y"), rows, padded=True) == padded
    assert tables.markdown(("x", "y"), []) == "| x | y |\n| --- | --- |"
