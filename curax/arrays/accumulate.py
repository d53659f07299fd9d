"""Gradients that are added to totals where these lie, micro-batch by micro-batch.

What is differentiated by is the total, which no value depends on: its gradient is the
total so far and the gradient of the values, parameters or keys and values of contexts.
So a layer's gradient is written once, into the total of its layer, and those of all
layers never exist beside it.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp


@flax.struct.dataclass
class Adding:
    """Values of layers, and the totals that their gradients are added to."""

    values: Any  # tree of [L, ...]: parameters, or keys and values
    totals: Any  # likewise, float32


def together(layers: Sequence[Any]) -> Any:
    """The trees of all layers as one, of `[L, ...]`."""
    return jax.tree.map(lambda *x: jnp.stack(x), *layers)


def each_layer(layers: Any, count: int) -> tuple[Any, ...]:
    """The trees of so many layers, from one of `[L, ...]`."""
    return tuple(jax.tree.map(lambda x, i=i: x[i], layers) for i in range(count))


@jax.custom_vjp
def onto(values: Any, totals: Any) -> Any:
    """The values. The gradient of the totals is these and the gradient of the values,
    where this is called once and one of the values is read.

    Args:
        values: tree of arrays; by itself it has no gradient.
        totals: likewise, float32.

    Returns:
        The values as they are.
    """
    del totals
    return values


def _onto(totals, slopes):
    return None, jax.tree.map(lambda t, s: t + s.astype(t.dtype), totals, slopes)


onto.defvjp(lambda values, totals: (values, totals), _onto)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def through(
    apply: Callable[[Any, jax.Array, Any], tuple[jax.Array, Any]],
    given: Any,
    x: jax.Array,
    layers: Adding,
    caches: Any,
) -> tuple[jax.Array, Any]:
    """What leaves the last layer; the backward pass computes each layer again.

    Args:
        apply: a layer, `(given, x, (params, cache)) -> (x, made)`.
        given: what all layers are given; it has no gradient.
        x: what enters the first.
        layers: their parameters, whose gradients go to the totals alone.
        caches: tree of `[L, ...]`, or such values and totals likewise.

    Returns:
        As x; and what each layer made besides, a tree of `[L, ...]`.
    """
    return _forward(apply, given, x, layers, caches)[0]


def _forward(apply, given, x, layers, caches):
    def step(x, layer):
        out, made = apply(given, x, layer)
        return out, (x, made)

    trees = layers, caches
    values = [one.values if isinstance(one, Adding) else one for one in trees]
    totals = [one.totals if isinstance(one, Adding) else None for one in trees]
    x, (entered, made) = jax.lax.scan(step, x, tuple(values))
    return (x, made), (given, entered, values, totals)


def _backward(apply, kept, slopes):
    (given, entered, values, totals), (slope, of_made) = kept, slopes

    def back(state, layer):
        (slope, totals), (number, of_made, *own) = state, layer
        _, pull = jax.vjp(lambda x, *layer: apply(given, x, layer), *own)
        slope, *more = pull((slope, of_made))

        def add(total, new):
            old = jax.lax.dynamic_index_in_dim(total, number, keepdims=False)
            new = old + new.astype(total.dtype)
            return jax.lax.dynamic_update_index_in_dim(total, new, number, 0)

        for i, total in enumerate(totals):
            if total is not None:
                totals[i], more[i] = jax.tree.map(add, total, more[i]), None
        return (slope, totals), more

    number = jnp.arange(len(entered), dtype=jnp.int32)
    (slope, totals), more = jax.lax.scan(
        back, (slope, totals), (number, of_made, entered, *values), reverse=True
    )
    for i, total in enumerate(totals):
        if total is not None:
            more[i] = Adding(None, total)
    return None, slope, *more


through.defvjp(_forward, _backward)
