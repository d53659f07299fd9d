"""Turns that the host answers: the completions of the decoding loop, round by round."""

import atexit
import contextlib
import dataclasses
import math
import os
import re
import shutil
import signal
import sys
import time
from functools import cache, partial
from pathlib import Path
from tempfile import mkdtemp

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import test_file_task
import test_rollout
import test_turns
import tiny
import turning
from words import tokenizer

from benchmarks.turns import here
from curax.config import ConfigError
from curax.step import drivers, play
from curax.step.types import Request, Subject
from curax.tasks import environments
from curax.types import (
    Environment,
    HostEnvironment,
    Observation,
    Prompts,
    Task,
    Turn,
    Weights,
)


@cache
def subject(world, model=tiny.MODEL):
    """The tiny policy, with an environment of the host."""
    task = Task(
        vocab_size=tiny.V,
        pad=tiny.PAD,
        end=turning.END,
        num_prompts=3,
        num_held_out=3,
        prompts=None,  # pyright: ignore[reportArgumentType]
        held_out=None,  # pyright: ignore[reportArgumentType]
        traces=None,
        verify=None,
        on_device=False,
        decode=str,
        environment=world,
    )
    return Subject(task=task, model=model)


def request(**options):
    prompts = Prompts(
        tokens=tiny.CONTEXTS.tokens,
        mask=tiny.CONTEXTS.mask,
        id=jnp.arange(3),
        target=turning.TARGET,
    )
    return Request(
        prompts=prompts,
        contexts=tiny.CONTEXTS,
        rows=tiny.ROWS,
        key=test_rollout.KEY,
        group=4,
        how=turning.settings(episodes=None, **options),
    )


HERE = here(turning.in_python(), measures=("parity",))


PROGRAMS = {}


class Host(drivers.Hosted):
    """What the environment answers is in no program, so one serves all of them."""

    def jitted(self, function, parts, **options):
        measures = parts.task.environment.measures
        kept, like = PROGRAMS.setdefault(measures, (drivers.Hosted(), parts))
        return kept.jitted(function, like, **options)


def played(world=HERE, **options):
    """A driver from the host, and what it draws and grades of the request."""
    drive = Host()
    begun = drive.begin(
        subject(world), Weights(params=tiny.params()), request(**options)
    )
    (verdicts,) = drive.verdicts([begun])
    return drive, jax.device_get(begun.rollouts), verdicts


# ----- the same completions


@pytest.mark.first(1)
@pytest.mark.parametrize("slots", [0, 3])
def test_rounds_from_the_host_draw_what_the_loop_on_the_device_draws(slots):
    _, rows, verdicts = played(slots=slots)
    wanted = test_turns.drawn()
    there = rows.exists
    found = {"parity": np.where(there, wanted.turns.found["parity"], np.nan)}
    wanted = dataclasses.replace(
        wanted, turns=dataclasses.replace(wanted.turns, found=found)
    )
    tiny.agree(rows, wanted, atol=1e-4)
    assert (rows.turns.count > 1).any()
    assert rows.turns.observed.any()
    np.testing.assert_array_equal(
        verdicts.outcome, np.where(there, rows.turns.outcome, np.nan)
    )
    assert not verdicts.reasons


# ----- episodes that end without a word


@pytest.mark.first(1)
@pytest.mark.parametrize("raises", [False, True])
def test_states_of_completions_that_are_cut_off_are_given_back(raises):
    told, answered = [], {}

    def answer(turns):
        if raises and len(answered) > 3:
            raise RuntimeError
        said = [one._replace(state=turn.key) for turn, one in ask(turns)]
        answered.update((one.state, one.done) for one in said)
        return said

    def ask(turns):
        states = [t._replace(state=t.state and inner[t.state]) for t in turns]
        found = HERE.answer(states)
        inner.update((t.key, one.state) for t, one in zip(turns, found, strict=True))
        return zip(turns, found, strict=True)

    inner = {}
    world = HostEnvironment(answer=answer, measures=("parity",), closed=told.append)
    with pytest.raises(RuntimeError) if raises else contextlib.nullcontext():
        played(world)
    (closed,) = told
    assert sorted(closed) == sorted(key for key, done in answered.items() if not done)
    assert 0 < len(closed) < len(answered)


