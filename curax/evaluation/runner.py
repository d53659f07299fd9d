"""One evaluation, held: completions drawn and graded, results in a folder."""

import contextlib
import json
import platform
import sys
import time
from argparse import Namespace
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numpy as np

from curax import __version__
from curax.config import ConfigError, changes
from curax.evaluation import results, samples
from curax.evaluation.questions import Questions
from curax.evaluation.samples import Drawer, Samples
from curax.evaluation.setup import Exam, prepared
from curax.runs import lock, run
from curax.runs.folder import NotWrittenError, write_json
from curax.runs.interrupt import Interrupt
from curax.runs.progress import Progress

SETTINGS, RESULTS = "settings.json", "results.json"
MARKS = ("parameters", "questions")  # settings that are numbers of no meaning
LIBRARIES = ("jax", "flax", "numpy", "tokenizers", "math-verify")
ENOUGH = 16  # completions, none of which has an outcome, that stop an evaluation
# What may help where no completion has an outcome, by the beginning of the reason.
FIXES = {
    "timeout": "raise --deadline, or make the grader faster",
    "crash": "raise --memory-mb, or mend the grader",
    "none": "the grader returned None; name another --grader, or mend it",
}


class NoOutcomeError(RuntimeError):
    """The grader has no outcome for any completion. Its text is one sentence."""


def hold(args: Namespace, out: Path, *, command: str) -> int:
    """Draw, grade, and write; what was done before is not done again.

    Args:
        args: of the command line.
        out: the folder.
        command: what was typed.

    Returns:
        Exit status: 0 done, 1 stopped by a failure, 128 + n by signal n.

    Raises:
        ConfigError: before anything is written.
    """
    run.enable_compilation_cache()
    with contextlib.ExitStack() as opened:
        if not out.exists() or out.is_dir():  # a file is told of below
            opened.enter_context(lock.hold(out, "--out"))
        exam = prepared(args, opened)
        compare(out, exam.settings)
        made(out, exam.settings)
        try:
            stopped, speeds = go(exam, out)
            if stopped is not None:
                print(f"Stopped; the same command goes on: {command}", flush=True)
                return 128 + stopped
            found = concluded(exam, out, command, speeds)
        except (NotWrittenError, RuntimeError, OSError) as error:
            print(f"curax.evaluate: {_failure(error)}", file=sys.stderr)
            return 1
    for name, result in found.items():
        print(results.table(name, result), end="\n\n")
    print(f"Written: {out / RESULTS}", flush=True)
    return 0


def _failure(error: Exception) -> str:
    """A sentence of why it stopped. What is done is in the folder in any case."""
    said = " ".join(str(error).split()).rstrip(".")
    if isinstance(error, NoOutcomeError):
        return f"{said}; nothing of it is kept, and the same command goes on."
    if "RESOURCE_EXHAUSTED" in said:
        return (
            "the device has not enough memory; go on with a lower --slots or --batch "
            f"({said[:200]})."
        )
    return f"{said}; mend that, and the same command goes on."


# ----- the folder


def compare(out: Path, settings: Mapping[str, Any]) -> None:
    """Refuse a folder that holds something else than this evaluation, or part of it.

    Raises:
        ConfigError: in a sentence.
    """
    if not out.is_dir():
        if out.exists():
            raise ConfigError(f"--out {out} is a file; name a folder.")
        return
    path = out / SETTINGS
    if not path.exists():
        if any(path.name != lock.FILE for path in out.iterdir()):
            raise ConfigError(
                f"--out {out} holds files of something else; name a new folder."
            )
        return
    if not any(file.stat().st_size for file in out.glob("*.jsonl")):
        return  # nothing was drawn yet: it may become another evaluation
    try:
        old = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: {error}; name another --out.") from error
    for name, was, now in changes(old, json.loads(json.dumps(settings))):
        differs = f"with {name}={was}, and this is one with {now}"
        for mark in MARKS:
            if name.startswith(mark):
                differs = f"of other {mark}"
        raise ConfigError(
            f"--out {out} holds an evaluation {differs}; name another --out, or make "
            "them agree."
        )


