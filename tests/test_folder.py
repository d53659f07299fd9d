import contextlib
import dataclasses
import errno
import importlib
import json
import math
import os
import re
import resource
import struct
import sys
import time
from functools import partial
from typing import Any

import jax
import numpy as np
import pytest
from outputs import message
from small import get_config
from tensorboardX.proto.event_pb2 import Event  # pyright: ignore[reportAttributeAccessIssue]

from curax.config import ConfigError, load, override
from curax.runs import dashboards, folder, marks, policies, reading
from curax.runs.rows import Appended, NotWrittenError, RemovedError, whole_rows
from curax.settings import files
from curax.settings.config_paths import describe
from curax.step.types import Shown
from curax.tasks import chain, file_task
from curax.types import Contexts, Prompts
from curax.verify import graders

CONFIG = get_config()
FOUR = [{"step": step, "loss/mean": step / 8} for step in range(4)]


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def events(path):
    """(step, name) to value: what TensorBoard shows, restarts taken into account."""
    shown = {}
    for file in sorted(path.iterdir()):
        data = file.read_bytes()
        while data:
            (length,) = struct.unpack("<Q", data[:8])
            event = Event.FromString(data[12 : 12 + length])
            data = data[16 + length :]
            if event.session_log.status == event.session_log.START:
                shown = {k: v for k, v in shown.items() if k[0] < event.step}
            for value in event.summary.value:
                shown[event.step, value.tag] = value.simple_value
    return shown


# Rows


def appended(path, **how):
    return Appended(path, whole_rows(path, **how))


def written(path, rows, *, upto=-1.0):
    file = appended(path, upto=upto)
    file.write(rows)
    file.close()
    return lines(path)


def test_rows_are_appended_one_object_per_line(tmp_path):
    path = tmp_path / "rows.jsonl"
    assert written(path, FOUR[:2]) == FOUR[:2]
    assert written(path, FOUR[2:], upto=math.inf) == FOUR


@pytest.mark.parametrize("upto", [-1, 0, 2, 3, math.inf])
def test_rows_behind_the_checkpoint_are_cut_off(tmp_path, upto):
    path = tmp_path / "rows.jsonl"
    written(path, [*FOUR, FOUR[3]])
    kept = [row for row in [*FOUR, FOUR[3]] if row["step"] <= upto]
    assert written(path, [{"step": 9}], upto=upto) == [*kept, {"step": 9}]


@pytest.mark.parametrize("cut", range(1, 8))
def test_half_a_row_at_the_end_is_cut_off(tmp_path, cut):
    path = tmp_path / "rows.jsonl"
    written(path, FOUR)
    path.write_bytes(path.read_bytes()[:-cut])
    assert written(path, FOUR[3:], upto=math.inf) == FOUR


def test_the_rows_that_stand_there_are_read_back(tmp_path):
    files = opened(tmp_path, step=None)
    files.write([*FOUR, {"step": 4, "loss/mean": [math.nan, 1.0]}])
    assert [*files.rows(folder.METRICS)] == [
        *FOUR,
        {"step": 4, "loss/mean": [None, 1.0]},
    ]
    files.close()
    with (tmp_path / folder.METRICS).open("a") as file:
        file.write('{"step": 5, "lo')
    files = opened(tmp_path, step=2)
    assert [*files.rows(folder.METRICS)] == FOUR[:3]
    files.write(FOUR[3:])
    assert [*files.rows(folder.METRICS)] == FOUR
    files.close()


def test_a_row_is_on_disk_as_soon_as_it_is_written(tmp_path):
    file = appended(tmp_path / "rows.jsonl", upto=-1)
    file.write(FOUR[:1])
    assert lines(tmp_path / "rows.jsonl") == FOUR[:1]
    file.close()


