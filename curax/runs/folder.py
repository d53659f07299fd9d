"""Files of a run folder: config, metrics, rollouts, alarms.

A resumed run cuts off all rows after its checkpoint, and a partial last row of a killed
run, and writes them anew.
"""

import contextlib
import math
import os
import secrets
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from curax import hub
from curax.config import Config, ConfigError, override
from curax.processes import peers
from curax.runs import checkpoint, marks, reading
from curax.runs.dashboards import EVENTS, Dashboards
from curax.runs.rows import (
    Appended,
    RemovedError,
    check_there,
    whole_rows,
    write_errors,
)
from curax.settings import files
from curax.settings.cli import recipe_name, write_whole, written_to
from curax.settings.config_paths import Place, changes, describe, flat
from curax.settings.config_types import HubName, metadata
from curax.settings.errors import refusals
from curax.step.states import States
from curax.types import Task

CONFIG, RECIPE = "config.json", "recipe.json"
METRICS, ROLLOUTS = "metrics.jsonl", "rollouts.jsonl"
WARM, EVALUATION = "warm_start.jsonl", "evaluation.json"
MEMORY, EXPECTED = "memory.jsonl", "expected.json"
QUESTIONS, ALARMS = "questions.json", "alarms.jsonl"
CHECKPOINTS, WARM_CHECKPOINTS = "checkpoints", "warm_start"
# Options, with mesh.*, logging.* and those of an engine, that a resumed run may change:
# results depend on them by rounding at most; as many completions are shown as asked.
CHANGEABLE = (
    *("steps", "evaluation.every"),
    *("update.micro_batches", "update.tokens_per_micro_batch", "update.token_chunk"),
    *("warm_start.micro_batches", "sampling.cache_gib"),
)


PATTERN = "*?[\\"  # characters of a path that orbax takes for those of a glob pattern
SHARING = 15.0  # seconds for a file to be seen on the other machines


def check_writable(workdir: Path) -> None:
    """Check that a run folder can be made at a path. Writes nothing.

    Raises:
        ConfigError: a file is in the way, there is no permission, or checkpoints
            cannot be written to a path of these characters.
    """
    try:
        str(workdir.absolute()).encode()
    except UnicodeEncodeError as error:
        what, fix = "a byte that is not UTF-8", ""
        with contextlib.suppress(UnicodeDecodeError):
            os.fsencode(workdir.absolute()).decode()
            what, fix = "letters that this locale lacks", "set PYTHONUTF8=1, or "
        raise ConfigError(
            f"--workdir {workdir} has {what}, and checkpoints cannot be written there; "
            f"{fix}name another folder."
        ) from error
    if found := next((c for c in str(workdir.absolute()) if c in PATTERN), None):
        raise ConfigError(
            f"--workdir {workdir.absolute()} has a {found}, which Orbax takes for that "
            "of a pattern when it reads a checkpoint; name another folder."
        )
    above = next(p for p in (workdir, *workdir.absolute().parents) if os.path.exists(p))
    if not above.is_dir():
        raise ConfigError(f"--workdir {workdir}: {above} is a file; name a folder.")
    if not os.access(above, os.W_OK | os.X_OK):
        raise ConfigError(
            f"--workdir {workdir} cannot be written: no permission in {above}; name "
            "another folder."
        )


def pinned(workdir: Path, config: Config, *, resume: bool) -> Config:
    """The config with its names on the hub at a commit.

    A resumed run keeps the commits of its config.json, without asking the hub.

    Args:
        workdir: run folder; it is only read.
        config: config of the run.
        resume: whether the run in the folder is to be continued.

    Raises:
        ConfigError: a name cannot be resolved.
    """
    old = files.known(workdir / CONFIG) if resume else {}
    before = {name: value for name, value, _ in changes(old, {})}
    found = {}
    for name, place in Place(config).walk():
        for mark in metadata(place.kind):
            if isinstance(mark, HubName) and isinstance(place.value, str):
                with refusals(hub.HubError, of=name):
                    value = hub.pinned(place.value, mark.kind, before.get(name))
                if value != place.value:
                    found[name] = value
    return override(config, found) if found else config


