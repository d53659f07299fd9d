"""Selection of prompts: candidates are probed before they are trained on.

Every `reflection.queries.every` steps a few completions of each candidate are drawn and
scored; a rule keeps the prompts from which the policy can learn.

References:
    Xu et al. 2025, "Direct Reasoning Optimization", arXiv:2506.13351, data filtering.
"""

import dataclasses

import jax
import jax.numpy as jnp

from curax import data, reflect
from curax.arrays import grids, metrics
from curax.arrays.keys import stage_key
from curax.arrays.metrics import Tally
from curax.config import Queries
from curax.settings.config_types import present
from curax.step import draw, stages
from curax.step.methods import references
from curax.step.methods.candidates import flatness, null_chance, pool, worst_rank
from curax.step.methods.references import References
from curax.step.types import Components, Driver, Method, Request, StepRollouts
from curax.types import Chosen, Prompts, Rollouts, TrainState

NAME = "queries"
Scores = tuple[jax.Array, ...]  # [F / B, B] float32 each


def rule(parts: Components) -> Queries:
    """Options of the selection: `config.reflection.queries`."""
    return present(present(parts.config.reflection).queries)


def init(drive: Driver, parts: Components, state: TrainState, what: None) -> Chosen:
    """State of the selection before any candidate was probed."""
    count = rule(parts).every * parts.config.sampling.prompts
    return Chosen(
        ids=jnp.full(count, -1, jnp.int32),
        level=jnp.float32(jnp.nan),
        kept=jnp.float32(jnp.nan),
        tokens=jnp.float32(0),
    )


def prompt_ids(parts: Components, state: TrainState) -> jax.Array:
    """`[B]` int32, ids of the next selected prompts."""
    count, ids = parts.config.sampling.prompts, state.methods[NAME].ids
    start = (state.step * count) % ids.shape[0]
    return jax.lax.dynamic_slice_in_dim(ids, start, count)


def choose(
    drive: Driver, parts: Components, state: TrainState, what: None
) -> tuple[TrainState, jax.Array]:
    """The train state, with a new selection where one is due, and the prompts of it."""

    def due(carry: tuple[jax.Array, Chosen, jax.Array]) -> jax.Array:
        return carry[0]

    def select(
        carry: tuple[jax.Array, Chosen, jax.Array],
    ) -> tuple[jax.Array, Chosen, jax.Array]:
        ids = drive.call(candidates, parts, state)
        found = all_scores(drive, parts, state, ids)
        new, position = drive.call(chosen, parts, state, ids, found)
        return jnp.bool_(False), new, position

    # A branch would be taken in every step once runs are mapped over seeds.
    start = drive.call(is_due, parts, state), state.methods[NAME], state.position
    _, now, position = drive.repeat(due, select, start)
    methods = {**state.methods, NAME: now}
    state = dataclasses.replace(state, methods=methods, position=position)
    return state, drive.call(prompt_ids, parts, state)


def is_due(parts: Components, state: TrainState) -> jax.Array:
    """`[]` bool: whether prompts are selected anew before this step."""
    return state.step % rule(parts).every == 0


def candidates(parts: Components, state: TrainState) -> jax.Array:
    """`[F / B, B]` int32 ids of the next candidates."""
    how, count = rule(parts), parts.config.sampling.prompts
    ids = data.prompt_ids(
        state.seed,
        state.position,
        count=how.candidates * how.every * count,
        num_prompts=parts.task.num_prompts,
    )
    return ids.reshape(-1, count)


def all_scores(
    drive: Driver, parts: Components, state: TrainState, ids: jax.Array
) -> Scores:
    """Probe scores of all candidates, B at a time.

    Returns:
        `[F / B, B]` float32 each, as of `probe_scores`.
    """
    blocks = ids.shape[0]

    def more(carry: tuple[jax.Array, Scores]) -> jax.Array:
        return carry[0] < blocks

    def next_block(carry: tuple[jax.Array, Scores]) -> tuple[jax.Array, Scores]:
        number, found = carry
        some = drive.call(block, parts, ids, number)
        prompts = drive.call_task(draw.prompts_of, parts, some)
        reference = drive.call_task(references.references_of, parts, prompts)
        request = drive.call(ask, parts, state, prompts, number)
        rollouts = drive.draw(parts, state, request)
        new = drive.call(probe_scores, parts, state, request, rollouts, reference)
        return number + 1, drive.call(put, parts, found, new, number)

    empty = tuple(jnp.zeros(ids.shape, jnp.float32) for _ in range(4))
    return drive.repeat(more, next_block, (jnp.int32(0), empty))[1]


