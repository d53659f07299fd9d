"""Reinforce-Ada-Est as released: draws in inverse proportion to the pass rate.

Paper:    Xiong et al. 2025, "Reinforce-Ada: An Adaptive Sampling Framework for
          Reinforce-Style LLM Training", arXiv:2510.04996, estimation, implicit.
Command:  python -m curax.train --config configs/ada_est_published.py
w(p):     (E[n(p)] - 1) / 8, n(p) = 1 and a share of the rest in proportion to 1 / q, q
          the pass rate in memory: n is how 1 / p is implemented, so log p as far as q
          is p and the batch has budget. At p = 0.01, 0.05, 0.1, 0.5, 0.9 it is 3.7,
          2.8, 2.0, 0.52, 0.30: 7 times as much at 0.01 as at 0.5, where log p asks for
          50. Tokens are averaged over the batch, which depends on content.
Here:     Beta(1, 16), counts discounted by 0.9 per visit, 8 draws per prompt on
          average, as released; at most 32 for a prompt, there no bound. Right is above
          0.5, there 0.7. Clip and dual clip as in the script of the sequential form. 16
          prompts per step.
          512 prompts to train on: what is remembered of one is read when it comes back.
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
        allocate=allocate.inverse_pass_rate,
        correct=correct.none,
        advantage=advantage.group_mean,
        claim=objective.log,
        loss=partial(loss.clipped_ratio, low=0.2, high=0.28, dual=10.0),
        aggregate=aggregate.token_mean,
    )
