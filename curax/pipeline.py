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

from curax import allocate, data, grids, hint, loss, metrics, rollout, update
from curax.config import Config
from curax.keys import stage_key
from curax.metrics import Tally
from curax.parts import Parts
from curax.types import (
    Batch,
    Contexts,
    Memory,
    Prompts,
    Rollouts,
    TrainState,
)

# ----- draw: data, allocate, hint, rollout


def draw(
    parts: Parts, state: TrainState, memory: Memory, attempt: jax.Array
) -> tuple[Prompts, Contexts, Rollouts]:
    """Sample completions for the next prompts.

    Args:
        parts: of the run.
        state: at the start of the step.
        memory: with what earlier attempts of this step observed.
        attempt: `[]` int32, 0 unless groups the gate closed are being refilled.

    Returns:
        B prompts, their contexts, N rows.
    """
    cfg = parts.config
    count = cfg.sampling.prompts
    ids = data.prompt_ids(
        state.seed,
        state.position + attempt * count,
        count=count,
        num_prompts=parts.task.num_prompts,
    )
    prompts = parts.task.prompts(ids)
    difficulty = allocate.pass_rate(memory, ids, prior=cfg.memory.prior)
    counts = cfg.allocate(difficulty, memory.draws[ids], budget=parts.rows)
    contexts = hint.none(prompts)
    key = jax.random.fold_in(stage_key(state.seed, state.step, "rollout"), attempt)
    rollouts = rollout.sample(
        parts.model,
        state.params,
        contexts,
        allocate.plan(counts, rows=parts.rows),
        key,
        max_tokens=cfg.sampling.max_tokens,
        end=parts.task.end,
        pad=parts.task.pad,
        temperature=cfg.sampling.temperature,
        top_k=cfg.sampling.top_k,
        top_p=cfg.sampling.top_p,
        slots=cfg.sampling.slots,
    )
    return prompts, contexts, rollouts


# ----- absorb: reward, memory, refill


@flax.struct.dataclass(kw_only=True)
class Drawn:
    """Prompts with graded completions. What the gate closed may have been replaced."""

    prompts: Prompts
    contexts: Contexts
    rollouts: Rollouts
    outcome: jax.Array  # [N] float32, NaN where missing
    memory: Memory  # after all prompts that were tried
    attempts: jax.Array  # [] int32, batches of prompts tried
    tally: Tally  # of all prompts that were tried


@flax.struct.dataclass(kw_only=True)
class Graded:
    """What stages compute on, `[B, G]`."""

    row: jax.Array  # int32, the row of each completion; N where there is none
    exists: jax.Array  # bool, drawn and graded: a missing outcome is absent
    outcome: jax.Array  # float32 in [0, 1], 0 where it does not exist
    finished: jax.Array  # bool, ended by itself
    length: jax.Array  # int32 tokens


def graded(config: Config, rollouts: Rollouts, outcome: jax.Array) -> Graded:
    """Rows to grids."""
    shape = (config.sampling.prompts, config.sampling.group_size)
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
    )


def open_groups(config: Config, seen: Graded) -> jax.Array:
    """`[B]` bool: groups of which the gate lets something train."""
    return jnp.any(config.gate(seen.outcome, seen.exists, seen.finished), -1)


def wants_refill(parts: Parts, drawn: Drawn) -> jax.Array:
    """`[]` bool: a group is closed and there are attempts left."""
    seen = graded(parts.config, drawn.rollouts, drawn.outcome)
    closed = ~jnp.all(open_groups(parts.config, seen))
    return closed & (drawn.attempts < parts.config.sampling.rounds)


def absorb(
    parts: Parts,
    memory: Memory,
    drawn: Drawn | None,
    sampled: tuple[Prompts, Contexts, Rollouts],
    outcome: jax.Array,
) -> Drawn:
    """Take graded completions in; let open new groups replace closed old ones.

    Args:
        parts: of the run.
        memory: before these completions.
        drawn: of the attempts before; None in the first.
        sampled: prompts, contexts and rollouts of this attempt.
        outcome: `[N]` float32 in [0, 1], NaN where missing.

    Returns:
        All that is known of the step's completions.
    """
    prompts, contexts, rollouts = sampled
    cfg = parts.config
    seen = graded(cfg, rollouts, outcome)
    new = Drawn(
        prompts=prompts,
        contexts=contexts,
        rollouts=rollouts,
        outcome=outcome,
        memory=allocate.observe(
            memory,
            prompts.id,
            seen.outcome,
            seen.exists,
            discount=cfg.memory.discount,
        ),
        attempts=jnp.int32(1),
        tally=metrics.of_rollouts(
            rollouts,
            seen.outcome,
            seen.exists,
            missing=rollouts.exists & jnp.isnan(outcome),
        ),
    )
    return new if drawn is None else refill(cfg, drawn, new, seen)


def refill(config: Config, old: Drawn, new: Drawn, seen: Graded) -> Drawn:
    """The i-th closed old group gives its place to the i-th open new one.

    Places keep their number, hence their rows; what stands in them changes.
    """
    fresh = open_groups(config, seen)
    closed = ~open_groups(config, graded(config, old.rollouts, old.outcome))
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


