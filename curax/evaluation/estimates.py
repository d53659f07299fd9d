"""What a few completions per problem say about a policy, and how sure that is.

Of every problem n completions were graded and c of them are right. Estimates are
unbiased for each problem; an interval is over problems, for others might have been
asked.
"""

import math
import warnings
from collections import Counter
from collections.abc import Callable, Sequence

import numpy as np

from curax.monitors import confidence

ENTRIES = 2**22  # of the values that are resampled at a time


def mean(values: np.ndarray) -> np.ndarray:
    """Over the last axis, of what is not NaN; NaN where all is."""
    known = ~np.isnan(values)
    count = np.where(known.any(-1), known.sum(-1), np.nan)
    return np.where(known, values, 0.0).sum(-1) / count


def pass_at_k(right: np.ndarray, graded: np.ndarray, k: int) -> np.ndarray:
    """The chance that one at least of k completions is right.

        1 - C(n - c, k) / C(n, k) = 1 - prod_{j<k} (n - c - j) / (n - j)

    the share of all ways to draw k of the n graded ones that hold a right one. At
    k = 1 it is c / n.

    Args:
        right: `[...]` c, in [0, n].
        graded: `[...]` n; completions without an outcome do not count.
        k: at least 1.

    Returns:
        `[...]` float64 in [0, 1]; NaN where fewer than k were graded.

    References:
        Chen et al. 2021, "Evaluating Large Language Models Trained on Code",
        arXiv:2107.03374, Eq. 1.
    """
    graded = np.asarray(graded, np.float64)[..., None]
    wrong, j = graded - np.asarray(right)[..., None], np.arange(k)
    left = np.maximum(wrong - j, 0) / np.maximum(graded - j, 1)
    return np.where(graded[..., 0] >= k, 1 - left.prod(-1), np.nan)


def majority(answer: np.ndarray, outcome: np.ndarray, k: int) -> float:
    """How right the most frequent answer among k completions is, on average.

    Over all ways to draw k of the n graded completions; where several answers are the
    most frequent, over these. Computed exactly: votes for different answers are
    independent binomials of the rate k / n, given that they are k in all. At k <= 2
    it is the mean outcome of those drawn, if all of them have an answer.

    Args:
        answer: `[n]` integer, equal where answers are the same, negative where there
            is none: no vote; k completions without any give 0.
        outcome: `[n]` float, NaN where it is missing: such completions are not drawn.
            That of an answer is the mean outcome of those that give it.
        k: at least 1.

    Returns:
        In [0, 1]; NaN if fewer than k were graded.

    References:
        Wang et al. 2023, "Self-Consistency Improves Chain of Thought Reasoning in
        Language Models", arXiv:2203.11171.
    """
    graded = ~np.isnan(outcome)
    answer, outcome = answer[graded], outcome[graded]
    n = len(answer)
    if n < k:
        return math.nan
    from scipy.stats import binom

    def chances(count: int) -> np.ndarray:
        return binom.pmf(np.arange(count + 1), count, k / n)

    silent, votes = int(np.sum(answer < 0)), Counter(answer[answer >= 0].tolist())
    likely = {count: chances(count) for count in {*votes.values(), silent}}
    expected, wins = 0.0, dict[int, float]()
    for label, count in votes.items():
        value = float(outcome[answer == label].mean())
        if value and count not in wins:  # it depends on nothing else
            others = [likely[votes[other]] for other in votes if other != label]
            wins[count] = sum(
                likely[count][top] * _beaten(others, likely[silent], top, k - top)
                for top in range(1, min(count, k) + 1)
            )
        expected += value and value * wins[count]
    return expected / float(chances(n)[k])


def weighted(
    answer: np.ndarray, outcome: np.ndarray, weight: np.ndarray, *, keep: float = 1.0
) -> float:
    """How right the answer with the most weight is, among all n completions.

    With equal weights it is `majority` of k = n.

    Args:
        answer: `[n]`, as `majority`.
        outcome: `[n]`, as `majority`.
        weight: `[n]` float, a score of each completion.
        keep: share of those with an answer that vote, the surest.

    Returns:
        In [0, 1], the mean over answers with the same weight, 0 if nobody votes; NaN
        where an outcome is missing.

    References:
        As `confidence.vote`.
    """
    if not len(answer) or np.isnan(outcome).any():
        return math.nan
    best = confidence.vote(answer, weight, keep=keep)
    worth = [float(outcome[answer == label].mean()) for label in best]
    return sum(worth) / max(len(worth), 1)


