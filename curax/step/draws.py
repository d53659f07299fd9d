"""Completions of a step, as far as the verifier: explore, allocate, hint, roll out.

Prompts come in turn, or as they were chosen; pilots or the memory say how hard they
are; a plan says how many completions each gets; the sampler draws them, all at once, in
parts, or in rounds between which a stopping rule is tested. `Graded` is what stages
behind the verifier compute on.
"""

import dataclasses
from functools import partial

import flax.struct
import jax
import jax.numpy as jnp

from curax import allocate, data, hint, rollout
from curax import memory as memories
from curax.arrays import frozen, grids, masked, metrics
from curax.arrays.keys import stage_key
from curax.arrays.metrics import Tally
from curax.config import Config, Stop
from curax.step import stages
from curax.step.build import Parts
from curax.types import (
    Contexts,
    Difficulty,
    Memory,
    Model,
    Plan,
    Prompts,
    Rollouts,
    TrainState,
)

# ----- what is seen of completions


@flax.struct.dataclass(kw_only=True)
class Graded:
    """What stages compute on, `[B, G]`."""

    row: jax.Array  # int32, the row of each completion; N where there is none
    exists: jax.Array  # bool, drawn and graded: a missing outcome is absent
    outcome: jax.Array  # float32 in [0, 1], 0 where it does not exist
    finished: jax.Array  # bool, ended by itself
    length: jax.Array  # int32 tokens
    square: jax.Array  # float32, squared norm of the score in the logits


def grid_of(config: Config) -> tuple[int, int]:
    """(B, G)."""
    return config.sampling.prompts, config.sampling.group_size


def graded(shape: tuple[int, int], rollouts: Rollouts, outcome: jax.Array) -> Graded:
    """Rows to grids of this shape."""
    row = grids.index(rollouts, shape)
    outcome = grids.grid(outcome, row, fill=jnp.nan)
    exists = ~jnp.isnan(outcome)
    length = jnp.sum(rollouts.mask, -1, dtype=jnp.int32)
    return Graded(
        row=row,
        exists=exists,
        outcome=jnp.where(exists, outcome, 0.0),
        finished=grids.grid(rollouts.finished, row, fill=False),
        length=grids.grid(length, row, fill=0),
        square=grids.grid(jnp.sum(rollouts.square, -1), row, fill=0.0),
    )


# ----- which prompts, by which policy


def at(state: TrainState) -> tuple[jax.Array, jax.Array]:
    """Which step of which run."""
    return state.seed, state.step


def policy(parts: Parts, state: TrainState) -> Model:
    """The model, as a function of what is trained of its parameters."""
    return frozen.over(parts.model, state.frozen)


def next_ids(parts: Parts, state: TrainState, attempt: jax.Array) -> jax.Array:
    """`[B]` int32, which prompts these are."""
    count, chosen = parts.config.sampling.prompts, state.chosen
    if chosen is not None:
        start = (state.step * count) % chosen.ids.shape[0]
        return jax.lax.dynamic_slice_in_dim(chosen.ids, start, count)
    return data.prompt_ids(
        state.seed,
        state.position + attempt * count,
        count=count,
        num_prompts=parts.task.num_prompts,
    )


def next_prompts(parts: Parts, state: TrainState, attempt: jax.Array) -> Prompts:
    """The prompts of this step, or those of a later attempt to fill it."""
    return parts.task.prompts(next_ids(parts, state, attempt))


# ----- explore: pilots, difficulty


@flax.struct.dataclass(kw_only=True)
class Explored:
    """What is known of the prompts of a step before it draws what trains."""

    difficulty: Difficulty
    memory: Memory  # with the pilots
    tally: Tally  # of the pilots


def difficulty(
    parts: Parts, memory: Memory, prompts: Prompts, explored: Explored | None
) -> Difficulty:
    """What is known of prompts: by their pilots, or else by the memory."""
    if explored is not None:
        return explored.difficulty
    prior = parts.config.memory.prior
    return memories.difficulty(memory, prompts.id, prior=prior)


