"""Variance of completions' gradients, and how much of it allocators can remove.

A completion of outcome r has the score s = grad log pi(y), E[s] = 0. Estimates from the
n completions of a prompt are unbiased, so that sampling noise is not taken for signal:

    G^2        = E|s|^2
    grad p     = Cov(r, s)
    |grad p|^2,  as HSIC with linear kernels, from sums over distinct completions
    V          = E[(r - p)^2 |s|^2] - |grad p|^2

V is the variance of a completion's gradient about the baseline p, summed over all
parameters: that of an estimate from n_i completions is V / n_i. Everything follows from
sums (`Sums`), so no two scores need exist at a time.

References:
    Song et al. 2012, "Feature Selection via Dependence Maximization", Journal of
    Machine Learning Research 13, for the unbiased HSIC.
"""

import math
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from curax import allocate
from curax.arrays import counts as whole
from curax.types import Difficulty

LEAST = 2  # completions of a prompt: a baseline needs another one
WIDEST = 4  # most of them, as a multiple of the mean
BINS = (0.0, 0.03, 0.1, 0.3, 0.7, 0.9, 0.97, 1.01)  # of pass rates
LOWEST = 0.01  # of the mean: the least variance that a choice of prompts believes


class Sums(NamedTuple):
    """Sums over the completions of a prompt, `[...]`; r outcomes, s scores."""

    n: np.ndarray
    tokens: np.ndarray
    r: np.ndarray
    rr: np.ndarray  # of r^2
    square: np.ndarray  # of |s|^2
    r_square: np.ndarray  # of r |s|^2
    rr_square: np.ndarray  # of r^2 |s|^2
    total: np.ndarray  # |sum s|^2
    right: np.ndarray  # |sum r s|^2
    cross: np.ndarray  # sum s . sum r s
    cross_rr: np.ndarray  # sum s . sum r^2 s


class Estimates(NamedTuple):
    """Estimated gradient moments of a prompt, `[...]`; NaN below 4 completions."""

    p: np.ndarray  # mean outcome
    outcome: np.ndarray  # variance of the outcome, p (1 - p); unbiased
    square: np.ndarray  # G^2
    proxy: np.ndarray  # G^2 p (1 - p), unbiased
    gradient: np.ndarray  # |grad p|^2; unbiased, so it may be negative
    variance: np.ndarray  # V; unbiased, likewise
    own: np.ndarray  # |estimated grad p|^2, its noise included
    length: np.ndarray  # mean tokens


def estimates(sums: Sums) -> Estimates:
    """Gradient moments of a prompt from n >= 4 completions, unbiased but for `own`."""
    few = sums.n < 4
    n, length, r, rr, s, rs, rrs, tt, uu, tu, tw = (
        np.where(few, np.nan, np.asarray(x, np.float64)) for x in sums
    )
    pairs = n * (n - 1)
    triples = pairs * (n - 2)
    both = (rr * s - rrs) / pairs  # E[r^2] G^2
    thrice = (r**2 * s - rr * s - 2 * r * rs + 2 * rrs) / triples  # p^2 G^2
    rows = r * tu - tw - r * rs + rrs
    gradient = (uu - rrs) + (tt - s) * (r**2 - rr) / ((n - 1) * (n - 2))
    gradient = (gradient - 2 / (n - 2) * rows) / (n * (n - 3))
    return Estimates(
        p=r / n,
        outcome=(rr - r**2 / n) / (n - 1),
        square=s / n,
        proxy=both - thrice,
        gradient=gradient,
        variance=rrs / n - 2 * (r * rs - rrs) / pairs + thrice - gradient,
        own=(uu - 2 * r / n * tu + (r / n) ** 2 * tt) / (n - 1) ** 2,
        length=length / n,
    )


# ----- the beliefs of `progress`


def explained(each: Estimates) -> float:
    """kappa of `progress`: share of |s|^2 that lies along the outcome, over prompts.

    sum |grad p|^2 / sum G^2 p (1 - p), so that E|grad p|^2 is as measured.
    """
    return float(np.nansum(each.gradient) / np.nansum(each.proxy))


