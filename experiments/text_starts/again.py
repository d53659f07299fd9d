"""Six more starts, to four times the tokens, in draws and greedily.

Command:  python -m curax.compare experiments/text_starts/again.py

On four times the held-out problems of `experiments.text_starts.experiment`, at the rate
that both arms take there; again_sparse.py is of the other regime, as far as there, and
again_sparse_long.py to four times that.
"""

from dataclasses import replace

from curax.compare.experiment import Experiment
from experiments.text import experiment as text
from experiments.text_starts import experiment, long

RATE = "3e-4"
STARTS = range(26, 32)  # seeds of pretraining
EVERY = 43  # updates, which draw 64 thousand tokens in mixed


def get_experiment(
    regime: str = long.REGIME, times: int = long.TIMES, every: int = EVERY
) -> Experiment:
    """Both arms at one rate from each start, of a regime, to `times` the tokens."""
    made = experiment.get_experiment()
    names = [experiment.arm(name, RATE) for name in experiment.ARMS]
    return replace(
        made,
        recipes={name: made.recipes[name] for name in names},
        common={**made.common, "evaluation.prompts": 512},
        conditions={
            experiment.condition(regime, start): {
                "model.path": f"runs/text/{start}",
                **text.REGIMES[regime],
            }
            for start in STARTS
        },
        tokens=times * text.HOW["tokens"],
        steps=times * text.HOW["steps"],
        every=every,
    )
