"""Pass-rate objectives f(p), and the prompt weights f'(p) they imply.

Training on the mean of f(p) over prompts follows f'(p) grad p: to choose f is to
choose how much each prompt counts, given how often it is solved.

Weights are `(outcome, exists, history) -> weight`, one per completion: they multiply
its advantage. From n draws of a prompt only polynomials in p of degree n - 1 can be had
as the weight on grad p, so of most f' only an approximation:

    prompt_weight   f' at the pass rate of the draws; biased, little noise
    history_weight  f' at a pass rate known before; exact for what was known
    series          f' = sum_k d_k (1-p)^k, its first n terms exactly
    bernstein       the slope of E f(pass rate of n draws), for any f, exactly
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from curax.arrays import checks, masked
from curax.settings.declared import RIGHT
from curax.types import BoolG, Float, FloatG


@checks.contract(objective="f")
def prompt_weight(
    outcome: FloatG,
    exists: BoolG,
    history: Float,
    *,
    f: Callable[[jax.Array], jax.Array],
    prior: tuple[float, float] = (0.0, 0.0),
    low: float | None = None,
    high: float | None = None,
) -> FloatG:
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
        history: `[...]` float in [0, 1], pass rate as it was known before; not read.
        f: elementwise, non-decreasing function of the pass rate, a member of this
            module or any other; differentiated here.
        prior: Beta pseudo-counts (a, b), both at least 0; (0, 0) is the plain mean.
        low: smallest pass rate to evaluate f' at; None leaves p as it is.
        high: largest pass rate to evaluate f' at; None leaves p as it is.

    Returns:
        `[..., G]` float32, f'(p) at every completion; 0 where there is none.

    Raises:
        AssertionError: while tracing, if shapes differ or dtypes are not (float, bool).

    References:
        Xiong et al. 2025, "Reinforce-Ada: An Adaptive Sampling Framework for
        Reinforce-Style LLM Training", arXiv:2510.04996, section on non-linear
        objectives. The paper clips nothing; the cap at 1/n is ours.
    """
    n = masked.total(exists, exists)
    solved, unsolved = prior
    rate = masked.total(outcome, exists) + solved
    rate = rate / jnp.where(n > 0, n + solved + unsolved, 1.0)
    rate = jnp.clip(rate, low, high)

    slope = jax.grad(lambda p: jnp.sum(f(p)))
    inner = 1.0 / jnp.maximum(n, 2.0)
    at_rate, within = slope(rate), slope(jnp.clip(rate, inner, 1.0 - inner))
    weight = jnp.where(jnp.isfinite(at_rate), at_rate, within)
    return jnp.where(exists, weight[..., None], 0.0)


@checks.contract(objective="f")
def history_weight(
    outcome: FloatG,
    exists: BoolG,
    history: Float,
    *,
    f: Callable[[jax.Array], jax.Array],
    low: float | None = None,
    high: float | None = None,
) -> FloatG:
    """How much each prompt counts under the objective f, at the pass rate known before.

        w = f'(h)        of the history h, clipped to [low, high]

    It does not depend on the draws it multiplies, so an advantage whose own weight is 1
    leaves exactly E = f'(h) grad p: noise of h adds variance and no bias from the
    draws. What remains is that f'(h) is not f'(p). For log and an independent pilot of
    N draws, E[p / h; h > 0] at p = 0.1 is 0.375, 0.848, 1.249 for N = 8, 16, 32.

    Args:
        outcome: `[..., G]` float in [0, 1]; not read.
        exists: `[..., G]` bool, True where there is a completion.
        history: `[...]` float in [0, 1], pass rate as it was known before the draws.
        f: elementwise, non-decreasing function of the pass rate, a member of this
            module or any other; differentiated here.
        low: smallest pass rate to evaluate f' at; None leaves it as it is.
        high: largest pass rate to evaluate f' at; None leaves it as it is.

    Returns:
        `[..., G]` float32, f'(h) at every completion; 0 where there is none, and in
        prompts at which f' is not finite (log at 0): nothing tells how much they count.

    Raises:
        AssertionError: as `prompt_weight`.

    References:
        Yao et al. 2025, GVM, arXiv:2505.02391: with f = log and a pilot this is the
        1/p of its estimator, sum over accepted of 1 / (n p). Xiong et al. 2025,
        Reinforce-Ada, arXiv:2510.04996: its estimation-based variant divides by the
        root of the pass rate of the draws; the root of the history is `power`.
    """
    rate = jnp.clip(jnp.asarray(history, jnp.float32), low, high)
    weight = jax.grad(lambda p: jnp.sum(f(p)))(rate)
    weight = jnp.where(jnp.isfinite(weight), weight, 0.0)
    return jnp.where(exists, weight[..., None], 0.0)


