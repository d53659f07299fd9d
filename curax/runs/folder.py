"""The run folder: config, metrics and rollouts as JSON lines, TensorBoard events.

Rows are appended whole or not at all. On resume those behind the checkpoint, and half a
row at the end if a killed run has left one, are cut off, and the run writes them anew.
"""

import contextlib
import json
import math
import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from tensorboardX.event_file_writer import EventsWriter
from tensorboardX.proto.event_pb2 import Event, SessionLog  # pyright: ignore[reportAttributeAccessIssue]
from tensorboardX.proto.summary_pb2 import Summary  # pyright: ignore[reportAttributeAccessIssue]

from curax.config import Config, ConfigError, changes, describe
from curax.runs import record
from curax.settings.cli import write_whole
from curax.types import Task

CONFIG = "config.json"
METRICS, ROLLOUTS = "metrics.jsonl", "rollouts.jsonl"
WARM, EVALUATION = "warm_start.jsonl", "evaluation.json"
MEMORY, EXPECTED = "memory.jsonl", "expected.json"
QUESTIONS, ALARMS = "questions.json", "alarms.jsonl"
CHECKPOINTS, WARM_CHECKPOINTS = "checkpoints", "warm_start"
EVENTS = "tensorboard"
# What comes of a run depends on these, and on mesh.*, by rounding at most.
FREE = (
    *("update.micro_batches", "update.vocab_chunk", "warm_start.micro_batches"),
    *("logging.checkpoint_every", "logging.keep", "logging.drift_nats"),
)


class NotWrittenError(OSError):
    """A file of the run folder could not be written. Its text names it and says why."""


class RemovedError(NotWrittenError):
    """A file that a run writes to is no longer where it was."""

    def __init__(self, path: Path):
        """The folder is named where that has gone as a whole."""
        gone = path if path.parent.is_dir() else path.parent
        super().__init__(f"{gone} was removed or renamed while the run wrote to it")


def _check_there(path: Path, was: os.stat_result) -> None:
    try:
        there = os.path.samestat(path.stat(), was)
    except OSError:
        there = False
    if not there:
        raise RemovedError(path)


def check_place(workdir: Path) -> None:
    """Refuse a folder that cannot be. Writes nothing.

    Raises:
        ConfigError: a file is in the way, or there is no permission.
    """
    above = next(p for p in (workdir, *workdir.absolute().parents) if os.path.exists(p))
    if not above.is_dir():
        raise ConfigError(f"--workdir {workdir}: {above} is a file; name a folder.")
    if not os.access(above, os.W_OK | os.X_OK):
        raise ConfigError(
            f"--workdir {workdir} cannot be written: no permission in {above}; name "
            "another folder."
        )


def check(workdir: Path, config: Config, *, resume: bool) -> None:
    """Refuse a folder that this run may not write to. Writes nothing.

    Raises:
        ConfigError: there is another run, or none to resume.
    """
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
    except RecursionError:
        old = None
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"{path}: {error}; the run cannot be resumed, name another --workdir."
        ) from error
    if not isinstance(old, dict):
        raise ConfigError(
            f"{path}:1: not a JSON object; the run cannot be resumed, name another "
            "--workdir."
        )
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
    """Refuse a folder whose run began with other questions. Writes nothing.

    Raises:
        ConfigError: the questions in the files of the task are not those.
    """
    path = workdir / QUESTIONS
    if task.in_files and path.exists() and record.whole(path).get("mark") != task.mark:
        raise ConfigError(
            f"--resume: the questions in the files of the task are not those in {path} "
            "that the run began with; bring these back, or name another --workdir."
        )


def note_questions(workdir: Path, task: Task) -> None:
    """Note which questions are in the files of a task; a run keeps its questions."""
    path = workdir / QUESTIONS
    if task.in_files and not path.exists():
        found = {"prompts": task.num_prompts, "held_out": task.num_held_out}
        write_json(path, {"mark": task.mark, **found, "told": task.told})


def checked(*, step: int | None, warm: int) -> dict[str, dict[str, Any]]:
    """What the files of rows hold where there is a checkpoint: arguments of `Rows`.

    Args:
        step: of the checkpoint, None where there is none.
        warm: of the checkpoint of the warm start, where there is no other.
    """
    upto, error = -1 if step is None else step, record.metrics_error
    done = warm if step is None else math.inf
    return {
        METRICS: {"upto": upto, "error": error, "first": 0},
        ROLLOUTS: {"upto": upto, "error": record.rollout_error},
        ALARMS: {"upto": upto, "error": record.alarm_error},
        WARM: {"upto": done, "error": error, "first": 1},
    }


