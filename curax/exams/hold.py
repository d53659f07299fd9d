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

from curax import __version__, lock, run
from curax.config import ConfigError, changes
from curax.exams import estimates, samples, tally
from curax.exams.asked import Exam, prepared
from curax.exams.questions import Questions
from curax.exams.samples import Drawer, Samples
from curax.folder import NotWrittenError, write_json
from curax.interrupt import Interrupt
from curax.progress import Progress

SETTINGS, RESULTS = "settings.json", "results.json"
MARKS = ("parameters", "questions")  # settings that are numbers of no meaning
LIBRARIES = ("jax", "flax", "numpy", "tokenizers", "math-verify")


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
    run.keep_compiled()
    with contextlib.ExitStack() as opened:
        if not out.exists() or out.is_dir():  # a file is told of below
            opened.enter_context(lock.hold(out, "--out"))
        exam = prepared(args, opened)
        compare(out, exam.settings)
        made(out, exam.settings)
        try:
            stopped = go(exam, out)
            if stopped is not None:
                print(f"Stopped; the same command goes on: {command}", flush=True)
                return 128 + stopped
            found = concluded(exam, out, command)
        except (NotWrittenError, RuntimeError, OSError) as error:
            print(f"curax.evaluate: {_failure(error)}", file=sys.stderr)
            return 1
    for name, result in found.items():
        print(tally.table(name, result), end="\n\n")
    print(f"Written: {out / RESULTS}", flush=True)
    return 0


def _failure(error: Exception) -> str:
    """A sentence of why it stopped. What is done is in the folder in any case."""
    said = " ".join(str(error).split()).rstrip(".")
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

    def drawn(self, done: int, outcome: float, tokens_per_s: float) -> None:
        """So many problems are done; their mean outcome until now."""
        note = f"mean {outcome:.3f}  {tokens_per_s:,.0f} tokens/s"
        self._show(done, note + self._left(done))


def go(exam: Exam, out: Path) -> int | None:
    """Draw what is not there yet, file by file; the number of a signal that stopped it.

    Raises:
        NotWrittenError: a file cannot be written.
        RuntimeError: the device or the graders failed.
    """
    display = Display()
    with display, Interrupt(display.stopping) as interrupt:
        for name, asked in exam.questions.items():
            if interrupt.number is None:
                file = Samples(out / name, asked.digests[: exam.limit], exam.how)
                _draw(exam, asked, file, display, interrupt)
    return interrupt.number


def _draw(
    exam: Exam, asked: Questions, file: Samples, display: Display, interrupt: Interrupt
) -> None:
    """Complete one file: a batch is graded while the next is drawn."""
    done, total = file.open(), len(asked.digests[: exam.limit])
    drawer, written = Drawer(exam.policy, asked, exam.how), Written(file, done)
    if done < total:
        display.begin(file.path.stem, done, total)
    with contextlib.closing(file), ThreadPoolExecutor(1, "grade") as background:
        pending: Future | None = None
        while done < total and interrupt.number is None:
            numbers = range(done, min(done + drawer.batch, total))
            said = drawer(numbers)
            if pending:
                written.add(pending.result())
                display.drawn(*written.told())
            pending = background.submit(lambda s=said: list(samples.rows(asked, s)))
            done = numbers.stop
        if pending:
            written.add(pending.result())
            display.drawn(*written.told())
    for reason, count in written.reasons.most_common(1):
        display.say(
            f"Warning: {sum(written.reasons.values())} of the completions have no "
            f"outcome and count as missing, {count} for this reason: {reason}"
        )


class Written:
    """What was written to a file in this go."""

    def __init__(self, file: Samples, done: int):
        """Nothing yet; `done` problems are there from before."""
        self._file, self._done, self._start = file, done, time.monotonic()
        self._tokens, self._outcomes = 0, list[float]()
        self.reasons = Counter[str]()

    def add(self, rows: Sequence[dict[str, Any]]) -> None:
        """Write the rows of some problems."""
        self._file.write(rows)
        self._done += len({row["problem"] for row in rows})
        self._tokens += sum(row["length_tokens"] for row in rows)
        shown = [row for row in rows if not row["greedy"]] or rows
        known = [row["outcome"] for row in shown]
        self._outcomes += [outcome for outcome in known if outcome is not None]
        self.reasons.update(row["reason"] for row in rows if row["reason"])

    def told(self) -> tuple[int, float, float]:
        """Problems done, mean outcome, tokens per second."""
        took = max(time.monotonic() - self._start, 1e-9)
        mean = float(estimates.mean(np.array(self._outcomes)))
        return self._done, mean, self._tokens / took


# ----- results


def concluded(exam: Exam, out: Path, command: str) -> dict[str, Any]:
    """The results of every file; they are written, too.

    Raises:
        OSError: they cannot be written; older ones are as they were.
    """
    found = {}
    for name, asked in exam.questions.items():
        file = Samples(out / name, asked.digests[: exam.limit], exam.how)
        told = tally.tally((rows for _, rows in file.blocks()), exam.how.n)
        results = tally.results(told, exam.ks, seed=exam.how.seed)
        found[name] = results | {"left_out": dict(asked.left_out)}
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


def _version(library: str) -> str | None:
    try:
        return version(library)
    except PackageNotFoundError:  # one that is needed for some files only
        return None
