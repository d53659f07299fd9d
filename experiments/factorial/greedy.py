"""Arms of the factorial by greedy answers.

Command:  python -m experiments.factorial.greedy

Where little is solved right ones alone beside RLOO, again, by the settings and seeds of
the page and greedily as well. Where a fifth is right all arms, at the settings that
their trials take by greedy answers, of which those of prompts that return have a lower
rate too. What is in `results_greedy/` is not measured again, so that the command, begun
anew, goes on.
"""

from pathlib import Path

from experiments.factorial import run
from experiments.factorial.run import Piece
from experiments.map import regimes
from experiments.map.regimes import Setting

RESULTS = Path(__file__).parent / "results_greedy"
REGIMES = ("sparse", "sparse_wide")
KINDS = {"claim": "", "long": ", four times the tokens"}
LOWER, TUNED = "lower", "tuned"  # kinds: trials at one more rate, and what they take
LOWEST = {"dense_returning": 3e-5}  # rate of these
ARMS = ("centred-fixed-one", "right-fixed-one")


def path(piece: Piece) -> Path:
    """The file of a piece here."""
    return RESULTS / piece.path.relative_to(run.RESULTS)


def pieces() -> list[Piece]:
    """All pieces, in order."""
    again = [Piece(r, kind, arm) for kind in KINDS for r in REGIMES for arm in ARMS]
    kinds = [(r, LOWER) for r in LOWEST] + [(r, TUNED) for r in run.DENSE]
    return again + [Piece(*own, arm) for own in kinds for arm in run.ARMS]


def chosen(regime: str, arm: str) -> Setting:
    """The best setting of an arm by greedy answers, the first of equals."""
    found = run.trials(regime, arm, "greedy")
    if regime in LOWEST:
        place = run.tokens(regime, "tune")
        found += run.tried(path(Piece(regime, LOWER, arm)), place, "greedy")
    return max(found, key=lambda trial: trial[1])[0]


def measure(piece: Piece) -> bytes:
    """Measure a piece, and return what its file holds."""
    regime, kind, arm = piece
    if kind == TUNED:
        return run.measure(Piece(regime, "claim", arm), chosen(regime, arm))
    if kind == LOWER:
        settings = [Setting("", n, LOWEST[regime]) for n in run.SIZES]
        lanes = [run.lane(regime, arm, own, "tune") for own in settings]
        names = run.knob(arm), regimes.RATE
        return run.histories(Piece(regime, "tune", arm), settings, lanes, names)
    return run.measure(piece)


def main() -> None:
    """Measure what is left."""
    run.finish(pieces(), path, measure)


if __name__ == "__main__":
    main()
