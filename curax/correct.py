"""Weights that undo what a selection did to the expected update, or leave it.

Every rule is `(reward, pool, keep) -> weight`, 0 where not kept. The weight multiplies
the advantage; the sum over the kept is then divided by R, the completions per prompt
that an update trains, which rules that turn it into another mean take as `rows`. Where
a rule tells right from wrong, right is a reward above a threshold. N, N+, N- are sizes
of the pool and its classes, n, n+, n- of what is kept.

Exact under every stopping rule that reads labels alone and that, while nothing is
right, draws on to a limit: `accepted_mean`, `control_variate`, `first_success`. Exact
given the pool: `horvitz_thompson`, `expansion`.
"""

from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from curax.arrays import checks, masked
from curax.settings.config_types import Magnitude, Positive
from curax.settings.declared import RIGHT
from curax.types import BoolG, FloatG


@checks.contract(constant=True)
def none(reward: FloatG, pool: BoolG, keep: BoolG) -> FloatG:
    """Every kept completion counts once: the selection is part of the objective.

    Args:
        reward: `[..., G]` float; not read.
        pool: `[..., G]` bool, completions that could have been kept.
        keep: `[..., G]` bool, those that were; a subset of `pool`.

    Returns:
        `[..., G]` float32, 1 where `keep`, else 0.

    Raises:
        AssertionError: while tracing, if shapes differ or dtypes are not
            (float, bool, bool).
    """
    return jnp.asarray(keep, jnp.float32)


@checks.contract()
def horvitz_thompson(reward: FloatG, pool: BoolG, keep: BoolG) -> FloatG:
    """Inverse inclusion rates, one per reward value: the pool's update, in expectation.

        omega_j = (N_c / N) / (n_c / n)

    with N, n the sizes of pool and kept set, and N_c, n_c those of their members with
    the reward of j. If the kept members of every class are a uniformly random part of
    it, then for any vectors phi and any A computed from the whole pool

        E[(1/n) sum_kept omega_j A_j phi_j | pool] = (1/N) sum_pool A_j phi_j ,

    however unequally the classes were kept. Statistics of the kept set alone break
    this; so does a class of which nothing was kept, to which no weight can give back
    what it lost. That happens to all inner values under `downsample.max_variance`, and
    makes continuous rewards a case to avoid. After `downsample.random` it stratifies,
    which is worth it only while no class can be lost.

    Args:
        reward: `[..., G]` float, outcome of each completion; a class is a value.
        pool: `[..., G]` bool, completions that could have been kept.
        keep: `[..., G]` bool, those that were; a subset of `pool`.

    Returns:
        `[..., G]` float32, 0 where not `keep`; its mean over the kept is 1 if no class
        was lost. All 1 where everything was kept.

    Raises:
        AssertionError: while tracing, if shapes differ or dtypes are not
            (float, bool, bool).

    References:
        Horvitz and Thompson 1952, "A Generalization of Sampling Without Replacement
        From a Finite Universe", Journal of the American Statistical Association 47.
        Neither Reinforce-Ada (arXiv:2510.04996) nor PODS (arXiv:2504.13818) applies
        it: Reinforce-Ada divides the whole group by the pass rate, or by nothing.
    """
    same = reward[..., :, None] == reward[..., None, :]

    def share(among: jax.Array) -> jax.Array:
        """Fraction of `among` that has the reward of j, `[..., G]`."""
        shape = (*among.shape, among.shape[-1])
        return masked.mean(same, jnp.broadcast_to(among[..., None, :], shape))

    kept_share = jnp.where(keep, share(keep), 1.0)
    return jnp.where(keep, share(pool) / kept_share, 0.0)


@checks.contract(right_above="threshold")
def expansion(
    reward: FloatG, pool: BoolG, keep: BoolG, *, threshold: float | jax.Array = RIGHT
) -> FloatG:
    """Inverse inclusion counts, one per class: the pool's sum, in expectation.

        omega_j = N_c / n_c        c the class of j, right or wrong

    Where `horvitz_thompson` gives back the mean of the pool, this gives its sum: a
    prompt counts by how much was drawn for it, which is the implicit weighting of
    Reinforce-Ada. With `advantage.raw`, or rewards less a constant, and any stopping
    rule that reads labels alone, w(p) = E[N] / R exactly. A baseline made of the draws
    breaks that where their number depends on them.

    Args:
        reward: `[..., G]` float, outcome of each completion.
        pool: `[..., G]` bool, completions that could have been kept.
        keep: `[..., G]` bool, those that were; a subset of `pool`.
        threshold: rewards above it are right.

    Returns:
        `[..., G]` float32, 0 where not `keep`, 1 where everything was kept.

    Raises:
        AssertionError: as `none`.

    References:
        Xiong et al. 2025, Reinforce-Ada, arXiv:2510.04996, implicit weighting.
    """
    right = masked.right(reward, pool, threshold)
    total = jnp.where(right, _count(right), _count(pool & ~right))
    return _spread(total, keep & right) + _spread(total, keep & ~right)


