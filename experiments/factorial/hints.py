"""The arms of the factorial where as good as nothing is solved, and a hint as a choice.

Command:  python -m experiments.factorial.hints

In the map's `hints`: the eight arms, those of one draw of each prompt, and all of them
with hints: groups in which nothing is right are drawn again behind the head of the
solution, of one value, of two, and of two again. Tuned and run as the arms of other
regimes, with seeds that the map has not used. At four times the tokens RLOO and right
ones alone, with and without a hint. And what a hint is beside redrawing without one:
*again*, at the setting of the hinted arm, may draw a group as often, of the bare
prompt; and RLOO without a hint at that setting, *like*.

Arms of fixed draws also at the settings that their trials, and some at a lower rate,
take by greedy answers. And what all hints are heads of, the solutions, imitated as the
warm start imitates its teacher, by as many tokens.

What is in `results_hints/` is not measured again, so that the command, begun anew, goes
on.
"""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import numpy as np

from curax import stop
from curax.config import Stop, override
from curax.step import loops
from curax.step.build import build
from experiments.factorial import run, single
from experiments.factorial.greedy import LOWER, TUNED
from experiments.factorial.run import PLAIN, Piece
from experiments.map import regimes
from experiments.map import run as map_run
from experiments.map.regimes import Setting

RESULTS = Path(__file__).parent / "results_hints"
REGIME = "hints"
HINT, AGAIN, LIKE = "-hint", "-again", "-like"  # what the names of arms end in
BARE = [*run.ARMS, *single.ARMS]
ARMS = [*BARE, *(arm + HINT for arm in BARE)]
LONG = [arm + hinted for arm in PLAIN for hinted in ("", HINT)]
ALIKE = PLAIN[0] + LIKE  # right ones alone took one setting with and without a hint
CONTROLS = [*(arm + AGAIN for arm in PLAIN), ALIKE]
FIXED = [arm for arm in ARMS if "fixed" in arm]
LOWEST = 1e-4  # rate of trials for greedy answers
IMITATED = Piece(REGIME, "imitate", "solutions")


def path(piece: Piece) -> Path:
    """The file of a piece."""
    return RESULTS / piece.path.name


def pieces() -> list[Piece]:
    """All pieces, in order."""
    kinds = {"tune": ARMS, "claim": [*ARMS, *CONTROLS], "long": [*LONG, ALIKE]}
    kinds |= {LOWER: FIXED, TUNED: FIXED}
    found = [Piece(REGIME, kind, arm) for kind, arms in kinds.items() for arm in arms]
    return [*found, IMITATED]


def settings(arm: str, kind: str) -> list[Setting]:
    """What an arm is tried with, or what that took."""
    if kind not in ("tune", LOWER):
        return [chosen(arm, "greedy" if kind == TUNED else "rate")]
    sizes = (1.0,) if arm.removesuffix(HINT) in single.ARMS else run.SIZES
    rates = run.RATES if kind == "tune" else (LOWEST,)
    return [Setting("", n, rate) for n in sizes for rate in rates]


def trials(arm: str, by: str) -> list[tuple[Setting, float]]:
    """Settings of an arm that were tried, and their mean rates at equal tokens."""
    kinds, place = ("tune", LOWER)[: 1 + (by == "greedy")], run.tokens(REGIME, "tune")
    files = [path(Piece(REGIME, kind, arm)) for kind in kinds]
    return [one for file in files for one in run.tried(file, place, by)]


def chosen(arm: str, by: str) -> Setting:
    """The best setting of an arm, the first of equals; a control has its arm's."""
    found = trials(arm.replace(AGAIN, HINT).replace(LIKE, HINT), by)
    return max(found, key=lambda trial: trial[1])[0]


def changes(arm: str, setting: Setting) -> dict[str, Any]:
    """Changes of `rloo` that make an arm at a setting."""
    arm = arm.removesuffix(LIKE)
    bare, rate = arm.removesuffix(HINT), {regimes.RATE: setting.rate}
    if bare in single.ARMS:
        hinted = {"hint": run.HINTED} if bare != arm else {}
        return single.changes(bare) | hinted | rate
    if arm.endswith(AGAIN):
        return again(bare.removesuffix(AGAIN), int(setting.value or 0)) | rate
    return run.changes(arm) | {run.knob(arm): setting.value} | rate


def again(arm: str, n: int) -> dict[str, Any]:
    """Changes of `rloo`: rounds of n until one is right, at most as with hints."""
    return {k: v for k, v in run.changes(arm).items() if k not in regimes.EQUAL} | {
        "sampling.prompts": regimes.ROWS // n,
        "sampling.group_size": n * (1 + run.HINTED.levels),
        "stop": Stop(rule=stop.positives, round_size=n),
    }


def measure(piece: Piece) -> bytes:
    """Measure a piece, and return what its file holds."""
    if piece == IMITATED:
        return imitated()
    regime, kind, arm = piece
    own = settings(arm, kind)
    like = {LOWER: "tune", TUNED: "claim"}.get(kind, kind)
    lanes = [run.made(regime, arm, changes(arm, one), like) for one in own]
    knob = () if own[0].value == 1 or arm.endswith(AGAIN) else (run.knob(arm),)
    return run.histories(Piece(regime, like, arm), own, lanes, (*knob, regimes.RATE))


def imitated() -> bytes:
    """What the file holds of a warm start that goes on without the teacher's errors."""
    seeds, rows = run.seeded(REGIME, "claim"), regimes.COMMON["warm_start.rows"]
    steps = -(-run.tokens(REGIME, "claim") // (rows * (regimes.DEPTH + 1)))
    own = {"task.errors": (0.0,) * 3, "warm_start.steps": steps}
    own["warm_start.optimizer.learning_rate.steps"] = steps
    like = replace(map_run.warm_config_of(REGIME), seed=seeds[0], seeds=len(seeds))
    loop = loops.Jitted(build(override(like, own)))
    begun = jax.device_get(run.started(REGIME, seeds).params)
    warm = loop.warmed(replace(loop.initial(), params=begun))
    rate, greedy, _ = loop.evaluate(loop.begin(warm))
    ends = (np.mean(x, -1).tolist() for x in (rate, greedy))
    found = dict(zip(("rate", "greedy"), ends, strict=True))
    return (json.dumps({"seeds": seeds, "updates": steps} | found) + "\n").encode()


def main() -> None:
    """Measure what is left."""
    run.finish(pieces(), path, measure)


if __name__ == "__main__":
    main()
