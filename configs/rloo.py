"""RLOO: REINFORCE on whole completions, the others of the group as baseline.

Paper:    Ahmadian et al. 2024, "Back to Basics: Revisiting REINFORCE Style Optimization
          for Learning from Human Feedback in LLMs", arXiv:2402.14740; k = 4.
Command:  python -m curax.train --config configs/rloo.py
w(p):     1, whatever p; f = p. The plain policy gradient of the pass rate, exactly:
          one update per batch, no clip, tokens divided by a constant.
Here:     4 completions of 32 prompts. The paper's reward comes from a reward model,
          less a KL penalty; this one is the outcome.
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
        gate=gate.none,
        downsample=downsample.none,
        correct=correct.none,
        advantage=advantage.leave_one_out,
        objective=partial(objective.prompt_weight, f=objective.linear),
        modulate=modulate.none,
        loss=loss.reinforce,
        aggregate=partial(aggregate.constant_length, length=8),
        optimizer=partial(optax.adam, learning_rate=3e-4, b2=0.99),
        update=Update(clip_norm=1.0),
        evaluation=Evaluation(every=50, prompts=256, samples=8),
        steps=200,
    )
