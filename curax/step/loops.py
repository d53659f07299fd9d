"""Training loops: a run as a pure function, in jitted chunks, or step by step.

`run` is a whole run as one pure function of a seed: jit it, vmap it over seeds, or over
magnitudes of the config. `Jitted` is the same run cut into chunks of steps, so that the
host gets metrics, progress and checkpoints between chunks, and `Lanes` are many such
runs side by side. `Staged` makes one step at a time and lets the host read prompts and
verify. All of them call `step.step` with a driver.
"""

import abc
import contextlib
import dataclasses
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from curax.arrays import frozen
from curax.arrays.sharding import placed
from curax.processes import peers
from curax.settings import machine
from curax.step import ahead, compiling, drivers, sft, validation
from curax.step.compiling import Program
from curax.step.states import States, Warm, begin, initial
from curax.step.step import step
from curax.step.types import Components, Shown, Subject
from curax.types import Rollouts, TrainState

MOST_BESIDE = 8  # programs that compile at the same time: each takes memory


def warm_step(parts: Components, state: Warm, traces=None) -> tuple[Warm, jax.Array]:
    """State after one warm-start step, and its loss in nats per token.

    `traces` are those of `sft.next_traces`; None: they are generated here.
    """
    if traces is None:
        ids = sft.next_ids(parts, state.seed, state.step)
        traces = sft.next_traces(parts, state.seed, state.step, ids)
    model = frozen.over(parts.model, state.frozen)
    params, opt_state, loss = sft.update(
        parts, model, state.params, state.opt_state, traces
    )
    step = state.step + 1
    state = dataclasses.replace(state, params=params, opt_state=opt_state, step=step)
    return state, loss


def warm_steps(parts: Components, state: Warm, times) -> tuple[Warm, jax.Array]:
    """State after some warm-start steps, and losses `[logging.every]`, as `repeat`."""
    body = partial(warm_step, parts)
    return repeat(body, state, times, most=parts.config.logging.every)


def steps(parts: Components, state: TrainState, times) -> tuple[TrainState, Any]:
    """State after some RL steps, and what `step` returns of each, as `repeat`."""
    body = partial(step, drivers.Traced(), parts)
    return repeat(body, state, times, most=parts.config.logging.every)


def repeat(body, state, times, *, most: int):
    """Apply `state -> (state, out)` `times` times; outs stacked in `[most, ...]`.

    `times` may be traced, so one program serves chunks of every length.
    """
    body = jax.jit(body)  # traced once, for shapes and for the loop
    like = jax.eval_shape(body, state)[1]
    outs = jax.tree.map(lambda x: jnp.zeros((most, *x.shape), x.dtype), like)

    def one(i, carry):
        state, outs = carry
        state, out = body(state)
        return state, jax.tree.map(lambda all_, x: all_.at[i].set(x), outs, out)

    return jax.lax.fori_loop(0, times, one, (state, outs))


def start(parts: Components, seed: jax.Array, loaded: Any = None) -> TrainState:
    """The state before the first RL step, after the whole warm start.

    Args:
        parts: components of the run.
        seed: `[]` uint32.
        loaded: parameters of a checkpoint, in place of random ones; None: there are
            none.
    """
    warm = initial(parts, seed, loaded)
    if how := parts.config.warm_start:
        warm, _ = jax.lax.scan(
            lambda now, _: warm_step(parts, now), warm, length=how.steps
        )
    return begin(parts, warm)


def run(
    parts: Components, seed: jax.Array, loaded: Any = None
) -> tuple[TrainState, dict[str, jax.Array]]:
    """A whole run, warm start included, as a pure function of its seed.

    Build `parts` inside a traced function from a config with traced magnitudes, and
    runs can be vmapped over these too.

    Args:
        parts: components of the run; its verifier is a JAX function.
        seed: `[]` uint32.
        loaded: as `start`.

    Returns:
        The final state; metrics by name, `[steps]` float32. Counts are per step.
    """

    def one(state, _):
        state, (values, _) = step(drivers.Traced(), parts, state)
        return state, values

    state = start(parts, seed, loaded)
    return jax.lax.scan(one, state, length=parts.config.steps)


