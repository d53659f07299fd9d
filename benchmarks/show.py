"""python -m benchmarks.show: README.md and pictures, from the results alone.

Whatever has a figure is computed here from the JSON files. A ratio to a peer is one of
medians, and where a peer was measured in several settings, to its fastest.
"""

# ruff: noqa: RUF001 (a multiplication sign and a dash are meant)

import argparse
import json
import re
import statistics
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from benchmarks.limits import Limits, decoded_bytes, forward_flops
from benchmarks.machine import QUIET
from benchmarks.scaling import MEMORY, MODEL, STEPS
from benchmarks.workload import WORKLOADS
from curax.settings.tables import markdown

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Results = dict[str, Any]
table = partial(markdown, padded=True)  # so that it reads in a terminal too
HERE = Path(__file__).parent
# Results beside the peers, by whether the processor has AVX-512.
PEERS = {True: "peers.json", False: "peers_without_avx512.json"}
PICTURED = ("nano", "small", "unequal", "long")


# ----- numbers


class Median(NamedTuple):
    """Median of repeated measurements, the undisturbed ones if there are any."""

    value: float
    of: int
    quiet: bool

    def __str__(self) -> str:
        """With a dagger where all were disturbed."""
        digits = 0 if self.value >= 100 else 1 if self.value >= 10 else 2
        return f"{self.value:.{digits}f}{'' if self.quiet else '†'}"


def median(many: Sequence[Results], *names: str) -> Median | None:
    """Of the values under the names, added up; None where nothing was measured."""
    quiet = [one for one in many if not one["disturbed"]]
    used = quiet or many
    if not used:
        return None
    value = statistics.median(sum(one[name] for name in names) for one in used)
    return Median(value, len(used), bool(quiet))


def rounds(found: Results) -> list[Results]:
    """A system's iterations, less those that still settled."""
    return [one for one in found["iterations"] if one["round"]]


def first(found: Results, *names: str) -> Median | None:
    """Median over the starts of a system, of its first iteration or of its import."""
    return median([start | start["first"] for start in found["starts"]], *names)


def peak(found: Results) -> float | None:
    """The most memory a system held in any iteration, MiB."""
    every = [one["peak_rss_mib"] for one in found["iterations"]]
    return max(every) if every else None


def fastest(results: Results, work: str, name: str) -> Results | None:
    """A system on a workload, in the fastest of its settings, or in the one named."""
    settings = [
        (taken.value, found)
        for system, found in results.get(work, {}).get("found", {}).items()
        if name in (system, system.partition(":")[0])
        if (taken := median(rounds(found), "iteration_s"))
    ]
    return min(settings, key=lambda pair: pair[0])[1] if settings else None


# ----- targets


class Measured(NamedTuple):
    """A value, and whether all it was computed from was undisturbed."""

    value: float
    quiet: bool


class Target(NamedTuple):
    """A sentence, its limit and unit, and what was measured."""

    name: str
    limit: float
    unit: str
    measured: Callable[[Results], Measured | None]

    def row(self, *results: Results) -> tuple[str, ...]:
        """For the table: name, target, and what was measured on each machine."""
        target = f"at most {self.limit:g}{self.unit}"
        return self.name, target, *map(self.reached, results)

    def reached(self, results: Results) -> str:
        """What was measured, and whether that is within the limit."""
        one = self.measured(results)
        if one is None:
            return "not measured"
        if not one.quiet:
            return f"{one.value:.3g}{self.unit} †, undecided"
        which = "reached" if one.value <= self.limit else "missed"
        return f"{one.value:.3g}{self.unit}, {which}"


def _ratio(
    work: str, peer: str, quantity: Callable[[Results], Measured | None]
) -> Callable[[Results], Measured | None]:
    """Measures curax over a peer."""

    def measured(results: Results) -> Measured | None:
        ours, theirs = fastest(results, work, "curax"), fastest(results, work, peer)
        if not (ours and theirs):
            return None
        a, b = quantity(ours), quantity(theirs)
        return Measured(a.value / b.value, a.quiet and b.quiet) if a and b else None

    return measured


def _iteration(found: Results) -> Measured | None:
    return _measured(median(rounds(found), "iteration_s"))


def _first(found: Results) -> Measured | None:
    return _measured(first(found, "iteration_s"))


