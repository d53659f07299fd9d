"""Joins the stages: the only module where one stage's output is another's input.

    data -> allocate -> hint -> rollout -> reward -> gate -> downsample -> correct
         -> advantage -> objective -> modulate -> loss -> aggregate -> update

`draw` goes as far as the rollout, `absorb` takes outcomes in, `learn` does the rest.
Both loops call these three; between `draw` and `absorb` stands the verifier.
"""

import dataclasses
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp

from curax import (
    allocate,
    data,
    frozen,
    grids,
    hint,
    loss,
    masked,
    metrics,
    modulate,
    reflect,
    rollout,
    update,
)
from curax import memory as memories
from curax.config import Config, Hint, Stop
from curax.keys import stage_key
from curax.metrics import Tally
from curax.parts import Parts
from curax.types import (
    Batch,
    Chosen,
    Contexts,
    Difficulty,
    Direct,
    HintMemory,
    Memory,
    Model,
    Plan,
    Prompts,
    Rollouts,
    Tokens,
    TrainState,
)

# ----- explore: pilots, difficulty


@flax.struct.dataclass(kw_only=True)
class Explored:
    """What is known of the prompts of a step before it draws what trains."""

    difficulty: Difficulty
    memory: Memory  # with the pilots
    tally: Tally  # of the pilots


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
        norm = cfg.pilot.norm(
            policy(parts, state), state.params, contexts, rollouts, how
        )
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


# ----- draw: data, allocate, hint, rollout


@flax.struct.dataclass(kw_only=True)
class Asked:
    """How prompts are asked, and which of them."""

    contexts: Contexts  # with the hints
    level: jax.Array  # [B] int32, of the hint; 0: there is none
    wanted: jax.Array  # [B] bool, False: nothing is drawn


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
    counts = cfg.allocate(known, budget=parts.rows, most=most)
    if asked is not None:
        counts = jnp.where(asked.wanted, counts, 0)
    return allocate.plan(counts, rows=parts.rows)


def asked_in(parts: Parts, prompts: Prompts, asked: Asked | None) -> Contexts:
    """The contexts of prompts: without hints, but as wide as any hint makes them."""
    if asked is not None:
        return asked.contexts
    if parts.config.hint:
        return hint.widened(prompts, parts.config.hint.width)
    return hint.none(prompts)


def draw_key(state: TrainState, attempt: jax.Array) -> jax.Array:
    """From which the noise of all completions of a draw derives."""
    return jax.random.fold_in(stage_key(*at(state), "rollout"), attempt)


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
    return drawn, jnp.where(stop.rule(seen.outcome, seen.exists), 0, more)


def goes_on(parts: Parts, pool: Pool, asked: Asked | None = None) -> jax.Array:
    """`[]` bool: a prompt wants another round."""
    more = next_round(parts, pool)[1] > 0
    return jnp.any(more if asked is None else more & asked.wanted)


def next_prompts(parts: Parts, state: TrainState, attempt: jax.Array) -> Prompts:
    """The prompts of this step, or those of a later attempt to fill it."""
    return parts.task.prompts(next_ids(parts, state, attempt))


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


def policy(parts: Parts, state: TrainState) -> Model:
    """The model, as a function of what is trained of its parameters."""
    return frozen.over(parts.model, state.frozen)


def difficulty(
    parts: Parts, memory: Memory, prompts: Prompts, explored: Explored | None
) -> Difficulty:
    """What is known of prompts: by their pilots, or else by the memory."""
    if explored is not None:
        return explored.difficulty
    prior = parts.config.memory.prior
    return memories.difficulty(memory, prompts.id, prior=prior)


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
        met=stop.rule,
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


def at(state: TrainState) -> tuple[jax.Array, jax.Array]:
    """Which step of which run."""
    return state.seed, state.step


# ----- absorb: reward, memory, refill


@flax.struct.dataclass(kw_only=True)
class Scored:
    """Rewards by how likely completions make the reference answer."""

    outcome: jax.Array  # [N] float32 in [0, 1], NaN where missing
    reward: jax.Array  # [N] float32, nats per token, all in all
    rest: jax.Array  # [N] float32, of that what the answer itself earned
    thought: jax.Array  # [N] int32, tokens up to the end of the delimiter
    certainty: reflect.Certainty  # [B, G]
    reference: jax.Array  # [B, Y] int32
    reference_mask: jax.Array  # [B, Y] bool


