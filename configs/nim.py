"""Nim: six turns or so against an opponent who plays at random, and one outcome.

Paper:    Liu et al. 2025, "Dr. GRPO", arXiv:2503.20783: mean baseline, constant length.
Command:  python -m curax.train --config configs/nim.py
w(p):     1 - 1/16, whatever p: the objective is the pass rate itself.
Here:     completions have turns: what the opponent leaves is read and not trained. The
          warm start plays at random and wins half; the best policy wins .993 of the
          held-out games, by dynamic programming.
"""

from functools import partial

from curax import advantage, aggregate, loss
from curax.config import Config, Evaluation, Sampling
from curax.tasks import nim
from curax.testbed import embedded


def get_config() -> Config:
    return embedded(
        task=nim.task,
        sampling=Sampling(prompts=16, group_size=16, max_tokens=36),
        advantage=advantage.group_mean,
        loss=partial(loss.clipped_ratio, low=0.2, high=0.28),
        aggregate=partial(aggregate.constant_length, length=36),
        evaluation=Evaluation(every=50, prompts=10, samples=64),
    )
