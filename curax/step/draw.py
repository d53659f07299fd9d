"""Draws of a step: prompt ids, allocation, sampling, and collection of completions.

    next_ids -> ask -> (methods) -> allocated -> draw and grade -> collect

`attempt` runs all of these, `next_request` those before the draw; a driver decides how
completions are drawn and graded. Prompts come in order, or as a method selects them;
pilots or the memory estimate their difficulty; the allocator gives each a number of
completions; the sampler draws these at once, in chunks, or in rounds between which a
stopping rule is tested.
"""

import dataclasses
from functools import partial
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from curax import allocate, data, hint, rollout
from curax import memory as memories
from curax.arrays import frozen, masked, metrics
from curax.arrays.keys import stage_key
from curax.config import Config, cache_bytes, truncates
from curax.settings.config_types import present
from curax.step import stages
from curax.step.records import (
    Components,
    Driver,
    Graded,
    Groups,
    Request,
    StepRollouts,
    grid_of,
    groups,
)
from curax.types import Model, Plan, PromptMemory, Prompts, Rollouts, TrainState


def attempt(
    drive: Driver, parts: Components, state: TrainState, drawn: StepRollouts | None
) -> StepRollouts:
    """Graded completions of the next B prompts, merged with those of earlier attempts.

    Args:
        drive: driver that calls functions, draws and grades completions.
        parts: components of the run.
        state: train state at the start of the step.
        drawn: of earlier attempts in this step; None: this is the first.
    """
    request = next_request(drive, parts, state, drawn)
    graded = drive.draw_and_grade(parts, state, request)
    return drive.call(collect, parts, request, graded, drawn)


def next_request(
    drive: Driver,
    parts: Components,
    state: TrainState,
    drawn: StepRollouts | None = None,
) -> Request:
    """Request for completions of the next B prompts; arguments as `attempt`."""
    number = drawn.attempts if drawn else jnp.int32(0)
    memory = drawn.memory if drawn else state.memory
    ids = drive.call(next_ids, parts, state, number)
    prompts = drive.call_task(prompts_of, parts, ids)
    request = drive.call(ask, parts, state, memory, prompts, number)
    for method in parts.methods:
        if method.before_draw:
            request = method.before_draw(drive, parts, state, request)
    return drive.call(allocated, parts, request)


# ----- which prompts


def policy(parts: Components, state: TrainState) -> Model:
    """The model as a function of its trained parameters."""
    return frozen.over(parts.model, state.frozen)


def in_turn(parts: Components) -> bool:
    """Whether prompts come in the order of the data, not selected by a method."""
    return not any(method.prompt_ids for method in parts.methods)


def next_ids(parts: Components, state: TrainState, attempt: jax.Array) -> jax.Array:
    """`[B]` int32 ids of the prompts of an attempt."""
    for method in parts.methods:
        if method.prompt_ids:
            return method.prompt_ids(parts, state)
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
) -> Request:
    """Request for completions of these prompts, before allocation.

    Contexts are without hints, but padded to the width of the widest hint.

    Args:
        parts: components of the run.
        state: train state at the start of the step.
        memory: difficulty memory, updated by earlier attempts of this step.
        prompts: B of them.
        number: `[]` int32, number of the attempt, folded into the random key.
    """
    how, count = parts.config.hint, parts.config.sampling.prompts
    prior = parts.config.memory.prior
    return Request(
        prompts=prompts,
        contexts=hint.widened(prompts, how.width) if how else hint.none(prompts),
        level=jnp.zeros(count, jnp.int32),
        wanted=jnp.ones(count, bool),
        known=memories.difficulty(memory, prompts.id, prior=prior),
        counts=None,
        memory=memory,
        key=draw_key(state, number),
        rows=parts.rows,
    )


def draw_key(state: TrainState, number: jax.Array) -> jax.Array:
    """Random key of all draws of an attempt."""
    key = stage_key(state.seed, state.step, "rollout")
    return jax.random.fold_in(key, number)


