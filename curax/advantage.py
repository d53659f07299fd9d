"""Rewards -> advantages: the credit of every completion, one function per estimator.

Every estimator is `(reward, exists) -> advantage`, 0 where there is no completion.
Each states the weight w(p) its expected update puts on grad p when n completions with
0/1 rewards are summed with coefficients A_i / n.
"""

import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from curax.arrays import checks, masked
from curax.arrays.masked import Axis
from curax.settings.config_types import Magnitude, Natural
from curax.types import BoolBG, BoolG, FloatBG, FloatG

_COLLAPSED = 1e-6  # rewards no further apart than this are equal


@checks.contract()
def raw(reward: FloatG, exists: BoolG) -> FloatG:
    """The reward itself.

        A_i = r_i

    No baseline: unbiased and noisy, w(p) = 1. With 0/1 rewards this is RAFT, which
    trains on right completions and ignores wrong ones.

    Args:
        reward: `[..., G]` float, outcome of each completion. Any scale.
        exists: `[..., G]` bool, True where there is a completion.

    Returns:
        `[..., G]` float32 in the units of `reward`; 0 where `exists` is False.

    Raises:
        AssertionError: while tracing, if shapes differ or dtypes are not (float, bool).

    References:
        Williams 1992, "Simple Statistical Gradient-Following Algorithms for
        Connectionist Reinforcement Learning", Machine Learning 8. Dong et al. 2023,
        RAFT, arXiv:2304.06767.
    """
    return jnp.where(exists, jnp.asarray(reward, jnp.float32), 0.0)


@checks.contract()
def signed(reward: FloatG, exists: BoolG) -> FloatG:
    """Right is +1, wrong is -1.

        A_i = 2 r_i - 1

    Reinforce and Reinforce-Rej as written, w(p) = 2; behind `gate.zero_variance`
    w(p) = 2 - p^(n-1) - (1-p)^(n-1). The released code of Reinforce-Rej passes 0/1
    rewards on, which is `raw`, w(p) = 1 - p^(n-1) behind the same gate: it never
    learns from a wrong completion.

    Args:
        reward: `[..., G]` float in [0, 1], outcome of each completion.
        exists: `[..., G]` bool, True where there is a completion.

    Returns:
        `[..., G]` float32 in [-1, 1]; 0 where `exists` is False.

    Raises:
        AssertionError: while tracing, if shapes differ or dtypes are not (float, bool).

    References:
        Xiong et al. 2025, "A Minimalist Approach to LLM Reasoning: from Rejection
        Sampling to Reinforce", arXiv:2504.11343.
    """
    return jnp.where(exists, 2.0 * jnp.asarray(reward, jnp.float32) - 1.0, 0.0)


@checks.contract(least_group=2)
def group_mean(reward: FloatG, exists: BoolG) -> FloatG:
    """How much better each completion did than its group.

        A_i = r_i - mean_j r_j        over the n completions that exist

    The mean contains r_i, so w(p) = (n - 1) / n; `leave_one_out` makes it 1. A group of
    equal rewards gets exactly 0, and so does a group with n < 2.

    Args:
        reward: `[..., G]` float, outcome of each completion. Any scale.
        exists: `[..., G]` bool, True where there is a completion.

    Returns:
        `[..., G]` float32 in the units of `reward`; 0 where `exists` is False.

    Raises:
        AssertionError: while tracing, if shapes differ or dtypes are not (float, bool).

    References:
        Liu et al. 2025, "Understanding R1-Zero-Like Training: A Critical Perspective"
        (Dr. GRPO), arXiv:2503.20783. Xiong et al. 2025, Reinforce-Ada,
        arXiv:2510.04996, where the group is the whole pool.
    """
    return _deviation(reward, exists, axis=-1)


@checks.contract(least_group=2)
def leave_one_out(reward: FloatG, exists: BoolG) -> FloatG:
    """How much better each completion did than the others drawn for its prompt.

        A_i = r_i - mean_{j != i} r_j = n / (n - 1) (r_i - mean_j r_j)

    over the n completions that exist. The baseline of completion i never contains r_i,
    so it leaves the policy gradient unbiased: w(p) = 1. A group with n < 2 has no
    baseline: it gets 0 and trains nothing.

    Args:
        reward: `[..., G]` float, outcome of each completion. Any scale.
        exists: `[..., G]` bool, True where there is a completion.

    Returns:
        `[..., G]` float32 in the units of `reward`; 0 where `exists` is False.

    Raises:
        AssertionError: while tracing, if shapes differ or dtypes are not (float, bool).

    References:
        Ahmadian et al. 2024, "Back to Basics: Revisiting REINFORCE Style Optimization
        for Learning from Human Feedback in LLMs", arXiv:2402.14740.
    """
    n = masked.total(exists, exists, keepdims=True)
    return _deviation(reward, exists, axis=-1) * (n / jnp.maximum(n - 1.0, 1.0))


