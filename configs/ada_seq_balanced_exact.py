"""Reinforce-Ada-Seq, balanced, exact: what stopping and keeping did is undone.

Paper:    Xiong et al. 2025, "Reinforce-Ada: An Adaptive Sampling Framework for
          Reinforce-Style LLM Training", arXiv:2510.04996, sequential sampling.
Command:  python -m curax.train --config configs/ada_seq_balanced_exact.py
w(p):     (1 - (1 - p)^32) / p, whatever the rule: log p, truncated at the 32 draws a
          prompt may have.
Here:     The mean over the right ones, with the number of draws as control variate: all
          right and all wrong pools train too, and their parts cancel in expectation.
          Rounds of 8, at most 4 of them, 4 kept at random within each class.
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
    stop,
    update,
)
from curax.config import Config, Evaluation, Sampling, Stop, Update, WarmStart
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
        sampling=Sampling(prompts=32, group_size=32, max_tokens=8),
        stop=Stop(rule=partial(stop.balanced, right=2, wrong=2), round_size=8),
        allocate=allocate.uniform,
        gate=gate.none,
        downsample=partial(downsample.balanced, m=4),
        correct=partial(correct.control_variate, rows=4, limit=32),
        advantage=advantage.signed,
        objective=partial(objective.prompt_weight, f=objective.linear),
        claim=objective.log,
        modulate=modulate.none,
        loss=partial(loss.clipped_ratio, low=0.2, high=0.28),
        aggregate=partial(aggregate.constant_length, length=8),
        optimizer=partial(optax.adam, learning_rate=3e-4, b2=0.99),
        update=Update(minibatches=2, clip_norm=1.0),
        evaluation=Evaluation(every=50, prompts=256, samples=8),
        steps=200,
    )