def allocated(parts: Components, request: Request) -> Request:
    """The request with `counts`, the completions that the allocator gives prompts."""
    most = parts.config.sampling.group_size
    bounds = {"budget": parts.rows, "most": most}
    counts = stages.called(parts.config, "allocate", request.known, **bounds)
    return dataclasses.replace(request, counts=counts)


def plan_of(request: Request) -> Plan:
    """Plan of a request: its `request.rows` rows."""
    counts = jnp.where(request.wanted, present(request.counts), 0)
    return allocate.plan(counts, rows=request.rows)


# ----- rows


def draw(parts: Components, state: TrainState, request: Request) -> Rollouts:
    """`[N]` completions of a request, sampled from the policy at the start of the step.

    The stopping rule is tested during sampling, with the task's verifier as a JAX
    function; `draw_round` is for host verifiers.
    """
    stops = parts.config.stop and not request.whole
    plan = plan_of(request)
    return draw_plan(parts, state, request, plan, stops=bool(stops))


def draw_plan(
    parts: Components,
    state: TrainState,
    request: Request,
    plan: Plan,
    *,
    stops: bool = False,
    prefix: rollout.Prefix | None = None,
) -> Rollouts:
    """Completions of the rows of a plan.

    `prefix` is `rollout.prefill` of the contexts, where it was computed before.
    """
    sizes = parts.config.sampling

    def outcome(prompt, tokens, mask):
        target = jax.tree.map(lambda leaf: leaf[prompt], request.prompts.target)
        return parts.task.verify(target, tokens, mask).astype(jnp.float32)

    stopping = None
    if stops:
        stopping = rollout.Stopping(
            met=partial(stages.called, parts.config, "stop.rule"),
            outcome=outcome,
            size=present(parts.config.stop).round_size,
            most=sizes.group_size,
        )
    return rollout.sample(
        policy(parts, state),
        state.params,
        request.contexts,
        plan,
        request.key,
        max_tokens=sizes.max_tokens,
        end=parts.task.end,
        pad=parts.task.pad,
        temperature=sizes.temperature,
        top_k=sizes.top_k,
        top_p=sizes.top_p,
        slots=sizes.slots,
        cache_bytes=cache_bytes(parts.config),
        stopping=stopping,
        prefix=prefix,
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class CacheSize:
    """Size of a draw's KV cache; slots and contexts are those of all devices."""

    bytes: float  # of one device
    slots: int  # K
    wanted: int  # K without a bound
    contexts: int  # C
    prompt: int  # P, with the widest hint


def cache_size(parts: Components, mesh: Mesh | None) -> CacheSize:
    """Size of a draw's KV cache, from shapes; prefixes are held once.

    Args:
        parts: components of the run.
        mesh: of the run; None: one device.

    Raises:
        ConfigError: `sampling.cache_gib` has no room for a completion.
    """
    sizes, how, model = parts.config.sampling, parts.config.hint, parts.model

    def contexts(ids):
        prompts = parts.task.prompts(ids)
        return hint.widened(prompts, how.width) if how else hint.none(prompts)

    ids = np.zeros(sizes.prompts, np.int32)
    asked = contexts(ids) if parts.task.in_files else jax.eval_shape(contexts, ids)
    params = jax.eval_shape(model.init, jax.random.key(0))
    prefix = jax.eval_shape(partial(rollout.prefill, model), params, asked)
    cut = dict(mesh.shape) if mesh else {}
    tensor, (_, prompt) = cut.get("tensor", 1), asked.tokens.shape
    token = rollout.token_bytes(
        prefix.cache, asked, lambda heads: tensor if heads % tensor == 0 else 1
    )
    rows = parts.rows // sizes.chunks
    if stop := parts.config.stop:  # more are never open at a time
        rows = min(rows, sizes.prompts * stop.round_size)
    where = rollout.Places(
        contexts=sizes.prompts,
        prompt=prompt,
        steps=sizes.max_tokens,
        shards=cut.get("data", 1) * cut.get("fsdp", 1),
    )
    most = min(sizes.slots or rows, rows)
    slots = where.slots(most, bound=cache_bytes(parts.config), token=token)
    own, shared = where.tokens(slots)
    return CacheSize(
        bytes=token * (own + shared),
        slots=slots,
        wanted=most,
        contexts=sizes.prompts,
        prompt=prompt,
    )


# ----- in chunks, and in rounds


def prefill(parts: Components, state: TrainState, request: Request) -> rollout.Prefix:
    """KV cache of the contexts of a request, shared by its chunks."""
    return rollout.prefill(policy(parts, state), state.params, request.contexts)


def draw_chunk(
    parts: Components,
    state: TrainState,
    request: Request,
    prefix: rollout.Prefix,
    number: jax.Array,
) -> Rollouts:
    """Completions of chunk `number` of a request: N / `sampling.chunks` rows.

    Equal to the same rows of one draw: their keys are a function of prompt and slot.
    """
    size = parts.rows // parts.config.sampling.chunks
    plan = jax.tree.map(
        lambda leaf: jax.lax.dynamic_slice_in_dim(leaf, number * size, size),
        plan_of(request),
    )
    return draw_plan(parts, state, request, plan, prefix=prefix)


@flax.struct.dataclass(kw_only=True)
class Pool:
    """Graded completions of the rounds so far, row b G + s for slot s of prompt b."""

    rollouts: Rollouts  # [B G]
    outcome: jax.Array  # [B G] float32, NaN where missing


def draw_round(
    parts: Components, state: TrainState, request: Request, pool: Pool | None
) -> Rollouts:
    """Completions of the next round, for prompts whose stopping rule is not met.

    Equal to those of `draw`, which tests the rule during sampling: keys are a function
    of prompt and slot.
    """
    sizes, stop = parts.config.sampling, present(parts.config.stop)
    drawn, counts = next_round(parts, request, pool)
    plan = allocate.plan(counts, rows=sizes.prompts * stop.round_size)
    plan = dataclasses.replace(plan, slot=plan.slot + drawn[plan.prompt])
    return draw_plan(parts, state, request, plan)


def add_round(
    parts: Components, pool: Pool | None, rollouts: Rollouts, outcome: jax.Array
) -> Pool:
    """The pool with the graded completions of another round."""
    most = parts.config.sampling.group_size
    if pool is None:
        place = jnp.arange(parts.rows, dtype=jnp.int32)
        empty = jax.tree.map(
            lambda leaf: jnp.zeros((parts.rows, *leaf.shape[1:]), leaf.dtype), rollouts
        )
        empty = dataclasses.replace(
            empty,
            tokens=jnp.full_like(empty.tokens, parts.task.pad),
            prompt=place // most,
            slot=place % most,
            context=place // most,
        )
        missing = jnp.full(parts.rows, jnp.nan, jnp.float32)
        pool = Pool(rollouts=empty, outcome=missing)
    row = rollouts.prompt * most + rollouts.slot
    row = jnp.where(rollouts.exists, row, parts.rows)  # out: dropped

    def put(old, new):
        return old.at[row].set(new, mode="drop")

    return Pool(
        rollouts=jax.tree.map(put, pool.rollouts, rollouts),
        outcome=put(pool.outcome, outcome),
    )


def next_round(
    parts: Components, request: Request, pool: Pool | None
) -> tuple[jax.Array, jax.Array]:
    """`[B]` int32: completions drawn so far, and completions of the next round.

    A prompt draws until its rule is met or it has what the allocator gave it.
    """
    stop, plan = present(parts.config.stop), plan_of(request)
    there = plan.exists.astype(jnp.int32)
    given = jnp.zeros_like(request.level).at[plan.prompt].add(there)
    most = jnp.minimum(given, parts.config.sampling.group_size)
    if pool is None:
        return jnp.zeros_like(most), jnp.minimum(stop.round_size, most)
    seen = groups(grid_of(parts.config), pool.rollouts, pool.outcome)
    drawn = jnp.sum(seen.row < parts.rows, -1, dtype=jnp.int32)
    done = stages.called(parts.config, "stop.rule", seen.outcome, seen.exists)
    return drawn, jnp.where(done, 0, jnp.minimum(stop.round_size, most - drawn))


def wants_round(parts: Components, request: Request, pool: Pool) -> jax.Array:
    """`[]` bool: whether any prompt has a next round."""
    return jnp.any(next_round(parts, request, pool)[1] > 0)


# ----- collection


def collect(
    parts: Components, request: Request, graded: Graded, drawn: StepRollouts | None
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
    seen = groups(grid_of(cfg), rollouts, outcome)
    plain = dataclasses.replace(
        seen, exists=seen.exists & (request.level == 0)[:, None]
    )
    tally = metrics.of_rollouts(rollouts, plain.outcome, plain.exists, graded=outcome)
    tally.counts["allocate/dropped_rows"] = dropped_rows(parts, request)
    if truncates(cfg):
        cut = metrics.mean(rollout.cut_mass(rollouts), rollouts.mask)
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
        found=graded.found,
    )
    return new if drawn is None else replace_closed(cfg, drawn, new, seen)


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


def dropped_rows(parts: Components, request: Request) -> jax.Array:
    """`[]` float32, completions that the allocator requests and a step cannot draw.

    Those beyond the group size or beyond the rows of a step, and negative counts.
    """
    counts = present(request.counts)
    given = jnp.clip(counts, 0, parts.config.sampling.group_size)
    over = jnp.maximum(jnp.sum(given) - parts.rows, 0)
    beyond = jnp.sum(jnp.abs(counts - given)) + over
    return beyond.astype(jnp.float32)


def forecast(
    parts: Components, request: Request, seen: Groups
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
    config: Config, old: StepRollouts, new: StepRollouts, seen: Groups
) -> StepRollouts:
    """Completions in which the i-th open new group replaces the i-th closed old one.

    Replaced groups keep their place in the batch, and so their rows.

    Args:
        config: config of the run.
        old: of earlier attempts.
        new: of another attempt.
        seen: groups of `new`.
    """
    fresh = open_groups(config, seen)
    before = groups(grid_of(config), old.rollouts, old.outcome)
    closed = ~open_groups(config, before)
    rank = jnp.cumsum(closed, dtype=jnp.int32) - 1
    source = jnp.argsort(~fresh, stable=True).astype(jnp.int32)[rank]  # [B]
    replaced = closed & (rank < jnp.sum(fresh, dtype=jnp.int32))  # [B]
    place = old.rollouts
    row = seen.row[source[place.prompt], place.slot]  # [N], the new row for each old
    swapped = replaced[place.prompt]
    return StepRollouts(
        prompts=pick(new.prompts, old.prompts, replaced, source),
        contexts=pick(new.contexts, old.contexts, replaced, source),
        rollouts=pick_rows(new.rollouts, place, swapped, row),
        outcome=pick(new.outcome, old.outcome, swapped, row),
        known=pick(new.known, old.known, replaced, source),
        level=pick(new.level, old.level, replaced, source),
        memory=new.memory,
        attempts=old.attempts + 1,
        tally=metrics.merge(old.tally, new.tally),
        found=old.found,
    )


def pick(new: Any, old: Any, where: jax.Array, at: jax.Array) -> Any:
    """Entries `at` of new arrays for the old ones, `where` that is so."""

    def leaf(new, old):
        return jnp.where(where.reshape(-1, *(1,) * (old.ndim - 1)), new[at], old)

    return jax.tree.map(leaf, new, old)


def pick_rows(
    new: Rollouts, old: Rollouts, where: jax.Array, at: jax.Array
) -> Rollouts:
    """As `pick`, of completions, each in the place of the old one."""
    return dataclasses.replace(
        pick(new, old, where, at), prompt=old.prompt, slot=old.slot, context=old.context
    )
