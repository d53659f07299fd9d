"""The notebooks run from top to bottom, and are kept without what they printed."""

import json
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[1] / "docs" / "notebooks"
NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs(path):
    cells = json.loads(path.read_text())["cells"]
    code = [one for one in cells if one["cell_type"] == "code"]
    assert not any(one["outputs"] for one in code)
    names = {"__name__": "notebook"}
    for number, one in enumerate(code):
        exec(compile("".join(one["source"]), f"{path.name}:{number}", "exec"), names)


def test_there_are_two():
    assert len(NOTEBOOKS) == 2