def _peak(found: Results) -> Measured | None:
    held = peak(found)
    return Measured(held, True) if held else None  # memory does not mind others


def _help(results: Results) -> Measured | None:
    taken = results.get("start", {}).get("found", {}).get("help", [])
    return _measured(median(taken, "seconds"))


def _quickstart(results: Results) -> Measured | None:
    pairs = results.get("start", {}).get("found", {}).get("quickstart", [])
    return _measured(median([pair["warm"] for pair in pairs], "steps_s"))


def _measured(one: Median | None) -> Measured | None:
    return one and Measured(one.value, one.quiet)


def _rollout(found: Results) -> Measured | None:
    """Seconds of a token that was drawn: lengths come out of each sampler."""
    done = rounds(found)
    taken = median(done, "rollout_s")
    if taken is None:
        return None
    drawn = statistics.mean(one["mean_length"] * one["rows"] for one in done)
    return Measured(taken.value / drawn, taken.quiet)


def _growth(results: Results) -> Measured | None:
    """Seconds of a token among 1,024, over those of one among 64."""
    points = {p["x"]: p for p in results.get("length", {}).get("points", [])}
    if not {64, 1024} <= points.keys():
        return None
    each = [
        (points[length]["rollout_s"] + points[length]["update_s"]) / length
        for length in (1024, 64)
    ]
    quiet = not any(points[length]["disturbed"] for length in (1024, 64))
    return Measured(each[0] / each[1], quiet)


def _against(
    work: str, peer: str, limit: float, what: str = "iteration", of: str = ""
) -> Target:
    """curax at most so many times a peer."""
    kinds = {"iteration": _iteration, "first iteration": _first}
    kinds |= {"peak memory": _peak, "decoding, a token": _rollout}
    name = f"{work}, {what} against {of or peer.partition(':')[0]}"
    return Target(name, limit, " ×", _ratio(work, peer, kinds[what]))


TARGETS = (
    _against("nano", "tunix", 0.4),
    _against("nano", "trl", 0.5),
    _against("nano", "plain", 1.0),
    _against("unequal", "tunix", 0.35),
    _against("small", "tunix", 0.6),
    _against("long", "tunix", 0.15, "decoding, a token"),
    _against("long", "tunix", 0.5, "peak memory"),
    _against("long", "trl", 0.5, "peak memory"),
    _against("nano", "tunix:1", 0.3, "peak memory", "tunix in one batch"),
    _against("nano", "tunix", 0.3, "peak memory", "tunix at its fastest"),
    _against("small", "tunix", 0.3, "peak memory"),
    _against("nano", "tunix", 0.6, "first iteration"),
    Target("growth: a token among 1,024 against one among 64", 1.5, " ×", _growth),
    Target("curax.train --help", 1.0, " s", _help),
    Target("quickstart, first steps shown, warm cache", 10.0, " s", _quickstart),
)


# ----- text


def title(system: str) -> str:
    """Words for a system and its settings: `curax@2` is curax on two devices."""
    system, _, micro_batches = system.partition(":")
    name, _, devices = system.partition("@")
    name += f", {devices} devices of the processor" if devices else ""
    return name + (f", micro-batches: {micro_batches}" if micro_batches else "")


def of_workload(results: Results, work: str) -> str:
    """The table of one workload; below it, what failed."""
    head = (
        *("system", "rollout s", "update s", "iteration s (n)", "curax takes"),
        *("of the machine", "CPU-s", "first iteration s", "import s", "peak MiB"),
        "tokens per row (cv)",
    )
    ours, rows, notes = fastest(results, work, "curax"), [], []
    own = _iteration(ours) if ours else None
    for system, found in results[work]["found"].items():
        if found["failure"]:
            notes.append(found["failure"])
        done = rounds(found)
        taken = median(done, "iteration_s")
        if not taken:
            continue
        length = statistics.mean(one["mean_length"] for one in done)
        cv = statistics.mean(one["cv_length"] for one in done)
        rows.append(
            (
                title(system),
                str(median(done, "rollout_s")),
                str(median(done, "update_s")),
                f"{taken} ({taken.of})",
                f"{own.value / taken.value:.2f} ×" + "†" * (not taken.quiet)
                if own
                else "–",
                shares(work, results[work].get("limits"), done),
                str(median(done, "cpu_rollout_s", "cpu_update_s")),
                str(first(found, "iteration_s")),
                str(first(found, "import_s")),
                f"{peak(found):.0f}",
                f"{length:.1f} ({cv:.2f})",
            )
        )
    return "\n\n".join([table(head, rows) if rows else "Nothing was measured.", *notes])


