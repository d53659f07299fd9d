"""Data files: every record with its place, the scan by its definition, errors."""

import gc
import json
import os
import re
import sys
import tracemalloc
from functools import partial
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st
from outputs import message

from curax.settings import machine
from curax.settings.packages import install
from curax.tasks import layouts, records, sources
from curax.tasks.layouts import LayoutError, Problem
from curax.tasks.sources import RecordError, SourceError

SKIP = "or --set task.on_error=skip."
ROWS = [{"question": f"What is {i} + 1?", "answer": str(i + 1)} for i in range(23)]


def json_lines(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def parquet(path, rows, *, group=5):
    pq.write_table(pa.Table.from_pylist(rows), path, row_group_size=group)
    return path


def shards(path, rows):
    path.mkdir()
    for name, part in (("b", rows[9:]), ("a", rows[:9])):
        parquet(path / f"{name}.parquet", part)
    return path


def line_shards(path, rows):
    """With one that is empty, which parquet files may be, too."""
    path.mkdir()
    for name, part in (("c", rows[9:]), ("b", []), ("a", rows[:9])):
        json_lines(path / f"{name}.jsonl", part)
    return path


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """What tensorflow-datasets makes of the rows, in an order of its own."""
    import tensorflow_datasets as tfds

    path = tmp_path_factory.mktemp("prepared")

    class Sums(tfds.core.GeneratorBasedBuilder):
        VERSION = tfds.core.Version("1.0.0")

        def _info(self):
            text, of = tfds.features.Text(), np.int64
            more = {"of": of, "all": tfds.features.Sequence(of)}
            row = {"question": text, "answer": text, "more": more}
            return tfds.core.DatasetInfo(
                builder=self, features=tfds.features.FeaturesDict(row)
            )

        def _split_generators(self, dl_manager):
            return {
                "train": self._generate_examples(ROWS),
                "test": self._generate_examples(ROWS[:2]),
            }

        def _generate_examples(self, rows):
            for i, row in enumerate(rows):
                yield i, row | {"more": {"of": i, "all": [i, i]}}

    Sums(data_dir=path, file_format="array_record").download_and_prepare()
    return path / "sums" / "1.0.0"


KINDS = {
    "json lines": lambda path: json_lines(path / "a.jsonl", ROWS),
    "json": lambda path: json_lines(path / "a.json", ROWS),
    "parquet": lambda path: parquet(path / "a.parquet", ROWS),
    "parquet, capital": lambda path: parquet(path / "a.PARQUET", ROWS),
    "a folder": lambda path: shards(path / "all", ROWS),
    "a pattern": lambda path: shards(path / "all", ROWS) / "*.parquet",
    "a folder of json lines": lambda path: line_shards(path / "all", ROWS),
    "a pattern of json lines": lambda path: line_shards(path / "all", ROWS) / "*.j*",
}


@pytest.fixture(params=[*KINDS, "prepared"])
def opened(request, tmp_path, folder):
    make = KINDS.get(request.param, lambda _: folder)
    return sources.open_records(make(tmp_path))


def found(opened):
    """The records of an opened file, with errors in place of broken ones."""
    return [record for _, record in opened.each()]


def places(opened):
    return [place for place, _ in opened.each()]


error_of = partial(message, SourceError, sources.open_records)


def by_question(rows):
    return sorted((row["question"], row["answer"]) for row in rows)


# Every kind of file


def test_every_record_is_there_in_order_each_time(opened, request):
    assert len(opened) == len(ROWS)
    rows = list(opened)
    assert by_question(rows) == by_question(ROWS)
    if "prepared" not in request.node.name:
        assert rows == ROWS
    assert list(opened) == found(opened) == rows
    assert len({*places(opened)}) == len(ROWS)


def test_only_other_bytes_are_changes_and_each_is_told_once(tmp_path):
    path = line_shards(tmp_path / "all", ROWS)
    opened = sources.open_records(path)
    assert not opened.changed()
    os.utime(path / "a.jsonl", ns=(1, 1))
    assert not opened.changed()
    changes = [
        lambda: json_lines(path / "a.jsonl", ROWS[8::-1]),
        lambda: (path / "c.jsonl").unlink(),
        lambda: json_lines(path / "c.jsonl", ROWS[9:]),
    ]
    for change in changes:
        change()
        assert [opened.changed(), opened.changed()] == [True, False]


# JSON lines


def test_blank_lines_a_byte_order_mark_and_line_ends_of_windows_are_no_records(
    tmp_path,
):
    path = tmp_path / "a.jsonl"
    path.write_bytes(
        b'\xef\xbb\xbf\r\n \t\r\n{"a": 1}\r\n\n\x0c\n\n'
        b'{"a": "\xc3\xa9"}\n{"a": 3}  \n\n'
    )
    opened = sources.open_records(path)
    assert [record["a"] for record in opened] == [1, "\u00e9", 3]
    assert places(opened) == [f"{path}:{i}" for i in (3, 7, 8)]


def test_a_byte_order_mark_may_stand_before_the_first_record(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"a": 1}')
    opened = sources.open_records(path)
    assert list(opened) == [{"a": 1}]
    assert places(opened) == [f"{path}:1"]


pieces = st.sampled_from(
    [b"\n", b"\r\n", b" ", b"a", b"{}", b'{"a": 1}', b"\xef\xbb\xbf"]
)
contents = st.lists(pieces, max_size=30).map(b"".join) | st.binary(max_size=40)


@given(contents)
def test_records_are_the_lines_that_are_not_blank(tmp_path_factory, content):
    path = tmp_path_factory.getbasetemp() / "lines.jsonl"
    path.write_bytes(content)
    lines = content.removeprefix(b"\xef\xbb\xbf").split(b"\n")
    want = {i + 1: line.rstrip() for i, line in enumerate(lines) if line.strip()}
    if not want:
        with pytest.raises(SourceError, match="is empty"):
            sources.open_records(path)
        return
    opened = sources.open_records(path)
    assert len(opened) == len(want)
    assert places(opened) == [f"{path}:{i}" for i in want]
    for got, line in zip(found(opened), want.values(), strict=True):
        try:
            record = json.loads(line.decode())
        except ValueError:
            record = None
        if isinstance(record, dict):
            assert got == record
        else:
            assert isinstance(got, RecordError)


@pytest.mark.parametrize(
    ("line", "said"),
    [
        (b'{"a": 1', "Expecting ',' delimiter at column 8"),
        (b'{"a": "half', "Unterminated string starting at at column 7"),
        (b'{"a": 1}{', "Extra data at column 9"),
        (b"What?", "Expecting value at column 1"),
        (b"[1]", "it is a list"),
        (b'"a"', "it is a text"),
        (b"1.5", "it is a number"),
        (b"null", "it is null"),
        (b"true", "it is true or false"),
        (
            b'"\xff"',
            "'utf-8' codec can't decode byte 0xff in position 1: invalid start byte",
        ),
    ],
)
@pytest.mark.parametrize("behind", [b"", b"\n", b'\n{"a": 3}\n'])
def test_a_line_that_is_no_object_is_named_with_what_it_is(
    tmp_path, line, said, behind
):
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"a": 1}\n\n' + line + behind)
    opened = sources.open_records(path)
    assert message(RecordError, list, opened) == (
        f"{path}:3: not a JSON object ({said}); mend or delete this line, {SKIP}"
    )
    first, _, *others = found(opened)
    assert first == {"a": 1}
    assert behind.count(b"3") == len(others) == len(opened) - 2


