"""Advantage estimators: definitions, published numbers, effective weights."""

from functools import partial

import jax
import numpy as np
import pytest
from contracts import (
    close,
    effective_weight,
    follows_permutations,
    ignores_absent_entries,
    is_the_same_however_it_runs,
    name,
    pools,
    runs_compiled_and_on_a_mesh,
)
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from curax import advantage

bessel = partial(advantage.standardised, bessel=True)
loose = partial(advantage.standardised, eps=0.1)
eighths = st.integers(-64, 64).map(lambda i: i / 8)
rewards = hnp.arrays(np.float32, (3, 4), elements=eighths)  # [B, G]
existing = hnp.arrays(np.bool_, (3, 4))


def standing_out(row, among, ddof=0, eps=1e-6):
    if len(among) < 2 or np.ptp(among) <= 1e-6:
        return np.zeros_like(row)
    return (row - np.mean(among)) / (np.std(among, ddof=ddof) + eps)


def against_the_others(row, batch):
    n = len(row)
    return [r - np.mean(np.delete(row, i)) if n > 1 else 0 for i, r in enumerate(row)]


# Every estimator with its definition: (rewards of the group, of the batch) -> A.
DEFINITIONS = {
    advantage.raw: lambda row, batch: row,
    advantage.signed: lambda row, batch: 2 * row - 1,
    advantage.group_mean: lambda row, batch: row - np.mean(row),
    advantage.leave_one_out: against_the_others,
    advantage.standardised: lambda row, batch: standing_out(row, row),
    bessel: lambda row, batch: standing_out(row, row, ddof=1),
    loose: lambda row, batch: standing_out(row, row, eps=0.1),
    advantage.batch_standardised: standing_out,
}
ESTIMATORS = list(DEFINITIONS)
CENTRED = ESTIMATORS[2:]
for_every_estimator = pytest.mark.parametrize("estimate", ESTIMATORS, ids=name)
for_every_centred_one = pytest.mark.parametrize("estimate", CENTRED, ids=name)


@for_every_estimator
@given(rewards, existing)
def test_an_estimator_is_its_definition(estimate, reward, exists):
    want, batch = np.zeros(reward.shape), reward[exists].astype(np.float64)
    for b, row in enumerate(exists):
        if row.any():
            group = reward[b, row].astype(np.float64)
            want[b, row] = DEFINITIONS[estimate](group, batch)
    close(jax.jit(estimate)(reward, exists), want, atol=1e-5)


@for_every_estimator
@given(rewards, existing)
def test_absent_completions_neither_get_nor_give_credit(estimate, reward, exists):
    ignores_absent_entries(estimate, reward, exists, counts=exists)


@for_every_estimator
@given(rewards, existing, st.permutations(range(3)), st.permutations(range(4)))
def test_credit_follows_its_completion(estimate, reward, exists, prompts, slots):
    follows_permutations(estimate, reward, exists, order=prompts, axis=0)
    follows_permutations(estimate, reward, exists, order=slots, axis=1)


@pytest.mark.parametrize("estimate", ESTIMATORS[:-1], ids=name)
def test_an_estimator_is_the_same_however_it_runs(estimate):
    random = np.random.default_rng(0)
    reward = random.integers(0, 3, (8, 4)).astype(np.float32)
    exists = random.random((8, 4)) < 0.8
    is_the_same_however_it_runs(estimate, reward, exists)


def test_the_batch_estimator_is_the_same_however_it_runs():
    random = np.random.default_rng(0)
    reward = random.random((8, 3, 4), np.float32)
    exists = random.random((8, 3, 4)) < 0.8
    is_the_same_however_it_runs(advantage.batch_standardised, reward, exists)
    runs_compiled_and_on_a_mesh(
        advantage.batch_standardised, reward[:, 0], exists[:, 0]
    )


