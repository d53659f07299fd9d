"""Sample completions: one while-loop over a table of slots that are refilled at once.

A prompt is run through the model once; its keys and values go to the slots of its
group. Behind them each slot has a ring of `max_tokens` columns. All slots write one
column, that of the loop's step modulo the ring, so the cache is updated in place at
one scalar index although slots are at different tokens of different rows; a mask by age
tells which columns belong to a slot's row.
"""

from functools import partial
from typing import Any

import flax.linen as nn
import flax.struct
import jax
import jax.numpy as jnp

from curax import keys
from curax.types import Contexts, Model, Plan, Rollouts


@flax.struct.dataclass(kw_only=True)
class Prefix:
    """What the model makes of the contexts: shared by all rows conditioned on them."""

    cache: Any  # per layer k, v [C, kv_heads, P, d]
    last: jax.Array  # [C, D] features of the last token: they predict the first

    def take(self, context: jax.Array) -> "Prefix":
        """The prefix of each row, `[N, ...]`."""
        return jax.tree.map(lambda leaf: leaf[context], self)


def prefill(model: Model, params: Any, contexts: Contexts) -> Prefix:
    """Run every context through the model once."""
    mask = contexts.mask
    positions = jnp.maximum(jnp.cumsum(mask, -1, dtype=jnp.int32) - 1, 0)
    causal = jnp.tril(jnp.ones((mask.shape[-1],) * 2, bool))
    features, cache = model.features(
        params, contexts.tokens, positions, causal[None] & mask[:, None, :]
    )
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
    t = jnp.arange(steps - 1, dtype=jnp.int32)
    length = jnp.sum(seen, -1, dtype=jnp.int32)
    ahead = jnp.broadcast_to(seen[:, None, :], (n, steps - 1, seen.shape[-1]))
    behind = jnp.broadcast_to(t[:, None] >= t[None, :], (n, steps - 1, steps - 1))
    features, _ = model.features(
        params,
        tokens[:, :-1],
        length[:, None] + t[None, :],
        jnp.concatenate([ahead, behind], -1),
        prefix.cache,
    )
    return jnp.concatenate([prefix.last[:, None], features], 1)


def sample(
    model: Model,
    params: Any,
    contexts: Contexts,
    plan: Plan,
    key: jax.Array,
    *,
    max_tokens: int,
    end: tuple[int, ...],
    pad: int,
    temperature: float | jax.Array = 1.0,
    top_k: int = 0,
    top_p: float | jax.Array = 1.0,
    slots: int = 0,
) -> Rollouts:
    """Draw one completion for every row of the plan.

    The key of token t of a row is a function of `key`, its prompt, its slot and t. So
    neither the number of decoding slots nor the order of rows changes what is drawn.

    Args:
        model: the policy.
        params: its parameters.
        contexts: `[C, P]`, what rows are conditioned on.
        plan: `[N]` rows; those that do not exist are not drawn.
        key: the step's key for this stage.
        max_tokens: T, at which a completion is cut off.
        end: tokens that end a completion; they are part of it.
        pad: token behind the end.
        temperature: divides the logits; the number 0 takes the likeliest token.
        top_k: keep the k likeliest tokens only; 0 keeps all.
        top_p: keep the smallest set of likeliest tokens with this mass; 1 keeps all.
        slots: completions decoded at a time; 0 means one per row.

    Returns:
        `[N, T]` completions with log-probs of the distribution drawn from and of the
        policy at this temperature. At temperature 0 the former are 0 and the latter are
        taken at temperature 1.
    """
    rows = plan.prompt.shape[0]
    slots = min(slots or rows, rows)
    width = contexts.tokens.shape[-1]
    length = jnp.sum(contexts.mask, -1, dtype=jnp.int32)
    head = model.head(params)
    prefix = prefill(model, params, contexts)
    draw = partial(choose, temperature=temperature, top_k=top_k, top_p=top_p)
    row_key = keys.row_keys(key, plan.prompt, plan.slot)
    # The queue: rows that exist, in the order of the plan.
    queue = jnp.argsort(~plan.exists, stable=True).astype(jnp.int32)
    wanted = jnp.sum(plan.exists, dtype=jnp.int32)

    def logits(features):
        return jnp.einsum(
            "nd,vd->nv", features, head, preferred_element_type=jnp.float32
        )

    def fill(cache, fresh, row):
        """Copy the prefix of its new row into every slot that takes one."""
        own = prefix.take(plan.context[row]).cache
        new = fresh[:, None, None, None]
        return jax.tree.map(
            lambda old, c: old.at[:, :, :width].set(
                jnp.where(new, c, old[:, :, :width])
            ),
            cache,
            own,
        )

    def step(carry):
        time, taken, row, active, count, z, cache, out = carry
        # 1. A token for every slot.
        token_key = jax.vmap(jax.random.fold_in)(row_key[row], count)
        token, behaviour, policy, entropy = draw(token_key, z)
        stop = jnp.isin(token, jnp.asarray(end, token.dtype))
        place = (jnp.where(active, row, rows), count)
        out = {
            "tokens": out["tokens"].at[place].set(token, mode="drop"),
            "mask": out["mask"].at[place].set(True, mode="drop"),
            "logp_behaviour": out["logp_behaviour"]
            .at[place]
            .set(behaviour, mode="drop"),
            "logp_policy": out["logp_policy"].at[place].set(policy, mode="drop"),
            "entropy": out["entropy"].at[place].set(entropy, mode="drop"),
            "finished": out["finished"].at[place[0]].set(stop, mode="drop"),
        }
        count = count + 1
        ended = active & (stop | (count == max_tokens))

        # 2. Run the token through the model; column `time` of the ring is its place.
        ring = jnp.arange(max_tokens, dtype=jnp.int32)
        age = (time - ring) % max_tokens
        context = plan.context[row]
        seen = jnp.concatenate(
            [contexts.mask[context], age[None, :] < count[:, None]], -1
        )
        features, cache = model.features(
            params,
            token[:, None],
            (length[context] + count - 1)[:, None],
            seen[:, None, :],
            cache,
            width + time % max_tokens,
        )
        z = logits(features[:, 0])

        # 3. A slot whose completion has ended takes the next row of the plan.
        if slots < rows:
            ticket = taken + jnp.cumsum(ended, dtype=jnp.int32) - 1
            fresh = ended & (ticket < wanted)
            row = jnp.where(fresh, queue[jnp.minimum(ticket, rows - 1)], row)
            cache = jax.lax.cond(
                jnp.any(fresh), fill, lambda c, *_: c, cache, fresh, row
            )
            z = jnp.where(fresh[:, None], logits(prefix.last[plan.context[row]]), z)
            count = jnp.where(fresh, 0, count)
            taken = taken + jnp.sum(fresh, dtype=jnp.int32)
            active = (active & ~ended) | fresh
        else:
            active = active & ~ended
        return time + 1, taken, row, active, count, z, cache, out

    row = queue[:slots]
    start = prefix.take(plan.context[row])
    ring = ((0, 0), (0, 0), (0, max_tokens), (0, 0))
    zeros = jnp.zeros((rows, max_tokens), jnp.float32)
    out = {
        "tokens": jnp.full((rows, max_tokens), pad, jnp.int32),
        "mask": jnp.zeros((rows, max_tokens), bool),
        "logp_behaviour": zeros,
        "logp_policy": zeros,
        "entropy": zeros,
        "finished": jnp.zeros(rows, bool),
    }
    carry = (
        jnp.int32(0),
        jnp.int32(slots),
        row,
        jnp.arange(slots) < wanted,
        jnp.zeros(slots, jnp.int32),
        logits(start.last),
        jax.tree.map(lambda c: jnp.pad(c, ring), start.cache),
        jax.tree.map(lambda a: shard_rows(a), out),
    )
    out = jax.lax.while_loop(lambda c: jnp.any(c[3]), step, carry)[-1]
    return Rollouts(
        **jax.tree.map(lambda a: shard_rows(a), out),
        prompt=plan.prompt,
        slot=plan.slot,
        context=plan.context,
        exists=plan.exists,
    )