@flax.struct.dataclass(kw_only=True)
class Drawn:
    """Prompts with graded completions. What the gate closed may have been replaced."""

    prompts: Prompts
    contexts: Contexts
    rollouts: Rollouts
    outcome: jax.Array  # [N] float32, NaN where missing
    history: jax.Array  # [B] float32, pass rates as they were known before
    level: jax.Array  # [B] int32, of the hint they were drawn with; 0: none
    memory: Memory  # after all prompts that were tried
    attempts: jax.Array  # [] int32, batches of prompts tried
    tally: Tally  # of all prompts that were tried
    scored: Scored | None = None  # None: outcomes are a verifier's


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


def open_groups(config: Config, seen: Graded) -> jax.Array:
    """`[B]` bool: groups of which the gate lets something train."""
    return jnp.any(config.gate(seen.outcome, seen.exists, seen.finished), -1)


def wants_refill(parts: Parts, drawn: Drawn) -> jax.Array:
    """`[]` bool: a group is closed and there are attempts left."""
    seen = graded(grid_of(parts.config), drawn.rollouts, drawn.outcome)
    closed = ~jnp.all(open_groups(parts.config, seen))
    return closed & (drawn.attempts < parts.config.sampling.rounds)


def absorb(
    parts: Parts,
    memory: Memory,
    drawn: Drawn | None,
    sampled: tuple[Prompts, Contexts, Rollouts],
    outcome: jax.Array,
    explored: Explored | None = None,
    level: jax.Array | None = None,
    scored: Scored | None = None,
) -> Drawn:
    """Take graded completions in; let open new groups replace closed old ones.

    Args:
        parts: of the run.
        memory: before these completions.
        drawn: of the attempts before; None in the first.
        sampled: prompts, contexts and rollouts of this attempt.
        outcome: `[N]` float32 in [0, 1], NaN where missing.
        explored: what pilots said, if there were any.
        level: `[B]` int32, of the hints they were drawn with; None: there were none.
        scored: their rewards; None: outcomes are a verifier's.

    Returns:
        All that is known of the step's completions. What was drawn with a hint says
        nothing of the prompt, neither to the memory nor in the metrics of outcomes.
    """
    prompts, contexts, rollouts = sampled
    cfg = parts.config
    seen = graded(grid_of(cfg), rollouts, outcome)
    if level is None:
        level = jnp.zeros(cfg.sampling.prompts, jnp.int32)
    plain = dataclasses.replace(seen, exists=seen.exists & (level == 0)[:, None])
    before = explored.memory if explored else memory
    tally = metrics.of_rollouts(
        rollouts,
        plain.outcome,
        plain.exists,
        missing=rollouts.exists & jnp.isnan(outcome),
    )
    if explored:
        tally = metrics.merge(tally, explored.tally)
    if cfg.stop is None and explored is None:
        tally.means.update(forecast(parts, memory, prompts, plain))
    new = Drawn(
        prompts=prompts,
        contexts=contexts,
        rollouts=rollouts,
        outcome=outcome,
        history=difficulty(parts, memory, prompts, explored).pass_rate,
        level=level,
        memory=remembered(parts, before, prompts, plain, again=explored is not None),
        attempts=jnp.int32(1),
        tally=tally,
        scored=scored,
    )
    return new if drawn is None else refill(cfg, drawn, new, seen)


def forecast(
    parts: Parts, memory: Memory, prompts: Prompts, seen: Graded
) -> dict[str, tuple[jax.Array, jax.Array]]:
    """Dead groups as the memory expects them of prompts it knows, and the surprise.

    Nothing where an outcome is neither right nor wrong: counts cannot foretell that.
    """
    known = memories.difficulty(memory, prompts.id, prior=parts.config.memory.prior)
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