def test_a_line_nested_too_deeply_is_broken_like_any_other(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text('{"a":' * 100_000 + "\n")
    with pytest.raises(RecordError, match="recursion"):
        list(sources.open_records(path))


def test_a_file_does_not_stay_open_when_it_is_no_longer_used(tmp_path):
    path = json_lines(tmp_path / "a.jsonl", ROWS)

    def held():
        gc.collect()
        files = (f"/proc/self/fd/{number}" for number in os.listdir("/proc/self/fd"))
        return sum(os.path.realpath(file) == str(path) for file in files)

    opened = [sources.open_records(path).each() for _ in range(3)]
    assert [next(one)[1] for one in opened] == ROWS[:1] * 3
    assert held() == 3
    del opened
    assert held() == 0


# Parquet


@pytest.mark.parametrize(
    ("write", "names", "behind"),
    [
        (shards, ("a.parquet", "b.parquet"), [f", row {i}" for i in range(14)]),
        (line_shards, ("a.jsonl", "c.jsonl"), [f":{i}" for i in range(1, 15)]),
    ],
    ids=["rows", "lines"],
)
def test_a_place_is_a_file_and_a_number_in_it(tmp_path, write, names, behind):
    folder = write(tmp_path / "all", ROWS)
    one, other = (folder / name for name in names)
    want = [f"{one}{at}" for at in behind[:9]] + [f"{other}{at}" for at in behind]
    assert places(sources.open_records(folder)) == want


def test_nested_rows_come_as_lists_and_dicts(tmp_path):
    row = {"prompt": [{"role": "user", "content": "Add."}], "of": {"a": "1"}, "n": None}
    path = parquet(tmp_path / "a.parquet", [row])
    assert list(sources.open_records(path)) == [row]


def not_text(path):
    """Parquet that says it holds text, with a row that is none."""
    column = pa.array([b"Add.", b"\xff", b"So."]).view(pa.string())
    pq.write_table(pa.table({"question": column, "answer": ["1", "2", "3"]}), path)
    return path


def test_a_row_that_is_not_text_is_broken_and_the_others_are_not(tmp_path):
    path = not_text(tmp_path / "a.parquet")
    opened = sources.open_records(path)
    assert message(RecordError, list, opened) == (
        f"{path}, row 1: not text ('utf-8' codec can't decode byte 0xff in position 0: "
        f"invalid start byte); mend or delete this row, {SKIP}"
    )
    assert [row["answer"] for row in found(opened) if isinstance(row, dict)] == [
        "1",
        "3",
    ]


# Prepared by tensorflow-datasets


def test_bytes_and_arrays_come_as_json_would_have_them(folder):
    opened = sources.open_records(folder)
    row = next(row for row in opened if row["answer"] == "4")
    assert row == ROWS[3] | {"more": {"of": 3, "all": [3, 3]}}
    assert type(row["more"]["of"]) is int
    assert places(opened)[4] == f"{folder}/train, record 4"


def test_a_split_is_chosen_by_its_name(folder):
    assert by_question(sources.open_records(folder, split="test")) == by_question(
        ROWS[:2]
    )
    assert error_of(folder, split="dev") == (
        f"{folder} has no split dev, only test, train; name another folder, or a file."
    )


@pytest.mark.parametrize("kind", ["tfrecord", "parquet"])
def test_only_array_record_is_read(tmp_path, folder, kind):
    for file in folder.iterdir():
        text = file.read_bytes().replace(b'"array_record"', f'"{kind}"'.encode())
        (tmp_path / file.name).write_bytes(text)
    assert error_of(tmp_path) == (
        f"{tmp_path} is not prepared as array_record; prepare it anew with "
        "file_format='array_record'."
    )


def test_arrays_of_any_depth_become_lists():
    row = {"a": np.array([[1, 2]]), "b": np.array([b"x"], object), "c": [np.float32(1)]}
    assert repr(records._in_python(row)) == "{'a': [[1, 2]], 'b': ['x'], 'c': [1.0]}"


def test_bytes_that_are_not_text_are_a_broken_record():
    _, error = records._row_found("a.b:1", records._example({"question": b"\xff"}))
    assert isinstance(error, RecordError)
    assert "a.b:1: not text ('utf-8' codec" in str(error)


# What cannot be opened


ABSENT = "does not exist; name a file or a folder that does."
EMPTY = "is empty; name a file with a record per line."
OTHER = (
    "is no .jsonl, .json or .parquet file and no folder; convert it or name another."
)
ARRAY = "is one JSON array; write an object per line, without commas between them."
# (name, what it holds, what is said of it)
NOT_OPENED = [
    *((name, None, ABSENT) for name in ("a.jsonl", "a.parquet", "a.csv")),
    *((name, None, ABSENT) for name in ("*.parquet", "a/b")),
    *(("a.jsonl", content, EMPTY) for content in (b"", b"\n \r\n", b"\xef\xbb\xbf")),
    *((name, b"{}", OTHER) for name in ("a.csv", "a.jsonl.gz", "a")),
    ("a.json", f"\n{json.dumps(ROWS, indent=1)}".encode(), ARRAY),
]


@pytest.mark.parametrize(("name", "content", "said"), NOT_OPENED)
def test_a_file_that_cannot_be_opened_is_named(tmp_path, name, content, said):
    path = tmp_path / name
    if content is not None:
        path.write_bytes(content)
    assert error_of(path) == error_of(str(path)) == f"{path} {said}"


def test_a_parquet_file_without_rows_is_named(tmp_path):
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"question": pa.array([], pa.string())}), path)
    assert error_of(path) == f"{path} has no rows; name a file with a record per row."