def made(out: Path, settings: Mapping[str, Any]) -> None:
    """Make the folder, and say in it what it is for.

    Raises:
        ConfigError: it cannot be.
    """
    try:
        out.mkdir(parents=True, exist_ok=True)
        write_json(out / SETTINGS, dict(settings))
    except OSError as error:
        raise ConfigError(
            f"--out {out} cannot be written ({error.strerror}); name another folder."
        ) from error


# ----- drawing


class Display(Progress):
    """Problems done, their mean outcome, tokens per second and time left."""

    def stopping(self, again: bool) -> None:
        """A signal has come, `again` if not for the first time."""
        if again:
            super().stopping(again)
        else:
            self.say("Stopping after this batch; once more to stop at once.")

    def drawn(self, done: int, outcome: float | None, tokens_per_s: float) -> None:
        """So many problems are done; their mean outcome until now, if there is any."""
        mean = "no outcome yet" if outcome is None else f"mean {outcome:.3f}"
        note = f"{mean}  {tokens_per_s:,.0f} tokens/s"
        self._show(done, note + self._left(done))


def go(exam: Exam, out: Path) -> tuple[int | None, dict[str, Any]]:
    """Draw what is not there yet, file by file.

    Returns:
        The number of a signal that stopped it, or None; how fast each file went of
        which something was drawn.

    Raises:
        NotWrittenError: a file cannot be written.
        NoOutcomeError: no completion can be graded.
        RuntimeError: the device or the graders failed.
    """
    display, speeds = Display(), {}
    with display, Interrupt(display.stopping) as interrupt:
        for name, asked in exam.questions.items():
            if interrupt.number is None:
                file = Samples(out / name, asked.digests[: exam.limit], exam.how)
                written = _draw(exam, asked, file, display, interrupt)
                if speed := written.speed():
                    speeds[name] = speed
    return interrupt.number, speeds


def _draw(
    exam: Exam, asked: Questions, file: Samples, display: Display, interrupt: Interrupt
) -> "Written":
    """Complete one file: a batch is graded while the next is drawn."""
    done, total = file.open(), len(asked.digests[: exam.limit])
    drawer = Drawer(exam.policy, asked, exam.how)
    written = Written(file, done, drawer)
    if done < total:
        display.begin(file.path.stem, done, total)
    with contextlib.closing(file), ThreadPoolExecutor(1, "grade") as background:
        pending: Future | None = None

        def take() -> None:
            if pending:
                written.add(pending.result(), last=done == total)
                display.drawn(*written.told())

        while done < total and interrupt.number is None:
            numbers = range(done, min(done + drawer.batch, total))
            said = drawer(numbers)
            written.drew(said)
            take()
            pending = background.submit(lambda s=said: list(samples.rows(asked, s)))
            done = numbers.stop
            if not written.graded:  # a grader that fails is not left to go on
                take()
                pending = None
        take()
    for reason, count in written.reasons.most_common(1):
        display.say(
            f"Warning: {sum(written.reasons.values())} of the completions have no "
            f"outcome and count as missing, {count} for this reason: {reason}"
        )
    return written


