"""Advantage estimators: definitions, published numbers, effective weights."""

from functools import partial

import jax
import numpy as np
import pytest
from contracts import (
    binomial,
    close,
    defined,
    effective_weight,
    is_the_same_however_it_runs,
    kept_by_all,
    name,
    pools,
    run_alike,
    runs_compiled_and_on_a_mesh,
)
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from curax import advantage

bessel = partial(advantage.standardised, bessel=True)
loose = partial(advantage.standardised, eps=0.1)
floored = partial(advantage.standardised, floor=2.0)
clipped = partial(advantage.guarded, estimate=advantage.standardised, clip=0.75)
two_right = partial(advantage.guarded, estimate=advantage.group_mean, least=2)
two_or_nothing = partial(
    advantage.guarded,
    estimate=advantage.leave_one_out,
    clip=3.0,
    least=2,
    keep_negatives=False,
    threshold=1.0,
)
eighths = st.integers(-64, 64).map(lambda i: i / 8)
rewards = hnp.arrays(np.float32, (3, 4), elements=eighths)  # [B, G]
existing = hnp.arrays(np.bool_, (3, 4))


def standing_out(row, among, ddof=0, eps=1e-6, floor=0.0):
    if len(among) < 2 or np.ptp(among) <= 1e-6:
        return np.zeros_like(row)
    return (row - np.mean(among)) / (max(np.std(among, ddof=ddof), floor) + eps)


def against_the_others(row, batch):
    n = len(row)
    return [r - np.mean(np.delete(row, i)) if n > 1 else 0 for i, r in enumerate(row)]


def over_hard(row, credit, threshold=0.5, keep_negatives=True):
    """Without positive advantages, or any, unless two are right."""
    if np.sum(row > threshold) >= 2:
        return credit
    return np.minimum(credit, 0) if keep_negatives else np.zeros_like(credit)


# Every estimator with its definition: (rewards of the group, of the batch) -> A.
DEFINITIONS = {
    advantage.raw: lambda row, batch: row,
    advantage.signed: lambda row, batch: 2 * row - 1,
    advantage.group_mean: lambda row, batch: row - np.mean(row),
    advantage.leave_one_out: against_the_others,
    advantage.standardised: lambda row, batch: standing_out(row, row),
    bessel: lambda row, batch: standing_out(row, row, ddof=1),
    loose: lambda row, batch: standing_out(row, row, eps=0.1),
    floored: lambda row, batch: standing_out(row, row, floor=2.0),
    clipped: lambda row, batch: np.clip(standing_out(row, row), -0.75, 0.75),
    two_right: lambda row, batch: over_hard(row, row - np.mean(row)),
    two_or_nothing: lambda row, batch: over_hard(
        row, np.clip(against_the_others(row, batch), -3, 3), 1.0, False
    ),
    advantage.batch_standardised: standing_out,
}
ESTIMATORS = list(DEFINITIONS)
GUARDED = [clipped, two_right, two_or_nothing]
CENTRED = [e for e in ESTIMATORS[2:] if e not in GUARDED]  # adds up to 0 per batch
for_every_centred_one = pytest.mark.parametrize("estimate", CENTRED, ids=name)


def naive(estimate, reward, exists):
    want, batch = np.zeros(reward.shape), reward[exists].astype(np.float64)
    for b, row in enumerate(exists):
        if row.any():
            group = reward[b, row].astype(np.float64)
            want[b, row] = DEFINITIONS[estimate](group, batch)
    return want


STAGE = ESTIMATORS, rewards, existing
test_an_estimator_is_its_definition = defined(*STAGE, naive=naive, atol=1e-5)
test_an_estimator_is_the_same_however_it_runs = run_alike(ESTIMATORS[:-1], *STAGE[1:])
test_absent_completions_neither_get_nor_give_credit_which_follows_the_others = (
    kept_by_all(*STAGE, counts=lambda reward, exists: exists, axes=(0, 1))
)


def test_the_batch_estimator_is_the_same_however_it_runs():
    random = np.random.default_rng(0)
    reward = random.random((8, 3, 4), np.float32)
    exists = random.random((8, 3, 4)) < 0.8
    is_the_same_however_it_runs(advantage.batch_standardised, reward, exists)
    runs_compiled_and_on_a_mesh(
        advantage.batch_standardised, reward[:, 0], exists[:, 0]
    )


@pytest.mark.first(50)
@pytest.mark.parametrize("estimate", CENTRED + GUARDED, ids=name)
@pytest.mark.parametrize("reward", [0.0, 1.0, 1.1, -0.3, 1e6])
@pytest.mark.parametrize("size", [1, 12, 24])
def test_equal_rewards_give_exactly_nothing(estimate, reward, size):
    """P13: a group of equal rewards."""
    group = np.full((2, size), reward, np.float32)
    assert not np.asarray(estimate(group, np.ones((2, size), bool))).any()


