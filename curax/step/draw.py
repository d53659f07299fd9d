"""Draws: prompt ids, allocation, sampling, and collection of completions.

    next_ids -> ask -> (methods) -> allocated -> draw and grade -> collect

`attempt` runs all of these, `next_request` those before the draw; a driver decides how
completions are drawn and graded. Prompts come in order, or as a method selects them;
pilots or the memory estimate their difficulty; the allocator gives each a number of
completions; the sampler draws these at once, in chunks, or in rounds between which a
stopping rule is tested. `draw` serves every `Request`, also those that are not of a
step.
"""

import dataclasses
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from curax import allocate, data, hint, reward, rollout
from curax import memory as memories
from curax.arrays import choice, frozen, masked, metrics
from curax.arrays.keys import stage_key
from curax.arrays.turns import Episodes
from curax.config import Config
from curax.settings.config_types import present
from curax.settings.sizes import cache_bytes, truncates
from curax.step import stages
from curax.step.types import (
    Components,
    Driver,
    Graded,
    Groups,
    Request,
    StepRequest,
    StepRollouts,
    Subject,
)
from curax.types import (
    Contexts,
    DrawRows,
    Environment,
    Model,
    PromptMemory,
    Prompts,
    Rollouts,
    TrainState,
    Weights,
)


def attempt(
    drive: Driver,
    parts: Components,
    state: TrainState,
    drawn: StepRollouts | None,
    ids: jax.Array | None = None,
) -> StepRollouts:
    """Graded completions of the next B prompts, merged with those of earlier attempts.

    Args:
        drive: driver that calls functions, draws and grades completions.
        parts: components of the run.
        state: train state at the start of the step.
        drawn: of earlier attempts in this step; None: this is the first.
        ids: `[B]` int32, of these prompts instead; None: of the next ones.
    """
    request = next_request(drive, parts, state, drawn, ids)
    graded = drive.draw_and_grade(parts, state, request)
    return drive.call(collect, parts, request, graded, drawn)


def next_request(
    drive: Driver,
    parts: Components,
    state: TrainState,
    drawn: StepRollouts | None = None,
    ids: jax.Array | None = None,
) -> StepRequest:
    """Request for completions of the next B prompts; arguments as `attempt`."""
    number = drawn.attempts if drawn else jnp.int32(0)
    memory = drawn.memory if drawn else state.memory
    if ids is None:
        ids = drive.call(next_ids, parts, state, number)
    prompts = drive.call_task(prompts_of, parts, ids)
    request = drive.call(ask, parts, state, memory, prompts, number)
    for method in parts.methods:
        if method.before_draw:
            request = method.before_draw(drive, parts, state, request)
    return drive.call(allocated, parts, request)


# ----- which prompts


def policy(parts: Subject, state: Weights) -> Model:
    """The model as a function of its trained parameters."""
    return frozen.over(parts.model, state.frozen)


def in_turn(parts: Components) -> bool:
    """Whether prompts come in the order of the data, not selected by a method."""
    return not any(method.choose for method in parts.methods)


def next_ids(parts: Components, state: TrainState, attempt: jax.Array) -> jax.Array:
    """`[B]` int32 ids of the prompts of an attempt, in the order of the data."""
    count = parts.config.sampling.prompts
    return data.prompt_ids(
        state.seed,
        state.position + attempt * count,
        count=count,
        num_prompts=parts.task.num_prompts,
    )


def prompts_of(parts: Components, ids: jax.Array) -> Prompts:
    """Training prompts with these ids."""
    return parts.task.prompts(ids)


# ----- how many completions, in which contexts


def ask(
    parts: Components,
    state: TrainState,
    memory: PromptMemory,
    prompts: Prompts,
    number: jax.Array,
) -> StepRequest:
    """Request for completions of these prompts, before allocation.

    Contexts are without hints, but padded to the width of the widest hint.

    Args:
        parts: components of the run.
        state: train state at the start of the step.
        memory: difficulty memory, updated by earlier attempts of this step.
        prompts: B of them.
        number: `[]` int32, number of the attempt, folded into the random key.
    """
    sizes, prior = parts.config.sampling, parts.config.memory.prior
    return StepRequest(
        prompts=prompts,
        contexts=contexts_of(parts, prompts),
        rows=None,
        key=draw_key(state, number),
        group=sizes.group_size,
        how=to_train(parts),
        stops=parts.config.stop is not None,
        chunks=sizes.chunks,
        terms=parts.task.terms is not None,
        level=jnp.zeros(sizes.prompts, jnp.int32),
        known=memories.difficulty(memory, prompts.id, prior=prior),
        memory=memory,
    )


