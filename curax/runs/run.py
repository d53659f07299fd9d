"""Training run in a folder: start or resume, chunks of steps, evaluation, report."""

import contextlib
import dataclasses
import os
import shutil
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from rich.console import Console

from curax import hub
from curax.config import Config
from curax.handover import ClosingError
from curax.models import prompt_form
from curax.processes import peers
from curax.runs import (
    alarms,
    cache,
    checkpoint,
    dashboards,
    ending,
    folder,
    libraries,
    marks,
    memory_io,
    policies,
    reading,
)
from curax.runs.compile_times import CompileTimes
from curax.runs.interrupt import Interrupt
from curax.runs.profile import Profile
from curax.runs.progress import Progress
from curax.runs.rows import RemovedError
from curax.settings import errors
from curax.settings.config_paths import describe
from curax.settings.sizes import checkpoint_of, declared_option
from curax.step import build, loops, rehearsal, stages
from curax.step.states import Warm
from curax.step.types import Components
from curax.types import TrainState


class RunError(RuntimeError):
    """The run cannot continue. The message is one sentence."""


def train(
    config: Config,
    workdir: Path,
    *,
    resume: bool,
    command: str,
    recipe: str = "",
    profile: int = 0,
) -> int:
    """Train to the last step or a signal, then write the report and print a summary.

    Args:
        config: config of the run.
        workdir: run folder, accepted by `folder.check`.
        resume: continue from the newest checkpoint of `workdir`.
        command: command line that resumes the run, printed when a signal stops it.
        recipe: name or file that the config comes from, as `folder.make`.
        profile: steps to trace, as `Profile`; 0: none.

    Returns:
        Exit status: 0 done, 1 stopped by a failure, 128 + n by signal n.

    Raises:
        ConfigError: wrong input; nothing has been written.
    """
    start, took = time.monotonic(), ""
    since = begun(config, workdir, resume=resume)
    if since == config.steps and policies.is_readable(config, workdir):
        say(f"Complete at step {since}; to go on, --set a higher steps.")
    else:
        loop, loaded = prepared(config, since)
        peers.on_first(folder.check_questions, workdir, loop.parts.task)
        peers.on_first(folder.check_shapes, workdir, loop)
        grader = marks.grader(config)
        if warning := folder.grader_warning(workdir, grader):
            say(f"Warning: {warning}")
        peers.on_first(folder.make, workdir, config, recipe)
        peers.on_first(folder.write_questions, workdir, loop.parts.task, grader)
        try:
            made = Run(loop, workdir, loaded, profile=profile)
            stopped = made.run()
        except (RunError, checkpoint.NotSavedError) as error:
            peers.settle()
            print(f"curax.train: {error}", file=sys.stderr)
            return 1
        if stopped is not None:
            say(f"Stopped; to go on: {command}")
            return 128 + stopped
        more = reading.plural(config.steps - made.since, "step")
        steps = f", the last {more}" if made.since else ""
        took = f"{steps} in {reading.duration_text(time.monotonic() - start)}"
    return ending.write_report(config, workdir, took) if peers.is_first() else 0


def begun(config: Config, workdir: Path, *, resume: bool) -> int | None:
    """Step of the newest checkpoint of a run that is resumed; None for a new run.

    Sets up caches and logging. Arguments as `train`.

    Raises:
        ConfigError: a file of the run is damaged, or processes have other configs.
    """
    libraries.set_up()
    since = checkpoint.latest(workdir / folder.CHECKPOINTS) if resume else None
    since = peers.broadcast(since)
    peers.same("the config", describe(config))
    if resume:
        peers.on_first(
            folder.check_files, workdir, since, finished=since == config.steps
        )
    return since


