"""The decoding loop: slots, the rows that they work on, and what a token changes."""

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp

from curax.arrays import cache_sizes
from curax.arrays.cache_sizes import widened
from curax.arrays.masked import somewhere
from curax.arrays.pages import Pages
from curax.arrays.queues import Queue
from curax.arrays.sharding import constrain, shard_rows
from curax.arrays.turns import Episodes, answered, nothing
from curax.settings.config_types import present
from curax.types import Contexts, DrawRows, Model, Rollouts, SharedCache


@flax.struct.dataclass(kw_only=True)
class Prefix:
    """Keys, values and last features of the contexts, shared by all their rows."""

    cache: Any  # per layer k, v [C, kv_heads, P, d]
    last: jax.Array  # [C, D] features of the last token: they predict the first

    def take(self, context: jax.Array) -> "Prefix":
        """The prefix of each row, `[N, ...]`."""
        return jax.tree.map(lambda leaf: leaf[context], self)

    def dealt(self, queue: Queue) -> "Prefix":
        """Prefixes of each shard's block of contexts, `[D, C / blocks, ...]`.

        Shards lie over the data axes of the mesh; heads stay sharded over `tensor`.
        """

        def leaf(x, *names):
            x = x.reshape(queue.blocks, 1, -1, *x.shape[1:])
            x = jnp.broadcast_to(x, (queue.blocks, queue.sharing, *x.shape[2:]))
            x = x.reshape(queue.shards, *x.shape[2:])
            return constrain(x, ("rows", None, *names))

        return Prefix(
            cache=jax.tree.map(lambda x: leaf(x, "heads", None, None), self.cache),
            last=leaf(self.last, None),
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Stopping:
    """Stopping rule of the sampler: when a prompt needs no more completions.

    All rows of a prompt must have one context.

    Attributes:
        met: a rule of `stop`, `(outcome [C, G], exists [C, G]) -> [C] bool`.
        outcome: what the verifier says, `(prompt [K] int32, tokens [K, T] int32,
            mask [K, T] bool) -> [K] float32`, NaN where it cannot be told.
        size: completions that a prompt draws between two tests of the rule.
        most: G.
    """

    met: Callable[[jax.Array, jax.Array], jax.Array]
    outcome: Callable[[jax.Array, jax.Array, jax.Array], jax.Array]
    size: int
    most: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class LoopInputs:
    """Constants of the decoding loop: parameters, prefix, queue, keys and options."""

    model: Model
    params: Any  # as `Model.ready` lays them out
    head: jax.Array  # [V, D]
    contexts: Contexts  # [C, P]
    length: jax.Array  # [C] int32, their tokens
    rows: DrawRows  # [N], its contexts as dealt
    prefix: Prefix  # [D, C / blocks], of the contexts, as dealt
    queue: Queue
    row_key: jax.Array  # [N] PRNG keys
    begun: jax.Array | None  # [N] int32, tokens in front of each row; None: 0
    max_tokens: int  # T
    end: tuple[int, ...]  # tokens that end a completion
    pad: int  # token behind the end
    choose: Callable[..., tuple[jax.Array, ...]]  # (keys, logits) -> as `choice.choose`
    support: jax.ShapeDtypeStruct | None  # of the kept set of a token; None: not noted
    stopping: Stopping | None
    episodes: Episodes | None
    refills: bool  # slots take other rows when theirs have ended
    sharing: int  # slots that are expected to have one context

    def prefix_of(self, row: jax.Array) -> jax.Array:
        """`[K]` int32: index in its shard of each slot's prefix, from its row."""
        return self.rows.context[row] % self.prefix.last.shape[1]

    def first_features(self, row: jax.Array) -> jax.Array:
        """`[K, D]` features that predict the first tokens of rows `[K]`."""
        own = self.prefix_of(row).reshape(self.queue.shards, -1)
        last = jax.vmap(lambda last, own: last[own])(self.prefix.last, own)
        return last.reshape(-1, last.shape[-1])

    def place(self, table: "Table") -> jax.Array:
        """`[K]` int32: the token of its completion at which each slot is."""
        return table.count + (0 if self.begun is None else self.begun[table.row])

    def logits(self, features: jax.Array) -> jax.Array:
        """`[K, V]` float32 logits of features `[K, D]`."""
        return jnp.einsum(
            "nd,vd->nv", features, self.head, preferred_element_type=jnp.float32
        )


@flax.struct.dataclass(kw_only=True)
class Table:
    """State of the decoding loop: K slots, and the completions written so far."""

    time: jax.Array  # [] int32, steps of the loop
    written: jax.Array  # [T] int32, step at which each column was written; at first -T
    opened: jax.Array  # [C] int32, rows of each group that may be drawn
    started: jax.Array  # [D, C / blocks] int32, rows that each shard has drawn of them
    done: jax.Array  # [N] bool, has ended; read by a stopping rule alone
    outcome: jax.Array  # [N] float32, NaN where not graded
    row: jax.Array  # [K] int32, the row that a slot works on
    count: jax.Array  # [K] int32, tokens of that row chosen so far
    active: jax.Array  # [K] bool, False once the queue has run out
    features: jax.Array  # [K, D], they predict the next token
    cache: Any  # per layer k, v [K, kv_heads, W, d], W columns, at most T; or as
    # `Model.ragged` has them
    out: Rollouts  # [N, T]
    episode: Any = None  # Episode, [N]; None: there is no environment
    pages: Pages | None = None  # None: slots have rings


def unwritten(
    rows: DrawRows, steps: int, pad: int, kept: jax.ShapeDtypeStruct | None
) -> Rollouts:
    """Completions of rows before their first token; `kept` as of `supports.shape`."""
    count = rows.prompt.shape[0]
    zeros = jnp.zeros((count, steps), jnp.float32)
    return Rollouts(
        tokens=jnp.full((count, steps), pad, jnp.int32),
        mask=jnp.zeros((count, steps), bool),
        logp_behaviour=zeros,
        logp_policy=zeros,
        entropy=zeros,
        score_sq_norm=zeros,
        finished=jnp.zeros(count, bool),
        prompt=rows.prompt,
        member=rows.member,
        context=rows.context,
        exists=rows.exists,
        support=jnp.zeros((count, steps, *kept.shape), kept.dtype) if kept else None,
    )


def blank(fixed: LoopInputs) -> tuple[Rollouts, Any]:
    """Completions and their episodes before the first token."""
    rows, steps, episode = fixed.rows, fixed.max_tokens, None
    out = unwritten(rows, steps, fixed.pad, fixed.support)
    if fixed.episodes:
        out = dataclasses.replace(out, turns=nothing(rows.prompt.shape[0], steps))
        episode = fixed.episodes.begin(fixed.row_key, rows.prompt)
    return jax.tree.map(shard_rows, out), episode


def initial_table(fixed: LoopInputs, slots: int, room: cache_sizes.Room) -> Table:
    """The table before the first token, whose slots hold the first rows.

    Without refills there is a slot for each row.
    """
    queue, steps, rule = fixed.queue, fixed.max_tokens, fixed.stopping
    count, wanted = fixed.rows.prompt.shape[0], queue.wanted
    out, episode = blank(fixed)
    row = queue.row[:slots] if not fixed.refills else jnp.zeros(slots, jnp.int32)
    table = Table(
        time=jnp.int32(0),
        written=jnp.full(steps, -steps, jnp.int32),
        opened=jnp.minimum(wanted, rule.size) if rule else wanted,
        started=jnp.zeros_like(queue.of_shards(wanted)),
        done=jnp.zeros(count, bool),
        outcome=jnp.full(count, jnp.nan, jnp.float32),
        row=row,
        count=jnp.zeros(slots, jnp.int32),
        active=jnp.arange(slots) < (0 if fixed.refills else jnp.sum(wanted)),
        out=out,
        episode=episode,
        features=fixed.first_features(row),
        cache=jax.tree.map(
            lambda x: jnp.zeros((slots, x.shape[-3], 0, x.shape[-1]), x.dtype),
            fixed.prefix.cache,
        ),
    )
    if room.pages:
        pages = Pages.of(
            fixed.prefix.cache,
            slots=slots,
            pages=room.pages,
            size=room.page,
            most=steps // room.page + 1,
        )
        table = dataclasses.replace(table, pages=pages)
    return refill(fixed, table) if fixed.refills else table


def held(table: Table, cache: Any) -> Table:
    """The table with its slots' own keys and values, which lie where they do."""

    def leaf(x):
        names = "rows", *(None,) * (x.ndim - 4), "heads", None, None
        return constrain(x, names)

    return dataclasses.replace(table, cache=jax.tree.map(leaf, cache))


def drawn(fixed: LoopInputs, slots: int, room: cache_sizes.Room) -> Table:
    """The table when all rows are drawn, by so many slots."""
    table, steps = initial_table(fixed, slots, room), fixed.max_tokens
    if room.pages:
        return by_pages(fixed, held(table, widened(table.cache, room.page)))

    def filled(table: Table, width: int, cache: Any) -> Table:
        return jax.lax.while_loop(
            partial(goes_on, fixed, width),
            partial(next_token, fixed, width),
            held(table, cache),
        )

    model = fixed.model
    whole = model.ragged(table.cache, steps) if model.shared and model.ragged else None
    if whole is not None:
        return filled(table, steps, whole)
    for width in cache_sizes.widths(fixed.contexts.tokens.shape[1], steps):
        table = filled(table, width, widened(table.cache, width))
    return table


def by_pages(fixed: LoopInputs, table: Table) -> Table:
    """`drawn` by slots that share pages, which they take where their blocks end."""
    size = present(table.pages).shape[2]

    def block(table: Table) -> Table:
        until = table.time + size
        table = jax.lax.while_loop(
            lambda table: (table.time < until) & somewhere(table.active),
            partial(next_token, fixed, size),
            table,
        )
        return flushed(fixed, dataclasses.replace(table, time=until))

    return jax.lax.while_loop(
        lambda table: somewhere(table.active | present(table.pages).waits), block, table
    )


def flushed(fixed: LoopInputs, table: Table) -> Table:
    """The table when blocks are full: in pages, or their rows begin anew.

    What these had drawn is forgotten.
    """
    pages, waits = present(table.pages).flushed(table.cache, table.count, table.active)
    row = jnp.where(waits, table.row, fixed.rows.prompt.shape[0])  # out: dropped
    anew = jnp.zeros_like(fixed.rows.exists).at[row].set(True, mode="drop")

    def forgotten(old, new):
        return jnp.where(anew.reshape(-1, *(1,) * (old.ndim - 1)), new, old)

    written = table.out, table.episode
    out, episode = jax.tree.map(forgotten, written, blank(fixed))
    active = table.active & ~waits
    table = dataclasses.replace(
        table, pages=pages, active=active, out=out, episode=episode
    )
    return refill(fixed, table)


def goes_on(fixed: LoopInputs, width: int, table: Table) -> jax.Array:
    """`[]` bool: whether some slot is active and none has filled all columns."""
    if width == fixed.max_tokens:  # which end there
        return somewhere(table.active)
    full = table.active & (table.count >= width)
    return somewhere(table.active) & ~somewhere(full)


def next_token(fixed: LoopInputs, width: int, table: Table) -> Table:
    """The table after one token: every active slot samples it and reads it."""
    place = fixed.place(table)
    key = jax.vmap(jax.random.fold_in)(fixed.row_key[table.row], place)
    token, *measured = fixed.choose(key, fixed.logits(table.features))
    own = table.active  # slots whose token the policy writes
    if turns := table.out.turns:
        read = turns.observed[table.row, table.count]
        token = jnp.where(read, table.out.tokens[table.row, table.count], token)
        own = own & ~read
    stop = jnp.isin(token, jnp.asarray(fixed.end, token.dtype))
    out = write(table.out, table, own, token, measured, stop)
    table = dataclasses.replace(table, out=out, count=table.count + 1)
    if fixed.episodes:
        table, stop = with_answers(fixed.episodes, table, own & stop)
    ended = table.active & (stop | (place + 1 == fixed.max_tokens))
    table = dataclasses.replace(table, active=table.active & ~ended)
    table = decode(fixed, width, table, token)
    if fixed.stopping:
        table = grade(fixed, table, ended)
    if fixed.refills:
        table = refill(fixed, table)
    return dataclasses.replace(table, time=table.time + 1)


def decode(fixed: LoopInputs, width: int, table: Table, token: jax.Array) -> Table:
    """The table after the model has read the chosen tokens, with one column more.

    The column is the oldest: no slot has as many tokens as there are columns.
    """
    contexts, context = fixed.contexts, fixed.rows.context[table.row]
    if table.pages:
        column, written = table.time % width, table.written
        own = table.pages.seen(table.count, table.time)
    else:
        column = jnp.argmin(table.written[:width]).astype(jnp.int32)
        written = table.written.at[column].set(table.time)
        own = (table.time - written[:width])[None, :] < table.count[:, None]
    own &= table.active[:, None]  # what is read for others is dropped
    idle = fixed.prefix.last.shape[1]
    cache = SharedCache(
        own=table.cache,
        prefix=fixed.prefix.cache,
        context=jnp.where(table.active, fixed.prefix_of(table.row), idle),
        group=fixed.sharing,
        pages=table.pages,
    )
    model = fixed.model
    read = model.features if model.shared else partial(unshared, model)
    features, cache = read(
        fixed.params,
        token[:, None],
        (fixed.length[context] + table.count - 1)[:, None],
        jnp.concatenate([contexts.mask[context], own], -1),
        cache,
        column,
    )
    return dataclasses.replace(
        table, written=written, features=features[:, 0], cache=cache.own
    )


def unshared(
    model: Model, params, tokens, positions, seen, cache: SharedCache, column
) -> tuple[jax.Array, SharedCache]:
    """`Model.features` for a model without shared prefixes, which are copied by row."""
    width = 0

    def join(prefix, own):
        nonlocal width
        context = cache.context.reshape(prefix.shape[0], -1)
        taken = jax.vmap(lambda prefix, own: prefix[own])(prefix, context)
        width = prefix.shape[-2]
        return jnp.concatenate([taken.reshape(-1, *prefix.shape[2:]), own], -2)

    whole = jax.tree.map(join, cache.prefix, cache.own)
    features, whole = model.features(
        params, tokens, positions, seen, whole, width + column
    )
    own = jax.tree.map(lambda x: x[:, :, width:], whole)
    return features, dataclasses.replace(cache, own=own)


def with_answers(
    episodes: Episodes, table: Table, ended: jax.Array
) -> tuple[Table, jax.Array]:
    """The table with answers to turns that ended; `[K]` bool, what ends with them."""
    given = table.row, table.count, ended, somewhere(ended)
    out, episode, done = answered(episodes, table.out, table.episode, *given)
    return dataclasses.replace(table, out=out, episode=episode), done


def grade(fixed: LoopInputs, table: Table, ended: jax.Array) -> Table:
    """The table with ended rows graded, and rounds opened where the rule is not met."""
    rows, queue, stopping = fixed.rows, fixed.queue, fixed.stopping
    assert stopping
    row = jnp.where(ended, table.row, rows.prompt.shape[0])  # out: dropped
    if turns := table.out.turns:
        verdict = turns.outcome[table.row]
    else:
        prompt, out = rows.prompt[table.row], table.out
        written = out.mask[table.row] & ended[:, None]  # nothing to ask of the others
        verdict = stopping.outcome(prompt, out.tokens[table.row], written)
    outcome = table.outcome.at[row].set(verdict, mode="drop")
    done = table.done.at[row].set(True, mode="drop")
    place = jnp.arange(stopping.most, dtype=jnp.int32)[None]
    group = queue.at(queue.first[:, None] + place)  # [C, G]
    ours = done[group] & (place < queue.wanted[:, None])
    graded = ours & ~jnp.isnan(outcome[group])
    met = stopping.met(jnp.where(graded, outcome[group], 0.0), graded)
    whole = jnp.sum(ours, -1, dtype=jnp.int32) == table.opened
    more = jnp.minimum(table.opened + stopping.size, queue.wanted)
    return dataclasses.replace(
        table,
        outcome=outcome,
        done=done,
        opened=jnp.where(whole & ~met, more, table.opened),
    )


def refill(fixed: LoopInputs, table: Table) -> Table:
    """The table with idle slots filled by the next open rows of their shard's queue."""
    pages, idle, again = table.pages, ~table.active, None
    if pages:
        again, idle = pages.room(table.active)
    row, new, started = fixed.queue.taken(table.opened, table.started, idle)
    row = jnp.where(new, row, table.row)
    if pages:
        new |= present(again)
        pages = pages.begun(new)
    return dataclasses.replace(
        table,
        started=started,
        pages=pages,
        row=row,
        count=jnp.where(new, 0, table.count),
        active=table.active | new,
        features=jnp.where(new[:, None], fixed.first_features(row), table.features),
    )


def write(out: Rollouts, table: Table, own, token, measured, stop) -> Rollouts:
    """Completions with the token of every slot whose `own` it is, and its log-probs."""
    row = jnp.where(own, table.row, out.finished.shape[0])  # out: dropped
    behaviour, policy, entropy, score_sq_norm, *kept = measured

    def put(values, new):
        return values.at[row, table.count].set(new, mode="drop")

    return dataclasses.replace(
        out,
        tokens=put(out.tokens, token),
        mask=put(out.mask, True),
        logp_behaviour=put(out.logp_behaviour, behaviour),
        logp_policy=put(out.logp_policy, policy),
        entropy=put(out.entropy, entropy),
        score_sq_norm=put(out.score_sq_norm, score_sq_norm),
        finished=out.finished.at[row].set(stop, mode="drop"),
        support=put(out.support, *kept) if kept else None,
    )
