"""The loop that goes step by step from the host, which reads prompts and verifies."""

import contextlib
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import Future
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from curax import imitate, metrics, pipeline, reward
from curax.loops import Loop, warm_step
from curax.parts import Parts
from curax.types import Prompts

KINDS = ("none", "error", "timeout", "crash")  # of outcomes that the host cannot tell


class Staged(Loop):
    """Step by step from the host, which may read prompts and verify; one seed."""

    def __init__(self, parts: Parts):
        """Nothing is compiled yet."""
        super().__init__(parts)
        # Where the host verifies, a stopping rule is tested between rounds.
        self._in_rounds = bool(parts.config.stop) and not parts.task.on_device
        self._ids = jax.jit(partial(pipeline.next_ids, parts))
        self._warm_ids = jax.jit(partial(imitate.next_ids, parts))
        self._warm_once = jax.jit(
            partial(warm_step, parts),
            out_shardings=(self.warm_sharding, None),
            donate_argnums=0,
        )
        self._pilots = jax.jit(partial(pipeline.pilots, parts))
        self._explored = jax.jit(partial(pipeline.explored, parts))
        self._draw = jax.jit(partial(pipeline.draw, parts))
        self._begin_draw = jax.jit(partial(pipeline.begin_draw, parts))
        self._draw_part = jax.jit(partial(pipeline.draw_part, parts))
        self._draw_round = jax.jit(partial(pipeline.draw_round, parts))
        self._pooled = jax.jit(partial(pipeline.pooled, parts))
        self._goes_on = jax.jit(partial(pipeline.goes_on, parts))
        self._absorb = jax.jit(partial(pipeline.absorb, parts))
        self._wants_refill = jax.jit(partial(pipeline.wants_refill, parts))
        self._learn = jax.jit(
            self._learn_once,
            out_shardings=(self.sharding, None, None),
            donate_argnums=0,
        )

    def _learn_once(self, state, drawn):
        state, tally, shown = pipeline.learn(self.parts, state, drawn)
        return state, metrics.finish(tally), shown

    def _rehearse_warm(self, warm):
        if not self.parts.task.in_files:
            return super()._rehearse_warm(warm)
        return jax.eval_shape(
            self._warm_once, warm, self._traces(jnp.uint32(0), jnp.int32(0))
        )

    def _rehearse_step(self, state):
        explored, shape = None, jax.ShapeDtypeStruct
        prompts = None
        if self.parts.task.in_files:
            ids = np.zeros(self.parts.config.sampling.prompts, np.int32)
            prompts = self.parts.task.prompts(ids)
        if self.parts.config.pilot:
            pilots = jax.eval_shape(self._pilots, state, prompts)
            outcome = shape(pilots[2].exists.shape, jnp.float32)
            explored = jax.eval_shape(self._explored, state, pilots, outcome)
        number = jnp.int32(0)
        if self._in_rounds:
            sampled = jax.eval_shape(self._draw_round, state, None, prompts)
            outcome = shape(sampled[2].exists.shape, jnp.float32)
            pool = jax.eval_shape(self._pooled, None, sampled, outcome)
            jax.eval_shape(self._draw_round, state, pool, prompts)
            sampled = pool.prompts, pool.contexts, pool.rollouts
        else:
            args = state, state.memory, number, explored, prompts
            sampled = jax.eval_shape(self._draw, *args)
            if self.parts.config.sampling.parts > 1:
                begun = jax.eval_shape(self._begin_draw, *args)
                jax.eval_shape(self._draw_part, state, begun, number)
        outcome = shape((self.parts.rows,), jnp.float32)
        drawn = jax.eval_shape(
            self._absorb, state.memory, None, sampled, outcome, explored
        )
        jax.eval_shape(self._learn, state, drawn)

    def warm(self, state, times):
        """As `Loop.warm`."""
        if not self.parts.task.in_files:
            return super().warm(state, times)
        losses = []
        for _ in range(times):
            traces = self._traces(state.seed, state.step)
            state, loss = self._warm_once(state, traces)
            losses.append(loss)
        return state, np.asarray(jax.device_get(losses))

    def _traces(self, seed, step):
        """Traces that the host reads."""
        ids = np.asarray(self._warm_ids(seed, step))
        return imitate.next_traces(self.parts, seed, step, ids)

    def advance(self, state, times):
        """As `Loop.advance`; every stage is timed by itself."""
        rows, all_shown = [], []
        for _ in range(times):
            state, row, shown = self._step(state)
            rows.append(row)
            all_shown.append(shown)
        return state, rows, all_shown

    def _step(self, state):
        clock = Clock()
        explored = None
        if self.parts.config.pilot:
            pilots = self._graded(clock, self._pilots, state, self._prompts(state, 0))
            explored = self._explored(state, *pilots)
        drawn, memory, attempt = None, state.memory, jnp.int32(0)
        while drawn is None or self._wants_refill(drawn):
            prompts = self._prompts(state, attempt)
            if self._in_rounds:
                sampled, outcome = self._rounds(clock, state, prompts)
            elif self.parts.config.sampling.parts > 1:
                args = state, memory, attempt, explored, prompts
                sampled, outcome = self._in_parts(clock, *args)
            else:
                args = state, memory, attempt, explored, prompts
                sampled, outcome = self._graded(clock, self._draw, *args)
            drawn = self._absorb(memory, drawn, sampled, outcome, explored)
            memory, attempt = drawn.memory, drawn.attempts
        with clock.times("update"):
            state, values, shown = jax.block_until_ready(self._learn(state, drawn))
        row = jax.device_get(values) | clock.row(self.parts.task.on_device)
        return state, row, jax.device_get(shown)

    def _prompts(self, state, attempt) -> Prompts | None:
        """The prompts of an attempt; None where the device makes them."""
        task = self.parts.task
        if not task.in_files:
            return None
        return task.prompts(np.asarray(self._ids(state, attempt)))

    def _graded(self, clock, draw, *args):
        """What a draw gives, and its outcomes."""
        with clock.times("rollout"):
            sampled = jax.block_until_ready(draw(*args))
        return sampled, self._waited(clock, [self._verify(clock, sampled)])

    def _rounds(self, clock, state, prompts):
        """A draw whose prompts stop between rounds."""
        pool = None
        while pool is None or self._goes_on(pool):
            round_ = self._graded(clock, self._draw_round, state, pool, prompts)
            pool = self._pooled(pool, *round_)
        return (pool.prompts, pool.contexts, pool.rollouts), pool.outcome

    def _in_parts(self, clock, state, *args):
        """A draw in parts: the host verifies one while the device draws the next."""
        pending, drawn = [], []
        with clock.times("rollout"):
            begun = self._begin_draw(state, *args)
            for part in range(self.parts.config.sampling.parts):
                rollouts = self._draw_part(state, begun, jnp.int32(part))
                sampled = begun.prompts, begun.contexts, jax.block_until_ready(rollouts)
                drawn.append(rollouts)
                pending.append(self._verify(clock, sampled))
        outcome = self._waited(clock, pending)
        rollouts = jax.tree.map(lambda *leaves: jnp.concatenate(leaves), *drawn)
        return (begun.prompts, begun.contexts, rollouts), outcome

    def _verify(self, clock, sampled) -> Future:
        """Begin to grade what was drawn."""
        task, (prompts, _, rollouts) = self.parts.task, sampled
        if task.on_device:
            return self._begun(lambda: reward.on_device(task, prompts, rollouts))
        prompts, rollouts = jax.device_get((prompts, rollouts))

        def grade():
            start = time.perf_counter()
            verdicts = reward.on_host(task, prompts, rollouts)
            clock.graded(time.perf_counter() - start, verdicts.missing)
            return jnp.asarray(verdicts.outcome)

        return self._begun(grade)

    def _waited(self, clock, pending: list[Future]) -> jax.Array:
        """`[N]` outcomes, when all of them are known."""
        with clock.times("verify"):
            outcomes = [future.result() for future in pending]
        return jnp.concatenate(outcomes) if len(outcomes) > 1 else outcomes[0]


class Clock:
    """Seconds that the stages of a step take, and what its verifier could not say."""

    def __init__(self):
        """All zero."""
        self._seconds: dict[str, float] = {"rollout": 0.0, "verify": 0.0, "update": 0.0}
        self._grading, self._missing = 0.0, Counter[str]()

    @contextlib.contextmanager
    def times(self, stage: str) -> Iterator[None]:
        """The stage that runs inside; for verify, the time others wait for it."""
        start = time.perf_counter()
        yield
        self._seconds[stage] += time.perf_counter() - start

    def graded(self, seconds: float, missing: Counter[str]) -> None:
        """So long the host has graded, whoever waited or not."""
        self._grading += seconds
        self._missing += missing

    def row(self, on_device: bool) -> dict[str, Any]:
        """Metrics."""
        row: dict[str, Any] = {f"time/{k}_s": took for k, took in self._seconds.items()}
        if on_device:
            return row
        hidden = max(self._grading - self._seconds["verify"], 0.0)
        kinds = {f"verify/{kind}": self._missing[kind] for kind in KINDS}
        return row | kinds | {"time/verify_hidden_s": hidden}
