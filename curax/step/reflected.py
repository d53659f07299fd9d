"""R3 in a run: completions rewarded by how likely their thought makes the reference.

    renewed -> draw -> scored -> absorb -> learn

The scorer runs over context, thought and reference with the same model as sampler and
trainer; the answer of the policy itself is discarded. `renewed` looks at prompts before
they are trained on, and leaves out those that have nothing to teach.
"""

import dataclasses
from functools import partial
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp

from curax import allocate, data, hint, reflect, update
from curax.arrays import grids, masked
from curax.arrays.keys import stage_key
from curax.rollout import extend, prefill
from curax.step import stages
from curax.step.build import Parts
from curax.step.draws import at, drawn_from, grid_of, policy
from curax.step.optimise import settings
from curax.step.pipeline import Scored
from curax.types import Chosen, Contexts, Prompts, Rollouts, TrainState

References = tuple[jax.Array, jax.Array]  # [B, Y] int32 tokens and bool mask


@flax.struct.dataclass(kw_only=True)
class Thoughts:
    """Where the thinking part of completions ends."""

    length: jax.Array  # [N] int32 tokens, the delimiter included
    found: jax.Array  # [N] bool, False: there is no delimiter


def thoughts(rollouts: Rollouts, delimiter: tuple[int, ...]) -> Thoughts:
    """The thinking parts of completions: up to the first delimiter."""
    tokens, mask = rollouts.tokens, rollouts.mask
    width, size = tokens.shape[-1], len(delimiter)
    here = jnp.ones((tokens.shape[0], width), bool)
    for k, token in enumerate(delimiter):
        fits = jnp.pad((tokens == token) & mask, ((0, 0), (0, size)))
        here = here & fits[:, k : k + width]
    found = jnp.any(here, -1)
    length = jnp.argmax(here, -1).astype(jnp.int32) + size
    return Thoughts(length=jnp.where(found, length, 0), found=found)


def logprobs(
    parts: Parts,
    state: TrainState,
    contexts: Contexts,
    context: jax.Array,
    tokens: jax.Array,
    length: jax.Array,
    reference: References,
    *,
    ranks: bool = False,
) -> jax.Array:
    """Log-probs of references behind thoughts, under the scorer, at temperature 1.

    Args:
        parts: of the run.
        state: at the start of the step.
        contexts: `[C, P]`.
        context: `[N]` int32 in [0, C).
        tokens: `[N, T]` int32, completions.
        length: `[N]` int32, of their thoughts.
        reference: `[N, Y]` tokens and mask.
        ranks: ranks in the vocabulary instead, 1 the likeliest.

    Returns:
        `[N, Y]` float32 nats, or ranks; anything finite off the mask.
    """
    tokens, mask, columns = grids.append_after(tokens, length, *reference)
    how = settings(parts.config)
    most = how.micro_batches
    count = next(k for k in range(most, 0, -1) if tokens.shape[0] % k == 0)
    how = dataclasses.replace(how, temperature=1.0, micro_batches=count)
    params = state.params if state.scorer is None else state.scorer
    model = policy(parts, state)
    if not ranks:
        args = model, params, contexts, tokens, mask, context, how
        return jnp.take_along_axis(update.logprobs(*args), columns, -1)
    prefix = prefill(model, params, contexts)

    def read(rows):
        tokens, context = rows
        seen = contexts.mask[context]
        features = extend(model, params, prefix.take(context), seen, tokens)
        head, chunk = model.head(params), how.vocab_chunk
        return (), masked.rank(features, head, tokens, chunk=chunk)

    rank = update.over_parts(read, (tokens, context), mask, how)[1]
    return jnp.take_along_axis(rank, columns, -1)


