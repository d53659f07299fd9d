"""DynaMO's allocation as released: a floor, and shares in proportion to a variance.

Paper:    DynaMO, arXiv:2602.19208, the allocation alone.
Command:  python -m curax.train --config configs/dynamo_allocation_published.py
w(p):     E[n(p) v(p, n)] / 16 with v(p, n) = sqrt((n - 1) / n) E[sqrt(q (1 - q))] / (p
          (1 - p)), q = k / n: GRPO in a group of n, times how many were drawn. At p =
          0.01, 0.05, 0.1, 0.5, 0.9 it is 1.5, 1.9, 2.1, 2.4, 1.4. Tokens are averaged
          over the batch, which depends on content.
Here:     16 draws per prompt, 8 to 24, as released; 8 prompts per step, there 512.
          Counts of the memory are those of all visits there, nearly so here. The
          release grades rows against the prompts of others as soon as counts differ;
          here each is graded against its own. Advantages are not modulated. Clipped at
          0.8 and 1.28, dual clip 10, no KL and no entropy bonus, as released
          (dynamo_published.py); 2 updates per batch, there 16.
          512 prompts to train on: what is remembered of one is read when it comes back.
"""

from functools import partial

from curax import advantage, aggregate, allocate, correct, loss
from curax.config import Config, Memory, Sampling
from curax.tasks import chain
from curax.testbed import embedded


def get_config() -> Config:
    return embedded(
        task=partial(chain.task, num_prompts=512),
        sampling=Sampling(prompts=8, group_size=24, max_tokens=8, budget=128),
        memory=Memory(half_life=1000.0),
        allocate=allocate.dynamo,
        correct=correct.none,
        advantage=partial(advantage.standardised, bessel=True),
        loss=partial(loss.clipped_ratio, low=0.2, high=0.28, dual=10.0),
        aggregate=aggregate.token_mean,
    )
