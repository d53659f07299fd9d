"""GVM-RAFT on log p truncated at 4 draws, one objective whatever is allocated.

Paper:    Yao et al. 2025, "Optimizing Chain-of-Thought Reasoners via Gradient Variance
          Minimization in Rejection Sampling and RL", arXiv:2505.02391, Algorithm 1. The
          objective is that of MaxRL, arXiv:2602.02710.
Command:  python -m curax.train --config configs/gvm_raft_exact.py
w(p):     (1 - (1 - p)^4) / p: log p, truncated at the 4 draws that every prompt gets at
          least, exactly and under any allocation: what more a prompt draws lowers its
          noise alone. At p = 0.01, 0.05, 0.1, 0.5, 0.9 it is 3.94, 3.71, 3.44, 1.88,
          1.11, where log p asks for 100, 20, 10, 2, 1.1, which no 4 draws reach.
Here:     4 pilots and 8 more for each of 16 prompts; at least 4 and at most 32 of these
          for a prompt, the best integers. G is the root mean square norm, which the
          bound is about. The M-step divides by |D|: the mean over the right ones, which
          truncates log p at each prompt's own n and so makes the objective one of the
          allocation. It is `correct.accepted_mean` without the series.
"""

from functools import partial

from curax import advantage, aggregate, allocate, correct, loss, objective, score
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
        allocate=partial(allocate.gvm, alpha=1e-3, beta=2.0, least=4, exact=True),
        correct=partial(correct.per_prompt, rows=8),
        advantage=advantage.raw,
        objective=partial(
            objective.series, coefficients=objective.log_coefficients, terms=4
        ),
        loss=partial(loss.clipped_ratio, low=0.2, high=0.28),
        aggregate=partial(aggregate.constant_length, length=8),
    )
