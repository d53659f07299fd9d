"""Pages: keys and values of decoding slots, held as far as completions are long.

A ring has columns for the longest completion, and where memory bounds the number of
slots most of them are empty. With pages a slot has one block of columns, which all
slots write together, as they write rings. When it is full, at the same token for all,
each slot puts its block into a page of a pool. So a token writes at one index, pages
are taken once in a block of tokens, and as many slots work as pages allow.

A row that no page is left for is preempted: it gives its own back and begins anew when
there is room. Rows with the fewest tokens are first, so that the longest always goes
on. The keys of a row are functions of its tokens' places, so it draws what it had
drawn, up to rounding. From then on no more rows work at a time than went on, and one
more after each block.
"""

import dataclasses
from functools import partial
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp

from curax.arrays.sharding import constrain


@flax.struct.dataclass(kw_only=True)
class Pages:
    """Pages of B columns that K slots on D shards have taken of a pool, M at most."""

    pool: Any  # per layer k, v [D, pages, kv_heads, B, d]
    at: jax.Array  # [K, M] int32, pages of each slot in the pool of its shard, in order
    held: jax.Array  # [K] int32, how many of these it has
    waits: jax.Array  # [K] bool, the slot's row begins anew when there is room
    limit: jax.Array  # [D] int32, rows that work at a time

    @classmethod
    def of(cls, cache: Any, *, slots: int, pages: int, size: int, most: int) -> "Pages":
        """Pages that nobody has taken.

        Args:
            cache: of prefixes, per layer k, v `[D, C, kv_heads, P, d]`.
            slots: K.
            pages: of each shard.
            size: B.
            most: M.
        """
        shards = jax.tree.leaves(cache)[0].shape[0]

        def leaf(x):
            pool = jnp.zeros((shards, pages, x.shape[2], size, x.shape[4]), x.dtype)
            return constrain(pool, ("rows", None, "heads", None, None))

        return cls(
            pool=jax.tree.map(leaf, cache),
            at=jnp.zeros((slots, most), jnp.int32),
            held=jnp.zeros(slots, jnp.int32),
            waits=jnp.zeros(slots, bool),
            limit=jnp.full(shards, slots // shards, jnp.int32),
        )

    @property
    def shape(self) -> tuple[int, int, int]:
        """(D, pages of a shard, B)."""
        shards, pages, _, size, _ = jax.tree.leaves(self.pool)[0].shape
        return shards, pages, size

    def seen(self, count: jax.Array, time: jax.Array) -> jax.Array:
        """Columns with tokens of each slot's row: those of its block, then of pages.

        Args:
            count: `[K]` int32, tokens of the row, that of this step included.
            time: `[]` int32, steps before this one.

        Returns:
            `[K, B + M B]` bool.
        """
        size = self.shape[2]
        count = count[:, None]
        age = (time % size - jnp.arange(size, dtype=jnp.int32))[None]
        block = (age >= 0) & (age < count)
        end = size * self.held[:, None]
        place = jnp.arange(size * self.at.shape[1], dtype=jnp.int32)[None]
        first = end - jnp.maximum(count - time % size - 1, 0)
        return jnp.concatenate([block, (place >= first) & (place < end)], -1)

    def room(self, active: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Idle slots that may begin: up to the limit, and with a page for each block.

        Returns:
            `[K]` bool, those that wait and may begin anew; `[K]` bool, those that may
            take other rows.
        """
        shards, pages, _ = self.shape
        of = partial(jnp.reshape, shape=(shards, -1))
        taken = jnp.sum(of(jnp.where(active, self.held + 1, 0)), -1)
        more = jnp.minimum(pages - taken, self.limit - jnp.sum(of(active), -1))
        waits, idle = of(self.waits), of(~active & ~self.waits)
        upto = jnp.cumsum(waits, -1, dtype=jnp.int32)
        again = waits & (upto <= more[:, None])
        upto = upto[:, -1:] + jnp.cumsum(idle, -1, dtype=jnp.int32)
        return again.reshape(-1), (idle & (upto <= more[:, None])).reshape(-1)

    def begun(self, new: jax.Array) -> "Pages":
        """Pages when slots `[K]` have begun rows."""
        held, waits = jnp.where(new, 0, self.held), self.waits & ~new
        return dataclasses.replace(self, held=held, waits=waits)

    def flushed(
        self, blocks: Any, count: jax.Array, active: jax.Array
    ) -> tuple["Pages", jax.Array]:
        """Pages when all blocks are full, and the rows for which there are none.

        Args:
            blocks: per layer k, v `[K, kv_heads, B, d]`.
            count: `[K]` int32, tokens of each slot's row.
            active: `[K]` bool, slots with rows that go on.

        Returns:
            The pages, with those blocks put into free ones that hold tokens of rows
            that go on. `[K]` bool, slots that wait from now on.
        """
        shards, pages, _ = self.shape
        of = partial(jax.tree.map, lambda x: x.reshape(shards, -1, *x.shape[1:]))
        at, held, count, active = of((self.at, self.held, count, active))
        held = jnp.where(active, held, 0)
        needs = active & (count > 0)
        cost = jnp.where(needs, held + 1, 0)
        stays = jax.vmap(partial(_stays, pages=pages))(count, cost)
        waits = needs & ~stays
        went_on = jnp.sum(active & ~waits, -1, dtype=jnp.int32)
        more = jnp.minimum(self.limit + 1, active.shape[1])
        held, needs = jnp.where(stays, held, 0), needs & stays
        page = jax.vmap(partial(_free, pages=pages))(at, held, needs)
        last = jnp.arange(at.shape[-1], dtype=jnp.int32)[None, None] == held[..., None]
        at = jnp.where(last & needs[..., None], page[..., None], at)

        def put(pool, new):
            new = constrain(new, ("rows", None, "heads", None, None))
            return jax.vmap(lambda x, page, new: x.at[page].set(new, mode="drop"))(
                pool, page, new
            )

        flat = partial(jax.tree.map, lambda x: x.reshape(-1, *x.shape[2:]))
        new = dataclasses.replace(
            self,
            pool=jax.tree.map(put, self.pool, of(blocks)),
            at=flat(at),
            held=flat(jnp.where(needs, held + 1, held)),
            waits=self.waits | flat(waits),
            limit=jnp.where(waits.any(-1), went_on, more),
        )
        return new, flat(waits)


def _stays(count: jax.Array, cost: jax.Array, *, pages: int) -> jax.Array:
    """`[K]` bool: rows that pages are left for, if the longest take theirs first."""
    order = jnp.argsort(-count)
    fits = jnp.cumsum(cost[order]) <= pages
    return jnp.zeros_like(fits).at[order].set(fits) | (cost == 0)


def _free(at: jax.Array, held: jax.Array, needs: jax.Array, *, pages: int) -> jax.Array:
    """`[K]` int32: for each slot that needs one a page that is nobody's, or `pages`."""
    place = jnp.arange(at.shape[-1], dtype=jnp.int32)[None]
    theirs = jnp.where(place < held[:, None], at, pages)
    taken = jnp.zeros(pages, bool).at[theirs.reshape(-1)].set(True, mode="drop")
    (free,) = jnp.nonzero(~taken, size=pages, fill_value=pages)
    rank = jnp.cumsum(needs, dtype=jnp.int32) - 1
    return jnp.where(needs, free[rank].astype(jnp.int32), pages)
