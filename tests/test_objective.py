"""Objectives and their weights: derivatives, ends, what n draws reach of them."""

from fractions import Fraction
from functools import partial
from math import comb

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from contracts import (
    binomial,
    by_member,
    close,
    effective_weight,
    kept_by_all,
    name,
    pools,
    run_alike,
)
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from curax import advantage, objective

root = partial(objective.power, alpha=0.5)
quarter = partial(objective.power, alpha=0.25)
pass_at_4 = partial(objective.pass_at_k, k=4)
log_of_6 = partial(objective.truncated_log, n=6)
RATES = np.array([0.05, 0.3, 0.5, 0.9])
SLOPES = {
    objective.linear: lambda p: 1.0,
    objective.log: lambda p: 1 / p,
    log_of_6: lambda p: sum((1 - p) ** k for k in range(6)),
    root: lambda p: 0.5 / np.sqrt(p),
    objective.arcsine: lambda p: 1 / np.sqrt(p * (1 - p)),
    objective.logit: lambda p: 1 / (2 * p * (1 - p)),
    pass_at_4: lambda p: 4 * (1 - p) ** 3,
}


def rising(x, k):
    """x (x + 1) ... (x + k - 1) / k!"""
    return rising(x, k - 1) * (x + k - 1) / k if k else Fraction(1)


# Series by f: its coefficients, and d_k by definition.
SERIES = {
    objective.linear: (objective.linear_coefficients, lambda k: Fraction(k == 0)),
    objective.log: (objective.log_coefficients, lambda k: Fraction(1)),
    root: (
        partial(objective.power_coefficients, alpha=0.5),
        lambda k: Fraction(comb(2 * k, k), 2 * 4**k),
    ),
    quarter: (
        partial(objective.power_coefficients, alpha=0.25),
        lambda k: Fraction(1, 4) * rising(Fraction(3, 4), k),
    ),
    pass_at_4: (
        partial(objective.pass_at_k_coefficients, k=4),
        lambda k: Fraction(4 * (k == 3)),
    ),
}
WEIGHTS = {f: partial(objective.prompt_weight, f=f) for f in SLOPES}
HISTORICAL = {f: partial(objective.history_weight, f=f) for f in SLOPES}
SERIAL = {f: partial(objective.series, coefficients=SERIES[f][0]) for f in SERIES}
SMOOTH = {f: partial(objective.bernstein, f=f) for f in SLOPES}
three_of_log = partial(SERIAL[objective.log], terms=3)
plain_arcsine = partial(SMOOTH[objective.arcsine], prior=(0.0, 0.0))
GROUPS = [WEIGHTS, HISTORICAL, SERIAL, SMOOTH]
EVERY = [weigh for group in GROUPS for weigh in group.values()]
MEMBERS = [
    *(WEIGHTS[f] for f in (objective.log, objective.arcsine, log_of_6, pass_at_4)),
    *(HISTORICAL[f] for f in (objective.log, objective.logit)),
    *(SERIAL[root], three_of_log, SMOOTH[objective.log], plain_arcsine),
]
for_every_objective = pytest.mark.parametrize("f", SLOPES, ids=name)
for_every_series = pytest.mark.parametrize("f", SERIES, ids=name)
for_every_member = pytest.mark.parametrize("weigh", MEMBERS, ids=name)
outcomes = hnp.arrays(np.float32, (3, 4), elements=st.sampled_from([0.0, 0.5, 1.0]))
existing = hnp.arrays(np.bool_, (3, 4))
rates = hnp.arrays(np.float32, 3, elements=st.integers(0, 8).map(lambda i: i / 8))


def by_draws(weigh, outcome, exists):
    """The weight of members that read no history: `[..., G]`."""
    return np.asarray(weigh(outcome, exists, np.zeros(exists.shape[:-1], np.float32)))


def by_count(weigh, n):
    """`[n + 1, n]` weights of `pools(n)`."""
    return by_draws(weigh, pools(n), np.ones((n + 1, n), bool))