class Written:
    """What was drawn, graded and written to a file in this go.

    Attributes:
        graded: whether any completion in the file has an outcome.
        reasons: why others have none, and how often.
    """

    def __init__(self, file: Samples, done: int, drawer: Drawer):
        """Nothing yet; `done` problems are there from before."""
        self._file, self._done, self._drawer = file, done, drawer
        self._start, self._completions, self._tokens = time.monotonic(), 0, 0
        self._outcomes, self._held = list[float](), list[dict[str, Any]]()
        before = (row for _, rows in file.blocks() for row in rows)
        self.graded = any(row.get("outcome") is not None for row in before)
        self.reasons = Counter[str]()

    def drew(self, completions: Sequence[samples.Completion]) -> None:
        """Count what was drawn."""
        self._completions += len(completions)
        self._tokens += sum(len(one.tokens) for one in completions)

    def add(self, rows: Sequence[dict[str, Any]], *, last: bool) -> None:
        """Write the rows of some problems, once any completion has an outcome.

        Raises:
            NoOutcomeError: none has, of the first `ENOUGH` or of all, as these are the
                `last`; then nothing is written.
        """
        self._done += len({row["problem"] for row in rows})
        shown = [row for row in rows if not row["greedy"]] or rows
        known = [row["outcome"] for row in shown]
        self._outcomes += [outcome for outcome in known if outcome is not None]
        self.reasons.update(row["reason"] for row in rows if row["reason"])
        self._held += rows
        self.graded |= any(row["outcome"] is not None for row in rows)
        if self.graded:
            self._file.write(self._held)
            self._held = []
        elif last or len(self._held) >= ENOUGH:
            raise NoOutcomeError(self._why())

    def _why(self) -> str:
        """A sentence of why there is no outcome, by the commonest reason."""
        ((reason, count),) = self.reasons.most_common(1)
        each = f"none of the first {len(self._held)} completions has an outcome"
        if len(self._held) == 1:
            each = "the first completion has no outcome"
        fix = FIXES.get(reason.partition(":")[0], "mend the grader")
        return f"{self._file.path}: {each}, {count} for this reason: {reason}; {fix}"

    def told(self) -> tuple[int, float | None, float]:
        """Problems done, mean outcome (None: there is none), tokens per second."""
        mean = float(np.mean(self._outcomes)) if self._outcomes else None
        return self._done, mean, self._tokens / self._seconds()

    def _seconds(self) -> float:
        """Of drawing and grading until now; compiling is none of it."""
        return max(time.monotonic() - self._start - self._drawer.compile_s, 1e-9)

    def speed(self) -> dict[str, float] | None:
        """How fast it went, ready for JSON; None: nothing was drawn."""
        if not self._completions:
            return None
        seconds = self._seconds()
        return {
            "completions": self._completions,
            "seconds": seconds,
            "compile_s": self._drawer.compile_s,
            "completions_per_s": self._completions / seconds,
            "tokens_per_s": self._tokens / seconds,
        }


# ----- results


def concluded(
    exam: Exam, out: Path, command: str, speeds: Mapping[str, Any]
) -> dict[str, Any]:
    """The results of every file; they are written, too.

    Args:
        exam: that was held.
        out: the folder.
        command: what was typed.
        speeds: of files of which something was drawn in this go; of others what was
            said before stays.

    Raises:
        OSError: they cannot be written; older ones are as they were.
    """
    found, before = {}, _before(out / RESULTS)
    for name, asked in exam.questions.items():
        file = Samples(out / name, asked.digests[: exam.limit], exam.how)
        told = results.tally((rows for _, rows in file.blocks()), exam.how.n)
        one = results.results(told, exam.ks, seed=exam.how.seed)
        speed = speeds.get(name) or before.get(name)
        one |= {"left_out": dict(asked.left_out), "speed": speed}
        found[name] = one
    page = {
        "command": command,
        **exam.about,
        "k": list(exam.ks),
        "settings": exam.settings,
        "versions": {
            "python": platform.python_version(),
            "curax": __version__,
            **{name: _version(name) for name in LIBRARIES},
        },
        "results": found,
    }
    write_json(out / RESULTS, page)
    return found


def _before(path: Path) -> dict[str, Any]:
    """The speed of each file that was told before; nothing where none can be read."""
    try:
        found = json.loads(path.read_text())["results"]
        return {name: one["speed"] for name, one in found.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return {}


def _version(library: str) -> str | None:
    try:
        return version(library)
    except PackageNotFoundError:  # one that is needed for some files only
        return None
