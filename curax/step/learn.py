"""From graded completions to new parameters: all stages after the verifier.

    reward -> gate -> downsample -> correct -> objective -> advantage -> compact
        -> (methods) -> log-probs -> optimise

Multipliers, token weights and losses are those of mini-batches: `optimise` has them. No
method is named here: methods change credit, batch and metrics through their records.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from curax import memory as memories
from curax import update
from curax.arrays import grids, masked, metrics
from curax.arrays.keys import stage_key
from curax.config import Config
from curax.settings.declared import RIGHT, declared
from curax.settings.sizes import needs_old_first
from curax.step import ahead, stages
from curax.step.draw import in_turn, policy
from curax.step.drivers import Traced
from curax.step.optimise import optimise, settings_of_trained
from curax.step.types import (
    Components,
    Credit,
    Groups,
    Selection,
    Shown,
    StepRollouts,
)
from curax.types import Batch, TrainState


def learn(
    parts: Components, state: TrainState, drawn: StepRollouts
) -> tuple[TrainState, tuple[dict[str, jax.Array], Shown]]:
    """The train state after the update, with metrics and logged completions."""
    cfg, seen, drive = parts.config, drawn.groups, Traced()
    selected, reward, batch = prepared(parts, state, drawn)
    given, contexts = selected.given, selected.drawn.contexts
    params, opt_state, tally = optimise(parts, state, contexts, batch)
    tally.means.update(group_metrics(parts, drawn, seen, given))
    tally.means["reward/mean"] = metrics.mean(reward, seen.exists)
    tally.counts["train/rows"] = metrics.count(selected.used)
    tally = metrics.join(drawn.tally, tally)
    for method in parts.methods:
        if method.metrics:
            tally = metrics.merge(tally, method.metrics(drive, parts, state, drawn))
    taken = drawn.attempts * cfg.sampling.prompts if in_turn(parts) else 0
    after = dataclasses.replace(
        state,
        params=params,
        opt_state=opt_state,
        memory=drawn.memory,
        position=state.position + taken,
        step=state.step + 1,
    )
    own: dict[str, Any] = dict(state.methods)
    for method in parts.methods:
        if method.after_update:
            own[method.name] = method.after_update(drive, parts, after, drawn)
    after = dataclasses.replace(after, methods=own)
    shown = show(parts, state, drawn, seen, reward, given)
    return after, (metrics.finish(tally), shown)


def learn_beside(
    parts: Components, used_up: TrainState, kept: TrainState, drawn: StepRollouts
) -> tuple[TrainState, tuple[dict[str, jax.Array], Shown]]:
    """As `learn`, beside the next step's draw; of the state what is `ahead.changed`."""
    state, out = learn(parts, ahead.whole(used_up, kept), drawn)
    return ahead.changed(state), out


def prepared(
    parts: Components, state: TrainState, drawn: StepRollouts
) -> tuple[Selection, jax.Array, Batch]:
    """What trains, the rewards `[B, G]`, and the batch, before any update."""
    cfg, seen = parts.config, drawn.groups
    reward = reward_of(parts, seen)
    given = compute_credit(
        cfg,
        stage_key(state.seed, state.step, "downsample"),
        seen.outcome,
        reward,
        seen.exists,
        seen.finished,
        drawn.known.pass_rate,
    )
    # Rows of the kept completions, in grid order, padded to M.
    place, used = grids.compact(given.keep, rows=parts.train_rows)
    row = jnp.minimum(seen.row.reshape(-1)[place], parts.rows - 1)
    trains = Selection(drawn=drawn, given=given, place=place, row=row, used=used)
    for method in parts.methods:
        if method.credit:
            trains = method.credit(Traced(), parts, state, trains)
    return trains, reward, batch_of(parts, state, trains)


def reward_of(parts: Components, seen: Groups) -> jax.Array:
    """`[B, G]` float32 rewards after shaping: of the grading, else the outcomes."""
    given = seen.outcome if seen.reward is None else seen.reward
    return stages.shaped(parts.config, given, seen.length)


def compute_credit(
    config: Config,
    key: jax.Array,
    outcome: jax.Array,
    reward: jax.Array,
    exists: jax.Array,
    finished: jax.Array,
    history: jax.Array,
) -> Credit:
    """Credit of each completion, the coefficient of its gradient, from the outcomes.

        credit = advantage * correction * weight of the objective   where kept

    With 0/1 outcomes and tokens summed and divided by a constant, the expected gradient
    is w(p) grad p:

        w(p) = (E[sum of credit over right ones] / p
                - E[sum of credit over wrong ones] / (1 - p)) / R ,

    where the sum over rows is divided by R, the rows trained per prompt.

    Args:
        config: the recipe; its stages are called.
        key: random key of down-sampling.
        outcome: `[B, G]` float32 in [0, 1].
        reward: `[B, G]` float32, outcomes after shaping.
        exists: `[B, G]` bool, drawn and graded.
        finished: `[B, G]` bool, ended by itself.
        history: `[B]` float32, pass rates known before the draw.

    Returns:
        Which completions are kept, and their credit.
    """
    pool = stages.called(config, "gate", outcome, exists, finished)

    def by(stage):
        """Rules that tell right from wrong go by the outcome, as gates; others rank."""
        return outcome if declared(stage, "right_above", "") else reward

    keep = stages.called(config, "downsample", key, by(config.downsample), pool)
    undo = stages.corrected(config, by, pool, keep)
    factor = undo * stages.called(config, "objective", outcome, exists, history)
    credit = stages.advantage_credit(config, reward, exists, keep, factor)
    return Credit(keep=keep, credit=credit, factor=factor)


