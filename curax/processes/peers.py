"""Communication with the other processes of a run; every exchange passes here.

All processes run one program over all devices, and a decision of one alone would make
them diverge: signals, files and outcomes go through `gather` first. Functions that
exchange something are called by all processes, in the same order, and in the main
thread; so is `start`. `count`, `is_first` and `share` exchange nothing, so any thread
may call them; `settle`, `leave` and `fail` are for a process that ends. With one
process each returns its input at once.
"""

import math
import os
import pickle
import sys
import time
import traceback
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from curax.processes.watch import GRACE, Address, Watch, within
from curax.settings.config_paths import ConfigError

START = 40.0  # seconds for all processes to find each other
HEARTBEAT = 50  # seconds after which JAX ends a process whose peer is silent
_watch: Watch | None = None


def start(
    coordinator: str | None = None,
    processes: int | None = None,
    process: int | None = None,
    *,
    saved: Callable[[], str],
    seconds: float = START,
) -> None:
    """Start `jax.distributed`, before JAX has done anything else.

    A process that does not find all others in time prints a message and ends.

    Args:
        coordinator: HOST:PORT of process 0; None: of the cluster that JAX detects.
        processes: number of processes; None: of the cluster.
        process: number of this one, from 0; None: of the cluster.
        saved: text on the last checkpoint, for the message about a lost process.
        seconds: for all to find each other.

    Where a cluster was detected and JAX finds none, this process warns and runs alone;
    the lock of the run folder keeps several such processes apart.

    Raises:
        ConfigError: the other processes were not reached.
    """
    global _watch
    # Signals are agreed on by `stop_signal`; JAX would keep SIGTERM to itself.
    jax.config.update("jax_enable_preemption_service", False)
    with within(seconds, saved):
        try:
            jax.distributed.initialize(
                coordinator,
                processes,
                process,
                initialization_timeout=math.ceil(2 * seconds),  # `within` ends before
                heartbeat_timeout_seconds=HEARTBEAT,
            )
        except (ValueError, RuntimeError) as error:
            if coordinator is None and isinstance(error, ValueError):
                print(
                    f"Warning: no other processes were found ({error})", file=sys.stderr
                )
                return
            why = " ".join(str(error).split())[:200].rstrip(".")
            raise ConfigError(
                f"the processes of this run did not find each other ({why}); start all "
                "of them with the same --coordinator HOST:PORT and --processes, each "
                "with its own --process from 0 on."
            ) from error
        watch = _connected(saved, seconds)
    if watch:
        watch.begin()
        _watch = watch


def _connected(saved: Callable[[], str], seconds: float) -> Watch | None:
    """The watch, connected before JAX looks for devices; None with a single process.

    Raises:
        ConfigError: process 0 was not reached.
    """
    from jax._src import distributed  # no public name

    state = distributed.global_state
    if state.num_processes == 1:
        return None
    assert state.client
    assert state.coordinator_address
    watch, name = Watch(state.process_id, state.num_processes, saved), "watch"
    if state.process_id == 0:
        state.client.key_value_set_bytes(name, pickle.dumps(watch.listen()))
        watch.accept()
        return watch
    wait = math.ceil(2000 * seconds)
    reply = state.client.blocking_key_value_get_bytes(name, wait)
    address: Address = pickle.loads(reply)
    host = state.coordinator_address.rpartition(":")[0].strip("[]")
    try:
        watch.connect(host, address)
    except OSError as error:
        raise ConfigError(
            f"process 0 listens on port {address.port} of {host}, and process "
            f"{state.process_id} has not reached it ({error}); let the machines of a "
            "run connect with each other on every port."
        ) from error
    return watch


def count() -> int:
    """Number of processes of the run."""
    return jax.process_count() if jax.distributed.is_initialized() else 1


def is_first() -> bool:
    """Whether this is process 0, which writes the run folder and prints."""
    return count() == 1 or jax.process_index() == 0


# ----- exchange


