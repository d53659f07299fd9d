"""Grading in worker processes, so that no completion can stop a run.

A check that hangs, crashes or exhausts memory loses its own outcome alone: its worker
is killed and replaced, and the worker's other checks are graded by others. The result
of a check is a number, or the reason why there is none. `tasks.environments` has
turns answered by the same processes.
"""

import contextlib
import hashlib
import json
import math
import os
import pickle
import secrets
import select
import signal
import socket
import subprocess
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, Protocol, Self

from curax.settings.config_paths import options, unbound
from curax.settings.declared import declared
from curax.verify import serve

Check = tuple[str, str, Any]  # prompt, completion, answer

BATCH = 16  # checks assigned to a worker at a time, at most
START_SECONDS = 120.0  # for a worker to import its grader
STARTS = 3  # consecutive workers that may crash while they start
END_SECONDS = 10.0  # for a worker to end all processes of its grader
LINE = 4096  # bytes of a verdict, at most
FATAL_TRIES = 2  # consecutive workers that equal checks may end
REMEMBERED = 2**14  # checks that have ended a worker


class Pool(Protocol):
    """What grades batches of checks: worker processes, or what a grader declares."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Free what it holds; a later call would take it again."""

    def start(self) -> None:
        """Be ready to grade; RuntimeError, in a sentence, where that fails."""

    def grade(self, checks: Sequence[Check]) -> list[serve.Verdict]:
        """The verdict of each check, in order, as `Workers.grade`."""
        ...


def graded(verdict: Any) -> serve.Verdict:
    """What a grader's worker says of a check: a float in [0, 1].

    Raises:
        ValueError: it is anything else.
    """
    if type(verdict) is float and 0 <= verdict <= 1:
        return verdict
    raise ValueError("no verdict")


class Kind(NamedTuple):
    """What workers serve, and what a verdict of theirs is."""

    service: serve.Service
    read: Callable[[Any], Any]  # a verdict that is no text, checked
    line: int  # bytes of a verdict, at most
    twice: bool  # whether a check may be made again whose verdict was lost


GRADING = Kind(serve.GRADER, graded, LINE, twice=True)


def parse_verdict(line: bytes, nonce: str, number: int, kind: Kind = GRADING) -> Any:
    """The verdict in a line of a worker; of its first line None, as it is ready.

    Args:
        line: `[nonce, number, verdict]` as JSON.
        nonce: that of the worker.
        number: of this line, from 0.
        kind: of workers.

    Returns:
        What `kind.read` gives, "none" or "error: " and a message; of the first line
        None, or why the worker has no function. Text is printable.

    Raises:
        ValueError: it is anything else.
    """
    try:
        message: Any = json.loads(line) if len(line) <= kind.line else None
    except (ValueError, RecursionError) as error:
        raise ValueError("no verdict") from error
    if not isinstance(message, list) or len(message) != 3:
        raise ValueError("no verdict")
    if (message[0], message[1], type(message[1])) != (nonce, number, int):
        raise ValueError("not the verdict of this check")
    verdict = message[2]
    if isinstance(verdict, str):
        text = serve.printable(verdict)
        if number == 0 or text == "none" or text.startswith("error: "):
            return text
    elif number > 0:
        return kind.read(verdict)
    elif verdict is None:
        return None
    raise ValueError("no verdict")


