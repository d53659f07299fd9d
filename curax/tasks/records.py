"""Records of JSON lines, parquet and array_record files, read from first to last."""

import contextlib
import json
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

from curax.settings.errors import WorkError
from curax.settings.packages import install

Record = Mapping[str, Any]
INFO = "dataset_info.json"  # in a folder of tensorflow-datasets
_BOM = b"\xef\xbb\xbf"
_BLOCK = 256  # rows of parquet that are decoded at once
_LINE_BYTES = 2**26  # of a line of JSON; a longer one is broken


class SourceError(WorkError, ValueError):
    """A file cannot be read or used. Its text is one sentence."""


class RecordError(SourceError):
    """One record cannot be read. Its text names the file and the place in it."""


Found = tuple[str, Record | RecordError]  # a place, as "file.jsonl:17", and its record


class Records:
    """The records of one or several files, read anew by each iteration."""

    def __init__(
        self,
        name: str,
        files: Iterable[Path],
        pieces: Sequence[tuple[int, Callable[[], Iterator[Found]]]],
    ):
        """Bind the files to what reads them.

        Args:
            name: of the files, as it was given.
            files: those whose changes are noticed.
            pieces: the number of records of each piece, and a function that reads them.
        """
        self.name, self._files, self._pieces = name, [*files], pieces
        self._written, self._checksum = (
            _last_written(self._files),
            checksum_of(self._files),
        )

    def __len__(self) -> int:
        return sum(count for count, _ in self._pieces)

    def each(self) -> Iterator[Found]:
        """Yield the place of each record, with the record or why it is broken."""
        for _, read in self._pieces:
            yield from read()

    def __iter__(self) -> Iterator[Record]:
        for _, found in self.each():
            if isinstance(found, RecordError):
                raise found
            yield found

    def changed(self) -> bool:
        """Whether the files changed since this was asked, or since they were opened."""
        before, self._written = self._written, _last_written(self._files)
        if self._written == before:
            return False
        known, self._checksum = self._checksum, checksum_of(self._files)
        return self._checksum != known


def _last_written(files: Sequence[Path]) -> list[tuple[Path, int, int]]:
    """The files that are there, with the times of their last changes and sizes."""
    found = []
    for file in files:
        with contextlib.suppress(OSError):
            stat = file.stat()
            found.append((file, stat.st_mtime_ns, stat.st_size))
    return found


def checksum_of(files: Sequence[Path]) -> int:
    """Checksum of the bytes of the files that are there."""
    checksum = 0
    for path in files:
        with contextlib.suppress(OSError), open(path, "rb") as file:
            while block := file.read(2**20):
                checksum = zlib.crc32(block, checksum)
    return checksum


def _found(place: str, record: Record | str, *, kind: str, unit: str) -> Found:
    """A place and its record; a text in place of it says why it is not of its kind."""
    if not isinstance(record, str):
        return place, record
    return place, RecordError(
        f"{place}: not {kind} ({record}); mend or delete this {unit}, or --set "
        "task.on_error=skip."
    )


_line_found = partial(_found, kind="a JSON object", unit="line")
_row_found = partial(_found, kind="text", unit="row")


def of_items(name: str, items: Sequence[Record]) -> Records:
    """Items that are there, such as generated ones, as the records of a file."""

    def read() -> Iterator[Found]:
        for i in range(len(items)):
            yield f"{name}, item {i}", items[i]

    return Records(name, [], [(len(items), read)])


def json_lines(name: str, files: Sequence[Path]) -> Records:
    """The records of files with a JSON object per line, in UTF-8.

    Blank lines are no records, and places count lines from 1.
    """
    for path in files:
        if path.suffix.lower() == ".json":
            _, first = next(_lines(path), (0, b""))
            if first.startswith(b"["):
                raise SourceError(
                    f"{path} is one JSON array; write an object per line, without "
                    "commas between them."
                )
    pieces = [(sum(1 for _ in _lines(path)), partial(_objects, path)) for path in files]
    if not any(count for count, _ in pieces):
        raise SourceError(f"{name} is empty; name a file with a record per line.")
    return Records(name, files, pieces)


def _lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """Yield the number and bytes of each line that is not blank, cut if too long."""
    try:
        with open(path, "rb", buffering=2**20) as file:
            number = 0
            while rest := file.readline(_LINE_BYTES + 1):
                number += 1
                line = rest.removeprefix(_BOM) if number == 1 else rest
                blank = not line.strip()
                while len(rest) > _LINE_BYTES and not rest.endswith(b"\n"):
                    rest = file.readline(_LINE_BYTES + 1)
                    blank = blank and not rest.strip()
                if not blank:
                    yield number, line
    except OSError as error:
        raise SourceError(f"{path} cannot be read: {error.strerror}.") from error


def _objects(path: Path) -> Iterator[Found]:
    for number, line in _lines(path):
        yield _line_found(f"{path}:{number}", _parsed(line))


def _parsed(line: bytes) -> Record | str:
    """The object of a line, or why it is none."""
    if len(line) > _LINE_BYTES:
        return f"it has more than {_LINE_BYTES} bytes"
    try:
        record = json.loads(line.rstrip().decode())
    except json.JSONDecodeError as error:
        return f"{error.msg} at column {error.colno}"
    except (ValueError, RecursionError) as error:
        return str(error)
    if isinstance(record, dict):
        return record
    kinds = {list: "a list", str: "a text", bool: "true or false", type(None): "null"}
    return f"it is {kinds.get(type(record), 'a number')}"


