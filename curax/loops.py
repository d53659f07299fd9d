"""Two loops over one path.

`run` is a whole run as one pure function of a seed: jit it, vmap it over seeds, or over
magnitudes of the config. `Jitted` is the same run cut into chunks of steps, so that the
host gets metrics, progress and checkpoints between chunks. `Staged` goes step by step
and lets the host verify; all else is the same functions.
"""

import abc
import contextlib
import dataclasses
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np

from curax import frozen, held_out, imitate, metrics, pipeline, reward, update
from curax import memory as memories
from curax import mesh as meshes
from curax.keys import stage_key
from curax.parts import Parts
from curax.pipeline import Drawn, Shown
from curax.types import Prompts, TrainState

KINDS = ("none", "error", "timeout", "crash")  # of outcomes that the host cannot tell


@flax.struct.dataclass(kw_only=True)
class Warm:
    """A policy in its warm start."""

    params: Any
    frozen: Any = None  # parameters that are not trained
    opt_state: Any
    step: jax.Array  # [] int32
    seed: jax.Array  # [] uint32


def saved(state: Any) -> Any:
    """What a checkpoint holds: frozen parameters can be had again. None stays None."""
    if state is None or state.frozen is None:
        return state
    return dataclasses.replace(state, frozen=None)


def initial(parts: Parts, seed: jax.Array, loaded: Any = None) -> Warm:
    """Parameters before any training: those of a checkpoint, the others random."""
    params = parts.model.init(stage_key(seed, jnp.int32(0), "init"))
    params, rest = frozen.split(parts.model, frozen.join(params, loaded))
    warm = parts.config.warm_start
    tx = warm and update.transformation(warm.optimizer, warm.clip_norm)
    return Warm(
        params=params,
        frozen=rest,
        opt_state=tx.init(params) if tx else None,
        step=jnp.int32(0),
        seed=seed,
    )


def warm_step(parts: Parts, state: Warm, traces=None) -> tuple[Warm, jax.Array]:
    """One warm-start step on traces, made here if None; its loss in nats per token."""
    if traces is None:
        ids = imitate.next_ids(parts, state.seed, state.step)
        traces = imitate.next_traces(parts, state.seed, state.step, ids)
    model = frozen.over(parts.model, state.frozen)
    params, opt_state, loss = imitate.update(
        parts, model, state.params, state.opt_state, traces
    )
    step = state.step + 1
    state = dataclasses.replace(state, params=params, opt_state=opt_state, step=step)
    return state, loss


def begin(parts: Parts, warm: Warm) -> TrainState:
    """The state before the first RL step, from a finished warm start."""
    return TrainState(
        params=warm.params,
        frozen=warm.frozen,
        opt_state=parts.tx.init(warm.params),
        # A copy: parameters are donated to the next step, the reference stays.
        reference=jax.tree.map(jnp.copy, warm.params) if parts.config.kl else None,
        memory=memories.forget(parts.task.num_prompts),
        position=jnp.int32(0),
        step=jnp.int32(0),
        seed=warm.seed,
    )


def step(
    parts: Parts, state: TrainState
) -> tuple[TrainState, tuple[dict[str, jax.Array], Shown]]:
    """One RL step with a verifier that is a JAX function."""

    explored = None
    if parts.config.pilot:
        pilots = pipeline.pilots(parts, state)
        outcome = reward.on_device(parts.task, pilots[0], pilots[2])
        explored = pipeline.explored(parts, state, pilots, outcome)

    def attempt(drawn: Drawn | None) -> Drawn:
        memory = drawn.memory if drawn else state.memory
        number = drawn.attempts if drawn else jnp.int32(0)
        sampled = pipeline.draw(parts, state, memory, number, explored)
        outcome = reward.on_device(parts.task, sampled[0], sampled[2])
        return pipeline.absorb(parts, memory, drawn, sampled, outcome, explored)

    drawn = attempt(None)
    if parts.config.sampling.rounds > 1:
        wanted = partial(pipeline.wants_refill, parts)
        drawn = jax.lax.while_loop(wanted, attempt, drawn)
    state, tally, shown = pipeline.learn(parts, state, drawn)
    return state, (metrics.finish(tally), shown)


def repeat(body, state, times, *, most: int):
    """Apply `state -> (state, out)` `times` times; outs stacked in `[most, ...]`.

    `times` may be traced, so one program serves chunks of every length.
    """
    like = jax.eval_shape(body, state)[1]
    outs = jax.tree.map(lambda x: jnp.zeros((most, *x.shape), x.dtype), like)

    def one(i, carry):
        state, outs = carry
        state, out = body(state)
        return state, jax.tree.map(lambda all_, x: all_.at[i].set(x), outs, out)

    return jax.lax.fori_loop(0, times, one, (state, outs))


