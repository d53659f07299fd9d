"""As `experiments.text_starts.again`, on the longest problems, to 64 thousand tokens.

Command:  python -m curax.compare experiments/text_starts/again_sparse.py
"""

from curax.compare.experiment import Experiment
from experiments.text_starts import again


def get_experiment() -> Experiment:
    """Both arms at one rate from each start, of the regime sparse."""
    return again.get_experiment("sparse", times=1, every=15)
