"""Sharding of arrays by logical axis names, which a mesh's rules map to its axes."""

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax.core.spmd import get_logical_axis_rules
from flax.linen.spmd import logical_to_mesh_axes
from jax.sharding import PartitionSpec

Names = tuple[str | None, ...]
SEEDS = "seeds"  # axis_name of a vmap over runs


def platform() -> str:
    """Platform that a program is traced for, as `tpu`: of the mesh in context, if any.

    The devices of a mesh may be absent. Without a mesh it is the default platform.
    """
    mesh = jax.sharding.get_abstract_mesh()
    device = None if mesh.empty else mesh.abstract_device
    return device.platform if device else jax.default_backend()


def cores() -> int:
    """Cores of a device of that platform that share its memory: 2 on TPU v4 and v5p."""
    mesh = jax.sharding.get_abstract_mesh()
    device = (None if mesh.empty else mesh.abstract_device) or jax.local_devices()[0]
    return (platform() == "tpu" and getattr(device, "num_cores", None)) or 1


def ampere() -> bool:
    """Whether devices of this process are NVIDIA GPUs, of Ampere's kind or later."""
    chip = str(getattr(jax.local_devices()[0], "compute_capability", ""))
    return chip[:1].isdigit() and float(chip) >= 8  # AMD's begin with letters


def active() -> bool:
    """Whether arrays are sharded: inside of `curax.step.mesh.use`, over a mesh."""
    mesh = jax.sharding.get_abstract_mesh()
    return not mesh.empty and bool(get_logical_axis_rules())


def over_seeds() -> bool:
    """Whether what is traced is mapped over runs, by a vmap with that axis's name."""
    try:
        jax.lax.axis_size(SEEDS)
    except NameError:
        return False
    return True


def mesh_axes(name: str | None, size: int | None = None) -> tuple[str, ...]:
    """Axes of the mesh that a logical axis lies along; none without a mesh.

    Inside of `on_copies` arrays are those of one copy, so its axes are left out.

    Args:
        name: of the logical axis.
        size: of the dimension; one that does not divide over its axes is copied.
    """
    if not active():
        return ()
    mesh = jax.sharding.get_abstract_mesh()
    shape, copies = mesh.shape, mesh.manual_axes
    places = (logical_to_mesh_axes((name,)) or (None,))[0] or ()
    places = places if isinstance(places, tuple) else (places,)
    axes = tuple(axis for axis in places if shape[axis] > 1 and axis not in copies)
    parts = math.prod(shape[axis] for axis in axes)
    return axes if size is None or size % parts == 0 else ()


def shards(name: str, size: int | None = None) -> int:
    """Parts into which a logical axis is cut; 1 without a mesh."""
    shape = jax.sharding.get_abstract_mesh().shape
    return math.prod(shape[axis] for axis in mesh_axes(name, size))


def spec(names: Names, shape: tuple[int, ...]) -> PartitionSpec:
    """Partition spec of named dimensions: rows always, others where they divide."""
    places = (
        mesh_axes(name, None if name == "rows" else size) if name else ()
        for name, size in zip(names, shape, strict=True)
    )
    return PartitionSpec(*(axes or None for axes in places))


def constrain(x: jax.Array, names: Names) -> jax.Array:
    """The array constrained to a sharding by logical axes; unchanged without a mesh.

    A dimension that does not divide over its axes of the mesh is copied; rows are
    padded.

    Args:
        x: any array, inside of `curax.step.mesh.use`.
        names: a logical axis for each dimension; None: copied.
    """
    if not active():
        return x
    return jax.lax.with_sharding_constraint(x, spec(names, x.shape))


def shard_rows(x: jax.Array) -> jax.Array:
    """The array with its first axis sharded over the data axes of the mesh, if any."""
    return constrain(x, ("rows",) + (None,) * (x.ndim - 1))


def spread(count: int, fewest: int) -> int:
    """Number of equal parts of some rows such that each part spans all row shards.

    Args:
        count: rows.
        fewest: parts there should be at least. Fewer are made where more would leave
            devices without rows of a part.

    Returns:
        A divisor of `count`.
    """
    return parts(count, fewest, shards("rows"))


