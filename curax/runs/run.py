"""One run in one folder: what is done before, between and after chunks of steps."""

import contextlib
import logging
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

from curax.config import Config, ConfigError, describe, option
from curax.models import prompt_form
from curax.runs import alarms, checkpoint, folder, memory_io, page, record
from curax.runs.compile_times import CompileTimes
from curax.runs.interrupt import Interrupt
from curax.runs.progress import Progress
from curax.step import build, loops, rehearsal, staged, stages, validation
from curax.step.loops import Warm
from curax.theory import expect
from curax.types import TrainState

CUMULATIVE = ("rollout/tokens", "update/count")
IN_A_ROW = "update/nonfinite_in_a_row"
MISSING_IN_A_ROW = "outcome/missing_in_a_row"
FROZEN = "frozen"  # fingerprint of the parameters that no checkpoint holds
PROGRAMS = {
    "warm": "the supervised update",
    "evaluation": "the held-out sampler",
    "step": "the sampler and the update",
}
OWN = str(Path(__file__).parents[1])


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
    keep_compiled()
    for name in ("absl", "asyncio"):
        # By these orbax tells failed saves at length; the run says them in a sentence.
        logging.getLogger(name).setLevel(logging.CRITICAL)
    since = checkpoint.latest(workdir / folder.CHECKPOINTS) if resume else None
    if resume:
        check_intact(workdir, since, finished=since == config.steps)
    if since == config.steps:
        print(f"Complete at step {since}; to go on, --set a higher steps.")
    else:
        loop = make_loop(config)
        if make_ready := loop.parts.task.start:
            try:
                make_ready()
            except RuntimeError as error:
                raise ConfigError(str(error)) from error
        path, form = option(config.model, "path"), loop.parts.task.prompt_form
        if departs := prompt_form.mismatch(path, form):
            print(f"Warning: {departs}", flush=True)
        # Only a run without a checkpoint has yet to begin.
        recalled = recollection(loop.parts) if since is None else None
        folder.check_questions(workdir, loop.parts.task)
        folder.make(workdir, config)
        folder.note_questions(workdir, loop.parts.task)
        try:
            stopped = Run(loop, workdir, recalled).go()
        except (RunError, checkpoint.NotSavedError) as error:
            print(f"curax.train: {error}", file=sys.stderr)
            return 1
        if stopped is not None:
            print(f"Stopped; to go on: {command}", flush=True)
            return 128 + stopped
        steps = f", the last {config.steps - since} steps" if since else ""
        took = f"{steps} in {record.duration(time.monotonic() - start)}"
    try:
        if took or not (workdir / folder.EXPECTED).exists():
            foretell(config, workdir)
        path, told = page.write(workdir), summary(workdir)
    except record.RecordError as error:
        print(f"curax.train: the run is complete, but {error}", file=sys.stderr)
        return 1
    except OSError as error:
        print(
            f"curax.train: the run is complete, but {workdir}/report.html cannot be "
            f"written ({error.strerror}); mend that and write it with --resume.",
            file=sys.stderr,
        )
        return 1
    print(f"{told}{took}.\nReport: {path}", flush=True)
    return 0


def check_intact(workdir: Path, since: int | None, *, finished: bool) -> None:
    """Refuse a folder whose files are damaged. Writes nothing.

    Raises:
        ConfigError: in a sentence with file and line.
    """
    warm = checkpoint.latest(workdir / folder.WARM_CHECKPOINTS)
    try:
        folder.check_rows(workdir, step=since, warm=warm or 0)
        if finished:
            record.read(workdir)
    except record.RecordError as error:
        raise ConfigError(str(error)) from error


def foretell(config: Config, workdir: Path) -> None:
    """Write what metrics should have been, given the held-out pass rates."""
    told = record.read(workdir)
    if told.before is None or told.after is None:
        return
    # Of a task in files; the options of others say it.
    prompts = record.whole(workdir / folder.QUESTIONS).get("prompts")
    sides = {
        side: expect.expected(config, rates, told.samples, prompts=prompts)
        for side, rates in (("before", told.before), ("after", told.after))
    }
    folder.write_json(workdir / folder.EXPECTED, sides)


