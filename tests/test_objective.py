"""Objectives and their prompt weights: derivatives, ends, effective weights."""

from functools import partial

import jax
import jax.numpy as jnp
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

from curax import advantage, objective

root = partial(objective.power, alpha=0.5)
pass_at_4 = partial(objective.pass_at_k, k=4)
SLOPES = {
    objective.linear: lambda p: 1.0,
    objective.log: lambda p: 1 / p,
    root: lambda p: 0.5 / np.sqrt(p),
    objective.arcsine: lambda p: 1 / np.sqrt(p * (1 - p)),
    pass_at_4: lambda p: 4 * (1 - p) ** 3,
}
WEIGHTS = {f: partial(objective.prompt_weight, f=f) for f in SLOPES}
for_every_objective = pytest.mark.parametrize("f", SLOPES, ids=name)
outcomes = hnp.arrays(np.float32, (3, 4), elements=st.sampled_from([0.0, 0.5, 1.0]))
existing = hnp.arrays(np.bool_, (3, 4))


@for_every_objective
@given(outcomes, existing)
def test_the_weight_is_the_slope_at_the_pass_rate(f, outcome, exists):
    want = np.zeros(3)
    for b, row in enumerate(exists):
        if not row.any():
            continue
        n, p = row.sum(), outcome[b, row].mean(dtype=np.float64)
        with np.errstate(divide="ignore"):
            want[b] = SLOPES[f](np.float64(p))
        if not np.isfinite(want[b]):
            want[b] = SLOPES[f](np.clip(p, 1 / max(n, 2), 1 - 1 / max(n, 2)))
    close(jax.jit(WEIGHTS[f])(outcome, exists), want)


@for_every_objective
@given(outcomes, existing, st.permutations(range(3)), st.permutations(range(4)))
def test_the_weight_belongs_to_the_prompt_alone(f, outcome, exists, prompts, slots):
    ignores_absent_entries(WEIGHTS[f], outcome, exists, counts=exists)
    follows_permutations(WEIGHTS[f], outcome, exists, order=prompts, axis=0)
    follows_permutations(WEIGHTS[f], outcome, exists, order=slots, axis=1)


@for_every_objective
def test_the_weight_is_the_same_however_it_runs(f):
    random = np.random.default_rng(0)
    outcome = random.integers(0, 2, (8, 4)).astype(np.float32)
    is_the_same_however_it_runs(WEIGHTS[f], outcome, random.random((8, 4)) < 0.8)


@for_every_objective
@pytest.mark.parametrize("n", [1, 5])
def test_the_weight_is_finite_at_both_ends(f, n):
    ends = np.stack([np.zeros(n, np.float32), np.ones(n, np.float32)])
    assert np.isfinite(WEIGHTS[f](ends, np.ones((2, n), bool))).all()


def test_a_pool_without_a_right_completion_weighs_what_one_would():
    nothing, everything = np.zeros((1, 8), np.float32), np.ones((1, 8), bool)
    close(WEIGHTS[objective.log](nothing, everything), 8.0)
    close(WEIGHTS[objective.arcsine](nothing, everything), 8 / np.sqrt(7))
    close(WEIGHTS[objective.arcsine](nothing + 1, everything), 8 / np.sqrt(7))


def test_prompts_without_completions_weigh_nothing():
    outcome, exists = np.full((2, 3), np.nan, np.float32), np.zeros((2, 3), bool)
    for weight in WEIGHTS.values():
        assert not np.asarray(weight(outcome, exists)).any()
        assert not np.asarray(partial(weight, prior=(1.0, 1.0))(outcome, exists)).any()


def test_a_prior_adds_its_counts_and_bounds_hold_the_rate():
    outcome, everything = pools(4), np.ones((5, 4), bool)
    weight = WEIGHTS[objective.log]
    smoothed = (np.arange(5) + 1) / (4 + 1 + 16)
    close(weight(outcome, everything, prior=(1.0, 16.0)), 1 / smoothed)
    bounded = np.clip(np.arange(5) / 4, 0.1, 0.8)
    close(weight(outcome, everything, low=0.1, high=0.8), 1 / bounded)


def test_any_function_of_the_pass_rate_is_an_objective():
    weight = objective.prompt_weight(
        pools(4)[1:4],
        np.ones((3, 4), bool),
        f=lambda p: jnp.log(p / (1 - p)) / 2,
    )
    p = np.array([0.25, 0.5, 0.75])
    close(weight, 1 / (2 * p * (1 - p)))


def test_magnitudes_may_be_traced():
    def weight(alpha, low):
        f = partial(objective.power, alpha=alpha)
        everything = np.ones((5, 4), bool)
        return objective.prompt_weight(pools(4), everything, f=f, low=low)

    alphas, p = jnp.array([0.25, 0.5]), np.maximum(np.arange(5) / 4, 0.1)
    want = [alpha * p ** (alpha - 1) for alpha in (0.25, 0.5)]
    close(jax.vmap(weight)(alphas, jnp.full(2, 0.1)), want)


@pytest.mark.parametrize("n", [2, 6])
def test_the_log_weight_reaches_the_log_only_up_to_n_draws(n):
    everything = np.ones((n + 1, n), bool)
    centred = advantage.group_mean(pools(n), everything)
    credit = centred * WEIGHTS[objective.log](pools(n), everything)[:, None] / n
    for p in (0.05, 0.3, 0.5, 0.9):
        close(effective_weight(credit, p), (1 - (1 - p) ** (n - 1)) / p)


def test_the_slope_of_the_arcsine_is_the_large_group_limit_of_grpo():
    limit = [SLOPES[objective.arcsine](p) for p in (0.01, 0.05, 0.1, 0.25, 0.5)]
    close(limit, [10.05, 4.588, 3.333, 2.309, 2.0], rtol=2e-4)
    draws = advantage.standardised(pools(256), np.ones((257, 256), bool)) / 256
    for p in (0.25, 0.5):
        slope = SLOPES[objective.arcsine](p)
        close(effective_weight(draws, p), slope, rtol=5e-3)


def test_wrong_shapes_and_dtypes_are_refused():
    outcome, exists = np.zeros((2, 3), np.float32), np.ones((2, 3), bool)
    for bad in [(outcome, exists[:1]), (exists, exists), (outcome, outcome)]:
        with pytest.raises(AssertionError):
            WEIGHTS[objective.log](*bad)
