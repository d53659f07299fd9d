"""Right ones alone beside RLOO on text, from six starts that nobody chose.

Command:  python -m curax.compare experiments/text_starts

Sizes and arms are those of `experiments.text`. Each rate is an arm of its own, so that
what tuning takes is known of every start; README.md says how to make the starts.
"""

from curax.compare.experiment import Experiment
from curax.config import override
from experiments.text import experiment

ARMS = ("centred-fixed-one", "right-fixed-one")  # RLOO, and `right_only` of 4
RATES = {"1.5e-4": 1.5e-4, "3e-4": 3e-4, "6e-4": 6e-4}
REGIMES = ("mixed", "sparse")
STARTS = range(20, 26)  # seeds of pretraining


def arm(name: str, rate: str) -> str:
    """Name of an arm at a rate."""
    return f"{name}-{rate}"


def condition(regime: str, start: int) -> str:
    """Name of a regime from a start."""
    return f"{regime}-{start}"


def get_experiment() -> Experiment:
    """Both at three rates from each start, on all problems and on the longest."""
    every = experiment.recipes()
    how = {**experiment.HOW, "tune": {}, "seeds": 4}
    return Experiment(
        recipes={
            arm(name, text): override(every[name], {"optimizer.learning_rate": rate})
            for name in ARMS
            for text, rate in RATES.items()
        },
        common=experiment.COMMON,
        conditions={
            condition(regime, start): {
                "model.path": f"runs/text/{start}",
                **experiment.REGIMES[regime],
            }
            for regime in REGIMES
            for start in STARTS
        },
        **how,
    )
