"""How prompts look that a checkpoint was trained on, kept in its folder.

A policy answers prompts of another form worse, whatever it has learnt: so an exported
folder says which form its policy knows, and whoever asks it differently is told. Only
the standard library is imported.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

FILE = "curax.json"
NAMES = ("template", "system", "chat", "thinking")
LARGEST = 2**20  # bytes; anything longer is not ours


def write(folder: Path, form: Mapping[str, Any]) -> None:
    """Write the form into the folder of a checkpoint.

    Args:
        folder: that exists.
        form: `Task.prompt_form`.
    """
    page = {"prompt": {name: form[name] for name in NAMES}}
    (folder / FILE).write_text(json.dumps(page, indent=2) + "\n")


def read(folder: Path) -> Mapping[str, Any] | None:
    """The form in the folder of a checkpoint; None where it says nothing of it."""
    path = folder / FILE
    try:
        if not path.is_file() or path.stat().st_size > LARGEST:
            return None
        form = json.loads(path.read_text())["prompt"]
        return {name: form[name] for name in NAMES}
    except (OSError, ValueError, LookupError, TypeError, RecursionError):
        return None


def departure(path: str | Path | None, form: Mapping[str, Any] | None) -> str | None:
    """In a sentence how prompts depart from those a checkpoint knows; None: in nothing.

    Args:
        path: folder of the checkpoint; None: there is none.
        form: `Task.prompt_form`; None: prompts are made of no text.
    """
    known = None if path is None else read(Path(path).expanduser())
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
