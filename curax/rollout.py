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
that hold tokens, or keys lie otherwise (`Model.ragged`). Where memory bounds the number
of slots and the model reads pages (`Model.paged`), slots share a pool of these in place
of rings (`arrays/pages.py`), and there are more of them.

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
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from curax.arrays import cache_sizes, choice, keys, supports
from curax.arrays.micro_batches import over_micro_batches
from curax.arrays.queues import Queue
from curax.arrays.sharding import platform, shard_rows, shards
from curax.arrays.slots import LoopInputs, Prefix, Stopping, drawn
from curax.arrays.turns import Episodes
from curax.monitors import confidence
from curax.settings.config_types import present
from curax.types import Contexts, DrawRows, Model, Rollouts

TOKENS = 2**13  # of completions whose confidence is computed at a time
ENTRIES = 2**26  # of logits that exist at a time


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
            slots or pages as it has room for, and other rows wait for one. 0: any.
        stopping: ends prompts early; None draws all rows.
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


def for_decoding(model: Model, cache: Any) -> Any:
    """Keys and values of contexts, of `prefill`, as decoding has them."""
    return model.shared(cache) if model.shared else cache


def token_bytes(model: Model, cache: Any, contexts: Contexts) -> float:
    """Bytes per device of the keys and values of a token in decoding, all layers.

    Args:
        model: the policy.
        cache: of `prefill`, or its shapes, `[C, kv_heads, P, d]`.
        contexts: `[C, P]`.
    """
    held = jax.eval_shape(partial(for_decoding, model), cache)
    return sum(
        x.size // contexts.tokens.size * x.dtype.itemsize / shards("heads", x.shape[1])
        for x in jax.tree.leaves(held)
    )


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
    rows: DrawRows,
    key: jax.Array,
    how: Settings,
    *,
    prefix: Prefix | None = None,
    begun: jax.Array | None = None,
) -> Rollouts:
    """Draw one completion for every row.

    The key of token t of a row is a function of `key`, its prompt, its member and t. So
    neither the number of decoding slots nor the order of rows changes what is drawn.
    With an environment token t may be one of an observation, which is no part of the
    mask and has neither log-probs nor entropy.

    With a stopping rule the rows of a prompt are opened `stopping.size` at a time, and
    the rule is tested on all of them when the last of a round has ended: never on the
    first to finish, which would favour short completions. Prompts do not wait for each
    other. A prompt stops when the rule is met or when there are no more rows for it.

    Args:
        model: the policy.
        params: its parameters.
        contexts: `[C, P]`, what rows are conditioned on.
        rows: `[N]`, of at most C prompts; those that do not exist are not drawn.
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
    count, groups = rows.prompt.shape[0], contexts.tokens.shape[0]
    # Before the loop, which would do it at every token.
    ready = model.ready(params) if model.ready else params
    group = rows.prompt if stopping else rows.context
    queue = Queue.of(rows, group, groups)
    slots = min(slots or count, count)
    if stopping:  # more than that are never open at a time
        slots = min(slots, groups * stopping.size)
    room = cache_sizes.Room(slots=slots)
    if bound := how.cache_bytes:
        known = prefix or jax.eval_shape(partial(prefill, model), params, contexts)
        where = cache_sizes.Places(
            contexts=groups,
            prompt=contexts.tokens.shape[1],
            steps=max_tokens,
            shards=queue.shards,
        )
        token = token_bytes(model, known.cache, contexts)
        page = model.paged(max_tokens) if model.paged else 0
        room = where.room(slots, bound=bound, token=token, page=page)
    even = room.slots + -room.slots % queue.shards
    # Shards may have more rows than slots, so they refill them.
    refills = bool(stopping or room.pages) or even < count or queue.shards > 1
    own = rows
    if queue.blocks > 1:
        order = queue.dealt()
        context = rows.context[queue.at(queue.first)][order]
        contexts = jax.tree.map(lambda leaf: leaf[context], contexts)
        prefix = prefix and prefix.take(context)
        group = jnp.argsort(order).astype(jnp.int32)[group]
        queue = Queue.of(rows, group, groups)
        own = dataclasses.replace(rows, context=group)
    if prefix is None:
        prefix = prefill(model, params, contexts)
    prefix = dataclasses.replace(prefix, cache=for_decoding(model, prefix.cache))
    head = model.head(ready)
    fixed = LoopInputs(
        model=model,
        params=ready,
        head=head,
        contexts=contexts,
        length=jnp.sum(contexts.mask, -1, dtype=jnp.int32),
        rows=own,
        prefix=prefix.dealt(queue),
        queue=queue,
        row_key=keys.row_keys(key, rows.prompt, rows.member),
        begun=begun,
        max_tokens=max_tokens,
        end=how.end,
        pad=how.pad,
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
        sharing=stopping.size if stopping else max(1, count // groups),
    )
    table = drawn(fixed, even if refills else count, room)
    # Every row that was opened was drawn: the loop ends when no slot has any left.
    place = jnp.argsort(queue.row) - queue.first[group]
    exists = rows.exists & (place < table.opened[group])
    out = dataclasses.replace(table.out, context=rows.context, exists=exists)
    if how.episodes:
        turns = present(out.turns)
        turns = dataclasses.replace(turns, found=how.episodes.found(table.episode))
        out = dataclasses.replace(out, turns=turns)
    return jax.tree.map(shard_rows, out)


def confidences(
    model: Model,
    params: Any,
    contexts: Contexts,
    rollouts: Rollouts,
    *,
    temperature: float | jax.Array,
    k: int,
    window: int,
    prefix: Prefix | None = None,
) -> confidence.Scores:
    """Confidence scores of completions, from another forward pass of the policy.

    Some rows at a time, and of these some tokens, so that logits of all of them never
    exist together.

    Args:
        model: the policy.
        params: its parameters.
        contexts: `[C, P]`.
        rollouts: `[N, T]` completions.
        temperature: that they were drawn at, 1 for greedy ones.
        k: likeliest tokens.
        window: tokens of a window, and of the tail.
        prefix: `prefill` of the contexts, if it is known already.

    Returns:
        `[N]` each.
    """
    if prefix is None:
        prefix = prefill(model, params, contexts)
    head = model.head(params)
    count, steps = rollouts.tokens.shape
    fewest = min(count, -(-count * steps // TOKENS))
    pieces = next(n for n in range(fewest, count + 1) if count % n == 0)

    def of(features: jax.Array) -> jax.Array:
        logits = jnp.einsum(
            "d,vd->v", features, head, preferred_element_type=jnp.float32
        )
        return confidence.of_tokens(logits / temperature, k=k)

    def read(rows: tuple[jax.Array, jax.Array]) -> tuple[tuple[()], jax.Array]:
        tokens, context = rows
        features = extend(
            model, params, prefix.take(context), contexts.mask[context], tokens
        )
        flat = features.reshape(-1, features.shape[-1])
        at_once = max(1, min(flat.shape[0], ENTRIES // head.shape[0]))
        return (), jax.lax.map(of, flat, batch_size=at_once).reshape(tokens.shape)

    rows = rollouts.tokens, rollouts.context
    _, sure = over_micro_batches(read, rows, rollouts.mask, count=pieces)
    return confidence.scores(sure, rollouts.mask, window=window, tail=window)
