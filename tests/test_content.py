"""Checks on lone successes, against their definitions on lists."""

import jax
import numpy as np
import pytest
from contracts import close, ignores_absent_entries, is_the_same_however_it_runs
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from curax import advantage
from curax.monitors import content

few = settings(max_examples=25)
existing = hnp.arrays(np.bool_, (3, 5))
answered = jax.jit(content.answered)
lone = jax.jit(content.lone, static_argnames="most")


@few
@given(
    hnp.arrays(np.float32, (3, 5), elements=st.sampled_from([0.0, 0.5, 0.75, 1.0])),
    existing,
    st.integers(0, 3),
)
def test_lone_successes_are_their_definition(outcome, exists, most):
    want = np.zeros((3, 5), bool)
    for b in range(3):
        right = exists[b] & (outcome[b] > 0.5)
        want[b] = right & (right.sum() <= most)
    np.testing.assert_array_equal(lone(outcome, exists, most=most), want)


def test_as_few_as_accident_gives_are_lone():
    least = advantage.least_positives(16, accident=0.02)
    outcome = np.float32(np.arange(16) < np.arange(4)[:, None])
    got = content.lone(outcome, np.ones((4, 16), bool), most=least - 1)
    assert np.asarray(got).sum(-1).tolist() == [0, 1, 0, 0]


@few
@given(
    hnp.arrays(np.float32, (3, 5), elements=st.integers(0, 99).map(float)),
    existing,
    st.sampled_from([0.0, 0.25, 1.0]),
)
def test_short_completions_are_far_below_the_median_of_their_group(
    length, exists, share
):
    got = np.asarray(content.short(length, exists, share=share))
    for b in range(3):
        own = length[b, exists[b]]
        low = share * np.median(own) if own.size else 0
        np.testing.assert_array_equal(got[b], exists[b] & (length[b] < low))
    ignores_absent_entries(content.short, length, exists, counts=exists)


def test_checks_of_groups_are_the_same_however_they_run():
    random = np.random.default_rng(0)
    length = random.random((8, 5), np.float32)
    exists = random.random((8, 5)) < 0.8
    for check in (content.lone, lambda *args: content.short(*args, share=0.8)):
        is_the_same_however_it_runs(check, length, exists)


def naive(tokens, answer):
    n, size = len(tokens), len(answer)
    at = [t for t in range(n - size + 1) if tokens[t : t + size] == answer and size]
    first = at[0] / max(n - size, 1) if at else 1.0
    return len(at) * size / max(n, 1), first


@few
@given(
    hnp.arrays(np.int32, (4, 7), elements=st.integers(0, 1)),
    hnp.arrays(np.int32, 4, elements=st.integers(0, 7)),
    hnp.arrays(np.int32, (4, 3), elements=st.integers(0, 1)),
    hnp.arrays(np.int32, 4, elements=st.integers(0, 3)),
)
def test_repetitions_of_the_answer_are_counted_and_the_first_is_found(
    tokens, length, answer, size
):
    mask, answer_mask = (
        np.arange(width) < n[:, None] for width, n in ((7, length), (3, size))
    )
    # What is behind an end may be anything, the answer too.
    got = answered(tokens, mask, answer, answer_mask)
    rows = zip(tokens.tolist(), length, answer.tolist(), size, strict=True)
    want = [naive(row[:n], said[:y]) for row, n, said, y in rows]
    close(np.stack(got, -1), want)


@pytest.mark.parametrize(
    ("tokens", "repeated", "first"),
    [
        ([5, 6, 7, 8, 1, 2], 1 / 3, 1.0),  # a derivation, then its answer
        ([1, 2], 1.0, 0.0),  # nothing but the answer
        ([1, 2, 1, 2, 1, 2, 1, 2], 1.0, 0.0),
        ([1, 2, 5, 6, 7, 8, 1, 2], 0.5, 0.0),  # the answer, then reasons for it
        ([5, 6, 7, 8], 0.0, 1.0),
    ],
)
def test_a_derivation_is_told_from_a_guess(tokens, repeated, first):
    rows = np.int32([tokens])
    answer, there = np.int32([[1, 2, 0]]), np.array([[True, True, False]])
    got = content.answered(rows, np.ones(rows.shape, bool), answer, there)
    close(np.stack(got, -1), [[repeated, first]])
