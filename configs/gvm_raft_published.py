"""GVM-RAFT++ as released: pilots share out the budget, all that is right trains.

Paper:    Yao et al. 2025, "Optimizing Chain-of-Thought Reasoners via Gradient Variance
          Minimization in Rejection Sampling and RL", arXiv:2505.02391, Algorithms 1 and
          2, Proposition 1.
Command:  python -m curax.train --config configs/gvm_raft_published.py
w(p):     E[n(p)] / 8, n(p) in proportion to G / sqrt(p + 0.001 / p) over pilots. At p =
          0.01, 0.05, 0.1, 0.5, 0.9 it is 0.069, 0.32, 0.58, 1.3, 0.99: it rises to the
          middle and falls again, for a prompt whose pilots are all wrong gets no draws.
          It is not the log p whose variance is minimised, for neither equation 8 nor
          the code divides by n p. Tokens are averaged over the batch, which depends on
          content. The KL penalty comes on top.
Here:     4 pilots and 8 more for each of 16 prompts, fresh in every step; the paper has
          8 and 8 of 1024, the same allocation for nine steps. At most 32 for a prompt,
          the code has no bound. G is the mean norm over right pilots of the gradient in
          the embedding, as released. Clip 0.2: the released run never passes its higher
          one on; its dual clip of 3 never binds, for no advantage is negative. KL 1e-3
          to the policy that RL starts from; there a reference and an optimizer of their
          own for every nine steps. Its mini-batches scale by one completion per prompt
          and so make 32 updates where its baselines make 4; here 2.
"""

from functools import partial

from curax import advantage, aggregate, allocate, correct, gate, loss, objective, score
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
        gate=gate.accepted,
        correct=correct.none,
        advantage=advantage.raw,
        claim=objective.log,
        loss=partial(loss.clipped_ratio, low=0.2, high=0.2),
        aggregate=aggregate.token_mean,
        kl=KL(estimator=loss.k3, coefficient=1e-3),
    )
