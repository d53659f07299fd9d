"""The device mesh, and the rules that map logical axes of arrays to its axes."""

import contextlib
import dataclasses
import math
import os
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax
from flax.core.spmd import logical_axis_rules
from flax.linen.spmd import logical_to_mesh_axes
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from curax.config import ConfigError
from curax.config import Mesh as Sizes
from curax.settings.groups import AXES

RULES = (
    ("rows", ("data", "fsdp")),
    ("vocab", "tensor"),
    ("embed", "fsdp"),
    ("heads", "tensor"),
    ("mlp", "tensor"),
)
EFFORT = "xla_backend_optimization_level"
# Code of loops that takes longer to compile, and runs no faster (docs/benchmarks.md).
PLAIN_LOOPS = "--xla_backend_extra_options=" + ",".join(
    ("xla_cpu_disable_tiled_emitter", "xla_cpu_disable_loop_unrolling")
)


def make(sizes: Sizes, devices: Sequence[Any] | None = None) -> Mesh | None:
    """The mesh of these sizes on the first devices there are; None for one device.

    Args:
        sizes: devices along each axis.
        devices: of a topology that is not here, of which one makes a mesh as well;
            None: those of this machine.

    Raises:
        ConfigError: as `shape_on`, or some of several processes would not take part.
    """
    here, processes = devices is None, jax.process_count()
    devices = list(jax.devices() if devices is None else devices)
    shape = shape_on(sizes, len(devices))
    wanted = math.prod(shape)
    if here and processes > 1 and wanted != len(devices):
        raise ConfigError(
            f"{_product(shape)} takes {wanted} of the {len(devices)} devices of "
            f"{processes} processes, and all must take part in one run; set one of the "
            "sizes to -1."
        )
    if here and wanted == 1:
        return None
    kinds = (AxisType.Auto,) * len(AXES)
    try:
        return jax.make_mesh(shape, AXES, devices=devices[:wanted], axis_types=kinds)
    except NotImplementedError as error:
        raise ConfigError(
            f"{_product(shape)} does not lie on this slice of chips: each size must be "
            "the product of some of its axes; python -m curax plan tries those that do."
        ) from error


class Split(NamedTuple):
    """Meshes of a run whose draws, one step ahead, have devices of their own."""

    train: Mesh
    draw: Mesh


def split(sizes: Sizes, devices: Sequence[Any] | None = None) -> Split:
    """The mesh of these sizes, cut in two along its data axis by `draw_share`.

    Args:
        sizes: devices along each axis, and the share of the data axis that draws.
        devices: as of `make`.

    Raises:
        ConfigError: as `make`; or the share is no whole number of devices, or leaves
            none that trains, or several processes share the run.
    """
    if devices is None and (processes := jax.process_count()) > 1:
        raise ConfigError(
            f"mesh.draw_share={sizes.draw_share} is for one process and these are "
            f"{processes}; set it to None."
        )
    devices = list(jax.devices() if devices is None else devices)
    shape = shape_on(sizes, len(devices))
    train, draw = divided(sizes, shape)
    whole = make(sizes, devices)
    assert whole is not None
    kinds = whole.axis_types

    def part(which: slice) -> Mesh:
        return Mesh(whole.devices[which], AXES, axis_types=kinds)

    return Split(part(slice(0, train)), part(slice(train, train + draw)))


def divided(sizes: Sizes, shape: tuple[int, ...]) -> tuple[int, int]:
    """How much of the data axis, the first of the shape, trains, and how much draws.

    Raises:
        ConfigError: as `split`.
    """
    data, share = shape[0], sizes.draw_share or 0.0
    draw = round(data * share)
    # Shares are written with some digits, as .3333 of three.
    if math.isclose(draw, data * share, abs_tol=1e-3) and 0 < draw < data:
        return data - draw, draw
    near = min(max(draw, 1), data - 1)
    fix = f"set it to {near / data:g}" if near else "set mesh.data to 2 or more"
    raise ConfigError(
        f"mesh.draw_share={share:g} of mesh.data={data} leaves no whole number of "
        f"devices to both draw and update; {fix}."
    )