def check_rows(workdir: Path, *, step: int | None, warm: int) -> None:
    """Refuse a folder whose files are damaged in front of a checkpoint. Writes nothing.

    Args:
        workdir: the folder.
        step: as `checked`.
        warm: as `checked`.

    Raises:
        RecordError: in a sentence with file and line.
    """
    for name, arguments in checked(step=step, warm=warm).items():
        intact(workdir / name, **arguments)
    record.whole(workdir / QUESTIONS)
    if step is not None:
        record.evaluation(workdir)


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

    def __init__(
        self,
        path: Path,
        *,
        upto: float,
        error: Callable[[Any], str | None] = lambda _: None,
        first: int | None = None,
    ):
        """Open for appending; what lies behind step `upto` is cut off.

        Args:
            path: of the file.
            upto: step of the checkpoint.
            error: says what is wrong with a row.
            first: step of the first row, if every step from there on has one.

        Raises:
            RecordError: rows up to the checkpoint are damaged or missing.
            NotWrittenError: no leave.
        """
        self._path, end = path, intact(path, upto=upto, error=error, first=first)
        with _told(path):
            self._file = path.open("ab", buffering=0)
            self._file.truncate(end)

    def write(self, rows: Iterable[dict[str, Any]]) -> None:
        """Append rows.

        Raises:
            NotWrittenError: no room, or no leave; then none of them is written.
        """
        self.check()
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
        for line in record.lines(self._path, lambda _: None, once=False):
            yield dict(line.row)

    def check(self) -> None:
        """Refuse to go on where the file has gone.

        Raises:
            RemovedError: it was removed, or renamed, or another is in its place.
        """
        _check_there(self._path, os.fstat(self._file.fileno()))

    def sync(self) -> None:
        """Wait until all rows are on the disk, should the machine itself fail."""
        os.fsync(self._file.fileno())

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def intact(
    path: Path,
    *,
    upto: float,
    error: Callable[[Any], str | None] = lambda _: None,
    first: int | None = None,
) -> int:
    """Bytes of the rows up to a checkpoint; arguments and errors as of `Rows`."""
    end, once, before = 0, first is not None, -1 if first is None else first - 1
    for line in record.lines(path, error, once=once, start=before, upto=upto):
        if not line.ended:
            break
        if once and line.row["step"] > before + 1:
            raise record.RecordError(
                f"{path}:{line.number}: step {line.row['step']} behind step {before}; "
                "bring back the lines between them."
            )
        before, end = line.row["step"], line.end
    if once and before < upto < math.inf:
        raise record.RecordError(
            f"{path}: no line of step {before + 1}, and there is a checkpoint of step "
            f"{upto}; bring back the lines up to that step."
        )
    return end


class Events:
    """TensorBoard scalars, on disk when `write` returns: no queue that dies with us."""

    def __init__(self, path: Path, *, upto: int):
        """Open a new file. Events behind `upto` in older ones are hidden, not gone."""
        path.mkdir(exist_ok=True)
        self._file = EventsWriter(str(path / "events"), f".{upto + 1}")
        self._path = Path(self._file._file_name)
        self._stat = self._path.stat()
        log = SessionLog(status=SessionLog.START)
        self._add(Event(step=upto + 1, session_log=log))

    def check(self) -> None:
        """As of `Rows`."""
        _check_there(self._path, self._stat)

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
        checks = checked(step=step, warm=warm)
        self.warm, self._metrics, self._rollouts, self._alarms = self._rows = [
            Rows(workdir / name, **checks[name])
            for name in (WARM, METRICS, ROLLOUTS, ALARMS)
        ]
        with _told(workdir / EVENTS):
            self._events = Events(workdir / EVENTS, upto=upto)

    def write(self, rows: Sequence[dict[str, Any]], shown: Sequence[Any] = ()) -> None:
        """Append the metrics of some steps and the completions to be shown of them.

        Args:
            rows: metrics, one row per step; of many seeds TensorBoard gets the mean.
            shown: `records.Shown` of each step; none where nothing was drawn.

        Raises:
            NotWrittenError: no room, or no leave.
        """
        self._check()  # before a part of it is written
        for row, some in zip(rows, shown, strict=False):
            told = completions(row["step"], some, self._task, self._seeds)
            self._rollouts.write(told)
        self._metrics.write(rows)
        with _told(self._workdir / EVENTS):
            self._events.write(rows)

    def alarm(self, step: int, kind: str, text: str) -> None:
        """Append what the run is warned of at a step.

        Raises:
            NotWrittenError: no room, or no leave.
        """
        self._alarms.write([{"step": step, "kind": kind, "text": text}])

    def metrics(self) -> Iterator[dict[str, Any]]:
        """The metrics of all steps so far."""
        return self._metrics.read()

    def evaluated(self, step: int, pass_rates: np.ndarray, samples: int) -> None:
        """Keep the held-out pass rates of step 0 and those of the last evaluation."""
        path = self._evaluation
        if step and not path.exists():
            raise RemovedError(path)
        known = record.whole(path) if step else {}
        known["after" if step else "before"] = {
            "step": step,
            "samples": samples,
            "pass_rates": pass_rates.round(6),
        }
        with _told(path):
            write_json(path, known)

    def sync(self) -> None:
        """Wait until all rows are on the disk: before a checkpoint counts on them."""
        self._check()
        for file in self._rows:
            file.sync()

    def _check(self) -> None:
        """Refuse to go on where a file is not there any longer."""
        for file in (*self._rows, self._events):
            file.check()

    def close(self) -> None:
        """Flush and close."""
        for file in (*self._rows, self._events):
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
        shown: `records.Shown`, with an axis of seeds in front if there are many.
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