@pytest.mark.parametrize("replaced", [False, True])
def test_a_file_that_is_no_longer_there_is_not_written_on(tmp_path, replaced):
    path = tmp_path / "rows.jsonl"
    file = appended(path, upto=-1)
    file.write(FOUR[:1])
    path.rename(tmp_path / "elsewhere.jsonl")
    if replaced:
        path.write_text("of another program\n")
    said = message(RemovedError, file.write, FOUR[1:2])
    file.close()
    assert str(path) in said
    assert lines(tmp_path / "elsewhere.jsonl") == FOUR[:1]
    assert not replaced or path.read_text() == "of another program\n"


def refused(path, **how) -> str:
    """Why a file is not opened; it stays as it is."""
    before = path.read_bytes()
    said = message(reading.DamagedError, appended, path, **how)
    assert path.read_bytes() == before
    return said


WRONG = ['{"step": 1, "lo', "5", "null", "[]", '{"a": 1}', '{"step": "2"}', "\xff"]
WRONG += ['{"step": NaN}', '{"step": true}', '{"step": 0}']


@pytest.mark.parametrize("first", [None, 0])
@pytest.mark.parametrize("text", WRONG)
def test_in_front_of_a_checkpoint_nothing_is_cut_off(tmp_path, text, first):
    path = tmp_path / "rows.jsonl"
    written(path, FOUR)
    rows = path.read_bytes().splitlines(keepends=True)
    rows[1] = text.encode("latin-1") + b"\n"
    path.write_bytes(b"".join(rows))
    for upto in (3, math.inf):
        if first is not None or text != '{"step": 0}':  # completions share a step
            said = refused(path, upto=upto, first=first)
            assert re.fullmatch(rf"{path}:2: .*; repair or delete this line\.", said)
    # Where there is no checkpoint, or one of before, it is as good as any row.
    appended(path, upto=-1, first=first).close()
    assert path.read_bytes() == b""


def test_what_lies_behind_the_last_step_of_a_checkpoint_may_be_anything(tmp_path):
    path = tmp_path / "rows.jsonl"
    for tail in ("\0\0\0", "5\n", '{"step": 4}\nnull\n', '{"step": 9}\n{"st'):
        written(path, FOUR)
        with path.open("a") as file:
            file.write(tail)
        appended(path, upto=3, first=0).close()
        assert lines(path) == FOUR
        path.unlink()


@pytest.mark.parametrize(
    ("steps", "cut", "sentence"),
    [
        ([0, 1, 3], 0, ":3: step 3 behind step 1; bring back the lines between them."),
        ([1, 2, 3], 0, ":1: step 1 behind step -1; bring back the lines between them."),
        ([0, 1, 2, 1, 3], 0, ":4: step 1 behind step 2; repair or delete this line."),
        ([0, 1, 2, 3, 3], 0, ":5: step 3 behind step 3; repair or delete this line."),
        *(
            (steps, cut, f": no line of step {step}, and there is a checkpoint of step "
            "3; bring back the lines up to that step.")
            for steps, cut, step in (([0, 1, 2], 0, 3), ([], 0, 0), ([0, 1, 2], 2, 2))
        ),
    ],
)  # fmt: skip
def test_rows_that_a_checkpoint_counts_on_are_missed(tmp_path, steps, cut, sentence):
    path = tmp_path / "rows.jsonl"
    text = "".join(f'{{"step": {step}}}\n' for step in steps)
    path.write_text(text[: len(text) - cut])
    assert refused(path, upto=3, first=0) == f"{path}{sentence}"


