"""GSPO: ratio and clip of whole completions.

Paper:    Zheng et al. 2025, "Group Sequence Policy Optimization", arXiv:2507.18071,
          equations 5 to 7; clip range and four mini-batches as in its experiments.
Command:  python -m curax.train --config configs/gspo.py
w(p):     E[sqrt(q (1 - q))] / (p (1 - p)), q = k / 8, k ~ Binomial(8, p), as GRPO;
          f -> 2 asin sqrt(p) in large groups. This is the first mini-batch: in the
          other three the ratio has left 1, and the range is so narrow that much of the
          batch is clipped. Each completion is divided by its length, which depends on
          content: w(p) is exact only where all are equally long.
Here:     8 completions of 16 prompts. The standard deviation is that of the group
          (ddof 0), which the paper leaves open.
"""

from functools import partial

from curax import advantage, aggregate, loss
from curax.config import Config, Sampling, Update
from curax.testbed import embedded


def get_config() -> Config:
    return embedded(
        sampling=Sampling(prompts=16, group_size=8, max_tokens=8),
        advantage=advantage.standardised,
        loss=partial(loss.gspo, low=3e-4, high=4e-4),
        aggregate=aggregate.sequence_mean,
        update=Update(minibatches=4),
    )
