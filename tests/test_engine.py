"""Completions by an engine over HTTP: right, asked again, or missing; never wrong."""

import dataclasses
import gc
import math
import os
import re
import signal
import threading
import time
from contextlib import contextmanager
from functools import lru_cache, partial
from pathlib import Path

import engine_server
import jax
import numpy as np
import pytest
import small
import tiny
from run_files import lines
from test_loops import STOPPED, TINY, warmed

from curax import engine, handover, hint, off_policy, reflect, train
from curax.config import ConfigError, Hint, Reflection, override
from curax.models import pretrained, written
from curax.step import loops
from curax.step.build import build, with_engine

KINDS = {"vllm": engine.vllm, "sglang": engine.sglang}
HOW = handover.Limits(max_tokens=3, temperature=1.0, end=(19,), vocabulary=23)
ASKS = [handover.Ask([1, 2, 3 + n % 4], 100 + n) for n in range(8)]


def asking(url, kind=engine.vllm, base=TINY, **options):
    given = {"wait": 20.0, "tries": 3, "retries": 0, "timeout": 60.0, "parallel": 4}
    changes = {
        "sampling.engine": partial(kind, url=url, **given | options),
        "sampling.off_policy": off_policy.truncated_ratio,
    }
    return override(base, changes)


@lru_cache
def params():
    return jax.device_get(tiny.random_params(build(TINY).model))


def source(parts, step=0, given=None):
    own = params() if given is None else given
    return handover.Source(
        step=step,
        mark=jax.device_put(np.float32(step)),
        params=lambda: own,
        config=parts.config,
        task=parts.task,
    )


@contextmanager
def started(kind=engine.vllm, **options):
    """A fake server, what asks it, and the components of the run."""
    fake = engine_server.Engine()
    with fake.served() as url:
        parts = with_engine(build(asking(url, kind, **options)))
        parts.engine.start(parts.config)
        try:
            yield fake, parts.engine, parts
        finally:
            parts.engine.close()


@lru_cache
def right():
    """The completions without any fault."""
    with started() as (_, asks, parts):
        return asks.draw(ASKS, HOW, source(parts)).completions


def of(completions):
    return [(one.tokens, one.logp, one.finished) for one in completions]


# ----- an engine by itself


@pytest.mark.first(1)
@pytest.mark.parametrize("kind", KINDS)
def test_parameters_are_handed_over_once_and_then_draw(kind, tmp_path):
    with started(KINDS[kind], folder=str(tmp_path)) as (fake, asks, parts):
        here = source(parts)
        drawn = [asks.draw(ASKS, HOW, here) for _ in range(2)]
        assert of(drawn[0].completions) == of(drawn[1].completions) == of(right())
        assert len(fake.loads) == 1
        assert drawn[0].counts["hand_over_bytes"] > 1000
        assert "hand_over_bytes" not in drawn[1].counts
        asks.draw(ASKS, HOW, source(parts, step=1))
        assert [Path(one).name[-1] for one in fake.loads] == ["0", "1"]
        assert [one.name for one in tmp_path.iterdir()] == [fake.version]
    assert not list(tmp_path.iterdir())


def test_where_the_route_for_tokens_is_closed_that_of_openai_is_asked():
    with started() as (fake, asks, parts):
        fake.generates = False
        drawn = asks.draw(ASKS, HOW, source(parts))
        assert of(drawn.completions) == of(right())
        assert all(body["return_token_ids"] for body in fake.asked)


def test_a_route_that_is_busy_when_it_is_looked_for_is_looked_for_again():
    fake = engine_server.Engine()
    fake.generates, looked = False, []
    given = fake.answer

    def answer(handler, body, number):
        if handler.path == "/inference/v1/generate" and not looked:
            looked.append(body)
            engine_server.judge_server.reply(handler, 503)
        else:
            given(handler, body, number)

    with engine_server.judge_server.serve(answer) as server:
        parts = with_engine(build(asking(server.url)))
        drawn = parts.engine.draw(ASKS, HOW, source(parts))
        parts.engine.close()
    assert of(drawn.completions) == of(right())
    assert looked == [{}]


