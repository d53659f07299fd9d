"""The frontier of reward over KL: the corners of measured policies."""

from typing import NamedTuple

import numpy as np


class Frontier(NamedTuple):
    """Corners of the upper hull of (kl, reward), both rising, `[F]` float64."""

    kl: np.ndarray  # nats
    reward: np.ndarray


def frontier(kl: np.ndarray, reward: np.ndarray) -> Frontier:
    """The upper left hull of measured policies: largest reward at each distance.

    Points between two corners are reached as well: a random mixture of the two policies
    has the mean of their rewards and, as the KL is convex, at most the mean of their
    distances. So runs are compared at equal reward or at equal distance, on their
    frontiers, and not at equal steps.

    Args:
        kl: `[K]` nats, distances of policies, as checkpoints of a run; NaN: not
            measured.
        reward: `[K]` their mean rewards; NaN: not measured.

    Returns:
        From the nearest policy to the best one.

    Raises:
        ValueError: if the shapes differ, or no policy was measured.

    References:
        Rewards compared at matched distances: "Fast-Slow Training", arXiv:2605.12484.
    """
    kl, reward = np.asarray(kl, np.float64), np.asarray(reward, np.float64)
    if kl.shape != reward.shape or kl.ndim != 1:
        raise ValueError(
            f"kl {kl.shape} and reward {reward.shape} must be of the same K policies."
        )
    known = np.isfinite(kl) & np.isfinite(reward)
    if not known.any():
        raise ValueError("no policy has both kl and reward; measure one at least.")
    points = sorted(zip(kl[known], -reward[known], strict=True))
    corners: list[tuple[float, float]] = []
    for x, y in ((x, -y) for x, y in points):
        if corners and y <= corners[-1][1]:
            continue
        while len(corners) > 1 and _is_below(corners[-2], corners[-1], (x, y)):
            corners.pop()
        corners.append((x, y))
    return Frontier(*np.array(corners, np.float64).T)


def _is_below(
    left: tuple[float, float], middle: tuple[float, float], right: tuple[float, float]
) -> bool:
    """Whether `middle` lies on the line from `left` to `right` or below it."""
    rise, run = right[1] - left[1], right[0] - left[0]
    return (middle[1] - left[1]) * run <= rise * (middle[0] - left[0])
