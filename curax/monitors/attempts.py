"""Chances of at least one right completion among several."""

import numpy as np


def pass_at_k(right: np.ndarray, graded: np.ndarray, k: int) -> np.ndarray:
    """Unbiased estimate of pass@k, the probability that one of k completions is right.

        1 - C(n - c, k) / C(n, k) = 1 - prod_{j<k} (n - c - j) / (n - j)

    the share of the k-subsets of n graded completions with a right one. At k = 1 it is
    c / n.

    Args:
        right: `[...]` c, right completions, in [0, n].
        graded: `[...]` n, completions with an outcome.
        k: completions drawn, at least 1.

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
