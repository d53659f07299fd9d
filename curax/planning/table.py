"""A plan as text for a terminal, and as JSON values."""

import dataclasses
import math
from typing import Any

from curax.planning.chips import GIB, INSTALL
from curax.planning.planner import Layout, Plan, Program, words
from curax.settings.config_types import present
from curax.settings.tables import aligned

SHOWN = 6  # meshes of those that were tried


def table(name: str, plan: Plan, *, compiler: bool) -> str:
    """The plan as lines of text.

    Args:
        name: of the config.
        plan: the plan.
        compiler: whether there is one for the topology.
    """
    place, one = plan.topology, plan.chosen
    lines = [
        f"{name} on {place.name}, {place.chips} chips: {words(one.mesh)}",
        _sizes(plan),
        "",
        *_layouts(plan),
    ]
    if plan.programs:
        for layout, found in zip(plan.layouts, plan.programs, strict=False):
            told = _compiled(plan, layout, found)
            lines += [f"Compiled for {words(layout.mesh)}", *told, ""]
    lines += ["Estimated from shapes", *_estimated(plan, one), ""]
    lines.append(_verdict(plan))
    if place.chip:
        lines.append(_assumptions(plan))
    if not compiler:
        lines.append(INSTALL[0].upper() + INSTALL[1:])
    return "\n".join(lines)


def _sizes(plan: Plan) -> str:
    s = plan.sizes
    return (
        f"{s.layers} layers of width {s.width}, vocabulary {s.vocab}; {s.rows} rows in "
        f"{s.slots} slots, {s.contexts} contexts of {s.prompt} + {s.steps} tokens, "
        f"{s.trained} rows trained."
    )


def _layouts(plan: Plan) -> list[str]:
    """Lines of a table of the meshes that were tried, the best first."""
    if len(plan.layouts) == 1:
        return []
    rows = [["data", "fsdp", "tensor", "draw GiB", "learn GiB", "step s", ""]]
    for one in plan.layouts[:SHOWN]:
        took = f"{one.seconds:.3g}" if one.seconds else "-"
        note = {True: "", None: "may fit", False: "too large"}[one.fits]
        note = note if plan.topology.chip else ""
        sizes = (gib(one.total(role)) for role in ("draw", "learn"))
        rows.append([*map(str, one.mesh.values()), *sizes, took, note])
    more = len(plan.layouts) - SHOWN
    said = [f"and {more} more"] if more > 0 else []
    return [*aligned(rows, left=(6,)), *said, ""]


def gib(size: float) -> str:
    """Bytes in GiB, three digits."""
    return digits(size / GIB)


def _columns(head: list[str], rows: list[tuple[str, list[str]]]) -> list[str]:
    cells = [["", *head], *([name, *values] for name, values in rows)]
    return [f"  {line}" for line in aligned(cells, least=(34, *[11] * len(head)))]


def _compiled(plan: Plan, one: Layout, found: list[Program]) -> list[str]:
    """Lines of a table of the compiler's report on each program."""
    done = [program.compiled for program in found]
    verdict = {True: "fits", False: "too large", None: "compiled"}
    rows = [
        ("verdict", [verdict[p.fits] for p in found]),
        ("GiB per chip: in use", [gib(p.total) for p in found]),
        ("  arguments", [gib(d.arguments) for d in done]),
        ("  temporaries", [gib(d.temporaries) for d in done]),
        ("  outputs", [gib(d.outputs) for d in done]),
        ("  code", [gib(d.code) for d in done]),
        ("MiB received: per turn", [mib(d.traffic.turn.total) for d in done]),
        ("  else, per call", [mib(d.traffic.call.total) for d in done]),
        ("  of all turns", [mib(p.received) for p in found]),
        ("  times what is estimated", [_times_received(p, one) for p in found]),
        ("GiB read: per turn", [gib(d.turn.read) for d in done]),
        ("  by kernels, at most", [gib(d.turn.kernels) for d in done]),
        ("  times what is needed", [_times(p, one, "turn") for p in found]),
        ("  else, per call", [gib(d.call.read) for d in done]),
        ("  times what is needed", [_times(p, one, "call") for p in found]),
        ("GiB written: per turn", [gib(d.turn.written) for d in done]),
        ("  else, per call", [gib(d.call.written) for d in done]),
        ("s to trace", [f"{d.lower_s:.1f}" for d in done]),
        ("s to compile", [f"{d.compile_s:.1f}" for d in done]),
    ]
    for resource in ("arithmetic", "memory", "links"):
        if plan.topology.chip:
            known = [p.seconds.get(resource, math.nan) for p in found]
            times = [digits(seconds) for seconds in known]
            rows.append((f"s at least, {resource}", times))
    for kind in sorted({kind for d in done for kind in _counts(d)}):
        each = [_counts(d).get(kind, "0") for d in done]
        rows.append((f"  {kind}s, per turn + call", each))
    lines = _columns([d.name for d in done], rows)
    for done in (program.compiled for program in found):
        if done.refusal:
            lines.append(f"  {done.name}: {done.refusal}")
        for when, moved in (("turn", done.turn), ("call", done.call)):
            if moved.worst:
                lines.append(f"  {done.name} moves most per {when}, GiB:")
            for size, array, source in moved.worst:
                lines.append(f"    {gib(size):>6} {array:28} {source}".rstrip())
    return lines


