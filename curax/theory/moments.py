"""Expected moments of a prompt's credit, summed over the states of its group."""

import math
from functools import partial

import numpy as np

from curax.config import Config
from curax.settings.sizes import kept_of, rows_of
from curax.step import stages
from curax.theory import hint_levels, outcome_states
from curax.theory.cases import Cases
from curax.theory.credits import MOMENTS, Credits, Reads, moments

OUTCOMES = 2**22  # outcomes in memory at a time


def rows_per_prompt(config: Config) -> float:
    """Rows trained per prompt, M / B, by which sums over rows are divided."""
    sizes = config.sampling
    kept = kept_of(config)
    return min(rows_of(config), sizes.prompts * kept) / sizes.prompts


def expected_moments(
    config: Config,
    credits: Credits,
    reads: Reads,
    cases: Cases,
    p: np.ndarray,
    under: np.ndarray | None,
    often: int,
) -> np.ndarray:
    """Expected MOMENTS of a prompt in each of S batches.

    Args:
        config: the recipe.
        credits: its credit function.
        reads: dependences of its credit.
        cases: of `cases.cases_of`.
        p: `[R]` pass rates.
        under: `[L + 1, R + K]` pass rates under hints, of prompts and of a population;
            None: no hints.
        often: visits of a run to a prompt.

    Returns:
        `[S, K, R, moments]`, K as in `_group_chances`.
    """
    random = np.random.default_rng(1)
    # Selections that are independent of outcomes are equivalent: one seed is enough.
    seeds = np.arange(len(cases.labels)) * (not reads.blind)

    def credit_of(part: np.ndarray, own: np.ndarray, drawn: np.ndarray):
        outcome, exists = _batch_labels(cases, part, own, drawn)
        if reads.order:
            lots = np.where(exists[:, 0], random.random(exists[:, 0].shape), 2)
            at = np.argsort(lots, -1)
            outcome[:, 0] = np.take_along_axis(outcome[:, 0], at, -1)
        outcome *= exists
        batch = np.repeat(cases.batch[part], len(own))
        history = np.repeat(cases.history[part], len(own), axis=0)
        # `reads_of` has compiled credit for two prompts already.
        least = 1 if reads.batch else 2
        result = credits(seeds[batch], outcome, exists, history, least=least)
        return result, outcome[:, 0], exists[:, 0]

    many = 0 if under is None else len(under)
    result = np.zeros((len(cases.count), 1 + 2 * many, len(p), len(MOMENTS)))
    for count in np.unique(cases.count):
        which, chance = _group_chances(config, p, under, int(count), reads.first, often)
        own, drawn = outcome_states.shown(which, config.sampling.group_size)
        at = np.flatnonzero(cases.count == count)
        if reads.blind:
            (_, keep, _), _, _ = credit_of(at[:1], own, drawn)
            own, drawn, share, of = _split_by_kept(which, keep, drawn)
            chance = chance[..., of] * share
        size = max(OUTCOMES // (len(own) * cases.labels[0].size), 1)
        for part in np.split(at, range(size, len(at), size)):
            (credit, keep, open_), labels, exists = credit_of(part, own, drawn)
            rest = open_, labels, exists, rows_per_prompt(config)
            result[part] = _averaged(chance, moments(credit, *rest))
            if many and config.hint and config.hint.credit:
                # Only whether credit is 0 is read, which does not depend on the ratio.
                credit = config.hint.credit(
                    credit.astype(np.float32),
                    labels,
                    keep,
                    np.zeros_like(labels),
                    np.ones(len(labels), bool),
                )
                value = moments(np.asarray(credit, np.float64), *rest)
                hinted = np.arange(1 + 2 * many)[2:]
                hinted = hinted[hinted != 1 + many]
                result[part[:, None], hinted] = _averaged(chance[hinted], value)
    return np.stack(
        [np.einsum("ra,akrm->krm", cases.chance, result[row]) for row in cases.place.T]
    )


def _batch_labels(
    cases: Cases, part: np.ndarray, own: np.ndarray, drawn: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Outcomes `[N, B, G]` float32 and existence: all states of a prompt in some cases.

    Args:
        cases: all cases.
        part: `[n]` indices of some.
        own: `[S, G]` outcomes of the prompt; N = n S.
        drawn: `[S, G]` bool, its completions.
    """
    outcome = cases.labels[np.repeat(cases.batch[part], len(own))].astype(np.float32)
    number = np.repeat(cases.number[part], len(own), axis=0)
    exists = np.arange(own.shape[1]) < number[..., None]
    outcome[:, 0] = np.tile(own, (len(part), 1))
    exists[:, 0] = np.tile(drawn, (len(part), 1))
    return outcome, exists


def _averaged(chance: np.ndarray, value: np.ndarray) -> np.ndarray:
    """`[T, K, R, moments]` means of values `[T S, moments]` by weights `[K, R, S]`."""
    value = value.reshape(-1, chance.shape[-1], len(MOMENTS))
    return np.einsum("krs,tsm->tkrm", chance, value)


def _group_chances(
    config: Config,
    p: np.ndarray,
    under: np.ndarray | None,
    most: int,
    first: bool,
    often: int,
) -> tuple[np.ndarray, np.ndarray]:
    """Final states of a group `[S, 3]`, and their probabilities `[K, R, S]`.

    The first of K is without hints. With pass rates `under` hints L + 1 follow for the
    groups that train, by level, and L + 1 for all groups that are drawn or, with a
    controller, for the stationary distribution (`hint_levels`).
    """
    sizes, stop, how = config.sampling, config.stop, config.hint
    met = partial(stages.called, config, "stop.rule")
    rule = {"size": stop.round_size, "met": met} if stop else {}
    rates = p[None] if under is None else under
    which, chance = outcome_states.states(
        rates.reshape(-1), most=most, first=first, **rule
    )
    chance = chance.reshape(*rates.shape, -1)
    parts = [chance[:1]]
    if under is not None and how:
        size = sizes.prompts, sizes.group_size
        found = hint_levels.visited if how.controller else hint_levels.searched
        parts += found(how, which, chance, size=size, own=len(p), visits=often)
    return which, np.concatenate(parts)[:, : len(p)]


def _split_by_kept(
    which: np.ndarray, keep: np.ndarray, drawn: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """States split by how many right completions are kept, with hypergeometric shares.

    Args:
        which: `[S, 3]` states.
        keep: `[S, G]` bool, what a random selection keeps; nothing of a closed pool.
        drawn: `[S, G]` bool.

    Returns:
        `[U, G]` outcomes and existence; `[U]` the share and the index of their state.
    """
    kept = {n: keep[which[:, 0] == n].any(0) for n in np.unique(which[:, 0])}
    rows, shares, of = [], [], []
    for i, (n, k, _) in enumerate(which.tolist()):
        inside = np.flatnonzero(kept[n])
        outside = np.flatnonzero(drawn[i] & ~kept[n])
        m = len(inside)
        for here in range(max(k - len(outside), 0), min(k, m) + 1):
            row = np.zeros(drawn.shape[1], np.float32)
            row[inside[:here]], row[outside[: k - here]] = 1, 1
            rows.append(row)
            ways = math.comb(m, here) * math.comb(n - m, k - here)
            shares.append(ways / math.comb(n, k))
            of.append(i)
    return np.stack(rows), drawn[of], np.array(shares), np.array(of)