def fetch(tree: Any) -> Any:
    """The arrays of a tree as numpy arrays, whole on every process."""
    if count() == 1:
        return jax.device_get(tree)

    def leaf(x: Any) -> Any:
        whole = not isinstance(x, jax.Array) or x.is_fully_replicated
        if whole or x.is_fully_addressable:
            return jax.device_get(x)
        return multihost_utils.process_allgather(x, tiled=True)

    return jax.tree.map(leaf, tree)


def gather(value: Any) -> list[Any]:
    """Values of all processes in their order; anything that can be pickled."""
    if count() == 1:
        return [value]
    data = np.frombuffer(pickle.dumps(value), np.uint8)
    sizes = multihost_utils.process_allgather(np.int32(len(data)))
    size = 1 << int(sizes.max()).bit_length()  # few programs
    found = multihost_utils.process_allgather(np.pad(data, (0, size - len(data))))
    return [
        pickle.loads(row[:n].tobytes()) for row, n in zip(found, sizes, strict=True)
    ]


def broadcast(value: Any) -> Any:
    """The value of process 0, on every process."""
    return gather(value)[0]


def stop_signal(number: int | None) -> int | None:
    """First signal that any process received, the same on all; None: no signal."""
    if count() == 1:
        return number
    numbers = multihost_utils.process_allgather(np.int32(number or 0))
    return next((int(n) for n in numbers if n), None)


def barrier() -> None:
    """Wait until all processes are here."""
    if count() > 1:
        multihost_utils.sync_global_devices("curax")


def on_first(function: Callable[..., Any], *args: Any, **named: Any) -> None:
    """Call a function on process 0 alone; the others wait until it has returned.

    Raises:
        ConfigError: on every process, what the function raised.
        Exception: another one that the function raised, on process 0.
        RuntimeError: the same, on the others.
    """
    if count() == 1:
        function(*args, **named)
        return
    raised: Exception | None = None
    if is_first():
        try:
            function(*args, **named)
        except Exception as error:
            raised = error
    # Not the exception itself, which need not be one that can be pickled.
    failure = raised and (type(raised).__name__, str(raised))
    failure, known = broadcast((failure, isinstance(raised, ConfigError)))
    if raised:
        raise raised
    if failure:
        name, text = failure
        raise ConfigError(text) if known else RuntimeError(f"process 0: {name}: {text}")


def same(what: str, value: Any) -> None:
    """Check that a value is the same on every process.

    Raises:
        ConfigError: it differs; the sentence begins with `what`.
    """
    found = gather(value)
    for other, theirs in enumerate(found):
        if theirs != found[0]:
            raise ConfigError(
                f"{what} of process {other} differs from that of process 0; start all "
                "processes with the same command, code and files."
            )


def share(rows: np.ndarray) -> np.ndarray:
    """Rows that this process grades; each row belongs to one process."""
    return rows if count() == 1 else rows[jax.process_index() :: count()]


# ----- the end


def finish(status: int) -> None:
    """Wait for the others before a normal exit; leave at once after an error.

    Where the run is complete or was stopped, all wait for each other. After an error a
    process leaves without the others, which notice.

    Args:
        status: 0, 128 + n of an agreed signal n, or that of an error.
    """
    if _watch is None:
        return
    if status == 0 or status > 128:
        barrier()
        _watch.done()
    else:
        _watch.leave(status)


def leave(status: int) -> None:
    """End this process with a status, which others notice; no-op with one process."""
    if _watch:
        _watch.leave(status)
    elif jax.distributed.is_initialized():  # whose end would wait for the others
        sys.stderr.flush()
        os._exit(status)


def settle() -> None:
    """Wait for the watch to report a lost process, if an error comes from one."""
    if _watch:
        _watch.settle()


def fail(error: BaseException) -> None:
    """End this process after an uncaught exception; with one process, raise it.

    If another process has ended, the watch reports that instead.
    """
    if _watch is None:
        raise error
    time.sleep(5 * GRACE)
    traceback.print_exception(error)
    _watch.leave(1)