def test_a_row_is_of_one_process_whichever_others_go_on(monkeypatch):
    monkeypatch.setattr(play.peers, "count", lambda: 2)
    monkeypatch.setattr(play.jax, "process_index", lambda: 1)
    for live in ([0, 1, 2, 3], [1, 2, 3], [3], [0, 3]):
        np.testing.assert_array_equal(
            play._own(np.array(live)), [n for n in live if n % 2]
        )


# ----- environments that fail

BAD = 7  # target of the prompt whose episodes fail
ACTS = {
    "crash": (lambda: os.kill(os.getpid(), signal.SIGKILL), "crash"),
    "raise": (lambda: 1 // 0, "error: ZeroDivisionError"),
    "hang": (lambda: time.sleep(60), "timeout"),
    "leave": (lambda: sys.exit(0), "error: SystemExit"),
    "fill": (lambda: bytearray(2**31), "error: MemoryError"),
    "print": (lambda: os.write(1, b"[1, 2, 3]\n") and 1 // 0, "error: Zero"),
    "nothing": (lambda: None, "error: TypeError: observe gives None beside the state"),
    "no tokens": (lambda: seen(tokens=None), "error: TypeError: observe gives None as"),
    "bytes": (lambda: seen(tokens=b"up"), "error: TypeError: observe gives b'up' as"),
    "alone": (None, "error: TypeError: observe gives 7; let it give a state and an"),
    "no reward": (lambda: seen(reward=None, done=True), "none"),
    "nan": (lambda: seen(reward=math.nan, done=True), "none"),
    "inf": (lambda: seen(reward=math.inf), "error: a reward of inf"),
    "text": (lambda: seen(tokens="higher"), "error: 'higher' is text"),
    "words": (lambda: seen(tokens=["higher"]), "error: ValueError"),
    "another vocabulary": (lambda: seen(tokens=[99]), "error: token 99 is none of 11"),
}


def seen(**fields):
    return Observation(**{"tokens": [1], "done": False, "reward": 0.0} | fields)


def observe(state, turn, *, what):
    """One turn that is right; of the bad target what is asked for."""
    if state == BAD and what == "large":
        return b"0" * 2**21, seen()
    if state == BAD and what == "alone":
        return state
    if state == BAD and what in ACTS:
        return state, ACTS[what][0]()
    if state == BAD and what == "long":
        return state, seen(tokens=[1] * 1000)
    return state, seen(done=True, reward=0.5)


def reset(key, target):
    if int(target) == BAD:
        assert 0 <= key < 2**64
    return int(target)


def measure(state):
    return {"target": state}


def failing(*, what):
    found = measure if what == "measures" else None
    act = partial(observe, what=what)
    return Environment(reset=reset, observe=act, measure=found)


def drawn_with(what, **options):
    make = partial(failing, what=what)
    how = {"count": 2, "deadline": 3.0, "memory_mb": 512}
    return played(environments.in_workers(make, **how | options))


def of_bad(rows):
    """Rows of the bad target with a turn that was answered."""
    return rows.exists & (turning.TARGET[rows.prompt] == BAD) & (rows.turns.count > 0)


@pytest.mark.first(2)
@pytest.mark.parametrize("what", [*ACTS, "large"])
def test_an_environment_that_fails_costs_the_completions_of_that_turn_alone(what):
    _, reason = ACTS.get(what, (None, "error: a state of"))
    drive, rows, verdicts = drawn_with(what)
    bad = of_bad(rows)
    assert bad.any()
    assert {*verdicts.reasons} == {*np.flatnonzero(bad)}
    assert all(why.startswith(reason) for why in verdicts.reasons.values())
    assert np.isnan(verdicts.outcome[bad | ~rows.exists]).all()
    rest = rows.exists & ~bad
    np.testing.assert_array_equal(verdicts.outcome[rest], rows.turns.count[rest] / 2)
    assert rows.finished[bad].all()
    assert not rows.turns.observed.any()
    row = drive.clock.row(False)
    missing = sum(
        n for k, n in row.items() if k.startswith("verify/") and "_s" not in k
    )
    assert missing == bad.sum()


@pytest.mark.long
def test_what_an_environment_measures_is_declared():
    _, rows, verdicts = drawn_with("measures")
    answered = rows.exists & (rows.turns.count > 0)
    assert {*verdicts.reasons} == {*np.flatnonzero(answered)}
    (reason,) = {*verdicts.reasons.values()}
    assert reason == "error: measures target, and declares nothing"


LONG = {"text": "\U0001f600", "tokens": [2**31]}  # the most that JSON has for each


def endless(*, kind):
    """An environment that says too much, and whose state is as large as can be."""

    def observe(state, turn):
        return state, seen(tokens=LONG[kind] * (environments.TOKENS + 1))

    return Environment(reset=lambda *_: b"0" * (2**20 - 20), observe=observe)


@pytest.mark.parametrize("kind", LONG)
def test_of_an_answer_that_is_too_long_a_worker_sends_the_beginning(kind):
    world = environments.in_workers(partial(endless, kind=kind), count=1, text=True)
    (said,) = world.answer([Turn(None, 5, 0, "up")])
    assert said.tokens == LONG[kind] * environments.TOKENS
    assert not said.done


@pytest.mark.long
def test_an_answer_that_is_too_long_is_cut_where_the_row_ends():
    _, rows, verdicts = drawn_with("long")
    bad = of_bad(rows)
    assert bad.any()
    assert not rows.finished[bad].any()
    assert rows.written[bad].all()
    assert (verdicts.outcome[bad] == 0).all()
    assert not verdicts.reasons


def spoilt(act):
    """The environment here, whose answers about the bad target are others."""

    def answer(turns):
        pairs = zip(turns, HERE.answer(turns), strict=True)
        return [act(one) if turn.target == BAD else one for turn, one in pairs]

    return HostEnvironment(answer=answer, measures=("parity",), closed=CLOSED.extend)


CLOSED = []
ODD = {  # in place of an answer, and the reason why there is none
    "none": (lambda one: None, "error: NoneType in place of an answer"),
    "a tuple": (tuple, "error: tuple in place of an answer"),
    "undeclared": (
        lambda one: one._replace(found={"parity": 0.0, "x": 1.0}),
        "error: measures x, and declares parity",
    ),
    "measures none": (
        lambda one: one._replace(found=None),
        "error: TypeError: 'NoneType' object is not iterable",
    ),
    "a measure of text": (
        lambda one: one._replace(found={"parity": "odd"}),
        "error: ValueError: could not convert string to float: 'odd'",
    ),
    "fractions": (
        lambda one: one._replace(tokens=[1, 2.5]),
        "error: token 2.5 is none of 11",
    ),
    "no tokens": (
        lambda one: one._replace(tokens=None),
        "error: TypeError: 'NoneType' object is not iterable",
    ),
    "reward of text": (
        lambda one: one._replace(reward="much"),
        "error: ValueError: could not convert string to float: 'much'",
    ),
    "no reward": (lambda one: one._replace(reward=None, done=True), "none"),
}


@pytest.mark.first(3)
@pytest.mark.parametrize("what", ODD)
def test_what_is_no_answer_of_ones_own_costs_its_completion_alone(what):
    act, reason = ODD[what]
    CLOSED.clear()
    _, rows, verdicts = played(spoilt(act))
    _, right, _ = played()
    bad = of_bad(dataclasses.replace(rows, turns=right.turns))
    assert bad.any()
    assert verdicts.reasons == dict.fromkeys(np.flatnonzero(bad).tolist(), reason)
    rest = rows.exists & ~bad
    np.testing.assert_array_equal(verdicts.outcome[rest], right.turns.outcome[rest])
    assert rows.finished[bad].all()
    if what not in ("none", "a tuple", "no reward"):  # they have states, to be closed
        assert CLOSED


@pytest.mark.first(1)
@pytest.mark.parametrize(
    ("answer", "number"),
    [(lambda turns: HERE.answer(turns[1:]), "[1-9]"), (lambda turns: None, "0")],
)
def test_a_host_environment_answers_each_turn(answer, number):
    """One that is left out would move all behind it to the row before."""
    world = HostEnvironment(answer=answer)
    with pytest.raises(ConfigError, match=f"^task.environment gives {number} answers"):
        played(world)


def nothing():
    return None


def lacks():
    return Environment(reset=reset, observe=None)  # pyright: ignore[reportArgumentType]


@pytest.mark.first(1)
@pytest.mark.parametrize(
    ("make", "words"),
    [
        (
            nothing,
            "what it gives, NoneType, has no function reset; let it give a types",
        ),
        (lacks, "what it gives, Environment, has no function observe"),
        (failing, r"cannot be called as failing\(\): missing a required .*argument"),
        (lambda: None, "define it with def at the top level of a file"),
    ],
)
def test_what_makes_no_environment_is_refused_before_a_run(make, words):
    with pytest.raises((RuntimeError, ValueError), match=words):
        environments.in_workers(make, count=1).start()


# ----- text


@cache
def demo():
    """The folder of the demo, and the environment of the page beside it."""
    folder = Path(mkdtemp(prefix="curax-tries-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    page = (Path(__file__).parents[1] / "docs" / "environments.md").read_text()
    (code,) = re.findall(r"^```python\n# tries.py\n(.*?)^```", page, re.M | re.S)
    (folder / "tries.py").write_text(code)
    return folder


@pytest.fixture
def tries(monkeypatch):
    monkeypatch.syspath_prepend(str(demo()))
    import tries

    return tries


def test_answers_are_turns_of_the_user_in_the_template_of_a_chat(tries):
    made = test_file_task.task(environment=tries.environment, max_answer_tokens=2)
    assert made.verify is made.verify_all is None
    world = made.environment
    assert world.measures == ("tries",)
    spoken = tokenizer()
    target = np.int32(0)
    problem = test_file_task.read("train.jsonl")[0]
    wrong, right = (
        [*spoken.encode(f"It is {n}."), *spoken.end[-1:]]
        for n in (int(problem["answer"]) + 1, problem["answer"])
    )
    turns = [Turn(None, 5, target, wrong), Turn(None, 5, target, right)]
    less, good = world.answer(turns)
    assert (less.done, less.reward, less.found) == (False, 0.0, {"tries": 1.0})
    assert (good.done, good.reward) == (True, 1.0)
    said = spoken.decode(less.tokens, control=True)
    words = spoken.decode(spoken.encode("Less.", begins=False)[:2])
    assert said == (f"\n<|im_start|>user\n{words}<|im_end|>\n<|im_start|>assistant\n")
    (again,) = world.answer([Turn(less.state, 5, target, right)])
    assert (again.done, again.reward, again.found) == (True, 0.5, {"tries": 2.0})
    whole = spoken.chat(
        [
            {"role": "user", "content": "?"},
            {"role": "assistant", "content": "x"},
            {"role": "user", "content": words},
        ]
    )
    assert whole[-len(less.tokens) :] == less.tokens


def spells():
    """An environment that gives tokens where its turns are text."""

    def observe(state, turn):
        return state, seen(tokens=[1, 2])

    return Environment(reset=reset, observe=observe)


@pytest.mark.long
def test_tokens_in_place_of_text_cost_their_completion_alone():
    made = test_file_task.task(environment=spells)
    (said,) = made.environment.answer([Turn(None, 5, 0, [1])])
    assert said == (
        "error: observe gives [1, 2] as tokens, and turns of this task are text"
    )


def test_without_a_chat_answers_are_plain_text(tries):
    made = test_file_task.task(environment=tries.environment, chat=False)
    spoken = tokenizer()
    (said,) = made.environment.answer([Turn(None, 5, 0, spoken.encode("It is 99."))])
    assert spoken.decode(said.tokens) == "Less."
