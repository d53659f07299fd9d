"""Grouped-query softmax attention in plain JAX, by cuDNN and by a Pallas TPU kernel.

All implementations take `(q, k, v, seen, *, causal)` and agree up to rounding:

    o = softmax(q k^T / sqrt(d) where visible) v

Causal queries are the last Q of the S tokens: key s is visible to query t if `seen[s]`
and s <= t + S - Q. Otherwise key s is visible to all queries if `seen[s]`.
"""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax.core.spmd import get_logical_axis_rules
from jax.sharding import PartitionSpec

from curax.arrays.sharding import (
    ampere,
    mesh_axes,
    over_seeds,
    platform,
    shards,
)

LANES = 128  # lanes of a TPU, of which blocks of tokens are multiples
GROUPS = 4  # of chunks of causal queries, by the keys that they read
LONG = 2048  # queries from which on neither scores nor mask of all of them are made
LONG_ON_CPU = 511  # there from a row of 512 tokens on, of which the last is not read
CHUNK_ON_CPU = 64  # queries at a time there, whose scores fit into caches


def by_platform(
    q: jax.Array, k: jax.Array, v: jax.Array, seen: jax.Array, *, causal: bool
) -> jax.Array:
    """Attention by the fastest implementation for device and shapes, chosen in tracing.

    The device is that of the mesh in context, which need not be here. Decoding, with a
    single query, is done by `plain`. Arguments and result as `plain`, but where nothing
    is visible to a query, which gets what the implementation says.
    """
    choice = choose(q.shape[-2], q.shape[-1], q.dtype) if causal else plain
    return choice(q, k, v, seen, causal=causal)


def choose(queries: int, d: int, dtype: Any) -> Callable[..., jax.Array]:
    """Attention function for this many causal queries of size d on the platform."""
    kind, half = platform(), dtype in (jnp.bfloat16, jnp.float16)
    # The compiler places rows that are mapped over: no kernel may assume where.
    mapped = not jax.sharding.get_abstract_mesh().empty and not get_logical_axis_rules()
    shaped = queries > 1 and d % 8 == 0 and d <= 128
    if kind == "gpu" and half and shaped and not mapped and ampere():
        return flash_long if queries >= LONG or over_seeds() else flash
    if queries >= LANES and kind == "tpu" and not mapped and d % 64 == 0:
        return splash
    return chunked if queries >= (LONG_ON_CPU if kind == "cpu" else LONG) else plain


def plain(
    q: jax.Array, k: jax.Array, v: jax.Array, seen: jax.Array, *, causal: bool
) -> jax.Array:
    """Attention by matrix products; the query heads of a group are rows of one product.

    Args:
        q: `[N, heads, Q, d]`.
        k: `[N, kv_heads, S, d]`.
        v: `[N, kv_heads, S, d]`.
        seen: `[N, S]` bool, the visible keys.
        causal: whether a query sees keys up to its own alone.

    Returns:
        `[N, heads, Q, d]`. A query without visible keys gets the mean of v.
    """
    return _plain(q, k, v, visible(seen, q.shape[-2], causal=causal))


