"""Rewards by completions' own answers: how likely they were, or how many others agree.

Controls beside rewards by references, of which these need none: what pays is that an
answer was likely behind its thought, or that it is that of others, whatever it says.
"""

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any

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


def certain(
    parts: Components, rollouts: Rollouts
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Outcomes, rewards and lengths of thoughts, by how likely answers were.

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


def agreed(
    parts: Components, rollouts: Rollouts
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Outcomes, rewards and lengths of thoughts, by how many others say the same.

        reward = the share of the other answers of the group that are its tokens

    Arguments and what is returned as `certain`, but that outcomes are the rewards.
    """
    outcome, _, thought = certain(parts, rollouts)
    fine, column = ~jnp.isnan(outcome), jnp.arange(rollouts.mask.shape[-1])[None]
    place = thought[:, None] + column
    there = place < jnp.sum(rollouts.mask, -1, keepdims=True)
    last = rollouts.mask.shape[-1] - 1
    answer = jnp.take_along_axis(rollouts.tokens, jnp.minimum(place, last), -1)
    answer = jnp.where(there, answer, -1)
    other = (rollouts.prompt[:, None] == rollouts.prompt[None]) & fine[None]
    other = other & ~jnp.eye(fine.shape[0], dtype=bool)
    same = jnp.all(answer[:, None] == answer[None], -1)
    reward = masked.mean(same.astype(jnp.float32), other)
    return jnp.where(fine, reward, jnp.nan), reward, thought


def grade(
    drive: Driver,
    parts: Components,
    state: TrainState,
    drawn: Ungraded,
    *,
    score: Callable[..., Any],
) -> Graded:
    """Outcomes and rewards by the own answers, of `certain` or `agreed`."""
    outcome, reward, thought = drive.call(score, parts, drawn.rollouts)
    rollouts = dataclasses.replace(drawn.rollouts, reward=reward)
    return Graded.of(drawn.request, rollouts, outcome, found={NAME: thought})


def credit(
    drive: Driver, parts: Components, state: TrainState, trains: Selection
) -> Selection:
    """What trains, with no credit for the answer, as under rewards by references."""
    thought = trains.drawn.found[NAME][trains.row]
    kept = jnp.where(inside(trains.mask, thought), trains.credit, 0.0)
    return dataclasses.replace(trains, of_tokens=kept)


def method(score: Callable[..., Any] = certain) -> Method:
    """The method, as `methods` of a config names it."""
    return Method(
        name=NAME, conflicts=conflicts, grade=partial(grade, score=score), credit=credit
    )
