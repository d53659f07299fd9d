"""Contracts: what a function takes and gives, and declares, checked while tracing.

    @checks.contract(least_group=2)
    def leave_one_out(reward: FloatG, exists: BoolG) -> FloatG: ...

Annotations of `types` say shape and kind: `FloatG` is `[..., G]` float. An axis has one
size wherever it stands in a signature, and `...` are the same leading axes, any number
of them. Both are static, so that checks run while tracing and cost nothing later.
"""

import dataclasses
import functools
import inspect
import re
import typing
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple, TypeVar, cast

import jax
import jax.numpy as jnp
import numpy as np

from curax.settings.config_types import field_types, metadata, out_of_range
from curax.settings.declared import declares

KINDS: dict[str, Any] = {"float": jnp.floating, "int": jnp.integer, "bool": jnp.bool_}

F = TypeVar("F", bound=Callable[..., Any])
Axes = tuple[str, ...]
Shape = tuple[int, ...]
Sizes = dict[str, Any]  # of axes by name; a tuple of `...`


class Stated(NamedTuple):
    """What an annotation states of an array."""

    kind: str  # a key of KINDS
    shapes: list[Axes]  # the array has one of them
    optional: bool  # None may stand for it


class Contract(NamedTuple):
    """What the signature of a function states."""

    takes: dict[str, Any]  # by argument: Stated, or that of each field of a record
    gives: list[Stated]
    ranges: dict[str, Any]  # annotations of options that are numbers of a range


def contract(**properties: Any) -> Callable[[F], F]:
    """Decorator that checks arguments by their annotations, and sets properties.

    A function so decorated takes numpy arrays and lists as well, which become JAX
    arrays, float64 float32. Of a record a field with one axis may be one number for
    all. Signature and name stay as they are.

    Args:
        **properties: what the function declares; see `settings/declared.py`.

    Returns:
        The decorator. Where an argument has another shape or dtype, or an option is out
        of its range, the function raises an AssertionError, a sentence that names both.
    """

    def decorated(function: F) -> F:
        stated = _contract(function)
        names = tuple(inspect.signature(function).parameters)
        home = function.__module__.removeprefix("curax.")
        called = f"{home}.{function.__qualname__}"

        @functools.wraps(function)
        def checked(*given: Any, **options: Any) -> Any:
            named = dict(zip(names, given, strict=False))
            try:
                found = _checked(stated, named | options)
            except AssertionError as error:
                raise AssertionError(f"{called}: {error}") from error.__cause__
            arrays = (found.get(name, value) for name, value in named.items())
            options |= {name: found[name] for name in options if name in found}
            return function(*arrays, *given[len(names) :], **options)

        return cast(F, declares(contract=stated, **properties)(checked))

    return decorated


def outputs(function: Any, *given: Any) -> list[tuple[str, Shape]]:
    """Kind and shape of each array that a function with a contract gives for these."""
    stated: Contract = function.contract
    sizes = _sizes()
    for each, value in zip(stated.takes.values(), given, strict=False):
        for _, array, part in _fields("", each, value):
            if hasattr(part, "shape"):
                fits = (_fitted(axes, part.shape, sizes) for axes in array.shapes)
                sizes = next(filter(None, fits), sizes)
    return [(kind, _shape(axes, sizes)) for kind, (axes, *_), _ in stated.gives]


def _contract(function: Callable[..., Any]) -> Contract:
    hints = typing.get_type_hints(function, include_extras=True)
    of = hints.pop("return", None)
    several = typing.get_args(of) if typing.get_origin(of) is tuple else (of,)
    return Contract(
        takes={name: _stated(kind) for name, kind in hints.items()},
        gives=[given for given in map(_stated, several) if isinstance(given, Stated)],
        ranges={name: kind for name, kind in hints.items() if any(metadata(kind))},
    )


def _stated(annotation: Any) -> Stated | dict[str, Stated] | None:
    """What is stated of an array, or of the fields of a record; None: nothing."""
    if dataclasses.is_dataclass(annotation):
        fields = field_types(cast(type, annotation)).items()
        of = {name: _stated(kind) for name, kind in fields}
        return {name: each for name, each in of.items() if isinstance(each, Stated)}
    texts = [text for text in metadata(annotation) if isinstance(text, str)]
    if not texts:
        return None
    shapes = [tuple(re.findall(r"\w+(?=[,\]])|\.\.\.", text)) for text in texts]
    kind = texts[0].rpartition(" ")[2]
    return Stated(kind, shapes, type(None) in typing.get_args(annotation))