def shares(name: str, most: Results | None, done: Sequence[Results]) -> str:
    """Least seconds that the machine allows over those taken: rollout, update."""
    if most is None:
        return "–"
    work, limits = WORKLOADS[name], Limits(**most)
    tokens = work.rows * statistics.mean(one["mean_length"] for one in done)
    forward = forward_flops(work, tokens)
    least = {
        "rollout_s": limits.seconds(size=decoded_bytes(work, tokens, 4), flops=forward),
        "update_s": limits.seconds(size=0, flops=3 * forward),
    }
    taken = {stage: median(done, stage) for stage in least}
    return ", ".join(f"{least[stage] / t.value:.2f}" for stage, t in taken.items() if t)


def tables(results: Results) -> str:
    """All that was measured beside the peers, and the targets."""
    parts = [f"{work}\n\n{of_workload(results, work)}" for work in _works(results)]
    parts.append(
        table(
            ("", "target", "measured"),
            [target.row(results) for target in TARGETS],
        )
    )
    return "\n\n".join(parts)


def _works(results: Results) -> list[str]:
    return [work for work in WORKLOADS if work in results]


def shapes(results: Results) -> Iterator[str]:
    """A line per workload: its model and its rows."""
    for name in _works(results):
        work = WORKLOADS[name]
        ends = f", ended by {len(work.ends)} of the tokens" if work.ends else ""
        yield (
            f"- **{name}**: {work.layers} layers, width {work.width}, MLP "
            f"{work.mlp_width}, vocabulary {work.vocab_size}, "
            f"{results[name]['parameters'] / 1e6:.1f} M parameters; {work.prompts} × "
            f"{work.group_size} = {work.rows} rows behind prompts of "
            f"{work.prompt_tokens} tokens, on {work.slots} slots, at most "
            f"{work.max_tokens} tokens each{ends}."
        )


def waits(results: Results) -> str:
    """How long a user waits."""
    if "start" not in results:
        return "Not measured."
    found = results["start"]["found"]
    rows = [("`curax.train --help`", str(median(found["help"], "seconds")))]
    for cache in ("cold", "warm"):
        pairs = [pair[cache] for pair in found["quickstart"]]
        for name, what in (("line_s", "first line"), ("steps_s", "first steps done")):
            rows.append(
                (f"quickstart, {cache} cache: {what}", str(median(pairs, name)))
            )
    return table(("from the start of the process", "s"), rows)


def provenance(results: Results) -> str:
    """Where, when and from what commit each part was measured."""
    rows = []
    for part, about in results.items():
        own = about["machine"]
        machine = (
            f"{own['cores']} cores, {own['cpu']} with{'out' * (not own['avx512'])} "
            f"AVX-512, {own['memory_gib']} GiB, "
            f"Python {own['python']}"
        )
        command = f"`{about['command']}`"
        rows.append((part, about["date"], about["commit"], machine, command))
    return table(("part", "date", "commit", "machine", "command"), rows)


def versions(results: Results) -> str:
    """The versions of the libraries that systems said they use."""
    said: dict[str, dict[str, str]] = {}
    for work in _works(results):
        for system, found in results[work]["found"].items():
            for begun in found["starts"]:
                said[re.split("[:@]", system)[0]] = begun["versions"]
    return "; ".join(
        f"{system}: " + ", ".join(f"{name} {number}" for name, number in own.items())
        for system, own in said.items()
    )


GROWTH = {
    "rows": "rows, of 16 prompts",
    "length": "tokens per completion, of 32 rows",
    "prompts": "prompts, of 4 rows each",
}


