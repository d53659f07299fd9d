"""Mutants differ from curax in one place, and are Python."""

import ast
import json
from pathlib import Path

import mutants
import pytest

MODULE = mutants.ROOT / "curax" / "advantage.py"


def test_a_mutant_differs_in_one_place_and_is_python():
    text = MODULE.read_text()
    found = list(mutants.mutants(MODULE))
    assert {row["mutation"] for row in found} >= {"constant moved", "sign flipped"}
    for row in found:
        assert mutants.text_of(row) != text
        ast.parse(mutants.text_of(row))


def test_each_kind_of_line_has_its_mutation(tmp_path, monkeypatch):
    path = tmp_path / "curax" / "some.py"
    path.parent.mkdir()
    path.write_text("def f(é, b):\n    g(b)\n    return -b if é < 2 else b + é\n")
    monkeypatch.setattr(mutants, "ROOT", tmp_path)
    got = {(row["line"], row["was"], row["is"]) for row in mutants.mutants(path)}
    assert got == {
        (2, "g(b)", "pass"),
        (3, "é < 2", "(é <= 2)"),
        (3, "2", "(3)"),
        (3, "-b", "(b)"),
        (3, "b + é", "(b - é)"),
    }


def test_mutants_are_a_function_of_the_seed_and_of_covered_lines_alone():
    name = str(MODULE.relative_to(mutants.ROOT))
    lines = {row["line"] for row in mutants.mutants(MODULE)}
    some = set(sorted(lines)[:10])
    drawn = [mutants.chosen(5, seed, {name: some}) for seed in (0, 0, 1)]
    assert drawn[0] == drawn[1] != drawn[2]
    assert {row["line"] for rows in drawn for row in rows} <= some


def test_a_mutant_that_lives_again_is_told(tmp_path, capsys):
    row = {"file": "a.py", "mutation": "sign flipped", "was": "-b", "is": "(b)"}
    before, after = tmp_path / "before", tmp_path / "after"
    before.write_text(json.dumps([{**row, "killed_by": "test_a"}]))
    after.write_text(json.dumps([{**row, "killed_by": None}]))
    assert mutants.compare(before, after) == 1
    assert "a.py: sign flipped, '-b' to '(b)': lives" in capsys.readouterr().out
    assert mutants.compare(before, before) == 0


@pytest.mark.long
def test_a_file_of_tests_that_fails_kills(tmp_path):
    path = Path(tmp_path / "test_it.py")
    path.write_text("def test_it():\n    assert False\n")
    assert mutants.pytest(tmp_path, path.name) == 1
    path.write_text("import time\n\n\ndef test_it():\n    time.sleep(60)\n")
    assert mutants.pytest(tmp_path, path.name, most=0.1) is None
