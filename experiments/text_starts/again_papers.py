"""As `experiments.text_starts.again`, four methods of papers, to 64 thousand tokens.

Command:  python -m curax.compare experiments/text_starts/again_papers.py

Of the sizes of `experiments.text`, at the rate that tuning took there for each.
"""

from dataclasses import replace

from curax.compare.experiment import Experiment
from curax.config import override
from experiments.text import experiment as text
from experiments.text_starts import again, experiment

EVERY = 11  # updates; DAPO makes 22 in 64 thousand tokens, PODS 43


def get_experiment() -> Experiment:
    """Each at one rate from each start, of the regime mixed."""
    every = text.recipes()
    rate = {"optimizer.learning_rate": experiment.RATES[again.RATE]}
    return replace(
        again.get_experiment(),
        recipes={
            experiment.arm(name, again.RATE): override(every[name], rate)
            for name in text.PAPERS
        },
        tokens=text.HOW["tokens"],
        steps=text.HOW["steps"],
        every=EVERY,
    )
