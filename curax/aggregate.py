"""Mask -> token weights. The loss of a batch is the sum of weight times token loss.

Weights are computed once on all rows of an update, so that gradients of micro-batches
simply add up.
"""

import jax
import jax.numpy as jnp

from curax.arrays import checks, masked
from curax.settings.config_types import Positive
from curax.types import BoolMT, FloatMT


@checks.contract()
def token_mean(mask: BoolMT) -> FloatMT:
    """Every token of the batch counts the same.

        weight = mask / (masked tokens in the batch)

    Long completions count for more than short ones, and lengthening one completion
    takes weight from all others: denominators that depend on content break the
    effective-weight law. A batch without tokens gets 0.

    Args:
        mask: `[..., M, T]` bool, True on tokens that train.

    Returns:
        `[..., M, T]` float32; sums to 1 over the batch. 0 off the mask.

    Raises:
        AssertionError: while tracing, if `mask` is not bool or has no row axis.

    References:
        Yu et al. 2025, "DAPO: An Open-Source LLM Reinforcement Learning System at
        Scale", arXiv:2503.14476, token-level loss.
    """
    tokens = masked.total(mask, mask, axis=(-2, -1), keepdims=True)
    return jnp.asarray(mask, jnp.float32) / jnp.maximum(tokens, 1.0)


@checks.contract()
def sequence_mean(mask: BoolMT) -> FloatMT:
    """Every completion counts the same, whatever its length.

        weight = mask / (tokens of the row) / (rows that have a token)

    A token of a long completion counts for less, so long wrong answers are punished
    more mildly than short ones. Rows without tokens get 0 and are not counted.

    Args:
        mask: `[..., M, T]` bool, True on tokens that train.

    Returns:
        `[..., M, T]` float32; sums to 1 over the batch. 0 off the mask.

    Raises:
        AssertionError: while tracing, if `mask` is not bool or has no row axis.

    References:
        Shao et al. 2024, "DeepSeekMath: Pushing the Limits of Mathematical Reasoning in
        Open Language Models", arXiv:2402.03300, equation 3.
    """
    length = masked.total(mask, mask, keepdims=True)
    rows = masked.total(length > 0, length > 0, axis=(-2, -1), keepdims=True)
    return jnp.asarray(mask, jnp.float32) / jnp.maximum(length * rows, 1.0)


@checks.contract(lengths=("length",))
def constant_length(mask: BoolMT, *, length: Positive | jax.Array) -> FloatMT:
    """Every token counts 1 / (M length), whatever else is in the batch.

        weight = mask / (M length)

    A completion's loss is the sum over its tokens, so its gradient is the score of the
    whole sequence and the effective-weight law holds. M is the number of rows of the
    array, filled or not: no denominator depends on content. Neither lengthening one
    completion nor dropping it changes what the others contribute.

    Args:
        mask: `[..., M, T]` bool, True on tokens that train.
        length: tokens, the divisor common to all rows; any constant, such as T.

    Returns:
        `[..., M, T]` float32; 0 off the mask.

    Raises:
        AssertionError: while tracing, if `mask` is not bool or has no row axis.

    References:
        Liu et al. 2025, "Understanding R1-Zero-Like Training: A Critical Perspective"
        (Dr. GRPO), arXiv:2503.20783.
    """
    return jnp.asarray(mask, jnp.float32) / (mask.shape[-2] * length)
