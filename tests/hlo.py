"""What the compiler says of a program, and all that a program moves between devices."""

import contextlib
import os
import tempfile
from collections.abc import Iterator
from typing import Any

from jax.extend.core import jaxprs_in_params

from curax.planning.hlo import Collective, collectives, computations


def everywhere(text: str) -> list[Collective]:
    """All collectives of a program."""
    return [one for lines in computations(text).values() for one in collectives(lines)]


def equations(jaxpr: Any) -> Iterator[Any]:
    """Every equation of a jaxpr and of those inside it."""
    for equation in jaxpr.eqns:
        yield equation
        for inner in jaxprs_in_params(equation.params):
            yield from equations(inner)


def sizes(jaxpr: Any) -> Iterator[int]:
    """Entries of every array in a jaxpr and in those inside it."""
    for equation in equations(jaxpr):
        for variable in (*equation.invars, *equation.outvars):
            yield variable.aval.size


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