@contextlib.contextmanager
def files_of_at_most(size):
    """No file may grow beyond so many bytes: the nearest to a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_rows_for_which_there_is_no_room_are_not_written_at_all(tmp_path):
    path = tmp_path / "rows.jsonl"
    file = appended(path, upto=-1)
    file.write(FOUR[:2])
    with files_of_at_most(path.stat().st_size + 40):
        said = message(NotWrittenError, file.write, FOUR[2:])
    assert said == f"{path} cannot be written (File too large)"
    assert lines(path) == FOUR[:2]
    file.write(FOUR[2:])
    file.close()
    assert lines(path) == FOUR


def test_a_disk_that_is_full_only_when_it_is_asked_is_told_in_a_sentence(
    tmp_path, monkeypatch
):
    path = tmp_path / "rows.jsonl"
    file = appended(path, upto=-1)

    def full(_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    said = message(NotWrittenError, file.sync)
    file.close()
    assert said == f"{path} cannot be written (No space left on device)"


def test_json_gets_plain_values_and_null_for_what_is_not_finite(tmp_path):
    value = {
        "a": np.float32(0.5),
        "b": [math.nan, np.inf, 1],
        "c": (np.arange(3), jax.numpy.float32(np.nan)),
        "d": {"e": np.bool_(True), "f": "text", "g": None},
    }
    folder.write_json(tmp_path / "x.json", value)
    assert json.loads((tmp_path / "x.json").read_text()) == {
        "a": 0.5,
        "b": [None, None, 1],
        "c": [[0, 1, 2], None],
        "d": {"e": True, "f": "text", "g": None},
    }
    assert os.listdir(tmp_path) == ["x.json"]


# Files


def opened(path, *, step, warm=0):
    task, seed = chain.task(depth=1), np.uint32(7)
    return folder.Files(path, task, seed, step=step, warm=warm)


def test_on_resume_all_files_go_back_to_the_checkpoint_and_the_warm_start_stays(
    tmp_path,
):
    for step, before, after in ((None, [], FOUR), (1, FOUR[:2], FOUR[2:])):
        files = opened(tmp_path, step=step)
        assert lines(tmp_path / folder.METRICS) == before
        if step is None:
            files.warm.write(FOUR[1:])
        files.write(after)
        files.close()
    assert lines(tmp_path / folder.METRICS) == FOUR
    assert lines(tmp_path / folder.WARM) == FOUR[1:]
    want = {(row["step"], "loss/mean"): row["loss/mean"] for row in FOUR}
    assert events(tmp_path / folder.EVENTS) == want
    for warm in (2, 0):
        opened(tmp_path, step=None, warm=warm).close()
        assert lines(tmp_path / folder.METRICS) == []
        assert lines(tmp_path / folder.WARM) == FOUR[1 : warm + 1]


def test_tensorboard_shows_a_run_that_goes_on_where_the_clock_was_set_back(
    tmp_path, monkeypatch
):
    now = time.time()
    for number, (step, rows) in enumerate([(None, FOUR[:3]), (1, FOUR[2:]), (2, FOUR)]):
        monkeypatch.setattr(time, "time", lambda number=number: now - 1000 * number)
        files = opened(tmp_path, step=step)
        files.write([row for row in rows if row["step"] > (step or -1)])
        files.close()
    want = {(row["step"], "loss/mean"): row["loss/mean"] for row in FOUR}
    assert events(tmp_path / folder.EVENTS) == want


def test_a_run_that_goes_on_has_no_predictions_of_where_it_ended(tmp_path):
    files = opened(tmp_path, step=None)
    files.write(FOUR)
    files.close()
    folder.write_json(tmp_path / folder.EXPECTED, {"after": {"group/draws": 8.0}})
    opened(tmp_path, step=3).close()
    assert not reading.expected(tmp_path)


def test_tensorboard_gets_the_mean_of_the_seeds_and_nothing_that_is_not_finite(
    tmp_path,
):
    files = opened(tmp_path, step=None)
    row = {"step": 2, "a": np.array([1.0, 3.0]), "b": [math.nan, 4.0], "c": math.nan}
    files.write([row])
    files.close()
    assert events(tmp_path / folder.EVENTS) == {(2, "a"): 2.0, (2, "b"): 4.0}
    assert lines(tmp_path / folder.METRICS) == [
        {"step": 2, "a": [1.0, 3.0], "b": [None, 4.0], "c": None}
    ]


def test_the_first_and_the_last_evaluation_are_kept(tmp_path):
    files = opened(tmp_path, step=None)
    kept = []
    for step in (0, 3, 6):
        files.write_evaluation(step, np.array([step / 8, np.nan]), samples=4)
        kept.append(json.loads((tmp_path / folder.EVALUATION).read_text()))
    files.close()
    sides = [
        {"step": step, "samples": 4, "pass_rates": [step / 8, None]}
        for step in (0, 3, 6)
    ]
    assert kept == [
        {"before": sides[0]},
        {"before": sides[0], "after": sides[1]},
        {"before": sides[0], "after": sides[2]},
    ]


# Completions


def shown(array: Any = np.array):
    """Two prompts, groups of two: a right, a wrong, a missing and a failed one."""
    prompts = Prompts(
        tokens=array([[9, 7, 16, 3, 21], [1, 4, 17, 2, 21]]),
        mask=array([[False, True, True, True, True]] * 2),
        id=array([5, 6]),
        target=None,
    )
    return Shown(
        prompts=prompts,
        tokens=array([[[10, 19], [3, 20]], [[2, 19], [0, 0]]]),
        mask=array([[[True, True], [True, False]], [[True, True], [False, False]]]),
        outcome=array([[1.0, 0.0], [np.nan, np.nan]], np.float32),
        reward=array([[0.5, 0.0], [0.0, 0.0]], np.float32),
        credit=array([[0.25, -0.25], [0.0, 0.0]], np.float32),
        keep=array([[True, True], [False, False]]),
        exists=array([[True, True], [True, False]]),
        version=array([[2, 2], [2, 0]]),
        level=array([0, 0]),
        contexts=Contexts(tokens=prompts.tokens, mask=prompts.mask),
        reference=None,
    )


TASK = chain.task(depth=1)
FIRST = {
    "step": 3,
    "seed": 7,
    "prompt_id": 5,
    "prompt": "7 + 3 =",
    "slot": 0,
    "text": "10 end",
    "tokens": [10, 19],
    "outcome": 1.0,
    "reward": 0.5,
    "advantage": 0.25,
    "kept": True,
    "policy_version": 2,
}


def test_a_completion_is_an_object_and_a_missing_outcome_is_null():
    seed = np.uint32(7)
    got = [
        files.json_value(row) for row in folder.completion_rows(3, shown(), TASK, seed)
    ]
    assert got[0] == FIRST
    assert [(row["prompt_id"], row["slot"]) for row in got] == [(5, 0), (5, 1), (6, 0)]
    assert got[1]["text"] == "3"
    assert [row["outcome"] for row in got] == [1.0, 0.0, None]
    assert [row["reward"] for row in got] == [0.5, 0.0, None]


def test_hints_and_references_are_written_where_there_are_any():
    few = shown()
    tokens = np.array([[23, 10, 22, 7, 16, 21], [22, 22, 22, 1, 16, 21]])
    mask = np.array([[True] * 6, [False] * 3 + [True] * 3])
    more = dataclasses.replace(
        few,
        level=np.array([2, 0]),
        contexts=Contexts(tokens=tokens, mask=mask),
        reference=(
            np.array([[10, 19, 0], [3, 19, 0]]),
            np.array([[True, True, False], [True, False, False]]),
            np.array([[0.75, 0.25, np.nan], [1.0, np.nan, np.nan]], np.float32),
        ),
    )
    both = jax.tree.map(lambda x: np.stack([x, x]), more)
    seeds = np.array([7, 8], np.uint32)
    for shown_, seed in ((more, seeds[0]), (both, seeds)):
        rows = [
            files.json_value(r) for r in folder.completion_rows(3, shown_, TASK, seed)
        ]
        hinted = {"hint_level": 2, "reference": ["10", "end"], "weights": [0.75, 0.25]}
        assert rows[0] == FIRST | hinted | {"prompt": TASK.decode(tokens[0])}
        assert rows[2]["reference"] == ["3"]
        assert rows[2]["weights"] == [1.0]
        assert "hint_level" not in rows[2]


def test_of_many_seeds_all_completions_are_written_with_their_seed():
    both = jax.tree.map(lambda x: np.stack([x, x]), shown())
    seeds = np.array([7, 8], np.uint32)
    got = [
        files.json_value(row) for row in folder.completion_rows(3, both, TASK, seeds)
    ]
    assert [row["seed"] for row in got] == [7] * 3 + [8] * 3
    assert got[0] == FIRST
    assert got[3] == FIRST | {"seed": 8}


def test_what_cannot_be_written_at_the_end_is_told_and_all_is_closed(
    tmp_path, monkeypatch
):
    files = opened(tmp_path, step=None)
    close = dashboards.TensorBoard.close

    def full(self):
        close(self)
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(dashboards.TensorBoard, "close", full)
    assert message(NotWrittenError, files.close) == (
        f"{tmp_path / 'tensorboard'} cannot be written (No space left on device)"
    )
    assert all(rows._file.closed for rows in files._rows)


# What is refused before anything is written


def error_of(workdir, config=CONFIG, *, resume=False, recipe="") -> str:
    how = {"resume": resume, "recipe": recipe}
    return message(ConfigError, folder.check, workdir, config, **how)


no_place = partial(message, ConfigError, folder.check_writable)


def test_a_new_folder_and_an_empty_one_are_let_pass_and_left_alone(tmp_path):
    folder.check_writable(tmp_path / "a" / "b")
    folder.check(tmp_path, CONFIG, resume=False)
    folder.check(tmp_path / "a" / "b", CONFIG, resume=False)
    assert not list(tmp_path.iterdir())


def test_a_folder_in_which_no_checkpoint_could_be_written_is_refused(tmp_path):
    workdir = tmp_path / "a\udcff" / "b"
    assert no_place(workdir) == (
        f"--workdir {workdir} has a byte that is not UTF-8, and checkpoints cannot be "
        "written there; name another folder."
    )
    workdir = tmp_path / "\udcc3\udcbc"  # as the locale C reads an umlaut
    assert no_place(workdir) == (
        f"--workdir {workdir} has letters that this locale lacks, and checkpoints "
        "cannot be written there; set PYTHONUTF8=1, or name another folder."
    )
    folder.check_writable(tmp_path / "\u4e2d")


@pytest.mark.parametrize("name", ["lr[1e-3]", "a*", "why?", "a\\b"])
def test_a_folder_whose_checkpoints_could_not_be_read_is_refused(tmp_path, name):
    found = next(c for c in name if c in "*?[\\")
    for workdir in (tmp_path / name, tmp_path / name / "b"):
        assert no_place(workdir) == (
            f"--workdir {workdir} has a {found}, which Orbax takes for that of a "
            "pattern when it reads a checkpoint; name another folder."
        )
    folder.check_writable(tmp_path / "a]b{c,d}%~=#")


def test_a_file_is_no_folder(tmp_path):
    (tmp_path / "file").touch()
    for workdir in (tmp_path / "file", tmp_path / "file" / "a" / "b"):
        assert no_place(workdir) == (
            f"--workdir {workdir}: {tmp_path / 'file'} is a file; name a folder."
        )


def test_a_folder_that_cannot_be_written_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "access", lambda path, mode: path != tmp_path)
    for workdir in (tmp_path, tmp_path / "a" / "b"):
        assert no_place(workdir) == (
            f"--workdir {workdir} cannot be written: no permission in {tmp_path}; name "
            "another folder."
        )


def test_what_only_the_system_knows_is_said_when_the_folder_is_made():
    assert message(ConfigError, folder.make, folder.Path("/proc/run"), CONFIG) == (
        "--workdir /proc/run cannot be written (No such file or directory); name "
        "another folder."
    )


def test_questions_for_which_there_is_no_room_are_told_as_the_folder_is(tmp_path):
    built = dataclasses.replace(chain.task(depth=1), fingerprint=7)
    with files_of_at_most(20):
        said = message(ConfigError, folder.write_questions, tmp_path, built)
    assert said == (
        f"--workdir {tmp_path} cannot be written (File too large); name another folder."
    )
    assert not list(tmp_path.iterdir())
    folder.write_questions(tmp_path, built)
    folder.check_questions(tmp_path, built)


def test_other_questions_than_those_of_the_run_are_refused(tmp_path):
    built = dataclasses.replace(chain.task(depth=1), fingerprint=7)
    folder.write_questions(tmp_path, built)
    other = dataclasses.replace(built, fingerprint=8)
    assert message(ConfigError, folder.check_questions, tmp_path, other) == (
        "--resume: the questions, answers, solutions or hints in the files of the task "
        f"are not those in {tmp_path / folder.QUESTIONS} that the run began with; "
        "bring these back, or name another --workdir."
    )


def test_questions_that_are_asked_otherwise_than_the_run_began_to_are_refused(
    tmp_path,
):
    built = dataclasses.replace(chain.task(depth=1), fingerprint=7)
    folder.write_questions(tmp_path, built)
    folder.check_questions(tmp_path, built)

    def shouted(ids):
        prompts = built.prompts(ids)
        return dataclasses.replace(prompts, tokens=prompts.tokens + 1)

    other = dataclasses.replace(built, prompts=shouted)
    assert message(ConfigError, folder.check_questions, tmp_path, other) == (
        "--resume: the tokenizer or the chat template of the task makes other prompts "
        f"of the questions than those in {tmp_path / folder.QUESTIONS} that the run "
        "began with; bring back what it was, or name another --workdir."
    )
    (tmp_path / folder.QUESTIONS).write_text('{"mark": 7}')  # of an earlier curax
    folder.check_questions(tmp_path, other)


@pytest.mark.parametrize("option", ["grader", "environment", "term"])
def test_another_file_of_a_grader_is_told_once(tmp_path, monkeypatch, option):
    code = "def judge(*_, **__):\n    pass\n"
    (tmp_path / "judging.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "judging", raising=False)
    judge: Any = importlib.import_module("judging").judge
    options: dict[str, Any] = {option: judge}
    if option == "term":  # of a weighted grader, beside the outcome's
        terms = {"right": graders.numbers, "own": judge}
        weights = dict.fromkeys(terms, 1.0)
        how = {"terms": terms, "weights": weights, "outcome": "right"}
        options = {"grader": partial(graders.weighted, **how)}
    task: Any = partial(file_task.task, train="", **options)
    config = dataclasses.replace(CONFIG, task=task)
    built = dataclasses.replace(chain.task(depth=1), fingerprint=7)
    assert folder.grader_warning(tmp_path, marks.grader(config)) == ""  # a new run
    folder.write_questions(tmp_path, built, marks.grader(config))
    began = json.loads((tmp_path / folder.QUESTIONS).read_text())
    assert folder.grader_warning(tmp_path, marks.grader(config)) == ""
    (tmp_path / "judging.py").write_text(code + "    return\n")
    other = marks.grader(config)
    assert folder.grader_warning(tmp_path, other) == (
        "the file of the grader or environment has changed since the run began or was "
        "resumed; from here on outcomes are by the new one."
    )
    changed = dataclasses.replace(built, fingerprint=8)  # other questions are no reason
    folder.write_questions(tmp_path, changed, other)
    assert json.loads((tmp_path / folder.QUESTIONS).read_text()) == {
        **began,
        "grader": other,
    }
    assert folder.grader_warning(tmp_path, other) == ""
    judge.__globals__["get_config"] = None  # a file that holds a config too
    assert marks.grader(config) == 0
    (tmp_path / folder.QUESTIONS).write_text('{"mark": 7}')
    assert folder.grader_warning(tmp_path, other) == ""


@pytest.mark.parametrize("name", ["config.json", "metrics.jsonl", "checkpoints"])
def test_a_folder_with_a_run_is_not_begun_anew(tmp_path, name):
    (tmp_path / name).mkdir()
    assert error_of(tmp_path) == (
        f"--workdir {tmp_path} holds {name} of a run already; add --resume to go on "
        "with that run, or name another folder."
    )


def test_a_run_is_resumed_with_its_own_config_and_with_more_steps(tmp_path):
    folder.make(tmp_path / "run", CONFIG)
    for steps in (6, 7):
        more = override(CONFIG, {"steps": steps})
        folder.check(tmp_path / "run", more, resume=True)


@pytest.mark.parametrize(
    "assignments",
    [
        ["mesh.data=8"],
        ["mesh.fsdp=2", "mesh.tensor=2"],
        ["update.micro_batches=2", "update.token_chunk=4"],
        ["update.tokens_per_micro_batch=8"],
        ["warm_start.micro_batches=2"],
        ["logging.checkpoint_every=1", "logging.keep=9", "logging.drift_nats=0.1"],
        ["logging.every=1", "logging.rollout_prompts=0"],
    ],
)
def test_a_run_is_resumed_with_what_changes_results_by_rounding_at_most(
    tmp_path, assignments
):
    folder.make(tmp_path, CONFIG)
    changed = override(CONFIG, assignments)
    assert describe(changed) != describe(CONFIG)
    folder.check(tmp_path, changed, resume=True)
    folder.make(tmp_path, changed)
    assert json.loads((tmp_path / "config.json").read_text()) == describe(changed)


OWN = """
from dataclasses import replace
from small import get_config as small

