"""Arms on text once more: a model eleven times as large, four times the tokens.

Command:  python -m curax.compare experiments/text_long

From a checkpoint that README.md says how to make; task and held-out problems are those
of the regime mixed of `experiments.text`, and so are the arms, of which those run whose
steps draw once.
"""

from curax.compare.experiment import Experiment
from experiments.text import experiment

RATES = (3e-5, 1e-4, 3e-4, 1e-3)


def get_experiment() -> Experiment:
    """Four arms and PODS, each rate tuned at the tokens of the claim."""
    how = {
        **experiment.HOW,
        "tune": {"optimizer.learning_rate": RATES},
        "tokens": 4 * experiment.HOW["tokens"],
        "steps": 4 * experiment.HOW["steps"],
        "every": 20,
    }
    return Experiment(
        recipes={
            name: recipe
            for name, recipe in experiment.recipes().items()
            if "fixed" in name or name == "pods_exact"
        },
        common={**experiment.COMMON, "update.tokens_per_micro_batch": 8192},
        conditions={"base": {"model.path": "runs/text/base"}},
        **how,
    )