def batch_of(parts: Components, state: TrainState, trains: Selection) -> Batch:
    """The M rows to train on, with log-probs of the old and reference policies.

    Where kept sets are noted (`sampling.replay_support`) all of these are log-probs
    within them, at each token within the same: of the policy, which the sampler's are
    then those of, of the old one and of the reference. So ratios are 1 where the policy
    drew, and the KL is that of two distributions over what could be drawn.

    Args:
        parts: components of the run.
        state: train state at the start of the step: its policy is old, its reference
            the reference.
        trains: completions of the step, which of them train, and their credit.

    References:
        Kept sets: DeepSeek-AI 2025, "DeepSeek-V3.2: Pushing the Frontier of Open Large
        Language Models", arXiv:2512.02556, section 3.1 ("Keep Sampling Mask").
    """
    cfg, drawn, row = parts.config, trains.drawn, trains.row
    rollouts, mask, support = drawn.rollouts, trains.mask, trains.support
    tokens, context = rollouts.tokens[row], rollouts.context[row]

    def logprobs(params):
        model = policy(parts, state)
        return update.logprobs(
            *(model, params, drawn.contexts, tokens, mask, context),
            settings_of_trained(cfg),
            support,
        )

    drawn_from, logp_policy = rollouts.logp_behaviour, rollouts.logp_policy
    if support is not None and cfg.sampling.engine is None:  # which is before the cut
        logp_policy = drawn_from
    return Batch(
        tokens=tokens,
        mask=mask,
        context=context,
        credit=trains.credit,
        multiplier=jnp.ones(mask.shape, jnp.float32),  # until an update modulates
        logp_behaviour=drawn_from[row],
        logp_policy=logp_policy[row],
        logp_old=logprobs(state.params) if needs_old_first(cfg) else None,
        logp_ref=logprobs(state.reference) if cfg.kl else None,
        imitated=trains.imitated,
        support=support,
    )


def group_metrics(
    parts: Components, drawn: StepRollouts, seen: Groups, given: Credit
) -> dict[str, tuple[jax.Array, jax.Array]]:
    """Metrics per prompt: pass rates, draws, groups with signal, sums of credit.

    They are what `xray` predicts: the sums of credit are C+ and C- of the law.
    """
    prior = parts.config.memory.prior
    known = memories.difficulty(drawn.memory, drawn.prompts.id, prior=prior).pass_rate
    each = jnp.ones_like(known, bool)
    per_prompt = parts.train_rows / parts.config.sampling.prompts
    right = seen.outcome > RIGHT
    count = jnp.sum(seen.row < parts.rows, -1)
    means = {
        "memory/pass_rate": metrics.mean(known, each),
        "group/draws": metrics.mean(count, each),
        "group/signal_fraction": metrics.mean(jnp.any(given.credit != 0, -1), each),
        "group/pass_rate": metrics.mean(
            masked.mean(seen.outcome, seen.exists), jnp.any(seen.exists, -1)
        ),
        "group/advantage_energy": metrics.mean(
            advantage_energy(given.credit, seen.outcome, seen.exists) / per_prompt, each
        ),
        "credit/right_sum": metrics.mean(
            masked.total(given.credit, right) / per_prompt, each
        ),
        "credit/wrong_sum": metrics.mean(
            masked.total(given.credit, ~right) / per_prompt, each
        ),
    }
    if parts.config.stop:
        met = stages.called(parts.config, "stop.rule", seen.outcome, seen.exists)
        means["stop/met_fraction"] = metrics.mean(met, each)
    return means


def advantage_energy(
    credit: jax.Array, outcome: jax.Array, exists: jax.Array
) -> jax.Array:
    """`[B]` float32, estimated advantage energy of each prompt, times its rows.

        sum_i c_i (r_i - q),   q the mean outcome of the group

    With the pass rate p in place of q its mean is R E(p), E(p) = w(p) p (1 - p); with q
    it is that less Cov(sum_i c_i, q), which is 0 where credits of a group add up to a
    constant, as centred ones do. With `advantage.raw` the mean is (1 - 1/n) of it.

    Args:
        credit: `[B, G]` float32, 0 where not kept.
        outcome: `[B, G]` float32 in [0, 1].
        exists: `[B, G]` bool.
    """
    rate = masked.mean(outcome, exists, keepdims=True)
    return masked.total(credit * (outcome - rate), exists)


def show(
    parts: Components,
    state: TrainState,
    drawn: StepRollouts,
    seen: Groups,
    reward: jax.Array,
    given: Credit,
) -> Shown:
    """Completions, outcomes, credit of the first `logging.rollout_prompts` prompts."""
    rollouts, version, turns = drawn.rollouts, drawn.version, drawn.rollouts.turns
    if version is None:
        version = jnp.full(parts.rows, state.step)
    every = Shown(
        prompts=drawn.prompts,
        tokens=grids.grid(rollouts.tokens, seen.row, fill=parts.task.pad),
        mask=grids.grid(rollouts.written, seen.row, fill=False),
        outcome=jnp.where(seen.exists, seen.outcome, jnp.nan),
        reward=reward,
        credit=given.credit,
        keep=given.keep,
        exists=seen.row < parts.rows,
        version=grids.grid(version, seen.row, fill=0),
        level=drawn.level,
        contexts=drawn.contexts,
        reference=drawn.reference,
        observed=turns and grids.grid(turns.observed, seen.row, fill=False),
    )
    few = parts.config.logging.rollout_prompts
    return jax.tree.map(lambda leaf: leaf[:few], every)
