"""What in training right completions alone pays: eight arms, each tuned, a piece a go.

Command:  python -m experiments.factorial.run            what is left
          python -m experiments.factorial.run --next 5   the next five pieces
          python -m experiments.factorial.run --all      all that is left

Three choices of two, in regimes of the map, with its warm starts:

    credit   centred: all completions, reward less a baseline; right: right ones alone
    draws    fixed: n of each prompt; drawn: rounds of n until one is right, 32 at most
    weight   one: of the pass rate; log: 1 / p, truncated at the most that is drawn

A step draws 64 completions where their number is fixed, and of 8 prompts where it is
not. Each arm has nine trials, n by learning rate, and three more at a rate beyond where
most arms took an end, at the tokens of the claim and by other seeds; the highest mean
held-out pass rate is taken, the first of equals. A piece is a file of `results/REGIME`,
and resumes as those of the map.
"""

import argparse
import itertools
import json
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from curax import advantage, correct, hint, objective, stop
from curax.compare import programs, statistics
from curax.compare.experiment import Arm, arms
from curax.config import Config, Hint, Sampling, Stop, load, override
from curax.runs import libraries
from experiments.map import ablations, parts, regimes, run
from experiments.map.regimes import TUNING, Setting

RESULTS = Path(__file__).parent / "results"
SEEDS = ablations.SEEDS  # of claims: 16, which tuning has not seen
DENSE = ("dense_fresh", "dense_returning")
UNUSED = (*DENSE, "hints")  # regimes whose seeds are new to the map
# Chains have one right completion; of `ways` each of k values has four right tokens.
REGIMES = ("sparse", "bimodal_ways", "bimodal", "sparse_wide", *DENSE, "noisy")
TOKENS = {"tune": 40_000, "beyond": 40_000, "claim": 40_000, "long": 160_000}
STEPS = 10_000  # at most
SIZES, RATES = (2.0, 4.0, 8.0), (3e-4, 1e-3, 3e-3)
TRIED = ("tune", "beyond")  # kinds of pieces that are trials
# One more rate where most arms had taken an end of the others.
BEYOND = {"bimodal": 1e-4, "bimodal_ways": 1e-2, **dict.fromkeys(DENSE, 3e-3)}
PROMPTS, MOST = 8, 32  # of a step that draws until one is right, and of a prompt
CREDIT, DRAWS, WEIGHT = ("centred", "right"), ("fixed", "drawn"), ("one", "log")
CHOICES = (CREDIT, DRAWS, WEIGHT)
ARMS = ["-".join(own) for own in itertools.product(*CHOICES)]
PLAIN = ["centred-fixed-one", "right-fixed-one"]
SHORT = (*DENSE, "noisy")  # regimes in which these two alone go on
ENTROPY = {"entropy": "policy/entropy_nats"}

BASELINE = {"centred": advantage.leave_one_out, "right": advantage.raw}
LOG = {"objective": partial(objective.series, coefficients=objective.log_coefficients)}
MEAN = {"correct": partial(correct.per_prompt, rows=MOST)}
UNBIASED = {  # whatever stopped the draws
    "centred": {
        "correct": partial(correct.control_variate, rows=MOST, limit=MOST),
        "advantage": advantage.signed,
    },
    "right": {"correct": partial(correct.accepted_mean, rows=MOST)},
}
POOL = {
    "sampling.prompts": PROMPTS,
    "sampling.group_size": MOST,
    "stop": Stop(rule=parts.right_in_rounds, round_size=int(SIZES[0])),
}
# Of prompts whose draws are all wrong, as in SAGE; arms of `hints.py` have it.
HINTED = Hint(
    source=hint.reference_prefix,
    levels=regimes.DEPTH,
    width=regimes.DEPTH + 1,
    trigger=hint.all_wrong,
    most=1.0,
)
# Choices whose signs are multiplied: + is right, drawn, log.
EFFECTS = {
    "right alone": (0,),
    "until one is right": (1,),
    "1/p": (2,),
    "right alone x until one is right": (0, 1),
    "right alone x 1/p": (0, 2),
    "until one is right x 1/p": (1, 2),
    "all three": (0, 1, 2),
}