def parquet(name: str, files: Sequence[Path]) -> Records:
    """The rows of parquet files; places count rows from 0."""
    pieces = []
    for path in files:
        with _parquet(path) as file:
            pieces.append((file.metadata.num_rows, partial(_rows_of, path)))
    if not any(count for count, _ in pieces):
        raise SourceError(f"{name} has no rows; name a file with a record per row.")
    return Records(name, files, pieces)


def _rows_of(path: Path) -> Iterator[Found]:
    with _parquet(path) as file:
        rows = chain.from_iterable(map(_rows, file.iter_batches(_BLOCK)))
        for number, row in enumerate(rows):
            yield _row_found(f"{path}, row {number}", row)


def _rows(table: Any) -> list[Record | str]:
    """The rows of a table; in place of those that Python cannot hold, why not.

    As those that are not UTF-8, or whose time is none.
    """
    try:
        rows = table.to_pylist()
    except (ValueError, OverflowError, LookupError) as error:
        if len(table) == 1:
            return [str(error).partition("\n")[0]]
        return [row for i in range(len(table)) for row in _rows(table.slice(i, 1))]
    for field in table.schema:
        if shortest := _shortest(field.type):
            for row in rows:
                row[field.name] = shortest(row[field.name])
    return rows


def _shortest(kind: Any) -> Callable[[Any], Any] | None:
    """What makes numbers of less than 64 bits their shortest decimals; None: nothing.

    Not those with the noise of their last bit, wherever in a column they stand.
    """
    from pyarrow import types

    if types.is_dictionary(kind):
        return _shortest(kind.value_type)
    if types.is_float32(kind) or types.is_float16(kind):
        narrow = np.float32 if types.is_float32(kind) else np.float16
        return lambda x: x if x is None else float(str(narrow(x)))
    if types.is_struct(kind):
        every = {one.name: _shortest(one.type) for one in kind}
        some = {name: shortest for name, shortest in every.items() if shortest}
        if some:
            return lambda x: x and x | {name: some[name](x[name]) for name in some}
    elif hasattr(kind, "value_type") and (inner := _shortest(kind.value_type)):
        return lambda x: x and [inner(one) for one in x]
    return None


@contextlib.contextmanager
def _parquet(file: Path) -> Iterator[Any]:
    """An open parquet file; a context that turns errors into `SourceError`."""
    try:
        import pyarrow.parquet
    except ImportError as error:
        raise _not_installed("pyarrow", "parquet", file) from error
    try:
        with pyarrow.parquet.ParquetFile(file) as parquet:
            yield parquet
    except (OSError, pyarrow.ArrowException) as error:
        reason = str(error).partition("\n")[0].rstrip(".")
        raise SourceError(
            f"{file} cannot be read as parquet ({reason}); fetch or write it again."
        ) from error


def _not_installed(package: str, extra: str, path: Path) -> SourceError:
    return SourceError(
        f"{path} is read with {package}, which is not installed; run {install(extra)}."
    )


def prepared(folder: Path, split: str) -> Records:
    """The records of a split that tensorflow-datasets prepared as array_record.

    Tensorflow is not needed, and places count records from 0.
    """
    try:
        import tensorflow_datasets as tfds
    except ImportError as error:
        raise _not_installed("tensorflow-datasets", "tfds", folder) from error
    try:
        builder: Any = tfds.builder_from_directory(str(folder))
    except Exception as error:  # of protocol buffers, as Hugging Face's own
        raise SourceError(
            f"{folder / INFO} is not of tensorflow-datasets ({type(error).__name__}); "
            "name the .jsonl or .parquet beside it."
        ) from error
    known, splits = builder.info.file_format, builder.info.splits
    # Its parquet files are written with rows missing; the rest needs tensorflow.
    if known is None or known.value != "array_record":
        raise SourceError(
            f"{folder} is not prepared as array_record; prepare it anew with "
            "file_format='array_record'."
        )
    if split not in splits:
        raise no_split(folder, split, splits)
    source = builder.as_data_source(split=split)
    name = f"{folder}/{split}"

    def examples() -> Iterator[Found]:
        for i in range(len(source)):
            yield _row_found(f"{name}, record {i}", _example(source[i]))

    return Records(name, sorted(folder.iterdir()), [(len(source), examples)])


def _example(example: Any) -> Record | str:
    """An example as JSON would have it, or why it is no text."""
    try:
        return _in_python(example)
    except UnicodeDecodeError as error:
        return str(error)


def _in_python(value: Any) -> Any:
    """A value of tensorflow-datasets with text and lists for bytes and arrays."""
    if isinstance(value, dict):
        return {key: _in_python(inner) for key, inner in value.items()}
    if isinstance(value, np.floating) and value.itemsize < 8:
        return float(str(value))
    if isinstance(value, np.ndarray) and value.ndim:
        return [_in_python(inner) for inner in value]
    if isinstance(value, np.ndarray | np.generic):
        return _in_python(value.item())
    if isinstance(value, list | tuple):
        return [_in_python(inner) for inner in value]
    return value.decode() if isinstance(value, bytes) else value


def no_split(folder: Path, split: str, there: Iterable[str]) -> SourceError:
    """The error of a folder without the wanted split."""
    return SourceError(
        f"{folder} has no split {split}, only {', '.join(sorted(there))}; name another "
        "folder, or a file."
    )
