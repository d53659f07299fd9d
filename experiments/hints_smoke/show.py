"""Tables and picture of `results.json`.

Command:  python -m experiments.hints_smoke.show
"""

import json
from pathlib import Path
from typing import Any

import numpy as np

from curax.runs import reading
from curax.settings.tables import markdown
from experiments import smoke
from experiments.hints_smoke.experiment import get_experiment

HERE = Path(__file__).parent
RECIPES = get_experiment().recipes
TOKENS = get_experiment().tokens
AT = (TOKENS // 4, TOKENS // 2, TOKENS)
UPDATES = 150


def hints(found: dict[str, Any]) -> str:
    """What became of hints, early and late: means over seeds and ten updates."""
    head = ["recipe", "groups hinted", "pass rate hinted", "all wrong without"]
    head += ["hinted, late", "all wrong without, late"]
    lines = []
    for name, own in found.items():
        if "hint/pass_rate" not in own["seen"]:
            continue
        spent = np.array(own["tokens"]).mean(1)
        late = int(np.searchsorted(spent, TOKENS / 2)) - 1

        def mean(metric: str, point: int, seen: Any = own["seen"]) -> str:
            return f"{np.mean(seen[metric][point]):.3f}"

        line = [name, mean("hint/hinted_fraction", 0), mean("hint/pass_rate", 0)]
        line += [mean("group/failed_fraction", 0), mean("hint/hinted_fraction", late)]
        lines.append([*line, mean("group/failed_fraction", late)])
    return markdown(head, lines)


def main() -> None:
    """Print the tables, draw the picture."""
    results = json.loads((HERE / "results.json").read_text())
    found = {name: results[name] for name in RECIPES if name in results}
    print(smoke.table(found, "grpo", AT, UPDATES), end="\n\n")
    print(hints(found))
    smoke.draw(HERE / "curves.png", found, "grpo", TOKENS)
    middle, half = reading.t_interval(np.array(found["grpo"]["rate"][0]))
    print(f"\nbefore RL {middle:.3f} ± {half:.3f}")
    print(f"commit {', '.join(sorted({own['commit'] for own in found.values()}))}")


if __name__ == "__main__":
    main()
