"""Communication between devices in a compiled program, read from its HLO text.

The text is that of an HLO module after partitioning: shapes are those of one device.
An operation is counted as often as the computation runs that holds it: bodies of loops
by the number in their condition, of branches the one that moves most. A loop without
such a number ends by data: the decoding loop, or its stages, of which the one that
moves most in a turn counts. Where others hold it and it runs several times, as the
micro-batches of each mini-batch, a turn is still one of it.
"""

import math
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

KINDS = (
    "all-gather",
    "all-reduce",
    "reduce-scatter",
    "all-to-all",
    "collective-permute",
)
COLLECTIVE = re.compile(rf"= (\(.*?\)|\S+) ({'|'.join(KINDS)})(-start)?\(([^)]*)\)")
ARRAY = re.compile(r"(pred|[a-z]+\d+\w*)\[([\d,]*)\]")
CALLED = re.compile(r"(?:calls|to_apply|body|condition|\w+_computation)=%?([\w.\-]+)")
BRANCHES = re.compile(r"branch_computations=\{([^}]*)\}")
HEAD = re.compile(r"(?:ENTRY )?%?([\w.\-]+) (?:\(.*)?.*\{$")
IN_TURN = re.compile(r"replica_groups=\[(\d+),(\d+)\]")  # groups, devices of each
# Sizes of the axes of a mesh, and those along which a group lies, some in part.
ALONG = re.compile(r"replica_groups=mesh\[([^\]]*)\](?:, device_ids=\S*)? ?\{([^}]*)\}")
LISTED = re.compile(r"replica_groups=\{\{([\d,]*)\}")


class Collective(NamedTuple):
    """A collective operation, which moves arrays between devices."""

    kind: str
    entries: int  # of the largest array that it makes
    source: str  # the operation it was made for; empty where the text has none
    received: float  # bytes that a device receives by it


def computations(text: str) -> dict[str, list[str]]:
    """Lines of each computation of an HLO module, by name."""
    result: dict[str, list[str]] = {}
    name = ""
    for line in text.splitlines():
        if head := HEAD.match(line):
            name = head[1]
            result[name] = []
        elif name:
            result[name].append(line)
    return result


def entry(text: str) -> str:
    """Name of the entry computation of a module."""
    found = re.search(r"^ENTRY %?([\w.\-]+) ", text, re.MULTILINE)
    assert found
    return found[1]


def called(line: str) -> list[str]:
    """Names of the computations that an instruction calls."""
    names = CALLED.findall(line)
    for branches in BRANCHES.findall(line):
        names += [name.strip().lstrip("%") for name in branches.split(",")]
    return names


def reached(all_: dict[str, list[str]], name: str) -> set[str]:
    """Names of a computation and of all computations that it calls."""
    found, left = set(), [name]
    while left:
        if (now := left.pop()) in all_ and now not in found:
            found.add(now)
            left += [name for line in all_[now] for name in called(line)]
    return found


def collectives(lines: list[str], *, scatters: bool = False) -> Iterator[Collective]:
    """Yield the collective operations among the instructions of a computation.

    Args:
        lines: of the computation.
        scatters: each device keeps a part of a sum only, as in the computations that
            TPUs call `all-reduce-scatter`.
    """
    for line in lines:
        if match := COLLECTIVE.search(line):
            kind = match[2]
            if scatters and kind == "all-reduce":
                kind = "reduce-scatter"
            found = [(entries(dims), of) for of, dims in ARRAY.findall(match[1])]
            # One that is begun: what it reads, what it makes, marks.
            if match[3] and kind != "all-reduce":
                number = match[4].count("%")
                found = found[number : 2 * number]
            whole = float(sum(n * bytes_of(of) for n, of in found))
            devices = group_size(line)
            if kind == "reduce-scatter" and not scatters:
                whole *= devices  # the text has what is left of it
            source = re.search(r'op_name="([^"]*)"', line)
            yield Collective(
                kind,
                max((n for n, _ in found), default=0),
                source[1] if source else "",
                received(kind, whole, devices),
            )


def received(kind: str, whole: float, devices: int) -> float:
    """Bytes each of n devices receives in a ring, for an array of `whole` bytes.

    gather, scatter, all to all   (n - 1) / n of it
    all-reduce                    twice as much
    permute                       all of it
    """
    if kind == "collective-permute":
        return whole
    share = (devices - 1) / devices
    return (2 if kind == "all-reduce" else 1) * share * whole


def group_size(line: str) -> int:
    """Number of devices in one group of a collective; 2 where the text names none."""
    if found := IN_TURN.search(line):
        return int(found[2])
    if found := ALONG.search(line):
        sizes = dict(re.findall(r"'([^']*)'=(\d+)", found[1]))
        axes = re.findall(r"'([^']*)'(?::\(\d+\)(\d+))?", found[2])
        return math.prod(int(part or sizes[axis]) for axis, part in axes)
    if found := LISTED.search(line):
        return found[1].count(",") + 1
    return 2