def check(workdir: Path, config: Config, *, resume: bool, recipe: str = "") -> None:
    """Check that a folder is empty of runs, or holds the run to resume. Writes nothing.

    Args:
        workdir: run folder.
        config: config of the run.
        resume: whether the run in the folder is to be continued.
        recipe: name or file that the config comes from, for messages.

    Raises:
        ConfigError: the folder holds another run, or none to resume.
    """
    if resume:
        _check_same(workdir / CONFIG, config, recipe)
        return
    if name := holds(workdir):
        raise ConfigError(
            f"--workdir {workdir} holds {name} of a run already; add --resume to go on "
            "with that run, or name another folder."
        )


def holds(workdir: Path) -> str | None:
    """What a folder holds of a run; None: nothing, so that one may begin there."""
    names = (CONFIG, METRICS, CHECKPOINTS)
    return next((name for name in names if (workdir / name).exists()), None)


def _check_same(path: Path, config: Config, recipe: str) -> None:
    """Check a config against config.json: `steps` may grow, `CHANGEABLE` may differ."""
    if not path.exists():
        raise ConfigError(
            f"--workdir {path.parent} holds no {path.name}, so no run to resume; leave "
            "--resume out to start one, or name the folder of a run."
        )
    old = described(path, "the run cannot be resumed, name another --workdir")
    for name, was, now in changes(old, describe(config)):
        if name == "steps" and isinstance(was, int) and was < now:
            continue
        if name != "steps" and _may_change(name):
            continue
        rule = "steps may only grow" if name == "steps" else "a run keeps its config"
        if type(now) is not type(was):  # 3 and "3" look alike
            now, was = repr(now), repr(was)
        began = recipe
        with contextlib.suppress(reading.DamagedError, OSError, KeyError):
            began = str(reading.read_json(path.with_name(RECIPE))["recipe"])
        if recipe_name(Path(began)) != recipe_name(Path(recipe)):
            raise ConfigError(
                f"--resume: {path.parent} holds a run of {began}, and {name}={now} of "
                f"{recipe} differs from {was} there; name {began}, or another "
                "--workdir."
            )
        raise ConfigError(
            f"--resume: {name}={now} differs from {was} in {path}; {rule}, so set "
            f"{name} back or name another --workdir."
        )


def described(path: Path, fix: str) -> dict[str, Any]:
    """The JSON object in a file of what a folder was begun with.

    Args:
        path: the file.
        fix: what to do where it is damaged, for the message.

    Raises:
        ConfigError: it cannot be read, or holds no object.
    """
    try:
        return reading.read_json(path, fix)
    except reading.DamagedError as error:
        raise ConfigError(str(error)) from error
    except OSError as error:
        raise ConfigError(f"{path}: {error}; {fix}.") from error


def _may_change(name: str) -> bool:
    """Whether a resumed run may have another value of an option."""
    others = ("mesh.", "logging.", "sampling.engine.")
    return name in CHANGEABLE or name.startswith(others)


def kept(description: Any) -> dict[str, Any]:
    """Values of a described config that a run keeps, which bind its checkpoints."""
    every = flat(description).items()
    return {name: value for name, value in every if not _may_change(name)}


def check_shared(workdir: Path) -> None:
    """Check that all processes see one run folder, which process 0 has made.

    Raises:
        ConfigError: another process has a folder of its own there, or none.
    """
    if peers.count() == 1:
        return
    mark = workdir / peers.broadcast(f"shared-{secrets.token_hex(8)}")
    peers.on_first(_write_mark, mark)
    end = time.monotonic() + SHARING
    while not (seen := mark.exists()) and time.monotonic() < end:
        time.sleep(0.2)
    names = peers.gather((seen, socket.gethostname()))
    if peers.is_first():
        mark.unlink(missing_ok=True)
    for process, (seen, name) in enumerate(names):
        if not seen:
            raise ConfigError(
                f"--workdir {workdir} of process {process} on {name} is not that of "
                f"process 0 on {names[0][1]}; name a folder that all processes share."
            )