def shared_square(each: Estimates, total: float) -> float:
    """|E grad p|^2 over prompts: the mean of grad p . grad p' over pairs of two.

    Args:
        each: `[K]` prompts.
        total: |sum of the estimated grad p|^2 over them.
    """
    count = int(np.sum(~np.isnan(each.own)))
    return float((total - np.nansum(each.own)) / (count * (count - 1)))


def shared(each: Estimates, total: float) -> float:
    """rho of `progress`: cosine of the gradients of two prompts.

    The mean of grad p . grad p' over that of |grad p| |grad p'|, with |grad p| =
    sqrt(kappa G^2 p (1 - p)), as `progress.believed`; so |E grad p|^2 is as measured.
    NaN where kappa is not above 0, as noise may have it: no gradient is seen then.
    """
    if not (kappa := explained(each)) > 0:
        return math.nan
    square = np.nan_to_num(kappa * np.maximum(each.proxy, 0))
    count = int(np.sum(~np.isnan(each.own)))
    pairs = np.sum(np.sqrt(square)) ** 2 - np.sum(square)
    return shared_square(each, total) * count * (count - 1) / float(pairs)


def cosines(each: Estimates, bins: np.ndarray, gram: np.ndarray) -> np.ndarray:
    """`[B, B]` rho by pass rate: cosine of gradients of prompts from two bins.

    Over pairs of distinct prompts, the mean of grad p . grad p', over the root of the
    mean |grad p|^2 in each bin. Unbiased but for that root; 0 where a bin has fewer
    than two prompts, or no gradient above its noise.

    Args:
        each: `[K]` prompts.
        bins: `[K]` the bin of each.
        gram: `[B, B]` products of the sums of the estimated grad p of bins.
    """
    count, own, square = (
        np.bincount(bins, x, len(gram)) for x in (None, each.own, each.gradient)
    )
    pairs = np.outer(count, count) - np.diag(count)
    norm = np.sqrt(np.maximum(square, 0) / np.maximum(count, 1)) * (count > 1)
    below = np.outer(norm, norm) * pairs
    above, none = gram - np.diag(own), np.zeros_like(gram)
    return np.divide(above, below, out=none, where=below > 0)


def varied(sums: Sums) -> float:
    """nu of `progress`: variance of right completions' scores over that of wrong ones.

    Sums of both over the prompts that have two of each; V_right is E|s|^2 among right
    ones less |E s|^2 there, both unbiased. 1 where no prompt has, or an outcome is
    neither 0 nor 1.

    Args:
        sums: `[K]` of prompts.
    """
    n, _, r, rr, s, rs, rrs, tt, uu, tu, _ = (np.asarray(x, np.float64) for x in sums)
    if not np.array_equal(r, rr):
        return 1.0
    has = (r >= 2) & (n - r >= 2)

    def within(count: np.ndarray, square: np.ndarray, whole: np.ndarray) -> float:
        count, square, whole = count[has], square[has], whole[has]
        return float(np.sum((square - (whole - square) / (count - 1)) / count))

    right, wrong = within(r, rrs, uu), within(n - r, s - rs, tt - 2 * tu + uu)
    return right / wrong if has.any() and wrong > 0 else 1.0


# ----- what allocators make of it


def shrunk(each: Estimates, draws: np.ndarray) -> Estimates:
    """Estimates with V shrunk halfway to the prediction of score norms.

    The mean of V as estimated and of G^2 p (1 - p), with p smoothed by half a right and
    half a wrong completion, scaled to the mean of V: few draws may give V = 0.
    """
    norms = each.square * smoothed(each.p * draws, draws)
    scale = np.mean(each.variance) / np.mean(norms)
    return each._replace(variance=(np.maximum(each.variance, 0) + scale * norms) / 2)


def smoothed(solved: np.ndarray, draws: np.ndarray) -> np.ndarray:
    """Smoothed p (1 - p), as `allocate.smoothed_variance`."""
    p = (solved + 0.5) / (draws + 1)
    return p * (1 - p)