def scaling(results: Results) -> str:
    """The tables of how costs grow."""
    parts = []
    for axis, what in GROWTH.items():
        if axis in results:
            rows = [
                (
                    str(point["x"]),
                    *_cells(point, "rollout_s", "update_s", "first_s", "peak_rss_mib"),
                )
                for point in results[axis]["points"]
            ]
            head = (what, "rollout s", "update s", "first iteration s", "peak MiB")
            parts.append(table(head, rows))
    if "vocabulary" in results:
        rows = [
            (
                str(point["x"]),
                str(point["chunk"] or "all"),
                *_cells(point, "planned_mib", "before_mib", "peak_rss_mib", "update_s"),
            )
            for point in results["vocabulary"]["points"]
        ]
        head = ("vocabulary", "at a time", "planned MiB", "peak MiB before")
        parts.append(table((*head, "peak MiB", "update s"), rows))
    if "stages" in results:
        (point,) = results["stages"]["points"]
        rows = [
            (name, f"{now:.0f}", f"+{now - before:.0f}")
            for (name, now), (_, before) in zip(
                point["stages"], [("", 0.0), *point["stages"]], strict=False
            )
        ]
        head = ("nano, peak of the process after", "MiB", "more")
        parts.append(table(head, rows))
    if "seeds" in results:
        done = [p for p in results["seeds"]["points"] if "run_s" in p]
        rows = [
            (
                str(point["x"]),
                *_cells(point, "run_s"),
                f"{point['run_s'] / done[0]['run_s']:.2f} ×",
            )
            for point in done
        ]
        parts.append(table(("seeds side by side", "s", "against one"), rows))
    return "\n\n".join(parts) or "Not measured."


def _cells(point: Results, *names: str) -> list[str]:
    """Values of a point, or what failed in the place of the first that is missing."""
    cells = []
    for name in names:
        value = point.get(name)
        if value is None:
            cells.append(point.pop("failure", "–") if "failure" in point else "–")
        else:
            # Others take time from a measurement, but no memory.
            quiet = not (point["disturbed"] and name.endswith("_s"))
            cells.append(str(Median(value, 1, quiet)))
    return cells


README = """\
# Benchmarks

What curax costs, beside two public trainers that do the same work on a CPU and beside a
plain sampler and update in JAX that were written for these shapes, and how its cost
grows. This page is written by `python -m benchmarks.show` from the files in
`results/`; no figure on it is typed by hand.

## Targets

{targets}

Against a peer: the median time of curax over that of the peer's fastest setting that
was measured.

![Seconds of an iteration, system by system](peers.png)

## Beside the peers

One iteration is a rollout and one GRPO update: a random decoder of the Qwen3 family
in float32, a group of completions for each prompt, temperature 1, AdamW, no KL term, a
reward that costs nothing.

{shapes}

{workloads}

{without}

† All iterations were disturbed: others took more than {quiet} of a core, and no target
is decided on them. CPU-s are processor seconds of an iteration, rollout and update
together. "Of the machine" is the least time that it allows for rollout and for update,
by the bandwidth and the matrix products measured in the same run, over the time taken;
older tables lack it. The first iteration builds the model and compiles everything, in a
fresh process with empty caches; it comes on top of the import. "curax takes" is the
time of curax over that of the row.

Versions: {versions}.

## How long a user waits

{waits}

The first line comes before anything is compiled; the target is about the first steps.

## How the cost grows

{scaling}

![How the cost of curax grows](scaling.png)

The model here is smaller than nano: {model}. Rows above {slots} share that many
slots.
"Planned" is what the compiler reserves for an update over {memory_rows} rows at once,
arguments included; the peak is that of the whole process, which the compiler has a
large part in: the table of stages shows which. Seeds are those of the quickstart,
shortened to {steps} steps of warm start and {steps} of RL.

## A real shape

Steps of a random policy of the shape of Qwen3-0.6B with its vocabulary of 151,936,
scanned over its layers, with remat and the vocabulary in chunks: no array of rows by
tokens by vocabulary exists. Floors are of the same process: how fast a large array is
read and how fast large matrices are multiplied.

{real}

## On a GPU

The same in bfloat16, of both sizes, beside trl, by one command:
`python -m benchmarks.gpu`.

{gpu}

## How many completions are judged in a second

The mix is as a run on GSM8K and MATH would ask for: of the prompts 70 % have a number
for an answer, 15 % a fraction or the like, 10 % need algebra, 5 % no claim at all;
groups of eight, half of them right.

{verifier}

## What a draw one step ahead saves

`nano`, with a verifier that sleeps as one that waits for a sandbox does. Draw and
update share the two cores, which neither fills alone. Hidden: of the seconds of drawing
and verifying, the share that a step did not wait for. Idle: of the seconds of a step,
those beyond a draw and an update, one after the other.

{ahead}

With two devices of the processor: all of it by both, and on halves, where one draws
while the other trains (`mesh.draw_share=.5`). Halves gain nothing over sharing here.

{halves}

## What it costs to decide who gets how many

Milliseconds to turn what is known of prompts into counts whose sum is the budget,
compiled, on a CPU:

{allocation}

## What score norms cost

On `nano`, all rows of a step, in rollouts; a pilot has fewer rows:

{norms}

## How to run it

    python -m benchmarks.peers --setup
    python -m benchmarks.peers
    python -m benchmarks.scaling
    python -m benchmarks.allocation
    python -m benchmarks.score_norm
    python -m benchmarks.qwen3
    python -m benchmarks.gpu
    python -m benchmarks.verifier
    python -m benchmarks.ahead
    python -m benchmarks.ahead --halves
    python -m benchmarks.show

From the root of the repository, with Linux and a quiet machine; `--help` lists the
options. The first command makes an environment per peer in `.venv-peers`; pip must
be told of an index with torch's CPU wheels, or it takes the build for GPUs. Every
system runs in a process of its own, one at a time while the others wait. An iteration
during which others took more than {quiet} of a core is marked, and repeated.

{provenance}

## Limits

- A CPU and small random models: nothing here says how any of them does on a GPU or TPU.
- The update is whatever is not the rollout: rewards and bookkeeping are in it.
- Each system has the micro-batches of gradients that were found fastest for it on nano;
  a peer's other settings are its defaults, but for gradient checkpointing and bf16,
  which TRL switches on and which slow a CPU down. Completions of 256 tokens and more
  that end by themselves curax packs, 1,024 tokens to a micro-batch. It has LLVM compile
  with effort 1 from 2026-11-30 on; tunix and plain have XLA's own, 3.
- Neither peer refills slots on a CPU in the settings used here, so where completions
  end by themselves each samples its rows in batches of the slots, as long as their
  longest row. `plain` samples all rows at once, to the end.
- Where completions end by themselves, lengths come out of each system's own sampler;
  their mean and coefficient of variation are in the table.
- Processor seconds are no neutral measure: threads that wait may spin.
"""


