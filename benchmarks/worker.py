"""One system in a process of its own: it iterates when told to, and says how long.

The process reads a line from standard input per iteration and answers with a JSON
object in a line. Libraries print on standard output, so the answers go through a copy
of it and standard output itself becomes standard error. Standard library only.
"""

import importlib.metadata
import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from benchmarks.machine import peak_rss_mib
from benchmarks.workload import Workload, mean_and_cv, named


class Worker:
    """The worker's end of the pipe, and its clocks. Waiting is never counted."""

    def __init__(self) -> None:
        """Before any library is imported."""
        self.work: Workload = named(sys.argv[1])
        self.micro_batches = int(sys.argv[2]) if len(sys.argv) > 2 else 0  # 0: default
        self.lengths: list[int] = []  # of this iteration's completions
        self.peak_mib: Callable[[], float] = peak_rss_mib
        self._answers = os.fdopen(os.dup(1), "w")
        os.dup2(2, 1)
        self._clock = self._rollout = (0.0, 0.0)
        self._start = time.perf_counter()

    def imported(self, *packages: str) -> None:
        """All libraries are imported; `packages` are those whose versions matter."""
        took = time.perf_counter() - self._start
        versions = {name: importlib.metadata.version(name) for name in packages}
        self._say(import_s=took, versions=versions)

    def wait(self) -> None:
        """Wait for the word to iterate; without one, end the process."""
        if not sys.stdin.readline():
            os._exit(0)  # some trainers own their loop and cannot be left otherwise
        self.lengths, self._rollout = [], (0.0, 0.0)
        self._clock = _now()

    @contextmanager
    def rollout(self) -> Iterator[None]:
        """Inside is the rollout; all else in an iteration is the update."""
        start = _now()
        yield
        self.rolled_out(start)

    def rolled_out(self, since: tuple[float, float] | None = None) -> None:
        """The rollout has ended; it began at `since`, or with the iteration."""
        wall, cpu = since or self._clock
        now = _now()
        self._rollout = (
            self._rollout[0] + now[0] - wall,
            self._rollout[1] + now[1] - cpu,
        )

    def done(self) -> None:
        """The iteration has ended and nothing of it is still being computed."""
        now = _now()
        wall, cpu = now[0] - self._clock[0], now[1] - self._clock[1]
        mean, cv = mean_and_cv(self.lengths)
        self._say(
            rollout_s=self._rollout[0],
            update_s=wall - self._rollout[0],
            iteration_s=wall,
            cpu_rollout_s=self._rollout[1],
            cpu_update_s=cpu - self._rollout[1],
            peak_rss_mib=self.peak_mib(),
            mean_length=mean,
            cv_length=cv,
            rows=len(self.lengths),
        )

    def _say(self, **values: Any) -> None:
        print(json.dumps(values), file=self._answers, flush=True)


def _now() -> tuple[float, float]:
    """Wall and processor seconds."""
    return time.perf_counter(), time.process_time()
