"""Which groups and completions may train. A gate reads outcomes, never the reward.

Every gate is `(outcome, exists, finished) -> may_train`, a subset of `exists`. Groups
it closes are not corrected for: what a gate does to the objective is part of it.
"""

from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp

from curax.arrays import checks, masked
from curax.settings.config_types import Fraction, Magnitude
from curax.settings.declared import RIGHT
from curax.types import BoolG, FloatG


@checks.contract()
def none(outcome: FloatG, exists: BoolG, finished: BoolG) -> BoolG:
    """Whatever exists may train.

    Args:
        outcome: `[..., G]` float in [0, 1], what the verifier said.
        exists: `[..., G]` bool, True where there is a completion with an outcome.
        finished: `[..., G]` bool, False where the length limit cut a completion off.

    Returns:
        `[..., G]` bool, `exists`.

    Raises:
        AssertionError: while tracing, if shapes differ or dtypes are not
            (float, bool, bool).
    """
    return exists


@checks.contract(least_group=2)
def zero_variance(
    outcome: FloatG,
    exists: BoolG,
    finished: BoolG,
    *,
    delta: Magnitude | jax.Array = 1e-6,
) -> BoolG:
    """Only groups whose outcomes differ: max - min > delta.

    A group with equal outcomes has nothing to compare. Its advantages are 0 already
    where they are centred on the group; the gate matters for those that are not
    (`signed`: Reinforce-Rej), and for what is averaged over the trained tokens. The
    spread is tested and not a standard deviation, which rounding makes positive for
    equal float32 outcomes. With advantages 2r - 1 over n draws of 0/1 outcomes the
    effective weight is 2 - p^(n-1) - (1-p)^(n-1).

    Args:
        outcome: as `none`.
        exists: as `none`.
        finished: as `none`; not read.
        delta: largest spread that counts as equal, in the units of `outcome`.

    Returns:
        `[..., G]` bool, `exists` in groups that differ; a group of one is closed.

    Raises:
        AssertionError: as `none`.

    References:
        Yu et al. 2025, "DAPO: An Open-Source LLM Reinforcement Learning System at
        Scale", arXiv:2503.14476, dynamic sampling. Xiong et al. 2025, "A Minimalist
        Approach to LLM Reasoning: from Rejection Sampling to Reinforce",
        arXiv:2504.11343, Reinforce-Rej.
    """
    smallest, largest = masked.extent(outcome, exists, keepdims=True)
    return exists & (largest - smallest > delta)


@checks.contract()
def pass_rate_band(
    outcome: FloatG,
    exists: BoolG,
    finished: BoolG,
    *,
    low: Fraction | jax.Array,
    high: Fraction | jax.Array,
) -> BoolG:
    """Only groups that are neither too hard nor too easy: low <= mean outcome <= high.

    Args:
        outcome: as `none`.
        exists: as `none`.
        finished: as `none`; not read.
        low: smallest mean outcome that may train, in [0, 1].
        high: largest mean outcome that may train, in [0, 1].

    Returns:
        `[..., G]` bool, `exists` in groups inside the band, both ends included.

    Raises:
        AssertionError: as `none`.

    References:
        Bae et al. 2025, "Online Difficulty Filtering for Reasoning Oriented
        Reinforcement Learning", arXiv:2504.03380.
    """
    rate = masked.mean(outcome, exists, keepdims=True)
    return exists & (rate >= low) & (rate <= high)


@checks.contract(least_group=2)
def advantage_energy(
    outcome: FloatG,
    exists: BoolG,
    finished: BoolG,
    *,
    least: float | jax.Array,
    weight: Callable[[jax.Array], jax.Array] | None = None,
) -> BoolG:
    """Only groups with enough advantage energy: w(q) v >= least, and above 0.

        v = (1/n) sum_i (r_i - q)^2,   q = (1/n) sum_i r_i

    The estimate of E(p) = w(p) p (1 - p), which is what a prompt's update is worth: the
    slope of its objective times the variance of an outcome. Of labels v is q (1 - q),
    whose mean is (1 - 1/n) p (1 - p): too small by 1/n for w = 1; else w is taken at q,
    whose noise adds (w v)'' p (1 - p) / (2 n), v = p (1 - p), to first order in 1/n.
    With w = 1 the gate is a band of pass rates; with w = f' it follows the objective
    and is not symmetric. Dead groups have 0 and are closed at any threshold. What is
    left has the effective weight of open groups alone: with centred advantages
    sum over open k of P(k) c(k) / (p (1 - p)), c(k) the credit of k right ones of n.

    Args:
        outcome: as `none`.
        exists: as `none`.
        finished: as `none`; not read.
        least: smallest energy that may train, in squared units of `outcome` times w.
        weight: elementwise function w of the pass rate, at least 0; None: 1. GRPO's is
            1 / sqrt(p (1 - p)) in large groups, which makes the energy the deviation.

    Returns:
        `[..., G]` bool, `exists` in groups with enough energy; never a group of one.

    Raises:
        AssertionError: as `none`.

    References:
        SAGE, arXiv:2602.03143, Corollary 3.1, has the energy (1/n) sum A_i^2 of
        standardised advantages, which is 1 for every mixed group.
    """
    rate = masked.mean(outcome, exists, keepdims=True)
    # Rounding leaves equal outcomes a variance; their spread is 0 exactly.
    smallest, largest = masked.extent(outcome, exists, keepdims=True)
    mixed = largest > smallest
    energy = jnp.where(mixed, masked.variance(outcome, exists, keepdims=True), 0.0)
    if weight is not None:
        energy = energy * weight(jnp.where(mixed, rate, 0.5))
    return exists & mixed & (energy >= least)