def _times(program: Program, one: Layout, when: str) -> str:
    """Bytes read over those that have to be: in a turn, or by an update in all."""
    work, done = one.work.get(program.role), program.compiled
    if work is None or done.refusal:
        return "-"
    if when == "turn":
        return digits(done.turn.read / work.turn_read if work.turn_read else math.nan)
    whole = not work.turn_read and work.read
    read = done.call.read + work.turns * done.turn.read
    return digits(read / whole if whole else math.nan)


def _times_received(program: Program, one: Layout) -> str:
    """Bytes received over those that the layout has to move, by the estimate."""
    work = one.work.get(program.role)
    moved = None if program.compiled.refusal else program.received
    if moved is None or work is None or not work.received:
        return "-"
    return digits(moved / work.received)


def _counts(done: Any) -> dict[str, str]:
    turn, call = done.traffic.turn.count, done.traffic.call.count
    return {
        kind: f"{turn.get(kind, 0):.0f} + {call.get(kind, 0):.0f}"
        for kind in {*turn, *call}
    }


def mib(size: float | None) -> str:
    """Bytes in MiB, three digits."""
    return digits(math.nan if size is None else size / 2**20)


def digits(value: float) -> str:
    """A number in three digits; a dash where it is not known."""
    return "-" if math.isnan(value) else f"{value:.3g}"


def _estimated(plan: Plan, one: Layout) -> list[str]:
    """Lines of a table of each program's memory, work and time, from shapes."""
    roles = list(one.work)
    rows = [("GiB per chip: in use", [gib(one.total(role)) for role in roles])]
    memory = [one.held(role) | one.work[role].memory for role in roles]
    for name in dict.fromkeys(name for parts in memory for name in parts):
        texts = [gib(parts.get(name, math.nan)) for parts in memory]
        rows.append((f"  {name}", texts))
    works = [one.work[role] for role in roles]
    rows += [
        ("TFLOP per chip", [f"{w.flops / 1e12:.3g}" for w in works]),
        ("GiB read", [gib(w.read) for w in works]),
        ("GiB received", [gib(w.received) for w in works]),
    ]
    if chip := plan.topology.chip:
        for resource in ("arithmetic", "memory", "links"):
            times = [f"{w.seconds(chip)[resource]:.3g}" for w in works]
            rows.append((f"s at least, {resource}", times))
    return _columns(roles, rows)


def _verdict(plan: Plan) -> str:
    """The verdict as a sentence."""
    place, chip = plan.topology, plan.topology.chip
    source = "compiled" if plan.programs else "by an estimate"
    if chip is None:
        return "No limit is known for a CPU: nothing is said about whether it fits."
    size = f"{chip.memory_bytes / GIB:.0f} GiB"
    if plan.best is None:
        tried = len(plan.programs) or len(plan.layouts)
        several = "none of the meshes tried fits" if tried > 1 else "it does not fit"
        return (
            f"On {place.name}, {source}, {several} {size} per chip; more "
            "update.micro_batches, fewer sampling.slots or more chips take less."
        )
    fits = "fits" if plan.programs or plan.chosen.fits else "may fit"
    return f"{words(plan.chosen.mesh)} {fits} {size} per chip, {source}."


def _assumptions(plan: Plan) -> str:
    chip = present(plan.topology.chip)
    return (
        f"Times are lower bounds: {chip.flops_per_s / 1e12:.0f} TFLOP/s in bfloat16, "
        f"{chip.bytes_per_s / 1e9:.0f} GB/s of memory, "
        f"{chip.link_bytes_per_s / 1e9:.0f} GB/s into a chip over all links; all "
        "completions as long as they may be."
    )


def page(plan: Plan) -> dict[str, Any]:
    """The plan as JSON values; bytes are those of one chip."""

    def layout(one: Layout) -> dict[str, Any]:
        every = dataclasses.asdict(one)
        return every | {"total": {role: one.total(role) for role in one.work}}

    def program(one: Program) -> dict[str, Any]:
        every = dataclasses.asdict(one)
        if math.isnan(one.total):
            every["total"] = None
        return every

    return {
        "topology": plan.topology.name,
        "chips": plan.topology.chips,
        "chip": dataclasses.asdict(plan.topology.chip) if plan.topology.chip else None,
        "sizes": dataclasses.asdict(plan.sizes),
        "best": plan.chosen.mesh if plan.best is not None else None,
        "layouts": [layout(one) for one in plan.layouts],
        "compiled": [
            {"mesh": one.mesh, "programs": [program(p) for p in found]}
            for one, found in zip(plan.layouts, plan.programs, strict=False)
        ],
    }
