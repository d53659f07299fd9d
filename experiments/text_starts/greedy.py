"""The arms of mixed at 3e-4 by `curax train`, which evaluates greedily as well.

Command:  python -m curax.train --config experiments/text_starts/greedy.py
              --set model.path=runs/text/20
and the same with `advantage=advantage.raw`, for right completions alone.

As many updates as the comparison makes of 64 thousand tokens, four seeds side by side,
on four times the held-out problems, at the start and at the end.
"""

from curax.comparison import experiment as comparison
from curax.config import Config, override
from experiments.text_starts import experiment

STEPS = 43


def get_config() -> Config:
    """RLOO from the first start."""
    name = experiment.arm("centred-fixed-one", "3e-4")
    place = experiment.condition("mixed", experiment.STARTS[0])
    made = comparison.arms(experiment.get_experiment())
    (config,) = (one.config for one in made if one.name == f"{name} @ {place}")
    ends = {"steps": STEPS, "evaluation.every": STEPS, "evaluation.prompts": 512}
    return override(config, ends)