def test_a_folder_without_data_is_named(tmp_path):
    (tmp_path / "README.md").write_text("Nothing.")
    assert error_of(tmp_path) == (
        f"{tmp_path} holds no .jsonl, no .parquet and no dataset_info.json; name a "
        "file in it or another folder."
    )


def test_several_files_are_read_as_one_if_they_are_of_one_kind(tmp_path):
    json_lines(tmp_path / "a.jsonl", ROWS)
    json_lines(tmp_path / "c.json", ROWS[:1])
    assert len(sources.open_records(tmp_path / "*.json*")) == 24
    parquet(tmp_path / "b.parquet", ROWS)
    for pattern in ("*", "?.*"):
        assert error_of(tmp_path / pattern) == (
            f"{tmp_path / pattern} stands for files of .json and .jsonl and .parquet; "
            "only files of one kind are read as one, name those."
        )
    assert error_of(tmp_path) == (
        f"{tmp_path} holds files of .jsonl and .parquet; name those of one kind, as "
        f"{tmp_path}/*.jsonl."
    )


@pytest.mark.parametrize("write", [json_lines, parquet])
def test_files_of_a_split_are_told_by_their_names_whatever_their_kind(tmp_path, write):
    kind = {json_lines: "jsonl", parquet: "parquet"}[write]
    for name, row in (("train-0", 0), ("train-1", 1), ("test-0", 2), ("validation", 3)):
        write(tmp_path / f"{name}.{kind}", [ROWS[row]])
    assert list(sources.open_records(tmp_path)) == ROWS[:2]
    for split, rows in (("train", [0, 1]), ("test", [2]), ("validation", [3])):
        opened = sources.open_records(tmp_path, split=split)
        assert list(opened) == [ROWS[i] for i in rows]
    assert error_of(tmp_path, split="dev") == (
        f"{tmp_path} has no split dev, only test, train, validation; name another "
        "folder, or a file."
    )


