"""Types of config fields: ranges of numbers, checks of values, text for messages.

Only the standard library is imported.
"""

import dataclasses
import functools
import math
import operator
import types
import typing
from collections.abc import Callable, Iterator, Sequence
from typing import Annotated, Any, NamedTuple, TypeVar

Function = Callable[..., Any]
T = TypeVar("T")
_FUNCTION: Any = typing.get_origin(Function)
_SEQUENCES = (tuple, list, Sequence)
_WORDS: dict[Any, tuple[str, Any]] = {
    int: ("an integer", 1),
    float: ("a number", 0.1),
    bool: ("true or false", True),
    str: ("text", "word"),
    tuple: ("a tuple", (1.0, 1.0)),
    Sequence: ("a tuple", (1.0, 1.0)),
    dict: ("values by name", {"name": 1.0}),
    type(None): ("none", None),
    _FUNCTION: ("a function", None),
}


class ConfigError(ValueError):
    """Wrong input. The message is one sentence: name, value, rule, nearest fix."""


class Range(NamedTuple):
    """A range of numbers from `low`, included if `closed`, to `high`, included."""

    low: float
    high: float = math.inf
    closed: bool = True

    def holds(self, value: float) -> bool:
        """Whether `value` is in the range; NaN is in none."""
        above = self.low <= value if self.closed else self.low < value
        return above and value <= self.high

    def nearest(self, value: float) -> float:
        """The value in range to suggest for one outside: the bound next to it.

        Above an open lower bound it is `low` + 1.
        """
        lowest = self.low if self.closed else min(self.low + 1, self.high)
        return self.high if value > self.high else lowest

    def __str__(self) -> str:
        text = f"at least {self.low}" if self.closed else f"greater than {self.low}"
        return text if self.high == math.inf else f"{text} and at most {self.high}"


class _OrRest(Range):
    """A range that includes -1."""

    def holds(self, value: float) -> bool:
        return value == -1 or super().holds(value)

    def __str__(self) -> str:
        return f"{super().__str__()}, or -1 for all that is left"


Count = Annotated[int, Range(1)]
Devices = Annotated[int, _OrRest(1)]
Natural = Annotated[int, Range(0)]
Seed = Annotated[int, Range(0, 2**32 - 1)]
Magnitude = Annotated[float, Range(0.0)]
Positive = Annotated[float, Range(0.0, closed=False)]
AboveOne = Annotated[float, Range(1.0, closed=False)]
Share = Annotated[float, Range(0.0, 1.0, closed=False)]
Fraction = Annotated[float, Range(0.0, 1.0)]


class HubName(NamedTuple):
    """Mark of text that is a local path, or a name on the hub."""

    kind: str  # of the repository: model or dataset


CheckpointPath = Annotated[str, HubName("model")]
DataPath = Annotated[str, HubName("dataset")]


def metadata(kind: Any) -> Iterator[Any]:
    """Yield the `Annotated` metadata of an annotation, or of a union's members."""
    union = typing.get_origin(kind) in (typing.Union, types.UnionType)
    for member in typing.get_args(kind) if union else (kind,):
        yield from getattr(member, "__metadata__", ())


def out_of_range(value: Any, kind: Any) -> Range | None:
    """The range of an annotation that a number violates; None: arrays, other values."""
    for bounds in metadata(kind):
        is_number = isinstance(bounds, Range) and type(value) in (int, float)
        if is_number and not bounds.holds(value):
            return bounds
    return None


def present(value: T | None) -> T:
    """An optional value that the caller knows to be set; asserts that it is."""
    assert value is not None
    return value


def is_array(value: Any) -> bool:
    """Whether a value has the shape and dtype of an array, traced or not."""
    return hasattr(value, "shape") and hasattr(value, "dtype")


def is_below(value: Any, count: int) -> bool:
    """Whether a value is an integer in [0, count), of Python or of an array."""
    try:
        return 0 <= operator.index(value) < count and not isinstance(value, bool)
    except TypeError:  # no integer, whatever it is equal to
        return False


