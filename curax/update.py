"""One parameter update: log-probs, micro-batches whose gradients add up, optax.

The weight of every token is computed before, on the whole batch. So the loss is a plain
sum over rows, and neither the number of micro-batches nor that of devices changes it.
Contexts are run through the model once, not once per completion: the gradient with
respect to their keys and values is summed over the rows, then pulled back.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import optax
from jax.typing import ArrayLike

from curax import masked
from curax.rollout import extend, prefill, shard_rows
from curax.types import Batch, Contexts, Model

TokenLoss = Callable[[jax.Array, jax.Array, Batch], jax.Array]


@flax.struct.dataclass(kw_only=True)
class Settings:
    """How log-probs are computed. Nothing here changes a result but temperature."""

    temperature: float | jax.Array = 1.0  # of the policy that is trained
    micro_batches: int = flax.struct.field(pytree_node=False, default=1)
    vocab_chunk: int = flax.struct.field(pytree_node=False, default=0)  # 0: all V


@flax.struct.dataclass(kw_only=True)
class Taken:
    """What the policy says of the tokens of a batch."""

    logp: jax.Array  # [M, T] float32, nats, of the token taken
    entropy: jax.Array  # [M, T] float32, nats


def split(tree: Any, parts: int) -> Any:
    """Leaves `[M, ...]` to `[parts, M / parts, ...]`.

    Part i is made of rows i, i + parts, ...: each device's rows lie in every part.
    """
    return jax.tree.map(
        lambda leaf: jnp.swapaxes(
            leaf.reshape(leaf.shape[0] // parts, parts, *leaf.shape[1:]), 0, 1
        ),
        tree,
    )


def join(tree: Any) -> Any:
    """Undo `split`."""
    return jax.tree.map(
        lambda leaf: jnp.swapaxes(leaf, 0, 1).reshape(-1, *leaf.shape[2:]), tree
    )


def take(model, params, contexts, prefix, tokens, context, settings: Settings) -> Taken:
    """Log-probs and entropies of the completions of some rows."""
    features = extend(
        model, params, prefix.take(context), contexts.mask[context], tokens
    )
    logp, entropy = masked.taken(
        features,
        model.head(params),
        tokens,
        temperature=settings.temperature,
        chunk=settings.vocab_chunk,
    )
    return Taken(logp=logp, entropy=entropy)


def logprobs(
    model: Model,
    params: Any,
    contexts: Contexts,
    tokens: jax.Array,
    context: jax.Array,
    settings: Settings,
) -> jax.Array:
    """Log-probs of completions, micro-batch by micro-batch, without a gradient.

    Args:
        model: the policy.
        params: its parameters, or the reference's.
        contexts: `[C, P]`.
        tokens: `[M, T]` int32.
        context: `[M]` int32 in [0, C).
        settings: micro-batches, vocabulary chunk, temperature.

    Returns:
        `[M, T]` float32, nats.
    """
    prefix = prefill(model, params, contexts)
    parts = split((tokens, context), settings.micro_batches)

    def read(rows):
        tokens, context = rows
        own = take(model, params, contexts, prefix, tokens, context, settings)
        return own.logp

    return join(jax.lax.map(read, parts))


def with_old(rows: Batch, logp: jax.Array, still_old: bool | jax.Array) -> Batch:
    """The rows with old log-probs: the policy's own ones while it is still old.

    Recomputing them would give the same numbers only up to rounding.
    """
    own = jax.lax.stop_gradient(logp)
    if rows.logp_old is not None:
        own = jnp.where(still_old, own, rows.logp_old)
    return dataclasses.replace(rows, logp_old=own)


def gradient(
    model: Model,
    params: Any,
    contexts: Contexts,
    batch: Batch,
    weight: jax.Array,
    token_loss: TokenLoss,
    settings: Settings,
    *,
    still_old: bool | jax.Array,
) -> tuple[jax.Array, Any, Taken]:
    """Loss and gradient of a whole batch.

        L = sum over rows and tokens of weight * token_loss(logp, entropy, batch)

    Args:
        model: the policy.
        params: its parameters.
        contexts: `[C, P]`.
        batch: `[M, T]` rows.
        weight: `[M, T]` float32, share of each token in the loss.
        token_loss: `(logp, entropy, rows) -> [rows, T]`.
        settings: micro-batches, vocabulary chunk, temperature.
        still_old: whether params are those at the start of the step, so that the ratio
            is exactly 1; see `with_old`.

    Returns:
        The loss, `[]` float32; its gradient, like params; what the policy says of the
        tokens, without a gradient.
    """
    prefix, pull = jax.vjp(lambda p: prefill(model, p, contexts), params)

    def loss_of(params, prefix, rows, weight):
        own = take(model, params, contexts, prefix, rows.tokens, rows.context, settings)
        rows = with_old(rows, own.logp, still_old)
        loss = token_loss(own.logp, own.entropy, rows)
        return jnp.sum(weight * loss), jax.lax.stop_gradient(own)

    def add(total, rows_and_weight):
        (loss, own), grads = jax.value_and_grad(loss_of, argnums=(0, 1), has_aux=True)(
            params, prefix, *rows_and_weight
        )
        return jax.tree.map(
            lambda a, b: a + b.astype(a.dtype), total, (loss, grads)
        ), own

    # Sums are float32 whatever the model computes in, so their order hardly matters.
    start = jax.tree.map(
        lambda x: jnp.zeros(x.shape, jnp.float32), (jnp.float32(0), (params, prefix))
    )
    parts = split(jax.tree.map(shard_rows, (batch, weight)), settings.micro_batches)
    (loss, (grads, prefix_grads)), own = jax.lax.scan(add, start, parts)
    prefix_grads = jax.tree.map(lambda g, x: g.astype(x.dtype), prefix_grads, prefix)
    grads = jax.tree.map(jnp.add, grads, pull(prefix_grads)[0])
    return loss, grads, join(own)


def transformation(
    optimizer: Callable[[], optax.GradientTransformation], clip_norm: float | jax.Array
) -> optax.GradientTransformation:
    """Clip by global norm, then the optimizer."""
    return optax.chain(optax.clip_by_global_norm(clip_norm), optimizer())


@flax.struct.dataclass(kw_only=True)
class Outcome:
    """What one optimizer update did."""

    loss: jax.Array  # [] float32
    gradient_norm: jax.Array  # [] float32, before clipping
    applied: jax.Array  # [] bool, False: nothing to train on, or not finite
    finite: jax.Array  # [] bool, loss and gradient


def apply(
    tx: optax.GradientTransformation, params: Any, opt_state: Any, loss, grads, usable
) -> tuple[Any, Any, Outcome]:
    """Parameters after one optimizer update; before it, if the update is unusable.

    An update is skipped as a whole (moments, schedule and weight decay too) where
    `usable` is False and where loss or gradient is not finite.

    Args:
        tx: clipping and optimizer.
        params: parameters.
        opt_state: its state.
        loss: `[]` float32.
        grads: tree like params.
        usable: `[]` bool, whether any token has a gradient.

    Returns:
        Parameters, optimizer state, what was done.
    """
    norm = optax.tree.norm(grads)
    finite = jnp.isfinite(loss) & jnp.isfinite(norm)
    applied = usable & finite
    # optax raises floats to integer counts, which strict promotion would refuse.
    with jax.numpy_dtype_promotion("standard"):
        updates, new_state = tx.update(grads, opt_state, params)
    new = (optax.apply_updates(params, updates), new_state)
    params, opt_state = jax.tree.map(
        lambda new, old: jnp.where(applied, new, old), new, (params, opt_state)
    )
    done = Outcome(loss=loss, gradient_norm=norm, applied=applied, finite=finite)
    return params, opt_state, done


def warmup_cosine(
    step: ArrayLike, *, peak: float, warmup: int, steps: int, end: float = 0.0
) -> jax.Array:
    """Learning rate: linear from 0 to `peak`, then half a cosine down to `end`.

    Args:
        step: `[]` integer, optimizer updates done.
        peak: highest rate.
        warmup: updates to get there.
        steps: updates after which the rate is `end`.
        end: lowest rate.

    Returns:
        `[]` float32.
    """
    schedule = optax.warmup_cosine_decay_schedule(0.0, peak, warmup, steps, end)
    return jnp.asarray(schedule(jnp.asarray(step, jnp.float32)), jnp.float32)
