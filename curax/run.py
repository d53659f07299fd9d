"""One run in one folder: what is done before, between and after chunks of steps."""

import sys
import time
import traceback
from pathlib import Path
from typing import Any

import numpy as np

from curax import checkpoint, folder, loops, parts, record, report
from curax.config import Config, ConfigError
from curax.interrupt import Interrupt
from curax.progress import Progress
from curax.types import TrainState

CUMULATIVE = ("rollout/tokens", "update/count")
OWN, LIBRARY = str(Path(__file__).parent), "site-packages"


class RunError(RuntimeError):
    """The run cannot go on. Its text is one sentence."""


def train(config: Config, workdir: Path, *, resume: bool, command: str) -> int:
    """Run to the end or to a signal; then report, and say in short what came of it.

    Args:
        config: of the run.
        workdir: its folder, which `folder.check` has let pass.
        resume: whether to go on with what is there.
        command: what to type in order to go on.

    Returns:
        Exit status: 0 done, 1 stopped by a failure, 128 + n by signal n.

    Raises:
        ConfigError: before anything is written.
    """
    start, took = time.monotonic(), ""
    since = checkpoint.latest(workdir / folder.CHECKPOINTS) if resume else None
    if since == config.steps:
        print(f"Complete at step {since}; to go on, --set a higher steps.")
    else:
        loop = build(config)
        folder.make(workdir, config)
        try:
            stopped = Run(loop, workdir).go()
        except RunError as error:
            print(f"curax.train: {error}", file=sys.stderr)
            return 1
        if stopped is not None:
            print(f"Stopped; to go on: {command}", flush=True)
            return 128 + stopped
        steps = f", the last {config.steps - since} steps" if since else ""
        took = f"{steps} in {record.duration(time.monotonic() - start)}"
    page = report.write(workdir)
    print(f"{summary(workdir)}{took}.\nReport: {page}", flush=True)
    return 0


def build(config: Config) -> loops.Loop:
    """Call and trace all functions of a config, so that what cannot work fails here.

    Raises:
        ConfigError: in a sentence, naming the line where it failed.
    """
    try:
        built = parts.build(config)
        staged = config.staged or not built.task.on_device
        loop = (loops.Staged if staged else loops.Jitted)(built)
        loop.rehearse()
    except ConfigError:
        raise
    except Exception as error:
        frames = traceback.extract_tb(error.__traceback__)
        text = " ".join(str(error).split()).rstrip(".") or "no message"
        own = (f for f in frames if OWN in f.filename or LIBRARY not in f.filename)
        *_, last = own
        if isinstance(error, ValueError) and (last.line or "").startswith("raise"):
            raise ConfigError(f"{text}.") from error  # a sentence about an option
        raise ConfigError(
            f"{last.filename}:{last.lineno}: {type(error).__name__}: {text}; change "
            "the option that this line reads, or mend the line."
        ) from error
    return loop


def summary(workdir: Path) -> str:
    """What came of the run."""
    told = record.read(workdir)
    rates = list(record.means(told.rows, "eval/pass_rate").values())
    change = f"{rates[0]:.3f} -> {rates[-1]:.3f}" if rates else "unknown"
    tokens = record.count(float(np.sum(told.rows[-1]["rollout/tokens"])))
    steps = told.rows[-1]["step"]
    return f"Held-out pass rate {change}: {steps} steps, {tokens} tokens generated"


