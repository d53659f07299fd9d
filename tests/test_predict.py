"""What is predicted of a recipe, against tables, enumeration and simulation."""

from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from contracts import binomial, effective_weight, name, pools, sides
from hypothesis import given
from hypothesis import strategies as st
from test_law import OF_PODS
from test_stop import PUBLISHED, printed

from curax import (
    advantage,
    aggregate,
    allocate,
    correct,
    downsample,
    gate,
    loss,
    objective,
    reward,
    stop,
)
from curax.config import (
    ConfigError,
    Memory,
    Pilot,
    Sampling,
    Stop,
    Update,
    load,
    override,
)
from curax.tasks import chain
from curax.theory import (
    cases,
    credits,
    moments,
    outcome_states,
    predict,
    remarks,
    stated_objective,
    visits,
)
from curax.types import Difficulty

CONFIGS = Path(__file__).parent.parent / "configs"
# Every prompt comes back in every step, so a memory gets as full as it may.
ONE = partial(chain.task, num_prompts=1)
PLAIN = replace(load(CONFIGS / "quickstart.py"), update=Update(), task=ONE)
ALL = np.array([0.2, 0.5, 0.8])  # pass rates of some population
close = partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-6)
log_weight = partial(objective.prompt_weight, f=objective.log)


def composed(prompts=2, group=4, budget=0, **stages):
    sizes = Sampling(prompts=prompts, group_size=group, budget=budget, max_tokens=8)
    return replace(PLAIN, sampling=sizes, **stages)


def seen(config, p, population=ALL, **options):
    return predict.predict(config, np.atleast_1d(p), population, **options)


def exact(config, p, **options):
    found = seen(config, p, **options)
    assert found.how == ()
    assert not found.half.any()
    return found


def covers(found, want):
    """The interval, half as wide again, holds what is true; it is one, and narrow."""
    assert found.how
    assert (found.half > 0).all()
    assert (found.half < 0.1 * np.abs(want)).all()
    assert (np.abs(found.weight - want) < 1.5 * found.half).all()


# ----- states


def listed(p, most, size, met):
    """Chances of (n, k, j), from all sequences of labels, draw by draw."""
    found = {}
    for labels in product([0, 1], repeat=most):
        n = min(size, most)
        while n < most and not (met and met(labels[:n])):
            n = min(n + size, most)
        k = sum(labels[:n])
        state = n, k, labels.index(1) + 1 if k else 0
        chance = np.prod([p if label else 1 - p for label in labels])
        found[state] = found.get(state, 0.0) + chance
    return found


RULES = {
    None: None,
    stop.positives: lambda labels: sum(labels) >= 1,
    partial(stop.positives, right=2): lambda labels: sum(labels) >= 2,
    partial(stop.balanced, right=1, wrong=2): lambda labels: (
        sum(labels) >= 1 and len(labels) - sum(labels) >= 2
    ),
    stop.never: lambda labels: False,
}


@pytest.mark.first(8)
@pytest.mark.parametrize("rule", RULES, ids=lambda r: name(r) if r else "none")
@pytest.mark.parametrize(("most", "size"), [(6, 2), (7, 3), (5, 1), (3, 8), (1, 1)])
def test_states_are_those_of_all_sequences_of_labels(rule, most, size):
    p = np.array([0.05, 0.4, 0.9])
    which, chance = outcome_states.states(p, most=most, size=size, met=rule)
    assert len({*map(tuple, which.tolist())}) == len(which)
    for row, rate in zip(chance, p, strict=True):
        want = listed(rate, most, size if rule else most, RULES[rule])
        got = dict(zip(map(tuple, which.tolist()), row, strict=True))
        assert got.keys() == want.keys()
        close([got[state] for state in want], list(want.values()), rtol=1e-12, atol=0)
    # Without the place of the first right one, chances add up.
    fewer, sums = outcome_states.states(p, most=most, size=size, met=rule, first=False)
    for state, want in zip(fewer.tolist(), sums.T, strict=True):
        same = (which[:, :2] == state[:2]).all(-1)
        close(chance[:, same].sum(-1), want, rtol=1e-12)
    assert (fewer[:, 2] == np.minimum(fewer[:, 1], 1)).all()


@given(st.integers(0, 40), st.integers(1, 9), st.floats(1e-6, 1 - 1e-6))
def test_chances_sum_to_one(most, size, p):
    rate = np.array([p])

    def two(outcome, exists):
        return outcome.sum(-1) >= 2

    for met in (None, two):
        for first in (True, False):
            chance = outcome_states.states(
                rate, most=most, size=size, met=met, first=first
            )[1]
            close(chance.sum(-1), 1, rtol=1e-12)


