"""PODS with its selection undone: 8 of 32 completions, the expected update of all 32.

Paper:    Xu et al. 2025, "Not All Rollouts are Useful: Down-Sampling Rollouts in LLM
          Reinforcement Learning", arXiv:2504.13818, for the selection. Horvitz and
          Thompson 1952, "A Generalization of Sampling Without Replacement From a Finite
          Universe", for the weights.
Command:  python -m curax.train --config configs/pods_exact.py
w(p):     E[sqrt(q (1 - q))] / (p (1 - p)), q = k / 32, k ~ Binomial(32, p): that of
          GRPO with 32 completions. f -> 2 asin sqrt(p) in large groups. Exact: one
          update per batch, tokens divided by a constant.
Here:     mean and standard deviation are those of all 32, not of the 8; inverse
          inclusion rates multiply the advantages; a constant divides the tokens, not
          the length of each completion.
"""

from functools import partial

from curax import advantage, aggregate, correct, downsample, loss, objective
from curax.config import Config, Sampling, Update
from curax.testbed import embedded


def get_config() -> Config:
    return embedded(
        sampling=Sampling(prompts=4, group_size=32, max_tokens=8),
        downsample=partial(downsample.max_variance, m=8),
        correct=correct.horvitz_thompson,
        advantage=advantage.standardised,
        claim=objective.arcsine,
        loss=loss.clipped_ratio,
        aggregate=partial(aggregate.constant_length, length=8),
        update=Update(minibatches=1),
    )
