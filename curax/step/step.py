"""One step of training: prompts selected, groups drawn and graded, policy updated."""

from typing import Any

import jax

from curax.step import ahead, draw
from curax.step.learn import learn, learn_beside
from curax.step.types import Components, Driver, Shown, StepRollouts
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
    out: Any
    if state.behaviour is None:
        state, drawn = completions(drive, parts, state)
        out = drive.finish(learn, parts, state, drawn)
        return out
    then = drive.beside(ahead.behaviour(state))
    state, drawn = drive.ahead(completions, parts, state, then)
    drawn = drive.call(ahead.met, parts, state, drawn)
    used_up, kept = ahead.apart(state, copied=then.params is not state.params)
    changed, out = drive.finish(learn_beside, parts, used_up, kept, drawn)
    return ahead.after(state, changed, then), out


def completions(
    drive: Driver, parts: Components, state: TrainState
) -> tuple[TrainState, StepRollouts]:
    """The state that remembers which prompts were chosen, and their completions."""
    ids = None
    for method in parts.methods:
        if method.choose:
            state, ids = method.choose(drive, parts, state, None)
    drawn = draw.attempt(drive, parts, state, None, ids)
    for method in parts.methods:
        if method.after_draw:
            drawn = method.after_draw(drive, parts, state, drawn)
    return state, drawn
