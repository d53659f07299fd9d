"""Data files opened by their names, and the scan for usable problems.

`scan` keeps what the layout takes of each usable record, so a file may be larger than
memory, but not what is kept of it: that is refused at half of the memory.
"""

import dataclasses
import glob
import hashlib
import re
import sys
import zlib
from collections.abc import Callable, Mapping, Sequence
from itertools import islice
from pathlib import Path

import numpy as np

from curax import hub
from curax.settings import machine
from curax.tasks import layouts
from curax.tasks.layouts import Layout, LayoutError, Problem
from curax.tasks.records import (
    INFO,
    Record,
    RecordError,
    Records,
    SourceError,
    json_lines,
    no_split,
    parquet,
    prepared,
)

_SAMPLE = 256  # records that determine the layout of a file
_NAMED = 10  # broken records of a file that are named
_SPLITS = {"train", "test", "validation", "valid", "val", "dev", "eval"}
LEFT_OUT = {  # why problems are left out, by the name of their count
    "duplicate": "asked before",
    "too_long": "too long",
    "broken": "broken",
    "held_out": "held out",
}


def open_records(path: str | Path, *, split: str = "train") -> Records:
    """The records of a file, of several files read as one, or of a folder.

    Args:
        path: of a file: `.jsonl` or `.json` with an object per line, or `.parquet`; of
            several files of one kind, read as one: a pattern (`data/*.jsonl`), or the
            folder of `.jsonl` or of `.parquet`; or a folder that tensorflow-datasets
            has prepared as array_record. Or a name on the hub, see `curax.hub`.
        split: part of a folder, the files whose names begin with this word; all files
            where none begins with the name of a split.

    Returns:
        Its records, in the order of the file, of several in the order of their names.

    Raises:
        SourceError: the path does not exist or cannot be read.
        HubError: a name on the hub cannot be downloaded.
    """
    path = hub.data(path, split)
    try:
        if (path / INFO).is_file():
            return prepared(path, split)
        files = _files(path, split)
        read = parquet if files[0].suffix.lower() == ".parquet" else json_lines
        return read(str(path), files)
    except OSError as error:
        raise SourceError(f"{path} cannot be read: {error.strerror}.") from error


def _files(path: Path, split: str) -> list[Path]:
    """The files of a path or pattern, all of one known kind."""
    if path.is_dir():
        files = _of_split(path, split)
    elif path.exists() or not glob.has_magic(str(path)):
        files = [path]
    else:
        files = sorted(map(Path, glob.glob(str(path), recursive=True)))
    if not files or not files[0].exists():
        raise SourceError(f"{path} does not exist; name a file or a folder that does.")
    suffixes = sorted({file.suffix.lower() for file in files})
    if not {*suffixes} <= {".jsonl", ".json", ".parquet"}:
        raise SourceError(
            f"{path} is no .jsonl, .json or .parquet file and no folder; convert it or "
            "name another."
        )
    if len(suffixes) > 1 and ".parquet" in suffixes:
        raise SourceError(
            f"{path} stands for files of {' and '.join(suffixes)}; only files of one "
            "kind are read as one, name those."
        )
    for file in files:
        if not file.is_file():  # a pipe would be waited for
            raise SourceError(f"{file} is no file; name another, or remove it.")
    return files


def _of_split(folder: Path, split: str) -> list[Path]:
    """The data files of a folder that belong to a split."""
    every = sorted(folder.iterdir())
    kinds = {
        kind: [file for file in every if file.suffix.lower() == kind]
        for kind in (".jsonl", ".parquet")
    }
    files = [*kinds[".jsonl"], *kinds[".parquet"]]
    if not files:
        raise SourceError(
            f"{folder} holds no .jsonl, no .parquet and no dataset_info.json; name a "
            "file in it or another folder."
        )
    if all(kinds.values()):
        raise SourceError(
            f"{folder} holds files of .jsonl and .parquet; name those of one kind, as "
            f"{folder / f'*{files[0].suffix}'}."
        )
    parts = {file: re.split("[-_.]", file.name.lower())[0] for file in files}
    if not _SPLITS & {*parts.values()}:
        return files
    chosen = [file for file in files if parts[file] == split]
    if not chosen:
        raise no_split(folder, split, {*parts.values()})
    return chosen


def resolved_layout(records: Records, layout: Layout) -> Layout:
    """The layout, or in place of `layouts.detect` that of most of the first records."""
    if layout is not layouts.detect:
        return layout
    some = (found for _, found in islice(records.each(), _SAMPLE))
    return layouts.majority_layout(x for x in some if not isinstance(x, RecordError))


@dataclasses.dataclass(frozen=True, eq=False)
class ProblemSet:
    """The usable problems of one file, numbered from 0 in the order of the file.

    Attributes:
        records: of the file.
        problems: n problems.
        longest: tokens of the longest prompt.
        digests: n digests of the questions, by `digest`.
        counts: records read and left out, by reason.
    """

    records: Records
    problems: list[Problem]
    longest: int
    digests: list[bytes]
    counts: dict[str, int]

    def __len__(self) -> int:
        return len(self.problems)

    @property
    def contents(self) -> bytes:
        """Checksums of the problems, four bytes each, by `content`."""
        return np.array([*map(content, self.problems)], np.uint32).tobytes()

    def subset(self, numbers: Sequence[int], **counts: int) -> "ProblemSet":
        """The problems with these numbers, numbered anew; `counts` are added."""
        return dataclasses.replace(
            self,
            problems=[self.problems[i] for i in numbers],
            digests=[self.digests[i] for i in numbers],
            counts=self.counts | counts,
        )

    def warn_of_changes(self) -> None:
        """Print a warning if the file changed since it was read, once a change."""
        if self.records.changed():
            print(
                f"Warning: {self.records.name} is not what it was when this run read "
                "it, and the run goes on with what it read; bring that back, or the "
                "run cannot be resumed.",
                file=sys.stderr,
                flush=True,
            )

    def summary(self) -> str:
        """File name, number of problems and what was left out, as one phrase."""
        found = f"{self.records.name}: {len(self)} of {self.counts['read']} problems"
        out = left_out(self.counts)
        return f"{found} ({out})" if out else found


