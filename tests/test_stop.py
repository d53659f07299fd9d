"""Stopping rules: definitions, and the published tables by a sum over all pools."""

from functools import partial

import jax
import numpy as np
import pytest
from contracts import (
    binomial,
    close,
    defined,
    kept_by_all,
    name,
    run_alike,
)
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from curax import correct, gate, hint, stop
from curax.settings.declared import RIGHT
from curax.theory import outcome_states

lucky = partial(stop.positives, right=2, threshold=0.7)
one_each = partial(stop.balanced, right=1, wrong=1)
lopsided = partial(stop.balanced, right=1, wrong=3, threshold=0.2)

# Every rule with its definition: outcomes of the pool -> met.
DEFINITIONS = {
    stop.never: lambda pool: False,
    stop.positives: lambda pool: np.sum(pool > 0.5) >= 1,
    lucky: lambda pool: np.sum(pool > 0.7) >= 2,
    stop.balanced: lambda pool: np.sum(pool > 0.5) >= 2 and np.sum(pool <= 0.5) >= 2,
    one_each: lambda pool: 0 < np.sum(pool > 0.5) < len(pool),
    lopsided: lambda pool: np.sum(pool > 0.2) >= 1 and np.sum(pool <= 0.2) >= 3,
}
for_every_rule = pytest.mark.parametrize("rule", DEFINITIONS, ids=name)
outcomes = hnp.arrays(
    np.float32, (3, 5), elements=st.sampled_from([0.0, 0.5, 0.625, 1.0])
)
masks = hnp.arrays(np.bool_, (3, 5))


def naive(rule, outcome, exists):
    return np.array(
        [
            row.any() and DEFINITIONS[rule](o[row])
            for o, row in zip(outcome, exists, strict=True)
        ]
    )


STAGE = DEFINITIONS, outcomes, masks
test_a_rule_is_its_definition = defined(*STAGE, naive=naive)
test_a_rule_is_the_same_however_it_runs = run_alike(*STAGE)
test_a_rule_counts_what_exists_in_any_order = kept_by_all(
    *STAGE, counts=lambda outcome, exists: exists, axes=(0, 1)
)


@pytest.mark.first(2)
@for_every_rule
@given(outcomes, masks, masks)
def test_what_is_met_stays_met_when_more_is_drawn(rule, outcome, exists, more):
    before, after = (jax.jit(rule)(outcome, e) for e in (exists, exists | more))
    assert (~np.asarray(before) | np.asarray(after)).all()


@pytest.mark.first(2)
@for_every_rule
@given(outcomes, masks)
def test_a_rule_reads_the_label_and_nothing_finer(rule, outcome, exists):
    threshold = rule.keywords.get("threshold", 0.5) if type(rule) is partial else 0.5
    label = np.float32(outcome > threshold)
    np.testing.assert_array_equal(
        jax.jit(rule)(label, exists), jax.jit(rule)(outcome, exists)
    )


def test_an_outcome_at_the_threshold_is_wrong():
    outcome, exists = np.float32([[0.5, 0.5, 1.0]]), np.ones((1, 3), bool)
    assert not stop.positives(outcome[:, :2], exists[:, :2]).any()
    assert stop.balanced(outcome, exists, right=1, wrong=2).all()
    assert stop.positives(outcome, exists, threshold=0.9).all()
    assert not stop.positives(outcome, exists, threshold=1.0).any()


@pytest.mark.parametrize("counts", [{"right": 0}, {"right": -1}])
def test_counts_below_one_are_refused(counts):
    outcome, exists = np.zeros((2, 3), np.float32), np.ones((2, 3), bool)
    for rule in (stop.positives, stop.balanced):
        with pytest.raises(AssertionError):
            rule(outcome, exists, **counts)
    with pytest.raises(AssertionError):
        stop.balanced(outcome, exists, wrong=0)


def pools(rule, p, *, size, rounds):
    """Pools that end the draws, `[pools, 3]` draws, right ones, some; their chances."""
    options = {"most": size * rounds, "size": size, "met": rule, "first": False}
    which, chance = outcome_states.states(np.array([p]), **options)
    return which, chance[0]


def expected_draws(rule, p, **sizes):
    """E[draws], summed over all pools."""
    which, chance = pools(rule, p, **sizes)
    return chance @ which[:, 0]


def printed(got, want):
    """`got` rounds to `want`, text as printed; float32 credits may be off by 1e-6."""
    _, _, decimals = want.partition(".")
    close(got, float(want), rtol=1e-6, atol=0.5 * 10.0 ** -len(decimals))


# p: draws, P(met), P(mixed), mean pass rate; weights as released, as the paper has it,
# of the whole pool corrected, and of the mean over right completions, of which four
# are trained. `test_predict` holds the weights, and `test_law` those of recipes.
BALANCED = """
.01 31.700 .0407 .2750 .0112 7.5225 204.555 26.6472 27.5020
.05 27.315 .4800 .8063 .0663 5.8570 96.7469 15.5783 16.1258
.10 20.962 .8436 .9657 .1321 3.9464 41.3601 9.2615 9.6566
.25 11.520 .9988 .9999 .2837 1.6205 7.2916 3.8195 3.9996
.50 8.567 1.0000 1.0000 .5000 1.0000 2.2419 2.0000 2.0000
.75 11.520 .9988 .9999 .7163 1.6205 2.2995 1.5133 1.3333
.90 20.962 .8436 .9657 .8679 3.9464 4.6168 1.4681 1.1111
.95 27.315 .4800 .8063 .9337 5.8570 6.4752 1.3962 1.0526
.99 31.700 .0407 .2750 .9888 7.5225 7.9005 1.1326 1.0101
"""
POSITIVES = """
.01 28.479 .2750 .2750 .0194 6.6109 125.052 25.8185 27.5020
.05 19.164 .8063 .8063 .0776 4.2673 60.3271 15.3414 16.1258
.10 13.564 .9657 .9657 .1297 2.8023 27.9310 9.2885 9.6566
.50 8.031 1.0000 .9961 .5010 .9726 2.2597 1.9961 2.0000
.90 8.000 1.0000 .5695 .9000 1.5795 1.9782 1.1111 1.1111
"""
PUBLISHED = {
    rule: [line.split() for line in table.split("\n")[1:-1]]
    for rule, table in ((stop.balanced, BALANCED), (stop.positives, POSITIVES))
}
ROWS = [(rule, row) for rule, rows in PUBLISHED.items() for row in rows]