def test_what_is_shown_has_the_state():
    which, _ = outcome_states.states(np.array([0.5]), most=6, size=2, met=stop.balanced)
    outcome, exists = outcome_states.shown(which, 8)
    assert outcome.dtype == np.float32
    assert not outcome[~exists].any()
    first = np.where(outcome.any(-1), outcome.argmax(-1) + 1, 0)
    got = np.stack([exists.sum(-1), outcome.sum(-1), first], -1)
    np.testing.assert_array_equal(got, which)
    assert (np.diff(exists.astype(int), axis=-1) <= 0).all()  # no gaps


# ----- tables of the reference

# Stages, the column of their weight, and their noise at p = .1, .5 and .9 under the
# balanced rule.
ESTIMATORS = {
    "code": ({}, 5, (0.006, 0.068, 0.006)),
    "paper": ({"correct": correct.inverse_pass_rate}, 6, None),
    "pool": (
        {"correct": correct.horvitz_thompson, "objective": log_weight},
        7,
        (0.009, 0.068, 0.012),
    ),
    "right ones": (
        {
            "advantage": advantage.raw,
            "correct": correct.horvitz_thompson,
            "objective": log_weight,
        },
        8,
        (0.0058, 0.1250, 0.3816),
    ),
    "mean": (
        {
            "advantage": advantage.raw,
            "correct": partial(correct.accepted_mean, rows=4),
        },
        8,
        (0.0058, 0.1250, 0.3816),
    ),
    "variate": (
        {
            "advantage": advantage.signed,
            "correct": partial(correct.control_variate, rows=4, limit=32),
        },
        8,
        (0.0071, 0.0968, 0.1026),
    ),
}


def adaptive(rule, **stages):
    """Rounds of 8, at most 32 draws of which four train: the published settings."""
    return composed(
        16,
        32,
        stop=Stop(rule=rule, round_size=8),
        downsample=partial(downsample.balanced, m=4),
        **stages,
    )


@pytest.mark.first(2)
@pytest.mark.parametrize("estimator", ESTIMATORS)
@pytest.mark.parametrize("rule", PUBLISHED, ids=name)
def test_adaptive_sampling_is_that_of_the_published_tables(rule, estimator):
    """L15b, L16."""
    stages, column, noise = ESTIMATORS[estimator]
    p, draws, _, mixed, rate, *_ = np.array(PUBLISHED[rule], float).T
    got = exact(adaptive(rule, **stages), p)
    for weight, row in zip(got.weight, PUBLISHED[rule], strict=True):
        printed(weight, row[column])
    close(got.draws, draws, rtol=0, atol=5.1e-4)
    close(got.rate, rate, rtol=0, atol=5.1e-5)
    if estimator != "variate":  # which has signal in dead pools
        if estimator in ("right ones", "mean"):
            mixed = 1 - (1 - p) ** 32
        close(got.signal, mixed, rtol=0, atol=5.1e-5)
    close(got.most[:, 32], 1)
    if rule is stop.balanced and noise:
        at = [np.flatnonzero(p == rate)[0] for rate in (0.1, 0.5, 0.9)]
        digits = 5e-4 if max(noise) < 0.07 else 5e-5
        close((got.noise / got.draws)[at], noise, rtol=1e-6, atol=digits)


def test_the_strength_of_the_control_variate_moves_noise_and_nothing_else():
    """L15b: the published noise."""
    p = np.array([0.1, 0.5, 0.9])
    drawn = exact(adaptive(stop.balanced), p).draws
    for strength, want in {
        0.0: (0.0058, 0.1250, 0.3816),
        1.0: (0.0071, 0.0968, 0.1026),
        3.0: (0.0218, 0.0720, 0.4612),
        None: (0.0094, 0.0734, 0.0785),  # 32 / E[draws], of each pass rate its own
    }.items():
        for i, noise in enumerate(want):
            own = 32 / drawn[i] if strength is None else strength
            rule = partial(correct.control_variate, rows=4, limit=32, strength=own)
            stages = {"advantage": advantage.signed, "correct": rule}
            got = exact(adaptive(stop.balanced, **stages), p[i])
            close(got.weight, (1 - (1 - p[i]) ** 32) / p[i])
            close(got.noise / got.draws, noise, rtol=0, atol=6e-5)


def test_noise_of_plain_groups_is_that_of_the_published_table():
    """L16: the noise of groups of 4."""
    got = exact(composed(16, 4), [0.1, 0.5, 0.9])
    close(got.noise / got.draws, [0.030, 0.083, 0.030], rtol=0, atol=5.1e-4)