def held_out_outcomes(
    parts: Components, state: TrainState
) -> list[tuple[Rollouts, jax.Array]]:
    """Completions of the held-out prompts with outcomes: sampled, and greedy ones."""
    drive = drivers.Traced()
    examined = Subject(task=parts.task, model=parts.model)
    graded = [
        drive.draw_and_grade(examined, state, request)
        for request in validation.requests(drive, parts, state.seed)
    ]
    return [(each.rollouts, each.outcome) for each in graded]


def donating(function: Callable, sharding: Any) -> Program:
    """The program of an update, whose first argument is donated: a state.

    Args:
        function: `(state, ...) -> (state, out)`.
        sharding: of the state that it gives; None: on one device.
    """
    where = (sharding, None)
    return Program(
        function, sharding, updates=True, out_shardings=where, donate_argnums=0
    )


class Loop(States, abc.ABC):
    """A run driven from the host; with several seeds all values have a seed axis.

    Subclasses implement `advance`.
    """

    def __init__(self, parts: Components, settings: Any = None):
        """Jit what a run calls; nothing is compiled yet. Arguments as `States`."""
        super().__init__(parts, settings)
        self._warm = donating(self._each(warm_steps, None), self.warm_sharding)
        changed, seeds = ahead.changed(self.sharding), parts.config.seeds
        what = changed, seeds, self.drawing, self.split
        self._drive = drivers.Hosted(*what)
        self._more: Future[None] | None = None  # programs of a run, compiled beside
        # Held-out prompts are graded by the verifier alone, whatever methods there are.
        self._held_out = Subject(task=parts.task, model=parts.model)

    @property
    def reason(self) -> str | None:
        """The latest reason for missing outcomes; None: there was none."""
        return self._drive.reason

    def rehearse(self, visit: Callable = drivers.traced, loaded: Any = None) -> None:
        """Trace every program without running it; the traces are kept for the run.

        Args:
            visit: gives the shapes of the outputs of `(name, program, args)`, as
                `drivers.traced`; it may compile the program too.
            loaded: of `self.loaded`, or shapes of it.
        """
        with self.context():
            self._rehearse_run(visit, self._rehearse_start(visit, loaded))

    @contextlib.contextmanager
    def compiling(
        self, start: Warm | TrainState | None = None, *, evaluates: bool = True
    ) -> Iterator[None]:
        """A context in which all programs compile side by side, in the background.

        With one core there is no side. On a mesh, and where several processes share a
        run, programs compile as they are called.

        Args:
            start: state that the run goes on from; None: the programs make one.
            evaluates: whether held-out completions are drawn.
        """
        cores = machine.cores()
        if cores == 1 or peers.count() > 1 or self.mesh:
            yield
            return
        if start is None and self.parts.model.load:  # its parameters are not read yet
            start = placed(self.abstract_warm, None)
        beside = compiling.Beside(min(cores, MOST_BESIDE))
        try:
            with self.context():
                state: Any = start
                if not isinstance(state, TrainState):
                    state = self._rehearse_start(beside, warm=start)
            self._more = beside.later(self._rehearse_more, beside, state, evaluates)
            if isinstance(start, TrainState):
                self._more.result()
            yield
        finally:
            beside.close()
            self._more = None

    def begin(self, warm):
        """As `States.begin`; by then the programs of a run are being compiled."""
        state = super().begin(warm)
        if self._more:
            self._more.result()
        return state

    def _rehearse_start(self, visit, loaded=None, warm=None):
        """The state before the first RL step; visit the programs that make it.

        Args:
            visit: as of `rehearse`.
            loaded: as of `rehearse`.
            warm: a state of the warm start that the run goes on from; None: none.
        """
        lanes = self.magnitudes
        if warm is None:
            warm = visit("initial", self._initial, (self.seeds, lanes, loaded))
        if self.parts.config.warm_start:
            self._rehearse_warm(visit, warm)
        return visit("begin", self._begin, (warm, lanes))

    def _rehearse_more(self, visit, state, evaluates):
        """As `_rehearse_run`, in a thread that has no context."""
        with self.context():
            self._rehearse_run(visit, state, evaluates=evaluates)

    def _rehearse_run(self, visit, state, *, evaluates=True):
        """Visit the programs of RL steps and of evaluations."""
        if evaluates:
            self._rehearse_evaluation(visit, state)
        if self.parts.config.steps:
            self._rehearse_step(visit, state)

    def _rehearse_evaluation(self, visit, state):
        """Visit the programs of an evaluation."""
        parts, how = self.parts, self.parts.config.evaluation
        drive, drawn = drivers.Abstract(self._drive, visit, "held-out "), []
        requests = validation.requests(drive, parts, state.seed)
        for request in requests:
            drawn.append(drive.draw(self._held_out, state, request))
        if how.distance or how.confidence:
            given = requests[0].prompts, drawn[0]
            drive.call(validation.measured, parts, state, *given)

    def _rehearse_warm(self, visit, warm):
        """Visit a step of the warm start."""
        visit("warm start", self._warm, (warm, self.magnitudes, 1))

    @abc.abstractmethod
    def _rehearse_step(self, visit, state):
        """Visit the programs of an RL step."""

    def warm(self, state: Warm, times: int) -> tuple[Warm, np.ndarray]:
        """State and losses of `times` warm-start steps, at most `logging.every`.

        Losses are `[times, ...]` nats per token.
        """
        state, losses = self._warm(state, self.magnitudes, times)
        return state, np.moveaxis(np.asarray(peers.fetch(losses)), -1, 0)[:times]

    def warm_up(
        self, state: Warm, done: int = 0, *due: int
    ) -> Iterator[tuple[Warm, int, np.ndarray]]:
        """Yield (state, steps done, losses) after each chunk of a whole warm start.

        Args:
            state: after `done` steps; it is donated, as each that is yielded.
            done: steps that are done.
            due: chunks end at the multiples of these, and of `logging.every`.
        """
        how, due = self.parts.config.warm_start, (*due, self.parts.config.logging.every)
        total = how.steps if how else 0
        while done < total:
            times = min(*(n - done % n for n in due), total - done)
            state, losses = self.warm(state, times)
            done += times
            yield state, done, losses

    def warmed(self, state: Warm | None = None) -> Warm:
        """The state after the whole warm start, of a given one or the initial one."""
        state = state or self.initial()
        for after, *_ in self.warm_up(state):
            state = after
        return state

    def evaluate(
        self, state: TrainState
    ) -> tuple[np.ndarray, np.ndarray, dict[str, np.ndarray]]:
        """`[..., E]` held-out pass rates, sampled and greedy; metrics of the former.

        The host verifies sampled completions while greedy ones are drawn.
        """
        parts, drive = self.parts, self._drive
        how = parts.config.evaluation
        begun, drawn, measured = [], [], {}
        for request in validation.requests(drive, parts, state.seed):
            begun.append(drive.begin(self._held_out, state, request))
            rollouts = begun[-1].rollouts
            drawn.append(peers.fetch(rollouts))
            if not measured:
                measured = validation.formats(parts, drawn[0])
                if how.distance or how.confidence:
                    args = state, request.prompts, rollouts
                    found = drive.call(validation.measured, parts, *args)
                    measured |= peers.fetch(found)
        outcomes = peers.fetch([drive.outcome([one]) for one in begun])
        sampled, greedy = (
            validation.pass_rates(parts, rollouts, outcome)
            for rollouts, outcome in zip(drawn, outcomes, strict=True)
        )
        measured |= validation.pass_at_k(parts, drawn[0], outcomes[0])
        return sampled, greedy, measured

    @abc.abstractmethod
    def advance(
        self, state: TrainState, times: int
    ) -> tuple[TrainState, list[dict[str, Any]], list[Shown]]:
        """State after `times` RL steps, at most `logging.every`, and their metrics.

        Returns:
            The new state (the old one is donated); for each step its metrics and logged
            completions.
        """


