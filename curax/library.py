"""Functions of a recipe, for notebooks and for loops of one's own.

`curax` exports these names: `curax.build(curax.load("grpo"))`. They are for one device.
`run` is for tasks whose verifier and prompts are JAX functions; `init` and `train_step`
take those too that the host reads and grades.
"""

import dataclasses
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
from curax.step.step import step
from curax.step.types import Components
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
        return builder.with_engine(builder.build(config))


def init(parts: Components, seed: int | jax.Array = 0) -> TrainState:
    """The state before the first RL step, after the warm start if there is one.

    Args:
        parts: of the run.
        seed: `[]` uint32, from which every random draw of the run follows; it may be
            traced, unless the host reads or grades the task.

    Raises:
        ConfigError: the run is for several devices.
    """
    _check_devices(parts)
    if _is_hosted(parts):
        return _init_from_host(parts, int(seed))
    start = jax.jit(partial(loops.start, parts))
    return start(jnp.asarray(seed, jnp.uint32), _loaded(parts))


def train_step(
    parts: Components,
) -> Callable[[TrainState], tuple[TrainState, dict[str, jax.Array]]]:
    """A function `state -> (state, metrics)`: one RL step, from prompts to the update.

    It is jitted, or where the host reads or grades the task, calls jitted programs. It
    compiles when it is first called, so keep it. The state that it is given stays
    valid. Metrics are those of `metrics.jsonl`, `[]` float32 by name, without times
    and evaluations; counts are per step.

    Raises:
        ConfigError: the run is for several devices.
    """
    _check_devices(parts)
    if parts.engine:
        try:
            parts.engine.start(parts.config)
        except RuntimeError as error:
            raise ConfigError(str(error)) from error
    if _is_hosted(parts):
        return partial(_step_from_host, drivers.Hosted(), parts)
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
        ConfigError: the host reads or grades the task, or the run is for several
            devices.
    """
    _check_devices(parts)
    if _is_hosted(parts):
        what = "verified" if not parts.task.on_device else "read"
        what = "drawn" if parts.engine else what
        raise ConfigError(
            f"the task is {what} by the host, which no compiled run can call; make "
            "single steps by curax.train_step, or train with python -m curax.train."
        )
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


def _init_from_host(parts: Components, seed: int) -> TrainState:
    config = dataclasses.replace(parts.config, seed=seed, seeds=1)
    loop = loops.Staged(dataclasses.replace(parts, config=config))
    warm, how = loop.initial(), config.warm_start
    for _ in range(how.steps if how else 0):
        warm, _ = loop.warm(warm, 1)
    return loop.begin(warm)


def _step_from_host(
    drive: drivers.Hosted, parts: Components, state: TrainState
) -> tuple[TrainState, dict[str, jax.Array]]:
    drive.clock = drivers.Clock()
    state = jax.tree.map(jnp.copy, state)  # a step donates what it is given
    state, (values, _) = step(drive, parts, state)
    graded = drive.clock.row(parts.task.on_device).items()
    more = {n: jnp.float32(x) for n, x in graded if not n.startswith("time/")}
    return state, values | more


def _is_hosted(parts: Components) -> bool:
    """Whether the host verifies the task, reads its prompts, or asks an engine."""
    task = parts.task
    return not task.on_device or task.in_files or parts.engine is not None


def _loaded(parts: Components) -> Any:
    """Parameters of the checkpoint that the model names; None: it names none."""
    return parts.model.load(None) if parts.model.load else None


def _check_devices(parts: Components) -> None:
    """Raise a ConfigError if the run is for several devices."""
    if meshes.make(parts.config.mesh) is not None:
        raise ConfigError(
            "mesh spreads the run over several devices, and this is for one; set "
            "mesh.data, mesh.fsdp and mesh.tensor to 1, or train with python -m "
            "curax.train."
        )