@checks.contract(series="coefficients", terms="terms", right_above="threshold")
def series(
    outcome: FloatG,
    exists: BoolG,
    history: Float,
    *,
    coefficients: Callable[[int], np.ndarray],
    terms: int | None = None,
    threshold: float | jax.Array = RIGHT,
) -> FloatG:
    """The first n terms of an objective's series, unbiased, from n draws.

        f'(p) = sum_k d_k (1-p)^k
        w_j = b(others of j that are right),
        b(i) = sum_{k<n} d_k C(n-1-i, k) / C(n-1, k)

    b(i) are the Bernstein coefficients of sum_{k<n} d_k (1-p)^k, of degree n - 1. Since
    w_j is a function of the others alone, with `advantage.raw` and, for n > 1, with
    `advantage.leave_one_out`

        w(p) = sum_{k < n} d_k (1-p)^k        exactly

    (`group_mean`: (n - 1) / n of it, `signed`: twice). For log, right completions get
    n / k, k the number of these: with `raw` the mean over the accepted ones. n is each
    group's own; where it depends on the draws, `correct.first_success` is to be taken
    instead. Outcomes are labels, right or wrong.

    Args:
        outcome: `[..., G]` float in [0, 1], what the verifier said.
        exists: `[..., G]` bool, True where there is a completion.
        history: `[...]` float in [0, 1], pass rate as it was known before; not read.
        coefficients: count -> d_0 to d_(count-1), `linear_coefficients` and others.
        terms: stop after so many, at which groups of n >= terms share one objective;
            None takes all that n draws reach.
        threshold: outcomes above it are right.

    Returns:
        `[..., G]` float32; 0 where there is no completion.

    Raises:
        AssertionError: as `prompt_weight`.

    References:
        Tajwar et al. 2026, "Maximum Likelihood Reinforcement Learning" (MaxRL),
        arXiv:2602.02710, for log. Walder and Karkhanis 2025, "Pass@K Policy
        Optimization", arXiv:2505.15201, for pass@k.
    """
    table = jnp.asarray(_polynomials(coefficients, exists.shape[-1], terms))
    n, others = _others(outcome, exists, threshold)
    return jnp.where(exists, table[n, others], 0.0)


