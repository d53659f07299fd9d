"""The softmax of decoding: one query per slot and head, over some of its keys.

With l = q k^T / sqrt(d), m and z = sum_s e^(l_s - m) the maximum and sum over these
keys, `decoding` joins partial results by m and z. Where there are many columns, only
blocks of them that hold a token are read, by a loop on a CPU and kernels elsewhere.
There e^(l_s - m) is rounded to the precision of v, with the m of a block or so far.

Where heads of keys lie side by side (`lanes`), kv_heads is the number of such rows, of
D = p d entries, and results have entries of all p heads; elsewhere D = d.
"""

import math
from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from curax.arrays.sharding import active, ampere, cores, platform
from curax.models.lanes import scaling, spread

LEAST = 256  # fewest columns that are read in blocks
TRANSPOSED = 64  # fewest of which a CPU's keys lie transposed
PIECE = 2**19  # bytes of keys that a CPU reads at a time: by several threads, cached
SOME = 4  # blocks, at least, where these are no more than the like part of all
BLOCK = 128  # columns of a CPU's block at most, of a page; entries of a TPU's lanes
FETCHES = 4  # pieces of half as many columns that a step of a TPU's kernel reads
TILE = 64  # columns of a block of a GPU, and most queries of a program there
PROGRAMS = 1024  # of a GPU, so that all its processors have some
VMEM = 2**23  # bytes of buffers of a TPU's kernel
ROOM = 256  # most bytes of a head there, or shared memory would not do
TRITON = "jax.experimental.pallas.triton"  # to be removed, says JAX 0.12
LOWEST = float(jnp.finfo(jnp.float32).min)
TINY = 1e-30  # sum where no key is visible, in place of 0

Partial = tuple[jax.Array, jax.Array, jax.Array]


def exponentials(q: jax.Array, k: jax.Array, seen: jax.Array) -> Partial:
    """Exponentials, maximum and sum of a softmax over one part of the keys.

    Args:
        q: `[N, kv_heads, R, d]`, queries of the heads of a group, of one or more slots.
        k: `[N, kv_heads, S, D]`.
        seen: `[N, S]` bool, the visible keys.

    Returns:
        e^(l_s - m) `[N, kv_heads, R, S]`, m and z `[N, kv_heads, R]`, float32. Where no
        key is visible m is the lowest float32.
    """
    wide = spread(q, k.shape[-1])
    scores = _scores(wide, k, seen[:, None, None], scaling(q))
    top = jnp.max(scores, -1)
    e = jnp.exp(scores - top[..., None])
    return e, top, jnp.sum(e, -1)


def mixed(e: jax.Array, factor: jax.Array, v: jax.Array) -> jax.Array:
    """sum_s p_s v_s `[N, kv_heads, R, D]` float32, p rounded to the precision of v."""
    return _product((e * factor[..., None]).astype(v.dtype), v)


def _product(e: jax.Array, v: jax.Array) -> jax.Array:
    return jnp.einsum("...rs,...sd->...rd", e, v, preferred_element_type=jnp.float32)


def _scores(q: jax.Array, k: jax.Array, seen: jax.Array, scale: float) -> jax.Array:
    scores = jnp.einsum("...rd,...sd->...rs", q, k, preferred_element_type=jnp.float32)
    return jnp.where(seen, scores * scale, LOWEST)


def by_blocks(width: int, d: int, item: int) -> Callable[..., Partial] | None:
    """How blocks of so many columns are read, each as it lies; None: all are read.

    Heads, or those that lie side by side, have d entries of `item` bytes.

    Not where the compiler places slots, as those of seeds over a mesh, nor by a kernel
    for which a head is too small or large: on a TPU it fills lanes, on a GPU, from
    Ampere on and with a JAX that has Triton, it has a power of two entries, from 16
    to `ROOM` bytes.
    """
    placed = jax.sharding.get_abstract_mesh().empty or active()
    fits = {
        "gpu": ampere()
        and find_spec(TRITON)
        and d >= 16
        and d & (d - 1) == 0
        and d * item <= ROOM,
        "tpu": d % BLOCK == 0,
    }.get(platform(), True)
    return BY_PLATFORM.get(platform()) if width >= LEAST and placed and fits else None


