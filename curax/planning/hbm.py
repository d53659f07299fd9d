"""Bytes that a compiled program reads and writes, and its operations, from its text.

An instruction reads its operands and writes what it makes, each as often as the
computation runs that holds it, as in `hlo.traffic`. Of an array of which it takes
slices alone these count, and where it puts a slice into an array, the slice: such an
array is changed in place. What lies in a memory of the chip itself, as VMEM, is neither
read nor written, and a loop only passes its arrays on. Inside a kernel (a custom call)
operands and results count once: what it skips or reads again the text does not say,
nor its operations, of which those of matrix products outside kernels are counted.
"""

import math
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np

from curax.planning import hlo

LINE = re.compile(r"\s*(ROOT )?%?([\w.\-]+) = (.*)")
OPCODE = re.compile(r" ([a-z][a-z0-9\-]*)\(")
ARRAY = re.compile(r"(pred|[a-z]+\d+\w*)\[([\d,]*)\](\{[^}]*\})?")
RESERVED = re.compile(r"\(color=0\)\nTotal bytes: (\d+)")  # color 0: of the device
ELSEWHERE = re.compile(r"S\([1-9]\d*\)")  # of a layout: not the memory of the device
KERNEL = 'custom_call_target="tpu_custom_call"'  # of Pallas
RUN = ("while", "conditional", "call")  # others, and pass arrays on
SLICES = ("dynamic-slice", "slice", "gather")
PUTS = ("dynamic-update-slice", "scatter")
FREE = (
    *("parameter", "constant", "tuple", "get-tuple-element", "bitcast", "after-all"),
    *("partition-id", "replica-id", "opt-barrier", "domain", "infeed", "outfeed"),
)


class Instruction(NamedTuple):
    """An instruction of an HLO computation."""

    name: str
    opcode: str
    type: str  # of what it makes
    operands: tuple[str, ...]
    text: str  # the whole line
    root: bool


class Access(NamedTuple):
    """What one instruction moves, each time that it runs."""

    read: float  # bytes
    written: float  # bytes
    array: str  # the largest of it, such as `bf16[64,128]`
    source: str  # file, line and operation, as far as the text has them
    kernel: bool = False  # which may skip some of it
    flops: float = 0.0  # of matrix products

    @property
    def moved(self) -> float:
        """Bytes read and written."""
        return self.read + self.written


class Moved(NamedTuple):
    """Bytes that are moved in a call, or in a turn of the loop that ends by data."""

    read: float = 0.0
    written: float = 0.0
    worst: tuple[tuple[float, str, str], ...] = ()  # (bytes, array, source)
    kernels: float = 0.0  # bytes read by kernels, at most
    flops: float = 0.0  # of matrix products outside kernels


def read(found: list[tuple[float, Access]]) -> float:
    """Bytes that are read by all of some accesses."""
    return sum(n * one.read for n, one in found)


def written(found: list[tuple[float, Access]]) -> float:
    """Bytes that are written by all of some accesses."""
    return sum(n * one.written for n, one in found)


def moved(found: list[tuple[float, Access]], number: int = 5) -> Moved:
    """Sums of some accesses, and the arrays that move most, each by its line."""
    sums: dict[tuple[str, str], float] = {}
    for n, one in found:
        key = one.array, one.source
        sums[key] = sums.get(key, 0.0) + n * one.moved
    order = sorted(sums.items(), key=lambda pair: -pair[1])
    most = tuple((n, *key) for key, n in order[:number] if n)
    kernels = [(n, one) for n, one in found if one.kernel]
    flops = sum(n * one.flops for n, one in found)
    return Moved(read(found), written(found), most, read(kernels), flops)