@pytest.mark.parametrize("folder", ["here/ä", "~/here", "~no-user/here"])
def test_a_folder_has_a_name_that_holds_wherever_the_server_runs(
    folder, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))

    class Own(Alone):
        def load(self, folder, version, *, adapter):
            super().load(folder, version, adapter=adapter)
            assert folder.parent == (tmp_path / "home/here" if home else tmp_path / it)

    home, it = folder.startswith("~/"), folder
    made = Own()
    made._folder = folder
    made.draw(ASKS, HOW, source(build(asking("http://127.0.0.1:1"))))
    made.close()


def late(given, number):
    time.sleep(1.5)
    return given


def other(**fields):
    """A fault: a reply with other values in some fields."""
    return lambda given: given | fields


FAULTS = {
    "no JSON": lambda given: "what?",
    "something else": lambda given: '{"choices": []}',
    "an error": lambda given: 500,
    "refused": lambda given: 400,
    "no tokens": other(tokens=[], logp=[]),
    "too few tokens": other(tokens=[1], logp=[-1.0], end="length"),
    "too many tokens": other(tokens=[1] * 4, logp=[-1.0] * 4, end="length"),
    "unknown tokens": other(tokens=[23, 19], logp=[-1.0] * 2),
    "fractions of tokens": other(tokens=[0.5, 19], logp=[-1.0] * 2),
    "truth for a token": other(tokens=[True, 19], logp=[-1.0] * 2),
    "tokens behind the end": other(tokens=[19, 4, 19], logp=[-1.0] * 3, end="stop"),
    "no end": other(tokens=[4, 5, 6], logp=[-1.0] * 3, end="stop"),
    "NaN": lambda given: given | {"logp": [math.nan] * len(given["tokens"])},
    "minus infinity": lambda given: (
        given | {"logp": [-math.inf] * len(given["tokens"])}
    ),
    "too low": lambda given: given | {"logp": [-1e39] * len(given["tokens"])},
    "truth": lambda given: given | {"logp": [False] * len(given["tokens"])},
    "text": lambda given: given | {"logp": ["-1"] * len(given["tokens"])},
    "above 0": lambda given: given | {"logp": [0.5] * len(given["tokens"])},
    "no number": lambda given: given | {"logp": ["x"] * len(given["tokens"])},
    "too few log-probs": lambda given: given | {"logp": given["logp"][1:]},
    "another version": other(version="of-someone-else"),
    "no version": other(version=None),
}


@pytest.mark.first(1)
@pytest.mark.parametrize("name", FAULTS)
def test_what_is_impossible_is_drawn_again_and_is_the_same(name):
    """Half of the rows fail at first; what is asked again has the same seed."""
    with started() as (fake, asks, parts):
        fake.fault = lambda given, n: FAULTS[name](given) if n % 2 and n < 9 else given
        drawn = asks.draw(ASKS, HOW, source(parts))
    assert of(drawn.completions) == of(right())
    assert (drawn.counts["requests"], drawn.counts["again"]) == (12, 4)
    assert drawn.counts["missing"] == 0
    assert drawn.reason is None


CUT = HOW._replace(top_k=3, top_p=0.9, most_kept=6)
UNFIT = {
    "of too few tokens": (lambda kept: kept[1:], r"\d tokens with \d kept sets"),
    "without the token": (lambda kept: [[22 - i for i in range(4)]] * len(kept), "its"),
    "unknown tokens": (lambda kept: [[*one, 23] for one in kept], "in the vocabulary"),
    "a token twice": (lambda kept: [one * 2 for one in kept], "a token twice"),
    "fractions": (lambda kept: [[0.5]] * len(kept), "holds no completion"),
    "too many": (lambda kept: [[*range(20)]] * len(kept), "there is room for 6"),
    "none": (lambda kept: None, r"\d tokens with 0 kept sets"),
}


