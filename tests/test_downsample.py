"""Selections: what they keep, against brute force, closed forms and chance."""

from fractions import Fraction
from functools import cache, partial
from itertools import combinations
from math import ceil

import jax
import numpy as np
import pytest
from contracts import (
    by_member,
    close,
    effective_weight,
    ignores_absent_entries,
    name,
    pools,
    run_compiled_and_on_a_mesh,
    together,
)
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from curax import advantage, downsample

KEY = jax.random.key(0)
max_variance_3 = partial(downsample.max_variance, m=3)
random_3 = partial(downsample.random, m=3)
max_reward_3 = partial(downsample.max_reward, m=3)
percentile_3 = partial(downsample.percentile, m=3)
balanced_3 = partial(downsample.balanced, m=3)
first_3 = partial(downsample.balanced, m=3, first=True)
BY_VALUE = [max_variance_3, max_reward_3, percentile_3]
BY_LABEL = [balanced_3, first_3]
CHOICES = [random_3, *BY_VALUE, *BY_LABEL]
RULES = [downsample.none, *CHOICES]
KEYED = [partial(rule, KEY) for rule in RULES]
for_every_choice = pytest.mark.parametrize("rule", CHOICES, ids=name)
eighths = st.integers(-16, 16).map(lambda i: i / 8)
rewards = hnp.arrays(np.float32, (3, 6), elements=eighths)
existing = hnp.arrays(np.bool_, (3, 6))


@cache
def compiled(rule, **options):
    return jax.jit(partial(rule, **options))


def varied(m):
    return compiled(downsample.max_variance, m=m)


def most_varied(reward, m, exists=None):
    """What `max_variance` keeps of up to 192 pools of up to 14, compiled once per m."""
    exists = np.ones(reward.shape, bool) if exists is None else exists
    rows, n = reward.shape
    grid = [np.pad(a, ((0, 192 - rows), (0, 14 - n))) for a in (reward, exists)]
    return np.asarray(varied(m)(KEY, *grid))[:rows, :n]


def kept(reward, m):
    """Rewards that `max_variance` keeps of one pool of at most eight, ascending."""
    grid = np.pad(np.asarray(reward, np.float32), (0, 8 - len(reward)))
    return sorted(grid[np.asarray(varied(m)(KEY, grid, np.arange(8) < len(reward)))])


def variances(reward, keep):
    """`[...]` population variance of the kept, in float64."""
    reward, n = np.where(keep, reward, 0).astype(np.float64), keep.sum(-1)
    squares = np.where(keep, reward - reward.sum(-1, keepdims=True) / n[..., None], 0)
    return (squares**2).sum(-1) / n


@given(rewards, existing)
def test_what_is_kept_exists_and_is_never_more_than_m(reward, exists):
    """PODS: exactly m, or all."""
    for rule, keep in by_member(RULES, KEY, reward, exists):
        most = rule.keywords["m"] if isinstance(rule, partial) else 6
        assert not (keep & ~exists).any(), name(rule)
        count = np.minimum(exists.sum(-1), most)
        np.testing.assert_array_equal(keep.sum(-1), count, err_msg=name(rule))


@given(rewards, existing)
def test_absent_rewards_are_never_read(reward, exists):
    for rule in KEYED:
        ignores_absent_entries(rule, reward, exists, counts=exists)


def test_a_rule_is_the_same_however_it_runs():
    random = np.random.default_rng(0)
    reward = random.integers(0, 3, (8, 6)).astype(np.float32)
    exists = random.random((8, 6)) < 0.8
    run_compiled_and_on_a_mesh(KEYED, reward, exists)
    keys, compiled = jax.random.split(KEY, 8), together(tuple(RULES))
    each = [compiled(keys[b], reward[b], exists[b]) for b in range(8)]
    each = zip(*each, strict=True)
    mapped = jax.jit(jax.vmap(compiled))(keys, reward, exists)
    folded = compiled(KEY, reward.reshape(2, 4, 6), exists.reshape(2, 4, 6))
    for rule, alone, one, two in zip(RULES, each, mapped, folded, strict=True):
        np.testing.assert_array_equal(one, alone, err_msg=name(rule))
        size = np.sum(alone, -1)
        np.testing.assert_array_equal(two.sum(-1).ravel(), size, err_msg=name(rule))


