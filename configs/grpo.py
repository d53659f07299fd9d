"""GRPO as DeepSeekMath states it: group z-scores, one update per batch, a KL penalty.

Paper:    Shao et al. 2024, "DeepSeekMath: Pushing the Limits of Mathematical Reasoning
          in Open Language Models", arXiv:2402.03300, equations 3 and 4.
Command:  python -m curax.train --config configs/grpo.py
w(p):     E[sqrt(q (1 - q))] / (p (1 - p)), q = k / 8, k ~ Binomial(8, p);
          sqrt(7) at p -> 0 and 1. f -> 2 asin sqrt(p) in large groups.
          Each completion is divided by its length, which depends on content: w(p) is
          exact only where all are equally long. The KL penalty comes on top.
Here:     8 completions of 16 prompts, not 64 of 16. The standard deviation is that of
          the group (ddof 0); trainers in the open divide by n - 1 and so multiply w(p)
          by sqrt(7 / 8). The paper gives no clip range, and with one update per batch
          the ratio is 1 and the range has no effect. The reward is the outcome, not a
          reward model.
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
from curax.config import KL, Config, Evaluation, Sampling, Update, WarmStart
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
        loss=loss.clipped_ratio,
        aggregate=aggregate.sequence_mean,
        kl=KL(estimator=loss.k3, coefficient=0.04),
        optimizer=partial(optax.adam, learning_rate=3e-4, b2=0.99),
        update=Update(clip_norm=1.0),
        evaluation=Evaluation(every=50, prompts=256, samples=8),
        steps=200,
    )
