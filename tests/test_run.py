"""What a run tells of its rows when it goes on, and of a function that fails."""

import contextlib
import json
import os
import signal
import time
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import small
from outputs import message

from curax.config import ConfigError
from curax.runs import checkpoint, ending, folder, reading, run
from curax.runs.compile_times import CompileTimes
from curax.step import loops, validation

FORMS = "format/effective_number"


class Loop:
    """Makes steps out of nothing; evaluations say these in turn."""

    platform = "cpu"

    def __init__(self, *said: Any, steps=4):
        config = replace(small.get_config(), warm_start=None, steps=steps)
        task = SimpleNamespace(summary="", in_files=False, decode=str)
        self.parts = SimpleNamespace(config=config, task=task, engine=None)
        self.seeds, self._said = np.uint32(0), iter(said)
        self.row: dict[str, float] = {}
        self.rates, self.reason = np.zeros(1), ""
        self.abstract = self.sharding = None

    @contextlib.contextmanager
    def compiling(self, start):
        yield

    def context(self):
        return pytest.MonkeyPatch.context()

    def whole(self, state):
        return state

    def initial(self):
        return SimpleNamespace(frozen=None, memory=None)

    begin = whole

    def evaluate(self, state):
        said = next(self._said)
        if isinstance(said, Exception):
            raise said
        return self.rates, self.rates, {FORMS: np.float32(said)}

    def advance(self, state, times):
        names = ("outcome/mean", "group/dead_fraction", "loss/mean", "gradient/norm")
        row = dict.fromkeys(names, 0.0) | {"update/count": 1.0}
        row |= {"sampler/drift_nats": 1.0} | self.row
        return state, [row for _ in range(times)], []


def follow(workdir, loop, monkeypatch, *, step=None) -> list[str]:
    """Warnings of a run, which goes on from the checkpoint of this step."""
    told, _ = followed(workdir, loop, monkeypatch, step=step)
    _, *warnings = "".join(f"\n{text}" for text in told).split("\nWarning: ")
    return [text.split(" is ")[0] for text in warnings]


def followed(workdir, loop, monkeypatch, *, step=None) -> tuple[list[str], int | None]:
    """All that a run says, and the signal that stopped it."""
    told: list[str] = []
    state = SimpleNamespace(frozen=None, memory=None)
    found = None if step is None else checkpoint.Restored(step, state, {}, {})
    saved = SimpleNamespace(
        newest=lambda *_: found,
        save=lambda *_, **__: None,
        wait=lambda: None,
        close=lambda: None,
    )
    workdir.mkdir(exist_ok=True)
    with monkeypatch.context() as patch:
        patch.setattr(run.checkpoint, "Checkpoints", lambda *_, **__: saved)
        patch.setattr(run.cache, "lines", lambda _: [])  # the loop has no model
        patch.setattr(run.memory_io, "write", lambda *_: None)
        patch.setattr(run.Progress, "say", lambda _, text: told.append(text))
        stopped = run.Run(loop, workdir).run()
    return told, stopped


def test_a_resumed_run_compares_with_the_first_steps_and_repeats_nothing(
    tmp_path, monkeypatch
):
    # Evaluated at 0, 3 and 4: drift is told at once, forms have not yet halved.
    begun = follow(tmp_path, Loop(4.0, 3.0, 2.5), monkeypatch)
    assert begun == ["sampler/drift_nats"]
    rest = follow(tmp_path, Loop(1.5, 1.0, steps=7), monkeypatch, step=4)
    assert rest == [FORMS]
    # That it was told is known as well, up to the checkpoint.
    assert follow(tmp_path, Loop(1.0, steps=8), monkeypatch, step=7) == []
    assert follow(tmp_path, Loop(1.0, steps=5), monkeypatch, step=4) == [FORMS]


def test_a_bound_that_is_lowered_is_told_of_although_rows_before_were_above_it(
    tmp_path, monkeypatch
):
    def bounded(nats, *said, steps):
        loop = Loop(*said, steps=steps)
        log = replace(loop.parts.config.logging, drift_nats=nats)
        loop.parts.config = replace(loop.parts.config, logging=log)
        return loop

    begun = bounded(2.0, 4.0, 3.0, 2.5, steps=4)
    assert follow(tmp_path, begun, monkeypatch) == []
    for steps, told in ((5, ["sampler/drift_nats"]), (6, [])):
        loop = bounded(0.5, 2.5, steps=steps)
        assert follow(tmp_path, loop, monkeypatch, step=steps - 1) == told
        kept = [(row["step"], row["kind"]) for row in reading.read(tmp_path).alarms]
        assert kept == [(5, "drift")]


