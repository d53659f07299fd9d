"""Commands under a pseudo-terminal, and what a person would then see."""

import fcntl
import os
import pty
import re
import struct
import subprocess
import termios
from collections.abc import Sequence
from pathlib import Path

SEQUENCE = re.compile(r"\x1b\[[0-9;?]*[a-zA-Z]")


def run(command: Sequence[str], cwd: Path, columns: int, **env: str) -> tuple[int, str]:
    """Exit status of a command whose output is a terminal, and what it printed.

    Args:
        command: words of the command.
        cwd: folder it runs in.
        columns: width of the terminal.
        **env: variables set besides those of this process.
    """
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 40, columns, 0, 0))
    process = subprocess.Popen(
        command,
        cwd=cwd,
        env=os.environ | {"TERM": "xterm-256color"} | env,
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
    )
    os.close(theirs)
    told = b""
    while True:
        try:
            part = os.read(ours, 1 << 16)
        except OSError:  # the other end is closed
            break
        if not part:
            break
        told += part
    os.close(ours)
    return process.wait(), told.decode(errors="replace")


def lines(told: str) -> list[str]:
    """What stands on the lines of a terminal, without what redraws them."""
    return SEQUENCE.sub("", told).replace("\r", "\n").splitlines()
