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

from curax import reward
from curax.arrays import metrics
from curax.step import draws, hinted, pipeline, reflected, sft
from curax.step.build import Parts
from curax.step.loops import Loop, chooses, warm_step
from curax.types import Prompts

KINDS = ("none", "error", "timeout", "crash")  # of outcomes that the host cannot tell


class Staged(Loop):
    """Step by step from the host, which may read prompts and verify; one seed."""

    def __init__(self, parts: Parts):
        """Nothing is compiled yet."""
        super().__init__(parts)
        # Where the host verifies, a stopping rule is tested between rounds.
        self._in_rounds = bool(parts.config.stop) and not parts.task.on_device
        self._ids = jax.jit(partial(draws.next_ids, parts))
        self._next_prompts = jax.jit(partial(draws.next_prompts, parts))
        self._warm_ids = jax.jit(partial(sft.next_ids, parts))
        self._warm_once = jax.jit(
            partial(warm_step, parts),
            out_shardings=(self.warm_sharding, None),
            donate_argnums=0,
        )
        self._pilots = jax.jit(partial(draws.pilots, parts))
        self._explored = jax.jit(partial(draws.explored, parts))
        self._draw = jax.jit(partial(draws.draw, parts))
        self._begin_draw = jax.jit(partial(draws.begin_draw, parts))
        self._draw_part = jax.jit(partial(draws.draw_part, parts))
        self._draw_round = jax.jit(partial(draws.draw_round, parts))
        self._pooled = jax.jit(partial(draws.pooled, parts))
        self._goes_on = jax.jit(partial(draws.goes_on, parts))
        self._absorb = jax.jit(partial(pipeline.absorb, parts))
        self._wants_refill = jax.jit(partial(pipeline.wants_refill, parts))
        self._meant = jax.jit(partial(hinted.meant, parts))
        self._make_hints = jax.jit(partial(hinted.hints, parts))
        self._write_hints = jax.jit(partial(hinted.writing, parts))
        self._at_level = jax.jit(hinted.at_level)
        self._noted = jax.jit(partial(hinted.noted, parts))
        self._found = jax.jit(partial(hinted.found, parts))
        self._begin_search = jax.jit(hinted.begin)
        self._goes_on_hinting = jax.jit(partial(hinted.goes_on, parts))
        self._ask = jax.jit(hinted.ask)
        self._take = jax.jit(partial(hinted.take, parts))
        self._scored = jax.jit(partial(reflected.scored, parts))
        self._is_due = jax.jit(partial(reflected.is_due, parts))
        self._candidates = jax.jit(partial(reflected.candidates, parts))
        self._looked = jax.jit(partial(reflected.looked, parts))
        self._chosen = jax.jit(partial(reflected.chosen, parts))
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
        if self.parts.config.reflection:
            return self._rehearse_reflected(state, prompts)
        if self.parts.config.pilot:
            pilots = jax.eval_shape(self._pilots, state, prompts)
            outcome = shape(pilots[2].exists.shape, jnp.float32)
            explored = jax.eval_shape(self._explored, state, pilots, outcome)
        number = jnp.int32(0)
        if self._in_rounds:
            sampled = jax.eval_shape(self._draw_round, state, None, number, prompts)
            outcome = shape(sampled[2].exists.shape, jnp.float32)
            pool = jax.eval_shape(self._pooled, None, sampled, outcome)
            jax.eval_shape(self._draw_round, state, pool, number, prompts)
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
        if self.parts.config.hint:
            drawn = jax.eval_shape(self._noted, state, drawn, None)
            self._rehearse_hints(state, drawn, prompts)
        return jax.eval_shape(self._learn, state, drawn)

    def _rehearse_reflected(self, state, prompts):
        references, number = self._references(prompts), jnp.int32(0)
        if chooses(self.parts):
            ids = jax.eval_shape(self._candidates, state)
            given = jax.ShapeDtypeStruct(ids.shape[1:], ids.dtype), number
            found = jax.eval_shape(self._looked, state, *given, prompts, references)
            found = [jax.ShapeDtypeStruct(ids.shape, x.dtype) for x in found]
            state = jax.eval_shape(self._chosen, state, ids, tuple(found))
        memory = state.memory
        sampled = jax.eval_shape(self._draw, state, memory, number, None, prompts)
        scored = jax.eval_shape(self._scored, state, sampled, references)
        args = sampled, scored.outcome, None, None, scored
        drawn = jax.eval_shape(self._absorb, memory, None, *args)
        return jax.eval_shape(self._learn, state, drawn)

    def _rehearse_hints(self, state, drawn, prompts):
        """Make hints for nobody: what cannot be made fails here."""
        found = jax.eval_shape(self._found, drawn)
        if prompts is None:
            jax.eval_shape(self._make_hints, state, drawn.prompts, found)
        else:
            nobody = np.zeros(found.shape, bool)
            write = partial(self._write_hints, state)
            hinted.hints_by_host(self.parts, prompts, nobody, write)

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
        return sft.next_traces(self.parts, seed, step, ids)

    def advance(self, state, times):
        """As `Loop.advance`; every stage is timed by itself."""
        rows, all_shown = [], []
        for _ in range(times):
            state, row, shown = self._step(state)
            rows.append(row)
            all_shown.append(shown)
        return state, rows, all_shown

    def _step(self, state):
        clock, explored = Clock(), None
        if chooses(self.parts):
            state = self._renewed(clock, state)
        if self.parts.config.reflection:
            return self._reflected(clock, state)
        if self.parts.config.pilot:
            pilots = self._graded(clock, self._pilots, state, self._prompts(state, 0))
            explored = self._explored(state, *pilots)
        drawn, memory, attempt = None, state.memory, jnp.int32(0)
        asked, level, cost, how = None, None, None, self.parts.config.hint
        while drawn is None or self._wants_refill(drawn):
            prompts = self._prompts(state, attempt)
            if how and how.controller:
                prompts, asked, cost = self._meant_for(clock, state, prompts)
                level = asked.level
            args = state, memory, attempt, explored, prompts, asked
            sampled, outcome = self._drawn(clock, *args)
            drawn = self._absorb(memory, drawn, sampled, outcome, explored, level)
            memory, attempt = drawn.memory, drawn.attempts
        if how:
            drawn = self._noted(state, drawn, cost)
        if how and not how.controller:
            drawn = self._searched(clock, state, drawn, explored)
        return self._trained(clock, state, drawn)

    def _trained(self, clock, state, drawn):
        """The update; metrics and what is to be shown."""
        with clock.times("update"):
            state, values, shown = jax.block_until_ready(self._learn(state, drawn))
        row = jax.device_get(values) | clock.row(self.parts.task.on_device)
        return state, row, jax.device_get(shown)

    def _reflected(self, clock, state):
        """A step that takes its rewards from reference answers."""
        prompts, memory = self._prompts(state, 0), state.memory
        with clock.times("rollout"):
            args = state, memory, jnp.int32(0), None, prompts
            sampled = jax.block_until_ready(self._draw(*args))
        with clock.times("verify"):
            given = state, sampled, self._references(prompts)
            scored = jax.block_until_ready(self._scored(*given))
        args = sampled, scored.outcome, None, None, scored
        return self._trained(clock, state, self._absorb(memory, None, *args))

    def _references(self, prompts):
        """Reference answers that the host reads; None where the device makes them."""
        task = self.parts.task
        return task.reference(prompts) if task.in_files and task.reference else None

    def _renewed(self, clock, state):
        """`reflected.renewed`, of prompts that the host may read."""
        if not self._is_due(state):
            return state
        found = []
        with clock.times("rollout"):
            ids = self._candidates(state)
            for number, some in enumerate(np.asarray(ids)):
                prompts = None
                if self.parts.task.in_files:
                    prompts = self.parts.task.prompts(some)
                given = prompts, self._references(prompts)
                found.append(self._looked(state, some, jnp.int32(number), *given))
            found = jax.tree.map(lambda *x: jnp.stack(x), *found)
            return jax.block_until_ready(self._chosen(state, ids, found))

    def _prompts(self, state, attempt) -> Prompts | None:
        """The prompts of an attempt; None where the device makes them."""
        task = self.parts.task
        if not task.in_files:
            return None
        return task.prompts(np.asarray(self._ids(state, attempt)))

    def _drawn(self, clock, state, memory, attempt, explored, prompts, asked):
        """Completions and their outcomes, drawn as the config says."""
        args = state, memory, attempt, explored, prompts, asked
        if self._in_rounds:
            return self._rounds(clock, state, attempt, prompts, asked)
        if self.parts.config.sampling.parts > 1:
            return self._in_parts(clock, *args)
        return self._graded(clock, self._draw, *args)

    def _meant_for(self, clock, state, prompts):
        """Prompts, asked with hints of the level that was set for each; the cost."""
        if prompts is None:
            prompts = self._next_prompts(state, jnp.int32(0))
        level = self._meant(state, prompts)
        hints, cost = self._hints(clock, state, prompts, level > 0)
        return prompts, self._at_level(prompts, hints, level), cost

    def _searched(self, clock, state, drawn, explored):
        """Groups that collapsed drawn again, with hints."""
        found = self._found(drawn)
        if not jnp.any(found):
            return drawn
        search = self._begin_search(
            drawn, found, self._hints(clock, state, drawn.prompts, found)
        )
        while self._goes_on_hinting(search):
            asked, prompts = self._ask(search), search.drawn.prompts
            args = state, state.memory, search.tried + 1, explored, prompts, asked
            sampled, outcome = self._drawn(clock, *args)
            search = self._take(search, asked, sampled, outcome)
        return search.drawn

    def _hints(self, clock, state, prompts, wanted):
        """`hinted.hints`, made by the host where prompts lie in files."""
        with clock.times("rollout"):
            if not self.parts.task.in_files:
                return jax.block_until_ready(self._make_hints(state, prompts, wanted))
            prompts, wanted = jax.device_get((prompts, wanted))
            write = partial(self._write_hints, state)
            return hinted.hints_by_host(self.parts, prompts, wanted, write)

    def _graded(self, clock, draw, *args):
        """What a draw gives, and its outcomes."""
        with clock.times("rollout"):
            sampled = jax.block_until_ready(draw(*args))
        return sampled, self._waited(clock, [self._verify(clock, sampled)])

    def _rounds(self, clock, state, attempt, prompts, asked):
        """A draw whose prompts stop between rounds."""
        pool = None
        while pool is None or self._goes_on(pool, asked):
            args = state, pool, attempt, prompts, asked
            round_ = self._graded(clock, self._draw_round, *args)
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
            self.reason = verdicts.reason or self.reason
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