def left_out(counts: Mapping[str, int]) -> str:
    """How many problems are left out for which reason, as "2 broken"; maybe empty."""
    return ", ".join(f"{counts[k]} {LEFT_OUT[k]}" for k in LEFT_OUT if counts.get(k))


def digest(question: str) -> bytes:
    """16-byte hash of a question, independent of its white space."""
    words = " ".join(question.split())
    return hashlib.blake2b(words.encode(), digest_size=16).digest()


def content(problem: Problem) -> int:
    """Checksum of all that a problem says: question, answer, solution, hints."""
    return zlib.crc32(repr(dataclasses.astuple(problem)).encode("utf-8", "replace"))


def scan(
    records: Records,
    layout: Layout,
    measure: Callable[[Problem], int],
    *,
    longest: int,
    on_error: str,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> ProblemSet:
    """The usable problems of a file, found in one pass over it.

    Of records with the same question the first is kept, whatever the answers of the
    others, which are not measured.

    Args:
        records: of `open_records`.
        layout: record to problem.
        measure: problem to the length of its prompt in tokens; called in order.
        longest: tokens; problems with longer prompts are left out.
        on_error: "raise" after the pass if a record is broken, or "skip" and count it.
        progress: called with the records read so far and their number.

    Raises:
        RecordError: the first broken record cannot be read. Its text and that of the
            next one names it and the next ones.
        LayoutError: the first broken record does not have the layout.
        SourceError: no record is usable, or they take half the memory of this machine.
    """
    problems: list[Problem] = []
    digests: list[bytes] = []
    seen, top, room = set[bytes](), 0, machine.ram() / 2
    broken: list[RecordError | LayoutError] = []  # those that will be named
    counts: dict[str, int] = {"read": 0, "duplicate": 0, "too_long": 0, "broken": 0}
    total = len(records)
    for place, record in records.each():
        counts["read"] += 1
        progress(counts["read"], total)
        problem = _problem(place, record, layout)
        length, key = 0, b""
        if isinstance(problem, Problem) and not broken:
            key = digest(problem.question)
            if key in seen:
                counts["duplicate"] += 1
                continue
            seen.add(key)
            try:
                length = measure(problem)
            except ValueError as error:  # a text that the tokenizer refuses
                problem = RecordError(f"{place}: {error}")
        if not isinstance(problem, Problem):
            counts["broken"] += 1
            if on_error != "skip" and len(broken) < _NAMED:
                broken.append(problem)
            continue
        if broken:  # nothing else will be told
            continue
        if length > longest:
            counts["too_long"] += 1
            continue
        problems.append(problem)
        digests.append(key)
        top, room = max(top, length), room - _bytes(problem)
        if room < 0:
            raise SourceError(
                f"the first {len(problems)} problems of {records.name} take half the "
                "memory of this machine; name fewer files, or fields of them with "
                "layouts.fields."
            )
    if broken:
        raise _joined(broken, counts)
    if not problems:
        raise _nothing_usable(records, counts, longest)
    return ProblemSet(records, problems, top, digests, counts)


def _problem(
    place: str, record: Record | RecordError, layout: Layout
) -> Problem | RecordError | LayoutError:
    if isinstance(record, RecordError):
        return record
    try:
        found = layout(record)
        if isinstance(found, Problem) and isinstance(found.question, str):
            return found
        raise TypeError(f"it gives a {type(found).__name__}, and must give a Problem")
    except LayoutError as error:
        return LayoutError(f"{place}: {error}")
    except Exception as error:  # of a user's layout
        return LayoutError(
            f"{place}: the layout failed ({type(error).__name__}: {error}); mend it or "
            "the record, or --set task.on_error=skip."
        )


def _bytes(problem: Problem) -> int:
    """Bytes of memory that a problem takes, without those of its digest."""
    texts = (text for text in dataclasses.astuple(problem) if text)
    return sum(map(sys.getsizeof, (problem, *texts, *problem.hints)))


def _joined(
    broken: list[RecordError | LayoutError], counts: dict[str, int]
) -> RecordError | LayoutError:
    """The first error of a file; where there are more, with places and reasons."""
    first, *others = broken
    if not others:
        return first
    more = counts["broken"] - len(broken)
    lines = [
        f"{first} {counts['broken']} of {counts['read']} records are broken, also",
        *(str(error).rpartition("; ")[0] or str(error) for error in others),
        *([f"and {more} more."] if more else ()),
    ]
    return type(first)("\n".join(lines))


def _nothing_usable(
    records: Records, counts: dict[str, int], longest: int
) -> SourceError:
    fixes = {
        "too_long": "allow longer prompts",
        "broken": "see what is broken with --set task.on_error=raise",
    }
    fix = " or ".join(fix for name, fix in fixes.items() if counts[name])
    return SourceError(
        f"{records.name} has {counts['read']} records and none is left: "
        f"{counts['duplicate']} ask what one before them asks, {counts['too_long']} "
        f"have a prompt of more than {longest} tokens, {counts['broken']} are broken; "
        f"{fix}."
    )
