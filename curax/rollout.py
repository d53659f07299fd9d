"""Sample completions: a loop over a table of slots, each refilled at once.

A stopping rule may end a prompt early: its next completions are opened round by round,
and slots that have nothing left to do take rows of other prompts.

A prompt is run through the model once; its keys and values are held once, and read by
all slots of its group where they lie. Besides, each slot has a ring of `max_tokens`
columns. All slots write one column, the oldest, so the cache is updated in place at one
scalar index although slots are at different tokens of different rows; a mask by age
tells which columns belong to a slot's row. A slot that takes another row writes none of
them: its row says which prefix it reads. Where `max_tokens` is large the ring begins
with fewer columns and grows, at most twice, when a completion needs more: a token reads
all there are. So there are up to three `while_loop`s, one after the other, of the same
table. The ring has all columns from the beginning where the model reads those alone
that hold tokens (`Model.ragged`).

An environment answers turns of the policy (`arrays/turns.py`). Its observation is
written into the row in one block, and the next tokens of that row are these instead of
sampled ones: they are read by the same loop, for every slot reads one token at every
step, whoever wrote it. So columns are as before, and no slot waits for another.

On a mesh slots and their caches are sharded by rows, and each shard has a queue of its
own: groups are dealt to shards, which hold the prefixes of these groups alone.
Parameters are laid out once, before the loop. So a token moves no parameters and no
caches: devices exchange activations over `tensor` and a few numbers per row.
"""

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp

from curax.arrays import cache_sizes, choice, keys, supports
from curax.arrays.masked import somewhere
from curax.arrays.queues import Queue
from curax.arrays.sharding import constrain, platform, shard_rows
from curax.arrays.turns import Episodes, answered, nothing
from curax.settings.config_types import present
from curax.types import Contexts, Model, Plan, Rollouts, SharedCache


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
class Settings:
    """How completions are sampled, wherever they are drawn.

    Attributes:
        max_tokens: T, at which a completion is cut off.
        end: tokens that end a completion, or a turn of it; they are part of it.
        pad: token behind the end.
        temperature: divides the logits; the number 0 takes the likeliest token.
        top_k: keep the k likeliest tokens only; 0 keeps all.
        top_p: keep the smallest set of likeliest tokens with this mass; 1 keeps all.
        slots: completions decoded at a time; 0 means one per row.
        cache_bytes: that keys and values may take of a device; there are only as many
            slots as it has room for, and other rows wait for one. 0: any.
        stopping: ends prompts early; None draws all rows of the plan.
        support: note what each token was drawn from; not at temperature 0.
        episodes: answers turns, and says which completions end with theirs; None: a
            completion ends with its first turn.
    """

    max_tokens: int
    end: tuple[int, ...]
    pad: int
    temperature: float | jax.Array = 1.0
    top_k: int = 0
    top_p: float | jax.Array = 1.0
    slots: int = 0
    cache_bytes: float = 0.0
    stopping: Stopping | None = None
    support: bool = False
    episodes: Episodes | None = None


def prefill(model: Model, params: Any, contexts: Contexts) -> Prefix:
    """Run every context through the model once."""
    mask = contexts.mask
    positions = jnp.maximum(jnp.cumsum(mask, -1, dtype=jnp.int32) - 1, 0)
    features, cache = model.features(params, contexts.tokens, positions, mask)
    return Prefix(cache=cache, last=features[:, -1])


