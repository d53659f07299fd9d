"""What the papers leave out: one change at a time, at one stated setting.

Command:  python -m experiments.map.ablations            what is left
          python -m experiments.map.ablations --next 5   the next five pieces
          python -m experiments.map.ablations --all --only gate_weight

An ablation stands in a regime of the map, has its warm starts, prompts and sizes, and
16 seeds that no tuning has seen. All its arms have one learning rate: the one that the
map's tuning chose in that regime, or the best of three for the first arm, by 4 other
seeds; so arms are compared where that one is at its best. A piece is an arm, a file of
`results/ablations`, and resumes as those of the map.
"""

import argparse
import json
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np

from curax import advantage, allocate, correct, downsample, gate, modulate
from curax.compare import programs, statistics
from curax.compare.experiment import Arm, Experiment, arms
from curax.runs import libraries
from experiments.map import regimes, run
from experiments.map.regimes import REGIMES, STEPS, TUNING

SEEDS = tuple(range(4, 20))
RESULTS = regimes.RESULTS / "ablations"
RATE = "rate"  # the piece that tunes


@dataclass(frozen=True, kw_only=True)
class Ablation:
    """Arms that differ in what is named, and the differences that are shown.

    Attributes:
        says: one line about it.
        regime: of the map, for task, warm start and tokens.
        arms: name -> (recipe of configs/, what is changed of it).
        pairs: what a difference is of -> signed arms, `+a -b`.
        common: changes of all arms.
        rate: learning rate; None: the best of `rates` for the first arm.
        rates: those that are tried.
        every: steps between two evaluations.
    """

    says: str
    regime: str
    arms: Mapping[str, tuple[str, Mapping[str, Any]]]
    pairs: Mapping[str, str]
    common: Mapping[str, Any]
    rate: float | None = None
    rates: tuple[float, ...] = regimes.HIGH
    every: int = 20


# One config, of which the arms change what they are named by: 4 prompts, up to 32
# completions of each, all of which train.
POOL = {
    "sampling.prompts": 4,
    "sampling.group_size": 32,
    "downsample": downsample.none,
    **regimes.LENGTH,
}
POSITIVE = "ada_seq_positive_accepted"
LOG = {"correct": partial(correct.accepted_mean, rows=32)}
PLAIN = {
    "gate": gate.none,
    "correct": partial(correct.per_prompt, rows=32),
    "advantage": advantage.leave_one_out,
    "claim": None,
}
OFF = {"correct": correct.none}
FIXED = {"stop": None}
# As many rows a step, 2 completions of each of 64 prompts.
TWO = FIXED | {"sampling.prompts": 64, "sampling.group_size": 2}
TEACHER = (0.16, 0.18, 0.19)  # errors in hints of another, a fifth of the policy's
SHORT = {"hint.width": regimes.DEPTH + 1}

