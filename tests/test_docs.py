"""What the documents say of the code and the tests is there."""

import re
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


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page):
    for link in re.findall(r"\]\(([^)#]+)\)", page.read_text()):
        assert "://" in link or (page.parent / link).exists(), link
