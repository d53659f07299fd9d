"""REINFORCE++: one completion per prompt, z-scores over the batch.

Paper:    Hu et al. 2025, "REINFORCE++: Stabilizing Critic-Free Policy Optimization with
          Global Advantage Normalization", arXiv:2501.03262, the variant without a group
          baseline.
Command:  python -m curax.train --config configs/reinforce_plus_plus.py
w(p):     1 / s, s the standard deviation of the rewards of the batch: the same for all
          of its prompts, so f = p / s, up to O(1 / 128). For 128 prompts that share one
          pass rate p, E[sqrt(q (1 - q))] / (p (1 - p)), q = k / 128,
          k ~ Binomial(128, p). Tokens are divided by how many there are in the
          mini-batch, which depends on content.
Here:     128 prompts of 1 completion, 2 updates per batch. The paper subtracts a KL
          penalty per token from the reward; there is none here.
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
        sampling=Sampling(prompts=128, group_size=1, max_tokens=8),
        allocate=allocate.uniform,
        gate=gate.none,
        downsample=downsample.none,
        correct=correct.none,
        advantage=advantage.batch_standardised,
        objective=partial(objective.prompt_weight, f=objective.linear),
        modulate=modulate.none,
        loss=loss.clipped_ratio,
        aggregate=aggregate.token_mean,
        optimizer=partial(optax.adam, learning_rate=3e-4, b2=0.99),
        update=Update(minibatches=2, clip_norm=1.0),
        evaluation=Evaluation(every=50, prompts=256, samples=8),
        steps=200,
    )