def refill(config: Config, old: Drawn, new: Drawn, seen: Graded) -> Drawn:
    """The i-th closed old group gives its place to the i-th open new one.

    Places keep their number, hence their rows; what stands in them changes.
    """
    fresh = open_groups(config, seen)
    closed = ~open_groups(config, graded(grid_of(config), old.rollouts, old.outcome))
    rank = jnp.cumsum(closed, dtype=jnp.int32) - 1
    source = jnp.argsort(~fresh, stable=True).astype(jnp.int32)[rank]  # [B]
    replaced = closed & (rank < jnp.sum(fresh, dtype=jnp.int32))  # [B]
    place = old.rollouts
    row = seen.row[source[place.prompt], place.slot]  # [N], the new row for each old

    def pick(new, old, where, at):
        def leaf(new, old):
            return jnp.where(where.reshape(-1, *(1,) * (old.ndim - 1)), new[at], old)

        return jax.tree.map(leaf, new, old)

    swapped = replaced[place.prompt]
    return Drawn(
        prompts=pick(new.prompts, old.prompts, replaced, source),
        contexts=pick(new.contexts, old.contexts, replaced, source),
        rollouts=dataclasses.replace(
            pick(new.rollouts, old.rollouts, swapped, row),
            prompt=place.prompt,
            slot=place.slot,
            context=place.context,
        ),
        outcome=pick(new.outcome, old.outcome, swapped, row),
        history=pick(new.history, old.history, replaced, source),
        level=pick(new.level, old.level, replaced, source),
        memory=new.memory,
        attempts=old.attempts + 1,
        tally=metrics.merge(old.tally, new.tally),
    )


# ----- learn: gate to update


@flax.struct.dataclass(kw_only=True)
class Credit:
    """What becomes of each completion, `[B, G]`."""

    keep: jax.Array  # bool, trains
    credit: jax.Array  # float32, multiplies the completion's gradient; 0 if not kept
    factor: jax.Array  # float32, of it what the advantage was multiplied by


def assign(
    config: Config,
    key: jax.Array,
    outcome: jax.Array,
    reward: jax.Array,
    exists: jax.Array,
    finished: jax.Array,
    history: jax.Array,
) -> Credit:
    """From outcomes to the coefficient of each completion: the learning signal.

        credit = advantage * correction * weight of the objective   where kept

    With 0/1 outcomes and tokens summed and divided by a constant, the expected gradient
    is w(p) grad p,

        w(p) = (E[sum of credit over right ones] / p
                - E[sum of credit over wrong ones] / (1 - p)) / R ,

    where R, the rows trained per prompt, is what the sum over rows is divided by.

    Args:
        config: names the stages.
        key: for down-sampling.
        outcome: `[B, G]` float32 in [0, 1].
        reward: `[B, G]` float32, outcome and shaping.
        exists: `[B, G]` bool, drawn and graded.
        finished: `[B, G]` bool, ended by itself.
        history: `[B]` float32, pass rates as they were known before the draw.

    Returns:
        What is kept, and with which credit.
    """
    pool = config.gate(outcome, exists, finished)
    keep = config.downsample(key, reward, pool)
    undo = config.correct(reward, pool, keep)
    factor = undo * config.objective(outcome, exists, history)
    credit = credited(config, reward, exists, keep, factor)
    return Credit(keep=keep, credit=credit, factor=factor)


def credited(
    config: Config,
    reward: jax.Array,
    exists: jax.Array,
    keep: jax.Array,
    factor: jax.Array,
) -> jax.Array:
    """`[B, G]` float32: the advantage of what is kept, times the factor."""
    advantage = config.advantage(reward, exists if config.pool_statistics else keep)
    return jnp.where(keep, advantage * factor, 0.0)


@flax.struct.dataclass(kw_only=True)
class Shown:
    """A few prompts with all their completions, to be read by a person."""

    prompts: Prompts  # [K, ...]
    tokens: jax.Array  # [K, G, T] int32
    mask: jax.Array  # [K, G, T] bool
    outcome: jax.Array  # [K, G] float32, NaN where missing
    reward: jax.Array  # [K, G] float32
    credit: jax.Array  # [K, G] float32
    keep: jax.Array  # [K, G] bool
    exists: jax.Array  # [K, G] bool, drawn
    level: jax.Array  # [K] int32, of the hint
    contexts: Contexts  # [K, ...], with it
    reference: tuple[jax.Array, ...] | None  # [K, Y] tokens, mask, weights in R3


