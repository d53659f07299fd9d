"""Reinforce-Ada-Est on the log objective: the memory decides draws, never weights.

Paper:    Xiong et al. 2025, "Reinforce-Ada: An Adaptive Sampling Framework for
          Reinforce-Style LLM Training", arXiv:2510.04996, estimation, for the
          allocation.
Command:  python -m curax.train --config configs/ada_est_exact.py
w(p):     (1 - (1 - p)^4) / p: log p, truncated at the 4 draws that every prompt gets at
          least, exactly and under any allocation: what more a prompt draws lowers its
          noise alone. At p = 0.01, 0.05, 0.1, 0.5, 0.9 it is 3.94, 3.71, 3.44, 1.88,
          1.11, where log p asks for 100, 20, 10, 2, 1.1, which no 4 draws reach.
Here:     Leave one out, and 8 / n so that all prompts count alike. At least 4 and at
          most 32 draws for a prompt. Without `objective.terms` log p is truncated at
          each prompt's own n, which the memory decides: hard prompts weigh more, and
          the objective is one of the allocation.
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
        allocate=partial(allocate.inverse_pass_rate, least=4),
        correct=partial(correct.per_prompt, rows=8),
        advantage=advantage.leave_one_out,
        objective=partial(
            objective.series, coefficients=objective.log_coefficients, terms=4
        ),
        loss=partial(loss.clipped_ratio, low=0.2, high=0.28),
        aggregate=partial(aggregate.constant_length, length=8),
    )
