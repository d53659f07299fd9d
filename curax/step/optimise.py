"""Optimizer updates of a step: mini-batches, loss, gradient and metrics of each.

Of each mini-batch:

    modulate -> aggregate -> loss -> update
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from curax import loss, modulate, off_policy, update
from curax.arrays import masked, metrics
from curax.arrays.keys import stage_key
from curax.arrays.metrics import Tally
from curax.config import Config
from curax.monitors import mismatch
from curax.settings import sizes
from curax.settings.config_types import present
from curax.settings.declared import declared
from curax.step import stages
from curax.step.draw import policy
from curax.step.sft import imitating
from curax.step.types import Components
from curax.types import Batch, Contexts, Tokens, TrainState


def settings(config: Config) -> update.Settings:
    """Settings of the trainer's log-probs: temperature, micro-batches, chunks."""
    return update.Settings(
        temperature=config.sampling.temperature,
        micro_batches=config.update.micro_batches,
        tokens_per_micro_batch=config.update.tokens_per_micro_batch,
        length_buckets=config.update.length_buckets,
        token_chunk=config.update.token_chunk,
    )


def settings_of_trained(config: Config) -> update.Settings:
    """`settings` of rows that train alone, of which a context has m at most."""
    return dataclasses.replace(settings(config), rows_per_context=sizes.kept_of(config))


def token_loss(config: Config) -> update.TokenLoss:
    """Per-token loss function of a recipe: policy term, KL to reference, entropy."""

    def objective(logp, entropy, rows: Batch):
        value = policy_loss(config, logp, rows) * rows.multiplier
        weights = ratio_weights(config, rows)
        if weights is not None:
            value = value * weights
        if config.kl:
            distance = stages.called(config, "kl.estimator", logp, rows.logp_ref)
            value = value + config.kl.coefficient * distance
        value = value - config.entropy_bonus * entropy
        return jnp.where(rows.mask, value, 0.0)

    return objective


def policy_loss(config: Config, logp: jax.Array, rows: Batch) -> jax.Array:
    """`[M, T]` float32, policy term of the loss of each token."""
    arrays = logp, ratio_base(config, rows), rows.credit, rows.mask
    return stages.called(config, "loss", *arrays)


def ratio_base(config: Config, rows: Batch) -> jax.Array:
    """`[M, T]` float32, log-probs that the ratio of the loss is over."""
    bypass = config.update.behaviour_as_old
    return rows.logp_behaviour if bypass else present(rows.logp_old)


def ratio_weights(config: Config, rows: Batch) -> jax.Array | None:
    """`[M, T]` float32, old policy over behaviour, by `sampling.off_policy`.

    None where all are 1. Those of a rule that needs all rows of an update are in the
    rows from the beginning of it.
    """
    if not sizes.corrects_sampling(config) or rows.off_policy is not None:
        return rows.off_policy
    arrays = present(rows.logp_old), rows.logp_behaviour, rows.mask
    return stages.called(config, "sampling.off_policy", *arrays)


def optimise(
    parts: Components, state: TrainState, contexts: Contexts, batch: Batch
) -> tuple[Any, Any, Tally]:
    """New parameters, optimizer state and metrics after all updates of a step.

    There are epochs times mini-batches of them; each epoch shuffles the rows anew.
    Token weights are shares of an update, so its size does not depend on the number of
    updates. Multipliers are those of the policy at the start of an update, computed
    over all its rows at once.
    """
    cfg = parts.config
    rows, how = parts.train_rows, cfg.update
    order = jnp.broadcast_to(jnp.arange(rows, dtype=jnp.int32), (how.epochs, rows))
    if how.minibatches > 1:
        key = stage_key(state.seed, state.step, "minibatches")
        epochs = jax.random.split(key, how.epochs)
        order = jax.vmap(jax.random.permutation)(epochs, order)
    order = order.reshape(how.epochs * how.minibatches, -1)
    of_batch = sizes.is_of_batch(cfg.sampling.off_policy)

    def one(carry, item):
        params, opt_state = carry
        number, which = item
        part, tokens = jax.tree.map(lambda leaf: leaf[which], batch), None
        if not declared(cfg.modulate, "constant", False):
            tokens = tokens_of(parts, state, params, contexts, part, number == 0)
            multiplier = stages.called(cfg, "modulate", tokens)
            part = dataclasses.replace(part, multiplier=multiplier)
        if of_batch:
            part = dataclasses.replace(part, off_policy=ratio_weights(cfg, part))
        value, grads, own = update.gradient(
            policy(parts, state),
            params,
            contexts,
            part,
            stages.called(cfg, "aggregate", part.mask),
            token_loss(cfg),
            settings_of_trained(cfg),
            still_old=number == 0,
        )
        if part.imitated is not None:
            extra, more = imitation(parts, state, params, contexts, part)
            value, grads = value + extra, jax.tree.map(jnp.add, grads, more)
        old = update.with_old(part, own.logp, number == 0)
        params, opt_state, done = update.apply(
            parts.tx, params, opt_state, value, grads, trains(cfg, old)
        )
        tally = tally_update(cfg, part, own, done, number == 0, tokens)
        return (params, opt_state), tally

    carry = (state.params, state.opt_state)
    numbers = jnp.arange(order.shape[0])
    (params, opt_state), tallies = jax.lax.scan(one, carry, (numbers, order))
    return params, opt_state, jax.tree.map(lambda leaf: jnp.sum(leaf, 0), tallies)