def entries(dims: str) -> int:
    """Number of entries of an array, from its dimensions as text."""
    return math.prod(int(n) for n in dims.split(",") if n)


def bytes_of(dtype: str) -> float:
    """Bytes per entry of a dtype, such as `bf16`."""
    bits = re.search(r"\d+", dtype)
    return max(int(bits[0]) / 8, 0.5) if bits else 1.0


def in_loops(text: str) -> list[Collective]:
    """Collectives inside loops, which run at every iteration."""
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


@dataclass
class Moved:
    """Bytes that a device receives and number of collectives, by kind of collective."""

    received: dict[str, float] = field(default_factory=dict)
    count: dict[str, float] = field(default_factory=dict)

    @classmethod
    def of(cls, found: "list[tuple[float, Collective]]") -> "Moved":
        """All of some collectives, each so many times."""
        result = cls()
        for times, one in found:
            for sums, value in ((result.received, one.received), (result.count, 1.0)):
                sums[one.kind] = sums.get(one.kind, 0.0) + times * value
        return result

    @property
    def total(self) -> float:
        """Bytes of all kinds."""
        return sum(self.received.values())


@dataclass
class Traffic:
    """Communication of a program: per call, and per turn of its data-dependent loop."""

    call: Moved = field(default_factory=Moved)
    turn: Moved = field(default_factory=Moved)  # loops whose end depends on data


def traffic(text: str) -> Traffic:
    """Communication of a compiled module, as bytes received per device."""

    def found(name: str, lines: list[str]) -> Iterator[Collective]:
        return collectives(lines, scatters="all-reduce-scatter" in name)

    done = counted(text, found, lambda one: one.received)
    return Traffic(call=Moved.of(done.call), turn=Moved.of(done.turn))


@dataclass
class Counted:
    """What a program does, and how often: (times, what), per call and per turn.

    A turn is one of the loop that ends by data.
    """

    call: list[tuple[float, Any]] = field(default_factory=list)
    turn: list[tuple[float, Any]] = field(default_factory=list)
    loops: float = 1.0  # how often that loop runs: `turn` is one turn of each


def counted(
    text: str,
    found: Callable[[str, list[str]], Iterable[Any]],
    size: Callable[[Any], float],
    *,
    fused: bool = True,
) -> Counted:
    """What the computations of a compiled module do, as often as it runs them.

    Args:
        text: of the module.
        found: `(name, lines) -> things`, what a computation does itself.
        size: of a thing; of branches, and of loops that end by data one after the
            other, the largest counts.
        fused: whether what instructions call counts too, as fusions and reducers; else
            calls, branches and loops alone.
    """
    every = computations(text)
    known: dict[str, Counted] = {}

    def whole(things: list[tuple[float, Any]]) -> float:
        return sum(n * size(one) for n, one in things)

    def of(name: str) -> Counted:
        if name not in known:
            known[name] = Counted()  # against a cycle, which HLO does not have
            known[name] = read(name)
        return known[name]

    def read(name: str) -> Counted:
        lines = every.get(name, [])
        result = Counted(call=[(1.0, one) for one in found(name, lines)])
        stages = [Counted()]  # of open loops: a turn is one of them
        for line in lines:
            if " while(" in line:
                stages.append(loop(line))
            elif " conditional(" in line:
                branches = [of(branch) for branch in called(line)]
                most = max(branches, key=lambda b: whole(b.call + b.turn), default=None)
                stages.append(most or Counted())
            elif fused or " call(" in line:
                stages += map(of, called(line))
        result.call += [thing for one in stages for thing in one.call]
        most = max(stages, key=lambda one: whole(one.turn) / one.loops)
        result.turn, result.loops = most.turn, most.loops
        return result

    def loop(line: str) -> Counted:
        (body,) = re.findall(r"body=%?([\w.\-]+)", line)
        inside, times = of(body), turns(every, line)
        if times is None:
            return Counted(turn=inside.call + inside.turn)
        return Counted(
            call=[(times * n, one) for n, one in inside.call],
            turn=[(times * n, one) for n, one in inside.turn],
            loops=max(times, 1) * inside.loops,
        )

    done = of(entry(text))
    turn = [(n / done.loops, one) for n, one in done.turn]
    return Counted(call=done.call, turn=turn)


def turns(every: dict[str, list[str]], line: str) -> int | None:
    """Trip count of a loop; None where its end depends on data."""
    if known := re.search(r'known_trip_count":?\{"n":"(\d+)"', line):
        return int(known[1])
    (condition,) = re.findall(r"condition=%?([\w.\-]+)", line)
    names = reached(every, condition)
    lines = [one for name in names for one in every[name]]
    if not any("direction=L" in one for one in lines):
        return None
    numbers = re.findall(r"= [su]\d+\[\]\S* constant\((\d+)\)", "\n".join(lines))
    return int(numbers[0]) if len(numbers) == 1 else None
