"""python -m curax.train: load a config, build it, choose a loop, run it."""

import argparse
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from curax.config import Config, ConfigError, changes, describe, load, override

DEFAULT = "configs/quickstart.py"


def parser() -> argparse.ArgumentParser:
    """The command line."""
    result = argparse.ArgumentParser(
        prog="python -m curax.train",
        description="Train a policy by reinforcement learning from verifiable rewards.",
        epilog="The run folder gets config.json, metrics.jsonl, rollouts.jsonl, "
        "TensorBoard events, checkpoints, pictures and report.html.",
    )
    result.add_argument(
        "--config",
        default=DEFAULT,
        metavar="FILE",
        help=f"Python file with get_config() (default: {DEFAULT})",
    )
    result.add_argument(
        "--workdir",
        metavar="DIR",
        help="run folder, made by the run (default: runs/NAME for configs/NAME.py)",
    )
    result.add_argument(
        "--set",
        dest="assignments",
        action="extend",
        nargs="+",
        default=[],
        metavar="NAME=VALUE",
        help="change a field or an option of a function, for example steps=400 "
        "sampling.group_size=16 loss.high=0.3 seeds=8",
    )
    result.add_argument(
        "--resume", action="store_true", help="go on with the run in the run folder"
    )
    return result


def main(argv: Sequence[str] | None = None) -> int:
    """Exit status: 0 done, 1 stopped by a failure, 2 bad input, 128 + n by a signal."""
    args = parser().parse_args(argv)
    workdir = Path(args.workdir or Path("runs") / Path(args.config).stem)
    try:
        config = override(load(args.config), args.assignments)
        check_workdir(workdir, config, resume=args.resume)
        return Run(config, workdir, resume=args.resume).go()
    except ConfigError as error:
        print(f"curax.train: {error}", file=sys.stderr)
        return 2
    except RunError as error:
        print(f"curax.train: {error}", file=sys.stderr)
        return 1


class RunError(RuntimeError):
    """The run cannot go on. Its text is one sentence."""


def check_workdir(workdir: Path, config: Config, *, resume: bool) -> None:
    """Refuse a folder that this run may not write to. Writes nothing.

    Raises:
        ConfigError: there is another run, or none to resume, or no permission.
    """
    from curax import folder

    there = workdir / folder.CONFIG
    if workdir.exists() and not workdir.is_dir():
        raise ConfigError(f"--workdir {workdir} is a file; name a folder.")
    parent = next(p for p in (workdir, *workdir.absolute().parents) if p.exists())
    if not os.access(parent, os.W_OK | os.X_OK):
        raise ConfigError(
            f"--workdir {workdir} cannot be written: no permission in {parent}; name "
            "another folder."
        )
    if not resume:
        if there.exists():
            raise ConfigError(
                f"--workdir {workdir} holds a run already; add --resume to go on with "
                "it, or name another folder."
            )
        return
    if not there.exists():
        raise ConfigError(
            f"--workdir {workdir} holds no run to resume; leave --resume out to start "
            "one."
        )
    old, new = folder.read_config(there), describe(config)
    for name, was, now in changes(old, new):
        if name == "steps" and was <= now:
            continue
        rule = "steps may only grow" if name == "steps" else "a run keeps its config"
        raise ConfigError(
            f"--resume: {name}={now} differs from {was} in {there}; {rule}: set {name} "
            "back or name another --workdir."
        )


