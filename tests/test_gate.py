"""Gates: definitions, what they never do, and the weights they leave."""

from functools import partial

import numpy as np
import pytest
from contracts import (
    binomial,
    close,
    defined,
    effective_weight,
    kept_by_all,
    name,
    pools,
    run_alike,
)
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from curax import advantage, gate

band = partial(gate.pass_rate_band, low=0.25, high=0.75)
wholly_right = partial(gate.accepted, threshold=0.75)
two_right = partial(gate.minimum_right, least=2)
three_fair = partial(gate.minimum_right, least=3, threshold=0.25)


def hard(p):
    """The slope of log."""
    return 1 / p


energetic = partial(gate.advantage_energy, least=0.2)
hard_energetic = partial(gate.advantage_energy, least=0.4, weight=hard)
several = partial(gate.every, gates=(band, gate.overlong, gate.zero_variance))

# Every gate with its definition: (outcomes of the group, finished) -> may train.
DEFINITIONS = {
    gate.none: lambda outcome, finished: True,
    gate.zero_variance: lambda outcome, finished: np.ptp(outcome) > 0,
    band: lambda outcome, finished: 0.25 <= outcome.mean() <= 0.75,
    gate.overlong: lambda outcome, finished: finished,
    gate.accepted: lambda outcome, finished: outcome > 0.5,
    wholly_right: lambda outcome, finished: outcome > 0.75,
    two_right: lambda outcome, finished: np.sum(outcome > 0.5) >= 2,
    three_fair: lambda outcome, finished: np.sum(outcome > 0.25) >= 3,
    energetic: lambda outcome, finished: outcome.var() >= 0.2,
    hard_energetic: lambda outcome, finished: (
        outcome.var() > 0 and outcome.var() / outcome.mean() >= 0.4
    ),
    several: lambda outcome, finished: (
        finished & (0.25 <= outcome.mean() <= 0.75) & (np.ptp(outcome) > 0)
    ),
}
for_every_gate = pytest.mark.parametrize("gate_", DEFINITIONS, ids=name)
OUTCOMES = st.sampled_from([0.0, 0.5, 0.625, 1.0])
outcomes = hnp.arrays(np.float32, (3, 4), elements=OUTCOMES)
masks = hnp.arrays(np.bool_, (3, 4))


def naive(gate_, outcome, exists, finished):
    want = np.zeros((3, 4), bool)
    for b, row in enumerate(exists):
        if row.any():
            want[b, row] = DEFINITIONS[gate_](outcome[b, row], finished[b, row])
    return want


STAGE = DEFINITIONS, outcomes, masks, masks
test_a_gate_is_its_definition = defined(*STAGE, naive=naive)
test_a_gate_is_the_same_however_it_runs = run_alike(*STAGE)
test_a_gate_neither_reads_nor_opens_to_the_absent = kept_by_all(
    *STAGE, counts=lambda outcome, exists, finished: exists, axes=(0, 1)
)


def test_rounding_does_not_bring_a_dead_group_to_life():
    outcome = np.float32([[1.1, np.nextafter(np.float32(1.1), np.float32(2))]])
    both = np.ones((1, 2), bool)
    assert not gate.zero_variance(outcome, both, both).any()
    assert gate.zero_variance(outcome, both, both, delta=0.0).all()
    spread = np.ptp(outcome)
    assert not gate.zero_variance(outcome, both, both, delta=spread).any()


CENTRED = [
    advantage.group_mean,
    advantage.leave_one_out,
    advantage.standardised,
    partial(advantage.standardised, bessel=True, floor=0.35),
    partial(advantage.guarded, estimate=advantage.standardised, least=2),
]


@pytest.mark.first(8)
@for_every_gate
@pytest.mark.parametrize("outcome", [0.0, 0.7, 1.0])
def test_a_group_of_equal_outcomes_trains_nothing(gate_, outcome):
    group, every = np.full((1, 12), outcome, np.float32), np.ones((1, 12), bool)
    open_ = np.asarray(gate_(group, every, every))
    for estimate in CENTRED:
        assert not np.asarray(estimate(group, every))[open_].any()
        assert not np.asarray(estimate(group, open_)).any()


@pytest.mark.parametrize("outcome", [0.0, 0.7, 1.0])
@pytest.mark.parametrize("size", [1, 12, 24])
def test_no_group_of_equal_outcomes_passes_where_they_must_differ(outcome, size):
    group, every = np.full((1, size), outcome, np.float32), np.ones((1, size), bool)
    assert not gate.zero_variance(group, every, every).any()


def test_a_group_too_hard_is_closed_at_the_least_number_and_an_easy_one_never():
    every = np.ones((9, 8), bool)
    for least in range(10):
        open_ = np.asarray(gate.minimum_right(pools(8), every, every, least=least))
        np.testing.assert_array_equal(open_.all(-1), np.arange(9) >= least)
        np.testing.assert_array_equal(open_.any(-1), open_.all(-1))


def test_an_outcome_at_the_threshold_is_wrong():
    outcome, every = np.float32([[0.5, 1.0]]), np.ones((1, 2), bool)
    assert not two_right(outcome, every, every).any()
    assert two_right(outcome, every, every, threshold=0.49).all()


@pytest.mark.parametrize("least", [1, 2, 3])
def test_hopeless_prompts_weigh_nothing_once_several_must_be_right(least):
    n, every = 8, np.ones((9, 8), bool)
    open_ = np.asarray(gate.minimum_right(pools(n), every, every, least=least))
    credit = np.where(open_, advantage.leave_one_out(pools(n), every), 0.0) / n
    for p in (0.001, 0.1, 0.5, 0.9):
        # All but the two completions whose pair of labels is (right, wrong).
        others = binomial(n - 2, p)
        close(effective_weight(credit, p), others[least - 1 :].sum(), rtol=1e-5)
    tiny = [effective_weight(credit, p) for p in (1e-4, 2e-4)]
    close(tiny[1] / tiny[0], 2 ** (least - 1), rtol=2e-3)


@pytest.mark.parametrize("weight", [None, hard], ids=["p", "log"])
def test_the_energy_of_groups_is_estimated_as_stated_and_gates_as_it_weighs(weight):
    """L1: E[q (1 - q)] = (1 - 1/n) p (1 - p), and w of a gate over all counts."""
    n, least = 6, 0.15
    every, k = np.ones((7, 6), bool), np.arange(7)
    q = k / n
    slope = 1 if weight is None else np.where(k, n / np.maximum(k, 1), 0)
    energy = slope * q * (1 - q)
    rule = partial(gate.advantage_energy, least=least, weight=weight)
    open_ = np.asarray(rule(pools(n), every, every))
    np.testing.assert_array_equal(open_.all(-1), (energy >= least) & (q % 1 > 0))
    credit = np.where(open_, advantage.leave_one_out(pools(n), every), 0.0) / n
    for p in (0.05, 0.3, 0.9):
        chance = binomial(n, p)
        close(chance @ (q * (1 - q)), (1 - 1 / n) * p * (1 - p))
        # c(k) = k (n - k) / (n (n - 1)) of leave one out.
        centred = k * (n - k) / (n * (n - 1)) * open_.all(-1)
        close(effective_weight(credit, p), chance @ centred / (p * (1 - p)), rtol=1e-5)


def test_no_gates_at_all_let_everything_through():
    exists = np.array([[True, False, True]])
    outcome = np.zeros((1, 3), np.float32)
    np.testing.assert_array_equal(gate.every(outcome, exists, exists, gates=()), exists)
