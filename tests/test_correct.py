"""Corrections: exact identities over all subsets, published numbers, weights in p."""

from functools import cache, partial
from itertools import product

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
)
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from curax import advantage, correct, downsample, objective

KEY = jax.random.key(0)
RULES = [correct.none, correct.horvitz_thompson]
for_every_rule = pytest.mark.parametrize("rule", RULES, ids=name)
rewards = hnp.arrays(np.float32, (3, 5), elements=st.sampled_from([0.0, 0.5, 1.0]))
masks = hnp.arrays(np.bool_, (3, 5))
SUBSETS = np.array(list(product([False, True], repeat=7)))  # [128, 7], all of seven


@cache
def best(m):
    return jax.jit(partial(downsample.max_variance, m=m))


@given(rewards, masks, masks)
def test_horvitz_thompson_is_its_definition(reward, pool, chosen):
    keep, want = pool & chosen, np.zeros((3, 5))
    for b, j in zip(*keep.nonzero(), strict=True):
        same = reward[b] == reward[b, j]
        in_pool = (same & pool[b]).sum() / pool[b].sum()
        want[b, j] = in_pool / ((same & keep[b]).sum() / keep[b].sum())
    close(jax.jit(correct.horvitz_thompson)(reward, pool, keep), want)


@given(rewards, masks, masks)
def test_without_correction_every_kept_completion_counts_once(reward, pool, chosen):
    keep = pool & chosen
    np.testing.assert_array_equal(jax.jit(correct.none)(reward, pool, keep), keep)


@for_every_rule
@given(rewards, masks, masks, st.permutations(range(3)), st.permutations(range(5)))
def test_weights_follow_what_is_kept_and_ignore_the_absent(
    rule, reward, pool, chosen, prompts, slots
):
    keep = pool & chosen
    ignores_absent_entries(rule, reward, pool, keep, counts=pool)
    assert not np.asarray(jax.jit(rule)(reward, pool, keep))[~keep].any()
    follows_permutations(rule, reward, pool, keep, order=prompts, axis=0)
    follows_permutations(rule, reward, pool, keep, order=slots, axis=1)


@for_every_rule
def test_a_rule_is_the_same_however_it_runs(rule):
    random = np.random.default_rng(0)
    reward = random.integers(0, 3, (8, 5)).astype(np.float32)
    pool = random.random((8, 5)) < 0.8
    is_the_same_however_it_runs(
        rule, reward, pool, pool & (random.random((8, 5)) < 0.6)
    )


@for_every_rule
def test_nothing_is_corrected_where_everything_was_kept(rule):
    reward, pool = pools(6), np.ones((7, 6), bool)
    pool[:, 4] = False
    np.testing.assert_array_equal(rule(reward, pool, pool), pool)


def subset_means(weight, credit, keep):
    """Mean over subsets of (1/n) sum over the kept of weight times credit."""
    size = keep.sum(-1, keepdims=True)
    return np.mean(np.where(keep, weight * credit, 0.0) / size, axis=0).sum()


@pytest.mark.parametrize("levels", [(0.0, 1.0), (0.0, 0.5, 1.0)])
def test_the_mean_over_all_subsets_is_the_pool_unless_a_class_is_lost(levels):
    phi = np.random.default_rng(0).normal(size=7)
    for counts in product(range(8), repeat=len(levels)):
        if not 0 < sum(counts) <= 7:
            continue
        reward = np.zeros(7, np.float32)
        reward[: sum(counts)] = np.repeat(np.float32(levels), counts)
        pool = np.arange(7) < sum(counts)
        whole = phi[pool].mean()
        keep = SUBSETS[~(SUBSETS & ~pool).any(-1)]
        sizes = np.stack([(keep & pool & (reward == r)).sum(-1) for r in levels], -1)
        weight = np.zeros((128, 7))
        grid = np.broadcast_to(reward, (128, 7)), np.broadcast_to(pool, (128, 7))
        padded = np.zeros((128, 7), bool)
        padded[: len(keep)] = keep
        weight = np.asarray(
            jax.jit(correct.horvitz_thompson)(*grid, padded), np.float64
        )
        for size in np.unique(sizes, axis=0):
            if ((size > 0) != (np.array(counts) > 0)).any():
                continue  # a class of the pool is lost, or nothing is kept
            these = (sizes == size).all(-1)
            kept, omega = keep[these], weight[: len(keep)][these]
            close(subset_means(omega, phi, kept), whole, atol=1e-6)
            close(omega.sum(-1), size.sum())
            fair = np.allclose(size / size.sum(), np.array(counts) / sum(counts))
            plain = subset_means(np.ones_like(omega), phi, kept)
            assert fair == np.isclose(plain, whole, rtol=0, atol=1e-9)