def learn(
    parts: Parts, state: TrainState, drawn: Drawn
) -> tuple[TrainState, Tally, Shown]:
    """Everything behind the verifier: one step of training on graded completions."""
    cfg, rollouts, contexts = parts.config, drawn.rollouts, drawn.contexts
    seen = graded(grid_of(cfg), rollouts, drawn.outcome)
    reward = seen.outcome
    if cfg.shape_reward:
        reward = cfg.shape_reward(seen.outcome, seen.length)
    if drawn.scored:
        reward = jnp.where(
            seen.exists, grids.grid(drawn.scored.reward, seen.row, fill=0.0), 0.0
        )
    key = stage_key(state.seed, state.step, "downsample")
    given = assign(
        cfg,
        key,
        seen.outcome,
        reward,
        seen.exists,
        seen.finished,
        drawn.history,
    )

    place, used = grids.compact(given.keep, rows=parts.train_rows)
    row = jnp.minimum(seen.row.reshape(-1)[place], parts.rows - 1)
    if cfg.hint:
        hints = noted(cfg.hint, state.hints, drawn, seen)
        state = dataclasses.replace(state, hints=hints)
        if cfg.hint.credit:
            drawn, given = unhinted(parts, state, drawn, seen, given, row, used)
    credit = jnp.where(used, given.credit.reshape(-1)[place], 0.0)
    batch = batch_of(parts, state, drawn, row, used, credit)
    if drawn.scored:
        batch = in_parts(parts, drawn.scored, drawn, batch, seen, given, place, row)
    params, opt_state, tally = optimise(parts, state, drawn.contexts, batch)

    known = difficulty(parts, drawn.memory, drawn.prompts, None).pass_rate
    each = jnp.ones_like(known, bool)
    tally.means["memory/pass_rate"] = metrics.mean(known, each)
    tally.means.update(told_of_groups(parts, seen, given, each))
    tally.means["reward/mean"] = metrics.mean(reward, seen.exists)
    tally.counts["train/rows"] = metrics.count(used)
    if drawn.scored:
        tally.means.update(told_of_references(drawn, drawn.scored, seen))
    if state.chosen is not None:
        tally.means["query/kept_fraction"] = metrics.one(state.chosen.kept)
        paid = {"query/tokens": looked_at(parts, state, state.chosen)}
        paid["rollout/tokens"] = paid["query/tokens"]
        drawn = dataclasses.replace(
            drawn, tally=metrics.merge(drawn.tally, Tally(means={}, counts=paid))
        )
    if cfg.hint:
        tally.means["hint/hinted_fraction"] = metrics.mean(drawn.level > 0, each)
    taken = 0 if state.chosen is not None else drawn.attempts * cfg.sampling.prompts
    state = dataclasses.replace(
        state,
        params=params,
        opt_state=opt_state,
        memory=drawn.memory,
        position=state.position + taken,
        scorer=later_scorer(cfg, state, params),
        step=state.step + 1,
    )
    shown = Shown(
        prompts=drawn.prompts,
        tokens=grids.grid(rollouts.tokens, seen.row, fill=parts.task.pad),
        mask=grids.grid(rollouts.mask, seen.row, fill=False),
        outcome=jnp.where(seen.exists, seen.outcome, jnp.nan),
        reward=reward,
        credit=given.credit,
        keep=given.keep,
        exists=seen.row < parts.rows,
        level=drawn.level,
        contexts=contexts,
        reference=drawn.scored and weighed(drawn.scored, seen),
    )
    few = jax.tree.map(lambda leaf: leaf[: cfg.logging.rollout_prompts], shown)
    return state, metrics.join(drawn.tally, tally), few


def noted(
    how: Hint, hints: HintMemory | None, drawn: Drawn, seen: Graded
) -> HintMemory:
    """What is remembered of hints after this step.

    A prompt that was not drawn at the level meant for it keeps that level.
    """
    assert hints is not None
    who, level = drawn.prompts.id, hints.level
    if how.controller:
        rate = masked.mean(seen.outcome, seen.exists)
        rate = jnp.where(jnp.any(seen.exists, -1), rate, jnp.nan)
        meant = level[who]
        then = how.controller(meant, rate, levels=how.levels)
        level = level.at[who].set(jnp.where(drawn.level == meant, then, meant))
    return HintMemory(level=level, hinted=hints.hinted.at[who].max(drawn.level > 0))


