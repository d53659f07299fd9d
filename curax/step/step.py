"""One step of training: prompts selected, groups drawn and graded, policy updated."""

from typing import Any

import jax

from curax.step import draw
from curax.step.learn import learn
from curax.step.types import Components, Driver, Shown
from curax.types import TrainState


def step(
    drive: Driver, parts: Components, state: TrainState
) -> tuple[TrainState, tuple[dict[str, jax.Array], Shown]]:
    """The train state after one step: prompts selected, groups drawn, policy updated.

    Args:
        drive: driver that calls functions, loops, draws and grades completions.
        parts: components of the run.
        state: train state before the step; donated, not to be used again.

    Returns:
        The state after the step; its metrics and its logged completions.
    """
    ids = None
    for method in parts.methods:
        if method.choose:
            state, ids = method.choose(drive, parts, state, None)
    drawn = draw.attempt(drive, parts, state, None, ids)
    for method in parts.methods:
        if method.after_draw:
            drawn = method.after_draw(drive, parts, state, drawn)
    out: Any = drive.finish(learn, parts, state, drawn)
    return out
