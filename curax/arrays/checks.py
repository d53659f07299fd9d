"""Checks of the dtype and shape of arguments, with messages that name the argument.

Shapes and dtypes are static: checks run while tracing and cost nothing at run time.
"""

import sys
from types import FrameType
from typing import Any

import jax
import jax.numpy as jnp

_WORDS: dict[Any, Any] = {float: jnp.floating, int: jnp.integer, bool: jnp.bool_}


def arrays(**named: tuple[Any, type]) -> list[jax.Array]:
    """Arguments as JAX arrays of one shape; numpy arrays and lists are converted.

    Args:
        **named: (value, float, int or bool) by the name of the argument.

    Returns:
        The arrays in the order given; float64 becomes float32.

    Raises:
        AssertionError: a value is not an array, has another kind of dtype or another
            shape than the first; the message names function and argument.
    """
    checked: dict[str, jax.Array] = {}
    for name, (value, kind) in named.items():
        try:
            array = value if isinstance(value, jax.Array) else jnp.asarray(value)
        except (TypeError, ValueError) as error:
            why = " ".join(str(error).split()).rstrip(".")
            raise AssertionError(f"{_called()}: {name} is no array ({why}).") from error
        if not jnp.issubdtype(array.dtype, _WORDS[kind]):
            given, word = getattr(value, "dtype", array.dtype), kind.__name__
            raise AssertionError(
                f"{_called()}: {name} is {given} and must be {word}; give "
                f"jnp.asarray({name}, {word}), for example."
            )
        checked[name] = array
    first, *others = checked
    for name in others:
        shape(**{name: (checked[name], checked[first].shape)}, like=first)
    return list(checked.values())


def shape(*, like: str = "", **named: tuple[jax.Array, tuple[int, ...]]) -> None:
    """Check that arrays have the required shapes.

    Args:
        like: name of the argument whose shape is required, for the message.
        **named: (array, required shape) by the name of the argument.

    Raises:
        AssertionError: a shape differs; the message names function and argument.
    """
    for name, (array, wanted) in named.items():
        if jnp.shape(array) != wanted:
            whose = f", as {like} has" if like else ""
            raise AssertionError(
                f"{_called()}: {name} has shape {jnp.shape(array)} and must have "
                f"{wanted}{whose}."
            )


def _called() -> str:
    """Module and name of the public function that called a check."""
    frame: FrameType | None = sys._getframe(1)
    while frame and (
        frame.f_globals["__name__"] == __name__ or frame.f_code.co_name[0] in "_<"
    ):
        frame = frame.f_back
    if frame is None:
        return "curax"
    module = frame.f_globals["__name__"].removeprefix("curax.")
    return f"{module}.{frame.f_code.co_name}"
