"""Rewards by references, agreement and a verifier from another start, and greedily.

Command:  python -m curax.compare experiments/references_control/greedy.py

The start is that of README.md by another seed of pretraining.
"""

from dataclasses import replace

from curax.compare.experiment import Experiment
from curax.config import override
from experiments.references import experiment as references
from experiments.references_control import experiment

SEED = 33
START = f"runs/text/sentences-{SEED}"
ARMS = ("aggregate-1e-4", "aggregate-3e-4", "agreement-1e-4")
RIGHT = "right-3e-4"  # right ones alone, by the verifier, at the rate it took there


def get_experiment() -> Experiment:
    """Two ways without a verifier and one with, on four times the held-out problems."""
    made = experiment.get_experiment()
    by_verifier = references.get_experiment().recipes["raft_plus_plus"]
    rate = {"optimizer.learning_rate": experiment.RATES[experiment.TAKEN]}
    return replace(
        made,
        recipes={
            **{name: made.recipes[name] for name in ARMS},
            RIGHT: override(by_verifier, rate),
        },
        common={**made.common, "model.path": START, "evaluation.prompts": 512},
        every=2 * made.every,
        baseline=ARMS[0],
    )