def _write_mark(path: Path) -> None:
    with written_to(f"--workdir {path.parent}", "another folder"):
        path.touch()


def make(workdir: Path, config: Config, recipe: str = "") -> None:
    """Make the run folder; write config.json and recipe.json.

    Args:
        workdir: run folder.
        config: config of the run, written with all defaults.
        recipe: name or file that it comes from; empty: unknown, and not written.

    Raises:
        ConfigError: the folder cannot be written.
    """
    with written_to(f"--workdir {workdir}", "another folder"):
        workdir.mkdir(parents=True, exist_ok=True)
        write_json(workdir / CONFIG, describe(config))
        if recipe:
            write_json(workdir / RECIPE, {"recipe": recipe})


def check_questions(
    workdir: Path, task: Task, *, of: str = "--resume", other: str = "another --workdir"
) -> None:
    """Check that a task of files has, and asks, the questions as the run began to.

    Args:
        workdir: run folder.
        task: of the run, built anew.
        of: what is refused, in the sentence.
        other: what to name instead.

    Raises:
        ConfigError: the questions differ, or their first prompts.
    """
    path = workdir / QUESTIONS
    began = reading.read_json(path) if task.fingerprint else {}
    if began and began.get("mark") != task.fingerprint:
        raise ConfigError(
            f"{of}: the questions, answers, solutions or hints in the files of the "
            f"task are not those in {path} that the run began with; bring these back, "
            f"or name {other}."
        )
    now = marks.asked(task)
    if began.get("asked", now) != now:
        raise ConfigError(
            f"{of}: the tokenizer or the chat template of the task makes other prompts "
            f"of the questions than those in {path} that the run began with; bring "
            f"back what it was, or name {other}."
        )


def check_shapes(workdir: Path, states: States) -> None:
    """Check that checkpoints of a folder, if it has any, are of the shapes of a run.

    Raises:
        ConfigError: as `checkpoint.check_shapes`.
    """
    checkpoint.check_shapes(workdir / CHECKPOINTS, states.abstract)
    checkpoint.check_shapes(workdir / WARM_CHECKPOINTS, states.abstract_warm)


def write_questions(workdir: Path, task: Task, grader: int = 0) -> None:
    """Write questions.json: digests and counts of the questions of a task of files.

    One that is there gets the grader alone.

    Args:
        workdir: run folder.
        task: of the run.
        grader: `marks.grader` of its config.

    Raises:
        ConfigError: the folder cannot be written.
    """
    path = workdir / QUESTIONS
    began = reading.read_json(path)
    if task.fingerprint and began.get("grader") != grader:
        sizes = {"prompts": task.num_prompts, "held_out": task.num_held_out}
        digests = {"mark": task.fingerprint, "asked": marks.asked(task)}
        page = {**digests, **sizes, "told": task.summary, **began, "grader": grader}
        with written_to(f"--workdir {workdir}", "another folder"):
            write_json(path, page)


def grader_warning(workdir: Path, grader: int) -> str:
    """Warning that another file grades than before, of `marks.grader`; empty: none."""
    if reading.read_json(workdir / QUESTIONS).get("grader", grader) == grader:
        return ""
    return (
        "the file of the grader or environment has changed since the run began or was "
        "resumed; from here on outcomes are by the new one."
    )


