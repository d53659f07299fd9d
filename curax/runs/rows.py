"""Append-only files of JSON rows, a line each: whole or not at all.

What is opened again is cut off behind its last whole row.
"""

import contextlib
import json
import math
import os
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from curax.runs import reading
from curax.settings import files
from curax.settings.cli import still_there
from curax.settings.errors import WorkError


class NotWrittenError(WorkError, OSError):
    """A file of the run folder could not be written; the message says which and why."""


class RemovedError(NotWrittenError):
    """A file was removed, renamed or replaced while the run wrote to it."""

    def __init__(self, path: Path):
        """Name the file, or its folder where the whole folder is gone."""
        gone = path if path.parent.is_dir() else path.parent
        super().__init__(f"{gone} was removed or renamed while the run wrote to it")


@contextlib.contextmanager
def write_errors(path: Path) -> Iterator[None]:
    """Turn an OSError while writing `path` into a `NotWrittenError`."""
    try:
        yield
    except OSError as error:
        why = error.strerror or type(error).__name__
        raise NotWrittenError(f"{path} cannot be written ({why})") from error


def check_there(path: Path, was: os.stat_result) -> None:
    """Check that the file at a path is still the one that it was.

    Raises:
        RemovedError: it was removed, renamed or replaced.
    """
    if not still_there(path, was):
        raise RemovedError(path)


class Appended:
    """A file that rows are appended to."""

    def __init__(self, path: Path, end: int):
        """Open for appending; bytes behind `end` are cut off.

        Raises:
            NotWrittenError: no permission.
        """
        self._path = path
        with write_errors(path):
            self._file = path.open("ab", buffering=0)
            self._file.truncate(end)

    def write(self, rows: Iterable[dict[str, Any]]) -> None:
        """Append rows, all of them or none.

        Raises:
            NotWrittenError: disk full or no permission; no row is written.
        """
        self.check()
        lines = (json.dumps(files.json_value(row)) + "\n" for row in rows)
        text = "".join(lines).encode()
        with write_errors(self._path):
            end = self._file.seek(0, os.SEEK_END)
            try:
                while text:
                    text = text[self._file.write(text) :]
            except OSError:
                self._file.truncate(end)
                raise

    def check(self) -> None:
        """Check that the open file is still the one at its path.

        Raises:
            RemovedError: it was removed, renamed or replaced.
        """
        check_there(self._path, os.fstat(self._file.fileno()))

    def sync(self) -> None:
        """Flush all rows to the disk (fsync).

        Raises:
            NotWrittenError: the disk has no room for them, as some say only now.
        """
        with write_errors(self._path):
            os.fsync(self._file.fileno())

    def close(self) -> None:
        """Close the file.

        Raises:
            NotWrittenError: its last rows could not be written.
        """
        with write_errors(self._path):
            self._file.close()


def whole_rows(
    path: Path,
    *,
    upto: float,
    error: Callable[[Any], str | None] = lambda _: None,
    first: int | None = None,
) -> int:
    """Byte offset at which the last whole row up to step `upto` ends.

    Args:
        path: file of rows with non-decreasing `step`.
        upto: step of the checkpoint.
        error: `row -> message` for an invalid row, None for a valid one.
        first: step of the first row where every later step has exactly one row;
            None where steps may repeat or be left out.

    Raises:
        DamagedError: rows up to the checkpoint are damaged or missing.
    """
    end, once, before = 0, first is not None, -1 if first is None else first - 1
    for line in reading.read_lines(path, error, once=once, start=before, upto=upto):
        if not line.ended:
            break
        if once and line.row["step"] > before + 1:
            raise reading.DamagedError(
                f"{path}:{line.number}: step {line.row['step']} behind step {before}; "
                "bring back the lines between them."
            )
        before, end = line.row["step"], line.end
    if once and before < upto < math.inf:
        raise reading.DamagedError(
            f"{path}: no line of step {before + 1}, and there is a checkpoint of step "
            f"{upto}; bring back the lines up to that step."
        )
    return end