def reserved(folder: Path) -> int:
    """Bytes of a device that a program takes, as its compiler wrote into a folder.

    Arguments, outputs, and temporaries with the holes between them: what the compiler
    of TPUs holds against their memory before it refuses a program. 0: it wrote nothing.
    """
    written = (path.read_text() for path in folder.glob("*memory-usage-report.txt"))
    found = (RESERVED.search(text) for text in written)
    return max((int(one[1]) for one in found if one), default=0)


def of(text: str) -> hlo.Counted:
    """Accesses of a compiled module, those of one device, per call and per turn."""
    module = _Module(text)
    return hlo.counted(text, module.accesses, lambda one: one.moved, fused=False)


class _Module:
    """A parsed HLO module."""

    def __init__(self, text: str):
        self._lines = hlo.computations(text)
        self._parsed: dict[str, dict[str, Instruction]] = {}
        self._source = _sources(text)

    def instructions(self, name: str) -> dict[str, Instruction]:
        """Instructions of a computation by name."""
        if name not in self._parsed:
            found = map(_instruction, self._lines.get(name, []))
            self._parsed[name] = {one.name: one for one in found if one}
        return self._parsed[name]

    def accesses(self, name: str, lines: list[str]) -> Iterator[Access]:
        """Yield what the instructions of a computation move, without what they call."""
        every = self.instructions(name)
        for one in every.values():
            if one.opcode not in RUN:
                flops = self._flops(one, every)
                access = self._access(one, every)._replace(flops=flops)
                if access.moved or flops:
                    yield access

    def _flops(self, one: Instruction, every: dict[str, Instruction]) -> float:
        """Operations of the products of an instruction, those of a fusion its own."""
        inner = [self.instructions(name) for name in hlo.called(one.text)]
        own = (self._flops(x, found) for found in inner for x in found.values())
        return products(one, every) + sum(own)

    def _access(self, one: Instruction, every: dict[str, Instruction]) -> Access:
        """What an instruction itself reads and writes."""
        kernel = KERNEL in one.text
        names = one.operands
        if kernel:  # which may have several views of an array
            names = {_viewed(name, every): name for name in names}.values()
        types = [every[name].type if name in every else "" for name in names]
        if one.opcode in FREE or one.opcode.endswith("-done"):
            return Access(0.0, 0.0, "", "")
        if one.opcode == "fusion":
            reads, made = self._fusion(_calls(one), types, one.type)
        elif one.opcode in SLICES:
            taken = min(size(types[0]), entire(one.type))
            reads, made = [taken, *map(size, types[1:])], size(one.type)
        elif one.opcode in PUTS:
            reads = [0.0, *map(size, types[1:])]
            put = types[-1] if one.opcode == "scatter" else types[1]
            made = min(size(one.type), entire(put))
        elif one.opcode == "copy-start":  # (what it makes, what it reads, a mark)
            reads, made = list(map(size, types)), size(_leaves(one.type)[0])
        elif one.opcode == "slice-start":  # ((what it reads), what it makes, a mark)
            whole, made = size(types[0]), size(_leaves(one.type)[1])
            reads = [min(whole, entire(_leaves(one.type)[1]))]
        elif one.opcode.endswith("-start") and one.opcode != "all-reduce-start":
            # (what it reads, what it makes, marks)
            own = sum(len(_leaves(type_)) for type_ in types)
            reads, made = (
                list(map(size, types)),
                sum(map(size, _leaves(one.type)[own:])),
            )
        else:
            reads, made = list(map(size, types)), size(one.type)
        pairs = [*zip(reads, types, strict=False), (made, one.type)]
        largest = max(pairs, key=lambda pair: pair[0])[1]
        array = max(_leaves(largest), key=size, default="")
        name = ARRAY.match(array)
        shape = f"{name[1]}[{name[2]}]" if name else ""
        return Access(sum(reads), made, shape, self._source(one.text), kernel)

    def _seen(self, name: str, place: int, whole: float) -> Iterator[float]:
        """Yield bytes that each user of a parameter of a fusion reads of it."""
        every = self.instructions(name)
        names = self._same(name, place)
        for user in every.values():
            for at, operand in enumerate(user.operands):
                if operand not in names or user.name in names:
                    continue
                if user.opcode == "fusion":
                    yield from self._seen(_calls(user), at, whole)
                elif user.opcode in SLICES and at == 0:
                    yield entire(user.type)
                elif user.opcode in PUTS and at == 0:
                    yield 0.0
                else:
                    yield whole

    def _same(self, name: str, place: int) -> set[str]:
        """Names of a parameter of a fusion, and of what is it under another shape."""
        found: set[str] = set()
        for one in self.instructions(name).values():  # what is used stands in front
            if one.opcode == "parameter":
                same = f"parameter({place})" in one.text
            elif one.opcode == "bitcast":
                same = one.operands[0] in found
            else:  # a fusion that is one of its operands
                same = one.opcode == "fusion" and any(
                    operand in found and self._is_operand(_calls(one), at)
                    for at, operand in enumerate(one.operands)
                )
            if same:
                found.add(one.name)
        return found

    def _is_operand(self, name: str, place: int) -> bool:
        """Whether a fusion makes nothing but an operand, under another shape."""
        same, every = self._same(name, place), self.instructions(name)
        return any(one.root and one.name in same for one in every.values())

    def _fusion(
        self, name: str, types: list[str], made: str
    ) -> tuple[list[float], float]:
        """Bytes that a fusion reads of each operand, and bytes that it writes."""
        every = self.instructions(name)
        reads = [
            min(there, sum(self._seen(name, place, there)))
            for place, there in enumerate(map(size, types))
        ]
        root = next((one for one in every.values() if one.root), None)
        outs = [root] if root else []
        if root and root.opcode == "tuple":
            outs = [every[name] for name in root.operands if name in every]
        total = 0.0
        for out, whole in zip(outs, _leaves(made), strict=False):
            put = _through(out, every)
            whole = size(whole)
            if put.opcode in PUTS:
                operand = put.operands[-1 if put.opcode == "scatter" else 1]
                whole = min(whole, entire(every[operand].type))
            total += whole
        return reads, total


