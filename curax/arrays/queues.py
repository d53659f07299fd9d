"""Rows that wait to be drawn, and the shards of a mesh that they are dealt to."""

import math
from functools import partial

import flax.struct
import jax
import jax.numpy as jnp

from curax.arrays.lines import dealt
from curax.arrays.sharding import shard_rows, shards
from curax.types import DrawRows


@flax.struct.dataclass(kw_only=True)
class Queue:
    """The rows to draw that exist, group by group, and the shards that draw them.

    A group is the rows of a context; with a stopping rule, of a prompt. The groups are
    cut into blocks, gcd(C, D) of them for D shards of slots. A block is that of one
    shard if D divides C; else some shards have it together, and take its groups' rows
    in turn.
    """

    row: jax.Array  # [N] int32, the rows in order; those that do not exist are last
    first: jax.Array  # [C] int32, the place of the first row of each group
    wanted: jax.Array  # [C] int32, rows of each group
    shards: int = flax.struct.field(pytree_node=False)  # D, 1 without a mesh

    @classmethod
    def of(cls, rows: DrawRows, group: jax.Array, groups: int) -> "Queue":
        """Queue of rows, from the group in [0, C) of each row, `[N]`."""
        order = (rows.member, rows.prompt, group, ~rows.exists)
        asked = rows.exists.astype(jnp.int32)
        wanted = jnp.zeros(groups, jnp.int32).at[group].add(asked)
        return cls(
            row=jnp.lexsort(order).astype(jnp.int32),
            first=jnp.cumsum(wanted) - wanted,
            wanted=wanted,
            shards=shards("rows"),
        )

    @property
    def blocks(self) -> int:
        """Number of blocks of groups."""
        return math.gcd(self.first.shape[0], self.shards)

    @property
    def sharing(self) -> int:
        """Number of shards that draw the rows of one block."""
        return self.shards // self.blocks

    def at(self, place: jax.Array) -> jax.Array:
        """Rows at these places of the queue, int32; past its end, the last one."""
        return self.row[jnp.minimum(place, self.row.shape[0] - 1)]

    def dealt(self) -> jax.Array:
        """`[C]` int32 order of groups, in which blocks have about equally many rows.

        Those that want most are dealt first, to the blocks in turn, there and back.
        """
        if self.blocks == 1:
            return jnp.arange(self.first.shape[0], dtype=jnp.int32)
        return dealt(self.wanted, self.blocks).reshape(-1)

    def of_shards(self, of_groups: jax.Array) -> jax.Array:
        """`[D, C / blocks]` values of each shard's block, from those by group `[C]`."""
        blocks = of_groups.reshape(self.blocks, 1, -1)
        return jnp.repeat(blocks, self.sharing, 1).reshape(self.shards, -1)

    @property
    def turn(self) -> jax.Array:
        """`[D, C / blocks]` int32 in [0, sharing): first row a shard draws of a group.

        From there on it takes every so many. Another shard of the block is the first to
        take one of the next group.
        """
        shard = jnp.arange(self.shards, dtype=jnp.int32)[:, None]
        group = jnp.arange(self.first.shape[0] // self.blocks, dtype=jnp.int32)[None]
        return (shard + group) % self.sharing

    def shares(self, of_groups: jax.Array) -> jax.Array:
        """`[D, C / blocks]` int32: rows a shard draws, of the first `[C]` of groups."""
        whole = self.of_shards(of_groups) - self.turn + self.sharing - 1
        return whole // self.sharing

    def taken(
        self, opened: jax.Array, started: jax.Array, idle: jax.Array
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """The next open rows of each shard's queue, for its idle slots.

        Args:
            opened: `[C]` int32, rows of each group that may be drawn.
            started: `[D, C / blocks]` int32, rows that each shard has drawn of them.
            idle: `[K]` bool.

        Returns:
            `[K]` int32 rows; `[K]` bool, the slots that take one; what has started.
        """
        pending = self.shares(opened) - started
        upto = jnp.cumsum(pending, -1)
        idle = idle.reshape(self.shards, -1)  # [D, K / D]
        ticket = jnp.cumsum(idle, -1, dtype=jnp.int32) - 1
        fresh = idle & (ticket < upto[:, -1:])
        own = jax.vmap(partial(jnp.searchsorted, side="right"))(upto, ticket)
        own = jnp.minimum(own.astype(jnp.int32), pending.shape[-1] - 1)
        pick = partial(jnp.take_along_axis, indices=own, axis=-1)
        number = pick(started - (upto - pending)) + ticket
        number = number * self.sharing + pick(self.turn)
        place = pick(self.of_shards(self.first)) + number
        started = jax.vmap(lambda started, own, fresh: started.at[own].add(fresh))(
            started, own, fresh.astype(jnp.int32)
        )
        return self.at(place.reshape(-1)), shard_rows(fresh.reshape(-1)), started
