"""Random access to the records of JSON lines, parquet and array_record files.

Each class is a source for grain, and safe to read from threads and after pickling.
"""

import abc
import array
import contextlib
import json
import os
import threading
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from curax.settings.packages import install

Record = Mapping[str, Any]
_OBJECT, _TEXT = "a JSON object", "text"  # a record that is not is broken
_BOM = b"\xef\xbb\xbf"
_LINE_BYTES = 2**26  # of a line of JSON; a longer one is broken
_CACHE_BYTES = 2**28  # of decoded parquet; the row group read last always stays


class SourceError(ValueError):
    """A file cannot be read or used. Its text is one sentence."""


class RecordError(SourceError):
    """One record cannot be read. Its text names the file and the place in it."""


class Broken(NamedTuple):
    """A broken record: its expected kind and the reason, without its place."""

    kind: str
    said: str

    def at(self, place: str) -> "RecordError":
        """The error of a broken record at `place`."""
        return RecordError(
            f"{place}: not {self.kind} ({self.said}); mend or delete this "
            f"{'row' if self.kind == _TEXT else 'line'}, or --set task.on_error=skip."
        )


class Records(abc.ABC):
    """The records of one or several files, a source for `grain.MapDataset`."""

    name: str  # of the file, as it was given

    @abc.abstractmethod
    def __len__(self) -> int:
        """Number of records."""

    @abc.abstractmethod
    def where(self, i: int) -> str:
        """The place of record `i`, as "file.jsonl:17"."""

    @abc.abstractmethod
    def read(self, start: int, stop: int) -> list[Record | Broken]:
        """Records `start` to `stop`, broken ones among them."""

    def __getitem__(self, index: int) -> Record:
        """Record `index`.

        Raises:
            RecordError: it is broken.
        """
        if not 0 <= index < len(self):
            raise IndexError(f"{self.name} has {len(self)} records, no record {index}")
        (record,) = self.read(index, index + 1)
        if isinstance(record, Broken):
            raise record.at(self.where(index))
        return record

    def __iter__(self) -> Iterator[Record]:
        return (self[i] for i in range(len(self)))


class JsonLines(Records):
    """A JSON object per line, in UTF-8; blank lines do not count.

    Held are the byte at which each record begins, 8 bytes per record, and an open file.
    """

    def __init__(self, path: Path):
        """Find the first byte of each record, in one pass."""
        self.name = str(path)
        begins, end = array.array("q"), 0
        begin, blank = 0, True  # of the line
        with open(path, "rb", buffering=2**20) as lines:
            while piece := lines.readline(_LINE_BYTES):
                bom = len(_BOM) * (end == 0 and piece.startswith(_BOM))
                begin += bom
                if blank and piece[bom:].strip():
                    begins.append(begin)
                    blank = False
                end += len(piece)
                if piece.endswith(b"\n"):
                    begin, blank = end, True
        begins.append(end)
        self._begins = np.array(begins, np.int64)
        self._open()
        if (
            path.suffix.lower() == ".json"
            and os.pread(self._file, 1, begins[0]) == b"["
        ):
            raise SourceError(
                f"{path} is one JSON array; write an object per line, without commas "
                "between them."
            )

    def _open(self) -> None:
        self._file = os.open(self.name, os.O_RDONLY)

    def __del__(self, close=os.close):  # bound: at the end of Python `os` is gone
        if hasattr(self, "_file"):
            close(self._file)

    def __getstate__(self) -> dict[str, Any]:
        return {"name": self.name, "_begins": self._begins}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._open()

    def __len__(self) -> int:
        return len(self._begins) - 1

    def where(self, i: int) -> str:
        """The file and the line, counted from 1."""
        line, left = 1, int(self._begins[i])
        with open(self.name, "rb") as file:
            while left > 0 and (block := file.read(min(left, 2**20))):
                line, left = line + block.count(b"\n"), left - len(block)
        return f"{self.name}:{line}"

    def read(self, start: int, stop: int) -> list[Record | Broken]:
        """Records `start` to `stop`, in one access to the file if they are short."""
        begins = self._begins[start : stop + 1].tolist()
        begin, end = begins[0], begins[-1]
        if end - begin <= _LINE_BYTES:
            data = os.pread(self._file, end - begin, begin)  # no lock, unlike seek
            return [_parsed(data[a - begin : b - begin]) for a, b in pairwise(begins)]
        return [
            _parsed(os.pread(self._file, b - a, a))
            if b - a <= _LINE_BYTES
            else Broken(_OBJECT, f"it has more than {_LINE_BYTES} bytes")
            for a, b in pairwise(begins)
        ]


def _parsed(line: bytes) -> Record | Broken:
    try:
        record = json.loads(line.rstrip().decode())
    except json.JSONDecodeError as error:
        return Broken(_OBJECT, f"{error.msg} at column {error.colno}")
    except (ValueError, RecursionError) as error:
        return Broken(_OBJECT, str(error))
    if isinstance(record, dict):
        return record
    kinds = {list: "a list", str: "a text", bool: "true or false", type(None): "null"}
    return Broken(_OBJECT, f"it is {kinds.get(type(record), 'a number')}")


def _place(ends: np.ndarray, i: int) -> int:
    """Which part has record `i`, where parts lie between these ends."""
    return int(np.searchsorted(ends, i, side="right")) - 1


