"""Tables and picture of `results.json`.

Command:  python -m experiments.hints_smoke.show
"""

import json
from typing import Any

import numpy as np

from curax import record
from experiments import smoke
from experiments.hints_smoke.run import HERE, RECIPES, TOKENS

AT = (TOKENS // 4, TOKENS // 2, TOKENS)
UPDATES = 150


def hints(found: dict[str, Any]) -> str:
    """What became of hints, early and late: means over seeds and ten updates."""
    head = ["recipe", "groups hinted", "pass rate hinted", "all wrong without"]
    head += ["hinted, late", "once hinted, without, late"]
    lines = [head, ["---"] * len(head)]
    for name, own in found.items():
        if "hint/pass_rate" not in own["seen"]:
            continue
        spent = np.array(own["tokens"]).mean(1)
        late = int(np.searchsorted(spent, TOKENS / 2)) - 1

        def mean(metric: str, point: int, seen: Any = own["seen"]) -> str:
            return f"{np.mean(seen[metric][point]):.3f}"

        line = [name, mean("hint/hinted_fraction", 0), mean("hint/pass_rate", 0)]
        line += [mean("group/failed_fraction", 0), mean("hint/hinted_fraction", late)]
        lines.append([*line, mean("hint/transfer_pass_rate", late)])
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def main() -> None:
    """Print the tables, draw the picture."""
    results = json.loads((HERE / "results.json").read_text())
    found = {name: results[name] for name in RECIPES if name in results}
    harder = {name: own for name, own in found.items() if name.endswith("_harder")}
    plain = {name: own for name, own in found.items() if name not in harder}
    print(smoke.table(plain, "grpo", AT, UPDATES), end="\n\n")
    print(smoke.table(harder, "grpo_harder", AT, UPDATES), end="\n\n")
    print(hints(found))
    smoke.draw(HERE / "curves.png", plain, "grpo", TOKENS)
    smoke.draw(HERE / "harder.png", harder, "grpo_harder", TOKENS)
    for name in ("grpo", "grpo_harder"):
        middle, half = record.interval(np.array(found[name]["rate"][0]))
        print(f"\n{name} before RL {middle:.3f} ± {half:.3f}")
    print(f"commit {', '.join(sorted({own['commit'] for own in found.values()}))}")


if __name__ == "__main__":
    main()
