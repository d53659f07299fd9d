"""Keep m of the completions of a group.

Every rule is `(key, reward, exists) -> keep`, a subset of `exists` with at most m per
group; `m` is static. What a rule does to the objective is undone in `correct`, or not.
"""

import chex
import jax
import jax.numpy as jnp

from curax import masked

_TIE = 1e-6  # variances this close, relative to the largest, are equal


def none(key: jax.Array, reward: jax.Array, exists: jax.Array) -> jax.Array:
    """Keep all.

    Args:
        key: PRNG key; not used.
        reward: `[..., G]` float; not read.
        exists: `[..., G]` bool, True on completions that may be kept.

    Returns:
        `[..., G]` bool, `exists`.

    Raises:
        AssertionError: while tracing, if shapes differ or dtypes are not (float, bool).
    """
    del key
    _check(reward, exists)
    return jnp.asarray(exists)


def max_variance(
    key: jax.Array, reward: jax.Array, exists: jax.Array, *, m: int
) -> jax.Array:
    """The m completions of each group whose rewards vary most.

        S in argmax_{|S| = m} Var{r_i : i in S}

    Some maximiser is the m - i smallest and the i largest rewards: the variance is a
    convex function of one reward, so it grows when that reward moves outwards. All
    i = 0..m are scored from prefix sums, O(G log G) in all. Of equal variances the most
    balanced split wins, then the smaller i. Among equal rewards the choice is uniformly
    random, since storage order may encode length or time.

    With 0/1 rewards, k of n positive, this keeps clip(floor(m/2), m - (n - k),
    min(k, m)) positives, Reinforce-Ada's balanced choice. Trained as it is, it trades
    GRPO's arcsine objective for one near log(p / (1 - p)) / 2;
    `correct.horvitz_thompson` undoes it exactly. With more reward values the inner ones
    are never kept, and nothing can undo that.

    A group of at most m keeps all; equal rewards give a uniformly random m of them.

    Args:
        key: PRNG key of the random choice.
        reward: `[..., G]` float, outcome of each completion. Any scale.
        exists: `[..., G]` bool, True on completions that may be kept.
        m: how many to keep per group, at least 1; static.

    Returns:
        `[..., G]` bool with exactly min(m, number that exist) True per group.

    Raises:
        AssertionError: while tracing, if shapes differ, dtypes are not (float, bool)
            or m < 1.

    References:
        Xu et al. 2025, "Not All Rollouts are Useful: Down-Sampling Rollouts in LLM
        Reinforcement Learning" (PODS), arXiv:2504.13818. Its multi-device code scans an
        aliased index buffer and stops at the first improvement; this is the method as
        written. Xiong et al. 2025, Reinforce-Ada, arXiv:2510.04996, takes the first
        ones drawn where this takes random ones.
    """
    _check(reward, exists, m)
    reward = jnp.asarray(reward, jnp.float32)
    low, high = masked.extent(reward, exists, keepdims=True)
    # Middle and spread of the group make sums exact for 0/1 rewards and free of
    # cancellation and overflow for all others.
    spread = jnp.where(high > low, high - low, 1.0)
    unit = jnp.where(exists, (reward - (low + (high - low) / 2)) / spread, 0.0)
    order = _ascending(key, unit, exists)
    n = jnp.sum(exists, axis=-1, keepdims=True)

    def taken(values: jax.Array) -> jax.Array:
        """Sum over the m - i smallest and the i largest, `[..., m + 1]`."""
        ascending = jnp.take_along_axis(values, order, axis=-1)
        sums = jnp.cumsum(ascending, axis=-1)
        sums = jnp.concatenate([jnp.zeros_like(sums[..., :1]), sums], axis=-1)

        def first(count: jax.Array) -> jax.Array:
            return jnp.take_along_axis(sums, jnp.clip(count, 0, n), axis=-1)

        return first(m - largest) + first(n) - first(n - largest)

    # Candidates in order of preference, so that the first of equals is the one to take.
    splits = sorted(range(m + 1), key=lambda i: (abs(2 * i - m), i))
    largest = jnp.broadcast_to(jnp.array(splits), (*n.shape[:-1], m + 1))
    variance = m * taken(unit**2) - taken(unit) ** 2  # times m^2
    best = jnp.max(variance, axis=-1, keepdims=True)
    choice = jnp.argmax(variance >= best * (1 - _TIE), axis=-1, keepdims=True)
    from_top = jnp.take_along_axis(largest, choice, axis=-1)
    rank = jnp.argsort(order, axis=-1)
    return exists & ((rank < m - from_top) | (rank >= n - from_top))


def random(
    key: jax.Array, reward: jax.Array, exists: jax.Array, *, m: int
) -> jax.Array:
    """A uniformly random m of each group, as if only m had been drawn.

    A group of at most m keeps all.

    Args:
        key: PRNG key of the choice.
        reward: `[..., G]` float; not read.
        exists: `[..., G]` bool, True on completions that may be kept.
        m: how many to keep per group, at least 1; static.

    Returns:
        `[..., G]` bool with exactly min(m, number that exist) True per group.

    Raises:
        AssertionError: while tracing, if shapes differ, dtypes are not (float, bool)
            or m < 1.

    References:
        The control in Xu et al. 2025, PODS, arXiv:2504.13818.
    """
    _check(reward, exists, m)
    order = _ascending(key, jnp.zeros_like(reward), exists)
    return exists & (jnp.argsort(order, axis=-1) < m)


def _ascending(key: jax.Array, value: jax.Array, exists: jax.Array) -> jax.Array:
    """`[..., G]` indices from small to large, equals at random, absent ones last."""
    lot = jax.random.bits(key, value.shape)
    return jnp.lexsort((lot, value, ~jnp.asarray(exists)), axis=-1)


def _check(reward: jax.Array, exists: jax.Array, m: int = 1) -> None:
    chex.assert_equal_shape([reward, exists])
    chex.assert_type([reward, exists], [float, bool])
    chex.assert_scalar_positive(m)
