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
import optax

from curax import (
    aggregate,
    allocate,
    data,
    hint,
    loss,
    metrics,
    rollout,
    update,
)
from curax.config import Config, option
from curax.keys import stage_key
from curax.metrics import Tally
from curax.types import (
    Batch,
    Contexts,
    Memory,
    Model,
    Prompts,
    Rollouts,
    Task,
    TrainState,
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Parts:
    """A config with its functions called: what every step needs, all of it static."""

    config: Config
    task: Task
    model: Model
    tx: optax.GradientTransformation
    rows: int  # N, completions drawn per round
    train_rows: int  # M, completions trained per step


def build(config: Config) -> Parts:
    """Call the config's task, model and optimizer.

    Raises:
        ValueError: if a combination is impossible, in a sentence.
    """
    task = config.task()
    refill, is_uniform = (
        config.sampling.rounds > 1,
        _is(config.allocate, allocate.uniform),
    )
    if refill and not is_uniform:
        raise ValueError(
            f"sampling.rounds={config.sampling.rounds} replaces whole groups and needs "
            "groups of one size; set allocate to allocate.uniform or rounds to 1."
        )
    rows = config.sampling.prompts * config.sampling.group_size
    kept = option(config.downsample, "m", config.sampling.group_size)
    return Parts(
        config=config,
        task=task,
        model=config.model(vocab_size=task.vocab_size),
        tx=transformation(config.optimizer, config.update.clip_norm),
        rows=rows,
        train_rows=config.sampling.prompts * kept,
    )


def _is(stage: Any, function: Any) -> bool:
    return getattr(stage, "func", stage) is function


def transformation(optimizer, clip_norm) -> optax.GradientTransformation:
    """Clip by global norm, then the optimizer."""
    return optax.chain(optax.clip_by_global_norm(clip_norm), optimizer())


def settings(config: Config) -> update.Settings:
    """How the trainer computes log-probs."""
    return update.Settings(
        temperature=config.sampling.temperature,
        micro_batches=config.update.micro_batches,
        vocab_chunk=config.update.vocab_chunk,
    )


# ----- rows and grids


def grid_index(rollouts: Rollouts, shape: tuple[int, int]) -> jax.Array:
    """`[B, G]` int32: the row of each (prompt, slot); N where there is none."""
    rows = rollouts.prompt.shape[0]
    prompt = jnp.where(rollouts.exists, rollouts.prompt, shape[0])  # out: dropped
    row = jnp.arange(rows, dtype=jnp.int32)
    empty = jnp.full(shape, rows, jnp.int32)
    return empty.at[prompt, rollouts.slot].set(row, mode="drop")


def grid(values: jax.Array, index: jax.Array, fill: Any) -> jax.Array:
    """Rows `[N, ...]` as a grid `[B, G, ...]`; `fill` where there is no row."""
    return values.at[index].get(mode="fill", fill_value=fill)


def compact(keep: jax.Array, *, rows: int) -> tuple[jax.Array, jax.Array]:
    """Places in the flat grid of the kept completions, in grid order.

    Args:
        keep: `[B, G]` bool, at most `rows` of them True.
        rows: M, static.

    Returns:
        `[M]` int32 places in [0, B G), `[M]` bool, False on the rows left over.
    """
    order = jnp.argsort(~keep.reshape(-1), stable=True)[:rows].astype(jnp.int32)
    return order, keep.reshape(-1)[order]


# ----- draw: data, allocate, hint, rollout


@flax.struct.dataclass(kw_only=True)
class Drawn:
    """Prompts with graded completions. What the gate closed may have been replaced."""

    prompts: Prompts
    contexts: Contexts
    rollouts: Rollouts
    outcome: jax.Array  # [N] float32, NaN where missing
    memory: Memory  # after all prompts that were tried
    rounds: jax.Array  # [] int32, batches of prompts tried
    tally: Tally  # of all prompts that were tried


def draw(
    parts: Parts, state: TrainState, memory: Memory, round_: jax.Array
) -> tuple[Prompts, Contexts, Rollouts]:
    """Sample completions for the next prompts.

    Args:
        parts: of the run.
        state: at the start of the step.
        memory: with what earlier rounds of this step observed.
        round_: `[]` int32, 0 unless closed groups are refilled.

    Returns:
        B prompts, their contexts, N rows.
    """
    cfg = parts.config
    count = cfg.sampling.prompts
    ids = data.prompt_ids(
        state.seed,
        state.position + round_ * count,
        count=count,
        num_prompts=parts.task.num_prompts,
    )
    prompts = parts.task.prompts(ids)
    difficulty = allocate.pass_rate(memory, ids, prior=cfg.memory.prior)
    counts = cfg.allocate(difficulty, memory.draws[ids], budget=parts.rows)
    contexts = hint.none(prompts)
    key = jax.random.fold_in(stage_key(state.seed, state.step, "rollout"), round_)
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


def absorb(
    parts: Parts,
    memory: Memory,
    drawn: Drawn | None,
    sampled: tuple[Prompts, Contexts, Rollouts],
    outcome: jax.Array,
) -> Drawn:
    """Take graded completions in; let live new groups replace closed old ones.

    Args:
        parts: of the run.
        memory: before these completions.
        drawn: of the rounds before; None in the first.
        sampled: prompts, contexts and rollouts of this round.
        outcome: `[N]` float32 in [0, 1], NaN where missing.

    Returns:
        All that is known of the step's completions.
    """
    prompts, contexts, rollouts = sampled
    index, exists, graded, finished = grids(parts, rollouts, outcome)
    memory = allocate.observe(
        memory, prompts.id, graded, exists, discount=parts.config.memory.discount
    )
    new = Drawn(
        prompts=prompts,
        contexts=contexts,
        rollouts=rollouts,
        outcome=outcome,
        memory=memory,
        rounds=jnp.int32(1),
        tally=tally_of(rollouts, outcome, graded, exists),
    )
    if drawn is None:
        return new
    # The i-th closed old group gives its place to the i-th live new one.
    live = jnp.any(parts.config.gate(graded, exists, finished), -1)
    closed = closed_groups(parts, drawn)
    rank = jnp.cumsum(closed, dtype=jnp.int32) - 1
    source = jnp.argsort(~live, stable=True).astype(jnp.int32)[rank]
    replaced = closed & (rank < jnp.sum(live, dtype=jnp.int32))
    old = drawn.rollouts
    row = index[source[old.prompt], old.slot]  # the new row for each old one

    def pick(new, old, where, at):
        def leaf(new, old):
            return jnp.where(where.reshape(-1, *(1,) * (old.ndim - 1)), new[at], old)

        return jax.tree.map(leaf, new, old)

    return Drawn(
        prompts=pick(prompts, drawn.prompts, replaced, source),
        contexts=pick(contexts, drawn.contexts, replaced, source),
        rollouts=pick(rollouts, old, replaced[old.prompt], row).replace(
            prompt=old.prompt, slot=old.slot, context=old.context
        ),
        outcome=pick(outcome, drawn.outcome, replaced[old.prompt], row),
        memory=memory,
        rounds=drawn.rounds + 1,
        tally=metrics.merge(drawn.tally, new.tally),
    )


def grids(parts: Parts, rollouts: Rollouts, outcome: jax.Array):
    """Row index, exists, outcome and finished as `[B, G]` grids; missing is absent."""
    cfg = parts.config.sampling
    index = grid_index(rollouts, (cfg.prompts, cfg.group_size))
    graded = grid(outcome, index, jnp.nan)
    exists = ~jnp.isnan(graded)
    return (
        index,
        exists,
        jnp.where(exists, graded, 0.0),
        grid(rollouts.finished, index, False),
    )


def closed_groups(parts: Parts, drawn: Drawn) -> jax.Array:
    """`[B]` bool: groups of which the gate lets nothing train."""
    _, exists, graded, finished = grids(parts, drawn.rollouts, drawn.outcome)
    return ~jnp.any(parts.config.gate(graded, exists, finished), -1)


def tally_of(rollouts, outcome, graded, exists) -> Tally:
    """What the completions of one round say, before anything is selected."""
    drawn = rollouts.exists
    some = jnp.any(exists, -1)
    best = jnp.max(graded, -1, where=exists, initial=-jnp.inf)
    worst = jnp.min(graded, -1, where=exists, initial=jnp.inf)
    length = jnp.sum(rollouts.mask, -1, dtype=jnp.float32)
    return Tally(
        means={
            "outcome/mean": metrics.mean(graded, exists),
            "group/dead_fraction": metrics.mean(best == worst, some),
            "group/solved_fraction": metrics.mean(worst >= 1, some),
            "group/failed_fraction": metrics.mean(best <= 0, some),
            "rollout/length_tokens": metrics.mean(length, drawn),
            "rollout/unfinished_fraction": metrics.mean(~rollouts.finished, drawn),
            "policy/entropy_nats": metrics.mean(rollouts.entropy, rollouts.mask),
        },
        counts={
            "rollout/drawn": metrics.count(drawn),
            "rollout/tokens": metrics.count(rollouts.mask),
            "outcome/missing": metrics.count(drawn & jnp.isnan(outcome)),
        },
    )


# ----- learn: gate to update


@flax.struct.dataclass(kw_only=True)
class Credit:
    """What becomes of each completion, `[B, G]`."""

    keep: jax.Array  # bool, trains
    advantage: jax.Array  # float32, before correction and prompt weight
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
    w(p) grad p with w(p) = E[sum of credit over right completions] / p - E[the same
    over wrong ones] / (1 - p), up to that constant.

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
    among = exists if config.pool_statistics else keep
    advantage = config.advantage(reward, among)
    undo = config.correct(reward, pool, keep)
    prompt_weight = config.objective(outcome, exists)
    credit = jnp.where(keep, advantage * undo * prompt_weight[..., None], 0.0)
    return Credit(keep=keep, advantage=advantage, credit=credit)


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
    index, exists, outcome, finished = grids(parts, rollouts, drawn.outcome)
    length = jnp.sum(grid(rollouts.mask, index, False), -1, dtype=jnp.int32)
    shaped = cfg.shape_reward(outcome, length) if cfg.shape_reward else outcome
    key = stage_key(state.seed, state.step, "downsample")
    given = assign(cfg, key, outcome, shaped, exists, finished)

    place, used = compact(given.keep, rows=parts.train_rows)
    row = jnp.minimum(index.reshape(-1)[place], parts.rows - 1)
    mask = rollouts.mask[row] & used[:, None]
    tokens, context = rollouts.tokens[row], rollouts.context[row]
    how = settings(cfg)

    def logprobs(params):
        return update.logprobs(
            parts.model, params, drawn.contexts, tokens, context, how
        )

    updates = cfg.update.epochs * cfg.update.minibatches
    batch = Batch(
        tokens=tokens,
        mask=mask,
        context=context,
        credit=jnp.where(used, given.credit.reshape(-1)[place], 0.0),
        logp_behaviour=rollouts.logp_behaviour[row],
        logp_policy=rollouts.logp_policy[row],
        logp_old=logprobs(state.params) if updates > 1 else None,
        logp_ref=logprobs(state.reference) if cfg.kl else None,
        multiplier=cfg.modulate(rollouts.entropy[row], mask),
    )
    params, opt_state, tally = optimise(parts, state, drawn.contexts, batch, how)
    ids = drawn.prompts.id
    difficulty = allocate.pass_rate(drawn.memory, ids, prior=cfg.memory.prior)
    tally.means["memory/pass_rate"] = metrics.mean(difficulty, jnp.ones_like(ids, bool))
    tally.means["reward/mean"] = metrics.mean(shaped, exists)
    tally.counts["train/rows"] = metrics.count(used)
    shown = cfg.logging.rollout_prompts
    state = state.replace(
        params=params,
        opt_state=opt_state,
        memory=drawn.memory,
        position=state.position + drawn.rounds * cfg.sampling.prompts,
        step=state.step + 1,
    )
    few = Shown(
        prompts=drawn.prompts,
        tokens=grid(rollouts.tokens, index, parts.task.pad),
        mask=grid(rollouts.mask, index, False),
        outcome=jnp.where(exists, outcome, jnp.nan),
        reward=shaped,
        credit=given.credit,
        keep=given.keep,
        exists=index < parts.rows,
    )
    few = jax.tree.map(lambda leaf: leaf[:shown], few)
    return state, metrics.join(drawn.tally, tally), few


def token_loss(config: Config) -> update.TokenLoss:
    """The per-token loss of a recipe: policy term, KL to the reference, entropy."""

    def objective(logp, entropy, rows: Batch):
        value = config.loss(logp, rows.logp_old, rows.credit, rows.mask)
        value = value * rows.multiplier
        if config.kl:
            distance = config.kl.estimator(logp, rows.logp_ref)
            value = value + config.kl.coefficient * distance
        bonus = config.entropy_bonus
        if not (isinstance(bonus, int | float) and bonus == 0):
            value = value - bonus * entropy
        return jnp.where(rows.mask, value, 0.0)

    return objective


def optimise(parts: Parts, state: TrainState, contexts, batch: Batch, how):
    """All optimizer updates of a step: epochs times mini-batches."""
    cfg = parts.config
    objective = token_loss(cfg)
    order = row_order(state, parts.train_rows, cfg.update)

    def one(carry, item):
        params, opt_state = carry
        number, rows = item
        part = jax.tree.map(lambda leaf: leaf[rows], batch)
        weight = cfg.aggregate(part.mask)
        value, grads, own = update.gradient(
            parts.model,
            params,
            contexts,
            part,
            weight,
            objective,
            how,
            still_old=number == 0,
        )
        params, opt_state, done = update.apply(
            parts.tx, params, opt_state, value, grads, jnp.any(part.mask)
        )
        return (params, opt_state), tally_update(cfg, part, own, done, number == 0)

    carry = (state.params, state.opt_state)
    numbers = jnp.arange(order.shape[0])
    (params, opt_state), tallies = jax.lax.scan(one, carry, (numbers, order))
    tally = jax.tree.map(lambda leaf: jnp.sum(leaf, 0), tallies)
    return params, opt_state, tally


def tally_update(
    config: Config, rows: Batch, own: update.Taken, done: update.Outcome, first
) -> Tally:
    """What one optimizer update says."""
    rows = update.with_old(rows, own.logp, first)
    pulled = jax.grad(
        lambda logp: jnp.sum(config.loss(logp, rows.logp_old, rows.credit, rows.mask))
    )(own.logp)
    trains = rows.mask & (rows.credit != 0)[:, None]
    drift = jnp.max(jnp.abs(own.logp - rows.logp_policy), where=rows.mask, initial=0.0)
    tally = Tally(
        means={
            "loss/mean": metrics.one(done.loss),
            "gradient/norm": metrics.one(done.gradient_norm),
            "ratio/clipped_fraction": metrics.mean(pulled == 0, trains),
            "kl/behaviour_nats": metrics.mean(
                loss.k3(rows.logp_behaviour, own.logp), rows.mask
            ),
            # Before the first update sampler and trainer hold the same parameters.
            "sampler/drift_nats": (jnp.where(first, drift, 0.0), metrics.count(first)),
        },
        counts={
            "update/count": metrics.count(done.applied),
            "update/skipped": metrics.count(~done.applied),
            "train/tokens": metrics.count(rows.mask),
        },
    )
    if config.kl:
        tally.means["kl/ref_nats"] = metrics.mean(
            loss.k3(own.logp, rows.logp_ref), rows.mask
        )
    return tally


def row_order(state: TrainState, rows: int, how) -> jax.Array:
    """`[updates, rows / minibatches]` int32: which rows each update of a step sees.

    Every epoch shuffles the rows anew; a single mini-batch keeps their order.
    """
    per_update = rows // how.minibatches
    order = jnp.broadcast_to(jnp.arange(rows, dtype=jnp.int32), (how.epochs, rows))
    if how.minibatches > 1:
        key = stage_key(state.seed, state.step, "minibatches")
        epochs = jax.random.split(key, how.epochs)
        order = jax.vmap(jax.random.permutation)(epochs, order)
    return order.reshape(-1, per_update)


# ----- warm start: imitate traces


def imitate(
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
    assert warm is not None and parts.task.traces is not None
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
    value, grads, _ = update.gradient(
        parts.model,
        params,
        hint.none(prompts),
        batch,
        aggregate.token_mean(mask),
        lambda logp, _, rows: loss.reinforce(
            logp, rows.logp_old, rows.credit, rows.mask
        ),
        update.Settings(),
        still_old=True,
    )
    tx = transformation(warm.optimizer, warm.clip_norm)
    params, opt_state, _ = update.apply(
        tx, params, opt_state, value, grads, jnp.bool_(True)
    )
    return params, opt_state, value