def test_two_right_of_eight_kept_two_and_two_give_the_published_advantages():
    reward, pool = pools(8)[2:3], np.ones((1, 8), bool)
    keep = np.asarray(best(4)(KEY, reward, pool))
    order = np.argsort(-reward[keep], kind="stable")  # right ones first

    def credit(f, rule, estimate=advantage.group_mean):
        weight = objective.prompt_weight(reward, pool, f=f)[:, None]
        grid = estimate(reward, pool) * weight * rule(reward, pool, keep)
        return np.asarray(grid)[keep][order]

    def two_of_each(right, wrong):
        return [right, right, wrong, wrong]

    ht = correct.horvitz_thompson
    close(ht(reward, pool, keep)[keep][order], two_of_each(0.5, 1.5))
    close(credit(objective.linear, correct.none), two_of_each(0.75, -0.25))
    close(credit(objective.log, correct.none), two_of_each(3, -1))
    close(credit(objective.linear, ht), two_of_each(0.375, -0.375))
    unbiased = credit(objective.linear, ht, advantage.leave_one_out)
    close(unbiased, two_of_each(0.428571, -0.428571))
    close(credit(objective.log, ht), two_of_each(1.5, -1.5))


def test_a_pool_without_signal_has_no_credit_in_any_composition():
    pool = np.ones((1, 8), bool)
    for outcome, f, rule in product((0, 8), (objective.log, objective.arcsine), RULES):
        reward = pools(8)[outcome : outcome + 1]
        keep = best(4)(KEY, reward, pool)
        credit = advantage.group_mean(reward, pool) * rule(reward, pool, keep)
        weight = objective.prompt_weight(reward, pool, f=f)[:, None]
        assert not np.asarray(credit * weight).any()


def selected(estimate, *, n, m, rule, of_pool, f=objective.linear):
    """`[n + 1, n]` coefficients of a pipeline that keeps m of n by variance."""

    reward, pool = pools(n), np.ones((n + 1, n), bool)
    keep = best(m)(KEY, reward, pool)
    credit = estimate(reward, pool if of_pool else keep) * rule(reward, pool, keep)
    weight = objective.prompt_weight(reward, pool, f=f)[:, None]
    return np.asarray(credit * weight) / m


def test_pods_weighs_prompts_as_derived_and_the_correction_gives_grpo_back():
    grpo = partial(advantage.standardised, eps=0.0)
    whole = grpo(pools(64), np.ones((65, 64), bool)) / 64
    wide = partial(selected, grpo, n=64, m=16)
    pods = wide(rule=correct.none, of_pool=False)
    mixed = wide(rule=correct.none, of_pool=True)
    exact = wide(rule=correct.horvitz_thompson, of_pool=True)
    table = {
        0.001: (7.798, 15.203, 31.169),
        0.01: (6.736, 12.983, 26.738),
        0.05: (4.336, 7.803, 16.637),
        0.1: (3.255, 5.205, 11.405),
        0.2: (2.469, 3.121, 5.393),
        0.3: (2.162, 2.381, 3.060),
        0.5: (1.984, 2.000, 2.016),
    }
    for p, want in table.items():
        got = [effective_weight(credit, p) for credit in (whole, pods, mixed)]
        close(got, want, rtol=0, atol=6e-4)
        close(effective_weight(exact, p), got[0])
    close(effective_weight(pods, 1e-7), 15.49193, rtol=1e-4)


def test_two_of_six_corrected_weigh_as_the_six_would():
    two_of_six = partial(selected, n=6, m=2, of_pool=True)
    ht, log = correct.horvitz_thompson, objective.log
    corrected = two_of_six(advantage.group_mean, rule=ht, f=log)
    linear = two_of_six(advantage.leave_one_out, rule=ht)
    published = two_of_six(advantage.group_mean, rule=correct.none, f=log)
    for p in (0.1, 0.3134797966, 0.5, 0.9):
        close(effective_weight(corrected, p), (1 - (1 - p) ** 5) / p)
        close(effective_weight(linear, p), 1.0)
        for limit in (5, 6):
            log_weight = (1 - (1 - p) ** limit) / p
            assert abs(effective_weight(published, p) / log_weight - 1) > 0.01


@for_every_rule
def test_wrong_shapes_and_dtypes_are_refused(rule):
    reward, mask = np.zeros((2, 3), np.float32), np.ones((2, 3), bool)
    for bad in [(reward, mask, mask[:1]), (mask, mask, mask), (reward, mask, reward)]:
        with pytest.raises(AssertionError):
            rule(*bad)
