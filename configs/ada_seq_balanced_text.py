"""Reinforce-Ada-Seq, balanced, as printed: the group is divided by its pass rate.

Paper:    Xiong et al. 2025, "Reinforce-Ada: An Adaptive Sampling Framework for
          Reinforce-Style LLM Training", arXiv:2510.04996, third version, whose text
          divides the advantages of a group by its pass rate.
Command:  python -m curax.train --config configs/ada_seq_balanced_text.py
w(p):     C+ / p - C- / (1 - p) over the pools it stops, (C+, C-) = E[(j / 4) (1 - q) /
          q], E[-(1 - j / 4); q > 0], q the share of right ones in the pool and j how
          many of the 4 are right. At p = 0.01, 0.05, 0.1, 0.5, 0.9 it is 205, 96.7,
          41.4, 2.24, 4.62: one factor for a whole group cannot undo a selection that
          treats its halves unlike.
Here:     As ada_seq_balanced_published but for the division by the pass rate of the
          pool, which no released code has and with which most likely no published
          number was measured; a pool without a right one has no advantage to divide.
"""

from functools import partial

from curax import advantage, aggregate, correct, downsample, loss, objective, stop
from curax.config import Config, Sampling, Stop
from curax.testbed import embedded


def get_config() -> Config:
    return embedded(
        sampling=Sampling(prompts=32, group_size=32, max_tokens=8),
        stop=Stop(rule=partial(stop.balanced, right=2, wrong=2), round_size=8),
        downsample=partial(downsample.balanced, m=4, first=True),
        correct=correct.inverse_pass_rate,
        advantage=advantage.group_mean,
        claim=objective.log,
        loss=partial(loss.clipped_ratio, low=0.2, high=0.28, dual=10.0),
        aggregate=aggregate.token_mean,
    )