def products(one: Instruction, every: dict[str, Instruction]) -> float:
    """Operations of a matrix product: 2 for each pair of entries that it multiplies.

        dot            2 (entries of the result) (size of the summed axes)
        convolution    2 (batch) (features out) (features in, of a group) (places)

    Places are those at which a window of the second array meets entries of the first,
    and no padding: a TPU has products as convolutions, axes of a batch as padded ones.
    0 of any other instruction.
    """
    if one.opcode not in ("dot", "convolution"):
        return 0.0
    types = *(every[name].type for name in one.operands[:2]), one.type
    sizes = [[int(n) for n in ARRAY.findall(of)[0][1].split(",") if n] for of in types]
    if one.opcode == "dot":
        (summed,) = re.findall(r"lhs_contracting_dims=\{([\d,]*)\}", one.text)
        inner = math.prod(sizes[0][int(axis)] for axis in summed.split(",") if axis)
        return 2.0 * math.prod(sizes[2]) * inner
    (labels,) = re.findall(r"dim_labels=(\w+)_(\w+)->(\w+)", one.text)
    left, right, out = (
        dict(zip(names, own, strict=True))
        for names, own in zip(labels, sizes, strict=True)
    )
    window = dict(re.findall(r"(\w+)=([\dx_-]+)", one.text.partition("window={")[2]))
    total = 2.0 * out["b"] * out["f"] * right["i"]
    for axis in filter(str.isdigit, out):

        def of(name: str, default: str = "1", axis: str = axis) -> int:
            own = window[name].split("x")[int(axis)] if name in window else default
            return int(own.partition("_")[0])

        starts = np.arange(out[axis])[:, None] * of("stride") - of("pad", "0")
        at = starts + np.arange(right[axis]) * of("rhs_dilate")
        place, between = np.divmod(at, of("lhs_dilate"))
        total *= np.sum((place >= 0) & (place < left[axis]) & (between == 0))
    return float(total)