@pytest.mark.long
def test_pods_weighs_prompts_as_in_the_published_table():
    """PODS: the published table of weights."""
    score = {"advantage": partial(advantage.standardised, eps=0.0)}
    best = {"downsample": partial(downsample.max_variance, m=16)}
    columns = [
        composed(2, 16, **score),
        composed(2, 64, **score),
        composed(2, 64, **score, **best, pool_statistics=False),
        composed(2, 64, **score, **best),
        composed(2, 64, **score, **best, correct=correct.horvitz_thompson),
    ]
    p = np.array(list(OF_PODS))
    found = [exact(config, np.concatenate([p, 1 - p])) for config in columns]
    got = np.transpose([one.weight for one in found])
    close(got[: len(p)], list(OF_PODS.values()), rtol=0, atol=6e-4)
    close(got[len(p) :], got[: len(p)], rtol=1e-4)
    gates = np.transpose([one.signal for one in found])
    for n, column in zip([16, 64, 64, 64, 64], gates.T, strict=True):
        close(column[: len(p)], 1 - p**n - (1 - p) ** n)


# ----- variance


def test_noise_and_spread_are_the_two_parts_of_the_covariance():
    """L1: of a softmax policy with more than one right action, over all draws."""
    policy, right = np.array([0.1, 0.2, 0.4, 0.3]), np.array([1, 1, 0, 0])
    n, p = 3, 0.3
    score = np.eye(4) - policy
    means = [policy[right == r] @ score[right == r] / policy[right == r].sum()
             for r in (1, 0)]  # fmt: skip
    traces = [
        (policy * (right == r))
        @ ((score - mean) ** 2).sum(-1)
        / (policy @ (right == r))
        for r, mean in zip((1, 0), means, strict=True)
    ]
    gradient = p * means[0]
    for estimate in (advantage.standardised, advantage.signed):
        config = composed(1, n, advantage=estimate)
        found = exact(config, p)
        every = np.array(list(product(range(4), repeat=n)))
        labels = right[every].astype(np.float32)
        credit = np.asarray(estimate(labels, np.ones(labels.shape, bool))) / n
        update = np.einsum("sj,sja->sa", credit, score[every])
        chance = policy[every].prod(-1)
        mean = chance @ update
        close(mean, found.weight[0] * gradient)
        trace = chance @ ((update - mean) ** 2).sum(-1)
        square = [chance @ (credit**2 * (labels == r)).sum(-1) for r in (1, 0)]
        weight = found.weight[0]
        close(found.noise[0] / n * weight**2, sum(square), rtol=1e-4)
        inner = weight**2 * found.spread[0] * (gradient @ gradient)
        close(inner + np.dot(square, traces), trace, rtol=1e-4)


def test_noise_counts_draws_so_that_larger_groups_do_not_win_by_it():
    p = np.array([0.1, 0.5])
    raw = [
        exact(composed(2, group, advantage=advantage.raw), p).noise
        for group in (2, 4, 16)
    ]
    close(raw[0], p)  # n E[k] / n^2
    close(raw[1], raw[0])
    close(raw[2], raw[0])


@pytest.mark.parametrize("n", [2, 9])
def test_the_group_of_comparison_is_grpo(n):
    p = np.array([0.01, 0.3, 0.5, 0.9])
    found = exact(composed(2, n, advantage=advantage.standardised), p)
    weight, noise = stated_objective.grpo(n, p)
    close(weight, found.weight)
    close(noise, found.noise)


# ----- groups of one size

arcsine = partial(objective.bernstein, f=objective.arcsine)
GUARDS = {
    "plain": {},
    "standardised": {"advantage": partial(advantage.standardised, floor=0.35)},
    "guarded": {
        "advantage": partial(
            advantage.guarded, estimate=advantage.standardised, clip=1.5, least=2
        )
    },
    "gate": {
        "gate": partial(
            gate.every,
            gates=(gate.zero_variance, partial(gate.minimum_right, least=2)),
        ),
        "advantage": advantage.signed,
    },
    "band": {"gate": partial(gate.pass_rate_band, low=0.2, high=0.7)},
    "best": {"downsample": partial(downsample.max_reward, m=3)},
    "share": {"downsample": partial(downsample.percentile, m=3)},
    "bernstein": {
        "objective": arcsine,
        "advantage": advantage.leave_one_out,
    },
}


