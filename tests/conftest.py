"""Strict for all: no silent broadcasting, no silent promotion, eight devices."""

import gc
import importlib.metadata
import os
import signal
import threading
from pathlib import Path

# A shell starts what runs in its background deaf to interrupts; some tests send them.
deaf = signal.getsignal(signal.SIGINT) == signal.SIG_IGN
if deaf and threading.current_thread() is threading.main_thread():
    signal.signal(signal.SIGINT, signal.default_int_handler)

os.environ["JAX_PLATFORMS"] = os.environ.get("JAX_PLATFORMS") or "cpu"
os.environ["XLA_FLAGS"] = (
    os.environ.get("XLA_FLAGS", "")
    + " --xla_force_host_platform_device_count=8"
    # Halves compile time, most of what tests spend; CI's quickstart runs optimised.
    + " --xla_backend_optimization_level=0"
)
if importlib.metadata.version("jaxlib") < "0.11":
    # A third less time to compile; later versions no longer know the option.
    os.environ["XLA_FLAGS"] += " --xla_cpu_use_fusion_emitters=false"

import hypothesis
import jax
import pytest

jax.config.update("jax_numpy_rank_promotion", "raise")
jax.config.update("jax_numpy_dtype_promotion", "strict")

hypothesis.settings.register_profile(
    "curax",
    deadline=None,
    derandomize=True,
    max_examples=30,
    suppress_health_check=[hypothesis.HealthCheck.too_slow],
)
hypothesis.settings.load_profile("curax")

LONGEST = (
    "train",
    "pages",
    "real",
    "loops",
    "configs",
    "workers",
    "memory_io",
    "fields",
)


def pytest_collection_modifyitems(items):
    """Files that take long come first, so that all processes end at about one time."""
    place = {f"test_{name}": i for i, name in enumerate(LONGEST)}
    items.sort(key=lambda item: place.get(item.path.stem, len(place)))


def pytest_collection_finish():
    """Traces are many small objects; to search them for cycles took a fifth of them."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(500_000, 20, 100)


MAPS = Path("/proc/self/maps")
MANY = 20_000  # pieces of mapped memory; Linux allows a process 65,530


@pytest.fixture(scope="module", autouse=True)
def few_compiled_programs():
    """Each maps memory of its own, and a process that runs out of maps crashes."""
    yield
    if MAPS.exists() and MAPS.read_bytes().count(b"\n") > MANY:
        jax.clear_caches()
        gc.collect()
