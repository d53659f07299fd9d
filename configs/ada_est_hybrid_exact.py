"""Reinforce-Ada-Est, hybrid, its weight taken from memory and not from the draws.

Paper:    Xiong et al. 2025, "Reinforce-Ada: An Adaptive Sampling Framework for
          Reinforce-Style LLM Training", arXiv:2510.04996, estimation, hybrid.
Command:  python -m curax.train --config configs/ada_est_hybrid_exact.py
w(p):     E[n(q) / sqrt(q)] / 16, q the pass rate in memory: in proportion to 1 / p as
          far as q is p and the batch has budget. At p = 0.01, 0.05, 0.1, 0.5, 0.9 it is
          9.3, 5.1, 3.0, 0.68, 0.39: 14 times as much at 0.01 as at 0.5, where log p
          asks for 50.
Here:     Leave one out, so that nothing but the memory stands between this and log p.
          Beta(1, 16) with 0.9 per visit, 2 to 32 draws, 8 on average.
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
        correct=correct.none,
        advantage=advantage.leave_one_out,
        objective=partial(
            objective.history_weight, f=partial(objective.power, alpha=0.5), low=0.001
        ),
        claim=objective.log,
        loss=partial(loss.clipped_ratio, low=0.2, high=0.28),
        aggregate=partial(aggregate.constant_length, length=8),
    )
