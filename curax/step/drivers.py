"""Drivers of a step: traced into one program, from the host, or for shapes alone.

A step defines what is computed from what; a driver defines how. Whatever differs within
a step between verifiers in JAX and in Python, and between generated prompts and prompts
read from files, is in this module. Outside of a step there is more: warm start and
held-out prompts in `loops`, held-out outcomes in `validation`, `draw.cache_size`.

Drivers name no method. They ask one thing of all of them: whether one grades in place
of the verifier.
"""

import contextlib
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any, Literal, NamedTuple, get_args

import jax
import jax.numpy as jnp
import numpy as np

from curax import reward
from curax.processes import peers
from curax.step import draw, grading
from curax.step import mesh as meshes
from curax.step.records import Components, Graded, Method, Request
from curax.types import Rollouts, TrainState

Stage = Literal["rollout", "verify", "update"]  # of a step, timed apart
KINDS = ("none", "error", "timeout", "crash")  # reasons for missing outcomes


def grader(parts: Components) -> Method | None:
    """The method that grades in place of the task's verifier; None without one."""
    return next((method for method in parts.methods if method.grade), None)


def grade(parts: Components, request: Request, rollouts: Rollouts) -> jax.Array:
    """`[N]` outcomes by the task's verifier as a JAX function."""
    return reward.on_device(parts.task, request.prompts, rollouts)


class Traced:
    """Driver of a traced step: one pure function, to be jitted, scanned or vmapped.

    Prompts and outcomes are computed by JAX functions.
    """

    def call(self, function: Callable, parts: Components, *args: Any) -> Any:
        """Call the function itself."""
        return function(parts, *args)

    call_task = finish = call

    def call_timed(
        self, stage: Stage, function: Callable, parts: Components, *args: Any
    ) -> Any:
        """Call the function itself: nothing can be timed inside a program."""
        del stage
        return function(parts, *args)

    def repeat(self, wants: Callable, body: Callable, start: Any) -> Any:
        """Run `jax.lax.while_loop`."""
        return jax.lax.while_loop(wants, body, start)

    def draw_and_grade(
        self, parts: Components, state: TrainState, request: Request
    ) -> Graded:
        """Draw all completions, testing the stopping rule meanwhile, and grade them."""
        rollouts = draw.draw(parts, state, request)
        if method := grader(parts):
            assert method.grade
            outcome, found = method.grade(self, parts, state, request, rollouts)
            return Graded(
                rollouts=rollouts, outcome=outcome, found={method.name: found}
            )
        outcome = grade(parts, request, rollouts)
        return Graded(rollouts=rollouts, outcome=outcome, found={})


