"""An evaluation run: sample and grade completions, write samples and results."""

import contextlib
import json
import platform
import sys
import time
from argparse import Namespace
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numpy as np

from curax.config import ConfigError
from curax.evaluate import benchmarks, results
from curax.evaluate.questions import Questions
from curax.evaluate.samples import Sampler, SamplesFile, Timed
from curax.evaluate.setup import EvaluationSetup, prepare
from curax.runs import libraries
from curax.runs.folder import described, write_json
from curax.runs.interrupt import Interrupt
from curax.runs.progress import Progress
from curax.settings import errors, lock
from curax.settings.cli import written_to
from curax.settings.config_paths import changes
from curax.settings.packages import VERSION

SETTINGS, RESULTS = "settings.json", "results.json"
# Settings that are hashes, and how an evaluation differs where they do.
MARKS = {
    "parameters": "of other parameters",
    "questions": "of other questions",
    "answers": "of other answers",
    "code": "by another content of the file of its grader or environment",
}
LIBRARIES = ("jax", "flax", "numpy", "tokenizers", "math-verify")
ENOUGH = 16  # completions without any outcome that stop an evaluation
# Fixes where no completion has an outcome, by the first word of the reason.
FIXES = {
    "timeout": "raise --deadline, or make the grader faster",
    "crash": "raise --memory-mb, or mend the grader",
    "none": "the grader returned None; name another --grader, or mend it",
}


class NoOutcomeError(RuntimeError):
    """The grader gave no outcome for any completion. The message is one sentence."""


FAILURES = (errors.WorkError, RuntimeError, OSError, MemoryError)


def evaluate(args: Namespace, out: Path, *, command: str) -> int:
    """Sample and grade missing completions, write the results, print their tables.

    Args:
        args: command line.
        out: folder of the evaluation.
        command: command line as text, which also resumes it.

    Returns:
        Exit status: 0 done, 1 stopped by a failure, 128 + n by signal n.

    Raises:
        ConfigError: wrong input; nothing has been written.
    """
    libraries.set_up()
    with contextlib.ExitStack() as opened:
        if not out.exists() or out.is_dir():  # `check_folder` refuses a file
            opened.enter_context(lock.hold(out, "--out"))
        setup = prepare(args, opened)
        check_folder(out, setup.settings)
        make_folder(out, setup.settings)
        try:
            stopped, speeds = sample_all(setup, out)
            if stopped is not None:
                print(f"Stopped; the same command goes on: {command}", flush=True)
                return 128 + stopped
            found = write_results(setup, out, command, speeds)
        except FAILURES as error:
            print(f"curax.evaluate: {_failure_sentence(error)}", file=sys.stderr)
            return 1
    for name, result in found.items():
        print(results.table(name, result), end="\n\n")
        if args.benchmark:
            asked = result["problems"]
            remarks = benchmarks.remarks(args.benchmark, asked, args.changed)
            print("\n".join(remarks), end="\n\n")
    print(f"Written: {out / RESULTS}", flush=True)
    return 0


def _failure_sentence(error: Exception) -> str:
    """Sentence of an error that stops an evaluation, with the way to resume it."""
    message = errors.text(error)
    if isinstance(error, NoOutcomeError):
        return f"{message}; nothing of it is kept, and the same command goes on."
    if why := errors.exhausted(error):
        return f"{why}; go on with a lower --slots or --batch."
    return f"{message}; mend that, and the same command goes on."


# ----- the folder


def check_folder(out: Path, settings: Mapping[str, Any]) -> None:
    """Check that a folder is new, or holds this evaluation or part of it.

    Args:
        out: folder of the evaluation.
        settings: JSON of its settings.

    Raises:
        ConfigError: the folder holds anything else.
    """
    if not out.is_dir():
        if out.exists():
            raise ConfigError(f"--out {out} is a file; name a folder.")
        return
    path = out / SETTINGS
    if not path.exists():
        own = (lock.FILE, f"{SETTINGS}.tmp")  # this one of a process that was killed
        if any(path.name not in own for path in out.iterdir()):
            raise ConfigError(
                f"--out {out} holds files of something else; name a new folder."
            )
        return
    if not any(file.stat().st_size for file in out.glob("*.jsonl")):
        return  # no completion yet: the settings may be replaced
    old = described(path, "name another --out")
    for name, was, now in changes(old, json.loads(json.dumps(settings))):
        differs = f"with {name}={was}, and this is one with {now}"
        for mark, other in MARKS.items():
            if name.startswith(mark):
                differs = other
        raise ConfigError(
            f"--out {out} holds an evaluation {differs}; name another --out, or make "
            "them agree."
        )


