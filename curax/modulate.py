"""Per-token multipliers of the loss: `(entropy, mask) -> multiplier`."""

import chex
import jax
import jax.numpy as jnp

from curax import masked


def none(entropy: jax.Array, mask: jax.Array) -> jax.Array:
    """Every token counts once.

    Args:
        entropy: `[..., M, T]` float, nats; not read.
        mask: `[..., M, T]` bool, True on tokens the policy chose.

    Returns:
        `[..., M, T]` float32, 1 everywhere; the mask is in the token weights.

    Raises:
        AssertionError: while tracing, if shapes differ or dtypes are not (float, bool).
    """
    _check(entropy, mask)
    return jnp.ones(mask.shape, jnp.float32)


def forking_tokens(
    entropy: jax.Array, mask: jax.Array, *, share: float | jax.Array = 0.2
) -> jax.Array:
    """Train only the tokens at which the policy was least sure.

        multiplier = 1[H_t >= tau],   tau = the round(share n)-th largest entropy

    among the n masked tokens of all rows, at least one of them. Tokens that tie with
    tau all count, so nothing depends on the order of rows. Token weights keep their
    denominators: the other tokens fall silent, those chosen do not grow louder. Which
    tokens count depends on content, so no effective weight in p describes it.

    Args:
        entropy: `[..., M, T]` float, nats, of the distribution each token came from.
        mask: `[..., M, T]` bool, True on tokens the policy chose.
        share: fraction of masked tokens to train, in (0, 1].

    Returns:
        `[..., M, T]` float32, 1 on the chosen tokens, else 0; 0 off the mask.

    Raises:
        AssertionError: while tracing, if shapes differ or dtypes are not (float, bool).

    References:
        Wang et al. 2025, "Beyond the 80/20 Rule: High-Entropy Minority Tokens Drive
        Effective Reinforcement Learning for LLM Reasoning", arXiv:2506.01939. It takes
        the threshold per micro-batch; here it is that of the batch, so the number of
        micro-batches changes nothing.
    """
    _check(entropy, mask)
    entropy = jnp.where(mask, jnp.asarray(entropy, jnp.float32), -jnp.inf)
    rows = entropy.reshape(*entropy.shape[:-2], -1)
    n = masked.total(mask, mask, axis=(-2, -1))[..., None]
    count = jnp.maximum(jnp.round(share * n), 1.0).astype(jnp.int32)
    descending = jnp.sort(rows, axis=-1, descending=True)
    threshold = jnp.take_along_axis(descending, count - 1, axis=-1)[..., None]
    return jnp.asarray(mask & (entropy >= threshold), jnp.float32)


def _check(entropy: jax.Array, mask: jax.Array) -> None:
    chex.assert_equal_shape([entropy, mask])
    chex.assert_type([entropy, mask], [float, bool])
    chex.assert_axis_dimension_gt(mask, -2, 0)
