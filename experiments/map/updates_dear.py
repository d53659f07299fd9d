"""The regime updates_dear of the map, its recipes as tuned.

Command:  python -m curax.compare experiments/map/updates_dear.py
"""

from curax.compare.experiment import Experiment
from experiments.map import regimes


def get_experiment() -> Experiment:
    """Recipes at the settings that tuning chose, with 20 fresh seeds."""
    return regimes.claimed("updates_dear")
