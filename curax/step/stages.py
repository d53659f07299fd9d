"""Checked calls of the stage functions that a config names.

Stages are called through this module, so that an error of a user's function, or an
output of the wrong shape, names the function and its field in the config. What a field
gives stands in its contract, in the file of the stage. Shapes and dtypes are checked
while tracing, at no cost later; `rehearsal` checks values.
"""

import inspect
from collections.abc import Callable
from operator import attrgetter
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from curax import (
    advantage,
    aggregate,
    allocate,
    correct,
    downsample,
    gate,
    hint,
    loss,
    modulate,
    objective,
    off_policy,
    reflect,
    reward,
    score,
    stop,
)
from curax.arrays import checks
from curax.config import Config, ConfigError
from curax.settings import errors
from curax.settings.config_paths import Place, full_name, option, unbound
from curax.settings.config_types import is_array
from curax.settings.packages import missing

# Of each field a function whose contract is that of all: the simplest.
CONTRACTS: dict[str, Callable[..., Any]] = {
    "allocate": allocate.uniform,
    "stop.rule": stop.never,
    "pilot.norm": score.logits,
    "hint.trigger": hint.all_wrong,
    "hint.controller": hint.paper,
    "hint.credit": hint.dropped,
    "shape_reward": reward.soft_overlong,
    "gate": gate.none,
    "downsample": downsample.none,
    "correct": correct.none,
    "objective": objective.prompt_weight,
    "advantage": advantage.raw,
    "modulate": modulate.none,
    "sampling.off_policy": off_policy.ratio,
    "loss": loss.reinforce,
    "aggregate": aggregate.token_mean,
    "kl.estimator": loss.k1,
    "reflection.weights": reflect.mean,
    "reflection.length": reflect.length_term,
    "reflection.rubric": reflect.drop,
    "reflection.keep": reflect.percentile,
    "reflection.queries.keep": reflect.percentile,
}
WORDS = {"int": "integer"}  # of kinds, in messages

Array = jax.Array | np.ndarray


def called(config: Config, field: str, *arrays: Any, **options: Any) -> jax.Array:
    """What the function of a field gives, checked; integers as int32.

    Args:
        config: the recipe.
        field: dotted name of the function, a key of `CONTRACTS`.
        *arrays: its positional arguments.
        **options: its keyword arguments.

    Raises:
        ConfigError: it fails, or its output has another shape or dtype than its
            contract says.
    """
    return _called(field, attrgetter(field)(config), *arrays, **options)


def corrected(
    config: Config, goes_by: Callable[[Any], Array], pool: Array, keep: Array
) -> jax.Array:
    """`[B, G]` float32, the product of the rules of `correct`, each as by `called`.

    Args:
        config: the recipe.
        goes_by: the outcomes or rewards `[B, G]` that a rule is given.
        pool: as of a rule.
        keep: as of a rule.
    """
    undo = jnp.asarray(keep, jnp.float32)
    for rule in _factors(config.correct):
        undo *= _called("correct", rule, goes_by(rule), pool, keep)
    return undo


def _factors(rule: Any) -> list[Any]:
    """The rules whose product a rule is, in any depth; itself, if it is none."""
    if unbound(rule) is not correct.every:
        return [rule]
    return [inner for one in option(rule, "rules") for inner in _factors(one)]


def several(config: Config, field: str, *arrays: Any) -> tuple[jax.Array, ...]:
    """What a function that gives a tuple gives, each checked as by `called`.

    Raises:
        ConfigError: as `called`, or the outputs are more or fewer.
    """
    function = attrgetter(field)(config)
    values = _value(field, function, *arrays)
    outputs = checks.outputs(CONTRACTS[field], *arrays)
    count = len(values) if isinstance(values, tuple) else 1
    if not isinstance(values, tuple) or count != len(outputs):
        raise ConfigError(
            f"{named(field, function)} gives {count} output{'s' * (count != 1)}, and "
            f"{field} must give {len(outputs)}; mend the function, or name another."
        )
    return tuple(
        _checked_array(field, function, value, shape, kind)
        for value, (kind, shape) in zip(values, outputs, strict=True)
    )


def shaped(config: Config, outcome: Array, length: Array) -> jax.Array:
    """`[..., B, G]` float, rewards by `shape_reward`; the outcomes where it is None."""
    if config.shape_reward is None:
        return jnp.asarray(outcome)
    return called(config, "shape_reward", outcome, length)


def advantage_credit(
    config: Config,
    reward: Array,
    exists: Array,
    keep: jax.Array,
    factor: jax.Array,
) -> jax.Array:
    """`[B, G]` float32: advantage times `factor` of kept completions, 0 of others."""
    sees = exists if config.pool_statistics else keep
    return jnp.where(keep, called(config, "advantage", reward, sees) * factor, 0.0)


def _called(field: str, function: Any, *arrays: Any, **options: Any) -> jax.Array:
    value = _value(field, function, *arrays, **options)
    ((kind, shape),) = checks.outputs(CONTRACTS[field], *arrays)
    return _checked_array(field, function, value, shape, kind)


def _value(field: str, function: Callable[..., Any], *arrays: Any, **options: Any):
    """Output of a function; any exception becomes a ConfigError."""
    try:
        return function(*arrays, **options)
    except ConfigError:
        raise
    except Exception as error:
        sentence = missing(error) or failure(field, function, error)
        raise ConfigError(sentence) from error


def _checked_array(
    field: str, function: Any, value: Any, shape: tuple[int, ...], kind: str
) -> jax.Array:
    """The value as an array; a ConfigError unless shape and dtype are as required."""
    known = is_array(value)
    if not (
        known
        and tuple(value.shape) == tuple(shape)
        and jnp.issubdtype(value.dtype, checks.KINDS[kind])
    ):
        given = f"{value.dtype} {list(value.shape)}" if known else _article(value)
        raise ConfigError(
            f"{named(field, function)} gives {given}, and {field} must give "
            f"{WORDS.get(kind, kind)} {list(shape)}; mend the function, or name "
            "another."
        )
    return jnp.asarray(value, jnp.int32 if kind == "int" else None)


def named(field: str, function: Any) -> str:
    """Field and function as text: `field=module.function`."""
    return f"{field}={full_name(function).removeprefix('curax.')}"


def failure(field: str, function: Any, error: Exception) -> str:
    """Sentence about a function of a config that failed: which, where, and why."""
    frames = errors.frames(error)
    theirs = [frame for frame in frames if errors.PACKAGE not in frame.filename]
    last = (theirs or frames)[-1]
    if said := errors.by_hand(error, frames[-1]):
        return f"{named(field, function)}: {said}"
    # Of a function among the options, the line that failed is the line to name.
    for name, place in Place(function).walk(field):
        inner = unbound(place.value)
        code = getattr(inspect.unwrap(inner), "__code__", None)
        if code and (code.co_filename, code.co_name) == (last.filename, last.name):
            field, function = name, inner
    return (
        f"{named(field, function)} fails at {last.filename}:{last.lineno} "
        f"({type(error).__name__}: {errors.text(error)}); mend that line, or the "
        f"options of {field}."
    )


def _article(value: Any) -> str:
    kind = type(value).__name__
    return "nothing" if value is None else f"a {kind} that is no array"