class Hosted:
    """Driver from the host, for prompts in files and host verifiers.

    Each function is jitted once; loops are Python's. The host grades a chunk while the
    device draws the next. With a host verifier a stopping rule is tested between its
    rounds, each a draw of its own.
    """

    def __init__(self, sharding: Any = None):
        """Set the sharding of the train state, None on one device; compile nothing."""
        self._jitted: dict[tuple[Any, ...], Any] = {}
        self._sharding = sharding
        self._background = ThreadPoolExecutor(1, "verify")
        self.clock = Clock()  # times of the present step
        self.reason: str | None = None  # latest reason for missing outcomes

    def jitted(self, function: Callable, parts: Components, **options: Any) -> Any:
        """The jitted function with `parts` bound, kept by function, parts and options.

        Its programs are freed with this driver; with `parts` as a static argument of a
        global jitted function they would be kept forever. A function made anew for each
        call is another one each time, and would compile each time.

        Raises:
            ValueError: it was made anew: a lambda, an inner function or a partial.
        """
        if "<" in getattr(function, "__qualname__", "<"):
            raise ValueError(
                f"{function} is made at each call and would be compiled at each; make "
                "it a function of a module, and what it binds its arguments."
            )
        key = function, parts, *options
        if key not in self._jitted:
            self._jitted[key] = jax.jit(partial(function, parts), **options)
        return self._jitted[key]

    def call(self, function: Callable, parts: Components, *args: Any) -> Any:
        """Call the jitted function; it compiles at the first call."""
        return self.jitted(function, parts)(*args)

    def call_task(self, function: Callable, parts: Components, *args: Any) -> Any:
        """Call a function on the host with numpy arrays if the task is in files."""
        if not parts.task.in_files:
            return self.call(function, parts, *args)
        return function(parts, *peers.fetch(args))

    def call_timed(
        self, stage: Stage, function: Callable, parts: Components, *args: Any
    ) -> Any:
        """As `call`, and wait for the result: its time is that of the stage."""
        with self.clock.times(stage):
            return self._waited_for(self.call(function, parts, *args))

    def finish(self, function: Callable, parts: Components, *args: Any) -> Any:
        """Call the jitted function, donating its first array; timed as the update."""
        with self.clock.times("update"):
            return jax.block_until_ready(self.finishing(function, parts)(*args))

    def finishing(self, function: Callable, parts: Components) -> Any:
        """The jitted function that ends a step, with the sharding of its state."""
        return self.jitted(
            function,
            parts,
            out_shardings=(self._sharding, None),
            donate_argnums=0,
            compiler_options=meshes.compiler_options(self._sharding),
        )

    def repeat(self, wants: Callable, body: Callable, start: Any) -> Any:
        """Run a Python loop."""
        while wants(start):
            start = body(start)
        return start

    def draw_and_grade(
        self, parts: Components, state: TrainState, request: Request
    ) -> Graded:
        """Draw at once, in chunks or in rounds of `stop`, as configured, and grade."""
        if method := grader(parts):
            assert method.grade
            rollouts = self.call_timed("rollout", draw.draw, parts, state, request)
            with self.clock.times("verify"):
                graded = method.grade(self, parts, state, request, rollouts)
                outcome, found = self._waited_for(graded)
            return Graded(
                rollouts=rollouts, outcome=outcome, found={method.name: found}
            )
        if not request.whole and parts.config.stop and not parts.task.on_device:
            return self._in_rounds(parts, state, request)
        if not request.whole and parts.config.sampling.chunks > 1:
            return self._in_chunks(parts, state, request)
        rollouts = self.call_timed("rollout", draw.draw, parts, state, request)
        outcome = self._outcome_of([self._grade(parts, request, rollouts)])
        return Graded(rollouts=rollouts, outcome=outcome, found={})

    def _waited_for(self, arrays: Any) -> Any:
        return jax.block_until_ready(arrays)

    def _in_rounds(
        self, parts: Components, state: TrainState, request: Request
    ) -> Graded:
        """Draw in rounds, between which the stopping rule is tested."""

        def another(pool: draw.Pool | None) -> draw.Pool:
            args = state, request, pool
            rollouts = self.call_timed("rollout", draw.draw_round, parts, *args)
            outcome = self._outcome_of([self._grade(parts, request, rollouts)])
            return self.call(draw.add_round, parts, pool, rollouts, outcome)

        wants = partial(self.call, draw.wants_round, parts, request)
        pool = self.repeat(wants, another, another(None))
        return Graded(rollouts=pool.rollouts, outcome=pool.outcome, found={})

    def _in_chunks(
        self, parts: Components, state: TrainState, request: Request
    ) -> Graded:
        """Draw in chunks; the host verifies one while the device draws the next."""
        pending, drawn = [], []
        with self.clock.times("rollout"):
            prefix = self.call(draw.prefill, parts, state, request)
            for number in range(parts.config.sampling.chunks):
                args = state, request, prefix, jnp.int32(number)
                rollouts = self._waited_for(self.call(draw.draw_chunk, parts, *args))
                drawn.append(rollouts)
                pending.append(self._grade(parts, request, rollouts))
        outcome = self._outcome_of(pending)
        rollouts = self.call(_joined, parts, drawn)
        return Graded(rollouts=rollouts, outcome=outcome, found={})

    def _grade(
        self, parts: Components, request: Request, rollouts: Rollouts
    ) -> "Future[Any]":
        """Future of the outcomes; a host verifier runs in the background."""
        if not parts.task.on_device:
            return self._grade_on_host(parts, request, rollouts)
        return finished(self.call(grade, parts, request, rollouts))

    def _grade_on_host(
        self, parts: Components, request: Request, rollouts: Rollouts
    ) -> "Future[Timed]":
        prompts, rollouts = peers.fetch((request.prompts, rollouts))

        def graded():
            start = time.perf_counter()
            verdicts = reward.on_host(parts.task, prompts, grading.own(rollouts))
            return Timed(verdicts, time.perf_counter() - start)

        return self._background.submit(graded)

    def _outcome_of(self, pending: "list[Future[Any]]") -> Any:
        """`[N]` outcomes of all futures; waits for them, and for other processes."""
        with self.clock.times("verify"):
            found = [future.result() for future in pending]
            if not isinstance(found[0], Timed):
                both = jnp.concatenate(found) if len(found) > 1 else found[0]
                return self._waited_for(both)
            verdicts = grading.join([graded.verdicts for graded in found])
        for graded, verdict in zip(found, verdicts, strict=True):
            self.clock.graded(graded.seconds, verdict.missing)
            self.reason = verdict.reason or self.reason
        return np.concatenate([verdict.outcome for verdict in verdicts])


