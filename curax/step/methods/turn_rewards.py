"""Credit turn by turn: each turn answers for the rewards from it on, not for all.

    credit_{i, k} = advantage of sum_{l >= k} r_{i, l} in the group

with r_{i, l} the reward of turn l of completion i. The advantage is that of the recipe,
called for each turn: with `advantage.leave_one_out` turn k is compared with what the
others of its group still got from their turn k on, 0 where they had ended. What was
given before a turn is no consequence of it, and is left out: with that advantage the
gradient has the mean that it has with credit of whole completions.

Where a completion has one turn this is the credit of completions.
"""

import dataclasses

import jax
import jax.numpy as jnp

from curax.arrays import grids
from curax.config import Config
from curax.settings.conflicts import Table
from curax.step import stages
from curax.step.types import Components, Driver, Method, Selection
from curax.types import Rollouts, Task, TrainState

NAME = "turn_rewards"


def conflicts(config: Config, task: Task) -> Table:
    """Of tasks without turns, and of what makes other rewards or credit."""
    return [
        (
            task.environment is None,
            "methods has turn_rewards.method and the task has no environment, whose "
            "rewards it takes; leave it out.",
        ),
        (
            config.shape_reward is not None,
            "shape_reward changes rewards of completions, and turn_rewards.method "
            "takes those of turns; set shape_reward to None.",
        ),
        (
            config.hint and config.hint.credit,
            "hint.credit reweights credit of completions, and turn_rewards.method "
            "gives it to turns; set hint.credit to None.",
        ),
    ]


def number(rollouts: Rollouts, end: tuple[int, ...]) -> jax.Array:
    """`[N, T]` int32, turn of each token from 0 on; of an observation, the next one."""
    ends = rollouts.mask & jnp.isin(rollouts.tokens, jnp.asarray(end, jnp.int32))
    return jnp.cumsum(ends, -1, dtype=jnp.int32) - ends.astype(jnp.int32)


def returns(reward: jax.Array, turn: jax.Array) -> jax.Array:
    """`[N, T]` float32, in column k the sum of the rewards of turns k and later.

    Args:
        reward: `[N, T]` float32, at the last token of each turn; 0 elsewhere.
        turn: `[N, T]` int32, of `number`.
    """
    row = jnp.arange(reward.shape[0])[:, None]
    each = jnp.zeros_like(reward).at[row, turn].add(reward)
    return jnp.cumsum(each[:, ::-1], -1)[:, ::-1]


def credit(
    drive: Driver, parts: Components, state: TrainState, trains: Selection
) -> Selection:
    """What trains, with the credit of its turn for each token."""
    seen, rollouts, given = trains.drawn.groups, trains.drawn.rollouts, trains.given
    assert rollouts.turns is not None
    turn = number(rollouts, parts.task.end)
    later = grids.grid(returns(rollouts.turns.reward, turn), seen.row, fill=0.0)
    later = jnp.where(seen.exists[..., None], later, 0.0)  # [B, G, T]

    def of_turn(later: jax.Array) -> jax.Array:
        return stages.advantage_credit(
            parts.config, later, seen.exists, given.keep, given.factor
        )

    each = jax.vmap(of_turn, in_axes=-1, out_axes=-1)(later)
    flat = each.reshape(-1, each.shape[-1])
    own = jnp.take_along_axis(flat[trains.place], turn[trains.row], -1)
    of_tokens = jnp.where(trains.mask, own, 0.0)
    return dataclasses.replace(trains, of_tokens=of_tokens)


def method() -> Method:
    """The method, as `methods` of a config names it."""
    return Method(name=NAME, conflicts=conflicts, credit=credit)
