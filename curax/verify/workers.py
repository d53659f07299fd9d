"""Graders in processes of their own, so that no completion can stop a run.

A check that hangs, crashes or takes all memory costs that check, not its neighbours:
the process is killed and replaced, and what else it was asked is given to others. What
comes back is a number for each check, or the reason why there is none.
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
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from curax.verify.serve import Grader, Source, Verdict, framed, source_of, told

Check = tuple[str, str, Any]  # prompt, completion, answer

BATCH = 16  # checks that a worker is given at a time, at most
START_SECONDS = 120.0  # for a worker to import its grader
STARTS = 3  # workers in a row that may crash while they start
END_SECONDS = 10.0  # for a worker to end all that its grader has started
LINE = 4096  # bytes of a verdict, at most
PATIENCE = 2  # workers in a row that equal checks may cost
REMEMBERED = 2**14  # checks that have cost a worker


def read(line: bytes, nonce: str, number: int) -> Verdict | None:
    """The verdict that a worker writes as JSON, or None as its first word.

    Args:
        line: `[nonce, number, verdict]`.
        nonce: that of the worker.
        number: of this line, from 0: the first says that the worker is ready.

    Returns:
        A float in [0, 1], "none" or "error: " and more; of the first line None, or why
        it has no grader. Text is printable.

    Raises:
        ValueError: it is anything else.
    """
    try:
        said: Any = json.loads(line) if len(line) <= LINE else None
    except (ValueError, RecursionError) as error:
        raise ValueError("no verdict") from error
    if not isinstance(said, list) or len(said) != 3:
        raise ValueError("no verdict")
    if (said[0], said[1], type(said[1])) != (nonce, number, int):
        raise ValueError("not the verdict of this check")
    verdict = said[2]
    if isinstance(verdict, str):
        text = "".join(c if c.isprintable() else ascii(c)[1:-1] for c in verdict)
        if number == 0 or text == "none" or text.startswith("error: "):
            return text
    elif verdict is None and number == 0:
        return None
    elif type(verdict) is float and number > 0 and 0 <= verdict <= 1:
        return verdict
    raise ValueError("no verdict")


class Worker:
    """A process that grades, and the numbers of the checks it has been given."""

    def __init__(self, source: Source, memory_mb: int):
        self.pipe, there = socket.socketpair()
        self.lifeline, far = socket.socketpair()
        fds = (there.fileno(), far.fileno())
        # Not by multiprocessing, which would import the main program once more.
        program = (
            f"import sys; sys.path[:] = {sys.path!r}; from curax.verify.serve "
            f"import serve; serve({fds[0]}, {fds[1]}, {os.getpid()})"
        )
        # A group of its own: Ctrl-C is for the parent.
        self.process = subprocess.Popen(
            [sys.executable, "-c", program],
            stdin=subprocess.DEVNULL,
            pass_fds=fds,
            start_new_session=True,
            env=os.environ | {"JAX_PLATFORMS": "cpu", "OMP_NUM_THREADS": "1"},
        )
        there.close()
        far.close()
        self.pipe.setblocking(False)  # a worker may stop reading, or half-way a line
        self.ready = False
        self.given: deque[int] = deque()
        self.since = time.monotonic()  # when it began to start, or its first check
        self._nonce = secrets.token_hex(16)
        self._number = 0  # of the verdict that comes next
        self._heard = b""  # of a line that is not complete
        self._unsent = memoryview(b"")
        self._send((source, memory_mb, self._nonce))

    def give(self, numbers: Sequence[int], checks: Sequence[bytes]) -> None:
        """Ask for the checks of these numbers; it has none now."""
        self.given.extend(numbers)
        self.since = time.monotonic()
        self._send(checks)

    def _send(self, message: object) -> None:
        data = framed(pickle.dumps(message))
        self._unsent = memoryview(bytes(self._unsent) + data)
        self.write()

    def write(self) -> None:
        """Send what it takes now of what is to be sent."""
        with contextlib.suppress(OSError):  # full; or dead, which is seen in reading
            while self._unsent:
                self._unsent = self._unsent[self.pipe.send(self._unsent) :]

    @property
    def waits_for(self) -> int:
        """The events of its pipe that somebody waits for."""
        return select.POLLIN | (select.POLLOUT if self._unsent else 0)

    def spoilt(self) -> bool:
        """Whether it has ended, or said what nobody asked for; it has no checks."""
        if self.process.poll() is not None:
            return True
        try:
            return self.ready and self.pipe.recv(1, socket.MSG_PEEK) is not None
        except BlockingIOError:
            return False
        except OSError:
            return True

    def heard(self) -> Iterator[Verdict | None]:
        """What it says now: None where it is ready, and verdicts, in their order.

        Raises:
            OSError: it has ended.
            ValueError: that was not asked for, or is none.
        """
        try:
            data = self.pipe.recv(2**16)
        except BlockingIOError:
            return
        if not data:
            raise ConnectionError("it has ended")
        *lines, self._heard = (self._heard + data).split(b"\n")
        for line in lines:
            if self.ready and not self.given:
                raise ValueError("a verdict without a check")
            yield read(line, self._nonce, self._number)
            self._number += 1
        if len(self._heard) > LINE:
            raise ValueError("a line without an end")

    def hang_up(self) -> None:
        """Have it end, with all it has started."""
        self.pipe.close()
        self.lifeline.close()

    def kill(self) -> int:
        """End it and what it has started; what it returned."""
        self.hang_up()
        try:
            return self.process.wait(END_SECONDS)
        except subprocess.TimeoutExpired:  # somebody has stopped its keeper
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.process.pid, signal.SIGKILL)
            return self.process.wait()


def _kill_all(workers: list[Worker]) -> None:
    for worker in workers:
        worker.hang_up()
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
        self._again: set[int] = set()  # checks asked twice, after an unexpected word
        # By the digest of a check: what it ended a worker by, how often in a row.
        self._costly: dict[bytes, tuple[str, int]] = {}
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

        A check that has ended its worker twice in a row, by "timeout", "crash" or all
        its memory, is not asked again: it keeps that verdict.

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
            if self._costly:
                for n, check in enumerate(self._checks):
                    verdict, times = self._costly.get(_digest(check), ("", 0))
                    if times >= PATIENCE:
                        self._verdicts[n] = verdict
            rest = (n for n in range(len(numbers)) if n not in self._verdicts)
            self._waiting, self._again = deque(rest), set()
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
            # One may have been killed, or have spoken, while nothing was asked of it.
            for worker in [w for w in self._workers if w.spoilt()]:
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
        busy = [w for w in self._workers if w.given or not w.ready]
        first = min(map(self._limit, busy)) - time.monotonic()
        poll = select.poll()
        for worker in self._workers:
            poll.register(worker.pipe, worker.waits_for)
        # Rounded up, so that it is late when it is not heard of.
        poll.poll(math.ceil(1000 * min(max(first, 0.0), 60.0)))
        for worker in list(self._workers):
            worker.write()
            self._hear(worker)
            waited_for = worker.given or not worker.ready
            if worker not in self._workers or not waited_for:
                continue
            if time.monotonic() > self._limit(worker):
                self._late(worker)

    def _limit(self, worker: Worker) -> float:
        """Until when it may start, or be at its check."""
        return worker.since + (self._deadline if worker.ready else START_SECONDS)

    def _hear(self, worker: Worker) -> None:
        """Take what a worker sent, or what its silence means."""
        try:
            for said in worker.heard():
                if said is None:
                    worker.ready, self._crashed = True, 0
                elif not worker.ready:
                    raise RuntimeError(self._no_start(str(said)))
                elif str(said).startswith("error: MemoryError"):
                    self._replace(worker, str(said))  # it may not give back its memory
                    return
                else:
                    number = worker.given.popleft()
                    self._verdicts[number] = said
                    if self._costly:
                        self._costly.pop(_digest(self._checks[number]), None)
                    worker.since = time.monotonic()
        except OSError:
            self._replace(worker, "crash")
        except ValueError:
            # An earlier check may have left what spoke: this one is asked once more.
            again = worker.given and worker.given[0] not in self._again
            self._again.update(list(worker.given)[:1])
            self._replace(worker, None if again else "crash")

    def _late(self, worker: Worker) -> None:
        if not worker.ready:
            why = f"it is not ready after {START_SECONDS:g} s; import less in its file."
            raise RuntimeError(self._no_start(why))
        self._replace(worker, "timeout")

    def _replace(self, worker: Worker, verdict: str | None) -> None:
        """Put another in its place; the first check it had gets the verdict."""
        if verdict and worker.given:
            number = worker.given.popleft()
            self._verdicts[number] = verdict
            digest = _digest(self._checks[number])
            _, times = self._costly.pop(digest, ("", 0))
            self._costly[digest] = verdict, times + 1
            if len(self._costly) > REMEMBERED:
                del self._costly[next(iter(self._costly))]
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


def _digest(check: bytes) -> bytes:
    return hashlib.blake2b(check, digest_size=16).digest()


def _pickled(check: Check) -> bytes | str:
    """A check as it is sent, or why it cannot be."""
    try:
        return pickle.dumps(check)
    except Exception as error:
        return f"error: {told(error)}"
