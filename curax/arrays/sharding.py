"""Arrays sharded by the names of their axes, which the rules of a mesh give places."""

import math
from typing import Any

import jax
from flax.core.spmd import get_logical_axis_rules
from flax.linen.spmd import logical_to_mesh_axes
from jax.sharding import PartitionSpec


def constrain(x: jax.Array, names: tuple[str | None, ...]) -> jax.Array:
    """The array sharded by logical axes over the mesh; without one, as it is.

    A dimension that does not divide over its axes of the mesh is copied; rows are
    padded.

    Args:
        x: any array, inside of `curax.step.mesh.use`.
        names: a logical axis for each dimension; None: copied.
    """
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty or not get_logical_axis_rules():
        return x

    def fits(name: str | None, size: int, axes: Any) -> bool:
        several = axes if isinstance(axes, tuple) else (axes,)
        return name == "rows" or size % math.prod(mesh.shape[a] for a in several) == 0

    places = logical_to_mesh_axes(names) or ()
    spec = [
        axes if axes and fits(name, size, axes) else None
        for name, size, axes in zip(names, x.shape, places, strict=True)
    ]
    return jax.lax.with_sharding_constraint(x, PartitionSpec(*spec))


def shard_rows(x: jax.Array) -> jax.Array:
    """Rows lie over the data axes of the mesh, if there is one."""
    return constrain(x, ("rows",) + (None,) * (x.ndim - 1))
