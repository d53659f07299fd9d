"""Outcomes on the device and on the host; rewards shaped by length."""

import dataclasses
import logging
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from contracts import close

from curax import allocate, hint, reward, rollout
from curax.config import ConfigError
from curax.step import drivers, grading
from curax.tasks import chain
from curax.types import Prompts, Terms

TASK = chain.task(depth=2)
HOST = chain.task(depth=2, on_device=False)


def judged(
    verify, length=(2, 0, 3, 1), exists=(True, True, True, False), terms=None, **more
):
    """Outcomes on the host of rows that name their prompt in their tokens."""
    n = len(length)
    prompt = np.int32([1, 0, 1, 0])
    prompts = Prompts(
        tokens=np.zeros((2, 1), np.int32),
        mask=np.ones((2, 1), bool),
        id=np.arange(2, dtype=np.int32),
        target={"answer": np.int32([40, 41]), "more": np.ones((2, 3))},
    )
    tokens = np.arange(3 * n, dtype=np.int32).reshape(n, 3)
    mask = np.arange(3) < np.array(length)[:, None]
    rows = tiny.rollouts(tokens, mask, prompt=prompt, exists=np.array(exists))
    task = dataclasses.replace(HOST, verify=verify, terms=terms, **more)
    verdicts = reward.on_host(task, prompts, rows, terms=terms is not None)
    verdicts.log()
    return verdicts if terms else verdicts.outcome


def test_a_host_verifier_sees_the_target_and_the_tokens_without_padding():
    seen = []

    def verify(target, tokens):
        seen.append((int(target["answer"]), target["more"].shape, tokens.tolist()))
        return len(tokens) / 4

    outcome = judged(verify)
    assert seen == [(41, (3,), [0, 1]), (40, (3,), []), (41, (3,), [6, 7, 8])]
    np.testing.assert_array_equal(outcome, np.float32([0.5, 0, 0.75, np.nan]))
    unread: Any = None
    begun = drivers.Begun(unread, drivers.finished(reward.Verdicts(outcome, {})))
    assert drivers.Hosted().outcome([begun]).dtype == np.float32


def test_what_a_verifier_cannot_tell_is_missing_and_not_wrong():
    answers = iter([None, 0.0, float("nan")])
    outcome = judged(lambda target, tokens: next(answers))
    np.testing.assert_array_equal(outcome, np.float32([np.nan, 0, np.nan, np.nan]))


def test_a_verifier_that_raises_gives_a_missing_outcome_and_a_line_in_the_log(caplog):
    def verify(target, tokens):
        if len(tokens) == 2:
            raise TimeoutError("two seconds are up")
        return 1.0

    with caplog.at_level(logging.WARNING, logger="curax"):
        outcome = judged(verify)
    np.testing.assert_array_equal(outcome, np.float32([np.nan, 1, 1, np.nan]))
    (record,) = caplog.records
    assert "TimeoutError: two seconds are up" in record.message


def test_a_verdict_that_is_no_number_is_missing_too(caplog):
    with caplog.at_level(logging.WARNING, logger="curax"):
        outcome = judged(lambda target, tokens: "right" if len(tokens) else 1.0)
    np.testing.assert_array_equal(outcome, np.float32([np.nan, 1, np.nan, np.nan]))
    (record,) = caplog.records
    assert "for 2 completions (error: ValueError: " in record.message


def test_a_completion_that_lacks_a_term_has_no_outcome(caplog):
    def verify_all(targets, completions):
        assert [len(one) for one in completions] == [2, 0, 3]
        return {
            "right": [1.0, 0.0, 1.0],
            "form": [0.25, 0.5, "error: ValueError: no"],
            "judge": [0.5, None, 1.0],
        }

    weights = {"right": 1.0, "form": 2.0, "judge": 0.0}
    terms = Terms(weights=weights, outcome="right", verify_all=verify_all)
    verdicts = judged(HOST.verify, terms=terms)
    nan = np.nan
    np.testing.assert_array_equal(verdicts.outcome, [1, nan, nan, nan])
    want = {"right": [1, nan, nan, nan], "form": [0.25, *[nan] * 3]}
    want["judge"] = [0.5, *[nan] * 3]
    assert verdicts.terms.keys() == want.keys()
    for name, values in verdicts.terms.items():
        np.testing.assert_array_equal(values, want[name], name)
    np.testing.assert_array_equal(verdicts.reward(weights), [1.5, nan, nan, nan])
    assert verdicts.missing == {"none": 1, "error": 1}
    assert "(error: form: ValueError: no)" in caplog.text
    halves = [
        verdicts._replace(
            outcome=np.where(mine, verdicts.outcome, nan),
            terms={n: np.where(mine, x, nan) for n, x in verdicts.terms.items()},
        )
        for mine in (np.arange(4) < 2, np.arange(4) >= 2)
    ]
    joined = grading.merged(halves).terms
    jax.tree.map(np.testing.assert_array_equal, joined, verdicts.terms)