@pytest.mark.long
def test_kept_sets_come_with_the_log_probs_within_them():
    """Of SGLang, which gives those within all tokens too, they are the same."""
    found = []
    for kind in KINDS.values():
        with started(kind) as (_, asks, parts):
            found.append(asks.draw(ASKS, CUT, source(parts)).completions)
    assert found[0] == [one._replace(versions=found[0][0].versions) for one in found[1]]
    sizes = {len(kept) for one in found[0] for kept in one.kept}
    assert max(sizes) == 3
    assert of(found[0]) != of(right())


@pytest.mark.first(1)
@pytest.mark.parametrize("name", UNFIT)
def test_kept_sets_that_cannot_be_are_no_completion(name):
    spoilt, said = UNFIT[name]
    with started(tries=1) as (fake, asks, parts):
        fake.fault = lambda given, n: given | {"kept": spoilt(given["kept"])}
        drawn = asks.draw(ASKS[:1], CUT, source(parts))
    assert drawn.completions == [None]
    assert re.search(said, drawn.reason)


@pytest.mark.first(1)
@pytest.mark.parametrize("name", ["NaN", "an error", "another version"])
def test_what_always_fails_is_missing_and_the_others_are_there(name):
    with started() as (fake, asks, parts):
        seed = ASKS[2].seed
        fake.fault = lambda given, n: (
            FAULTS[name](given)
            if fake.asked[n - 1]["sampling_params"]["seed"] == seed
            else given
        )
        # One at a time, or a number may be another request's.
        asks._rows._parallel = 1
        drawn = asks.draw(ASKS, HOW, source(parts))
    assert [one is None for one in drawn.completions].index(True) == 2
    assert drawn.counts["missing"] == 1
    assert drawn.counts["requests"] == len(ASKS) + 2
    assert drawn.reason


def test_what_takes_too_long_is_cancelled_and_asked_again():
    with started(timeout=1.0) as (fake, asks, parts):
        here = source(parts)
        asks.draw(ASKS[:4], HOW, here)  # compiled
        already = len(fake.asked)
        fake.fault = lambda given, n: late(given, n) if n == already + 1 else given
        drawn = asks.draw(ASKS, HOW, here)
    assert of(drawn.completions) == of(right())
    assert drawn.counts["again"] == 1


def test_an_engine_that_dies_in_the_middle_of_a_draw_is_waited_for_and_loaded_again():
    with started() as (fake, asks, parts):

        def dies(given, number):
            if number == 3:
                fake.dead = True
                threading.Timer(1.0, fake.restart).start()
            return 503 if fake.dead else given

        fake.fault = dies
        drawn = asks.draw(ASKS, HOW, source(parts))
        assert of(drawn.completions) == of(right())
        assert drawn.counts["again"] > 0
        assert len(fake.loads) == 2
        assert len(set(fake.loads)) == 1


@pytest.mark.long
def test_an_engine_that_comes_back_with_other_parameters_draws_nothing_that_counts():
    """By the route that does not say what drew: it is asked before and afterwards."""
    with started() as (fake, asks, parts):
        fake.generates = False

        def swaps(given, number):
            if number == 5:
                fake.version = "default"
            return given

        fake.fault = swaps
        drawn = asks.draw(ASKS, HOW, source(parts))
        assert of(drawn.completions) == of(right())
        assert drawn.counts["requests"] == 2 * len(ASKS)
        assert len(fake.loads) == 2


def test_an_engine_that_does_not_come_back_ends_the_run_in_a_sentence():
    with started(wait=0.3) as (fake, asks, parts):
        fake.dead = True
        with pytest.raises(handover.EngineError, match=r"has not answered for 0\.3 s"):
            asks.draw(ASKS, HOW, source(parts))


def test_an_engine_that_takes_no_parameters_says_so():
    """As that of sglang-jax, which has no route for them."""
    fake = engine_server.Engine()
    given = fake.answer

    def answer(handler, body, number):
        if handler.path == "/update_weights_from_disk":
            engine_server.judge_server.reply(handler, 404, '{"detail": "Not Found"}')
        else:
            given(handler, body, number)

    with engine_server.judge_server.serve(answer) as server:
        parts = with_engine(build(asking(server.url, engine.sglang)))
        with pytest.raises(handover.EngineError, match=r"refuses .*HTTP 404"):
            parts.engine.draw(ASKS, HOW, source(parts))