def _plain(q: jax.Array, k: jax.Array, v: jax.Array, mask: jax.Array) -> jax.Array:
    """`plain` with the keys visible to each query, `[N, Q, S]` or `[N, 1, S]` bool."""
    n, heads, queries, d = q.shape
    kv_heads, length = k.shape[1], k.shape[2]
    q = q.reshape(n, kv_heads, heads // kv_heads * queries, d)
    scores = jnp.einsum("nkqd,nksd->nkqs", q, k, preferred_element_type=jnp.float32)
    scores = scores.reshape(n, kv_heads, -1, queries, length) * d**-0.5
    scores = jnp.where(mask[:, None, None], scores, jnp.finfo(jnp.float32).min)
    shares = jax.nn.softmax(scores, axis=-1).astype(v.dtype)
    shares = shares.reshape(n, kv_heads, -1, length)
    return jnp.einsum("nkqs,nksd->nkqd", shares, v).reshape(n, heads, queries, d)


def chunked(
    q: jax.Array, k: jax.Array, v: jax.Array, seen: jax.Array, *, causal: bool
) -> jax.Array:
    """`plain` in chunks of queries, whose scores the backward pass recomputes.

    Causal chunks are in `GROUPS` groups, each of which reads the keys up to its last
    query alone: of the products with the queries' own keys (1 + 1 / GROUPS) / 2.

    Arguments and result as `plain`, but a causal query without visible keys gets the
    mean of the v that its group has.
    """
    n, heads, queries, d = q.shape
    chunk = CHUNK_ON_CPU if platform() == "cpu" else LANES
    before, chunks = k.shape[-2] - queries, -(-queries // chunk)
    wide = chunks * chunk
    whole = k.astype(jnp.float32), v.astype(jnp.float32)  # gradients are summed so

    def group(starts: jax.Array, parts: jax.Array, keys: int) -> jax.Array:
        own_k, own_v = (x[:, :, :keys] for x in whole)
        key = jnp.arange(keys, dtype=jnp.int32)

        @jax.checkpoint
        def some(part):
            start, q = part
            place = start + jnp.arange(chunk, dtype=jnp.int32) + before
            mask = seen[:, None, :keys]
            if causal:
                mask = mask & (key[None] <= place[:, None])[None]
            return _plain(q, own_k.astype(k.dtype), own_v.astype(v.dtype), mask)

        return jax.lax.map(some, (starts, parts))

    parts = _padded(q, -2, wide).reshape(n, heads, chunks, chunk, d)
    parts = jnp.moveaxis(parts, 2, 0)
    starts = jnp.arange(0, wide, chunk, dtype=jnp.int32)
    size = -(-chunks // GROUPS) if causal else chunks
    out = [
        group(
            starts[at : at + size],
            parts[at : at + size],
            before + min(queries, (at + size) * chunk),
        )
        for at in range(0, chunks, size)
    ]
    out = jnp.moveaxis(jnp.concatenate(out), 0, 2)
    return out.reshape(n, heads, wide, d)[:, :, :queries]


def flash(
    q: jax.Array, k: jax.Array, v: jax.Array, seen: jax.Array, *, causal: bool
) -> jax.Array:
    """Flash attention of cuDNN, for NVIDIA GPUs from Ampere on, in half precision.

    Scores are never stored, but the mask is, `[N, 1, Q, S]` in the precision of `q`.
    cuDNN's rule for vmap knows no such mask, so runs of many seeds take `flash_long`.
    Arguments and result as `plain`.
    """
    queries, length = q.shape[-2], k.shape[-2]
    even = (queries + queries % 2, length + length % 2)  # as its gradient requires

    def run(q, k, v, seen):
        mask = visible(seen, queries, causal=causal)
        mask = jnp.broadcast_to(mask, (q.shape[0], queries, length))
        mask = _padded(_padded(mask, -2, even[0]), -1, even[1])

        def tokens_first(x, size):
            return jnp.swapaxes(_padded(x, -2, size), -2, -3)

        out = jax.nn.dot_product_attention(
            tokens_first(q, even[0]),
            tokens_first(k, even[1]),
            tokens_first(v, even[1]),
            mask=mask[:, None],
            implementation="cudnn",
        )
        return jnp.swapaxes(out, -2, -3)[:, :, :queries]

    return _over_mesh(run, q, k, v, seen)


def flash_long(
    q: jax.Array, k: jax.Array, v: jax.Array, seen: jax.Array, *, causal: bool
) -> jax.Array:
    """`flash` without a mask, for rows whose visible keys are the last ones.

    Each row's first visible key is moved to the front, and queries to the places of
    their own keys, behind padding. So causality and the number of keys tell the kernel
    what is visible; it computes up to 2 S / Q times as many products.

    Args:
        q: `[N, heads, Q, d]`.
        k: `[N, kv_heads, S, d]`.
        v: `[N, kv_heads, S, d]`.
        seen: `[N, S]` bool; visible from the first True on.
        causal: must be True.

    Returns:
        `[N, heads, Q, d]`.
    """
    assert causal
    queries, length = q.shape[-2], k.shape[-2]
    even = length + length % 2  # as its gradient requires

    def run(q, k, v, seen):
        # Under vmap cuDNN needs lengths that are mapped over wherever its queries are.
        none = ((q[:, 0, 0, 0] != q[:, 0, 0, 0]) & False).astype(jnp.int32)
        first = (jnp.argmax(seen, -1).astype(jnp.int32) + none)[:, None]
        place = jnp.arange(even, dtype=jnp.int32)[None]

        def tokens_first(x):
            x = jnp.swapaxes(_padded(x, -2, even), -2, -3)
            return jnp.take_along_axis(x, ((place + first) % even)[..., None, None], 1)

        front = ((0, 0), (0, 0), (length - queries, 0), (0, 0))
        out = jax.nn.dot_product_attention(
            tokens_first(jnp.pad(q, front)),
            tokens_first(k),
            tokens_first(v),
            is_causal=True,
            query_seq_lengths=none + even,
            key_value_seq_lengths=length - first[:, 0],
            implementation="cudnn",
        )
        back = (place[:, length - queries : length] - first) % even
        out = jnp.take_along_axis(out, back[..., None, None], 1)
        return jnp.swapaxes(out, -2, -3)

    return _over_mesh(run, q, k, v, seen)


def splash(
    q: jax.Array, k: jax.Array, v: jax.Array, seen: jax.Array, *, causal: bool
) -> jax.Array:
    """Splash attention for TPUs: no scores, no mask, no work above the diagonal.

    Rows and heads are sharded over the mesh, if there is one. Others interpret the
    kernel, which is slow. Arguments and result as `plain`, but a query without visible
    keys gets a mean of some of v.
    """

    # A query sees the keys of its segment: all are in 1, invisible keys in 0.
    def run(q, k, v, seen):
        ours = jnp.ones((q.shape[0], q.shape[2]), jnp.int32)
        theirs = seen.astype(jnp.int32)
        return segmented(q, k, v, ours, theirs, causal=causal)

    return _over_mesh(run, q, k, v, seen)


def segmented(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    ours: jax.Array,
    theirs: jax.Array,
    *,
    causal: bool = True,
) -> jax.Array:
    """`splash` on one device, in which queries see the keys of their own segment.

    Args:
        q: `[N, heads, Q, d]`.
        k: `[N, kv_heads, S, d]`.
        v: `[N, kv_heads, S, d]`.
        ours: `[N, Q]` int32, segments of the queries.
        theirs: `[N, S]` int32, segments of the keys; what pads them is in 0.
        causal: as `splash`.
    """
    from jax.experimental.pallas.ops.tpu import splash_attention as kernels

    queries, length = q.shape[-2], k.shape[-2]
    rows, columns = _in_lanes(queries), _in_lanes(length)
    shape = (rows, columns)
    mask = (
        kernels.CausalMask(shape, length - queries)
        if causal
        else kernels.FullMask(shape)
    )
    one, other = _block(rows), _block(columns)
    blocks = kernels.BlockSizes(
        block_q=one,
        block_kv=other,
        block_q_dkv=one,
        block_kv_dkv=other,
        block_q_dq=one,
        block_kv_dq=other,
    )

    kernel: Any = kernels.make_splash_mha(
        kernels.MultiHeadMask([mask] * q.shape[1]),
        head_shards=1,
        q_seq_shards=1,
        block_sizes=blocks,
        interpret=platform() != "tpu",
    )
    segments = kernels.SegmentIds(
        jnp.pad(ours, ((0, 0), (0, rows - queries)), mode="edge"),
        _padded(theirs, -1, columns),
    )
    out = jax.vmap(kernel)(
        _padded(q * q.shape[-1] ** -0.5, -2, rows),
        _padded(k, -2, columns),
        _padded(v, -2, columns),
        segments,
    )
    return out[:, :, :queries]


def visible(seen: jax.Array, queries: int, *, causal: bool) -> jax.Array:
    """Keys visible to each query, `[N, Q, S]` bool; `[N, 1, S]` if not causal."""
    if not causal:
        return seen[:, None, :]
    length = seen.shape[-1]
    own = jnp.tril(jnp.ones((queries, length), bool), length - queries)
    return own[None] & seen[:, None, :]


def _over_mesh(run: Any, q: jax.Array, k: jax.Array, v: jax.Array, seen: jax.Array):
    """A kernel run by `shard_map` on the rows and heads of each device."""
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty:
        return run(q, k, v, seen)
    rows = mesh_axes("rows") or None
    # Where they do not divide, every device runs all heads.
    heads, parts = mesh_axes("heads", q.shape[1]), shards("heads", q.shape[1])
    spec = PartitionSpec(rows, heads or None)
    # Too few heads of keys for the mesh axis: devices share copies of them.
    copies = parts // math.gcd(parts, k.shape[1])
    k, v = (jnp.repeat(x, copies, axis=1) for x in (k, v))
    return jax.shard_map(
        run,
        in_specs=(spec, spec, spec, PartitionSpec(rows)),
        out_specs=spec,
        check_vma=False,
    )(q, k, v, seen)


def _padded(x: jax.Array, axis: int, size: int) -> jax.Array:
    """An array with an axis padded to `size` by zeros or False."""
    pad = [(0, 0)] * x.ndim
    pad[axis] = (0, size - x.shape[axis])
    return jnp.pad(x, pad)


def _in_lanes(length: int) -> int:
    return -(-length // LANES) * LANES


def _block(length: int) -> int:
    """The largest block size that divides the number of tokens."""
    return next(size for size in (512, 256, LANES) if length % size == 0)
