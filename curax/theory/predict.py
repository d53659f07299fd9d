"""Effective weight w(p) of a recipe, computed from its own stage functions.

A completion is right or wrong, and coefficients depend on that alone. Then the expected
update of a prompt is w(p) grad p, and its objective is f with f' = w
(`learn.compute_credit` gives w from credit). The group of a prompt ends in a state: n
completions drawn, k of them right, the first right one in place j. The probability of
every state follows from dynamic programming over the rounds of the stopping rule, and
its credit from the stage functions. What a pilot or the memory may report of the prompt
is summed over in the same way.

Two things are averaged over random draws, because they are no function of one prompt's
outcomes: the rest of its batch, and a down-sampling that keeps a random number of right
completions. Then `Prediction.how` names it, and `Prediction.half` is the 95% interval.

Assumptions: outcomes are 0 or 1 and none is missing; completions end by themselves, and
are as short as can be where the reward is shaped; allocators see equal norms and equal
lengths; the memory has seen every prompt as often as the run visits it, at its present
pass rate.
"""

import dataclasses

import numpy as np

from curax.config import Config
from curax.theory import hint_levels, outcome_states
from curax.theory.cases import ATOMS, cases_of
from curax.theory.credits import MOMENTS, OPEN, Credits, reads_of
from curax.theory.moments import expected_moments
from curax.theory.visits import memory_draws, visits


@dataclasses.dataclass(frozen=True, kw_only=True)
class Prediction:
    """Predicted weight, credit, signal, draws, noise by pass rate; `[R]` to `spread`.

    The trace of the covariance of a prompt's update is

        |grad p|^2 w^2 spread + E[sum of squared coefficients] V ,

    where V is the trace of the score's covariance among right, or wrong, completions;
    where both differ, `of_right` says how much of the sum has which. Scores of long
    completions have many directions, of which grad p is one: V is then much the larger,
    and `noise` is what counts.
    """

    p: np.ndarray
    weight: np.ndarray  # w(p)
    half: np.ndarray  # half of its 95% interval, 0 where it is exact
    right: np.ndarray  # E[C+], credit of right completions over rows per prompt
    wrong: np.ndarray  # E[C-]
    signal: np.ndarray  # probability that any completion of the prompt has credit
    draws: np.ndarray  # expected completions, pilots included
    rate: np.ndarray  # E[share of right ones among those drawn, if any were]
    noise: np.ndarray  # draws times E[sum of squared coefficients] / w^2, pilots too
    of_right: np.ndarray  # share of the squared coefficients that right ones have
    spread: np.ndarray  # Var(C+ / p - C- / (1 - p)) / w^2
    most: np.ndarray  # [R, G + 1] probability of each number that it may draw
    attempts: float  # expected batches of prompts drawn per step, with refilling
    open: float  # share of groups that the gate leaves open; 1 without refilling
    placed: float  # share of the open groups in them that is used
    lengths: bool  # credit depends on how completions end, or on how long they are
    known: float  # draws behind the known pass rate; 0 where nothing reads it
    how: tuple[str, ...]  # what was averaged over random draws; empty: exact
    hints: hint_levels.Levels | None = None  # all other fields are without hints

    def mean(self, rates: np.ndarray, values: np.ndarray) -> float:
        """Mean over prompts of these pass rates, from values `[R]` at those of `p`."""
        return float(np.interp(rates, self.p, values).mean())


def predict(
    config: Config,
    p: np.ndarray,
    population: np.ndarray,
    *,
    remembered: float | None = None,
    lift: float | None = None,
    prompts: int | None = None,
    often: int | None = None,
) -> Prediction:
    """Prediction of a recipe for prompts of pass rate p among a population.

    Refilling of closed groups is not in w: it multiplies w of all prompts by one
    factor, `attempts * placed`.

    Args:
        config: the recipe.
        p: `[R]` pass rates in (0, 1).
        population: `[K]` pass rates, all equally likely; allocators and statistics over
            the batch depend on them, and so does the number of closed groups.
        remembered: draws that the memory holds of a prompt; None: as many as it can.
        lift: nats that each level of a hint adds to the log-odds of p; None: hints are
            not predicted.
        prompts: number of prompts of the task, as of `visits`.
        often: visits of a run to each prompt; None: by `visits`.
    """
    p = np.asarray(p, np.float64)
    population = np.asarray(population, np.float64)
    sizes, rates, under, every = config.sampling, p, None, population
    if len(every) > ATOMS:
        share = (np.arange(ATOMS) + 0.5) / ATOMS
        every = np.quantile(population, share, method="inverted_cdf")
    if sizes.attempts > 1:
        rates = np.concatenate([p, every])
    if config.hint and lift is not None:
        under = hint_levels.lifted(np.concatenate([p, every]), lift, config.hint.levels)
    credits = Credits(config)
    reads = reads_of(config, credits)
    often = visits(config, prompts) if often is None else often
    held = memory_draws(config, remembered, often)
    cases = cases_of(config, reads, rates, population, held)
    found = expected_moments(config, credits, reads, cases, rates, under, often)
    each = found[:, 0]  # [S, R, moments]
    attempts, placed, open_ = 1.0, 1.0, 1.0
    if sizes.attempts > 1:
        open_ = float(each[:, len(p) :, OPEN].mean())
        attempts, placed = refills(open_, sizes.prompts, sizes.attempts)
    each = each[:, : len(p)]

    weights = each[..., 0] / p - each[..., 1] / (1 - p)
    weight, moments = weights.mean(0), each.mean(0).T
    right, wrong, signal, drawn, some, share, square, sure, _, _, *second = moments
    draws = drawn + (config.pilot.draws if config.pilot else 0)
    terms = np.array([1 / p**2, -2 / (p * (1 - p)), 1 / (1 - p) ** 2])
    with np.errstate(divide="ignore", invalid="ignore"):
        return Prediction(
            p=p,
            weight=weight,
            half=_half_interval(weights, exact=not cases.how),
            right=right,
            wrong=wrong,
            signal=signal,
            draws=draws,
            rate=share / some,
            noise=draws * square / weight**2,
            of_right=np.where(square > 0, sure / square, 0.0),
            spread=np.maximum((terms * second).sum(0) / weight**2 - 1, 0),
            most=cases.most(sizes.group_size)[: len(p)],
            attempts=attempts,
            open=open_,
            placed=placed,
            lengths=reads.lengths,
            known=cases.known,
            how=cases.how,
            hints=None
            if under is None
            else _levels(config, under, found[:, 1:], exact=not cases.how),
        )