@pytest.mark.long
def test_adapters_are_handed_over_alone_under_names_of_their_own(tmp_path):
    written.write(tmp_path / "base", TINY, build(TINY).task, params())
    base = partial(pretrained.model, path=str(tmp_path / "base"), lora_rank=2)
    with started(base=dataclasses.replace(TINY, model=base)) as (fake, asks, parts):
        fake.load(str(tmp_path / "base"))
        own = jax.device_get(parts.model.init(jax.random.key(0)))
        for step in range(2):
            drawn = asks.draw(ASKS, HOW, source(parts, step, own))
            assert None not in drawn.completions
            ((name, folder),) = fake.adapters.items()
            assert {body["model"] for body in fake.asked[-8:]} == {name}
            assert name.endswith(f"step-{step}")
            names = {one.name for one in Path(folder).iterdir()}
            assert {"adapter_config.json", "adapter_model.safetensors"} <= names
        assert fake.loads == [str(tmp_path / "base")]


def test_the_token_comes_from_the_environment_and_is_told_nowhere(monkeypatch):
    monkeypatch.setenv("CURAX_ENGINE_TOKEN", "hidden-from-all")
    seen = []

    def answer(handler, body, number):
        seen.append(handler.headers["Authorization"])
        engine_server.judge_server.reply(handler, 401, "no: hidden-from-all")

    with engine_server.judge_server.serve(answer) as server:
        parts = with_engine(build(asking(server.url, wait=0.1)))
        parts.engine.start(parts.config)
        with pytest.raises(handover.EngineError) as told:
            parts.engine.draw(ASKS, HOW, source(parts))
    assert set(seen) == {"Bearer hidden-from-all"}
    assert "hidden" not in str(told.value)


def test_an_end_at_the_last_token_is_an_end_whatever_the_engine_says():
    """Some look at the length first."""
    last = handover.Limits(max_tokens=2, temperature=1.0, end=(9,), vocabulary=20)
    logp = [-1.0, -1.0]
    for said in (True, False):
        given = handover.Completion([3, 9], logp, said, frozenset(["v"]))
        assert handover.fault(given, last, "v") is None
    given = handover.Completion([3, 4], logp, True, frozenset(["v"]))
    assert handover.fault(given, last, "v") == "an end that is none of the task's"

    class LengthFirst(Alone):
        def complete(self, asks, how, version):
            return [handover.Completion([3, how.end[0]], logp, False) for _ in asks]

    config = override(asking("http://127.0.0.1:1"), {"sampling.engine": LengthFirst})
    parts = with_engine(build(config))
    how = HOW._replace(max_tokens=2)
    (one, *_) = parts.engine.draw(ASKS, how, source(parts)).completions
    assert one.finished
    parts.engine.close()


def test_no_folder_is_left_of_an_engine_that_nobody_closes(tmp_path):
    with engine_server.Engine().served() as url:
        parts = with_engine(build(asking(url, folder=str(tmp_path))))
        parts.engine.start(parts.config)
        parts.engine.draw(ASKS[:1], HOW, source(parts))
        folders = parts.engine._folders
        assert [*tmp_path.iterdir()] == folders
        handover._remove_all(folders, os.getpid() + 1)  # in a fork
        assert [*tmp_path.iterdir()] == folders
        del parts
        gc.collect()
    assert not [*tmp_path.iterdir()]


def test_what_a_killed_process_of_the_same_run_has_left_is_removed(tmp_path):
    parts, home = build(asking("http://127.0.0.1:1")), tmp_path / "home"
    here, other = tmp_path / "here", tmp_path / "other"

    def following(workdir):
        made = Alone()
        made._folder = str(home)
        made.follow(workdir)
        return made

    left = []  # which nobody closes
    for workdir in (here, other):
        workdir.mkdir()
        left.append(following(workdir))
        left[-1].draw(ASKS[:1], HOW, source(parts))
    (mine,), (its,) = (made._folders for made in left)
    (home / f".{mine.name}.partial").mkdir()
    following(here)
    assert [*home.iterdir()] == [its]


