"""Completions by an engine: what a step asks for, and what becomes of the answers.

    asked -> Engine.draw -> rollouts, with what no engine says

An engine draws what a step trains on, refills and hinted groups included. Pilots,
probes, hints that the policy writes and held-out prompts are drawn by curax's sampler.
"""

from collections.abc import Mapping
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np

from curax import reward, update
from curax.arrays import frozen, keys, metrics, supports
from curax.arrays.sharding import shard_rows
from curax.handover import Ask, Drawn, Limits, Source
from curax.processes import peers
from curax.settings.config_types import present
from curax.step import draw, optimise, room
from curax.step.types import Components, Request, StepRequest, Subject
from curax.types import Prompts, Rollouts, TrainState

Pair = tuple[jax.Array, jax.Array]


@flax.struct.dataclass(kw_only=True)
class Given:
    """Completions of an engine; a row without tokens is missing."""

    tokens: Any  # [N, T] int32, `pad` after the end
    mask: Any  # [N, T] bool
    logp: Any  # [N, T] float32, nats
    finished: Any  # [N] bool
    support: Any = None  # [N, T, S], as `supports.packed`; None: not noted


def draws(parts: Subject, request: Request) -> bool:
    """Whether an engine draws a request."""
    if not isinstance(parts, Components) or parts.engine is None:
        return False
    return isinstance(request, StepRequest)


def asked(parts: Components, request: Request) -> jax.Array:
    """`[N]` uint32, seeds of the rows: a function of key, prompt and member."""
    rows = present(request.rows)
    each = keys.row_keys(request.key, rows.prompt, rows.member)
    return jax.vmap(jax.random.bits)(each)


def answered(
    parts: Components, state: TrainState, request: Request, seed: jax.Array
) -> tuple[Given, Drawn]:
    """Completions of the engine by the parameters of a state, as arrays and as given.

    The parameters are those of the step before where the draw is one step ahead.

    Raises:
        EngineError: the engine draws nothing more.
    """
    version = max(int(state.step) - parts.config.sampling.ahead, 0)
    seen, rows, seed = peers.fetch((request.contexts, present(request.rows), seed))
    there = np.flatnonzero(rows.exists)
    contexts = [t[m].tolist() for t, m in zip(seen.tokens, seen.mask, strict=True)]
    asks = [Ask(contexts[rows.context[n]], int(seed[n]) & 0x7FFFFFFF) for n in there]
    kept, vocabulary = room.kept_to_train(parts), parts.task.vocab_size
    how = Limits(
        max_tokens=request.how.max_tokens,
        temperature=float(request.how.temperature),
        end=tuple(map(int, parts.task.end)),
        vocabulary=vocabulary,
        top_k=request.how.top_k,
        top_p=float(request.how.top_p),
        most_kept=0 if kept is None else supports.most(kept, vocabulary),
    )
    source = Source(
        step=version,
        mark=jax.tree.leaves(state.params)[0],
        params=lambda: peers.fetch(frozen.join(state.params, state.frozen)),
        config=parts.config,
        task=parts.task,
    )
    drawn = present(parts.engine).draw(asks, how, source)
    given = blank(parts, request, len(seed), np)
    for n, one in zip(there, drawn.completions, strict=True):
        if one is not None:
            count = len(one.tokens)
            given.tokens[n, :count], given.mask[n, :count] = one.tokens, True
            given.logp[n, :count] = np.minimum(one.logp, 0.0)
            given.finished[n] = one.finished
            if kept is not None:
                given.support[n, :count] = supports.of_ids(one.kept, kept)
    return given, drawn


def grade(parts: Subject, prompts: Prompts, rollouts: Rollouts) -> jax.Array:
    """`[N]` outcomes by the task's verifier as a JAX function, NaN of missing rows."""
    outcome = reward.on_device(parts.task, prompts, rollouts)
    return jnp.where(jnp.any(rollouts.mask, -1), outcome, jnp.nan)


def blank(parts: Components, request: Request, rows: int, xp: Any) -> Given:
    """No completion: each of the rows is missing; arrays of numpy or of JAX, `xp`."""
    shape, kept = (rows, request.how.max_tokens), room.kept_to_train(parts)
    return Given(
        tokens=xp.full(shape, parts.task.pad, xp.int32),
        mask=xp.zeros(shape, bool),
        logp=xp.zeros(shape, xp.float32),
        finished=xp.ones(rows, bool),  # what is missing was not cut off
        support=None if kept is None else xp.zeros((*shape, *kept.shape), kept.dtype),
    )


def shapes(parts: Components, request: Request, seed: jax.Array) -> Given:
    """Shapes of what the engine gives."""
    return jax.eval_shape(lambda: blank(parts, request, seed.shape[0], jnp))


def rollouts(
    parts: Components, state: TrainState, request: Request, given: Given
) -> tuple[Rollouts, Mapping[str, Pair]]:
    """Completions of an engine as rollouts, and how far its log-probs are off.

    Log-probs of the policy, entropy and score norms, which no engine gives, are the
    trainer's, of one pass with the parameters that drew. So `logp_policy` rounds as the
    trainer does, and `logp_behaviour` as the engine. Where kept sets are noted all are
    within them.
    """
    rows, mask = present(request.rows), given.mask
    stats = update.token_stats(
        draw.policy(parts, state),
        state.params,
        request.contexts,
        given.tokens,
        mask,
        rows.context,
        optimise.settings(parts.config),
        given.support,
    )
    off = jnp.abs(given.logp - stats.logp)
    made = Rollouts(
        tokens=given.tokens,
        mask=mask,
        logp_behaviour=given.logp,
        logp_policy=jnp.where(mask, stats.logp, 0.0),
        entropy=jnp.where(mask, stats.entropy, 0.0),
        score_sq_norm=jnp.where(mask, jnp.maximum(stats.score_sq_norm, 0.0), 0.0),
        finished=given.finished,
        prompt=rows.prompt,
        member=rows.member,
        context=rows.context,
        exists=rows.exists,
        support=given.support,
    )
    gaps = {
        "engine/gap_nats": metrics.mean(off, mask),
        "engine/gap_max_nats": metrics.one(jnp.max(off, where=mask, initial=0.0)),
    }
    return jax.tree.map(shard_rows, made), gaps