def run(parts: Parts, seed: jax.Array) -> tuple[TrainState, dict[str, jax.Array]]:
    """A whole run, warm start included, as a pure function of its seed.

    Build `parts` inside a traced function from a config with traced magnitudes, and
    runs can be vmapped over these too.

    Args:
        parts: of the run; its verifier is a JAX function.
        seed: `[]` uint32.

    Returns:
        The final state; metrics by name, `[steps]` float32. Counts are per step.
    """
    warm, count = initial(parts, seed), parts.config.warm_start
    if count:
        warm, _ = jax.lax.scan(
            lambda w, _: warm_step(parts, w), warm, length=count.steps
        )

    def body(state, _):
        state, (values, _) = step(parts, state)
        return state, values

    return jax.lax.scan(body, begin(parts, warm), length=parts.config.steps)


class Loop(abc.ABC):
    """A run, driven from the host. With many seeds all values have an axis of seeds.

    Subclasses say how steps are made, in `advance`.
    """

    def __init__(self, parts: Parts):
        """Nothing is compiled yet."""
        self.parts, cfg = parts, parts.config
        self.mesh = meshes.make(cfg.mesh)
        seeds = jnp.uint32(cfg.seed) + jnp.arange(cfg.seeds, dtype=jnp.uint32)
        seeds = seeds if cfg.seeds > 1 else seeds[0]
        # Committed, as a restored state is: so a resumed run is the same program.
        place = None if self.mesh else jax.devices()[0]
        self.seeds = jax.device_put(seeds, place)
        with self.context():
            warm = jax.eval_shape(self._each(partial(initial, parts)), self.seeds)
            state = jax.eval_shape(self._each(partial(begin, parts)), warm)
            self.warm_sharding = self._sharding(warm)
            self.sharding = self._sharding(state)
        self._initial = jax.jit(
            self._each(partial(initial, parts), None),
            out_shardings=self.warm_sharding,
            donate_argnums=1 if cfg.seeds == 1 else (),
        )
        self._warm = jax.jit(
            self._each(self._warm_many, None),
            out_shardings=(self.warm_sharding, None),
            donate_argnums=0,
        )
        self._begin = jax.jit(
            self._each(partial(begin, parts)), out_shardings=self.sharding
        )
        self._held_out = [
            jax.jit(self._each(partial(self._evaluate, samples=samples)))
            for samples in (cfg.evaluation.samples, 0)
        ]
        self.abstract_warm, self.abstract = warm, state
        self._background = ThreadPoolExecutor(1, "verify")

    def context(self):
        """Everything is traced and run inside this: it sets the mesh."""
        return meshes.use(self.mesh)

    def rehearse(self) -> None:
        """Trace every program without running it; the traces are kept for the run."""
        with self.context():
            warm = jax.eval_shape(self._initial, self.seeds, None)
            if self.parts.config.warm_start:
                self._rehearse_warm(warm)
            state = jax.eval_shape(self._begin, warm)
            for draw in self._held_out:
                jax.eval_shape(draw, state, *self._held_out_prompts())
            self._rehearse_step(state)

    def _rehearse_warm(self, warm):
        """Trace what a step of the warm start runs."""
        jax.eval_shape(self._warm, warm, 1)

    @abc.abstractmethod
    def _rehearse_step(self, state):
        """Trace what a step runs."""

    def initial(self) -> Warm:
        """Parameters before any training."""
        model, where = self.parts.model, None
        if model.load and self.mesh:
            like = jax.eval_shape(model.init, jax.random.key(0))
            where = meshes.of_params(self.mesh, model.axes, like)
        return self._initial(self.seeds, model.load(where) if model.load else None)

    def whole(self, state: Any) -> Any:
        """A state as it was `saved`, with its frozen parameters."""
        if self.parts.model.trained is None:
            return state
        return dataclasses.replace(state, frozen=self.initial().frozen)

    def warm(self, state: Warm, times: int) -> tuple[Warm, np.ndarray]:
        """`times` warm-start steps, at most `logging.every`; losses, `[times, ...]`."""
        state, losses = self._warm(state, times)
        return state, np.moveaxis(np.asarray(losses), -1, 0)[:times]

    def begin(self, warm: Warm) -> TrainState:
        """The state before the first RL step."""
        return self._begin(warm)

    def evaluate(self, state: TrainState) -> tuple[np.ndarray, np.ndarray]:
        """`[..., E]` held-out pass rates, sampled and greedy.

        The host verifies the former while the latter are drawn.
        """
        parts, given = self.parts, self._held_out_prompts()
        drawn, graded = [], []
        for draw in self._held_out:
            prompts, rollouts = jax.block_until_ready(draw(state, *given))
            grade = partial(held_out.outcomes, parts, prompts, rollouts)
            drawn.append(rollouts)
            graded.append(self._begun(grade))
        sampled, greedy = (
            held_out.pass_rates(parts, rollouts, outcome.result())
            for rollouts, outcome in zip(drawn, graded, strict=True)
        )
        return sampled, greedy

    @abc.abstractmethod
    def advance(
        self, state: TrainState, times: int
    ) -> tuple[TrainState, list[dict[str, Any]], list[Shown]]:
        """`times` RL steps, at most `logging.every`.

        Returns:
            The state, donated; for each step its metrics and what is to be shown.
        """

    def _warm_many(self, state, times):
        body = partial(warm_step, self.parts)
        return repeat(body, state, times, most=self.parts.config.logging.every)

    def _held_out_prompts(self) -> tuple[Prompts, ...]:
        """Those that a draw of held-out completions cannot make by itself."""
        task, count = self.parts.task, self.parts.config.evaluation.prompts
        ids = np.arange(count, dtype=np.int32)
        return (task.held_out(ids),) if task.in_files else ()

    def _begun(self, grade: Callable[[], Any]) -> Future:
        """Grading goes on in the background, if it is the host's."""
        if not self.parts.task.on_device:
            return self._background.submit(grade)
        done = Future()
        done.set_result(grade())
        return done

    def _evaluate(self, state, prompts=None, *, samples):
        model = frozen.over(self.parts.model, state.frozen)
        return held_out.draw(
            self.parts, model, state.params, state.seed, prompts, samples=samples
        )

    def _each(self, function, *rest):
        """The function vmapped over its first argument, if there are many seeds."""
        if self.parts.config.seeds == 1:
            return function
        return jax.vmap(function, in_axes=(0, *rest))

    def _sharding(self, state):
        if self.mesh is None:
            return None
        axes, rest = frozen.split(self.parts.model, self.parts.model.axes)
        return meshes.of_state(self.mesh, axes, state, rest)