@checks.contract(right_above="threshold")
def inverse_pass_rate(
    reward: FloatG,
    pool: BoolG,
    keep: BoolG,
    *,
    power: Magnitude | jax.Array = 1.0,
    threshold: float | jax.Array = RIGHT,
) -> FloatG:
    """The published correction: every kept completion over the pass rate of its pool.

        omega_j = (N+ / N)^-power        0 where nothing is right

    It does not undo a selection. Over a balanced choice of the pool it puts the weight
    ((1-p)^2 + p^2) / (2 p^2 (1-p)) on grad p and not the 1 / p that is meant: one
    factor for the whole group cannot give back what one class lost against the other.
    `horvitz_thompson` with the weight of log does. Kept for comparison.

    Args:
        reward: `[..., G]` float, outcome of each completion.
        pool: `[..., G]` bool, completions that could have been kept.
        keep: `[..., G]` bool, those that were; a subset of `pool`.
        power: 1 for log, 1/2 for what is left of it where the number of draws already
            follows the other half.
        threshold: rewards above it are right.

    Returns:
        `[..., G]` float32, 0 where not `keep`.

    Raises:
        AssertionError: as `none`.

    References:
        Xiong et al. 2025, Reinforce-Ada, arXiv:2510.04996, third version. The released
        code has no such factor.
    """
    right = _count(masked.right(reward, pool, threshold))
    rate = jnp.where(right > 0, right / jnp.maximum(_count(pool), 1.0), 1.0)
    return jnp.where(keep & (right > 0), rate**-power, 0.0)


@checks.contract(rows_per_prompt="rows")
def per_prompt(
    reward: FloatG, pool: BoolG, keep: BoolG, *, rows: Positive | jax.Array
) -> FloatG:
    """Every prompt counts the same, however many completions of it are trained.

        omega_j = R / n

    so that the sum over the kept, divided by R, is their mean. Without it a prompt with
    twice the completions has twice the weight: what was to lower noise has moved the
    objective. With `advantage.leave_one_out` the update is that of the uniform
    allocation, exactly and for every allocation that does not depend on these draws;
    a baseline that contains its own completion is off by (n - 1) / n, another factor in
    every prompt. GVM's 1 / (n p) is this times `objective.history_weight` of log: the
    pass rate is that of the pilot.

    Args:
        reward: `[..., G]` float; not read.
        pool: `[..., G]` bool, completions that could have been kept.
        keep: `[..., G]` bool, those that were; a subset of `pool`.
        rows: R, completions per prompt that the update divides by: the rows of the
            step over its prompts.

    Returns:
        `[..., G]` float32, 0 where not `keep`; sums to `rows` in every prompt of which
        anything was kept.

    Raises:
        AssertionError: as `none`.

    References:
        Yao et al. 2025, GVM, arXiv:2505.02391, Lemma 1. DynaMO, arXiv:2602.19208,
        allocates without it.
    """
    return _spread(rows, keep)


@checks.contract(rows_per_prompt="rows", right_above="threshold")
def accepted_mean(
    reward: FloatG,
    pool: BoolG,
    keep: BoolG,
    *,
    rows: Positive | jax.Array,
    threshold: float | jax.Array = RIGHT,
) -> FloatG:
    """The mean over the right ones that are kept; wrong ones train nothing.

        omega_j = R / n+ if right, else 0

    With `advantage.raw` or `advantage.signed`, as long as one is kept where one was
    found,

        w(p) = (1 - (1-p)^N) / p ,

    N the draws made where nothing is right: the log objective, truncated at N, whatever
    stopped the draws before that and whichever right ones are kept. Noisier than a
    centred estimator on easy prompts.

    Args:
        reward: `[..., G]` float, outcome of each completion.
        pool: `[..., G]` bool, completions that could have been kept.
        keep: `[..., G]` bool, those that were; a subset of `pool`.
        rows: R, completions per prompt that the update divides by.
        threshold: rewards above it are right.

    Returns:
        `[..., G]` float32, 0 where wrong or not `keep`.

    Raises:
        AssertionError: as `none`.

    References:
        Yao et al. 2025, GVM, arXiv:2505.02391, Algorithm 1: its 1 / |D|.
    """
    return _spread(rows, keep & masked.right(reward, pool, threshold))


