"""Runner of a comparison in its folder: warm starts, programs, checkpoints, histories.

    experiment.json     what runs, so that another experiment is refused
    warm/KEY/           checkpoints of warm starts, shared by arms that have the same
    checkpoints/KEY/    the program that is running, saved at every evaluation
    arms/KEY.json       a program at its end: the history of each of its arms
    cost.json           seconds per token drawn and per token trained, where measured

Killed at any time, a comparison goes on from the last evaluation, and its histories are
those of one that was not killed, bit for bit, but for their seconds.
"""

import contextlib
import difflib
import json
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from curax.compare import analysis, programs
from curax.compare.experiment import (
    Arm,
    Experiment,
    budget,
    settled,
    trials,
    warm_config,
    warm_key,
)
from curax.compare.programs import Sweep
from curax.config import Config, ConfigError
from curax.runs import checkpoint, marks, reading
from curax.runs.progress import Progress
from curax.settings import errors, files
from curax.settings.cli import write_file
from curax.settings.config_paths import changes, describe
from curax.settings.sizes import checkpoint_of
from curax.step import loops
from curax.step.build import build

ABOUT, COST = "experiment.json", "cost.json"
ARMS, WARM, RUNNING = "arms", "warm", "checkpoints"
SAVE_S = 5.0  # seconds between two checkpoints of a warm start
TIMED = 5  # steps that are timed, stage by stage
MOST = 8  # times as many steps, where none trains a token
# Digests of what an arm reads, and what runs have been where one has changed.
READ = {
    "read": "on other questions than those of its task now",
    "asked": "whose questions another tokenizer or chat template asked",
    "weights": "from another checkpoint than model.path holds now",
    "grader": "by another content of the file of its grader",
}


def check(workdir: Path, experiment: Experiment, arms: Sequence[Arm]) -> None:
    """Check that a folder is empty, or holds this comparison. Writes nothing.

    Raises:
        ConfigError: it holds another one; arms may be added, not changed or left out.
    """
    old = reading.read_json(workdir / ABOUT)
    if not old:
        if (workdir / "config.json").exists():
            raise ConfigError(f"--workdir {workdir} holds a run; name another folder.")
        return
    for other in _others(old, about(experiment, arms)):
        raise ConfigError(
            f"--workdir {workdir} holds {other}; bring that back, or name another "
            "--workdir."
        )


def _others(old: Mapping[str, Any], now: Mapping[str, Any]) -> Iterator[str]:
    """Phrases on what a folder holds that is not of the comparison `about` now."""
    for name, was, new in changes(old.get("budget"), now["budget"]):
        yield f"a comparison with {name}={was}, and it is {new} now"
    for name, config in old.get("arms", {}).items():
        if name not in now["arms"]:
            yield f"runs of {name}, which the experiment no longer names"
        for setting, was, new in changes(config, now["arms"][name]):
            yield f"runs of {name} with {setting}={was}, and it is {new} now"
        for kind, said in READ.items():
            own = now[kind][name]
            if old.get(kind, {}).get(name, own) != own:
                yield f"runs of {name} {said}"


def about(experiment: Experiment, arms: Sequence[Arm]) -> dict[str, Any]:
    """Budget, configs and digests of the files that histories follow from."""
    every = (*arms, *trials(experiment, arms))
    weights = cache(marks.weights)  # those of a checkpoint are read once
    found: dict[str, Any] = {kind: {} for kind in READ}
    for arm in every:
        task, path = programs.task_inside(arm.config), checkpoint_of(arm.config)
        found["read"][arm.name] = task.fingerprint
        found["asked"][arm.name] = marks.asked(task)
        with errors.config_errors(arm.config):
            found["weights"][arm.name] = weights(path) if path else 0
        found["grader"][arm.name] = marks.grader(arm.config)
    described = {arm.name: describe(arm.config) for arm in every}
    return {"budget": budget(experiment), "arms": described} | found


def finished(workdir: Path) -> dict[str, Any]:
    """Histories of the finished arms, by name."""
    found: dict[str, Any] = {}
    for path in sorted((workdir / ARMS).glob("*.json")):
        found |= reading.read_json(path).get("arms", {})
    return found


def ran_on(workdir: Path) -> dict[str, str]:
    """Kind of device and version of JAX of the finished programs, each named once."""
    every = [reading.read_json(path) for path in (workdir / ARMS).glob("*.json")]
    return {
        name: ", ".join(sorted({found[name] for found in every}))
        for name in ("device", "jax")
    }


