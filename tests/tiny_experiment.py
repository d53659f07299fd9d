"""Two recipes of a policy that knows the last token alone, and a swept rate."""

from dataclasses import replace
from functools import partial

import small
import tiny

from curax import advantage
from curax.compare.experiment import Experiment
from curax.config import override


def get_experiment() -> Experiment:
    config = override(small.get_config(), {"warm_start.steps": 3})
    config = replace(config, model=partial(tiny.table))
    return Experiment(
        recipes={
            "plain": config,
            "centred": (config, {"advantage": advantage.group_mean}),
        },
        sweep={"optimizer.learning_rate": (0.003, 0.01)},
        seeds=2,
        tokens=100,
        steps=8,
        every=1,
        threshold=0.5,
        watched=("outcome/mean",),
    )
