"""Warm start: supervised updates on traces, by the trainer that RL uses."""

from typing import Any

import jax
import jax.numpy as jnp

from curax import aggregate, data, hint, loss
from curax import update as updates
from curax.arrays.keys import stage_key
from curax.settings.config_types import present
from curax.step.types import Components
from curax.types import Batch, Contexts, Model


def next_ids(parts: Components, seed: jax.Array, step: jax.Array) -> jax.Array:
    """`[rows]` int32, ids of the prompts whose traces the next update imitates.

    Every prompt comes once before any comes again, in another order than RL's.
    """
    warm = present(parts.config.warm_start)
    return data.prompt_ids(
        jax.random.bits(stage_key(seed, jnp.int32(0), "warm start")),
        step * warm.rows,
        count=warm.rows,
        num_prompts=parts.task.num_prompts,
    )


def next_traces(
    parts: Components, seed: jax.Array, step: jax.Array, ids: Any
) -> tuple[Contexts, Any, Any]:
    """Contexts of prompts, and a trace for each: `[rows, T]` tokens and mask."""
    task, key = parts.task, stage_key(seed, step, "traces")
    prompts = task.prompts(ids)
    contexts = (
        task.trace_contexts(key, prompts) if task.trace_contexts else hint.none(prompts)
    )
    return contexts, *present(task.traces)(key, prompts)


def imitating(tokens: jax.Array, mask: jax.Array, context: jax.Array) -> Batch:
    """Rows to imitate: all of credit 1, and drawn by nobody."""
    zeros = jnp.zeros(mask.shape, jnp.float32)
    return Batch(
        tokens=tokens,
        mask=mask,
        context=context,
        credit=zeros + 1,
        multiplier=zeros + 1,
        logp_behaviour=zeros,
        logp_policy=zeros,
        logp_old=None,
        logp_ref=None,
    )


def update(
    parts: Components,
    model: Model,
    params: Any,
    opt_state: Any,
    traces: tuple[Contexts, jax.Array, jax.Array],
) -> tuple[Any, Any, jax.Array]:
    """Parameters after one supervised update on traces, with credit 1 for every token.

    Args:
        parts: components of the run.
        model: the policy.
        params: its trained parameters.
        opt_state: of the warm start's own optimizer.
        traces: contexts, tokens and mask, of `next_traces`.

    Returns:
        Parameters, optimizer state, mean loss per token, `[]` float32 nats.
    """
    warm, how = present(parts.config.warm_start), parts.config.update
    contexts, tokens, mask = traces
    batch = imitating(tokens, mask, jnp.arange(warm.rows, dtype=jnp.int32))
    value, grads, _ = updates.gradient(
        model,
        params,
        contexts,
        batch,
        aggregate.token_mean(mask),
        lambda logp, _, rows: loss.reinforce(logp, logp, rows.credit, rows.mask),
        updates.Settings(
            micro_batches=warm.micro_batches,
            tokens_per_micro_batch=how.tokens_per_micro_batch,
            length_buckets=how.length_buckets,
            token_chunk=how.token_chunk,
            rows_per_context=1,
        ),
        still_old=True,
    )
    tx = updates.transformation(warm.optimizer, warm.clip_norm)
    params, opt_state, _ = updates.apply(
        tx, params, opt_state, value, grads, jnp.any(mask)
    )
    return params, opt_state, value
