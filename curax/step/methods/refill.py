"""Refilling: groups that the gate closed are replaced by groups of other prompts.

DAPO's dynamic sampling. Batches of prompts are drawn until every group of the step is
open, at most `sampling.attempts` of them: the first draw and its refills. The rounds of
a stopping rule are others, of more completions for the same prompts.
"""

from functools import partial

import jax
import jax.numpy as jnp

from curax.config import Config
from curax.settings.conflicts import Table
from curax.settings.declared import declared
from curax.step import draw
from curax.step.types import Components, Driver, Method, StepRollouts
from curax.types import Task, TrainState


def conflicts(config: Config, task: Task) -> Table:
    """Of groups that cannot be swapped: sizes differ, or there are pilots."""
    sizes = config.sampling
    return [
        (
            not declared(config.allocate, "equal_groups", False) or sizes.budget,
            f"sampling.attempts={sizes.attempts} replaces whole groups and needs "
            "groups of one size; set allocate to allocate.uniform, sampling.budget to "
            "0 or sampling.attempts to 1.",
        ),
        (
            config.pilot,
            f"sampling.attempts={sizes.attempts} replaces whole groups and knows no "
            "pilots; set pilot to None or sampling.attempts to 1.",
        ),
    ]


def wants(parts: Components, drawn: StepRollouts) -> jax.Array:
    """`[]` bool: some group is closed, and attempts are left."""
    closed = ~jnp.all(draw.open_groups(parts.config, drawn.groups))
    return closed & (drawn.attempts < parts.config.sampling.attempts)


def after_draw(
    drive: Driver, parts: Components, state: TrainState, drawn: StepRollouts
) -> StepRollouts:
    """Completions with closed groups replaced by groups of the next prompts."""
    again = partial(draw.attempt, drive, parts, state)
    return drive.repeat(partial(drive.call, wants, parts), again, drawn)


METHOD = Method(name="refill", conflicts=conflicts, after_draw=after_draw)