@pytest.mark.first(3)
@pytest.mark.parametrize("guard", GUARDS)
def test_any_stages_weigh_as_their_credit_of_every_number_of_right_ones(guard):
    n, p = 6, np.array([0.02, 0.5, 0.9])
    config = composed(2, n, **GUARDS[guard])
    outcome = pools(n)[:, None]
    every = np.ones(outcome.shape, bool)

    @jax.vmap
    def credit(outcome, exists):
        key, history = jax.random.key(1), jnp.full(1, 0.5)
        arrays = outcome, outcome, exists, exists, history
        return credits.learn.compute_credit(config, key, *arrays).credit[0]

    rows = moments.rows_per_prompt(config)
    given = np.asarray(jax.jit(credit)(outcome, every), np.float64) / rows
    found = exact(config, p)
    close(found.weight, [effective_weight(given, rate) for rate in p], rtol=1e-4)
    assert (np.abs(found.right) + np.abs(found.wrong) > 0).all()
    close(found.draws, n)
    close(found.rate, p)


# ----- lots


@pytest.mark.long
def test_a_random_part_is_as_if_only_that_had_been_drawn():
    part = partial(downsample.random, m=3)
    p = np.array([0.03, 0.4, 0.99])
    of_kept = composed(2, 8, downsample=part, pool_statistics=False)
    for estimate in (advantage.standardised, advantage.group_mean, advantage.raw):
        got = exact(replace(of_kept, advantage=estimate), p)
        want = exact(composed(2, 3, advantage=estimate), p)
        for field in ("weight", "right", "wrong", "signal", "spread"):
            close(getattr(got, field), getattr(want, field), rtol=1e-4, atol=1e-5)
        close(got.noise, want.noise * 8 / 3, rtol=1e-4)


def test_a_random_part_of_a_stopped_pool_holds_its_share_of_right_ones():
    config = composed(
        2,
        6,
        stop=Stop(rule=stop.positives, round_size=2),
        downsample=partial(downsample.random, m=2),
        advantage=advantage.raw,
    )
    p = np.array([0.1, 0.6])
    which, chance = outcome_states.states(
        p, most=6, size=2, met=stop.positives, first=False
    )
    close(exact(config, p).weight, chance @ (which[:, 1] / which[:, 0]) / p)


def thinned(key, value, exists, *, m):
    """Each right one is dropped with chance 1/4: no set, and not blind to labels."""
    return exists & ~((value > 0.5) & jax.random.bernoulli(key, 0.25, exists.shape))


def test_any_other_lot_is_averaged_over():
    config = composed(2, 8, advantage=advantage.raw, downsample=partial(thinned, m=8))
    found = seen(config, [0.3, 0.7])
    covers(found, 0.75)
    assert found.how == ("which completions down-sampling keeps",)


# ----- order


def last_only(value, pool, keep):
    """Counts the last completion alone."""
    group = keep.shape[-1]
    place = jnp.where(pool, jnp.cumsum(pool, -1), 0)
    last = place == jnp.max(place, -1, keepdims=True)
    return jnp.where(keep & last, float(group), 0.0)


def test_the_place_of_the_first_right_one_is_told_apart_where_it_matters():
    """L17: under a stopping rule."""
    series = partial(
        correct.first_success,
        rows=4,
        limit=12,
        coefficients=partial(objective.power_coefficients, alpha=0.5),
    )
    config = composed(
        2,
        12,
        stop=Stop(rule=stop.balanced, round_size=4),
        downsample=partial(downsample.balanced, m=4, first=True),
        advantage=advantage.raw,
        correct=series,
    )
    p = np.array([0.05, 0.3134797966, 0.8])
    d = objective.power_coefficients(12, alpha=0.5)
    close(exact(config, p).weight, (1 - p[:, None]) ** np.arange(12) @ d)


def test_any_other_order_is_averaged_over():
    found = seen(composed(2, 6, advantage=advantage.raw, correct=last_only), [0.3, 0.7])
    covers(found, 1.0)
    assert found.how == ("the order of draws, as if nothing had stopped them",)


# ----- what was known before, and allocation


def test_pilots_are_counted_one_by_one():
    """E[p / h; h > 0] of a pilot's pass rate h: the bias of a plug-in 1 / p."""
    table = {0.1: (0.375, 0.848, 1.249), 0.05: (0.123, 0.366, 0.837)}
    table |= {0.3: (1.142, 1.210, 1.091)}
    p = np.array(list(table))
    for column, draws in enumerate((8, 16, 32)):
        config = composed(
            2,
            36,
            72,
            pilot=Pilot(draws=draws),
            advantage=advantage.leave_one_out,
            objective=partial(objective.history_weight, f=objective.log),
        )
        got = exact(config, p)
        close(
            got.weight * p,
            [row[column] for row in table.values()],
            rtol=0,
            atol=5.1e-4,
        )
        close(got.draws, 36)
        assert got.known == draws