@checks.contract(objective="f", right_above="threshold")
def bernstein(
    outcome: FloatG,
    exists: BoolG,
    history: Float,
    *,
    f: Callable[[jax.Array], jax.Array],
    prior: tuple[float, float] = (0.5, 0.5),
    threshold: float | jax.Array = RIGHT,
) -> FloatG:
    """Any objective, smoothed to what n draws reach, and that without bias.

        x(k) = (k + a) / (n + a + b)
        w_j = (n + a + b) (f(x(i + 1)) - f(x(i))),   i = others of j that are right

    the mean of f' between two neighbouring pass rates, around (i + 1) / (n + 1) with
    the prior as it is. With `advantage.raw` and, for n > 1, `advantage.leave_one_out`
    the objective that is ascended is exactly

        (1 + (a + b) / n) E f((k + a) / (n + a + b)),   k ~ Binomial(n, p) ,

    the Bernstein polynomial of f for the prior (0, 0), which tends to f as n grows.
    linear remains linear. Where f has a series in 1 - p, `series` follows that without
    smoothing. n is each group's own and must not depend on the draws. Outcomes are
    labels, right or wrong.

    Args:
        outcome: `[..., G]` float in [0, 1], what the verifier said.
        exists: `[..., G]` bool, True where there is a completion.
        history: `[...]` float in [0, 1], pass rate as it was known before; not read.
        f: elementwise, non-decreasing function of the pass rate; finite inside (0, 1).
        prior: pseudo-counts (a, b) of right and wrong; each 0 only where f is finite
            at that end (linear, power, arcsine, pass@k; not log, not logit).
        threshold: outcomes above it are right.

    Returns:
        `[..., G]` float32; 0 where there is no completion.

    Raises:
        AssertionError: as `prompt_weight`.

    References:
        Lorentz 1953, "Bernstein Polynomials", University of Toronto Press: w(p) is the
        Kantorovich polynomial of f'. Its use as an objective is ours.
    """
    a, b = prior
    n, others = _others(outcome, exists, threshold)
    scale = jnp.maximum(n, 1).astype(jnp.float32) + (a + b)
    below = jnp.where(exists, others, 0).astype(jnp.float32) + a
    rise = f((below + 1.0) / scale) - f(below / scale)
    return jnp.where(exists, scale * rise, 0.0)


# ----- objectives


def linear(p: jax.Array) -> jax.Array:
    """The pass rate itself: f = p, f' = 1. Every prompt counts the same.

    Any number of draws reaches it.
    """
    return p


def log(p: jax.Array) -> jax.Array:
    """Log-likelihood of being right: f = log p, f' = 1/p. What RAFT's EM ascends.

    n draws reach `truncated_log`: `series` that of n, `prompt_weight` with
    `advantage.group_mean` that of n - 1.

    References:
        Yao et al. 2025, "Optimizing Chain-of-Thought Reasoners via Gradient Variance
        Minimization in Rejection Sampling and RL" (GVM), arXiv:2505.02391.
    """
    return jnp.log(p)


def truncated_log(p: jax.Array, *, n: int) -> jax.Array:
    """What n draws reach of log: f = sum_{k<=n} (1 - (1-p)^k) / k, f' = (1-(1-p)^n)/p.

    A mixture of pass@k in shares of 1/k. f' is n at p = 0, finite as it must be.

    References:
        Tajwar et al. 2026, "Maximum Likelihood Reinforcement Learning" (MaxRL),
        arXiv:2602.02710.
    """
    wrong = 1.0 - jnp.asarray(p, jnp.float32)[..., None]
    k = jnp.arange(1, n + 1, dtype=jnp.float32).reshape((1,) * (wrong.ndim - 1) + (n,))
    return jnp.sum((1.0 - wrong**k) / k, -1)


def power(p: jax.Array, *, alpha: float | jax.Array) -> jax.Array:
    """Between linear and log: f = p^alpha, f' = alpha p^(alpha - 1), alpha in (0, 1].

    n draws reach the first n terms of its series in 1 - p: for alpha = 1/2, n = 6 the
    weight at p = 0.3135 is 0.8597 instead of 0.8930, and 1.3535 at most, at p = 0.

    Args:
        p: pass rates in [0, 1], float32.
        alpha: exponent in (0, 1]; 1 is the pass rate itself.

    References:
        Xiong et al. 2025, Reinforce-Ada, arXiv:2510.04996.
    """
    return jnp.power(p, alpha)


def arcsine(p: jax.Array) -> jax.Array:
    """Large-group limit of GRPO: f = 2 asin sqrt p, f' = 1 / sqrt(p (1 - p)).

    Dividing by the group's standard deviation lends easy and hard prompts alike more
    weight. A group of n gets there only as n grows; at p -> 0 it stops at sqrt(n - 1).
    f' is not finite at p = 1, so it has no series in 1 - p; its finite form is
    `bernstein`.
    """
    return 2.0 * jnp.arcsin(jnp.sqrt(p))


