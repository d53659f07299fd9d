"""Right ones alone beside RLOO where little is solved, again, and greedily as well.

Command:  python -m experiments.factorial.greedy

Runs of the claims, by the settings and seeds of the page. What is in `results_greedy/`
is not measured again, so that the command, begun anew, goes on.
"""

import time
from pathlib import Path

from curax.runs.run import set_up_libraries
from experiments.factorial import run
from experiments.factorial.run import Piece
from experiments.map.run import write

RESULTS = Path(__file__).parent / "results_greedy"
REGIMES = ("sparse", "sparse_wide")
KINDS = {"claim": "", "long": ", four times the tokens"}
ARMS = ("centred-fixed-one", "right-fixed-one")


def path(piece: Piece) -> Path:
    """The file of a piece here."""
    return RESULTS / piece.path.relative_to(run.RESULTS)


def main() -> None:
    """Measure what is left."""
    set_up_libraries()
    for piece in (
        Piece(r, kind, arm) for kind in KINDS for r in REGIMES for arm in ARMS
    ):
        if not path(piece).exists():
            begun = time.monotonic()
            write(path(piece), run.measure(piece))
            print(f"{' '.join(piece)}: {time.monotonic() - begun:.0f} s", flush=True)


if __name__ == "__main__":
    main()
