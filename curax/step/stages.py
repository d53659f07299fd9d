"""Checked calls of the stage functions that a config names.

Stages are called through this module, so that an error of a user's function, or an
output of the wrong shape, names the function and its field in the config. Shapes and
dtypes are checked while tracing, at no cost later; `rehearsal` checks values.
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
from curax.settings.cli import out_of_memory
from curax.settings.config_paths import Place, full_name
from curax.settings.config_types import present
from curax.settings.packages import missing
from curax.types import Difficulty, Tokens

KINDS: dict[str, Any] = {
    "bool": jnp.bool_,
    "integer": jnp.integer,
    "float": jnp.floating,
}
PACKAGE = str(Path(__file__).parents[1])
LONGEST = 600  # characters of an error that are shown

Array = jax.Array | np.ndarray


def called(
    field: str,
    function: Callable[..., Any],
    *arrays: Any,
    shape: tuple[int, ...],
    kind: str,
    **options: Any,
) -> jax.Array:
    """Output of a function, checked for shape and dtype.

    Args:
        field: dotted name of the function in the config.
        function: the function.
        *arrays: its positional arguments.
        shape: required shape of the output.
        kind: required dtype of the output, a key of `KINDS`.
        **options: its keyword arguments.

    Raises:
        ConfigError: it fails, or its output has another shape or dtype.
    """
    value = _value(field, function, *arrays, **options)
    return _checked_array(field, function, value, shape, kind)


def several(
    field: str,
    function: Callable[..., Any],
    *arrays: Any,
    outputs: Sequence[tuple[tuple[int, ...], str]],
    **options: Any,
) -> tuple[jax.Array, ...]:
    """Outputs of a function that returns a tuple, each checked as by `called`.

    Args:
        field: dotted name of the function in the config.
        function: the function.
        *arrays: its positional arguments.
        outputs: required shape and kind of each output.
        **options: its keyword arguments.

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
        _checked_array(field, function, value, shape, kind)
        for value, (shape, kind) in zip(values, outputs, strict=True)
    )


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
    """Field and function as text: `field=module.function`."""
    return f"{field}={full_name(function).removeprefix('curax.')}"


def failure(field: str, function: Any, error: Exception) -> str:
    """Sentence about a function of a config that failed: which, where, and why."""
    text, frames = _text(error), _frames(error)
    theirs = [frame for frame in frames if PACKAGE not in frame.filename]
    last = (theirs or frames)[-1]
    if _is_sentence(error, frames[-1]):
        return _sentence(f"{named(field, function)}: {text}")
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
    """Context that turns exceptions while building or tracing into a ConfigError.

    Raises:
        ConfigError: a sentence with the missing package, the option that the error
            quotes, or the line that failed.
    """
    try:
        yield
    except ConfigError:
        raise
    except Exception as error:
        if out_of_memory(error):  # no fault of the config's
            raise
        if needed := missing(error):
            raise ConfigError(needed) from error
        text, last = _text(error), _frames(error)[-1]
        if _is_sentence(error, last):
            raise ConfigError(_sentence(text)) from error
        where = f"{last.filename}:{last.lineno}: {type(error).__name__}: {text}"
        fix = "change the option that this line reads, or mend the line"
        if quoted := culprit(config, text):
            where = f"{quoted} fails at {where}"
            fix = f"set {quoted.partition('=')[0]} to another value"
        raise ConfigError(f"{where}; {fix}.") from error


def _text(error: Exception) -> str:
    """Message of an error in one line, without a full stop."""
    return " ".join(str(error).split())[:LONGEST].rstrip(".") or "no message"


def _sentence(text: str) -> str:
    return text if text.endswith("?") else f"{text}."


def _frames(error: Exception) -> list[traceback.FrameSummary]:
    """Stack frames of an error, without those inside other libraries."""
    frames = traceback.extract_tb(error.__traceback__)
    return [
        frame
        for frame in frames
        if PACKAGE in frame.filename or "site-packages" not in frame.filename
    ]


def _is_sentence(error: Exception, last: traceback.FrameSummary) -> bool:
    """Whether an error is a ValueError raised by hand, with a sentence as its text."""
    return isinstance(error, ValueError) and (last.line or "").startswith("raise")


def culprit(config: Config, text: str) -> str | None:
    """The option whose value an error quotes, as `name='text'`; None without one."""
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
    """`[B]` int32, completions of each prompt, by `allocate`."""
    shape, options = known.draws.shape, {"budget": budget, "most": most}
    given = called(
        "allocate", config.allocate, known, shape=shape, kind="integer", **options
    )
    return given.astype(jnp.int32)


def met(config: Config, outcome: Array, exists: Array) -> jax.Array:
    """`[..., B]` bool, prompts whose `stop.rule` is met."""
    rule, shape = present(config.stop).rule, exists.shape[:-1]
    return called("stop.rule", rule, outcome, exists, shape=shape, kind="bool")


def pilot_norms(config: Config, *given: Any, rows: int) -> jax.Array:
    """`[rows]` float, score norms of pilots, by `pilot.norm`."""
    norm = present(present(config.pilot).norm)
    return called("pilot.norm", norm, *given, shape=(rows,), kind="float")


# ----- from outcomes to credit


def shaped(config: Config, outcome: Array, length: Array) -> jax.Array:
    """`[..., B, G]` float, rewards by `shape_reward`; the outcomes where it is None."""
    if config.shape_reward is None:
        return jnp.asarray(outcome)
    arrays, shape = (outcome, length), outcome.shape
    return called(
        "shape_reward", config.shape_reward, *arrays, shape=shape, kind="float"
    )