def scored(
    parts: Parts,
    state: TrainState,
    sampled: tuple[Prompts, Contexts, Rollouts],
    reference: References | None = None,
) -> Scored:
    """Rewards of what was drawn.

        reward = R3 + length_weight * length(answer, reference), then the rubric

    Args:
        parts: of the run.
        state: at the start of the step.
        sampled: prompts, contexts, rollouts.
        reference: `[B, Y]` tokens and mask, if the host has read them.
    """
    how, (prompts, contexts, rollouts) = parts.config.reflection, sampled
    assert how
    if reference is None:
        assert parts.task.reference
        reference = parts.task.reference(prompts)
    wanted, mask = reference
    own = wanted[rollouts.prompt], mask[rollouts.prompt]
    thought = thoughts(rollouts, parts.task.delimiter)
    index = grids.index(rollouts, grid_of(parts.config))

    def grid(values, fill: Any = 0.0):
        return grids.grid(values, index, fill=fill)

    def read(tokens, length):
        given = parts, state, contexts, rollouts.context
        return grid(logprobs(*given, tokens, length, own))

    logp = read(rollouts.tokens, thought.length)
    exists = grid(rollouts.exists & thought.found, fill=False)
    exists = reflect.scored(logp, exists, mask)
    baseline = None
    if how.baseline:
        sizes = {"delimiter": parts.task.delimiter, "pad": parts.task.pad}
        baseline = read(*how.baseline(rollouts.tokens, thought.length, **sizes))
    found = reflect.certainty(
        logp,
        exists,
        mask,
        weights=partial(stages.reference_weights, parts.config),
        clip_nats=how.clip_nats,
        leave_one_out=how.leave_one_out,
        baseline=baseline,
    )
    reward, rest = found.value, jnp.zeros_like(found.value)
    said = jnp.sum(rollouts.mask, -1, dtype=jnp.int32) - thought.length
    if how.length:
        length = jnp.sum(mask, -1, dtype=jnp.int32)[:, None]
        earned = stages.length_reward(parts.config, grid(said, fill=0), length)
        rest = how.length_weight * earned
        reward = reward + rest
    if how.rubric:
        fit = grid(rollouts.finished & (said > 0), fill=False)
        ruled, exists = stages.apply_rubric(parts.config, reward, exists, fit)
        reward, rest = ruled, rest + ruled - reward

    def rows(values):
        return values[rollouts.prompt, rollouts.slot]

    fine = rows(exists) & rollouts.exists
    likely = jnp.exp(jnp.minimum(rows(found.value), 0.0))
    return Scored(
        outcome=jnp.where(fine, likely, jnp.nan),
        reward=rows(reward),
        rest=rows(rest),
        thought=thought.length,
        certainty=found,
        reference=wanted,
        reference_mask=mask,
    )


# ----- which prompts are worth training on


def none_chosen(parts: Parts) -> Chosen:
    """Nothing was looked at yet."""
    assert parts.config.reflection
    how = parts.config.reflection.queries
    assert how
    return Chosen(
        ids=jnp.full(how.every * parts.config.sampling.prompts, -1, jnp.int32),
        level=jnp.float32(jnp.nan),
        kept=jnp.float32(jnp.nan),
        tokens=jnp.float32(0),
    )


def is_due(parts: Parts, state: TrainState) -> jax.Array:
    """`[]` bool: prompts are to be chosen anew before this step."""
    assert parts.config.reflection
    assert parts.config.reflection.queries
    return state.step % parts.config.reflection.queries.every == 0


def candidates(parts: Parts, state: TrainState) -> jax.Array:
    """`[F / B, B]` int32: ids of the next candidates."""
    assert parts.config.reflection
    how, count = parts.config.reflection.queries, parts.config.sampling.prompts
    assert how
    ids = data.prompt_ids(
        state.seed,
        state.position,
        count=how.candidates * how.every * count,
        num_prompts=parts.task.num_prompts,
    )
    return ids.reshape(-1, count)