def keep_all(outcome, exists, ended):
    return exists

def keep_none(outcome, exists, ended):
    return exists & False

def get_config():
    return replace(small(), gate={})
"""


def test_a_config_file_that_was_renamed_is_resumed_and_another_function_is_not(
    tmp_path,
):
    old, new, other = (tmp_path / name for name in ("a.b.py", "c.py", "d.py"))
    for file, gate in ((old, "keep_all"), (new, "keep_all"), (other, "keep_none")):
        file.write_text(OWN.format(gate))
    folder.make(tmp_path, load(old))
    folder.check(tmp_path, load(new), resume=True)
    assert error_of(tmp_path, load(other), resume=True).startswith(
        f"--resume: gate=config.keep_none differs from config.keep_all in {tmp_path}"
    )
    folder.make(tmp_path, load(new))
    named = json.loads((tmp_path / "config.json").read_text())["gate"]
    assert named == {"function": "config_c.keep_all"}


def test_the_config_of_a_run_is_read_by_its_file_under_another_name(tmp_path):
    old, new = tmp_path / "before.py", tmp_path / "after.py"
    old.write_text(OWN.format("keep_all"))
    folder.make(tmp_path, load(old))
    old.rename(new)
    del sys.modules["config_before"]
    said = message(ConfigError, policies.run_config, tmp_path)
    assert said.endswith("name that file with --config.")
    got = policies.run_config(tmp_path, file=str(new))
    assert got.gate is sys.modules["config_after"].keep_all  # pyright: ignore[reportAttributeAccessIssue]


@pytest.mark.parametrize(
    ("assignment", "was", "rule"),
    [
        ("steps=5", "6", "steps may only grow"),
        ("loss.high=0.5", "0.28", "a run keeps its config"),
        ("seed=1", "3", "a run keeps its config"),
        ("loss.dual=3.0", "None", "a run keeps its config"),
    ],
)
def test_a_changed_config_is_not_resumed(tmp_path, assignment, was, rule):
    folder.make(tmp_path, CONFIG)
    name = assignment.partition("=")[0]
    changed = override(
        CONFIG, [assignment, "steps=7"] if "steps" not in name else [assignment]
    )
    assert error_of(tmp_path, changed, resume=True) == (
        f"--resume: {assignment} differs from {was} in {tmp_path / 'config.json'}; "
        f"{rule}, so set {name} back or name another --workdir."
    )


def test_a_run_that_is_resumed_by_another_recipe_is_told_both(tmp_path):
    folder.make(tmp_path, CONFIG, "grpo")
    other = override(CONFIG, ["seed=1"])
    for recipe, said in {
        "dapo": f"--resume: {tmp_path} holds a run of grpo, and seed=1 of dapo "
        "differs from 3 there; name grpo, or another --workdir.",
        "configs/grpo.py": f"--resume: seed=1 differs from 3 in "
        f"{tmp_path}/config.json; a run keeps its config, so set seed back or name "
        "another --workdir.",
    }.items():
        assert error_of(tmp_path, other, resume=True, recipe=recipe) == said
    folder.check(tmp_path, CONFIG, resume=True, recipe="dapo")  # the same by any name


@pytest.mark.parametrize(
    ("text", "what"),
    [
        *((text, "not a JSON object") for text in ("5", "null", "[]", "[" * 99_999)),
        ('{"steps": ', "not JSON"),
    ],
)
def test_a_config_that_is_no_object_is_not_resumed(tmp_path, text, what):
    (tmp_path / "config.json").write_text(text)
    assert error_of(tmp_path, resume=True) == (
        f"{tmp_path / 'config.json'}:1: {what}; the run cannot be resumed, name "
        "another --workdir."
    )


@pytest.mark.parametrize(
    ("make", "kind"), [(os.mkfifo, "named pipe"), (os.mkdir, "folder")]
)
@pytest.mark.parametrize(
    "name",
    [
        *(folder.METRICS, folder.ROLLOUTS, folder.ALARMS, folder.WARM),
        *(folder.EVALUATION, folder.QUESTIONS, folder.CONFIG),
    ],
)
def test_what_is_no_file_is_refused_and_not_waited_for(tmp_path, name, make, kind):
    folder.make(tmp_path, CONFIG)
    written(tmp_path / folder.METRICS, FOUR)
    (tmp_path / name).unlink(missing_ok=True)
    make(tmp_path / name)
    (tmp_path / folder.CHECKPOINTS).mkdir()  # so it is the folder of a run

    def resumed():
        config = folder.pinned(tmp_path, CONFIG, resume=True)
        folder.check(tmp_path, config, resume=True)
        folder.check_files(tmp_path, 3, finished=False)

    def read():
        policies.run_config(tmp_path)
        reading.read(tmp_path)

    for use in (resumed, read) if name != folder.QUESTIONS else (resumed,):
        said = message((reading.DamagedError, ConfigError), use)
        assert said.startswith(f"{tmp_path / name}: it is a {kind}, not a file"), said


def test_a_pipe_where_a_file_is_first_written_is_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "a.json.tmp")
    os.mkfifo(tmp_path / "a.json")
    folder.write_json(tmp_path / "a.json", 1)
    assert lines(tmp_path / "a.json") == [1]
    assert [path.name for path in tmp_path.iterdir()] == ["a.json"]


def test_a_value_of_another_type_is_told_as_such(tmp_path):
    folder.make(tmp_path, CONFIG)
    path = tmp_path / "config.json"
    path.write_text(path.read_text().replace('"seed": 3', '"seed": "3"'))
    assert error_of(tmp_path, resume=True).startswith(
        f"--resume: seed=3 differs from '3' in {path}; "
    )


def test_the_resolved_config_is_written_beside_the_metrics(tmp_path):
    folder.make(tmp_path / "a" / "b", CONFIG)
    text = (tmp_path / "a" / "b" / "config.json").read_text()
    assert json.loads(text) == describe(CONFIG)
