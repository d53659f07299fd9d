"""A dry run: all that precedes the first step, and the memory of its programs."""

import dataclasses
import time
from pathlib import Path
from typing import Any

import jax
import numpy as np

from curax.arrays.sharding import bytes_on_device
from curax.config import Config, kept_of
from curax.processes import peers
from curax.runs import cache, folder, record, run
from curax.runs.cache import memory_of_device
from curax.runs.progress import Progress
from curax.settings.tables import aligned
from curax.step.loops import Loop

MIB = 2**20
PARTS = ("params", "frozen", "opt_state", "reference", "memory", "methods")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Program:
    """A compiled program; bytes are those of one device."""

    name: str
    seconds: float  # of compiling
    arguments: int
    outputs: int  # without those in the place of arguments
    temporaries: int

    @property
    def total(self) -> int:
        """Bytes on a device while it runs."""
        return self.arguments + self.outputs + self.temporaries


class Compiler:
    """Visitor of `Loop.rehearse` that compiles each program for the run's devices."""

    def __init__(self, progress: Progress):
        """Nothing is compiled yet; `progress` shows which program is."""
        self.programs: list[Program] = []
        self.outputs: dict[str, Any] = {}  # shapes by the name of the program
        self._progress = progress

    def __call__(self, name: str, program: Any, args: tuple[Any, ...]) -> Any:
        """Shapes, dtypes and shardings of the outputs of a jitted function."""
        start = time.perf_counter()
        with self._progress.waiting(f"compiling {name}"):
            done = program.lower(*args).compile()
        sizes = done.memory_analysis()
        self.programs.append(
            Program(
                name=name,
                seconds=time.perf_counter() - start,
                arguments=sizes.argument_size_in_bytes,
                outputs=sizes.output_size_in_bytes - sizes.alias_size_in_bytes,
                temporaries=sizes.temp_size_in_bytes,
            )
        )

        def placed(x: Any, where: Any) -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct(
                x.shape, x.dtype, sharding=where, weak_type=x.weak_type
            )

        shapes = jax.tree.map(placed, program.eval_shape(*args), done.output_shardings)
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
    with Progress(run.console()) as progress:
        if summary := loop.parts.task.summary:
            progress.say(summary)
        compiler = Compiler(progress)
        with loop.context():
            loaded = loop.loaded()
        loop.rehearse(compiler, loaded)
    most = max(program.total for program in compiler.programs)
    limit = memory_of_device()
    held = [line] if (line := cache.line(loop)) else []
    run.say("\n".join([*sizes(loop), *held, "", *table(compiler), ""]))
    verdict = "It fits" if most <= limit else "It does not fit"
    where = f"{workdir}, step {since}" if since else f"a new run in {workdir}"
    if not resume and folder.holds(workdir):
        where = f"{workdir} holds a run, so add --resume or name another --workdir"
    run.say(
        f"{verdict}: at most {mib(most)} of {mib(limit)} MiB of a device. "
        f"Nothing was drawn or written; without --dry-run: {where}."
    )
    return 0 if most <= limit else 1


def sizes(loop: Loop) -> list[str]:
    """Lines on the devices of a run, and on the sizes of its steps."""
    config, devices = loop.parts.config, jax.devices()
    mesh = dict(loop.mesh.shape) if loop.mesh else {}
    axes = " x ".join(f"{axis} {size}" for axis, size in mesh.items() if size > 1)
    used = int(np.prod(list(mesh.values()))) if mesh else 1
    draw, count = config.sampling, peers.count()
    processes = f", {count} processes" if count > 1 else ""
    seeds = f" {config.seeds} seeds side by side." if config.seeds > 1 else ""
    return [
        f"{used} of {len(devices)} {devices[0].device_kind} devices{processes}"
        f"{f', mesh {axes}' if axes else ''}.{seeds}",
        f"A step: {draw.prompts} prompts, {loop.parts.rows} completions of at most "
        f"{draw.max_tokens} tokens, {loop.parts.train_rows} of them trained, at most "
        f"{kept_of(config)} of a prompt.",
        f"{config.steps} steps; {config.evaluation.prompts} held-out prompts every "
        f"{config.evaluation.every} steps.",
    ]


def table(compiler: Compiler) -> list[str]:
    """Lines with the bytes of the state by part, and of each program."""
    state = compiler.outputs["begin"]
    parts = {name: bytes_on_device(getattr(state, name)) for name in PARTS}
    names = {"params": "parameters", "opt_state": "optimizer"}
    held = ", ".join(
        f"{names.get(name, name)} {mib(size)}" for name, size in parts.items() if size
    )
    head = ("MiB of a device", "arguments", "outputs", "temporaries", "all", "compiled")
    lines: list[tuple[str, ...]] = [head]
    for one in compiler.programs:
        sizes = one.arguments, one.outputs, one.temporaries, one.total
        took = record.duration_text(one.seconds)
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