def unhinted(
    parts: Parts,
    state: TrainState,
    drawn: Drawn,
    seen: Graded,
    given: Credit,
    row: jax.Array,
    used: jax.Array,
) -> tuple[Drawn, Credit]:
    """What trains without the hints it was drawn with, and the credit that undoes that.

    Args:
        parts: of the run; `hint.credit` is set.
        state: at the start of the step.
        drawn: of the step.
        seen: the same on the grid.
        given: credit as if nothing had been hinted.
        row: `[M]` int32, rows that train.
        used: `[M]` bool, False on rows left over.

    Returns:
        Drawn, in contexts without hints, with log-probs taken there; the credit.
    """
    assert parts.config.hint
    assert parts.config.hint.credit
    rollouts, contexts = drawn.rollouts, hint.none(drawn.prompts)
    mask = rollouts.mask[row] & used[:, None]
    logp = update.logprobs(
        policy(parts, state),
        state.params,
        contexts,
        rollouts.tokens[row],
        mask,
        rollouts.context[row],
        settings(parts.config),
    )
    hinted = drawn.level > 0
    ratio = masked.total(logp - rollouts.logp_behaviour[row], mask)
    ratio = jnp.zeros(parts.rows, jnp.float32).at[row].add(jnp.where(used, ratio, 0.0))
    credit = parts.config.hint.credit(
        given.credit,
        seen.outcome,
        given.keep,
        grids.grid(ratio, seen.row, fill=0.0),
        hinted,
    )
    other = used & hinted[rollouts.prompt[row]]
    where = jnp.where(other, row, parts.rows)  # out: dropped

    def put(old):
        return old.at[where].set(logp, mode="drop")

    rollouts = dataclasses.replace(
        rollouts,
        logp_policy=put(rollouts.logp_policy),
        logp_behaviour=put(rollouts.logp_behaviour),
    )
    drawn = dataclasses.replace(drawn, contexts=contexts, rollouts=rollouts)
    return drawn, dataclasses.replace(given, credit=credit)


def weighed(scored: Scored, seen: Graded) -> tuple[jax.Array, ...]:
    """Reference answers, tokens and mask, and what each token weighs in the mean."""
    weight = jnp.moveaxis(scored.certainty.weight, -1, -2)  # [B, Y, G]
    exists = jnp.broadcast_to(seen.exists[:, None], weight.shape)
    return scored.reference, scored.reference_mask, masked.mean(weight, exists)


def later_scorer(config: Config, state: TrainState, params: Any) -> Any:
    """Who scores references in the next step, None: the policy."""
    if state.scorer is None or not config.reflection:
        return None
    every = config.reflection.scorer_every
    if every == 0:
        return state.scorer
    due = (state.step + 1) % every == 0
    return jax.tree.map(lambda old, new: jnp.where(due, new, old), state.scorer, params)


def looked_at(parts: Parts, state: TrainState, chosen: Chosen) -> jax.Array:
    """`[]` float32: tokens drawn in this step to choose prompts."""
    how = parts.config.reflection
    assert how
    assert how.queries
    return jnp.where(state.step % how.queries.every == 0, chosen.tokens, 0.0)


