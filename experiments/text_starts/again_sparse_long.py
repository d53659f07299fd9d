"""As `experiments.text_starts.again_sparse`, to four times the tokens.

Command:  python -m curax.compare experiments/text_starts/again_sparse_long.py

Its arms have the names of that, so they are kept in a folder of their own.
"""

from curax.compare.experiment import Experiment
from experiments.text_starts import again


def get_experiment() -> Experiment:
    """Both arms at one rate from each start, of the regime sparse."""
    return again.get_experiment("sparse", every=31)
