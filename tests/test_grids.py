"""Rows to grids and back: by name, never by position."""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import tiny
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from curax import allocate
from curax.arrays import grids

B, G, ROWS = 4, 3, 14
counts_ = hnp.arrays(np.int32, B, elements=st.integers(0, G))
orders = st.permutations(range(ROWS)).map(np.array)
rows_to_draw = jax.jit(partial(allocate.rows_to_draw, rows=ROWS))
index = jax.jit(partial(grids.index, shape=(B, G)))
grid = jax.jit(grids.grid, static_argnames="fill")
compact = jax.jit(grids.compact, static_argnames="rows")
last_of_each = jax.jit(grids.last_of_each, static_argnames="size")


def rollouts(counts, order):
    """Rows in any order; what does not exist has any name."""
    rows = rows_to_draw(counts)
    junk = np.arange(ROWS, dtype=np.int32)
    prompt = jnp.where(rows.exists, rows.prompt, junk % B)
    member = jnp.where(rows.exists, rows.member, junk % G)
    tokens, mask = jnp.zeros((ROWS, 2), jnp.int32), jnp.ones((ROWS, 2), bool)
    names = {"prompt": prompt, "member": member, "exists": rows.exists}
    rows = tiny.rollouts(tokens, mask, **names)
    return jax.tree.map(lambda leaf: leaf[order], rows)


def named(rows):
    """A value per row that tells its prompt and member."""
    return (10 * rows.prompt + rows.member).astype(jnp.float32)


@given(counts_, orders)
def test_a_grid_holds_each_row_in_its_own_place(counts, order):
    rows = rollouts(counts, order)
    where = index(rows)
    assert where.dtype == jnp.int32
    exists = np.arange(G) < counts[:, None]
    np.testing.assert_array_equal(where < ROWS, exists)
    want = 10.0 * np.arange(B)[:, None] + np.arange(G)
    got = grid(named(rows), where, fill=-1.0)
    np.testing.assert_array_equal(got, np.where(exists, want, -1))
    every = jnp.stack([named(rows)] * 2, -1)
    got = grid(every, where, fill=np.nan)
    assert got.shape == (B, G, 2)
    np.testing.assert_array_equal(np.isnan(got[..., 1]), ~exists)
    # And back: each row that exists finds itself.
    flat = np.asarray(where)[exists]
    assert sorted(flat) == np.flatnonzero(rows.exists).tolist()
    np.testing.assert_array_equal(named(rows)[flat], want[exists])


@given(counts_, orders)
def test_the_order_of_rows_does_not_change_a_grid(counts, order):
    straight = rollouts(counts, np.arange(ROWS))
    moved = jax.tree.map(lambda leaf: leaf[order], straight)
    values = np.random.default_rng(0).normal(size=ROWS).astype(np.float32)
    np.testing.assert_array_equal(
        grid(values, index(straight), fill=0.0),
        grid(values[order], index(moved), fill=0.0),
    )


@given(hnp.arrays(np.bool_, (B, G)))
def test_compacting_lists_the_kept_places_in_grid_order(keep):
    place, used = compact(keep, rows=B * G)
    want = np.flatnonzero(keep)
    np.testing.assert_array_equal(place[: len(want)], want)
    np.testing.assert_array_equal(used, np.arange(B * G) < len(want))
    assert place.dtype == jnp.int32
    assert sorted(np.asarray(place)) == list(range(B * G))


@given(hnp.arrays(np.int32, B, elements=st.integers(0, 2)), orders)
def test_what_is_kept_is_compacted_alike_in_any_order_of_rows(counts, order):
    def kept(rows):
        where = index(rows)
        # Two of three slots at most: fewer rows than places.
        place, used = compact((where < ROWS) & (np.arange(G) < 2)[None], rows=2 * B)
        row = jnp.minimum(where.reshape(-1)[place], ROWS - 1)
        return jnp.where(used, named(rows)[row], -1.0)

    straight = kept(rollouts(counts, np.arange(ROWS)))
    np.testing.assert_array_equal(kept(rollouts(counts, order)), straight)
    assert (np.asarray(straight) >= 0).sum() == counts.sum()


def test_a_row_outside_the_grid_is_dropped():
    rows = rollouts(np.int32([1, 1, 1, 1]), np.arange(ROWS))
    outside = dataclasses.replace(
        rows, member=jnp.where(rows.prompt == 2, G, rows.member)
    )
    np.testing.assert_array_equal(
        index(outside)[:, 0] < ROWS, [True, True, False, True]
    )


@given(hnp.arrays(np.int32, 6, elements=st.integers(0, 5)))
def test_the_last_place_of_each_id_is_one_place(ids):
    """And ids from the size on, which a write drops, have none."""
    want = [b < 4 and b not in ids[i + 1 :] for i, b in enumerate(ids)]
    np.testing.assert_array_equal(last_of_each(ids, size=4), want)
