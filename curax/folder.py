"""The run folder: config, metrics and rollouts as JSON lines, TensorBoard events.

Rows are appended whole or not at all. On resume those behind the checkpoint, and half a
row at the end if a killed run has left one, are cut off, and the run writes them anew.
"""

import contextlib
import json
import math
import os
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from tensorboardX.event_file_writer import EventsWriter
from tensorboardX.proto.event_pb2 import Event, SessionLog  # pyright: ignore[reportAttributeAccessIssue]
from tensorboardX.proto.summary_pb2 import Summary  # pyright: ignore[reportAttributeAccessIssue]

from curax.command import write_whole
from curax.config import Config, ConfigError, changes, describe
from curax.types import Task

CONFIG = "config.json"
METRICS, ROLLOUTS = "metrics.jsonl", "rollouts.jsonl"
WARM, EVALUATION = "warm_start.jsonl", "evaluation.json"
MEMORY, EXPECTED = "memory.jsonl", "expected.json"
QUESTIONS = "questions.json"
CHECKPOINTS, WARM_CHECKPOINTS = "checkpoints", "warm_start"
EVENTS = "tensorboard"
# What comes of a run depends on these, and on mesh.*, by rounding at most.
FREE = (
    *("update.micro_batches", "update.vocab_chunk", "warm_start.micro_batches"),
    *("logging.checkpoint_every", "logging.keep", "logging.drift_nats"),
)


class NotWrittenError(OSError):
    """A file of the run folder could not be written. Its text names it and says why."""


def check(workdir: Path, config: Config, *, resume: bool) -> None:
    """Refuse a folder that this run may not write to. Writes nothing.

    Raises:
        ConfigError: there is another run, or none to resume, or no permission.
    """
    above = next(p for p in (workdir, *workdir.absolute().parents) if os.path.exists(p))
    if not above.is_dir():
        raise ConfigError(f"--workdir {workdir}: {above} is a file; name a folder.")
    if not os.access(above, os.W_OK | os.X_OK):
        raise ConfigError(
            f"--workdir {workdir} cannot be written: no permission in {above}; name "
            "another folder."
        )
    if resume:
        _check_same(workdir / CONFIG, config)
        return
    for name in (CONFIG, METRICS, CHECKPOINTS):
        if (workdir / name).exists():
            raise ConfigError(
                f"--workdir {workdir} holds {name} of a run already; add --resume to "
                "go on with that run, or name another folder."
            )


def _check_same(path: Path, config: Config) -> None:
    """A run keeps its config; its steps may grow, and what is in `FREE` may change."""
    if not path.exists():
        raise ConfigError(
            f"--workdir {path.parent} holds no {path.name}, so no run to resume; leave "
            "--resume out to start one, or name the folder of a run."
        )
    try:
        old = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"{path}: {error}; the run cannot be resumed, name another --workdir."
        ) from error
    for name, was, now in changes(old, describe(config)):
        if name == "steps" and isinstance(was, int) and was < now:
            continue
        if name in FREE or name.startswith("mesh."):
            continue
        rule = "steps may only grow" if name == "steps" else "a run keeps its config"
        raise ConfigError(
            f"--resume: {name}={now} differs from {was} in {path}; {rule}, so set "
            f"{name} back or name another --workdir."
        )


def make(workdir: Path, config: Config) -> None:
    """Make the folder and write the resolved config.

    Raises:
        ConfigError: if that fails.
    """
    try:
        workdir.mkdir(parents=True, exist_ok=True)
        write_json(workdir / CONFIG, describe(config))
    except OSError as error:
        raise ConfigError(
            f"--workdir {workdir} cannot be written: {error.strerror}; name another "
            "folder."
        ) from error


def check_questions(workdir: Path, task: Task) -> None:
    """Note which questions are in the files of a task; a run keeps its questions.

    Raises:
        ConfigError: they are not those that the run began with.
    """
    path = workdir / QUESTIONS
    if not task.in_files:
        return
    if not path.exists():
        found = {"prompts": task.num_prompts, "held_out": task.num_held_out}
        write_json(path, {"mark": task.mark, **found, "told": task.told})
    elif json.loads(path.read_text())["mark"] != task.mark:
        raise ConfigError(
            f"--resume: the questions in the files of the task are not those in {path} "
            "that the run began with; bring these back, or name another --workdir."
        )


def plain(value: Any) -> Any:
    """Arrays as numbers or lists for JSON; what is not finite as None."""
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if hasattr(value, "tolist"):
        return plain(np.asarray(value).tolist())
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def write_json(path: Path, value: Any) -> None:
    """Write a whole file or nothing."""
    write_whole(path, (json.dumps(plain(value), indent=1) + "\n").encode())


class Rows:
    """A file of JSON objects, one per line, each with a `step` that never falls."""

    def __init__(self, path: Path, *, upto: float):
        """Open for appending; from the first row behind `upto` on, all is cut off."""
        self._path, end = path, 0
        if path.exists():
            with path.open("rb") as lines:
                for line in lines:
                    if not _step(line) <= upto:
                        break
                    end += len(line)
        with _told(path):
            self._file = path.open("ab", buffering=0)
            self._file.truncate(end)

    def write(self, rows: Iterable[dict[str, Any]]) -> None:
        """Append rows.

        Raises:
            NotWrittenError: no room, or no leave; then none of them is written.
        """
        end = self._file.seek(0, os.SEEK_END)
        text = "".join(json.dumps(plain(row)) + "\n" for row in rows).encode()
        with _told(self._path):
            try:
                while text:
                    text = text[self._file.write(text) :]
            except OSError:
                self._file.truncate(end)
                raise

    def read(self) -> Iterator[dict[str, Any]]:
        """All rows, from the first; null stands where a value is not finite."""
        with self._path.open("rb") as lines:
            yield from map(json.loads, lines)

    def sync(self) -> None:
        """Wait until all rows are on the disk, should the machine itself fail."""
        os.fsync(self._file.fileno())

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def _step(line: bytes) -> float:
    """The step of a row, NaN for what a killed run has left of one."""
    try:
        return json.loads(line)["step"] if line.endswith(b"\n") else math.nan
    except ValueError:
        return math.nan


