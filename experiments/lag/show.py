"""Table of `results.json`.

Command:  python -m experiments.lag.show
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from curax.compare import statistics
from curax.runs import reading
from curax.settings.tables import markdown
from experiments.lag.experiment import get_experiment

HERE = Path(__file__).parent
EXPERIMENT = get_experiment()
TOKENS = EXPERIMENT.tokens
BASE = "on_policy"


def shown(values: np.ndarray, *, signed: bool = False) -> str:
    """Mean and half a 95 % t-interval over seeds."""
    middle, half = reading.t_interval(values)
    return f"{middle:{'+' if signed else ''}.3f} ± {half:.3f}"


def at(own: Mapping[str, Any]) -> np.ndarray:
    """`[seeds]` pass rates where each seed has drawn the tokens of the experiment."""
    return statistics.at(np.array(own["tokens"]), np.array(own["rate"]), TOKENS)


def table(found: dict[str, Any]) -> str:
    """Every arm at equal tokens, less on policy at the same rate and seed."""
    ((setting, rates),) = EXPERIMENT.sweep.items()
    ends = ["", *(f" {setting}={rate}" for rate in rates)]
    head = ["drawn", *(f"{name}, {what}" for name in ("3e-4", "3e-3") for what in TOLD)]
    rows = []
    for name in EXPERIMENT.recipes:
        cells = [name]
        for end in ends:
            there = at(found[name + end])
            gap = there - at(found[BASE + end])
            cells += [shown(there), "" if name == BASE else shown(gap, signed=True)]
        rows.append(cells)
    return markdown(head, rows)


TOLD = ("pass rate", f"less {BASE}")


if __name__ == "__main__":
    print(table(json.loads((HERE / "results.json").read_text())))
