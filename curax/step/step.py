"""One step of training: the order of what is drawn, graded and learnt, once."""

from typing import Any

import jax

from curax.step import draw
from curax.step.learn import learn
from curax.step.records import Components, Driver, Shown
from curax.types import TrainState


def step(
    drive: Driver, parts: Components, state: TrainState
) -> tuple[TrainState, tuple[dict[str, jax.Array], Shown]]:
    """One step: methods choose prompts; groups are drawn, and more; the policy learns.

    Args:
        drive: how functions are called, loops made, completions drawn and graded.
        parts: of the run.
        state: before the step; not to be used again.

    Returns:
        The state after the step; its metrics, and what is to be shown of it.
    """
    for method in parts.methods:
        if method.before_step:
            state = method.before_step(drive, parts, state)
    drawn = draw.attempt(drive, parts, state, None)
    for method in parts.methods:
        if method.after_draw:
            drawn = method.after_draw(drive, parts, state, drawn)
    out: Any = drive.finish(learn, parts, state, drawn)
    return out