@pytest.mark.long
def test_no_folder_is_left_of_an_engine_that_is_absent_or_closed(tmp_path):
    class Absent(Alone):
        away = 0

        def load(self, folder, version, *, adapter):
            if self.away:
                self.away -= 1
                raise handover.AbsentError("away")
            super().load(folder, version, adapter=adapter)

    made = Absent()
    made._folder, made._wait, made.away = str(tmp_path), 9.0, 1
    parts = build(asking("http://127.0.0.1:1"))
    first, second = source(parts, 0), source(parts, 1)
    for of in (first, second):
        made.draw(ASKS, HOW, of)
        assert len(list(tmp_path.iterdir())) == 1
    made.close()
    assert not list(tmp_path.iterdir())
    with pytest.raises(handover.EngineError, match="as the run ends"):
        made.draw(ASKS, HOW, first)
    assert not list(tmp_path.iterdir())
    made = Absent()
    made._folder, made._wait, made.away = str(tmp_path), 600.0, 99
    threading.Timer(0.2, made.leave).start()
    with pytest.raises(handover.ClosingError, match="is not waited for"):
        made.draw(ASKS, HOW, first)


def test_numbers_of_any_size_and_states_of_any_shape_are_no_completion():
    server = engine.vllm(url="http://127.0.0.1:1")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(server._rows, "replies", lambda *_: [[float("inf")]])
        assert server.completions([{}], "/x", lambda reply: engine.whole(reply[0])) == [
            "the reply of /x holds no completion"
        ]
        patch.setattr(server, "get", lambda place: ["odd"])
        with pytest.raises(handover.AbsentError, match="about its version"):
            server._version("v")


# ----- a run


def advanced(config, times):
    """The loop of a config after some steps: its state, rows and completions."""
    parts = with_engine(build(config))
    parts.engine.start(config)
    loop = loops.Staged(parts)
    with loop.context():
        loop.rehearse()
        state = loop.begin(dataclasses.replace(warmed(1), seed=loop.seeds))
        state, rows, shown = loop.advance(state, times)
    parts.engine.close()
    return jax.device_get(state), rows, shown


KEEPS = ["sampling.replay_support=true", "sampling.temperature=2"]


def host(config):
    return override(config, ["task.on_device=false"])


WHERE = [pytest.param(lambda config: config, marks=pytest.mark.long), host]


@pytest.mark.parametrize("where", WHERE, ids=["device", "host"])
def test_a_run_trains_on_what_its_policy_draws_elsewhere(where):
    fake = engine_server.Engine()
    with fake.served() as url:
        _, rows, _ = advanced(where(asking(url)), 3)
    assert [Path(one).name[-1] for one in fake.loads] == ["0", "1", "2"]
    for row in rows:
        assert row["engine/requests"] == row["rollout/drawn"] == 16
        assert 0 <= row["engine/gap_nats"] <= row["engine/gap_max_nats"] < 1e-4
        assert row["engine/missing"] == row["outcome/missing"] == 0
        assert row["off_policy/weight_max"] < 1.2
        assert row["update/count"] == 2


@pytest.mark.long
@pytest.mark.parametrize("where", WHERE, ids=["device", "host"])
def test_a_run_trains_within_what_its_engine_kept(where):
    for kept in (["sampling.top_p=0.9"], ["sampling.top_k=5"]):
        fake = engine_server.Engine()
        with fake.served() as url:
            config = where(asking(url, base=override(TINY, KEEPS + kept)))
            _, rows, _ = advanced(config, 2)
        for row in rows:
            assert row["engine/gap_max_nats"] < 1e-4
            assert row["outcome/missing"] == 0
            assert row["off_policy/ratio_max"] == pytest.approx(1, abs=1e-3)
            assert "sampler/cut_mass" not in row