class Worker:
    """A worker process, and the numbers of the checks that are assigned to it."""

    def __init__(self, source: serve.Source, memory_mb: int, kind: Kind):
        self.pipe, there = socket.socketpair()
        self.lifeline, far = socket.socketpair()
        fds = (there.fileno(), far.fileno())
        # Not by multiprocessing, which would import the main program once more.
        program = (
            f"import sys; sys.path[:] = {sys.path!r}; from curax.verify.serve "
            f"import serve; serve({fds[0]}, {fds[1]}, {os.getpid()})"
        )
        # In its own process group: Ctrl-C is for the parent.
        self.process = subprocess.Popen(
            [sys.executable, "-c", program],
            stdin=subprocess.DEVNULL,
            pass_fds=fds,
            start_new_session=True,
            env=os.environ | {"JAX_PLATFORMS": "cpu", "OMP_NUM_THREADS": "1"},
        )
        there.close()
        far.close()
        self.pipe.setblocking(False)  # a worker may stop reading, or stop within a line
        self.ready = False
        self.assigned: deque[int] = deque()
        self.since = time.monotonic()  # of its start, or of its current check
        self._nonce = secrets.token_hex(16)
        self._number = 0  # of the next verdict
        self._partial = b""  # of an incomplete line
        self._unsent = memoryview(b"")
        self._kind = kind
        self._send((source, kind.service.name, memory_mb, self._nonce))

    def assign(self, numbers: Sequence[int], checks: Sequence[bytes]) -> None:
        """Send checks and store their numbers; none are assigned before."""
        self.assigned.extend(numbers)
        self.since = time.monotonic()
        self._send(checks)

    def _send(self, message: object) -> None:
        self._unsent = memoryview(bytes(self._unsent) + pickle.dumps(message))
        self.write()

    def write(self) -> None:
        """Send as much of the unsent data as the socket takes."""
        with contextlib.suppress(OSError):  # full; or dead, which reading will show
            while self._unsent:
                self._unsent = self._unsent[self.pipe.send(self._unsent) :]

    @property
    def poll_events(self) -> int:
        """The events of its socket to wait for."""
        return select.POLLIN | (select.POLLOUT if self._unsent else 0)

    def unusable(self) -> bool:
        """Whether an idle worker has ended, or has sent unrequested data."""
        if self.process.poll() is not None:
            return True
        try:
            return self.ready and self.pipe.recv(1, socket.MSG_PEEK) is not None
        except BlockingIOError:
            return False
        except OSError:
            return True

    def receive(self) -> Iterator[Any]:
        """The messages received by now: None when it is ready, then verdicts in order.

        Raises:
            OSError: the worker has ended.
            ValueError: a message is no verdict, or was not requested.
        """
        try:
            data = self.pipe.recv(2**16)
        except BlockingIOError:
            return
        if not data:
            raise ConnectionError("it has ended")
        *lines, self._partial = (self._partial + data).split(b"\n")
        for line in lines:
            if self.ready and not self.assigned:
                raise ValueError("a verdict without a check")
            yield parse_verdict(line, self._nonce, self._number, self._kind)
            self._number += 1
        if len(self._partial) > self._kind.line:
            raise ValueError("a line without an end")

    def hang_up(self) -> None:
        """Close the sockets, upon which it ends with all its processes."""
        self.pipe.close()
        self.lifeline.close()

    def kill(self) -> int:
        """End it with all its processes, and return its exit status."""
        self.hang_up()
        try:
            return self.process.wait(END_SECONDS)
        except subprocess.TimeoutExpired:  # its keeper is stopped
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.process.pid, signal.SIGKILL)
            return self.process.wait()


def _kill_all(workers: list[Worker]) -> None:
    for worker in workers:
        worker.hang_up()
    while workers:
        workers.pop().kill()


def _end(workers: list[Worker], lock: threading.Lock) -> None:
    """Kill the workers, unless a thread still grades.

    In that case this process is ending, and the lifelines end the workers.
    """
    if lock.acquire(blocking=False):
        _kill_all(workers)


