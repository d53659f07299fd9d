"""Reinforce-Rej: right is +1, wrong is -1, groups that are all of one kind are dropped.

Paper:    Xiong et al. 2025, "A Minimalist Approach to LLM Reasoning: from Rejection
          Sampling to Reinforce", arXiv:2504.11343, Reinforce-Rej.
Command:  python -m curax.train --config configs/reinforce_rej.py
w(p):     2 - p^3 - (1 - p)^3; f = 2 p - p^4 / 4 + (1 - p)^4 / 4. That is for a constant
          denominator; here it is how many completions of the mini-batch are in open
          groups, and the length of each, and both depend on content.
Here:     4 completions of 32 prompts, the paper has 4 of 1024. The released code passes
          0/1 outcomes on and never learns from a wrong completion: w(p) = 1 - p^3. Nor
          is here what else it has and the paper does not state: a KL of 1e-3 to the
          start, an entropy bonus of 1e-3, a dual clip of 3, a mean over the tokens of
          all completions, dropped ones too, and 4 updates per batch, here 2.
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
        sampling=Sampling(prompts=32, group_size=4, max_tokens=8),
        allocate=allocate.uniform,
        gate=gate.zero_variance,
        downsample=downsample.none,
        correct=correct.none,
        advantage=advantage.signed,
        objective=partial(objective.prompt_weight, f=objective.linear),
        modulate=modulate.none,
        loss=loss.clipped_ratio,
        aggregate=aggregate.sequence_mean,
        optimizer=partial(optax.adam, learning_rate=3e-4, b2=0.99),
        update=Update(minibatches=2, clip_norm=1.0),
        evaluation=Evaluation(every=50, prompts=256, samples=8),
        steps=200,
    )
