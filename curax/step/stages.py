"""The functions that a config names, called and held to what they promise.

Whoever joins the stages calls them here, so that a function of a user's own that fails,
or gives what no stage gives, is told by its name and by the field that names it. Shapes
and dtypes are checked while tracing, at no cost later; `rehearsal` looks at values.
"""

import contextlib
import traceback
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from curax.config import Config, ConfigError
from curax.settings.config_paths import Place, full_name
from curax.settings.packages import missing
from curax.types import Difficulty, Tokens

KINDS: dict[str, Any] = {
    "bool": jnp.bool_,
    "integer": jnp.integer,
    "float": jnp.floating,
}
PACKAGE = str(Path(__file__).parents[1])
LONGEST = 600  # characters of an error that are told

Array = jax.Array | np.ndarray


def called(
    field: str,
    function: Callable[..., Any],
    *arrays: Any,
    shape: tuple[int, ...],
    kind: str,
    **options: Any,
) -> jax.Array:
    """What a function gives for arrays.

    Args:
        field: dotted name of the function in the config.
        function: what stands there.
        *arrays: it is called with these.
        shape: that its output must have.
        kind: that its dtype must be, of `KINDS`.
        **options: it is called with these too.

    Raises:
        ConfigError: it fails, or its output has another shape or dtype.
    """
    value = _value(field, function, *arrays, **options)
    return _held(field, function, value, shape, kind)


def several(
    field: str,
    function: Callable[..., Any],
    *arrays: Any,
    outputs: Sequence[tuple[tuple[int, ...], str]],
    **options: Any,
) -> tuple[jax.Array, ...]:
    """What a function of several outputs gives, as `called`.

    Args:
        field: dotted name of the function in the config.
        function: what stands there.
        *arrays: it is called with these.
        outputs: shape and kind of each output.
        **options: it is called with these too.

    Raises:
        ConfigError: as `called`, or the outputs are more or fewer.
    """
    values = _value(field, function, *arrays, **options)
    count = len(values) if isinstance(values, tuple) else 1
    if not isinstance(values, tuple) or count != len(outputs):
        raise ConfigError(
            f"{named(field, function)} gives {count} output{'s' * (count != 1)}, and "
            f"{field} must give {len(outputs)}; mend the function, or name another."
        )
    return tuple(
        _held(field, function, value, shape, kind)
        for value, (shape, kind) in zip(values, outputs, strict=True)
    )


def _value(field: str, function: Callable[..., Any], *arrays: Any, **options: Any):
    """What a function gives, or a sentence on how it failed."""
    try:
        return function(*arrays, **options)
    except ConfigError:
        raise
    except Exception as error:
        told = missing(error) or failure(field, function, error)
        raise ConfigError(told) from error


def _held(
    field: str, function: Any, value: Any, shape: tuple[int, ...], kind: str
) -> jax.Array:
    """A value of this shape and kind, or a sentence on what it is."""
    is_array = hasattr(value, "shape") and hasattr(value, "dtype")
    if not (
        is_array
        and tuple(value.shape) == tuple(shape)
        and jnp.issubdtype(value.dtype, KINDS[kind])
    ):
        given = f"{value.dtype} {list(value.shape)}" if is_array else _article(value)
        raise ConfigError(
            f"{named(field, function)} gives {given}, and {field} must give {kind} "
            f"{list(shape)}; mend the function, or name another."
        )
    return jnp.asarray(value)


def named(field: str, function: Any) -> str:
    """A field and the function that it names, in short."""
    return f"{field}={full_name(function).removeprefix('curax.')}"


def failure(field: str, function: Any, error: Exception) -> str:
    """In a sentence that a function of a config failed, where, and why."""
    text, frames = _text(error), _frames(error)
    theirs = [frame for frame in frames if PACKAGE not in frame.filename]
    last = (theirs or frames)[-1]
    if _is_sentence(error, frames[-1]):
        return f"{named(field, function)}: {text}."
    # Of a function among the options, the line that failed is the line to name.
    for name, place in Place(function).walk(field):
        inner = place.value.func if isinstance(place.value, partial) else place.value
        code = getattr(inner, "__code__", None)
        if code and (code.co_filename, code.co_name) == (last.filename, last.name):
            field, function = name, inner
    return (
        f"{named(field, function)} fails at {last.filename}:{last.lineno} "
        f"({type(error).__name__}: {text}); mend that line, or the options of {field}."
    )


