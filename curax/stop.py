"""When a prompt has been drawn often enough, told by the outcomes it has so far.

A prompt draws `round_size` completions at a time. After each whole round a rule looks
at its whole pool, all rounds together; the prompt stops when the rule is met or its
cap is reached. With rounds of M and a cap of T M the expected number of draws is
M sum_{t<T} P(not met after t M). These rounds ask again for the same prompt;
`sampling.attempts` counts batches of other prompts, which refill closed groups.

Every rule is `(outcome, exists) -> met`. It reads labels only, right or wrong, and how
many of each: never a length, a text or who was done first. Given their labels the
completions of a pool are then as good as freshly drawn ones, so that every estimator
has an effective weight in p, and exact corrections for stopping exist. A rule that is
met stays met when more is drawn.
"""

import jax
import jax.numpy as jnp

from curax.arrays import checks, masked
from curax.settings.config_types import Count
from curax.settings.declared import RIGHT
from curax.types import Bool, BoolG, FloatG


@checks.contract()
def never(outcome: FloatG, exists: BoolG) -> Bool:
    """Every prompt draws up to its cap.

    Args:
        outcome: `[..., G]` float in [0, 1], what the verifier said.
        exists: `[..., G]` bool, True where a completion has been drawn and graded.

    Returns:
        `[...]` bool, False.

    Raises:
        AssertionError: while tracing, if shapes differ or dtypes are not (float, bool).
    """
    return jnp.zeros(exists.shape[:-1], bool)


@checks.contract(right_above="threshold")
def positives(
    outcome: FloatG,
    exists: BoolG,
    *,
    right: Count = 1,
    threshold: float | jax.Array = RIGHT,
) -> Bool:
    """Enough right completions: N+ >= right.

    Easy prompts stop after one round, mostly without a wrong completion to compare
    with: with rounds of 8, at p = 0.9, 43% of the pools are all right. Pass rates of
    pools stopped this way are too high on average. Without a cap and for one right
    completion, rounds of M take M / (1 - (1-p)^M) draws, which is 1/p for M = 1 only.

    Args:
        outcome: as `never`; right above `threshold`.
        exists: as `never`.
        right: right completions that are enough, at least 1; static.
        threshold: largest outcome of a wrong completion.

    Returns:
        `[...]` bool, True where the prompt needs no more.

    Raises:
        AssertionError: as `never`, or if `right` < 1.

    References:
        Xiong et al. 2025, "Reinforce-Ada: An Adaptive Sampling Framework for
        Reinforce-Style LLM Training", arXiv:2510.04996, positive-focused. Released
        with right = 1, rounds of 8, a cap of 32, 4 trained, and threshold 0.7; its text
        illustrates right = 16, rounds of 16 and a cap of 128.
    """
    return _count(outcome, exists, threshold)[0] >= right


@checks.contract(right_above="threshold")
def balanced(
    outcome: FloatG,
    exists: BoolG,
    *,
    right: Count = 2,
    wrong: Count = 2,
    threshold: float | jax.Array = RIGHT,
) -> Bool:
    """Enough completions of either kind: N+ >= right and N- >= wrong.

    A prompt that stops before its cap has something to compare. Hard and easy ones draw
    most: with rounds of 8 and a cap of 32 a prompt takes 8.6 draws at p = 1/2 and 21 at
    p = 0.1 or 0.9. Pass rates of pools stopped this way lean towards 1/2.

    Args:
        outcome: as `never`; right above `threshold`.
        exists: as `never`.
        right: right completions that are enough, at least 1; static.
        wrong: wrong completions that are enough, at least 1; static.
        threshold: largest outcome of a wrong completion.

    Returns:
        `[...]` bool, True where the prompt needs no more.

    Raises:
        AssertionError: as `never`, or if `right` < 1 or `wrong` < 1.

    References:
        Xiong et al. 2025, Reinforce-Ada, arXiv:2510.04996, balanced. Released with
        (2, 2), half of the 4 trained each, rounds of 8, a cap of 32 and threshold 0.7;
        its text illustrates (8, 8), rounds of 16 and a cap of 128.
    """
    count_right, count_wrong = _count(outcome, exists, threshold)
    return (count_right >= right) & (count_wrong >= wrong)


def _count(
    outcome: jax.Array, exists: jax.Array, threshold: float | jax.Array
) -> tuple[jax.Array, jax.Array]:
    """How many are right, and how many wrong, `[...]` each."""
    right = masked.right(outcome, exists, threshold)
    return masked.total(right, exists), masked.total(~right, exists)