def reached(weigh, estimate=advantage.raw, size=7, rates=RATES):
    """`[size, rates]` w(p) of 1 to `size` draws, each in a group of `size` places: the
    weight times the advantage, over the number of draws."""
    n = np.arange(1, size + 1)[:, None, None]
    k = np.minimum(np.arange(size + 1)[:, None], n)
    exists = np.broadcast_to(np.arange(size) < n, (size, size + 1, size))
    outcome = np.float32(np.arange(size) < k)
    credit = np.asarray(jax.jit(estimate)(outcome, exists))
    credit = credit * by_draws(jax.jit(weigh), outcome, exists) / n
    return np.array(
        [
            [effective_weight(grid[: n + 1, :n], p) for p in rates]
            for n, grid in enumerate(credit, 1)
        ]
    )


def others_right(outcome, exists):
    """`[..., G]` right ones among the others, where there is a completion; else 0."""
    right = exists & (outcome > 0.5)
    return np.where(exists, right.sum(-1, keepdims=True) - right, 0)


# ----- what all weights promise


test_a_weight_follows_its_completion_and_ignores_the_absent = kept_by_all(
    *(MEMBERS, outcomes, existing, rates),
    counts=lambda outcome, exists, history: exists,
    axes=(0, 1),
    examples=12,
)


test_a_weight_is_the_same_however_it_runs = run_alike(
    MEMBERS, outcomes, existing, rates
)


def test_a_weight_is_finite_at_both_ends():
    outcome = np.repeat(np.float32([0, 1, 0, 1]), 5).reshape(4, 5)
    exists = np.arange(5) < np.array([[1], [1], [5], [5]])
    for weigh, got in by_member(EVERY, outcome, exists, outcome[:, 0]):
        assert np.isfinite(got).all(), name(weigh)


@pytest.mark.first(3)
@for_every_member
def test_prompts_without_completions_weigh_nothing(weigh):
    outcome, exists = np.full((2, 3), np.nan, np.float32), np.zeros((2, 3), bool)
    assert not np.asarray(weigh(outcome, exists, np.float32([0, 0.5]))).any()


# ----- the slope at the pass rate of the draws


@pytest.mark.first(3)
@for_every_objective
@given(outcomes, existing)
def test_the_prompt_weight_is_the_slope_at_the_pass_rate(f, outcome, exists):
    want = np.zeros((3, 4))
    for b, row in enumerate(exists):
        if not row.any():
            continue
        n, p = row.sum(), outcome[b, row].mean(dtype=np.float64)
        with np.errstate(divide="ignore"):
            slope = SLOPES[f](np.float64(p))
        if not np.isfinite(slope):
            slope = SLOPES[f](np.clip(p, 1 / max(n, 2), 1 - 1 / max(n, 2)))
        want[b, row] = slope
    close(by_draws(jax.jit(WEIGHTS[f]), outcome, exists), want)


def test_a_pool_without_a_right_completion_weighs_what_one_would():
    nothing, everything = np.zeros((1, 8), np.float32), np.ones((1, 8), bool)
    close(by_draws(WEIGHTS[objective.log], nothing, everything), 8.0)
    for outcome in (nothing, nothing + 1):
        got = by_draws(WEIGHTS[objective.arcsine], outcome, everything)
        close(got, 8 / np.sqrt(7))


def test_a_prior_adds_its_counts_and_bounds_hold_the_rate():
    weight, k = WEIGHTS[objective.log], np.arange(5)[:, None]
    smoothed = partial(weight, prior=(1.0, 16.0))
    close(by_count(smoothed, 4), np.tile((4 + 1 + 16) / (k + 1), 4))
    bounded = partial(weight, low=0.1, high=0.8)
    close(by_count(bounded, 4), np.tile(1 / np.clip(k / 4, 0.1, 0.8), 4))
    nobody = np.zeros((2, 3), np.float32), np.zeros((2, 3), bool)
    assert not by_draws(smoothed, *nobody).any()


def test_any_function_of_the_pass_rate_is_an_objective():
    def odds(p):
        return p / (1 - p)

    got = by_count(partial(objective.prompt_weight, f=odds), 4)[1:4]
    close(got, np.tile(1 / (1 - np.array([[0.25], [0.5], [0.75]])) ** 2, 4))