def looked(
    parts: Parts,
    state: TrainState,
    ids: jax.Array,
    number: jax.Array,
    prompts: Prompts | None = None,
    reference: References | None = None,
) -> tuple[jax.Array, ...]:
    """How hard and how flat some candidates are.

    Args:
        parts: of the run.
        state: at the start of the step.
        ids: `[B]` int32.
        number: `[]` int32, which B of the candidates these are.
        prompts: theirs, if the host has read them.
        reference: `[B, Y]` tokens and mask, likewise.

    Returns:
        `[B]` float32 each: the worst ranks of the reference after the best thought; the
        largest spread of a token, nats; how likely noise alone makes one as large; the
        tokens drawn to find that out.
    """
    assert parts.config.reflection
    how = parts.config.reflection.queries
    assert how
    if prompts is None:
        prompts = parts.task.prompts(ids)
    if reference is None:
        assert parts.task.reference
        reference = parts.task.reference(prompts)
    count, contexts = ids.shape[0], hint.none(prompts)
    plan = allocate.plan(jnp.full(count, how.draws, jnp.int32), rows=how.draws * count)
    key = jax.random.fold_in(stage_key(*at(state), "queries"), number)
    rollouts = drawn_from(parts, state, prompts, contexts, plan, key)
    thought = thoughts(rollouts, parts.task.delimiter)
    wanted, mask = reference
    own = wanted[rollouts.prompt], mask[rollouts.prompt]
    given = rollouts.tokens, thought.length, own
    index = grids.index(rollouts, (count, how.draws))

    def read(*, ranks):
        args = parts, state, contexts, rollouts.context, *given
        return grids.grid(logprobs(*args, ranks=ranks), index, fill=0)

    logp, rank = read(ranks=False), read(ranks=True)
    exists = grids.grid(rollouts.exists & thought.found, index, fill=False)
    exists = reflect.scored(logp, exists, mask)
    clip = {"clip_nats": parts.config.reflection.clip_nats}
    length = jnp.sum(rollouts.mask, -1, dtype=jnp.float32)
    return (
        reflect.worst_rank(rank, exists, mask),
        reflect.flatness(logp, exists, mask, **clip),
        reflect.null_chance(logp, exists, mask, **clip),
        jnp.sum(grids.grid(length, index, fill=0.0), -1),
    )


def chosen(
    parts: Parts,
    state: TrainState,
    ids: jax.Array,
    found: tuple[jax.Array, ...],
) -> TrainState:
    """The state with the prompts of the next steps.

    Args:
        parts: of the run.
        state: at the start of the step.
        ids: `[F / B, B]` int32, `candidates`.
        found: `[F / B, B]` float32 each, `looked`.
    """
    assert parts.config.reflection
    how = parts.config.reflection.queries
    assert how
    assert state.chosen is not None
    every = ids.reshape(-1)
    *looks, tokens = (x.reshape(-1) for x in found)
    keep, level = stages.select_prompts(parts.config, looks, state.chosen.level)
    count = state.chosen.ids.shape[0]
    ids = reflect.chosen(
        keep,
        state.chosen.ids,
        every,
        count=count,
        carried=int(how.carried * count + 0.5),
    )
    kept = jnp.mean(keep, dtype=jnp.float32)
    return dataclasses.replace(
        state,
        chosen=Chosen(ids=ids, level=level, kept=kept, tokens=jnp.sum(tokens)),
        position=state.position + every.shape[0],
    )


def renewed(parts: Parts, state: TrainState) -> TrainState:
    """The state before a step, with prompts chosen anew where that is due."""

    def look(carry):
        ids = candidates(parts, state)
        numbers = jnp.arange(ids.shape[0], dtype=jnp.int32)
        found = jax.lax.map(lambda x: looked(parts, state, *x), (ids, numbers))
        new = chosen(parts, state, ids, found)
        return jnp.bool_(False), new.chosen, new.position

    # A branch would be taken in every step once runs are mapped over seeds.
    carry = is_due(parts, state), state.chosen, state.position
    _, now, position = jax.lax.while_loop(lambda carry: carry[0], look, carry)
    return dataclasses.replace(state, chosen=now, position=position)
