"""Draws in proportion to the standard deviation of outcomes, every prompt counts alike.

Paper:    DynaMO, arXiv:2602.19208, whose allocation is meant; Neyman 1934, "On the Two
          Different Aspects of the Representative Method".
Command:  python -m curax.train --config configs/dynamo_allocation_exact.py
w(p):     1, whatever p: the objective is the pass rate itself.
Here:     The square root of p (1 - p), smoothed by Beta(1/2, 1/2), where the release
          takes p (1 - p) itself, by which nothing is gained over equal shares. Leave
          one out without std, and weights 16 / n.
          512 prompts to train on: what is remembered of one is read when it comes
          back.
"""

from functools import partial

from curax import advantage, aggregate, allocate, correct, loss
from curax.config import Config, Sampling
from curax.tasks import chain
from curax.testbed import embedded


def get_config() -> Config:
    return embedded(
        task=partial(chain.task, num_prompts=512),
        sampling=Sampling(prompts=8, group_size=24, max_tokens=8, budget=128),
        allocate=partial(allocate.bernoulli, least=8),
        correct=partial(correct.per_prompt, rows=16),
        advantage=advantage.leave_one_out,
        loss=partial(loss.clipped_ratio, low=0.2, high=0.28),
        aggregate=partial(aggregate.constant_length, length=8),
    )