@pytest.mark.long
def test_magnitudes_may_be_traced():
    everything, nothing = np.ones((5, 4), bool), np.zeros(5, np.float32)

    def weights(alpha, low):
        f = partial(objective.power, alpha=alpha)
        drawn, known = objective.prompt_weight, objective.history_weight
        return (
            drawn(pools(4), everything, nothing, f=f, low=low),
            known(pools(4), everything, nothing + 1, f=f, low=low),
            objective.bernstein(pools(4), everything, nothing, f=f),
        )

    alphas = (0.25, 0.5)
    drawn, known, smooth = jax.vmap(weights)(jnp.array(alphas), jnp.full(2, 0.1))
    p = np.maximum(np.arange(5) / 4, 0.1)[:, None]
    close(drawn, [np.tile(a * p ** (a - 1), 4) for a in alphas])
    close(known, [np.full((5, 4), a) for a in alphas])
    for got, a in zip(smooth, alphas, strict=True):
        f = partial(objective.power, alpha=a)
        close(got, by_count(partial(objective.bernstein, f=f), 4), atol=1e-5)


def test_the_log_weight_reaches_the_log_only_up_to_n_draws():
    """L1: (r - q) / q over the whole pool."""
    got = reached(WEIGHTS[objective.log], advantage.group_mean)
    close(got, (1 - (1 - RATES) ** np.arange(7)[:, None]) / RATES)


def test_the_slope_of_the_arcsine_is_the_large_group_limit_of_grpo():
    """L1: the limit of GRPO."""
    limit = [SLOPES[objective.arcsine](p) for p in (0.01, 0.05, 0.1, 0.25, 0.5)]
    close(limit, [10.05, 4.588, 3.333, 2.309, 2.0], rtol=2e-4)
    draws = advantage.standardised(pools(256), np.ones((257, 256), bool)) / 256
    for p in (0.25, 0.5):
        slope = SLOPES[objective.arcsine](p)
        close(effective_weight(draws, p), slope, rtol=5e-3)


# ----- objectives


@pytest.mark.first(3)
@for_every_objective
def test_the_slope_of_an_objective_is_its_derivative(f):
    p = np.array([0.05, 0.3, 0.5, 0.9], np.float32)
    slope = jax.jit(jax.grad(lambda p: jnp.sum(f(p))))(p)
    close(slope, np.broadcast_to(SLOPES[f](p), p.shape))
    step = np.float32(1e-2)
    values = jax.jit(f)(np.stack([p - step, p + step]))
    rise = (values[1] - values[0]) / (2 * step)
    close(rise, slope, rtol=2e-2)
    close(jax.vmap(f)(p), f(p))


def test_the_truncated_log_has_its_published_value_and_finite_ends():
    """L18: its derivative at 0.05."""
    truncated = partial(objective.truncated_log, n=32)
    close(jax.grad(truncated)(0.05), 16.125770)
    close(jax.vmap(jax.grad(truncated))(jnp.array([0.0, 1.0])), [32.0, 1.0])
    close(truncated(0.0), 0.0)
    close(truncated(1.0), sum(1 / k for k in range(1, 33)))


# ----- the slope at a pass rate known before


@pytest.mark.first(3)
@for_every_objective
@given(outcomes, existing, rates)
def test_the_history_weight_is_the_slope_at_the_history(f, outcome, exists, history):
    got = jax.jit(HISTORICAL[f])(outcome, exists, history)
    with np.errstate(divide="ignore"):
        want = np.broadcast_to(SLOPES[f](history.astype(np.float64)), (3,))
    want = np.where(np.isfinite(want), want, 0.0)
    close(got, np.where(exists, want[:, None], 0.0))


def test_the_history_is_held_within_its_bounds():
    outcome, exists = np.zeros((4, 2), np.float32), np.ones((4, 2), bool)
    history = np.float32([0, 0.05, 0.5, 1])
    got = objective.history_weight(
        outcome, exists, history, f=objective.log, low=0.1, high=0.8
    )
    close(got[:, 0], [10, 10, 2, 1.25])