class Workers(Pool):
    """A pool of worker processes that serve a function; a context manager.

    Mostly a grader, whose checks they grade.

    Calls are served one at a time. Processes are started by the first call or by
    `start`, and end with `close`, with this process, or when the object is collected.
    """

    def __init__(
        self,
        served: serve.Grader | Callable[..., Any],
        *,
        count: int = 2,
        deadline: float = 5.0,
        memory_mb: int = 2048,
        kind: Kind = GRADING,
    ):
        """Prepare a pool without starting a process.

        Args:
            served: `(prompt, completion, answer) -> float | None`, a function at the
                top level of a module or config file, or a partial of one; or another,
                as `kind` says.
            count: processes.
            deadline: seconds per check.
            memory_mb: MiB per process, beyond its imports.
            kind: what the function is.

        Raises:
            ValueError: another process cannot import the function, or a number is not
                positive.
        """
        numbers = {"count": count, "deadline": deadline, "memory_mb": memory_mb}
        for name, value in numbers.items():
            if not value > 0:
                raise ValueError(f"{name}={value} must be positive; raise it.")
        self._source, self._kind = serve.source_of(served, kind.service), kind
        self._count, self._deadline, self._memory_mb = count, deadline, memory_mb
        self._lock = threading.Lock()
        self._workers: list[Worker] = []
        self._crashed = 0  # consecutive workers, while they started
        self._checks: list[bytes] = []
        self._waiting: deque[int] = deque()  # numbers of unassigned checks
        self._verdicts: dict[int, Any] = {}
        self._again: set[int] = set()  # checks repeated after an unexpected message
        # By the digest of a check: how it ended a worker, how many times in a row.
        self._fatal: dict[bytes, tuple[str, int]] = {}
        weakref.finalize(self, _end, self._workers, self._lock)

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

    def grade(self, checks: Sequence[Check]) -> list[serve.Verdict]:
        """The verdict of each check, in order; equal checks are graded once.

        As `ask`, of a grader: prompt, completion and right answer of each; the answer
        is any value that the grader understands and pickle can send.

        Returns:
            A float in [0, 1] for each, or the reason why there is none, "none" where
            the grader returned None.
        """
        return self.ask(checks)

    def ask(self, checks: Sequence[tuple[Any, ...]]) -> list[Any]:
        """What the function says to each check, in order; equal ones are made once.

        A check that has ended its worker twice in a row, by "timeout", "crash" or lack
        of memory, keeps that verdict and is not graded again.

        Args:
            checks: arguments of each.

        Returns:
            A verdict for each, as `kind.read` gives it, or the reason why there is
            none: "timeout", "crash", "none", or "error: " and what was raised, or
            returned and is no verdict.

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
            if self._fatal:
                for n, check in enumerate(self._checks):
                    verdict, times = self._fatal.get(_digest(check), ("", 0))
                    if times >= FATAL_TRIES:
                        self._verdicts[n] = verdict
            rest = (n for n in range(len(numbers)) if n not in self._verdicts)
            self._waiting, self._again = deque(rest), set()
            if self._waiting:
                self._until(lambda: len(self._verdicts) == len(self._checks))
            return [self._verdicts[n] for n in order]

    def _until(self, done: Callable[[], bool]) -> None:
        self._crashed = 0
        try:
            # An idle worker may have been killed, or have sent unrequested data.
            for worker in [w for w in self._workers if w.unusable()]:
                self._remove(worker)
            self._fill()
            while not done():
                self._poll_once()
        except BaseException:
            # Verdicts of these checks must not reach the next call.
            _kill_all(self._workers)
            raise

    def _fill(self) -> None:
        while len(self._workers) < self._count:
            self._workers.append(Worker(self._source, self._memory_mb, self._kind))

    def _poll_once(self) -> None:
        """Assign checks, wait for messages or a deadline, and handle them."""
        for worker in self._workers:
            if worker.ready and not worker.assigned and self._waiting:
                share = math.ceil(len(self._waiting) / (2 * self._count))
                batch = [self._waiting.popleft() for _ in range(min(share, BATCH))]
                worker.assign(batch, [self._checks[number] for number in batch])
        busy = [w for w in self._workers if w.assigned or not w.ready]
        first = min(map(self._limit, busy)) - time.monotonic()
        poll = select.poll()
        for worker in self._workers:
            poll.register(worker.pipe, worker.poll_events)
        # Rounded up, so that a deadline has passed when no message has come.
        poll.poll(math.ceil(1000 * min(max(first, 0.0), 60.0)))
        for worker in list(self._workers):
            worker.write()
            self._receive(worker)
            busy = worker.assigned or not worker.ready
            if worker not in self._workers or not busy:
                continue
            if time.monotonic() > self._limit(worker):
                self._time_out(worker)

    def _limit(self, worker: Worker) -> float:
        """Deadline of a worker for starting, or for grading its current check."""
        return worker.since + (self._deadline if worker.ready else START_SECONDS)

    def _receive(self, worker: Worker) -> None:
        """Handle the messages of a worker, or its end."""
        try:
            for verdict in worker.receive():
                if verdict is None:
                    worker.ready, self._crashed = True, 0
                elif not worker.ready:
                    raise RuntimeError(self._no_start(str(verdict)))
                elif str(verdict).startswith("error: MemoryError"):
                    self._replace(worker, str(verdict))  # it may not free its memory
                    return
                else:
                    number = worker.assigned.popleft()
                    self._verdicts[number] = verdict
                    if self._fatal:
                        self._fatal.pop(_digest(self._checks[number]), None)
                    worker.since = time.monotonic()
        except OSError:
            self._replace(worker, "crash")
        except ValueError:
            # An earlier check may have left a process that sent it: grade once more.
            again = worker.assigned and worker.assigned[0] not in self._again
            again = again and self._kind.twice
            self._again.update(list(worker.assigned)[:1])
            self._replace(worker, None if again else "crash")

    def _time_out(self, worker: Worker) -> None:
        if not worker.ready:
            why = f"it is not ready after {START_SECONDS:g} s; import less in its file."
            raise RuntimeError(self._no_start(why))
        self._replace(worker, "timeout")

    def _replace(self, worker: Worker, verdict: str | None) -> None:
        """Replace a worker; its current check gets the verdict, the rest wait again."""
        if verdict and worker.assigned:
            number = worker.assigned.popleft()
            self._verdicts[number] = verdict
            digest = _digest(self._checks[number])
            _, times = self._fatal.pop(digest, ("", 0))
            self._fatal[digest] = verdict, times + 1
            if len(self._fatal) > REMEMBERED:
                del self._fatal[next(iter(self._fatal))]
        self._waiting.extendleft(reversed(worker.assigned))
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
        what = f"{self._kind.service.name} {self._source.name!r}"
        return f"{place}: no process can start for {what}: {why}"


def pool(grader: serve.Grader, **processes: Any) -> Pool:
    """The pool that a grader declares, made of the grader's options; else `Workers`.

    Args:
        grader: as of `Workers`.
        processes: further arguments of `Workers`; a declared pool has no use for them.

    Raises:
        ValueError: an option is wrong, or the grader cannot be called.
    """
    made = declared(grader, "pool", None)
    if made is None:
        return Workers(grader, **processes)
    serve.check_call(grader, getattr(unbound(grader), "__qualname__", ""))
    return made(**options(grader))


def _digest(check: bytes) -> bytes:
    return hashlib.blake2b(check, digest_size=16).digest()


def _pickled(check: tuple[Any, ...]) -> bytes | str:
    """A pickled check, or why it cannot be pickled, as a verdict."""
    try:
        return pickle.dumps(check)
    except Exception as error:
        return f"error: {serve.error_line(error)}"
