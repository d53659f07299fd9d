"""Mastermind: three guesses at a hidden code, each answered in the loop.

Paper:    Liu et al. 2025, "Dr. GRPO", arXiv:2503.20783: mean baseline, constant length.
Command:  python -m curax.train --config configs/mastermind.py
w(p):     1 - 1/16, whatever p: the objective is the pass rate itself.
Here:     completions have turns: the answers to guesses are read and not trained. A
          group shares its prompt, and each completion has a code of its own. The best
          policy finds .979 of those held out, by search.
"""

from functools import partial

from curax import advantage, aggregate, loss
from curax.config import Config, Evaluation, Sampling
from curax.tasks import mastermind
from curax.testbed import embedded


def get_config() -> Config:
    return embedded(
        task=mastermind.task,
        sampling=Sampling(prompts=16, group_size=16, max_tokens=9),
        advantage=advantage.group_mean,
        loss=partial(loss.clipped_ratio, low=0.2, high=0.28),
        aggregate=partial(aggregate.constant_length, length=9),
        evaluation=Evaluation(every=50, prompts=9, samples=64),
        steps=400,
    )
