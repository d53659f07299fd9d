"""Reinforce-Ada-Seq, balanced, as released: draw until two of each are there, keep 4.

Paper:    Xiong et al. 2025, "Reinforce-Ada: An Adaptive Sampling Framework for
          Reinforce-Style LLM Training", arXiv:2510.04996, sequential sampling.
Command:  python -m curax.train --config configs/ada_seq_balanced_published.py
w(p):     C+ / p - C- / (1 - p) over the pools it stops, (C+, C-) = E[(j / 4) (1 - q)],
          E[-(1 - j / 4) q], q the share of right ones in the pool and j how many of the
          4 are right. At p = 0.01, 0.05, 0.1, 0.5, 0.9 it is 7.52, 5.86, 3.95, 1.00,
          3.95. Were both kinds plentiful, it would be ((1 - p)^2 + p^2) / (2 p (1 -
          p)), f = log(p / (1 - p)) / 2 - p; at p = 0.01 that is 49.5, but few pools of
          32 hold two right ones. Easy prompts are boosted as much as hard ones; log p
          it is not.
Here:     Rounds of 8, at most 4 of them, 4 kept, as released; 32 prompts per step, the
          released runs have 512. Right is above 0.5, there 0.7. Dual clip 10 as
          released, no KL and no entropy bonus, for which the paper has 1e-4; 2 updates
          per batch, there 4. The text divides by the pass rate; no released code and
          most likely no published number does, nor does this. Tokens are averaged over
          the batch, which depends on content.
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
        correct=correct.none,
        advantage=advantage.group_mean,
        claim=objective.log,
        loss=partial(loss.clipped_ratio, low=0.2, high=0.28, dual=10.0),
        aggregate=aggregate.token_mean,
    )
