"""Two loops over one path.

`run` is a whole run as one pure function of a seed: jit it, vmap it over seeds, or over
magnitudes of the config. `Jitted` is the same run cut into chunks of steps, so that the
host gets metrics, progress and checkpoints between chunks. `Staged` goes step by step
and lets the host verify; all else is the same functions.
"""

import abc
import dataclasses
import time
from functools import partial
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np

from curax import evaluate, imitate, metrics, pipeline, reward, update
from curax import memory as memories
from curax import mesh as meshes
from curax.keys import stage_key
from curax.parts import Parts
from curax.pipeline import Drawn, Shown
from curax.types import TrainState


@flax.struct.dataclass(kw_only=True)
class Warm:
    """A policy in its warm start."""

    params: Any
    opt_state: Any
    step: jax.Array  # [] int32
    seed: jax.Array  # [] uint32


def initial(parts: Parts, seed: jax.Array) -> Warm:
    """Random parameters, before any training."""
    params = parts.model.init(stage_key(seed, jnp.int32(0), "init"))
    warm = parts.config.warm_start
    tx = warm and update.transformation(warm.optimizer, warm.clip_norm)
    return Warm(
        params=params,
        opt_state=tx.init(params) if tx else None,
        step=jnp.int32(0),
        seed=seed,
    )


def warm_step(parts: Parts, state: Warm) -> tuple[Warm, jax.Array]:
    """One warm-start step; its loss in nats per token."""
    params, opt_state, loss = imitate.update(
        parts, state.params, state.opt_state, state.seed, state.step
    )
    step = state.step + 1
    state = dataclasses.replace(state, params=params, opt_state=opt_state, step=step)
    return state, loss


def begin(parts: Parts, warm: Warm) -> TrainState:
    """The state before the first RL step, from a finished warm start."""
    return TrainState(
        params=warm.params,
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
            self._each(partial(initial, parts)), out_shardings=self.warm_sharding
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

    def context(self):
        """Everything is traced and run inside this: it sets the mesh."""
        return meshes.use(self.mesh)

    def rehearse(self) -> None:
        """Trace every program without running it; the traces are kept for the run."""
        with self.context():
            warm = jax.eval_shape(self._initial, self.seeds)
            if self.parts.config.warm_start:
                jax.eval_shape(self._warm, warm, 1)
            state = jax.eval_shape(self._begin, warm)
            for draw in self._held_out:
                jax.eval_shape(draw, state)
            self._rehearse_step(state)

    @abc.abstractmethod
    def _rehearse_step(self, state):
        """Trace what a step runs."""

    def initial(self) -> Warm:
        """Random parameters."""
        return self._initial(self.seeds)

    def warm(self, state: Warm, times: int) -> tuple[Warm, np.ndarray]:
        """`times` warm-start steps, at most `logging.every`; losses, `[times, ...]`."""
        state, losses = self._warm(state, times)
        return state, np.moveaxis(np.asarray(losses), -1, 0)[:times]

    def begin(self, warm: Warm) -> TrainState:
        """The state before the first RL step."""
        return self._begin(warm)

    def evaluate(self, state: TrainState) -> tuple[np.ndarray, np.ndarray]:
        """`[..., E]` held-out pass rates, sampled and greedy."""
        sampled, greedy = (
            evaluate.pass_rates(self.parts, *draw(state)) for draw in self._held_out
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

    def _evaluate(self, state, *, samples):
        return evaluate.draw(self.parts, state.params, state.seed, samples=samples)

    def _each(self, function, *rest):
        """The function vmapped over its first argument, if there are many seeds."""
        if self.parts.config.seeds == 1:
            return function
        return jax.vmap(function, in_axes=(0, *rest))

    def _sharding(self, state):
        if self.mesh is None:
            return None
        return meshes.of_state(self.mesh, self.parts.model.axes, state)


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
    """Step by step from the host, which may verify; one seed."""

    def __init__(self, parts: Parts):
        """Nothing is compiled yet."""
        super().__init__(parts)
        # Where the host verifies, a stopping rule is tested between rounds.
        self._in_rounds = bool(parts.config.stop) and not parts.task.on_device
        self._pilots = jax.jit(partial(pipeline.pilots, parts))
        self._explored = jax.jit(partial(pipeline.explored, parts))
        self._draw = jax.jit(partial(pipeline.draw, parts))
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

    def _rehearse_step(self, state):
        explored, shape = None, jax.ShapeDtypeStruct
        if self.parts.config.pilot:
            pilots = jax.eval_shape(self._pilots, state)
            outcome = shape(pilots[2].exists.shape, jnp.float32)
            explored = jax.eval_shape(self._explored, state, pilots, outcome)
        if self._in_rounds:
            sampled = jax.eval_shape(self._draw_round, state, None)
            outcome = shape(sampled[2].exists.shape, jnp.float32)
            pool = jax.eval_shape(self._pooled, None, sampled, outcome)
            jax.eval_shape(self._draw_round, state, pool)
            sampled = pool.prompts, pool.contexts, pool.rollouts
        else:
            number = jnp.int32(0)
            sampled = jax.eval_shape(self._draw, state, state.memory, number, explored)
        outcome = shape((self.parts.rows,), jnp.float32)
        drawn = jax.eval_shape(
            self._absorb, state.memory, None, sampled, outcome, explored
        )
        jax.eval_shape(self._learn, state, drawn)

    def advance(self, state, times):
        """As `Loop.advance`; every stage is timed by itself."""
        rows, all_shown = [], []
        for _ in range(times):
            state, row, shown = self._step(state)
            rows.append(row)
            all_shown.append(shown)
        return state, rows, all_shown

    def _step(self, state):
        seconds = dict.fromkeys(("rollout", "verify", "update"), 0.0)

        def graded(draw, *args):
            """What a draw gives, and its outcomes."""
            start = time.perf_counter()
            sampled = jax.block_until_ready(draw(state, *args))
            drawn_at = time.perf_counter()
            outcome = self._verified(sampled)
            seconds["rollout"] += drawn_at - start
            seconds["verify"] += time.perf_counter() - drawn_at
            return sampled, outcome

        explored = None
        if self.parts.config.pilot:
            explored = self._explored(state, *graded(self._pilots))
        drawn, memory, attempt = None, state.memory, jnp.int32(0)
        while drawn is None or self._wants_refill(drawn):
            if self._in_rounds:
                pool = self._pooled(None, *graded(self._draw_round, None))
                while self._goes_on(pool):
                    pool = self._pooled(pool, *graded(self._draw_round, pool))
                sampled, outcome = (
                    (pool.prompts, pool.contexts, pool.rollouts),
                    pool.outcome,
                )
            else:
                sampled, outcome = graded(self._draw, memory, attempt, explored)
            drawn = self._absorb(memory, drawn, sampled, outcome, explored)
            memory, attempt = drawn.memory, drawn.attempts
        start = time.perf_counter()
        state, values, shown = jax.block_until_ready(self._learn(state, drawn))
        seconds["update"] = time.perf_counter() - start
        row = jax.device_get(values)
        row |= {f"time/{stage}_s": took for stage, took in seconds.items()}
        return state, row, jax.device_get(shown)

    def _verified(self, sampled):
        """`[N]` outcomes, on the device or from the host."""
        task = self.parts.task
        if task.on_device:
            return reward.on_device(task, sampled[0], sampled[2])
        local = jax.device_get((sampled[0], sampled[2]))
        return jnp.asarray(reward.on_host(task, *local))