@pytest.mark.parametrize("estimate", CENTRED[2:], ids=name)
def test_rewards_apart_by_rounding_alone_give_exactly_nothing(estimate):
    reward = np.float32([[0.5, np.nextafter(np.float32(0.5), np.float32(1))]])
    assert not np.asarray(estimate(reward, np.ones((1, 2), bool))).any()


@pytest.mark.first(3)
@for_every_centred_one
@given(rewards, existing)
def test_centred_credit_of_the_batch_adds_up_to_nothing(estimate, reward, exists):
    assert abs(np.sum(jax.jit(estimate)(reward, exists))) < 1e-4


@pytest.mark.first(3)
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


@pytest.mark.first(2)
@pytest.mark.parametrize(
    ("n", "spike", "with_bessel"),
    [(8, 2.646, 2.475), (16, 3.873, 3.750), (24, 4.796, 4.695), (32, 5.568, 5.480)],
)
def test_one_right_among_many_stands_out_the_more_the_more_there_are(
    n, spike, with_bessel
):
    reward, exists = pools(n)[1:2], np.ones((1, n), bool)
    pairs = {advantage.standardised: spike, bessel: with_bessel}
    for estimate, want in pairs.items():
        credit = np.asarray(estimate(reward, exists))[0]
        close(credit[0], want, rtol=0, atol=6e-4)
        close(credit[1:], -want / (n - 1), rtol=0, atol=6e-4)


def test_a_group_pushes_most_when_half_of_it_is_right():
    credit = advantage.standardised(pools(16), np.ones((17, 16), bool), eps=0.0)
    total = np.abs(credit).sum(-1)
    close(total[[1, 2, 4, 8]], [7.75, 10.58, 13.86, 16], rtol=0, atol=6e-3)
    k = np.arange(17)
    close(total, 2 * np.sqrt(k * (16 - k)), atol=1e-5)


def test_a_floor_under_the_deviation_halves_the_spike():
    reward, exists = pools(16)[1:2], np.ones((1, 16), bool)
    close(advantage.standardised(reward, exists)[0, 0], 3.873, rtol=0, atol=6e-4)
    low = advantage.standardised(reward, exists, floor=0.35)
    close(low[0, 0], 2.68, rtol=0, atol=6e-3)
    close(low[0, 0], (15 / 16) / (0.35 + 1e-6))


@given(rewards, existing, st.sampled_from([0.0, 0.125, 0.5, 2.0, 100.0]), st.booleans())
def test_a_floor_never_makes_an_advantage_larger(reward, exists, floor, bessel):
    """P13: a floor under the deviation."""
    estimate = jax.jit(advantage.standardised, static_argnames="bessel")
    plain = np.asarray(estimate(reward, exists, bessel=bessel, floor=0.0))
    low = np.asarray(estimate(reward, exists, bessel=bessel, floor=floor))
    assert (np.abs(low) <= np.abs(plain)).all()
    np.testing.assert_array_equal(np.sign(low), np.sign(plain))
    np.testing.assert_array_equal(estimate(reward, exists, bessel=bessel), plain)


def test_a_floor_above_every_deviation_leaves_the_mean_alone():
    exists = np.ones((9, 8), bool)
    credit = advantage.standardised(pools(8), exists, eps=0.0, floor=0.5)
    close(credit, 2 * advantage.group_mean(pools(8), exists))


GUARDABLE = [advantage.group_mean, advantage.standardised, advantage.raw]
for_every_guardable_one = pytest.mark.parametrize("estimate", GUARDABLE, ids=name)


@for_every_guardable_one
@given(rewards, existing, st.integers(0, 5), st.booleans())
def test_a_guard_leaves_groups_with_enough_right_ones_alone(
    estimate, reward, exists, least, keep
):
    """P13: from `least` right ones on."""
    plain = np.asarray(estimate(reward, exists))
    options = {"least": least, "keep_negatives": keep}
    got = np.asarray(advantage.guarded(reward, exists, estimate=estimate, **options))
    enough = np.sum(exists & (reward > 0.5), -1) >= least
    np.testing.assert_array_equal(got[enough], plain[enough])
    np.testing.assert_array_equal(got[~enough], np.minimum(plain[~enough], 0) * keep)


@for_every_guardable_one
@given(rewards, existing)
def test_an_idle_guard_changes_nothing(estimate, reward, exists):
    got = advantage.guarded(reward, exists, estimate=estimate)
    np.testing.assert_array_equal(got, estimate(reward, exists))


@for_every_guardable_one
@given(rewards, existing, st.sampled_from([0.0, 0.125, 1.0, 2.5]))
def test_a_clip_is_symmetric_and_keeps_the_order(estimate, reward, exists, clip):
    def guard(estimate, reward):
        return np.asarray(
            advantage.guarded(reward, exists, estimate=estimate, clip=clip)
        )

    plain, got = np.asarray(estimate(reward, exists)), guard(estimate, reward)
    assert (np.abs(got) <= clip).all()
    inside = np.abs(plain) <= clip
    np.testing.assert_array_equal(got[inside], plain[inside])
    np.testing.assert_array_equal(np.abs(got[~inside]), np.float32(clip))
    order = np.argsort(plain, axis=None, kind="stable")
    assert (np.diff(got.ravel()[order]) >= 0).all()

    def negated(reward, exists):
        return -estimate(reward, exists)

    np.testing.assert_array_equal(guard(negated, reward), -got)