def _viewed(name: str, every: dict[str, Instruction]) -> str:
    """Name of the array that an operand is, maybe under another shape."""
    while name in every and every[name].opcode == "bitcast":
        name = every[name].operands[0]
    return name


def _calls(fusion: Instruction) -> str:
    """Name of the computation that a fusion is."""
    (name,) = re.findall(r"calls=%?([\w.\-]+)", fusion.text)
    return name


def _through(one: Instruction, every: dict[str, Instruction]) -> Instruction:
    """What an output of a fusion is, seen through changes of its shape alone."""
    while one.opcode in ("bitcast", "copy") and one.operands[0] in every:
        one = every[one.operands[0]]
    return one


def _instruction(line: str) -> Instruction | None:
    """An instruction from its line; None: it is none."""
    if not (found := LINE.match(line)):
        return None
    root, name, rest = found.groups()
    if not (opcode := OPCODE.search(rest)):
        return None
    start, depth, end = opcode.end(), 1, opcode.end()
    while depth and end < len(rest):
        depth += {"(": 1, ")": -1}.get(rest[end], 0)
        end += 1
    operands = tuple(re.findall(r"%([\w.\-]+)", rest[start : end - 1]))
    return Instruction(
        name=name,
        opcode=opcode[1],
        type=rest[: opcode.start()],
        operands=operands,
        text=line,
        root=bool(root),
    )


def _leaves(of_type: str) -> list[str]:
    """The arrays of a type as text: one, or those of a tuple."""
    return [found[0] for found in ARRAY.finditer(of_type)]


def size(of_type: str) -> float:
    """Bytes of the arrays of a type that lie in the memory of the device."""
    return sum(entire(one) for one in _leaves(of_type) if not ELSEWHERE.search(one))


def entire(of_type: str) -> float:
    """Bytes of the arrays of a type, wherever they lie."""
    return sum(
        hlo.entries(dims) * hlo.bytes_of(kind)
        for kind, dims, _ in ARRAY.findall(of_type)
    )


def _sources(text: str) -> Callable[[str], str]:
    """A function from a line of a module to the file, line and operation it is of."""
    tables = {
        name: dict(re.findall(r"^(\d+) (.*)$", body, re.MULTILINE))
        for name, body in re.findall(
            r"^(FileNames|FileLocations|StackFrames)\n((?:\d+ .*\n)*)",
            text,
            re.MULTILINE,
        )
    }

    def place_of(line: str) -> str:
        if found := re.search(r'source_file="([^"]*)" source_line=(\d+)', line):
            return f"{_short(found[1])}:{found[2]}"
        if found := re.search(r"stack_frame_id=(\d+)", line):
            frame = tables.get("StackFrames", {}).get(found[1], "")
            place = re.search(r"file_location_id=(\d+)", frame)
            where = tables.get("FileLocations", {}).get(place[1] if place else "", "")
            numbers = re.search(r"file_name_id=(\d+) .*?\bline=(\d+)", where)
            if numbers:
                name = tables.get("FileNames", {}).get(numbers[1], "").strip('"')
                return f"{_short(name)}:{numbers[2]}"
        return ""

    def of_line(line: str) -> str:
        name = re.search(r'op_name="([^"]*)"', line)
        words = [place_of(line), *([_end(name[1])] if name else [])]
        return " ".join(filter(None, words))

    return of_line


def _end(name: str) -> str:
    """The last two parts of the name of an operation."""
    return "/".join(name.split("/")[-2:])


def _short(path: str) -> str:
    """A path from the package on, as `curax/rollout.py`."""
    parts = path.split("/")
    if "curax" in parts[:-1]:
        place = len(parts) - 1 - parts[::-1].index("curax")
        return "/".join(parts[place:])
    return "/".join(parts[-2:])
