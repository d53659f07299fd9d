"""Reinforce-Ada-Seq, positive, as released: draw until a right one is there, keep 4.

Paper:    Xiong et al. 2025, "Reinforce-Ada: An Adaptive Sampling Framework for
          Reinforce-Style LLM Training", arXiv:2510.04996, sequential sampling.
Command:  python -m curax.train --config configs/ada_seq_positive_published.py
w(p):     C+ / p - C- / (1 - p) over the pools it stops, (C+, C-) = E[(j / 4) (1 - q)],
          E[-(1 - j / 4) q], q the share of right ones in the pool and j how many of the
          4 are right. At p = 0.01, 0.05, 0.1, 0.5, 0.9 it is 6.61, 4.27, 2.80, 0.973,
          1.58: neither log p, nor p.
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
        stop=Stop(rule=stop.positives, round_size=8),
        downsample=partial(downsample.balanced, m=4, first=True),
        correct=correct.none,
        advantage=advantage.group_mean,
        claim=objective.log,
        loss=partial(loss.clipped_ratio, low=0.2, high=0.28, dual=10.0),
        aggregate=aggregate.token_mean,
    )