def remembered(
    parts: Parts, memory: Memory, prompts: Prompts, seen: "Graded", *, again=False
) -> Memory:
    """The memory with graded completions; `again`: within the same visit."""
    forgets = 1.0 if again else memories.discount(parts.config.memory.half_life)
    return memories.observe(
        memory,
        prompts.id,
        seen.outcome,
        seen.square,
        seen.length,
        seen.exists,
        discount=forgets,
    )


def pilots(
    parts: Parts, state: TrainState, prompts: Prompts | None = None
) -> tuple[Prompts, Contexts, Rollouts]:
    """Sample completions that tell how hard the next prompts are."""
    cfg = parts.config
    assert cfg.pilot
    if prompts is None:
        prompts = next_prompts(parts, state, jnp.int32(0))
    counts = jnp.full(cfg.sampling.prompts, cfg.pilot.draws, jnp.int32)
    plan = allocate.plan(counts, rows=cfg.pilot.draws * cfg.sampling.prompts)
    return sampled(parts, state, prompts, plan, stage_key(*at(state), "pilot"))


def explored(
    parts: Parts,
    state: TrainState,
    pilots: tuple[Prompts, Contexts, Rollouts],
    outcome: jax.Array,
) -> Explored:
    """What graded pilots say: pass rates as they are, without a prior.

    Args:
        parts: of the run.
        state: at the start of the step.
        pilots: of `pilots`.
        outcome: `[B draws]` float32 in [0, 1], NaN where missing.
    """
    prompts, contexts, rollouts = pilots
    cfg = parts.config
    assert cfg.pilot
    shape = (cfg.sampling.prompts, cfg.pilot.draws)
    seen = graded(shape, rollouts, outcome)
    norm = jnp.ones_like(outcome)
    if cfg.pilot.norm:
        how = cfg.sampling.temperature
        given = policy(parts, state), state.params, contexts, rollouts, how
        norm = stages.pilot_norms(cfg, *given, rows=outcome.shape[0])
    norm = grids.grid(norm, seen.row, fill=0.0)
    of = seen.exists & (seen.outcome > 0.5) if cfg.pilot.accepted else seen.exists
    typical = masked.mean(norm, of)
    if cfg.pilot.root_mean_square:
        typical = jnp.sqrt(masked.mean(norm**2, of))
    draws = masked.total(seen.exists, seen.exists)
    solved = masked.total(seen.outcome, seen.exists)
    missing = rollouts.exists & jnp.isnan(outcome)
    counted = metrics.of_pilots(rollouts, missing=missing)
    return Explored(
        difficulty=Difficulty(
            draws=draws,
            solved=solved,
            pass_rate=solved / jnp.maximum(draws, 1.0),
            norm=typical,
            tokens=masked.mean(seen.length, seen.exists),
        ),
        memory=remembered(parts, state.memory, prompts, seen),
        tally=counted,
    )


# ----- draw: allocate, hint, rollout


@flax.struct.dataclass(kw_only=True)
class Asked:
    """How prompts are asked, and which of them."""

    contexts: Contexts  # with the hints
    level: jax.Array  # [B] int32, of the hint; 0: there is none
    wanted: jax.Array  # [B] bool, False: nothing is drawn


def asked_in(parts: Parts, prompts: Prompts, asked: Asked | None) -> Contexts:
    """The contexts of prompts: without hints, but as wide as any hint makes them."""
    if asked is not None:
        return asked.contexts
    if parts.config.hint:
        return hint.widened(prompts, parts.config.hint.width)
    return hint.none(prompts)