def _checked(stated: Contract, given: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments that have a shape, checked, as JAX arrays."""
    found, sizes, first = {}, _sizes(), {}
    for name, value in given.items():
        if bounds := out_of_range(value, stated.ranges.get(name)):
            fix = f"set it to {bounds.nearest(value)}"
            raise AssertionError(f"{name} is {value} and must be {bounds}; {fix}.")
    for name, each in stated.takes.items():
        if name in given and each:
            parts = {}
            for key, array, part in _fields(name, each, given[name]):
                parts[key] = _array(key, array, part)
                if parts[key] is not None:
                    _check_shape(key, array, parts[key].shape, sizes, first)
            if isinstance(each, dict):
                fields = {key.rpartition(".")[2]: part for key, part in parts.items()}
                parts = {name: dataclasses.replace(given[name], **fields)}
            found |= parts
    return found


def _fields(name: str, each: Any, value: Any) -> Iterator[tuple[str, Stated, Any]]:
    """Yield (name, what is stated, value) of an argument, or of fields of a record."""
    if isinstance(each, Stated):
        yield name, each, value
    elif each and value is not None:
        fields = {key: getattr(value, key) for key in each}
        size = max(map(np.size, fields.values()))
        for key, part in fields.items():
            (axes, *_) = each[key].shapes
            alone = np.ndim(part) == 0 and len(axes) == 1 and axes != ("...",)
            yield f"{name}.{key}", each[key], jnp.full(size, part) if alone else part


def _sizes() -> Sizes:
    return {"1": 1}


def _fitted(axes: Axes, shape: Shape, sizes: Sizes) -> Sizes | None:
    """Sizes with those of axes that are new; None where a shape has another rank."""
    leading = axes[:1] == ("...",)
    cut = len(shape) - len(axes) + leading
    if cut < 0 or (cut and not leading):
        return None
    values = (shape[:cut], *shape[cut:]) if leading else shape
    return dict(zip(axes, values, strict=True)) | sizes


def _shape(axes: Axes, sizes: Sizes) -> Shape:
    each = (sizes[axis] for axis in axes)
    return tuple(n for size in each for n in (size if type(size) is tuple else (size,)))


def _array(name: str, stated: Stated, value: Any) -> jax.Array | None:
    """The value as a JAX array of the kind that is stated."""
    if value is None and stated.optional:
        return None
    try:
        array = value if isinstance(value, jax.Array) else jnp.asarray(value)
    except (TypeError, ValueError) as error:
        why = " ".join(str(error).split()).rstrip(".")
        raise AssertionError(f"{name} is no array ({why}).") from error
    if not jnp.issubdtype(array.dtype, KINDS[stated.kind]):
        given = getattr(value, "dtype", array.dtype)
        fix = f"give jnp.asarray({name}, {stated.kind}), for example"
        raise AssertionError(f"{name} is {given} and must be {stated.kind}; {fix}.")
    return array


def _check_shape(
    name: str, stated: Stated, shape: Shape, sizes: Sizes, first: dict[Axes, str]
) -> None:
    """Check a shape by the sizes known so far.

    Args:
        name: of the argument.
        stated: what its annotation states.
        shape: the argument's.
        sizes: of the axes of the arguments before; those that are new are added.
        first: the argument that had these axes first, by axes; added likewise.
    """
    wanted = []
    for axes in stated.shapes:
        fitted = _fitted(axes, shape, sizes)
        known = fitted or sizes
        if known.keys() >= {*axes}:
            wanted.append(_shape(axes, known))
        if fitted and wanted[-1] == shape:
            sizes |= fitted
            first.setdefault(axes, name)
            return
    near = [one for one in wanted if len(one) == len(shape)] or wanted
    must = str(near[0]) if near else f"[{', '.join(stated.shapes[0])}]"
    like = first.get(stated.shapes[0]) if len(stated.shapes) == 1 else None
    must += f", as {like} has" if like else ""
    raise AssertionError(f"{name} has shape {shape} and must have {must}.")