@given(rewards, existing, st.permutations(range(3)), st.permutations(range(6)))
def test_kept_rewards_do_not_depend_on_the_order(reward, exists, prompts, slots):
    """PODS: permutations."""
    rules = (*BY_VALUE, *BY_LABEL)

    def rewards_kept(reward, exists):
        for rule, keep in by_member(rules, KEY, reward, exists):
            seen = reward > 0.5 if rule in BY_LABEL else reward
            yield np.sort(np.where(keep, seen, np.inf), axis=-1)

    wanted = rewards_kept(reward, exists)
    moved = rewards_kept(reward[prompts][:, slots], exists[prompts][:, slots])
    for rule, got, want in zip(rules, moved, wanted, strict=True):
        np.testing.assert_array_equal(got, want[prompts], err_msg=name(rule))


TABLE = [
    ([0, 0, 0, 1, 1, 1, 1, 1], 4, [0, 0, 1, 1], 0.25),
    ([0] * 7 + [1], 4, [0, 0, 0, 1], 0.1875),
    ([1] * 7 + [0], 4, [0, 1, 1, 1], 0.1875),
    ([0, 1, 1, 0], 3, [0, 0, 1], 0.222222),
    ([0, 0.1, 0.2, 1, 1.1, 1.2], 3, [0, 0.1, 1.2], 0.295556),
    ([0, 0, 0.1, 0.2, 0.2, 1], 4, [0, 0, 0.1, 1], 0.176875),
    ([0, 1, 1, 1, 1, 10], 4, [0, 1, 1, 10], 16.5),
    ([0, 1, 2, 3, 4, 5], 5, [0, 1, 2, 4, 5], 3.44),
    ([-5, 0, 0, 0, 0, 5.1], 2, [-5, 5.1], 25.5025),
    ([0.3] * 5, 2, [0.3, 0.3], 0.0),
]


@pytest.mark.first(4)
@pytest.mark.parametrize(("reward", "m", "want", "variance"), TABLE)
def test_the_published_examples_are_kept(reward, m, want, variance):
    """PODS: the published vectors."""
    got = kept(reward, m)
    close(got, want)
    close(np.var(np.float64(got)), variance)


def test_later_candidates_are_not_corrupted_by_earlier_ones():
    """PODS: the published guard against aliases."""
    reward = pools(128)[64]
    keep = np.asarray(varied(32)(KEY, reward, np.ones(128, bool)))
    assert reward[keep].sum() == 16
    close(np.var(reward[keep], ddof=1), 0.258065)  # and not 0.03125 with 1 of 32


KINDS = {
    "continuous": lambda random, shape: random.normal(size=shape),
    "binary": lambda random, shape: random.integers(0, 2, shape),
    "four levels": lambda random, shape: random.integers(0, 4, shape) / 3,
    "rounded exponential": lambda random, shape: random.exponential(size=shape).round(
        1
    ),
    "far from zero": lambda random, shape: 1000 + random.integers(0, 8, shape) / 8,
    "one outlier": lambda random, shape: random.normal(size=shape) ** 9,
    "tiny": lambda random, shape: 1e-20 * random.normal(size=shape),
    "constant": lambda random, shape: np.full(shape, 1.1),
}


@pytest.mark.first(3)
@pytest.mark.parametrize("m", range(1, 11))
def test_no_subset_varies_more_than_the_one_kept(m):
    """PODS: brute force over all subsets."""
    random, n = np.random.default_rng(m), 10
    pools_ = [draw(random, (24, n)).astype(np.float32) for draw in KINDS.values()]
    reward = np.concatenate(pools_)  # [kinds * 24, n]
    exists = random.random(reward.shape) < random.choice([0.7, 1.0], (len(reward), 1))
    keep = most_varied(reward, m, exists)
    subsets = np.array([np.isin(range(n), s) for s in combinations(range(n), m)])
    for pool, there, chosen in zip(reward, exists, keep, strict=True):
        inside = subsets[~(subsets & ~there).any(-1)]
        if inside.size:
            best = variances(pool, inside).max()
            close(variances(pool, chosen), best, rtol=3e-6, atol=0)
        else:
            np.testing.assert_array_equal(chosen, there)