class Run:
    """One run in one folder: what is done between chunks of steps."""

    def __init__(self, config: Config, workdir: Path, *, resume: bool):
        """Build everything that can fail before anything is written."""
        from curax import checkpoint, folder, loops, pipeline

        self.config, self.workdir, self.resumed = config, workdir, resume
        try:
            parts = pipeline.build(config)
            staged = config.staged or not parts.task.on_device
            self.loop = (loops.Staged if staged else loops.Jitted)(parts)
        except ConfigError:
            raise
        except ValueError as error:
            raise ConfigError(str(error)) from error
        try:
            workdir.mkdir(parents=True, exist_ok=True)
            self.checkpoints = checkpoint.Checkpoints(
                workdir / folder.CHECKPOINTS, keep=config.logging.keep
            )
        except OSError as error:
            raise ConfigError(
                f"--workdir {workdir} cannot be written: {error.strerror}; name "
                "another folder."
            ) from error
        folder.write_json(workdir / folder.CONFIG, describe(config))
        self.totals: dict[str, Any] = {}
        self.stop: int | None = None  # the signal that asked us to stop
        self.folder = folder

    def go(self) -> int:
        """Run to the end, or to a signal; the exit status."""
        from curax import report
        from curax.progress import Progress

        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._on_signal)
        with self.loop.context(), Progress(self.config) as progress:
            state, step = self._restore()
            files = self._open(step)
            if state is None:
                state = self._start(files, progress)
            if state is not None:
                self._steps(state, step or 0, files, progress)
        self.checkpoints.close()
        for file in files.values():
            file.close()
        if self.stop is not None:
            print(f"Stopped; to go on: {self._command()}", flush=True)
            return 128 + self.stop
        page = report.write(self.workdir)
        print(f"Report: {page}", flush=True)
        return 0

    def _restore(self):
        """State and step of the last checkpoint, or None."""
        from curax import checkpoint

        step = self.checkpoints.latest()
        if step is None:
            return None, None
        like = self.loop.abstract
        if self.loop.mesh is not None:
            like = checkpoint.with_sharding(like, self.loop.sharding)
        state, self.totals = self.checkpoints.restore(step, like)
        return state, step

    def _open(self, step: int | None) -> dict[str, Any]:
        f = self.folder
        return {
            f.WARM: f.Rows(
                self.workdir / f.WARM, upto=None if step is None else 1 << 60
            ),
            f.METRICS: f.Rows(self.workdir / f.METRICS, upto=step),
            f.ROLLOUTS: f.Rows(self.workdir / f.ROLLOUTS, upto=step),
            f.EVENTS: f.Events(
                self.workdir / f.EVENTS, upto=-1 if step is None else step
            ),
        }

    def _start(self, files, progress):
        """Parameters, warm start, first evaluation: the state of step 0, saved."""
        config, loop = self.config, self.loop
        state, done = loop.initial(), 0
        total = config.warm_start.steps if config.warm_start else 0
        while done < total:
            times = min(config.logging.every, total - done)
            state, losses = loop.warm(state, times)
            rows = [
                {"step": done + i + 1, "warm/loss_nats": loss}
                for i, loss in enumerate(losses)
            ]
            files[self.folder.WARM].write(rows)
            done += times
            progress.warm(done, total, losses[-1])
            if self.stop is not None:
                return None
        state = loop.begin(state)
        row = {"step": 0, **self._counted({}), **self._evaluate(state, 0)}
        self._write(files, [row], [])
        progress.step(row)
        self.checkpoints.save(0, state, self.totals)
        return state

    def _steps(self, state, step, files, progress) -> None:
        config = self.config
        stops = (
            config.logging.every,
            config.logging.checkpoint_every,
            config.evaluation.every,
        )
        while step < config.steps and self.stop is None:
            times = min(*(n - step % n for n in stops), config.steps - step)
            state, rows, shown = self.loop.advance(state, times)
            for i, row in enumerate(rows):
                rows[i] = {"step": step + i + 1, **row, **self._counted(row)}
            step += times
            last = step == config.steps
            if last or step % config.evaluation.every == 0:
                rows[-1] |= self._evaluate(state, step)
            self._write(files, rows, shown)
            progress.step(rows[-1], rows)
            self._check_finite(rows)
            if last or step % config.logging.checkpoint_every == 0 or self.stop:
                self.checkpoints.save(step, state, self.totals)
        if self.stop is not None and step != self.checkpoints.latest():
            self.checkpoints.save(step, state, self.totals)

    def _counted(self, row: dict[str, Any]) -> dict[str, Any]:
        """Cumulative counts, exact at any size: the device counts single steps."""
        import numpy as np

        zero = np.zeros(self.loop.seeds.shape)
        for name in ("rollout/tokens", "update/count"):
            new = np.asarray(row.get(name, zero)).astype(np.int64)
            old = np.asarray(self.totals.get(name, zero)).astype(np.int64)
            self.totals[name] = (old + new).tolist()
        return dict(self.totals)

    def _evaluate(self, state, step: int) -> dict[str, Any]:
        import json
        import time

        start = time.perf_counter()
        sampled, greedy = self.loop.evaluate(state)
        took = time.perf_counter() - start
        path = self.workdir / self.folder.EVALUATION
        known = json.loads(path.read_text()) if step and path.exists() else {}
        samples = self.config.evaluation.samples
        now = {"step": step, "samples": samples, "pass_rates": sampled.round(6)}
        if step in (0, self.config.steps):
            known["after" if step else "before"] = now
            self.folder.write_json(path, known)
        return {
            "eval/pass_rate": sampled.mean(-1),
            "eval/greedy_pass_rate": greedy.mean(-1),
            "time/evaluate_s": took,
        }

    def _write(self, files, rows, shown) -> None:
        f = self.folder
        files[f.ROLLOUTS].write(
            line
            for row, some in zip(rows, shown, strict=False)
            for line in f.completions(
                row["step"], some, self.loop.parts.task, self.loop.seeds
            )
        )
        files[f.METRICS].write(rows)
        files[f.EVENTS].write(rows)

    def _check_finite(self, rows) -> None:
        import numpy as np

        for row in rows:
            for name in ("loss/mean", "gradient/norm"):
                if not np.all(np.isfinite(row[name])):
                    raise RunError(
                        f"{name} is {row[name]} at step {row['step']}; the run stops; "
                        "lower optimizer.learning_rate and start anew. The last good "
                        f"checkpoint is that of step {self.checkpoints.latest()}."
                    )

    def _on_signal(self, number, frame) -> None:
        if self.stop is not None:  # the second time, at once
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
        self.stop = number
        print(
            "Stopping after this chunk of steps; once more to stop at once.", flush=True
        )

    def _command(self) -> str:
        return f"add --resume to the same command (run folder {self.workdir})"


if __name__ == "__main__":
    sys.exit(main())