@pytest.mark.parametrize(
    ("metric", "says"),
    [
        (
            "allocate/dropped_rows",
            "allocate=allocate.uniform asked in step 2 for 68 completions more than "
            "there is room for, and they were dropped; mend it: ",
        ),
        (
            "outcome/out_of_range",
            "the verifier or environment of task gave 68 outcomes outside [0, 1] in "
            "step 2; mend it, ",
        ),
    ],
)
def test_a_step_that_breaks_a_promise_ends_the_run_in_a_sentence(
    tmp_path, monkeypatch, metric, says
):
    class Breaking(Loop):
        def advance(self, state, times):
            state, rows, shown = super().advance(state, times)
            return state, [*rows[:-1], rows[-1] | {metric: 68.0}], shown

    said = message(run.RunError, follow, tmp_path, Breaking(*[4.0] * 9), monkeypatch)
    assert said.startswith(says)
    assert said.endswith(", and start anew in another --workdir.")


def test_a_format_that_fails_ends_the_run_in_a_sentence(tmp_path, monkeypatch):
    what = "evaluation.format gave 1.0, which is no integer, for the completion '2'"
    loop = Loop(validation.FormatError(what))
    assert message(run.RunError, follow, tmp_path, loop, monkeypatch) == (
        f"{what}; mend that and go on with --resume: there is no checkpoint yet, so it "
        "will start again."
    )
    assert (tmp_path / folder.METRICS).read_text() == ""


@pytest.mark.parametrize(
    ("method", "n", "last", "stopped"),
    [
        ("advance", 2, 3, signal.SIGTERM),  # chunks end at 2, 3 and 4
        ("advance", 3, 4, None),
        ("evaluate", 3, 4, None),
    ],
)
def test_a_signal_after_the_last_chunk_has_begun_leaves_a_complete_run(
    tmp_path, monkeypatch, method, n, last, stopped
):
    loop, calls = Loop(4.0, 3.0, 2.5), []
    original = getattr(loop, method)

    def sending(*args):
        calls.append(args)
        if len(calls) == n:
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(0.2)  # until the thread has received it
        return original(*args)

    monkeypatch.setattr(loop, method, sending)
    told, number = followed(tmp_path, loop, monkeypatch)
    assert "Stopping after this chunk of steps; once more to stop at once." in told
    assert number == stopped
    rows = (tmp_path / folder.METRICS).read_text().splitlines()
    assert json.loads(rows[-1])["step"] == last


DEAD = {"group/signal_fraction": 0.0, "group/failed_fraction": 1.0}


def test_alarms_are_kept_as_other_rows_are_and_told_at_the_end(tmp_path, monkeypatch):
    for step in (None, 4, 2):
        loop = Loop(*[4.0, 3.0, 3.0, 3.0][step is not None :], steps=7)
        loop.row = DEAD
        follow(tmp_path, loop, monkeypatch, step=step)
        told = {row["kind"]: row["step"] for row in reading.read(tmp_path).alarms}
        assert told == {"drift": 1, "collapse": 5}
    row = {"step": 7, "rollout/tokens": 9}
    (tmp_path / folder.METRICS).write_text(json.dumps(row) + "\n")
    assert ending.summary_line(tmp_path) == (
        "Complete, but with ratios off 1 before any update (step 1), nothing left to "
        "learn from (step 5). Held-out pass rate unknown: 7 steps, 9 tokens generated"
    )
    page = ending.page.write(tmp_path).read_text()
    top = page[page.index("<header") : page.index("</header>")]
    assert top.count('<p class="alarm">Step ') == 2
    assert "Step 5: nothing to train on in 5 steps in a row up to step 5, " in top


def test_a_run_without_rl_is_told_as_a_supervised_one(tmp_path):
    row = {"step": 0, "eval/pass_rate": 0.125}
    (tmp_path / "config.json").write_text('{"steps": 0}')
    (tmp_path / "metrics.jsonl").write_text(json.dumps(row) + "\n")
    warm = [json.dumps({"step": n, "warm/loss_nats": 1.0}) for n in (1, 2, 3)]
    (tmp_path / "warm_start.jsonl").write_text("\n".join(warm) + "\n")
    said = "Held-out pass rate 0.125 after 3 supervised steps"
    assert ending.summary_line(tmp_path) == said
    page = ending.page.write(tmp_path).read_text()
    assert "Held-out pass rate is <b>12.5%</b> after 3 supervised steps." in page
    (tmp_path / "warm_start.jsonl").write_text(f"{warm[0]}\n")
    assert ending.summary_line(tmp_path).endswith(" after 1 supervised step")