def test_the_clip_cuts_the_spike_and_what_is_larger_alone():
    reward, exists = pools(16), np.ones((17, 16), bool)
    plain = np.asarray(advantage.standardised(reward, exists))
    guard = partial(advantage.guarded, estimate=advantage.standardised, clip=2.5)
    np.testing.assert_array_equal(guard(reward, exists), np.clip(plain, -2.5, 2.5))
    cut = (np.abs(plain) > 2.5).any(-1)
    np.testing.assert_array_equal(cut.nonzero()[0], [1, 2, 14, 15])


@pytest.mark.parametrize("keep", [True, False])
@pytest.mark.parametrize("least", [1, 2, 3])
def test_guarded_weights_fall_to_nothing_with_the_pass_rate(least, keep):
    n, exists = 8, np.ones((9, 8), bool)
    credit = advantage.guarded(
        pools(n),
        exists,
        estimate=advantage.group_mean,
        least=least,
        keep_negatives=keep,
    )
    k = np.arange(n + 1)
    product, enough = k * (n - k) / n**2, k >= least
    for p in (1e-3, 0.1, 0.5, 0.9):
        sides = enough / p + (enough | keep) / (1 - p)
        weight = effective_weight(np.asarray(credit) / n, p)
        close(weight, binomial(n, p) @ (product * sides), rtol=1e-5)
    if least > 1:
        tiny = effective_weight(np.asarray(credit) / n, 1e-6)
        assert tiny < 1e-5


@pytest.mark.parametrize(
    ("n", "accident", "want"),
    [(16, 0.01, 2), (16, 0.02, 2), (16, 0.05, 3), (8, 0.02, 2), (8, 0.05, 3)],
)
def test_as_many_must_be_right_as_accident_hardly_gives(n, accident, want):
    assert advantage.least_positives(n, accident=accident) == want
    assert advantage.least_positives(n, accident=accident, delta=0.05) == want


@pytest.mark.parametrize(
    ("accident", "tails"),
    [
        (0.01, ("0.149", "0.0109")),
        (0.02, ("0.276", "0.0399", "0.0037")),
        (0.05, ("0.560", "0.189", "0.0429")),
    ],
)
def test_the_least_number_turns_where_the_published_tail_is(accident, tails):
    for k, tail in enumerate(tails, start=1):
        half = 0.5 * 10.0 ** -len(tail.partition(".")[2])
        least = partial(advantage.least_positives, 16, accident=accident)
        assert least(delta=float(tail) + half) <= k
        assert least(delta=float(tail) - half) > k


@given(
    st.integers(1, 24),
    st.integers(0, 20).map(lambda i: i / 20),
    st.sampled_from([0.0, 0.001, 0.05, 0.3]),
)
def test_the_least_number_is_its_definition(n, accident, delta):
    chance = binomial(n, accident)
    least = advantage.least_positives(n, accident=accident, delta=delta)
    assert 1 <= least <= n + 1
    assert sum(chance[least:]) <= delta + 1e-12
    assert least == 1 or sum(chance[least - 1 :]) > delta - 1e-12


def test_the_least_number_has_ends():
    assert advantage.least_positives(8, accident=0.0, delta=0.0) == 1
    assert advantage.least_positives(8, accident=1.0) == 9


@pytest.mark.parametrize(
    ("n", "accident", "delta", "wrong"),
    [
        (0, 0.1, 0.05, "n=0"),
        (8, 1.5, 0.05, "accident=1.5"),
        (8, -0.1, 0.05, "accident=-0.1"),
        (8, float("nan"), 0.05, "accident=nan"),
        (8, 0.1, 1.0, "delta=1.0"),
    ],
)
def test_numbers_out_of_range_are_refused_by_name(n, accident, delta, wrong):
    with pytest.raises(ValueError, match=wrong):
        advantage.least_positives(n, accident=accident, delta=delta)


@pytest.mark.parametrize("n", [2, 4, 8])
def test_effective_weights_are_those_the_docstrings_state(n):
    """L1: estimators of one group."""
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
    """L1: the published weights of finite groups."""
    credit = bessel(pools(n), np.ones((n + 1, n), bool)) / n
    got = [effective_weight(credit, p) for p in (0.01, 0.05, 0.1, 0.25, 0.5)]
    close(got, weights, atol=5e-4)


def test_grpo_weighs_a_hopeless_prompt_by_the_root_of_its_group():
    credit = advantage.standardised(pools(16), np.ones((17, 16), bool)) / 16
    close(effective_weight(credit, 1e-6), 3.872969, rtol=1e-4)