def test_files_without_any_record_are_named_by_their_pattern(tmp_path):
    for name in "ab":
        json_lines(tmp_path / f"{name}.jsonl", [])
    for path in (tmp_path, tmp_path / "*.jsonl"):
        assert error_of(path) == f"{path} is empty; name a file with a record per line."


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_a_pipe_is_not_waited_for(tmp_path, kind):
    os.mkfifo(tmp_path / f"a.{kind}")
    said = f"{tmp_path}/a.{kind} is no file; name another, or remove it."
    for path in (tmp_path / f"a.{kind}", tmp_path, tmp_path / f"*.{kind}"):
        assert error_of(path) == said


def test_a_line_without_end_is_broken_and_the_others_are_not(tmp_path, monkeypatch):
    monkeypatch.setattr(records, "_LINE_BYTES", 64)
    path = tmp_path / "a.jsonl"
    rows = [{"a": 1}, {"a": "x" * 99}, {"a": 2}, {"a": "x" * 50}, {"a": 3}]
    lines = [json.dumps(row) for row in rows]
    path.write_text("\n".join([" " * 99, *lines]) + "\n")
    opened = sources.open_records(path)
    first, error, *others = found(opened)
    assert isinstance(error, RecordError)
    assert ":3: not a JSON object (it has more than 64 bytes" in str(error)
    assert [first, *others] == [rows[0], *rows[2:]]
    assert places(opened) == [f"{path}:{i + 2}" for i in range(5)]


