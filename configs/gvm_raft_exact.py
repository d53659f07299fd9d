"""GVM-RAFT on log p as far as its draws reach: the mean over the right ones.

Paper:    Yao et al. 2025, "Optimizing Chain-of-Thought Reasoners via Gradient Variance
          Minimization in Rejection Sampling and RL", arXiv:2505.02391, Algorithm 1,
          whose M-step divides by |D|. The objective is that of MaxRL, arXiv:2602.02710.
Command:  python -m curax.train --config configs/gvm_raft_exact.py
w(p):     E[(1 - (1 - p)^n) / p], n as allocated from independent pilots: log p,
          truncated at the n draws of the prompt, which is 1 where all pilots are wrong.
          At p = 0.01, 0.05, 0.1, 0.5, 0.9 it is 1.5, 2.6, 3.2, 1.93, 1.11, where log p
          asks for 100, 20, 10, 2, 1.1: log p from the middle up, not below. Nothing is
          right: nothing trains.
Here:     4 pilots and 8 more for each of 16 prompts; at least 1 and at most 32 of these
          for a prompt, the best integers. G is the root mean square norm, which the
          bound is about.
"""

from functools import partial

from curax import advantage, aggregate, allocate, correct, gate, loss, objective, score
from curax.config import Config, Pilot, Sampling
from curax.testbed import embedded


def get_config() -> Config:
    return embedded(
        sampling=Sampling(prompts=16, group_size=32, max_tokens=8, budget=192),
        pilot=Pilot(
            draws=4,
            norm=partial(score.gradient, parameters=score.embedding),
            root_mean_square=True,
        ),
        allocate=partial(allocate.gvm, alpha=1e-3, beta=2.0, least=1, exact=True),
        gate=gate.accepted,
        correct=partial(correct.accepted_mean, rows=8),
        advantage=advantage.raw,
        claim=objective.log,
        loss=partial(loss.clipped_ratio, low=0.2, high=0.28),
        aggregate=partial(aggregate.constant_length, length=8),
    )
