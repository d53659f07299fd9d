"""Programs of a comparison: arms that differ in magnitudes alone run as one, vmapped.

L lanes run side by side, S settings by R seeds, the seeds of a setting next to each
other. Numbers that a function needs while it is traced, shapes and functions get a
program of their own.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from curax.comparison.experiment import Arm, Experiment, digest, setting_of
from curax.config import Config, ConfigError, describe, override
from curax.settings import errors
from curax.step import drivers, loops, validation
from curax.step.build import build
from curax.step.records import Subject
from curax.step.step import step
from curax.types import TrainState

# What is counted of each step, by the name of its metric.
COUNTED = {
    "drawn": "rollout/tokens",
    "trained": "train/tokens",
    "updates": "update/count",
}
# Fields below which no value is a magnitude of RL.
STATIC = ("task", "model", "warm_start", "evaluation", "logging", "mesh", "seed")


class Plan(NamedTuple):
    """Arms that run as one program, and the settings in which they differ."""

    arms: tuple[Arm, ...]
    settings: tuple[str, ...]

    @property
    def name(self) -> str:
        """Recipe and condition; the name of the arm where there is one."""
        first = self.arms[0]
        return first.name if len(self.arms) == 1 else first._replace(setting="").name

    @property
    def key(self) -> str:
        """File name of the program, with a digest of its configs."""
        about = [[arm.name, describe(arm.config)] for arm in self.arms]
        return f"{self.arms[0].recipe}-{digest([about, self.settings])}"


def plans(pending: Sequence[Arm], experiment: Experiment) -> list[Plan]:
    """Plans of the fewest programs that run some arms, in order of their first arms.

    Raises:
        ConfigError: a task is verified on the host, or a stage cannot work.
    """
    found: dict[Any, Plan] = {}
    known: dict[Any, bool] = {}
    for arm in pending:
        where, traced = (arm.recipe, arm.condition), False
        if arm.setting:
            at = *where, arm.setting
            if at not in known:
                values = (setting_of(arm.config, arm.setting), arm.value)
                values += tuple(experiment.sweep[arm.setting])
                known[at] = _is_magnitude(arm.config, arm.setting, values)
            traced = known[at]
        _check(arm)
        alone = arm.setting and not traced
        key = (*where, arm.name) if alone else where
        before = found.get(key, Plan((), ()))
        more = (arm.setting,) if traced and arm.setting not in before.settings else ()
        found[key] = Plan((*before.arms, arm), (*before.settings, *more))
    return list(found.values())


def _check(arm: Arm) -> None:
    """Check that an arm's components fit together, and that its task is in JAX alone.

    Raises:
        ConfigError: they do not.
    """
    with errors.config_errors(arm.config):
        parts = build(replace(arm.config, seeds=1))
    if not parts.task.on_device:
        raise ConfigError(
            f"{arm.name}: its task is verified on the host, which grades one run at a "
            "time; name a task whose verifier is a JAX function, such as chain.task."
        )
    if parts.task.in_files:
        raise ConfigError(
            f"{arm.name}: the prompts of its task are read by the host, for one run at "
            "a time; name a task whose prompts are a JAX function, such as chain.task."
        )


def _is_magnitude(config: Config, name: str, values: Sequence[Any]) -> bool:
    """Whether a setting may be an array while a step is traced."""
    numbers = all(type(value) in (int, float) for value in values)
    floats = any(type(value) is float for value in values)
    if not (numbers and floats) or name.split(".")[0] in STATIC:
        return False

    def probe(value):
        parts = build(override(config, {name: value}))
        state = loops.begin(parts, loops.initial(parts, jnp.uint32(0)))
        drive = drivers.Traced()
        asked = validation.requests(drive, parts, state.seed)[0]
        held_out = drive.draw(parts, state, asked)
        return step(drive, parts, state), held_out

    try:
        jax.eval_shape(probe, jax.ShapeDtypeStruct((), jnp.float32))
    except Exception:  # of any kind: the program of its own reports what is wrong
        return False
    return True


class Lanes:
    """A compiled program of L lanes, one for each arm and seed of a plan."""

    def __init__(self, plan: Plan):
        """Jit the program's functions; nothing is compiled yet."""
        self.plan, self.config = plan, plan.arms[0].config
        seeds = self.config.seeds
        self.count = seeds * len(plan.arms)
        place = jax.devices()[0]
        self.magnitudes = {
            name: jax.device_put(
                np.repeat(
                    np.array(
                        [setting_of(a.config, name) for a in plan.arms], np.float32
                    ),
                    seeds,
                ),
                place,
            )
            for name in plan.settings
        }
        self.parts = build(self.config)
        self.abstract: Any = None  # shapes of the state of all lanes, once rehearsed
        self.metrics: tuple[str, ...] = ()  # of a step, once rehearsed
        self._begin = jax.jit(jax.vmap(self._first))
        self._chunk = jax.jit(
            jax.vmap(self._many, in_axes=(0, 0, None)), donate_argnums=0
        )
        self._held_out = jax.jit(jax.vmap(self._graded))

    def _parts(self, magnitudes: dict[str, jax.Array]):
        return build(override(self.config, magnitudes)) if magnitudes else self.parts

    def _first(self, warm: loops.Warm, magnitudes: dict[str, jax.Array]) -> TrainState:
        return loops.begin(self._parts(magnitudes), warm)

    def _many(self, state: TrainState, magnitudes: dict[str, jax.Array], times: Any):
        body = partial(step, drivers.Traced(), self._parts(magnitudes))
        state, (values, _) = loops.repeat(
            body, state, times, most=self.config.logging.every
        )
        return state, values

    def _graded(self, state: TrainState, magnitudes: dict[str, jax.Array]):
        parts, drive = self._parts(magnitudes), drivers.Traced()
        asked = validation.requests(drive, parts, state.seed)[0]
        examined = Subject(task=parts.task, model=parts.model)
        graded = drive.draw_and_grade(examined, state, asked)
        return graded.rollouts, graded.outcome

    def rehearse(self, warm: Any) -> None:
        """Trace all programs, and keep the traces.

        Args:
            warm: shapes of the warm start of all seeds.

        Raises:
            ConfigError: a stage cannot work; the message names its line.
        """
        with errors.config_errors(self.config):
            warm = jax.eval_shape(self._spread, warm)
            state = jax.eval_shape(self._begin, warm, self.magnitudes)
            jax.eval_shape(self._held_out, state, self.magnitudes)
            _, values = jax.eval_shape(self._chunk, state, self.magnitudes, 1)
        self.abstract, self.metrics = state, tuple(values)

    def _spread(self, warm: loops.Warm) -> loops.Warm:
        """Warm-start state of each lane, copied from that of its seed."""
        seeds = self.config.seeds
        wide = (lambda x: x[None]) if seeds == 1 else (lambda x: x)
        lane = jnp.arange(self.count) % seeds
        return jax.tree.map(lambda x: wide(x)[lane], warm)

    def begin(self, warm: loops.Warm) -> TrainState:
        """State of all lanes before the first step of RL."""
        return self._begin(self._spread(warm), self.magnitudes)

    def advance(self, state: TrainState, times: int) -> tuple[TrainState, Any]:
        """State after `times` steps, and `[L, times]` metrics by name."""
        chunk = self._chunk(state, self.magnitudes, times)
        state, values = jax.block_until_ready(chunk)
        values = jax.device_get(values)
        return state, {name: value[:, :times] for name, value in values.items()}

    def evaluate(self, state: TrainState) -> np.ndarray:
        """`[L]` held-out pass rates, sampled, with the same noise at every call."""
        rollouts, outcome = jax.device_get(self._held_out(state, self.magnitudes))
        return np.nanmean(validation.pass_rates(self.parts, rollouts, outcome), -1)


def split(lanes: Lanes, history: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield (name, history) of each arm, lists `[K][R]`, from `[K][L]` of all lanes."""
    seeds = lanes.config.seeds
    for i, arm in enumerate(lanes.plan.arms):
        own = slice(i * seeds, (i + 1) * seeds)

        def cut(value: Any, own: slice = own) -> Any:
            if isinstance(value, dict):
                return {name: cut(part) for name, part in value.items()}
            return [row[own] if isinstance(row, list) else row for row in value]

        yield arm.name, cut(history)