ABLATIONS = {
    "gate_weight": Ablation(
        says="draws until one is right or 32 at once; the pass rate or truncated log",
        regime="sparse",
        rate=1e-3,
        every=10,
        common=POOL,
        arms={
            "fixed_1": (POSITIVE, FIXED | PLAIN),
            "forced_1": (POSITIVE, PLAIN),
            "fixed_log": (POSITIVE, FIXED | LOG),
            "forced_log": (POSITIVE, LOG),
            "two_1": (POSITIVE, TWO | PLAIN | {"correct.rows": 2}),
            "two_right": (POSITIVE, TWO | OFF | {"claim": None}),
            "two_log": (POSITIVE, TWO | {"correct.rows": 2}),
        },
        pairs={
            "forcing the gate, weight 1": "+forced_1 -fixed_1",
            "forcing the gate, weight 1/p": "+forced_log -fixed_log",
            "weight 1/p, fixed draws": "+fixed_log -fixed_1",
            "weight 1/p, forced gate": "+forced_log -forced_1",
            "both over each alone": "+forced_log -fixed_log -forced_1 +fixed_1",
            "right ones alone, 2 draws": "+two_right -two_1",
            "weight 2 - p, 2 draws": "+two_log -two_right",
            "until one is right over 2 draws": "+forced_log -two_log",
        },
    ),
    "seq_est": Ablation(
        says="Seq, balanced, against Est, at equal draws, on prompts that return",
        regime="dense_returning",
        common={"sampling.prompts": 8},
        arms={
            "est_exact": ("ada_est_exact", regimes.SHARED | regimes.LENGTH),
            "seq_exact": ("ada_seq_balanced_exact", regimes.LENGTH),
            "est_published": ("ada_est_published", regimes.SHARED),
            "seq_published": ("ada_seq_balanced_published", {}),
        },
        pairs={
            "Seq over Est, exact": "+seq_exact -est_exact",
            "Seq over Est, published": "+seq_published -est_published",
            "exact over published, Seq": "+seq_exact -seq_published",
            "exact over published, Est": "+est_exact -est_published",
        },
    ),
    "correction": Ablation(
        says="what a selection did is undone, or not",
        regime="dense_returning",
        common=regimes.LENGTH,
        arms={
            "seq": ("ada_seq_balanced_exact", {"sampling.prompts": 8}),
            "seq_off": (
                "ada_seq_balanced_exact",
                {"sampling.prompts": 8, "advantage": advantage.group_mean} | OFF,
            ),
            "pods": ("pods_exact", {"sampling.prompts": 4}),
            "pods_off": ("pods_exact", {"sampling.prompts": 4} | OFF),
            "allocation": (
                "dynamo_allocation_exact",
                regimes.SHARED | {"allocate.least": 4, "correct.rows": 8},
            ),
            "allocation_off": (
                "dynamo_allocation_exact",
                regimes.SHARED | {"allocate.least": 4} | OFF,
            ),
        },
        pairs={
            "correction, Seq": "+seq -seq_off",
            "correction, down-sampling": "+pods -pods_off",
            "correction, allocation": "+allocation -allocation_off",
        },
    ),
    "modulation": Ablation(
        says="DynaMO's two parts, each without the other; four updates per batch",
        regime="dense_returning",
        common=regimes.SHARED
        | regimes.LENGTH
        | {"update.minibatches": 4, "correct.rows": 8},
        arms={
            "neither": (
                "dynamo",
                {"allocate": allocate.uniform, "modulate": modulate.none},
            ),
            "modulation": ("dynamo", {"allocate": allocate.uniform}),
            "allocation": (
                "dynamo",
                {"allocate.least": 4, "modulate": modulate.none},
            ),
            "both": ("dynamo", {"allocate.least": 4}),
        },
        pairs={
            "modulation without allocation": "+modulation -neither",
            "allocation without modulation": "+allocation -neither",
            "modulation on allocation": "+both -allocation",
        },
    ),
    "hint_source": Ablation(
        says="hints of the solution, the policy, the policy before RL, or another",
        regime="hints",
        common={
            "sampling.prompts": 8,
            "task.hint_errors": TEACHER,
            **regimes.LENGTH,
        },
        arms={
            "none": ("sage", {"hint": None}),
            "solution": ("sage", SHORT),
            "online": ("sage_self", SHORT),
            "offline": ("sage_offline", SHORT),
            "teacher": ("sage_teacher", SHORT),
        },
        pairs={
            "hints of the solution": "+solution -none",
            "hints of the policy, online": "+online -none",
            "hints of the policy, offline": "+offline -none",
            "hints of a teacher": "+teacher -none",
            "online over offline": "+online -offline",
        },
    ),
    "reference_filter": Ablation(
        says="R3 with no filter, by its own completions, by a look beforehand",
        regime="no_verifier",
        common={"sampling.prompts": 4},
        arms={
            "none": ("dro", {"reflection.queries": None}),
            "in_step": ("dro_in_step", {}),
            "look": ("dro", {}),
        },
        pairs={
            "filter in the step": "+in_step -none",
            "filter by a look": "+look -none",
            "in the step over a look": "+in_step -look",
        },
    ),
}


def experiment(name: str, rate: float, stage: str = "claim") -> Experiment:
    """All arms of an ablation at a learning rate; `tune` is the first one, 4 seeds."""
    own = ABLATIONS[name]
    first = regimes.BASELINES[0]
    setting = REGIMES[own.regime].chunks(first)[0][0]
    made = {
        arm: (recipe, {**changes, regimes.RATE: rate})
        for arm, (recipe, changes) in own.arms.items()
    }
    seeds = TUNING if stage == "tune" else SEEDS
    like = regimes.experiment(own.regime, {first: setting}, stage)
    return replace(
        like,
        recipes=made,
        common={**like.common, **own.common, "seed": seeds[0]},
        seeds=len(seeds),
        tokens=round(REGIMES[own.regime].whole(stage)),
        every=own.every,
        cost=(1.0, 0.0),
    )


def arm(name: str, which: str, rate: float, stage: str = "claim") -> Arm:
    """An arm of an ablation at a learning rate."""
    made = experiment(name, rate, stage)
    (found,) = arms(replace(made, recipes={which: made.recipes[which]}))
    return found


# ----- pieces


def path(name: str, which: str) -> Path:
    """The file of a piece."""
    return RESULTS / name / f"{which}.json"


def pieces(name: str) -> list[str]:
    """Pieces of an ablation: its learning rate, where it is not given, and its arms."""
    own = ABLATIONS[name]
    return [*([] if own.rate else [RATE]), *own.arms]


def left(only: str | None = None) -> list[tuple[str, str]]:
    """Pieces that are not there, in order."""
    names = [only] if only else list(ABLATIONS)
    every = [(name, which) for name in names for which in pieces(name)]
    return [piece for piece in every if not path(*piece).exists()]