def test_a_memory_is_as_precise_as_its_discounted_draws():
    config = composed(2, 8, memory=Memory(half_life=6.58), steps=300)
    draws, trials = visits.memory_draws(config, None, 300)
    kept = 0.5 ** (np.arange(300) / 6.58)
    right = np.random.default_rng(0).binomial(8, 0.3, (20_000, 300))
    share = right @ kept / (8 * kept.sum())
    close(draws, 8 * kept.sum(), rtol=1e-4)
    close(0.3 * 0.7 / trials, share.var(), rtol=0.03)
    assert visits.memory_draws(config, None, 1) == (8.0, 8)
    forgets_nothing = replace(config, memory=Memory(half_life=np.inf))
    assert visits.memory_draws(forgets_nothing, None, 300) == (2400.0, 2400)
    assert visits.memory_draws(config, 40.0, 300)[0] == 40.0


def in_files(*, train="train.jsonl"):
    """A task that says how many prompts it has only when it has read them."""
    raise AssertionError(train)


def test_a_memory_holds_what_the_run_comes_back_to():
    def held(prompts, steps=10):
        task = partial(chain.task, num_prompts=prompts)
        config = composed(2, 8, memory=Memory(half_life=np.inf), steps=steps, task=task)
        often = visits.visits(config)
        assert visits.visits(replace(config, task=in_files), prompts) == often
        return often, visits.memory_draws(config, None, often)[0]

    assert held(2) == (10, 80.0)
    assert held(4) == (5, 40.0)
    assert held(19) == (1, 8.0)
    assert held(20) == (0, 0.0)  # each is taken once, and none comes back
    assert held(21) == (0, 0.0)


@pytest.mark.long
def test_without_a_second_visit_an_allocation_that_remembers_is_uniform():
    def counts(prompts):
        task = partial(chain.task, num_prompts=prompts)
        own = composed(4, 16, allocate=allocate.bernoulli, task=task, steps=10)
        own = replace(own, sampling=replace(own.sampling, budget=32))
        assert visits.remembers(own)
        return seen(own, [0.05, 0.5]).draws

    close(counts(1000), [8, 8])
    assert counts(1)[0] < 7 < 8 < counts(1)[1]


@pytest.mark.parametrize("trials", [3, 256, 257, 4000])
def test_what_may_be_known_has_the_mean_and_the_variance_of_the_draws(trials):
    p = np.array([0.01, 0.3, 0.98])
    shares, chance = cases.known_shares(trials, p)
    close(chance.sum(-1), 1, rtol=1e-9)
    close(chance @ shares, p, rtol=1e-9)
    precision = p * (1 - p) / (chance @ shares**2 - p**2)
    assert (precision < trials * (1 + 1e-6)).all()
    least = 1 / (1 / trials + (trials > 256) / 30_000)
    assert (precision > least * (1 - 1e-6)).all()


def test_the_memory_is_summed_over_what_it_may_hold():
    def halves(outcome, exists, history):
        """1 where more than half was solved before, else 0."""
        return jnp.where(exists, (history > 0.5)[..., None].astype(jnp.float32), 0.0)

    config = composed(2, 2, steps=1, advantage=advantage.raw, objective=halves)
    got = exact(config, [0.3, 0.6], remembered=5.0)
    p = got.p
    close(got.weight, binomial(5, p)[:, 3:].sum(-1))
    assert got.known == 5.0


def test_a_budget_that_does_not_divide_is_counted_place_by_place():
    for prompts, budget in [(4, 10), (300, 700)]:
        got = exact(composed(prompts, 4, budget, advantage=advantage.raw), [0.2, 0.9])
        close(got.weight, 1)
        close(got.draws, budget / prompts)
        close(got.most[:, 2], 1 - budget / prompts % 1)
        close(got.most[:, 3], budget / prompts % 1)


def test_among_equals_an_allocation_is_uniform_in_the_mean():
    """All prompts have one pass rate: none is favoured, whatever the memory says."""
    config = composed(
        4, 16, 16, allocate=allocate.inverse_pass_rate, advantage=advantage.raw, steps=1
    )
    for p in (0.2, 0.7):
        found = seen(config, p, population=np.array([p]))
        covers(found, 1.0)
        assert abs(found.draws[0] - 4) < 0.3
        assert found.most[0, 4] < 0.9
        close(found.most.sum(-1), 1)