def test_a_warm_start_without_a_finite_loss_stops_the_run(tmp_path, monkeypatch):
    def warmed(*losses):
        loop, given = Loop(4.0, 4.0, steps=1), iter(losses)
        given_warm = replace(small.get_config().warm_start, steps=len(losses))
        config = replace(loop.parts.config, warm_start=given_warm)
        loop.parts.config = replace(config, logging=replace(config.logging, every=1))
        vars(loop).update(abstract_warm=None, warm_sharding=None)
        loop.warm = lambda state, times: (state, np.array([next(given)]))
        loop.warm_up = partial(loops.Loop.warm_up, loop)
        return loop

    nan = float("nan")
    late = warmed(1.0, *[nan] * 9)
    assert message(run.RunError, follow, tmp_path, late, monkeypatch) == (
        "the loss of the warm start is not finite at step 6, as in all of the last 5 "
        "steps, so the run stops; start anew with a lower "
        "warm_start.optimizer.learning_rate, or from another checkpoint if the weights "
        "of this one are not finite."
    )
    follow(tmp_path / "one", warmed(*[nan] * 4, 1.0, *[nan] * 4), monkeypatch)
    two = warmed(*[[nan, 1.0]] * 7)  # of two seeds one goes on
    follow(tmp_path / "two", two, monkeypatch)


MISSING = {"outcome/missing": 4.0, "rollout/drawn": 4.0} | DEAD


def test_a_verifier_that_never_knows_stops_the_run(tmp_path, monkeypatch):
    loop = Loop(4.0, 3.0, 3.0, 3.0, steps=9)
    loop.row, loop.reason = MISSING, "error: ValueError: cannot\ntell."
    assert message(run.RunError, follow, tmp_path, loop, monkeypatch) == (
        "the verifier gave no outcome for any completion in the last 5 steps up to "
        "step 5 (error: ValueError: cannot tell), so the run stops, saved as step 6; "
        "mend the verifier and go on with --resume."
    )
    loop = Loop(4.0)
    loop.rates, loop.reason = np.full(1, np.nan), "it gave None or NaN"
    assert message(run.RunError, follow, tmp_path / "other", loop, monkeypatch) == (
        "the verifier gave no outcome for any held-out completion (it gave None or "
        "NaN), so the run stops before its first step; mend the verifier and go on "
        "with --resume."
    )
    assert (tmp_path / "other" / folder.METRICS).read_text() == ""


@pytest.mark.parametrize("gone", [folder.METRICS, folder.EVENTS, "", "evaluation.json"])
def test_what_is_removed_during_a_run_is_told(tmp_path, monkeypatch, gone):
    loop, workdir = Loop(4.0, 3.0, 3.0), tmp_path / "run"
    advance = loop.advance

    def removing(state, times):
        if (workdir / gone).exists():
            (workdir / gone).rename(tmp_path / "elsewhere")
        return advance(state, times)

    monkeypatch.setattr(loop, "advance", removing)
    assert message(run.RunError, follow, workdir, loop, monkeypatch) == (
        f"{workdir / gone} was removed or renamed while the run wrote to it, so the "
        "run stops; bring it back and go on with --resume, or start anew in another "
        "--workdir."
    )
    assert not (workdir / gone).exists()


def test_how_long_programs_took_is_known_the_next_time(tmp_path):
    config = {"seed": 1, "model": {"width": 8}}
    times = CompileTimes(tmp_path / "cache", config)
    assert times.last("step") is None
    times.store("step", 28.123)
    assert CompileTimes(tmp_path / "cache", config | {"seed": 2}).last("step") == 28.12
    assert times.last("warm") is None
    assert CompileTimes(tmp_path / "cache", {"model": 1}).last("step") is None
    for text in ("", "[]", '{"a": "b"}'):
        next((tmp_path / "cache").iterdir()).write_text(text)
        assert times.last("step") is None
        times.store("step", 3.0)
        assert times.last("step") == 3.0
    nowhere = CompileTimes(None, config)
    nowhere.store("step", 1.0)
    assert nowhere.last("step") is None


def no_package():
    raise ModuleNotFoundError("No module named 'sklearn_x'", name="sklearn_x")


def test_a_task_that_needs_what_is_not_installed_gets_the_line_that_installs_it():
    config = replace(small.get_config(), task=no_package)
    assert message(ConfigError, run.make_loop, config) == (
        "the package sklearn_x is not installed; run pip install sklearn_x, or put its "
        "folder on PYTHONPATH if it is yours."
    )
