"""Weights of tokens: the policy over what was drawn from, by their definitions.

What the update of such completions is stands in `test_truncated.py`.
"""

from functools import partial

import jax
import numpy as np
import pytest
from contracts import (
    by_member,
    close,
    follow_permutations,
    ignores_absent_entries,
    name,
    run_alike,
    run_compiled_and_on_a_mesh,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from curax import correct, off_policy

few = settings(max_examples=12)


def clipped(rho, cap=2.0):
    return min(rho, cap)


def dropped(rho, low=0.0, high=2.0):
    return rho if low <= rho <= high else 0.0


def plain(rho):
    return rho


def per(of, kind):
    """Weights of a row from its ratios, by what one ratio is of."""

    def weights(rho):
        one = {
            "token": lambda: rho,
            "sequence": lambda: np.full(len(rho), np.prod(rho)),
            "geometric": lambda: np.full(len(rho), np.prod(rho) ** (1 / len(rho))),
            "mean": lambda: np.full(len(rho), np.mean(rho)),
        }[kind]()
        return np.array([of(x) for x in one])

    return weights


def rejecting(weigh, by):
    return lambda rho: weigh(rho) * (by(rho) > 0)


# Every rule of tokens but those of the whole batch, with its definition for a row.
OF_TOKENS = {
    off_policy.none: per(lambda rho: 1.0, "token"),
    off_policy.icepop: per(partial(dropped, low=0.5, high=5.0), "token"),
    off_policy.truncated_ratio: per(clipped, "token"),
    off_policy.masked_ratio: per(dropped, "token"),
    **{
        partial(rule, per=kind, **options): per(of, kind)
        for rule, options, of in (
            (off_policy.ratio, {}, plain),
            (off_policy.truncated_ratio, {"cap": 1.5}, partial(clipped, cap=1.5)),
            (off_policy.masked_ratio, {"cap": 1.5}, partial(dropped, high=1.5)),
        )
        for kind in off_policy.PER
    },
    off_policy.rejected: rejecting(
        per(clipped, "token"), per(partial(dropped, low=0.5), "geometric")
    ),
    partial(
        off_policy.rejected,
        weigh=partial(off_policy.ratio, per="mean"),
        by="sequence",
        high=5.0,
    ): rejecting(
        per(plain, "mean"), per(partial(dropped, low=0.5, high=5), "sequence")
    ),
}
EDGES = 0.5, 1.5, 2.0, 5.0  # where a weight jumps
OF_BATCH = {
    off_policy.self_normalised: (per(clipped, "token"), "tokens"),
    partial(
        off_policy.self_normalised,
        weigh=partial(off_policy.ratio, per="sequence"),
        over="sequences",
    ): (per(plain, "sequence"), "sequences"),
}


def by_row(weigh, rho, mask):
    """`[M, T]`: what a definition gives for the ratios of each row, 0 off the mask."""
    found = np.zeros(mask.shape)
    for m in np.flatnonzero(mask.any(-1)):
        found[m, mask[m]] = weigh(rho[m, mask[m]])
    return found


log_probs = hnp.arrays(np.float32, (8, 3), elements=st.floats(-4, 0, width=32))
tokens = hnp.arrays(np.bool_, (8, 3))
test_weights_of_tokens_are_the_same_however_they_run = run_alike(
    OF_TOKENS, log_probs, log_probs, tokens
)


@few
@given(log_probs, log_probs, tokens, st.permutations(range(8)))
def test_weights_of_tokens_are_their_definition(logp, behaviour, mask, order):
    arrays = logp, behaviour, mask
    rho = np.exp(np.float64(logp) - behaviour)
    edge = np.zeros(mask.shape, bool)
    for kind in off_policy.PER:
        each = by_row(per(plain, kind), rho, mask)
        edge |= np.isclose(each[..., None], EDGES, rtol=1e-4).any(-1)
    for rule, got in by_member(OF_TOKENS, *arrays):
        want = by_row(OF_TOKENS[rule], rho, mask)
        close(got[~edge], want[~edge], rtol=1e-4, err_msg=name(rule))
        ignores_absent_entries(rule, *arrays, counts=mask)
    for rule, got in by_member(OF_BATCH, *arrays):
        weigh, over = OF_BATCH[rule]
        want = by_row(weigh, rho, mask)
        each = want[mask]
        if over == "sequences":
            each = [
                row[on].mean() for row, on in zip(want, mask, strict=True) if on.any()
            ]
        want = want / np.mean(each) if len(each) else want
        close(got, want, rtol=1e-4, err_msg=name(rule))
        ignores_absent_entries(rule, *arrays, counts=mask)
    follow_permutations({**OF_TOKENS, **OF_BATCH}, *arrays, order=order, axis=0)


@pytest.mark.parametrize("rule", {**OF_TOKENS, **OF_BATCH}, ids=name)
def test_weights_of_tokens_are_finite_constants(rule):
    random = np.random.default_rng(0)
    logp, behaviour = np.float32(-random.exponential(size=(2, 8, 3)))
    mask = random.random((8, 3)) < 0.7
    grad = jax.grad(lambda logp: rule(logp, behaviour, mask).sum())(logp)
    assert not np.asarray(grad).any()
    far = rule(np.full((1, 2), 0.0, np.float32), np.full((1, 2), -90.0, np.float32),
               np.ones((1, 2), bool))  # fmt: skip
    assert np.isfinite(far).all()


def test_weights_of_the_batch_are_the_same_compiled_and_on_a_mesh():
    random = np.random.default_rng(0)
    logp, behaviour = np.float32(-random.exponential(size=(2, 8, 3)))
    run_compiled_and_on_a_mesh(OF_BATCH, logp, behaviour, random.random((8, 3)) < 0.7)


@pytest.mark.parametrize(
    ("rule", "option"),
    [
        (off_policy.ratio, "per"),
        (off_policy.masked_ratio, "per"),
        (off_policy.rejected, "by"),
        (off_policy.self_normalised, "over"),
    ],
)
def test_a_word_that_a_rule_does_not_know_is_refused_in_a_sentence(rule, option):
    arrays = (*np.zeros((2, 2, 3), np.float32), np.ones((2, 3), bool))
    said = rf"^{option}='row' is none of \w+, .*; set it to \w+$"
    with pytest.raises(ValueError, match=said):
        rule(*arrays, **{option: "row"})


def test_a_rule_of_one_kind_is_no_rule_of_the_other():
    number, flag = np.zeros((2, 3), np.float32), np.ones((2, 3), bool)
    with pytest.raises(AssertionError, match="logp_behaviour is bool"):
        off_policy.truncated_ratio(number, flag, flag)
    with pytest.raises(AssertionError, match="pool is float32"):
        correct.horvitz_thompson(number, number, flag)
