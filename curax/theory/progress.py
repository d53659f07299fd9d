"""Predicted progress of a step of training: its first-order gain at the best step size.

Let J be the pass rate, averaged over the K prompts of a file, and g the direction of a
step, the mean of the updates u of its B prompts. If J curves by at most L,

    E J(theta + eta g) >= J + eta grad J . E g - eta^2 L E|g|^2 / 2 ,

and the right side is largest at eta = grad J . E g / (L E|g|^2), where the gain is
(grad J . E g)^2 / (2 L E|g|^2). The exact gradient, g = grad J, gains |grad J|^2 / 2 L.
Progress is the ratio of both, from 0 to 1 by Cauchy and Schwarz, and L cancels:

    progress = (grad J . E g)^2 / (|grad J|^2 E|g|^2) .

Of a prompt of pass rate p, by the law of the effective weight (`predict.Prediction`),

    E u = w grad p,   E|u|^2 = w^2 |grad p|^2 (1 + spread) + V E[sum of c^2] ,

with V the variance of a completion's score within its class, that of each completion
its own: the sum is V_right E[sum of c^2 of right ones] + V_wrong E[that of wrong ones].
Three numbers say what no label tells. A share kappa of the squared norm G^2 of a score
lies along the outcome:

    |grad p|^2 = kappa G^2 p (1 - p),   p V_right + (1 - p) V_wrong = (1 - kappa) G^2 ,

which is what the law of total variance leaves, with kappa = 1 at most. Right ones vary
by nu = V_right / V_wrong: 1 if as much as wrong ones, 0 if there is but one way to be
right, and then completions that are right add no noise. And gradients of two prompts
have the cosine rho: grad p . grad p' = rho |grad p| |grad p'|; where it was measured by
pass rate, rho = a . a' with an a of each. With h = |grad p|, a = (sqrt(rho)) where rho
is one number, and means over the prompts,

    grad J . E g = E[a h] . E[a w h] + E[(1 - |a|^2) w h^2] / K
    E|g|^2 = E|u|^2 / B
             + (1 - 1 / B) (|E[a w h]|^2 - E[|a|^2 w^2 h^2] / K) / (1 - 1 / K) ,

as the prompts of a step are distinct. What differs between prompts is in E|u|^2. For
large K progress is 1 / (1 + N / B), where N is the number of prompts of a step at which
half of what is possible is reached.

Assumptions: one update of plain gradient ascent at the best step size; updates of a
step's prompts are independent, given their pass rates, so that what a shared budget or
statistics of the batch tie together is left out, and prompts of refilled batches are
distinct; nu is the same for all prompts; and those of `predict`.

References:
    McCandlish et al. 2018, "An Empirical Model of Large-Batch Training",
    arXiv:1812.06162, for 1 / (1 + N / B).
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from curax.theory.predict import Prediction, filled_places


class Scores(NamedTuple):
    """Squared norms of scores by pass rate, `[R]`, in one unit."""

    gradient: np.ndarray  # |grad p|^2
    right: np.ndarray  # V_right, variance within right completions
    wrong: np.ndarray  # V_wrong


AXES = 2  # in which a is held that was measured; more of them are mostly noise


class ByRate(NamedTuple):
    """kappa, G^2 and a as measured at K pass rates."""

    p: np.ndarray  # [K], rising
    explained: np.ndarray  # [K], kappa
    square: np.ndarray  # [K], G^2
    axes: np.ndarray  # [A, K], a

    def at(self, p: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """kappa `[R]`, G^2 `[R]`, a `[A, R]` at p: linear in log-odds, flat outside."""
        x, own = (np.log(q) - np.log1p(-q) for q in (p, self.p))
        axes = np.stack([np.interp(x, own, axis) for axis in self.axes])
        explained, square = self.explained, self.square
        return np.interp(x, own, explained), np.interp(x, own, square), axes


def axes_of(cosines: np.ndarray, prompts: np.ndarray) -> np.ndarray:
    """Vectors a `[AXES, K]`, one for each pass rate, with a . a' nearest to cosines.

    Nearest in squares, where two pass rates weigh as much as they have pairs of
    prompts.

    Args:
        cosines: `[K, K]` rho between pass rates, symmetric, noise included.
        prompts: `[K]` number of prompts behind each.
    """
    root = np.sqrt(prompts)
    values, vectors = np.linalg.eigh(cosines * np.outer(root, root))
    found = vectors[:, -AXES:] * np.sqrt(np.maximum(values[-AXES:], 0.0))
    return at_most_one(found.T / root)


def at_most_one(axes: np.ndarray) -> np.ndarray:
    """Vectors a `[A, R]` shortened to |a| = 1 where longer, for rho is a cosine."""
    return axes / np.maximum(np.linalg.norm(axes, axis=0), 1.0)


def believed(
    p: np.ndarray,
    explained: np.ndarray | float,
    square: np.ndarray | float = 1.0,
    varied: float = 1.0,
) -> Scores:
    """Squared norms of scores, of which a share kappa lies along the outcome.

    Args:
        p: `[R]` pass rates.
        explained: `[R]` or `[]`, kappa in [0, 1].
        square: `[R]` or `[]`, mean squared norm of the score of a completion.
        varied: nu, at least 0.
    """
    wrong = (1 - explained) * square / (1 - p + varied * p)
    return Scores(explained * square * p * (1 - p), varied * wrong, wrong)


class Update(NamedTuple):
    """Moments of the update u of a prompt, by pass rate `[..., R]`."""

    weight: np.ndarray  # w
    spread: np.ndarray  # variance of the weight, in the units of w^2
    credit: np.ndarray  # E[sum of c^2]
    of_right: np.ndarray  # share of it that right ones have

    def square(self, scores: Scores) -> np.ndarray:
        """`[..., R]` E|u|^2 at these squared norms."""
        rest = self.of_right * scores.right + (1 - self.of_right) * scores.wrong
        return scores.gradient * (self.weight**2 + self.spread) + rest * self.credit


def update_of(seen: Prediction) -> Update:
    """Moments of the update of a prompt, as predicted `[R]`."""
    square = seen.weight**2
    credit = seen.noise * square / seen.draws
    return Update(seen.weight, square * seen.spread, credit, seen.of_right)


class Pull(NamedTuple):
    """How the updates of a step move prompts, and how far they agree."""

    moves: np.ndarray  # [..., R] grad p . E u, of every prompt
    pairs: np.ndarray  # [...] E[u . u'] of two prompts of a step
    common: np.ndarray  # [A, ...] E[a w h], by which h a is multiplied elsewhere


def pull(
    mean: Callable[[np.ndarray], Any],
    weight: np.ndarray,
    h: np.ndarray,
    axes: np.ndarray,
    total: float,
) -> Pull:
    """Moves of prompts, by updates w grad p of the prompts of a step.

    The mean of the moves is grad J . E g, and that of w times the moves |E g|^2.

    Args:
        mean: over prompts, of values `[..., R]` by pass rate.
        weight: `[..., R]` w.
        h: `[..., R]` |grad p|.
        axes: `[A, ..., R]` vectors a.
        total: K.
    """
    cosine, along = np.sum(axes**2, 0), weight * h
    common = np.array([mean(x) for x in axes * along])  # [A, ...]
    alike = np.sum(common**2, 0)
    moves = h * np.sum(axes * common[..., None], 0)
    moves = moves + (1 - cosine) * along * h / total
    pairs = np.zeros_like(alike)
    if total > 1:
        pairs = (alike - mean(cosine * along**2) / total) / (1 - 1 / total)
    return Pull(moves, pairs, common)


class Progress(NamedTuple):
    """Progress of steps of a recipe, by the number of their prompts."""

    toward: float  # grad J . E g
    square: float  # E|g|^2
    limit: float  # progress without any noise, the squared cosine of E g and grad J
    noise: float  # N, prompts per step at which half of the limit is reached

    def of(self, prompts: float) -> float:
        """Progress of a step with this many prompts: limit / (1 + N / prompts)."""
        return self.limit / (1 + self.noise / prompts)


def progress(
    seen: Prediction,
    rates: np.ndarray,
    scores: Scores,
    *,
    axes: np.ndarray,
    prompts: int,
    attempts: int = 1,
    total: float = np.inf,
) -> Progress:
    """Progress of a recipe on prompts of these pass rates.

    Args:
        seen: its prediction at `[R]` pass rates, with a weight other than 0.
        rates: `[K']` pass rates of the prompts, all equally likely, between the first
            and the last of the prediction.
        scores: `[R]` squared norms.
        axes: `[A, R]` vectors a, rho = a . a' the cosine of the gradients of two
            prompts; one row of sqrt(rho) where it is the same for all.
        prompts: B of a step, at most `total`.
        attempts: batches drawn at most to fill one, by open groups alone.
        total: K; inf: so many that none counts by itself.
    """
    update, h = update_of(seen), np.sqrt(scores.gradient)
    mean = partial(seen.mean, rates)
    own = mean(update.square(scores))
    moves, pairs, _ = pull(mean, update.weight, h, axes, total)
    best = mean(pull(mean, np.ones_like(h), h, axes, total).moves)
    toward, still = mean(moves), mean(update.weight * moves)  # |E u|^2
    pairs = float(pairs)
    used, squared = float(prompts), float(prompts) ** 2
    if attempts > 1:  # each place is filled by a group that the gate left open
        _, chance = filled_places(seen.open, prompts, attempts)
        places = np.arange(prompts + 1)
        used, squared = float(chance @ places), float(chance @ places**2)
    part = used / (prompts * seen.open)
    square = used * own / seen.open + (squared - used) * pairs / seen.open**2
    square, toward = square / prompts**2, part * toward
    limit = toward**2 / (best * part**2 * still)
    made = toward**2 / (best * square)
    return Progress(toward, square, limit, prompts * (limit / made - 1))
