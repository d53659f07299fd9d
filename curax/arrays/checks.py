"""What stage functions are given: arrays of the right kind and shape, by name.

Shapes and dtypes are static, so all of this happens while tracing and costs nothing
later. Traced arrays pass as they are.
"""

import sys
from types import FrameType
from typing import Any

import jax
import jax.numpy as jnp

_WORDS: dict[Any, Any] = {float: jnp.floating, int: jnp.integer, bool: jnp.bool_}


def arrays(**named: tuple[Any, type]) -> list[jax.Array]:
    """The arrays, of one shape, of numpy or a list as JAX has them: float64 as float32.

    Args:
        **named: of each argument by its name, the value and its kind: float, int, bool.

    Raises:
        AssertionError: in a sentence with the function that was called and the name of
            the argument, if one is no array or not of its kind, or shapes differ.
    """
    found: dict[str, jax.Array] = {}
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
        found[name] = array
    first, *others = found
    for name in others:
        shape(**{name: (found[name], found[first].shape)}, like=first)
    return list(found.values())


def shape(*, like: str = "", **named: tuple[jax.Array, tuple[int, ...]]) -> None:
    """Refuse an array of another shape.

    Args:
        like: the argument that has that shape; empty: none has.
        **named: of each argument by its name, the array and the shape it must have.

    Raises:
        AssertionError: in a sentence, as `arrays`.
    """
    for name, (array, wanted) in named.items():
        if jnp.shape(array) != wanted:
            whose = f", as {like} has" if like else ""
            raise AssertionError(
                f"{_called()}: {name} has shape {jnp.shape(array)} and must have "
                f"{wanted}{whose}."
            )


def _called() -> str:
    """The public function that asked, without the helpers between."""
    frame: FrameType | None = sys._getframe(1)
    while frame and (
        frame.f_globals["__name__"] == __name__ or frame.f_code.co_name[0] in "_<"
    ):
        frame = frame.f_back
    if frame is None:
        return "curax"
    module = frame.f_globals["__name__"].removeprefix("curax.")
    return f"{module}.{frame.f_code.co_name}"
