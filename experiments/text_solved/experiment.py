"""Four arms on text once more where most is solved: another start, four rates.

Command:  python -m curax.compare experiments/text_solved

Task, sizes and arms are those of the regime solved of `experiments.text`, from the
checkpoint `start`, which README.md says how to make.
"""

from curax.compare.experiment import Experiment
from experiments.factorial.run import ARMS
from experiments.text import experiment

RATES = (3e-5, 1e-4, 3e-4, 1e-3)
NAME = "solved_again"


def get_experiment() -> Experiment:
    """Arms of weight one, each rate tuned by twice the seeds, at equal tokens drawn."""
    how = {
        **experiment.HOW,
        "tune": {"optimizer.learning_rate": RATES},
        "tuning_seeds": 4,
    }
    task = experiment.REGIMES["solved"]
    every = experiment.recipes()
    return Experiment(
        recipes={arm: every[arm] for arm in ARMS if arm.endswith("one")},
        common=experiment.COMMON,
        conditions={NAME: {"model.path": "experiments/text_solved/start", **task}},
        **how,
    )
