"""The regime no_verifier of the map, its recipes as tuned.

Command:  python -m curax.compare experiments/map/no_verifier.py
"""

from curax.compare.experiment import Experiment
from experiments.map import regimes


def get_experiment() -> Experiment:
    """Recipes at the settings that tuning chose, with 20 fresh seeds."""
    return regimes.claimed("no_verifier")