def _beaten(
    others: Sequence[np.ndarray], silent: np.ndarray, top: int, rest: int
) -> float:
    """What an answer with `top` votes gets if others have `rest` votes in all.

    The chance that none of them has more, divided by the number of the best.

    Args:
        others: chances of 0, 1, ... votes for each other answer.
        silent: the same for no answer, which may have any number of votes.
        top: votes of the answer.
        rest: those of all others, silent ones too.
    """
    # [ties, votes so far]
    chance = np.zeros((rest // top + 1, rest + 1))
    chance[0, : len(silent)] = silent[: rest + 1]
    for other in others:
        new = np.zeros_like(chance)
        for votes, likely in enumerate(other[: min(top, rest + 1)]):
            new[:, votes:] += likely * chance[:, : rest + 1 - votes]
        if len(other) > top <= rest:
            new[1:, top:] += other[top] * chance[:-1, : rest + 1 - top]
        chance = new
    return float(np.sum(chance[:, rest] / np.arange(1, len(chance) + 1)))


def alike(
    answers: Sequence[str | None], same: Callable[[str, str], bool | None]
) -> np.ndarray:
    """`[n]` integers, equal where answers are the same; -1 where there is none.

    Args:
        answers: of one problem.
        same: whether two are the same; each is compared with the first of its kind.
    """
    firsts: list[str] = []
    known: dict[str | None, int] = {None: -1}
    for answer in answers:
        if answer is None or answer in known:
            continue
        found = (i for i, first in enumerate(firsts) if same(first, answer))
        known[answer] = next(found, len(firsts))
        if known[answer] == len(firsts):
            firsts.append(answer)
    return np.array([known[answer] for answer in answers], np.int64)


def bootstrap(
    values: np.ndarray,
    *,
    statistic: Callable[[np.ndarray], np.ndarray] = mean,
    draws: int = 2000,
    seed: int = 0,
    level: float = 0.95,
) -> tuple[np.ndarray, np.ndarray]:
    """Where a statistic lies if other problems of the same kind are asked.

    Problems are drawn with replacement, as many as there are; the interval is between
    two percentiles of what the statistic then is. Everything in front of the last axis
    sees the same problems drawn.

    Args:
        values: `[..., P]`, one per problem; NaN where there is none.
        statistic: of the last axis, `[..., P] -> [...]`, which knows about NaN.
        draws: how often.
        seed: the same gives the same interval.
        level: share of what is drawn that lies inside.

    Returns:
        Lower and upper end, `[...]` each; NaN where fewer than two problems have a
        value, for one says nothing of others.
    """
    from scipy import stats

    values = np.asarray(values, np.float64)
    known = np.sum(~np.isnan(values), -1)
    if values.shape[-1] < 2:
        return np.full(known.shape, np.nan), np.full(known.shape, np.nan)
    with warnings.catch_warnings(category=stats.DegenerateDataWarning, action="ignore"):
        drawn = stats.bootstrap(
            (values,),
            lambda sample, axis: statistic(sample),
            n_resamples=draws,
            batch=max(1, ENTRIES // max(values.size, 1)),
            vectorized=True,
            axis=-1,
            method="percentile",
            rng=np.random.default_rng(seed),
        ).bootstrap_distribution
    low, high = (quantile(drawn, share) for share in ((1 - level) / 2, (1 + level) / 2))
    return np.where(known > 1, low, np.nan), np.where(known > 1, high, np.nan)


def quantile(values: np.ndarray, share: float) -> np.ndarray:
    """Quantile on the last axis of what is not NaN, NaN where all is.

        x_(i) + (t - i) (x_(i+1) - x_(i)),   t = share (n - 1), i = floor(t)

    Args:
        values: `[..., n]`, may be empty.
        share: in [0, 1].
    """
    values = np.asarray(values, np.float64)
    none = np.isnan(values).all(-1)
    more = np.where(none, 0.0, np.nan)[..., None]  # no row is empty
    found = np.nanquantile(np.concatenate([values, more], -1), share, -1)
    return np.where(none, np.nan, found)