@checks.contract(least_group=2)
def standardised(
    reward: FloatG,
    exists: BoolG,
    *,
    eps: Magnitude | jax.Array = 1e-6,
    bessel: bool = False,
    floor: Magnitude | jax.Array = 0.0,
) -> FloatG:
    """How many standard deviations each completion is above its group. GRPO.

        A_i = (r_i - mean_j r_j) / (max(s, floor) + eps),
        s^2 = sum_j (r_j - mean)^2 / (n - ddof)

    over the n completions that exist. ddof is 0, or 1 with `bessel`; the papers leave
    it open, the trainers of verl and TRL use 1. eps is added to s and not to s^2, as
    they do. Small groups of any prompt matter alike: w(p) tends to 1 / sqrt(p (1 - p))
    as n grows, and to sqrt(n - 1) as p -> 0 at fixed n; `bessel` multiplies it by
    sqrt((n - 1) / n). The lone success of a hopeless prompt gets sqrt(n - 1), the more
    the larger the group: 3.87 among 16, of which a floor of 0.35 leaves 2.68. Under a
    floor that no s exceeds this is `group_mean` times a constant.

    A group whose rewards are within 1e-6 of each other gets exactly
    0, where rounding would make advantages of noise; so does a group with n < 2, which
    verl gives its raw reward.

    Args:
        reward: `[..., G]` float, outcome of each completion. Any scale.
        exists: `[..., G]` bool, True where there is a completion.
        eps: added to the standard deviation, in the units of `reward`, at least 0.
        bessel: divide by n - 1 and not by n; static.
        floor: least standard deviation to divide by, in the units of `reward`; 0 is
            GRPO.

    Returns:
        `[..., G]` float32, no unit; 0 where `exists` is False.

    Raises:
        AssertionError: while tracing, if shapes differ or dtypes are not (float, bool).

    References:
        Shao et al. 2024, "DeepSeekMath: Pushing the Limits of Mathematical Reasoning in
        Open Language Models", arXiv:2402.03300, section 4.1.
    """
    ddof = int(bessel)
    return _standardised(reward, exists, axis=-1, eps=eps, ddof=ddof, floor=floor)


@checks.contract()
def batch_standardised(
    reward: FloatBG, exists: BoolBG, *, eps: Magnitude | jax.Array = 1e-6
) -> FloatBG:
    """How many standard deviations each completion is above the whole batch.

        A_i = (r_i - mean) / (s + eps)        over all completions of all prompts

    One baseline for all prompts: what an easy prompt gets is pushed up as a whole, what
    a hard one gets down. With many prompts w(p) = 1 / s for each; with few, a prompt's
    advantages depend on the rest of the batch. A batch whose rewards are within 1e-6
    of each other gets exactly 0.

    Args:
        reward: `[..., B, G]` float, outcome of each completion. Any scale.
        exists: `[..., B, G]` bool, True where there is a completion.
        eps: added to the population standard deviation, in the units of `reward`.

    Returns:
        `[..., B, G]` float32, no unit; 0 where `exists` is False.

    Raises:
        AssertionError: while tracing, if shapes differ, there is no prompt axis or
            dtypes are not (float, bool).

    References:
        Hu et al. 2025, "REINFORCE++: Stabilizing Critic-Free Policy Optimization with
        Global Advantage Normalization", arXiv:2501.03262. Its KL penalty inside the
        reward is not part of this.
    """
    return _standardised(reward, exists, axis=(-2, -1), eps=eps, ddof=0)


