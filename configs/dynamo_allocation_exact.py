"""Draws in proportion to the standard deviation of outcomes, every prompt counts alike.

Paper:    DynaMO, arXiv:2602.19208, whose allocation is meant; Neyman 1934, "On the Two
          Different Aspects of the Representative Method".
Command:  python -m curax.train --config configs/dynamo_allocation_exact.py
w(p):     1, whatever p: the objective is the pass rate itself.
Here:     The square root of p (1 - p), smoothed by Beta(1/2, 1/2), where the release
          takes p (1 - p) itself, by which nothing is gained over equal shares. Leave
          one out without std, and weights 16 / n.
          512 prompts to train on: what is remembered of one is read when it comes
          back.
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
        allocate=partial(allocate.bernoulli, least=8),
        gate=gate.none,
        downsample=downsample.none,
        correct=partial(correct.per_prompt, rows=16),
        advantage=advantage.leave_one_out,
        objective=partial(objective.prompt_weight, f=objective.linear),
        modulate=modulate.none,
        loss=partial(loss.clipped_ratio, low=0.2, high=0.28),
        aggregate=partial(aggregate.constant_length, length=8),
        optimizer=partial(optax.adam, learning_rate=3e-4, b2=0.99),
        update=Update(minibatches=2, clip_norm=1.0),
        evaluation=Evaluation(every=50, prompts=256, samples=8),
        steps=200,
    )
