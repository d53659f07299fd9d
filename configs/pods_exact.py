"""PODS with its selection undone: 8 of 32 completions, the expected update of all 32.

Paper:    Xu et al. 2025, "Not All Rollouts are Useful: Down-Sampling Rollouts in LLM
          Reinforcement Learning", arXiv:2504.13818, for the selection. Horvitz and
          Thompson 1952, "A Generalization of Sampling Without Replacement From a Finite
          Universe", for the weights.
Command:  python -m curax.train --config configs/pods_exact.py
w(p):     E[sqrt(q (1 - q))] / (p (1 - p)), q = k / 32, k ~ Binomial(32, p): that of
          GRPO with 32 completions. f -> 2 asin sqrt(p) in large groups. Exact: one
          update per batch, tokens divided by a constant.
Here:     mean and standard deviation are those of all 32, not of the 8; inverse
          inclusion rates multiply the advantages; a constant divides the tokens, not
          the length of each completion.
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
        sampling=Sampling(prompts=4, group_size=32, max_tokens=8),
        allocate=allocate.uniform,
        gate=gate.none,
        downsample=partial(downsample.max_variance, m=8),
        correct=correct.horvitz_thompson,
        advantage=advantage.standardised,
        objective=partial(objective.prompt_weight, f=objective.linear),
        claim=objective.arcsine,
        modulate=modulate.none,
        loss=loss.clipped_ratio,
        aggregate=partial(aggregate.constant_length, length=8),
        optimizer=partial(optax.adam, learning_rate=3e-4, b2=0.99),
        update=Update(clip_norm=1.0),
        evaluation=Evaluation(every=50, prompts=256, samples=8),
        steps=200,
    )
