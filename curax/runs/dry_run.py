"""A dry run: all that precedes the first step, and the memory of its programs."""

from pathlib import Path
from typing import Any

import jax
import numpy as np

from curax.arrays.sharding import placed
from curax.config import Config
from curax.planning import estimate, programs
from curax.planning.programs import Compiled
from curax.processes import peers
from curax.runs import cache, folder, marks, reading, run
from curax.runs.cache import device_bytes
from curax.runs.progress import Progress
from curax.settings.sizes import kept_of
from curax.settings.tables import aligned
from curax.step.loops import Loop, Staged

MIB = 2**20


class Compiler:
    """Visitor of `Loop.rehearse` that compiles each program for the run's devices."""

    def __init__(self, progress: Progress):
        """Nothing is compiled yet; `progress` shows which program is."""
        self.reports: list[Compiled] = []
        self.outputs: dict[str, Any] = {}  # shapes by the name of the program
        self._progress = progress

    def __call__(self, name: str, program: Any, args: tuple[Any, ...]) -> Any:
        """Shapes, dtypes and shardings of the outputs of a jitted function."""
        with self._progress.waiting(f"compiling {name}"):
            report, done = programs.compiled(name, program, args)
        if done is None:
            raise MemoryError(f"{name}: {report.refusal}")
        self.reports.append(report)
        shapes = placed(program.eval_shape(*args), done.output_shardings)
        self.outputs[name] = shapes
        return shapes


def dry_run(config: Config, workdir: Path, *, resume: bool) -> int:
    """Do all that precedes the first step; print the memory that programs need.

    Data and weights are read, workers of the verifier started, and all programs
    compiled for the devices of the run, which finds them compiled. Nothing is drawn and
    nothing is written to the run folder.

    Args:
        config: config of the run.
        workdir: run folder, accepted by `folder.check` if a run is continued; else it
            may hold one, which the last line then says.
        resume: whether the run in the folder is to be continued.

    Returns:
        Exit status: 0, or 1 where a program takes more memory than a device has.

    Raises:
        ConfigError: wrong input.
    """
    since = run.begun(config, workdir, resume=resume)
    loop, _ = run.prepared(config, since)
    if resume:
        peers.on_first(folder.check_questions, workdir, loop.parts.task)
        peers.on_first(folder.check_shapes, workdir, loop)
        if warning := folder.grader_warning(workdir, marks.grader(config)):
            run.say(f"Warning: {warning}")
    with Progress(run.console()) as progress:
        if summary := loop.parts.task.summary:
            progress.say(summary)
        compiler = Compiler(progress)
        with loop.context():
            loaded, held = loop.loaded(), cache.lines(loop)
        loop.rehearse(compiler, loaded)
    most = most_bytes(loop, compiler)
    limit = device_bytes()
    run.say("\n".join([*sizes(loop), *held, "", *table(compiler), ""]))
    verdict = "It fits" if most <= limit else "It does not fit"
    where = f"a new run in {workdir}"
    if since is not None:
        where = f"{workdir}, step {since}"
    if not resume and folder.holds(workdir):
        where = f"{workdir} holds a run, so add --resume or name another --workdir"
    run.say(
        f"{verdict}: at most {mib(most)} of {mib(limit)} MiB of a device. "
        f"Nothing was drawn or written; without --dry-run: {where}."
    )
    return 0 if most <= limit else 1


def most_bytes(loop: Loop, compiler: Compiler) -> float:
    """Bytes of a device while the largest program runs, with what runs beside it."""
    most = max(report.in_use for report in compiler.reports)
    if loop.split:  # one that draws has also what drew before
        own = estimate.state_bytes(compiler.outputs["begin"])["what draws ahead"]
        return max(most, own + max(one.in_use for one in drawing(compiler)))
    return most + beside(loop, compiler)


def beside(loop: Loop, compiler: Compiler) -> float:
    """Bytes of the next step's draw while this one trains: of its largest program.

    0 where no draw runs beside another program of a device.
    """
    aside = loop.parts.config.sampling.ahead and isinstance(loop, Staged)
    if not aside or loop.split or peers.count() > 1:
        return 0.0
    return max(one.temporaries + one.made for one in drawing(compiler))


def drawing(compiler: Compiler) -> list[Compiled]:
    """Reports on the programs that draw the completions of a step."""
    *others, _ = compiler.reports  # the last one is the update
    before = ("initial", "warm start", "begin", "held-out")
    return [one for one in others if not one.name.startswith(before)]


def sizes(loop: Loop) -> list[str]:
    """Lines on the devices of a run, and on the sizes of its steps."""
    config, devices = loop.parts.config, jax.devices()
    mesh = dict(loop.mesh.shape) if loop.mesh else {}
    axes = " x ".join(f"{axis} {size}" for axis, size in mesh.items() if size > 1)
    used = int(np.prod(list(mesh.values()))) if mesh else 1
    drawing = f"; {loop.split.draw.size} more draw ahead" if loop.split else ""
    draw, count = config.sampling, peers.count()
    processes = f", {count} processes" if count > 1 else ""
    seeds = f" {config.seeds} seeds side by side." if config.seeds > 1 else ""
    return [
        f"{used} of {len(devices)} {devices[0].device_kind} devices{processes}"
        f"{f', mesh {axes}' if axes else ''}{drawing}.{seeds}",
        f"A step: {draw.prompts} prompts, {loop.parts.rows} completions of at most "
        f"{draw.max_tokens} tokens, {loop.parts.train_rows} of them trained, at most "
        f"{kept_of(config)} of a prompt.",
        f"{config.steps} steps; {config.evaluation.prompts} held-out prompts every "
        f"{config.evaluation.every} steps.",
    ]


def table(compiler: Compiler) -> list[str]:
    """Lines with the bytes of the state by part, and of each program."""
    state = estimate.state_bytes(compiler.outputs["begin"])
    held = ", ".join(f"{name} {mib(size)}" for name, size in state.items())
    head = ("MiB of a device", "arguments", "outputs", "temporaries", "all", "compiled")
    lines: list[tuple[str, ...]] = [head]
    for one in compiler.reports:
        sizes = one.arguments, one.made, one.temporaries, one.in_use
        took = reading.duration_text(one.lower_s + one.compile_s)
        lines.append((one.name, *map(mib, sizes), took))
    return [
        f"State, MiB of a device: {held}.",
        "",
        *aligned(lines, least=(18, *[11] * (len(head) - 1))),
    ]


def mib(size: float) -> str:
    """Bytes in MiB, three digits; 0 below a hundredth."""
    if size < MIB / 100:
        return "0"
    return f"{size / MIB:,.0f}" if size >= 1000 * MIB else f"{size / MIB:.3g}"
