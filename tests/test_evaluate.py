"""The evaluation of a policy: what is drawn, what is said of it, and going on."""

import contextlib
import json
import os
import pkgutil
import re
import shutil
import signal
import subprocess
import sys
import time
from argparse import Namespace
from collections import Counter
from dataclasses import replace
from functools import partial
from itertools import combinations
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import pytest
import real
import saved
import small
import words
from outputs import message, printed, refusal
from test_folder import files_of_at_most, lines

from curax import rollout
from curax.commands import demo
from curax.config import ConfigError
from curax.evaluate import __main__ as evaluate
from curax.evaluate import benchmarks, questions, results, runner, samples, setup
from curax.models import pretrained, prompt_form
from curax.runs import folder, policies
from curax.settings import lock
from curax.tasks import (
    file_task,
    gym,
    gymnasium,
    layouts,
    openenv,
    sources,
    text,
    verifiers,
    worlds,
)
from curax.tasks.prompt_format import PromptFormat
from curax.types import Turn
from curax.verify import graders

ROOT = Path(__file__).parents[1]
GRADER = '''
import os, time, zlib

def grade(question, completion, answer):
    """Right, wrong, half right or unknown, whatever it says."""
    time.sleep(float(os.environ.get("SLOW", 0)))
    kind = zlib.crc32(f"{question} {completion} {answer}".encode()) % 16
    if kind == 15:
        raise ValueError("cannot tell")
    return None if kind == 14 else 0.5 if kind > 11 else float(kind < 6)

def always(question, completion, answer):
    return 1

def fails(question, completion, answer):
    if os.path.exists(os.environ["MENDED"]):
        return 1.0
    raise KeyError("gold")

def closure():
    return lambda question, completion, answer: 1.0

bound = closure()
def unasked(question, completion):
    return 1
'''
N, PROBLEMS = 4, 10
VOCABULARY = 384  # rows of the head of the small checkpoint
CONFIDENT = ("--confidence", 5, "--window", 3)
SAMPLING = ["--n", str(N), "--max-tokens", "6", "--batch", "4", "--slots", "6"]
main = partial(printed, evaluate.main)


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A folder with files of problems and a grader that Python finds."""
    path = tmp_path_factory.mktemp("place")
    (path / "marks.py").write_text(GRADER)
    records = [
        {"problem": r["question"], "answer": r["answer"], "solution": r["solution"]}
        | {"level": f"Level {i % 3 + 1}", "type": ("sums", "rest")[i % 2]}
        for i, r in enumerate(demo.problems(seed=3, count=PROBLEMS))
    ]
    demo.write_lines(path / "math.jsonl", records)
    demo.write_lines(path / "turned.jsonl", records[::-1])
    demo.write_lines(path / "aside.jsonl", list(demo.problems(seed=4, count=3)))
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(path))
        yield path


def typed(place, out, *more, data=("math.jsonl", "aside.jsonl"), sampling=SAMPLING):
    """The words of an evaluation of the small checkpoint."""
    files = [str(place / name) for name in data]
    here = ["--model", str(real.checkpoint(small=True)), "--data", *files]
    here += ["--grader", "marks:grade", "--greedy", "--k", "1", "2", "3", str(N)]
    return [*here, *sampling, "--out", str(out), *map(str, more)]


@pytest.fixture(scope="module")
def whole(place):
    """An evaluation that nothing interrupted, and what it printed."""
    out = place / "whole"
    status, said, err = main(*typed(place, out))
    assert (status, err) == (0, "")
    return out, said


def saved_results(out):
    return json.loads((out / "results.json").read_text())


def snapshot(path: Path):
    """Names and bytes of all that is in a folder."""
    return {
        file: file.read_bytes() if file.is_file() else b"" for file in path.rglob("*")
    }


def assert_same(got, want):
    """Two folders that differ in nothing but the command that was typed, and times."""
    assert {f.name for f in got.iterdir()} == {f.name for f in want.iterdir()}
    for file in want.iterdir():
        if file.name != runner.RESULTS:
            assert (got / file.name).read_bytes() == file.read_bytes()
    one, other = ({**saved_results(out), "command": ""} for out in (got, want))
    for page in (one, other):
        for file in page["results"].values():
            del file["speed"]
    assert one == other


# ----- what is drawn


def test_every_problem_has_a_block_of_completions(whole, place):
    rows = lines(whole[0] / "math.jsonl")
    records = lines(place / "math.jsonl")
    names = [(row["problem"], row["greedy"], row["slot"]) for row in rows]
    assert names == [
        (number, *one)
        for number in range(PROBLEMS)
        for one in [(True, 0), *((False, slot) for slot in range(N))]
    ]
    for row in rows:
        record = records[row["problem"]]
        assert (row["question"], row["gold"]) == (record["problem"], record["answer"])
        assert f"Level {row['level']}" == record["level"]
        assert row["subject"] == record["type"]
        assert 1 <= row["length_tokens"] <= 6
        assert row["finished"] or row["length_tokens"] == 6
        assert (row["outcome"] is None) == (row["reason"] is not None)
    assert {row["reason"] for row in rows} == {
        None,
        "none",
        "error: ValueError: cannot tell",
    }
    assert {row["outcome"] for row in rows} == {None, 0.0, 0.5, 1.0}
    sampled = [row["text"] for row in rows if not row["greedy"]]
    assert len(set(sampled)) > len(sampled) / 2


def test_greedy_completions_are_the_likeliest_tokens(whole):
    folder = real.checkpoint(small=True)
    model = pretrained.model(path=str(folder), dtype="float32")
    spoken = text.load(folder)
    params = model.load(None)
    features = jax.jit(lambda *args: model.features(params, *args)[0])
    places = np.arange(64, dtype=np.int32)[None]
    for row in [row for row in lines(whole[0] / "math.jsonl") if row["greedy"]][:3]:
        tokens = spoken.chat([{"role": "user", "content": row["question"]}])
        start = len(tokens)
        while len(tokens) - start < 6:
            # What is behind a token does not change what it predicts.
            behind = np.array([tokens + [0] * (64 - len(tokens))], np.int32)
            last = features(behind, places, behind >= 0)[0, len(tokens) - 1]
            tokens.append(int(np.argmax(model.head(params) @ last)))
            if tokens[-1] in spoken.end:
                break
        assert row["text"] == spoken.decode(tokens[start:])
        assert row["length_tokens"] == len(tokens) - start


def test_the_same_again_changes_nothing(whole, place):
    before = snapshot(whole[0])
    status, said, err = main(*typed(place, whole[0]))
    assert (status, err) == (0, "")
    after = snapshot(whole[0])
    results_file = whole[0] / runner.RESULTS
    assert json.loads(before.pop(results_file)) == json.loads(after.pop(results_file))
    assert before == after
    assert said == whole[1][whole[1].index("math.jsonl: ") :]


def by_question(path):
    """The block of each problem, without its number."""
    found = {}
    for row in lines(path):
        del row["problem"]
        found.setdefault(row["question"], []).append(row)
    return found


@pytest.mark.long
def test_neither_batch_nor_order_nor_limit_changes_what_is_drawn(place, whole):
    out = place / "turned"
    other = ["--n", str(N), "--max-tokens", "6", "--batch", "3", "--slots", "0"]
    words_ = typed(place, out, "--limit", 7, data=["turned.jsonl"], sampling=other)
    assert main(*words_)[0] == 0
    mine, theirs = (
        by_question(out / "turned.jsonl"),
        by_question(whole[0] / "math.jsonl"),
    )
    assert len(mine) == 7
    for question, block in mine.items():
        alike = [{**row, "level": 0, "subject": 0} for row in block]
        assert alike == [{**row, "level": 0, "subject": 0} for row in theirs[question]]


@pytest.mark.long
def test_a_mesh_of_devices_draws_the_same(place, whole):
    out = place / "mesh"
    words_ = typed(place, out, "--mesh", 2, 2, 1, "--limit", 6, data=["math.jsonl"])
    assert main(*words_)[::2] == (0, "")
    rows = lines(out / "math.jsonl")
    assert len(rows) == 6 * (N + 1)
    assert rows == lines(whole[0] / "math.jsonl")[: len(rows)]


@pytest.mark.long
def test_another_seed_draws_other_completions(place, whole):
    out = place / "seed"
    words_ = typed(place, out, "--seed", 1, "--limit", 4, data=["math.jsonl"])
    assert main(*words_)[0] == 0
    rows, old = lines(out / "math.jsonl"), lines(whole[0] / "math.jsonl")
    same = {greedy: [] for greedy in (True, False)}
    for row, before in zip(rows, old, strict=False):
        same[row["greedy"]].append(row["text"] == before["text"])
    assert all(same[True])
    assert sum(same[False]) < len(same[False]) / 4


# ----- what is said


def naive(rows, k):
    """pass@k of one problem, from its definition."""
    graded = [row["outcome"] for row in rows if row["outcome"] is not None]
    each = [max(some) >= 1 for some in combinations(graded, k)]
    return np.mean(each) if each else np.nan


def test_measures_are_means_over_problems(whole):
    found = saved_results(whole[0])["results"]["math.jsonl"]
    rows = [row for row in lines(whole[0] / "math.jsonl") if not row["greedy"]]
    blocks = [rows[i : i + N] for i in range(0, len(rows), N)]
    for k in (1, 2, 3, N):
        each = np.array([naive(block, k) for block in blocks])
        row = found["measures"][f"pass@{k}"]
        assert row["problems"] == np.sum(~np.isnan(each))
        np.testing.assert_allclose(row["value"], np.nanmean(each))
        assert row["low"] <= row["value"] <= row["high"]
    known = [[r["outcome"] for r in b if r["outcome"] is not None] for b in blocks]
    mean = np.mean([np.mean(outcomes) for outcomes in known if outcomes])
    np.testing.assert_allclose(found["measures"][f"mean@{N}"]["value"], mean)
    greedy = [r["outcome"] for r in lines(whole[0] / "math.jsonl") if r["greedy"]]
    greedy = [outcome for outcome in greedy if outcome is not None]
    assert found["measures"]["greedy"]["problems"] == len(greedy)
    np.testing.assert_allclose(found["measures"]["greedy"]["value"], np.mean(greedy))
    length = [row["length_tokens"] for row in rows if row["outcome"] == 1]
    np.testing.assert_allclose(found["length_tokens"]["right"]["mean"], np.mean(length))
    cut = np.mean([not row["finished"] for row in rows])
    np.testing.assert_allclose(found["truncated"]["value"], cut)
    reasons = [(row["reason"] or "").partition(":")[0] for row in rows]
    assert found["missing"] == {name: reasons.count(name) for name in ("error", "none")}
    for level in "123":
        of = [block for block in blocks if block[0]["level"] == level]
        each = [naive(block, 1) for block in of]
        row = found["levels"][level]["pass@1"]
        np.testing.assert_allclose(row["value"], np.nanmean(each))
    assert set(found["subjects"]) == {"sums", "rest"}
    assert found["problems"] == PROBLEMS
    assert found["left_out"] == {"duplicate": 0, "too_long": 0, "broken": 0}


def test_results_say_how_they_came_about(whole):
    page = saved_results(whole[0])
    settings = json.loads((whole[0] / runner.SETTINGS).read_text())
    assert page["settings"] == settings
    assert settings["sampling"]["seed"] == 0
    assert settings["grader"] == {"function": "marks.grade"}
    assert page["model"] == str(real.checkpoint(small=True))
    assert page["versions"]["jax"] == jax.__version__
    assert "-m curax.evaluate --model" in page["command"]
    assert set(page["results"]) == {"math.jsonl", "aside.jsonl"}


def test_the_terminal_shows_progress_and_a_table_per_file(whole):
    out, said = whole
    shown = said.splitlines()
    assert shown[0] == "math 0/10  compiling"
    assert shown[1].startswith("math 4/10  mean 0.")
    assert any(line.startswith("Warning: ") for line in shown)
    found = saved_results(out)["results"]
    for name in found:
        assert results.table(name, found[name]) in said
    head = shown.index("pass@1 by level           value    95% interval  problems")
    assert [line.split()[0] for line in shown[head + 1 : head + 4]] == ["1", "2", "3"]
    assert shown[-1] == f"Written: {out / 'results.json'}"


def test_speed_is_of_what_was_drawn_in_this_go(whole):
    for name, found in saved_results(whole[0])["results"].items():
        speed = found["speed"]
        rows = lines(whole[0] / name)
        tokens = sum(row["length_tokens"] for row in rows)
        assert speed["completions"] == len(rows)
        assert speed["compile_s"] > 0
        each = speed["completions_per_s"], speed["tokens_per_s"]
        assert each == (len(rows) / speed["seconds"], tokens / speed["seconds"])


class Ticks:
    """A file that keeps what is written, a drawer that compiled for 100 s, a clock."""

    path, compile_s = Path("math.jsonl"), 100.0

    def __init__(self, monkeypatch):
        self.now, self.rows = 0.0, []
        monkeypatch.setattr(runner.time, "monotonic", lambda: self.now)

    def blocks(self):
        return iter(())

    def write(self, rows):
        self.rows += rows


def a_row(problem, reason=None, *, outcome=1.0, **more):
    told = {"problem": problem, "reason": reason, "greedy": False, "slot": 0}
    told |= {"outcome": None if reason else outcome, "answer": None, "finished": True}
    return told | {"length_tokens": 25, "level": None, "subject": None} | more


def test_speed_leaves_compiling_out(monkeypatch):
    there = Ticks(monkeypatch)
    written = runner.GradedWriter(there, 0, there)
    assert written.speed() is None
    written.add([a_row(0)] * 4, last=True)
    there.now = 110.0
    assert written.progress() == (1, 1.0, 10.0)
    assert written.speed() == {
        "completions": 4,
        "seconds": 10.0,
        "compile_s": 100.0,
        "completions_per_s": 0.4,
        "tokens_per_s": 10.0,
    }


@pytest.mark.parametrize(
    ("reason", "fix"),
    [
        ("timeout", "raise --deadline, or make the grader faster"),
        ("crash", "raise --memory-mb, or mend the grader"),
        ("none", "the grader returned None; name another --grader, or mend it"),
        ("error: KeyError: 'gold'", "mend the grader"),
    ],
)
def test_without_any_outcome_it_stops_with_the_commonest_reason(
    monkeypatch, reason, fix
):
    there = Ticks(monkeypatch)
    written = runner.GradedWriter(there, 0, there)
    missing = [a_row(0, reason)] * 9 + [a_row(1, "other")] * 7
    assert message(runner.NoOutcomeError, written.add, missing, last=False) == (
        "math.jsonl: none of the first 16 completions has an outcome, 9 for this "
        f"reason: {reason}; {fix}"
    )
    assert there.rows == []


def test_a_few_completions_without_an_outcome_wait_for_one_that_has_it(monkeypatch):
    there = Ticks(monkeypatch)
    written = runner.GradedWriter(there, 0, there)
    first = [a_row(i, "timeout") for i in range(15)]
    for row in first:
        written.add([row], last=False)
    assert (there.rows, written.progress()[:2]) == ([], (15, None))
    written.add([a_row(15)], last=False)
    assert there.rows == [*first, a_row(15)]
    written.add([a_row(16, "timeout")] * 99, last=True)
    assert written.reasons == Counter(timeout=114)
    assert len(there.rows) == 115


def test_a_grader_that_fails_stops_it_and_mended_goes_on(place, monkeypatch, tmp_path):
    out, draws, draw = tmp_path / "out", [], samples.Sampler.__call__

    def counted(self, numbers):
        draws.append(numbers)
        return draw(self, numbers)

    monkeypatch.setattr(samples.Sampler, "__call__", counted)
    monkeypatch.setenv("MENDED", str(tmp_path / "mended"))
    words_ = [*typed(place, out), "--grader", f"{place}/marks.py:fails"]
    assert main(*words_)[::2] == (
        1,
        f"curax.evaluate: {out}/math.jsonl: none of the first 20 completions has an "
        "outcome, 20 for this reason: error: KeyError: 'gold'; mend the grader; "
        "nothing of it is kept, and the same command goes on.\n",
    )
    assert len(draws) == 1
    assert (out / "math.jsonl").read_bytes() == b""
    assert not (out / runner.RESULTS).exists()
    # As nothing is there, it may become another evaluation as well.
    runner.check_folder(out, {"grader": "another"})
    (tmp_path / "mended").touch()
    status, said, err = main(*words_)
    assert (status, err) == (0, "")
    assert "without an outcome" not in said
    assert saved_results(out)["results"]["math.jsonl"]["missing"] == {}


@pytest.mark.parametrize("greedy", [False, True])
def test_a_table_with_few_outcomes_begins_with_that(greedy):
    reasons = ["timeout", "timeout", None]
    blocks = [[a_row(i, why, greedy=greedy)] for i, why in enumerate(reasons)]
    found = results.summary(results.collect(blocks, int(not greedy)), [], seed=0)
    assert (found["completions"], found["missing"]) == (3, {"timeout": 2})
    told = results.table("x", found).splitlines()
    assert told[:2] == [
        "x: 3 problems",
        "Most completions have no outcome: 66.7% of 3. The figures are of the others "
        "alone.",
    ]
    assert "without an outcome: 66.7% (2 timeout)" in told
    half = results.summary(results.collect(blocks[1:], int(not greedy)), [], seed=0)
    assert "Most" not in results.table("x", half)
    assert "left out" not in results.table("x", half)
    out = {"left_out": {"duplicate": 0, "too_long": 1, "broken": 2}}
    told = results.table("x", found | out).splitlines()
    assert told[2] == "left out of the file: 1 too long, 2 broken"


def test_a_tally_of_nothing_is_no_error():
    found = results.summary(results.collect([], 2), [1], seed=0)
    assert found["problems"] == 0
    assert "0 problems" in results.table("x", found)


def test_tables_are_in_order_of_numbers_and_then_of_words():
    said = ["b", "②", "10", "9", "²"]
    blocks = [[a_row(i, level=level)] for i, level in enumerate(said)]
    found = results.summary(results.collect(blocks, 1), [1], seed=0)
    assert list(found["levels"]) == ["9", "10", "b", "²", "②"]


def test_the_majority_counts_answers_that_are_the_same():
    said = [("0.5", 1.0), ("1/2", 1.0), ("3", 0.0), ("4", 0.0)]
    block = [a_row(0, answer=answer, outcome=outcome) for answer, outcome in said]
    measures = results.summary(results.collect([block], 4), [1, 2, 4], seed=0)[
        "measures"
    ]
    assert measures["maj@4"]["value"] == 1
    assert "maj@2" not in measures
    assert measures["pass@2"]["value"] == pytest.approx(5 / 6)
    one = {"value": 0.5, "low": None, "high": None, "problems": 1}
    assert measures["pass@1"] == one


@pytest.mark.long
def test_greedy_alone_needs_no_samples(place):
    out = place / "greedy"
    words_ = typed(place, out, data=["aside.jsonl"])
    k = words_.index("--k")
    words_[k : k + 5] = []
    words_[words_.index("--n") + 1] = "0"
    assert main(*words_)[0] == 0
    found = saved_results(out)["results"]["aside.jsonl"]
    assert set(found["measures"]) <= {"greedy"}
    assert len(lines(out / "aside.jsonl")) == 3


# ----- confidence


@pytest.fixture(scope="module")
def sure(place):
    """An evaluation that tells confidence, of one file."""
    out = place / "sure"
    asked_ = typed(place, out, *CONFIDENT, data=["aside.jsonl"])
    status, said, err = main(*asked_)
    assert (status, err) == (0, "")
    return out, said, asked_


def drawn_in(batch):
    """Tokens of the completions of a batch, in the order of the file."""
    for place in range(len(batch.numbers)):
        for kind, each in ((True, 1), (False, N)):
            rows = batch.begun[kind].rollouts
            for n in range(place * each, (place + 1) * each):
                yield np.asarray(rows.tokens[n])[np.asarray(rows.mask[n])]


@pytest.mark.long
def test_confidence_is_that_of_the_policy_at_the_temperature_drawn_with(
    place, monkeypatch
):
    # A row at a time, and of it five tokens and then one.
    monkeypatch.setattr(rollout, "TOKENS", 10)
    monkeypatch.setattr(rollout, "ENTRIES", 5 * VOCABULARY)
    args = options(place, *CONFIDENT, "--temperature", 0.5)
    with contextlib.ExitStack() as opened:
        made = setup.prepare(args, opened)
        (questions,) = made.questions.values()
        sampler = samples.Sampler(made.policy, questions, made.sampling)
        batch = sampler([2, 0])
        found = list(zip(sampler.rows(batch), drawn_in(batch), strict=True))
        tokens, mask = questions.prompts([2, 0])
    model, params = made.policy.model, made.policy.params
    features = jax.jit(lambda *args: model.features(params, *args)[0])
    head = np.asarray(model.head(params), np.float64)
    assert len(head) == VOCABULARY
    rows = {2: tokens[0][mask[0]], 0: tokens[1][mask[1]]}
    places = np.arange(64, dtype=np.int32)[None]
    assert len(found) == 2 * (N + 1)
    for one, own_tokens in found:
        whole = np.concatenate([rows[one["problem"]], own_tokens])
        behind = np.zeros((1, 64), np.int32)
        behind[0, : len(whole)] = whole
        last = features(behind, places, behind >= 0)[0]
        own = np.asarray(last, np.float64)[
            len(rows[one["problem"]]) - 1 : len(whole) - 1
        ]
        z = own @ head.T / (1.0 if one["greedy"] else 0.5)
        logp = z - np.log(np.exp(z).sum(-1, keepdims=True))
        each = -np.sort(logp, -1)[:, -5:].mean(-1)
        means = [each[t : t + 3].mean() for t in range(len(each) - 2)] or [each.mean()]
        want = {"mean": each.mean(), "lowest": min(means), "bottom": min(means)}
        want["tail"] = each[-3:].mean()
        assert one["confidence_nats"] == pytest.approx(want, rel=1e-4)


@pytest.mark.long
def test_confidence_changes_neither_what_is_drawn_nor_what_else_is_said(sure, whole):
    rows, old = (lines(out / "aside.jsonl") for out in (sure[0], whole[0]))
    scores = [row.pop("confidence_nats") for row in rows]
    assert rows == old
    assert {tuple(score) for score in scores} == {("mean", "lowest", "bottom", "tail")}
    assert all(score["lowest"] <= score["mean"] for score in scores)
    found, before = (
        saved_results(out)["results"]["aside.jsonl"]["measures"]
        for out in (sure[0], whole[0])
    )
    votes = {name for name in found if name.startswith(f"maj@{N} ")}
    assert {name: found[name] for name in found if name not in votes} == before
    assert {name: found[name] for name in before} == before
    settings = json.loads((sure[0] / runner.SETTINGS).read_text())["sampling"]
    plain = json.loads((whole[0] / runner.SETTINGS).read_text())["sampling"]
    assert settings == plain | {"confidence": 5, "window": 3}
    assert not {"confidence", "window"} & set(plain)


@pytest.mark.long
def test_an_evaluation_with_confidence_goes_on_and_is_not_mixed(place, sure):
    out = shutil.copytree(sure[0], place / "sure_cut")
    data = (out / "aside.jsonl").read_bytes()
    (out / "aside.jsonl").write_bytes(data[: len(data) // 2])
    again = [str(out) if word == str(sure[0]) else word for word in sure[2]]
    assert main(*again)[0] == 0
    assert_same(out, sure[0])
    status, _, err = main(*typed(place, out, data=["aside.jsonl"]))
    assert status == 2
    assert "with sampling.confidence=5, and this is one with" in err


def test_sure_completions_outvote_a_majority():
    # Answer, outcome, and two scores.
    said = [("1", 0.0, 1.0, 3.0), ("1", 0.0, 1.5, 3.0), ("2", 1.0, 4.0, 4.0)]
    said += [(None, 0.0, 5.0, 5.0)]
    block = [
        a_row(0, answer=answer, outcome=outcome, level="1")
        | {"confidence_nats": {"mean": one, "tail": 1 / one, "bottom": other}}
        for answer, outcome, one, other in said
    ]
    found = results.summary(results.collect([block, block], 4), [4], seed=0)
    values = {name: row["value"] for name, row in found["measures"].items()}
    assert values["maj@4"] == 0
    assert values["maj@4 mean"] == values["maj@4 mean top 10%"] == 1
    assert values["maj@4 tail"] == values["maj@4 tail top 10%"] == 0
    assert values["maj@4 bottom"] == 0
    assert values["maj@4 bottom top 10%"] == 1
    assert set(found["levels"]["1"]) == {"mean@4", "pass@4"}
    row = found["measures"]["maj@4 mean"]
    assert (row["low"], row["high"], row["problems"]) == (1, 1, 2)


def test_completions_without_an_answer_say_so_in_their_rows_and_in_the_table():
    texts = ["it is 17", "\\boxed{17}", "\\boxed{3}", "I see"]

    asked: Any = SimpleNamespace(
        text=lambda tokens: texts[tokens[0]],
        task=SimpleNamespace(states=graders.statement(graders.mathematics)),
    )
    alike = {"greedy": False, "finished": True, "level": None, "subject": None}
    alike["length_tokens"] = 1
    rows = []
    for i, each in enumerate(texts):
        outcome: Any = graders.mathematics("", each, "17")
        rows.append(alike | samples.said(asked, np.array([i]), outcome, "none"))
    assert [row["outcome"] for row in rows] == [0, 1, 0, 0]
    silent = graders.NO_ANSWER
    assert [row["reason"] for row in rows] == [silent, None, None, silent]
    # Nor do they vote: a last number is no answer to a grader that reads none.
    assert [row["answer"] for row in rows] == [None, "17", "3", None]
    found = results.summary(results.collect([rows], 4), [1], seed=0)
    assert (found["no_answer"], found["missing"]) == (2, {})
    assert "wrong, without an answer: 50.0%" in results.table("x", found)
    assert "Warning" not in results.table("x", found)
    found = results.summary(results.collect([rows[:1] * 4], 4), [1], seed=0)
    told = results.table("x", found)
    assert "Warning: 100% of the completions state no answer that the grader" in told
    assert "graders.numbers" in told
    loose = partial(graders.mathematics, last_number=True)
    for grader, states in ((loose, True), (graders.numbers, True)):
        assert graders.statement(grader)(texts[0]) == states
    assert graders.statement(graders.exact) is None


# ----- how it is asked


def options(place, *more, data=("aside.jsonl",)) -> Namespace:
    args = evaluate.parser().parse_args(typed(place, place / "none", *more, data=data))
    evaluate.check(args)
    return args


@pytest.mark.first(1)
@pytest.mark.parametrize(
    ("more", "begins", "ends"),
    [
        ((), "<|im_start|>user\n", "<|im_end|>\n<|im_start|>assistant\n"),
        (("--no-chat", "--template", "Q: {question}\nA:"), "Q: ", "\nA:"),
        (
            ("--system", "Be brief."),
            "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\n",
            "<|im_end|>\n<|im_start|>assistant\n",
        ),
    ],
)
def test_a_prompt_has_the_form_that_was_asked_for(place, more, begins, ends):
    with contextlib.ExitStack() as opened:
        made = setup.prepare(options(place, *more), opened)
    (questions,) = made.questions.values()
    tokens, mask = questions.prompts([1, 0])
    spoken = text.load(real.checkpoint(small=True))
    question = lines(place / "aside.jsonl")[1]["question"]
    shown = spoken.decode(tokens[0][mask[0]], control=True)
    assert shown == f"{begins}{question}{ends}"
    assert mask[:, -1].all()


def test_prompts_that_the_checkpoint_does_not_know_are_told_of(place, tmp_path, capsys):
    known = {"template": "{question}", "system": None, "chat": True, "thinking": None}
    for where in (real.checkpoint(small=True), tmp_path):
        prompt_form.write(tmp_path, known)
        for file in real.checkpoint(small=True).iterdir():
            (tmp_path / file.name).write_bytes(file.read_bytes())
        args = options(place, "--system", "Be brief.")
        setup._prompt_form(where, None, args)
        assert ("Warning: prompts have system='Be brief.', and " in told(capsys)) == (
            where == tmp_path
        )
        setup._prompt_form(where, None, options(place))
        assert told(capsys) == ""


def asked_in_files(place, task):
    """The environments of files that a run of this task is asked; who grades them."""
    form = PromptFormat(tokenizer=text.load(real.checkpoint(small=True)))
    (args := options(place)).grader = None
    config: Any = SimpleNamespace(task=task)
    with contextlib.ExitStack() as opened:
        sets, known = setup._file_questions(config, form, args, opened)
    return [one.task.environment for one in sets.values()], known


def test_an_environment_that_poses_its_own_prompts_is_not_asked_about_files(place):
    lake = partial(gymnasium.environment, name="FrozenLake-v1")
    found, known = asked_in_files(place, partial(worlds.task, environment=lake))
    assert found == [None]
    assert known["grader"]["function"] == "curax.verify.graders.mathematics"


def test_an_environment_that_is_a_server_answers_problems_of_files(place):
    served = partial(openenv.environment, url="http://127.0.0.1:9")
    (one,), known = asked_in_files(place, partial(file_task.task, environment=served))
    (said,) = one.answer([Turn(None, 7, 0, [])])
    assert said.startswith("crash: ")
    assert known["environment"]["function"] == "curax.tasks.openenv.environment"


def told(capsys) -> str:
    return capsys.readouterr().err


# ----- runs


@pytest.mark.long
def test_a_benchmark_sets_what_is_not_said(place, tmp_path):
    """Layout, prompt and sampling; what differs from the protocol is told."""
    out = tmp_path / "out"
    argv = ["--model", real.checkpoint(small=True), "--data", place / "math.jsonl"]
    argv += ["--benchmark", "math500", *SAMPLING, "--grader", "marks:grade"]
    status, said, err = main(*argv, "--out", out)
    assert (status, err) == (0, "")
    page = saved_results(out)
    assert page["benchmark"] == "math500"
    assert page["settings"]["layout"] == {"function": "curax.tasks.layouts.math"}
    assert page["settings"]["form"]["template"] == layouts.STEP_BY_STEP
    sampling = page["settings"]["sampling"]
    assert (sampling["n"], sampling["temperature"], sampling["top_p"]) == (N, 1.0, 1.0)
    measures = page["results"]["math.jsonl"]["measures"]
    assert set(measures) == {"mean@4", "pass@1", "pass@4", "maj@4"}
    assert all(one["low"] <= one["value"] <= one["high"] for one in measures.values())
    here = "here n=4, max_tokens=6, grader='marks:grade'."
    assert f"avg@32 at temperature 1 in 4096 tokens; {here}" in said
    assert "Warning: math500 has 500 problems, and 10 were asked" in said


@pytest.mark.parametrize("name", benchmarks.BENCHMARKS)
def test_every_benchmark_has_a_layout_and_options_that_are_accepted(name):
    argv = ["--model", "m", "--data", "d", "--benchmark", name]
    args = evaluate.parser().parse_args(argv)
    evaluate.apply_benchmark(args)
    evaluate.check(args)
    known = benchmarks.BENCHMARKS[name]
    assert pkgutil.resolve_name(known.layout).__module__ == layouts.__name__
    assert (args.n, args.k, args.changed) == (known.n, [1, known.n], {})
    (line,) = benchmarks.remarks(name, known.problems, {})
    assert line == f"{name}: {known.source}."
    # What no benchmark sets, but what makes it another, is named too.
    more = ["--system", "S", "--no-chat", "--thinking", "--grader", "my:own"]
    args = evaluate.parser().parse_args([*argv, *more, "--max-prompt-tokens", "9"])
    evaluate.apply_benchmark(args)
    (line,) = benchmarks.remarks(name, known.problems, args.changed)
    assert line == (
        f"{name}: {known.source}; here system='S', chat=False, thinking=True, "
        "max_prompt_tokens=9, grader='my:own'."
    )


@pytest.mark.long
def test_a_run_is_asked_what_it_holds_out_as_it_was_trained(tmp_path, monkeypatch):
    saved.patched(monkeypatch)
    there = saved.write(tmp_path / "run", saved.lora)
    before = snapshot(there)
    argv = ["--model", there, "--n", 2, "--out", tmp_path / "out"]
    assert main(*argv, "--batch", 4)[::2] == (0, "")
    assert snapshot(there) == before
    page, rows = saved_results(tmp_path / "out"), lines(tmp_path / "out/held_out.jsonl")
    sampling = page["settings"]["sampling"]
    assert (sampling["max_tokens"], sampling["top_k"]) == (5, 50)
    assert page["settings"]["form"]["template"] == "Q: {question}"
    assert page["settings"]["grader"]["function"] == "curax.verify.graders.numbers"
    assert page["step"] == 5
    task = saved.built(saved.lora).parts.task
    held = task.held_out(np.arange(7, dtype=np.int32))
    shown = [task.decode(t[m]) for t, m in zip(held.tokens, held.mask, strict=True)]
    questions = [row["question"] for row in rows[::2]]
    assert len(questions) == 7
    for question, prompt in zip(questions, shown, strict=True):
        assert f"Q: {question}<" in prompt
    # Other parameters are another evaluation.
    assert main(*argv, "--step", "best")[::2] == (
        2,
        f"curax.evaluate: --out {tmp_path / 'out'} holds an evaluation of other "
        "parameters; name another --out, or make them agree.\n",
    )
    # What it holds out was cut from a file, which may be another by now.
    (there / folder.QUESTIONS).write_text('{"mark": 1, "prompts": 9}')
    assert main("--model", there, "--n", 1, "--out", tmp_path / "other")[::2] == (
        2,
        f"curax.evaluate: {there}: the questions, answers, solutions or hints in the "
        f"files of the task are not those in {there / folder.QUESTIONS} that the run "
        "began with; bring these back, or name files with --data.\n",
    )
    config = policies.run_config(there)
    assert policies.load_run(there, config).step == 5  # to ask others, and to export
    monkeypatch.undo()
    states = policies.states_of(config, {"prompts": 9})
    assert states.abstract.memory.draws.shape == (9,)
    # Where no file is named there is nothing to read in another way.
    for option, value in (("--layout", "json:loads"), ("--on-error", "skip")):
        assert main("--model", there, option, value)[::2] == (
            2,
            f"curax.evaluate: {option} is for files of problems, and --data names "
            "none; leave it out, or name --data.\n",
        )


def test_what_is_held_out_never_trained_in_whatever_form_it_is_asked(tmp_path):
    """What becomes too long is left out; it moved the border between the sides."""
    path = tmp_path / "problems.jsonl"
    made = enumerate(demo.problems(seed=5, count=40))
    long = [p | {"question": "Look. " * (i % 5) + p["question"]} for i, p in made]
    demo.write_lines(path, long)
    own = PromptFormat(tokenizer=words.tokenizer())
    form = replace(own, template="Think. {question} Answer in one number.")
    known: dict[str, Any] = {"train": str(path), "held_out": None, "num_held_out": 12}
    known |= {"held_out_layout": None, "layout": layouts.detect, "on_error": "raise"}
    whole = file_task.usable(
        sources.open_records(str(path)),
        layouts.detect,
        own,
        longest=99,
        on_error="raise",
    )
    length = [len(form.prompt(problem)) for problem in whole.problems]
    known["max_prompt_tokens"] = most = int(np.median(length))
    held = questions.held_out_problems(known, own, own, most)
    asked = questions.held_out_problems(known, own, form, most)
    size = dict(zip(whole.digests, length, strict=True))
    assert asked.digests == [d for d in held.digests if size[d] <= most]
    assert 0 < len(asked) < len(held) == 12
    assert asked.longest == max(x for x in length if x <= most)
    apart = known | {"train": "nowhere", "held_out": str(path)}
    first = questions.held_out_problems(apart, own, form, most)
    assert first.digests == [d for d in whole.digests[:12] if size[d] <= most]
    few = known | {"num_held_out": 1}
    (one,) = questions.held_out_problems(few, own, own, most).digests
    short = min(length)
    assert short < size[one]
    with pytest.raises(ValueError, match="all problems that the run holds out are lon"):
        questions.held_out_problems(few, own, form, short)


@pytest.mark.long
def test_a_task_without_files_is_graded_by_its_own_verifier(tmp_path, monkeypatch):
    saved.patched(monkeypatch)
    there = saved.write(tmp_path / "run", saved.own)
    words_ = ["--model", there, "--config", small.FILE, "--n", 3, "--greedy"]
    assert main(*words_, "--limit", 9, "--out", tmp_path / "out")[0] == 0
    rows = lines(tmp_path / "out/held_out.jsonl")
    task = saved.built(saved.own).parts.task
    held = task.held_out(np.arange(9, dtype=np.int32))
    assert len(rows) == 9 * 4
    for row in rows:
        number = row["problem"]
        prompt = np.asarray(held.tokens)[number][np.asarray(held.mask)[number]]
        assert row["question"] == task.decode(prompt)
        assert row["outcome"] in (0.0, 1.0)
    words_ += ["--template", "{question}", "--out", tmp_path / "x"]
    assert main(*words_)[::2] == (
        2,
        "curax.evaluate: --template is for files of problems, and --data names none; "
        "leave it out, or name --data.\n",
    )


# ----- going on


WRONG_ROWS = {
    'outcome is "yes"': {"outcome": "yes"},
    "outcome is 17.0, which is not from 0 to 1": {"outcome": 17.0},
    "outcome is NaN, which is": {"outcome": float("nan")},
    "outcome is true": {"outcome": True},
    "length_tokens is null": {"length_tokens": None},
    "it is no completion of problem 0": {"slot": 7},
    "not a JSON object": None,
}


@pytest.mark.parametrize("said", WRONG_ROWS)
def test_a_damaged_row_is_told_with_its_line_and_drops_nothing_behind_it(
    said, tmp_path
):
    spec: Any = SimpleNamespace(completions=[(False, 0), (False, 1)])
    path, digests = tmp_path / "x.jsonl", [b"a", b"b"]
    rows = [
        a_row(i, answer="1", text="", digest=digest.hex(), slot=slot)
        for i, digest in enumerate(digests)
        for slot in range(2)
    ]
    file = samples.SamplesFile(path, digests, spec)
    demo.write_lines(path, rows)
    assert len(list(file.blocks())) == 2
    changed = WRONG_ROWS[said]
    rows[1] = {} if changed is None else rows[1] | changed
    demo.write_lines(path, rows)
    before = path.read_bytes()
    assert message(ConfigError, file.open).startswith(f"{path}:2: {said}")
    assert path.read_bytes() == before
    path.write_bytes(before[:-5])  # of a process that was killed
    with pytest.raises(ConfigError):
        list(file.blocks())


@pytest.mark.long
def test_answers_that_changed_are_refused_and_a_file_that_moved_is_not(
    place, whole, tmp_path
):
    out = shutil.copytree(whole[0], place / "changed")
    data = tmp_path / "aside.jsonl"
    rows = lines(place / "aside.jsonl")
    demo.write_lines(data, rows)
    moved = typed(place, out)
    moved[moved.index(str(place / "aside.jsonl"))] = str(data)
    assert main(*moved)[0] == 0
    rows[1]["answer"] = "4711"
    demo.write_lines(data, rows)
    assert main(*moved)[::2] == (
        2,
        f"curax.evaluate: --out {out} holds an evaluation of other answers; name "
        "another --out, or make them agree.\n",
    )


@pytest.mark.long
def test_a_grader_whose_file_changed_is_refused(place, whole):
    (file := place / "marks.py").write_text(f"{GRADER}# mended\n")
    found = main(*typed(place, whole[0]))
    file.write_text(GRADER)
    assert found[::2] == (
        2,
        f"curax.evaluate: --out {whole[0]} holds an evaluation by another content of "
        "the file of its grader or environment; name another --out, or make them "
        "agree.\n",
    )


def test_an_environment_whose_file_changed_is_another_evaluation(place, monkeypatch):
    file, codes = place / "games.py", []
    monkeypatch.setitem(sys.modules, "games", None)  # and what it was before, after
    del sys.modules["games"]
    for program in (GAME, f"{GAME}# mended\n"):
        file.write_text(program)
        task = partial(worlds.task, environment=pkgutil.resolve_name("games:game"))
        codes.append(setup._code_of_environment(task))
    assert codes[0]["code"] != codes[1]["code"]
    lake = partial(gymnasium.environment, name="FrozenLake-v1")
    own = partial(worlds.task, environment=lake)
    assert setup._code_of_environment(own) == {}
    named = partial(verifiers.task, taskset="sums")  # by a name of another program's
    assert setup._code_of_environment(gym.task) == {}
    assert setup._code_of_environment(named) == {}


GAME = "def game():\n    pass\n"


def test_settings_of_a_killed_process_do_not_refuse_the_folder(tmp_path):
    (tmp_path / f"{runner.SETTINGS}.tmp").write_text("{")
    runner.check_folder(tmp_path, {"a": 1})
    runner.make_folder(tmp_path, {"a": 1})
    (tmp_path / "another").touch()
    (tmp_path / runner.SETTINGS).unlink()
    with pytest.raises(ConfigError, match="files of something else"):
        runner.check_folder(tmp_path, {"a": 1})


def test_weights_that_are_not_finite_are_refused(place, monkeypatch):
    load = policies.load_checkpoint

    def broken(*args, **named):
        policy = load(*args, **named)
        leaves, tree = jax.tree.flatten(policy.params)
        leaves[0] = leaves[0].at[(0,) * leaves[0].ndim].set(np.nan)
        return replace(policy, params=jax.tree.unflatten(tree, leaves))

    monkeypatch.setattr(policies, "load_checkpoint", broken)
    status, _, err = main(*typed(place, place / "nan"))
    assert status == 2
    assert re.search(r"the parameter \S+ has values that are not finite; name", err)
    assert not (place / "nan").exists() or not any((place / "nan").glob("*.json*"))


@pytest.mark.first(1)
@pytest.mark.parametrize("cut", [0, 300, 4000, -1, -200])
def test_what_is_missing_is_done_again_and_no_more(place, whole, cut, monkeypatch):
    out = shutil.copytree(whole[0], place / f"cut{cut}")
    data = (out / "math.jsonl").read_bytes()
    (out / "math.jsonl").write_bytes(data[:cut])
    kept = data[:cut].count(b"\n") // (N + 1)
    asked_again, draw = [], samples.Sampler.__call__

    def counted(self, numbers):
        asked_again.extend(numbers)
        return draw(self, numbers)

    monkeypatch.setattr(samples.Sampler, "__call__", counted)
    assert main(*typed(place, out))[0] == 0
    assert asked_again == list(range(kept, PROBLEMS))
    assert_same(out, whole[0])


def test_a_line_that_was_changed_stops_an_evaluation_and_changes_nothing(place, whole):
    out = shutil.copytree(whole[0], place / "line")
    rows = (out / "math.jsonl").read_text().splitlines(keepends=True)
    rows[7] = rows[7].replace('"slot": 1', '"slot": 3')
    (out / "math.jsonl").write_text("".join(rows))
    before = snapshot(out)
    assert main(*typed(place, out)) == (
        2,
        "",
        f"curax.evaluate: {out}/math.jsonl:8: it is no completion of problem 1; bring "
        "the line back, or name another --out.\n",
    )
    assert snapshot(out) == before


def test_a_killed_and_an_interrupted_process_go_on(place, whole):
    out = place / "killed"
    path = os.pathsep.join(map(str, (ROOT, ROOT / "tests", place)))
    command = [sys.executable, "-m", "curax.evaluate", *typed(place, out)]
    for number, least in ((signal.SIGKILL, 1), (signal.SIGTERM, 25)):
        process = subprocess.Popen(
            command,
            env=os.environ | {"PYTHONPATH": path, "SLOW": "0.15"},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        file = out / "math.jsonl"
        while process.poll() is None:
            if file.exists() and file.read_bytes().count(b"\n") >= least:
                break
            time.sleep(0.005)
        process.send_signal(number)
        said, err = process.communicate()
        assert err == ""
        status = -9 if number == signal.SIGKILL else 128 + signal.SIGTERM
        assert process.returncode == status, said
        assert not (out / runner.RESULTS).exists()
    assert "Stopping after this batch; once more to stop at once.\n" in said
    assert said.splitlines()[-1].startswith("Stopped; the same command goes on: ")
    assert main(*typed(place, out))[0] == 0
    assert_same(out, whole[0])


@pytest.mark.long
def test_a_full_disk_stops_it_in_a_sentence_and_nothing_is_lost(place, whole):
    out = place / "full"
    with files_of_at_most(9000):
        status, _, err = main(*typed(place, out))
    assert status == 1
    assert err == (
        f"curax.evaluate: {out}/math.jsonl cannot be written (File too large); mend "
        "that, and the same command goes on.\n"
    )
    assert (out / "math.jsonl").read_bytes().endswith(b"\n")
    assert main(*typed(place, out))[0] == 0
    assert_same(out, whole[0])


# ----- bad input

USAGE = "; python -m curax evaluate --help lists what there is."
GOOD = "--model {model} --data {data} --out {new}"
# What is typed, and the sentence that is printed; the names in braces are paths.
BAD = {
    "": f"the following arguments are required: --model{USAGE}",
    f"{GOOD} --foo": f"unrecognized arguments: --foo{USAGE}",
    f"{GOOD} --n many": f"argument --n: invalid int value: 'many'{USAGE}",
    f"{GOOD} --n -1": "--n -1 must be at least 0; write --n 0.",
    f"{GOOD} --n 1000000000000": "--n 1000000000000 completions of --batch 16 "
    "problems, of up to --max-tokens 1024, take half the memory of this machine at "
    "least; lower one of them.",
    f"{GOOD} --n 0": "--n 0 draws nothing; add --greedy, or write --n 1.",
    f"{GOOD} --n 0 --greedy --k 1": "--k is of sampled completions; leave it out at "
    "--n 0.",
    f"{GOOD} --n 4 --k 8": "--k 8 completions cannot be drawn from --n 4; write --k 4, "
    "or a higher --n.",
    f"{GOOD} --temperature 0": "--temperature 0.0 must be greater than 0.0; write "
    "--temperature 1.0.",
    f"{GOOD} --temperature nan": "--temperature nan is not finite; write --temperature "
    "1.",
    f"{GOOD} --top-p 1.5": "--top-p 1.5 must be greater than 0.0 and at most 1.0; "
    "write --top-p 1.0.",
    f"{GOOD} --max-tokens 0": "--max-tokens 0 must be at least 1; write --max-tokens "
    "1.",
    f"{GOOD} --confidence 0": "--confidence 0 must be at least 1; write --confidence "
    "1.",
    f"{GOOD} --window 64": "--window is of confidence; add --confidence 20, or leave "
    "it out.",
    f"{GOOD} --template ask": "--template 'ask' does not say where the question "
    "stands; put {{question}} into it.",
    f"{GOOD} --mesh 0 1 1": "--mesh 0 must be at least 1, or -1 for all that is "
    "left; write --mesh 1 1 1.",
    f"{GOOD} --mesh -1 -1 1": "--mesh: one size at most may be -1; write --mesh 1 -1 "
    "1.",
    f"{GOOD} --mesh 64 1 1": "mesh.data=64 x mesh.fsdp=1 x mesh.tensor=1 takes 64 "
    "devices; set them so that their product is at most the 8 that are here.",
    "--model {model} --data {data} {place}/../same.jsonl": "--data {data} is named "
    "twice; name it once.",
    "--model ~nosuch/x --data {data}": "--model ~nosuch/x is no folder; name that of a "
    "checkpoint or of a run.",
    "--model {model} --data ~nosuch/x": "~nosuch/x does not exist; name a file or a "
    "folder that does.",
    "--model {model} --benchmark math500": "--benchmark math500 is of one file, and "
    "--data names 0; add --data FILE with its problems.",
    "--model {new} --data {data}": "--model {new} is no folder; name that of a "
    "checkpoint or of a run.",
    "--model {circle} --data {data}": "--model {circle} is no folder; name that of a "
    "checkpoint or of a run.",
    "--model {model}": "--data names no file, and {model} is no run with problems of "
    "its own; add --data FILE.",
    f"{GOOD} --step 3": "--step is for runs, and {model} is none; leave it out or name "
    "the folder of a run.",
    "--model {place} --data {data}": "{place} holds neither tokenizer.json nor "
    "tokenizer.model, and 0 *.model; copy the checkpoint's tokenizer there.",
    "--model {model} --data {new}": "{new} does not exist; name a file or a folder "
    "that does.",
    "--model {model} --data {broken}": "{broken}:2: not a JSON object (Expecting value "
    "at column 1); mend or delete this line, or --on-error skip.",
    f"{GOOD} --max-prompt-tokens 3": "{data} has 3 records and none is left: 0 ask "
    "what one before them asks, 3 have a prompt of more than 3 tokens, 0 are broken; "
    "allow longer prompts.",
    f"{GOOD} --grader marks.grad": "--grader marks.grad is no function of marks; did "
    "you mean marks.grade?",
    f"{GOOD} --grader marks:mark": "--grader marks:mark is no function of marks; it "
    "has grade, always, fails, closure, bound, unasked.",
    f"{GOOD} --grader lost.py:mark": "--grader lost.py:mark cannot be read (No such "
    "file or directory); name a Python file and a function of it, FILE.py:FUNCTION.",
    f"{GOOD} --grader marks:bound": "the grader 'closure.<locals>.<lambda>' cannot be "
    "found by its name in another process; define it with def at the top level of a "
    "file.",
    f"{GOOD} --grader nowhere:mark": "--grader nowhere:mark cannot be imported because "
    "there is no module nowhere, nor a file nowhere.py here; write MODULE:FUNCTION or "
    "FILE.py:FUNCTION.",
    f"{GOOD} --grader marks:unasked": "the grader 'unasked' cannot be called as "
    "unasked(prompt, completion, answer): too many positional arguments; let it take "
    "these three, and give each further option a default or bind it by its name with "
    "functools.partial.",
    "--model {model} --data {data} --out {file}": "--out {file} is a file; name a "
    "folder.",
    "--model {model} --data {data} --out {file}/a": "--out {file}/a cannot be written: "
    "Not a directory; name another folder.",
    "--model {model} --data {data} --out {place}": "--out {place} holds files of "
    "something else; name a new folder.",
}


def test_a_folder_that_another_process_writes_is_refused(place, tmp_path):
    with lock.hold(tmp_path / "out", "--out"):
        said = refusal(evaluate.main, *typed(place, tmp_path / "out"))
    what = f"curax.evaluate: --out {tmp_path}/out is being written by process "
    assert said.startswith(what)


@pytest.mark.parametrize("words_", BAD)
def test_bad_input_gets_one_sentence_and_nothing_is_written(place, tmp_path, words_):
    paths = {name: tmp_path / name for name in ("new", "file", "broken")}
    paths["broken"] = tmp_path / "broken.jsonl"
    paths["broken"].write_text('{"question": "a", "answer": "1"}\nx\n')
    paths["file"].write_text("")
    paths |= {"model": real.checkpoint(small=True), "data": place / "aside.jsonl"}
    (tmp_path / "place").mkdir()
    (tmp_path / "place" / "notes").write_text("")
    paths["place"] = tmp_path / "place"
    (tmp_path / "same.jsonl").symlink_to(paths["data"])
    paths["circle"] = tmp_path / "circle"
    paths["circle"].symlink_to("circle")
    before = snapshot(tmp_path)
    default = [] if "--grader" in words_ else ["--grader", "marks:grade"]
    got = main(*(words_.format(**paths).split()), *(default if words_ else []))
    assert got == (2, "", f"curax.evaluate: {BAD[words_].format(**paths)}\n")
    assert snapshot(tmp_path) == before


@pytest.mark.first(1)
@pytest.mark.parametrize(
    ("more", "what"),
    [
        (("--seed", 1), "with sampling.seed=0, and this is one with 1"),
        (
            ("--temperature", 0.5),
            "with sampling.temperature=1.0, and this is one with 0.5",
        ),
        (("--limit", 5), "with limit=None, and this is one with 5"),
        (("--system", "Hello"), "of other questions"),
        (
            ("--grader", "marks:always"),
            "with grader=marks.grade, and this is one with marks.always",
        ),
    ],
)
def test_a_folder_of_another_evaluation_is_refused(place, whole, more, what):
    before = snapshot(whole[0])
    assert main(*typed(place, whole[0], *more)) == (
        2,
        "",
        f"curax.evaluate: --out {whole[0]} holds an evaluation {what}; name another "
        "--out, or make them agree.\n",
    )
    assert snapshot(whole[0]) == before
