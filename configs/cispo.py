"""CISPO: clip the importance weight, not the gradient.

Paper:    MiniMax 2025, "MiniMax-M1: Scaling Test-Time Compute Efficiently with
          Lightning Attention", arXiv:2506.13585, equations 4 and 5.
Command:  python -m curax.train --config configs/cispo.py
w(p):     E[sqrt(q (1 - q))] / (p (1 - p)), q = k / 8, k ~ Binomial(8, p), as GRPO;
          f -> 2 asin sqrt(p) in large groups. This is the first mini-batch, at ratio
          1; tokens are divided by how many there are in the mini-batch, which depends
          on content.
Here:     8 completions of 16 prompts in 4 updates, the paper makes 16 per batch. It
          tunes the upper bound of the weight and does not publish it: here 5. It adds
          DAPO's dynamic sampling and length penalty; here there is the loss alone.
"""

from curax import advantage, aggregate, loss
from curax.config import Config, Sampling, Update
from curax.testbed import embedded


def get_config() -> Config:
    return embedded(
        sampling=Sampling(prompts=16, group_size=8, max_tokens=8),
        advantage=advantage.standardised,
        loss=loss.cispo,
        aggregate=aggregate.token_mean,
        update=Update(minibatches=4),
    )
