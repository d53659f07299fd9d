"""Estimates against their definitions: every subset is drawn, every tie is broken."""

import math
from functools import partial
from itertools import combinations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from curax.evaluate import estimates
from curax.monitors.attempts import pass_at_k
from curax.runs.reading import finite_mean

outcomes = st.lists(st.sampled_from([0.0, 1.0, math.nan]), min_size=1, max_size=8)
# Of one problem: what each completion answers, and its outcome.
answered = st.lists(
    st.tuples(st.integers(-1, 3), st.sampled_from([0.0, 0.25, 1.0, math.nan])),
    min_size=1,
    max_size=8,
)
values = st.lists(
    st.one_of(st.just(math.nan), st.floats(0, 1)), min_size=1, max_size=12
)


def drawn(completions, k):
    """All ways to draw k completions that have an outcome, the last of each."""
    return combinations([c for c in completions if not math.isnan(c[-1])], k)


def solved(outcome, k):
    each = [max(o for (o,) in some) for some in drawn([(o,) for o in outcome], k)]
    return np.mean(each) if each else math.nan


def voted(completions, k):
    """Each answer is worth what those that give it are worth on average."""
    worth = {}
    for answer, outcome in completions:
        if answer >= 0 and not math.isnan(outcome):
            worth.setdefault(answer, []).append(outcome)
    each = []
    for some in drawn(completions, k):
        votes = [answer for answer, _ in some if answer >= 0]
        most = max(map(votes.count, votes), default=0)
        best = [np.mean(worth[a]) for a in set(votes) if votes.count(a) == most]
        each.append(np.mean(best) if best else 0.0)
    return np.mean(each) if each else math.nan


def counts(outcome):
    return np.nansum(outcome), np.sum(~np.isnan(outcome))


# ----- pass@k


@given(outcomes, st.integers(1, 9))
def test_pass_at_k_is_the_share_of_subsets_with_a_right_one(outcome, k):
    got = pass_at_k(*counts(outcome), k)
    np.testing.assert_allclose(got, solved(outcome, k), atol=1e-12)


@given(st.lists(outcomes, min_size=1, max_size=4), st.integers(1, 9))
def test_pass_at_k_of_many_problems_is_that_of_each(problems, k):
    right, graded = map(np.array, zip(*map(counts, problems), strict=True))
    each = [pass_at_k(*pair, k) for pair in zip(right, graded, strict=True)]
    np.testing.assert_array_equal(pass_at_k(right, graded, k), each)


@pytest.mark.parametrize(("right", "k"), [(1, 1), (1, 512), (3, 100), (1023, 2)])
def test_pass_at_k_is_exact_where_binomials_are_huge(right, k):
    want = 1 - math.comb(1024 - right, k) / math.comb(1024, k)
    got = pass_at_k(np.array(right), np.array(1024), k)
    np.testing.assert_allclose(got, want, rtol=1e-12)


def test_pass_at_k_has_no_bias():
    n, p, k = 6, 0.3, 4
    right = np.arange(n + 1)
    chance = [math.comb(n, c) * p**c * (1 - p) ** (n - c) for c in right]
    mean = chance @ pass_at_k(right, np.full(n + 1, n), k)
    np.testing.assert_allclose(mean, 1 - (1 - p) ** k)


# ----- maj@k


@given(answered, st.integers(1, 9))
def test_majority_is_the_mean_over_all_subsets_and_ties(completions, k):
    answer, outcome = map(np.array, zip(*completions, strict=True))
    got = estimates.majority(answer, outcome, k)
    np.testing.assert_allclose(got, voted(completions, k), atol=1e-12)


@given(answered, st.randoms(use_true_random=False))
def test_majority_knows_neither_the_order_nor_the_names_of_answers(completions, chance):
    other = [(7 - a if a >= 0 else -5, o) for a, o in completions]
    chance.shuffle(other)
    one, two = (
        estimates.majority(*map(np.array, zip(*some, strict=True)), 3)
        for some in (completions, other)
    )
    np.testing.assert_allclose(one, two, atol=1e-12)


def test_majority_of_all_is_that_of_the_most_frequent_answer():
    answer = np.repeat([0, 1, 2, -1], [5, 4, 4, 9])
    outcome = np.where(answer == 0, 1.0, 0.0)
    assert estimates.majority(answer, outcome, 22) == 1
    assert estimates.majority(answer[1:], outcome[1:], 21) == pytest.approx(1 / 3)


weights = st.sampled_from([0.5, 1.0, 2.0, 7.0])


@given(answered, weights)
def test_a_vote_of_equal_weights_is_the_majority_of_all(completions, weight):
    answer, outcome = map(np.array, zip(*completions, strict=True))
    got = estimates.weighted_majority(answer, outcome, np.full(len(answer), weight))
    want = estimates.majority(answer, outcome, len(answer))
    np.testing.assert_allclose(got, want, atol=1e-12)