def in_parts(
    parts: Parts,
    scored: Scored,
    drawn: Drawn,
    batch: Batch,
    seen: Graded,
    given: Credit,
    place: jax.Array,
    row: jax.Array,
) -> Batch:
    """The rows to train on, with what thought and answer are to be credited for.

    R3 does not depend on the answer of the policy itself: its tokens get the credit of
    what the answer earned, centred as the recipe does. `place` and `row`, `[M]` int32,
    say where the rows stand in the grid and among those drawn.
    """
    how = parts.config.reflection
    assert how
    thought = scored.thought[row]
    column = jnp.arange(batch.tokens.shape[-1], dtype=jnp.int32)[None]
    if not how.answers:
        rest = jnp.where(seen.exists, grids.grid(scored.rest, seen.row, fill=0.0), 0.0)
        credit = credited(parts.config, rest, seen.exists, given.keep, given.factor)
        credit = credit.reshape(-1)[place]
        batch = dataclasses.replace(
            batch,
            answer=batch.mask & (column >= thought[:, None]),
            answer_credit=jnp.where(jnp.any(batch.mask, -1), credit, 0.0),
        )
    if isinstance(how.direct, int | float) and how.direct == 0:
        return batch
    prompt, slot = drawn.rollouts.prompt[row], drawn.rollouts.slot[row]
    reference, there = scored.reference[prompt], scored.reference_mask[prompt]
    tokens, mask, columns = grids.behind(batch.tokens, thought, reference, there)
    weight = jnp.where(there, scored.certainty.weight[prompt, slot], 0.0)
    which = jnp.arange(mask.shape[0])[:, None]
    spread = jnp.zeros(mask.shape, jnp.float32).at[which, columns].set(weight)
    mask = mask & jnp.any(batch.mask, -1, keepdims=True)
    direct = Direct(tokens=tokens, mask=mask, weight=how.direct * spread)
    return dataclasses.replace(batch, direct=direct)


def told_of_references(
    drawn: Drawn, scored: Scored, seen: Graded
) -> dict[str, tuple[jax.Array, jax.Array]]:
    """Metrics of rewards by reference answers."""
    found, some = scored.certainty, jnp.any(seen.exists, -1)
    ended = drawn.rollouts.exists & (scored.thought > 0)
    length = jnp.sum(drawn.rollouts.mask, -1, dtype=jnp.int32)
    return {
        "reflect/certainty_nats": metrics.mean(found.value, seen.exists),
        "reflect/flat_fraction": metrics.mean(found.flat, some),
        "reflect/spread_nats": metrics.mean(jnp.max(found.spread, -1), some),
        "reflect/top_weight": metrics.mean(jnp.max(found.weight, -1), seen.exists),
        "reflect/thought_fraction": metrics.mean(ended, drawn.rollouts.exists),
        "reflect/thought_tokens": metrics.mean(scored.thought, ended),
        "reflect/answer_tokens": metrics.mean(length - scored.thought, ended),
    }


def told_of_groups(
    parts: Parts, seen: Graded, given: Credit, each: jax.Array
) -> dict[str, tuple[jax.Array, jax.Array]]:
    """Metrics of what was drawn and decided per prompt; `each`: all True, `[B]`.

    They are what `xray` predicts: the sums of credit are C+ and C- of the law.
    """
    per_prompt = parts.train_rows / parts.config.sampling.prompts
    right = seen.outcome > 0.5
    drawn = jnp.sum(seen.row < parts.rows, -1)
    means = {
        "group/draws": metrics.mean(drawn, each),
        "group/signal_fraction": metrics.mean(jnp.any(given.credit != 0, -1), each),
        "group/pass_rate": metrics.mean(masked.mean(seen.outcome, seen.exists), each),
        "credit/right_sum": metrics.mean(
            masked.total(given.credit, right) / per_prompt, each
        ),
        "credit/wrong_sum": metrics.mean(
            masked.total(given.credit, ~right) / per_prompt, each
        ),
    }
    if stop := parts.config.stop:
        met = stop.rule(seen.outcome, seen.exists)
        means["stop/met_fraction"] = metrics.mean(met, each)
    return means


def batch_of(parts: Parts, state: TrainState, drawn: Drawn, row, used, credit) -> Batch:
    """The M rows to train on, with the log-probs that ratios and penalties refer to.

    Args:
        parts: of the run.
        state: at the start of the step: its policy is old, its reference the reference.
        drawn: of the step.
        row: `[M]` int32, their rows among the N drawn.
        used: `[M]` bool, False on rows left over.
        credit: `[M]` float32.
    """
    cfg, rollouts = parts.config, drawn.rollouts
    tokens, context = rollouts.tokens[row], rollouts.context[row]
    mask = rollouts.mask[row] & used[:, None]

    def logprobs(params):
        model = policy(parts, state)
        return update.logprobs(
            model, params, drawn.contexts, tokens, mask, context, settings(cfg)
        )

    several = cfg.update.epochs * cfg.update.minibatches > 1
    return Batch(
        tokens=tokens,
        mask=mask,
        context=context,
        credit=credit,
        multiplier=jnp.ones(mask.shape, jnp.float32),  # until an update modulates
        logp_behaviour=rollouts.logp_behaviour[row],
        logp_policy=rollouts.logp_policy[row],
        logp_old=logprobs(state.params) if several else None,
        logp_ref=logprobs(state.reference) if cfg.kl else None,
    )


