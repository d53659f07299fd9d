"""What the libraries of a command are told before they begin."""

import gc
import os
from importlib.metadata import version
from pathlib import Path

import jax

from curax.step import mesh as meshes

# Options of XLA: devices of one CPU, and whether each begins with what is ready.
DEVICES = "xla_force_host_platform_device_count"
IN_ORDER = "--xla_cpu_enable_concurrency_optimized_scheduler"


def set_up() -> None:
    """Set what JAX and XLA read later, where it is not set.

    The compilation cache is in the user's cache folder; a user without a home has none.
    Several devices of one CPU run what they have in one order: with JAX 0.12 each else
    begins with what is ready, and devices that begin with different collectives wait
    for each other for ever. What is imported by now stays, and is not collected.
    """
    if not gc.get_freeze_count():
        gc.freeze()
    flags = os.environ.get("XLA_FLAGS", "")
    extra, _, _ = meshes.PLAIN_LOOPS.partition("=")
    if extra not in flags and not meshes.effort_is_named():
        os.environ["XLA_FLAGS"] = flags = f"{flags} {meshes.PLAIN_LOOPS}".strip()
    several = DEVICES in flags or jax.config.values["jax_num_cpu_devices"] > 1
    if several and IN_ORDER not in flags and version("jaxlib") >= "0.11":
        os.environ["XLA_FLAGS"] = f"{flags} {IN_ORDER}=false".strip()
    home = os.path.expanduser(os.environ.get("XDG_CACHE_HOME") or "~/.cache")
    there = jax.config.values["jax_compilation_cache_dir"]
    if there is None and not home.startswith("~"):
        programs = str(Path(home, "curax", "jax"))
        jax.config.update("jax_compilation_cache_dir", programs)
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.1)
