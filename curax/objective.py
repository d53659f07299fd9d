"""Pass-rate objectives f(p), and the prompt weights f'(p) they imply.

Training on the mean of f(p) over prompts follows f'(p) grad p: to choose f is to
choose how much each prompt counts, given how often it is solved.
"""

from collections.abc import Callable

import chex
import jax
import jax.numpy as jnp

from curax import masked


def prompt_weight(
    outcome: jax.Array,
    exists: jax.Array,
    *,
    f: Callable[[jax.Array], jax.Array],
    prior: tuple[float, float] = (0.0, 0.0),
    low: float | None = None,
    high: float | None = None,
) -> jax.Array:
    """How much each prompt counts under the objective f, at its estimated pass rate.

        w = f'(p),   p = (k + a) / (n + a + b),   k = sum_i outcome_i

    over the n completions that exist, (a, b) the prior's pseudo-counts of solved and
    unsolved. Where f' is not finite (log at p = 0) it is taken at 1/n, or 1 - 1/n at
    the other end: n draws justify no larger weight. (n = 1 takes 1/2, where both meet.)
    Multiplied onto an advantage whose own effective weight is 1 this is a plug-in
    estimate: f' of a noisy p is not f' of the true one, and n draws reach only
    polynomials of degree n - 1 in p.

    Args:
        outcome: `[..., G]` float in [0, 1], what the verifier said.
        exists: `[..., G]` bool, True where there is a completion.
        f: elementwise, non-decreasing function of the pass rate, a member of this
            module or any other; differentiated here.
        prior: Beta pseudo-counts (a, b), both at least 0; (0, 0) is the plain mean.
        low: smallest pass rate to evaluate f' at; None leaves p as it is.
        high: largest pass rate to evaluate f' at; None leaves p as it is.

    Returns:
        `[...]` float32, f'(p); 0 for a prompt without completions.

    Raises:
        AssertionError: while tracing, if shapes differ or dtypes are not (float, bool).

    References:
        Xiong et al. 2025, "Reinforce-Ada: An Adaptive Sampling Framework for
        Reinforce-Style LLM Training", arXiv:2510.04996, section on non-linear
        objectives. The paper clips nothing; the cap at 1/n is ours.
    """
    chex.assert_equal_shape([outcome, exists])
    chex.assert_type([outcome, exists], [float, bool])
    n = masked.total(exists, exists)
    solved, unsolved = prior
    rate = masked.total(outcome, exists) + solved
    rate = rate / jnp.where(n > 0, n + solved + unsolved, 1.0)
    rate = jnp.clip(rate, low, high)

    slope = jax.grad(lambda p: jnp.sum(f(p)))
    inner = 1.0 / jnp.maximum(n, 2.0)
    at_rate, within = slope(rate), slope(jnp.clip(rate, inner, 1.0 - inner))
    weight = jnp.where(jnp.isfinite(at_rate), at_rate, within)
    return jnp.where(n > 0, weight, 0.0)


def linear(p: jax.Array) -> jax.Array:
    """The pass rate itself: f = p, f' = 1. Every prompt counts the same."""
    return p


def log(p: jax.Array) -> jax.Array:
    """Log-likelihood of being right: f = log p, f' = 1/p. What RAFT's EM ascends.

    References:
        Yao et al. 2025, "Optimizing Chain-of-Thought Reasoners via Gradient Variance
        Minimization in Rejection Sampling and RL" (GVM), arXiv:2505.02391.
    """
    return jnp.log(p)


def power(p: jax.Array, *, alpha: float | jax.Array) -> jax.Array:
    """Between linear and log: f = p^alpha, f' = alpha p^(alpha - 1), alpha in (0, 1].

    References:
        Xiong et al. 2025, Reinforce-Ada, arXiv:2510.04996.
    """
    return jnp.power(p, alpha)


def arcsine(p: jax.Array) -> jax.Array:
    """Large-group limit of GRPO: f = 2 asin sqrt p, f' = 1 / sqrt(p (1 - p)).

    Dividing by the group's standard deviation lends easy and hard prompts alike more
    weight. A group of n gets there only as n grows; at p -> 0 it stops at sqrt(n - 1).
    """
    return 2.0 * jnp.arcsin(jnp.sqrt(p))


def pass_at_k(p: jax.Array, *, k: int) -> jax.Array:
    """One of k draws is right: f = 1 - (1 - p)^k, f' = k (1 - p)^(k - 1).

    k = 1 is `linear`; a prompt that is nearly always solved counts nothing for k > 1.

    References:
        Walder and Karkhanis 2025, "Pass@K Policy Optimization", arXiv:2505.15201.
    """
    return 1.0 - (1.0 - p) ** k
