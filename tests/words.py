"""The files of `curax demo` without its model, once for each process."""

import atexit
import shutil
from functools import cache
from pathlib import Path
from tempfile import mkdtemp

import numpy as np

from curax.commands import demo
from curax.tasks import text


@cache
def folder():
    """A folder with train.jsonl, test.jsonl, a config and a tokenizer in tokenizer/."""
    there = Path(mkdtemp(prefix="curax-words-"))
    atexit.register(shutil.rmtree, there, ignore_errors=True)
    demo.write_problems(there)
    return there


@cache
def tokenizer():
    return text.load(folder() / "tokenizer")


def asked(prompts):
    """The texts of prompts, control tokens included."""
    rows = zip(np.asarray(prompts.tokens), np.asarray(prompts.mask), strict=True)
    return [tokenizer().decode(tokens[mask], control=True) for tokens, mask in rows]


def files(there=None):
    """Options of a task: the problems of a folder, the tokenizer, one process."""
    there = there or folder()
    return {
        "train": str(there / "train.jsonl"),
        "held_out": str(there / "test.jsonl"),
        "tokenizer": str(folder() / "tokenizer"),
        "workers": 1,
    }
