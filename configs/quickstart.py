"""Chains of modular arithmetic from scratch: a warm start, then GRPO without std.

Paper:    Liu et al. 2025, "Dr. GRPO", arXiv:2503.20783: mean baseline, constant length.
Command:  python -m curax.train
w(p):     1 - 1/8, whatever p: the objective is the pass rate itself.
"""

from functools import partial

from curax import advantage, aggregate, loss
from curax.config import Config, Sampling
from curax.testbed import embedded


def get_config() -> Config:
    return embedded(
        sampling=Sampling(prompts=16, group_size=8, max_tokens=8),
        advantage=advantage.group_mean,
        loss=partial(loss.clipped_ratio, low=0.2, high=0.28),
        aggregate=partial(aggregate.constant_length, length=8),
        steps=400,
    )