def logit(p: jax.Array) -> jax.Array:
    """Log-odds: f = log(p / (1 - p)) / 2, f' = 1 / (2 p (1 - p)).

    What PODS follows, in place of GRPO's arcsine, on prompts with right and wrong
    completions enough: keeping m/2 of each and standardising what is kept forgets how
    many there were. Its finite form is `bernstein`, as that of `arcsine`.

    References:
        Xu et al. 2025, "Not All Rollouts are Useful: Down-Sampling Rollouts in LLM
        Reinforcement Learning" (PODS), arXiv:2504.13818. The objective is derived here.
    """
    return (jnp.log(p) - jnp.log1p(-p)) / 2.0


def pass_at_k(p: jax.Array, *, k: int) -> jax.Array:
    """One of k draws is right: f = 1 - (1 - p)^k, f' = k (1 - p)^(k - 1).

    k = 1 is `linear`; a prompt that is nearly always solved counts nothing for k > 1.
    n >= k draws reach it, fewer nothing of it.

    References:
        Walder and Karkhanis 2025, "Pass@K Policy Optimization", arXiv:2505.15201.
    """
    return 1.0 - (1.0 - p) ** k


# ----- series: d_k of f'(p) = sum_k d_k (1-p)^k


def linear_coefficients(count: int) -> np.ndarray:
    """1, 0, 0, ...: `[count]` float64, d_0 to d_(count-1) of `linear`."""
    return np.eye(1, count)[0]


def log_coefficients(count: int) -> np.ndarray:
    """1, 1, 1, ...: `[count]` float64, d_0 to d_(count-1) of `log`."""
    return np.ones(count)


def power_coefficients(count: int, *, alpha: float) -> np.ndarray:
    """d_k = alpha (1 - alpha)_k / k!, a rising factorial: those of `power`.

    Args:
        count: how many; static.
        alpha: exponent in (0, 1]; static. 1/2 gives C(2k, k) / 4^k / 2.

    Returns:
        `[count]` float64, d_0 to d_(count-1).
    """
    k = np.arange(1, count)
    return alpha * np.cumprod(np.concatenate([[1.0], (k - alpha) / k]))[:count]


def pass_at_k_coefficients(count: int, *, k: int) -> np.ndarray:
    """d_(k-1) = k, all others 0: those of `pass_at_k`.

    Args:
        count: how many; static. Fewer than k are all 0.
        k: draws of which one is to be right; static.

    Returns:
        `[count]` float64, d_0 to d_(count-1).
    """
    return np.where(np.arange(count) == k - 1, float(k), 0.0)


def _polynomials(
    coefficients: Callable[[int], np.ndarray], size: int, terms: int | None
) -> np.ndarray:
    """`[size + 1, size]` float32: b(i) of groups of n, at [n, i].

    From the polynomial of degree n - 2 to that of degree n - 1: its degree is raised,
    which takes means of neighbours and loses no digits, and a term is added.
    """
    terms = size if terms is None else min(terms, size)
    d = np.zeros(size)
    d[:terms] = coefficients(terms)
    table = np.zeros((size + 1, size))
    for n in range(1, size + 1):
        share = np.arange(n) / max(n - 1, 1)
        before = np.concatenate([[0.0], table[n - 1, : n - 1]])
        table[n, :n] = share * before + (1.0 - share) * table[n - 1, :n]
        table[n, 0] += d[n - 1]
    return table.astype(np.float32)


def _others(
    outcome: jax.Array, exists: jax.Array, threshold: float | jax.Array
) -> tuple[jax.Array, jax.Array]:
    """`[..., G]` int32: n of the group, right ones among the n - 1 others."""
    right = masked.right(outcome, exists, threshold).astype(jnp.int32)
    n = jnp.sum(exists, -1, keepdims=True, dtype=jnp.int32)
    others = jnp.sum(right, -1, keepdims=True, dtype=jnp.int32) - right
    return jnp.broadcast_to(n, exists.shape), others