@contextlib.contextmanager
def config_errors(config: Config) -> Iterator[None]:
    """Whatever is raised while a config is built or traced becomes a ConfigError.

    Raises:
        ConfigError: in a sentence with the package that is missing, the option that the
            error quotes, or else the line that failed.
    """
    try:
        yield
    except ConfigError:
        raise
    except Exception as error:
        if needed := missing(error):
            raise ConfigError(needed) from error
        text, last = _text(error), _frames(error)[-1]
        if _is_sentence(error, last):
            raise ConfigError(f"{text}.") from error
        where = f"{last.filename}:{last.lineno}: {type(error).__name__}: {text}"
        fix = "change the option that this line reads, or mend the line"
        if quoted := culprit(config, text):
            where = f"{quoted} fails at {where}"
            fix = f"set {quoted.partition('=')[0]} to another value"
        raise ConfigError(f"{where}; {fix}.") from error


def _text(error: Exception) -> str:
    """What an error says, in one line without a full stop."""
    return " ".join(str(error).split())[:LONGEST].rstrip(".") or "no message"


def _frames(error: Exception) -> list[traceback.FrameSummary]:
    """The calls that led to an error, but for those inside other libraries."""
    frames = traceback.extract_tb(error.__traceback__)
    return [
        frame
        for frame in frames
        if PACKAGE in frame.filename or "site-packages" not in frame.filename
    ]


def _is_sentence(error: Exception, last: traceback.FrameSummary) -> bool:
    """Whether an error was raised by hand, as a sentence about an option."""
    return isinstance(error, ValueError) and (last.line or "").startswith("raise")


def culprit(config: Config, text: str) -> str | None:
    """The option whose text an error quotes, as `name='text'`; None: there is none."""
    for name, place in Place(config).walk():
        value = place.value
        if isinstance(value, str) and len(value) > 1 and repr(value) in text:
            return f"{name}={value!r}"
    return None


def _article(value: Any) -> str:
    kind = type(value).__name__
    return "nothing" if value is None else f"a {kind} that is no array"


# ----- before completions are drawn


def counts(config: Config, known: Difficulty, *, budget: int, most: int) -> jax.Array:
    """`[B]` int32, completions of each prompt, as `allocate` gives them."""
    shape, options = known.draws.shape, {"budget": budget, "most": most}
    given = called(
        "allocate", config.allocate, known, shape=shape, kind="integer", **options
    )
    return given.astype(jnp.int32)


def met(config: Config, outcome: Array, exists: Array) -> jax.Array:
    """`[..., B]` bool, prompts that draw no more."""
    assert config.stop
    shape = exists.shape[:-1]
    rule = config.stop.rule
    return called("stop.rule", rule, outcome, exists, shape=shape, kind="bool")


def pilot_norms(config: Config, *given: Any, rows: int) -> jax.Array:
    """`[rows]` float, norms of the scores of pilots."""
    assert config.pilot
    norm = config.pilot.norm
    assert norm
    return called("pilot.norm", norm, *given, shape=(rows,), kind="float")


# ----- from outcomes to credit


def shaped(config: Config, outcome: Array, length: Array) -> jax.Array:
    """`[..., B, G]` float, rewards of outcomes; the outcomes where nothing shapes."""
    if config.shape_reward is None:
        return jnp.asarray(outcome)
    return called(
        "shape_reward",
        config.shape_reward,
        outcome,
        length,
        shape=outcome.shape,
        kind="float",
    )


def gated(
    config: Config, outcome: Array, exists: Array, finished: jax.Array
) -> jax.Array:
    """`[..., B, G]` bool, completions that may train."""
    arrays = outcome, exists, finished
    return called("gate", config.gate, *arrays, shape=exists.shape, kind="bool")


