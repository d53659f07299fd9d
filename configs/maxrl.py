"""MaxRL: the mean over the right ones, less the mean over all, per prompt.

Paper:    MaxRL, arXiv:2602.02710.
Command:  python -m curax.train --config configs/maxrl.py
w(p):     (1 - (1 - p)^7) / p: log p, truncated one below the 8 draws, since the pass
          rate of a group is its own baseline.
Here:     8 completions of 16 prompts. A = (r - q) / q with q the share of right ones.
"""

from functools import partial

from curax import advantage, aggregate, loss, objective
from curax.config import Config, Sampling
from curax.testbed import embedded


def get_config() -> Config:
    return embedded(
        sampling=Sampling(prompts=16, group_size=8, max_tokens=8),
        advantage=advantage.group_mean,
        objective=partial(objective.prompt_weight, f=objective.log),
        claim=objective.log,
        loss=partial(loss.clipped_ratio, low=0.2, high=0.28),
        aggregate=partial(aggregate.constant_length, length=8),
    )
