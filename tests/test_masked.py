"""Masked reductions against numpy's on the entries that count."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from contracts import close
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from curax.arrays import masked

values_ = hnp.arrays(np.float32, (3, 4), elements=st.floats(-8, 8, width=32))
counts_ = hnp.arrays(np.bool_, (3, 4))
REDUCTIONS = {
    "total": (masked.total, np.sum),
    "mean": (masked.mean, np.mean),
    "variance": (masked.variance, np.var),
    "smallest": (lambda *a, **k: masked.extent(*a, **k)[0], np.min),
    "largest": (lambda *a, **k: masked.extent(*a, **k)[1], np.max),
}
for_every_reduction = pytest.mark.parametrize(
    ("reduce", "definition"), REDUCTIONS.values(), ids=REDUCTIONS.keys()
)


@for_every_reduction
@given(values_, counts_)
def test_a_reduction_is_numpys_over_what_counts(reduce, definition, values, counts):
    poisoned = np.where(counts, values, np.float32(np.nan))
    rows = [v[c] for v, c in zip(values, counts, strict=True)]
    want = [definition(row.astype(np.float64)) if row.size else 0.0 for row in rows]
    close(reduce(poisoned, counts), want, atol=1e-5)


@pytest.mark.first(5)
@for_every_reduction
@pytest.mark.parametrize("axis", [0, -1, (0, 1), None])
def test_axes_reduce_as_in_numpy(reduce, definition, axis):
    values = np.arange(12, dtype=np.float32).reshape(3, 4)
    everything = np.ones((3, 4), bool)
    for keepdims in (False, True):
        got = reduce(values, everything, axis=axis, keepdims=keepdims)
        assert got.dtype == jnp.float32
        close(got, definition(values, axis=axis, keepdims=keepdims))


@given(values_, counts_)
def test_bessels_correction_divides_by_one_less(values, counts):
    rows = [v[c].astype(np.float64) for v, c in zip(values, counts, strict=True)]
    want = [np.var(row, ddof=1) if row.size > 1 else 0.0 for row in rows]
    close(masked.variance(values, counts, ddof=1), want, atol=1e-5)


def test_a_large_offset_costs_the_variance_no_digits():
    values = np.array([4096.0, 4096.5, 4097.0], np.float32)
    close(masked.variance(values, np.ones(3, bool)), np.var([0.0, 0.5, 1.0]))


def test_no_gradient_reaches_what_is_absent():
    values = jnp.array([1.0, 2.0, jnp.nan])
    counts = jnp.array([True, True, False])
    for reduce in (masked.total, masked.mean, masked.variance):
        gradient = jax.grad(reduce)(values, counts)
        assert np.isfinite(gradient).all()
        assert gradient[2] == 0


def test_reduced_precision_is_summed_in_float32():
    ones = jnp.ones(1000, jnp.bfloat16)
    assert masked.total(ones, ones > 0) == 1000


@pytest.mark.first(1)
@pytest.mark.parametrize("chunk", [0, 3, 8])
def test_a_rank_counts_the_tokens_that_are_likelier(chunk):
    """Equally likely ones share the best rank; padding of a chunk is no token."""
    random = np.random.default_rng(0)
    features = random.integers(-3, 0, (2, 5, 3)).astype(np.float32)
    head = random.integers(0, 3, (7, 3)).astype(np.float32)  # logits below those of 0
    head[4] = head[2]
    tokens = random.integers(0, 7, (2, 5)).astype(np.int32)
    logits = features @ head.T
    own = np.take_along_axis(logits, tokens[..., None], -1)
    got = masked.rank(*map(jnp.asarray, (features, head, tokens)), chunk=chunk)
    assert got.dtype == jnp.int32
    np.testing.assert_array_equal(got, 1 + (logits > own).sum(-1))
