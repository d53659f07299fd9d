"""What the command lines have in common."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.mark.parametrize("name", ["train", "evaluate", "export", "xray"])
def test_help_comes_at_once(name):
    """Nothing heavy is imported before the input is read."""
    code = (
        f"import atexit, sys; from curax import {name}; sys.argv[1:] = ['--help']; "
        "heavy = {'jax', 'matplotlib', 'optax'}; "
        "atexit.register(lambda: print(heavy & {*sys.modules})); "
        f"{name}.main()"
    )
    shown = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=True,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    )
    assert shown.stdout.startswith(f"usage: python -m curax.{name} ")
    assert shown.stdout.endswith("\nset()\n")