def contexts_of(parts: Components, prompts: Prompts) -> Contexts:
    """Contexts of prompts without hints, of the width of those with the widest hint."""
    how = parts.config.hint
    return hint.widened(prompts, how.width) if how else hint.none(prompts)


def settings(parts: Components) -> rollout.Settings:
    """How completions of a run are sampled: `config.sampling`."""
    sizes = parts.config.sampling
    return rollout.Settings(
        max_tokens=sizes.max_tokens,
        end=parts.task.end,
        pad=parts.task.pad,
        temperature=sizes.temperature,
        top_k=sizes.top_k,
        top_p=sizes.top_p,
        slots=sizes.slots,
        cache_bytes=cache_bytes(parts.config),
    )


def to_train(parts: Components) -> rollout.Settings:
    """`settings`, with what an update reads: kept sets where these are replayed."""
    noted = parts.config.sampling.replay_support
    return dataclasses.replace(settings(parts), support=noted)


def draw_key(state: TrainState, number: jax.Array) -> jax.Array:
    """Random key of all draws of an attempt."""
    key = stage_key(state.seed, state.step, "rollout")
    return jax.random.fold_in(key, number)


def allocated(
    parts: Components, request: StepRequest, wanted: jax.Array | None = None
) -> StepRequest:
    """The request with rows of the completions that the allocator gives prompts.

    Args:
        parts: components of the run.
        request: before allocation.
        wanted: `[B]` bool, False: nothing is drawn of this prompt; None: of each.
    """
    most = parts.config.sampling.group_size
    bounds = {"budget": parts.rows, "most": most}
    counts = stages.called(parts.config, "allocate", request.known, **bounds)
    drawn = counts if wanted is None else jnp.where(wanted, counts, 0)
    rows = allocate.rows_to_draw(drawn, rows=parts.rows)
    return dataclasses.replace(request, counts=counts, rows=rows)


def plain(
    prompts: Prompts, each: int, key: jax.Array, how: rollout.Settings
) -> Request:
    """Request for equally many completions of every prompt, without hints.

    Args:
        prompts: B of them.
        each: completions of a prompt.
        key: `[]` random key of the draw; or `[B]`, one for each prompt.
        how: how they are sampled.
    """
    count = prompts.tokens.shape[0]
    counts = jnp.full(count, each, jnp.int32)
    return Request(
        prompts=prompts,
        contexts=hint.none(prompts),
        rows=allocate.rows_to_draw(counts, rows=count * each),
        key=key,
        group=each,
        how=how,
    )


# ----- rows


def draw(parts: Subject, state: Weights, request: Request) -> Rollouts:
    """`[N]` completions of a request, sampled from the policy of a state.

    An environment of the task answers their turns, whoever asks for them.
    Where the request stops, the rule is tested during sampling, with the task's
    verifier as a JAX function; `round_rows` is for host verifiers.
    """
    how = request.how
    if request.stops:
        assert isinstance(parts, Components)
        how = dataclasses.replace(how, stopping=stopping(parts, request))
    environment = parts.task.environment
    if isinstance(environment, Environment):
        given = request.prompts, parts.task.pad
        how = dataclasses.replace(how, episodes=Episodes.of(environment, *given))
    return rollout.sample(
        policy(parts, state),
        state.params,
        request.contexts,
        present(request.rows),
        request.key,
        how,
        prefix=request.prefix,
    )


def stopping(parts: Components, request: Request) -> rollout.Stopping:
    """The stopping rule of a run, on completions of a request."""
    return rollout.Stopping(
        met=partial(stages.called, parts.config, "stop.rule"),
        outcome=partial(reward.of_tokens, parts.task, request.prompts),
        size=present(parts.config.stop).round_size,
        most=request.group,
    )


# ----- in chunks, and in rounds


def prefill(parts: Subject, state: Weights, request: Request) -> rollout.Prefix:
    """KV cache of the contexts of a request, shared by several draws of them."""
    return rollout.prefill(policy(parts, state), state.params, request.contexts)


def chunk_rows(parts: Subject, request: Request, number: jax.Array) -> DrawRows:
    """Rows of chunk `number` of a request: N / `request.chunks` of them.

    Completions equal the same rows of one draw: their keys are a function of prompt and
    member.
    """
    rows = present(request.rows)
    size = rows.prompt.shape[0] // request.chunks
    return jax.tree.map(
        lambda leaf: jax.lax.dynamic_slice_in_dim(leaf, number * size, size), rows
    )