@given(
    st.lists(
        st.tuples(st.integers(-1, 2), st.sampled_from([0.0, 0.25, 1.0]), weights),
        min_size=1,
        max_size=8,
    ),
    st.sampled_from([1.0, 0.5, 0.1]),
)
def test_a_weighted_vote_is_worth_what_its_answers_are(completions, keep):
    answer, outcome, weight = map(np.array, zip(*completions, strict=True))
    votes = [c for c in completions if c[0] >= 0]
    cut = np.quantile([w for *_, w in votes], 1 - keep) if votes else 0
    total = {}
    for a, _, w in votes:
        total[a] = total.get(a, 0) + w * (w >= cut)
    best = [a for a in total if total[a] == max(total.values())]
    worth = [np.mean([o for a, o, _ in votes if a == label]) for label in best]
    got = estimates.weighted_majority(answer, outcome, weight, keep=keep)
    np.testing.assert_allclose(got, np.mean(worth) if worth else 0, atol=1e-12)


def test_a_vote_that_an_outcome_is_missing_of_is_not_told():
    answer, weight = np.array([0, 1, 1]), np.ones(3)
    assert math.isnan(
        estimates.weighted_majority(answer, np.array([1, 0, np.nan]), weight)
    )
    nothing = np.zeros(0)
    assert math.isnan(
        estimates.weighted_majority(nothing.astype(int), nothing, nothing)
    )


def test_majority_of_many_completions_stays_a_probability():
    random = np.random.default_rng(0)
    answer = random.integers(-1, 6, 400)
    outcome = np.where(answer == 2, 1.0, 0.0)
    for k in (1, 7, 64, 200, 399):
        assert 0 <= estimates.majority(answer, outcome, k) <= 1
    one = estimates.majority(answer, outcome, 1)
    np.testing.assert_allclose(one, outcome.mean())


@given(st.lists(st.none() | st.sampled_from(["1", "1.0", "2", "one", ""])))
def test_answers_are_alike_where_they_are_the_same(answers):
    def same(a, b):
        return True if {a, b} <= {"1", "1.0"} else None if "one" in (a, b) else False

    labels = estimates.answer_labels(answers, same)
    for label, answer in zip(labels, answers, strict=True):
        assert (label < 0) == (answer is None)
        for other, text in zip(labels, answers, strict=True):
            like = answer == text or bool(answer and text and same(answer, text))
            assert (label == other) == like


# ----- intervals


def test_an_interval_covers_what_all_problems_would_give():
    random, truth, covered = np.random.default_rng(0), 0.3, []
    for trial in range(400):
        rates = random.beta(0.6, 1.4, 80)  # their mean is the truth
        low, high = estimates.bootstrap(rates, seed=trial, draws=400, level=0.9)
        covered.append(low <= truth <= high)
    assert 0.86 < np.mean(covered) < 0.93


@given(values, st.integers(0, 5))
def test_an_interval_lies_inside_the_values_and_around_more_at_a_higher_level(
    values, seed
):
    known = [value for value in values if not math.isnan(value)]
    low, high = estimates.bootstrap(np.array(values), seed=seed, draws=100)
    if len(known) < 2:
        assert np.isnan(low)
        assert np.isnan(high)
        return
    inner = estimates.bootstrap(np.array(values), seed=seed, draws=100, level=0.5)
    assert min(known) - 1e-9 <= low <= inner[0] + 1e-9
    assert inner[0] <= inner[1] + 1e-9
    assert inner[1] <= high + 1e-9 <= max(known) + 2e-9
    assert (low, high) == estimates.bootstrap(np.array(values), seed=seed, draws=100)


def test_an_interval_is_between_two_percentiles_of_the_resampled_statistic():
    values, draws = np.array([0.0, 0.5, 1.0, 1.0, np.nan, 0.25]), 50
    picked = np.random.default_rng(7).integers(6, size=(draws, 6))
    for statistic in (finite_mean, partial(np.nanmax, axis=-1)):
        means = [statistic(values[some]) for some in picked]
        got = estimates.bootstrap(
            values, statistic=statistic, draws=draws, seed=7, level=0.8
        )
        np.testing.assert_allclose(got, np.quantile(means, [0.1, 0.9]))


def test_statistics_told_together_see_the_same_problems():
    values = np.random.default_rng(0).uniform(size=(2, 3, 20))
    values[0, 1, :19] = np.nan
    low, high = estimates.bootstrap(values, seed=3, draws=200)
    assert low.shape == high.shape == (2, 3)
    assert np.isnan(low[0, 1])
    for i, j in ((0, 0), (1, 2)):
        alone = estimates.bootstrap(values[i, j], seed=3, draws=200)
        np.testing.assert_allclose(alone, (low[i, j], high[i, j]), rtol=1e-12)


def test_the_size_of_a_piece_changes_no_interval(monkeypatch):
    values = np.random.default_rng(0).uniform(size=33)
    whole = estimates.bootstrap(values)
    monkeypatch.setattr(estimates, "ENTRIES", 100)
    np.testing.assert_array_equal(estimates.bootstrap(values), whole)


@given(values, st.sampled_from([0.0, 0.5, 0.95, 1.0]))
def test_a_quantile_is_that_of_what_is_known(values, share):
    known = [value for value in values if not math.isnan(value)]
    want = np.quantile(known, share) if known else math.nan
    np.testing.assert_allclose(estimates.quantile(np.array(values), share), want)


def test_of_no_problem_nothing_is_known():
    assert np.isnan(estimates.bootstrap(np.zeros(0))).all()
    assert np.isnan(finite_mean(np.zeros((2, 0)))).all()
    assert math.isnan(estimates.quantile(np.zeros(0), 0.5))
    assert math.isnan(estimates.majority(np.zeros(0, int), np.zeros(0), 1))
