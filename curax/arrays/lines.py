"""Rows of unequal length packed into lines of equally many tokens.

A line is U tiles of B tokens. A row fills whole tiles, one after the other, and is
never cut; rows of a line are about equally long. Only lines that hold rows are
computed. On a mesh each shard of the rows has lines of its own, and computes them in
parallel with the other shards; where it can be, it has their contexts too (`Homes`).
"""

from typing import Any, NamedTuple

import flax.struct
import jax
import jax.numpy as jnp

from curax.arrays.sharding import shard_rows

TILE = 32  # tokens; half a tile of each row is padding
AT_HOME = 8  # contexts of a shard at least, or shards differ in tokens by too much
PLACES = 2  # of rows at home at most, for each row; for more, groups are too unequal


@flax.struct.dataclass(kw_only=True)
class Line:
    """Layout of a packed line: U tiles of B tokens, in which at most R rows lie."""

    row: jax.Array  # [U] int32 in [0, R], rows of the line in turn; R: an empty tile
    place: jax.Array  # [U] int32, tiles of the same row before it
    start: jax.Array  # [R] int32, first tile of each row
    count: jax.Array  # [R] int32, its tiles, 0: there is no such row
    tile: int = flax.struct.field(pytree_node=False)  # B
    # Whether contexts of its rows lie on its shard, as of `Homes`.
    at_home: bool = flax.struct.field(pytree_node=False, default=False)

    def tiles(self, rows: jax.Array) -> jax.Array:
        """`[U B, ...]` of each token in the order of the line, from `[R, T, ...]`."""
        count, steps, *own = rows.shape
        more = ((0, 0), (0, -steps % self.tile), *[(0, 0)] * len(own))
        rows = jnp.pad(rows, more).reshape(count, -1, self.tile, *own)
        found = rows[jnp.minimum(self.row, count - 1), self.place]
        return found.reshape(-1, *own)

    def rows(self, tokens: jax.Array, steps: int) -> jax.Array:
        """`[R, T]` per-token values, unpacked from `[U B]`; 0 past the end of a row."""
        tiles = tokens.reshape(-1, self.tile)
        place = jnp.arange(-(-steps // self.tile), dtype=jnp.int32)[None]
        which = jnp.minimum(self.start[:, None] + place, tiles.shape[0] - 1)
        here = (place < self.count[:, None])[..., None]
        found = jnp.where(here, tiles[which], jnp.zeros((), tokens.dtype))
        return found.reshape(which.shape[0], -1)[:, :steps]


@flax.struct.dataclass(kw_only=True)
class Visible:
    """Visibility in packed lines: a query sees keys of its context and of its own row.

    A line of each of D shards. The first token of a row is no key: it stands for the
    last token of the context.
    """

    row: jax.Array  # [D, U] int32 in [0, R], R: an empty tile
    place: jax.Array  # [D, U] int32, tiles of the same row before each tile
    contexts: jax.Array  # [D, R] int32 in [0, C), of the rows
    seen: jax.Array  # [C, P] bool, tokens of the contexts
    tile: int = flax.struct.field(pytree_node=False)  # B
    at_home: bool = flax.struct.field(pytree_node=False, default=False)  # as of `Line`

    @property
    def context(self) -> jax.Array:
        """`[D, U]` int32 in [0, C), context of each tile; arbitrary for empty ones."""
        row = jnp.minimum(self.row, self.contexts.shape[1] - 1)
        return jnp.take_along_axis(self.contexts, row, 1)


class Lines(NamedTuple):
    """Sizes of packed lines."""

    tokens: int  # per line, approximately
    rows: int = 0  # per line at most; 0: as many as fit
    together: int = 1  # lines of each shard that are computed at a time
    at_home: bool = False  # rows are those of each shard in turn, as of `Homes`

    def width(self, steps: int) -> tuple[int, int]:
        """Tiles of a line, and tokens of a tile, for rows of at most T tokens."""
        tile = min(TILE, steps)
        return max(self.tokens // tile, -(-steps // tile)), tile

    def longest(self, steps: int) -> int:
        """Rows of T tokens that a line holds."""
        width, tile = self.width(steps)
        return min(width // -(-steps // tile), self.rows or width)


def picked(x: jax.Array, which: jax.Array) -> jax.Array:
    """Rows of `[M, ...]` by index in [0, M]; M is none, of which all is 0."""
    return x.at[which].get(mode="fill", fill_value=0)


def dealt(length: jax.Array, shards: int) -> jax.Array:
    """`[D, M / D]` int32 indices of each shard's rows, in [0, M); M: no row.

    Rows are dealt by falling length, there and back, so that shards have about as many
    tokens each; M is rounded up to a multiple of D.

    Args:
        length: `[M]` int32, tokens of each row.
        shards: D.
    """
    rows = length.shape[0]
    order = jnp.argsort(-length).astype(jnp.int32)
    order = jnp.pad(order, (0, -rows % shards), constant_values=rows)
    laps = order.reshape(-1, shards)
    back = jnp.arange(laps.shape[0])[:, None] % 2 == 1
    return jnp.where(back, laps[:, ::-1], laps).T


@flax.struct.dataclass(kw_only=True)
class Homes:
    """The shard of each context, on which its rows lie too.

    Each of D shards has C / D contexts. Those with most tokens of rows are dealt first,
    each to the shard that has fewest tokens so far.
    """

    context: jax.Array  # [C] int32, those of shard d are C / D from d C / D on
    row: jax.Array  # [D K] int32 in [0, M], rows of each shard in turn; M: none
    whole: jax.Array  # [] bool, every row with tokens has a place

    @classmethod
    def of(
        cls,
        length: jax.Array,
        context: jax.Array,
        *,
        contexts: int,
        shards: int,
        rows: int,
    ) -> "Homes":
        """Homes of rows.

        Args:
            length: `[M]` int32, tokens of each row; without any it needs no place.
            context: `[M]` int32 in [0, C), of each row.
            contexts: C, a multiple of D.
            shards: D.
            rows: K, places of a shard.
        """
        tokens = jnp.zeros(contexts, jnp.int32).at[context].add(length)

        def deal(state, tokens):
            left, load = state
            shard = jnp.argmin(jnp.where(left > 0, load, jnp.iinfo(load.dtype).max))
            return (left.at[shard].add(-1), load.at[shard].add(tokens)), shard

        first = jnp.argsort(-tokens)
        start = jnp.full(shards, contexts // shards), jnp.zeros(shards, jnp.int32)
        _, shard = jax.lax.scan(deal, start, tokens[first])
        order = first[jnp.argsort(shard)].astype(jnp.int32)
        home = jnp.argsort(order)[context] // (contexts // shards)
        home = jnp.where(length > 0, home, shards)
        sort = jnp.argsort(home).astype(jnp.int32)
        edges = jnp.searchsorted(home[sort], jnp.arange(shards + 1))
        place = edges[:-1, None] + jnp.arange(rows)[None]
        own = sort.at[place].get(mode="fill", fill_value=length.shape[0])
        row = jnp.where(place < edges[1:, None], own, length.shape[0])
        whole = jnp.max(edges[1:] - edges[:-1]) <= rows
        return cls(context=order, row=row.reshape(-1), whole=whole)

    def there(self, tree: Any) -> Any:
        """Leaves `[D K, ...]` of rows `[M, ...]`; of no row: 0."""
        return jax.tree.map(lambda x: picked(x, self.row), tree)

    def moved(
        self, contexts: Any, context: jax.Array, rows: Any
    ) -> tuple[Any, jax.Array, Any]:
        """Contexts `[C, ...]`, that of each row, and rows `[D K, ...]`, as dealt."""
        contexts = jax.tree.map(lambda x: shard_rows(x[self.context]), contexts)
        place = jnp.argsort(self.context).astype(jnp.int32)[context]
        return contexts, *jax.tree.map(shard_rows, self.there((place, rows)))

    def back(self, tree: Any, rows: int) -> Any:
        """Float leaves `[M, ...]` from those of `there`; of rows without a place: 0.

        NaN everywhere where a row with tokens has none, so that nothing is lost unseen.
        """
        count = self.row.shape[0]
        place = jnp.full(rows, count).at[self.row].set(jnp.arange(count), mode="drop")

        def leaf(x: jax.Array) -> jax.Array:
            return jnp.where(
                self.whole, picked(x, place), jnp.asarray(jnp.nan, x.dtype)
            )

        return jax.tree.map(leaf, tree)


def places(rows: int, contexts: int, shards: int, rows_per_context: int) -> int:
    """Places for rows on each shard where all lie with their contexts; 0: they do not.

    They do on a mesh over whose shards the contexts divide, `AT_HOME` or more to each,
    unless places for the most rows of them would be more than `PLACES` times the rows.

    Args:
        rows: M.
        contexts: C.
        shards: of rows.
        rows_per_context: at most; 0: any number.
    """
    each = min(rows, contexts // shards * rows_per_context)
    fits = contexts % shards == 0 and each * shards <= PLACES * rows
    return each if shards > 1 and contexts >= AT_HOME * shards and fits else 0


@flax.struct.dataclass(kw_only=True)
class Packing:
    """Assignment of M rows to L lines."""

    order: jax.Array  # [M] int32, rows by falling length
    count: jax.Array  # [M] int32, tiles of each, in that order
    line: jax.Array  # [M] int32, its line, in that order; rising
    lines: jax.Array  # [] int32, L
    width: int = flax.struct.field(pytree_node=False)  # U
    tile: int = flax.struct.field(pytree_node=False)  # B
    most: int = flax.struct.field(pytree_node=False)  # R, rows that a line may have

    @classmethod
    def of(
        cls, length: jax.Array, *, steps: int, tokens: int, rows: int = 0
    ) -> "Packing":
        """Packing of rows into lines of about `tokens` tokens, at least T.

        Args:
            length: `[M]` int32, tokens of each row; without any it is in no line.
            steps: T, the most that a row may have.
            tokens: of a line.
            rows: of a line at most; 0: as many as there is place for.
        """
        width, tile = Lines(tokens).width(steps)
        order = jnp.argsort(-length).astype(jnp.int32)
        count = -(-length[order] // tile)

        most = min(width, length.shape[0], rows or width)

        def deal(state, count):
            line, used, number = state
            fits = (used + count <= width) & (number < most)
            line = jnp.where(fits, line, line + 1)
            used, number = (jnp.where(fits, x, 0) for x in (used, number))
            return (line, used + count, number + 1), line

        start = (jnp.int32(0), jnp.int32(0), jnp.int32(0))
        _, line = jax.lax.scan(deal, start, count)
        lines = jnp.max(jnp.where(count > 0, line + 1, 0))
        return cls(
            order=order,
            count=count,
            line=line,
            lines=lines,
            width=width,
            tile=tile,
            most=most,
        )

    def at(self, number: Any) -> tuple[jax.Array, Line]:
        """`[R]` int32 indices of a line's rows, in [0, M), M: none; and its layout."""
        rows = self.order.shape[0]
        first = jnp.searchsorted(self.line, number).astype(jnp.int32)
        place = first + jnp.arange(self.most, dtype=jnp.int32)
        inside = jnp.minimum(place, rows - 1)
        here = (place < rows) & (self.line[inside] == number)
        here = here & (self.count[inside] > 0)
        count = jnp.where(here, self.count[inside], 0)
        end = jnp.cumsum(count, dtype=jnp.int32)
        tile = jnp.arange(self.width, dtype=jnp.int32)
        row = jnp.searchsorted(end, tile, side="right").astype(jnp.int32)
        start = end - count
        own = start[jnp.minimum(row, self.most - 1)]
        return jnp.where(here, self.order[inside], rows), Line(
            row=row,
            place=jnp.where(row < self.most, tile - own, 0),
            start=start,
            count=count,
            tile=self.tile,
        )
