"""Which groups and completions may train. A gate reads outcomes, never the reward.

Every gate is `(outcome, exists, finished) -> may_train`, a subset of `exists`. Groups
it closes are not corrected for: what a gate does to the objective is part of it.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from curax.arrays import checks, masked
from curax.settings.declared import RIGHT, declares


def none(outcome: jax.Array, exists: jax.Array, finished: jax.Array) -> jax.Array:
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
    outcome, exists, finished = _check(outcome, exists, finished)
    return jnp.asarray(exists)


@declares(least_group=2)
def zero_variance(
    outcome: jax.Array,
    exists: jax.Array,
    finished: jax.Array,
    *,
    delta: float | jax.Array = 1e-6,
) -> jax.Array:
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
    outcome, exists, finished = _check(outcome, exists, finished)
    smallest, largest = masked.extent(outcome, exists, keepdims=True)
    return exists & (largest - smallest > delta)


def pass_rate_band(
    outcome: jax.Array,
    exists: jax.Array,
    finished: jax.Array,
    *,
    low: float | jax.Array,
    high: float | jax.Array,
) -> jax.Array:
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
    outcome, exists, finished = _check(outcome, exists, finished)
    rate = masked.mean(outcome, exists, keepdims=True)
    return exists & (rate >= low) & (rate <= high)


@declares(least_group=2)
def advantage_energy(
    outcome: jax.Array,
    exists: jax.Array,
    finished: jax.Array,
    *,
    least: float | jax.Array,
    weight: Callable[[jax.Array], jax.Array] | None = None,
) -> jax.Array:
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
    outcome, exists, finished = _check(outcome, exists, finished)
    rate = masked.mean(outcome, exists, keepdims=True)
    # Rounding leaves equal outcomes a variance; their spread is 0 exactly.
    smallest, largest = masked.extent(outcome, exists, keepdims=True)
    mixed = largest > smallest
    energy = jnp.where(mixed, masked.variance(outcome, exists, keepdims=True), 0.0)
    if weight is not None:
        energy = energy * weight(jnp.where(mixed, rate, 0.5))
    return exists & mixed & (energy >= least)


@declares(least_group="least", right_above="threshold")
def minimum_right(
    outcome: jax.Array,
    exists: jax.Array,
    finished: jax.Array,
    *,
    least: int,
    threshold: float | jax.Array = RIGHT,
) -> jax.Array:
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
    outcome, exists, finished = _check(outcome, exists, finished)
    right = masked.right(outcome, exists, threshold)
    return exists & (masked.total(right, exists, keepdims=True) >= least)


def overlong(outcome: jax.Array, exists: jax.Array, finished: jax.Array) -> jax.Array:
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
    outcome, exists, finished = _check(outcome, exists, finished)
    return jnp.asarray(exists) & finished


@declares(right_above="threshold")
def accepted(
    outcome: jax.Array,
    exists: jax.Array,
    finished: jax.Array,
    *,
    threshold: float | jax.Array = RIGHT,
) -> jax.Array:
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
    outcome, exists, finished = _check(outcome, exists, finished)
    return masked.right(outcome, exists, threshold)


def every(
    outcome: jax.Array,
    exists: jax.Array,
    finished: jax.Array,
    *,
    gates: Sequence[Callable[[jax.Array, jax.Array, jax.Array], jax.Array]],
) -> jax.Array:
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


def _check(outcome: Any, exists: Any, finished: Any) -> list[jax.Array]:
    return checks.arrays(
        outcome=(outcome, float), exists=(exists, bool), finished=(finished, bool)
    )
