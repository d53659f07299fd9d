"""Reinforce-Rej: right is +1, wrong is -1, groups that are all of one kind are dropped.

Paper:    Xiong et al. 2025, "A Minimalist Approach to LLM Reasoning: from Rejection
          Sampling to Reinforce", arXiv:2504.11343, Reinforce-Rej.
Command:  python -m curax.train --config configs/reinforce_rej.py
w(p):     2 - p^3 - (1 - p)^3; f = 2 p - p^4 / 4 + (1 - p)^4 / 4. That is for a constant
          denominator; here it is how many completions of the mini-batch are in open
          groups, and the length of each, and both depend on content.
Here:     4 completions of 32 prompts, the paper has 4 of 1024. The released code passes
          0/1 outcomes on and never learns from a wrong completion: w(p) = 1 - p^3. Nor
          is here what else it has and the paper does not state: a KL of 1e-3 to the
          start, an entropy bonus of 1e-3, a dual clip of 3, a mean over the tokens of
          all completions, dropped ones too, and 4 updates per batch, here 2.
"""

from curax import advantage, aggregate, correct, gate, loss
from curax.config import Config, Sampling
from curax.testbed import embedded


def get_config() -> Config:
    return embedded(
        sampling=Sampling(prompts=32, group_size=4, max_tokens=8),
        gate=gate.zero_variance,
        correct=correct.none,
        advantage=advantage.signed,
        loss=loss.clipped_ratio,
        aggregate=aggregate.sequence_mean,
    )