@pytest.mark.long
def test_an_allocation_is_the_mean_over_all_memories():
    """Of two prompts, three draws remembered of each, in either place of the batch."""
    config = composed(
        2, 5, 6, allocate=allocate.inverse_pass_rate, advantage=advantage.raw, steps=1
    )
    p, others = 0.3, (0.2, 0.9)
    cases = np.array(list(product(range(4), range(4))), np.float32)
    known = jax.vmap(
        lambda solved: allocate.inverse_pass_rate(
            Difficulty(
                draws=jnp.full(2, 3.0),
                solved=solved,
                pass_rate=(solved + 1.0) / 5.0,
                norm=jnp.ones(2),
                tokens=jnp.ones(2),
            ),
            budget=6,
            most=5,
        )
    )
    counts = np.asarray(known(cases))
    chance = np.zeros(6)
    for other in others:
        for place in (0, 1):
            rates = (p, other) if place == 0 else (other, p)
            likely = np.outer(*binomial(3, rates)).reshape(-1) / 4
            np.add.at(chance, counts[:, place], likely)
    found = seen(config, p, population=np.array(others))
    covers(found, chance @ np.arange(6) / 3)
    close(found.most[0], chance, rtol=0, atol=0.05)
    close(found.draws[0], found.most[0] @ np.arange(6))


@pytest.mark.long
def test_an_allocation_that_is_undone_leaves_the_weight_exact():
    config = composed(
        4,
        16,
        24,
        allocate=allocate.neyman,
        advantage=advantage.leave_one_out,
        correct=partial(correct.per_prompt, rows=6),
    )
    found = seen(config, [0.1, 0.5, 0.95])
    close(found.weight, 1)
    close(found.half, 0, atol=1e-5)
    assert found.how == ("the rest of a batch, which shares its budget",)
    assert np.ptp(found.draws) > 1


def test_a_prompt_that_draws_nothing_has_no_pass_rate_that_could_be_off():
    found = seen(load(CONFIGS / "gvm_raft_published.py"), [0.02, 0.5])
    assert found.most[0, 0] > 0.3
    close(found.rate, found.p)


# ----- batches


def test_statistics_that_span_a_large_batch_are_averaged_over():
    """128 prompts of one pass rate: E sqrt(q (1 - q)) / (p (1 - p)), q = k / 128."""
    config = load(CONFIGS / "reinforce_plus_plus.py")
    k = np.arange(129)
    for p in (0.3, 0.5):
        want = binomial(128, p) @ np.sqrt(k / 128 * (1 - k / 128)) / (p * (1 - p))
        found = seen(config, p, population=np.array([p]))
        assert found.how == ("the rest of a batch, which statistics span",)
        # The statistics of a large batch hardly differ: neither does this.
        assert found.half < 0.01
        close(found.weight, want, rtol=0.01)


def every_pair(config, p, others, ends=None):
    """w of a prompt with pass rate p beside one of a population, all labels listed."""
    group, total = config.sampling.group_size, 0.0
    key = jax.random.key(0)
    labels = np.array(list(product([0, 1], repeat=2 * group))).reshape(-1, 2, group)
    labels = labels.astype(np.float32)
    number = np.full(labels.shape[:2], group) if ends is None else ends(labels)
    exists = np.arange(group) < number[..., None]
    history = np.full(2, 0.5, np.float32)

    def credit(labels, exists):
        labels = jnp.where(exists, labels, 0.0)
        arrays = labels, labels, exists, exists, history
        return credits.learn.compute_credit(config, key, *arrays).credit

    credited = np.asarray(jax.jit(jax.vmap(credit))(labels, exists), np.float64)
    for other in others:
        rates = np.array([p, other])[:, None]
        chance = np.where(labels == 1, rates, 1 - rates).prod((-2, -1))
        own = sides(credited[:, 0], labels[:, 0], p)
        total += chance @ own / moments.rows_per_prompt(config) / len(others)
    return total


def test_statistics_that_span_a_small_batch_are_averaged_over():
    config = composed(2, 3, advantage=advantage.batch_standardised)
    p = np.array([0.3, 0.8])
    found = seen(config, p)
    covers(found, [every_pair(config, rate, ALL) for rate in p])


def test_the_rest_of_a_batch_stops_as_well():
    rule = partial(stop.balanced, right=1, wrong=1)
    config = composed(
        2,
        6,
        stop=Stop(rule=rule, round_size=2),
        advantage=advantage.batch_standardised,
    )

    def ends(labels):
        right, wrong = labels.cumsum(-1), (1 - labels).cumsum(-1)
        done = ((right > 0) & (wrong > 0))[..., 1::2]
        return np.where(done.any(-1), 2 * (done.argmax(-1) + 1), 6)

    p = np.array([0.3, 0.8])
    found = seen(config, p)
    covers(found, [every_pair(config, rate, ALL, ends) for rate in p])
    np.testing.assert_array_equal(
        cases.stopping_draws(
            config, np.array([[[0, 1, 0, 0, 0, 0], [1, 1, 1, 1, 1, 1]]])
        ),
        [[2, 6]],
    )


