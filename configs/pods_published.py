"""PODS as published: of 32 completions train the 8 whose rewards vary most.

Paper:    Xu et al. 2025, "Not All Rollouts are Useful: Down-Sampling Rollouts in LLM
          Reinforcement Learning", arXiv:2504.13818; 32 to 8 as in its runs on MATH.
Command:  python -m curax.train --config configs/pods_published.py
w(p):     E[sqrt(q (1 - q))] / (p (1 - p)), q = j / 8, j = min(max(4, k - 24), k), k ~
          Binomial(32, p). At p = 0.01, 0.05, 0.1, 0.5, 0.9 it is 9.63, 6.90, 4.94,
          2.00, 4.94, and 10.6 at p -> 0. Were both outcomes plentiful, q = 1/2 and w(p)
          = 1 / (2 p (1 - p)), f = log(p / (1 - p)) / 2, not GRPO's arcsine; at p = 0.01
          that is 50.5, but few pools of 32 hold four right ones. Each completion is
          divided by its length, which depends on content: w(p) is exact only where all
          are equally long. configs/pods_exact.py undoes the selection.
Here:     4 prompts per step, the released single-GPU runs have 1. The standard
          deviation is that of the kept (ddof 0); the code divides by m - 1 and adds
          1e-4. No KL, as there; it samples at temperature 0.9, clips the gradient at
          0.1 and rewards the format too, also where it selects: here 1, 1 and the
          outcome alone. The released scan for several GPUs stops at the first subset
          that varies more, this one finds the best.
"""

from functools import partial

from curax import advantage, aggregate, correct, downsample, loss
from curax.config import Config, Sampling, Update
from curax.testbed import embedded


def get_config() -> Config:
    return embedded(
        sampling=Sampling(prompts=4, group_size=32, max_tokens=8),
        downsample=partial(downsample.max_variance, m=8),
        correct=correct.none,
        pool_statistics=False,
        advantage=advantage.standardised,
        loss=loss.clipped_ratio,
        aggregate=aggregate.sequence_mean,
        update=Update(minibatches=1),
    )
