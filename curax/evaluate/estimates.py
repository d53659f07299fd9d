"""Estimators of accuracy from n completions per problem, with bootstrap intervals.

Of each problem n completions are graded and c of them are right. Estimators are
unbiased for each problem; intervals are over problems.
"""

import math
from collections import Counter
from collections.abc import Callable, Sequence

import numpy as np

from curax.monitors import confidence
from curax.runs import reading
from curax.runs.reading import finite_mean

ENTRIES = 2**22  # entries of one array of resampled values


def majority(answer: np.ndarray, outcome: np.ndarray, k: int) -> float:
    """Expected outcome of the majority answer among k completions, maj@k.

    The mean over all k-subsets of the n graded completions, and over ties for the most
    frequent answer. It is exact: given their sum k, votes for different answers are
    independent binomials of rate k / n. At k <= 2 it is the mean outcome, if every
    completion has an answer.

    Args:
        answer: `[n]` integer, equal for equal answers; negative: no answer and no
            vote. k completions without an answer give 0.
        outcome: `[n]` float, NaN where missing; such completions are left out. The
            outcome of an answer is the mean over its completions.
        k: completions that vote, at least 1.

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
        if value and count not in wins:  # answers with equal counts win equally often
            others = [likely[votes[other]] for other in votes if other != label]
            wins[count] = sum(
                likely[count][top] * _win_share(others, likely[silent], top, k - top)
                for top in range(1, min(count, k) + 1)
            )
        expected += value and value * wins[count]
    return expected / float(chances(n)[k])


def weighted_majority(
    answer: np.ndarray, outcome: np.ndarray, weight: np.ndarray, *, keep: float = 1.0
) -> float:
    """Outcome of the answer with the largest total weight among n completions.

    With equal weights and `keep` 1 it is `majority` at k = n.

    Args:
        answer: `[n]`, as `majority`.
        outcome: `[n]`, as `majority`.
        weight: `[n]` float, weight of each vote, such as a confidence.
        keep: share of the completions with an answer that vote, those of most weight.

    Returns:
        In [0, 1], the mean over ties, 0 without any vote; NaN where an outcome is
        missing.

    References:
        As `confidence.vote`.
    """
    if not len(answer) or np.isnan(outcome).any():
        return math.nan
    best = confidence.vote(answer, weight, keep=keep)
    outcomes = [float(outcome[answer == label].mean()) for label in best]
    return sum(outcomes) / max(len(outcomes), 1)


def _win_share(
    others: Sequence[np.ndarray], silent: np.ndarray, top: int, rest: int
) -> float:
    """Expected share in the majority of an answer with `top` votes; ties share equally.

        E[1 / (1 + ties)  if no other answer has more votes, else 0]

    Args:
        others: probabilities of 0, 1, ... votes for each other answer.
        silent: the same for completions without an answer, which cannot win.
        top: votes of the answer.
        rest: votes of all others, those without an answer included.
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


def answer_labels(
    answers: Sequence[str | None], same: Callable[[str, str], bool | None]
) -> np.ndarray:
    """`[n]` integer labels, equal for equal answers; -1 where there is no answer.

    Args:
        answers: answers of n completions of one problem.
        same: whether two answers are equal; each is compared with the first of every
            label.
    """
    firsts: list[str] = []
    known: dict[str | None, int] = {None: -1}
    for answer in answers:
        if answer is None or answer in known:
            continue
        labels = (i for i, first in enumerate(firsts) if same(first, answer))
        known[answer] = next(labels, len(firsts))
        if known[answer] == len(firsts):
            firsts.append(answer)
    return np.array([known[answer] for answer in answers], np.int64)


def bootstrap(
    values: np.ndarray,
    *,
    statistic: Callable[[np.ndarray], np.ndarray] = finite_mean,
    draws: int = 2000,
    seed: int = 0,
    level: float = 0.95,
) -> tuple[np.ndarray, np.ndarray]:
    """Percentile bootstrap interval of a statistic over problems.

    Problems are resampled with replacement, P of P; all leading axes share the
    resampled problems.

    Args:
        values: `[..., P]` float, one per problem; NaN where missing.
        statistic: `[..., P] -> [...]` over the last axis; must handle NaN.
        draws: number of resamples.
        seed: seed of the resampling.
        level: coverage of the interval.

    Returns:
        Lower and upper end, `[...]` each; NaN where fewer than two problems have a
        value.
    """
    values = np.asarray(values, np.float64)
    known = np.sum(~np.isnan(values), -1)
    if values.shape[-1] < 2:
        return np.full(known.shape, np.nan), np.full(known.shape, np.nan)
    batch = max(1, ENTRIES // max(values.size, 1))
    made = reading.bootstrap([values], statistic, draws=draws, seed=seed, batch=batch)
    drawn = made.bootstrap_distribution
    low, high = (quantile(drawn, share) for share in ((1 - level) / 2, (1 + level) / 2))
    return np.where(known > 1, low, np.nan), np.where(known > 1, high, np.nan)


def quantile(values: np.ndarray, share: float) -> np.ndarray:
    """Quantile over the last axis without NaN; NaN where all values are NaN.

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
