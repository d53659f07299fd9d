"""Whether what a completion says bears out that it is right.

The lone success on a prompt far too hard may be a guess: it says its answer again and
again, or says it before it has thought, or hardly thinks. Each check is a number or a
flag per completion; what they exclude leaves `keep`.
"""

import chex
import jax
import jax.numpy as jnp

from curax.arrays import checks, masked


def lone(outcome: jax.Array, exists: jax.Array, *, most: int = 1) -> jax.Array:
    """Right completions of groups in which there are hardly any.

    Args:
        outcome: `[..., G]` float; right above 0.5.
        exists: `[..., G]` bool.
        most: right ones of a group that are hardly any; `least_positives` of
            `advantage`, less 1.

    Returns:
        `[..., G]` bool.

    Raises:
        AssertionError: while tracing, if shapes differ or dtypes are not (float, bool).

    References:
        What over-hard prompts teach: arXiv:2605.28388. The checks are ours.
    """
    outcome, exists = checks.arrays(outcome=(outcome, float), exists=(exists, bool))
    right = exists & (outcome > 0.5)
    return right & (masked.total(right, right, keepdims=True) <= most)


def short(
    length: jax.Array, exists: jax.Array, *, share: float | jax.Array = 0.25
) -> jax.Array:
    """Completions much shorter than their group.

        length_i < share median_j length_j

    Args:
        length: `[..., G]` integer or float, tokens of the thought.
        exists: `[..., G]` bool.
        share: of the median of those that exist, in [0, 1].

    Returns:
        `[..., G]` bool.

    Raises:
        AssertionError: while tracing, if shapes differ or `exists` is not bool.

    References:
        As `lone`.
    """
    chex.assert_equal_shape([length, exists])
    chex.assert_type(exists, bool)
    length = jnp.asarray(length, jnp.float32)
    ordered = jnp.sort(jnp.where(exists, length, jnp.inf), -1)
    last = jnp.maximum(jnp.sum(exists, -1, keepdims=True, dtype=jnp.int32) - 1, 0)
    below = jnp.take_along_axis(ordered, last // 2, -1)
    above = jnp.take_along_axis(ordered, (last + 1) // 2, -1)
    return exists & (length < share * (below + above) / 2.0)


def answered(
    tokens: jax.Array, mask: jax.Array, answer: jax.Array, answer_mask: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """How much of each completion is its answer, over and over, and how soon it comes.

        repeated = Y / n times the places at which the answer begins
        first = t / (n - Y) for the first of these places, t from 0

    over completions of n tokens and answers of Y. A derivation that ends in its answer
    has `repeated` about Y / n and `first` 1; a bare answer has both 1 and 0.

    Args:
        tokens: `[N, T]` integer.
        mask: `[N, T]` bool, True from the first token to the last.
        answer: `[N, Y]` integer, of the row's prompt, as its tokens stand in a text,
            without an end; right-padded.
        answer_mask: `[N, Y]` bool.

    Returns:
        `[N]` float32, at least 0, and more than 1 only where answers overlap; `[N]`
        float32 in [0, 1], 1 where the answer is nowhere. Without an answer 0 and 1.

    Raises:
        AssertionError: while tracing, if shapes do not fit or dtypes are not
            (int, bool, int, bool).

    References:
        As `lone`.
    """
    chex.assert_equal_shape([tokens, mask])
    chex.assert_equal_shape([answer, answer_mask])
    chex.assert_equal_shape_prefix([tokens, answer], 1)
    chex.assert_type([tokens, mask, answer, answer_mask], [int, bool, int, bool])
    steps, width = tokens.shape[1], answer.shape[1]
    behind = ((0, 0), (0, width))
    shown, inside = jnp.pad(tokens, behind), jnp.pad(mask, behind)
    begins = mask & answer_mask[:, :1] if width else jnp.zeros_like(mask)
    for y in range(width):
        here = (shown[:, y : y + steps] == answer[:, y, None]) & inside[
            :, y : y + steps
        ]
        begins &= here | ~answer_mask[:, y, None]
    times = jnp.sum(begins, -1, dtype=jnp.float32)
    n, size = (jnp.sum(x, -1, dtype=jnp.float32) for x in (mask, answer_mask))
    first = jnp.argmax(begins, -1).astype(jnp.float32) / jnp.maximum(n - size, 1.0)
    return times * size / jnp.maximum(n, 1.0), jnp.where(times > 0, first, 1.0)