def block(parts: Components, ids: jax.Array, number: jax.Array) -> jax.Array:
    """`[B]` int32, row `number` of the candidates."""
    return ids[number]


def put(parts: Components, found: Scores, new: Scores, number: jax.Array) -> Scores:
    """The scores with row `number` set."""
    return tuple(x.at[number].set(y) for x, y in zip(found, new, strict=True))


def ask(
    parts: Components, state: TrainState, prompts: Prompts, number: jax.Array
) -> Request:
    """Request for a few completions of each of B candidates.

    Args:
        parts: components of the run.
        state: train state at the start of the step.
        prompts: B candidates.
        number: `[]` int32, row of the candidates, folded into the random key.
    """
    key = jax.random.fold_in(stage_key(state.seed, state.step, "queries"), number)
    return draw.plain(prompts, rule(parts).draws, key, draw.settings(parts))


def probe_scores(
    parts: Components,
    state: TrainState,
    request: Request,
    rollouts: Rollouts,
    reference: References,
) -> Scores:
    """Probe scores of B candidates: difficulty, spread, its significance, and cost.

    Args:
        parts: components of the run.
        state: train state at the start of the step.
        request: of `ask`.
        rollouts: its completions.
        reference: `[B, Y]` tokens and mask, their answers.

    Returns:
        `[B]` float32 each: worst rank of the reference after the best thought; largest
        spread of a token, nats; probability that noise alone gives one as large; tokens
        drawn.
    """
    thought = references.thoughts(rollouts, parts.task.delimiter)
    wanted, mask = reference
    own = wanted[rollouts.prompt], mask[rollouts.prompt]
    given = rollouts.tokens, thought, own
    index = grids.index(rollouts, (wanted.shape[0], request.group))

    def read(*, ranks):
        args = parts, state, request.contexts, rollouts.context, *given
        return grids.grid(references.logprobs(*args, ranks=ranks), index, fill=0)

    logp, rank = read(ranks=False), read(ranks=True)
    exists = grids.grid(rollouts.exists & (thought > 0), index, fill=False)
    exists = reflect.scored(logp, exists, mask)
    clip = {"clip_nats": present(parts.config.reflection).clip_nats}
    length = jnp.sum(rollouts.mask, -1, dtype=jnp.float32)
    return (
        worst_rank(rank, exists, mask),
        flatness(logp, exists, mask, **clip),
        null_chance(logp, exists, mask, **clip),
        jnp.sum(grids.grid(length, index, fill=0.0), -1),
    )


def chosen(
    parts: Components, state: TrainState, ids: jax.Array, found: Scores
) -> tuple[Chosen, jax.Array]:
    """Prompts selected for the next steps, and the data position after the candidates.

    Args:
        parts: components of the run.
        state: train state at the start of the step.
        ids: `[F / B, B]` int32, `candidates`.
        found: `[F / B, B]` float32 each, `all_scores`.
    """
    before, every = state.methods[NAME], ids.reshape(-1)
    *scores, tokens = (x.reshape(-1) for x in found)
    keep, level = stages.several(
        parts.config, "reflection.queries.keep", *scores, before.level
    )
    count = before.ids.shape[0]
    ids = pool(
        keep,
        before.ids,
        every,
        count=count,
        carried=int(rule(parts).carried * count + 0.5),
    )
    kept = jnp.mean(keep, dtype=jnp.float32)
    new = Chosen(ids=ids, level=level, kept=kept, tokens=jnp.sum(tokens))
    return new, state.position + every.shape[0]


def metrics_of(
    drive: Driver, parts: Components, state: TrainState, drawn: StepRollouts
) -> Tally:
    """Metrics: share of candidates that were kept, and tokens drawn to probe them."""
    now: Chosen = state.methods[NAME]
    paid = jnp.where(is_due(parts, state), now.tokens, 0.0)
    return Tally(
        means={"query/kept_fraction": metrics.one(now.kept)},
        counts={"query/tokens": paid, "rollout/tokens": paid},
    )


METHOD = Method(
    name=NAME,
    init=init,
    choose=choose,
    metrics=metrics_of,
)