class Jitted(Loop):
    """Chunks of steps as one program, for verifiers that are JAX functions."""

    def __init__(self, parts: Parts):
        """Nothing is compiled yet."""
        super().__init__(parts)
        self._chunk = jax.jit(
            self._each(self._many, None),
            out_shardings=(self.sharding, None),
            donate_argnums=0,
        )
        self._draw = jax.jit(self._each(self._draw_once))
        self._draw_is_compiled = False

    def _many(self, state, times):
        body = partial(step, self.parts)
        return repeat(body, state, times, most=self.parts.config.logging.every)

    def _rehearse_step(self, state):
        jax.eval_shape(self._chunk, state, 1)

    def _draw_once(self, state):
        explored, parts = None, self.parts
        pilots = None
        if parts.config.pilot:
            pilots = pipeline.pilots(parts, state)
            outcome = reward.on_device(parts.task, pilots[0], pilots[2])
            explored = pipeline.explored(parts, state, pilots, outcome)
        drawn = pipeline.draw(parts, state, state.memory, jnp.int32(0), explored)
        return pilots, drawn

    def advance(self, state, times):
        """As `Loop.advance`.

        A chunk is one program, so its stages cannot be timed apart: the rollout of its
        first step is drawn once more, timed, and thrown away; what remains of the time
        per step counts as update.
        """
        draw_s = self._timed_draw(state)
        start = time.perf_counter()
        state, (values, shown) = jax.block_until_ready(self._chunk(state, times))
        step_s = (time.perf_counter() - start) / times
        values, shown = jax.device_get((values, shown))
        rows = []
        for i in range(times):
            row = {name: value[..., i] for name, value in values.items()}
            row["time/rollout_s"] = draw_s
            row["time/update_s"] = max(step_s - draw_s, 0.0)
            rows.append(row)
        axis = 0 if self.parts.config.seeds == 1 else 1
        return (
            state,
            rows,
            [jax.tree.map(lambda x, i=i: x.take(i, axis), shown) for i in range(times)],
        )

    def _timed_draw(self, state) -> float:
        if not self._draw_is_compiled:
            jax.block_until_ready(self._draw(state))
            self._draw_is_compiled = True
        start = time.perf_counter()
        jax.block_until_ready(self._draw(state))
        return time.perf_counter() - start


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
