"""Attention of decoding slots: to a prefix that several share, and to own tokens.

The softmax over both is merged from two parts, in float32. With l = q k^T / sqrt(d), m
and z = sum_s e^(l_s - m) the maximum and sum over the keys seen of a part, and M the
maximum over both:

    o = sum_parts sum_s p_s v_s
    p_s = e^(l_s - m) f,  f = e^(m - M) / sum_parts e^(m - M) z

As in the trainer it is p that is rounded to the precision of v, but where blocks of
keys are read (`softmax.by_blocks`): there it is e^(l_s - m).

Slots that read one prefix are tiles of rows: their queries are multiplied with its keys
as one matrix, so that keys and values are held, and read, once for a tile.
"""

import dataclasses
import math
from collections.abc import Callable
from functools import partial
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from curax.arrays.sharding import active, constrain, mesh_axes, platform
from curax.models import lanes, softmax
from curax.types import SharedCache

MOST = 32  # slots of a tile
COPIED = 2**20  # bytes of keys that a CPU copies from prefixes at a time: cached


@flax.struct.dataclass(kw_only=True)
class Tiles:
    """Slots of each shard grouped into at most t tiles, of m slots with one prefix."""

    prefix: jax.Array  # [D, t] int32, prefix of each tile
    slot: jax.Array  # [D, t, m] int32, slots of each tile, filled up with 0
    place: jax.Array  # [D, K / D] int32, index in [t m] of each slot; any if idle
    count: jax.Array  # [D] int32, number of tiles in use