@pytest.mark.long
@pytest.mark.parametrize("where", [lambda config: config, host], ids=["device", "host"])
def test_a_completion_that_is_missing_trains_nothing(where):
    """Of the first prompt all are missing: they count as missing outcomes."""
    fake = engine_server.Engine()
    with fake.served() as url:
        config = where(asking(url, tries=1, parallel=1))
        fake.fault = lambda given, n: 500 if n <= 4 else given
        _, (row,), (shown,) = advanced(config, 1)
    assert row["engine/missing"] == row["outcome/missing"] == 4
    assert row["rollout/drawn"] == 16
    assert np.isnan(shown.outcome[0]).all()
    assert not shown.keep[0].any()
    assert not shown.mask[0].any()
    assert not np.isnan(shown.outcome[1]).any()


@pytest.mark.long
def test_faults_change_nothing_of_a_run():
    """Bit for bit: what is asked again is the same."""
    states = []
    for fault in (None, lambda given, n: 500 if n % 5 == 1 else given):
        fake = engine_server.Engine()
        fake.fault = fault
        with fake.served() as url:
            states.append(advanced(asking(url, tries=9), 2)[0])
    assert fake.asked
    jax.tree.map(np.testing.assert_array_equal, *states)


@pytest.mark.long
def test_rounds_of_a_stopping_rule_ask_for_no_more_than_they_open():
    fake = engine_server.Engine()
    with fake.served() as url:
        _, (row,), _ = advanced(asking(url, base=STOPPED), 1)
    assert row["engine/requests"] == row["rollout/drawn"] < STOPPED.sampling.prompts * 4
    assert row["group/draws"] == row["rollout/drawn"] / STOPPED.sampling.prompts
    assert len(fake.loads) == 1


@pytest.mark.long
def test_hinted_groups_are_drawn_by_the_engine_too():
    hinted = override(TINY, ["task.hints=true", "sampling.max_tokens=3"])
    how = Hint(source=hint.reference_prefix, width=3, trigger=hint.all_wrong, levels=1)
    fake = engine_server.Engine()
    with fake.served() as url:
        hinted = dataclasses.replace(asking(url, base=hinted), hint=how)
        _, rows, _ = advanced(hinted, 2)
    assert sum(row["engine/requests"] for row in rows) == len(fake.asked)
    assert sum(row["rollout/drawn"] for row in rows) == len(fake.asked)


@pytest.mark.long
def test_a_draw_ahead_is_by_the_parameters_of_the_step_before():
    fake = engine_server.Engine()
    with fake.served() as url:
        config = override(asking(url), ["sampling.ahead=1"])
        _, rows, shown = advanced(config, 4)
    asked = [int(body["cache_salt"].rpartition("-")[2]) for body in fake.asked]
    assert [asked[16 * n] for n in range(4)] == [0, 0, 1, 2]
    assert [set(one.version[one.exists]) for one in shown] == [{0}, {0}, {1}, {2}]
    # The first are handed over twice: the state has a copy of them for each draw.
    assert [Path(one).name[-1] for one in fake.loads] == ["0", "0", "1", "2"]
    assert max(row["engine/gap_max_nats"] for row in rows) < 1e-4


