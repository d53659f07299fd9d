"""Corrections: exact identities over all subsets, published numbers, weights in p."""

from functools import cache, partial
from itertools import product

import jax
import numpy as np
import pytest
from contracts import (
    are_the_same_however_they_run,
    by_member,
    close,
    effective_weight,
    follow_permutations,
    ignores_absent_entries,
    name,
    pools,
    sides,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from curax import advantage, correct, downsample, objective

KEY = jax.random.key(0)
UNCHANGED = [correct.none, correct.horvitz_thompson]  # 1 where everything was kept
root_series = partial(objective.power_coefficients, alpha=0.5)
pool_mean = partial(
    correct.every,
    rules=(correct.horvitz_thompson, partial(correct.per_prompt, rows=3.0)),
)
first_root = partial(correct.first_success, rows=3.0, limit=4, coefficients=root_series)


def over(number, among):
    return number / max(among.sum(), 1)


def by_class(right, keep, plus, minus):
    """The totals of right and wrong ones, shared out among the kept of each."""
    of_right, of_wrong = over(plus, keep & right), over(minus, keep & ~right)
    return np.where(right, of_right, of_wrong)


def inverse_rate(power):
    def weight(right, keep):
        return right.mean() ** -power if right.any() else 0.0

    return weight


def against_a_control(right, keep, strength=1.0, limit=8):
    plus = right.any() - strength * right.sum() / limit
    minus = strength * (~right).sum() / limit
    return by_class(right, keep, 3 * plus, 3 * minus)


def from_the_first(right, keep):
    series = [0.5, 0.25, 0.1875, 0.15625]
    first = right.argmax() if right.any() else 4
    return by_class(right, keep, 3 * series[first] if first < 4 else 0.0, 0.0)


# Every rule beside `horvitz_thompson` with its definition: (labels of the pool, which
# of it is kept) -> weights.
DEFINITIONS = {
    correct.none: lambda right, keep: 1.0,
    correct.expansion: lambda right, keep: by_class(
        right, keep, right.sum(), (~right).sum()
    ),
    correct.inverse_pass_rate: inverse_rate(1.0),
    partial(correct.inverse_pass_rate, power=0.5): inverse_rate(0.5),
    partial(correct.per_prompt, rows=3.0): lambda right, keep: over(3, keep),
    partial(correct.accepted_mean, rows=3.0): lambda right, keep: by_class(
        right, keep, 3, 0
    ),
    partial(correct.control_variate, rows=3.0, limit=8): against_a_control,
    partial(correct.control_variate, rows=3.0, limit=8, strength=0.5): partial(
        against_a_control, strength=0.5
    ),
    first_root: from_the_first,
    partial(correct.every, rules=()): lambda right, keep: 1.0,
    partial(
        correct.every,
        rules=(correct.inverse_pass_rate, partial(correct.per_prompt, rows=3.0)),
    ): lambda right, keep: inverse_rate(1.0)(right, keep) * over(3, keep),
}
RULES = [*DEFINITIONS, correct.horvitz_thompson, pool_mean]
UNORDERED = [rule for rule in RULES if rule is not first_root]
few = settings(max_examples=12)
rewards = hnp.arrays(np.float32, (3, 5), elements=st.sampled_from([0.0, 0.5, 1.0]))
masks = hnp.arrays(np.bool_, (3, 5))
SUBSETS = np.array(list(product([False, True], repeat=7)))  # [128, 7], all of seven


@cache
def best(m):
    return jax.jit(partial(downsample.max_variance, m=m))


def prompt_weight(reward, pool, f):
    """The weight of f at the pass rate of the pool."""
    unknown = np.zeros(pool.shape[:-1], np.float32)
    return objective.prompt_weight(reward, pool, unknown, f=f)


def naive(rule, reward, pool, keep):
    want = np.zeros((3, 5))
    if rule is correct.horvitz_thompson:
        for b, j in zip(*keep.nonzero(), strict=True):
            same = reward[b] == reward[b, j]
            in_pool = (same & pool[b]).sum() / pool[b].sum()
            want[b, j] = in_pool / ((same & keep[b]).sum() / keep[b].sum())
        return want
    for b, row in enumerate(pool):
        if row.any():
            want[b, row] = DEFINITIONS[rule](reward[b, row] > 0.5, keep[b, row])
    return np.where(keep, want, 0.0)


chosen = st.tuples(masks, masks).map(lambda both: (both[0], both[0] & both[1]))


@given(rewards, chosen)
def test_a_rule_is_its_definition(reward, both):
    rules = tuple(RULES[:-1])  # of the last, a product, the factors
    for rule, got in by_member(rules, reward, *both):
        close(got, naive(rule, reward, *both), err_msg=name(rule))


@few
@given(rewards, chosen, st.permutations(range(3)), st.permutations(range(5)))
def test_weights_follow_what_is_kept_and_ignore_the_absent(
    reward, both, prompts, slots
):
    arrays = reward, *both
    for rule, got in by_member(RULES, *arrays):
        ignores_absent_entries(rule, *arrays, counts=both[0])
        assert not got[~both[1]].any(), name(rule)
    follow_permutations(RULES, *arrays, order=prompts, axis=0)
    # Of `first_root` the order along a group is that of drawing.
    follow_permutations(UNORDERED, *arrays, order=slots, axis=1)


def test_a_rule_is_the_same_however_it_runs():
    random = np.random.default_rng(0)
    reward = random.integers(0, 3, (8, 5)).astype(np.float32)
    pool = random.random((8, 5)) < 0.8
    keep = pool & (random.random((8, 5)) < 0.6)
    are_the_same_however_they_run(RULES, reward, pool, keep)


@pytest.mark.parametrize("rule", [*UNCHANGED, correct.expansion], ids=name)
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
    """L13, PODS: all pools of at most seven, all subsets."""
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
        sums = jax.jit(correct.expansion)(*grid, padded)
        for size in np.unique(sizes, axis=0):
            if ((size > 0) != (np.array(counts) > 0)).any():
                continue  # a class of the pool is lost, or nothing is kept
            these = (sizes == size).all(-1)
            kept, omega = keep[these], weight[: len(keep)][these]
            close(subset_means(omega, phi, kept), whole, atol=1e-6)
            close(omega.sum(-1), size.sum())
            if len(levels) == 2:
                total = np.asarray(sums, np.float64)[: len(keep)][these]
                close(np.mean((total * phi * kept).sum(-1)), phi[pool].sum(), atol=1e-5)
            fair = np.allclose(size / size.sum(), np.array(counts) / sum(counts))
            plain = subset_means(np.ones_like(omega), phi, kept)
            assert fair == np.isclose(plain, whole, rtol=0, atol=1e-9)


def test_pools_of_one_class_have_credit_under_the_control_variate_alone():
    """L12: where exactness requires it."""
    reward, pool, kept = np.zeros((3, 32), np.float32), np.ones((3, 32), bool), 4
    reward[1], pool[1, 8:] = 1, False
    pool[2] = False  # none of this prompt
    keep = pool & (np.arange(32) < kept)
    weight = correct.control_variate(reward, pool, keep, rows=4, limit=32)
    credit = np.asarray(advantage.signed(reward, pool) * weight)
    close(credit[keep], [-1] * 4 + [0.75] * 4)
    assert not credit[~keep].any()
    nothing = (reward[::2], pool[::2], keep[::2])
    for rule in RULES:
        got = rule(*nothing) * advantage.raw(*nothing[:2])
        assert np.isfinite(rule(*nothing)).all()
        assert not got.any()


def test_a_pool_without_signal_has_no_credit_in_any_composition():
    """L12: no right one, or no wrong one."""
    pool = np.ones((1, 8), bool)
    log, rules = objective.log, [*UNCHANGED, correct.inverse_pass_rate, pool_mean]
    for outcome, f, rule in product((0, 8), (log, objective.arcsine), rules):
        reward = pools(8)[outcome : outcome + 1]
        keep = best(4)(KEY, reward, pool)
        credit = advantage.group_mean(reward, pool) * rule(reward, pool, keep)
        assert not np.asarray(credit * prompt_weight(reward, pool, f)).any()


def selected(estimate, *, n, m, rule, of_pool, f=objective.linear):
    """`[n + 1, n]` coefficients of a pipeline that keeps m of n by variance."""

    reward, pool = pools(n), np.ones((n + 1, n), bool)
    keep = best(m)(KEY, reward, pool)
    credit = estimate(reward, pool if of_pool else keep) * rule(reward, pool, keep)
    return np.asarray(credit * prompt_weight(reward, pool, f)) / m


def test_five_right_of_eight_kept_two_and_two_weigh_as_published():
    """PODS: the published example of weights."""
    reward, pool = pools(8)[5:6], np.ones((1, 8), bool)
    keep = np.asarray(best(4)(KEY, reward, pool))
    weight = np.asarray(correct.horvitz_thompson(reward, pool, keep))
    close(weight[keep & (reward == 1)], [1.25, 1.25])
    close(weight[keep & (reward == 0)], [0.75, 0.75])
    close((weight * reward).sum() / 4, 0.625)


def test_pods_follows_the_logit_where_both_classes_are_plentiful():
    plenty = slice(8, 64 - 8 + 1)
    wide = partial(selected, n=64, m=16)
    grpo = partial(advantage.standardised, eps=0.0)
    pods = wide(grpo, rule=correct.none, of_pool=False)
    exact = partial(wide, advantage.group_mean, rule=correct.horvitz_thompson)
    logit = exact(of_pool=True, f=objective.logit)
    close(pods[plenty], logit[plenty])
    assert not np.allclose(pods[1:8], logit[1:8], rtol=1e-2)


# ----- draws that stop when they have seen enough


def stopped(labels, per_round, exit_at):
    """Which of draws in rounds are made: after each round the group is left if it has
    `exit_at` right and wrong ones."""
    draw = np.arange(labels.shape[-1])
    pool = draw < per_round
    pool = np.broadcast_to(pool, labels.shape)
    for _ in range(labels.shape[-1] // per_round - 1):
        right, wrong = ((pool & (labels == side)).sum(-1) for side in (1, 0))
        left = (right >= exit_at[0]) & (wrong >= exit_at[1])
        more = np.minimum(pool.sum(-1) + np.where(left, 0, per_round), draw.size)
        pool = draw < more[:, None]
    return pool


def first_of_each(labels, pool):
    """One of each class, the first that was drawn."""
    both = pool & (labels == 1), pool & (labels == 0)
    return np.logical_or(*(own & (own.cumsum(-1) <= 1) for own in both))


ALL_SIX = np.float32(list(product([0, 1], repeat=6)))
PUBLISHED_P = 0.3134797966
LOG_OF_SIX = 2.8560259946
RATES = (0.05, 0.3, 0.5, 0.9)
SERIES = [
    objective.linear_coefficients,
    objective.log_coefficients,
    root_series,
    partial(objective.pass_at_k_coefficients, k=3),
]


@pytest.mark.first(2)
@pytest.mark.parametrize("keep_all", [True, False])
@pytest.mark.parametrize(
    ("exit_at", "of_pool"), [((1, 0), 2.2524), ((1, 1), 2.4194)], ids=str
)
def test_under_early_stopping_only_some_rules_are_exact(exit_at, of_pool, keep_all):
    """L15, L17: over all sequences of six labels."""
    rows = 2
    pool = stopped(ALL_SIX, 2, exit_at)
    keep = pool if keep_all else first_of_each(ALL_SIX, pool)
    assert pool.sum(-1).min() == 2
    assert pool.sum(-1).max() == 6

    def weigh(estimate, rule, f=objective.linear):
        """At any p: mean over all sequences of six, of which the first are drawn."""
        advantages = estimate(ALL_SIX, pool)
        credit = advantages * rule(ALL_SIX, pool, keep)
        credit = np.asarray(credit * prompt_weight(ALL_SIX, pool, f)) / rows

        def w(p):
            chance = np.where(ALL_SIX == 1, p, 1 - p).prod(-1)
            return chance @ sides(credit, ALL_SIX, p)

        return w

    control = partial(correct.control_variate, rows=rows, limit=6)
    mean = (correct.horvitz_thompson, partial(correct.per_prompt, rows=rows))
    mean = partial(correct.every, rules=mean)
    exact = [
        weigh(advantage.raw, mean, objective.log),
        weigh(advantage.raw, partial(correct.accepted_mean, rows=rows)),
        *(
            weigh(advantage.signed, partial(control, strength=strength))
            for strength in (0.0, 1.0, 1.7)
        ),
    ]
    pooled = weigh(advantage.group_mean, mean, objective.log)
    for w in exact:
        close(w(PUBLISHED_P), LOG_OF_SIX)
        close([w(p) for p in RATES], [(1 - (1 - p) ** 6) / p for p in RATES])
    close(pooled(PUBLISHED_P), of_pool, rtol=0, atol=6e-5)

    first = partial(correct.first_success, rows=rows, limit=6)
    for series in SERIES:
        d = series(6)
        for estimate in (advantage.raw, advantage.signed):
            w = weigh(estimate, partial(first, coefficients=series))
            close([w(p) for p in RATES], [d @ (1 - p) ** np.arange(6) for p in RATES])
    root = weigh(advantage.raw, partial(first, coefficients=root_series))
    close(root(PUBLISHED_P), 0.8596917918)
    accepted = correct.accepted_mean(ALL_SIX, pool, keep, rows=rows)
    log = partial(first, coefficients=objective.log_coefficients)
    np.testing.assert_array_equal(log(ALL_SIX, pool, keep), accepted)

    for baseline in (0.0, 0.3):
        w = weigh(lambda r, e, b=baseline: advantage.raw(r, e) - b, correct.expansion)
        for p in RATES:
            chance = np.where(ALL_SIX == 1, p, 1 - p).prod(-1)
            close(rows * w(p), chance @ pool.sum(-1))


def test_a_first_success_past_the_limit_weighs_nothing():
    reward, pool = np.float32([[0, 0, 0, 1], [0, 0, 1, 1]]), np.ones((2, 4), bool)
    pool[1, 0] = False
    log = partial(correct.first_success, coefficients=objective.log_coefficients)
    close(log(reward, pool, pool, rows=2, limit=3), [[0] * 4, [0, 0, 1, 1]])


# ----- draws whose number was allotted before


LOGITS = np.array([0.3, -0.4, 0.9, 0.1])
POLICY = np.exp(LOGITS) / np.exp(LOGITS).sum()
RIGHT = np.array([True, False, True, False])


def bandit(n, size, policy, right):
    """All draws of n actions: chances `[S]`, labels and existence `[S, size]`, and the
    scores `[S, size, K]`, gradients with respect to logits."""
    actions = np.array(list(product(range(len(policy)), repeat=n)))
    padded = np.zeros((len(actions), size), int)
    padded[:, :n] = actions
    exists = np.broadcast_to(np.arange(size) < n, padded.shape)
    labels = np.float32(right[padded] & exists)
    score = np.where(exists[..., None], np.eye(len(policy))[padded] - policy, 0.0)
    return policy[actions].prod(-1), labels, exists, score


def test_the_estimators_of_gvm_follow_the_log_its_truncation_and_the_pass_rate():
    """L9: by enumeration, and the variance of the first."""
    n, p = 5, POLICY[RIGHT].sum()
    chance, labels, exists, score = bandit(n, n, POLICY, RIGHT)
    grad_p = POLICY * (RIGHT - p)
    raw = advantage.raw(labels, exists)

    def update(weight, rows):
        credit = np.asarray(raw * weight, np.float64) / rows
        return np.einsum("sj,sja->sa", credit, score)

    known = np.full(len(chance), p, np.float32)
    log = objective.history_weight(labels, exists, known, f=objective.log)
    per_prompt = correct.per_prompt(labels, exists, exists, rows=8)
    exact = update(log * per_prompt, rows=8)
    mean = chance @ exact
    close(mean, grad_p / p)
    accepted = update(correct.accepted_mean(labels, exists, exists, rows=8), rows=8)
    close(chance @ accepted, (1 - (1 - p) ** n) * grad_p / p)
    plain = update(correct.none(labels, exists, exists), rows=1)
    close(chance @ plain, n * grad_p)

    accepting = POLICY * RIGHT / p
    scores = np.eye(len(POLICY)) - POLICY
    second, centre = accepting @ (scores**2).sum(-1), accepting @ scores
    trace = chance @ (exact**2).sum(-1) - (mean**2).sum()
    close(trace, (second / p - (centre**2).sum()) / n)


@pytest.mark.long
def test_every_prompt_counts_the_same_however_many_completions_it_was_given():
    """P4, L2 of DynaMO: a bandit of three actions, by enumeration."""
    policies = [np.array([0.3, 0.5, 0.2]), np.array([0.8, 0.15, 0.05])]
    right = np.array([True, False, False])
    for policy, n in product(policies, (2, 3, 4, 6)):
        chance, labels, exists, score = bandit(n, 6, policy, right)
        weight = correct.per_prompt(labels, exists, exists, rows=3.5)
        grad_p = policy * (right - policy[0])
        for estimate, share in [
            (advantage.leave_one_out, 1.0),
            (advantage.group_mean, (n - 1) / n),
        ]:
            credit = np.asarray(estimate(labels, exists) * weight, np.float64) / 3.5
            mean = np.einsum("s,sj,sja->a", chance, credit, score)
            close(mean, share * grad_p)
        credit = np.asarray(advantage.leave_one_out(labels, exists)) / 3.5
        mean = np.einsum("s,sj,sja->a", chance, credit, score)
        close(mean, n / 3.5 * grad_p)  # without the rule


def test_groups_of_unequal_size_keep_unequal_weights_where_a_deviation_divides():
    """P6: the published table, its symmetry and its limit."""
    table = {
        0.01: (1.496, 2.440, 3.615, 4.425, 5.054, 10.05),
        0.05: (1.481, 2.313, 3.163, 3.611, 3.880, 4.588),
        0.10: (1.464, 2.177, 2.757, 2.986, 3.095, 3.333),
        0.25: (1.425, 1.895, 2.128, 2.193, 2.223, 2.309),
        0.50: (1.400, 1.736, 1.873, 1.916, 1.937, 2.000),
    }
    sizes, rows = (4, 8, 16, 24, 32), 12.0

    @jax.jit
    def weigh(labels, exists):
        weight = correct.per_prompt(labels, exists, exists, rows=rows)
        return advantage.standardised(labels, exists, eps=0.0, bessel=True) * weight

    drawn = np.reshape(sizes, (-1, 1, 1))
    right = np.minimum(np.arange(33)[:, None], drawn)
    place = np.broadcast_to(np.arange(32), (5, 33, 32))
    grids = np.asarray(weigh(np.float32(place < right), place < drawn)) / rows
    credit = {n: grid[: n + 1, :n] for n, grid in zip(sizes, grids, strict=True)}

    def c(n, p):
        return effective_weight(credit[n], p)

    for p, want in table.items():
        got = [c(n, p) for n in sizes]
        close(got, want[:-1], rtol=0, atol=6e-4)
        close(got, [c(n, 1 - p) for n in sizes])
        assert (np.diff(got) > 0).all()
        close(1 / np.sqrt(p * (1 - p)), want[-1], rtol=3e-4)
        assert got[-1] < want[-1]
    close(c(24, 0.05) / c(8, 0.05), 1.56, rtol=3e-3)