def with_hints(config: Config, seen: Prediction) -> Prediction:
    """The prediction with the weight of grad p, signal and draws under hints.

    Credit is that of groups without a hint. Noise, spread and the pass rate of what is
    drawn stay as they are without hints.
    """
    hints = seen.hints
    if hints is None or config.hint is None:
        return seen
    mine = slice(None if hint_levels.credited(config.hint) == 0 else 1)
    return dataclasses.replace(
        seen,
        weight=hints.weight[mine].sum(0),
        half=hints.half[mine].sum(0),
        right=hints.right,
        wrong=hints.wrong,
        signal=hints.signal.sum(0),
        draws=hints.draws.sum(0) + (config.pilot.draws if config.pilot else 0),
    )


def _levels(
    config: Config, under: np.ndarray, parts: np.ndarray, *, exact: bool
) -> hint_levels.Levels:
    """Predictions by hint level, from moments `[S, 2 (L + 1), R, moments]`.

    The first L + 1 are of groups that train; for the others see `_group_chances`.
    """
    assert config.hint
    p = under[:, : parts.shape[2]]
    trains, others = (
        dict(zip(MOMENTS, np.moveaxis(part, -1, 0), strict=True))
        for part in np.split(parts, 2, 1)
    )  # each [S, L + 1, R]
    weight, other = (
        part["right"] / p - part["wrong"] / (1 - p) for part in (trains, others)
    )
    if hint_levels.credited(config.hint) is None:
        weight[:, 1:], other[:, 1:] = np.nan, np.nan
    by_visit = config.hint.controller is not None
    drawn = trains if by_visit else others
    return hint_levels.Levels(
        p=p,
        drawn=drawn["all"].mean(0),
        trains=trains["all"].mean(0),
        weight=weight.mean(0),
        half=_half_interval(weight, exact=exact),
        right=trains["right"].mean(0)[0],
        wrong=trains["wrong"].mean(0)[0],
        signal=trains["signal"].mean(0),
        draws=drawn["draws"].mean(0),
        end=others["all"].mean(0) if by_visit else None,
        end_weight=other.mean(0) if by_visit else None,
    )


def _half_interval(weights: np.ndarray, *, exact: bool) -> np.ndarray:
    """Half of the 95% interval of a mean over batches `[S, ...]`; 0 if it is exact."""
    if exact:
        return np.zeros(weights.shape[1:])
    return 1.96 * weights.std(0, ddof=1) / np.sqrt(len(weights))


def refills(chance: float, prompts: int, most: int) -> tuple[float, float]:
    """Expected batches drawn to fill one, and the share of open groups that is used.

    Every batch has a binomial number of open groups; batches are drawn until their sum
    fills one, at most `most`.

    Args:
        chance: probability that the gate leaves a group open.
        prompts: B, places.
        most: batches drawn at most.

    Returns:
        Expected batches, and the share of all their open groups that finds a place.
    """
    attempts, filled = filled_places(chance, prompts, most)
    opened = prompts * chance * attempts  # Wald
    used = filled @ np.arange(prompts + 1)
    return attempts, float(used / opened) if opened else 1.0


def filled_places(chance: float, prompts: int, most: int) -> tuple[float, np.ndarray]:
    """Expected batches drawn to fill one, and `[B + 1]` probabilities of full places.

    Args:
        chance: probability that the gate leaves a group open.
        prompts: B, places.
        most: batches drawn at most.
    """
    new = outcome_states.binomial(prompts, np.array([chance]))[:, 0]
    filled, attempts = np.eye(prompts + 1)[0], 0.0
    for _ in range(most):
        attempts += filled[:-1].sum()
        done = np.convolve(filled[:-1], new)
        done[prompts] = done[prompts:].sum() + filled[-1]
        filled = done[: prompts + 1]
    return float(attempts), filled