def extend(
    model: Model, params: Any, prefix: Prefix, seen: jax.Array, tokens: jax.Array
) -> jax.Array:
    """Features that predict each completion token, given the row's own prefix.

    Args:
        model: the policy.
        params: its parameters.
        prefix: one per row, `[N, ...]`.
        seen: `[N, P]` bool, mask of the row's context.
        tokens: `[N, T]` int32, completions.

    Returns:
        `[N, T, D]`; position t depends on the prefix and on tokens before t.
    """
    n, steps = tokens.shape
    if steps == 1:
        return prefix.last[:, None]
    # The last token predicts none. TPUs read it all the same: their tiles of 8 tokens
    # would not fit T - 1, and every layer would lay its arrays out anew.
    read = steps if platform() == "tpu" else steps - 1
    t = jnp.arange(read, dtype=jnp.int32)
    length = jnp.sum(seen, -1, dtype=jnp.int32)
    features, _ = model.features(
        params,
        tokens[:, :read],
        length[:, None] + t[None, :],
        jnp.concatenate([seen, jnp.ones((n, read), bool)], -1),
        prefix.cache,
    )
    return jnp.concatenate([prefix.last[:, None], features[:, : steps - 1]], 1)


def sample(
    model: Model,
    params: Any,
    contexts: Contexts,
    plan: Plan,
    key: jax.Array,
    how: Settings,
    *,
    prefix: Prefix | None = None,
    begun: jax.Array | None = None,
) -> Rollouts:
    """Draw one completion for every row of the plan.

    The key of token t of a row is a function of `key`, its prompt, its slot and t. So
    neither the number of decoding slots nor the order of rows changes what is drawn.
    With an environment token t may be one of an observation, which is no part of the
    mask and has neither log-probs nor entropy.

    With a stopping rule the rows of a prompt are opened `stopping.size` at a time, and
    the rule is tested on all of them when the last of a round has ended: never on the
    first to finish, which would favour short completions. Prompts do not wait for each
    other. A prompt stops when the rule is met or when the plan has no more rows for it.

    Args:
        model: the policy.
        params: its parameters.
        contexts: `[C, P]`, what rows are conditioned on.
        plan: `[N]` rows of at most C prompts; those that do not exist are not drawn.
        key: the step's key for this stage; or `[B]`, of each prompt, as `row_keys`.
        how: temperature, lengths, slots and so on.
        prefix: `prefill` of the contexts, if it is known already.
        begun: `[N]` int32, tokens of each row that its context ends with: it goes on
            behind them, by the keys of the tokens that follow, and is cut off so much
            earlier. None: rows begin.

    Returns:
        `[N, T]` completions with log-probs of the distribution drawn from and of the
        policy at this temperature. At temperature 0 the former are 0 and the latter are
        taken at temperature 1. Rows that were never opened do not exist.

    Raises:
        ConfigError: `how.cache_bytes` are too few for one row on each device.
    """
    max_tokens, stopping, slots = how.max_tokens, how.stopping, how.slots
    rows, groups = plan.prompt.shape[0], contexts.tokens.shape[0]
    # Before the loop, which would do it at every token.
    ready = model.ready(params) if model.ready else params
    group = plan.prompt if stopping else plan.context
    queue = Queue.of(plan, group, groups)
    slots = min(slots or rows, rows)
    if stopping:  # more than that are never open at a time
        slots = min(slots, groups * stopping.size)
    if bound := how.cache_bytes:
        known = prefix or jax.eval_shape(partial(prefill, model), params, contexts)
        slots = cache_sizes.with_room(
            known.cache, contexts, max_tokens, queue, slots, bound=bound
        )
    even = slots + -slots % queue.shards
    # Shards may have more rows than slots, so they refill them.
    refills = bool(stopping) or even < rows or queue.shards > 1
    own = plan
    if queue.blocks > 1:
        order = queue.dealt()
        context = plan.context[queue.at(queue.first)][order]
        contexts = jax.tree.map(lambda leaf: leaf[context], contexts)
        prefix = prefix and prefix.take(context)
        group = jnp.argsort(order).astype(jnp.int32)[group]
        queue = Queue.of(plan, group, groups)
        own = dataclasses.replace(plan, context=group)
    if prefix is None:
        prefix = prefill(model, params, contexts)
    head = model.head(ready)
    fixed = LoopInputs(
        model=model,
        params=ready,
        head=head,
        contexts=contexts,
        length=jnp.sum(contexts.mask, -1, dtype=jnp.int32),
        plan=own,
        prefix=prefix.dealt(queue),
        queue=queue,
        row_key=keys.row_keys(key, plan.prompt, plan.slot),
        begun=begun,
        max_tokens=max_tokens,
        end=how.end,
        choose=partial(
            choice.choose,
            temperature=how.temperature,
            top_k=how.top_k,
            top_p=how.top_p,
            support=how.support,
        ),
        support=supports.shape(head.shape[0], how.top_k) if how.support else None,
        stopping=stopping,
        episodes=how.episodes,
        refills=refills,
        sharing=stopping.size if stopping else max(1, rows // groups),
    )
    table = initial_table(fixed, even if refills else rows, how.pad)
    columns = cache_sizes.widths(contexts.tokens.shape[1], max_tokens)
    if model.ragged and model.ragged(max_tokens):
        columns = (max_tokens,)
    for width in columns:
        table = jax.lax.while_loop(
            partial(goes_on, fixed, width),
            partial(next_token, fixed, width),
            widened(width, table),
        )
    # Every row that was opened was drawn: the loop ends when no slot has any left.
    place = jnp.argsort(queue.row) - queue.first[group]
    drawn = plan.exists & (place < table.opened[group])
    out = dataclasses.replace(table.out, context=plan.context, exists=drawn)
    if how.episodes:
        turns = present(out.turns)
        turns = dataclasses.replace(turns, found=how.episodes.found(table.episode))
        out = dataclasses.replace(out, turns=turns)
    return jax.tree.map(shard_rows, out)


@dataclasses.dataclass(frozen=True, kw_only=True)
class LoopInputs:
    """Constants of the decoding loop: parameters, prefix, queue, keys and options."""

    model: Model
    params: Any  # as `Model.ready` lays them out
    head: jax.Array  # [V, D]
    contexts: Contexts  # [C, P]
    length: jax.Array  # [C] int32, their tokens
    plan: Plan  # [N], its contexts as dealt
    prefix: Prefix  # [D, C / blocks], of the contexts, as dealt
    queue: Queue
    row_key: jax.Array  # [N] PRNG keys
    begun: jax.Array | None  # [N] int32, tokens in front of each row; None: 0
    max_tokens: int  # T
    end: tuple[int, ...]  # tokens that end a completion
    choose: Callable[..., tuple[jax.Array, ...]]  # (keys, logits) -> as `choice.choose`
    support: jax.ShapeDtypeStruct | None  # of the kept set of a token; None: not noted
    stopping: Stopping | None
    episodes: Episodes | None
    refills: bool  # slots take other rows when theirs have ended
    sharing: int  # slots that are expected to have one context

    def prefix_of(self, row: jax.Array) -> jax.Array:
        """`[K]` int32: index in its shard of each slot's prefix, from its row."""
        return self.plan.context[row] % self.prefix.last.shape[1]

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
    cache: Any  # per layer k, v [K, kv_heads, W, d], W columns, at most T
    out: Rollouts  # [N, T]
    episode: Any = None  # Episode, [N]; None: there is no environment


def unwritten(
    plan: Plan, steps: int, pad: int, kept: jax.ShapeDtypeStruct | None
) -> Rollouts:
    """Completions of a plan before their first token; `kept` as of `supports.shape`."""
    rows = plan.prompt.shape[0]
    zeros = jnp.zeros((rows, steps), jnp.float32)
    return Rollouts(
        tokens=jnp.full((rows, steps), pad, jnp.int32),
        mask=jnp.zeros((rows, steps), bool),
        logp_behaviour=zeros,
        logp_policy=zeros,
        entropy=zeros,
        score_sq_norm=zeros,
        finished=jnp.zeros(rows, bool),
        prompt=plan.prompt,
        slot=plan.slot,
        context=plan.context,
        exists=plan.exists,
        support=jnp.zeros((rows, steps, *kept.shape), kept.dtype) if kept else None,
    )


def initial_table(fixed: LoopInputs, slots: int, pad: int) -> Table:
    """The table before the first token, whose slots hold the first rows.

    Without refills there is a slot for each row.
    """
    plan, queue, steps = fixed.plan, fixed.queue, fixed.max_tokens
    rows, wanted, rule = plan.prompt.shape[0], queue.wanted, fixed.stopping
    out = unwritten(plan, steps, pad, fixed.support)
    if fixed.episodes:
        out = dataclasses.replace(out, turns=nothing(rows, steps))
    row = queue.row[:slots] if not fixed.refills else jnp.zeros(slots, jnp.int32)
    table = Table(
        time=jnp.int32(0),
        written=jnp.full(steps, -steps, jnp.int32),
        opened=jnp.minimum(wanted, rule.size) if rule else wanted,
        started=jnp.zeros_like(queue.of_shards(wanted)),
        done=jnp.zeros(rows, bool),
        outcome=jnp.full(rows, jnp.nan, jnp.float32),
        row=row,
        count=jnp.zeros(slots, jnp.int32),
        active=jnp.arange(slots) < (0 if fixed.refills else jnp.sum(wanted)),
        out=jax.tree.map(shard_rows, out),
        features=fixed.first_features(row),
        cache=jax.tree.map(
            lambda x: jnp.zeros((slots, x.shape[-3], 0, x.shape[-1]), x.dtype),
            fixed.prefix.cache,
        ),
    )
    if fixed.episodes:
        episode = fixed.episodes.begin(fixed.row_key, plan.prompt)
        table = dataclasses.replace(table, episode=episode)
    return refill(fixed, table) if fixed.refills else table


def widened(width: int, table: Table) -> Table:
    """The table with its cache widened to `width` columns."""

    def leaf(x):
        wide = jnp.pad(x, ((0, 0), (0, 0), (0, width - x.shape[2]), (0, 0)))
        return constrain(wide, ("rows", "heads", None, None))

    return dataclasses.replace(table, cache=jax.tree.map(leaf, table.cache))


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
    contexts, context = fixed.contexts, fixed.plan.context[table.row]
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
    plan, queue, stopping = fixed.plan, fixed.queue, fixed.stopping
    assert stopping
    row = jnp.where(ended, table.row, plan.prompt.shape[0])  # out: dropped
    if turns := table.out.turns:
        verdict = turns.outcome[table.row]
    else:
        prompt, out = plan.prompt[table.row], table.out
        verdict = stopping.outcome(prompt, out.tokens[table.row], out.mask[table.row])
    outcome = table.outcome.at[row].set(verdict, mode="drop")
    done = table.done.at[row].set(True, mode="drop")
    place = jnp.arange(stopping.most, dtype=jnp.int32)[None]
    member = queue.at(queue.first[:, None] + place)  # [C, G]
    ours = done[member] & (place < queue.wanted[:, None])
    graded = ours & ~jnp.isnan(outcome[member])
    met = stopping.met(jnp.where(graded, outcome[member], 0.0), graded)
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
    queue = fixed.queue
    pending = queue.shares(table.opened) - table.started  # [D, C / blocks]
    upto = jnp.cumsum(pending, -1)
    idle = ~table.active.reshape(queue.shards, -1)  # [D, K / D]
    ticket = jnp.cumsum(idle, -1, dtype=jnp.int32) - 1
    fresh = idle & (ticket < upto[:, -1:])
    own = jax.vmap(partial(jnp.searchsorted, side="right"))(upto, ticket)
    own = jnp.minimum(own.astype(jnp.int32), pending.shape[-1] - 1)
    pick = partial(jnp.take_along_axis, indices=own, axis=-1)
    number = pick(table.started - (upto - pending)) + ticket
    number = number * queue.sharing + pick(queue.turn)
    place = pick(queue.of_shards(queue.first)) + number
    started = jax.vmap(lambda started, own, fresh: started.at[own].add(fresh))(
        table.started, own, fresh.astype(jnp.int32)
    )
    new = shard_rows(fresh.reshape(-1))
    row = jnp.where(new, queue.at(place.reshape(-1)), table.row)
    return dataclasses.replace(
        table,
        started=started,
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
