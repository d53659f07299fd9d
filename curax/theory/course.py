"""Course of a run: pass rates of its prompts, followed until a budget is spent.

The state is the pass rate p of each of K' equally likely prompts, which stand for K. A
step of B prompts has the direction g of `progress`, and moves every prompt by

    eta grad p . E g ,   grad p . E g = h (a . E[a w h]) + (1 - |a|^2) w h^2 / K ,

to first order, and a held-out prompt, which no step trains on, by the first term
alone. Here that is taken in log-odds, by eta grad p . E g / (p (1 - p)), so that p
stays in (0, 1), and by MOST at most in a stretch of equal cost. The length of a step
knows no learning rate. It is one of

    best     eta = s grad J . E g / E|g|^2, the best of progress's bound with s = 1 / L
    length   eta = s / sqrt(E|g|^2), steps of one length, as those of Adam are,

both with the noise of a step in E|g|^2, and with one time scale s, which is free. What
a step costs follows the pass rates too: its draws and rows are those that the recipe
makes there. Moments are tabulated by pass rate and interpolated.

Scores are needed at pass rates at which no gradient was measured. Of a softmax the
gradient of the log-odds is bounded, and in sparse and in dense regimes of the map its
square was measured to change by two or three times over all pass rates, where kappa
goes to 0 with p (in a bimodal one by seven). So
from where they are known scores are carried by

    |grad p|^2 = sigma^2 p^2 (1 - p)^2 ,   V_right and V_wrong as they are,

sigma^2 and V linear in the log-odds between two such pass rates, flat outside. A
prompt at p = 0 or 1 has no gradient and stays: |grad p| goes to 0 with p, so no cosine
lifts it. No population has one. A prompt that was never right begins where its
posterior is, and rises in log-odds by eta sigma a . E[a w h], in proportion to what it
shares with the others; one not trained on by nothing else. sigma and a are then those
of the lowest pass rate at which they were measured.

Assumptions: those of `progress`, at every step; what a recipe's credit knows of its
batch or of a memory is as at the first step; no group is drawn again; sigma, V and a
belong to a pass rate and not to the run that has got there; no noise of a step takes
back what another made.
"""

from typing import NamedTuple

import numpy as np

from curax.theory import progress
from curax.theory.predict import Prediction
from curax.theory.progress import Scores, Update

POINTS = 120  # stretches of equal cost in which pass rates are held
BINS = 32  # of pass rates, K'
MOST = 1.0  # nats by which log-odds may move in a stretch
STEPS = ("best", "length")


def binned(rates: np.ndarray) -> np.ndarray:
    """`[BINS]` equally likely pass rates that stand for those of all prompts `[K]`."""
    share = (np.arange(BINS) + 0.5) / BINS
    return np.quantile(rates, share, method="inverted_cdf")


class Gradients(NamedTuple):
    """Scores and vectors a as known at some pass rates, carried to others."""

    p: np.ndarray  # [K], rising
    slope: np.ndarray  # [K] sigma^2, squared norm of the gradient of log-odds
    right: np.ndarray  # [K] V_right
    wrong: np.ndarray  # [K] V_wrong
    axes: np.ndarray  # [A, K] a

    def at(self, p: np.ndarray) -> tuple[Scores, np.ndarray]:
        """Squared norms `[..., R]`, and a `[A, ..., R]`, at pass rates `[..., R]`."""
        x, own = log_odds(p), log_odds(self.p)
        slope, right, wrong = (
            np.interp(x, own, each) for each in (self.slope, self.right, self.wrong)
        )
        axes = np.stack([np.interp(x, own, axis) for axis in self.axes])
        return Scores(slope * (p * (1 - p)) ** 2, right, wrong), axes

    def believed(self, by_shared: float, by_slope: float) -> "Gradients":
        """The same with rho and sigma^2 multiplied, rho to 1 at most."""
        axes = progress.at_most_one(self.axes * by_shared**0.5)
        return self._replace(axes=axes, slope=self.slope * by_slope)


def of_scores(p: np.ndarray, scores: Scores, axes: np.ndarray) -> Gradients:
    """What is known at pass rates `[K]` in (0, 1), as `Gradients`."""
    slope = scores.gradient / (p * (1 - p)) ** 2
    return Gradients(p, slope, scores.right, scores.wrong, axes)


def of_beliefs(explained: float, varied: float, shared: float) -> Gradients:
    """kappa and rho of one number each: kappa is that of prompts at p = 1/2."""
    half = np.array([0.5])
    scores = progress.believed(half, explained, varied=varied)
    return of_scores(half, scores, np.full((1, 1), shared**0.5))


