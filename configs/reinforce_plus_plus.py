"""REINFORCE++: one completion per prompt, z-scores over the batch.

Paper:    Hu et al. 2025, "REINFORCE++: Stabilizing Critic-Free Policy Optimization with
          Global Advantage Normalization", arXiv:2501.03262, the variant without a group
          baseline.
Command:  python -m curax.train --config configs/reinforce_plus_plus.py
w(p):     1 / s, s the standard deviation of the rewards of the batch: the same for all
          of its prompts, so f = p / s, up to O(1 / 128). For 128 prompts that share one
          pass rate p, E[sqrt(q (1 - q))] / (p (1 - p)), q = k / 128,
          k ~ Binomial(128, p). Tokens are divided by how many there are in the
          mini-batch, which depends on content.
Here:     128 prompts of 1 completion, 2 updates per batch. The paper subtracts a KL
          penalty per token from the reward; there is none here.
"""

from curax import advantage, aggregate, loss
from curax.config import Config, Sampling
from curax.testbed import embedded


def get_config() -> Config:
    return embedded(
        sampling=Sampling(prompts=128, group_size=1, max_tokens=8),
        advantage=advantage.batch_standardised,
        loss=loss.clipped_ratio,
        aggregate=aggregate.token_mean,
    )
