"""Functions of a recipe, for notebooks and for loops of one's own.

`curax` exports these names: `curax.build(curax.load("grpo"))`. They are for one device
and for tasks whose verifier and prompts are JAX functions; other runs need a host that
drives them, which is `python -m curax.train`.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from curax.config import Config, ConfigError
from curax.settings import errors
from curax.step import build as builder
from curax.step import drivers, loops
from curax.step import mesh as meshes
from curax.step.records import Components
from curax.step.step import step
from curax.theory import predict as theory
from curax.types import TrainState

PROMPTS = 200  # of the population that a prediction takes where none is given
LIFT = 1.0  # nats that a level of a hint adds to the log-odds of p, as for the x-ray


def build(config: Config) -> Components:
    """Components of a run: its config with task, model and optimizer built.

    Raises:
        ConfigError: in a sentence, if they cannot be made or do not fit each other.
    """
    with errors.config_errors(config):
        return builder.build(config)


def init(parts: Components, seed: int | jax.Array = 0) -> TrainState:
    """The state before the first RL step, after the warm start if there is one.

    Args:
        parts: of the run.
        seed: `[]` uint32, from which every random draw of the run follows; it may be
            traced.

    Raises:
        ConfigError: the run needs a host that drives it.
    """
    _check(parts)
    start = jax.jit(partial(loops.start, parts))
    return start(jnp.asarray(seed, jnp.uint32), _loaded(parts))


def train_step(
    parts: Components,
) -> Callable[[TrainState], tuple[TrainState, dict[str, jax.Array]]]:
    """A jitted `state -> (state, metrics)`: one RL step, from prompts to the update.

    It compiles when it is first called, so keep it. The state that it is given stays
    valid. Metrics are those of `metrics.jsonl`, `[]` float32 by name, without times
    and evaluations; counts are per step.

    Raises:
        ConfigError: the run needs a host that drives it.
    """
    _check(parts)
    return jax.jit(partial(_step, parts))


def run(
    parts: Components, seed: int | jax.Array = 0
) -> tuple[TrainState, dict[str, jax.Array]]:
    """A whole run, warm start included, as a pure function of its seed.

    jit it, and vmap it over seeds; or build `parts` inside the traced function, from a
    config with traced magnitudes, and vmap it over these.

    Args:
        parts: of the run.
        seed: `[]` uint32; it may be traced.

    Returns:
        The state after `config.steps` steps; metrics of each, `[steps]` float32.

    Raises:
        ConfigError: the run needs a host that drives it.
    """
    _check(parts)
    return loops.run(parts, jnp.asarray(seed, jnp.uint32), _loaded(parts))


def predict(
    config: Config, p: Any, population: Any = None, *, lift: float = LIFT
) -> theory.Prediction:
    """Predicted weight w(p), signal, draws and noise of a recipe: the x-ray as numbers.

    `weight` is w(p) of E[update] = w(p) grad p; other fields are the signal,
    expected draws and noise. Nothing is trained.

    Args:
        config: the recipe.
        p: `[R]` pass rates in (0, 1).
        population: `[K]` pass rates of the prompts of the task, all equally likely;
            None: spread evenly over (0, 1).
        lift: nats that each level of a hint adds to the log-odds of p; for recipes with
            hints.

    Raises:
        ConfigError: its functions fail on made-up outcomes, or its rewards are not
            outcomes.
    """
    if config.reflection:
        raise ConfigError(
            "reflection rewards by the log-prob of reference answers and w(p) is about "
            "right and wrong ones; set reflection to None."
        )
    if population is None:
        population = (np.arange(PROMPTS) + 0.5) / PROMPTS
    with errors.config_errors(config):
        rates, others = np.atleast_1d(p), np.asarray(population)
        plain = theory.predict(config, rates, others, lift=lift)
        return theory.with_hints(config, plain)


def _step(
    parts: Components, state: TrainState
) -> tuple[TrainState, dict[str, jax.Array]]:
    state, (values, _) = step(drivers.Traced(), parts, state)
    return state, values


def _loaded(parts: Components) -> Any:
    """Parameters of the checkpoint that the model names; None: it names none."""
    return parts.model.load(None) if parts.model.load else None


def _check(parts: Components) -> None:
    """Raise a ConfigError if one program on one device cannot make the run.

    Raises:
        ConfigError: the host verifies or reads the task, or there is a mesh.
    """
    task = parts.task
    if not task.on_device or task.in_files:
        what = "prompts of the task are read" if task.on_device else "task is verified"
        raise ConfigError(
            f"the {what} by the host, which no compiled step can call; train with "
            "python -m curax.train."
        )
    if meshes.make(parts.config.mesh) is not None:
        raise ConfigError(
            "mesh spreads the run over several devices, and this is for one; set "
            "mesh.data, mesh.fsdp and mesh.tensor to 1, or train with python -m "
            "curax.train."
        )