@pytest.mark.long
def test_a_run_whose_engine_does_not_come_back_stops_and_can_be_resumed(
    tmp_path, monkeypatch, capsys
):
    """So does one that is stopped while it waits, at once; no file has the token."""
    monkeypatch.setenv(engine.TOKEN, "hidden-from-all")
    ends = []
    for name in ("whole", "stopped", "signalled"):
        fake = engine_server.Engine()
        with fake.served() as url:
            options = [
                "sampling.engine=engine.vllm",
                f"sampling.engine.url={url}",
                f"sampling.engine.wait={600 if name == 'signalled' else 0.5}",
                "sampling.off_policy=off_policy.truncated_ratio",
            ]
            argv = ["--config", str(small.FILE), "--workdir", str(tmp_path / name)]
            set_ = ["--set", "steps=4", *options]
            if name == "whole":
                assert train.main([*argv, *set_]) == 0
            else:
                once = iter([signal.SIGINT] if name == "signalled" else [])

                def dies(given, number, fake=fake, once=once):
                    fake.dead = number > 3 * 16 + 5
                    if fake.dead and (sent := next(once, None)):  # a second would end
                        os.kill(os.getpid(), sent)  # the process
                    return 503 if fake.dead else given

                fake.fault = dies
                asked, status = name == "signalled", train.main([*argv, *set_])
                assert status == (128 + signal.SIGINT if asked else 1)
                out, err = capsys.readouterr()
                assert ("is not waited for, as the run ends" in out) == asked
                assert ("has not answered for 0.5 s" in err) != asked
                assert "--resume" in (out if asked else err)
                with engine_server.Engine().served() as elsewhere:
                    set_ = [one.replace(url, elsewhere) for one in set_]
                    assert train.main([*argv, "--resume", *set_]) == 0
        rows = lines(tmp_path / name / "metrics.jsonl")
        ends.append([(row["step"], row.get("outcome/mean")) for row in rows])
        files = [path for path in (tmp_path / name).rglob("*") if path.is_file()]
        assert not any(b"hidden-from" in path.read_bytes() for path in files)
    assert ends[0] == ends[1] == ends[2]
    assert "hidden-from" not in "".join(capsys.readouterr())


class Alone(handover.Engine):
    """An engine of one's own that gives one completion to all."""

    def __init__(self):
        super().__init__()
        self.has = None

    def version(self, wanted, *, adapter):
        return self.has

    def load(self, folder, version, *, adapter):
        assert (folder / "config.json").is_file()
        self.has = version

    def complete(self, asks, how, version):
        return [handover.Completion([19], [-0.5], True) for _ in asks]


@pytest.mark.long
def test_an_engine_of_ones_own_is_one_function():
    config = override(asking("http://127.0.0.1:1"), {"sampling.engine": Alone})
    _, (row,), (shown,) = advanced(config, 1)
    assert row["rollout/length_tokens"] == 1
    # What is off is the engine's: the trainer agrees with itself.
    off = [row[f"off_policy/{of}perplexity_gap_nats"] for of in ("", "engine_")]
    assert 0.1 < abs(off[0]) < row["engine/gap_nats"] * (1 + 1e-4)  # of one token each
    assert row["engine/gap_nats"] <= row["engine/gap_max_nats"]
    np.testing.assert_allclose(*off, rtol=1e-4)
    assert (shown.tokens[..., 0] == 19).all()


ODD = {  # in place of the last completion, and the reason why it is missing
    "none": (None, "NoneType in place of a completion"),
    "a tuple": (([19], [-0.5], True), "tuple in place of a completion"),
    "fractions of tokens": (([2.5, 19], [-0.5] * 2), "is not in the vocabulary"),
    "truth": (([True, 19], [-0.5] * 2), "is not in the vocabulary"),
    "text": ((["x", 19], [-0.5] * 2), "is not in the vocabulary"),
    "no tokens": ((None, [-0.5]), "whose fields are others (TypeError: "),
    "text of log-probs": (([19], ["x"]), "whose fields are others (TypeError: "),
    "no log-prob": (([19], [None]), "whose fields are others (TypeError: "),
}


def drawn_by(complete):
    """What an engine of one's own draws, which is asked three times at most."""

    class Own(Alone):
        def complete(self, asks, how, version):
            return complete(super().complete(asks, how, version))

    made = Own()
    try:
        return made.draw(ASKS, HOW, source(build(asking("http://127.0.0.1:1"))))
    finally:
        made.close()


@pytest.mark.first(4)
@pytest.mark.parametrize("name", ODD)
def test_what_is_no_completion_of_an_engine_of_ones_own_is_missing(name):
    what, said = ODD[name]
    if what and len(what) == 2:
        what = handover.Completion(*what, True)
    # It is the last of the rows, and then the only one that is asked for again.
    drawn = drawn_by(lambda each: [*each[:-1], what])
    assert [n for n, one in enumerate(drawn.completions) if one is None] == [7]
    assert drawn.counts["requests"] == len(ASKS) + 2
    assert said in drawn.reason


def fails(_):
    raise ValueError("of mine")