def test_a_batch_of_one_prompt_spans_nothing():
    alone = composed(1, 4, advantage=advantage.batch_standardised)
    close(
        exact(alone, ALL).weight,
        exact(composed(1, 4, advantage=advantage.standardised), ALL).weight,
    )


# ----- refill


@pytest.mark.parametrize("prompts", [1, 3])
@pytest.mark.parametrize("rounds", [1, 2, 3])
def test_refills_are_those_of_all_batches(prompts, rounds):
    chance, attempts, used, opened = 0.4, 0.0, 0.0, 0.0
    for opens in product([0, 1], repeat=prompts * rounds):
        likely = np.prod([chance if one else 1 - chance for one in opens])
        batches = np.reshape(opens, (rounds, prompts)).sum(-1)
        drawn = 1
        while drawn < rounds and batches[:drawn].sum() < prompts:
            drawn += 1
        attempts += likely * drawn
        used += likely * min(batches[:drawn].sum(), prompts)
        opened += likely * batches[:drawn].sum()
    close(predict.refills(chance, prompts, rounds), (attempts, used / opened))


def test_refills_follow_from_the_population():
    config = composed(2, 2, gate=gate.zero_variance)
    many = override(config, {"sampling.attempts": 5})
    half = seen(many, [0.1, 0.5], population=np.full(3, 0.5))
    close((half.attempts, half.placed), predict.refills(0.5, 2, 5))
    assert len(half.weight) == 2
    # Half of the prompts are of either kind, and none in between.
    mixed = seen(many, 0.5, population=np.array([1e-9, 0.5]))
    close((mixed.attempts, mixed.placed), predict.refills(0.25, 2, 5))
    solved = seen(many, 0.5, population=np.full(3, 0.999999))
    close(solved.attempts, 5, rtol=1e-3)
    once = seen(config, [0.1, 0.5])
    assert (once.attempts, once.placed) == (1.0, 1.0)
    close(half.weight, once.weight)


# ----- what is not counted


def test_completions_that_are_judged_by_their_length_are_told():
    shaped = partial(reward.soft_overlong, max_tokens=8, margin=2)
    assert not seen(PLAIN, 0.5).lengths
    early = seen(replace(PLAIN, shape_reward=shaped), 0.5)
    assert early.lengths
    close(early.weight, seen(PLAIN, 0.5).weight)
    late = seen(replace(PLAIN, gate=gate.overlong), 0.5)
    assert late.lengths
    close(late.weight, seen(PLAIN, 0.5).weight)


@pytest.mark.parametrize(
    ("rule", "constant"),
    [
        (partial(aggregate.constant_length, length=8), True),
        (aggregate.token_mean, False),
        (aggregate.sequence_mean, False),
    ],
    ids=lambda value: name(value) if callable(value) else None,
)
def test_denominators_that_depend_on_content_are_known(rule, constant):
    assert remarks.sums_tokens(replace(PLAIN, aggregate=rule)) == constant


def test_losses_are_the_policy_gradient_or_known_not_to_be():
    for rule in (loss.reinforce, loss.clipped_ratio, loss.cispo, loss.gspo):
        assert remarks.is_policy_gradient(replace(PLAIN, loss=rule))

    def half(logp, logp_old, advantage, mask):
        return -0.5 * advantage * logp

    assert not remarks.is_policy_gradient(replace(PLAIN, loss=half))


# ----- claims and names


log_series = partial(objective.series, coefficients=objective.log_coefficients)


def doubled(p):
    return 2.0 * jnp.log(p)


@pytest.mark.parametrize(
    ("stages", "says", "slope"),
    [
        ({}, "p", lambda p: 1 + 0 * p),
        ({"objective": log_weight}, "log p", lambda p: 1 / p),
        ({"claim": objective.log}, "log p", lambda p: 1 / p),
        (
            {"claim": partial(objective.power, alpha=0.25)},
            "p^0.25",
            lambda p: 0.25 * p**-0.75,
        ),
        (
            {"claim": partial(objective.pass_at_k, k=3)},
            "pass@3",
            lambda p: 3 * (1 - p) ** 2,
        ),
        ({"claim": objective.arcsine}, "2 asin sqrt p", lambda p: (p - p * p) ** -0.5),
        (
            {"claim": partial(objective.truncated_log, n=4)},
            "truncated_log(n=4)",
            lambda p: (1 - (1 - p) ** 4) / p,
        ),
        ({"claim": doubled}, "doubled", lambda p: 2 / p),
        (
            {"claim": lambda p: p * p if p.ndim == 0 else None},
            "lambda",
            lambda p: 2 * p,
        ),
        ({"objective": arcsine}, "2 asin sqrt p", lambda p: (p - p * p) ** -0.5),
        ({"objective": log_series}, "log p", lambda p: 1 / p),
        (
            {"objective": partial(log_series, terms=2)},
            "log p, 2 terms",
            lambda p: 2 - p,
        ),
    ],
)
def test_a_recipe_claims_what_it_names(stages, says, slope):
    claim = stated_objective.claimed(replace(PLAIN, **stages))
    assert claim.name == says
    p = np.array([0.01, 0.3, 0.9])
    close(claim.slope(p), slope(p), rtol=1e-4)


