"""What a compiled program moves between devices, read from its text."""

import contextlib
import math
import os
import re
import tempfile
from collections.abc import Iterator
from typing import NamedTuple

COLLECTIVE = re.compile(
    r"= (\(.*?\)|\S+) (all-gather|all-reduce|reduce-scatter|all-to-all|"
    r"collective-permute)(?:-start)?\("
)
ARRAY = re.compile(r"(pred|[a-z]+\d+)\[([\d,]*)\]")
CALLED = re.compile(r"(?:calls|to_apply|body|condition|\w+_computation)=%?([\w.\-]+)")
BRANCHES = re.compile(r"branch_computations=\{([^}]*)\}")


class Collective(NamedTuple):
    """An operation that moves arrays between devices."""

    kind: str
    entries: int  # of the largest array that it makes
    source: str  # the operation it was made for; empty where the text has none


def computations(text: str) -> dict[str, list[str]]:
    """Lines of each computation of an HLO module, by name."""
    result: dict[str, list[str]] = {}
    name = ""
    for line in text.splitlines():
        if head := re.match(r"(?:ENTRY )?%?([\w.\-]+) (?:\(.*)?.*\{$", line):
            name = head[1]
            result[name] = []
        elif name:
            result[name].append(line)
    return result


def called(line: str) -> list[str]:
    """Names of the computations that an instruction calls."""
    names = CALLED.findall(line)
    for branches in BRANCHES.findall(line):
        names += [name.strip().lstrip("%") for name in branches.split(",")]
    return names


def reached(all_: dict[str, list[str]], name: str) -> set[str]:
    """A computation and all that it calls."""
    found, left = set(), [name]
    while left:
        if (now := left.pop()) in all_ and now not in found:
            found.add(now)
            left += [name for line in all_[now] for name in called(line)]
    return found


def collectives(lines: list[str]) -> Iterator[Collective]:
    """Those among the instructions of a computation."""
    for line in lines:
        if match := COLLECTIVE.search(line):
            sizes = [
                math.prod(int(n) for n in shape.split(",") if n)
                for _, shape in ARRAY.findall(match[1])
            ]
            source = re.search(r'op_name="([^"]*)"', line)
            yield Collective(match[2], max(sizes), source[1] if source else "")


def in_loops(text: str) -> list[Collective]:
    """All collectives inside of loops, which therefore run again and again."""
    every = computations(text)
    bodies = {
        body
        for lines in every.values()
        for line in lines
        if " while(" in line
        for body in re.findall(r"body=%?([\w.\-]+)", line)
    }
    inside = set().union(*(reached(every, body) for body in bodies))
    return [one for name in sorted(inside) for one in collectives(every[name])]


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