def of_allocation(results: Results) -> str:
    """Milliseconds per allocator and number of prompts."""
    if not results:
        return "Not measured."
    points = results["points"]
    sizes = sorted({point["prompts"] for point in points})
    took = {(point["allocator"], point["prompts"]): point for point in points}
    rows = [
        (
            name,
            *(
                f"{took[name, size]['run_ms']:.2f}"
                + "†" * took[name, size]["disturbed"]
                for size in sizes
            ),
        )
        for name in dict.fromkeys(point["allocator"] for point in points)
    ]
    return table(("allocator", *(f"{size:,} prompts" for size in sizes)), rows)


def of_norms(results: Results) -> str:
    """Seconds of every norm, and as a share of the rollout."""
    if not results:
        return "Not measured."
    rows = [
        (
            name,
            f"{found['seconds']:.3f}" + "†" * found["disturbed"],
            f"{found['ratio']:.3f} ×",
        )
        for name, found in results["points"].items()
    ]
    return table(("", "s", "of a rollout"), rows)


def of_real(results: Results) -> str:
    """A column per measurement, and below what was not measured."""
    if not results:
        return "Not measured."
    points = results["points"]
    shares = [
        (
            f"{stage}, share of the device's {what}",
            lambda p, name=f"{stage}_share_of_{kind}": f"{p[name]:.2f}",
        )
        for stage, kind, what in (
            ("rollout", "bandwidth", "bandwidth"),
            ("rollout", "flops", "peak"),
            ("update", "flops", "peak"),
        )
    ]
    lines: list[tuple[str, Callable[[Results], str]]] = [
        ("device", lambda p: p["device"] + "†" * p["disturbed"]),
        ("precision", lambda p: p["dtype"]),
        ("parameters", lambda p: f"{p['parameters'] / 1e6:.0f} M"),
        (
            "completions × tokens, of prompts × tokens",
            lambda p: (
                f"{p['prompts'] * p['group_size']} × {p['max_tokens']}, "
                f"{p['prompts']} × {p['prompt_tokens']}"
            ),
        ),
        ("rollout, s", lambda p: f"{p['rollout_s']:.1f}"),
        ("tokens drawn per s", lambda p: f"{p['generated_tokens_per_s']:.1f}"),
        ("update, s", lambda p: f"{p['update_s']:.1f}"),
        ("tokens trained per s", lambda p: f"{p['trained_tokens_per_s']:.1f}"),
        ("peak memory, MiB", lambda p: f"{p['peak_mib']:.0f}"),
        *shares,
        (
            "the device",
            lambda p: (
                f"{p['floor_gb_per_s']:.1f} GB/s, {p['floor_gflop_per_s']:.0f} GFLOP/s"
            ),
        ),
    ]

    def cell(write: Callable[[Results], str], point: Results) -> str:
        try:
            return write(point)
        except KeyError:  # another system, which says less
            return "–"

    rows = [(name, *(cell(write, p) for p in points)) for name, write in lines]
    head = ["", *(f"{p.get('system', 'run')} {i}" for i, p in enumerate(points, 1))]
    return "\n\n".join([table(head, rows), *results.get("notes", [])])