@pytest.mark.first(4)
@for_every_objective
@pytest.mark.parametrize("estimate", [advantage.raw, advantage.leave_one_out])
def test_draws_weighed_by_history_follow_its_slope_exactly(f, estimate):
    n = 5
    for history in (0.125, 0.5, 0.75):
        known = np.full(n + 1, history, np.float32)
        everything = np.ones((n + 1, n), bool)
        weight = objective.history_weight(pools(n), everything, known, f=f)
        credit = estimate(pools(n), everything) * weight / n
        for p in RATES:
            close(effective_weight(credit, p), SLOPES[f](history))


# ----- series


def finite(d, n):
    """b(0) to b(n - 1) by definition, in fractions."""
    return [
        sum(d(k) * Fraction(comb(n - 1 - i, k), comb(n - 1, k)) for k in range(n))
        for i in range(n)
    ]


@for_every_series
def test_coefficients_are_those_of_the_slope(f):
    coefficients, d = SERIES[f]
    for count in (1, 2, 7):
        close(coefficients(count), [float(d(k)) for k in range(count)], rtol=1e-12)
        assert coefficients(count).dtype == np.float64
    p = np.float64(0.6)
    total = np.polynomial.polynomial.polyval(1 - p, coefficients(80))
    close(total, jax.grad(f)(jnp.float32(p)))


@pytest.mark.first(2)
@for_every_series
@given(outcomes, existing)
def test_a_series_weighs_by_how_many_of_the_others_are_right(f, outcome, exists):
    d, want = SERIES[f][1], np.zeros((3, 4))
    others = others_right(outcome, exists)
    for b, j in zip(*exists.nonzero(), strict=True):
        want[b, j] = finite(d, int(exists[b].sum()))[others[b, j]]
    close(by_draws(jax.jit(SERIAL[f]), outcome, exists), want)


@for_every_series
def test_n_draws_reach_the_first_n_terms_of_a_series_exactly(f):
    """L17: any f whose slope is a series in 1 - p."""
    terms = [float(SERIES[f][1](k)) * (1 - RATES) ** k for k in range(7)]
    want, n = np.cumsum(terms, 0), np.arange(1, 8)[:, None]
    close(reached(SERIAL[f]), want)
    close(reached(SERIAL[f], advantage.signed), 2 * want)
    close(reached(SERIAL[f], advantage.leave_one_out)[1:], want[1:])
    close(reached(SERIAL[f], advantage.group_mean), (n - 1) / n * want)


def test_six_draws_reach_the_published_weight_of_the_root():
    """L17: the published value, at a fixed number of draws."""
    p = 0.3134797966
    for estimate in (advantage.raw, advantage.leave_one_out):
        got = reached(SERIAL[root], estimate, rates=[p])[6 - 1]
        close(got, 0.8596917918, rtol=1e-6)
    close(SLOPES[root](p), 0.8930283088, rtol=1e-9)
    close(by_count(SERIAL[root], 6)[0], 1.353516, rtol=1e-6)  # the limit at p = 0


@for_every_series
def test_right_ones_together_weigh_the_mean_over_all_orders_of_drawing(f):
    """L17: the Rao-Blackwell form."""
    d, n = SERIES[f][1], 6
    total = (pools(n) * by_count(SERIAL[f], n)).sum(-1)
    for k in range(1, n + 1):
        orders = sum(d(m) * comb(n - 1 - m, k - 1) for m in range(n)) / comb(n, k)
        close(total[k] / n, float(orders))


@pytest.mark.first(1)
@pytest.mark.parametrize("size", [1, 5, 128])
def test_the_series_of_the_log_is_the_mean_over_the_accepted(size):
    """L17: for the log the right ones together weigh 1."""
    n, k = np.full((size + 1, size), size), np.arange(size + 1)[:, None]
    for size_of_all in (size, 128):  # alone, and among larger groups
        padded = np.zeros((2, size + 1, size_of_all), np.float32)
        padded[0, :, :size], padded[1, :, :size] = pools(size), 1
        got = by_draws(SERIAL[objective.log], padded[0], padded[1] > 0)
        want = np.where(pools(size) == 1, n / np.maximum(k, 1), n / (k + 1))
        close(got[:, :size], want)