@checks.contract(least_group="least", right_above="threshold")
def minimum_right(
    outcome: FloatG,
    exists: BoolG,
    finished: BoolG,
    *,
    least: int,
    threshold: float | jax.Array = RIGHT,
) -> BoolG:
    """Only groups with enough right completions: no fewer than `least`.

    On a prompt far too hard the rare right completion may well be an accident, and what
    is learnt of it harms. `advantage.least_positives` says how many are more than that.
    Of centred advantages over n draws of 0/1 outcomes the effective weight falls to 0
    with p, like p^(least - 1); least = 1 closes what centred advantages make 0 anyway.
    Groups that are all right stay open.

    Args:
        outcome: as `none`; right above `threshold`.
        exists: as `none`.
        finished: as `none`; not read.
        least: fewest right completions of a group that may train; static.
        threshold: largest outcome of a wrong completion, in the units of `outcome`.

    Returns:
        `[..., G]` bool, `exists` in groups with enough right ones.

    Raises:
        AssertionError: as `none`.

    References:
        The finding that over-hard prompts do harm: arXiv:2605.28388. The count is ours.
    """
    right = masked.right(outcome, exists, threshold)
    return exists & (masked.total(right, exists, keepdims=True) >= least)


@checks.contract()
def overlong(outcome: FloatG, exists: BoolG, finished: BoolG) -> BoolG:
    """Only completions that ended by themselves.

    A completion cut off by the length limit was judged on half of what it had to say.
    It still counts in the statistics of its group where those are taken over all that
    exists. Dropping depends on content and not on the label alone, so no effective
    weight in p describes it.

    Args:
        outcome: as `none`; not read.
        exists: as `none`.
        finished: as `none`.

    Returns:
        `[..., G]` bool, `exists` where `finished`.

    Raises:
        AssertionError: as `none`.

    References:
        Yu et al. 2025, DAPO, arXiv:2503.14476, overlong filtering.
    """
    return exists & finished


@checks.contract(right_above="threshold")
def accepted(
    outcome: FloatG,
    exists: BoolG,
    finished: BoolG,
    *,
    threshold: float | jax.Array = RIGHT,
) -> BoolG:
    """Only completions that are right: outcome > threshold. RAFT's accepted set.

    The paper accepts the best of each group, which would accept all of an all-wrong
    one; its code accepts none of those, and neither does this.

    Args:
        outcome: as `none`.
        exists: as `none`.
        finished: as `none`; not read.
        threshold: as `minimum_right`.

    Returns:
        `[..., G]` bool, `exists` where accepted.

    Raises:
        AssertionError: as `none`.

    References:
        Dong et al. 2023, "RAFT: Reward rAnked FineTuning for Generative Foundation
        Model Alignment", arXiv:2304.06767. Xiong et al. 2025, arXiv:2504.11343.
    """
    return masked.right(outcome, exists, threshold)


@checks.contract()
def every(
    outcome: FloatG,
    exists: BoolG,
    finished: BoolG,
    *,
    gates: Sequence[Callable[[jax.Array, jax.Array, jax.Array], jax.Array]],
) -> BoolG:
    """What all of several gates let through.

    Each gate sees all that exists and not what the others left of it, so their order
    changes nothing.

    Args:
        outcome: as `none`.
        exists: as `none`.
        finished: as `none`.
        gates: functions of (outcome, exists, finished); none at all is `none`.

    Returns:
        `[..., G]` bool, where every gate is open.

    Raises:
        AssertionError: as `none`.
    """
    open_ = none(outcome, exists, finished)
    for gate in gates:
        open_ &= gate(outcome, exists, finished)
    return open_
