"""What the command lines have in common."""

import argparse
import contextlib
import functools
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NoReturn

from curax.settings.config_paths import ConfigError


class Parser(argparse.ArgumentParser):
    """A parser whose errors are one sentence, without the usage before it."""

    def error(self, message: str) -> NoReturn:
        """Say what is wrong."""
        raise ConfigError(f"{message}; {self.prog} --help lists what there is.")

    def add_assignments(self) -> None:
        """The option that changes a config."""
        self.add_argument(
            "--set",
            dest="assignments",
            action="extend",
            nargs="+",
            default=[],
            metavar="NAME=VALUE",
            help="change a field or an option of a function, for example steps=400 "
            "sampling.group_size=16 loss.high=0.3 seeds=8",
        )


class _Quiet:
    """A stream that falls silent as soon as it cannot be written to."""

    def __init__(self, stream: Any):
        self._stream = stream

    def write(self, text: str) -> int:
        """All is taken, whether anybody reads it or not."""
        with self._silenced():
            self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        """As of the stream."""
        with self._silenced():
            self._stream.flush()

    @contextlib.contextmanager
    def _silenced(self) -> Iterator[None]:
        try:
            yield
        except OSError:
            # What is buffered would fail again, at the latest when the process ends.
            with contextlib.suppress(OSError, ValueError):
                nowhere = os.open(os.devnull, os.O_WRONLY)
                os.dup2(nowhere, self._stream.fileno())
                os.close(nowhere)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def survives_closed_output(main: Callable[..., int]) -> Callable[..., int]:
    """A command line that goes on where its output is read no longer.

    Its reader may have ended, as `head` does, or the terminal been closed; what was to
    be done is done all the same.
    """

    @functools.wraps(main)
    def whole(*args: Any, **named: Any) -> int:
        for number in range(3):
            with contextlib.suppress(OSError):
                os.fstat(number)
                continue
            # Closed: the next file to be opened would get what is printed.
            os.open(os.devnull, os.O_RDWR)
        streams = sys.stdout, sys.stderr
        sys.stdout, sys.stderr = (_Quiet(one) if one else None for one in streams)
        try:
            return main(*args, **named)
        finally:
            for quiet in (sys.stdout, sys.stderr):
                if isinstance(quiet, _Quiet):
                    quiet.flush()
            sys.stdout, sys.stderr = streams

    return whole


def write_whole(path: Path, data: bytes) -> None:
    """Write a file, or leave the one that is there as it is."""
    partial = path.with_name(path.name + ".tmp")
    try:
        partial.write_bytes(data)
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)
