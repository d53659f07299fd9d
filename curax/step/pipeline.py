"""Joins the stages: one stage's output is another's input here, and in what it calls.

    data -> allocate -> hint -> rollout -> reward -> gate -> downsample -> correct
         -> advantage -> objective -> modulate -> loss -> aggregate -> update

`draws.draw` goes as far as the rollout, `absorb` takes outcomes in, `learn` does the
rest, the updates by `optimise`. Both loops call these three; between `draw` and
`absorb` stands the verifier. Groups that collapsed go through `hinted` before they
learn; rewards by reference answers come from `reflected`.
"""

import dataclasses
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp

from curax import hint, reflect, rollout, update
from curax import memory as memories
from curax.arrays import grids, masked, metrics
from curax.arrays.keys import stage_key
from curax.arrays.metrics import Tally
from curax.config import Config, Hint, truncates
from curax.step import stages
from curax.step.build import Parts
from curax.step.draws import (
    Explored,
    Graded,
    difficulty,
    graded,
    grid_of,
    policy,
    remembered,
)
from curax.step.optimise import optimise, settings
from curax.types import (
    Batch,
    Chosen,
    Contexts,
    Direct,
    HintMemory,
    Memory,
    Prompts,
    Rollouts,
    TrainState,
)

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


def open_groups(config: Config, seen: Graded) -> jax.Array:
    """`[B]` bool: groups of which the gate lets something train."""
    pool = stages.gated(config, seen.outcome, seen.exists, seen.finished)
    return jnp.any(pool, -1)


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
    tally.counts["outcome/out_of_range"] = metrics.count((outcome < 0) | (outcome > 1))
    tally.counts["allocate/dropped_rows"] = dropped_rows(
        parts, memory, prompts, explored
    )
    if truncates(cfg):
        cut = metrics.mean(rollout.cut_mass(rollouts), rollouts.mask)
        tally.means["sampler/cut_mass"] = cut
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


def dropped_rows(
    parts: Parts, memory: Memory, prompts: Prompts, explored: Explored | None
) -> jax.Array:
    """`[]` float32, completions that an allocator asked for beyond what a step has.

    Beyond the group size, beyond the rows of a step, or fewer than none of a prompt.
    """
    known = difficulty(parts, memory, prompts, explored)
    most = parts.config.sampling.group_size
    counts = stages.counts(parts.config, known, budget=parts.rows, most=most)
    given = jnp.clip(counts, 0, most)
    over = jnp.maximum(jnp.sum(given) - parts.rows, 0)
    return (jnp.sum(jnp.abs(counts - given)) + over).astype(jnp.float32)


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
    pool = stages.gated(config, outcome, exists, finished)
    keep = stages.selected(config, key, reward, pool)
    undo = stages.correction(config, reward, pool, keep)
    factor = undo * stages.prompt_weight(config, outcome, exists, history)
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
    sees = exists if config.pool_statistics else keep
    advantage = stages.advantages(config, reward, sees)
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
    reward = stages.shaped(cfg, seen.outcome, seen.length)
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
        then = stages.called(
            "hint.controller",
            how.controller,
            meant,
            rate,
            shape=meant.shape,
            kind="integer",
            levels=how.levels,
        )
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
    credit = stages.called(
        "hint.credit",
        parts.config.hint.credit,
        given.credit,
        seen.outcome,
        given.keep,
        grids.grid(ratio, seen.row, fill=0.0),
        hinted,
        shape=given.credit.shape,
        kind="float",
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
    tokens, mask, columns = grids.append_after(batch.tokens, thought, reference, there)
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
    if parts.config.stop:
        met = stages.met(parts.config, seen.outcome, seen.exists)
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
