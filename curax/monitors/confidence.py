"""How sure a policy is, token by token and along a completion.

    logits -> confidence of tokens -> means over windows -> scores -> votes

Windows end at the token they are called by, and are `window` tokens wide. A completion
shorter than that has no window: it is scored by its mean.

A log to watch and a weight of votes, never a reward: a policy that is paid for being
sure gives up its entropy.
"""

from typing import NamedTuple

import chex
import jax
import jax.numpy as jnp
import numpy as np

from curax.arrays import checks, masked


class Scores(NamedTuple):
    """Of whole completions, `[...]` float32, nats."""

    mean: jax.Array  # of all tokens
    lowest: jax.Array  # of the window that is least sure
    bottom: jax.Array  # of the tenth of all windows that is least sure, at least one
    tail: jax.Array  # of the last tokens


def of_tokens(logits: jax.Array, *, k: int = 20) -> jax.Array:
    """How peaked the distribution of each next token is.

        C_t = -mean over the k likeliest v of log pi_t(v)

    Higher is surer: log k where k tokens share all mass evenly is the least there is.
    It is taken over exactly k tokens, the one drawn among them or not; the offline
    code of the paper adds that one where it is missing, and so may mean k + 1.

    Args:
        logits: `[..., V]` float, divided by the temperature if there is one, and before
            top-k and top-p cut them.
        k: likeliest tokens, at least 1; all V where there are fewer. Static.

    Returns:
        `[...]` float32, nats, at least log k.

    Raises:
        AssertionError: while tracing, if the dtype is not float.

    References:
        Fu et al. 2025, "Deep Think with Confidence" (DeepConf), arXiv:2508.15260.
    """
    chex.assert_type(logits, float)
    logits = jnp.asarray(logits, jnp.float32)
    top, _ = jax.lax.top_k(logits, min(k, logits.shape[-1]))
    return jax.nn.logsumexp(logits, -1) - jnp.mean(top, -1)


def windows(
    confidence: jax.Array, mask: jax.Array, *, window: int
) -> tuple[jax.Array, jax.Array]:
    """Mean confidence of the last `window` tokens, at each token.

    Args:
        confidence: `[..., T]` float, nats, of tokens.
        mask: `[..., T]` bool, True from the first token to the last.
        window: tokens of a window, at least 1; static.

    Returns:
        `[..., T]` float32, nats, 0 where there is none; `[..., T]` bool, where a window
        is full.

    Raises:
        AssertionError: while tracing, if shapes differ or dtypes are not (float, bool).

    References:
        As `of_tokens`.
    """
    confidence, mask = checks.arrays(confidence=(confidence, float), mask=(mask, bool))
    # Sums of deviations stay small, and so does what their difference loses.
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
    """What the confidence of its tokens comes to over a completion.

    Args:
        confidence: `[..., T]` float, nats, of tokens.
        mask: `[..., T]` bool, True from the first token to the last.
        window: tokens of a window, at least 1; static.
        tail: last tokens that are scored by themselves, at least 1; static.

    Returns:
        `[...]` each. Of a completion shorter than a window, the lowest and the bottom
        are the mean. All are 0 for one without tokens.

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
    """What the surest `keep` of some completions do not fall below.

        percentile(lowest, 100 (1 - keep))

    The released code stops below the 10th percentile of 16 completions, `keep` 0.9; its
    aggressive setting is 0.1. It is one of a prompt, and not of a data set.

    Args:
        lowest: `[W]` scores of completions of one prompt, drawn to their ends.
        keep: share of them that would not have been stopped, in (0, 1].

    Returns:
        In the units of the scores.

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
    """The answers with the most weight among the completions that are surest.

        argmax_a sum of weight_i over kept i with answer_i = a

    Args:
        answer: `[n]` integer, equal where answers are the same, negative where there is
            none: such completions do not vote and are not counted.
        weight: `[n]` float, a score of each completion.
        keep: share of the completions that vote, the surest; as `threshold`.

    Returns:
        Answers, rising: one, several where they are equal, none if nobody votes.

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