class Jitted(Loop):
    """Chunks of steps as one program, for verifiers that are JAX functions."""

    def __init__(self, parts: Components, settings: Any = None):
        """Jit a chunk of steps; nothing is compiled yet. Arguments as `States`."""
        super().__init__(parts, settings)
        self._chunk = donating(self._each(steps, None), self.sharding)

    def _rehearse_step(self, visit, state):
        return visit("steps", self._chunk, (state, self.magnitudes, 1))

    def advance(self, state, times):
        """As `Loop.advance`.

        A chunk is one program, so its stages cannot be timed apart: every step has the
        mean time of its chunk.
        """
        start = time.perf_counter()
        state, (values, shown) = jax.block_until_ready(
            self._chunk(state, self.magnitudes, times)
        )
        step_s = (time.perf_counter() - start) / times
        values, shown = peers.fetch((values, shown))
        rows = []
        for i in range(times):
            row = {name: value[..., i] for name, value in values.items()}
            row["time/step_s"] = step_s
            rows.append(row)
        axis = 1 if self.many else 0
        each = range(times)
        shown = [jax.tree.map(lambda x, i=i: x.take(i, axis), shown) for i in each]
        return state, rows, shown


class Lanes(Jitted):
    """Runs side by side that differ in seeds and in magnitudes of the config alone.

    Their warm start is another loop's, and an evaluation is of pass rates alone.
    """

    def __init__(self, parts: Components, settings: Mapping[str, Sequence[float]]):
        """Jit a chunk of steps of all lanes. Arguments as `States`."""
        super().__init__(parts, settings)
        self._examined = Program(self._each(held_out_outcomes), self.sharding)
        self.metrics: tuple[str, ...] = ()  # of a step, once rehearsed

    def _rehearse_start(self, visit, loaded=None, warm=None):
        warm = warm or placed(self.abstract_warm, self.warm_sharding)
        return visit("begin", self._begin, (warm, self.magnitudes))

    def _rehearse_evaluation(self, visit, state):
        visit("held-out completions", self._examined, (state, self.magnitudes))

    def _rehearse_step(self, visit, state):
        _, (values, _) = super()._rehearse_step(visit, state)
        self.metrics = tuple(values)

    def begin(self, warm):
        """The state before the first RL step, from a warm start of each seed."""
        seeds = self.parts.config.seeds
        lane = jnp.arange(self.seeds.size) % seeds
        wide = (lambda x: x[None]) if seeds == 1 else (lambda x: x)
        return super().begin(jax.tree.map(lambda x: wide(x)[lane], warm))

    def pass_rates(self, state: TrainState) -> tuple[np.ndarray, np.ndarray]:
        """`[L]` held-out pass rates, sampled and greedy.

        With the same noise at every call; NaN where nothing was graded.
        """
        sampled, greedy = (
            validation.mean_of_known(validation.pass_rates(self.parts, *each))
            for each in jax.device_get(self._examined(state, self.magnitudes))
        )
        return sampled, greedy


