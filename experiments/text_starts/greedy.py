"""The arms of mixed at 3e-4 by `curax train`, which evaluates greedily as well.

Command:  for start in 20 21 22 23 24 25; do
              of="--config experiments/text_starts/greedy.py"
              set="--set model.path=runs/text/$start"
              where="--workdir runs/greedy"
              python -m curax.train $of $where/centred-fixed-one-$start $set
              python -m curax.train $of $where/right-fixed-one-$start $set \
                  advantage=advantage.raw
          done
          python -m experiments.text_starts.greedy runs/greedy

As many updates as the comparison makes of 64 thousand tokens, four seeds side by side,
on four times the held-out problems, at the start and at the end. The last line keeps
what was read in results_greedy.json.
"""

import json
import sys
from pathlib import Path

from curax.compare import experiment as comparison
from curax.config import Config, override
from curax.settings.cli import write_file
from experiments.text_starts import experiment

STEPS = 43
RESULTS = Path(__file__).parent / "results_greedy.json"
READ = {"draws": "eval/pass_rate", "greedy": "eval/greedy_pass_rate"}


def get_config() -> Config:
    """RLOO from the first start."""
    name = experiment.arm("centred-fixed-one", "3e-4")
    place = experiment.condition("mixed", experiment.STARTS[0])
    made = comparison.arms(experiment.get_experiment())
    (config,) = (one.config for one in made if one.name == f"{name} @ {place}")
    ends = {"steps": STEPS, "evaluation.every": STEPS, "evaluation.prompts": 512}
    return override(config, ends)


def main(folder: Path) -> None:
    """Keep the rates of all runs, `[2, R]` of each kind: at the start, at the end."""
    found = {}
    for start in experiment.STARTS:
        for arm in experiment.ARMS:
            path = folder / f"{arm}-{start}" / "metrics.jsonl"
            rows = [json.loads(line) for line in path.read_text().splitlines()]
            seen = [row for row in rows if READ["greedy"] in row]
            assert [row["step"] for row in seen] == [0, STEPS], path
            found[f"{arm} @ {start}"] = {
                kind: [row[name] for row in seen] for kind, name in READ.items()
            }
    write_file(RESULTS, json.dumps(found, indent=1).encode())


if __name__ == "__main__":
    main(Path(sys.argv[1]))
