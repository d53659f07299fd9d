"""curax env: versions, devices and settings of this machine, for a bug report."""

import importlib.metadata
import os
import platform
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

from curax.settings import machine
from curax.settings.cli import Parser, command_line
from curax.settings.packages import VERSION
from curax.settings.tables import aligned

PACKAGES = (
    *("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "chex", "numpy"),
    *("scipy", "libtpu", "jax-cuda12-plugin", "jax-cuda13-plugin"),
)
SETTINGS = ("JAX_", "XLA_", "LIBTPU_", "TPU_", "CUDA_VISIBLE", "NVIDIA_VISIBLE")
EXTENSIONS = ("avx2", "avx512f", "avx512_bf16", "amx_bf16", "asimd", "sve")
GIB = 2**30


def parser() -> Parser:
    """Argument parser of `curax env`."""
    return Parser(
        "env", description="Print versions, devices and settings, for a bug report."
    )


@command_line("curax.env")
def main(argv: list[str]) -> int:
    """Exit status: 0 done, 2 bad input."""
    parser().parse_args(argv)
    print("\n".join(aligned(described(), left=(0, 1))))
    return 0


def described() -> Iterator[tuple[str, str]]:
    """(name, text) of what results and speed depend on; nothing secret."""
    yield "curax", f"{VERSION} in {Path(__file__).parents[1]}"
    yield "python", f"{platform.python_version()} {platform.python_implementation()}"
    yield "system", platform.platform()
    yield "processor", processor()
    yield "memory", f"{machine.ram() / GIB:.1f} GiB"
    yield "disk free here", f"{shutil.disk_usage('.').free / GIB:.1f} GiB"
    for name in PACKAGES:
        try:
            yield name, importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    yield "devices", devices()
    for name in sorted(os.environ):
        if name.startswith(SETTINGS):
            yield name, os.environ[name]


def processor() -> str:
    """Cores that this process may use, and the vector instructions they have."""
    path, found = Path("/proc/cpuinfo"), []
    if path.exists():
        words = {*path.read_text().replace(":", " ").split()}
        found = [name for name in EXTENSIONS if name in words]
    cores = f"{machine.cores()} cores, {platform.machine()}"
    return f"{cores}, {' '.join(found) or 'unknown'}"


def devices() -> str:
    """The devices that JAX finds, or why it finds none."""
    try:
        import jax

        found = jax.devices()
    except (ImportError, RuntimeError) as error:
        return f"none: {' '.join(str(error).split())}"
    kinds = sorted({device.device_kind for device in found})
    return (
        f"{len(found)} of {found[0].platform} ({', '.join(kinds)}), "
        f"{jax.process_count()} process{'es' * (jax.process_count() > 1)}"
    )


if __name__ == "__main__":
    sys.exit(main())
