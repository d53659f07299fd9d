"""Reinforce-Ada-Est, hybrid, as written: half of 1/p by draws, half by weights.

Paper:    Xiong et al. 2025, "Reinforce-Ada: An Adaptive Sampling Framework for
          Reinforce-Style LLM Training", arXiv:2510.04996, estimation, hybrid.
Command:  python -m curax.train --config configs/ada_est_hybrid_published.py
w(p):     E[n sqrt(q) (1 - q)] / (8 p (1 - p)), q = k / n the share of right ones: less
          than in proportion to 1 / p for hard prompts, since 1 / sqrt(q) of a noisy q
          is too small there: 0.34 of 1 / sqrt(p) at p = 0.02 in a group of 8. At p =
          0.01, 0.05, 0.1, 0.5, 0.9 it is 12, 6.5, 4.1, 1.0, 0.58.
Here:     No code was released and no constants are given: Beta(1, 16) with 0.9 per
          visit, 2 to 32 draws, 8 on average. Tokens are averaged over the batch, which
          depends on content.
          512 prompts to train on: what is remembered of one is read when it comes
          back.
"""

from functools import partial

from curax import advantage, aggregate, allocate, correct, loss, objective
from curax.config import Config, Memory, Sampling
from curax.tasks import chain
from curax.testbed import embedded


def get_config() -> Config:
    return embedded(
        task=partial(chain.task, num_prompts=512),
        sampling=Sampling(prompts=16, group_size=32, max_tokens=8, budget=128),
        memory=Memory(half_life=6.58, prior=(1.0, 16.0)),
        allocate=allocate.inverse_root,
        correct=partial(correct.inverse_pass_rate, power=0.5),
        advantage=advantage.group_mean,
        claim=objective.log,
        loss=partial(loss.clipped_ratio, low=0.2, high=0.28),
        aggregate=aggregate.token_mean,
    )
