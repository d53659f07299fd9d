"""Keep m of the completions of a group.

Every rule is `(key, reward, exists) -> keep`, a subset of `exists` with at most m per
group; `m` is static. What a rule does to the objective is undone in `correct`, or not.
"""

import jax
import jax.numpy as jnp

from curax.arrays import checks, masked
from curax.settings.config_types import Count
from curax.settings.declared import RIGHT
from curax.types import BoolG, FloatG

_TIE = 1e-6  # variances this close, relative to the largest, are equal


@checks.contract()
def none(key: jax.Array, reward: FloatG, exists: BoolG) -> BoolG:
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
    return exists


@checks.contract(keeps="m")
def max_variance(key: jax.Array, reward: FloatG, exists: BoolG, *, m: Count) -> BoolG:
    """The m completions of each group whose rewards vary most.

        S in argmax_{|S| = m} Var{r_i : i in S}

    Some maximiser is the m - i smallest and the i largest rewards: the variance is a
    convex function of one reward, so it grows when that reward moves outwards. All
    i = 0..m are scored from prefix sums, O(G log G) in all. Of equal variances the most
    balanced split wins, then the smaller i. Among equal rewards the choice is uniformly
    random, since storage order may encode length or time.

    With 0/1 rewards, k of n positive, this keeps clip(floor(m/2), m - (n - k),
    min(k, m)) positives, Reinforce-Ada's balanced choice. Trained as it is, it trades
    GRPO's arcsine objective for log(p / (1 - p)) / 2, as far as pools hold m / 2 of
    either kind (of 32 and m = 8: w = 9.6 at p = .01, where that asks for 50);
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
    reward = jnp.asarray(reward, jnp.float32)
    low, high = masked.extent(reward, exists, keepdims=True)
    # Middle and spread of the group make sums exact for 0/1 rewards and free of
    # cancellation and overflow for all others.
    spread = jnp.where(high > low, high - low, 1.0)
    unit = jnp.where(exists, (reward - (low + (high - low) / 2)) / spread, 0.0)
    order = _ascending(_lots(key, exists), unit, exists)
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


@checks.contract(keeps="m")
def random(key: jax.Array, reward: FloatG, exists: BoolG, *, m: Count) -> BoolG:
    """A uniformly random m of each group, as if only m had been drawn.

    A group of at most m keeps all.

    Args:
        key: PRNG key of the choice.
        reward: `[..., G]` float; not read.
        exists: as `max_variance`.
        m: as `max_variance`.

    Returns:
        As `max_variance`.

    Raises:
        AssertionError: as `max_variance`.

    References:
        The control in Xu et al. 2025, PODS, arXiv:2504.13818.
    """
    order = _ascending(_lots(key, exists), jnp.zeros_like(reward), exists)
    return exists & (jnp.argsort(order, axis=-1) < m)


@checks.contract(keeps="m")
def max_reward(key: jax.Array, reward: FloatG, exists: BoolG, *, m: Count) -> BoolG:
    """The m completions of each group with the largest rewards.

    Among equal rewards the choice is uniformly random. Best-of-n distillation, and a
    warning: with 0/1 rewards and k >= m right ones nothing wrong is kept, so centred on
    the kept set such a group trains nothing, and centred on the pool it only ever
    learns from what was right. Smaller rewards are lost, which no weight gives back.

    A group of at most m keeps all.

    Args:
        key: PRNG key of the choice among equals.
        reward: as `max_variance`.
        exists: as `max_variance`.
        m: as `max_variance`.

    Returns:
        As `max_variance`.

    Raises:
        AssertionError: as `max_variance`.

    References:
        A control in the released code of Xu et al. 2025, PODS, arXiv:2504.13818, where
        it does far worse than `random`.
    """
    best_first = -jnp.asarray(reward, jnp.float32)
    order = _ascending(_lots(key, exists), best_first, exists)
    return exists & (jnp.argsort(order, axis=-1) < m)


@checks.contract(keeps="m")
def percentile(key: jax.Array, reward: FloatG, exists: BoolG, *, m: Count) -> BoolG:
    """The m completions that stand for the rewards of each group most evenly.

        S = {order statistics ceil((l - 1/2) n / m) : l = 1..m}

    of the n that exist: the inverse distribution function of the group at the middles
    of m equal shares. Among equal rewards the choice is uniformly random.

    With 0/1 rewards, k of n positive, this keeps ceil(m k / n - 1/2) positives, the
    whole number next to their share (halves down): nearly the pass rate of the pool and
    hardly any selection to undo. A class of less than half a share may be lost, the one
    right completion of a hard prompt too, where `max_variance` and `balanced` keep it.

    A group of at most m keeps all.

    Args:
        key: PRNG key of the choice among equals.
        reward: as `max_variance`.
        exists: as `max_variance`.
        m: as `max_variance`.

    Returns:
        As `max_variance`.

    Raises:
        AssertionError: as `max_variance`.

    References:
        Reported as one of the rules of Xu et al. 2025, PODS, arXiv:2504.13818; it is
        not in the released code. The rounding is ours.
    """
    reward = jnp.asarray(reward, jnp.float32)
    rank = jnp.argsort(_ascending(_lots(key, exists), reward, exists), axis=-1)
    n = jnp.maximum(jnp.sum(exists, axis=-1, keepdims=True), 1)

    def wanted(count: jax.Array) -> jax.Array:
        """How many of the m are among the `count` smallest: all l with l - 1/2 <=."""
        return (2 * m * count + n) // (2 * n)

    return exists & (wanted(rank + 1) > wanted(rank))


@checks.contract(keeps="m", right_above="threshold")
def balanced(
    key: jax.Array,
    reward: FloatG,
    exists: BoolG,
    *,
    m: Count,
    first: bool = False,
    threshold: float | jax.Array = RIGHT,
) -> BoolG:
    """As many right completions as wrong ones, as far as there are any.

        n+ = min(floor(m / 2), N+),   n- = min(m - n+, N-)

    with N+ right and N- wrong ones in the group; what is then short of m is filled with
    spare right ones. On 0/1 rewards this is `max_variance`; others are told apart by
    the threshold alone, so that no shaping decides which of a class survive. The only
    member of a class is never dropped if m >= 2.

    Trained as it is with A = r - N+ / N, the weight of a prompt whose two classes are
    plentiful is ((1-p)^2 + p^2) / (2 p (1-p)): easy and hard prompts gain alike.
    `correct.horvitz_thompson` undoes it exactly. Taking the first ones drawn and not
    random ones changes no expectation as long as draws are exchangeable given their
    labels; a sampler that returns short completions first breaks that.

    A group of at most m keeps all.

    Args:
        key: PRNG key of the choice inside each class; not used if `first`.
        reward: `[..., G]` float, outcome of each completion; right above `threshold`.
        exists: as `max_variance`.
        m: as `max_variance`.
        first: take the first of each class, as they were drawn, and not
            a uniformly random part of it; static.
        threshold: largest reward of a wrong completion, in the units of `reward`.

    Returns:
        As `max_variance`.

    Raises:
        AssertionError: as `max_variance`.

    References:
        Xiong et al. 2025, "Reinforce-Ada: An Adaptive Sampling Framework for
        Reinforce-Style LLM Training", arXiv:2510.04996. Its released code takes the
        first ones, counts rewards above 0.7 as right and corrects for nothing.
    """
    right = masked.right(reward, exists, threshold)
    every_right = jnp.sum(right, axis=-1, keepdims=True)
    every_wrong = jnp.sum(exists & ~right, axis=-1, keepdims=True)
    kept_right = jnp.minimum(m // 2, every_right)
    kept_wrong = jnp.minimum(m - kept_right, every_wrong)
    kept_right = jnp.minimum(m - kept_wrong, every_right)

    slots = jnp.arange(exists.shape[-1], dtype=jnp.uint32)
    lots = jnp.broadcast_to(slots, exists.shape) if first else _lots(key, exists)
    # The right ones come first, then the wrong ones.
    rank = jnp.argsort(_ascending(lots, ~right, exists), axis=-1)
    within = jnp.where(right, rank, rank - every_right)
    return exists & (within < jnp.where(right, kept_right, kept_wrong))


def _lots(key: jax.Array, exists: jax.Array) -> jax.Array:
    return jax.random.bits(key, exists.shape)


def _ascending(lots: jax.Array, value: jax.Array, exists: jax.Array) -> jax.Array:
    """`[..., G]` indices from small to large, equals by lot, absent ones last."""
    return jnp.lexsort((lots, value, ~exists), axis=-1)
