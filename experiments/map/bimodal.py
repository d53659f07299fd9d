"""The regime bimodal of the map, its recipes as tuned.

Command:  python -m curax.compare experiments/map/bimodal.py
"""

from curax.compare.experiment import Experiment
from experiments.map import regimes


def get_experiment() -> Experiment:
    """Recipes at the settings that tuning chose, with 20 fresh seeds."""
    return regimes.claimed("bimodal")