class Ran(NamedTuple):
    """What a comparison ran, at its end."""

    arms: Sequence[Arm]  # at what tuning took
    histories: Mapping[str, Any]  # by the name of the arm
    tuned: Mapping[str, Any]  # by recipe and condition: all trials, and the one taken
    on: Mapping[str, str]  # kind of device and version of JAX, of every program


class Comparison:
    """Runner of an experiment, in a folder that this process has locked."""

    def __init__(self, experiment: Experiment, arms: Sequence[Arm], workdir: Path):
        """Trace all programs that are still to run; nothing is written.

        Raises:
            ConfigError: an arm cannot work.
        """
        self._experiment, self._arms, self._workdir = experiment, arms, workdir
        self._done = finished(workdir)
        self._warm: dict[str, loops.Jitted] = {}
        self._states: dict[str, Any] = {}  # of the last warm start, on the host
        self._trials = trials(experiment, arms)
        # Where settings are tuned, arms are traced when it is known what they take.
        self._programs = self._traced(self._trials or arms)
        if not self._done:
            self._check_watched()

    def _pending(self, arms: Sequence[Arm]) -> list[Sweep]:
        """Sweeps of the arms that are not finished."""
        left = [arm for arm in arms if arm.name not in self._done]
        return programs.sweeps(left, self._experiment)

    def _traced(self, arms: Sequence[Arm]) -> list[tuple[Sweep, loops.Lanes]]:
        """Programs of the arms that are not finished."""
        found = []
        for sweep in self._pending(arms):
            self._warm_loop(sweep.arms[0])
            found.append((sweep, programs.lanes(sweep)))
        return found

    def _check_watched(self) -> None:
        """Check that each metric in `watched` is one of some recipe.

        Raises:
            ConfigError: one is not.
        """
        known = {name for _, lanes in self._programs for name in lanes.metrics}
        for name in self._experiment.watched:
            if name not in known:
                near = difflib.get_close_matches(name, known, 1, cutoff=0)
                raise ConfigError(
                    f"watched names {name!r}, which no recipe has as a metric; did you "
                    f"mean {near[0]!r}?"
                )

    def run(self, *, measures: bool, progress: Progress) -> Ran:
        """Run the remaining programs, trials before the arms that take the best.

        Args:
            measures: measure the cost of a token, if the folder does not know it.
            progress: display, entered.
        """
        experiment, arms = self._experiment, self._arms
        write_file(self._workdir / ABOUT, files.json_bytes(about(experiment, arms)))
        (self._workdir / ARMS).mkdir(exist_ok=True)
        if measures:
            self._measure(progress)
        start, tuned, before = time.monotonic(), {}, 0
        if self._trials:
            before = len(self._programs)
            self._run_all(start, 0, before + len(self._pending(arms)), progress)
            taken, tuned = self._taken()
            arms = settled(arms, taken)
            self._programs = self._traced(arms)
        self._run_all(start, before, before + len(self._programs), progress)
        shutil.rmtree(self._workdir / RUNNING, ignore_errors=True)
        histories = {arm.name: self._done[arm.name] for arm in arms}
        return Ran(arms, histories, tuned, ran_on(self._workdir))

    def _run_all(
        self, start: float, begun: int, total: int, progress: Progress
    ) -> None:
        """Run programs, of which `begun` of `total` went before, and write each."""
        for number, (sweep, lanes) in enumerate(self._programs, begun):
            clock = _Clock(start, number, total)
            history = self._run(sweep, lanes, progress, clock)
            found = {
                "device": jax.devices()[0].device_kind,
                "jax": jax.__version__,
                "lanes": lanes.seeds.size,
                "arms": dict(programs.split(sweep, history)),
            }
            path = self._workdir / ARMS / f"{sweep.key}.json"
            write_file(path, (json.dumps(found) + "\n").encode())
            shutil.rmtree(self._workdir / RUNNING / sweep.key, ignore_errors=True)
            self._done |= found["arms"]

    def _taken(self) -> tuple[list[Arm], dict[str, Any]]:
        """The best trial of each recipe and condition, and all of them as JSON."""
        groups: dict[str, list[Arm]] = {}
        for trial in self._trials:
            name = trial._replace(changed=(), trial=False).name
            groups.setdefault(name, []).append(trial)
        taken, found = [], {}
        for name, own in groups.items():
            histories = [analysis.history_of(self._done[x.name]) for x in own]
            axis, place, rates = analysis.trial_rates(
                histories, self._experiment.budgets
            )
            if (best := analysis.best_of(rates)) is None:
                raise ConfigError(
                    f"{name}: completions of all trials lack outcomes, so none can be "
                    "taken; try other values in tune, or mend the verifier."
                )
            tried = [
                {"settings": trial.settings, "rate": rate}
                for trial, rate in zip(own, rates, strict=True)
            ]
            taken.append(own[best])
            found[name] = {"axis": axis, "place": place, "trials": tried, "taken": best}
        return taken, found

    # ----- warm starts

    def _warm_loop(self, arm: Arm) -> loops.Jitted:
        """Training loop of an arm's warm start, cached by `warm_key`."""
        key = warm_key(self._experiment, arm)
        if key not in self._warm:
            config = warm_config(self._experiment, arm)
            self._warm[key] = loops.Jitted(programs.built(config))
        return self._warm[key]

    def _warmed(self, arm: Arm, progress: Progress) -> Any:
        """State of all seeds after an arm's warm start, cached by `warm_key`."""
        key, loop = warm_key(self._experiment, arm), self._warm_loop(arm)
        if key in self._states:
            return jax.device_put(self._states[key], jax.devices()[0])
        how, last = loop.parts.config.warm_start, time.monotonic()
        total, path = how.steps if how else 0, self._workdir / WARM / key
        with _resumed(path, loop.abstract_warm, loop.whole) as (saved, found):
            state, done = (found.state, found.step) if found else (loop.initial(), 0)
            if done < total:
                progress.begin("warm start", done, total)
            for after, number, losses in loop.warm_up(state, done):
                state, done = after, number
                progress.warm(done, losses[-1])
                if done == total or time.monotonic() - last > SAVE_S:
                    saved.save(done, state, {})
                    last = time.monotonic()
        self._states = {key: jax.device_get(state)}
        return state

    # ----- programs

    def _run(
        self, sweep: Sweep, lanes: loops.Lanes, progress: Progress, clock: "_Clock"
    ) -> dict[str, Any]:
        """Run a program from its last evaluation to its end, and return its history."""
        experiment, path = self._experiment, self._workdir / RUNNING / sweep.key
        with (
            _resumed(path, lanes.abstract, lanes.whole) as (saved, found),
            lanes.compiling(found.state if found else None),
        ):
            if found:
                state = found.state
                history = analysis.with_greedy(found.totals["history"])
            else:
                state = lanes.begin(self._warmed(sweep.arms[0], progress))
                history = _empty_history(lanes, experiment)
                _append_rates(history, lanes, state)
            begun = _percent(history, experiment)
            progress.begin(clock.title(sweep.name), begun, 100, share=True)
            while (percent := _percent(history, experiment)) < 100:
                times = min(experiment.every, experiment.steps - history["steps"][-1])
                state, rows, _ = lanes.advance(state, times)
                _append_chunk(history, rows)
                _append_rates(history, lanes, state)
                saved.save(history["steps"][-1], state, {"history": history})
                percent = _percent(history, experiment)
                progress.note(
                    percent, _progress_text(history) + clock.remaining(percent)
                )
        return history

    # ----- what a token costs

    def _measure(self, progress: Progress) -> None:
        """Measure the cost of a token on one seed of the baseline; write cost.json.

        What was measured before is kept, unless it was on another baseline.
        """
        arm = next(arm for arm in self._arms if arm.recipe == self._experiment.against)
        before = reading.read_json(self._workdir / COST)
        if before and before.get("baseline", arm.recipe) == arm.recipe:
            return
        warm = self._warmed(arm, progress)
        if self._experiment.seeds > 1:
            warm = jax.tree.map(lambda x: x[0], warm)
        with progress.waiting("measuring what a token costs"):
            config = replace(arm.config, seeds=1, staged=True)
            found = {"baseline": arm.recipe} | measured_cost(config, warm)
            write_file(self._workdir / COST, files.json_bytes(found))


