"""Selections: what they keep, against brute force, closed forms and chance."""

from functools import cache, partial
from itertools import combinations

import jax
import numpy as np
import pytest
from contracts import (
    close,
    ignores_absent_entries,
    name,
    pools,
    runs_compiled_and_on_a_mesh,
)
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from curax import downsample

KEY = jax.random.key(0)
max_variance_3 = partial(downsample.max_variance, m=3)
random_3 = partial(downsample.random, m=3)
RULES = [downsample.none, max_variance_3, random_3]
KEYED = {rule: partial(rule, KEY) for rule in RULES}
for_every_rule = pytest.mark.parametrize("rule", RULES, ids=name)
eighths = st.integers(-16, 16).map(lambda i: i / 8)
rewards = hnp.arrays(np.float32, (3, 6), elements=eighths)
existing = hnp.arrays(np.bool_, (3, 6))


@cache
def varied(m):
    return jax.jit(partial(downsample.max_variance, m=m))


def kept(reward, m):
    """Rewards that `max_variance` keeps of one pool of at most eight, ascending."""
    grid = np.pad(np.asarray(reward, np.float32), (0, 8 - len(reward)))
    return sorted(grid[np.asarray(varied(m)(KEY, grid, np.arange(8) < len(reward)))])


def variances(reward, keep):
    """`[...]` population variance of the kept, in float64."""
    reward, n = np.where(keep, reward, 0).astype(np.float64), keep.sum(-1)
    squares = np.where(keep, reward - reward.sum(-1, keepdims=True) / n[..., None], 0)
    return (squares**2).sum(-1) / n


@for_every_rule
@given(rewards, existing)
def test_what_is_kept_exists_and_is_never_more_than_m(rule, reward, exists):
    keep = np.asarray(jax.jit(rule)(KEY, reward, exists))
    most = rule.keywords["m"] if isinstance(rule, partial) else 6
    assert not (keep & ~exists).any()
    np.testing.assert_array_equal(keep.sum(-1), np.minimum(exists.sum(-1), most))


@for_every_rule
@given(rewards, existing)
def test_absent_rewards_are_never_read(rule, reward, exists):
    ignores_absent_entries(KEYED[rule], reward, exists, counts=exists)


@for_every_rule
def test_a_rule_is_the_same_however_it_runs(rule):
    random = np.random.default_rng(0)
    reward = random.integers(0, 3, (8, 6)).astype(np.float32)
    exists = random.random((8, 6)) < 0.8
    runs_compiled_and_on_a_mesh(KEYED[rule], reward, exists)
    keys, compiled = jax.random.split(KEY, 8), jax.jit(rule)
    alone = np.array([compiled(keys[b], reward[b], exists[b]) for b in range(8)])
    mapped = jax.jit(jax.vmap(rule))(keys, reward, exists)
    np.testing.assert_array_equal(mapped, alone)
    folded = compiled(KEY, reward.reshape(2, 4, 6), exists.reshape(2, 4, 6))
    np.testing.assert_array_equal(folded.sum(-1).ravel(), alone.sum(-1))


@given(rewards, existing, st.permutations(range(3)), st.permutations(range(6)))
def test_kept_rewards_do_not_depend_on_the_order(reward, exists, prompts, slots):
    def rewards_kept(reward, exists):
        keep = jax.jit(max_variance_3)(KEY, reward, exists)
        return np.sort(np.where(keep, reward, np.inf), axis=-1)

    want = rewards_kept(reward, exists)
    moved = rewards_kept(reward[prompts][:, slots], exists[prompts][:, slots])
    np.testing.assert_array_equal(moved, want[prompts])


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


@pytest.mark.parametrize(("reward", "m", "want", "variance"), TABLE)
def test_the_published_examples_are_kept(reward, m, want, variance):
    got = kept(reward, m)
    close(got, want)
    close(np.var(np.float64(got)), variance)


def test_later_candidates_are_not_corrupted_by_earlier_ones():
    reward = pools(128)[64]
    keep = np.asarray(varied(32)(KEY, reward, np.ones(128, bool)))
    assert reward[keep].sum() == 16
    close(np.var(reward[keep], ddof=1), 0.258065)


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


@pytest.mark.parametrize("m", [1, 2, 3, 4, 5, 10])
def test_no_subset_varies_more_than_the_one_kept(m):
    random, n = np.random.default_rng(m), 10
    pools_ = [draw(random, (24, n)).astype(np.float32) for draw in KINDS.values()]
    reward = np.concatenate(pools_)  # [kinds * 24, n]
    exists = random.random(reward.shape) < random.choice([0.7, 1.0], (len(reward), 1))
    keep = np.asarray(varied(m)(KEY, reward, exists))
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
    tenths = np.random.default_rng(m).integers(0, 4, (24 * len(KINDS), 10)) * 3
    exists = np.ones(tenths.shape, bool)
    keep = np.asarray(varied(m)(KEY, np.float32(tenths / 10), exists))
    for row, chosen in zip(tenths, keep, strict=True):
        pool = np.sort(row)
        splits = [np.r_[pool[: m - i], pool[10 - i :]] for i in range(m + 1)]
        spread = [m * np.sum(split**2) - np.sum(split) ** 2 for split in splits]
        best = min(range(m + 1), key=lambda i: (-spread[i], abs(2 * i - m), i))
        np.testing.assert_array_equal(np.sort(row[chosen]), splits[best])


