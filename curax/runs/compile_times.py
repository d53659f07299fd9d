"""How long a program of this config took to compile the last time.

    {"4f1c... update": 28.1}

Whoever waits for minutes is told so before. With a warm cache it takes less, and that
is what is said the next time.
"""

import contextlib
import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from curax.settings.cli import write_whole

FILE, MOST = "curax-seconds.json", 500  # entries that are kept
OTHER = ("seed", "steps", "logging")  # fields that programs hardly depend on


class CompileTimes:
    """Seconds by program, of one config."""

    def __init__(self, folder: Path | None, config: Mapping[str, Any]):
        """Nothing is read yet.

        Args:
            folder: of compiled programs; None: nothing is kept.
            config: described, as in `config.json`.
        """
        rest = {name: value for name, value in config.items() if name not in OTHER}
        text = json.dumps(rest, sort_keys=True, default=str).encode()
        self._path = folder and folder / FILE
        self._digest = hashlib.blake2b(text, digest_size=8).hexdigest()

    def last(self, program: str) -> float | None:
        """Seconds the last time, None where there was none."""
        seconds = self._read().get(f"{self._digest} {program}")
        return seconds if isinstance(seconds, int | float) else None

    def note(self, program: str, seconds: float) -> None:
        """Keep it for the next time; where that fails nothing is lost."""
        if self._path is None:
            return
        name = f"{self._digest} {program}"
        rest = [item for item in self._read().items() if item[0] != name]
        known = dict([*rest, (name, round(seconds, 2))][-MOST:])
        with contextlib.suppress(OSError):
            self._path.parent.mkdir(parents=True, exist_ok=True)
            write_whole(self._path, json.dumps(known).encode())

    def _read(self) -> dict[str, Any]:
        try:
            known = json.loads(self._path.read_bytes()) if self._path else {}
        except (OSError, ValueError, RecursionError):
            return {}
        return known if isinstance(known, dict) else {}