def prepared(
    config: Config, since: int | None
) -> tuple[loops.Loop, memory_io.LoadedMemory | None]:
    """The rehearsed loop of a run and the memory it begins with; writes nothing.

    Args:
        config: config of the run.
        since: of `begun`.

    Raises:
        ConfigError: wrong input.
    """
    build.check_weights(config, resumed=since is not None)
    loop = make_loop(config)
    with errors.refusals(RuntimeError):
        if make_ready := loop.parts.task.start:
            make_ready()
        if engine := loop.parts.engine:
            engine.start(config)
    path, form = checkpoint_of(config), loop.parts.task.prompt_form
    path = path and hub.checkpoint(path, weights=False)
    if warning := prompt_form.mismatch(path, form):
        say(f"Warning: {warning}")
    # A run with a checkpoint has its memory in it.
    loaded = load_memory(loop.parts) if since is None else None
    task = loop.parts.task
    peers.same("the problems in the files of the task", task.fingerprint)
    mark = loaded and checkpoint.fingerprint(loaded.memory)
    peers.same("the file of memory.load", mark)
    peers.on_first(dashboards.check, config.logging.dashboards)
    return loop, loaded


def say(text: str) -> None:
    """Print a line on process 0."""
    if peers.is_first():
        print(text, flush=True)


def make_loop(config: Config, *, rehearse: bool = True) -> loops.Loop:
    """Build the training loop of a config: `Jitted`, or `Staged` where it needs a host.

    The host verifies, reads the prompts of a task in files, asks an engine, or lets
    devices of their own draw ahead.

    Args:
        config: config of the run.
        rehearse: also trace a step abstractly, so that a stage that cannot work
            fails here; False where no step will be made.

    Raises:
        ConfigError: a function of the config failed; the message names its line.
    """
    with errors.config_errors(config):
        built = build.with_engine(build.build(config))
        if rehearse and config.steps:
            rehearsal.check(config)
        apart = config.mesh.draw_share is not None
        from_host = config.staged or apart or built.needs_host
        loop = (loops.Staged if from_host else loops.Jitted)(built)
        if rehearse:
            loop.rehearse()
    return loop


def load_memory(built: Components) -> memory_io.LoadedMemory | None:
    """Difficulty memory from the file `memory.load`; None where the option is None.

    Raises:
        ConfigError: the file cannot be read.
    """
    path = built.config.memory.load
    if path is None:
        return None
    return memory_io.read(Path(os.path.expanduser(path)), built.task)


