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
        loss=loss.cispo,
        aggregate=aggregate.token_mean,
        optimizer=partial(optax.adam, learning_rate=3e-4, b2=0.99),
        update=Update(minibatches=4, clip_norm=1.0),
        evaluation=Evaluation(every=50, prompts=256, samples=8),
        steps=200,
    )