def test_without_an_f_nothing_is_claimed():
    def even(outcome, exists, history):
        return jnp.where(exists, 1.0, 0.0)

    claim = stated_objective.claimed(replace(PLAIN, objective=even))
    assert claim == ("nothing", None, None)


def test_a_claim_that_cannot_be_differentiated_is_refused_in_a_sentence():
    claim = stated_objective.claimed(replace(PLAIN, claim=lambda p: np.log(p)))
    with pytest.raises(ConfigError, match=r"cannot be differentiated; write it with "):
        claim.slope(ALL)


def test_a_claim_is_reached_as_far_as_draws_go():
    for config, want in [
        (composed(2, 7, objective=log_weight), lambda p: (1 - (1 - p) ** 7) / p),
        (composed(2, 4), lambda p: 1 + 0 * p),
        (
            composed(2, 4, 5, objective=log_weight),  # 3 and 2
            lambda p: (2 - (1 - p) ** 3 - (1 - p) ** 2) / (2 * p),
        ),
        (
            composed(2, 3, claim=partial(objective.power, alpha=0.5)),
            lambda p: 0.5 + (1 - p) / 4 + 3 / 16 * (1 - p) ** 2,
        ),
    ]:
        found = exact(config, ALL)
        close(
            stated_objective.reached(stated_objective.claimed(config), found), want(ALL)
        )
    arcsine = composed(2, 4, claim=objective.arcsine)
    assert (
        stated_objective.reached(stated_objective.claimed(arcsine), seen(arcsine, ALL))
        is None
    )


@pytest.mark.parametrize("scale", [0.01, 30.0])
def test_every_member_of_the_family_is_nearest_to_itself(scale):
    p = np.linspace(0.01, 0.99, 41)
    members = stated_objective.family((8, 32))
    assert {"log p of 7 draws", "GRPO of 32 draws"} <= members.keys()
    for own, slope in members.items():
        found, factor = stated_objective.nearest(scale * slope(p), p, members)
        assert found == own
        assert factor == pytest.approx(1)
    # Halfway between two, it is near to none.
    between = np.sqrt(members["log p"](p) * members["pass@4"](p))
    assert stated_objective.nearest(between, p, members)[1] > 1.3
    assert stated_objective.nearest(p - 0.5, p, members)[1] == np.inf


def test_the_nearest_member_does_not_depend_on_where_p_is_dense():
    members = stated_objective.family((8,))
    even = np.linspace(0.01, 0.99, 99)
    low = np.unique(np.concatenate([np.geomspace(0.01, 0.1, 200), even]))

    def weight(p):
        return 1 / p**0.8

    first, second = (
        stated_objective.nearest(weight(p), p, members) for p in (even, low)
    )
    assert first[0] == second[0]
    assert first[1] == pytest.approx(second[1], rel=0.02)


def test_distances_are_one_in_the_middle():
    p = np.array([0.05, 0.4, 0.6, 0.95])
    ratio = stated_objective.distance(3 / p**2, 1 / p, p)
    middle = np.interp(0.5, p, 1 / p)
    close(ratio, 1 / p / middle)
    published = ((1 - p) ** 2 + p**2) / (2 * p**2 * (1 - p))
    p_half = np.insert(p, 2, 0.5)
    b = ((1 - p_half) ** 2 + p_half**2) / (2 * p_half**2 * (1 - p_half))
    close(stated_objective.distance(b, 1 / p_half, p_half)[0], 9.526316)
    assert published[0] == pytest.approx(b[0])


def test_integrals_are_those_of_known_slopes():
    p = 1 / (1 + np.exp(-np.linspace(-6, 6, 61)))
    for slope, f in [
        (1 / p, np.log(p)),
        (np.ones_like(p), p),
        (1 / (p * (1 - p)), np.log(p / (1 - p))),
        (1 / np.sqrt(p * (1 - p)), 2 * np.arcsin(np.sqrt(p))),
    ]:
        got = stated_objective.integral(slope, p)
        assert got[0] == 0
        close(got, f - f[0], rtol=2e-3, atol=2e-4)
