"""GVM-GRPO as released: pilots share out the budget, each prompt is one GRPO group.

Paper:    Yao et al. 2025, "Optimizing Chain-of-Thought Reasoners via Gradient Variance
          Minimization in Rejection Sampling and RL", arXiv:2505.02391, section on GRPO.
Command:  python -m curax.train --config configs/gvm_grpo_published.py
w(p):     E[n(p) v(p, n)] / 8 with v(p, n) = sqrt((n - 1) / n) E[sqrt(q (1 - q))] / (p
          (1 - p)), q = k / n: GRPO in a group of n, times how many were drawn. At p =
          0.01, 0.05, 0.1, 0.5, 0.9 it is 0.23, 0.95, 1.5, 2.3, 2.2. Tokens are averaged
          over the batch, which depends on content. The KL penalty comes on top.
Here:     The paper cuts what a prompt gets into groups of 4; the code makes one group
          of it, and so does this. A group of 1 trains on its raw reward there, and not
          at all here. The standard deviation divides by n - 1. Clip 0.2, dual clip 3
          and KL 1e-3 as released, the last to the policy that RL starts from; there a
          reference and an optimizer of their own for every nine steps. Sizes as
          gvm_raft_published.
"""

from functools import partial

from curax import advantage, aggregate, allocate, correct, loss, objective, score
from curax.config import KL, Config, Pilot, Sampling
from curax.testbed import embedded


def get_config() -> Config:
    return embedded(
        sampling=Sampling(prompts=16, group_size=32, max_tokens=8, budget=192),
        pilot=Pilot(
            draws=4,
            norm=partial(score.gradient, parameters=score.embedding),
            root_mean_square=False,
        ),
        allocate=partial(allocate.gvm, alpha=1e-3, beta=2.0),
        correct=correct.none,
        advantage=partial(advantage.standardised, bessel=True),
        claim=objective.log,
        loss=partial(loss.clipped_ratio, low=0.2, high=0.2, dual=3.0),
        aggregate=aggregate.token_mean,
        kl=KL(estimator=loss.k3, coefficient=1e-3),
    )