@pytest.mark.parametrize("m", [2, 3, 4, 5])
def test_equal_variances_are_decided_by_balance_and_not_by_rounding(m):
    """PODS: ties, in integers."""
    tenths = np.random.default_rng(m).integers(0, 4, (24 * len(KINDS), 10)) * 3
    keep = most_varied(np.float32(tenths / 10), m)
    for row, chosen in zip(tenths, keep, strict=True):
        pool = np.sort(row)
        splits = [np.r_[pool[: m - i], pool[10 - i :]] for i in range(m + 1)]
        spread = [m * np.sum(split**2) - np.sum(split) ** 2 for split in splits]
        best = min(range(m + 1), key=lambda i: (-spread[i], abs(2 * i - m), i))
        np.testing.assert_array_equal(np.sort(row[chosen]), splits[best])


def splits_of(pool, m):
    """`[m + 1]` variance of the m - i smallest and i largest, for i = 0..m."""
    pool = np.sort(np.float64(pool))
    n = len(pool)
    return np.array([np.var(np.r_[pool[: m - i], pool[n - i :]]) for i in range(m + 1)])


@pytest.mark.parametrize("m", [1, 2, 3, 4, 5, 10])
def test_variances_of_splits_rise_and_then_fall_by_increments_of_known_sign(m):
    """PODS: increment identity, unimodality, and that bisecting finds what is kept."""
    random, n = np.random.default_rng(m), 10
    reward = [draw(random, (24, n)).astype(np.float32) for draw in KINDS.values()]
    reward = np.concatenate(reward)
    keep = most_varied(reward, m)
    for row, chosen in zip(reward, keep, strict=True):
        # One unit of spread, since neither side of the identity knows the scale.
        pool = np.sort(np.float64(row))
        pool = (pool - pool.mean()) / max(np.ptp(pool), 1e-30)
        v = splits_of(pool, m)
        low, high = pool[m - 1 :: -1][:m], pool[n - 1 - np.arange(m)]  # a, b of step i
        tops = [np.r_[pool[: m - i], pool[n - i :]].mean() for i in range(m)]
        sign = (1 - 1 / m) * high + (1 + 1 / m) * low - 2 * np.array(tops)
        close(m * np.diff(v), (high - low) * sign, rtol=0, atol=1e-13)
        assert (np.diff(sign) <= 1e-12).all()
        fallen = np.logical_or.accumulate(np.diff(v) < -1e-12)
        assert not (fallen & (np.diff(v) > 1e-12)).any()
        found = np.searchsorted(-sign, 0.0)  # the first step that does not rise
        close(np.var(pool[np.argsort(np.argsort(row))][chosen]), v[found], rtol=2e-6)


