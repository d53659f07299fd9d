"""Confidence of a policy per token and per completion (DeepConf).

    logits -> confidence of tokens -> means over windows -> scores -> votes

A window is the last `window` tokens up to a token. A completion shorter than a window
is scored by its mean.

Confidence is a metric and a weight of votes, never a reward: rewarding it collapses the
entropy of the policy.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from curax.arrays import checks, masked
from curax.types import BoolT, Float, FloatT, FloatV


class Scores(NamedTuple):
    """Confidence scores of completions, `[...]` float32, nats."""

    mean: jax.Array  # mean over all tokens
    lowest: jax.Array  # lowest mean of a window
    bottom: jax.Array  # mean of the lowest tenth of window means, at least one
    tail: jax.Array  # mean over the last tokens


@checks.contract()
def of_tokens(logits: FloatV, *, k: int = 20) -> Float:
    """Confidence of each token: minus the mean log-prob of the k likeliest tokens.

        C_t = -1/k sum_{v in top k} log pi_t(v)

    Higher is more peaked; the minimum is log k, where k tokens share all mass evenly.
    The mean is over exactly k tokens, whether or not the sampled one is among them; the
    offline code of the paper adds the sampled one and so may average k + 1.

    Args:
        logits: `[..., V]` float, divided by the temperature, before top-k and top-p.
        k: number of likeliest tokens, at least 1, at most V. Static.

    Returns:
        `[...]` float32, nats, at least log k.

    Raises:
        AssertionError: while tracing, if the dtype is not float.

    References:
        Fu et al. 2025, "Deep Think with Confidence" (DeepConf), arXiv:2508.15260.
    """
    logits = jnp.asarray(logits, jnp.float32)
    top, _ = jax.lax.top_k(logits, min(k, logits.shape[-1]))
    return jax.nn.logsumexp(logits, -1) - jnp.mean(top, -1)


@checks.contract()
def windows(confidence: FloatT, mask: BoolT, *, window: int) -> tuple[FloatT, BoolT]:
    """Mean confidence over the window that ends at each token.

    Args:
        confidence: `[..., T]` float, nats, of tokens.
        mask: `[..., T]` bool, True from the first token to the last.
        window: tokens of a window, at least 1; static.

    Returns:
        `[..., T]` float32, nats, 0 where no window is full; `[..., T]` bool, True
        where the window is full.

    Raises:
        AssertionError: while tracing, if shapes differ or dtypes are not (float, bool).

    References:
        As `of_tokens`.
    """
    # Differences of cumulative sums round less where the sums are of deviations.
    centre = masked.mean(confidence, mask, keepdims=True)
    above = jnp.where(mask, jnp.asarray(confidence, jnp.float32) - centre, 0.0)
    sums = jnp.cumsum(above, -1)
    behind = [(0, 0)] * (mask.ndim - 1) + [(window, 0)]
    before = jnp.pad(sums, behind)[..., : mask.shape[-1]]
    full = mask & (jnp.cumsum(mask, -1, dtype=jnp.int32) >= window)
    return jnp.where(full, centre + (sums - before) / window, 0.0), full


def scores(
    confidence: jax.Array, mask: jax.Array, *, window: int = 2048, tail: int = 2048
) -> Scores:
    """Confidence scores of each completion: mean, lowest window, bottom tenth, tail.

    Args:
        confidence: `[..., T]` float, nats, of tokens.
        mask: `[..., T]` bool, True from the first token to the last.
        window: tokens of a window, at least 1; static.
        tail: last tokens in the tail score, at least 1; static.

    Returns:
        `[...]` each. Lowest and bottom are the mean where a completion is shorter than
        a window. All are 0 without tokens.

    Raises:
        AssertionError: as `windows`.

    References:
        As `of_tokens`. The defaults are those of the released code.
    """
    means, full = windows(confidence, mask, window=window)
    mean = masked.mean(confidence, mask)
    some, count = jnp.any(full, -1), jnp.sum(full, -1, dtype=jnp.int32)
    ordered = jnp.sort(jnp.where(full, means, jnp.inf), -1)
    place = jnp.cumsum(jnp.ones_like(mask), -1, dtype=jnp.int32)
    lowest = place <= jnp.maximum(count // 10, 1)[..., None]
    left = jnp.cumsum(mask[..., ::-1], -1, dtype=jnp.int32)[..., ::-1]
    return Scores(
        mean=mean,
        lowest=jnp.where(some, ordered[..., 0], mean),
        bottom=jnp.where(some, masked.mean(ordered, lowest & some[..., None]), mean),
        tail=masked.mean(confidence, mask & (left <= tail)),
    )


# ----- votes


def threshold(lowest: np.ndarray, *, keep: float) -> float:
    """Stopping threshold of a prompt: a percentile of scores of its completions.

        percentile(lowest, 100 (1 - keep))

    The released code stops below the 10th percentile of 16 completions, `keep` 0.9; its
    aggressive setting is `keep` 0.1. The threshold is per prompt, not per data set.

    Args:
        lowest: `[W]` scores of complete completions of one prompt.
        keep: share of them that would not have been stopped, in (0, 1].

    Returns:
        Threshold in the units of the scores.

    Raises:
        ValueError: if `keep` is out of its range, or there is no completion.

    References:
        As `of_tokens`: its online algorithm.
    """
    lowest = np.asarray(lowest, np.float64)
    if not 0 < keep <= 1:
        raise ValueError(f"keep={keep} must be in (0, 1]; 0.1 keeps the surest tenth.")
    if not lowest.size:
        raise ValueError("lowest is empty; draw completions of the prompt to the end.")
    return float(np.quantile(lowest, 1 - keep))


def vote(answer: np.ndarray, weight: np.ndarray, *, keep: float = 1.0) -> np.ndarray:
    """The answers with the largest total weight among the completions that vote.

        argmax_a sum of weight_i over voting i with answer_i = a

    Args:
        answer: `[n]` integer, equal for equal answers; negative: no answer, no vote.
        weight: `[n]` float, weight of each vote, such as a confidence score.
        keep: share of the completions with an answer that vote, those of most weight.

    Returns:
        Sorted answers: one, several in a tie, none without votes.

    Raises:
        ValueError: if `keep` is out of its range.

    References:
        As `of_tokens`: its offline algorithm.
    """
    answer, weight = np.asarray(answer), np.asarray(weight, np.float64)
    answer, weight = answer[answer >= 0], weight[answer >= 0]
    if not answer.size:
        return answer
    votes = weight >= threshold(weight, keep=keep)
    labels, of = np.unique(answer[votes], return_inverse=True)
    total = np.bincount(of, weight[votes], len(labels))
    return labels[total == total.max()]