def of_rates(by_rate: progress.ByRate, varied: float) -> Gradients:
    """kappa, G^2 and rho as measured by pass rate."""
    p = by_rate.p
    scores = progress.believed(p, by_rate.explained, by_rate.square, varied)
    return of_scores(p, scores, by_rate.axes)


class Recipe(NamedTuple):
    """What a course needs of a recipe, by pass rate."""

    p: np.ndarray  # [R], rising
    update: Update  # [R]
    cost: np.ndarray  # [R] of a prompt, in the unit of the budget
    prompts: float  # B of a step


def of_prediction(seen: Prediction, cost: np.ndarray, prompts: float) -> Recipe:
    """A recipe as predicted, which fills no batch by drawing again.

    Args:
        seen: its prediction at `[R]` pass rates, with a weight other than 0.
        cost: `[R]` of a prompt.
        prompts: B.
    """
    return Recipe(seen.p, progress.update_of(seen), cost, prompts)


class Course(NamedTuple):
    """Pass rates of N lanes along a run."""

    spent: np.ndarray  # [S + 1]
    mean: np.ndarray  # [S + 1, N] mean pass rate of prompts not trained on
    steps: np.ndarray  # [S + 1, N] made until then
    rates: np.ndarray  # [N, K'] pass rates of prompts trained on, at the end


def course(
    recipe: Recipe,
    rates: np.ndarray,
    gradients: Gradients,
    scale: np.ndarray,
    *,
    budget: float,
    total: float = np.inf,
    step: str = "best",
    points: int = POINTS,
) -> Course:
    """Pass rates along a run, for several time scales.

    Args:
        recipe: its moments and its cost.
        rates: `[K']` pass rates in [0, 1] at the beginning, all equally likely.
        gradients: scores and cosines by pass rate.
        scale: `[N]` s, at least 0.
        budget: what a run may cost.
        total: K; inf: so many that none counts by itself.
        step: one of STEPS.
        points: stretches of equal cost.
    """
    assert step in STEPS, step
    scale = np.asarray(scale, float)
    p = np.tile(np.asarray(rates, float), (len(scale), 1))
    unseen = p if np.isfinite(total) else None
    own, found, done = log_odds(recipe.p), [p.mean(-1)], [np.zeros(len(scale))]
    for _ in range(points):
        x = log_odds(p)
        *moments, cost = (np.interp(x, own, y) for y in (*recipe.update, recipe.cost))
        update = Update(*moments)
        scores, axes = gradients.at(p)
        h = np.sqrt(scores.gradient)
        pull = progress.pull(_mean, update.weight, h, axes, total)
        alone = _mean(update.square(scores))
        square = alone / recipe.prompts + (1 - 1 / recipe.prompts) * pull.pairs
        toward = _mean(pull.moves)
        count = budget / points / (recipe.prompts * _mean(cost))
        far = np.maximum(toward, 0) if step == "best" else np.sqrt(square)
        eta = scale * far / np.where(square > 0, square, np.inf)
        far = (count * eta)[:, None]
        trained = _moved(p, far * pull.moves)
        if unseen is not None:
            scores, axes = gradients.at(unseen)
            shared = np.sum(axes * pull.common[..., None], 0)
            unseen = _moved(unseen, far * np.sqrt(scores.gradient) * shared)
        p = trained
        found.append((p if unseen is None else unseen).mean(-1))
        done.append(done[-1] + count)
    spent = np.linspace(0, budget, points + 1)
    return Course(spent, np.stack(found), np.stack(done), p)


def reaching(ends: np.ndarray, level: float) -> float:
    """Place, with a fraction, of the first time scale at which a run ends at a level.

    Args:
        ends: `[N]` pass rates at the ends, by time scale.
        level: a pass rate; where none gets there, the place is that of the highest.
    """
    over = np.flatnonzero(ends >= level)
    if not len(over) or over[0] == 0:
        return float(over[0] if len(over) else np.argmax(ends))
    i = over[0]
    return float(i - (ends[i] - level) / (ends[i] - ends[i - 1]))


def _moved(p: np.ndarray, by: np.ndarray) -> np.ndarray:
    """Pass rates moved by so much, to first order in log-odds; 0 and 1 stay."""
    live = p * (1 - p)
    step = np.clip(by / np.where(live > 0, live, 1), -MOST, MOST)
    return np.where(live > 0, 1 / (1 + np.exp(-log_odds(p) - step)), p)


def _mean(values: np.ndarray) -> np.ndarray:
    return values.mean(-1)


def log_odds(p: np.ndarray) -> np.ndarray:
    """log p - log(1 - p), within +-30 nats."""
    p = np.clip(p, 1e-13, 1 - 1e-13)
    return np.log(p) - np.log1p(-p)