def row_checks(*, step: int | None, warm: int) -> dict[str, dict[str, Any]]:
    """Keyword arguments of `whole_rows` for each file of rows, given the checkpoint.

    Args:
        step: step of the newest checkpoint; None without one.
        warm: step of the warm start's checkpoint, used where `step` is None.
    """
    upto, error = -1 if step is None else step, reading.metrics_error
    done = warm if step is None else math.inf
    return {
        METRICS: {"upto": upto, "error": error, "first": 0},
        ROLLOUTS: {"upto": upto, "error": reading.logged_error},
        ALARMS: {"upto": upto, "error": reading.alarm_error},
        WARM: {"upto": done, "error": error, "first": 1},
    }


def last_checkpoint(workdir: Path) -> str:
    """Phrase that names the last checkpoint in a run"""
    last = checkpoint.latest(workdir / CHECKPOINTS)
    if last is None:
        return "there is no checkpoint yet, so it will start again"
    return f"the checkpoint of step {last} is intact"


def check_files(workdir: Path, since: int | None, *, finished: bool) -> None:
    """Check that the files of a run folder can be read up to a checkpoint.

    Args:
        workdir: run folder; nothing in it is changed.
        since: step of the newest checkpoint, None without one.
        finished: the run is complete, so every file is read in full.

    Raises:
        ConfigError: a file is damaged; the message names file and line.
    """
    warm = checkpoint.latest(workdir / WARM_CHECKPOINTS)
    with refusals(reading.DamagedError):
        for name, arguments in row_checks(step=since, warm=warm or 0).items():
            whole_rows(workdir / name, **arguments)
        reading.read_json(workdir / QUESTIONS)
        if since is not None:
            reading.evaluation(workdir)
        if finished:
            reading.read(workdir)


def write_json(path: Path, value: Any) -> None:
    """Write a JSON file atomically: a failed write leaves the old file."""
    write_whole(path, files.json_bytes(value))


class Files:
    """The files that a run appends to, and the dashboards that get the same rows."""

    def __init__(
        self,
        workdir: Path,
        task: Task,
        seeds: Any,
        *,
        step: int | None,
        warm: int = 0,
        config: Config | None = None,
        warn: Callable[[str], None] = print,
    ):
        """Open all files; rows after the checkpoint and old predictions go.

        Args:
            workdir: run folder.
            task: decodes tokens.
            seeds: `[]` or `[R]` integer, seeds of the run.
            step: step of the checkpoint; None without one.
            warm: steps of the warm start that are done.
            config: of the run, which names the dashboards; None: TensorBoard.
            warn: shows a warning.
        """
        upto = -1 if step is None else step
        self._task, self._seeds = task, seeds
        self._workdir, self._evaluation = workdir, workdir / EVALUATION
        checks = row_checks(step=step, warm=warm)
        paths = [workdir / name for name in (WARM, METRICS, ROLLOUTS, ALARMS)]
        self.warm, self._metrics, self._rollouts, self._alarms = self._rows = [
            Appended(path, whole_rows(path, **checks[path.name])) for path in paths
        ]
        with write_errors(workdir / EXPECTED):  # of an evaluation that is not the last
            (workdir / EXPECTED).unlink(missing_ok=True)
        with write_errors(workdir / EVENTS):
            named = config.logging.dashboards if config else (EVENTS,)
            self._dashboards = Dashboards(
                named, workdir, describe(config), step=upto, warn=warn
            )

    def write(self, rows: Sequence[dict[str, Any]], shown: Sequence[Any] = ()) -> None:
        """Append metrics and logged completions of some steps.

        Args:
            rows: metrics, one row per step.
            shown: `step.types.Shown` of each step; empty where nothing was drawn.

        Raises:
            NotWrittenError: disk full, or no permission.
        """
        self._check()  # before any of the files is written
        rollouts = [
            completion
            for row, some in zip(rows, shown, strict=False)
            for completion in completion_rows(
                row["step"], some, self._task, self._seeds
            )
        ]
        self._rollouts.write(rollouts)
        self._metrics.write(rows)
        with write_errors(self._workdir / EVENTS):
            self._dashboards.write(rows, rollouts)

    def write_alarm(self, step: int, kind: str, text: str) -> None:
        """Append an alarm of a step.

        Raises:
            NotWrittenError: disk full, or no permission.
        """
        self._alarms.write([{"step": step, "kind": kind, "text": text}])

    def rows(self, name: str) -> Iterator[dict[str, Any]]:
        """Yield the rows so far of a file of rows; non-finite values are None."""
        path, once = self._workdir / name, name == METRICS
        for line in reading.read_lines(path, lambda _: None, once=once):
            yield dict(line.row)

    def write_evaluation(self, step: int, pass_rates: np.ndarray, samples: int) -> None:
        """Write held-out pass rates to evaluation.json: before RL, or the last ones.

        Args:
            step: step of this evaluation.
            pass_rates: `[..., E]` in [0, 1], per held-out prompt.
            samples: completions behind each pass rate.
        """
        path = self._evaluation
        if step and not path.exists():
            raise RemovedError(path)
        known = reading.read_json(path) if step else {}
        known["after" if step else "before"] = {
            "step": step,
            "samples": samples,
            "pass_rates": pass_rates.round(6),
        }
        with write_errors(path):
            write_json(path, known)

    def sync(self) -> None:
        """Flush all rows to the disk, before a checkpoint that relies on them."""
        self._check()
        for file in self._rows:
            file.sync()

    def _check(self) -> None:
        """Check that every open file is still at its path."""
        for file in self._rows:
            file.check()
        for path, was in self._dashboards.files():
            check_there(path, was)

    def close(self) -> None:
        """Flush and close all files.

        Raises:
            NotWrittenError: what was left to be written could not be.
        """
        with contextlib.ExitStack() as last:
            for file in self._rows:
                last.callback(file.close)
            with write_errors(self._workdir / EVENTS):
                self._dashboards.close()