@pytest.mark.parametrize("m", [1, 2, 3, 4, 5, 10])
def test_binary_pools_keep_as_many_of_either_as_there_are(m):
    n = 10
    reward = np.resize(pools(n), (24 * len(KINDS), n))
    k = reward.sum(-1)
    keep = np.asarray(varied(m)(KEY, reward, np.ones(reward.shape, bool)))
    want = np.clip(m // 2, np.maximum(0, m - (n - k)), np.minimum(k, m))
    np.testing.assert_array_equal((reward * keep).sum(-1), want)
    np.testing.assert_array_equal(keep.sum(-1), m)


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
def test_on_labels_it_is_the_balanced_choice_of_reinforce_ada(m, wrong, right, want):
    got = kept([0] * wrong + [1] * right, m)
    assert (sum(got), m - sum(got)) == want


@given(rewards, existing, st.integers(-4, 4), st.sampled_from([0.5, 2.0, 64.0]))
def test_offset_and_scale_of_the_reward_change_nothing(reward, exists, offset, scale):
    rule = jax.jit(max_variance_3)
    moved = reward * np.float32(scale) + np.float32(offset)
    np.testing.assert_array_equal(rule(KEY, moved, exists), rule(KEY, reward, exists))


@given(hnp.arrays(np.float32, (3, 6), elements=eighths))
def test_negated_rewards_vary_as_much_and_never_more_than_half_their_spread(reward):
    rule, exists = jax.jit(max_variance_3), np.ones((3, 6), bool)
    keep, mirrored = (np.asarray(rule(KEY, r, exists)) for r in (reward, -reward))
    close(variances(reward, keep), variances(reward, mirrored))
    assert (variances(reward, keep) <= np.ptp(reward, -1) ** 2 / 4 + 1e-6).all()


@given(hnp.arrays(np.float32, (3, 6), elements=eighths))
def test_another_completion_never_makes_the_choice_vary_less(reward):
    rule, exists = jax.jit(max_variance_3), np.ones((3, 6), bool)
    fewer = exists & (np.arange(6) < 5)
    keep, before = (np.asarray(rule(KEY, reward, e)) for e in (exists, fewer))
    assert (variances(reward, keep) >= variances(reward, before) - 1e-5).all()


@pytest.mark.parametrize(
    ("rule", "reward"),
    [
        (random_3, [0.0, 1.0, 2.0, 3.0, 4.0, 5.0]),
        (max_variance_3, [0.0, 0.0, 0.0, 1.0, 1.0, 1.0]),
        (max_variance_3, [0.5] * 6),
        (max_variance_3, [0.0, 0.5, 0.5, 0.5, 0.5, 0.7]),
    ],
)
def test_equal_rewards_are_equally_likely_and_independent(rule, reward):
    reward, draws = np.array(reward, np.float32), 4096
    many = np.broadcast_to(reward, (draws, 6))
    keep = np.asarray(jax.jit(rule)(KEY, many, np.ones((draws, 6), bool)))
    classes = np.zeros(6) if rule is random_3 else reward
    for value in np.unique(classes):
        chosen = keep[:, classes == value]
        n = chosen.shape[1]
        share = chosen[0].sum() / n
        close(chosen.mean(0), share, atol=5 * 0.5 / np.sqrt(draws))
        if n > 1:
            pairs = np.mean(chosen[:, 0] & chosen[:, 1])
            want = share * (n * share - 1) / (n - 1)
            close(pairs, want, atol=5 * 0.5 / np.sqrt(draws))


def test_a_group_of_at_most_m_keeps_all():
    reward = np.arange(6, dtype=np.float32)[None]
    exists = np.array([[True, False, True, False, False, True]])
    for rule in (max_variance_3, random_3, partial(downsample.max_variance, m=9)):
        np.testing.assert_array_equal(jax.jit(rule)(KEY, reward, exists), exists)


@for_every_rule
def test_wrong_shapes_dtypes_and_sizes_are_refused(rule):
    reward, exists = np.zeros((2, 3), np.float32), np.ones((2, 3), bool)
    for bad in [(reward, exists[:1]), (exists, exists), (reward, reward)]:
        with pytest.raises(AssertionError):
            rule(KEY, *bad)
    for choice in (downsample.max_variance, downsample.random):
        with pytest.raises(AssertionError):
            choice(KEY, reward, exists, m=0)
