"""The notebooks run from top to bottom, and are kept with what they print and draw."""

import re
import runpy
from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).resolve().parents[1]
RUN = runpy.run_path(str(ROOT / "docs" / "run_notebooks.py"))
NUMBER = re.compile(r"-?\d*\.\d+|-?\d+\.")


def told(outputs):
    """The texts of a cell without their numbers; the numbers; how many pictures."""
    text = "".join("".join(one["text"]) for one in outputs if "text" in one)
    pictures = sum("image/png" in one.get("data", ()) for one in outputs)
    numbers = np.array([float(one) for one in NUMBER.findall(text)])
    return " ".join(NUMBER.sub("", text).split()), numbers, pictures


@pytest.mark.long
@pytest.mark.parametrize("path", RUN["NOTEBOOKS"], ids=lambda path: path.stem)
def test_a_notebook_prints_and_draws_what_is_stored(path):
    """Numbers may be rounded another way elsewhere."""
    stored = RUN["code"](RUN["load"](path))
    pictures = 0
    for number, (cell, made) in enumerate(
        zip(stored, RUN["outputs"](path), strict=True), start=1
    ):
        assert cell["execution_count"] == number
        text, numbers, drawn = told(made)
        kept, close, there = told(cell["outputs"])
        assert (text, drawn) == (kept, there), number
        np.testing.assert_allclose(numbers, close, rtol=2e-3, atol=0.011)
        pictures += drawn
    assert pictures > 0
    assert path.stat().st_size < 100_000


def test_there_are_three():
    assert len(RUN["NOTEBOOKS"]) == 3


def test_a_notebook_installs_from_a_clone_that_holds_it():
    for path in RUN["NOTEBOOKS"]:
        source = "".join(RUN["code"](RUN["load"](path))[0]["source"])
        (where,) = re.findall(r'^SOURCE = "(.+)\[pictures\]"$', source, re.MULTILINE)
        assert (path.parent / where).resolve() == ROOT