class NoFiles:
    """Replacement of `Files` on all processes but 0: it has no rows and writes none."""

    def __getattr__(self, name: str) -> "NoFiles":
        """Any method or file of rows: this again."""
        return self

    def __call__(self, *_: Any) -> "NoFiles":
        """Do nothing."""
        return self

    def __iter__(self) -> Iterator[dict[str, Any]]:
        """No rows."""
        return iter(())


def completion_rows(
    step: int, shown: Any, task: Task, seeds: Any
) -> Iterator[dict[str, Any]]:
    """Yield a row of rollouts.jsonl for each logged completion of a step.

    Args:
        step: number of the step.
        shown: `step.types.Shown`; a leading axis `[R]` of seeds, if `seeds` has it.
        task: decodes tokens.
        seeds: `[]` or `[R]` integer, seeds of the run.
    """
    for r, seed in enumerate(np.atleast_1d(seeds)):
        one = shown if np.ndim(seeds) == 0 else jax.tree.map(lambda x, r=r: x[r], shown)
        for b, prompt_id in enumerate(one.prompts.id):
            prompt = one.contexts.tokens[b][one.contexts.mask[b]]
            more = {"hint_level": one.level[b]} if one.level[b] else {}
            if one.reference is not None:
                words, mask, weight = (x[b] for x in one.reference)
                more["reference"] = [task.decode([t]) for t in words[mask]]
                more["weights"] = weight[mask]
            for member in np.flatnonzero(one.exists[b]):
                mask, own = one.mask[b, member], more
                tokens = one.tokens[b, member][mask]
                if one.observed is not None:
                    own = more | {"observed": one.observed[b, member][mask]}
                outcome, reward = one.outcome[b, member], one.reward[b, member]
                yield {
                    "step": step,
                    "seed": seed,
                    "prompt_id": prompt_id,
                    "prompt": task.decode(prompt),
                    "slot": member,
                    "text": task.decode(tokens),
                    "tokens": tokens,
                    "outcome": outcome,
                    "reward": reward if np.isfinite(outcome) else None,
                    "advantage": one.credit[b, member],
                    "kept": one.keep[b, member],
                    "policy_version": one.version[b, member],
                    **own,
                }