def round_rows(parts: Components, request: Request, pool: Graded | None) -> DrawRows:
    """Rows of the next round, of prompts whose stopping rule is not met.

    Completions equal those of `draw`, which tests the rule during sampling: keys are a
    function of prompt and member.
    """
    sizes, stop = parts.config.sampling, present(parts.config.stop)
    drawn, counts = next_round(parts, request, pool)
    rows = allocate.rows_to_draw(counts, rows=sizes.prompts * stop.round_size)
    return dataclasses.replace(rows, member=rows.member + drawn[rows.prompt])


def add_round(parts: Components, pool: Graded | None, new: Graded) -> Graded:
    """The pool with the graded completions of another round.

    Row b G + s of a pool is member s of prompt b.
    """
    most, rollouts = parts.config.sampling.group_size, new.rollouts
    if pool is None:
        place = jnp.arange(parts.rows, dtype=jnp.int32)
        empty = jax.tree.map(
            lambda leaf: jnp.zeros((parts.rows, *leaf.shape[1:]), leaf.dtype), rollouts
        )
        empty = dataclasses.replace(
            empty,
            tokens=jnp.full_like(empty.tokens, parts.task.pad),
            prompt=place // most,
            member=place % most,
            context=place // most,
        )
        missing = jnp.full(parts.rows, jnp.nan, jnp.float32)
        pool = dataclasses.replace(new, rollouts=empty, outcome=missing)
    row = rollouts.prompt * most + rollouts.member
    row = jnp.where(rollouts.exists, row, parts.rows)  # out: dropped

    def put(old, new):
        return old.at[row].set(new, mode="drop")

    return dataclasses.replace(
        pool,
        rollouts=jax.tree.map(put, pool.rollouts, rollouts),
        outcome=put(pool.outcome, new.outcome),
    )


def next_round(
    parts: Components, request: Request, pool: Graded | None
) -> tuple[jax.Array, jax.Array]:
    """`[B]` int32: completions drawn so far, and completions of the next round.

    A prompt draws until its rule is met or it has what the allocator gave it.
    """
    stop, rows = present(parts.config.stop), present(request.rows)
    there = rows.exists.astype(jnp.int32)
    given = jnp.zeros(parts.config.sampling.prompts, jnp.int32)
    most = jnp.minimum(given.at[rows.prompt].add(there), request.group)
    if pool is None:
        return jnp.zeros_like(most), jnp.minimum(stop.round_size, most)
    seen = pool.groups
    drawn = jnp.sum(seen.row < parts.rows, -1, dtype=jnp.int32)
    done = stages.called(parts.config, "stop.rule", seen.outcome, seen.exists)
    return drawn, jnp.where(done, 0, jnp.minimum(stop.round_size, most - drawn))


def wants_round(parts: Components, request: Request, pool: Graded) -> jax.Array:
    """`[]` bool: whether any prompt has a next round."""
    return jnp.any(next_round(parts, request, pool)[1] > 0)


# ----- collection


def collect(
    parts: Components, request: StepRequest, graded: Graded, drawn: StepRollouts | None
) -> StepRollouts:
    """The step's completions with metrics and the updated memory, merged with `drawn`.

    Completions drawn with a hint enter neither the memory nor the metrics of outcomes.

    Args:
        parts: components of the run.
        request: the request.
        graded: its completions and outcomes.
        drawn: of earlier attempts, whose closed groups are replaced by open new ones;
            None: there were none.
    """
    cfg, rollouts, outcome = parts.config, graded.rollouts, graded.outcome
    seen = graded.groups
    plain = dataclasses.replace(
        seen, exists=seen.exists & (request.level == 0)[:, None]
    )
    tally = metrics.of_rollouts(rollouts, plain.outcome, plain.exists, graded=outcome)
    tally.counts["allocate/dropped_rows"] = dropped_rows(parts, request)
    if truncates(cfg) and cfg.sampling.engine is None:  # which tells not what it cut
        cut = metrics.mean(choice.cut_mass(rollouts), rollouts.mask)
        tally.means["sampler/cut_mass"] = cut
    if request.explored:
        tally = metrics.merge(tally, request.explored)
    if cfg.stop is None and not request.visited:
        tally.means.update(forecast(parts, request, plain))
    new = StepRollouts(
        prompts=request.prompts,
        contexts=request.contexts,
        rollouts=rollouts,
        outcome=outcome,
        known=request.known,
        level=request.level,
        memory=observe(
            parts, request.memory, request.prompts, plain, again=request.visited
        ),
        attempts=jnp.int32(1),
        tally=tally,
        reference=graded.reference,
        found=graded.found,
        shape=graded.shape,
    )
    return new if drawn is None else replace_closed(cfg, drawn, new)


