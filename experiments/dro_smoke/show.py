"""Tables and picture of `results.json`.

Command:  python -m experiments.dro_smoke.show
"""

import json
from pathlib import Path

import numpy as np

from curax.runs import reading
from experiments import smoke
from experiments.dro_smoke.experiment import get_experiment

HERE = Path(__file__).parent
RECIPES = get_experiment().recipes
TOKENS = get_experiment().tokens
AT = (TOKENS // 4, TOKENS // 2, TOKENS)
UPDATES = 120


def main() -> None:
    """Print the tables, draw the picture."""
    results = json.loads((HERE / "results.json").read_text())
    found = {name: results[name] for name in RECIPES if name in results}
    print(smoke.table(found, "mean", AT, UPDATES), end="\n\n")
    for name, own in found.items():
        seen = {key: np.array(value) for key, value in own["seen"].items()}
        ends = {key: (v[0].mean(), v[-1].mean()) for key, v in seen.items()}
        told = [f"{key} {a:.2f} -> {b:.2f}" for key, (a, b) in ends.items()]
        print(f"{name}: {', '.join(told)}")
    smoke.draw(HERE / "curves.png", found, "mean", TOKENS)
    middle, half = reading.t_interval(np.array(found["mean"]["rate"][0]))
    print(f"\nbefore RL {middle:.3f} ± {half:.3f}")
    print(f"commit {', '.join(sorted({own['commit'] for own in found.values()}))}")


if __name__ == "__main__":
    main()
