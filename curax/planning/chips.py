"""Accelerators by name: figures that their vendor publishes, and slices of them."""

import itertools
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from curax.config import ConfigError
from curax.settings import errors
from curax.settings.packages import install, is_installed

GIB = 2**30


@dataclass(frozen=True, kw_only=True)
class Chip:
    """Figures of one chip, as published at docs.cloud.google.com/tpu/docs.

    But its memory is what a compiler (libtpu 0.0.42.1) leaves to programs.
    `link_bytes_per_s` is half the bidirectional bandwidth between chips; of v4 it is
    the all-reduce bandwidth of a pod over its 4,096 chips.
    """

    flops_per_s: float  # bfloat16, peak
    memory_bytes: float  # HBM
    bytes_per_s: float  # HBM
    link_bytes_per_s: float  # into a chip, over all of its links
    axes: int  # of a slice


MOST = 16_384  # chips of a slice, more than any has
CHIPS = {
    name: Chip(
        flops_per_s=tera_flops * 1e12,
        memory_bytes=gib * GIB,
        bytes_per_s=giga_bytes * 1e9,
        link_bytes_per_s=link_giga_bytes * 1e9,
        axes=axes,
    )
    for name, tera_flops, gib, giga_bytes, link_giga_bytes, axes in (
        ("v4", 275, 30.75, 1200, 268, 3),
        ("v5e", 197, 15.75, 819, 200, 2),
        ("v5p", 459, 95.74, 2765, 600, 3),
        ("v6e", 918, 31.25, 1638, 400, 2),
    )
}
INSTALL = (
    "the TPU compiler is not installed, so these are estimates from shapes alone; "
    f"{install('tpu')} installs it."
)


@dataclass(frozen=True)
class Topology:
    """A slice of chips, or devices of this machine."""

    name: str
    kind: str  # of CHIPS, or cpu
    shape: tuple[int, ...]

    @property
    def chips(self) -> int:
        """Number of chips."""
        return math.prod(self.shape)

    @property
    def chip(self) -> Chip | None:
        """Figures of a chip; None for a CPU."""
        return CHIPS.get(self.kind)


def topology(name: str) -> Topology:
    """The topology of a name such as `v5p:4x4x4`, `v5e:2x2` or `cpu:8`.

    Raises:
        ConfigError: if the name is none, or the chip has another number of axes.
    """
    kind, _, sizes = name.partition(":")
    if kind != "cpu" and kind not in CHIPS:
        raise ConfigError(
            f"--topology {name}: {kind or 'nothing'} is none of "
            f"{', '.join([*CHIPS, 'cpu'])}; write for example --topology v5p:4x4x4."
        )
    axes = CHIPS[kind].axes if kind in CHIPS else 1
    example = f"{kind}:{'x'.join(['4'] * axes)}"
    if not re.fullmatch(r"[1-9]\d{0,4}(x[1-9]\d{0,4})*", sizes):
        raise ConfigError(
            f"--topology {name}: {sizes or 'nothing'} is no shape of a slice; write "
            f"for example --topology {example}."
        )
    shape = tuple(map(int, sizes.split("x")))
    if len(shape) != axes:
        raise ConfigError(
            f"--topology {name}: a slice of {kind} has {axes} axes, not {len(shape)}; "
            f"write for example --topology {example}."
        )
    found = Topology(name, kind, shape)
    if found.chips > MOST:
        raise ConfigError(
            f"--topology {name}: {found.chips} chips are more than a slice has; write "
            f"for example --topology {example}."
        )
    return found


def lies_on(shape: Sequence[int], place: Topology) -> bool:
    """Whether a mesh maps onto a slice: each slice axis belongs to one mesh axis.

    So each size of the mesh is the product of some axes: 4 x 4 x 4 takes 1 x 16 x 4,
    and not 1 x 8 x 8.
    """
    if place.chip is None or math.prod(shape) != place.chips:
        return True
    for owners in itertools.product(range(len(shape)), repeat=len(place.shape)):
        sizes = [1] * len(shape)
        for owner, size in zip(owners, place.shape, strict=True):
            sizes[owner] *= size
        if sizes == list(shape):
            return True
    return False


def has_compiler(place: Topology) -> bool:
    """Whether programs can be compiled for it: for a TPU libtpu must be installed."""
    return place.kind == "cpu" or is_installed("libtpu")


def devices(place: Topology) -> Sequence[Any]:
    """Descriptions of the devices, to compile for; of a CPU, those of this process.

    Raises:
        ConfigError: if the compiler does not know the topology, or there are too few.
    """
    import jax
    from jax.experimental import topologies

    if place.kind == "cpu":
        here = jax.devices("cpu")
        if len(here) < place.chips:
            raise ConfigError(
                f"--topology {place.name}: this process has {len(here)} CPU devices; "
                f"set XLA_FLAGS=--xla_force_host_platform_device_count={place.chips}."
            )
        return here[: place.chips]
    how: dict[str, Any] = {}
    if place.chips == 1:  # the compiler takes slices of whole hosts, unless it is told
        how["chips_per_host_bounds"] = (1, 1, 1)
    if place.kind == "v4":  # whose two cores would be a device each
        how["chip_config_name"] = "megacore"
    try:
        found = topologies.get_topology_desc(
            platform="tpu", topology_name=place.name, **how
        )
    except Exception as error:  # of several types, by the version of libtpu
        raise ConfigError(
            f"--topology {place.name} is not known to the TPU compiler "
            f"({errors.text(error)[:200]}); name a slice that can be had."
        ) from error
    return found.devices
