"""States of a prompt's group, (drawn, right, place of the first right).

A state is n completions drawn, k of them right, the first right one in place j. Their
probabilities follow from dynamic programming over the rounds of a stopping rule.
"""

from collections.abc import Callable
from typing import Any

import numpy as np


def states(
    p: np.ndarray,
    *,
    most: int,
    size: int = 1,
    met: Callable[[np.ndarray, np.ndarray], Any] | None = None,
    first: bool = True,
) -> tuple[np.ndarray, np.ndarray]:
    """Final states of a prompt's group, and the probability of each.

    Args:
        p: `[R]` pass rates.
        most: completions after which it stops in any case.
        size: completions between two tests of the rule.
        met: rule of counts, `(outcome [S, most], exists [S, most]) -> [S]`; None draws
            `most`.
        first: distinguish states by the place of the first right one; if not, it is 1.

    Returns:
        `[S, 3]` int: n drawn, k right, j the place of the first right one from 1 on,
        0 without one. `[R, S]` probabilities; they sum to 1 over S.
    """
    ends = [*range(size, most, size), most] if met else [most]
    over = {most: np.ones(most + 1, bool)}
    if met and len(ends) > 1:
        at = np.array([(n, k, min(k, 1)) for n in ends[:-1] for k in range(n + 1)])
        done = np.asarray(met(*shown(at, most)))
        over |= {n: done[at[:, 0] == n] for n in ends[:-1]}
    alive = np.zeros((len(p), most + 1, (most if first else 1) + 1))  # by k and j
    alive[:, 0, 0] = 1
    found, chances = [], []
    for start, n in zip([0, *ends], ends, strict=False):
        alive = _drawn(alive, p, start, n - start, first)
        k, j = np.nonzero(alive.max(0) > 0)
        done = over[n][k]
        k, j = k[done], j[done]
        found.append(np.stack([np.full_like(k, n), k, j], -1))
        chances.append(alive[:, k, j])
        alive[:, k, j] = 0
    return np.concatenate(found), np.concatenate(chances, 1)


def _drawn(
    alive: np.ndarray, p: np.ndarray, start: int, count: int, first: bool
) -> np.ndarray:
    """Probabilities `[R, k, j]` after `count` more draws than the first `start`."""
    new = np.zeros_like(alive)
    more = binomial(count, p)
    for k, chance in enumerate(more):
        new[:, k:, 1:] += alive[:, : alive.shape[1] - k, 1:] * chance[:, None, None]
    none_yet = alive[:, 0, 0]
    new[:, 0, 0] = none_yet * more[0]
    if not first:
        new[:, 1 : count + 1, 1] += none_yet[:, None] * more[1:].T
        return new
    for j in range(1, count + 1):
        here = none_yet * (1 - p) ** (j - 1) * p
        rest = binomial(count - j, p)
        new[:, 1 : len(rest) + 1, start + j] += here[:, None] * rest.T
    return new


def shown(states: np.ndarray, width: int) -> tuple[np.ndarray, np.ndarray]:
    """Example of each state: outcomes `[S, width]` float32, existence `[S, width]`.

    From the first right one on, right ones stand before wrong ones.
    """
    n, k, j = states[:, :, None].transpose(1, 0, 2)
    place = np.arange(1, width + 1)
    right = (place >= j) & (place < j + k)
    return right.astype(np.float32), place <= n


def binomial(n: int, p: np.ndarray) -> np.ndarray:
    """`[n + 1, R]` probabilities P(k; n, p) of k = 0 .. n right completions among n."""
    from scipy.stats import binom

    return binom.pmf(np.arange(n + 1)[:, None], n, p)
