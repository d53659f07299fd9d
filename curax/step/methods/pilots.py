"""Pilots: completions that estimate the difficulty of prompts, and do not train.

The policy draws them, or with `pilot.every` = K a copy of it every K steps: then the
prompts of K steps are allocated by one policy, as if their pilots were drawn at once.

References:
    GVM-RAFT, arXiv:2505.02391, stage 1 of algorithm 1.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from curax.arrays import grids, masked, metrics
from curax.arrays.keys import stage_key
from curax.settings.config_types import present
from curax.step import draw, stages
from curax.step.types import (
    Components,
    Driver,
    Graded,
    Method,
    Request,
    StepRequest,
    StepRollouts,
)
from curax.types import Difficulty, TrainState

NAME = "pilots"


def init(drive: Driver, parts: Components, state: TrainState, what: None) -> Any:
    """Parameters that draw pilots, a copy of the policy's."""
    return jax.tree.map(jnp.copy, state.params)


def after_update(
    drive: Driver, parts: Components, state: TrainState, drawn: StepRollouts
) -> Any:
    """Parameters that draw the pilots of the next step."""
    due = state.step % present(parts.config.pilot).every == 0
    held = state.methods[NAME]
    return jax.tree.map(lambda old, new: jnp.where(due, new, old), held, state.params)


def before_draw(
    drive: Driver, parts: Components, state: TrainState, request: StepRequest
) -> StepRequest:
    """The request with difficulty estimated by pilot completions of its prompts."""
    held = state.methods.get(NAME, state.params)
    state = dataclasses.replace(state, params=held)
    pilots = drive.call(ask, parts, state, request)
    graded = drive.draw_and_grade(parts, state, pilots)
    return drive.call(explored, parts, state, request, graded)


def ask(parts: Components, state: TrainState, request: StepRequest) -> Request:
    """Request for `pilot.draws` completions of each prompt, all at once."""
    draws = present(parts.config.pilot).draws
    key = stage_key(state.seed, state.step, "pilot")
    asked = draw.plain(request.prompts, draws, key, request.how)
    return dataclasses.replace(asked, contexts=request.contexts)


def explored(
    parts: Components, state: TrainState, request: StepRequest, graded: Graded
) -> StepRequest:
    """The request with the difficulty that pilots measured: no prior is added.

    Args:
        parts: components of the run.
        state: train state at the start of the step.
        request: before the pilots.
        graded: completions and outcomes of the pilots.
    """
    cfg, rollouts, outcome = parts.config, graded.rollouts, graded.outcome
    how, seen = present(cfg.pilot), graded.groups
    norm = jnp.ones_like(outcome)
    if how.norm:
        heat = cfg.sampling.temperature
        model = draw.policy(parts, state)
        given = model, state.params, request.contexts, rollouts, heat
        norm = stages.called(cfg, "pilot.norm", *given)
    norm = grids.grid(norm, seen.row, fill=0.0)
    of = masked.right(seen.outcome, seen.exists)
    typical = masked.mean(norm, of)
    if how.root_mean_square:
        typical = jnp.sqrt(masked.mean(norm**2, of))
    draws = masked.total(seen.exists, seen.exists)
    solved = masked.total(seen.outcome, seen.exists)
    return dataclasses.replace(
        request,
        known=Difficulty(
            draws=draws,
            solved=solved,
            pass_rate=solved / jnp.maximum(draws, 1.0),
            norm=typical,
            tokens=masked.mean(seen.length, seen.exists),
        ),
        memory=draw.observe(parts, request.memory, request.prompts, seen),
        explored=metrics.of_pilots(rollouts, outcome),
        visited=True,
    )


METHOD = Method(name=NAME, before_draw=before_draw)
# Where a copy of the policy draws them.
STALE = dataclasses.replace(METHOD, init=init, after_update=after_update)


def method(every: int) -> Method:
    """The method: it has a state where pilots are not drawn by the policy itself."""
    return METHOD if every == 1 else STALE
