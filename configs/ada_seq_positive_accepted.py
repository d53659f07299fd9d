"""Reinforce-Ada-Seq, positive, exact without a baseline: the mean over right ones.

Paper:    Xiong et al. 2025, "Reinforce-Ada: An Adaptive Sampling Framework for
          Reinforce-Style LLM Training", arXiv:2510.04996, sequential sampling; the mean
          over the accepted of Yao et al. 2025, GVM, arXiv:2505.02391, Algorithm 1.
Command:  python -m curax.train --config configs/ada_seq_positive_accepted.py
w(p):     (1 - (1 - p)^32) / p, whatever the rule: log p, truncated at the 32 draws a
          prompt may have.
Here:     Right completions alone train, 4 at most, kept at random; their mean is exact
          when draws stop early. Without a baseline it is noisier on easy prompts than
          ada_seq_positive_exact, which has the number of draws as control variate and
          trains pools of one kind too. Rounds of 8, at most 4 of them.
"""

from functools import partial

from curax import advantage, aggregate, correct, downsample, gate, loss, objective, stop
from curax.config import Config, Sampling, Stop
from curax.testbed import embedded


def get_config() -> Config:
    return embedded(
        sampling=Sampling(prompts=32, group_size=32, max_tokens=8),
        stop=Stop(rule=stop.positives, round_size=8),
        gate=gate.accepted,
        downsample=partial(downsample.random, m=4),
        correct=partial(correct.accepted_mean, rows=4),
        advantage=advantage.raw,
        claim=objective.log,
        loss=partial(loss.clipped_ratio, low=0.2, high=0.28),
        aggregate=partial(aggregate.constant_length, length=8),
    )
