"""Heads of keys side by side in the lanes of a TPU, in the cache of decoding.

A TPU has arrays in memory with 128 entries to a row, so heads of 64 would leave half of
it empty, and no kernel could read them. p heads of a row are p d entries, and the last
row is filled up with zeros. A query has its own d among them and zeros for the others,
so one product with the row gives its scores; of the values that it is given it keeps
its own d.
"""

import jax
import jax.numpy as jnp

from curax.arrays.sharding import platform, shards
from curax.models.attention import LANES


def side_by_side(heads: int, kv_heads: int, d: int) -> int:
    """Heads of keys, p, that lie side by side in the cache of decoding.

    As many as fill the lanes of a TPU, which half of a row of 64 entries would leave
    empty; 1 on other platforms, where a mesh would cut them otherwise than the heads of
    queries, and where it cuts heads that do not divide so.
    """
    many = max(1, LANES // d)
    if platform() != "tpu" or many * d != LANES:
        return 1
    cuts = shards("heads", heads)
    whole = cuts == 1 or kv_heads % many == 0
    alike = shards("heads", -(-kv_heads // many)) == cuts
    return many if whole and alike else 1


def in_lanes(x: jax.Array, many: int) -> jax.Array:
    """Keys or values `[N, kv_heads, S, d]` as `[N, ceil(kv_heads / p), S, p d]`."""
    if many == 1:
        return x
    x = filled(x, -(-x.shape[1] // many) * many)
    x = x.reshape(x.shape[0], -1, many, *x.shape[2:])
    return jnp.moveaxis(x, 2, 3).reshape(*x.shape[:2], x.shape[3], -1)


def filled(x: jax.Array, heads: int) -> jax.Array:
    """Heads `[N, h, S, d]` with zeros behind them, `[N, heads, S, d]`."""
    if x.shape[1] == heads:
        return x
    return jnp.pad(x, [(0, 0), (0, heads - x.shape[1]), (0, 0), (0, 0)])


def grouped(q: jax.Array, v: jax.Array) -> jax.Array:
    """Queries `[N, heads, 1, d]` by rows of values `v`, `[N, kv_heads, R, d]`.

    One of each of the heads that lie side by side, then the next of each.
    """
    rows, many = v.shape[-3], v.shape[-1] // q.shape[-1]
    x = q.reshape(q.shape[0], rows, many, -1, q.shape[-1])
    return jnp.swapaxes(x, 2, 3).reshape(q.shape[0], rows, -1, q.shape[-1])


def of_heads(out: jax.Array, d: int) -> jax.Array:
    """Results of `grouped` queries `[N, kv_heads, R, D]` as `[N, heads, 1, d]`."""
    many = out.shape[-1] // d
    each = out.reshape(*out.shape[:2], -1, many, many, d)
    own = jnp.stack([each[:, :, :, i, i] for i in range(many)], 2)
    return own.reshape(out.shape[0], -1, 1, d)


def scaling(q: jax.Array) -> float:
    """1 / sqrt(d) of queries `[..., d]`."""
    return q.shape[-1] ** -0.5


def spread(q: jax.Array, lanes: int) -> jax.Array:
    """Queries of `grouped` `[..., R, d]` as `[..., R, D]`, 0 in the lanes of others."""
    many = lanes // q.shape[-1]
    if many == 1:
        return q
    each = q.reshape(*q.shape[:-2], -1, many, 1, q.shape[-1])
    own = jnp.expand_dims(jnp.eye(many, dtype=q.dtype), (*range(q.ndim - 1), -1))
    return (each * own).reshape(*q.shape[:-1], lanes)