class Run:
    """A run of a training loop in a folder, from step 0 or from a checkpoint."""

    def __init__(
        self,
        loop: loops.Loop,
        workdir: Path,
        loaded: memory_io.LoadedMemory | None = None,
        *,
        profile: int = 0,
    ):
        """Open the checkpoints; no other file is touched.

        Args:
            loop: training loop.
            workdir: run folder.
            loaded: difficulty memory of another run, for the state of step 0.
            profile: steps to trace, as `Profile`; 0: none.
        """
        self._loop, self._config = loop, loop.parts.config
        self._loaded = loaded
        self._profile = Profile(workdir, profile, writes=peers.is_first())
        self._workdir, keep = workdir, self._config.logging.keep
        self._about = folder.kept(describe(self._config))
        self._checkpoints = checkpoint.Checkpoints(
            workdir / folder.CHECKPOINTS, keep=keep, about=self._about
        )
        self._alarms = alarms.Alarms(
            patience=self._config.update.patience,
            drift_nats=drift_bound(self._config, loop.platform),
        )
        self._totals = alarms.Totals()
        self._unknown_losses = np.zeros((), int)  # of the warm start, in a row
        programs = jax.config.values["jax_compilation_cache_dir"]
        self._times = CompileTimes(
            Path(programs) if programs else None, describe(self._config)
        )
        self._signal: int | None = None  # that all processes have agreed to stop at
        self.since = 0  # step that this process went on from

    def run(self) -> int | None:
        """Train to the last step or a signal.

        Returns:
            Number of the signal that stopped the run; None: it is complete, also where
            a signal came after its last chunk had begun.

        Raises:
            RunError: the run cannot continue.
        """
        complete = False
        with (
            self._errors_as_sentences(),
            self._loop.context(),
            Progress(console()) as self._progress,
            Interrupt(self._on_signal) as self._interrupt,
            contextlib.ExitStack() as self._open,
        ):
            self._open.callback(self._checkpoints.close)
            self._open.callback(self._profile.close)
            if engine := self._loop.parts.engine:
                engine.follow(self._workdir)
                self._open.callback(engine.close)
            if description := self._loop.parts.task.summary:
                self._progress.say(description)
            for held in cache.lines(self._loop):
                self._progress.say(held)
            found = self._restore()
            start = found.state if found else None
            self._open.enter_context(self._loop.compiling(start))
            state = found.state if found else self._start()
            if state is not None:
                if peers.is_first():
                    done = self._workdir / folder.WARM_CHECKPOINTS
                    shutil.rmtree(done, ignore_errors=True)
                self.since = found.step if found else 0
                complete = self._train(state, self.since)
        return None if complete else self._stopping()

    def _on_signal(self, urged: bool) -> None:
        """Say that the run stops, and wait for no engine that does not answer."""
        self._progress.stopping(urged)
        if engine := self._loop.parts.engine:
            engine.leave()

    def _stopping(self) -> int | None:
        """Number of the first signal that any process has got, agreed on by all."""
        if self._signal is None:
            self._signal = peers.stop_signal(self._interrupt.number)
        return self._signal

    @contextlib.contextmanager
    def _errors_as_sentences(self) -> Iterator[None]:
        """Turn failures of disk, memory and user functions into a `RunError`."""
        try:
            yield
        except Exception as error:
            if not (found := errors.work_error(error)):
                raise
            first, what = found
            if isinstance(first, RemovedError):
                raise RunError(
                    f"{what}, so the run stops; bring it back and go on with "
                    "--resume, or start anew in another --workdir."
                ) from first
            raise RunError(
                f"{what}; mend that and go on with --resume: "
                f"{folder.last_checkpoint(self._workdir)}."
            ) from first

    def _restore(self) -> checkpoint.Restored | None:
        """The newest readable checkpoint, None without one; files are cut to it."""
        loop = self._loop
        try:
            found = self._newest(self._checkpoints, loop.abstract, loop.sharding)
        except checkpoint.DamagedError as error:
            raise RunError(
                f"no checkpoint can be read, the newest is {error}; bring one back, or "
                "start anew in another --workdir."
            ) from error
        if found:
            for path, reason in found.skipped.items():
                self._warn(
                    f"the checkpoint of step {path.stem} cannot be read ({reason}), so "
                    f"the run goes on from step {found.step}; it is kept as {path}."
                )
            self._open_files(step=found.step)
            # Alarms are checked from step 1 on.
            rows = (row for row in self._files.rows(folder.METRICS) if row["step"])
            self._alarms.resume(rows, self._files.rows(folder.ALARMS))
            self._totals = alarms.Totals(**found.totals)
        return found

    def _newest(
        self, saved: checkpoint.Checkpoints, like: Any, sharding: Any
    ) -> checkpoint.Restored | None:
        """As `Checkpoints.newest`, with the frozen parameters."""
        try:
            return saved.newest(like, sharding, self._loop.whole)
        except checkpoint.OtherBaseError as error:
            raise RunError(
                f"{error}; bring back what model.path={checkpoint_of(self._config)} "
                "was, or start anew in another --workdir."
            ) from error

    def _warn(self, text: str) -> None:
        self._progress.say(f"Warning: {text}")

    def _open_files(self, *, step: int | None, warm: int = 0) -> None:
        """Open the files of rows; rows after the checkpoint are cut off."""
        task, seeds = self._loop.parts.task, self._loop.seeds
        self._files: folder.Files | folder.NoFiles = folder.NoFiles()
        if peers.is_first():
            self._files = folder.Files(
                self._workdir,
                task,
                seeds,
                step=step,
                warm=warm,
                config=self._config,
                warn=self._warn,
            )
        self._open.callback(self._files.close)

    def _start(self) -> TrainState | None:
        """The state of step 0, evaluated and saved; None where a signal came first."""
        warm = self._warm_start()
        if warm is None:
            return None
        state = self._loop.begin(warm)
        if loaded := self._loaded:
            state = memory_io.with_memory(state, loaded.memory)
            if loaded.unknown:
                self._warn(
                    f"{loaded.unknown} of the {loaded.lines} prompts in memory.load="
                    f"{self._config.memory.load} are not in this task and are left out."
                )
        evaluated, score = self._evaluate(state, 0)
        if text := alarms.silence({"step": 0, **evaluated}):
            self._warn(text)
        counts = self._totals.add({}, self._loop.seeds)
        self._files.write([{"step": 0, **counts, **evaluated}])
        self._save(0, state, score)
        self._checkpoints.wait()  # before checkpoints of the warm start are removed
        return state

    def _warm_start(self) -> Warm | None:
        """State after the warm start, resumed if it was begun; None: a signal came."""
        loop, log = self._loop, self._config.logging
        if not self._config.warm_start:
            self._open_files(step=None)
            return loop.initial()
        total, there = self._config.warm_start.steps, folder.WARM_CHECKPOINTS
        saved = checkpoint.Checkpoints(self._workdir / there, keep=1, about=self._about)
        with contextlib.closing(saved):
            try:
                found = self._newest(saved, loop.abstract_warm, loop.warm_sharding)
            except checkpoint.DamagedError as error:
                self._warn(f"{error} cannot be read; the warm start begins again.")
                saved.clear()
                found = None
            state, done = (found.state, found.step) if found else (loop.initial(), 0)
            self._open_files(step=None, warm=done)
            self._progress.begin("warm start", done, total, self._times.note("warm"))
            stopped = self._stopping() is not None
            chunks = loop.warm_up(state, done, log.checkpoint_every)
            while done < total and not stopped:
                with self._times.timed("warm"):
                    state, done, losses = next(chunks)
                self._files.warm.write(
                    {"step": step, "warm/loss_nats": loss}
                    for step, loss in enumerate(losses, done - len(losses) + 1)
                )
                self._progress.warm(done, losses[-1])
                self._check_warm(done, losses)
                stopped = self._stopping() is not None
                if stopped or done % log.checkpoint_every == 0:
                    self._files.sync()
                    saved.save(done, state, {})
        return None if stopped else state

    def _check_warm(self, step: int, losses: np.ndarray) -> None:
        """Stop where no loss of the last steps of a warm start is finite, in any seed.

        Args:
            step: the last of them.
            losses: `[times, ...]` nats per token.
        """
        patience = self._config.update.patience
        for unknown in ~np.isfinite(losses):
            self._unknown_losses = alarms.streak(unknown, self._unknown_losses)
        if np.all(self._unknown_losses >= patience):
            raise RunError(
                f"the loss of the warm start is not finite at step {step}, as in all "
                f"of the last {patience} steps, so the run stops; start anew with a "
                "lower warm_start.optimizer.learning_rate, or from another checkpoint "
                "if the weights of this one are not finite."
            )

    def _train(self, state: TrainState, step: int) -> bool:
        """Train in chunks that end at each log, checkpoint and evaluation step.

        Returns:
            Whether the last step is done and saved; else a signal came before it.
        """
        config, log = self._config, self._config.logging
        if step < config.steps:
            self._progress.begin("RL", step, config.steps, self._times.note("step"))
        due = (log.every, log.checkpoint_every, config.evaluation.every)
        score: float | None = None
        begun = step
        while step < config.steps and self._stopping() is None:
            times = min(*(n - step % n for n in due), config.steps - step)
            times = self._profile.begin(step - begun, times)
            try:
                with self._times.timed("step"):
                    state, rows, shown = self._loop.advance(state, times)
            except ClosingError as error:  # what the chunk had begun is gone
                self._progress.say(f"{error}; steps since the last checkpoint are lost")
                return False
            rows = [
                {"step": step + i, **row, **self._totals.add(row, self._loop.seeds)}
                for i, row in enumerate(rows, 1)
            ]
            step += times
            score = None
            if text := self._profile.end(step - begun):
                self._progress.say(text)
            if step == config.steps or step % config.evaluation.every == 0:
                evaluated, score = self._evaluate(state, step)
                rows[-1] |= evaluated
            self._files.write(rows, shown)
            self._progress.step(rows)
            diverged = self._must_stop(rows)
            if step == config.steps:  # before the last checkpoint marks the run done
                self._write_memory(state)
            if diverged or score is not None or step % log.checkpoint_every == 0:
                self._save(step, state, score)
            if diverged:
                raise RunError(diverged)
        self._save(step, state, score)
        complete = step == config.steps
        if not complete:  # after a signal time is short: the state is first
            self._write_memory(state)
        return complete

    def _write_memory(self, state: TrainState) -> None:
        """Write memory.jsonl, which other runs can load."""
        path = self._workdir / folder.MEMORY
        memory_io.write(path, self._loop.parts.task, state.memory)

    def _save(self, step: int, state: TrainState, score: float | None) -> None:
        self._files.sync()
        totals = dataclasses.asdict(self._totals)
        self._checkpoints.save(step, state, totals, score=score)

    def _must_stop(self, rows: list[dict[str, Any]]) -> str | None:
        """Report new alarms of some rows; return why the run must stop, or None."""
        for row in rows:
            for kind, text in self._alarms.check(row).items():
                self._warn(text)
                if kind in alarms.SHORT:  # of the kinds that are kept
                    self._files.write_alarm(row["step"], kind, text)
            if why := self._totals.must_stop(
                row,
                patience=self._config.update.patience,
                saved=rows[-1]["step"],
                allocator=stages.named("allocate", self._config.allocate),
                verifier=self._verifier_reason(),
            ):
                return why
        return None

    def _verifier_reason(self) -> str:
        """The verifier's most frequent reason for a missing outcome, shortened."""
        reason = " ".join((self._loop.reason or "they are not finite").split())
        return reason.rstrip(".")[:200]

    def _evaluate(self, state: TrainState, step: int) -> tuple[dict[str, Any], float]:
        """Evaluate a state.

        Returns:
            Metrics for the row of the step; score of the state, its mean pass rate.

        Raises:
            RunError: at step 0, where the verifier gave no outcome at all.
        """
        start = time.perf_counter()
        with contextlib.ExitStack() as first_call:
            if note := self._times.note("evaluation"):
                first_call.enter_context(self._progress.waiting(note))
                first_call.enter_context(self._times.timed("evaluation"))
            sampled, greedy, metrics = self._loop.evaluate(state)
        took = time.perf_counter() - start
        if step == 0 and not (np.isfinite(sampled).any() or np.isfinite(greedy).any()):
            raise RunError(
                "the verifier gave no outcome for any held-out completion "
                f"({self._verifier_reason()}), so the run stops before its first step; "
                "mend the verifier and go on with --resume."
            )
        self._files.write_evaluation(step, sampled, self._config.evaluation.samples)
        self._progress.evaluated(sampled)
        row = {
            "eval/pass_rate": reading.finite_mean(sampled),
            "eval/greedy_pass_rate": reading.finite_mean(greedy),
            "time/evaluate_s": took,
            **metrics,
        }
        return row, float(np.mean(row["eval/pass_rate"]))


def drift_bound(config: Config, platform: str) -> float:
    """Largest difference of log-probs, sampler against trainer, without an alarm, nats.

    `logging.drift_nats`, or the rounding to expect: 1e-4 where the model computes in
    float32 on a CPU, else 0.2. Where the draw is ahead of the update they differ by
    that update too, and there is no bound to expect.
    """
    if config.logging.drift_nats is not None:
        return float(config.logging.drift_nats)
    if config.sampling.ahead:
        return float("inf")
    dtype = jnp.dtype(declared_option(config.model, "computes_in", jnp.float32))
    # Accelerators round float32 products to fewer bits.
    return 1e-4 if dtype == jnp.float32 and platform == "cpu" else 0.2


def console() -> Console | None:
    """Console for progress: None, the terminal, on process 0; a quiet one on others."""
    return None if peers.is_first() else Console(quiet=True)
