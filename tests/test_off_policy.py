"""Weights of tokens: the policy over what was drawn from, by their definitions.

What the update of such completions is stands in `test_truncated.py`.
"""

from functools import partial

import jax
import numpy as np
import pytest
from contracts import (
    are_the_same_however_they_run,
    by_member,
    close,
    follow_permutations,
    ignores_absent_entries,
    name,
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


# Every rule of tokens with its definition, and whether it weighs whole completions.
OF_TOKENS = {
    off_policy.ratio: (lambda rho: rho, False),
    partial(off_policy.ratio, sequence=True): (lambda rho: rho, True),
    off_policy.none: (lambda rho: 1.0, False),
    off_policy.truncated_ratio: (clipped, False),
    partial(off_policy.truncated_ratio, cap=1.5, sequence=True): (
        partial(clipped, cap=1.5),
        True,
    ),
    off_policy.masked_ratio: (dropped, False),
    partial(off_policy.masked_ratio, cap=1.5, sequence=True): (
        partial(dropped, high=1.5),
        True,
    ),
    off_policy.icepop: (partial(dropped, low=0.5, high=5.0), False),
}
log_probs = hnp.arrays(np.float32, (8, 3), elements=st.floats(-4, 0, width=32))
tokens = hnp.arrays(np.bool_, (8, 3))


@few
@given(log_probs, log_probs, tokens, st.permutations(range(8)))
def test_weights_of_tokens_are_their_definition(logp, behaviour, mask, order):
    arrays = logp, behaviour, mask
    for rule, got in by_member(OF_TOKENS, *arrays):
        of, whole = OF_TOKENS[rule]
        want = np.zeros(mask.shape)
        for m, t in np.argwhere(mask):
            at = mask[m] if whole else t
            want[m, t] = of(np.exp(np.sum(np.float64(logp - behaviour)[m, at])))
        edge = np.isclose(want, 1.5, rtol=1e-4) | np.isclose(want, 2.0, rtol=1e-4)
        edge |= np.isclose(want, 0.5, rtol=1e-4) | np.isclose(want, 5.0, rtol=1e-4)
        close(got[~edge], want[~edge], rtol=1e-4, err_msg=name(rule))
        ignores_absent_entries(rule, *arrays, counts=mask)
    follow_permutations(OF_TOKENS, *arrays, order=order, axis=0)


def test_weights_of_tokens_are_the_same_however_they_run():
    random = np.random.default_rng(0)
    logp, behaviour = np.float32(-random.exponential(size=(2, 8, 3)))
    mask = random.random((8, 3)) < 0.7
    are_the_same_however_they_run(OF_TOKENS, logp, behaviour, mask)


@pytest.mark.parametrize("rule", OF_TOKENS, ids=name)
def test_weights_of_tokens_are_finite_constants(rule):
    random = np.random.default_rng(0)
    logp, behaviour = np.float32(-random.exponential(size=(2, 8, 3)))
    mask = random.random((8, 3)) < 0.7
    grad = jax.grad(lambda logp: rule(logp, behaviour, mask).sum())(logp)
    assert not np.asarray(grad).any()
    far = rule(np.full((1, 2), 0.0, np.float32), np.full((1, 2), -90.0, np.float32),
               np.ones((1, 2), bool))  # fmt: skip
    assert np.isfinite(far).all()


def test_a_rule_of_one_kind_is_no_rule_of_the_other():
    number, flag = np.zeros((2, 3), np.float32), np.ones((2, 3), bool)
    with pytest.raises(AssertionError, match="logp_behaviour is bool"):
        off_policy.truncated_ratio(number, flag, flag)
    with pytest.raises(AssertionError, match="pool is float32"):
        correct.horvitz_thompson(number, number, flag)