def test_a_file_whose_name_looks_like_a_pattern_is_itself(tmp_path):
    path = json_lines(tmp_path / "a[1].jsonl", ROWS)
    assert len(sources.open_records(path)) == 23


def test_what_is_no_parquet_is_said_in_one_sentence(tmp_path):
    path = tmp_path / "a.parquet"
    path.write_bytes(b"PAR1 and so on")
    said = error_of(path)
    assert said.startswith(f"{path} cannot be read as parquet (")
    assert said.endswith("); fetch or write it again.")
    assert "\n" not in said


def test_a_file_that_may_not_be_read_is_named(tmp_path, monkeypatch):
    path = json_lines(tmp_path / "a.jsonl", ROWS)

    def refused(*_, **__):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(records, "open", refused, raising=False)
    assert error_of(path) == f"{path} cannot be read: Permission denied."


@pytest.mark.parametrize(
    ("module", "package", "extra"),
    [
        ("pyarrow.parquet", "pyarrow", "parquet"),
        ("tensorflow_datasets", "tensorflow-datasets", "tfds"),
    ],
)
def test_a_package_that_is_not_installed_is_named(
    tmp_path, monkeypatch, module, package, extra
):
    path = parquet(tmp_path / "a.parquet", ROWS)
    if package != "pyarrow":
        path = tmp_path
        (path / "dataset_info.json").touch()
    monkeypatch.setitem(sys.modules, module, None)
    assert error_of(path) == (
        f"{path} is read with {package}, which is not installed; run {install(extra)}."
    )


# The scan


def words(problem):
    return len(problem.question.split())


def scan(opened, layout=layouts.fields, measure=words, *, longest=100, **options: Any):
    options.setdefault("on_error", "raise")
    return sources.scan(opened, layout, measure, longest=longest, **options)


def questions(index):
    return [problem.question for problem in index.problems]


def naive(lines, longest):
    """The scan, written out over the lines of a file."""
    usable, seen, top = [], set(), 0
    counts = dict.fromkeys(("read", "duplicate", "too_long", "broken"), 0)
    for line in lines:
        counts["read"] += 1
        try:
            question = json.loads(line)["question"].strip()
        except (ValueError, KeyError, TypeError):
            counts["broken"] += 1
            continue
        plain = re.sub(r"\s+", " ", question)
        if plain in seen:
            counts["duplicate"] += 1
        elif len(plain.split(" ")) > longest:
            counts["too_long"] += 1
        else:
            usable.append(question)
            top = max(top, len(plain.split(" ")))
        seen.add(plain)
    return usable, top, counts


question = st.lists(
    st.sampled_from(["a", "b", " ", "\n", "  \t"]), min_size=1, max_size=6
)
good = question.map(" ".join).filter(str.strip)
lines = st.lists(
    good.map(lambda text: json.dumps({"question": text, "answer": "1"}))
    | st.sampled_from(["{", '{"question": ', '{"answer": "1"}', "[]"]),
    min_size=1,
    max_size=25,
)


@given(lines, st.integers(1, 5))
def test_the_scan_is_its_definition(tmp_path_factory, content, longest):
    path = tmp_path_factory.getbasetemp() / "scan.jsonl"
    path.write_text("\n".join(content))
    want, top, counts = naive(content, longest)
    opened = sources.open_records(path)
    options = {"longest": longest, "on_error": "skip"}
    if not want:
        with pytest.raises(SourceError, match="none is left"):
            scan(opened, **options)
        return
    got = scan(opened, **options)
    assert questions(got) == want
    assert got.digests == [sources.digest(text) for text in want]
    assert (got.longest, got.counts) == (top, counts)


def test_every_kind_of_file_is_scanned_alike(opened):
    index = scan(opened)
    assert index.counts == {"read": 23, "duplicate": 0, "too_long": 0, "broken": 0}
    assert index.problems == [Problem(r["question"], r["answer"]) for r in opened]