def of_ahead(results: Results) -> str:
    """Seconds of a step by verifier, with and without a draw ahead."""
    if not results:
        return "Not measured."
    points = results["points"].values()
    base = {one["verifier"]: one["step_s"] for one in points if not one["ahead"]}
    rows = [
        (
            one["verifier"],
            str(one["ahead"]),
            f"{one['step_s']:.2f}" + "†" * one["disturbed"],
            f"{one['step_s'] / base[one['verifier']]:.2f} ×",
            f"{one['hidden']:.0%}",
            f"{one['idle']:.0%}",
        )
        for one in points
    ]
    head = ("verifier", "`sampling.ahead`", "step s", "of 0", "hidden", "idle")
    told = f"A draw takes {results['draw_s']:.2f} s, an update "
    return f"{told}{results['update_s']:.2f} s.\n\n{table(head, rows)}"


def of_verifier(results: Results) -> str:
    """Checks per second, and what became of the flood."""
    if not results:
        return "Not measured."
    rates = [
        (name, f"{found['per_second']:,.0f}" + "†" * found["disturbed"])
        for name, found in results["points"].items()
    ]
    flood = results["flood"]
    kinds = [
        (name, ", ".join(f"{n} {said}" for said, n in found.items()))
        for name, found in flood["found"].items()
    ]
    return (
        f"{table(('', 'checks/s'), rates)}\n\nThen a flood: {flood['checks']} checks, "
        "honest ones among claims made to take for ever, in "
        f"{flood['seconds']:.0f} s.\nRight: told what it is worth. None: missing.\n\n"
        f"{table(('claims', 'told'), kinds)}"
    )


def readme(
    peers: Results,
    without: Results,
    grown: Results,
    shares: Results,
    norms: Results,
    real: Results,
    verifier: Results,
    gpu: Results,
    ahead: Results,
    halves: Results,
) -> str:
    """The page."""
    parts = peers | {f"{work}, AVX2": about for work, about in without.items()}
    parts |= {f"by {axis}": about for axis, about in grown.items()}
    named = {"allocation": shares, "score norms": norms}
    named |= {"a real shape": real, "verifiers": verifier, "a GPU": gpu}
    named |= {"a draw ahead": ahead, "on halves": halves}
    parts |= {name: found for name, found in named.items() if found}
    return README.format(
        targets=table(
            ("", "target", "with AVX-512", "without"),
            [target.row(peers | grown, without) for target in TARGETS],
        ),
        shapes="\n".join(shapes(peers | without)),
        workloads="\n\n".join(
            f"### {work}\n\n{of_workload(peers, work)}" for work in _works(peers)
        ),
        without="\n\n".join(
            f"### {work}, without AVX-512\n\n{of_workload(without, work)}"
            for work in _works(without)
        ),
        quiet=QUIET,
        versions=versions(peers | without),
        waits=waits(peers),
        scaling=scaling(grown),
        model=f"{MODEL.layers} layers, width {MODEL.width}, "
        f"{MODEL.parameters / 1e6:.1f} M parameters",
        slots=MODEL.slots,
        memory_rows=MEMORY["prompts"] * MEMORY["group_size"],
        steps=STEPS,
        allocation=of_allocation(shares),
        norms=of_norms(norms),
        real=of_real(real),
        gpu=of_real(gpu),
        verifier=of_verifier(verifier),
        ahead=of_ahead(ahead),
        halves=of_ahead(halves),
        provenance=provenance(parts),
    )


