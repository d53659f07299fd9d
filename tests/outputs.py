"""What comes of a call: what a command prints, an error says, a folder holds."""

import contextlib
import io
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]


def ran(
    *words: object, cwd: Any = ROOT, timeout: Any = None, **env: str
) -> tuple[int, str, str]:
    """Exit status, stdout and stderr of Python with these words, in a process."""
    done = subprocess.run(
        [sys.executable, *map(str, words)],
        env=os.environ | {"PYTHONPATH": str(ROOT)} | env,
        cwd=cwd,
        timeout=timeout,
        capture_output=True,
        text=True,
    )
    return done.returncode, done.stdout, done.stderr


def printed(command: Callable[..., int], *argv: object) -> tuple[int, str, str]:
    """Exit status, stdout and stderr of a command in this process."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        status = command([str(word) for word in argv])
    return status, out.getvalue(), err.getvalue()


def refusal(command: Callable[..., int], *argv: object) -> str:
    """The one sentence that a command prints where it refuses what is typed."""
    status, out, err = printed(command, *argv)
    assert (status, out, err.count("\n")) == (2, "", 1), out + err
    return err


def message(kind: Any, call: Callable, /, *args: Any, **options: Any) -> str:
    """The message of the error, of a kind or of several, that a call raises."""
    with pytest.raises(kind) as caught:
        call(*args, **options)
    return str(caught.value)


def snapshot(folder: Path) -> dict[Path, tuple[int, bytes]]:
    """Names, times and bytes of all that is in a folder."""
    return {
        path: (path.stat().st_mtime_ns, path.read_bytes() if path.is_file() else b"")
        for path in folder.rglob("*")
    }
