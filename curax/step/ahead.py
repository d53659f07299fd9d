"""A draw one step ahead of the update: what draws, and what its completions meet.

    behaviour of step t + 1 = parameters, memory, methods at the start of step t

So a completion is drawn from parameters that lack one update, and memory, hints and
allocation are what was known when its draw began. This is a function of the state, the
same whatever runs side by side: a resumed run draws again, by the same keys, what was
under way. In the first step nothing lags.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from curax import memory as memories
from curax.arrays import metrics
from curax.settings.config_types import present
from curax.step.types import Components, StepRollouts
from curax.types import Behaviour, TrainState


def behaviour(state: TrainState) -> Behaviour:
    """What the state draws from if it draws itself."""
    return Behaviour(
        params=state.params,
        memory=state.memory,
        methods=state.methods,
        version=state.step,
    )


def of_step(state: TrainState) -> TrainState:
    """The state that draws for this step: it lacks the last update."""
    own = present(state.behaviour)
    return dataclasses.replace(
        state,
        params=own.params,
        memory=own.memory,
        methods=own.methods,
        opt_state=None,
        behaviour=None,
    )


def of_next(parts: Components, state: TrainState, own: Behaviour) -> TrainState:
    """The state that draws for the next step: `of_step` of the state after this one.

    `own` is the behaviour of the given state.
    """
    after = dataclasses.replace(
        state,
        step=state.step + 1,
        position=state.position + parts.config.sampling.prompts,
        behaviour=own,
    )
    return of_step(after)


def met(parts: Components, state: TrainState, drawn: StepRollouts) -> StepRollouts:
    """Completions of the state's behaviour; with the state's memory after them, lag.

    Observing is affine in the sums of a prompt, with the discount lambda as its slope,
    so sums x that became y where the draw began from them become

        y + lambda (x' - x)        of a prompt that it observed; else x'

    of x', which the step before has meanwhile made of x.
    """
    own = present(state.behaviour)
    slope = memories.discount(parts.config.memory.half_life)
    trees = own.memory, drawn.memory, state.memory
    pairs = zip(*map(jax.tree.leaves, trees[:2]), strict=True)
    seen = jnp.any(jnp.stack([before != after for before, after in pairs]), 0)
    memory = jax.tree.map(
        lambda x, y, now: jnp.where(seen, y + slope * (now - x), now), *trees
    )
    exists = drawn.rollouts.exists
    version = jnp.where(exists, own.version, state.step)
    lag = state.step - version
    of_lag = {
        "sampler/lag_mean": metrics.mean(lag, exists),
        "sampler/lag_max": metrics.one(jnp.max(lag)),
    }
    tally = dataclasses.replace(drawn.tally, means=drawn.tally.means | of_lag)
    return dataclasses.replace(drawn, memory=memory, version=version, tally=tally)


def without_params(own: Behaviour) -> Behaviour:
    """A behaviour as `met` reads it, which looks at no parameters."""
    return dataclasses.replace(own, params=None)


# What a step uses up, and what the next step's draw still looks at, are two arguments:
# the first is donated.


def apart(state: TrainState, *, copied: bool) -> tuple[TrainState, TrainState]:
    """What of a state a step uses up, and what stays valid; each lacks the other.

    Parameters stay, unless the next draw has been given a copy of them.
    """
    used = "opt_state", "behaviour", *(["params"] if copied else [])
    kept = dataclasses.replace(state, **dict.fromkeys(used))
    gone = {f.name: None for f in dataclasses.fields(state)} | {"methods": {}}
    gone |= {name: getattr(state, name) for name in used}
    return dataclasses.replace(state, **gone), kept


def whole(used_up: TrainState, kept: TrainState) -> TrainState:
    """The state that was taken apart."""
    return dataclasses.replace(
        kept,
        params=used_up.params if kept.params is None else kept.params,
        opt_state=used_up.opt_state,
        behaviour=used_up.behaviour,
    )


KEPT = ("frozen", "reference", "seed")  # what no step changes


def changed(state: Any) -> Any:
    """What a step changes of a state with a behaviour, or of its sharding; else all."""
    if state is None or state.behaviour is None:
        return state
    return dataclasses.replace(state, **dict.fromkeys((*KEPT, "behaviour")))


def after(before: TrainState, changed: TrainState, then: Behaviour) -> TrainState:
    """The state after a step, from the one before and what the step changed of it.

    `then` is what it draws by, the behaviour of the state before.
    """
    kept = {name: getattr(before, name) for name in KEPT}
    return dataclasses.replace(changed, behaviour=then, **kept)