@pytest.mark.parametrize(
    ("rule", "row"), ROWS, ids=[f"{name(rule)}-{row[0]}" for rule, row in ROWS]
)
def test_the_released_settings_draw_as_derived(rule, row):
    """L16, L19, Reinforce-Ada: rounds of 8, a cap of 32."""
    which, chance = pools(rule, float(row[0]), size=8, rounds=4)
    n, k, some = which.T
    met = np.asarray(rule(*outcome_states.shown(which, 32)))
    for value, want in zip((n, met, some & (k < n), k / n), row[1:5], strict=True):
        printed(chance @ value, want)


def by_closed_form(p, *, size, rounds, right, wrong):
    """M sum_{t<T} P(not met after t M), with N+ ~ Binomial(t M, p)."""
    waiting = 0.0
    for n in range(0, size * rounds, size):
        k = np.arange(n + 1)
        waiting += binomial(n, p)[(k < right) | (n - k < wrong)].sum()
    return size * waiting


@pytest.mark.parametrize(
    ("rule", "size", "rounds"),
    [
        (stop.never, 8, 4),
        (stop.positives, 8, 4),
        (stop.balanced, 8, 4),
        (lucky, 3, 4),
        (lopsided, 2, 5),
        (one_each, 1, 6),
    ],
    ids=lambda option: name(option) if callable(option) else str(option),
)
def test_expected_draws_are_rounds_times_the_chance_to_go_on(rule, size, rounds):
    """L19: the closed form against the sum over all pools."""
    options = {"right": 1, "wrong": 0}
    if rule in (stop.never, stop.balanced):
        options = dict.fromkeys(options, np.inf if rule is stop.never else 2)
    options |= {k: v for k, v in getattr(rule, "keywords", {}).items() if k in options}
    sizes = {"size": size, "rounds": rounds}
    for p in (0.01, 0.05, 0.3, 0.5, 0.9):
        want = by_closed_form(p, **sizes, **options)
        close(expected_draws(rule, p, **sizes), want, rtol=1e-12)


@pytest.mark.parametrize(
    ("rule", "draws"),
    [
        (
            partial(stop.balanced, right=8, wrong=8),
            ("122.09", "86.18", "39.66", "28.89"),
        ),
        (partial(stop.positives, right=16), ("128.0", "125.98", "71.50", "38.99")),
    ],
    ids=["balanced", "positives"],
)
def test_the_illustrated_settings_draw_as_derived(rule, draws):
    """L19: rounds of 16, a cap of 128."""
    for p, want in zip((0.05, 0.1, 0.25, 0.5), draws, strict=True):
        printed(expected_draws(rule, p, size=16, rounds=8), want)


@pytest.mark.parametrize(("p", "want"), [(0.05, "23.8"), (0.5, "8.03")])
def test_rounds_draw_far_more_than_one_over_the_pass_rate(p, want):
    """Without a cap M / (1 - (1-p)^M), and not 1/p."""
    draws = expected_draws(stop.positives, p, size=8, rounds=24)
    close(draws, 8 / (1 - (1 - p) ** 8), rtol=1e-4)
    printed(draws, want)


def test_drawn_at_random_prompts_stop_when_the_sum_over_all_pools_says():
    """L19: by simulation."""
    random, p = np.random.default_rng(0), 0.1
    outcome = np.float32(random.random((20000, 32)) < p)
    ended = np.full(20000, 32)
    for drawn in (24, 16, 8):
        exists = np.broadcast_to(np.arange(32) < drawn, outcome.shape)
        ended[np.asarray(jax.jit(stop.balanced)(outcome, exists))] = drawn
    close(ended.mean(), 20.962, rtol=0, atol=5 * ended.std() / np.sqrt(20000))


GRADED = hnp.arrays(np.float32, (3, 4), elements=st.floats(0, 1, width=32))


@given(GRADED, hnp.arrays(np.bool_, (3, 4)), st.sampled_from([RIGHT, 0.25, 0.75]))
def test_what_stops_a_draw_is_what_is_accepted_and_counted(outcome, exists, threshold):
    """A completion of .7 once stopped a draw and trained nothing."""
    one = {"threshold": threshold}
    stops = np.asarray(stop.positives(outcome, exists, **one))
    accepted = np.asarray(gate.accepted(outcome, exists, exists, **one))
    np.testing.assert_array_equal(stops, accepted.any(-1))
    counted = np.asarray(correct.accepted_mean(outcome, exists, exists, rows=1, **one))
    np.testing.assert_array_equal(counted > 0, accepted)
    enough = np.asarray(gate.minimum_right(outcome, exists, exists, least=1, **one))
    np.testing.assert_array_equal(enough, exists & stops[:, None])
    if threshold == RIGHT:
        again = np.asarray(hint.all_wrong(outcome, exists))
        np.testing.assert_array_equal(again, exists.any(-1) & ~stops)