def remaining_variance(variance: np.ndarray, counts: np.ndarray, mean: float) -> float:
    """Variance sum_i V_i / n_i, over that of `mean` completions of each prompt."""
    return float(np.sum(variance / counts) / (np.sum(variance) / mean))


def allocators(
    budget: int, most: int, tokens: float
) -> dict[str, Callable[[Difficulty], Any]]:
    """Every allocator of `curax.allocate` with the same bounds and the same budget.

    Args:
        budget: completions of all prompts.
        most: of one prompt.
        tokens: of all prompts, the budget where that is what is limited; what a
            completion costs then bounds their number.
    """
    size: dict[str, Any] = {"budget": budget, "most": most, "least": LEAST}
    many = size | {"budget": LEAST * budget, "token_budget": tokens}
    return {
        "uniform": partial(allocate.uniform, budget=budget, most=most),
        "inverse_pass_rate": partial(allocate.inverse_pass_rate, **size),
        "inverse_root": partial(allocate.inverse_root, **size),
        "skip_dead": partial(allocate.skip_dead, **size),
        "dynamo": partial(allocate.dynamo, **size),
        "bernoulli": partial(allocate.bernoulli, **size),
        "neyman": partial(allocate.neyman, **size),
        "neyman_within_tokens": partial(allocate.neyman_within_tokens, **many),
        "gvm": partial(allocate.gvm, **size),
        "log_baseline": partial(allocate.log_baseline, **size),
    }


def allocations(
    known: Estimates, draws: np.ndarray, measured: Estimates, mean: int
) -> dict[str, dict[str, float]]:
    """Remaining variance under each allocator, over that of equal groups, by name.

    Every prompt counts the same (`correct.per_prompt`), so counts change no mean. What
    an allocator knows and what it is judged by come from different completions, so that
    no noise is taken for a gain.

    Args:
        known: `[K]` what allocators know of the prompts.
        draws: `[K]` completions behind it.
        measured: `[K]` of other completions.
        mean: completions per prompt, the budget.

    Returns:
        Of each, "labels": if V were p (1 - p); "norms": if it were G^2 p (1 - p);
        "measured"; "log_norms" and "log_measured": the same of the log objective, where
        a prompt's gradient is divided by its pass rate; "tokens", those drawn, over
        those of equal groups; "most", the largest count.
    """
    solved = known.p * draws
    rate, labels = (solved + 0.5) / (draws + 1), smoothed(solved, draws)
    norms, length = known.square * labels, measured.length
    judges = {
        "labels": labels,
        "norms": norms,
        "measured": measured.variance,
        "log_norms": norms / rate**2,
        "log_measured": measured.variance / rate**2,
    }
    norm = np.sqrt(known.square)
    have = draws, solved, rate, norm, known.length
    names = "draws", "solved", "pass_rate", "norm", "tokens"
    given: Any = {k: np.float32(x) for k, x in zip(names, have, strict=True)}
    budget = mean * len(rate)
    size = {"budget": budget, "most": WIDEST * mean, "least": LEAST}
    tokens = float(mean * np.sum(known.length))
    every: dict[str, Any] = {
        name: np.asarray(rule(Difficulty(**given)), np.float64)
        for name, rule in allocators(budget, WIDEST * mean, tokens).items()
    }
    best = shrunk(known, draws).variance
    for name, square in {"oracle": best, "oracle of log p": best / rate**2}.items():
        every[name] = np.asarray(whole.greedy(jnp.float32(square), **size), np.float64)
    return {
        name: {key: remaining_variance(v, counts, mean) for key, v in judges.items()}
        | {
            "tokens": float(np.sum(counts * length) / np.sum(mean * length)),
            "most": float(np.max(counts)),
        }
        for name, counts in every.items()
    }


