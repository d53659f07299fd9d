"""What the documents say of the code and the tests is there."""

import ast
import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGES = [*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), ROOT / "benchmarks/README.md"]


def test_every_test_that_the_table_of_faults_names_exists():
    rows = (ROOT / "docs" / "faults.md").read_text().splitlines()
    shown = [row.split("|")[3] for row in rows if row.startswith("| ") and "`" in row]
    assert len(shown) > 12
    for cell in shown:
        files = re.findall(r"test_\w+\.py", cell)
        text = "".join((ROOT / "tests" / name).read_text() for name in files)
        assert files
        for name in re.findall(r"\btest_\w+(?!\.py)\b", cell):
            assert name + ".py" in files or f"def {name}(" in text, name


def test_every_test_that_the_table_of_laws_names_exists_and_names_its_law():
    text = (ROOT / "docs" / "laws.md").read_text()
    rows = [row.split("|") for row in text.splitlines() if "::" in row]
    assert len(rows) > 40
    for _, law, _, tests, _ in rows:
        number = law.split(",")[0].strip()
        shown = re.findall(r"`tests/(test_\w+\.py)::(test_\w+)`", tests)
        assert len(shown) == tests.count("::") == len(set(shown))
        for file, name in shown:
            said = " ".join((docstrings(file)[name] or "").split())
            called = rf"\b{re.escape(number)}(?!\w| of DynaMO| \()"
            assert re.search(called, said), (number, file, name)


@cache
def docstrings(file):
    """What the functions of a test module say, by name."""
    tree = ast.parse((ROOT / "tests" / file).read_text())
    functions = [node for node in tree.body if isinstance(node, ast.FunctionDef)]
    return {node.name: ast.get_docstring(node) for node in functions}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page):
    for link in re.findall(r"\]\(([^)#]+)\)", page.read_text()):
        assert "://" in link or (page.parent / link).exists(), link