def keep_compiled() -> None:
    """Keep compiled programs in the user's cache folder, unless JAX was told where."""
    if jax.config.values["jax_compilation_cache_dir"] is None:
        cache = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser()
        jax.config.update("jax_compilation_cache_dir", str(cache / "curax" / "jax"))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.1)


def make_loop(config: Config, *, rehearse: bool = True) -> loops.Loop:
    """Call and trace all functions of a config, so that what cannot work fails here.

    Args:
        config: of the run.
        rehearse: trace the steps too; False where none is to be made.

    Raises:
        ConfigError: in a sentence, naming the line where it failed.
    """
    with stages.config_errors(config):
        built = build.build(config)
        if rehearse and config.steps:
            rehearsal.check(config)
        from_host = config.staged or not built.task.on_device
        loop = (staged.Staged if from_host else loops.Jitted)(built)
        if rehearse:
            loop.rehearse()
    return loop


def recollection(built: build.Parts) -> memory_io.Recalled | None:
    """What `memory.load` names, read; None where it names nothing.

    Raises:
        ConfigError: it cannot be read.
    """
    path = built.config.memory.load
    return None if path is None else memory_io.read(Path(path), built.task)


def summary(workdir: Path) -> str:
    """What came of the run."""
    told = record.read(workdir)
    rates = list(record.means(told.rows, "eval/pass_rate").values())
    if told.config.get("steps") == 0:  # there was no RL, so nothing to compare with
        rate = f"{rates[-1]:.3f}" if rates else "unknown"
        return (
            f"{alarmed(told)}Held-out pass rate {rate} after {len(told.warm)} "
            "supervised steps"
        )
    change = f"{rates[0]:.3f} -> {rates[-1]:.3f}" if rates else "unknown"
    tokens = record.count(float(np.sum(told.rows[-1].get("rollout/tokens", 0))))
    steps = told.rows[-1]["step"]
    return (
        f"{alarmed(told)}Held-out pass rate {change}: {steps} steps, {tokens} tokens "
        "generated"
    )


def alarmed(told: record.Run) -> str:
    """What a run was warned of, in short; nothing where it was of nothing."""
    brief = [
        f"{alarms.BRIEF.get(row['kind'], row['kind'])} (step {row['step']})"
        for row in told.alarms
    ]
    return f"Complete, but with {', '.join(brief)}. " if brief else ""


