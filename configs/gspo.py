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

import optax

from curax import (
    advantage,
    aggregate,
    allocate,
    correct,
    downsample,
    gate,
    loss,
    modulate,
    objective,
    update,
)
from curax.config import Config, Evaluation, Sampling, Update, WarmStart
from curax.models import transformer
from curax.tasks import chain


def get_config() -> Config:
    return Config(
        task=partial(chain.task, depth=6),
        model=partial(transformer.model, width=64, layers=2, heads=4, kv_heads=2),
        warm_start=WarmStart(
            steps=500,
            rows=128,
            optimizer=partial(
                optax.adamw,
                learning_rate=partial(
                    update.warmup_cosine, peak=8e-3, warmup=20, steps=500, end=3e-4
                ),
                weight_decay=0.01,
            ),
        ),
        sampling=Sampling(prompts=16, group_size=8, max_tokens=8),
        allocate=allocate.uniform,
        gate=gate.none,
        downsample=downsample.none,
        correct=correct.none,
        advantage=advantage.standardised,
        objective=partial(objective.prompt_weight, f=objective.linear),
        modulate=modulate.none,
        loss=partial(loss.gspo, low=3e-4, high=4e-4),
        aggregate=aggregate.sequence_mean,
        optimizer=partial(optax.adam, learning_rate=3e-4, b2=0.99),
        update=Update(minibatches=4, clip_norm=1.0),
        evaluation=Evaluation(every=50, prompts=256, samples=8),
        steps=200,
    )
