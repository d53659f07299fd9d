"""Strict for all: no silent broadcasting, no silent promotion, eight devices."""

import collections
import ctypes
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
SPEED_UP = [
    *("reshape-mover", "while-loop-constant-sinking", "gather_expander"),
    *("simplify-sorts", "tree_reduction_rewriter"),
]
OLD = importlib.metadata.version("jaxlib") < "0.11"
if OLD:  # Without these, later versions round alike loops of two programs apart.
    SPEED_UP += ["simplify-while-loops", "while-loop-invariant-code-motion"]
# Where in a file an operation comes from is written into no program: a tenth of the
# time to trace and to lower it.
os.environ["JAX_TRACEBACK_IN_LOCATIONS_LIMIT"] = "0"
os.environ["JAX_PLATFORMS"] = os.environ.get("JAX_PLATFORMS") or "cpu"
FLAGS = (
    "--xla_force_host_platform_device_count=8",
    # Halves compile time, most of what tests spend; CI's quickstart runs optimised.
    "--xla_backend_optimization_level=0",
    # A third to a fifth less again.
    f"--xla_disable_hlo_passes={','.join(SPEED_UP)}",
    "--xla_cpu_parallel_codegen_split_count=1",
)
if OLD:
    # A third less time to compile; later versions no longer know the option.
    FLAGS += ("--xla_cpu_use_fusion_emitters=false",)
else:
    # Else devices may take up collectives in different orders, and wait for each other.
    FLAGS += ("--xla_cpu_enable_concurrency_optimized_scheduler=false",)
# A worker finds those of the process that started it. Each once: the key of a compiled
# program holds them, and one process alone shares the programs of several.
set_before = os.environ.get("XLA_FLAGS", "").split()
os.environ["XLA_FLAGS"] = " ".join(dict.fromkeys([*set_before, *FLAGS]))

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


# All workers, the next run, and the processes that tests start share one folder; those
# write to it where `sitecustomize` sees to it that no half program is left behind.
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(programs()))
os.environ["WANDB_MODE"] = "offline"  # read once, by the first test that opens it
os.environ["JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES"] = "-1"
os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "1e9"

import hypothesis
import kept_programs

kept_programs.install()

import jax
import pytest
from jax._src.interpreters import mlir

jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
jax.config.update("jax_numpy_rank_promotion", "raise")
jax.config.update("jax_numpy_dtype_promotion", "strict")

MADE = [threading.local()]


def in_one_context(make):
    """The context of a thread, in which the programs of a file are lowered.

    JAX makes one for each program, loads all dialects into it, and keeps it with the
    trace: a fifth of the time of these tests, and half of their memory. A program that
    is compiled while another is lowered has its own.
    """

    def context():
        if mlir.ir.Context.current:  # of what is lowered
            return make()
        if not hasattr(MADE[0], "context"):
            MADE[0].context = make()
        return MADE[0].context

    return context


if hasattr(mlir, "make_ir_context"):
    mlir.make_ir_context = in_one_context(mlir.make_ir_context)

hypothesis.settings.register_profile(
    "curax",
    deadline=None,
    derandomize=True,
    max_examples=30,
    suppress_health_check=[hypothesis.HealthCheck.too_slow],
)
hypothesis.settings.load_profile("curax")

LONGEST = (
    *("real", "train", "processes", "configs", "pages", "loops", "fields", "ahead"),
    *("evaluate", "engine", "library", "compare", "rollout", "reflected", "mesh"),
    *("workers", "law", "allocate", "downsample", "update", "hinted", "memory_io"),
    *("play", "strangers", "xray", "whole_path", "checkpoint", "score", "objective"),
    *("turning_runs", "correct", "modulate", "sources", "model", "report", "predict"),
    *("pretrained", "advantage", "export", "reflect", "gradients", "plan"),
)


def pytest_configure(config):
    """Programs of other versions and of former code: too many begin anew."""
    folder = programs().parent
    if not hasattr(config, "workerinput") and folder.exists():
        held = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
        for part in folder.rglob("*.part"):  # of processes that were killed
            part.unlink(missing_ok=True)
        if held > MOST_BYTES:
            shutil.rmtree(folder, ignore_errors=True)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    """Cases behind the `first` are long, and files that take long come first.

    So all processes end at about one time.
    """
    cases = collections.Counter()
    for item in items:
        if mark := item.get_closest_marker("first"):
            name = item.nodeid.partition("[")[0]
            cases[name] += 1
            if cases[name] > mark.args[0]:
                item.add_marker(pytest.mark.long)
    place = {f"test_{name}": i for i, name in enumerate(LONGEST)}
    items.sort(key=lambda item: place.get(item.path.stem, len(place)))


def pytest_collection_finish():
    """Traces are many small objects; to search them for cycles took a fifth of them."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(500_000, 20, 100)


MAPS, MEMORY = Path("/proc/self/maps"), Path("/proc/self/statm")
MANY = 20_000  # pieces of mapped memory; Linux allows a process 65,530
MUCH = 300_000_000  # bytes; what a file takes, 1.6 GB at most, comes on top
LEFT = [400_000_000]  # bytes that a process holds where no program is kept


def bytes_held() -> int:
    """Memory of this process."""
    return int(MEMORY.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def holds_much() -> bool:
    """Whether this process maps or takes so much that compiled programs have to go."""
    if not MAPS.exists():
        return False
    much = bytes_held() > LEFT[0] + MUCH
    return much or MAPS.read_bytes().count(b"\n") > MANY


@pytest.fixture(scope="module", autouse=True)
def few_compiled_programs():
    """Each maps memory of its own, and a process that runs out of maps crashes.

    What a file leaves behind, traces above all, is not searched for cycles again by the
    files after it: tests that collect garbage took ten times as long late in a process.
    """
    yield
    MADE[0] = threading.local()
    if holds_much():
        jax.clear_caches()
        gc.unfreeze()
        gc.collect()
        if platform.libc_ver()[0] == "glibc":  # which keeps what was freed
            ctypes.CDLL(None).malloc_trim(0)
        LEFT[0] = max(LEFT[0], bytes_held())
    else:
        gc.collect()
    gc.freeze()
