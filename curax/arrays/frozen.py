"""Splitting of parameters into trained and frozen ones.

`TrainState.params`, the optimizer and gradients hold the trained ones; frozen ones,
such as the base of low-rank adapters, are passed as an argument.
"""

import dataclasses
from typing import Any

from flax.traverse_util import flatten_dict, unflatten_dict

from curax.types import Model


def split(model: Model, params: Any) -> tuple[Any, Any]:
    """(trained, frozen) parts of a tree like params; frozen is None if all train."""
    if model.trained is None:
        return params, None
    flat = flatten_dict(params)
    trained = {path: leaf for path, leaf in flat.items() if model.trained(path)}
    frozen = {path: leaf for path, leaf in flat.items() if path not in trained}
    return unflatten_dict(trained), unflatten_dict(frozen)


def join(first: Any, second: Any) -> Any:
    """Two nested dicts merged; leaves of the second replace those of the first."""
    if second is None:
        return first
    return unflatten_dict(flatten_dict(first) | flatten_dict(second))


def over(model: Model, frozen: Any) -> Model:
    """The model as a function of its trained parameters alone."""
    if frozen is None:
        return model
    ready = model.ready
    return dataclasses.replace(
        model,
        features=lambda params, *args: model.features(join(frozen, params), *args),
        head=lambda params: model.head(join(frozen, params)),
        axes=split(model, model.axes)[0],
        ready=ready and (lambda params: ready(join(frozen, params))),
        adding=None,
    )