class Piece(NamedTuple):
    """An arm in a regime, tuned, claimed, or run four times as long."""

    regime: str
    kind: str  # tune, beyond, claim or long
    arm: str

    @property
    def path(self) -> Path:
        """The file that holds it, once it is measured."""
        return RESULTS / self.regime / f"{self.kind}-{self.arm}.json"


def changes(arm: str) -> dict[str, Any]:
    """Changes of `rloo` that make an arm, without what is tuned."""
    credit, draws, weight, *hinted = arm.split("-")
    own = {**regimes.LENGTH, "advantage": BASELINE[credit]}
    own |= {"hint": HINTED} if hinted else {}
    if draws == "fixed":
        return own | regimes.EQUAL | (LOG if weight == "log" else {})
    return own | POOL | (UNBIASED[credit] if weight == "log" else MEAN)


def seeded(regime: str, kind: str) -> tuple[int, ...]:
    """Seeds of a kind of piece."""
    if kind in TRIED:
        return TUNING
    return regimes.FRESH if regime in UNUSED else SEEDS


def rates(regime: str, kind: str) -> tuple[float, ...]:
    """Learning rates that a piece of trials tries; in dense regimes the map's."""
    if kind == "beyond":
        return (BEYOND[regime],)
    return regimes.RATES if regime in DENSE else RATES


def asked(regime: str, kind: str) -> list[str]:
    """Arms that a kind of piece is measured of."""
    return PLAIN if kind == "long" and regime in SHORT else ARMS


def tokens(regime: str, kind: str) -> int:
    """Tokens that every run draws at least, and where all are read."""
    return round(TOKENS[kind] * regimes.REGIMES[regime].times)


def knob(arm: str) -> str:
    """What sets n, a magnitude in both cases."""
    return "allocate.size" if "fixed" in arm else "stop.rule.size"


