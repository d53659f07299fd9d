"""Conversion between rows `[N, ...]` of tokens and grids `[B, G, ...]` of outcomes.

Only `curax.step` calls these. Rows are found by (prompt, member), never by position.
"""

from typing import Any

import jax
import jax.numpy as jnp

from curax.types import Rollouts


def index(rollouts: Rollouts, shape: tuple[int, int]) -> jax.Array:
    """`[B, G]` int32: the row of each (prompt, member); N where there is none."""
    rows = rollouts.prompt.shape[0]
    prompt = jnp.where(rollouts.exists, rollouts.prompt, shape[0])  # out: dropped
    row = jnp.arange(rows, dtype=jnp.int32)
    empty = jnp.full(shape, rows, jnp.int32)
    return empty.at[prompt, rollouts.member].set(row, mode="drop")


def grid(values: jax.Array, index: jax.Array, *, fill: Any) -> jax.Array:
    """Rows `[N, ...]` as a grid `[B, G, ...]`; `fill` where there is no row."""
    return values.at[index].get(mode="fill", fill_value=fill)


def last_of_each(ids: jax.Array, *, size: int) -> jax.Array:
    """`[B]` bool: the last place of each id, so that a write to ids has one value.

    Args:
        ids: `[B]` int32; those from `size` on are nobody's and never the last.
        size: number of ids, static.
    """
    place = jnp.arange(ids.shape[0], dtype=jnp.int32)
    last = jnp.full(size, -1, jnp.int32).at[ids].max(place, mode="drop")
    return last.at[ids].get(mode="fill", fill_value=-1) == place


def compact(keep: jax.Array, *, rows: int) -> tuple[jax.Array, jax.Array]:
    """Flat grid indices of the kept completions, in grid order.

    Args:
        keep: `[B, G]` bool, at most `rows` of them True.
        rows: M, static.

    Returns:
        `[M]` int32 indices in [0, B G); `[M]` bool, False on rows without a completion.
    """
    order = jnp.argsort(~keep.reshape(-1), stable=True)[:rows].astype(jnp.int32)
    return order, keep.reshape(-1)[order]


def append_after(
    tokens: jax.Array, length: jax.Array, reference: jax.Array, mask: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Each row cut to its length, with a reference appended.

    Args:
        tokens: `[N, T]` int32, rows.
        length: `[N]` int32 in [0, T], tokens of a row that are kept.
        reference: `[N, Y]` int32, tokens to append, right-padded.
        mask: `[N, Y]` bool, True on tokens of the reference.

    Returns:
        `[N, T + Y]` int32 tokens; `[N, T + Y]` bool, True on appended tokens;
        `[N, Y]` int32, column of each reference token.
    """
    width, count = tokens.shape[-1], reference.shape[-1]
    column = jnp.arange(width + count, dtype=jnp.int32)[None]
    place = column - length[:, None]
    inside = jnp.clip(place, 0, count - 1)
    follows = jnp.take_along_axis(reference, inside, -1)
    there = (place >= 0) & (place < count) & jnp.take_along_axis(mask, inside, -1)
    padded = jnp.pad(tokens, ((0, 0), (0, count)))
    columns = length[:, None] + jnp.arange(count, dtype=jnp.int32)[None]
    return jnp.where(place >= 0, follows, padded), there, columns