class Run:
    """A run, ready to start or to go on from its last checkpoint."""

    def __init__(
        self,
        loop: loops.Loop,
        workdir: Path,
        recalled: memory_io.Recalled | None = None,
    ):
        """Open the checkpoints; nothing else is touched.

        Args:
            loop: that makes the steps.
            workdir: the run folder.
            recalled: memory of another run, for the state of step 0.
        """
        self._loop, self._config = loop, loop.parts.config
        self._recalled = recalled
        self._workdir, keep = workdir, self._config.logging.keep
        self._checkpoints = checkpoint.Checkpoints(
            workdir / folder.CHECKPOINTS, keep=keep
        )
        self._watch = alarms.Watch(
            patience=self._config.update.patience, drift_nats=drift_bound(self._config)
        )
        self._totals: dict[str, Any] = {}
        cache = jax.config.values["jax_compilation_cache_dir"]
        self._times = CompileTimes(
            Path(cache) if cache else None, describe(self._config)
        )
        self._compiled: set[str] = set()  # programs that have run here

    def go(self) -> int | None:
        """Run to the end, or to a signal: its number.

        Raises:
            RunError: it cannot go on.
        """
        with (
            self._told_in_a_sentence(),
            self._loop.context(),
            Progress() as self._progress,
            Interrupt(self._progress.stopping) as self._interrupt,
            contextlib.ExitStack() as self._open,
        ):
            self._open.callback(self._checkpoints.close)
            if told := self._loop.parts.task.told:
                self._progress.say(told)
            found = self._found()
            state = found.state if found else self._start()
            if state is not None:
                done = self._workdir / folder.WARM_CHECKPOINTS
                shutil.rmtree(done, ignore_errors=True)
                self._steps(state, found.step if found else 0)
        return self._interrupt.number

    @contextlib.contextmanager
    def _told_in_a_sentence(self) -> Iterator[None]:
        """What the disk, or a function of the user's, does to a run in a sentence."""
        try:
            yield
        except (
            checkpoint.NotSavedError,
            folder.NotWrittenError,
            validation.FormatError,
            record.RecordError,
        ) as error:
            last = checkpoint.latest(self._workdir / folder.CHECKPOINTS)
            behind = "there is no checkpoint yet, so it will start again"
            if last is not None:
                behind = f"the checkpoint of step {last} is intact"
            if isinstance(error.__context__, folder.RemovedError):
                error = error.__context__  # what was on its way to it failed as well
            if isinstance(error, folder.RemovedError):
                raise RunError(
                    f"{error}, so the run stops; bring it back and go on with "
                    "--resume, or start anew in another --workdir."
                ) from error
            what = str(error).rstrip(".")
            raise RunError(
                f"{what}; mend that and go on with --resume: {behind}."
            ) from error

    def _found(self) -> checkpoint.Found | None:
        """The newest checkpoint that can be read, and the rows up to it."""
        loop = self._loop
        try:
            found = self._checkpoints.newest(
                loops.saved(loop.abstract), loops.saved(loop.sharding)
            )
        except checkpoint.DamagedError as error:
            raise RunError(
                f"no checkpoint can be read, the newest is {error}; bring one back, or "
                "start anew in another --workdir."
            ) from error
        if found:
            for path, reason in found.passed_over.items():
                self._warn(
                    f"the checkpoint of step {path.stem} cannot be read ({reason}), so "
                    f"the run goes on from step {found.step}; it is kept as {path}."
                )
            self._open_files(step=found.step)
            for row in self._files.metrics():
                if row["step"]:  # at that of step 0 a run does not look
                    self._watch.look(row)  # it has said what it has to say of these
            self._totals = found.totals
            found = found._replace(state=self._whole(found.state, found.totals))
        return found

    def _whole(self, state: Any, totals: dict[str, Any]) -> Any:
        """A restored state, with the frozen parameters that no checkpoint holds."""
        state = self._loop.whole(state)
        if totals.get(FROZEN) != _mark(state):
            raise RunError(
                "the parameters that are not trained differ from those the run began "
                f"with; bring back what model.path={option(self._config.model, 'path')}"
                " was, or start anew in another --workdir."
            )
        return state

    def _marks(self, state: Any) -> dict[str, Any]:
        """Of what a checkpoint needs and does not hold."""
        return {FROZEN: _mark(state)}

    def _warn(self, text: str) -> None:
        self._progress.say(f"Warning: {text}")

    def _open_files(self, *, step: int | None, warm: int = 0) -> None:
        """What was written behind the checkpoint is cut off."""
        task, seeds = self._loop.parts.task, self._loop.seeds
        self._files = folder.Files(self._workdir, task, seeds, step=step, warm=warm)
        self._open.callback(self._files.close)

    def _start(self) -> TrainState | None:
        """The state of step 0, evaluated and saved; None: stopped before."""
        warm = self._warm()
        if warm is None:
            return None
        state = self._loop.begin(warm)
        self._totals |= self._marks(state)
        if self._recalled:
            state = memory_io.begun(state, self._recalled.memory)
            self._told_of_unknown(self._recalled)
        evaluated, score = self._evaluated(state, 0)
        self._files.write([{"step": 0, **self._counted({}), **evaluated}])
        self._save(0, state, score)
        self._checkpoints.wait()  # before the checkpoints of the warm start go
        return state

    def _told_of_unknown(self, recalled: memory_io.Recalled) -> None:
        """A file that serves this task in part, or not at all, is no error."""
        if recalled.unknown:
            self._warn(
                f"{recalled.unknown} of the {recalled.lines} prompts in memory.load="
                f"{self._config.memory.load} are not in this task and are left out."
            )

    def _warm(self) -> Warm | None:
        """The warm start, from where it was; None: stopped."""
        loop, log = self._loop, self._config.logging
        if not self._config.warm_start:
            self._open_files(step=None)
            return loop.initial()
        total, there = self._config.warm_start.steps, folder.WARM_CHECKPOINTS
        saved = checkpoint.Checkpoints(self._workdir / there, keep=1)
        with contextlib.closing(saved):
            try:
                found = saved.newest(
                    loops.saved(loop.abstract_warm), loops.saved(loop.warm_sharding)
                )
            except checkpoint.DamagedError as error:
                self._warn(f"{error} cannot be read; the warm start begins again.")
                saved.clear()
                found = None
            done = found.step if found else 0
            begun = found and self._whole(found.state, found.totals)
            state = begun or loop.initial()
            self._open_files(step=None, warm=done)
            self._progress.begin("warm start", done, total, self._compiles("warm"))
            while done < total and self._interrupt.number is None:
                due = (log.every, log.checkpoint_every)
                times = min(*(n - done % n for n in due), total - done)
                with self._timed("warm"):
                    state, losses = loop.warm(state, times)
                self._files.warm.write(
                    {"step": done + i, "warm/loss_nats": loss}
                    for i, loss in enumerate(losses, 1)
                )
                done += times
                self._progress.warm(done, losses[-1])
                stopped = self._interrupt.number is not None
                if stopped or done % log.checkpoint_every == 0:
                    self._files.sync()
                    saved.save(done, loops.saved(state), self._marks(state))
        return None if self._interrupt.number is not None else state

    def _steps(self, state: TrainState, step: int) -> None:
        """Chunks of steps, which end where something is due."""
        config, log = self._config, self._config.logging
        if step < config.steps:
            self._progress.begin("RL", step, config.steps, self._compiles("step"))
        due = (log.every, log.checkpoint_every, config.evaluation.every)
        score: float | None = None
        while step < config.steps and self._interrupt.number is None:
            times = min(*(n - step % n for n in due), config.steps - step)
            with self._timed("step"):
                state, rows, shown = self._loop.advance(state, times)
            rows = [
                {"step": step + i, **row, **self._counted(row)}
                for i, row in enumerate(rows, 1)
            ]
            step += times
            score = None
            if step == config.steps or step % config.evaluation.every == 0:
                evaluated, score = self._evaluated(state, step)
                rows[-1] |= evaluated
            self._files.write(rows, shown)
            self._progress.step(rows)
            diverged = self._looked(rows)
            if step == config.steps:  # before the checkpoint that ends the run
                self._remember(state)
            if diverged or score is not None or step % log.checkpoint_every == 0:
                self._save(step, state, score)
            if diverged:
                raise RunError(diverged)
        self._save(step, state, score)
        if step < config.steps:  # a signal may leave little time: the state goes first
            self._remember(state)

    def _compiles(self, program: str) -> str:
        """What is compiled, and how long that took the last time."""
        last = self._times.last(program)
        took = f" (took {record.duration(last)} the last time)" if last else ""
        return f"compiling {PROGRAMS[program]}{took}"

    @contextlib.contextmanager
    def _timed(self, program: str) -> Iterator[None]:
        """Note how long the first run of a program takes, which compiles it."""
        start = time.monotonic()
        yield
        if program not in self._compiled:
            self._compiled.add(program)
            self._times.note(program, time.monotonic() - start)

    def _remember(self, state: TrainState) -> None:
        """Leave the memory for other runs."""
        path = self._workdir / folder.MEMORY
        memory_io.write(path, self._loop.parts.task, state.memory)

    def _save(self, step: int, state: TrainState, score: float | None) -> None:
        self._files.sync()
        self._checkpoints.save(step, loops.saved(state), self._totals, score=score)

    def _looked(self, rows: list[dict[str, Any]]) -> str | None:
        """Warn of what the rows show; why the run must stop, if it must."""
        patience = self._config.update.patience
        for row in rows:
            for kind, text in self._watch.look(row).items():
                self._warn(text)
                if kind in alarms.BRIEF:
                    self._files.alarm(row["step"], kind, text)
            count = alarms.missing_in_a_row(row, self._totals.get(MISSING_IN_A_ROW, 0))
            self._totals[MISSING_IN_A_ROW] = count.tolist()
            if np.all(count >= patience):
                return (
                    f"the verifier gave no outcome for any completion in the last "
                    f"{patience} steps up to step {row['step']} ({self._reason()}), so "
                    f"the run stops, saved as step {rows[-1]['step']}; mend the "
                    "verifier and go on with --resume."
                )
            allocator = stages.named("allocate", self._config.allocate)
            if broken := alarms.broken(row, allocator):
                return f"{broken}, and start anew in another --workdir."
            count = alarms.in_a_row(row, self._totals.get(IN_A_ROW, 0))
            self._totals[IN_A_ROW] = count.tolist()
            if np.all(count >= patience):
                return (
                    f"{alarms.culprit(row)} at step {row['step']}, as in all of the "
                    f"last {patience} steps, so the run stops; what it had learnt "
                    f"until then is saved as step {rows[-1]['step']}; start anew with "
                    "a lower optimizer.learning_rate."
                )
        return None

    def _counted(self, row: dict[str, Any]) -> dict[str, Any]:
        """Cumulative counts, exact at any size: the device counts single steps."""
        for name in CUMULATIVE:
            new = np.asarray(row.get(name, np.zeros(self._loop.seeds.shape)))
            old = np.asarray(self._totals.get(name, 0), np.int64)
            self._totals[name] = (old + new.astype(np.int64)).tolist()
        return {name: self._totals[name] for name in CUMULATIVE}

    def _reason(self) -> str:
        """Why the verifier gives no outcome, as it mostly says."""
        said = " ".join((self._loop.reason or "they are not finite").split())
        return said.rstrip(".")[:200]

    def _evaluated(self, state: TrainState, step: int) -> tuple[dict[str, Any], float]:
        """What an evaluation adds to the row of a step; the score of its state."""
        start = time.perf_counter()
        with contextlib.ExitStack() as told:
            if "evaluation" not in self._compiled:
                what = self._compiles("evaluation")
                told.enter_context(self._progress.waiting(what))
                told.enter_context(self._timed("evaluation"))
            sampled, greedy, said = self._loop.evaluate(state)
        took = time.perf_counter() - start
        if step == 0 and not (np.isfinite(sampled).any() or np.isfinite(greedy).any()):
            raise RunError(
                "the verifier gave no outcome for any held-out completion "
                f"({self._reason()}), so the run stops before its first step; mend the "
                "verifier and go on with --resume."
            )
        self._files.evaluated(step, sampled, self._config.evaluation.samples)
        self._progress.held_out(sampled)
        row = {
            "eval/pass_rate": _mean(sampled),
            "eval/greedy_pass_rate": _mean(greedy),
            "time/evaluate_s": took,
            **said,
        }
        return row, float(np.mean(row["eval/pass_rate"]))


def drift_bound(config: Config) -> float:
    """Nats that log-probs of sampler and trainer may be apart: their rounding."""
    if config.logging.drift_nats is not None:
        return float(config.logging.drift_nats)
    dtype = jnp.dtype(option(config.model, "dtype", jnp.float32))
    # Elsewhere float32 products are rounded to fewer bits than they have.
    return 1e-4 if dtype == jnp.float32 and jax.default_backend() == "cpu" else 0.2


def _mark(state: Any) -> int | None:
    """A number for the parameters that are not trained; None where all are."""
    return None if state.frozen is None else int(checkpoint.fingerprint(state.frozen))


def _mean(pass_rates: np.ndarray) -> np.ndarray:
    """Over the prompts that have one, `[..., E]`; NaN where none has."""
    known = np.isfinite(pass_rates)
    count = np.where(known.any(-1), known.sum(-1), np.nan)
    return np.where(known, pass_rates, 0.0).sum(-1) / count
