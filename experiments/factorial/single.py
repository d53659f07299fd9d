"""One draw of each prompt: right ones alone, beside a baseline of the whole batch.

Command:  python -m experiments.factorial.single

The control of n = 2, the smallest n of the eight arms. Draws are fixed and the weight
is one: *right* trains right completions alone, and *centred* takes the mean of the
batch from rewards and divides by their deviation, as `reinforce_plus_plus` does, for a
prompt with one draw has no mean of its own. Tuned by the rates of the regime and run
with the seeds of its claims. Beside them RLOO and right ones alone at the n of the
page, on this processor: those of `greedy.py`, of bimodal run again, and of the other
regimes those of the page. What is in `results_single/` is not measured again, so that
the command, begun anew, goes on.

And a control of four times the tokens in dense_fresh, where RLOO runs at another n and
rate than right ones alone: RLOO at theirs.
"""

from pathlib import Path
from typing import Any

from curax import advantage
from curax.config import Config, Sampling, load, override
from experiments.factorial import greedy, run
from experiments.factorial.run import Piece
from experiments.map import regimes
from experiments.map.regimes import Setting

RESULTS = Path(__file__).parent / "results_single"
AGAIN = ("sparse", "sparse_wide", "bimodal")  # arms of the page are run again
REGIMES = (*AGAIN, *run.SHORT)
BASELINE = {"centred": advantage.batch_standardised, "right": advantage.raw}
ARMS = {f"{credit}-fixed-single": credit for credit in BASELINE}
CONTROL = Piece("dense_fresh", "long", run.PLAIN[0])  # by the setting of right ones


def path(piece: Piece) -> Path:
    """The file of a piece, of one draw or beside those."""
    if piece.arm not in ARMS and piece.regime in greedy.REGIMES:
        return greedy.path(piece)
    if piece.arm not in ARMS and piece.regime not in AGAIN and piece != CONTROL:
        return piece.path
    return RESULTS / piece.path.relative_to(run.RESULTS)


def changes(arm: str) -> dict[str, Any]:
    """Changes of `rloo` that make an arm, without what is tuned."""
    drawn = {"sampling.prompts": regimes.ROWS, "sampling.group_size": 1}
    return {**regimes.LENGTH, **drawn, "advantage": BASELINE[ARMS[arm]]}


def plain(arm: str) -> Config:
    """An arm, for the x-ray."""
    drawn = {"sampling": Sampling(prompts=regimes.ROWS, group_size=1)}
    changed = {k: v for k, v in changes(arm).items() if not k.startswith("sampling")}
    return override(load("rloo"), drawn | changed)


def pieces() -> list[Piece]:
    """All pieces, in order."""
    found = [
        Piece(regime, kind, arm)
        for regime in REGIMES
        for kind, arms in (("tune", ARMS), ("claim", [*ARMS, *run.PLAIN]))
        for arm in arms
    ]
    return [*found, CONTROL]


def trials(regime: str, arm: str) -> list[tuple[Setting, float]]:
    """Settings of an arm that were tried, and their mean rates at equal tokens."""
    tuned = path(Piece(regime, "tune", arm))
    return run.tried(tuned, run.tokens(regime, "tune"), "rate")


def measure(piece: Piece) -> bytes:
    """Measure a piece, and return what its file holds."""
    regime, kind, arm = piece
    if piece == CONTROL:
        return run.measure(piece, run.chosen(regime, run.PLAIN[1]))
    if arm not in ARMS:
        return run.measure(piece)
    if kind == "tune":
        rates = sorted(
            rate
            for kind in (run.TRIED if regime in run.BEYOND else run.TRIED[:1])
            for rate in run.rates(regime, kind)
        )
        settings = [Setting("", 1.0, rate) for rate in rates]
    else:
        settings = [max(trials(regime, arm), key=lambda trial: trial[1])[0]]
    lanes = [
        run.made(regime, arm, changes(arm) | {regimes.RATE: own.rate}, kind)
        for own in settings
    ]
    return run.histories(piece, settings, lanes, (regimes.RATE,))


def main() -> None:
    """Measure what is left."""
    run.finish(pieces(), path, measure)


if __name__ == "__main__":
    main()