def floors(
    known: Estimates, measured: Estimates, each: Estimates, common: float, mean: int
) -> dict[str, dict[str, float]]:
    """Remaining variance under perfect knowledge, over that of equal groups.

    With counts n, prompts drawn by q and weighed by 1 / q, a step of B prompts has

        B tr Cov = E_x[(h^2 + V / n) / (K q)] - |E grad p|^2,   h = |grad p|

    and equal draws. "counts": of E V / n alone, least for n in proportion to sqrt(V),
    without bounds. "prompts": of the step, least for q in proportion to
    sqrt(h^2 + V / n), in equal groups. "both": one completion of every prompt, q in
    proportion to sqrt(h^2 + V), and the baseline p known.

    Args:
        known: `[K]` of some completions, `shrunk`.
        measured: `[K]` of others.
        each: `[K]` of all.
        common: |E grad p|^2, `shared_square`.
        mean: completions per prompt.

    Returns:
        Of each, "least": from the estimates of all, too low by their noise; "reached":
        by a choice from `known`, judged by `measured`. NaN where noise leaves no
        variance.
    """

    def bounds(between: float, n: float, subtract: float, draws: int):
        def noise(of: Estimates) -> np.ndarray:
            return between * of.gradient + of.variance / n

        def ratio(choose: Estimates, judge: Estimates) -> float:
            by = noise(choose)
            equal = between * judge.gradient + judge.variance / mean
            if not between:
                equal = noise(judge)
            every = np.mean(equal) - subtract
            if not (np.mean(by) > 0 and every > 0):
                return math.nan
            by = np.sqrt(np.maximum(by, LOWEST * np.mean(by)))
            made = np.mean(noise(judge) / by) * np.mean(by) - subtract
            return float(made / draws / every)

        return {"least": ratio(each, each), "reached": ratio(known, measured)}

    return {
        "counts": bounds(0, 1, 0.0, 1),
        "prompts": bounds(1, mean, common, 1),
        "both": bounds(1, 1, common, mean),
    }


def by_pass_rate(
    known: Estimates, measured: Estimates, each: Estimates
) -> list[dict[str, float]]:
    """Means over prompts, in bins of the pass rate in `known`; V is of other draws.

    Returns:
        Of each of BINS with any prompt: its bounds "low" and "high", "prompts", and
        the means of "pass_rate", "variance", "norms" G^2 p (1 - p), "square" G^2, all
        `measured`; "explained", kappa of `each`.
    """
    found = []
    for low, high in pairwise(BINS):
        here = (known.p >= low) & (known.p < high)
        if not here.any():
            continue
        of = Estimates(*(x[here] for x in measured))
        both = Estimates(*(x[here] for x in each))
        proxy = float(np.sum(both.proxy))
        found.append(
            {
                "low": low,
                "high": min(high, 1.0),
                "prompts": int(np.sum(here)),
                "pass_rate": float(np.mean(of.p)),
                "variance": float(np.mean(of.variance)),
                "norms": float(np.mean(of.proxy)),
                "square": float(np.mean(of.square)),
                "explained": explained(both) if proxy > 0 else 0.0,
            }
        )
    return found


def correlations(known: Estimates, measured: Estimates) -> dict[str, dict[str, float]]:
    """Correlation over prompts of the measured V with its predictors.

    Returns:
        By "labels" p (1 - p), "norms" G^2 p (1 - p), "square" G^2 and "length", of
        `known`, and by "variance", the V of `known`, which bounds them: "pearson" and
        "spearman"; 0 where one of both is constant.
    """
    from scipy.stats import pearsonr, spearmanr

    def correlation(rule: Any, x: np.ndarray) -> float:
        constant = not (np.ptp(x) and np.ptp(v))
        return 0.0 if constant else float(rule(x, v).statistic)

    v = measured.variance
    of = {
        "labels": known.outcome,
        "norms": known.proxy,
        "square": known.square,
        "length": known.length,
        "variance": known.variance,
    }
    return {
        name: {
            "pearson": correlation(pearsonr, x),
            "spearman": correlation(spearmanr, x),
        }
        for name, x in of.items()
    }