@checks.contract(right_above="threshold", counts_right="least")
def guarded(
    reward: FloatG,
    exists: BoolG,
    *,
    estimate: Callable[[jax.Array, jax.Array], jax.Array],
    clip: Magnitude | jax.Array = math.inf,
    least: Natural = 0,
    keep_negatives: bool = True,
    threshold: float | jax.Array = 0.5,
) -> FloatG:
    """Another estimator, kept from learning much from a few lucky completions.

        A_i = clip(estimate_i, -clip, clip)
        A_i = min(A_i, 0)        in groups of fewer than `least` right completions

    The rare success on a prompt far too hard is as likely an accident as a solution,
    yet a standardised advantage is largest there. `least_positives` says how many right
    ones are more than accident. Such groups still push their wrong completions down,
    unless `keep_negatives` is False; `gate.minimum_right` drops them from all averages
    instead. With least >= 2, w(p) falls to 0 with p, where the estimator alone keeps a
    positive limit. The defaults change nothing.

    Args:
        reward: `[..., G]` float, outcome of each completion; right above `threshold`.
        exists: `[..., G]` bool, True where there is a completion. Right ones are
            counted among these: the kept ones only, where statistics are theirs.
        estimate: the estimator, `(reward, exists) -> advantage`.
        clip: largest size of an advantage, in its units, at least 0.
        least: fewest right completions that positive advantages need; static.
        keep_negatives: whether the other groups keep theirs below 0; static.
        threshold: largest reward of a wrong completion, in the units of `reward`.
            Where rewards are not outcomes, a config with this is refused.

    Returns:
        `[..., G]` float32 in the units of `estimate`; 0 where `exists` is False.

    Raises:
        AssertionError: while tracing, if shapes differ or dtypes are not (float, bool).

    References:
        The finding that over-hard prompts do harm: arXiv:2605.28388. Clip and count are
        ours.
    """
    advantage = jnp.clip(estimate(reward, exists), -clip, clip)
    right = reward > threshold
    enough = masked.total(right, exists, keepdims=True) >= least
    rest = jnp.minimum(advantage, 0.0) if keep_negatives else jnp.zeros_like(advantage)
    return jnp.where(enough, advantage, rest)


def least_positives(n: int, *, accident: float, delta: float = 0.05) -> int:
    """How many right completions of n are too many for accident.

        min {k : P(Binomial(n, accident) >= k) <= delta}

    Made for `least` of `guarded` and of `gate.minimum_right`. 16 completions of which
    2% are right by accident need 2 right ones; at 5% they need 3.

    Args:
        n: completions of a group, at least 1.
        accident: chance that a completion counts as right without a solution, in
            [0, 1]: lucky guesses, and mistakes of the verifier.
        delta: accepted chance that accident alone gives as many, in [0, 1).

    Returns:
        An integer in [1, n + 1]; n + 1 if no number of right ones is enough.

    Raises:
        ValueError: if an argument is out of its range.
    """
    if n < 1:
        raise ValueError(f"n={n} must be at least 1; set it to the group size.")
    if not 0.0 <= accident <= 1.0:
        raise ValueError(f"accident={accident} must be in [0, 1]; give a rate.")
    if not 0.0 <= delta < 1.0:
        raise ValueError(f"delta={delta} must be in [0, 1); set it to 0.05, say.")

    from scipy.special import bdtrc

    tails = bdtrc(np.arange(n + 1), n, accident)  # P(more than 0 .. n)
    return 1 + int(np.argmax(tails <= delta))


def _standardised(
    reward: jax.Array,
    exists: jax.Array,
    *,
    axis: Axis,
    eps: float | jax.Array,
    ddof: int,
    floor: float | jax.Array = 0.0,
) -> jax.Array:
    low, high = masked.extent(reward, exists, axis=axis, keepdims=True)
    differ = high - low > _COLLAPSED
    square = masked.variance(reward, exists, axis=axis, keepdims=True, ddof=ddof)
    scale = jnp.where(differ, jnp.maximum(jnp.sqrt(square), floor) + eps, 1.0)
    return jnp.where(differ, _deviation(reward, exists, axis=axis) / scale, 0.0)


def _deviation(reward: jax.Array, exists: jax.Array, *, axis: Axis) -> jax.Array:
    """Reward minus mean. Taken from the smallest reward, equal ones give exactly 0."""
    low, _ = masked.extent(reward, exists, axis=axis, keepdims=True)
    above = jnp.where(exists, jnp.asarray(reward, jnp.float32) - low, 0.0)
    centre = masked.mean(above, exists, axis=axis, keepdims=True)
    return jnp.where(exists, above - centre, 0.0)
