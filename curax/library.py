"""Functions of a recipe, for notebooks and for loops of one's own.

`curax` exports these names: `curax.build(curax.load("grpo"))`. They are for one device.

`sample`, `forward_backward`, `optim_step` and `compute_logprobs` are what a step is
made of, for loops that are no recipe: pure functions of a state, to be jitted together.
"""

import dataclasses
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np

from curax import hint, update
from curax.arrays import frozen
from curax.config import Config, ConfigError
from curax.models import written
from curax.settings import errors
from curax.settings.config_paths import full_name
from curax.step import build as builder
from curax.step import callbacks, draw, drivers, loops, optimise, play
from curax.step import mesh as meshes
from curax.step.step import step
from curax.step.types import Components
from curax.theory import predict as theory
from curax.theory.population import LIFT
from curax.types import Batch, Contexts, Prompts, Rollouts, TrainState

PROMPTS = 200  # of the population that a prediction takes where none is given


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
        ConfigError: the run is for several devices, or begins with a memory.
    """
    _check_devices(parts)
    _check_memory(parts)
    if parts.needs_host:
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
        with errors.refusals(RuntimeError):
            parts.engine.start(parts.config)
    if parts.needs_host:
        drive = drivers.Hosted()
        drive.begins = False  # nobody knows whether there is a next step, or of what
        return partial(_step_from_host, drive, parts)
    return jax.jit(partial(_step, parts))


def run(
    parts: Components, seed: int | jax.Array = 0
) -> tuple[TrainState, dict[str, jax.Array]]:
    """A whole run, warm start included, as a pure function of its seed.

    jit it, and vmap it over seeds; or build `parts` inside the traced function, from a
    config with traced magnitudes, and vmap it over these. Where the host reads or
    grades the task, the program calls back for it, as `step.callbacks` says.

    Args:
        parts: of the run.
        seed: `[]` uint32; it may be traced.

    Returns:
        The state after `config.steps` steps; metrics of each, `[steps]` float32.

    Raises:
        ConfigError: an engine draws, a program cannot call the task, or the run is for
            several devices or begins with a memory.
    """
    _check_devices(parts)
    _check_memory(parts)
    if parts.engine:
        raise ConfigError(
            "sampling.engine draws for the task, which no compiled run can call; make "
            "single steps by curax.train_step, or train with python -m curax.train."
        )
    with errors.config_errors(parts.config):
        parts = dataclasses.replace(parts, task=callbacks.inside(parts.task))
    return loops.run(parts, jnp.asarray(seed, jnp.uint32), _loaded(parts))


# ----- a loop of one's own

TokenLoss = Callable[[jax.Array, jax.Array, jax.Array, jax.Array], jax.Array]


@flax.struct.dataclass(kw_only=True)
class Datum:
    """Rows of tokens to train on, made by `datum`."""

    contexts: Contexts  # [C, P], each of which is run once for all its rows
    batch: Batch  # [M, T]


def datum(
    prompts: Prompts,
    tokens: jax.Array,
    mask: jax.Array,
    *,
    advantage: float | jax.Array = 1.0,
    logp: jax.Array | None = None,
    context: jax.Array | None = None,
    support: jax.Array | None = None,
) -> Datum:
    """Rows of tokens, how much each counts, and what drew them.

    Args:
        prompts: B of them, what the rows go on from.
        tokens: `[M, T]` int32.
        mask: `[M, T]` bool, True on tokens that train.
        advantage: `[]`, `[M]` or `[M, T]` float, what multiplies the gradient of a
            token; 1 imitates.
        logp: `[M, T]` float, nats, of what drew the tokens; None: nobody did, for a
            loss without a ratio.
        context: `[M]` int32 in [0, B), the prompt of each row; None: M = B, in order.
        support: `[M, T, S]`, the `support` of rows of `sample`, within which log-probs
            then are; None: they are of the whole vocabulary.

    Raises:
        ConfigError: there are no rows, shapes do not fit each other, or context names
            a prompt that is not there, which is not seen while it is traced.
    """
    shape, credit = mask.shape, jnp.asarray(advantage, jnp.float32)
    if len(shape) != 2 or min(shape) < 1:
        raise ConfigError(
            f"mask of curax.datum has shape {shape}; give one of rows and tokens, at "
            "least one of each."
        )
    _check_rows(shape, tokens=tokens, logp=logp)
    _check_rows(shape[:1], context=context)
    if credit.ndim:
        _check_rows(shape[: credit.ndim], advantage=credit)
    if support is not None:
        _check_rows((*shape, *support.shape[2:3]), support=support)
    _check_prompts(context, len(prompts.tokens))
    if context is None and shape[0] != len(prompts.tokens):
        raise ConfigError(
            f"curax.datum is given {shape[0]} rows of {len(prompts.tokens)} prompts; "
            "give context, the prompt of each row, as that of curax.sample."
        )
    credit = credit[:, None] if credit.ndim == 1 else credit
    drawn = jnp.zeros(shape, jnp.float32) if logp is None else logp
    rows = jnp.arange(shape[0], dtype=jnp.int32) if context is None else context
    batch = Batch(
        tokens=tokens,
        mask=mask,
        context=rows,
        credit=jnp.broadcast_to(credit, shape),
        multiplier=jnp.ones(shape, jnp.float32),
        logp_behaviour=drawn,
        logp_policy=drawn,
        logp_old=drawn,
        logp_ref=None,
        support=support,
    )
    return Datum(contexts=hint.none(_as_jax(prompts)), batch=batch)


def _as_jax(prompts: Prompts) -> Prompts:
    """Prompts as arrays of JAX; a task that reads files gives those of NumPy."""
    tokens, mask = jnp.asarray(prompts.tokens), jnp.asarray(prompts.mask)
    return dataclasses.replace(prompts, tokens=tokens, mask=mask)


def _check_rows(shape: tuple[int, ...], **arrays: jax.Array | None) -> None:
    """Raise a ConfigError if an array of `datum` that is given has another shape."""
    for name, array in arrays.items():
        if array is not None and array.shape != shape:
            raise ConfigError(
                f"{name} of curax.datum has shape {array.shape}, and by its mask there "
                f"are {shape}; give these."
            )


def _check_prompts(context: jax.Array | None, count: int) -> None:
    """Raise a ConfigError if `context` of `datum` has values outside [0, count)."""
    if context is None:
        return
    try:
        found = np.asarray(context)
    except jax.errors.TracerArrayConversionError:
        return
    outside = found[(found < 0) | (found >= count)]
    if outside.size:
        raise ConfigError(
            f"context of curax.datum has {outside[0]}, and there are {count} prompts; "
            f"give each row one from 0 to {count - 1}."
        )


def sample(
    parts: Components, state: TrainState, prompts: Prompts, each: int, key: jax.Array
) -> Rollouts:
    """Completions of prompts by the policy of a state, by `config.sampling`.

    Args:
        parts: of the run.
        state: whose parameters draw.
        prompts: B of them.
        each: n, completions of a prompt.
        key: random key.

    Returns:
        `[B n]` rows; row b n + i is completion i of prompt b. `logp_behaviour` has the
        log-prob of each token under what it was drawn from, and `support` with
        `sampling.replay_support` the tokens that this could be.

    Raises:
        ConfigError: the task has an environment that is asked from the host, or n is
            below 1.
    """
    if play.hosted(parts):
        raise ConfigError(
            "task.environment is asked from the host, which answers no turns here; "
            "make steps by curax.train_step, or name a task whose environment is a JAX "
            "function."
        )
    if each < 1:
        raise ConfigError(f"each={each} must be at least 1.")
    request = draw.plain(_as_jax(prompts), each, key, draw.to_train(parts))
    return draw.draw(parts, state, request)


def compute_logprobs(parts: Components, state: TrainState, rows: Datum) -> jax.Array:
    """`[M, T]` float32, nats: log-probs of tokens under the policy of a state.

    At the temperature of `config.sampling`; anything finite off the mask.
    """
    batch = rows.batch
    given = rows.contexts, batch.tokens, batch.mask, batch.context
    how = optimise.settings(parts.config)
    model = draw.policy(parts, state)
    return update.logprobs(model, state.params, *given, how, batch.support)


def forward_backward(
    parts: Components,
    state: TrainState,
    rows: Datum,
    loss: TokenLoss,
    *,
    weight: jax.Array | None = None,
) -> tuple[Any, dict[str, jax.Array]]:
    """Gradient of a loss of tokens, which `optim_step` takes; gradients may be added.

        L = sum over rows and tokens of weight * loss(logp, logp_old, advantage, mask)

    with `logp_old` the log-probs of what drew the tokens, so that a ratio in the loss
    is policy over behaviour.

    Args:
        parts: of the run; micro-batches are those of `config.update`.
        state: whose policy is differentiated.
        rows: to train on.
        loss: of `curax.loss`, or a function of one's own with that signature that
            gives `[M, T]`.
        weight: `[M, T]` float32, share of each token, as of `curax.aggregate`; None: 1,
            a sum.

    Returns:
        The gradient, like `state.params`; `loss` `[]` and `logp` `[M, T]` float32.

    Raises:
        ConfigError: `weight` has another shape than the rows.
    """
    batch = rows.batch
    if weight is not None and jnp.shape(weight) != batch.mask.shape:
        raise ConfigError(
            f"weight of curax.forward_backward has shape {jnp.shape(weight)}, and the "
            f"rows have {batch.mask.shape}; give one of each token."
        )

    def of_tokens(logp, _, part):
        return loss(logp, part.logp_old, part.credit, part.mask)

    value, gradient, own = update.gradient(
        draw.policy(parts, state),
        state.params,
        rows.contexts,
        batch,
        batch.mask.astype(jnp.float32) if weight is None else weight,
        of_tokens,
        optimise.settings(parts.config),
        still_old=False,
    )
    return gradient, {"loss": value, "logp": own.logp}


def optim_step(parts: Components, state: TrainState, gradient: Any) -> TrainState:
    """The state after one update of `config.optimizer`, clipped by `update.clip_norm`.

    A gradient that is not finite changes nothing but the number of the step.
    """
    params, opt_state, _ = update.apply(
        parts.tx, state.params, state.opt_state, jnp.float32(0), gradient, True
    )
    after = {"params": params, "opt_state": opt_state, "step": state.step + 1}
    return dataclasses.replace(state, **after)


def save_for_sampler(parts: Components, state: TrainState, folder: str | Path) -> None:
    """Write the policy of a state as a Hugging Face folder, which engines load.

    Args:
        parts: of the run, with a model of `curax.models`.
        state: whose parameters are written, LoRA merged.
        folder: does not exist yet; it appears when it is whole.

    Raises:
        ConfigError: Hugging Face has no format for the model, or there can be no such
            folder.
        OSError: what is in it cannot be written, as on a full disk.
    """
    params = jax.device_get(frozen.join(state.params, state.frozen))
    with errors.config_errors():
        if not written.is_possible(parts.config):
            raise ConfigError(
                f"{full_name(parts.config.model)} has no form of Hugging Face; take a "
                "model of curax.models."
            )
        written.write(folder, parts.config, parts.task, params)


# ----- the x-ray


def predict(
    config: Config, p: Any, population: Any = None, *, lift: float = LIFT
) -> theory.Prediction:
    """Predicted weight w(p), signal, draws and noise of a recipe: the x-ray as numbers.

    `weight` is w(p) of E[update] = w(p) grad p; other fields are the signal,
    expected draws and noise. Nothing is trained.

    Args:
        config: the recipe.
        p: `[R]` pass rates in (0, 1).
        population: `[K]` pass rates in [0, 1] of the prompts of the task, all equally
            likely; None: spread evenly over (0, 1).
        lift: nats that each level of a hint adds to the log-odds of p; for recipes with
            hints.

    Raises:
        ConfigError: its functions fail on made-up outcomes, its rewards are not
            outcomes, or p or the population are no such pass rates.
    """
    if config.reflection:
        raise ConfigError(
            "reflection rewards by the log-prob of reference answers and w(p) is about "
            "right and wrong ones; set reflection to None."
        )
    if population is None:
        population = (np.arange(PROMPTS) + 0.5) / PROMPTS
    rates, others = _rates(p, "p"), _rates(population, "population", ends=True)
    with errors.config_errors(config):
        plain = theory.predict(config, rates, others, lift=lift)
        return theory.with_hints(config, plain)


# ----- parts of these


def _rates(values: Any, name: str, *, ends: bool = False) -> np.ndarray:
    """Pass rates `[R]`; `ends`: 0 and 1 are some too."""
    try:
        rates = np.atleast_1d(np.asarray(values, np.float64))
    except (TypeError, ValueError):
        rates = np.empty(0)
    inside = (rates > 0) & (rates < 1) | ends & ((rates == 0) | (rates == 1))
    if rates.ndim > 1 or not rates.size or not inside.all():
        between = "[0, 1]" if ends else "(0, 1)"
        raise ConfigError(
            f"{name}={values} is no list of pass rates; give numbers in {between}."
        )
    return rates


def _step(
    parts: Components, state: TrainState
) -> tuple[TrainState, dict[str, jax.Array]]:
    state, (values, _) = step(drivers.Traced(), parts, state)
    return state, values


def _init_from_host(parts: Components, seed: int) -> TrainState:
    config = dataclasses.replace(parts.config, seed=seed, seeds=1)
    loop = loops.Staged(dataclasses.replace(parts, config=config))
    return loop.begin(loop.warmed())


def _step_from_host(
    drive: drivers.Hosted, parts: Components, state: TrainState
) -> tuple[TrainState, dict[str, jax.Array]]:
    drive.clock = drivers.Clock()
    state = jax.tree.map(jnp.copy, state)  # a step donates what it is given
    state, (values, _) = step(drive, parts, state)
    graded = drive.clock.row(parts.task.on_device).items()
    more = {n: jnp.float32(x) for n, x in graded if not n.startswith("time/")}
    return state, values | more


def _loaded(parts: Components) -> Any:
    """Parameters of the checkpoint that the model names; None: it names none."""
    return parts.model.load(None) if parts.model.load else None


def _check_memory(parts: Components) -> None:
    """Raise a ConfigError if the run is to begin with a memory."""
    if (path := parts.config.memory.load) is not None:
        raise ConfigError(
            f"memory.load={path} is read by python -m curax.train alone; set "
            "memory.load to None."
        )


def _check_devices(parts: Components) -> None:
    """Raise a ConfigError if the run is for several devices."""
    if meshes.make(parts.config.mesh) is not None:
        raise ConfigError(
            "mesh spreads the run over several devices, and this is for one; set "
            "mesh.data, mesh.fsdp and mesh.tensor to 1, or train with python -m "
            "curax.train."
        )
