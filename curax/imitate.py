"""Warm start: supervised updates on traces, by the trainer that RL uses."""

from typing import Any

import jax
import jax.numpy as jnp

from curax import aggregate, hint, loss
from curax import update as updates
from curax.keys import stage_key
from curax.parts import Parts
from curax.types import Batch


def update(
    parts: Parts, params: Any, opt_state: Any, seed: jax.Array, step: jax.Array
) -> tuple[Any, Any, jax.Array]:
    """One supervised update on traces: the same trainer, credit 1 for every row.

    Args:
        parts: of the run.
        params: parameters.
        opt_state: of the warm start's own optimizer.
        seed: `[]` uint32.
        step: `[]` int32, warm-start steps done.

    Returns:
        Parameters, optimizer state, mean loss per token, `[]` float32 nats.
    """
    warm = parts.config.warm_start
    assert warm is not None
    assert parts.task.traces is not None
    key_prompts, key_traces = jax.random.split(stage_key(seed, step, "warm start"))
    ids = jax.random.randint(key_prompts, (warm.rows,), 0, parts.task.num_prompts)
    prompts = parts.task.prompts(ids)
    tokens, mask = parts.task.traces(key_traces, prompts)
    zeros = jnp.zeros(tokens.shape, jnp.float32)
    batch = Batch(
        tokens=tokens,
        mask=mask,
        context=jnp.arange(warm.rows, dtype=jnp.int32),
        credit=jnp.ones(warm.rows, jnp.float32),
        multiplier=zeros + 1,
        logp_behaviour=zeros,
        logp_policy=zeros,
        logp_old=None,
        logp_ref=None,
    )
    value, grads, _ = updates.gradient(
        parts.model,
        params,
        hint.none(prompts),
        batch,
        aggregate.token_mean(mask),
        lambda logp, _, rows: loss.reinforce(logp, logp, rows.credit, rows.mask),
        updates.Settings(),
        still_old=True,
    )
    tx = updates.transformation(warm.optimizer, warm.clip_norm)
    params, opt_state, _ = updates.apply(
        tx, params, opt_state, value, grads, jnp.bool_(True)
    )
    return params, opt_state, value
