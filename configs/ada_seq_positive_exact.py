"""Reinforce-Ada-Seq, positive, exact: what stopping and keeping did is undone.

Paper:    Xiong et al. 2025, "Reinforce-Ada: An Adaptive Sampling Framework for
          Reinforce-Style LLM Training", arXiv:2510.04996, sequential sampling.
Command:  python -m curax.train --config configs/ada_seq_positive_exact.py
w(p):     (1 - (1 - p)^32) / p, whatever the rule: log p, truncated at the 32 draws a
          prompt may have.
Here:     The mean over the right ones, with the number of draws as control variate: all
          right and all wrong pools train too, and their parts cancel in expectation.
          Rounds of 8, at most 4 of them, 4 kept at random within each class.
"""

from functools import partial

from curax import advantage, aggregate, correct, downsample, loss, objective, stop
from curax.config import Config, Sampling, Stop
from curax.testbed import embedded


def get_config() -> Config:
    return embedded(
        sampling=Sampling(prompts=32, group_size=32, max_tokens=8),
        stop=Stop(rule=stop.positives, round_size=8),
        downsample=partial(downsample.balanced, m=4),
        correct=partial(correct.control_variate, rows=4, limit=32),
        advantage=advantage.signed,
        claim=objective.log,
        loss=partial(loss.clipped_ratio, low=0.2, high=0.28),
        aggregate=partial(aggregate.constant_length, length=8),
    )