def make_folder(out: Path, settings: Mapping[str, Any]) -> None:
    """Make the folder and write settings.json.

    Raises:
        ConfigError: the folder cannot be written.
    """
    with written_to(f"--out {out}", "another folder"):
        out.mkdir(parents=True, exist_ok=True)
        write_json(out / SETTINGS, dict(settings))


# ----- sampling


class EvaluationProgress(Progress):
    """Display of problems done, mean outcome, tokens per second and time left."""

    unit = "batch"

    def drawn(self, done: int, outcome: float | None, tokens_per_s: float) -> None:
        """Show problems done, their mean outcome (None: none yet) and the speed."""
        mean = "no outcome yet" if outcome is None else f"mean {outcome:.3f}"
        self.note(done, f"{mean}  {tokens_per_s:,.0f} tokens/s")


def sample_all(setup: EvaluationSetup, out: Path) -> tuple[int | None, dict[str, Any]]:
    """Sample and grade the missing completions, file by file.

    Returns:
        Number of the signal that stopped it, or None; speed of each file in which
        completions were sampled.

    Raises:
        NotWrittenError: a file cannot be written.
        NoOutcomeError: no completion can be graded.
        RuntimeError: the device or the graders failed.
    """
    display, speeds = EvaluationProgress(), {}
    with display, Interrupt(display.stopping) as interrupt:
        for name, questions in setup.questions.items():
            if interrupt.number is None:
                file = _samples_file(setup, out, name)
                writer = _sample_file(setup, questions, file, display, interrupt)
                if speed := writer.speed():
                    speeds[name] = speed
    return interrupt.number, speeds


def _samples_file(setup: EvaluationSetup, out: Path, name: str) -> SamplesFile:
    """The samples file of a question set."""
    digests = setup.questions[name].digests[: setup.limit]
    return SamplesFile(out / name, digests, setup.sampling)


def _sample_file(
    setup: EvaluationSetup,
    questions: Questions,
    file: SamplesFile,
    display: EvaluationProgress,
    interrupt: Interrupt,
) -> "GradedWriter":
    """Complete a samples file; a batch is graded while the next is sampled."""
    done, total = file.open(), len(questions.digests[: setup.limit])
    sampler = Sampler(setup.policy, questions, setup.sampling)
    writer = GradedWriter(file, done, sampler.drive)
    if done < total:
        display.begin(file.path.stem, done, total)
    with contextlib.closing(file), sampler.drive.background as background:
        pending: Future | None = None

        def write_pending() -> None:
            if pending:
                writer.add(pending.result(), last=done == total)
                display.drawn(*writer.progress())

        while done < total and interrupt.number is None:
            numbers = range(done, min(done + sampler.batch, total))
            batch = sampler(numbers)
            write_pending()
            pending = background.submit(lambda b=batch: list(sampler.rows(b)))
            done = numbers.stop
            if not writer.graded:  # until the first outcome, wait for the grader
                write_pending()
                pending = None
        write_pending()
    for reason, count in writer.reasons.most_common(1):
        display.say(
            f"Warning: {sum(writer.reasons.values())} of the completions have no "
            f"outcome and count as missing, {count} for this reason: {reason}"
        )
    return writer


