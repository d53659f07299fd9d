"""Attention of rows that are packed into lines of tokens, tile by tile.

A line is cut into tiles of B tokens; a row fills whole tiles, one after the other. Each
query sees the context of its row, whose keys and values exist once for all rows that
share it, and its own row up to itself:

    o = (sum_P e^s_p v_p + sum_R e^s_r v_r) / (sum_P e^s_p + sum_R e^s_r)

with s = q k / sqrt(d), the keys p of the context and r of the row.

One loop goes over tiles of the contexts, another over those of the own row, back from
the query's; sums and maximum are kept in float32. Both loops end at the longest
context or row present, and neither scores nor a mask of the whole line ever exist.

On a mesh each device has the line of its shard and its heads. Where contexts lie with
their rows nothing passes between devices; else each reads the contexts of all shards,
one layer's at a time.
"""

import dataclasses
from functools import partial
from typing import Any, NamedTuple

import flax.struct
import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from curax.arrays.lines import Visible
from curax.arrays.sharding import active, mesh_axes
from curax.models import attention
from curax.models.decoding import heads_of

ROWS = 8  # per line at most, for a kernel
LOW = -1e30  # score of a key that is not visible


def attend(
    q: jax.Array, k: jax.Array, v: jax.Array, prefix: Any, lines: Visible
) -> jax.Array:
    """Attention in packed lines, one line per shard: to the context and the own row.

    Args:
        q: `[D, heads, U B, d]`.
        k: `[D, kv_heads, U B, d]`.
        v: `[D, kv_heads, U B, d]`.
        prefix: keys and values of the contexts, `[C, kv_heads, P, d]`.
        lines: what the tiles are.

    Returns:
        `[D, heads, U B, d]`; 0 where nothing is visible.
    """
    heads, kv_heads = q.shape[1], k.shape[1]
    by_keys = mesh_axes("heads", kv_heads)
    axes = by_keys or mesh_axes("heads", heads)

    by_kernel = attention.choose(q.shape[2], q.shape[3], q.dtype) is attention.splash

    def run(q, k, v, prefix, lines):
        if axes and not by_keys:  # copies of all heads of keys, of which it takes
            first = jax.lax.axis_index(axes) * q.shape[1]
            of = (first + jnp.arange(q.shape[1])) // (heads // kv_heads)
            k, v, *prefix = (heads_of(x, of) for x in (k, v, *prefix))
        if lines.at_home:
            own = lines.contexts % prefix[0].shape[0]
            lines = dataclasses.replace(lines, contexts=own)
        return (segments if by_kernel else _attend_line)(q, k, v, prefix, lines)

    args = q, k, v, prefix, lines
    if not active():
        return run(*args)
    rows, keys = mesh_axes("rows") or None, by_keys or None
    query = PartitionSpec(rows, axes or None)
    own, line = PartitionSpec(rows, keys), PartitionSpec(rows)
    shared = rows if lines.at_home else None
    return jax.shard_map(
        run,
        in_specs=(
            *(query, own, own, PartitionSpec(shared, keys)),
            dataclasses.replace(
                lines, row=line, place=line, contexts=line, seen=PartitionSpec(shared)
            ),
        ),
        out_specs=query,
        check_vma=False,
    )(*args)


def segments(
    q: jax.Array, k: jax.Array, v: jax.Array, prefix: Any, lines: Visible
) -> jax.Array:
    """`attend` on one device by a TPU kernel with segments.

    The keys of a line are those of its rows' contexts, R P of them, and its own. Row r
    and its context are segment r + 1; keys that no query sees are in segment 0.

    Args:
        q: as `attend`.
        k: as `attend`.
        v: as `attend`.
        prefix: as `attend`.
        lines: as `attend`.
    """
    count, rows = lines.contexts.shape

    def joined(shared, own):
        shared = jnp.swapaxes(shared[lines.contexts], 1, 2)
        shared = shared.reshape(*own.shape[:2], -1, own.shape[-1])
        return jnp.concatenate([shared, own], 2)

    number = jnp.where(lines.row < rows, lines.row + 1, 0)
    ours = jnp.repeat(number, lines.tile, 1)
    first = (lines.place == 0)[..., None] & (jnp.arange(lines.tile) == 0)[None, None]
    own = jnp.where(first.reshape(ours.shape), 0, ours)
    each = jnp.arange(1, rows + 1, dtype=jnp.int32)[None, :, None]
    theirs = jnp.where(lines.seen[lines.contexts], each, 0).reshape(count, -1)
    theirs = jnp.concatenate([theirs, own], 1)
    keys, values = joined(prefix[0], k), joined(prefix[1], v)
    return attention.segmented(q, keys, values, ours, theirs)