class Timed(NamedTuple):
    """Verdicts of this process, and the seconds they took."""

    verdicts: reward.Verdicts
    seconds: float


def traced(name: str, program: Any, args: tuple[Any, ...]) -> Any:
    """Shapes and dtypes of the outputs of a jitted function, whose trace is kept."""
    del name
    return program.eval_shape(*args)


class Abstract(Hosted):
    """Driver that computes shapes alone, through the programs of a hosted driver.

    Functions that cannot be traced fail here, and the traces are kept for the run. The
    body of a loop is traced once. Functions that read files are called, with zeros.
    """

    def __init__(self, of: Hosted, visit: Callable = traced):
        """Share the jitted functions of a hosted driver.

        Args:
            of: the hosted driver.
            visit: gives the shapes of the outputs of each program, as `traced`.
        """
        super().__init__(of._sharding)
        self._jitted, self._visit = of._jitted, visit

    def call(self, function: Callable, parts: Components, *args: Any) -> Any:
        """Shapes and dtypes of the function's outputs."""
        program = self.jitted(function, parts)
        return self._visit(function.__name__.strip("_"), program, args)

    def call_task(self, function: Callable, parts: Components, *args: Any) -> Any:
        """Call the function on zeros if the task is in files, else as `call`."""
        if not parts.task.in_files:
            return self.call(function, parts, *args)
        zeros = jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), args)
        return function(parts, *zeros)

    def finish(self, function: Callable, parts: Components, *args: Any) -> Any:
        """Shapes and dtypes of the function's outputs."""
        return self._visit(function.__name__, self.finishing(function, parts), args)

    def repeat(self, wants: Callable, body: Callable, start: Any) -> Any:
        """Trace condition and body once."""
        wants(start)
        body(start)
        return start

    def _waited_for(self, arrays: Any) -> Any:
        return arrays

    def _grade_on_host(self, parts, request, rollouts) -> "Future[Any]":
        del parts, request
        return finished(jax.ShapeDtypeStruct(rollouts.exists.shape, jnp.float32))

    def _outcome_of(self, pending: "list[Future[Any]]") -> Any:
        found = [future.result() for future in pending]
        if len(found) == 1:
            return found[0]
        rows = sum(outcome.shape[0] for outcome in found)
        return jax.ShapeDtypeStruct((rows,), jnp.float32)


def finished(value: Any) -> Future:
    """A completed future with this result."""
    done = Future()
    done.set_result(value)
    return done


def _joined(parts: Components, drawn: list[Rollouts]) -> Rollouts:
    """Rows of all chunks, concatenated."""
    del parts
    return jax.tree.map(lambda *leaves: jnp.concatenate(leaves), *drawn)


class Clock:
    """Seconds of each stage of a step, and missing outcomes of its host verifier."""

    def __init__(self):
        """Start all times at zero."""
        self._seconds: dict[Stage, float] = dict.fromkeys(get_args(Stage), 0.0)
        self._grading, self._missing = 0.0, Counter[str]()

    @contextlib.contextmanager
    def times(self, stage: Stage) -> Iterator[None]:
        """A context that times a stage; for verify, the time spent waiting for it."""
        start = time.perf_counter()
        yield
        self._seconds[stage] += time.perf_counter() - start

    def graded(self, seconds: float, missing: Counter[str]) -> None:
        """Add the seconds and missing outcomes of a grading on the host."""
        self._grading += seconds
        self._missing += missing

    def row(self, on_device: bool) -> dict[str, Any]:
        """Times, and counts of missing outcomes by reason, as metrics by name.

        `verify/other` counts all reasons that are not of `KINDS`.
        """
        row: dict[str, Any] = {f"time/{k}_s": took for k, took in self._seconds.items()}
        if on_device:
            return row
        hidden = max(self._grading - self._seconds["verify"], 0.0)
        kinds = {f"verify/{kind}": self._missing[kind] for kind in KINDS}
        kinds["verify/other"] = self._missing.total() - sum(kinds.values())
        return row | kinds | {"time/verify_hidden_s": hidden}