def test_a_question_is_measured_once_and_in_order(tmp_path):
    rows = [{"question": f"{i % 7}?", "answer": str(i)} for i in range(70)]
    opened = sources.open_records(json_lines(tmp_path / "a.jsonl", rows))
    measured = []

    def measure(problem):
        measured.append(problem)
        return 9 if problem.question == "3?" else 1

    index = scan(opened, measure=measure, longest=8)
    assert measured == [Problem(f"{i}?", str(i)) for i in range(7)]
    assert questions(index) == [f"{i}?" for i in (0, 1, 2, 4, 5, 6)]
    assert index.counts == {"read": 70, "duplicate": 63, "too_long": 1, "broken": 0}
    assert index.longest == 1


def test_a_prompt_as_long_as_the_longest_stays(tmp_path):
    rows = [{"question": "a " * n, "answer": "1"} for n in (3, 5, 4)]
    opened = sources.open_records(json_lines(tmp_path / "a.jsonl", rows))
    index = scan(opened, longest=4)
    assert [words(problem) for problem in index.problems] == [3, 4]
    assert index.longest == 4


def test_a_digest_knows_words_and_not_the_space_between_them():
    assert len(sources.digest("a b")) == 16
    assert sources.digest(" a\n\n b\t") == sources.digest("a b")
    assert len({sources.digest(text) for text in ("a b", "ab", "a  c", "A b", "")}) == 5


def test_progress_is_told_to_the_end(opened):
    told = []
    scan(opened, progress=lambda *progress: told.append(progress))
    assert told == [(i, 23) for i in range(1, 24)]


def broken_file(path):
    good = json.dumps(ROWS[0])
    path.write_text(f'{good}\n\n{{"question": "Add."}}\n{{"question": \n{good}\n')
    return sources.open_records(path)


def test_the_first_broken_record_is_raised_with_its_place(tmp_path):
    path = tmp_path / "a.jsonl"
    opened = broken_file(path)
    assert message(LayoutError, scan, opened) == (
        f"{path}:3: answer is missing, the record has the keys question; mend the "
        "record, name its fields with layouts.fields, or --set task.on_error=skip. "
        f"2 of 4 records are broken, also\n{path}:4: not a JSON object (Expecting "
        "value at column 13)"
    )
    said = message(RecordError, scan, opened, partial(layouts.fields, answer=None))
    assert said.startswith(f"{path}:4: not a JSON object (Expecting value")