def settings(config: Config) -> update.Settings:
    """How the trainer computes log-probs."""
    return update.Settings(
        temperature=config.sampling.temperature,
        micro_batches=config.update.micro_batches,
        length_buckets=config.update.length_buckets,
        vocab_chunk=config.update.vocab_chunk,
    )


def token_loss(config: Config) -> update.TokenLoss:
    """The per-token loss of a recipe: policy term, KL to the reference, entropy."""

    def objective(logp, entropy, rows: Batch):
        value = policy_loss(config, logp, rows) * rows.multiplier
        if config.kl:
            distance = config.kl.estimator(logp, rows.logp_ref)
            value = value + config.kl.coefficient * distance
        value = value - config.entropy_bonus * entropy
        return jnp.where(rows.mask, value, 0.0)

    return objective


def policy_loss(config: Config, logp: jax.Array, rows: Batch) -> jax.Array:
    """`[M, T]` float32, the loss of the recipe; answers may have their own credit."""
    value = config.loss(logp, rows.logp_old, rows.credit, rows.mask)
    if rows.answer is None:
        return value
    own = config.loss(logp, rows.logp_old, rows.answer_credit, rows.mask)
    return jnp.where(rows.answer, own, value)


def credit_of(rows: Batch) -> jax.Array:
    """`[M, T]` float32, what multiplies the gradient of each token."""
    credit = jnp.broadcast_to(rows.credit[:, None], rows.mask.shape)
    if rows.answer is None or rows.answer_credit is None:
        return credit
    return jnp.where(rows.answer, rows.answer_credit[:, None], credit)


def optimise(
    parts: Parts, state: TrainState, contexts: Contexts, batch: Batch
) -> tuple[Any, Any, Tally]:
    """All optimizer updates of a step: epochs times mini-batches.

    The weight of a token is its share of its own update, so an update means the same
    however many there are; each epoch shuffles the rows anew. A multiplier is that of
    the policy as the update finds it, over all rows of the update at once.
    """
    cfg = parts.config
    rows, how = parts.train_rows, cfg.update
    order = jnp.broadcast_to(jnp.arange(rows, dtype=jnp.int32), (how.epochs, rows))
    if how.minibatches > 1:
        key = stage_key(state.seed, state.step, "minibatches")
        epochs = jax.random.split(key, how.epochs)
        order = jax.vmap(jax.random.permutation)(epochs, order)
    order = order.reshape(how.epochs * how.minibatches, -1)

    def one(carry, item):
        params, opt_state = carry
        number, which = item
        part, tokens = jax.tree.map(lambda leaf: leaf[which], batch), None
        if cfg.modulate is not modulate.none:
            tokens = tokens_of(parts, state, params, contexts, part, number == 0)
            part = dataclasses.replace(part, multiplier=cfg.modulate(tokens))
        value, grads, own = update.gradient(
            policy(parts, state),
            params,
            contexts,
            part,
            cfg.aggregate(part.mask),
            token_loss(cfg),
            settings(cfg),
            still_old=number == 0,
        )
        if part.direct is not None:
            extra, more = towards_references(parts, state, params, contexts, part)
            value, grads = value + extra, jax.tree.map(jnp.add, grads, more)
        params, opt_state, done = update.apply(
            parts.tx, params, opt_state, value, grads, trains(cfg, part)
        )
        said = tally_update(cfg, part, own, done, number == 0, tokens)
        return (params, opt_state), said

    carry = (state.params, state.opt_state)
    numbers = jnp.arange(order.shape[0])
    (params, opt_state), tallies = jax.lax.scan(one, carry, (numbers, order))
    return params, opt_state, jax.tree.map(lambda leaf: jnp.sum(leaf, 0), tallies)