def assign(
    config: Config,
    key: jax.Array,
    outcome: jax.Array,
    reward: jax.Array,
    exists: jax.Array,
    finished: jax.Array,
) -> Credit:
    """From outcomes to the coefficient of each completion: the learning signal.

        credit = advantage * correction * f'(pass rate)   where kept

    With binary outcomes and a sum over tokens by a constant, the expected gradient is
    w(p) grad p with w(p) = E[sum of credit over right completions] / p + E[the same
    over wrong ones] / (p - 1), up to that constant.

    Args:
        config: names the stages.
        key: for down-sampling.
        outcome: `[B, G]` float32 in [0, 1].
        reward: `[B, G]` float32, outcome and shaping.
        exists: `[B, G]` bool, drawn and graded.
        finished: `[B, G]` bool, ended by itself.

    Returns:
        What is kept, and with which credit.
    """
    pool = config.gate(outcome, exists, finished)
    keep = config.downsample(key, reward, pool)
    advantage = config.advantage(reward, exists if config.pool_statistics else keep)
    undo = config.correct(reward, pool, keep)
    weight = config.objective(outcome, exists)
    credit = jnp.where(keep, advantage * undo * weight[..., None], 0.0)
    return Credit(keep=keep, credit=credit)


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


def learn(
    parts: Parts, state: TrainState, drawn: Drawn
) -> tuple[TrainState, Tally, Shown]:
    """Everything behind the verifier: one step of training on graded completions."""
    cfg, rollouts = parts.config, drawn.rollouts
    seen = graded(cfg, rollouts, drawn.outcome)
    reward = seen.outcome
    if cfg.shape_reward:
        reward = cfg.shape_reward(seen.outcome, seen.length)
    key = stage_key(state.seed, state.step, "downsample")
    given = assign(cfg, key, seen.outcome, reward, seen.exists, seen.finished)

    place, used = grids.compact(given.keep, rows=parts.train_rows)
    row = jnp.minimum(seen.row.reshape(-1)[place], parts.rows - 1)
    credit = jnp.where(used, given.credit.reshape(-1)[place], 0.0)
    batch = batch_of(parts, state, drawn, row, used, credit)
    params, opt_state, tally = optimise(parts, state, drawn.contexts, batch)

    difficulty = allocate.pass_rate(
        drawn.memory, drawn.prompts.id, prior=cfg.memory.prior
    )
    always = jnp.ones_like(difficulty, bool)
    tally.means["memory/pass_rate"] = metrics.mean(difficulty, always)
    tally.means["reward/mean"] = metrics.mean(reward, seen.exists)
    tally.counts["train/rows"] = metrics.count(used)
    state = dataclasses.replace(
        state,
        params=params,
        opt_state=opt_state,
        memory=drawn.memory,
        position=state.position + drawn.attempts * cfg.sampling.prompts,
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
    )
    few = jax.tree.map(lambda leaf: leaf[: cfg.logging.rollout_prompts], shown)
    return state, metrics.join(drawn.tally, tally), few


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
        return update.logprobs(
            parts.model, params, drawn.contexts, tokens, mask, context, settings(cfg)
        )

    several = cfg.update.epochs * cfg.update.minibatches > 1
    return Batch(
        tokens=tokens,
        mask=mask,
        context=context,
        credit=credit,
        multiplier=cfg.modulate(rollouts.entropy[row], mask),
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
        value = config.loss(logp, rows.logp_old, rows.credit, rows.mask)
        value = value * rows.multiplier
        if config.kl:
            distance = config.kl.estimator(logp, rows.logp_ref)
            value = value + config.kl.coefficient * distance
        value = value - config.entropy_bonus * entropy
        return jnp.where(rows.mask, value, 0.0)

    return objective


def optimise(
    parts: Parts, state: TrainState, contexts: Contexts, batch: Batch
) -> tuple[Any, Any, Tally]:
    """All optimizer updates of a step: epochs times mini-batches.

    The weight of a token is its share of its own update, so an update means the same
    however many there are; each epoch shuffles the rows anew.
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
        part = jax.tree.map(lambda leaf: leaf[which], batch)
        value, grads, own = update.gradient(
            parts.model,
            params,
            contexts,
            part,
            cfg.aggregate(part.mask),
            token_loss(cfg),
            settings(cfg),
            still_old=number == 0,
        )
        params, opt_state, done = update.apply(
            parts.tx, params, opt_state, value, grads, trains(cfg, part)
        )
        return (params, opt_state), tally_update(cfg, part, own, done, number == 0)

    carry = (state.params, state.opt_state)
    numbers = jnp.arange(order.shape[0])
    (params, opt_state), tallies = jax.lax.scan(one, carry, (numbers, order))
    return params, opt_state, jax.tree.map(lambda leaf: jnp.sum(leaf, 0), tallies)


def trains(config: Config, rows: Batch) -> jax.Array:
    """`[]` bool: whether anything in the rows has a gradient.

    Without credit only a KL or an entropy term has one. An update without any would
    still move the parameters, by the optimizer's momentum and weight decay.
    """
    bonus = config.entropy_bonus
    credited = rows.credit != 0
    if config.kl or not (isinstance(bonus, int | float) and bonus == 0):
        credited = jnp.ones_like(credited)
    return jnp.any(rows.mask & credited[:, None])


def tally_update(
    config: Config, rows: Batch, own: update.Taken, done: update.Outcome, first
) -> Tally:
    """What one optimizer update says; `first`: sampler and trainer share parameters."""
    rows = update.with_old(rows, own.logp, first)
    pull = jax.grad(
        lambda logp: jnp.sum(config.loss(logp, rows.logp_old, rows.credit, rows.mask))
    )(own.logp)
    credited = rows.mask & (rows.credit != 0)[:, None]
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
    return tally