@flax.struct.dataclass(kw_only=True)
class Layer:
    """Keys and values of a layer, as decoding slots read them."""

    own: Any  # k, v [K, kv_heads, W, d], or those of `lanes`, `softmax.Transposed`
    prefix: Any  # k, v [D, C, kv_heads, P, d]
    tiles: Tiles
    pool: Any = None  # k, v [D, pages, kv_heads, B, d]; None: there are no pages
    at: jax.Array | None = None  # [K, M] int32, pages of each slot

    def written(self, k: jax.Array, v: jax.Array, column: Any) -> Any:
        """The slots' own with key and value of a token, `[K, kv_heads, 1, d]`."""
        keys, values = self.own
        k, v = (lanes.in_lanes(x, values.shape[-1] // x.shape[-1]) for x in (k, v))
        put = jax.lax.dynamic_update_slice
        at = (0, 0, column, 0)
        if not isinstance(self.own, softmax.Transposed):
            return put(keys, k, at), put(values, v, at)
        k, of_key = jnp.swapaxes(k, 2, 3), (0, 0, 0, column)
        if values.ndim == 5:
            block, place = column // values.shape[-2], column % values.shape[-2]
            k, v = k[:, None], v[:, None]
            of_key, at = (0, block, 0, 0, place), (0, block, 0, place, 0)
        return softmax.Transposed(put(keys, k, of_key), put(values, v, at))

    def attend(
        self, q: jax.Array, own: Any, seen: jax.Array, kv_heads: int
    ) -> jax.Array:
        """Attention of one query per slot.

        Args:
            q: `[K, heads, 1, d]`.
            own: as the field, this token's key and value included.
            seen: `[K, P + W + M B]` bool, keys of the prefix and own ones that are
                visible.
            kv_heads: heads of keys, before they lie side by side.

        Returns:
            `[K, heads, 1, d]`.
        """
        heads, (held, _, wide) = q.shape[1], own[1].shape[-3:]  # [..., held, W, wide]
        side_by_side = wide // q.shape[-1]
        q = lanes.filled(q, heads // kv_heads * held * side_by_side)
        by_keys = mesh_axes("heads", held)
        axes = by_keys or mesh_axes("heads", heads)

        def run(q, own, others: tuple[Any, Any], seen, tiles, at):
            if axes and not by_keys:  # copies of all heads of keys, of which it takes
                first = jax.lax.axis_index(axes) * q.shape[1]
                of = (first + jnp.arange(q.shape[1])) // (heads // kv_heads)
                own, others = jax.tree.map(lambda x: heads_of(x, of), (own, others))
            return _attend(q, own, *others, seen, tiles, at)

        args = q, own, (self.prefix, self.pool), seen, self.tiles, self.at
        if not active():
            return run(*args)[:, :heads]
        rows, cut = mesh_axes("rows") or None, axes or None
        keys = by_keys or None
        out = jax.shard_map(
            run,
            in_specs=(
                PartitionSpec(rows, cut),
                PartitionSpec(rows, *(None,) * (own[0].ndim - 4), keys),
                PartitionSpec(rows, None, keys),
                PartitionSpec(rows),
                PartitionSpec(rows),
                PartitionSpec(rows),
            ),
            out_specs=PartitionSpec(rows, cut),
            check_vma=False,
        )(*args)
        return out[:, :heads]


def layers(cache: SharedCache) -> tuple[Layer, ...]:
    """The cache of each layer, with the tiles that all layers have in common."""
    common: dict[str, Any] = {"tiles": tiles_of(cache)}
    pools: Any = (None,) * len(cache.own)
    if cache.pages:
        pools, common["at"] = cache.pages.pool, cache.pages.at
    return tuple(
        Layer(own=own, prefix=prefix, pool=pool, **common)
        for own, prefix, pool in zip(cache.own, cache.prefix, pools, strict=True)
    )


def tiles_of(cache: SharedCache) -> Tiles:
    """Tiles of a cache, of as many slots m as are expected to share a prefix."""
    shards, contexts = jax.tree.leaves(cache.prefix)[0].shape[:2]
    context = constrain(cache.context.reshape(shards, -1), ("rows", None))
    size = min(cache.group, context.shape[1], MOST)
    tiles = jax.vmap(partial(_tiles, contexts=contexts, size=size))(context)
    tiles = jax.tree.map(
        lambda x: constrain(x, ("rows", *(None,) * (x.ndim - 1))), tiles
    )
    return tiles.replace(count=_batch_max(tiles.count))


def _tiles(context: jax.Array, *, contexts: int, size: int) -> Tiles:
    """Tiles of a shard, of `size` slots, from the prefix of each slot `[K]`."""
    slots = context.shape[0]
    most = (slots + min(contexts, slots) * (size - 1)) // size
    at = jnp.arange(slots, dtype=jnp.int32)
    order = jnp.argsort(context).astype(jnp.int32)
    ordered = context[order]
    first = jnp.concatenate([jnp.ones(1, bool), ordered[1:] != ordered[:-1]])
    rank = at - jax.lax.cummax(jnp.where(first, at, 0))
    works = ordered < contexts
    begins = works & (rank % size == 0)
    tile = jnp.cumsum(begins, dtype=jnp.int32) - 1
    place = jnp.where(works, tile * size + rank % size, most * size)  # out: dropped
    slot = jnp.zeros(most * size, jnp.int32).at[place].set(order, mode="drop")
    last = most * size - 1
    return Tiles(
        prefix=jnp.zeros(most, jnp.int32)
        .at[jnp.where(begins, tile, most)]
        .set(ordered, mode="drop"),
        slot=slot.reshape(most, size),
        place=jnp.zeros(slots, jnp.int32).at[order].set(jnp.minimum(place, last)),
        count=jnp.sum(begins, dtype=jnp.int32),
    )


@jax.custom_batching.custom_vmap
def _batch_max(count: jax.Array) -> jax.Array:
    """Tile counts; under vmap over samplers their maximum, so that loops agree."""
    return count


@_batch_max.def_vmap
def _(axis_size: int, in_batched: list[bool], count: jax.Array):
    return (jnp.max(count, 0) if in_batched[0] else count), False


def heads_of(x: jax.Array, of: jax.Array) -> jax.Array:
    """Keys or values of the given heads; unchanged where there is only one head."""
    return x if x.shape[-3] == 1 else jnp.take(x, of, -3)


def _attend(q, own, prefix, pool, seen, tiles: Tiles, at) -> jax.Array:
    """`Layer.attend` for the slots and heads of one device."""
    (k, v), width = own, prefix[0].shape[-2]
    if isinstance(own, softmax.Transposed) and v.ndim == 4:
        k = jnp.swapaxes(k, 2, 3)
    columns = k.shape[2] if pool is not None else seen.shape[1] - width
    theirs, ours, before = jnp.split(seen, (width, width + columns), 1)
    grouped = lanes.grouped(q, v)
    tiles = jax.tree.map(lambda x: x[0], tiles)
    shared = Shared(k=prefix[0][0], v=prefix[1][0], tiles=tiles)
    by = softmax.by_blocks(columns, v.shape[-1], v.dtype.itemsize)
    kernel = pool is not None or by is softmax.of_kernel
    read = softmax.of_blocks if v.ndim == 5 else softmax.of_kernel if kernel else None
    if read:
        here, top, total = read(grouped, k, v, ours)
    else:
        here, top, total = softmax.exponentials(grouped, k, ours)
    if kernel:
        there, high, sum_ = shared.by_kernel(grouped, theirs)
    else:
        there, high, sum_ = shared.exponentials(grouped, theirs)
    high = jnp.where(sum_ > 0, high, softmax.LOWEST)  # an idle slot may be in no tile
    if pool is not None:
        of_pages = softmax.of_kernel(grouped, pool[0][0], pool[1][0], before, at)
        there, high, sum_ = softmax.joined((there, high, sum_), of_pages)
    most = jnp.maximum(top, high)
    low, up = jnp.exp(top - most), jnp.exp(high - most)
    total = total * low + sum_ * up
    factor, other = low / total, up / total
    out = here * factor[..., None] if read else softmax.mixed(here, factor, v)
    out += there * other[..., None] if kernel else shared.mixed(there, other)
    out = out.astype(v.dtype)
    if kernel:  # or XLA reshapes both parts, in float32
        out = jax.lax.optimization_barrier(out)
    return lanes.of_heads(out, q.shape[-1])


@dataclasses.dataclass(frozen=True, kw_only=True)
class Shared:
    """Prefixes of one device, and the tiles of slots that read them.

    Without the kernel a CPU computes a few tiles at a time and skips empty ones; other
    devices compute all at once, as a loop inside a decoding step costs them more.
    """

    k: jax.Array  # [C, kv_heads, P, d]
    v: jax.Array  # [C, kv_heads, P, d]
    tiles: Tiles  # without the axis D

    def by_kernel(self, q: jax.Array, seen: jax.Array) -> softmax.Partial:
        """`softmax.kernel` by slot: weighted values, m and z."""
        tiles = self.tiles
        used = jnp.arange(tiles.prefix.size) < tiles.count
        mask = seen[tiles.slot[:, 0]] & used[:, None]
        found = softmax.kernel(q, self.k, self.v, mask, tiles.prefix, tiles.slot)
        out, log_sum = (x.reshape(-1, *x.shape[2:])[tiles.place] for x in found)
        any_ = mask.any(-1)[tiles.place // tiles.slot.shape[1]]
        return softmax.written(out, log_sum, any_)

    def exponentials(self, q: jax.Array, seen: jax.Array) -> softmax.Partial:
        """`softmax.exponentials` by tile, `[t, kv_heads, m R, P]`; m and z by slot."""
        rows, mask = self.of_tiles(q), seen[self.tiles.slot[:, 0]]

        def part(cut):
            keys = self.k[cut(self.tiles.prefix)]
            return softmax.exponentials(cut(rows), keys, cut(mask))

        e, top, total = self.over_tiles(part)
        return e, self.of_slots(top), self.of_slots(total)

    def mixed(self, e: jax.Array, factor: jax.Array) -> jax.Array:
        """`softmax.mixed` by slot, from exponentials by tile and factors by slot."""
        factors = self.of_tiles(factor)

        def part(cut):
            return softmax.mixed(cut(e), cut(factors), self.v[cut(self.tiles.prefix)])

        return self.of_slots(self.over_tiles(part))

    def of_tiles(self, x: jax.Array) -> jax.Array:
        """Values by tile, `[t, kv_heads, m R, ...]`, from those by slot, `[K, ...]`."""
        return softmax.in_rows(x, self.tiles.slot)

    def of_slots(self, x: jax.Array) -> jax.Array:
        """Values by slot, from those by tile: the inverse of `of_tiles`."""
        each = softmax.of_each(x, self.tiles.slot.shape[1])
        return each.reshape(-1, *each.shape[2:])[self.tiles.place]

    def over_tiles(self, part: Callable[[Callable[..., jax.Array]], Any]) -> Any:
        """Output of `part` for all tiles; on a CPU for a few tiles at a time.

        Empty tiles may be left out, with zeros in their place.
        """
        most = self.tiles.slot.shape[0]
        number = COPIED // (math.prod(self.k.shape[1:]) * self.k.dtype.itemsize)
        number = max(1, number)
        if platform() != "cpu" or number >= most:
            return part(lambda x: x)

        def some(i):
            return part(
                partial(
                    jax.lax.dynamic_slice_in_dim,
                    start_index=i * number,
                    slice_size=number,
                )
            )

        def body(i, whole):
            put = partial(
                jax.lax.dynamic_update_slice_in_dim, start_index=i * number, axis=0
            )
            return jax.tree.map(put, whole, some(i))

        shapes = jax.eval_shape(some, 0)
        none = jax.tree.map(lambda x: jnp.zeros((most, *x.shape[1:]), x.dtype), shapes)
        return jax.lax.fori_loop(0, -(-self.tiles.count // number), body, none)