def plain(arm: str, n: int) -> Config:
    """An arm at one n, nothing of it traced: for the x-ray."""
    found = changes(arm)
    if "fixed" in arm:
        found = {k: v for k, v in found.items() if k not in regimes.EQUAL}
        found["sampling"] = Sampling(prompts=regimes.ROWS // n, group_size=n)
    else:
        found["stop"] = Stop(rule=stop.positives, round_size=n)
    return override(load("rloo"), found)


def lane(regime: str, arm: str, setting: Setting, kind: str) -> Arm:
    """An arm at a setting, with the seeds and tokens of a kind of piece."""
    tuned = {knob(arm): setting.value, regimes.RATE: setting.rate}
    return made(regime, arm, {**changes(arm), **tuned}, kind)


def made(regime: str, arm: str, changed: Mapping[str, Any], kind: str) -> Arm:
    """A changed `rloo` in a regime, with the seeds and tokens of a kind of piece."""
    first = regimes.BASELINES[0]
    like = regimes.experiment(
        regime, {first: regimes.REGIMES[regime].chunks(first)[0][0]}
    )
    seeds = seeded(regime, kind)
    own = replace(
        like,
        recipes={arm: ("rloo", changed)},
        common={**like.common, "seed": seeds[0]},
        seeds=len(seeds),
        tokens=tokens(regime, kind),
        steps=STEPS,
        every=every(arm),
    )
    (found,) = arms(own)
    return found


def every(arm: str) -> int:
    """Steps between two evaluations."""
    return 20 if "fixed" in arm else 10


# ----- pieces


def pieces() -> list[Piece]:
    """All pieces, in order: a regime whole, then the next; long ones at the end."""
    claims = (
        (regime, kind)
        for regime in REGIMES
        for kind in (*TRIED, "claim")
        if kind != "beyond" or regime in BEYOND
    )
    longer = ((regime, "long") for regime in REGIMES)
    return [
        Piece(regime, kind, arm)
        for regime, kind in (*claims, *longer)
        for arm in asked(regime, kind)
    ]


def left() -> list[Piece]:
    """Pieces that are not there, in order."""
    return [piece for piece in pieces() if not piece.path.exists()]


def trials(regime: str, arm: str, by: str = "rate") -> list[tuple[Setting, float]]:
    """Settings of an arm that were tried, and their mean rates at equal tokens."""
    kinds = TRIED if regime in BEYOND else TRIED[:1]
    every = [Piece(regime, kind, arm).path for kind in kinds]
    return [one for path in every for one in tried(path, tokens(regime, "tune"), by)]


def tried(path: Path, place: float, by: str) -> list[tuple[Setting, float]]:
    """Settings of a file of trials, and their mean rates at a place."""
    own = json.loads(path.read_text())
    means = ends(own, place, by).reshape(len(own["settings"]), -1).mean(-1)
    settings = [Setting(*setting) for setting in own["settings"]]
    return list(zip(settings, means.tolist(), strict=True))


def chosen(regime: str, arm: str) -> Setting:
    """The best setting of an arm, the first of equals."""
    return max(trials(regime, arm), key=lambda trial: trial[1])[0]


def ends(own: Mapping[str, Any], place: float, what: str = "rate") -> np.ndarray:
    """`[L]` pass rates of lanes where each has drawn as many tokens, or of others."""
    drawn, values = np.array(own["drawn"], float), np.array(own[what], float)
    assert drawn[-1].min() >= place, "a run stopped before"
    return statistics.at(drawn[-len(values) :], values, place)


def measure(piece: Piece, setting: Setting | None = None) -> bytes:
    """Measure a piece, and return what its file holds.

    Args:
        piece: which.
        setting: of a claim, in place of what tuning took.
    """
    regime, kind, arm = piece
    if kind in TRIED:
        own = rates(regime, kind)
        settings = [Setting("", n, rate) for n in SIZES for rate in own]
    else:
        settings = [setting or chosen(regime, arm)]
    lanes = [lane(regime, arm, setting, kind) for setting in settings]
    return histories(piece, settings, lanes, (knob(arm), regimes.RATE))


def histories(
    piece: Piece, settings: list[Setting], lanes: list[Arm], names: tuple[str, ...]
) -> bytes:
    """Run the lanes of a piece, which differ in some names, as its file holds them."""
    begun = time.monotonic(), time.process_time()
    regime, kind, arm = piece
    seeds = seeded(regime, kind)
    found = run.history(
        programs.lanes(programs.Sweep(tuple(lanes), names)),
        *(started(regime, seeds), every(arm), " ".join(piece)),
        whole=tokens(regime, kind),
        steps=STEPS,
        watched=ENTROPY,
    )
    found = {"settings": settings, "seeds": seeds} | found
    found |= {
        "seconds": round(time.monotonic() - begun[0], 1),
        "processor_seconds": round(time.process_time() - begun[1], 1),
        "device": jax.devices()[0].device_kind,
        "jax": jax.__version__,
    }
    return (json.dumps(found) + "\n").encode()


def started(regime: str, seeds: tuple[int, ...]) -> Any:
    """The warm starts of some seeds of a regime, made where they are missing."""
    for piece in run.warm_pieces(regime, seeds):
        if not piece.path.exists():
            run.measure(piece)
    return run.warmed(regime, seeds)


def finish(
    pieces: Iterable[Piece],
    path: Callable[[Piece], Path],
    measure: Callable[[Piece], bytes],
) -> None:
    """Measure those pieces, in order, whose file is not there."""
    libraries.set_up()
    for piece in pieces:
        if not path(piece).exists():
            begun = time.monotonic()
            run.write(path(piece), measure(piece))
            print(f"{' '.join(piece)}: {time.monotonic() - begun:.0f} s", flush=True)


def main(argv: list[str] | None = None) -> int:
    """Exit status: 0 done, 2 bad input."""
    parser = argparse.ArgumentParser(prog="python -m experiments.factorial.run")
    parser.add_argument("--next", type=int, nargs="?", const=1, metavar="N", default=0)
    parser.add_argument("--all", action="store_true")
    args = parser.parse_args(argv)
    missing = left()
    next_ones = missing[: len(missing) if args.all else args.next]
    finish(next_ones, lambda piece: piece.path, measure)
    missing = left()
    for piece in missing:
        print(f"left: {' '.join(piece)}")
    print(f"{len(missing)} pieces left")
    return 0


if __name__ == "__main__":
    sys.exit(main())