@functools.cache
def field_types(cls: type) -> dict[str, Any]:
    """Annotations of a dataclass by field, strings resolved; empty if unreadable."""
    try:
        return typing.get_type_hints(cls, include_extras=True)
    except Exception:  # an annotation may be unreadable
        return {}


def alternatives(kind: Any) -> list[Any]:
    """Members of a union annotation, without metadata."""
    parts = typing.get_args(kind)
    if typing.get_origin(kind) is Annotated:
        return alternatives(parts[0])
    if typing.get_origin(kind) in (typing.Union, types.UnionType):
        members = [member for part in parts for member in alternatives(part)]
        # A union of array-likes names bool too, but no magnitude is one.
        return [m for m in members if not (m is bool and float in members)]
    return [kind]


def origins(kind: Any) -> list[Any]:
    """Members of a union annotation, without metadata and without parameters."""
    return [typing.get_origin(member) or member for member in alternatives(kind)]


def has_functions(kind: Any) -> bool:
    """Whether an annotation names functions."""
    return _FUNCTION in origins(kind)


def groups_in(kind: Any) -> list[Any]:
    """The dataclasses that an annotation names."""
    return [member for member in alternatives(kind) if dataclasses.is_dataclass(member)]


def item_kinds(kind: Any, length: int) -> list[Any]:
    """Annotation of each entry of a sequence with `length` entries."""
    for member in alternatives(kind):
        parts, origin = typing.get_args(member), typing.get_origin(member)
        if origin is tuple and parts[1:] != (...,):
            return list(parts)
        if origin in _SEQUENCES:
            return [parts[0]] * length
    return [Any] * length


def entry_kind(kind: Any) -> Any:
    """Annotation of the values of a dictionary with text as keys; None: it is none."""
    for member in alternatives(kind):
        if typing.get_origin(member) is dict:
            return typing.get_args(member)[1]
    return None


def infer_type(value: Any) -> Any:
    """Annotation inferred from a default value; Any for None."""
    if value is None:
        return Any
    if type(value) is tuple and value:
        return types.GenericAlias(tuple, tuple(map(infer_type, value)))
    return _FUNCTION if callable(value) else float if is_array(value) else type(value)


def matches(value: Any, kind: Any) -> bool:
    """Whether a value matches an annotation; arrays match numbers."""

    def matches_member(member: Any) -> bool:
        origin = typing.get_origin(member) or member
        if member in (int, float) or is_array(member):
            number = type(value) in (int, float if member is not int else int)
            return number or is_array(value)
        if origin in _SEQUENCES:
            if not isinstance(value, tuple | list) or not isinstance(value, origin):
                return False
            kinds = item_kinds(member, len(value))
            return len(kinds) == len(value) and all(map(matches, value, kinds))
        protocol = getattr(origin, "_is_protocol", False)  # isinstance may refuse it
        known = isinstance(origin, type) and not protocol
        return member is Any or (known and isinstance(value, origin))

    return any(map(matches_member, alternatives(kind)))


def type_phrase(kind: Any) -> tuple[str, Any]:
    """(phrase, example value or None) of an annotation, for messages."""
    kinds = origins(kind)
    kinds = [k for k in kinds if not (k is int and float in kinds)]
    plain = [k for k in kinds if k in _WORDS or dataclasses.is_dataclass(k)] or kinds
    words = _WORDS | {tuple: (_tuple_phrase(kind), _WORDS[tuple][1])}
    known = [words.get(k, (f"a {getattr(k, '__name__', k)}", None)) for k in plain]
    return " or ".join(phrase for phrase, _ in known), known[0][1]


def _tuple_phrase(kind: Any) -> str:
    """Phrase for the tuples of an annotation, with their length where it is fixed."""
    for member in alternatives(kind):
        parts = typing.get_args(member)
        if typing.get_origin(member) is tuple and ... not in parts:
            entries = {entry for part in parts for entry in alternatives(part)}
            names = {(int,): "integers", (float,): "numbers"}
            return f"a tuple of {len(parts)} {names.get((*entries,), 'entries')}"
    return _WORDS[tuple][0]