# ----- pictures


def of_peers(results: Results) -> "Figure":
    """Stacked bars, rollout and update, a panel per workload."""
    from curax.runs.drawing import LIGHT, canvas, label

    works = [work for work in PICTURED if work in results]
    figure, panels = canvas(LIGHT, [len(results[work]["found"]) for work in works])
    figure.set_size_inches(10.5, 4.4)
    for axes, work in zip(panels, works, strict=True):
        names, stages = [], []
        for system, found in results[work]["found"].items():
            both = [median(rounds(found), name) for name in ("rollout_s", "update_s")]
            if all(both):
                names.append(system.replace(":1", "\none\nbatch"))
                stages.append([one.value for one in both if one])
        places = range(len(names))
        rollout, update = ([both[i] for both in stages] for i in (0, 1))
        axes.bar(places, rollout, 0.6, color=LIGHT.blue, label="rollout")
        axes.bar(places, update, 0.6, rollout, color=LIGHT.orange, label="update")
        axes.set_xticks(list(places), names, fontsize=8)
        label(axes, LIGHT, work, "seconds per iteration")
    return figure


def of_scaling(results: Results) -> "Figure":
    """Seconds over rows, length and prompts; memory over the vocabulary; seeds."""
    from curax.runs.drawing import LIGHT, canvas, label
    from curax.runs.reading import count_text

    shown = [axis for axis in (*GROWTH, "vocabulary", "seeds") if axis in results]
    figure, panels = canvas(LIGHT, [1] * len(shown))
    figure.set_size_inches(3.2 * len(shown), 3.6)
    for axes, axis in zip(panels, shown, strict=True):
        points, unit = results[axis]["points"], "seconds"
        if axis == "vocabulary":
            unit = "MiB"
            curves = [
                (
                    name,
                    "planned_mib",
                    [p for p in points if bool(p["chunk"]) == chunked],
                )
                for name, chunked in (("whole", False), ("in chunks", True))
            ]
        elif axis == "seeds":
            curves = [("run", "run_s", points)]
        else:
            curves = [(n, f"{n}_s", points) for n in ("rollout", "update")]
        for (name, key, own), hue in zip(
            curves, (LIGHT.blue, LIGHT.orange), strict=False
        ):
            known = [(p["x"], p[key]) for p in own if key in p]
            axes.plot(*zip(*known, strict=True), "o-", color=hue, label=name, ms=4)
        axes.set_xscale("log", base=2)
        axes.set_yscale("log", base=10 if axis == "vocabulary" else 2)
        for both in (axes.xaxis, axes.yaxis):
            both.set_major_formatter(lambda value, _: f"{value:.4g}")
            both.set_minor_formatter("")
        axes.xaxis.set_major_formatter(lambda value, _: count_text(value))
        label(axes, LIGHT, axis, unit)
    return figure


def main() -> None:
    """Write README.md and the pictures."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.show", description="Write README.md and pictures."
    )
    parser.add_argument("--results", type=Path, default=HERE / "results", help="folder")
    parser.add_argument("--out", type=Path, default=HERE, help="folder")
    args = parser.parse_args()
    names = ["scaling", "allocation", "score_norm", "qwen3", "verifier", "gpu"]
    names += ["ahead", "ahead_halves"]
    every = (*PEERS.values(), *(f"{name}.json" for name in names))
    files = (args.results / name for name in every)
    found = [json.loads(file.read_text()) if file.exists() else {} for file in files]
    peers, _, grown = found[:3]
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / "README.md").write_text(readme(*found))
    for name, title, results, draw in (
        ("peers", "An iteration, system by system", peers, of_peers),
        ("scaling", "How the cost of curax grows", grown, of_scaling),
    ):
        if results:
            figure = draw(results)
            figure.suptitle(title, x=0.015, ha="left", fontsize=11.5, fontweight="bold")
            figure.savefig(args.out / f"{name}.png", metadata={"Software": None})


if __name__ == "__main__":
    main()
