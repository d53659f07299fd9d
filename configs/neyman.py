"""Neyman allocation: draws in proportion to the measured spread of the gradient.

Paper:    Neyman 1934, "On the Two Different Aspects of the Representative Method: The
          Method of Stratified Sampling and the Method of Purposive Selection", Journal
          of the Royal Statistical Society 97; for rollouts arXiv:2602.19208.
Command:  python -m curax.train --config configs/neyman.py
w(p):     1, whatever p: the objective is the pass rate itself. The allocation lowers
          the variance of a batch, by prediction: for evenly spread pass rates the
          squared coefficients add up to 0.95 of those of equal groups, at as many
          draws. Not that of every draw: at p = 0.1, 0.5, 0.9 the noise per draw is
          1.02, 0.95, 1.02 of GRPO's (--beta 0.3 3), and 0.98, 0.99, 0.98 in equal
          groups.
Here:     The variance is p (1 - p) times the mean squared norm of the score in the
          logits, both as the memory of earlier visits has them. 4 to 32 draws, 8 on
          average; leave one out, weights 8 / n.
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
        sampling=Sampling(prompts=16, group_size=32, max_tokens=8, budget=128),
        allocate=partial(allocate.neyman, least=4),
        correct=partial(correct.per_prompt, rows=8),
        advantage=advantage.leave_one_out,
        loss=partial(loss.clipped_ratio, low=0.2, high=0.28),
        aggregate=partial(aggregate.constant_length, length=8),
    )