@checks.contract(rows_per_prompt="rows", most_draws="limit", right_above="threshold")
def control_variate(
    reward: FloatG,
    pool: BoolG,
    keep: BoolG,
    *,
    rows: Positive | jax.Array,
    limit: float | jax.Array,
    strength: float | jax.Array = 1.0,
    threshold: float | jax.Array = RIGHT,
) -> FloatG:
    """`accepted_mean` with a baseline that no stopping rule can bias.

        C+ = 1[N+ >= 1] - s N+ / L,   C- = -s N- / L
        omega_j = R C+ / n+ if right, -R C- / n- if wrong

    for `advantage.signed`, which turns the sign of wrong ones: kept ones of a class
    share its C. What is subtracted is s / L times the sum of all scores drawn, of
    expectation 0 (Wald) whenever the draws stop, so w(p) = (1 - (1-p)^L) / p for every
    s as in `accepted_mean`, with less noise. Pools without a right completion push
    their wrong ones down, and pools without a wrong one their right ones up; both are
    needed, and a gate that drops them brings a bias.

    Args:
        reward: `[..., G]` float, outcome of each completion.
        pool: `[..., G]` bool, completions that could have been kept.
        keep: `[..., G]` bool, those that were; at least one of each class in `pool`.
        rows: R, completions per prompt that the update divides by.
        limit: L, draws made for a prompt where nothing is right.
        strength: s, a constant or anything else that does not depend on these draws; 0
            is `accepted_mean`, 1 is safe, L / E[N] is best for easy prompts, above 2
            everywhere is harmful.
        threshold: rewards above it are right.

    Returns:
        `[..., G]` float32, 0 where not `keep`.

    Raises:
        AssertionError: as `none`.

    References:
        Derived here; for the sampling of Xiong et al. 2025, Reinforce-Ada,
        arXiv:2510.04996.
    """
    right = masked.right(reward, pool, threshold)
    of_right, of_wrong = _count(right), _count(pool & ~right)
    plus = jnp.where(of_right > 0, 1.0, 0.0) - strength * of_right / limit
    minus = strength * of_wrong / limit
    return _spread(rows * plus, keep & right) + _spread(rows * minus, keep & ~right)


@checks.contract(rows_per_prompt="rows", most_draws="limit", right_above="threshold")
def first_success(
    reward: FloatG,
    pool: BoolG,
    keep: BoolG,
    *,
    rows: Positive | jax.Array,
    limit: int,
    coefficients: Callable[[int], np.ndarray],
    threshold: float | jax.Array = RIGHT,
) -> FloatG:
    """Any series f'(p) = sum_k d_k (1-p)^k, from when the first right one was drawn.

        omega_j = R d_{J-1} / n+ if right, else 0

    J - 1 draws of the pool came before the first right one. P(J) = p (1-p)^(J-1), so
    with `advantage.raw` or `advantage.signed`

        w(p) = sum_{k < L} d_k (1-p)^k        exactly,

    whatever stopped the draws after that and whichever right ones are kept. For log it
    is `accepted_mean`. With a number of draws fixed before, `objective.series` says the
    same with less noise.

    Args:
        reward: `[..., G]` float, outcome of each completion, in the order of drawing.
        pool: `[..., G]` bool, completions that could have been kept: all drawn.
        keep: `[..., G]` bool, those that were; a right one if there is any in `pool`.
        rows: R, completions per prompt that the update divides by.
        limit: L, draws made for a prompt where nothing is right; static.
        coefficients: count -> d_0 to d_(count-1), see `objective.log_coefficients`.
        threshold: rewards above it are right.

    Returns:
        `[..., G]` float32, 0 where wrong or not `keep`.

    Raises:
        AssertionError: as `none`.

    References:
        Derived here; for the objectives and the sampling of Xiong et al. 2025,
        Reinforce-Ada, arXiv:2510.04996.
    """
    right = masked.right(reward, pool, threshold)
    table = jnp.asarray([*coefficients(limit), 0.0], jnp.float32)
    draw = jnp.cumsum(pool, -1, dtype=jnp.int32) - 1
    first = jnp.min(draw, -1, keepdims=True, where=right, initial=limit)
    return _spread(rows * table[first], keep & right)


@checks.contract()
def every(
    reward: FloatG,
    pool: BoolG,
    keep: BoolG,
    *,
    rules: Sequence[Callable[[jax.Array, jax.Array, jax.Array], jax.Array]],
) -> FloatG:
    """The product of several rules.

    `horvitz_thompson` and `per_prompt` together are the mean of the pool, however many
    completions were kept of it.

    Args:
        reward: `[..., G]` float, outcome of each completion.
        pool: `[..., G]` bool, completions that could have been kept.
        keep: `[..., G]` bool, those that were; a subset of `pool`.
        rules: functions of (reward, pool, keep); none at all is `none`.

    Returns:
        `[..., G]` float32, 0 where not `keep`.

    Raises:
        AssertionError: as `none`.
    """
    weight = none(reward, pool, keep)
    for rule in rules:
        weight *= rule(reward, pool, keep)
    return weight


def _count(among: jax.Array) -> jax.Array:
    """`[..., 1]` float32."""
    return masked.total(among, among, keepdims=True)


def _spread(total: float | jax.Array, among: jax.Array) -> jax.Array:
    """`total` shared out evenly `among` those, 0 for all others."""
    return jnp.where(among, total / jnp.maximum(_count(among), 1.0), 0.0)
