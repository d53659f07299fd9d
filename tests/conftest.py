"""Strict for all: no silent broadcasting, no silent promotion, eight devices."""

import contextlib
import gc
import hashlib
import importlib.metadata
import os
import platform
import shutil
import signal
import sys
import threading
from pathlib import Path

# A shell starts what runs in its background deaf to interrupts; some tests send them.
deaf = signal.getsignal(signal.SIGINT) == signal.SIG_IGN
if deaf and threading.current_thread() is threading.main_thread():
    signal.signal(signal.SIGINT, signal.default_int_handler)

# Passes over a program that only speed it up; tests run each a few times.
SPEED_UP = (
    *("simplify-while-loops", "while-loop-invariant-code-motion", "reshape-mover"),
    *("while-loop-constant-sinking", "gather_expander", "simplify-sorts"),
    "tree_reduction_rewriter",
)
os.environ["JAX_PLATFORMS"] = os.environ.get("JAX_PLATFORMS") or "cpu"
os.environ["XLA_FLAGS"] = (
    os.environ.get("XLA_FLAGS", "")
    + " --xla_force_host_platform_device_count=8"
    # Halves compile time, most of what tests spend; CI's quickstart runs optimised.
    + " --xla_backend_optimization_level=0"
    # A third to a fifth less again.
    + f" --xla_disable_hlo_passes={','.join(SPEED_UP)}"
    + " --xla_cpu_parallel_codegen_split_count=1"
)
if importlib.metadata.version("jaxlib") < "0.11":
    # A third less time to compile; later versions no longer know the option.
    os.environ["XLA_FLAGS"] += " --xla_cpu_use_fusion_emitters=false"

ROOT = Path(__file__).parents[1]
CPU = Path("/proc/cpuinfo")
MOST_BYTES = 2_000_000_000


def programs() -> Path:
    """The folder of compiled programs: of these versions, on such a processor.

    JAX's own key of a program holds neither the processor, whose instructions the
    program uses, nor the version of JAX.
    """
    versions = [importlib.metadata.version(name) for name in ("jax", "jaxlib")]
    if CPU.exists():
        names = ("flags", "Features", "model", "cpu family", "CPU")
        lines = CPU.read_text().splitlines()
        which = sorted({line for line in lines if line.startswith(names)})
    else:
        which = [platform.processor(), platform.node()]
    which += [platform.machine(), sys.platform]
    digest = hashlib.blake2b("\n".join(which).encode(), digest_size=6).hexdigest()
    return ROOT / ".pytest_cache" / "programs" / "-".join([*versions, digest])


# All workers, the next run, and the processes that tests start share one folder. Only
# this process writes to it: one that a test kills would leave half a program behind.
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(programs()))
os.environ["WANDB_MODE"] = "offline"  # read once, by the first test that opens it
os.environ["JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES"] = "-1"
os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "1e9"

import hypothesis
import jax
import pytest

jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
jax.config.update("jax_numpy_rank_promotion", "raise")
jax.config.update("jax_numpy_dtype_promotion", "strict")

with contextlib.suppress(ImportError):
    from jax._src.lru_cache import LRUCache

    def put(self, key, value):
        """Whole or not at all: workers read what others write."""
        path = Path(str(self.path)) / f"{key}-cache"
        if not path.exists():
            part = path.with_name(f"{key}.{os.getpid()}.part")
            try:
                part.write_bytes(value)
                part.replace(path)
            except OSError:  # no room, and nothing is lost
                part.unlink(missing_ok=True)

    LRUCache.put = put

hypothesis.settings.register_profile(
    "curax",
    deadline=None,
    derandomize=True,
    max_examples=30,
    suppress_health_check=[hypothesis.HealthCheck.too_slow],
)
hypothesis.settings.load_profile("curax")

LONGEST = (
    *("real", "train", "pages", "loops", "fields", "whole_path", "reflected", "hinted"),
    *("configs", "workers", "memory_io", "evaluate", "refill", "text_hints", "rollout"),
    *("reflect", "rehearsal", "law", "allocate", "layouts", "xray", "predict"),
    *("compare", "comparison"),
)


def pytest_configure(config):
    """Programs of other versions and of former code: too many begin anew."""
    folder = programs().parent
    if not hasattr(config, "workerinput") and folder.exists():
        held = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
        if held > MOST_BYTES:
            shutil.rmtree(folder, ignore_errors=True)


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