def draw(
    parts: Parts,
    state: TrainState,
    memory: Memory,
    attempt: jax.Array,
    explored: Explored | None = None,
    prompts: Prompts | None = None,
    asked: Asked | None = None,
) -> tuple[Prompts, Contexts, Rollouts]:
    """Sample completions for the next prompts.

    Args:
        parts: of the run.
        state: at the start of the step.
        memory: with what earlier attempts of this step observed.
        attempt: `[]` int32, 0 unless groups the gate closed are being refilled, or
            drawn again with hints.
        explored: what pilots said of them, if there were any.
        prompts: `next_prompts`, if the host has made them.
        asked: how and which of them; None: all of them, without hints.

    Returns:
        B prompts, their contexts, N rows.
    """
    if prompts is None:
        prompts = next_prompts(parts, state, attempt)
    plan = planned(parts, memory, prompts, explored, asked)
    key, stop = draw_key(state, attempt), parts.config.stop
    return sampled(parts, state, prompts, plan, key, asked=asked, stop=stop)


def planned(
    parts: Parts,
    memory: Memory,
    prompts: Prompts,
    explored: Explored | None,
    asked: Asked | None,
) -> Plan:
    """The N rows that are to be drawn for these prompts."""
    cfg = parts.config
    known = difficulty(parts, memory, prompts, explored)
    most = cfg.sampling.group_size
    counts = stages.counts(cfg, known, budget=parts.rows, most=most)
    if asked is not None:
        counts = jnp.where(asked.wanted, counts, 0)
    return allocate.plan(counts, rows=parts.rows)


def draw_key(state: TrainState, attempt: jax.Array) -> jax.Array:
    """From which the noise of all completions of a draw derives."""
    return jax.random.fold_in(stage_key(*at(state), "rollout"), attempt)


def sampled(
    parts: Parts,
    state: TrainState,
    prompts: Prompts,
    plan: Plan,
    key: jax.Array,
    *,
    asked: Asked | None = None,
    stop: Stop | None = None,
) -> tuple[Prompts, Contexts, Rollouts]:
    """Prompts, their contexts, and the rows of a plan."""
    contexts = asked_in(parts, prompts, asked)
    rollouts = drawn_from(parts, state, prompts, contexts, plan, key, stop=stop)
    return prompts, contexts, rollouts


def drawn_from(
    parts: Parts,
    state: TrainState,
    prompts: Prompts,
    contexts: Contexts,
    plan: Plan,
    key: jax.Array,
    *,
    stop: Stop | None = None,
    prefix: rollout.Prefix | None = None,
) -> Rollouts:
    """The rows of a plan, drawn by the policy at the start of the step."""
    sizes = parts.config.sampling

    def outcome(prompt, tokens, mask):
        target = jax.tree.map(lambda leaf: leaf[prompt], prompts.target)
        return parts.task.verify(target, tokens, mask).astype(jnp.float32)

    stopping = stop and rollout.Stopping(
        met=partial(stages.met, parts.config),
        outcome=outcome,
        size=stop.round_size,
        most=sizes.group_size,
    )
    return rollout.sample(
        policy(parts, state),
        state.params,
        contexts,
        plan,
        key,
        max_tokens=sizes.max_tokens,
        end=parts.task.end,
        pad=parts.task.pad,
        temperature=sizes.temperature,
        top_k=sizes.top_k,
        top_p=sizes.top_p,
        slots=sizes.slots,
        stopping=stopping,
        prefix=prefix,
    )


# ----- in parts, and in rounds


@flax.struct.dataclass(kw_only=True)
class Begun:
    """A draw in parts: what all of them have in common."""

    prompts: Prompts
    contexts: Contexts
    plan: Plan
    prefix: rollout.Prefix
    key: jax.Array


def begin_draw(
    parts: Parts,
    state: TrainState,
    memory: Memory,
    attempt: jax.Array,
    explored: Explored | None = None,
    prompts: Prompts | None = None,
    asked: Asked | None = None,
) -> Begun:
    """Begin to `draw` in parts, each to be verified while the next is drawn.

    The same completions as of one draw: their keys are a function of prompt and slot.
    Arguments as `draw`.
    """
    if prompts is None:
        prompts = next_prompts(parts, state, attempt)
    contexts = asked_in(parts, prompts, asked)
    return Begun(
        prompts=prompts,
        contexts=contexts,
        plan=planned(parts, memory, prompts, explored, asked),
        prefix=rollout.prefill(policy(parts, state), state.params, contexts),
        key=draw_key(state, attempt),
    )