def rate_of(name: str) -> float:
    """Learning rate of an ablation; it is tuned by now."""
    if rate := ABLATIONS[name].rate:
        return rate
    own = json.loads(path(name, RATE).read_text())
    spent, rates = np.array(own["drawn"]), np.array(own["rate"])
    place = REGIMES[ABLATIONS[name].regime].whole("tune")
    found = statistics.at(spent, rates, min(spent[-1].min(), place))
    return own["rates"][int(np.argmax(found.reshape(len(own["rates"]), -1).mean(-1)))]


def measure(name: str, which: str) -> None:
    """Measure a piece and write its file."""
    begun = time.monotonic(), time.process_time()
    own = ABLATIONS[name]
    for piece in run.pieces(own.regime):
        if piece.kind == "warm" and not piece.path.exists():
            run.measure(piece)
    if which == RATE:
        stage, seeds, rates = "tune", TUNING, own.rates
        first = next(iter(own.arms))
        lanes = [arm(name, first, rate, stage) for rate in rates]
    else:
        stage, seeds, rates = "claim", SEEDS, (rate_of(name),)
        lanes = [arm(name, which, *rates)]
    sweep = programs.Sweep(tuple(lanes), (regimes.RATE,))
    warm = run.warmed(own.regime, seeds)
    whole = REGIMES[own.regime].whole(stage)
    found = run.history(
        *(programs.lanes(sweep), warm, own.every, f"{name} {which}"),
        whole=whole,
        steps=STEPS[stage],
    )
    found = {"rates": rates, "seeds": seeds, "tokens": round(whole)} | found
    found |= {
        "seconds": round(time.monotonic() - begun[0], 1),
        "processor_seconds": round(time.process_time() - begun[1], 1),
        "device": jax.devices()[0].device_kind,
        "jax": jax.__version__,
    }
    run.write(path(name, which), (json.dumps(found) + "\n").encode())


# ----- what was found


def ends(name: str) -> dict[str, np.ndarray]:
    """Held-out pass rates of the 16 seeds of each arm, `[16]`, at equal tokens drawn.

    Empty until all arms are measured.
    """
    whole = [path(name, which) for which in ABLATIONS[name].arms]
    if not all(file.exists() for file in whole):
        return {}
    every = [json.loads(file.read_text()) for file in whole]
    assert len({json.dumps(own["seeds"]) for own in every}) == 1, "other seeds"
    place = min(np.array(own["drawn"])[-1].min() for own in every)
    return {
        which: statistics.at(np.array(own["drawn"]), np.array(own["rate"]), place)
        for which, own in zip(ABLATIONS[name].arms, every, strict=True)
    }


def difference(signed: str, found: Mapping[str, np.ndarray]) -> statistics.Estimate:
    """Interquartile mean of `+a -b` over seeds, of the same seed."""
    signs = {"+": 1.0, "-": -1.0}
    terms = [signs[term[0]] * found[term[1:]] for term in signed.split()]
    return statistics.center([np.sum(terms, 0)])


def rows(name: str) -> list[list[str]]:
    """A row of the table for each difference of an ablation that is whole."""
    own, found = ABLATIONS[name], ends(name)
    if not found:
        return []
    gaps = {what: difference(signed, found) for what, signed in own.pairs.items()}
    levels = statistics.holm([float(gap.p_value()) for gap in gaps.values()])
    shown = []
    for (what, gap), level in zip(gaps.items(), levels, strict=True):
        low, high = gap.interval(level)
        text = f"{gap.value:+.3f} [{low:+.3f}, {high:+.3f}]"
        shown.append([name, what, own.pairs[what], f"{rate_of(name):.0e}", text])
    return shown


def arm_rows(name: str) -> list[list[str]]:
    """A row for each arm of an ablation that is whole: pass rate and tokens a step."""
    shown = []
    for which, rates in ends(name).items():
        spread = statistics.center([rates])
        low, high = spread.interval()
        own = json.loads(path(name, which).read_text())
        a_step = np.mean(own["drawn"][-1]) / own["steps"][-1]
        text = f"{spread.value:.3f} [{low:.3f}, {high:.3f}]"
        shown.append([name, which, text, f"{a_step:.0f}"])
    return shown


def main(argv: list[str] | None = None) -> int:
    """Exit status: 0 done, 2 bad input."""
    parser = argparse.ArgumentParser(prog="python -m experiments.map.ablations")
    parser.add_argument("--next", type=int, nargs="?", const=1, metavar="N", default=0)
    parser.add_argument("--all", action="store_true")
    parser.add_argument("--only", choices=list(ABLATIONS))
    args = parser.parse_args(argv)
    missing = left(args.only)
    libraries.set_up()
    for name, which in missing[: len(missing) if args.all else args.next]:
        begun = time.monotonic()
        measure(name, which)
        print(f"{name} {which}: {time.monotonic() - begun:.0f} s", flush=True)
    missing = left(args.only)
    for name, which in missing:
        print(f"left: {name} {which}")
    print(f"{len(missing)} pieces left")
    return 0


if __name__ == "__main__":
    sys.exit(main())
