"""Programs of a comparison: arms that differ in magnitudes alone run as one, vmapped.

L lanes run side by side, S settings by R seeds, the seeds of a setting next to each
other. Numbers that a function needs while it is traced, shapes and functions get a
program of their own.
"""

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from curax.compare.experiment import Arm, Experiment, digest, setting_of
from curax.config import Config, override
from curax.settings import errors
from curax.settings.config_paths import describe, unbound
from curax.settings.sizes import checkpoint_of
from curax.step import callbacks, drivers, loops, states, validation
from curax.step.build import build, task_of
from curax.step.step import step
from curax.step.types import Components
from curax.types import Task

# What is counted of each step, by the name of its metric.
COUNTED = {
    "drawn": "rollout/tokens",
    "trained": "train/tokens",
    "updates": "update/count",
}
# Fields below which no value is a magnitude of RL.
STATIC = ("task", "model", "warm_start", "evaluation", "logging", "mesh", "seed")
_tasks: dict[tuple[Any, str], Task] = {}  # of this process, by function and options


class Sweep(NamedTuple):
    """Arms that run as one program, and the settings in which they differ."""

    arms: tuple[Arm, ...]
    settings: tuple[str, ...]

    @property
    def name(self) -> str:
        """Recipe, condition and what is the same in all arms: of one arm its name."""
        first, *others = self.arms
        same = [x for x in first.changed if all(x in arm.changed for arm in others)]
        return first._replace(changed=tuple(same)).name

    @property
    def key(self) -> str:
        """File name of the program, with a digest of its configs."""
        about = [[arm.name, describe(arm.config)] for arm in self.arms]
        return f"{self.arms[0].recipe}-{digest([about, self.settings])}"


def sweeps(pending: Sequence[Arm], experiment: Experiment) -> list[Sweep]:
    """The fewest sweeps that run some arms, in order of their first arms.

    Raises:
        ConfigError: programs cannot call a task, or a stage cannot work.
    """
    found: dict[Any, Sweep] = {}
    known: dict[Any, bool] = {}

    def traced(arm: Arm, setting: str, value: Any) -> bool:
        at = arm.recipe, arm.condition, setting
        if at not in known:
            values = (setting_of(arm.config, setting), value)
            values += tuple({**experiment.sweep, **experiment.tune}[setting])
            known[at] = _is_magnitude(arm.config, setting, values)
        return known[at]

    for arm in pending:
        _check(arm)
        alone = [(name, x) for name, x in arm.changed if not traced(arm, name, x)]
        key = arm.recipe, arm.condition, arm.trial, repr(alone)
        before = found.get(key, Sweep((), ()))
        settings = dict.fromkeys(before.settings)
        settings |= {change[0]: None for change in arm.changed if change not in alone}
        found[key] = Sweep((*before.arms, arm), tuple(settings))
    return list(found.values())


def _check(arm: Arm) -> None:
    """Check that an arm's components fit together, and that programs can call its task.

    Raises:
        ConfigError: they do not.
    """
    with _errors_of(arm):
        built(replace(arm.config, seeds=1))


@contextlib.contextmanager
def _errors_of(arm: Arm) -> Iterator[None]:
    """As `errors.config_errors`; the sentence says which arm it is of."""
    with errors.refusals(of=arm.name), errors.config_errors(arm.config):
        yield


def built(config: Config) -> Components:
    """Components of runs side by side.

    Raises:
        ValueError: a combination is impossible.
        ConfigError: the task cannot be made, or programs cannot call it.
    """
    return build(config, task_inside(config))


def task_inside(config: Config) -> Task:
    """The config's task, of functions that programs can call; a file is read once.

    Raises:
        ConfigError: it cannot be made, or they cannot call it.
    """
    own = describe({"task": config.task, "path": checkpoint_of(config)})
    key = unbound(config.task), repr(own)
    if key not in _tasks:
        with errors.config_errors(config):
            _tasks[key] = callbacks.inside(task_of(config))
    return _tasks[key]


def _is_magnitude(config: Config, name: str, values: Sequence[Any]) -> bool:
    """Whether a setting may be an array while a step is traced."""
    numbers = all(type(value) in (int, float) for value in values)
    floats = any(type(value) is float for value in values)
    if not (numbers and floats) or name.split(".")[0] in STATIC:
        return False

    def probe(value):
        parts = built(override(config, {name: value}))
        state = states.begin(parts, states.initial(parts, jnp.uint32(0)))
        drive = drivers.Traced()
        asked = validation.requests(drive, parts, state.seed)[0]
        held_out = drive.draw(parts, state, asked)
        return step(drive, parts, state), held_out

    try:
        jax.eval_shape(probe, jax.ShapeDtypeStruct((), jnp.float32))
    except Exception:  # of any kind: the program of its own reports what is wrong
        return False
    return True


def lanes(sweep: Sweep) -> loops.Lanes:
    """The runs of a sweep side by side, one for each of its arms and seeds, rehearsed.

    Raises:
        ConfigError: a stage cannot work; the message names its line.
    """
    first, *_ = sweep.arms
    settings = {
        name: [setting_of(arm.config, name) for arm in sweep.arms]
        for name in sweep.settings
    }
    with _errors_of(first):
        found = loops.Lanes(built(first.config), settings)
        found.rehearse()
    return found


def split(sweep: Sweep, history: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield (name, history) of each arm, lists `[K][R]`, from `[K][L]` of all lanes."""
    seeds = sweep.arms[0].config.seeds
    for i, arm in enumerate(sweep.arms):
        own = slice(i * seeds, (i + 1) * seeds)

        def cut(value: Any, own: slice = own) -> Any:
            if isinstance(value, dict):
                return {name: cut(part) for name, part in value.items()}
            return [row[own] if isinstance(row, list) else row for row in value]

        yield arm.name, cut(history)
