"""Tasks of verifiers, whose other side is a program that speaks as it would.

With verifiers itself: `make verifiers-test`.
"""

import json
import os
import re
import signal
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

import numpy as np
import pytest
import test_play
import tiny
import turning
import words

from curax.config import Config, load, override, rebuild
from curax.settings.config_paths import describe, unbound
from curax.tasks import text, verifiers, verifiers_process
from curax.types import Answer, Turn

FAKE = Path(__file__).with_name("verifiers_fake.py")
TOKENIZER = str(words.folder() / "tokenizer")
PROMPTS = [[5, 6], [7, 8, 9], [5, 6, 7, 8], [9, 9]]


@pytest.fixture(autouse=True)
def sides(monkeypatch):
    """The fake takes the place of the other side; what a test has started ends."""
    made, begun = [], verifiers_process.Side.__init__

    def noted(side, *args):
        begun(side, *args)
        made.append(side)

    monkeypatch.setattr(verifiers_process, "SIDE", FAKE)
    monkeypatch.setattr(verifiers_process.Side, "__init__", noted)
    monkeypatch.delenv(verifiers.PYTHON, raising=False)
    verifiers.asked.cache_clear()
    yield made
    for side in made:
        side.end()


def task(prompts=None, taskset="fake", acts=None, **options):
    told = {name: options.pop(name) for name in ("turns", "log") if name in options}
    config = {"prompts": prompts or PROMPTS, "acts": acts or {}} | told
    default = {"tokenizer": TOKENIZER, "python": sys.executable, "num_held_out": 1}
    return verifiers.task(
        taskset=taskset, config=config, **default | {"deadline": 60.0} | options
    )


def lines(log):
    return [json.loads(line) for line in log.read_text().splitlines()]


def left(side):
    return [*side._episodes], [*side._traces]


# ----- prompts


def test_a_prompt_is_what_an_episode_asks_with_first(sides):
    made = task(num_held_out=2)
    assert (made.num_prompts, made.num_held_out) == (2, 2)
    prompts = made.prompts(np.array([1, 0]))
    asked = [t[m].tolist() for t, m in zip(prompts.tokens, prompts.mask, strict=True)]
    assert asked == [PROMPTS[1], PROMPTS[0]]
    assert prompts.tokens.shape == (2, 4)
    np.testing.assert_array_equal(prompts.target, [1, 0])
    held = made.held_out(np.array([1]))
    np.testing.assert_array_equal(held.tokens, [[*[made.pad] * 2, 9, 9]])
    np.testing.assert_array_equal(held.target, [3])
    spoken = text.load(TOKENIZER)
    assert (made.vocab_size, made.end) == (spoken.size, spoken.end)
    assert made.summary == "fake: 4 of 4 tasks, of which 2 are held out."
    assert left(sides[0]) == ([], [])
    again = task(num_held_out=2)
    assert again.fingerprint == made.fingerprint != task(num_held_out=1).fingerprint
    assert len(sides) == 1  # the same options have one process


def test_prompts_that_are_too_long_are_left_out_and_counted():
    made = task(max_prompt_tokens=3)
    assert (made.num_prompts, made.num_held_out) == (2, 1)
    assert made.summary == "fake: 3 of 4 tasks (1 too long), of which 1 are held out."
    assert made.prompts(np.array([0])).tokens.shape == (1, 3)
    assert task(size=2).num_prompts == 1


# ----- turns


def first(made, number, key=7):
    """The first turn of an episode of a task."""
    return Turn(None, key, np.int32(number), [3, 4])