def parts(count: int, fewest: int, shards: int) -> int:
    """`spread` over so many row shards."""
    each = shards if count % shards == 0 else 1
    fine = [n for n in range(1, count // each + 1) if count % (n * each) == 0]
    return next((n for n in fine if n >= fewest), fine[-1])


def gathered(x: jax.Array, names: Names, dtype: Any) -> jax.Array:
    """A parameter cast to `dtype` and gathered along `embed`; its gradient is sharded.

    What fully sharded data parallelism does before a layer: the cast comes before the
    gathering, and the gradient lies like the parameter. Without a mesh: as it is.

    Args:
        x: the parameter.
        names: its logical axes.
        dtype: in which it is read.
    """
    if "embed" not in names or not active():
        return x
    own = x.dtype
    whole = tuple(None if name == "embed" else name for name in names)

    @jax.custom_vjp
    def gather(x):
        return constrain(constrain(x.astype(dtype), names), whole)

    gather.defvjp(
        lambda x: (gather(x), None),
        lambda _, slope: (constrain(slope, names).astype(own),),
    )
    return gather(x)


def rows_of(table: jax.Array, index: jax.Array, dtype: Any) -> jax.Array:
    """`table[index]` in a type, where the table is sharded by `vocab` and `embed`.

    The table stays where it lies, and so does its gradient: devices exchange indices
    and what was found, a part of each row.

    Args:
        table: `[V, D]`.
        index: `[N, Q]` int32 in [0, V).
        dtype: of the result.

    Returns:
        `[N, Q, D]`, sharded by rows.
    """
    if not active():
        return table[index].astype(dtype)
    vocab = mesh_axes("vocab", table.shape[0])
    embed = mesh_axes("embed", table.shape[1])
    rows = mesh_axes("rows")

    def find(table, index):
        if embed:
            index = jax.lax.all_gather(index, embed, tiled=True)
        first = jax.lax.axis_index(vocab) * table.shape[0] if vocab else 0
        place = index - first
        here = (place >= 0) & (place < table.shape[0])
        found = table[jnp.where(here, place, 0)].astype(dtype)
        found = jnp.where(here[..., None], found, 0)
        if vocab:
            found = jax.lax.psum(found, vocab)
        if embed:
            found = jax.lax.all_to_all(found, embed, 0, 2, tiled=True)
        return found

    run = jax.shard_map(
        find,
        in_specs=(PartitionSpec(vocab or None, embed or None), PartitionSpec(rows)),
        out_specs=PartitionSpec(rows),
    )
    return padded_rows(partial(run, table), index)


def on_shards(function: Callable[..., jax.Array], *rows: jax.Array) -> jax.Array:
    """Output of a function of each shard's rows, which lie on their shard again."""
    axes = mesh_axes("rows")
    if not axes:
        return function(*rows)
    of_rows = PartitionSpec(axes)
    run = jax.shard_map(function, in_specs=of_rows, out_specs=of_rows, check_vma=False)
    return run(*rows)


def padded_rows(function: Callable[..., Any], *rows: jax.Array) -> Any:
    """Output of a function of arrays `[N, ...]`, padded to divide over their shards."""
    count = rows[0].shape[0]
    more = -count % shards("rows")
    if not more:
        return function(*rows)
    wide = (jnp.pad(x, ((0, more),) + ((0, 0),) * (x.ndim - 1)) for x in rows)
    return jax.tree.map(lambda x: x[:count], function(*wide))


def on_copies(
    function: Callable[[Any, Any], tuple[Any, Any]], known: Any, rows: Any
) -> tuple[Any, Any]:
    """Output of a function of rows, run by each replica of the parameters on its rows.

    Copies lie along the axes of the mesh that cut rows and no parameter. What a copy
    adds up thus moves along the other axes alone, until the function sums it over all
    copies at its end: partitioned as a whole, each term would be summed over all rows.

    Args:
        function: of what is known and a part of the rows; returns a tree that is the
            same on all copies, by `over_copies`, and a tree of rows.
        known: tree of what all copies need whole, as the parameters.
        rows: tree of `[N, ...]`. Where a number of rows does not divide over the
            copies, or there is one copy, this is `function(known, rows)`.
    """
    axes = tuple(a for a in mesh_axes("rows") if a not in mesh_axes("embed"))
    shape = jax.sharding.get_abstract_mesh().shape
    count = math.prod(shape[axis] for axis in axes)
    if count == 1 or any(x.shape[0] % count for x in jax.tree.leaves(rows)):
        return function(known, rows)
    return jax.shard_map(
        function,
        in_specs=(PartitionSpec(), PartitionSpec(axes)),
        out_specs=(PartitionSpec(), PartitionSpec(axes)),
        axis_names=set(axes),
        check_vma=False,
    )(known, rows)


def over_copies(reduce: Callable[[Any, Any], Any], tree: Any) -> Any:
    """`lax.psum` or another reduction of each leaf over the replicas of `on_copies`."""
    axes = jax.sharding.get_abstract_mesh().manual_axes
    if not axes:
        return tree
    return jax.tree.map(lambda x: reduce(x, axes), tree)


def own_of_copies(tree: Any) -> Any:
    """Leaves `[N, ...]` summed over the replicas of `on_copies`: the rows of each.

    A sum of all, and a part of it: compiled, `lax.psum_scatter` would gather what lies
    over the other axes first.
    """
    axes = jax.sharding.get_abstract_mesh().manual_axes
    if not axes:
        return tree
    size, index = jax.lax.axis_size(axes), jax.lax.axis_index(axes)

    def leaf(x):
        rows = x.shape[0] // size
        return jax.lax.dynamic_slice_in_dim(jax.lax.psum(x, axes), index * rows, rows)

    return jax.tree.map(leaf, tree)


def placed(tree: Any, where: Any) -> Any:
    """Shapes and dtypes of arrays that lie there.

    Args:
        tree: of arrays, or of their shapes.
        where: tree like it of shardings; None: the first device.
    """
    if where is None:
        one = jax.sharding.SingleDeviceSharding(jax.devices()[0])
        where = jax.tree.map(lambda _: one, tree)

    def at(leaf: Any, where: Any) -> jax.ShapeDtypeStruct:
        weak = getattr(leaf, "weak_type", False)
        return jax.ShapeDtypeStruct(
            leaf.shape, leaf.dtype, sharding=where, weak_type=weak
        )

    return jax.tree.map(at, tree, where)


def bytes_on_device(tree: Any, where: Any = None) -> int:
    """Bytes of one device's shards of arrays or of their shapes.

    Args:
        tree: arrays, shapes or PRNG keys.
        where: tree of their shardings; None: each has its own.
    """

    def leaf(x: Any, sharding: Any) -> int:
        is_key = jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
        data = jax.eval_shape(jax.random.key_data, x) if is_key else x
        shard = sharding.shard_shape(x.shape) + data.shape[len(x.shape) :]
        return math.prod(shard) * data.dtype.itemsize

    if where is None:
        where = jax.tree.map(lambda x: x.sharding, tree)
    return sum(jax.tree.leaves(jax.tree.map(leaf, tree, where)))
