"""The same six starts on all problems, with four times the tokens.

Command:  python -m curax.compare experiments/text_starts/long.py

At the two lower rates of `experiments.text_starts.experiment`, the higher first, which
is all that README.md has.
"""

from dataclasses import replace

from curax.compare.experiment import Experiment
from experiments.text import experiment as text
from experiments.text_starts import experiment

TIMES = 4
REGIME = "mixed"
RATES = ("3e-4", "1.5e-4")


def get_experiment() -> Experiment:
    """Both arms at two rates from each start, of the regime mixed."""
    made = experiment.get_experiment()
    arms = [experiment.arm(name, x) for name in experiment.ARMS for x in RATES]
    places = [experiment.condition(REGIME, start) for start in experiment.STARTS]
    return replace(
        made,
        recipes={name: made.recipes[name] for name in arms},
        conditions={name: made.conditions[name] for name in places},
        tokens=TIMES * text.HOW["tokens"],
        steps=TIMES * text.HOW["steps"],
        every=2 * text.HOW["every"],
    )