def tokens_of(
    parts: Components,
    state: TrainState,
    params: Any,
    contexts: Contexts,
    rows: Batch,
    first,
) -> Tokens:
    """Token statistics that multipliers depend on; `first`: the policy is old."""
    seen = update.token_stats(
        policy(parts, state),
        params,
        contexts,
        rows.tokens,
        rows.mask,
        rows.context,
        settings_of_trained(parts.config),
        rows.support,
    )
    rows = update.with_old(rows, seen.logp, first)
    return Tokens(
        mask=rows.mask,
        credit=rows.credit,
        logp_old=ratio_base(parts.config, rows),
        **seen._asdict(),
    )


def imitation(
    parts: Components, state: TrainState, params: Any, contexts: Contexts, rows: Batch
) -> tuple[jax.Array, Any]:
    """Weighted negative log-likelihood of the imitated references, and its gradient.

        - mean over rows of sum_j weight_j log pi(y_j | context, y_<j)

    at temperature 1 and with constant weights.
    """
    imitated, how = present(rows.imitated), settings(parts.config)
    batch = imitating(imitated.tokens, imitated.mask, rows.context)
    batch = dataclasses.replace(batch, multiplier=imitated.weight)
    value, grads, _ = update.gradient(
        policy(parts, state),
        params,
        contexts,
        batch,
        jnp.full(imitated.mask.shape, 1.0 / imitated.mask.shape[0], jnp.float32),
        lambda logp, _, rows: jnp.where(rows.mask, -rows.multiplier * logp, 0.0),
        dataclasses.replace(how, temperature=1.0),
        still_old=True,
    )
    return value, grads


def trains(config: Config, rows: Batch) -> jax.Array:
    """`[]` bool: whether the rows, with old log-probs, have any gradient.

    Without credit only a KL, an entropy bonus or imitation has one. An update without
    any would still move the parameters, by the optimizer's momentum and weight decay.
    """
    bonus = config.entropy_bonus
    always = config.kl or rows.imitated is not None
    if always or not (isinstance(bonus, int | float) and bonus == 0):
        return jnp.any(rows.mask)
    weights = ratio_weights(config, rows)
    kept = rows.mask if weights is None else rows.mask & (weights != 0)
    return jnp.any(kept & (rows.credit != 0))


def weight_metrics(
    config: Config, rows: Batch
) -> dict[str, tuple[jax.Array, jax.Array]]:
    """Means of weights of `sampling.off_policy` over the tokens of an update, or none.

    The effective sample size is (sum w)^2 / sum w^2, here as a share of the tokens.
    """
    weights = ratio_weights(config, rows)
    if weights is None:
        return {}
    rule: Any = present(config.sampling.off_policy)
    arrays = present(rows.logp_old), rows.logp_behaviour, rows.mask
    plain = off_policy.ratio(*arrays, per=sizes.ratio_per(rule))
    # Divided by their mean all of them would differ from their ratios.
    own = weights
    while sizes.is_of_batch(rule):
        rule = sizes.declared_option(rule, "weighs")
        own = jnp.where(weights == 0, 0.0, rule(*arrays))
    total, square, tokens = (
        masked.total(values, rows.mask, axis=None)
        for values in (weights, weights**2, rows.mask)
    )
    size = total**2 / jnp.where(square > 0, square, 1.0)
    largest = jnp.max(weights, where=rows.mask, initial=0.0)
    some = metrics.count(tokens > 0)
    return {
        "off_policy/weight_mean": metrics.mean(weights, rows.mask),
        "off_policy/weight_max": (largest, some),
        "off_policy/weight_effective_fraction": (size / jnp.maximum(tokens, 1.0), some),
        "off_policy/cut_fraction": metrics.mean(own != plain, rows.mask),
        "off_policy/dropped_fraction": metrics.mean(weights == 0, rows.mask),
    }


def gap_metrics(
    config: Config, rows: Batch, logp: jax.Array, first: jax.Array
) -> dict[str, tuple[jax.Array, jax.Array]]:
    """What was drawn from against the policy, in all and by cause, or none.

    Args:
        config: the recipe; says whether they differ, and why.
        rows: of an update.
        logp: `[M, T]` float32, the policy's before this update.
        first: whether it is the first of the step, which alone is measured.
    """
    known = sizes.causes(config)
    now, sampler = (logp, rows.logp_policy), (rows.logp_policy, rows.logp_behaviour)
    # With an outside engine `logp_policy` is the trainer's own, of what drew.
    of = {"truncation": sampler, "lag": now}
    of["engine"] = sampler if config.sampling.engine else now
    parts = {"": (logp, rows.logp_behaviour)} | {f"{why}_": of[why] for why in known}
    some = metrics.count(first & jnp.any(rows.mask))
    return {
        f"off_policy/{part}{name}": (value * some, some)
        for part, arrays in (parts if known else {}).items()
        for name, value in mismatch.gap(*arrays, rows.mask).items()
    }


def tally_update(
    config: Config,
    rows: Batch,
    own: update.TokenLogprobs,
    done: update.UpdateResult,
    first,
    tokens: Tokens | None,
) -> Tally:
    """Metrics of one optimizer update; `first`: sampler and trainer share parameters.

    `tokens`: inputs of its multipliers, None without modulation.
    """
    rows = update.with_old(rows, own.logp, first)
    pull = jax.grad(lambda logp: jnp.sum(policy_loss(config, logp, rows)))(own.logp)
    credited = rows.mask & (rows.credit != 0)
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
    tally.means.update(weight_metrics(config, rows))
    tally.means.update(gap_metrics(config, rows, own.logp, first))
    if rows.logp_ref is not None:
        distance = loss.k3(own.logp, rows.logp_ref)
        tally.means["kl/ref_nats"] = metrics.mean(distance, rows.mask)
    if tokens is not None:
        tally.means.update(modulate.multiplier_metrics(tokens, rows.multiplier, -pull))
    return tally
