"""DAPO: GRPO with a higher clip, dynamic sampling, token mean and overlong shaping.

Paper:    Yu et al. 2025, "DAPO: An Open-Source LLM Reinforcement Learning System at
          Scale", arXiv:2503.14476, equations 8 to 13.
Command:  python -m curax.train --config configs/dapo.py
w(p):     E[sqrt(q (1 - q))] / (p (1 - p)), q = k / 8, k ~ Binomial(8, p), as GRPO: a
          group with equal outcomes contributes 0 whether it is replaced or not.
          Replacing it multiplies w(p) by a factor common to all prompts, the chance
          that an open group finds a place. f -> 2 asin sqrt(p) in large groups. The law
          holds for completions of at most 8 tokens, which are neither dropped nor
          penalised; and tokens are divided by how many there are in the mini-batch,
          which depends on content.
Here:     8 completions of 16 prompts in 4 updates, the paper has 16 of 512 in 16. It
          draws until the batch is full; here at most 3 times, and groups still closed
          train nothing. Outcomes are 0 and 1, not -1 and 1, so the overlong penalty
          weighs twice as much. The last fifth of max_tokens is penalised, as there.
"""

from functools import partial

from curax import advantage, aggregate, correct, gate, loss, reward
from curax.config import Config, Sampling, Update
from curax.testbed import embedded


def get_config() -> Config:
    return embedded(
        sampling=Sampling(prompts=16, group_size=8, max_tokens=10, attempts=3),
        gate=partial(gate.every, gates=(gate.zero_variance, gate.overlong)),
        correct=correct.none,
        advantage=advantage.standardised,
        loss=partial(loss.clipped_ratio, low=0.2, high=0.28),
        aggregate=aggregate.token_mean,
        shape_reward=partial(reward.soft_overlong, max_tokens=10, margin=2),
        update=Update(minibatches=4),
    )
