"""MaxRL: the mean over the right ones, less the mean over all, per prompt.

Paper:    MaxRL, arXiv:2602.02710.
Command:  python -m curax.train --config configs/maxrl.py
w(p):     (1 - (1 - p)^7) / p: log p, truncated one below the 8 draws, since the pass
          rate of a group is its own baseline.
Here:     8 completions of 16 prompts. A = (r - q) / q with q the share of right ones.
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
        advantage=advantage.group_mean,
        objective=partial(objective.prompt_weight, f=objective.log),
        claim=objective.log,
        modulate=modulate.none,
        loss=partial(loss.clipped_ratio, low=0.2, high=0.28),
        aggregate=partial(aggregate.constant_length, length=8),
        optimizer=partial(optax.adam, learning_rate=3e-4, b2=0.99),
        update=Update(minibatches=2, clip_norm=1.0),
        evaluation=Evaluation(every=50, prompts=256, samples=8),
        steps=200,
    )
