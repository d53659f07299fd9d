"""The prompt format that a checkpoint was trained on, as a file in its folder.

A policy answers prompts of another format worse. So an exported folder holds the format
of its training, and training or evaluating with another one gives a warning. Only the
standard library is imported.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

FILE = "curax.json"
NAMES = ("template", "system", "chat", "thinking")
LARGEST = 2**20  # bytes; a longer file is ignored


def write(folder: Path, form: Mapping[str, Any]) -> None:
    """Write the format into the folder of a checkpoint.

    Args:
        folder: an existing folder.
        form: `Task.prompt_form`.
    """
    page = {"prompt": {name: form[name] for name in NAMES}}
    (folder / FILE).write_text(json.dumps(page, indent=2) + "\n")


def read(folder: Path) -> Mapping[str, Any] | None:
    """The format in the folder of a checkpoint; None where it holds none."""
    path = folder / FILE
    try:
        if not path.is_file() or path.stat().st_size > LARGEST:
            return None
        form = json.loads(path.read_text())["prompt"]
        return {name: form[name] for name in NAMES}
    except (OSError, ValueError, LookupError, TypeError, RecursionError):
        return None


def mismatch(path: str | Path | None, form: Mapping[str, Any] | None) -> str | None:
    """The difference between prompts and those of a checkpoint, in a sentence, or None.

    Args:
        path: folder of the checkpoint; None: there is none.
        form: `Task.prompt_form`; None: prompts are not text.
    """
    known = None if path is None else read(Path(path))
    if known is None or form is None:
        return None
    other = [name for name in NAMES if known[name] != form[name]]
    if not other:
        return None
    now = ", ".join(f"{name}={form[name]!r}" for name in other)
    then = ", ".join(f"{name}={known[name]!r}" for name in other)
    return (
        f"prompts have {now}, and {path} was trained on prompts with {then}, as its "
        f"{FILE} says: it knows how to answer those; set task to the same."
    )
