"""The files of `curax demo` without its model, once for each process."""

import atexit
import shutil
from functools import cache
from pathlib import Path
from tempfile import mkdtemp

from curax import demo


@cache
def folder():
    """A folder with train.jsonl, test.jsonl, a config and a tokenizer in tokenizer/."""
    there = Path(mkdtemp(prefix="curax-words-"))
    atexit.register(shutil.rmtree, there, ignore_errors=True)
    demo.write_problems(there)
    return there
