"""The arms of the factorial at four times the tokens, where two alone had gone on.

Command:  python -m experiments.factorial.longer

In the dense regimes and noisy: the other six arms at the settings of their claims; RLOO
at those that arms of right ones took (n = 2 and 4, 1e-3); one draw of each prompt; and
in the dense regimes RLOO and what leads by greedy answers, at the settings that these
took. What is in `results_longer/` is not measured again, so that the command, begun
anew, goes on.
"""

from pathlib import Path

from experiments.factorial import greedy, run, single
from experiments.factorial.greedy import TUNED
from experiments.factorial.run import Piece
from experiments.map.regimes import Setting

RESULTS = Path(__file__).parent / "results_longer"
REGIMES = ("dense_fresh", "noisy", "dense_returning")
RLOO, LEADS = run.PLAIN[0], "right-drawn-log"
LIKE, FOUR = "like", "four"  # kinds: at the setting of another arm
LIKES = {LIKE: LEADS, FOUR: "right-fixed-log"}


def path(piece: Piece) -> Path:
    """The file of a piece, here or where it was measured before."""
    if piece.kind == "long" and piece.arm in run.PLAIN:
        return piece.path
    if piece == Piece(single.CONTROL.regime, LIKE, RLOO):
        return single.path(single.CONTROL)
    return RESULTS / piece.path.relative_to(run.RESULTS)


def pieces() -> list[Piece]:
    """All pieces, in order."""
    tuned = [Piece(r, TUNED, arm) for r in run.DENSE for arm in (RLOO, LEADS)]
    every = (*run.ARMS, *single.ARMS)
    long = [Piece(r, "long", arm) for r in REGIMES for arm in every]
    likes = [(r, LIKE) for r in REGIMES] + [(r, FOUR) for r in run.DENSE]
    return [*tuned, *(Piece(*own, RLOO) for own in likes), *long]


def chosen(piece: Piece) -> Setting:
    """The setting of a piece."""
    regime, kind, arm = piece
    if kind == TUNED:
        return greedy.chosen(regime, arm)
    return run.chosen(regime, LIKES.get(kind, arm))


def measure(piece: Piece) -> bytes:
    """Measure a piece, and return what its file holds."""
    if piece.arm in single.ARMS:
        return single.measure(piece)
    return run.measure(Piece(piece.regime, "long", piece.arm), chosen(piece))


def main() -> None:
    """Measure what is left."""
    run.finish(pieces(), path, measure)


if __name__ == "__main__":
    main()
