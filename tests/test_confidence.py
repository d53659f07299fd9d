"""Confidence: definitions in numpy, the vectors of DeepConf, votes."""

import math
from functools import partial

import jax
import numpy as np
import pytest
from contracts import close, is_the_same_however_it_runs
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from curax.monitors import confidence

T, WINDOW, TAIL = 12, 3, 4
TRACE = np.float32([2, 2, 2, 0.5, 0.5, 0.5, 2, 2, 2, 2])
PUBLISHED = jax.jit(partial(confidence.scores, window=3, tail=3))
of_tokens = jax.jit(confidence.of_tokens, static_argnames="k")
few = settings(max_examples=25)
halves = hnp.arrays(
    np.float32, (2, T), elements=st.integers(0, 40).map(lambda i: i / 8)
)
lengths = st.lists(st.integers(0, T), min_size=2, max_size=2).map(np.array)
answers = st.lists(
    st.tuples(st.integers(-1, 3), st.sampled_from([0.5, 1.0, 2.0, 7.0])), max_size=8
)


@jax.jit
def everything(sure, mask):
    return (
        confidence.windows(sure, mask, window=WINDOW),
        confidence.scores(sure, mask, window=WINDOW, tail=TAIL),
    )


def whole(trace):
    return np.float32(trace), np.ones(np.shape(trace), bool)


# ----- of tokens


def test_confidence_of_tokens_is_that_of_the_published_vectors():
    """P14: confidence of a token."""
    logits = np.log(np.float32([[0.7, 0.1, 0.1, 0.1], [0.25, 0.25, 0.25, 0.25]]))
    close(confidence.of_tokens(logits, k=4), [1.816108, 1.386294])
    close(confidence.of_tokens(logits, k=2), [1.329630, 1.386294])
    close(confidence.of_tokens(logits + 7, k=20), [1.816108, 1.386294])


@few
@given(hnp.arrays(np.float32, (3, 6), elements=st.floats(-8, 8, width=32)))
def test_confidence_of_a_token_is_minus_the_mean_of_its_likeliest(logits):
    chance = np.exp(logits.astype(np.float64))
    logp = np.log(chance / chance.sum(-1, keepdims=True))
    for k in (1, 3, 6):
        want = -np.sort(logp, -1)[:, -k:].mean(-1)
        got = of_tokens(logits, k=k)
        close(got, want, atol=1e-5)
        assert (np.asarray(got) > math.log(k) - 1e-5).all()


# ----- along a completion


def test_a_trace_has_the_published_windows_and_scores():
    """P14: windows, and scores of a trace."""
    means, full = confidence.windows(*whole(TRACE), window=3)
    assert full.tolist() == [False] * 2 + [True] * 8
    close(means[2:], [2, 1.5, 1, 0.5, 1, 1.5, 2, 2])
    close(PUBLISHED(*whole(TRACE)), [1.55, 0.5, 0.5, 2.0])
    close(PUBLISHED(*whole([1.55] * 10)), [1.55, 1.55, 1.55, 1.55])


def naive(sure, n):
    """Windows by their ends and scores of one completion, from words."""
    sure = sure[:n].astype(np.float64)
    ends = {t: sure[t + 1 - WINDOW : t + 1].mean() for t in range(WINDOW - 1, n)}
    mean = sure.mean() if n else 0.0
    ordered = sorted(ends.values()) or [mean]
    tenth = max(1, len(ends) // 10)
    scores = (mean, ordered[0], np.mean(ordered[:tenth]), sure[-TAIL:].mean())
    return ends, scores if n else (0.0,) * 4


@few
@given(halves, lengths)
def test_windows_and_scores_are_their_definitions(sure, length):
    mask = np.arange(T) < length[:, None]
    poisoned = np.where(mask, sure, np.float32(np.nan))
    (means, full), scores = everything(poisoned, mask)
    with np.errstate(invalid="ignore"):
        for row, n in enumerate(length):
            if not n:
                assert not full[row].any()
                assert [float(score[row]) for score in scores] == [0] * 4
                continue
            ends, want = naive(sure[row], n)
            assert np.flatnonzero(full[row]).tolist() == list(ends)
            close(means[row][full[row]], list(ends.values()), atol=1e-5)
            close([score[row] for score in scores], want, atol=1e-5)
    assert not np.asarray(means)[~np.asarray(full)].any()


def test_the_bottom_is_a_tenth_of_the_windows():
    sure = np.random.default_rng(0).permutation(40).astype(np.float32)
    length, tenths = np.array([19, 20, 39, 40]), (1, 2, 3, 4)
    mask = np.arange(40) < length[:, None]
    got = confidence.scores(np.broadcast_to(sure, mask.shape), mask, window=1).bottom
    pairs = zip(length, tenths, strict=True)
    close(got, [np.sort(sure[:n])[:tenth].mean() for n, tenth in pairs])


def test_short_completions_are_scored_by_their_mean():
    sure = whole([0.5, 1.0, 3.0])
    close(confidence.scores(*sure, window=4, tail=2), [1.5, 1.5, 1.5, 2.0])


def test_windows_of_long_completions_keep_their_digits():
    sure = np.random.default_rng(0).uniform(10, 20, 20_000).astype(np.float32)
    means, _ = confidence.windows(*whole(sure), window=100)
    sums = np.cumsum(np.concatenate([[0.0], sure.astype(np.float64)]))
    close(means[99:], (sums[100:] - sums[:-100]) / 100, rtol=3e-6)


@pytest.mark.long
def test_scores_are_the_same_however_they_run():
    random = np.random.default_rng(0)
    sure = random.random((8, T), np.float32)
    mask = np.arange(T) < random.integers(0, T + 1, (8, 1))
    is_the_same_however_it_runs(
        lambda sure, mask: sum(confidence.scores(sure, mask, window=3)[1:]), sure, mask
    )


# ----- votes


def test_thresholds_are_the_published_percentiles():
    """P14: percentiles of 1 to 8."""
    lowest = np.random.default_rng(0).permutation(np.arange(1, 9))
    close(confidence.threshold(lowest, keep=0.9), 1.7)
    close(confidence.threshold(lowest, keep=0.1), 7.3)
    close(confidence.threshold(lowest, keep=1.0), 1)
    for keep in (0.0, 1.5, math.nan):
        with pytest.raises(ValueError, match=f"keep={keep}"):
            confidence.threshold(lowest, keep=keep)
    with pytest.raises(ValueError, match="empty"):
        confidence.threshold(np.zeros(0), keep=0.5)


@few
@given(answers, st.sampled_from([1.0, 0.5, 0.1]))
def test_the_vote_is_its_definition(given_, keep):
    votes = [(a, w) for a, w in given_ if a >= 0]
    cut = np.quantile([w for _, w in votes], 1 - keep) if votes else 0
    total = {}
    for answer, weight in votes:
        if weight >= cut:
            total[answer] = total.get(answer, 0) + weight
    want = sorted(a for a in total if total[a] == max(total.values()))
    columns = np.array(given_).reshape(-1, 2).T
    got = confidence.vote(columns[0].astype(int), columns[1], keep=keep)
    assert got.tolist() == want


@pytest.mark.long
def test_a_sure_minority_outvotes_an_unsure_majority():
    answer, weight = np.array([0, 0, 0, 1, 1]), np.array([1.0, 1, 1, 2, 2.5])
    assert confidence.vote(answer, weight).tolist() == [1]
    assert confidence.vote(answer, np.ones(5)).tolist() == [0]
    assert confidence.vote(answer, 1 / weight, keep=0.6).tolist() == [0]
    assert confidence.vote(answer, weight, keep=0.1).tolist() == [1]