class Run:
    """A run, ready to start or to go on from its last checkpoint."""

    def __init__(self, loop: loops.Loop, workdir: Path):
        """Open the folder; what was written behind the last checkpoint is cut off."""
        self._loop, self._config = loop, loop.parts.config
        self._saved, keep = workdir / folder.CHECKPOINTS, self._config.logging.keep
        self._checkpoints = checkpoint.Checkpoints(self._saved, keep=keep)
        self._totals: dict[str, Any] = {}
        self._step = self._checkpoints.latest()
        self._files = folder.Files(
            workdir, loop.parts.task, loop.seeds, step=self._step
        )

    def go(self) -> int | None:
        """Run to the end, or to a signal: its number."""
        try:
            with (
                self._loop.context(),
                Progress() as self._progress,
                Interrupt(self._progress.stopping) as self._interrupt,
            ):
                state = self._start() if self._step is None else self._restored()
                if state is not None:
                    self._steps(state, self._step or 0)
            return self._interrupt.number
        finally:
            self._files.close()
            self._checkpoints.close()

    def _restored(self) -> TrainState:
        step, loop = self._step, self._loop
        assert step is not None
        try:
            state, self._totals = self._checkpoints.restore(
                step, loop.abstract, loop.sharding
            )
        except Exception as error:
            raise RunError(
                f"the checkpoint {self._saved / str(step)} cannot be read "
                f"({type(error).__name__}); delete it to go on from the one before."
            ) from error
        return state

    def _start(self) -> TrainState | None:
        """Warm start and first evaluation: the state of step 0, saved; None: stopped.

        Nothing is saved before: a run stopped in its warm start begins again.
        """
        loop, warm = self._loop, self._config.warm_start
        state, done, total = loop.initial(), 0, warm.steps if warm else 0
        if total:
            self._progress.begin("warm start", 0, total)
        while done < total:
            times = min(self._config.logging.every, total - done)
            state, losses = loop.warm(state, times)
            self._files.warm.write(
                {"step": done + i, "warm/loss_nats": loss}
                for i, loss in enumerate(losses, 1)
            )
            done += times
            self._progress.warm(done, losses[-1])
            if self._interrupt.number is not None:
                return None
        state = loop.begin(state)
        row = {"step": 0, **self._counted({}), **self._evaluated(state, 0)}
        self._files.write([row])
        self._checkpoints.save(0, state, self._totals)
        return state

    def _steps(self, state: TrainState, step: int) -> None:
        """Chunks of steps, which end where something is due."""
        config, log = self._config, self._config.logging
        self._progress.begin("RL", step, config.steps)
        due = (log.every, log.checkpoint_every, config.evaluation.every)
        while step < config.steps and self._interrupt.number is None:
            times = min(*(n - step % n for n in due), config.steps - step)
            state, rows, shown = self._loop.advance(state, times)
            rows = [
                {"step": step + i, **row, **self._counted(row)}
                for i, row in enumerate(rows, 1)
            ]
            step += times
            last = step == config.steps
            if last or step % config.evaluation.every == 0:
                rows[-1] |= self._evaluated(state, step)
            self._files.write(rows, shown)
            self._check_finite(rows)
            self._progress.step(rows)
            if last or step % log.checkpoint_every == 0:
                self._checkpoints.save(step, state, self._totals)
        self._checkpoints.save(step, state, self._totals)

    def _counted(self, row: dict[str, Any]) -> dict[str, Any]:
        """Cumulative counts, exact at any size: the device counts single steps."""
        for name in CUMULATIVE:
            new = np.asarray(row.get(name, np.zeros(self._loop.seeds.shape)))
            old = np.asarray(self._totals.get(name, 0), np.int64)
            self._totals[name] = (old + new.astype(np.int64)).tolist()
        return dict(self._totals)

    def _evaluated(self, state: TrainState, step: int) -> dict[str, Any]:
        start = time.perf_counter()
        sampled, greedy = self._loop.evaluate(state)
        took = time.perf_counter() - start
        self._files.evaluated(step, sampled, self._config.evaluation.samples)
        self._progress.held_out(sampled)
        return {
            "eval/pass_rate": _mean(sampled),
            "eval/greedy_pass_rate": _mean(greedy),
            "time/evaluate_s": took,
        }

    def _check_finite(self, rows: list[dict[str, Any]]) -> None:
        for row in rows:
            for name in ("loss/mean", "gradient/norm"):
                if not np.all(np.isfinite(row[name])):
                    raise RunError(
                        f"{name} is {row[name]} at step {row['step']}, so the run "
                        f"stops behind the checkpoint of {self._checkpoints.latest()}; "
                        "start anew with a lower optimizer.learning_rate."
                    )


def _mean(pass_rates: np.ndarray) -> np.ndarray:
    """Over the prompts that have one, `[..., E]`; NaN where none has."""
    known = np.isfinite(pass_rates)
    count = np.where(known.any(-1), known.sum(-1), np.nan)
    return np.where(known, pass_rates, 0.0).sum(-1) / count
