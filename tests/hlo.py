"""What the compiler says of a program, and all that a program moves between devices."""

import contextlib
import os
import tempfile
from collections.abc import Iterator

from curax.planning.hlo import Collective, collectives, computations


def everywhere(text: str) -> list[Collective]:
    """All collectives of a program."""
    return [one for lines in computations(text).values() for one in collectives(lines)]


@contextlib.contextmanager
def compiler_log() -> Iterator[list[str]]:
    """Lines that the compiler, which is no Python, writes to the standard error."""
    lines: list[str] = []
    kept = os.dup(2)
    with tempfile.TemporaryFile() as file:
        os.dup2(file.fileno(), 2)
        try:
            yield lines
        finally:
            os.dup2(kept, 2)
            os.close(kept)
            file.seek(0)
            lines += file.read().decode(errors="replace").splitlines()
