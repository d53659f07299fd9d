"""Functions of rows, called on some of them at a time: micro-batches, or packed lines.

Sums add up and outputs per token come back in the order of the rows, so that the result
does not depend on how many rows, or which, are worked on together.
"""

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from curax.arrays.lines import Line, Lines, Packing, dealt, picked
from curax.arrays.sharding import on_shards, over_copies, shard_rows, shards


def split(tree: Any, count: int) -> Any:
    """Leaves `[M, ...]` reshaped to `count` micro-batches, `[n, M / n, ...]`.

    Micro-batch i is made of rows i, i + n, ...: each device's rows lie in all of them.
    """
    return jax.tree.map(
        lambda leaf: jnp.swapaxes(
            leaf.reshape(leaf.shape[0] // count, count, *leaf.shape[1:]), 0, 1
        ),
        tree,
    )


def join(tree: Any) -> Any:
    """Inverse of `split`."""
    return jax.tree.map(
        lambda leaf: jnp.swapaxes(leaf, 0, 1).reshape(-1, *leaf.shape[2:]), tree
    )


def cuts(steps: int, buckets: int) -> list[int]:
    """Lengths to which micro-batches are cut: T, its half, its quarter, ...; rising."""
    return sorted({-(-steps // 2**k) for k in range(buckets)})


def ends(mask: jax.Array) -> jax.Array:
    """`[M]` int32: length of each row up to the last True of its mask `[M, T]`."""
    place = jnp.arange(1, mask.shape[-1] + 1, dtype=jnp.int32)
    return jnp.max(jnp.where(mask, place, 0), -1)


def over_micro_batches(
    function: Callable[[Any], tuple[Any, Any]],
    rows: Any,
    mask: jax.Array,
    *,
    count: int,
    buckets: int = 1,
) -> tuple[Any, Any]:
    """Sums and per-token outputs of a function, called on each micro-batch.

    With several length buckets, rows are sorted by length, so that those of one
    micro-batch are about equally long, and it is cut behind its longest. Each length
    is a branch of the program: more to compile, less to compute.

    Args:
        function: from rows, `[m, t]` and `[m]`, to a tree that is to be summed and a
            tree of `[m, t]`; of tokens outside the mask it may say anything finite.
        rows: tree of `[M, T, ...]` and `[M]`.
        mask: `[M, T]` bool.
        count: micro-batches.
        buckets: lengths to which they are cut.

    Returns:
        Sums in float32, so that their order hardly matters; the `[M, T]` tree, 0 where
        rows were cut.
    """
    function = jax.jit(function, inline=True)  # traced once, for shapes and the loop
    steps = mask.shape[-1]
    lengths = cuts(steps, buckets)
    last, order = ends(mask), None
    if len(lengths) > 1:
        # `split` deals rows out like cards; here each gets like lengths.
        order = jnp.argsort(last).reshape(count, -1).T.reshape(-1)
        rows, last = jax.tree.map(lambda x: jnp.take(x, order, 0), (rows, last))
    rows, last = jax.tree.map(shard_rows, (rows, last))

    def cut(rows, length):
        short = jax.tree.map(lambda x: x[:, :length] if x.ndim > 1 else x, rows)
        total, own = function(short)
        behind = ((0, 0), (0, steps - length))
        return total, jax.tree.map(lambda x: jnp.pad(x, behind), own)

    def add(total, micro_batch):
        rows, last = micro_batch
        longest = over_copies(jax.lax.pmax, jnp.max(last))
        which = jnp.searchsorted(jnp.asarray(lengths, jnp.int32), longest)
        branches = [partial(cut, length=length) for length in lengths]
        new, own = jax.lax.switch(which, branches, rows)
        return added(total, new), own

    rows = split((rows, last), count)
    like, _ = jax.eval_shape(function, jax.tree.map(lambda leaf: leaf[0], rows[0]))
    total, own = jax.lax.scan(add, zeros(like), rows)
    own = join(own)
    if order is not None:
        own = jax.tree.map(lambda x: x[jnp.argsort(order)], own)
    return total, own


def zeros(like: Any) -> Any:
    """Sums of nothing, in float32, of a tree like this."""
    return jax.tree.map(lambda x: jnp.zeros(x.shape, jnp.float32), like)


def added(total: Any, new: Any) -> Any:
    """Sums with those of another micro-batch."""
    return jax.tree.map(lambda a, b: a + b.astype(a.dtype), total, new)


def over_lines(
    function: Callable[[Any, Any, Line], tuple[Any, Any]],
    total: Any,
    rows: Any,
    mask: jax.Array,
    how: Lines,
) -> tuple[Any, Any]:
    """A total and per-token outputs of a function, called on each line of packed rows.

    On a mesh a line of each shard of the rows at a time, as often as the shard with
    most lines needs.

    Args:
        function: of the total so far, rows `[D R, T, ...]` and `[D R]`, R of each of D
            shards, and their lines, to the total with these and a tree as that of
            `over_micro_batches`.
        total: of no rows.
        rows: as `over_micro_batches`.
        mask: as `over_micro_batches`.
        how: sizes of lines; several of a shard at a time count as those of more shards.
            At home, rows are K of each shard, and stay on it.

    Returns:
        The total of all; the `[M, T]` tree.
    """
    function = jax.jit(function, inline=True)  # traced once, for shapes and the loop
    (count, steps), last = mask.shape, ends(mask)
    each = min(how.together, -(-count // shards("rows")))  # heaps of a shard
    # Those of all rows, or of each shard's own.
    wholes, each = (shards("rows"), each) if how.at_home else (1, each * shards("rows"))

    of_each = on_shards if how.at_home else lambda call, *rows: call(*rows)
    order = of_each(partial(dealt, shards=each), last)  # [D each, ...]

    def deal(x):  # [M, ...] -> [D, M / D, ...]
        if each == 1:
            return shard_rows(x.reshape(wholes, -1, *x.shape[1:]))
        return shard_rows(of_each(picked, x, order))

    last, rows = jax.tree.map(deal, (last, rows))
    of = partial(Packing.of, steps=steps, tokens=how.tokens, rows=how.rows)
    packing = jax.vmap(of)(last)

    def read(number, total):
        which, line = jax.vmap(lambda packing: packing.at(number))(packing)
        line = dataclasses.replace(line, at_home=how.at_home)
        own = jax.tree.map(lambda x: join_shards(jax.vmap(picked)(x, which)), rows)
        total, own = function(total, own, line)
        return which, total, own

    def next_line(number, state):
        which, total, part = read(number, state[0])

        def put(whole, part):
            part = part.reshape(*which.shape, steps)
            return jax.vmap(lambda x, at, y: x.at[at].set(y, mode="drop"))(
                whole, which, part
            )

        return total, jax.tree.map(put, state[1], part)

    _, _, own = jax.eval_shape(read, jnp.int32(0), total)
    own = jax.tree.map(
        lambda x: shard_rows(jnp.zeros((*last.shape, steps), x.dtype)), own
    )
    most = over_copies(jax.lax.pmax, jnp.max(packing.lines))
    total, own = jax.lax.fori_loop(0, most, next_line, (total, own))
    if each > 1:

        def back(x, order):
            return x[jnp.argsort(order.reshape(-1))[: count // wholes]]

        return total, jax.tree.map(lambda x: of_each(back, join_shards(x), order), own)
    return total, jax.tree.map(join_shards, own)


def join_shards(x: jax.Array) -> jax.Array:
    """`[D R, ...]` rows sharded over D shards, from `[D, R, ...]`."""
    return shard_rows(x.reshape(-1, *x.shape[2:]))