class Several(Records):
    """The concatenated records of several files."""

    def __init__(self, name: str, parts: Sequence[Records]):
        self.name, self._parts = name, list(parts)
        self._ends = np.cumsum([0, *map(len, parts)])

    def __len__(self) -> int:
        return int(self._ends[-1])

    def where(self, i: int) -> str:
        """The place of a record in its own file."""
        part = _place(self._ends, i)
        return self._parts[part].where(i - int(self._ends[part]))

    def read(self, start: int, stop: int) -> list[Record | Broken]:
        """Records `start` to `stop`, across files."""
        records: list[Record | Broken] = []
        while start < stop:
            part = _place(self._ends, start)
            first, end = int(self._ends[part]), int(self._ends[part + 1])
            records += self._parts[part].read(start - first, min(stop, end) - first)
            start = end
        return records


class Parquet(Records):
    """The rows of parquet files, whose row groups are decoded on demand."""

    def __init__(self, name: str, files: Sequence[Path]):
        """Read the footers of the files."""
        self.name, self._files = name, list(files)
        self._groups: list[tuple[Path, int, int]] = []  # file, group, its first row
        ends = [0]
        for file in self._files:
            first = ends[-1]
            for group, rows in enumerate(_row_groups(file)):
                self._groups.append((file, group, ends[-1] - first))
                ends.append(ends[-1] + rows)
        if ends[-1] == 0:
            raise SourceError(f"{name} has no rows; name a file with a record per row.")
        self._ends = np.array(ends, np.int64)
        self._forget()

    def _forget(self) -> None:
        self._lock, self._cache = threading.Lock(), OrderedDict[int, Any]()

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_lock": None, "_cache": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._forget()

    def __len__(self) -> int:
        return int(self._ends[-1])

    def where(self, i: int) -> str:
        """The file and the row, counted from 0."""
        group = _place(self._ends, i)
        file, _, first = self._groups[group]
        return f"{file}, row {first + i - int(self._ends[group])}"

    def read(self, start: int, stop: int) -> list[Record | Broken]:
        """Records `start` to `stop`, across row groups."""
        records: list[Record | Broken] = []
        while start < stop:
            group = _place(self._ends, start)
            first = int(self._ends[group])
            rows = self._table(group).slice(start - first, stop - start)
            records += _rows(rows)
            start += len(rows)
        return records

    def _table(self, group: int) -> Any:
        """A decoded row group, from a cache that evicts the least recently used."""
        with self._lock:
            if group not in self._cache:
                self._cache[group] = _decoded(*self._groups[group][:2])
            self._cache.move_to_end(group)
            held = sum(table.nbytes for table in self._cache.values())
            while held > _CACHE_BYTES and len(self._cache) > 1:
                held -= self._cache.popitem(last=False)[1].nbytes
            return self._cache[group]


def _rows(table: Any) -> list[Record | Broken]:
    """The rows of a table; those that are not UTF-8 as `Broken`."""
    try:
        return table.to_pylist()
    except UnicodeDecodeError as error:
        if len(table) == 1:
            return [Broken(_TEXT, str(error))]
        return [row for i in range(len(table)) for row in _rows(table.slice(i, 1))]


def _row_groups(file: Path) -> list[int]:
    """The number of rows of each row group."""
    with _parquet(file) as parquet:
        footer = parquet.metadata
        return [footer.row_group(i).num_rows for i in range(footer.num_row_groups)]


def _decoded(file: Path, group: int) -> Any:
    with _parquet(file) as parquet:
        return parquet.read_row_group(group)


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


class Prepared(Records):
    """A split of a data set that tensorflow-datasets prepared as array_record."""

    def __init__(self, folder: Path, split: str):
        """Open the split, without tensorflow."""
        self.name, self._folder, self._split = f"{folder}/{split}", folder, split
        self._open()

    def _open(self) -> None:
        try:
            import tensorflow_datasets as tfds
        except ImportError as error:
            raise _not_installed("tensorflow-datasets", "tfds", self._folder) from error
        builder: Any = tfds.builder_from_directory(str(self._folder))
        known, splits = builder.info.file_format, builder.info.splits
        # Its parquet files are written with rows missing; the rest needs tensorflow.
        if known is None or known.value != "array_record":
            raise SourceError(
                f"{self._folder} is not prepared as array_record; prepare it anew with "
                "file_format='array_record'."
            )
        if self._split not in splits:
            raise no_split(self._folder, self._split, splits)
        self._source: Any = builder.as_data_source(split=self._split)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_source": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._open()

    def __len__(self) -> int:
        return len(self._source)

    def where(self, i: int) -> str:
        """The split and the record, counted from 0."""
        return f"{self.name}, record {i}"

    def read(self, start: int, stop: int) -> list[Record | Broken]:
        """Records `start` to `stop`."""
        return [_in_python(self._source[i]) for i in range(start, stop)]


def _in_python(example: Any) -> Record | Broken:
    """An example of tensorflow-datasets with text and lists for bytes and arrays."""

    def plain(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: plain(inner) for key, inner in value.items()}
        if isinstance(value, np.ndarray | np.generic):
            return plain(value.tolist())
        if isinstance(value, list | tuple):
            return [plain(inner) for inner in value]
        return value.decode() if isinstance(value, bytes) else value

    try:
        return plain(example)
    except UnicodeDecodeError as error:
        return Broken(_TEXT, str(error))


def no_split(folder: Path, split: str, there: Iterable[str]) -> SourceError:
    """The error of a folder without the wanted split."""
    return SourceError(
        f"{folder} has no split {split}, only {', '.join(sorted(there))}; name another "
        "folder, or a file."
    )
