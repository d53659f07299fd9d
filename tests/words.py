"""Word problems, a teacher who is often wrong, and a tokenizer: made on the spot."""

import atexit
import json
import random
import shutil
from functools import cache
from pathlib import Path
from tempfile import mkdtemp

from curax.tasks import text

NAMES = ("Ann", "Ben", "Cleo", "Dan", "Eve")
THINGS = ("apples", "books", "coins", "dice")
WRONG = 0.5  # of the teacher's solutions


def lines(seed=0, count=1100, wrong=WRONG):
    """Records with a question, its answer, a worked solution and a level.

    The teacher's mistake is systematic: he is one off, and the answer field is right.
    """
    kinds = [("buys", "more", "+", 1), ("gives", "away", "-", -1)]
    asked = [
        (name, thing, kind, a, b)
        for name in NAMES
        for thing in THINGS
        for kind in kinds
        for a in range(1, 7)
        for b in range(1, 7)
        if kind[3] > 0 or a >= b
    ]
    made = random.Random(seed)
    for name, thing, (verb, word, sign, factor), a, b in made.sample(asked, count):
        answer = a + factor * b
        said = answer + (made.random() < wrong)
        yield {
            "question": f"{name} has {a} {thing} and {verb} {b} {word}. "
            f"How many {thing} does {name} have now?",
            "answer": str(answer),
            "solution": f"{a} {sign} {b} = {said}\n#### {said}",
            "level": "add" if factor > 0 else "subtract",
        }


def write(path, records):
    """A file of JSON lines."""
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


@cache
def folder():
    """A folder with train.jsonl, test.jsonl and a tokenizer in tokenizer/."""
    there = Path(mkdtemp(prefix="curax-words-"))
    atexit.register(shutil.rmtree, there, ignore_errors=True)
    records = list(lines())
    write(there / "train.jsonl", records[:1000])
    write(there / "test.jsonl", records[1000:])
    spoken = (f"{r['question']}\n{r['solution']}" for r in records)
    text.train(there / "tokenizer", spoken, vocab_size=400)
    return there