def test_groups_of_unequal_size_share_an_objective_where_terms_say_so():
    want = np.cumsum([(1 - RATES) ** k if k < 3 else 0 * RATES for k in range(7)], 0)
    close(reached(three_of_log), want)
    close(reached(three_of_log, advantage.leave_one_out)[1:], want[1:])


def test_fewer_than_k_draws_reach_nothing_of_pass_at_k():
    got = reached(SERIAL[pass_at_4])
    assert not got[:3].any()
    assert got[3:].all()


# ----- any objective, smoothed


def mean_slope(f, low, high):
    """Mean of f' from low to high, by quadrature of its closed form."""
    node, weight = np.polynomial.legendre.leggauss(40)
    x = low[..., None] + (high - low)[..., None] * (node + 1) / 2
    return np.broadcast_to(SLOPES[f](x), x.shape) @ weight / 2


@pytest.mark.first(3)
@for_every_objective
@given(outcomes, existing)
def test_bernstein_weighs_by_the_rise_between_two_pass_rates(f, outcome, exists):
    n = exists.sum(-1, keepdims=True) + 1
    others = others_right(outcome, exists)
    slope = mean_slope(f, (others + 0.5) / n, (others + 1.5) / np.maximum(n, 2))
    weigh = jax.jit(SMOOTH[f])
    close(by_draws(weigh, outcome, exists), np.where(exists, slope, 0), rtol=2e-5)


FINITE = [f for f in SLOPES if f not in (objective.log, objective.logit)]  # at 0, 1


@pytest.mark.first(4)
@pytest.mark.parametrize(
    ("f", "prior"),
    [
        *((f, (0.5, 0.5)) for f in SLOPES),
        *((f, (0.0, 0.0)) for f in FINITE),
        (objective.log, (1.0, 16.0)),
    ],
    ids=lambda value: name(value) if callable(value) else str(value),
)
def test_bernstein_ascends_the_mean_objective_of_n_draws(f, prior):
    (a, b), n, p = prior, np.arange(1, 8)[:, None], RATES[:, None]
    k = np.minimum(np.arange(8), n)  # the last repeats
    values = np.asarray(f(jnp.float32((k + a) / (n + a + b))), np.float64)
    want = []
    for n, value in enumerate(values, 1):
        k = np.arange(n + 1)
        slope = (binomial(n, RATES) * (k / p - (n - k) / (1 - p))) @ value[: n + 1]
        want.append((1 + (a + b) / n) * slope)
    weigh = partial(SMOOTH[f], prior=prior)
    close(reached(weigh), want, rtol=2e-5, atol=2e-5)
    out = reached(weigh, advantage.leave_one_out)
    close(out[1:], want[1:], rtol=2e-5, atol=2e-5)


@pytest.mark.first(2)
@for_every_objective
def test_bernstein_tends_to_the_objective_as_the_group_grows(f):
    errors = []
    for n in (16, 128):
        credit = pools(n) * by_count(SMOOTH[f], n) / n
        rates = (0.3, 0.5, 0.8)
        errors.append([abs(effective_weight(credit, p) - SLOPES[f](p)) for p in rates])
    assert (errors[1] < np.maximum(np.array(errors[0]) / 4, 1e-4)).all()


def test_bernstein_leaves_the_linear_objective_alone():
    for n in (1, 5, 128):
        got = by_count(SMOOTH[objective.linear], n)
        close(got, np.ones((n + 1, n)), rtol=2e-5)


def test_bernstein_without_a_prior_is_finite_for_the_arcsine():
    close(by_count(plain_arcsine, 1), np.pi)
    close(by_count(plain_arcsine, 2), np.pi)
    thirds = 6 * np.arcsin(np.sqrt(1 / 3))
    middle = 6 * np.arcsin(np.sqrt(2 / 3)) - thirds
    close(by_count(plain_arcsine, 3)[1], [thirds, middle, middle])