def test_episodes_go_on_turn_by_turn_at_the_same_time(sides, tmp_path):
    made = task(log=str(tmp_path / "log"))
    answer = made.environment.answer
    turns = [first(made, n % 3, key=2**64 - 1 - n) for n in range(40)]
    said = answer(turns)
    assert {(*one.tokens, one.done, one.reward) for one in said} == {(1, False, 0.0)}
    assert len({one.state for one in said}) == len(turns)
    said = answer([Turn(one.state, 0, 0, [n, 4]) for n, one in enumerate(said)])
    assert {(*one.tokens, one.done) for one in said} == {(1, 2, False)}
    said = answer([Turn(one.state, 0, 0, [4]) for one in said])
    assert said == [Answer(None, [], True, 0.5, {})] * len(turns)
    rows = {
        (*one["row"], one["seed"]) for one in lines(tmp_path / "log") if "row" in one
    }
    assert rows == {
        (*PROMPTS[n % 3], 3, 4, 1, n, 4, 1, 2, 4, 2**63 - 1 - n) for n in range(40)
    }
    assert left(sides[0]) == ([], [])


FAULTS = {
    "hang": "timeout",
    "late": "timeout",
    "fails": "error: KeyError: 'x'",
    "rewrites": "error: the episode asks with another history, from token 3 of 4 on",
    "another": "error: the episode asks with another prompt than before",
    "again": "error: another agent of the episode, or another attempt",
    "inf": "error: a reward of inf",
}


@pytest.mark.first(1)
def test_what_fails_costs_the_completion_of_that_episode_alone(sides):
    acts = {str(n): act for n, act in enumerate([*FAULTS, "none", ""])}
    made = task([[5, 6]] * (len(acts) + 1), acts=acts, deadline=3.0, turns=2)
    begun = time.monotonic()
    *said, none, good = made.environment.answer([first(made, int(n)) for n in acts])
    assert 3 < time.monotonic() - begun < 10
    found = dict(zip(FAULTS, said, strict=True))
    inf, found["inf"] = made.environment.answer(
        [Turn(one.state, 0, 0, [4]) for one in (none, found["inf"])]
    )
    assert np.isnan(inf.reward)
    assert inf.done
    assert good.tokens == [1]
    for act, reason in FAULTS.items():
        assert found[act].startswith(reason), act
    (good,) = made.environment.answer([Turn(good.state, 0, 0, [4])])
    assert (good.done, good.reward) == (True, 0.5)
    assert left(sides[0]) == ([], [])


def test_where_the_process_dies_its_episodes_crash_and_the_next_have_another(sides):
    made = task(acts={"1": "crash"})
    (good,) = made.environment.answer([first(made, 0)])
    assert not good.done
    assert made.environment.answer([first(made, 1)]) == ["crash"]
    assert made.environment.answer([Turn(good.state, 0, 0, [4])]) == ["crash"]
    (good,) = made.environment.answer([first(made, 0)])
    assert good.tokens == [1]
    assert left(sides[0])[0] == [good.state]
    made.environment.closed([good.state])
    assert left(sides[0]) == ([], [])
    assert made.environment.answer([Turn(good.state, 0, 0, [4])]) == ["crash"]


def test_a_process_is_started_before_the_work_where_none_runs(sides, monkeypatch):
    made = task(acts={"1": "crash"})
    assert made.environment.answer([first(made, 1)]) == ["crash"]
    dead = sides[0]._process
    made.start()
    assert sides[0]._process is not dead
    made.start()  # it runs
    running = sides[0]._process
    running.kill()
    assert running.over.wait(20)
    monkeypatch.setattr(sides[0], "_python", "/nowhere/python")
    with pytest.raises(
        RuntimeError, match=r"^task.python='/nowhere/python' cannot be run"
    ):
        made.start()


def test_a_request_of_somebody_else_is_refused(sides):
    made = task()
    assert made
    url = f"http://127.0.0.1:{sides[0]._server.server_port}/v1/models"
    with pytest.raises(urllib.error.HTTPError, match="401"):
        urllib.request.urlopen(url)


# ----- completions