def shardings_moved(where: Any, mesh: Mesh) -> Any:
    """The same shardings, on the devices of another mesh."""
    return jax.tree.map(lambda own: NamedSharding(mesh, own.spec), where)


def moved(tree: Any, mesh: Mesh) -> Any:
    """The same arrays on the devices of another mesh, cut along the same axes.

    A dimension that does not divide there is copied instead. Shapes give shapes.
    """

    def where(x: Any) -> NamedSharding:
        spec = getattr(getattr(x, "sharding", None), "spec", PartitionSpec())
        try:
            sharding = NamedSharding(mesh, spec)
            sharding.shard_shape(x.shape)
        except ValueError:
            return NamedSharding(mesh, PartitionSpec())
        return sharding

    def move(x: Any) -> Any:
        if isinstance(x, jax.ShapeDtypeStruct):
            return jax.ShapeDtypeStruct(
                x.shape, x.dtype, sharding=where(x), weak_type=x.weak_type
            )
        return jax.device_put(x, where(x)) if isinstance(x, jax.Array) else x

    return jax.tree.map(move, tree)


def shape_on(sizes: Sizes, devices: int) -> tuple[int, ...]:
    """Mesh shape over `devices` devices; a size of -1 is inferred from the others.

    Raises:
        ConfigError: if there are fewer devices than the mesh takes, or what is left of
            them does not divide.
    """
    shape = tuple(getattr(sizes, axis) for axis in AXES)
    if -1 in shape:
        others = math.prod(size for size in shape if size != -1)
        if devices % others:
            few = range(1, min(others, devices) + 1)
            near = max(n for n in few if devices % n == 0)
            raise ConfigError(
                f"{_product(shape)} shares out {devices} devices, which {others} does "
                "not divide; set the sizes that are not -1 so that their product is "
                f"{near}."
            )
        return tuple(devices // others if size == -1 else size for size in shape)
    if (wanted := math.prod(shape)) > devices:
        raise ConfigError(
            f"{_product(shape)} takes {wanted} devices; set them so that their product "
            f"is at most the {devices} that are here."
        )
    return shape


def _product(shape: Sequence[int]) -> str:
    sizes = zip(AXES, shape, strict=True)
    return " x ".join(f"mesh.{axis}={n}" for axis, n in sizes)


@contextlib.contextmanager
def use(
    mesh: Mesh | AbstractMesh | None, *, cut_sampler: bool = False
) -> Iterator[None]:
    """Context of a mesh, in which constraints by logical axis take effect.

    Args:
        mesh: of the run, or its shape alone to trace with; None: one device.
        cut_sampler: `mesh.cut_sampler` of the config.
    """
    if mesh is None:
        yield
        return
    sampled = ("sampled", "fsdp" if cut_sampler else None)
    whole = isinstance(mesh, Mesh)
    here = jax.set_mesh(mesh) if whole else jax.sharding.use_abstract_mesh(mesh)
    with here, logical_axis_rules((*RULES, sampled)):
        yield


def effort_is_named() -> bool:
    """Whether `XLA_FLAGS` say how much effort LLVM makes, or lie in a file."""
    flags = os.environ.get("XLA_FLAGS", "")
    return flags.strip()[:1] not in ("", "-") or EFFORT in flags


def compiler_options(where: Any, *, updates: bool = False) -> dict[str, Any] | None:
    """Options of a run's programs; None where the compiler's own are right.

    For CPUs LLVM compiles with little effort, unless `XLA_FLAGS` say with how much or
    name a file: it takes less time, for programs that are as fast (docs/benchmarks.md).
    On TPUs updates do without a pass that moves sums out of loops: it ends the compiler
    of libtpu 0.0.42 with an internal error where rows lie on several chips.

    Args:
        where: tree of shardings; None: one device, of those that are here.
        updates: whether the program updates parameters.
    """
    leaves = jax.tree.leaves(where)
    device = leaves[0].mesh.devices.flat[0] if leaves else jax.devices()[0]
    if device.platform == "cpu" and not effort_is_named():
        return {EFFORT: 1}
    if device.platform == "tpu" and leaves and updates:
        return {"xla_disable_hlo_passes": "while-loop-all-reduce-code-motion"}
    return None


def of_params(mesh: Mesh, axes: Any, params: Any) -> Any:
    """The sharding of every parameter, from the names of its logical axes.

    A vocabulary that does not divide over its mesh axis is copied instead: nobody
    chooses its size. Any other dimension that does not divide is an error.

    Args:
        mesh: of the run.
        axes: tree like params of logical axis names, for the last axes of each leaf.
        params: shapes; axes in front of the named ones, as of seeds, are not sharded.

    Raises:
        ConfigError: if a dimension does not divide over its mesh axis.
    """

    divisible: dict[str, int] = {}  # by axis of the mesh: every size must divide this
    wrong: dict[str, tuple[Any, tuple[int, ...], int]] = {}

    def leaf(path, param, names):
        names = (None,) * (param.ndim - len(names)) + tuple(names)
        spec = logical_to_mesh_axes(names, RULES)
        assert spec is not None
        fits = []
        for size, axis, name in zip(param.shape, spec, names, strict=True):
            parts = mesh.shape[axis] if axis else 1
            fits.append(axis if size % parts == 0 else None)
            if axis and name != "vocab":
                divisible[axis] = math.gcd(divisible.get(axis, 0), size)
                if size % parts:
                    wrong.setdefault(axis, (path, param.shape, size))
        return NamedSharding(mesh, PartitionSpec(*fits))

    where = jax.tree_util.tree_map_with_path(leaf, params, axes)
    for axis, (path, shape, size) in wrong.items():
        most = max(jax.device_count(), mesh.size) // (mesh.size // mesh.shape[axis])
        fine = [f"{n}" for n in range(2, most + 1) if divisible[axis] % n == 0] or ["1"]
        words = " or ".join([*filter(None, [", ".join(fine[:-1])]), fine[-1]])
        raise ConfigError(
            f"mesh.{axis}={mesh.shape[axis]} does not divide the {size} of parameter "
            f"{jax.tree_util.keystr(path)}, {tuple(shape)}; set mesh.{axis} to "
            f"{words}."
        )
    return where


def of_state(mesh: Mesh, axes: Any, state: Any, frozen_axes: Any = None) -> Any:
    """Sharding of a train state: what is like a parameter is sharded like it.

    Args:
        mesh: of the run.
        axes: tree like params of logical axis names.
        state: shapes; its field `params`, and every leaf with the path and shape of a
            parameter in whatever tree (optimizer moments, of some parameters too, or
            the reference), is sharded, and so is its field `frozen`; the rest is copied
            everywhere.
        frozen_axes: tree like the frozen parameters; None: there are none.
    """
    everywhere = NamedSharding(mesh, PartitionSpec())
    params = of_params(mesh, axes, state.params)
    shapes = jax.tree_util.tree_leaves_with_path(state.params)
    known = {
        (path, leaf.shape): where
        for (path, leaf), where in zip(shapes, jax.tree.leaves(params), strict=True)
    }

    def like_parameter(path, leaf):
        ends = ((path[n:], leaf.shape) for n in range(len(path)))
        return next((known[end] for end in ends if end in known), everywhere)

    result = jax.tree_util.tree_map_with_path(like_parameter, state)
    if frozen_axes is None:
        return result
    frozen = of_params(mesh, frozen_axes, state.frozen)
    return dataclasses.replace(result, frozen=frozen)
