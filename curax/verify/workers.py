"""Graders in processes of their own, so that no completion can stop a run.

A check that hangs, crashes or takes all memory costs that check, not its neighbours:
the process is killed and replaced, and what else it was asked is given to others. What
comes back is a number for each check, or the reason why there is none.
"""

import contextlib
import math
import os
import pickle
import signal
import socket
import subprocess
import sys
import threading
import time
import weakref
from collections import Counter, deque
from collections.abc import Callable, Sequence
from multiprocessing.connection import Pipe, wait
from typing import Any

from curax.verify.serve import Grader, Source, Verdict, source_of, told

Check = tuple[str, str, Any]  # prompt, completion, answer

BATCH = 16  # checks that a worker is given at a time, at most
START_SECONDS = 120.0  # for a worker to import its grader
STARTS = 3  # workers in a row that may crash while they start


class Worker:
    """A process that grades, and the numbers of the checks it has been given."""

    def __init__(self, source: Source, memory_mb: int):
        self.pipe, there = Pipe()
        self.lifeline, far = socket.socketpair()
        fds = (there.fileno(), far.fileno())
        # Not by multiprocessing, which would import the main program once more.
        program = (
            f"import sys; sys.path[:] = {sys.path!r}; "
            f"from curax.verify.serve import serve; serve{fds}"
        )
        # A group of its own: Ctrl-C is for the parent, and what a grader starts is
        # killed with it.
        self.process = subprocess.Popen(
            [sys.executable, "-c", program],
            stdin=subprocess.DEVNULL,
            pass_fds=fds,
            start_new_session=True,
            env=os.environ | {"JAX_PLATFORMS": "cpu", "OMP_NUM_THREADS": "1"},
        )
        there.close()
        far.close()
        self.ready = False
        self.given: deque[int] = deque()
        self.since = time.monotonic()  # when it began to start, or its first check
        with contextlib.suppress(OSError):  # it is dead: the pipe ends, which is seen
            self.pipe.send((source, memory_mb))

    def give(self, numbers: Sequence[int], checks: Sequence[bytes]) -> None:
        """Ask for the checks of these numbers; it has none now."""
        self.given.extend(numbers)
        self.since = time.monotonic()
        with contextlib.suppress(OSError):
            self.pipe.send(checks)

    def kill(self) -> int:
        """End it and what it has started; what it returned."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.pipe.close()
        self.lifeline.close()
        return self.process.wait()


def _kill_all(workers: list[Worker]) -> None:
    while workers:
        workers.pop().kill()


def _end(workers: list[Worker], lock: threading.Lock) -> None:
    """Kill them, unless a thread is grading still, which would be surprised.

    Then this process is at its end, and the lifelines end the workers.
    """
    if lock.acquire(blocking=False):
        _kill_all(workers)


class Workers:
    """Processes that share the checks of a call; a context, closed at its end.

    One call is served at a time, others wait. Processes are started by the first call,
    or by `start`, and end with `close`, with this process, or when nobody holds the
    object any more.
    """

    def __init__(
        self,
        grader: Grader,
        *,
        count: int = 2,
        deadline: float = 5.0,
        memory_mb: int = 2048,
    ):
        """No process is started yet.

        Args:
            grader: `(prompt, completion, answer) -> float | None`, a function at the
                top level of a module or config file, or a partial of one.
            count: processes.
            deadline: seconds that a check may take.
            memory_mb: MiB that a process may take beyond its imports.

        Raises:
            ValueError: the grader cannot be found by another process, or a number is
                not positive.
        """
        numbers = {"count": count, "deadline": deadline, "memory_mb": memory_mb}
        for name, value in numbers.items():
            if not value > 0:
                raise ValueError(f"{name}={value} must be positive; raise it.")
        self.counts: Counter[str] = Counter()  # graded, timeout, crash, error, none
        self._source = source_of(grader)
        self._count, self._deadline, self._memory_mb = count, deadline, memory_mb
        self._lock = threading.Lock()
        self._workers: list[Worker] = []
        self._crashed = 0  # workers in a row, while they started
        self._checks: list[bytes] = []
        self._waiting: deque[int] = deque()  # numbers of checks that nobody has
        self._verdicts: dict[int, Verdict] = {}
        weakref.finalize(self, _end, self._workers, self._lock)

    def __enter__(self) -> "Workers":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the processes; a later call would start new ones."""
        with self._lock:
            _kill_all(self._workers)

    def start(self) -> None:
        """Wait until every process is ready to grade.

        Raises:
            RuntimeError: a process cannot start, as where the grader's file fails.
        """
        with self._lock:
            self._until(lambda: all(worker.ready for worker in self._workers))

    def grade(self, checks: Sequence[Check]) -> list[Verdict]:
        """Grade each check; equal ones once.

        Args:
            checks: prompt, completion and right answer of each; the answer is whatever
                the grader understands and pickle can send.

        Returns:
            For each check, in order, a float in [0, 1], or the reason why there is
            none: "timeout", "crash", "none" where the grader returned None, or
            "error: " and what it raised, or returned that is not in [0, 1].

        Raises:
            RuntimeError: a process cannot start, as where the grader's file fails.
        """
        with self._lock:
            numbers: dict[bytes | str, int] = {}
            order = [numbers.setdefault(_pickled(c), len(numbers)) for c in checks]
            self._checks = [c if isinstance(c, bytes) else b"" for c in numbers]
            self._verdicts = {
                n: error for error, n in numbers.items() if isinstance(error, str)
            }
            rest = (n for n in range(len(numbers)) if n not in self._verdicts)
            self._waiting = deque(rest)
            if self._waiting:
                self._until(lambda: len(self._verdicts) == len(self._checks))
            verdicts = [self._verdicts[n] for n in order]
        self.counts.update(
            verdict.partition(":")[0] if isinstance(verdict, str) else "graded"
            for verdict in verdicts
        )
        return verdicts

    def _until(self, done: Callable[[], bool]) -> None:
        self._crashed = 0
        try:
            # One may have been killed while nothing was asked of it.
            for worker in [w for w in self._workers if w.process.poll() is not None]:
                self._remove(worker)
            self._fill()
            while not done():
                self._turn()
        except BaseException:
            # Answers to what was asked before must not come to who asks next.
            _kill_all(self._workers)
            raise

    def _fill(self) -> None:
        while len(self._workers) < self._count:
            self._workers.append(Worker(self._source, self._memory_mb))

    def _turn(self) -> None:
        """Give out checks, wait until something happens, and see to it."""
        for worker in self._workers:
            if worker.ready and not worker.given and self._waiting:
                share = math.ceil(len(self._waiting) / (2 * self._count))
                batch = [self._waiting.popleft() for _ in range(min(share, BATCH))]
                worker.give(batch, [self._checks[number] for number in batch])
        limits = {w: self._limit(w) for w in self._workers if w.given or not w.ready}
        first = min(limits.values()) - time.monotonic()
        heard = wait([worker.pipe for worker in self._workers], max(first, 0.0))
        now = time.monotonic()
        for worker in list(self._workers):
            if worker.pipe in heard:
                self._hear(worker)
            elif worker in limits and now > limits[worker] and not worker.pipe.poll():
                self._late(worker)

    def _limit(self, worker: Worker) -> float:
        """Until when it may start, or be at its check."""
        return worker.since + (self._deadline if worker.ready else START_SECONDS)

    def _hear(self, worker: Worker) -> None:
        """Take what a worker sent, or what its silence means."""
        try:
            said: Any = worker.pipe.recv()
        except (EOFError, OSError):
            self._replace(worker, "crash")
            return
        if not worker.ready:
            if said is not None:
                raise RuntimeError(self._no_start(said))
            worker.ready, self._crashed = True, 0
            return
        self._verdicts[worker.given.popleft()] = said
        worker.since = time.monotonic()
        if str(said).startswith("error: MemoryError"):
            self._replace(worker, None)  # it may not give back what it has taken

    def _late(self, worker: Worker) -> None:
        if not worker.ready:
            why = f"it is not ready after {START_SECONDS:g} s; import less in its file."
            raise RuntimeError(self._no_start(why))
        self._replace(worker, "timeout")

    def _replace(self, worker: Worker, verdict: str | None) -> None:
        """Put another in its place; the first check it had gets the verdict."""
        if verdict and worker.given:
            self._verdicts[worker.given.popleft()] = verdict
        self._waiting.extendleft(reversed(worker.given))
        status = self._remove(worker)
        if not worker.ready:
            self._crashed += 1
            if self._crashed >= STARTS:
                why = f"{STARTS} in a row ended with status {status} while they started"
                raise RuntimeError(self._no_start(f"{why}; import its file by hand."))
        self._fill()

    def _remove(self, worker: Worker) -> int:
        self._workers.remove(worker)
        return worker.kill()

    def _no_start(self, why: str) -> str:
        place = self._source.path or self._source.called
        return f"{place}: no process can start for grader {self._source.name!r}: {why}"


def _pickled(check: Check) -> bytes | str:
    """A check as it is sent, or why it cannot be."""
    try:
        return pickle.dumps(check)
    except Exception as error:
        return f"error: {told(error)}"