class Events:
    """TensorBoard scalars, on disk when `write` returns: no queue that dies with us."""

    def __init__(self, path: Path, *, upto: int):
        """Open a new file. Events behind `upto` in older ones are hidden, not gone."""
        path.mkdir(exist_ok=True)
        self._file = EventsWriter(str(path / "events"), f".{upto + 1}")
        log = SessionLog(status=SessionLog.START)
        self._add(Event(step=upto + 1, session_log=log))

    def write(self, rows: Sequence[dict[str, Any]]) -> None:
        """One event per row: its finite numbers, of many seeds the mean."""
        for row in rows:
            values = []
            for name, value in row.items():
                numbers = np.asarray(value, np.float64)
                numbers = numbers[np.isfinite(numbers)]
                if name != "step" and numbers.size:
                    mean = float(numbers.mean())
                    values.append(Summary.Value(tag=name, simple_value=mean))
            self._add(Event(step=row["step"], summary=Summary(value=values)))
        self._file.flush()

    def _add(self, event: Event) -> None:
        event.wall_time = time.time()
        self._file.write_event(event)

    def close(self) -> None:
        """Flush and close."""
        self._file.close()


class Files:
    """All that a run writes between checkpoints."""

    def __init__(
        self, workdir: Path, task: Task, seeds: Any, *, step: int | None, warm: int = 0
    ):
        """Open; what lies behind the checkpoint of `step` (None: there is none) goes.

        Args:
            workdir: the run folder.
            task: decodes tokens.
            seeds: `[]` or `[R]`, the seeds of the run.
            step: of the checkpoint.
            warm: warm-start steps that need not be done again.
        """
        upto = -1 if step is None else step
        self._task, self._seeds = task, seeds
        self._workdir, self._evaluation = workdir, workdir / EVALUATION
        self.warm = Rows(workdir / WARM, upto=warm if step is None else math.inf)
        self._metrics = Rows(workdir / METRICS, upto=upto)
        self._rollouts = Rows(workdir / ROLLOUTS, upto=upto)
        with _told(workdir / EVENTS):
            self._events = Events(workdir / EVENTS, upto=upto)

    def write(self, rows: Sequence[dict[str, Any]], shown: Sequence[Any] = ()) -> None:
        """Append the metrics of some steps and the completions to be shown of them.

        Args:
            rows: metrics, one row per step; of many seeds TensorBoard gets the mean.
            shown: `curax.pipeline.Shown` of each step; none where nothing was drawn.

        Raises:
            NotWrittenError: no room, or no leave.
        """
        for row, some in zip(rows, shown, strict=False):
            told = completions(row["step"], some, self._task, self._seeds)
            self._rollouts.write(told)
        self._metrics.write(rows)
        with _told(self._workdir / EVENTS):
            self._events.write(rows)

    def metrics(self) -> Iterator[dict[str, Any]]:
        """The metrics of all steps so far."""
        return self._metrics.read()

    def evaluated(self, step: int, pass_rates: np.ndarray, samples: int) -> None:
        """Keep the held-out pass rates of step 0 and those of the last evaluation."""
        path, known = self._evaluation, {}
        if step and path.exists():
            known = json.loads(path.read_text())
        known["after" if step else "before"] = {
            "step": step,
            "samples": samples,
            "pass_rates": pass_rates.round(6),
        }
        with _told(path):
            write_json(path, known)

    def sync(self) -> None:
        """Wait until all rows are on the disk: before a checkpoint counts on them."""
        for file in (self.warm, self._metrics, self._rollouts):
            file.sync()

    def close(self) -> None:
        """Flush and close."""
        for file in (self.warm, self._metrics, self._rollouts, self._events):
            file.close()


@contextlib.contextmanager
def _told(path: Path) -> Iterator[None]:
    """What goes wrong in writing a file becomes a sentence."""
    try:
        yield
    except OSError as error:
        why = error.strerror or type(error).__name__
        raise NotWrittenError(f"{path} cannot be written ({why})") from error


def completions(
    step: int, shown: Any, task: Task, seeds: Any
) -> Iterator[dict[str, Any]]:
    """One object per completion of the prompts that a step shows.

    Args:
        step: its number.
        shown: `curax.pipeline.Shown`, with an axis of seeds in front if there are many.
        task: decodes tokens.
        seeds: `[]` or `[R]`, the seeds of the run.
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
            for slot in np.flatnonzero(one.exists[b]):
                tokens = one.tokens[b, slot][one.mask[b, slot]]
                outcome, reward = one.outcome[b, slot], one.reward[b, slot]
                yield {
                    "step": step,
                    "seed": seed,
                    "prompt_id": prompt_id,
                    "prompt": task.decode(prompt),
                    "slot": slot,
                    "text": task.decode(tokens),
                    "tokens": tokens,
                    "outcome": outcome,
                    "reward": reward if np.isfinite(outcome) else None,
                    "advantage": one.credit[b, slot],
                    "kept": one.keep[b, slot],
                    **more,
                }
