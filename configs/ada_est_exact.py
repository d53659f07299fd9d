"""Reinforce-Ada-Est on the log objective: the memory decides draws, never weights.

Paper:    Xiong et al. 2025, "Reinforce-Ada: An Adaptive Sampling Framework for
          Reinforce-Style LLM Training", arXiv:2510.04996, estimation, for the
          allocation.
Command:  python -m curax.train --config configs/ada_est_exact.py
w(p):     E[(1 - (1 - p)^n) / p], n as allocated from earlier visits: log p, truncated
          at the n draws of the prompt. At p = 0.01, 0.05, 0.1, 0.5, 0.9 it is 25, 13,
          7.7, 1.9, 1.11, where log p asks for 100, 20, 10, 2, 1.1.
Here:     Leave one out, weights unbiased in every group, and 8 / n so that all prompts
          count alike. At least 2 and at most 32 draws for a prompt.
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
        allocate=partial(allocate.inverse_pass_rate, least=2),
        correct=partial(correct.per_prompt, rows=8),
        advantage=advantage.leave_one_out,
        objective=partial(objective.series, coefficients=objective.log_coefficients),
        claim=objective.log,
        loss=partial(loss.clipped_ratio, low=0.2, high=0.28),
        aggregate=partial(aggregate.constant_length, length=8),
    )