@pytest.mark.long
def test_rows_are_what_episodes_have_read_and_those_cut_off_are_closed(sides, tmp_path):
    """By the tiny policy, whose draw has more rows than fit their tokens."""
    contexts = tiny.CONTEXTS
    asked = [t[m].tolist() for t, m in zip(contexts.tokens, contexts.mask, strict=True)]
    prompts = [[5]] * 9
    for number, row in zip(turning.TARGET.tolist(), asked, strict=True):
        prompts[number] = list(map(int, row))
    made = task(prompts, log=str(tmp_path / "log"))
    _, rows, verdicts = test_play.played(made.environment)
    done = rows.exists & (rows.turns.count == 3)
    assert 0 < done.sum() < rows.exists.sum()
    assert not verdicts.reasons
    np.testing.assert_array_equal(verdicts.outcome[done], 0.5)
    np.testing.assert_array_equal(verdicts.outcome[rows.exists & ~done], 0.0)
    wanted = sorted(
        prompts[turning.TARGET[rows.prompt[n]]]
        + rows.tokens[n, rows.written[n]].tolist()
        for n in np.flatnonzero(done)
    )
    assert left(sides[0]) == ([], [])
    sides[0].end()
    noted = lines(tmp_path / "log")
    assert sorted(one["row"] for one in noted if "row" in one) == wanted
    begun = (rows.exists & (rows.turns.count > 0)).sum()
    stops = [one for one in noted if "stop" in one]
    assert len(stops) <= begun + len(prompts)


def test_the_config_of_the_page_is_one(tmp_path, monkeypatch):
    page = (Path(__file__).parents[1] / "docs" / "environments.md").read_text()
    blocks = dict(re.findall(r"^```python\n# (\w+\.py)\n(.*?)^```", page, re.M | re.S))
    (tmp_path / "train_sums.py").write_text(blocks["train_sums.py"])
    compile(blocks["sums.py"], "sums.py", "exec")
    (tmp_path / "words").symlink_to(words.folder())
    monkeypatch.chdir(tmp_path)
    config = load("train_sums.py")
    assert unbound(config.task) is verifiers.task
    rebuilt = rebuild(describe(config), Config)
    assert describe(rebuilt) == describe(config)
    with pytest.raises(ValueError, match=r"^task\.python names no Python"):
        override(config, {"task.tokenizer": TOKENIZER}).task()


# ----- what is refused


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"python": None}, r"^task\.python names no Python that has verifiers; run py"),
        (
            {"python": "/no/python"},
            r"^task\.python='/no/python' is no program that can",
        ),
        (
            {"taskset": "absent"},
            r"^verifiers is not installed for .*; run .* -m pip in",
        ),
        (
            {"taskset": "broken"},
            r"^task\.taskset='broken' cannot be loaded \(ModuleNotFoundError: taskset",
        ),
        ({"taskset": "dies"}, r"cannot be loaded \(it has ended: Segmentation fault\)"),
        ({"num_held_out": 4}, r"^task\.num_held_out=4 of the 4 .* to at most 3\.$"),
        ({"max_prompt_tokens": 1}, r"^task\.max_prompt_tokens=1 leaves no .* 2 tokens"),
        (
            {"acts": {"2": "silent"}},
            r"^task 2 of fake asks the policy for nothing \(error: ValueError: no\); c",
        ),
        ({"tokenizer": None}, r"^task\.tokenizer names no folder"),
    ],
)
def test_a_wrong_option_is_told_in_a_sentence(options, said):
    with pytest.raises(ValueError, match=said) as caught:
        task(**options)
    assert str(caught.value)[-1] == "."


def test_a_taskset_of_nothing_is_refused(monkeypatch):
    monkeypatch.setenv(verifiers.PYTHON, sys.executable)
    with pytest.raises(ValueError, match=r"cannot be loaded \(it has no tasks\)"):
        verifiers.task(taskset="fake", config={"prompts": []}, tokenizer=TOKENIZER)


def test_nothing_is_left_running(sides):
    task()
    process = sides[0]._process._process
    assert os.getpgid(process.pid) == process.pid
    sides[0].end()
    assert process.returncode == -signal.SIGKILL