def selected(config: Config, key: Array, reward: Array, pool: jax.Array) -> jax.Array:
    """`[..., B, G]` bool, completions that train."""
    arrays = key, reward, pool
    return called(
        "downsample", config.downsample, *arrays, shape=pool.shape, kind="bool"
    )


def correction(
    config: Config, reward: Array, pool: Array, keep: jax.Array
) -> jax.Array:
    """`[..., B, G]` float, what undoes the selection."""
    arrays = reward, pool, keep
    return called("correct", config.correct, *arrays, shape=keep.shape, kind="float")


def prompt_weight(
    config: Config, outcome: Array, exists: Array, history: jax.Array
) -> jax.Array:
    """`[..., B, G]` float, the weight of the objective."""
    arrays = outcome, exists, history
    return called(
        "objective", config.objective, *arrays, shape=exists.shape, kind="float"
    )


def advantages(config: Config, reward: Array, exists: Array) -> jax.Array:
    """`[..., B, G]` float, credit before corrections and weights."""
    arrays = reward, exists
    return called(
        "advantage", config.advantage, *arrays, shape=exists.shape, kind="float"
    )


# ----- per token


def multipliers(config: Config, tokens: Tokens) -> jax.Array:
    """`[M, T]` float, what multiplies the policy term of each token."""
    shape = tokens.mask.shape
    return called("modulate", config.modulate, tokens, shape=shape, kind="float")


def token_losses(
    config: Config,
    logp: Array,
    logp_old: Array | None,
    credit: Array | None,
    mask: Array,
) -> jax.Array:
    """`[M, T]` float, the loss of each token."""
    arrays = logp, logp_old, credit, mask
    return called("loss", config.loss, *arrays, shape=mask.shape, kind="float")


def token_weights(config: Config, mask: Array) -> jax.Array:
    """`[M, T]` float, what each token weighs."""
    return called("aggregate", config.aggregate, mask, shape=mask.shape, kind="float")


def distances(config: Config, logp: Array, logp_ref: Array | None) -> jax.Array:
    """`[M, T]` float, nats to the reference."""
    assert config.kl
    estimator = config.kl.estimator
    return called(
        "kl.estimator", estimator, logp, logp_ref, shape=logp.shape, kind="float"
    )


# ----- rewards by reference answers, and the prompts that are worth their draws


def reference_weights(config: Config, spread: Any, mask: Array) -> jax.Array:
    """`[..., Y]` float, what each token of a reference weighs."""
    assert config.reflection
    weights, shape = config.reflection.weights, mask.shape
    return called(
        "reflection.weights", weights, spread, mask, shape=shape, kind="float"
    )


def length_reward(config: Config, length: jax.Array, wanted: Array) -> jax.Array:
    """`[B, G]` float, the reward of how long an answer is."""
    assert config.reflection
    reward = config.reflection.length
    assert reward
    return called(
        "reflection.length", reward, length, wanted, shape=length.shape, kind="float"
    )


def apply_rubric(
    config: Config, reward: jax.Array, exists: jax.Array, fit: jax.Array
) -> tuple[jax.Array, ...]:
    """`[B, G]` float rewards and bool, by a rubric."""
    assert config.reflection
    rubric, shape = config.reflection.rubric, reward.shape
    assert rubric
    outputs = (shape, "float"), (shape, "bool")
    return several("reflection.rubric", rubric, reward, exists, fit, outputs=outputs)


def select_prompts(
    config: Config, looks: Sequence[jax.Array], level: jax.Array
) -> tuple[jax.Array, ...]:
    """`[F]` bool, candidates that stay; `[]` float, the new state of what decides."""
    assert config.reflection
    queries = config.reflection.queries
    assert queries
    outputs = (looks[0].shape, "bool"), ((), "float")
    name = "reflection.queries.keep"
    return several(name, queries.keep, *looks, level, outputs=outputs)