@flax.struct.dataclass
class _Line:
    """Layout of one line; fields as in `Visible`."""

    place: jax.Array  # [U]
    context: jax.Array  # [U]
    seen: jax.Array  # [C, P]
    tile: int = flax.struct.field(pytree_node=False)


def _attend_line(q, k, v, prefix, lines: Visible) -> jax.Array:
    """`attend` for one line and the heads of one device, without a kernel."""
    kv_heads, tile = k.shape[1], lines.tile
    group = q.shape[1] // kv_heads

    def tiles(x):  # [1, heads, U B, d] -> [U, kv_heads, heads / kv_heads B, d]
        x = x.reshape(kv_heads, -1, x.shape[2] // tile, tile, x.shape[-1])
        return x.transpose(2, 0, 1, 3, 4).reshape(x.shape[2], kv_heads, -1, x.shape[-1])

    line = _Line(lines.place[0], lines.context[0], lines.seen, tile)
    out = _attend(tiles(q), tiles(k), tiles(v), *prefix, line)
    out = out.reshape(-1, kv_heads, group, tile, q.shape[-1])
    return out.transpose(1, 2, 0, 3, 4).reshape(q.shape)


class _Loops(NamedTuple):
    """Key tiles of both loops: at each turn one key tile for each tile of the line."""

    line: _Line
    group: int  # query heads of a head of keys

    @property
    def first(self) -> jax.Array:
        """`[]` int32, index of the first context tile with a visible token."""
        some = jnp.any(self.line.seen, 0)
        return (jnp.argmax(some) // self.line.tile).astype(jnp.int32)

    @property
    def shift(self) -> int:
        """Number of padding tokens before the contexts, which makes tiles whole."""
        return -self.line.seen.shape[1] % self.line.tile

    def whole(self, x: jax.Array, axis: int) -> jax.Array:
        """Contexts padded in front to whole tiles."""
        pad = [(0, 0)] * x.ndim
        pad[axis] = (self.shift, 0)
        return jnp.pad(x, pad)

    def of_context(self, turn: Any, *keys: jax.Array) -> Any:
        """Keys `[U, kv_heads, B, d]` of context tile `turn`, and their visibility."""

        def cut(x, axis):
            size = self.line.tile
            x = jax.lax.dynamic_slice_in_dim(x, turn * size, size, axis)
            return x[self.line.context]

        seen = cut(self.whole(self.line.seen, 1), 1)[:, None, None]
        return *(cut(x, 2) for x in keys), seen

    def of_row(self, back: Any, *keys: jax.Array) -> Any:
        """Keys of the tile `back` places before each tile, and their visibility."""
        count = self.line.place.shape[0]
        keys = tuple(
            jax.lax.dynamic_slice_in_dim(x, count - back, count, 0) for x in keys
        )
        token = jnp.arange(self.line.tile, dtype=jnp.int32)[None, None]
        first = self.line.place[:, None, None] * self.line.tile
        key = first - back * self.line.tile + token  # negative: of another row
        query = first + jnp.swapaxes(token, 1, 2)
        seen = (key > 0) & (key <= query)
        return *keys, jnp.tile(seen, (1, self.group, 1))[:, None]


def _pad_front(x: jax.Array) -> jax.Array:
    """Tiles of a line preceded by as many empty ones, for `_Loops.of_row`."""
    return jnp.concatenate([jnp.zeros_like(x), x])


def _scores(q, k, seen):
    scores = jnp.einsum("ukqd,uksd->ukqs", q, k, preferred_element_type=jnp.float32)
    return jnp.where(seen, scores * q.shape[-1] ** -0.5, LOW)


@jax.custom_vjp
def _attend(q, k, v, prefix_k, prefix_v, line):
    """`attend` on tiles `[U, kv_heads, ., d]`, with its own backward pass."""
    return _forward(q, k, v, prefix_k, prefix_v, line)[0]


def _forward(q, k, v, prefix_k, prefix_v, line):
    loops = _Loops(line, q.shape[2] // line.tile)
    prefix = loops.whole(prefix_k, 2), loops.whole(prefix_v, 2)
    own = _pad_front(k), _pad_front(v)

    def add(state, k, v, seen):
        top, total, out = state
        scores = _scores(q, k, seen)
        new = jnp.maximum(top, jnp.max(scores, -1))
        shares = jnp.where(seen, jnp.exp(scores - new[..., None]), 0.0)
        old = jnp.exp(top - new)
        more = jnp.einsum(
            "ukqs,uksd->ukqd",
            shares.astype(v.dtype),
            v,
            preferred_element_type=jnp.float32,
        )
        total = total * old + jnp.sum(shares, -1)
        return new, total, out * old[..., None] + more

    state = (
        jnp.full(q.shape[:-1], LOW, jnp.float32),
        jnp.zeros(q.shape[:-1], jnp.float32),
        jnp.zeros(q.shape, jnp.float32),
    )
    state = jax.lax.fori_loop(
        loops.first,
        prefix[0].shape[2] // line.tile,
        lambda turn, state: add(state, *loops.of_context(turn, *prefix)),
        state,
    )
    top, total, out = jax.lax.fori_loop(
        0,
        jnp.max(line.place) + 1,
        lambda back, state: add(state, *loops.of_row(back, *own)),
        state,
    )
    out = (out / jnp.maximum(total, 1e-30)[..., None]).astype(q.dtype)
    level = top + jnp.log(jnp.maximum(total, 1e-30))
    return out, (q, k, v, prefix_k, prefix_v, line, out, level)


def _backward(saved, slope):
    q, k, v, prefix_k, prefix_v, line, out, level = saved
    loops = _Loops(line, q.shape[2] // line.tile)
    prefix = loops.whole(prefix_k, 2), loops.whole(prefix_v, 2)
    own = _pad_front(k), _pad_front(v)
    mean = jnp.sum(out.astype(jnp.float32) * slope.astype(jnp.float32), -1)
    product = partial(jnp.einsum, preferred_element_type=jnp.float32)

    def pull(k, v, seen):
        """Contribution of a tile of keys to the gradients of q, k and v."""
        shares = jnp.where(seen, jnp.exp(_scores(q, k, seen) - level[..., None]), 0.0)
        rise = product("ukqd,uksd->ukqs", slope, v) - mean[..., None]
        rise = (shares * rise * q.shape[-1] ** -0.5).astype(q.dtype)
        return (
            product("ukqs,uksd->ukqd", rise, k),
            product("ukqs,ukqd->uksd", rise, q),
            product("ukqs,ukqd->uksd", shares.astype(q.dtype), slope),
        )

    def context(turn, state):
        queries, *sums = state
        more, *parts = pull(*loops.of_context(turn, *prefix))

        def put(total, part):
            part = (
                jnp.zeros((total.shape[0], *part.shape[1:])).at[line.context].add(part)
            )
            return jax.lax.dynamic_update_slice_in_dim(total, part, turn * line.tile, 2)

        return queries + more, *map(put, sums, parts)

    def row(back, state):
        queries, *sums = state
        more, *parts = pull(*loops.of_row(back, *own))
        count = q.shape[0]

        def put(total, part):
            old = jax.lax.dynamic_slice_in_dim(total, count - back, count, 0)
            return jax.lax.dynamic_update_slice_in_dim(
                total, old + part, count - back, 0
            )

        return queries + more, *map(put, sums, parts)

    def zeros(x):
        return jnp.zeros(x.shape, jnp.float32)

    queries, *of_context = jax.lax.fori_loop(
        loops.first,
        prefix[0].shape[2] // line.tile,
        context,
        (zeros(q), *map(zeros, prefix)),
    )
    queries, *of_row = jax.lax.fori_loop(
        0, jnp.max(line.place) + 1, row, (queries, *map(zeros, own))
    )
    of_row = (x[q.shape[0] :].astype(k.dtype) for x in of_row)
    of_context = (x[:, :, loops.shift :].astype(prefix_k.dtype) for x in of_context)
    return queries.astype(q.dtype), *of_row, *of_context, None


_attend.defvjp(_forward, _backward)
