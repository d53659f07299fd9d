"""GRPO as DeepSeekMath states it: group z-scores, one update per batch, a KL penalty.

Paper:    Shao et al. 2024, "DeepSeekMath: Pushing the Limits of Mathematical Reasoning
          in Open Language Models", arXiv:2402.03300, equations 3 and 4.
Command:  python -m curax.train --config configs/grpo.py
w(p):     E[sqrt(q (1 - q))] / (p (1 - p)), q = k / 8, k ~ Binomial(8, p);
          sqrt(7) at p -> 0 and 1. f -> 2 asin sqrt(p) in large groups.
          Each completion is divided by its length, which depends on content: w(p) is
          exact only where all are equally long. The KL penalty comes on top.
Here:     8 completions of 16 prompts, not 64 of 16. The standard deviation is that of
          the group (ddof 0); trainers in the open divide by n - 1 and so multiply w(p)
          by sqrt(7 / 8). The paper gives no clip range, and with one update per batch
          the ratio is 1 and the range has no effect. The reward is the outcome, not a
          reward model.
"""

from curax import advantage, aggregate, loss
from curax.config import KL, Config, Sampling, Update
from curax.testbed import embedded


def get_config() -> Config:
    return embedded(
        sampling=Sampling(prompts=16, group_size=8, max_tokens=8),
        advantage=advantage.standardised,
        loss=loss.clipped_ratio,
        aggregate=aggregate.sequence_mean,
        kl=KL(estimator=loss.k3, coefficient=0.04),
        update=Update(minibatches=1),
    )