class GradedWriter:
    """Writer of graded completions to a samples file, with counts and speed.

    Attributes:
        graded: whether any completion in the file has an outcome.
        reasons: number of missing outcomes by reason.
    """

    def __init__(self, file: SamplesFile, done: int, drive: Timed):
        """Start at a file with `done` problems from an earlier process."""
        self._file, self._done, self._drive = file, done, drive
        self._start, self._completions, self._tokens = time.monotonic(), 0, 0
        self._outcomes, self._held = list[float](), list[dict[str, Any]]()
        before = (row for _, rows in file.blocks() for row in rows)
        self.graded = any(row.get("outcome") is not None for row in before)
        self.reasons = Counter[str]()

    def add(self, rows: Sequence[dict[str, Any]], *, last: bool) -> None:
        """Append rows; they are held back until a completion has an outcome.

        Args:
            rows: graded rows of some problems.
            last: no more rows follow.

        Raises:
            NoOutcomeError: none of the first `ENOUGH` completions has an outcome, or
                none of all; nothing is written.
        """
        self._done += len({row["problem"] for row in rows})
        self._completions += len(rows)
        self._tokens += sum(row["length_tokens"] for row in rows)
        shown = [row for row in rows if not row["greedy"]] or rows
        known = [row["outcome"] for row in shown]
        self._outcomes += [outcome for outcome in known if outcome is not None]
        self.reasons.update(row["reason"] for row in rows if row["outcome"] is None)
        self._held += rows
        self.graded |= any(row["outcome"] is not None for row in rows)
        if self.graded:
            self._file.write(self._held)
            self._held = []
        elif last or len(self._held) >= ENOUGH:
            raise NoOutcomeError(self._why())

    def _why(self) -> str:
        """Phrase about missing outcomes, with the most frequent reason and a fix."""
        ((reason, count),) = self.reasons.most_common(1)
        each = f"none of the first {len(self._held)} completions has an outcome"
        if len(self._held) == 1:
            each = "the first completion has no outcome"
        fix = FIXES.get(reason.partition(":")[0], "mend the grader")
        return f"{self._file.path}: {each}, {count} for this reason: {reason}; {fix}"

    def progress(self) -> tuple[int, float | None, float]:
        """Problems done, mean outcome (None: none yet) and tokens per second."""
        mean = float(np.mean(self._outcomes)) if self._outcomes else None
        return self._done, mean, self._tokens / self._seconds()

    def _seconds(self) -> float:
        """Seconds of sampling and grading so far, without compilation."""
        return max(time.monotonic() - self._start - self._drive.compile_s, 1e-9)

    def speed(self) -> dict[str, float] | None:
        """Speed as JSON; None where nothing was sampled."""
        if not self._completions:
            return None
        seconds = self._seconds()
        return {
            "completions": self._completions,
            "seconds": seconds,
            "compile_s": self._drive.compile_s,
            "completions_per_s": self._completions / seconds,
            "tokens_per_s": self._tokens / seconds,
        }


# ----- results


def write_results(
    setup: EvaluationSetup, out: Path, command: str, speeds: Mapping[str, Any]
) -> dict[str, Any]:
    """Compute the results of every samples file and write results.json.

    Args:
        setup: setup of the evaluation.
        out: folder of the evaluation.
        command: command line as text.
        speeds: speed of the files sampled by this process; others keep theirs.

    Returns:
        Results by samples file.

    Raises:
        OSError: results.json cannot be written; the old one is unchanged.
    """
    found, earlier = {}, _earlier_speeds(out / RESULTS)
    for name, questions in setup.questions.items():
        blocks = (rows for _, rows in _samples_file(setup, out, name).blocks())
        table = results.collect(blocks, setup.sampling.n)
        speed = speeds.get(name) or earlier.get(name)
        found[name] = results.summary(table, setup.ks, seed=setup.sampling.seed) | {
            "left_out": dict(questions.left_out),
            "speed": speed,
        }
    page = {
        "command": command,
        **setup.source,
        "k": list(setup.ks),
        "settings": setup.settings,
        "versions": {
            "python": platform.python_version(),
            "curax": VERSION,
            **{name: _version(name) for name in LIBRARIES},
        },
        "results": found,
    }
    write_json(out / RESULTS, page)
    return found


def _earlier_speeds(path: Path) -> dict[str, Any]:
    """Speed by samples file in an old results.json; empty where it cannot be read."""
    try:
        old = json.loads(path.read_text())["results"]
        return {name: one["speed"] for name, one in old.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return {}


def _version(library: str) -> str | None:
    try:
        return version(library)
    except PackageNotFoundError:  # an optional package
        return None