@pytest.mark.first(4)
@pytest.mark.parametrize("m", range(1, 15))
def test_binary_pools_keep_as_many_of_either_as_there_are(m):
    """PODS: the closed form for pools of up to 14, and half of either is best."""
    sizes = np.repeat(np.arange(15), np.arange(15) + 1)  # of the pool
    k = np.concatenate([np.arange(n + 1) for n in range(15)])
    slots = np.arange(14)
    reward, exists = np.float32(slots < k[:, None]), slots < sizes[:, None]
    keep = most_varied(reward, m, exists)
    most = np.minimum(m, sizes)
    want = np.clip(m // 2, np.maximum(0, most - (sizes - k)), np.minimum(k, most))
    np.testing.assert_array_equal((reward * keep).sum(-1), want)
    np.testing.assert_array_equal(keep.sum(-1), most)
    balance = np.asarray(downsample.balanced(KEY, reward, exists, m=m))
    np.testing.assert_array_equal((reward * balance).sum(-1), want)
    for j, size, right in zip(want, sizes, k, strict=True):
        if size >= m:
            v = splits_of(pools(size)[right] if size else [], m)
            q = j / m
            close([v.max(), v[m // 2] if m % 2 == 0 else q * (1 - q)], q * (1 - q))


@pytest.mark.parametrize(
    ("m", "wrong", "right", "want"),
    [
        (4, 8, 0, (0, 4)),
        (4, 7, 1, (1, 3)),
        (4, 6, 2, (2, 2)),
        (4, 5, 3, (2, 2)),
        (4, 3, 5, (2, 2)),
        (4, 1, 7, (3, 1)),
        (4, 0, 8, (4, 0)),
        (5, 4, 4, (2, 3)),
        (5, 1, 7, (4, 1)),
    ],
)
def test_the_balanced_choice_is_the_published_one(m, wrong, right, want):
    """L11: Reinforce-Ada's table, which `max_variance` follows on labels."""
    got = kept([0] * wrong + [1] * right, m)
    assert (sum(got), m - sum(got)) == want
    reward, exists = pools(8)[right], np.ones(8, bool)
    for first in (False, True):
        keep = downsample.balanced(KEY, reward, exists, m=m, first=first)
        assert (reward[keep].sum(), np.sum(reward[keep] == 0)) == want


@pytest.mark.first(3)
@pytest.mark.parametrize("m", [1, 2, 3, 4, 6, 7])
@given(rewards, existing)
def test_balance_is_its_definition(m, reward, exists):
    """L11: keeps min(m, N); a class of one member is never dropped."""
    rule = partial(downsample.balanced, KEY, reward, exists, m=m, threshold=0.25)
    keep, first = (np.asarray(rule(first=first)) for first in (False, True))
    np.testing.assert_array_equal(keep.sum(-1), np.minimum(m, exists.sum(-1)))
    for b, row in enumerate(exists):
        right = [i for i in np.flatnonzero(row) if reward[b, i] > 0.25]
        wrong = [i for i in np.flatnonzero(row) if reward[b, i] <= 0.25]
        n_right = min(m // 2, len(right))
        n_wrong = min(m - n_right, len(wrong))
        n_right += min(m - n_right - n_wrong, len(right) - n_right)
        assert keep[b, right].sum() == n_right
        assert keep[b, wrong].sum() == n_wrong
        drawn = sorted(right[:n_right] + wrong[:n_wrong])
        np.testing.assert_array_equal(np.flatnonzero(first[b]), drawn)
        if m >= 2:
            assert (n_right > 0) == (len(right) > 0)
            assert (n_wrong > 0) == (len(wrong) > 0)


def test_taking_the_first_needs_no_luck():
    random = np.random.default_rng(0)
    reward, exists = np.float32(random.random((8, 6))), random.random((8, 6)) < 0.8
    keeps = [first_3(jax.random.key(i), reward, exists) for i in range(4)]
    for keep in keeps[1:]:
        np.testing.assert_array_equal(keep, keeps[0])


def test_a_reward_at_the_threshold_is_wrong():
    reward, exists = np.float32([0.5, 0.5, 0.5, 1.0]), np.ones(4, bool)
    for first in (False, True):
        keep = downsample.balanced(KEY, reward, exists, m=2, first=first)
        assert keep[3]
        lower = downsample.balanced(
            KEY, reward, exists, m=2, first=first, threshold=0.4
        )
        assert (lower.sum(), bool(keep[:3].any())) == (2, True)


@pytest.mark.first(3)
@pytest.mark.parametrize("m", [1, 2, 3, 5, 6, 7])
@given(rewards, existing)
def test_the_largest_rewards_and_the_even_shares_are_their_definitions(
    m, reward, exists
):
    best = np.asarray(downsample.max_reward(KEY, reward, exists, m=m))
    even = np.asarray(downsample.percentile(KEY, reward, exists, m=m))
    for b, row in enumerate(exists):
        pool = np.sort(reward[b, row])
        n = len(pool)
        middles = [Fraction(2 * part - 1, 2) * n / m for part in range(1, m + 1)]
        shares = [pool[ceil(middle) - 1] for middle in middles] if n > m else pool
        np.testing.assert_array_equal(np.sort(reward[b][best[b]]), pool[-m:])
        np.testing.assert_array_equal(np.sort(reward[b][even[b]]), shares)


@pytest.mark.first(2)
@pytest.mark.parametrize(
    ("n", "m", "want"),
    [
        (8, 4, [1, 3, 5, 7]),
        (8, 2, [2, 6]),
        (9, 3, [2, 5, 8]),
        (8, 3, [2, 4, 7]),
        (8, 1, [4]),
        (5, 5, [1, 2, 3, 4, 5]),
    ],
)
def test_even_shares_are_order_statistics_at_their_middles(n, m, want):
    reward, exists = np.arange(1, n + 1, dtype=np.float32), np.ones(n, bool)
    keep = downsample.percentile(KEY, reward[::-1], exists, m=m)
    np.testing.assert_array_equal(np.sort(reward[::-1][keep]), want)


@pytest.mark.parametrize("m", [1, 2, 3, 4, 7])
def test_even_shares_of_labels_are_the_pass_rate_to_the_nearest_whole(m):
    n = 8
    exists = np.ones((n + 1, n), bool)
    keep = np.asarray(downsample.percentile(KEY, pools(n), exists, m=m))
    k = np.arange(n + 1)
    want = np.ceil(m * k / n - 0.5)
    np.testing.assert_array_equal((pools(n) * keep).sum(-1), want)
    assert (abs(want - m * k / n) <= 0.5).all()


@given(rewards, existing, st.integers(-4, 4), st.sampled_from([0.5, 2.0, 64.0]))
def test_offset_and_scale_of_the_reward_change_nothing(reward, exists, offset, scale):
    """PODS: shift and positive scale."""
    rule = jax.jit(max_variance_3)
    moved = reward * np.float32(scale) + np.float32(offset)
    np.testing.assert_array_equal(rule(KEY, moved, exists), rule(KEY, reward, exists))


@given(hnp.arrays(np.float32, (3, 6), elements=eighths))
def test_negated_rewards_vary_as_much_and_never_more_than_half_their_spread(reward):
    """PODS: negation, and the largest variance there is."""
    rule, exists = jax.jit(max_variance_3), np.ones((3, 6), bool)
    keep, mirrored = (np.asarray(rule(KEY, r, exists)) for r in (reward, -reward))
    close(variances(reward, keep), variances(reward, mirrored))
    assert (variances(reward, keep) <= np.ptp(reward, -1) ** 2 / 4 + 1e-6).all()


@pytest.mark.parametrize("m", [2, 3, 4, 5, 10])
def test_negated_rewards_keep_the_same_completions_from_the_other_end(m):
    """PODS: i from the top becomes m - i, where no two splits vary alike."""
    random, n = np.random.default_rng(m), 10
    reward = random.normal(size=(24 * len(KINDS), n)).astype(np.float32)
    keep, mirrored = (most_varied(r, m) for r in (reward, -reward))
    np.testing.assert_array_equal(mirrored, keep)


@given(hnp.arrays(np.float32, (3, 6), elements=eighths))
def test_another_completion_never_makes_the_choice_vary_less(reward):
    """PODS: monotone in the pool."""
    rule, exists = jax.jit(max_variance_3), np.ones((3, 6), bool)
    fewer = exists & (np.arange(6) < 5)
    keep, before = (np.asarray(rule(KEY, reward, e)) for e in (exists, fewer))
    assert (variances(reward, keep) >= variances(reward, before) - 1e-5).all()


SIX = np.zeros(6)
PAIRS = np.arange(6) // 2
HALVES = np.arange(6) // 3
EQUALS = [
    # Rewards, and classes whose members are alike to the rule.
    (random_3, [0.0, 1.0, 2.0, 3.0, 4.0, 5.0], SIX),
    (max_variance_3, [0.0, 0.0, 0.0, 1.0, 1.0, 1.0], HALVES),
    (max_variance_3, [1.1] * 6, SIX),
    (max_variance_3, [0.0, 0.5, 0.5, 0.5, 0.5, 0.7], np.array([0, 1, 1, 1, 1, 2])),
    (max_reward_3, [0.0, 0.0, 1.0, 1.0, 2.0, 2.0], PAIRS),
    (max_reward_3, [1.1] * 6, SIX),
    (percentile_3, [0.0, 0.0, 0.0, 1.0, 1.0, 1.0], HALVES),
    (percentile_3, [1.1] * 6, SIX),
    (balanced_3, [0.0, 0.1, 0.2, 0.8, 0.9, 1.0], HALVES),
    (balanced_3, [0.0, 0.0, 0.0, 0.0, 0.0, 1.0], np.array([0, 0, 0, 0, 0, 1])),
    (balanced_3, [1.1] * 6, SIX),
]


@pytest.mark.first(4)
@pytest.mark.parametrize(
    ("rule", "reward", "classes"), EQUALS, ids=[name(rule) for rule, *_ in EQUALS]
)
def test_equals_are_equally_likely_and_independent(rule, reward, classes):
    reward, draws = np.array(reward, np.float32), 4096
    many = np.broadcast_to(reward, (draws, 6))
    keep = np.asarray(jax.jit(rule)(KEY, many, np.ones((draws, 6), bool)))
    for value in np.unique(classes):
        chosen = keep[:, classes == value]
        n = chosen.shape[1]
        share = chosen[0].sum() / n
        np.testing.assert_array_equal(chosen.sum(-1), chosen[0].sum())
        close(chosen.mean(0), share, atol=5 * 0.5 / np.sqrt(draws))
        if n > 1:
            pairs = np.mean(chosen[:, 0] & chosen[:, 1])
            want = share * (n * share - 1) / (n - 1)
            close(pairs, want, atol=5 * 0.5 / np.sqrt(draws))


@pytest.mark.parametrize(
    "rule", [r for r in CHOICES if r is not first_3 and r is not max_reward_3], ids=name
)
def test_pools_stored_by_length_are_not_kept_by_length(rule):
    draws = 4096
    reward = np.float32([0, 0, 1, 0, 1, 1])  # the mirror image swaps the classes
    length = np.float32([100, 120, 150, 150, 180, 200])
    many = np.broadcast_to(reward, (draws, 6))
    keep = np.asarray(jax.jit(rule)(KEY, many, np.ones((draws, 6), bool)))
    for label in (0, 1):
        chosen = keep & (reward == label)
        lengths = chosen @ length / np.maximum(chosen.sum(-1), 1)
        lengths = lengths[chosen.any(-1)]
        bound = 5 * max(lengths.std(), 1e-3) / np.sqrt(len(lengths))
        close(lengths.mean(), length[reward == label].mean(), rtol=0, atol=bound)


@pytest.mark.first(1)
@pytest.mark.parametrize("n", [12, 24])
def test_constant_rewards_that_round_keep_a_random_part_and_train_nothing(n):
    draws, m = 2048, n // 3
    reward, exists = np.full((draws, n), 1.1, np.float32), np.ones((draws, n), bool)
    keep = np.asarray(varied(m)(KEY, reward, exists))
    np.testing.assert_array_equal(keep.sum(-1), m)
    close(keep.mean(0), m / n, atol=5 * 0.5 / np.sqrt(draws))
    credit = advantage.standardised(reward, jax.numpy.asarray(keep))
    assert not np.asarray(credit).any()


@pytest.mark.first(2)
@pytest.mark.parametrize("rule", CHOICES, ids=name)
def test_a_group_of_at_most_m_keeps_all(rule):
    """With m = n a rule is the identity, so that nothing but the group size counts."""
    reward = np.arange(6, dtype=np.float32)[None]
    exists = np.array([[True, False, True, False, False, True]])
    every = np.ones((1, 6), bool)
    np.testing.assert_array_equal(jax.jit(rule)(KEY, reward, exists), exists)
    for m in (6, 9):
        wide = compiled(rule, m=m)
        np.testing.assert_array_equal(wide(KEY, reward, every), every)
        np.testing.assert_array_equal(wide(KEY, reward, exists), exists)
    none = np.zeros((1, 6), bool)
    np.testing.assert_array_equal(jax.jit(rule)(KEY, reward, none), none)


@pytest.mark.first(1)
@pytest.mark.parametrize(
    ("n", "m", "ratios"),
    [
        (32, 8, (1.875, 1.751, 1.570, 1.273, 1.016)),
        (128, 32, (1.951, 1.819, 1.614, 1.258, 1.004)),
        (64, 4, (3.216, 2.295, 1.703, 1.266, 1.008)),
        (64, 2, (3.557, 2.336, 1.705, 1.266, 1.008)),
    ],
)
def test_what_varies_most_weighs_hard_prompts_more_than_the_pool_does(n, m, ratios):
    """PODS: the published ratios to GRPO."""
    reward, pool = pools(n), np.ones((n + 1, n), bool)
    keep = varied(m)(KEY, reward, pool)
    grpo = partial(advantage.standardised, eps=0.0)
    for p, ratio in zip((0.01, 0.05, 0.1, 0.2, 0.5), ratios, strict=True):
        weight = effective_weight(np.asarray(grpo(reward, keep)) / m, p)
        whole = effective_weight(np.asarray(grpo(reward, pool)) / n, p)
        close(weight / whole, ratio, rtol=0, atol=6e-4)


@pytest.mark.parametrize("rule", CHOICES, ids=name)
def test_sizes_below_one_are_refused(rule):
    with pytest.raises(AssertionError, match="m is 0 and must be at least 1"):
        rule(KEY, np.zeros((2, 3), np.float32), np.ones((2, 3), bool), m=0)
