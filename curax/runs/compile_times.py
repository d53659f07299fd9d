"""Seconds that the programs of a config took to compile in the last run.

    {"4f1c... update": 28.1}

The display shows them while a program compiles. With a warm compilation cache the times
are shorter, and so is what the next run shows.
"""

import contextlib
import hashlib
import json
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from curax.runs.reading import duration_text
from curax.settings import files
from curax.settings.cli import write_whole

FILE, MOST = "curax-seconds.json", 500  # file beside the cache; entries kept in it
PROGRAMS = {
    "warm": "the supervised update",
    "evaluation": "the held-out sampler",
    "step": "the sampler and the update",
}
OTHER = ("seed", "steps", "logging")  # fields that programs hardly depend on


class CompileTimes:
    """Seconds of compilation by program, for one config."""

    def __init__(self, folder: Path | None, config: Mapping[str, Any]):
        """Set folder and config; no file is read.

        Args:
            folder: folder of the compilation cache; None: no times are kept.
            config: the config as JSON values, as in `config.json`.
        """
        rest = {name: value for name, value in config.items() if name not in OTHER}
        text = json.dumps(rest, sort_keys=True, default=str).encode()
        self._path = folder and folder / FILE
        self._digest = hashlib.blake2b(text, digest_size=8).hexdigest()
        self._called: set[str] = set()  # programs that this process has run

    def last(self, program: str) -> float | None:
        """Seconds of a program in the last run; None if unknown."""
        known = files.known(self._path) if self._path else {}
        seconds = known.get(f"{self._digest} {program}")
        return seconds if isinstance(seconds, int | float) else None

    def note(self, program: str) -> str:
        """Text for the display: what compiles now, and its last time; else empty."""
        if program in self._called:
            return ""
        last = self.last(program)
        took = f" (took {duration_text(last)} the last time)" if last else ""
        return f"compiling {PROGRAMS[program]}{took}"

    @contextlib.contextmanager
    def timed(self, program: str) -> Iterator[None]:
        """Store the seconds of a program's first call, which compiles it."""
        start = time.monotonic()
        yield
        if program not in self._called:
            self._called.add(program)
            self.store(program, time.monotonic() - start)

    def store(self, program: str, seconds: float) -> None:
        """Store the seconds of a program; a file that cannot be written is ignored."""
        if self._path is None:
            return
        name = f"{self._digest} {program}"
        known = files.known(self._path).items()
        rest = [item for item in known if item[0] != name]
        known = dict([*rest, (name, round(seconds, 2))][-MOST:])
        with contextlib.suppress(OSError):
            self._path.parent.mkdir(parents=True, exist_ok=True)
            write_whole(self._path, json.dumps(known).encode())
