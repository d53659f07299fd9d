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
from curax.config import Config, Evaluation, Memory, Sampling, Update, WarmStart
from curax.models import transformer
from curax.tasks import chain


def get_config() -> Config:
    return Config(
        task=partial(chain.task, depth=6, num_prompts=512),
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
        sampling=Sampling(prompts=8, group_size=24, max_tokens=8, budget=128),
        memory=Memory(half_life=1000.0),
        allocate=allocate.dynamo,
        gate=gate.none,
        downsample=downsample.none,
        correct=correct.none,
        advantage=partial(advantage.standardised, bessel=True),
        objective=partial(objective.prompt_weight, f=objective.linear),
        modulate=modulate.none,
        loss=partial(loss.clipped_ratio, low=0.2, high=0.28, dual=10.0),
        aggregate=aggregate.token_mean,
        optimizer=partial(optax.adam, learning_rate=3e-4, b2=0.99),
        update=Update(minibatches=2, clip_norm=1.0),
        evaluation=Evaluation(every=50, prompts=256, samples=8),
        steps=200,
    )