def test_outcomes_are_never_those_of_other_completions():
    """One that is left out would move all behind it to the row before."""

    def few(targets, completions):
        return [1.0 for one in completions if len(one)]

    with pytest.raises(ConfigError, match="of the task gives 2 outcomes of 3 comple"):
        judged(HOST.verify, verify_all=few)
    by_term = {"right": [1.0, 0.0, 1.0], "form": [1.0]}
    weights = {"right": 1.0, "form": 1.0}
    terms = Terms(weights=weights, outcome="right", verify_all=lambda *_: by_term)
    with pytest.raises(ConfigError, match="the term form of the reward gives 1 outc"):
        judged(HOST.verify, terms=terms)


def test_interrupting_a_verifier_interrupts_the_run():
    def verify(target, tokens):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        judged(verify)


def test_device_and_host_judge_the_chain_task_alike():
    prompts = jax.jit(TASK.prompts)(jnp.arange(8, dtype=jnp.int32))
    policy = tiny.model(vocab_size=TASK.vocab_size)
    shapes = jax.eval_shape(policy.init, jax.random.key(0))
    flat = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape), shapes)  # uniform
    rows = jax.jit(
        lambda asked: rollout.sample(
            policy,
            flat,
            hint.none(prompts),
            asked,
            jax.random.key(0),
            rollout.Settings(max_tokens=3, end=TASK.end, pad=TASK.pad),
        )
    )(allocate.rows_to_draw(jnp.full(8, 3), rows=30))
    # Some rows say what is right, of their own prompt or of another.
    right = prompts.target[rows.prompt]
    tokens = jnp.where(rows.member[:, None] == 1, right, rows.tokens)
    tokens = jnp.where(rows.member[:, None] == 2, jnp.roll(right, 3, 0), tokens)
    rows = dataclasses.replace(rows, tokens=tokens, mask=tokens != TASK.pad)
    got = np.asarray(jax.jit(lambda p, r: reward.on_device(TASK, p, r))(prompts, rows))
    want = reward.on_host(HOST, *jax.device_get((prompts, rows))).outcome
    exists = np.asarray(rows.exists)
    np.testing.assert_array_equal(got[exists], want[exists])
    assert np.isnan(want[~exists]).all()
    assert got[exists & (np.asarray(rows.member) == 1)].all()
    assert 8 <= got[exists].sum() < 20


def test_the_overlong_penalty_follows_its_equation():
    # DAPO, section 3.4: 20,480 tokens at most, the last 4,096 of them punished.
    length = np.int32([1, 16384, 17408, 18432, 20480, 30000])
    got = jax.jit(
        lambda r, n: reward.soft_overlong(r, n, max_tokens=20480, margin=4096)
    )(np.ones(6, np.float32), length)
    close(got, [1, 1, 0.75, 0.5, 0, 0])


def test_the_overlong_penalty_is_subtracted_from_any_outcome():
    outcome = np.float32([[0, 0.5], [1, 0]])
    length = np.int32([[5, 6], [7, 8]])
    got = reward.soft_overlong(outcome, length, max_tokens=8, margin=4)
    close(got, [[-0.25, 0], [0.25, -1]])
    assert got.dtype == jnp.float32


def test_a_term_that_says_none_is_named_and_not_warned_about(caplog):
    """As of a grader alone, to which it is an answer."""
    terms = reward.Terms(weights={}, outcome="right", verify_all=lambda *_: {})
    given = [
        reward._outcome(terms, {"right": 1.0, "form": said})
        for said in (0.5, None, float("nan"), "none", "error: odd")
    ]
    assert given == [1.0, *["none: form"] * 3, "error: form: odd"]
    verdicts = reward.Verdicts(np.full(3, np.nan), dict(enumerate(given[1:4])))
    verdicts.log()
    assert not caplog.records
    assert verdicts.reason == "form gave None or NaN"
    assert verdicts.missing == {"none": 3}
