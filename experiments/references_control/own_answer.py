"""Rewards by the likelihood of a completion's own answer: certainty, right or not.

A control beside rewards by references: what pays here is that the answer was likely
behind its thought, whatever it says.
"""

import dataclasses

import jax
import jax.numpy as jnp

from curax.arrays import masked
from curax.config import Config
from curax.settings.conflicts import Table
from curax.step.methods import references
from curax.step.types import (
    Components,
    Driver,
    Graded,
    Method,
    Selection,
    Ungraded,
)
from curax.types import Rollouts, Task, TrainState

NAME = "own_answer"


def conflicts(config: Config, task: Task) -> Table:
    """Of a task without a delimiter between thought and answer."""
    return [
        (
            not task.delimiter,
            "own_answer needs a delimiter that ends the thought, and this task has "
            "none; choose another task.",
        )
    ]


def inside(mask: jax.Array, thought: jax.Array) -> jax.Array:
    """`[N, T]` bool, tokens up to the end of thoughts."""
    return jnp.arange(mask.shape[-1])[None] < thought[:, None]


def score(
    parts: Components, rollouts: Rollouts
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Outcomes, rewards and lengths of thoughts.

        reward = mean of log pi(answer token) over tokens behind the thought

    Args:
        parts: components of the run.
        rollouts: `[N]`.

    Returns:
        `[N]` float32 outcomes, exp of the reward and NaN without an answer behind a
        thought; `[N]` float32 rewards, nats per token, at most 0; `[N]` int32 tokens
        up to the end of the delimiter.
    """
    thought = references.thoughts(rollouts, parts.task.delimiter)
    answer = rollouts.mask & ~inside(rollouts.mask, thought)
    reward = masked.mean(rollouts.logp_policy, answer)
    fine = rollouts.exists & (thought > 0) & jnp.any(answer, -1)
    return jnp.where(fine, jnp.exp(reward), jnp.nan), reward, thought


def grade(
    drive: Driver, parts: Components, state: TrainState, drawn: Ungraded
) -> Graded:
    """Outcomes and rewards by the own answer."""
    outcome, reward, thought = drive.call(score, parts, drawn.rollouts)
    rollouts = dataclasses.replace(drawn.rollouts, reward=reward)
    return Graded.of(drawn.request, rollouts, outcome, found={NAME: thought})


def credit(
    drive: Driver, parts: Components, state: TrainState, trains: Selection
) -> Selection:
    """What trains, with no credit for the answer, as under rewards by references."""
    thought = trains.drawn.found[NAME][trains.rows.row]
    kept = jnp.where(inside(trains.mask, thought), trains.credit, 0.0)
    return dataclasses.replace(trains, of_tokens=kept)


def method() -> Method:
    """The method, as `methods` of a config names it."""
    return Method(name=NAME, conflicts=conflicts, grade=grade, credit=credit)