def observe(
    parts: Components,
    memory: PromptMemory,
    prompts: Prompts,
    seen: Groups,
    *,
    again: bool = False,
) -> PromptMemory:
    """Difficulty memory updated by graded completions; `again`: without discount."""
    forgets = 1.0 if again else memories.discount(parts.config.memory.half_life)
    return memories.observe(
        memory,
        prompts.id,
        seen.outcome,
        seen.score_sq_norm,
        seen.length,
        seen.exists,
        discount=forgets,
    )


def dropped_rows(parts: Components, request: StepRequest) -> jax.Array:
    """`[]` float32, completions that the allocator requests and a step cannot draw.

    Those beyond the group size or beyond the rows of a step, and negative counts.
    """
    counts = present(request.counts)
    given = jnp.clip(counts, 0, parts.config.sampling.group_size)
    over = jnp.maximum(jnp.sum(given) - parts.rows, 0)
    beyond = jnp.sum(jnp.abs(counts - given)) + over
    return beyond.astype(jnp.float32)


def forecast(
    parts: Components, request: StepRequest, seen: Groups
) -> dict[str, tuple[jax.Array, jax.Array]]:
    """Predicted fraction of dead groups, and the z-score of the observed number.

    Over prompts with earlier draws; the weight is 0 where any outcome is fractional,
    which counts of right and wrong completions cannot predict.
    """
    known = request.known
    right, wrong = parts.config.memory.prior
    each = jnp.where(known.draws > 0, jnp.sum(seen.exists, -1, dtype=jnp.int32), 0)
    low, high = masked.extent(seen.outcome, seen.exists)
    expected, _, z = memories.dead_groups(
        known.solved + right,
        known.draws - known.solved + wrong,
        each,
        low == high,
        most=parts.config.sampling.group_size,
    )
    whole = (seen.outcome == 0) | (seen.outcome == 1) | ~seen.exists
    some = jnp.any(each > 0, keepdims=True) & jnp.all(whole)
    return {
        "forecast/dead_fraction": metrics.mean(expected[None], some),
        "forecast/dead_z": metrics.mean(z[None], some),
    }


def open_groups(config: Config, seen: Groups) -> jax.Array:
    """`[B]` bool: groups with a completion that passes the gate."""
    arrays = seen.outcome, seen.exists, seen.finished
    return jnp.any(stages.called(config, "gate", *arrays), -1)


def replace_closed(
    config: Config, old: StepRollouts, new: StepRollouts
) -> StepRollouts:
    """Completions in which the i-th open new group replaces the i-th closed old one.

    Replaced groups keep their place in the batch, and so their rows.

    Args:
        config: config of the run.
        old: of earlier attempts.
        new: of another attempt.
    """
    seen = new.groups
    fresh, closed = open_groups(config, seen), ~open_groups(config, old.groups)
    rank = jnp.cumsum(closed, dtype=jnp.int32) - 1
    source = jnp.argsort(~fresh, stable=True).astype(jnp.int32)[rank]  # [B]
    replaced = closed & (rank < jnp.sum(fresh, dtype=jnp.int32))  # [B]
    place = old.rollouts
    row = seen.row[source[place.prompt], place.member]  # [N], the new row for each old
    swapped = replaced[place.prompt]
    return dataclasses.replace(
        old,
        prompts=pick(new.prompts, old.prompts, replaced, source),
        contexts=pick(new.contexts, old.contexts, replaced, source),
        rollouts=pick_rows(new.rollouts, place, swapped, row),
        outcome=pick(new.outcome, old.outcome, swapped, row),
        known=pick(new.known, old.known, replaced, source),
        level=pick(new.level, old.level, replaced, source),
        memory=new.memory,
        attempts=old.attempts + 1,
        tally=metrics.merge(old.tally, new.tally),
    )


def pick(new: Any, old: Any, where: jax.Array, at: Any = ...) -> Any:
    """Entries `at` of new arrays, or their own, for the old ones `where` that is so."""

    def leaf(new, old):
        return jnp.where(where.reshape(-1, *(1,) * (old.ndim - 1)), new[at], old)

    return jax.tree.map(leaf, new, old)


def pick_rows(
    new: Rollouts, old: Rollouts, where: jax.Array, at: jax.Array
) -> Rollouts:
    """As `pick`, of completions, each in the place of the old one."""
    own = {name: getattr(old, name) for name in ("prompt", "member", "context")}
    return dataclasses.replace(pick(new, old, where, at), **own)