def choose(
    key: jax.Array,
    logits: jax.Array,
    *,
    temperature: float | jax.Array = 1.0,
    top_k: int = 0,
    top_p: float | jax.Array = 1.0,
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """One token per row, and what is known of it.

    Args:
        key: `[N]` PRNG keys.
        logits: `[N, V]` float32.
        temperature: divides the logits; the number 0 takes the likeliest token.
        top_k: keep the k likeliest tokens only (ties kept too); 0 keeps all.
        top_p: then keep the smallest set of likeliest tokens with this mass.

    Returns:
        Token `[N]` int32; its log-prob under what was drawn from and under the policy
        before truncation, `[N]` float32 nats; the policy's entropy, `[N]` float32 nats.
    """
    greedy = isinstance(temperature, int | float) and temperature == 0
    z = logits if greedy else logits / temperature
    logp = jax.nn.log_softmax(z)
    entropy = -jnp.sum(jnp.exp(logp) * logp, -1)
    if greedy:
        token = jnp.argmax(z, -1).astype(jnp.int32)
        behaviour = jnp.zeros_like(entropy)
    else:
        cut = truncate(logp, top_k=top_k, top_p=top_p)
        token = jax.vmap(jax.random.categorical)(key, cut).astype(jnp.int32)
        behaviour = pick(cut, token)
    return token, behaviour, pick(logp, token), entropy


def truncate(logp: jax.Array, *, top_k: int, top_p: float | jax.Array) -> jax.Array:
    """Log-probs renormalised over the top-k, then top-p, tokens; -inf elsewhere."""
    if top_k == 0 and isinstance(top_p, int | float) and top_p >= 1:
        return logp
    ordered = jnp.sort(logp, -1, descending=True)
    if top_k:
        kth = ordered[:, min(top_k, logp.shape[-1]) - 1, None]
        logp = jax.nn.log_softmax(jnp.where(logp >= kth, logp, -jnp.inf))
        ordered = jnp.sort(logp, -1, descending=True)
    before = jnp.cumsum(jnp.exp(ordered), -1) - jnp.exp(ordered)
    last = jnp.sum(before < top_p, -1, keepdims=True) - 1
    least = jnp.take_along_axis(ordered, last, -1)
    return jax.nn.log_softmax(jnp.where(logp >= least, logp, -jnp.inf))


def pick(values: jax.Array, index: jax.Array) -> jax.Array:
    """`values[n, index[n]]`."""
    return jnp.take_along_axis(values, index[:, None], -1)[:, 0]


def shard_rows(x: jax.Array) -> jax.Array:
    """Rows lie over the data axes of the mesh, if there is one."""
    return nn.with_logical_constraint(x, ("rows",) + (None,) * (x.ndim - 1))
