"""DynaMO as published: its allocation, and tokens modulated by how sure they are.

Paper:    DynaMO, arXiv:2602.19208, with the constants of its released example script.
Command:  python -m curax.train --config configs/dynamo_published.py
w(p):     E[n(p) v(p, n)] / 16 with v(p, n) = sqrt((n - 1) / n) E[sqrt(q (1 - q))] / (p
          (1 - p)), q = k / n: GRPO in a group of n, times how many were drawn. At p =
          0.01, 0.05, 0.1, 0.5, 0.9 it is 1.5, 1.9, 2.1, 2.4, 1.4. The multipliers come
          on top: at a state of normalised entropy gap h about 1 + 0.2 h (1 - p) of it,
          most for hard prompts. Tokens are averaged over the batch, which depends on
          content.
Here:     Clipped at 0.8 and 1.28: the script passes 0.2 twice, and a helper that is on
          by default multiplies the upper one by 1.4. Dual clip 10; 1e-6 beside the
          deviation, which divides by n - 1; no KL, no entropy bonus. The change of
          entropy is the paper's, exact, over all rows of an update; the release puts
          the mean over a completion for the expectation over the vocabulary, and takes
          maxima per micro-batch and device (`modulate.released_entropy_change`). The
          allocation as in dynamo_allocation_published.py: 8 to 24 draws, 16 on average,
          8 prompts per step, in 2 updates, there 512 in 16.
"""

from functools import partial

from curax import advantage, aggregate, allocate, correct, loss, modulate
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
        advantage=partial(advantage.standardised, eps=1e-6, bessel=True),
        modulate=partial(
            modulate.dynamo,
            boost=0.2,
            floor=0.6,
            gamma=50.0,
            tau=0.99,
            low=0.2,
            high=0.28,
        ),
        loss=partial(loss.clipped_ratio, low=0.2, high=0.28, dual=10.0),
        aggregate=aggregate.token_mean,
    )
