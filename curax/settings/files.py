"""JSON as it is written; bounded reading of untrusted files.

Of what is read size, type and nesting are limited. Messages are phrases that callers
put after the name of the file.
"""

import contextlib
import json
import math
import os
import stat
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

MAX_BYTES = 2**24  # size of a JSON file or template; real checkpoints have far less
MAX_DEPTH = 64  # depth of nested lists and objects
_KINDS = {
    stat.S_IFDIR: "a folder",
    stat.S_IFIFO: "a named pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}


@contextlib.contextmanager
def opened(path: Path) -> Iterator[tuple[BinaryIO, int]]:
    """Open a regular file; gives the file and its size in bytes. Links are followed.

    Raises:
        OSError: the file is missing, or may not be read.
        ValueError: it is a folder, a pipe or a device.
    """
    # Without O_NONBLOCK opening a pipe would wait for a writer.
    number = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        status = os.fstat(number)
        if not stat.S_ISREG(status.st_mode):
            kind = _KINDS.get(stat.S_IFMT(status.st_mode), "something else")
            raise ValueError(f"it is {kind}, not a file")
        with open(number, "rb", closefd=False) as file:
            yield file, status.st_size
    finally:
        os.close(number)


def read(path: Path, *, most: int = MAX_BYTES) -> bytes:
    """Bytes of a regular file of at most `most` bytes.

    Raises:
        OSError: as `opened`.
        ValueError: as `opened`; or the file is larger.
    """
    with opened(path) as (file, size):
        # The file may have grown, and some file systems report no size.
        data = file.read(most + 1) if size <= most else None
        data = data or b""  # None where a read would block
    if size > most or len(data) > most:
        raise ValueError(f"it has more than the {most} bytes that are read of it")
    return data


def json_of(data: bytes) -> Any:
    """Parse JSON in UTF-8, strictly.

    Raises:
        ValueError: invalid JSON, a duplicate key, a non-finite number, or nesting
            beyond `MAX_DEPTH`.
    """
    try:
        value = json.loads(
            data.decode(), parse_constant=_no_number, object_pairs_hook=_named_once
        )
    except RecursionError:
        raise ValueError(_TOO_DEEP) from None
    level = [value]
    for _ in range(MAX_DEPTH):
        level = [inner for outer in level for inner in _inside(outer)]
        if not level:
            return value
    raise ValueError(_TOO_DEEP)


_TOO_DEEP = f"it is nested more than {MAX_DEPTH} levels deep"


def _inside(value: Any) -> Any:
    if isinstance(value, dict):
        return value.values()
    return value if isinstance(value, list) else ()


def _no_number(name: str) -> Any:
    raise ValueError(f"it holds {name}, which is no number of JSON")


def _named_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in value if names.count(name) > 1)
        raise ValueError(f"it names {json.dumps(twice)[:200]} twice in one object")
    return value


def known(path: Path) -> dict[str, Any]:
    """The JSON object in a file; empty where it cannot be read, or holds none."""
    try:
        value = json_of(read(path))
    except (OSError, ValueError):
        return {}
    return value if isinstance(value, dict) else {}


def object_of(line: bytes) -> dict[str, Any] | None:
    """The JSON object that a line of a file holds; None: it holds none."""
    try:
        value = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def json_value(value: Any) -> Any:
    """A tree of Python values and arrays as JSON values; non-finite floats as None."""
    if isinstance(value, Mapping):
        return {key: json_value(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [json_value(item) for item in value]
    if hasattr(value, "tolist"):
        return json_value(value.tolist())
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def json_bytes(value: Any) -> bytes:
    """A JSON file of `json_value`."""
    return (json.dumps(json_value(value), indent=1, allow_nan=False) + "\n").encode()


def shown(value: Any) -> str:
    """A value as one line of JSON, at most 200 characters."""
    return cut(json.dumps(value, default=repr))


def cut(text: str, most: int = 200) -> str:
    """A text of at most `most` characters; a longer one ends in "..."."""
    return text if len(text) <= most else f"{text[:most]} ..."