def gated(
    config: Config, outcome: Array, exists: Array, finished: jax.Array
) -> jax.Array:
    """`[..., B, G]` bool, completions that may train, by `gate`."""
    arrays = outcome, exists, finished
    return called("gate", config.gate, *arrays, shape=exists.shape, kind="bool")


def selected(config: Config, key: Array, reward: Array, pool: jax.Array) -> jax.Array:
    """`[..., B, G]` bool, completions that train, by `downsample`."""
    arrays = key, reward, pool
    return called(
        "downsample", config.downsample, *arrays, shape=pool.shape, kind="bool"
    )


def correction(
    config: Config, reward: Array, pool: Array, keep: jax.Array
) -> jax.Array:
    """`[..., B, G]` float, factors that undo the selection's bias, by `correct`."""
    arrays = reward, pool, keep
    return called("correct", config.correct, *arrays, shape=keep.shape, kind="float")


def prompt_weight(
    config: Config, outcome: Array, exists: Array, history: jax.Array
) -> jax.Array:
    """`[..., B, G]` float, weight of each prompt, by `objective`."""
    arrays = outcome, exists, history
    return called(
        "objective", config.objective, *arrays, shape=exists.shape, kind="float"
    )


def advantages(config: Config, reward: Array, exists: Array) -> jax.Array:
    """`[..., B, G]` float, advantages, not corrected or weighted, by `advantage`."""
    arrays = reward, exists
    return called(
        "advantage", config.advantage, *arrays, shape=exists.shape, kind="float"
    )


# ----- per token


def advantage_credit(
    config: Config,
    reward: Array,
    exists: Array,
    keep: jax.Array,
    factor: jax.Array,
) -> jax.Array:
    """`[B, G]` float32: advantage times `factor` of kept completions, 0 of others."""
    sees = exists if config.pool_statistics else keep
    advantage = advantages(config, reward, sees)
    return jnp.where(keep, advantage * factor, 0.0)


def multipliers(config: Config, tokens: Tokens) -> jax.Array:
    """`[M, T]` float, multiplier of the policy term of each token, by `modulate`."""
    shape = tokens.mask.shape
    return called("modulate", config.modulate, tokens, shape=shape, kind="float")


def ratio_weights(
    config: Config, logp: Array, logp_behaviour: Array, mask: Array
) -> jax.Array:
    """`[M, T]` float, weight of each token's policy term, by `sampling.correct`."""
    rule = present(config.sampling.correct)
    arrays, shape = (logp, logp_behaviour, mask), mask.shape
    return called("sampling.correct", rule, *arrays, shape=shape, kind="float")


def token_losses(
    config: Config,
    logp: Array,
    logp_old: Array | None,
    credit: Array | None,
    mask: Array,
) -> jax.Array:
    """`[M, T]` float, loss of each token, by `loss`."""
    arrays = logp, logp_old, credit, mask
    return called("loss", config.loss, *arrays, shape=mask.shape, kind="float")


def token_weights(config: Config, mask: Array) -> jax.Array:
    """`[M, T]` float, weight of each token, by `aggregate`."""
    return called("aggregate", config.aggregate, mask, shape=mask.shape, kind="float")


def distances(config: Config, logp: Array, logp_ref: Array | None) -> jax.Array:
    """`[M, T]` float, KL to the reference in nats, by `kl.estimator`."""
    estimator = present(config.kl).estimator
    return called(
        "kl.estimator", estimator, logp, logp_ref, shape=logp.shape, kind="float"
    )


# ----- rewards by reference answers, and the selection of prompts


def reference_weights(config: Config, spread: Any, mask: Array) -> jax.Array:
    """`[..., Y]` float, weight of each reference token, by `reflection.weights`."""
    weights, shape = present(config.reflection).weights, mask.shape
    return called(
        "reflection.weights", weights, spread, mask, shape=shape, kind="float"
    )


def length_reward(config: Config, length: jax.Array, wanted: Array) -> jax.Array:
    """`[B, G]` float, reward of the length of an answer, by `reflection.length`."""
    reward = present(present(config.reflection).length)
    return called(
        "reflection.length", reward, length, wanted, shape=length.shape, kind="float"
    )


def apply_rubric(
    config: Config, reward: jax.Array, exists: jax.Array, fit: jax.Array
) -> tuple[jax.Array, ...]:
    """`[B, G]` float rewards and bool existence, by `reflection.rubric`."""
    rubric, shape = present(present(config.reflection).rubric), reward.shape
    outputs = (shape, "float"), (shape, "bool")
    return several("reflection.rubric", rubric, reward, exists, fit, outputs=outputs)


def trained_groups(config: Config, spread: jax.Array, null: jax.Array) -> jax.Array:
    """`[B]` bool, groups that train by their own completions, by `reflection.keep`.

    Args:
        config: the recipe.
        spread: `[B]` float32, largest spread of a token in each group, nats.
        null: `[B]` float32, probability that noise alone gives one as large.
    """
    keep, nothing = present(present(config.reflection).keep), jnp.zeros_like(spread)
    scores = (nothing, spread, null, jnp.float32(jnp.nan))
    outputs = (spread.shape, "bool"), ((), "float")
    return several("reflection.keep", keep, *scores, outputs=outputs)[0]


def select_prompts(
    config: Config, scores: Sequence[jax.Array], level: jax.Array
) -> tuple[jax.Array, ...]:
    """`[F]` bool, candidates that are kept; `[]` float, new state of the rule."""
    queries = present(present(config.reflection).queries)
    outputs = (scores[0].shape, "bool"), ((), "float")
    name = "reflection.queries.keep"
    return several(name, queries.keep, *scores, level, outputs=outputs)