def piece(kv_heads: int, d: int, item: int) -> int:
    """Blocks of keys of about `PIECE` bytes, or some; `item` bytes per entry."""
    return max(SOME, PIECE // (BLOCK * kv_heads * d * item))


class Transposed(NamedTuple):
    """Slots' own keys, transposed, and values of a layer on a CPU.

    A product of several queries with rows of D would transpose all keys first.
    """

    k: jax.Array  # [K, kv_heads, D, W] or, as `of_blocks` takes it, [K, b, ..., B]
    v: jax.Array  # [K, kv_heads, W, D] or [K, b, kv_heads, B, D]


def transposes(columns: int, queries: int, item: int) -> bool:
    """Whether keys of so many columns are `Transposed` where all of these are read.

    Where they serve several queries each, and an entry has four bytes: bfloat16 is
    written and read faster in rows.
    """
    many = TRANSPOSED <= columns < LEAST and queries > 1
    return platform() == "cpu" and many and item == 4


def transposed(cache: Any, columns: int) -> tuple[Transposed, ...]:
    """`Transposed` keys and values without a token, in blocks from `LEAST` columns on.

    Args:
        cache: per layer k and v, `[K, kv_heads, 0, D]`.
        columns: W.
    """
    blocks, size = (), columns
    if columns >= LEAST:
        size = -(-columns // -(-columns // BLOCK))  # about as many in each
        blocks = (-(-columns // size),)

    def leaf(x, *last):
        slots, kv_heads, _, _ = x.shape
        return jnp.zeros((slots, *blocks, kv_heads, *last), x.dtype)

    return tuple(
        Transposed(leaf(k, k.shape[-1], size), leaf(v, size, v.shape[-1]))
        for k, v in cache
    )


@jax.custom_batching.sequential_vmap
def of_blocks(q: jax.Array, k: jax.Array, v: jax.Array, seen: jax.Array) -> Partial:
    """Weighted values, maximum and sum of a softmax, over blocks that hold tokens.

    Blocks are those of `Transposed`. As many as are a piece are read at a time, of
    whichever slots, and the last piece is filled up.

    Args:
        q: as `exponentials`.
        k: `[N, b, kv_heads, D, B]`, b blocks of B columns.
        v: `[N, b, kv_heads, B, D]`.
        seen: as `exponentials`, S at most b B.

    Returns:
        sum_s e^(l_s - m) v_s `[N, kv_heads, R, D]`, m and z `[N, kv_heads, R]`, all
        float32. Where no key is visible: 0, the lowest float32, and not quite 0.
    """
    (_, most, kv_heads, size, d), scale = v.shape, scaling(q)
    q = spread(q, d)
    mask, some = blocks_seen(seen, size)
    each = min(piece(kv_heads, d, v.dtype.itemsize), max(1, some.size // SOME))
    (found,) = jnp.nonzero(some.reshape(-1), size=some.size + each, fill_value=0)

    def read(i, state):
        which = jax.lax.dynamic_slice_in_dim(found, i * each, each)
        slot, block = which // most, which % most
        visible = jnp.repeat(mask[slot, block], kv_heads, 0)[:, None]
        asked, keys, values = (  # heads of blocks; of 1 head XLA would turn the keys
            x.reshape(-1, *x.shape[2:])
            for x in (q[slot], k[slot, block], v[slot, block])
        )
        scores = _scores(asked, jnp.swapaxes(keys, 1, 2), visible, scale)
        top = jnp.max(scores, -1, keepdims=True)
        e = jnp.exp(scores - top)  # each block that is found has a key that is seen
        out = _product(e.astype(v.dtype), values)

        def put(old, new):
            new = new.reshape(each, kv_heads, *new.shape[1:])
            return jax.lax.dynamic_update_slice_in_dim(old, new, i * each, 0)

        return jax.tree.map(put, state, (out, top, jnp.sum(e, -1, keepdims=True)))

    none = jnp.zeros((len(found), *q.shape[1:]), jnp.float32)
    pieces = -(-jnp.sum(some, dtype=jnp.int32) // each)
    state = jax.lax.fori_loop(0, pieces, read, (none, none[..., :1], none[..., :1]))
    place = jnp.cumsum(some.reshape(-1), dtype=jnp.int32).reshape(some.shape) - 1
    out, top, total = (x[place] for x in state)  # [N, b, ...]
    some = some[..., None, None, None]
    high = jnp.max(jnp.where(some, top, LOWEST), 1)
    share = jnp.where(some, jnp.exp(top - high[:, None]), 0.0)
    total = jnp.maximum(jnp.sum(share * total, 1), TINY)
    return jnp.sum(share * out, 1), high[..., 0], total[..., 0]


def added(state: Partial, q, k, v, mask: jax.Array, scale: float) -> Partial:
    """A part with more keys: those of a block, of which the mask is visible.

    Of the state m and z have an axis of size 1 behind; q as of `spread`, l = q k^T
    scale.
    """
    out, top, total = state
    scores = _scores(q, k, mask, scale)
    new = jnp.maximum(top, jnp.max(scores, -1, keepdims=True))
    e = jnp.where(mask, jnp.exp(scores - new), 0.0)
    old = jnp.exp(top - new)
    more = _product(e.astype(v.dtype), v)
    return out * old + more, new, total * old + jnp.sum(e, -1, keepdims=True)


def joined(one: Partial, other: Partial) -> Partial:
    """Both parts as one: weighted values, maximum and sum of a softmax over both."""
    (out, top, total), (more, high, sum_) = one, other
    most = jnp.maximum(top, high)
    low, up = jnp.exp(top - most), jnp.exp(high - most)
    out = out * low[..., None] + more * up[..., None]
    return out, most, total * low + sum_ * up


def of_kernel(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    seen: jax.Array,
    source: jax.Array | None = None,
) -> Partial:
    """A part by `kernel`; slots read their own, or pages if `source` is given."""
    own = jnp.arange(q.shape[0], dtype=jnp.int32)
    source = own if source is None else source
    out, log_sum = kernel(q, k, v, seen, source, own[:, None])
    return written(out[:, 0], log_sum[:, 0], seen.any(-1))


def kernel(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    seen: jax.Array,
    source: jax.Array,
    slot: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    """A part by a Pallas kernel of the platform, which others interpret.

    Row n has the queries of `slot[n, :]`. It reads the keys and values of `source[n]`,
    or, one behind the other, the pages `source[n, :]`, and of these the blocks of
    columns in which it sees a key.

    Args:
        q: `[K, kv_heads, R, d]`.
        k: `[M, kv_heads, S, D]`; pages: `[M, kv_heads, B, D]`.
        v: as k.
        seen: `[N, S]` bool.
        source: `[N]` or `[N, S / B]` int32.
        slot: `[N, m]` int32.

    Returns:
        sum_s p_s v_s `[N, m, kv_heads, R, D]`, p the softmax over these keys, and its
        m + log z `[N, m, kv_heads, R, 1]`, float32; anything where no key is visible.
        To drop the last axis is a copy on a TPU, of 1 KiB for each.
    """
    of_platform = triton if platform() == "gpu" else mosaic
    return of_platform(q, k, v, seen, source, slot)


def written(out: jax.Array, log_sum: jax.Array, any_: jax.Array) -> Partial:
    """What `kernel` gives as a part with z = 1; `any_` `[N]`: whether a key is seen."""
    any_ = any_[:, None, None]
    return (
        jnp.where(any_[..., None], out, 0.0),
        jnp.where(any_, log_sum[..., 0], LOWEST),
        jnp.where(any_, 1.0, TINY),
    )


def in_rows(x: jax.Array, slot: jax.Array) -> jax.Array:
    """Values of slots `[K, kv_heads, R, ...]` as `[N, kv_heads, m R, ...]`."""
    x = jnp.swapaxes(x[slot], 1, 2)
    return x.reshape(*x.shape[:2], -1, *x.shape[4:])


def of_each(x: jax.Array, slots: int) -> jax.Array:
    """Values of `in_rows` as `[N, m, kv_heads, R, ...]`, m `slots`."""
    return jnp.swapaxes(x.reshape(*x.shape[:2], slots, -1, *x.shape[3:]), 1, 2)


def blocks_seen(seen: jax.Array, size: int) -> tuple[jax.Array, jax.Array]:
    """`seen` `[N, S]` cut to blocks of `size`, filled up: `[N, b, size]`, `[N, b]`."""
    padded = jnp.pad(seen, ((0, 0), (0, -seen.shape[1] % size)))
    blocks = padded.reshape(seen.shape[0], -1, size)
    return blocks, blocks.any(-1)


def fetched(found: jax.Array, some: jax.Array) -> jax.Array:
    """Pieces that lie in the places of a step of `mosaic`, `[steps, FETCHES]` int32.

    Where a step needs none it is the one of the step before, or in front of the first
    that is needed any that the first step needs.

    Args:
        found: `[steps]` int32, blocks of `FETCHES` pieces.
        some: `[steps, FETCHES]` bool, pieces of them in which a key is seen.
    """
    own = found[:, None] * FETCHES + jnp.arange(FETCHES)[None]
    at = jnp.arange(len(found))[:, None]
    last = jax.lax.cummax(jnp.where(some, at, -1))
    before = jnp.take_along_axis(own, jnp.maximum(last, 0), 0)
    return jnp.where(last < 0, own[0, jnp.argmax(some[0])], before)


def scheduled(
    seen: jax.Array, source: jax.Array, each: int
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """Steps of the grid of `mosaic`, one row after the other, and what they fetch.

    Args:
        seen: as `kernel`.
        source: as `kernel`.
        each: pieces of a source.

    Returns:
        Keys that are seen, filled up to whole blocks of `FETCHES` pieces, b of a row,
        `[N, b FETCHES BLOCK / 2]` bool; block of each step, counted over rows,
        `[N b]` int32; their number, at least 1, `[]` int32; and the piece, counted over
        sources, in each place of a step, `[N b, FETCHES]` int32.
    """
    size = BLOCK // 2
    mask, some = blocks_seen(seen, size * FETCHES)
    rows, most = some.shape
    (found,) = jnp.nonzero(some.reshape(-1), size=some.size, fill_value=0)
    found = found.astype(jnp.int32)
    count = jnp.maximum(jnp.sum(some, dtype=jnp.int32), 1)  # one without keys: zeros
    own = fetched(found, mask.reshape(-1, FETCHES, size).any(-1)[found])
    row, piece = own // (most * FETCHES), own % (most * FETCHES)
    source = source[row, piece // each] if source.ndim == 2 else source[row]
    held = source * each + piece % each
    return mask.reshape(rows, -1), found, count, held.astype(jnp.int32)


def heads_at_once(kv_heads: int, slots: int, queries: int, d: int, item: int) -> int:
    """Heads of keys that a step of `mosaic` reads: as many as have room, of a core.

    A buffer's last but one axis is filled up to 8 rows of 4 bytes, its last to `BLOCK`.
    What is read or written has two of them.
    """
    rows, lines = -(-queries // 8) * 8, -(-slots * queries // 8) * 8
    each = 2 * 4 * slots * rows * (2 * d + BLOCK)  # queries, results, their m + log z
    each += 4 * lines * (2 * d + 2 * BLOCK)  # of all slots, m and z apart
    each += 2 * 2 * FETCHES * BLOCK // 2 * d * item
    parts = math.gcd(kv_heads, cores())
    fitting = (n for n in range(parts, kv_heads, parts) if kv_heads % n == 0)
    return next((p for n in fitting if (p := kv_heads // n) * each <= VMEM), 1)


@jax.custom_batching.sequential_vmap
def mosaic(q, k, v, seen, source, slot) -> tuple[jax.Array, jax.Array]:
    """`kernel` for TPUs, whose pages have `BLOCK` columns.

    The grid has a step for each block of `FETCHES` pieces of columns in which a row
    sees a key, one row after the other, and the maps of its operands tell which pieces:
    where no key of one is seen what the step before had in its place stays there, and
    nothing is fetched.
    """
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import tpu as pltpu

    scale = scaling(q)
    q = spread(q, k.shape[-1])
    (_, kv_heads, queries, d), (rows, width) = q.shape, seen.shape
    size = BLOCK // 2
    each = k.shape[2] // size if source.ndim == 2 else -(-width // size)
    mask, found, count, held = scheduled(seen, source, each)
    most = len(found) // rows  # blocks of a row
    ends = (slots := slot.shape[1]) + FETCHES  # of the operands: queries, then keys
    part = heads_at_once(kv_heads, slots, queries, d, k.dtype.itemsize)

    def step(found, held, slot, *refs):
        q, keys, values = refs[:slots], refs[slots:ends], refs[ends : ends + FETCHES]
        mask, mean, log_sum, asked, out, top, total = refs[ends + FETCHES :]
        i, count = pl.program_id(1), pl.num_programs(1)
        row = found[i] // most
        cuts = [slice(n * queries, (n + 1) * queries) for n in range(slots)]

        @pl.when((i == 0) | (found[jnp.maximum(i - 1, 0)] // most != row))
        def _():
            out[...] = jnp.zeros_like(out)
            top[...] = jnp.full_like(top, LOWEST)
            total[...] = jnp.zeros_like(total)
            for cut, x in zip(cuts, q, strict=True):
                asked[:, cut] = x[:, 0].astype(asked.dtype)

        def real(n, x):  # what lies behind the last column may be no number
            if width % size == 0:
                return x
            place = held[i * FETCHES + n] % each * size
            place += jax.lax.broadcasted_iota(jnp.int32, x.shape, 1)
            return jnp.where(place < width, x, jnp.zeros_like(x))

        k = jnp.concatenate([x[0] for x in keys], 1)
        v = jnp.concatenate([real(n, x[0]) for n, x in enumerate(values)], 1)
        state = out[...], top[...], total[...]
        mine = asked[...].astype(q[0].dtype)
        new = added(state, mine, k, v, (mask[0] != 0)[None], scale)
        out[...], top[...], total[...] = new

        following = found[jnp.minimum(i + 1, count - 1)] // most

        @pl.when((i == count - 1) | (following != row))
        def _():
            z = jnp.maximum(total[...], TINY)
            out[...], total[...] = out[...] / z, top[...] + jnp.log(z)
            for n, cut in enumerate(cuts):
                mean[0, n], log_sum[0, n] = out[:, cut], total[:, cut]

    def of_slot(n, i, at, found, held, slot):
        return i, slot[found[at] // most * slots + n], 0, 0

    def of_row(i, at, found, held, slot):
        return found[at] // most, 0, i, 0, 0

    def of_keys(n, i, at, found, held, slot):
        one = held[at * FETCHES + n]
        return one // each, i, one % each, 0

    def of_mask(i, at, found, held, slot):
        return found[at] // most, 0, found[at] % most

    if not (interpret := platform() != "tpu"):  # or all would be copied to VMEM first
        k, v = (pltpu.with_memory_space_constraint(x, pltpu.HBM) for x in (k, v))
    asked = [
        pl.BlockSpec((part, 1, queries, d), partial(of_slot, n)) for n in range(slots)
    ]
    keys = [
        pl.BlockSpec((1, part, size, d), partial(of_keys, n)) for n in range(FETCHES)
    ]
    sizes = d, 1
    return pl.pallas_call(
        step,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=3,
            grid=(kv_heads // part, count),
            in_specs=[
                *asked,
                *keys,
                *keys,
                pl.BlockSpec((1, 1, size * FETCHES), of_mask),
            ],
            out_specs=[
                pl.BlockSpec((1, slots, part, queries, n), of_row) for n in sizes
            ],
            scratch_shapes=[
                pltpu.VMEM((part, slots * queries, n), jnp.float32)
                for n in (d, d, 1, 1)
            ],
        ),
        out_shape=[
            jax.ShapeDtypeStruct((rows, slots, kv_heads, queries, n), jnp.float32)
            for n in sizes
        ],
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "arbitrary")
        ),
        interpret=interpret,
        name="decode_attention",
    )(
        found,
        held.reshape(-1),
        slot.astype(jnp.int32).reshape(-1),
        *[jnp.swapaxes(q, 0, 1)] * slots,
        *[k] * FETCHES,
        *[v] * FETCHES,
        mask.reshape(rows, 1, -1).astype(jnp.int32),
    )


def triton(q, k, v, seen, source, slot) -> tuple[jax.Array, jax.Array]:
    """`kernel` for GPUs, by Triton.

    A program has a row, a head of keys and at most `TILE` of its queries, and reads
    `TILE` columns at a time, from a list of those blocks in which the row sees a key.
    Where that makes few programs several share the list, and their parts are joined.
    """
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import triton as gpu

    scale = scaling(q)
    q = spread(q, k.shape[-1])
    slots, q = slot.shape[1], in_rows(q, slot)
    (rows, kv_heads, queries, d), width = q.shape, seen.shape[1]
    page = k.shape[2] if (paged := source.ndim == 2) else width
    block = math.gcd(TILE, page) if paged else TILE
    mask, some = blocks_seen(seen, block)
    rank = jnp.cumsum(some, -1, dtype=jnp.int32)  # [N, b]
    at = jnp.arange(most := some.shape[1], dtype=jnp.int32)
    nth = some[:, None] & (rank[:, None] == (at[:, None] + 1)[None])  # [N, b, b]
    found = jnp.sum(jnp.where(nth, at[None, None], 0), -1, dtype=jnp.int32)
    count = rank[:, -1]  # [N], the blocks that a row reads, listed in found [N, b]
    size = min(TILE, max(16, 2 ** (queries - 1).bit_length()))
    chunks = -(-queries // size)
    shares = min(-(-PROGRAMS // (rows * kv_heads * chunks)), max(1, most // 2))

    def step(count, found, source, q, k, v, mask, out, top, total):
        row, head, part = (pl.program_id(i) for i in range(3))
        part %= shares
        line = pl.program_id(2) // shares * size + jnp.arange(size)
        line = (line < queries)[:, None]
        mine = gpu.load(q, mask=line, other=0.0)  # [size, d]
        first, last = (count[row] * i // shares for i in (part, part + 1))

        def add(i, state):
            start = found[row, i] * block
            place = pl.ds(start % page, block)
            of = source[row, start // page] if paged else source[row]
            inside = (start + jnp.arange(block) < width)[:, None]
            keys, values = (  # [block, d]
                gpu.load(x.at[of, head, place], mask=inside, other=0.0) for x in (k, v)
            )
            visible = mask[row, pl.ds(start, block)] != 0
            return added(state, mine, keys, values, visible[None], scale)

        none = jnp.zeros((size, 1), jnp.float32)
        state = jnp.zeros((size, d), jnp.float32), none + LOWEST, none
        state = jax.lax.fori_loop(first, last, add, state)
        for into, x in zip((out, top, total), state, strict=True):
            gpu.store(into, x, mask=line)

    def of_lines(row, head, part):
        return row, head, part // shares, 0

    def of_part(row, head, part):
        return part % shares, *of_lines(row, head, part)

    whole, sizes = pl.BlockSpec(), (d, 1, 1)
    out, top, total = pl.pallas_call(
        step,
        grid=(rows, kv_heads, chunks * shares),
        in_specs=[
            *[whole] * 3,
            pl.BlockSpec((None, None, size, d), of_lines),
            *[whole] * 3,
        ],
        out_specs=[pl.BlockSpec((None, None, None, size, n), of_part) for n in sizes],
        out_shape=[
            jax.ShapeDtypeStruct((shares, rows, kv_heads, queries, n), jnp.float32)
            for n in sizes
        ],
        compiler_params=gpu.CompilerParams(num_warps=4, num_stages=2),
        interpret=platform() != "gpu",
        name="decode_attention",
    )(count, found, source, q, k, v, mask.reshape(rows, -1).astype(jnp.int8))
    most = jnp.max(top, 0)
    weight = jnp.exp(top - most[None])
    z = jnp.maximum(jnp.sum(total * weight, 0), TINY)
    out = jnp.sum(out * weight, 0) / z
    return of_each(out, slots), of_each(most + jnp.log(z), slots)


# How columns are read by blocks, on the platforms where they are.
BY_PLATFORM: dict[str, Callable[..., Partial]] = {
    "cpu": of_blocks,
    "gpu": of_kernel,
    "tpu": of_kernel,
}