class Staged(Loop):
    """One step at a time from the host, which may read prompts and verify; one seed."""

    def __init__(self, parts: Components):
        """Set up the driver and the warm start; nothing is compiled yet."""
        super().__init__(parts)
        self._warm_once = donating(partial(warm_step, parts), self.warm_sharding)

    def _rehearse_warm(self, visit, warm):
        if not self.parts.task.in_files:
            return super()._rehearse_warm(visit, warm)
        drive = drivers.Abstract(self._drive, visit, "warm start ")
        return visit("warm start", self._warm_once, (warm, self._traces(drive, warm)))

    def _rehearse_step(self, visit, state):
        step(drivers.Abstract(self._drive, visit), self.parts, state)

    def warm(self, state, times):
        """As `Loop.warm`."""
        if not self.parts.task.in_files:
            return super().warm(state, times)
        losses = []
        for _ in range(times):
            traces = self._traces(self._drive, state)
            state, loss = self._warm_once(state, traces)
            losses.append(loss)
        return state, np.asarray(peers.fetch(losses))

    def _traces(self, drive, state):
        """Traces of a warm-start step, read by the host."""
        when = self.parts, state.seed, state.step
        return drive.call_task(sft.next_traces, *when, drive.call(sft.next_ids, *when))

    def advance(self, state, times):
        """As `Loop.advance`; every stage is timed by itself."""
        rows, all_shown = [], []
        for _ in range(times):
            self._drive.clock = drivers.Clock()
            state, out = step(self._drive, self.parts, state)
            values, shown = peers.fetch(out)
            rows.append(values | self._drive.clock.row(self.parts.task.on_device))
            all_shown.append(shown)
        return state, rows, all_shown