def test_of_many_broken_records_ten_are_named_and_all_counted(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text((json.dumps(ROWS[0]) + "\n{\n") * 12)
    opened, measured = sources.open_records(path), []
    told = {"measure": lambda problem: measured.append(problem) or 1}
    said = message(RecordError, scan, opened, **told)
    first, *others, last = said.splitlines()
    assert first.startswith(f"{path}:2: not a JSON object (")
    assert first.endswith("skip. 12 of 24 records are broken, also")
    assert [line.partition(": ")[0] for line in others] == [
        f"{path}:{line}" for line in range(4, 22, 2)
    ]
    assert last == "and 2 more."
    assert len(measured) == 1


def test_broken_records_are_skipped_if_so_asked(tmp_path):
    index = scan(broken_file(tmp_path / "a.jsonl"), on_error="skip")
    assert questions(index) == [ROWS[0]["question"]]
    assert index.counts == {"read": 4, "duplicate": 1, "too_long": 0, "broken": 2}


WORKED = [
    {"question": f"What is {i} + 1?", "answer": f"So.\n#### {i + 1}"} for i in range(5)
]
BOXED = {"problem": "Add.", "solution": r"\boxed{2}", "level": "Level 1"}


@pytest.mark.parametrize(
    ("line", "record", "said"),
    [
        (3, {"answer": "no hash"}, "answer='no hash' has no result behind ####"),
        (1, {"answer": "no hash"}, "answer='no hash' has no result behind ####"),
        (2, {"question": 7}, "question is 7, which is no text"),
        (2, {"question": 7.5}, "question is 7.5, which is no text"),
        (2, {"question": None}, "question is empty"),
        (2, {"question": ["a"]}, "question is ['a'], which is no text"),
        (2, {"answer": 7}, "answer='7' has no result behind ####"),
        (2, {"answer": ""}, "answer is empty"),
        (2, {"answer": ["#### 1"]}, "answer is ['#### 1'], which is no text"),
        (4, None, "answer is missing, the record has the keys question"),
        (5, BOXED, "it is laid out as math, and most of its file as gsm8k"),
    ],
)
def test_a_record_that_is_not_laid_out_as_its_file_is_told_by_its_line(
    tmp_path, line, record, said
):
    rows = list(WORKED)
    if record is None:
        rows[line - 1] = {"question": "What?"}
    else:
        rows[line - 1] = record if record is BOXED else WORKED[line - 1] | record
    path = json_lines(tmp_path / "a.jsonl", rows)
    opened = sources.open_records(path)
    layout = sources.resolved_layout(opened, layouts.detect)
    assert message(LayoutError, scan, opened, layout) == (
        f"{path}:{line}: {said}; mend the record, name its fields with "
        f"layouts.fields, {SKIP}"
    )
    index = scan(opened, layout, on_error="skip")
    assert questions(index) == [
        row["question"] for i, row in enumerate(WORKED) if i != line - 1
    ]
    assert index.counts["broken"] == 1


def test_a_layout_that_is_named_is_kept_and_broken_records_do_not_decide(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text("{\n" * 9 + "".join(json.dumps(row) + "\n" for row in WORKED))
    opened = sources.open_records(path)
    assert sources.resolved_layout(opened, layouts.fields) is layouts.fields
    assert sources.resolved_layout(opened, layouts.detect) == layouts.FileLayout(
        layouts.gsm8k
    )


def test_a_row_of_parquet_that_is_not_text_is_skipped(tmp_path):
    opened = sources.open_records(not_text(tmp_path / "a.parquet"))
    with pytest.raises(RecordError, match="row 1: not text"):
        scan(opened)
    index = scan(opened, on_error="skip")
    assert questions(index) == ["Add.", "So."]


def test_what_a_layout_of_ones_own_raises_is_said_with_the_place(opened):
    def own(record):
        return Problem(record["what"])

    said = message(LayoutError, scan, opened, own)
    assert said.partition(" 23 of 23 records are broken")[0] == (
        f"{places(opened)[0]}: the layout failed (KeyError: 'what'); mend it or the "
        "record, or --set task.on_error=skip."
    )


def test_what_is_no_problem_is_a_broken_record_with_its_place(opened):
    """As what a layout raises, and as a text that the tokenizer refuses."""
    said = message(LayoutError, scan, opened, lambda record: None)
    assert said.startswith(
        f"{places(opened)[0]}: the layout failed (TypeError: it gives a NoneType, and "
    )

    first = next(record["question"] for _, record in opened.each())

    def measure(problem):
        if problem.question == first:
            raise ValueError("it has a control token; remove it from the text.")
        return 1

    known = {"longest": 9, "on_error": "skip"}
    found = sources.scan(opened, layouts.fields, measure, **known)
    assert found.counts["broken"] > 0
    assert first not in questions(found)
    with pytest.raises(RecordError, match="it has a control token"):
        sources.scan(opened, layouts.fields, measure, longest=9, on_error="raise")


def test_numbers_of_parquet_are_those_that_were_written(tmp_path):
    """Not with the noise of bits that a double has more; and no time ends a run."""
    path = tmp_path / "a.parquet"
    columns = {
        "question": ["One?", "Two?"],
        "answer": pa.array([1999.99, 0.1], pa.float32()),
    }
    columns["small"] = pa.array([0.1, None], pa.float16())
    inside = pa.struct([("truth", pa.float32()), ("all", pa.list_(pa.float16()))])
    columns["inside"] = pa.array([{"truth": 0.1, "all": [0.3, None]}, None], inside)
    columns["known"] = pa.array([0.1, 0.1], pa.float32()).dictionary_encode()
    pq.write_table(pa.table(columns), path)
    rows = [record for _, record in sources.open_records(path).each()]
    assert [row["answer"] for row in rows] == [1999.99, 0.1]
    assert [row["small"] for row in rows] == [0.1, None]
    assert [row["known"] for row in rows] == [0.1, 0.1]
    assert [row["inside"] for row in rows] == [{"truth": 0.1, "all": [0.3, None]}, None]
    columns["far"] = pa.array([2**60, 0], pa.timestamp("us"))
    pq.write_table(pa.table(columns), path)
    with pytest.raises(RecordError, match=r"row 0: not text \(.*\); mend"):
        scan(sources.open_records(path))
    index = scan(sources.open_records(path), layouts.fields, on_error="skip")
    assert questions(index) == ["Two?"]


def test_names_of_splits_and_kinds_are_told_in_any_case(tmp_path):
    for name, rows in (("Train.jsonl", ROWS[:2]), ("TEST.JSONL", ROWS[2:3])):
        json_lines(tmp_path / name, rows)
    for split, count in (("train", 2), ("test", 1)):
        assert len(sources.open_records(tmp_path, split=split)) == count


def test_a_folder_with_the_page_of_another_library_is_told_in_a_sentence(tmp_path):
    (tmp_path / "dataset_info.json").write_text('{"builder_name": "json"}')
    json_lines(tmp_path / "train.jsonl", ROWS)
    assert "is not of tensorflow-datasets (" in error_of(tmp_path)


def test_a_file_that_breaks_under_the_scan_is_named(tmp_path):
    path = parquet(tmp_path / "a.parquet", ROWS)
    opened = sources.open_records(path)
    path.write_bytes(b"PAR1")
    with pytest.raises(SourceError, match="cannot be read as parquet"):
        scan(opened, on_error="skip")


@pytest.mark.parametrize(
    ("options", "counted", "fix"),
    [
        (
            {"measure": lambda _: 200},
            "1 ask what one before them asks, 3 have a prompt of more than 100 tokens, "
            "0 are broken",
            "allow longer prompts",
        ),
        (
            {"layout": layouts.dapo_math},
            "0 ask what one before them asks, 0 have a prompt of more than 100 tokens, "
            "4 are broken",
            "see what is broken with --set task.on_error=raise",
        ),
    ],
)
def test_if_nothing_is_left_it_is_said_why(tmp_path, options, counted, fix):
    path = json_lines(tmp_path / "a.jsonl", [*ROWS[:3], ROWS[1]])
    opened = sources.open_records(path)
    assert message(SourceError, scan, opened, on_error="skip", **options) == (
        f"{path} has 4 records and none is left: {counted}; {fix}."
    )


@pytest.mark.first(1)
@pytest.mark.parametrize("count", [10_000, 100_000])
def test_a_scan_holds_what_the_layout_takes(tmp_path, count):
    path = tmp_path / "a.jsonl"
    with open(path, "w") as file:
        for i in range(count):
            file.write(f'{{"question": "{i}", "more": "{"o" * 1200}"}}\n')
    tracemalloc.start()
    try:
        opened = sources.open_records(path)
        index = scan(opened, lambda record: Problem(record["question"]), lambda _: 1)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert questions(index)[-1] == str(count - 1)
    assert peak < path.stat().st_size / 2


def test_problems_that_take_half_the_memory_are_refused(tmp_path, monkeypatch):
    texts = [{"question": f"{i}" * 10_000, "answer": f"{i}" * 10_000} for i in range(9)]
    opened = sources.open_records(json_lines(tmp_path / "a.jsonl", texts))
    monkeypatch.setattr(machine, "ram", lambda: 2 * 20_000 * 10)
    assert len(scan(opened).problems) == 9
    monkeypatch.setattr(machine, "ram", lambda: 2 * 20_000 * 5)
    assert message(SourceError, scan, opened) == (
        f"the first 5 problems of {tmp_path / 'a.jsonl'} take half the memory of this "
        "machine; name fewer files, or fields of them with layouts.fields."
    )
