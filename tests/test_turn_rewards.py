"""Credit turn by turn: definition, and when it is the credit of completions."""

import re
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import test_turning_runs
import tiny
import turning
from contracts import close
from test_turns import drawn

from curax import advantage, reward
from curax.step import loops
from curax.step.build import build
from curax.step.methods import turn_rewards
from curax.step.types import Credit, Graded, Selection

TINY = replace(
    test_turning_runs.TINY,
    methods=(turn_rewards.method,),
    advantage=advantage.leave_one_out,
)
PARTS = build(TINY)


def credited(rows, outcome, end=turning.END):
    """What trains of the tiny rows, all that exists, with credit by turns."""
    rows = jax.tree.map(jnp.asarray, rows)
    graded = Graded(rollouts=rows, outcome=outcome, shape=(3, 4))
    keep = graded.groups.exists
    factor = jnp.where(keep, 2.0, 0.0)
    given = Credit(keep=keep, credit=jnp.zeros((3, 4)), factor=factor)
    used = keep.reshape(-1)
    row = jnp.minimum(graded.groups.row.reshape(-1), 9)
    names = {"place": jnp.arange(12), "row": row, "used": used}
    trains = Selection(drawn=graded, given=given, **names)  # pyright: ignore[reportArgumentType]
    parts = replace(PARTS, task=replace(PARTS.task, end=end))
    return trains, turn_rewards.credit(None, parts, None, trains)  # pyright: ignore[reportArgumentType]


def naive(rows, n):
    """Credit of the tokens of a row, turn by turn in Python."""
    others = np.flatnonzero(rows.exists & (rows.prompt == rows.prompt[n]))
    others = others[others != n]

    def later(row, k):
        gains = rows.turns.reward[row][
            np.isin(rows.tokens[row], turning.END) & rows.mask[row]
        ]
        return gains[k:].sum()

    out, k = np.zeros(turning.STEPS), 0
    for t in np.flatnonzero(rows.mask[n]):
        if others.size:
            mean = np.mean([later(j, k) for j in others])
            out[t] = 2 * (later(n, k) - mean)
        k += rows.tokens[n, t] in turning.END
    return out


def test_a_turn_is_credited_with_what_came_from_it_on():
    rows = drawn()
    trains, made = credited(rows, jnp.asarray(rows.turns.reward.sum(-1)))
    credit, row = np.asarray(made.credit), np.asarray(trains.row)
    several = 0
    for m in np.flatnonzero(trains.used):
        want = naive(rows, row[m])
        close(credit[m], want)
        several += len(np.unique(want[rows.mask[row[m]]])) > 1
    assert several > 1
    assert not credit[~np.asarray(trains.mask)].any()


def test_of_completions_of_one_turn_it_is_the_credit_of_completions():
    rows, never = drawn(), (tiny.V,)
    outcome = jnp.asarray(rows.turns.reward.sum(-1), jnp.float32)
    trains, made = credited(rows, outcome, end=never)
    grid = advantage.leave_one_out(
        trains.drawn.groups.outcome, trains.drawn.groups.exists
    )
    whole = 2 * np.asarray(grid).reshape(-1)[:, None]
    close(made.credit, np.where(trains.mask, whole, 0))


def test_a_missing_outcome_gives_credit_to_nobody():
    rows = drawn()
    outcome = rows.turns.reward.sum(-1)
    outcome[0] = np.nan
    lost = rows.turns.reward.copy()
    lost[0, 0] = np.nan
    rows = replace(rows, turns=replace(rows.turns, reward=lost))
    trains, made = credited(rows, jnp.asarray(outcome))
    assert np.isfinite(made.credit).all()
    own = np.asarray(trains.row) == 0
    assert not np.asarray(made.credit)[own & np.asarray(trains.used)].any()


@pytest.mark.long
def test_a_run_trains_by_it():
    loop = loops.Jitted(build(TINY))
    state = loop.begin(replace(test_turning_runs.warmed(), seed=loop.seeds))
    after, rows, _ = loop.advance(state, 2)
    assert int(after.step) == 2
    assert all(np.isfinite(row["loss/mean"]) for row in rows)
    assert rows[-1]["update/count"] > 0


REFUSED = {
    "methods has turn_rewards.method and the task has no environment": replace(
        TINY, task=test_turning_runs.test_loops.TINY.task
    ),
    "shape_reward changes rewards of completions, and turn_rewards": replace(
        TINY, shape_reward=partial(reward.soft_overlong, max_tokens=9, margin=2)
    ),
}


@pytest.mark.parametrize("words", REFUSED)
def test_it_is_refused_where_it_makes_no_sense(words):
    with pytest.raises(ValueError, match=re.escape(words)):
        build(REFUSED[words])
