"""Table of `results.json`.

Command:  python -m experiments.lag.show
"""

import json
from pathlib import Path
from typing import Any

from curax.settings.tables import markdown
from experiments.lag.experiment import get_experiment
from experiments.smoke import at, shown

HERE = Path(__file__).parent
EXPERIMENT = get_experiment()
TOKENS = EXPERIMENT.tokens
BASE = "on_policy"


def table(found: dict[str, Any]) -> str:
    """Every arm at equal tokens, less on policy at the same rate and seed."""
    ((setting, rates),) = EXPERIMENT.sweep.items()
    ends = ["", *(f" {setting}={rate}" for rate in rates)]
    head = ["drawn", *(f"{name}, {what}" for name in ("3e-4", "3e-3") for what in TOLD)]
    rows = []
    for name in EXPERIMENT.recipes:
        cells = [name]
        for end in ends:
            there = at(found[name + end], "tokens", TOKENS)
            gap = there - at(found[BASE + end], "tokens", TOKENS)
            cells += [shown(there), "" if name == BASE else shown(gap, signed=True)]
        rows.append(cells)
    return markdown(head, rows)


TOLD = ("pass rate", f"less {BASE}")


if __name__ == "__main__":
    print(table(json.loads((HERE / "results.json").read_text())))