def tokens_of(
    parts: Parts, state: TrainState, params: Any, contexts: Contexts, rows: Batch, first
) -> Tokens:
    """What a multiplier reads of the rows of an update; `first`: the policy is old."""
    seen = update.look(
        policy(parts, state),
        params,
        contexts,
        rows.tokens,
        rows.mask,
        rows.context,
        settings(parts.config),
    )
    logp_old = update.with_old(rows, seen.logp, first).logp_old
    assert logp_old is not None
    return Tokens(
        mask=rows.mask,
        credit=credit_of(rows),
        logp=seen.logp,
        logp_old=logp_old,
        entropy=seen.entropy,
        square=seen.square,
        coupling=seen.coupling,
    )


def towards_references(
    parts: Parts, state: TrainState, params: Any, contexts: Contexts, rows: Batch
) -> tuple[jax.Array, Any]:
    """The part of R3's gradient that goes through the reference, as a loss.

        - direct mean over rows of sum_j w_j log pi(y_j | context, thought, y_<j)

    at temperature 1 and with weights that are constants. Its value and gradient.
    """
    direct, how = rows.direct, settings(parts.config)
    assert direct is not None
    nothing = jnp.zeros(direct.mask.shape, jnp.float32)
    batch = Batch(
        tokens=direct.tokens,
        mask=direct.mask,
        context=rows.context,
        credit=jnp.ones(rows.credit.shape, jnp.float32),
        multiplier=direct.weight,
        logp_behaviour=nothing,
        logp_policy=nothing,
        logp_old=None,
        logp_ref=None,
    )
    value, grads, _ = update.gradient(
        policy(parts, state),
        params,
        contexts,
        batch,
        nothing + 1.0 / direct.mask.shape[0],
        lambda logp, _, rows: jnp.where(rows.mask, -rows.multiplier * logp, 0.0),
        dataclasses.replace(how, temperature=1.0),
        still_old=True,
    )
    return value, grads


def trains(config: Config, rows: Batch) -> jax.Array:
    """`[]` bool: whether anything in the rows has a gradient.

    Without credit only a KL, an entropy term or a reference has one. An update without
    any would still move the parameters, by the optimizer's momentum and weight decay.
    """
    bonus = config.entropy_bonus
    always = config.kl or rows.direct is not None
    if always or not (isinstance(bonus, int | float) and bonus == 0):
        return jnp.any(rows.mask)
    return jnp.any(rows.mask & (credit_of(rows) != 0))


def tally_update(
    config: Config,
    rows: Batch,
    own: update.Taken,
    done: update.Outcome,
    first,
    tokens: Tokens | None,
) -> Tally:
    """What one optimizer update says; `first`: sampler and trainer share parameters.

    `tokens`: what its multiplier was made of, None where nothing is modulated.
    """
    rows = update.with_old(rows, own.logp, first)
    pull = jax.grad(lambda logp: jnp.sum(policy_loss(config, logp, rows)))(own.logp)
    credited = rows.mask & (credit_of(rows) != 0)
    drift = jnp.max(jnp.abs(own.logp - rows.logp_policy), where=rows.mask, initial=0.0)
    distance = loss.k3(rows.logp_behaviour, own.logp)
    tally = Tally(
        means={
            "loss/mean": metrics.one(done.loss),
            "gradient/norm": metrics.one(done.gradient_norm),
            "ratio/clipped_fraction": metrics.mean(pull == 0, credited),
            "kl/behaviour_nats": metrics.mean(distance, rows.mask),
            "sampler/drift_nats": (jnp.where(first, drift, 0.0), metrics.count(first)),
        },
        counts={
            "update/count": metrics.count(done.applied),
            "update/skipped": metrics.count(~done.applied),
            "update/nonfinite": metrics.count(~done.finite),
            "train/tokens": metrics.count(rows.mask),
        },
    )
    if rows.logp_ref is not None:
        distance = loss.k3(own.logp, rows.logp_ref)
        tally.means["kl/ref_nats"] = metrics.mean(distance, rows.mask)
    if tokens is not None:
        tally.means.update(modulate.told(tokens, rows.multiplier, -pull))
    return tally