def measured_cost(config: Config, warm: Any) -> dict[str, Any]:
    """Seconds of sampling per token drawn, and of updating per token trained.

    Medians over `TIMED` steps behind one that compiles, or up to `MOST` times as many
    where in none a token trains; steps without a token do not count.

    Args:
        config: config of one seed.
        warm: its finished warm start.

    Raises:
        ConfigError: in none of them a token trains.
    """
    loop = loops.Staged(build(config))
    state, _, _ = loop.advance(loop.begin(warm), 1)
    rows: list[dict[str, Any]] = []
    trained = programs.COUNTED["trained"]
    while not any(row[trained] for row in rows):
        if len(rows) >= MOST * TIMED:
            raise ConfigError(
                f"no token trained in {len(rows)} steps of the baseline, so what one "
                "costs cannot be measured; say it by --cost 1:3, for example."
            )
        state, more, _ = loop.advance(state, TIMED)
        rows += more

    def each(stage: str, counted: str) -> float:
        some = [row for row in rows if row[counted]]
        return float(np.median([row[f"time/{stage}_s"] / row[counted] for row in some]))

    return {
        "drawn_s": each("rollout", programs.COUNTED["drawn"]),
        "trained_s": each("update", trained),
        "device": jax.devices()[0].device_kind,
        "steps": len(rows),
    }


