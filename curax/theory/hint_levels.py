"""Probabilities of hint level and outcomes of the group that trains, with hints.

A prompt draws a group without a hint. If it collapses it draws another with a hint of
level 1, and so on, and one of these groups trains. Given the pass rate p_l under a hint
of each level, the probability of every end follows from those of the states of each
group, by the functions that decide: the trigger, `hint.replaces`, or the controller
that sets the level between visits.

All decisions depend on the number of right completions alone. Then the group that
trains adds a coefficient times grad p_l, whatever it was chosen for:

    E[update] = sum_l {E[C+; l] / p_l - E[C-; l] / (1 - p_l)} grad p_l

with C+ and C- as in `learn.compute_credit` and the sums over groups that train at
level l.

Assumptions: every prompt has a hint of every level, or from its first right completion
on where those are the hints, and triggers and controllers depend on counts alone.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from curax import hint
from curax.arrays import masked
from curax.config import Hint
from curax.settings.config_types import present
from curax.settings.declared import declared
from curax.step.methods import hints
from curax.theory import outcome_states


@dataclasses.dataclass(frozen=True, kw_only=True)
class Levels:
    """Probabilities, weights and draws by hint level, `[L + 1, R]`; row 0 has no hint.

    With a controller, all are means over the visits of a run, the first without a hint;
    `end` is the stationary distribution of the visits.
    """

    p: np.ndarray  # pass rate under a hint of the level, as assumed
    drawn: np.ndarray  # probability that a group is drawn at the level
    trains: np.ndarray  # probability that the group that trains is of the level
    weight: np.ndarray  # coefficient of the gradient `credited` names; else NaN
    half: np.ndarray  # half of its 95% interval, 0 where it is exact
    signal: np.ndarray  # probability that it is, and any completion has credit
    draws: np.ndarray  # expected completions drawn at the level, pilots apart
    right: np.ndarray  # [R] E[C+] of groups without a hint that train
    wrong: np.ndarray  # [R] E[C-] of them
    end: np.ndarray | None  # stationary share of visits; None without a controller
    end_weight: np.ndarray | None  # stationary weight


def lifted(p: np.ndarray, lift: float, levels: int) -> np.ndarray:
    """Pass rates by hint level, if every level adds `lift` to the log-odds.

        log(p_l / (1 - p_l)) = log(p / (1 - p)) + l lift

    Args:
        p: `[R]` pass rates without a hint, in (0, 1).
        lift: nats per level; log-odds are clipped to 25 nats.
        levels: L.

    Returns:
        `[L + 1, R]`.
    """
    odds = np.log(p) - np.log1p(-p) + lift * np.arange(1, levels + 1)[:, None]
    return np.concatenate([p[None], 1 / (1 + np.exp(-np.clip(odds, -25, 25)))])


def admitted(most: float, prompts: int, chance: float) -> float:
    """Probability that a prompt to be hinted is among the first `most` B of its batch.

    Its place in the batch is uniform; every other prompt is to be hinted with
    probability `chance`.

    Args:
        most: share of the prompts of a batch that may be hinted.
        prompts: B.
        chance: probability that a prompt is to be hinted.
    """
    places = int(np.sum(hints.limit(jnp.ones(prompts, bool), most)))
    before = np.zeros(places + 1)  # probability of each number before it; last: more
    before[0], total = 1, 0.0
    for _ in range(prompts):
        total += before[:places].sum()
        moved = np.append(0.0, before[:-1] * chance)
        before = before * (1 - chance) + moved
    return total / prompts


def searched(
    how: Hint,
    which: np.ndarray,
    chance: np.ndarray,
    *,
    size: tuple[int, int],
    own: int,
    visits: int,
) -> tuple[np.ndarray, np.ndarray]:
    """Probabilities of states by level, if collapsed groups are drawn at the next one.

    Args:
        how: the trigger, and how many prompts may be hinted.
        which: `[S, 3]` states that a group may have, as of `outcome_states.states`.
        chance: `[L + 1, R, S]` of each, drawn at each level. Of R prompts the last ones
            are a population, whose collapsed groups compete for hints.
        size: (B, G).
        own: number of prompts that are not of the population.
        visits: of a run to each prompt.

    Returns:
        `[L + 1, R, S]`, probability that the group that trains is of this level and
        state, which sums to 1; the same of every group that is drawn, of which a
        level's sum is the probability that the level is drawn.
    """
    prompts, group = size
    kinds, of = np.unique(which[:, :2], axis=0, return_inverse=True)
    first = np.minimum(kinds[:, 1:], 1)
    seen = _shown(np.concatenate([kinds, first], 1), group)
    collapsed = np.asarray(how.trigger(*seen))
    swaps = _swaps(*seen)
    each = chance @ np.eye(len(kinds))[of]  # [L + 1, R, kinds]

    wanted = each[0] * collapsed
    share = admitted(how.most, prompts, float(wanted[own:].sum(-1).mean()))
    done, open_ = np.zeros_like(each), np.zeros_like(each)
    done[0], open_[0] = each[0] - share * wanted, share * wanted
    asked = np.ones(each.shape[:2])
    for level in range(1, len(each)):
        asked[level] = open_.sum((0, -1))
        new = each[level]
        over = new * (open_.sum(0) @ swaps.T)  # replaces the old group
        done = done + open_ * ((new * ~collapsed) @ ~swaps)
        open_ = open_ * ((new * collapsed) @ ~swaps)
        done[level] += over * ~collapsed
        open_[level] += over * collapsed
    left = np.divide(done + open_, each, out=np.zeros_like(each), where=each > 0)
    found = chance * left[..., of], chance * asked[..., None]
    if not recalls(how):
        return found
    wrong = chance[0] @ (which[:, 1] == 0)
    visits = max(visits, 1)
    new = ((1 - wrong**visits) / (visits * (1 - wrong)))[:, None]  # never solved before
    plain = new * chance * (np.arange(len(chance)) == 0)[:, None, None]
    trains, asked = ((1 - new) * part + plain for part in found)
    return trains, asked


def recalls(how: Hint) -> bool:
    """Whether hints are right completions of earlier visits: before, there is none."""
    return declared(how.source, "recall", None) is not None


def _shown(states: np.ndarray, group: int) -> tuple[jax.Array, jax.Array]:
    outcome, exists = outcome_states.shown(states, group)
    return jnp.asarray(outcome), jnp.asarray(exists)


def _swaps(outcome: jax.Array, exists: jax.Array) -> np.ndarray:
    """`[S, S]` bool: whether a new group, by row, replaces an old one, by column."""

    def one(new: tuple[Any, Any]) -> jax.Array:
        outcomes, there = (jnp.broadcast_to(x, outcome.shape) for x in new)
        return hint.replaces(outcomes, there, outcome, exists)

    return np.asarray(jax.lax.map(one, (outcome, exists)))


def visited(
    how: Hint,
    which: np.ndarray,
    chance: np.ndarray,
    *,
    size: tuple[int, int],
    own: int,
    visits: int,
) -> tuple[np.ndarray, np.ndarray]:
    """Probabilities of states by level, if a controller sets that of the next visit.

    Args:
        how: the controller, and how many prompts may be hinted.
        which: as `searched`.
        chance: as `searched`.
        size: as `searched`.
        own: as `searched`.
        visits: of a run to each prompt; the first is at level 0.

    Returns:
        `[L + 1, R, S]`, share of visits at this level and in this state, which sums to
        1; the same of the stationary distribution, if every prompt may be hinted and
        has hints.
    """
    steps, right = moves(how, which, chance, group=size[1]), which[:, 1] > 0
    solved = (chance[0] @ right)[:, None]
    up = moves(how, which, chance * right, group=size[1])[:, 0]  # of those, from 0
    level = np.zeros(steps.shape[:2])
    level[:, 0] = 1
    new = np.zeros_like(level)  # levels of prompts that have no hints
    if recalls(how):
        level, new = new, level
    total, later = np.zeros_like(level), np.arange(len(chance)) > 0
    visits = max(visits, 1)
    for visit in range(visits):
        chosen = float((level + new)[own:, later].sum(1).mean())
        share = admitted(how.most, size[0], chosen)
        at = level * np.where(later, share, 1)
        waits = level - at  # drawn without a hint; their level stays
        drawn = at.copy()
        drawn[:, 0] += (waits + new).sum(1)
        first, stay = new[:, :1], new * later
        then = first * up + stay * solved  # solved now
        after = waits + np.einsum("rl,rlm->rm", at, steps) + then
        unsolved = first * steps[:, 0] + stay - then
        total += drawn
        moved = np.abs(after - level).max() + np.abs(unsolved - new).max()
        if moved < _STILL:
            total += (visits - visit - 1) * drawn
            break
        level, new = after, unsolved
    end = resting(steps)
    trains, others = (part.T[..., None] * chance for part in (total / visits, end))
    return trains, others


_STILL = 1e-12  # changes of probabilities below this have converged


def moves(
    how: Hint, which: np.ndarray, chance: np.ndarray, *, group: int
) -> np.ndarray:
    """`[R, L + 1, L + 1]` transition matrix of the level between two visits."""
    outcome, exists = _shown(which, group)
    rate = jnp.where(jnp.any(exists, -1), masked.mean(outcome, exists), jnp.nan)
    level = np.arange(len(chance), dtype=np.int32)
    shape = len(level), len(rate)
    then = present(how.controller)(
        jnp.broadcast_to(level[:, None], shape),
        jnp.broadcast_to(rate, shape),
        levels=how.levels,
    )
    to = np.asarray(then)[..., None] == level
    return np.einsum("lrs,lsm->rlm", chance, to.astype(np.float64))


def resting(steps: np.ndarray) -> np.ndarray:
    """`[..., L + 1]` stationary distribution of the level.

    Where there are several, the one that level 0 leads to.

    Args:
        steps: `[..., L + 1, L + 1]` transition probabilities, from rows to columns.
    """
    # The lazy chain has the same stationary distribution and is aperiodic.
    lazy = (steps + np.eye(steps.shape[-1])) / 2
    for _ in range(_DOUBLINGS):
        lazy = lazy @ lazy
        lazy = lazy / lazy.sum(-1, keepdims=True)
    return lazy[..., 0, :]


_DOUBLINGS = 64  # of the number of visits


def credited(how: Hint) -> int | None:
    """Level whose grad p hinted groups train: 1 under the hint, 0 without; None: none.

    Weighted by the ratio of their sequences, completions drawn with a hint give the
    same coefficient of grad p_0 as they had of grad p_l (`hint.sequence_weighted`).
    """
    if how.credit is None:
        return 1
    return 0 if declared(how.credit, "trains_prompt", False) else None