def draw_part(
    parts: Parts, state: TrainState, begun: Begun, part: jax.Array
) -> Rollouts:
    """Sample part number `part` of the rows: N over `sampling.parts` of them."""
    size = parts.rows // parts.config.sampling.parts
    plan = jax.tree.map(
        lambda leaf: jax.lax.dynamic_slice_in_dim(leaf, part * size, size), begun.plan
    )
    return drawn_from(
        parts,
        state,
        begun.prompts,
        begun.contexts,
        plan,
        begun.key,
        prefix=begun.prefix,
    )


def draw_round(
    parts: Parts,
    state: TrainState,
    pool: "Pool | None",
    attempt: jax.Array,
    prompts: Prompts | None = None,
    asked: Asked | None = None,
) -> tuple[Prompts, Contexts, Rollouts]:
    """Sample the next round of every prompt that goes on.

    What `draw` does where a stopping rule can be tested while it samples; the same
    completions, for their keys are a function of prompt and slot.
    """
    sizes, stop = parts.config.sampling, parts.config.stop
    assert stop
    if prompts is None:
        prompts = next_prompts(parts, state, attempt)
    drawn = jnp.zeros(sizes.prompts, jnp.int32)
    counts = drawn + min(stop.round_size, sizes.group_size)
    if pool is not None:
        drawn, counts = next_round(parts, pool)
    if asked is not None:
        counts = jnp.where(asked.wanted, counts, 0)
    plan = allocate.plan(counts, rows=sizes.prompts * stop.round_size)
    plan = dataclasses.replace(plan, slot=plan.slot + drawn[plan.prompt])
    return sampled(parts, state, prompts, plan, draw_key(state, attempt), asked=asked)


@flax.struct.dataclass(kw_only=True)
class Pool:
    """Graded completions of the rounds so far, row b G + s for slot s of prompt b."""

    prompts: Prompts
    contexts: Contexts
    rollouts: Rollouts  # [B G]
    outcome: jax.Array  # [B G] float32, NaN where missing


def pooled(
    parts: Parts,
    pool: Pool | None,
    sampled: tuple[Prompts, Contexts, Rollouts],
    outcome: jax.Array,
) -> Pool:
    """The pool with another round in it."""
    prompts, contexts, rollouts = sampled
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
        pool = Pool(prompts=prompts, contexts=contexts, rollouts=empty, outcome=missing)
    row = rollouts.prompt * most + rollouts.slot
    row = jnp.where(rollouts.exists, row, parts.rows)  # out: dropped

    def put(old, new):
        return old.at[row].set(new, mode="drop")

    return dataclasses.replace(
        pool,
        rollouts=jax.tree.map(put, pool.rollouts, rollouts),
        outcome=put(pool.outcome, outcome),
    )


def next_round(parts: Parts, pool: Pool) -> tuple[jax.Array, jax.Array]:
    """`[B]` int32: completions drawn so far, and how many more in the next round."""
    sizes, stop = parts.config.sampling, parts.config.stop
    assert stop
    seen = graded(grid_of(parts.config), pool.rollouts, pool.outcome)
    drawn = jnp.sum(seen.row < parts.rows, -1, dtype=jnp.int32)
    more = jnp.minimum(stop.round_size, sizes.group_size - drawn)
    done = stages.met(parts.config, seen.outcome, seen.exists)
    return drawn, jnp.where(done, 0, more)


def goes_on(parts: Parts, pool: Pool, asked: Asked | None = None) -> jax.Array:
    """`[]` bool: a prompt wants another round."""
    more = next_round(parts, pool)[1] > 0
    return jnp.any(more if asked is None else more & asked.wanted)