class _Clock:
    """Estimator of the time left, for all programs together."""

    def __init__(self, start: float, number: int, programs: int):
        self._start, self._number, self._programs = start, number, programs
        self._first: tuple[float, float] | None = None

    def title(self, name: str) -> str:
        """Name of a program with its number."""
        return f"{name} ({self._number + 1} of {self._programs})"

    def remaining(self, percent: float) -> str:
        """Text of the time left; empty for the last, and before two evaluations."""
        now = time.monotonic()
        self._first = self._first or (now, percent)
        began, first = self._first
        after = self._programs - self._number - 1
        if percent <= first or not after:
            return ""
        whole = (now - began) / (percent - first) * 100
        behind = self._number + percent / 100
        mean = max((now - self._start) / behind, whole) if self._number else whole
        every = whole * (1 - percent / 100) + mean * after
        return f"  about {reading.duration_text(every)} in all"


@contextlib.contextmanager
def _resumed(
    path: Path, like: Any, whole: Callable[[Any], Any]
) -> Iterator[tuple[checkpoint.Checkpoints, checkpoint.Restored | None]]:
    """The checkpoints in a folder, of which one is kept, and the newest; None: none.

    Raises:
        ConfigError: none can be read.
    """
    about = {"key": path.name}
    saved = checkpoint.Checkpoints(path, keep=1, about=about)
    with contextlib.closing(saved):
        try:
            found = saved.newest(like, whole=whole)
        except checkpoint.DamagedError as error:
            raise ConfigError(
                f"no checkpoint can be read, the newest is {error}; remove that "
                "folder, and its program starts anew."
            ) from error
        except checkpoint.OtherBaseError as error:
            raise ConfigError(
                f"{error}; bring these back, or name another --workdir."
            ) from error
        yield saved, found


def _empty_history(lanes: loops.Lanes, experiment: Experiment) -> dict[str, Any]:
    """History before the first step: all counts are 0."""
    counted = {name: [[0.0] * lanes.seeds.size] for name in programs.COUNTED}
    watched = {name: [] for name in experiment.watched}
    rates = {name: [] for name in analysis.RATES}
    return {"steps": [0], "seconds": [0.0], "watched": watched} | rates | counted


def _append_chunk(history: dict[str, Any], rows: Sequence[Mapping[str, Any]]) -> None:
    """Append some steps to a history, from the `[L]` metrics of each."""

    def every(metric: str) -> np.ndarray:
        like = rows[0]["update/count"]  # of a metric that this recipe lacks
        found = [row.get(metric, np.full_like(like, np.nan)) for row in rows]
        return np.stack(found, -1).astype(np.float64)  # [L, steps]

    for name, metric in programs.COUNTED.items():
        history[name].append((every(metric).sum(-1) + history[name][-1]).tolist())
    history["steps"].append(history["steps"][-1] + len(rows))
    seconds = sum(row["time/step_s"] for row in rows)
    history["seconds"].append(history["seconds"][-1] + seconds)
    for metric, kept in history["watched"].items():
        kept.append(files.json_value(reading.finite_mean(every(metric))))


def _append_rates(history: dict[str, Any], lanes: loops.Lanes, state: Any) -> None:
    """Append an evaluation of all lanes to a history."""
    for name, each in zip(analysis.RATES, lanes.pass_rates(state), strict=True):
        history[name].append(each.tolist())


def _percent(history: dict[str, Any], experiment: Experiment) -> float:
    """Percentage of the budgets that the slowest lane has spent; 100 at the end."""
    if history["steps"][-1] >= experiment.steps:
        return 100.0
    wanted = {"drawn": experiment.tokens, "updates": experiment.updates}
    shares = [min(history[n][-1]) / most for n, most in wanted.items() if most]
    return 100 * min(1.0, *shares)


def _progress_text(history: dict[str, Any]) -> str:
    """Progress text: pass rate, tokens and updates so far, means over lanes."""
    drawn = reading.count_text(float(np.mean(history["drawn"][-1])))
    updates = np.mean(history["updates"][-1])
    return (
        f"held-out {np.mean(history['rate'][-1]):.3f}  {drawn} tokens  "
        f"{updates:.0f} updates"
    )
