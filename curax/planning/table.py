"""A plan as text for a terminal, and as JSON values."""

import dataclasses
import math
from collections.abc import Iterator
from typing import Any

from curax.planning.chips import GIB, INSTALL
from curax.planning.estimate import Need
from curax.planning.planner import Layout, Plan, Program, words
from curax.settings.config_types import present
from curax.settings.files import json_value
from curax.settings.tables import aligned

SHOWN = 6  # meshes of those that were tried
KINDS = (  # of what programs do: name, field of `Need`, unit
    ("TFLOP", "flops", 1e12),
    ("MiB received", "received", 2**20),
    ("GiB read", "read", GIB),
    ("GiB written", "written", GIB),
)
NEEDED = "  times what is needed"


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
            told = _compiled(layout, found)
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


def _compiled(one: Layout, found: list[Program]) -> list[str]:
    """Lines of a table of the compiler's report on each program."""
    done = [program.compiled for program in found]
    verdict = {True: "fits", False: "too large", None: "compiled"}
    least = [getattr(one.work.get(p.role), "least", 0.0) for p in found]
    held = [_over(d.temporaries, n) for d, n in zip(done, least, strict=True)]
    rows = [
        ("verdict", [verdict[p.fits] for p in found]),
        ("GiB per chip: in use", [gib(p.total) for p in found]),
        ("  arguments", [gib(d.arguments) for d in done]),
        ("  temporaries", [gib(d.temporaries) for d in done]),
        (NEEDED, held),
        ("  outputs", [gib(d.outputs) for d in done]),
        ("  code", [gib(d.code) for d in done]),
        *(row for kind in KINDS for row in _moves(*kind, one, found)),
        ("  by kernels, at most: read per turn", [gib(d.turn.kernels) for d in done]),
        ("s to trace", [f"{d.lower_s:.1f}" for d in done]),
        ("s to compile", [f"{d.compile_s:.1f}" for d in done]),
    ]
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


def _moves(
    name: str, field: str, unit: float, one: Layout, found: list[Program]
) -> Iterator[tuple[str, list[str]]]:
    """Yield rows of what programs do, in a turn and else, and over what they need."""
    for when, head in (("turn", f"{name}: per turn"), ("call", "  else, per call")):
        did = [getattr(p.compiled.did(when), field) for p in found]
        yield head, [digits(x / unit) for x in did]
        needed = [getattr(_needed(p, one, when), field) for p in found]
        yield NEEDED, [_over(x, y) for x, y in zip(did, needed, strict=True)]


def _needed(program: Program, one: Layout, when: str) -> Need:
    """What a program needs in a turn or else: in all, where no loop ends by data.

    Operations are without attention where kernels do it. What is received is written.
    """
    done, work = program.compiled, one.work.get(program.role)
    if work is None or done.refusal:
        return Need()
    need: Need = getattr(work, when) if done.turn.read else work.total
    kernels = done.turn.kernels + done.call.kernels > 0
    return need.plus(Need(flops=-need.attention * kernels, written=need.received))


def _over(did: float, needed: float) -> str:
    """A ratio in three digits; a dash where one of both is nothing."""
    return digits(did / needed if did and needed else math.nan)


def _counts(done: Any) -> dict[str, str]:
    turn, call = done.traffic.turn.count, done.traffic.call.count
    return {
        kind: f"{turn.get(kind, 0):.0f} + {call.get(kind, 0):.0f}"
        for kind in {*turn, *call}
    }


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
    for name, field, unit in KINDS:
        values = [getattr(work.total, field) / unit for work in works]
        rows.append((name, [digits(value) for value in values]))
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
    size = f"{round(chip.memory_bytes / GIB, 2):g} GiB"
    if plan.best is None:
        tried = len(plan.programs) or len(plan.layouts)
        several = "none of the meshes tried fits" if tried > 1 else "it does not fit"
        return (
            f"On {place.name}, {source}, {several} {size} per chip; "
            "smaller micro-batches, fewer sampling.slots or more chips take less."
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

    found = {
        "topology": plan.topology.name,
        "chips": plan.topology.chips,
        "chip": dataclasses.asdict(plan.topology.chip) if plan.topology.chip else None,
        "sizes": dataclasses.asdict(plan.sizes),
        "best": plan.chosen.mesh if plan.best is not None else None,
        "layouts": [layout(one) for one in plan.layouts],
        "compiled": [
            {"mesh": one.mesh, "programs": list(map(dataclasses.asdict, programs))}
            for one, programs in zip(plan.layouts, plan.programs, strict=False)
        ],
    }
    return json_value(found)