@for_every_centred_one
@pytest.mark.parametrize("reward", [0.0, 1.0, 1.1, -0.3, 1e6])
@pytest.mark.parametrize("size", [1, 12, 24])
def test_equal_rewards_give_exactly_nothing(estimate, reward, size):
    group = np.full((2, size), reward, np.float32)
    assert not np.asarray(estimate(group, np.ones((2, size), bool))).any()


@pytest.mark.parametrize("estimate", CENTRED[2:], ids=name)
def test_rewards_apart_by_rounding_alone_give_exactly_nothing(estimate):
    reward = np.float32([[0.5, np.nextafter(np.float32(0.5), np.float32(1))]])
    assert not np.asarray(estimate(reward, np.ones((1, 2), bool))).any()


@for_every_centred_one
@given(rewards, existing)
def test_centred_credit_of_the_batch_adds_up_to_nothing(estimate, reward, exists):
    assert abs(np.sum(jax.jit(estimate)(reward, exists))) < 1e-4


@pytest.mark.parametrize("estimate", CENTRED, ids=name)
@given(rewards, existing, st.integers(-8, 8))
def test_a_common_offset_changes_no_centred_credit(estimate, reward, exists, offset):
    shifted = jax.jit(estimate)(reward + np.float32(offset), exists)
    close(shifted, jax.jit(estimate)(reward, exists), atol=1e-5)


def test_one_right_among_eight_gives_the_published_numbers():
    reward = pools(8)[1:2]
    exists = np.ones((1, 8), bool)
    got = advantage.standardised(reward, exists)[0, :2]
    close(got, [2.64574331, -0.37796333])
    close(bessel(reward, exists)[0, :2], [2.47486673, -0.35355239])
    energy = [np.mean(f(reward, exists) ** 2) for f in (CENTRED[2], bessel, loose)]
    close(energy, [0.99999395, 0.87499505, 0.589563])
    half_right = loose(pools(8)[4:5], exists)
    close(np.mean(half_right**2), 0.694444)


@pytest.mark.parametrize("n", [2, 4, 8])
def test_effective_weights_are_those_the_docstrings_state(n):
    everything = np.ones((n + 1, n), bool)
    sharp = [partial(f, eps=0.0) for f in (advantage.standardised, bessel)]
    credit = {f: f(pools(n), everything) / n for f in (*ESTIMATORS[:4], *sharp)}
    for p in (0.05, 0.3, 0.5, 0.9):
        weight = {f: effective_weight(c, p) for f, c in credit.items()}
        close(weight[advantage.raw], 1.0)
        close(weight[advantage.signed], 2.0)
        close(weight[advantage.group_mean], 1 - 1 / n)
        close(weight[advantage.leave_one_out], 1.0)
        close(weight[sharp[1]], np.sqrt((n - 1) / n) * weight[sharp[0]])


@pytest.mark.parametrize(
    ("n", "weights"),
    [
        (4, (1.496, 1.481, 1.464, 1.425, 1.400)),
        (16, (3.614, 3.163, 2.757, 2.128, 1.873)),
    ],
)
def test_small_groups_flatten_the_weight_of_grpo(n, weights):
    credit = bessel(pools(n), np.ones((n + 1, n), bool)) / n
    got = [effective_weight(credit, p) for p in (0.01, 0.05, 0.1, 0.25, 0.5)]
    close(got, weights, atol=5e-4)


def test_grpo_weighs_a_hopeless_prompt_by_the_root_of_its_group():
    credit = advantage.standardised(pools(16), np.ones((17, 16), bool)) / 16
    close(effective_weight(credit, 1e-6), 3.872969, rtol=1e-4)


def test_wrong_shapes_and_dtypes_are_refused():
    reward, exists = np.zeros((2, 3), np.float32), np.ones((2, 3), bool)
    for bad in [(reward, exists[:1]), (exists, exists), (reward, reward)]:
        for estimate in ESTIMATORS:
            with pytest.raises(AssertionError):
                estimate(*bad)
    with pytest.raises(AssertionError):
        advantage.batch_standardised(reward[0], exists[0])
