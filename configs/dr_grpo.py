"""Dr. GRPO: GRPO without the two divisions that depend on the data.

Paper:    Liu et al. 2025, "Understanding R1-Zero-Like Training: A Critical
          Perspective", arXiv:2503.20783, section 3.
Command:  python -m curax.train --config configs/dr_grpo.py
w(p):     1 - 1/8, whatever p; f = (1 - 1/8) p. Tokens are divided by a constant, so
          this is exact for the first of the two updates per step, at ratio 1.
Here:     8 completions of 16 prompts; the constant is max_tokens.
"""

from functools import partial

from curax import advantage, aggregate, loss
from curax.config import Config, Sampling
from curax.testbed import embedded


def get_config() -> Config:
    return embedded(
        sampling=Sampling(prompts=16, group_size=8, max_tokens=8),
        advantage=advantage.group_mean,
        loss=loss.clipped_ratio,
        aggregate=partial(aggregate.constant_length, length=8),
    )