@pytest.mark.parametrize(
    ("spoilt", "said"),
    [
        (fails, r"fails at .*test_engine\.py:\d+ \(ValueError: of mine\)"),
        (lambda each: 5, r"fails at .* \(TypeError: "),
    ],
)
def test_an_engine_of_ones_own_that_fails_ends_the_run_in_a_sentence(spoilt, said):
    with pytest.raises(handover.EngineError, match=said):
        drawn_by(spoilt)


def test_a_reason_of_an_engine_of_ones_own_is_one_line():
    drawn = drawn_by(lambda each: ["of\nlines \ud800" + "x" * 999 for _ in each])
    assert drawn.reason.startswith("of lines \\ud800x")
    assert len(drawn.reason) < 210

    def away(each):
        raise ConnectionError("of\nlines")

    assert drawn_by(away).reason == "of lines"


def test_tokens_of_numpy_are_tokens():
    one = handover.Completion(np.array([3, 19]), np.float32([-1, -0.5]), True)
    drawn = drawn_by(lambda each: [one for _ in each])
    assert None not in drawn.completions


@pytest.mark.parametrize(
    ("spoilt", "number"), [(lambda each: each[1:], 7), (lambda each: None, 0)]
)
def test_an_engine_of_ones_own_replies_to_each_row(spoilt, number):
    """One that is left out would move all behind it to the row before."""
    with pytest.raises(handover.EngineError, match=f"{number} completions of 8 that"):
        drawn_by(spoilt)


@pytest.mark.parametrize(
    ("error", "times", "missing"),
    [(handover.AbsentError, 3, 0), (ConnectionError, 3, 0), (ConnectionError, 4, 8)],
)
def test_an_engine_that_does_not_answer_while_it_draws_is_asked_again(
    error, times, missing
):
    tries = []

    def away(each):
        tries.append(each)
        if len(tries) < times:
            raise error("gone")
        return each

    drawn = drawn_by(away)
    assert (drawn.counts["requests"], drawn.counts["missing"]) == (24, missing)
    assert drawn.reason == ("gone" if missing else None)


# ----- what is refused

URL = "http://127.0.0.1:9"


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"sampling.off_policy": None}, "as another program rounds it"),
        ({"sampling.top_k": 3}, "gives what it kept, or sampling.top_k=0."),
        ({"sampling.top_p": 0.5}, "gives what it kept, or sampling.top_p=1.0."),
        ({"seeds": 2}, "set seeds to 1."),
        (
            {"reflection": Reflection(weights=reflect.mean), "kl": None},
            "set sampling.engine to None or reflection to None.",
        ),
    ],
)
def test_what_an_engine_cannot_do_is_refused(changes, said):
    with pytest.raises(ConfigError, match=said):
        override(asking(URL), changes)


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (partial(engine.vllm, url="vllm"), "no http:// or https:// address"),
        (partial(engine.vllm, url="http://me:secret@host"), "a user or a password"),
        (partial(engine.sglang, url=URL, token_env="abc"), "no name in capitals"),
        (engine.vllm, "engine.vllm: missing a required .*argument: 'url'; set it"),
        (dict, "gives a dict; name a function that gives a handover.Engine."),
    ],
)
def test_an_engine_that_is_none_is_refused(make, said):
    config = override(asking(URL), {"sampling.engine": make})
    with pytest.raises((ConfigError, ValueError), match=said) as told:
        with_engine(build(config))
    assert "secret" not in str(told.value)


def test_a_token_that_is_named_must_be_there():
    parts = with_engine(build(asking(URL, token_env="NOT_THERE")))
    with pytest.raises(RuntimeError, match="no environment variable NOT_THERE"):
        parts.engine.start(parts.config)


@pytest.mark.parametrize("variable", ["ALL_PROXY", "SSL_CERT_FILE"])
def test_variables_that_allow_no_request_are_told(variable, monkeypatch):
    monkeypatch.setenv(variable, "odd://nowhere")
    parts = with_engine(build(asking(URL)))
    with pytest.raises(RuntimeError, match=f"cannot be set up .*{variable}"):
        parts.engine.start(parts.config)
