"""SAGE, exact: what is drawn with a hint ascends the pass rate without it.

Paper:    SAGE, "self-hint aligned GRPO with privileged supervision",
          arXiv:2602.03143, algorithm 1; the correction is derived here.
Command:  python -m curax.train --config configs/sage_exact.py
w(p):     1, whatever p, of every group, hinted or not; so a prompt ascends w grad p_0
          with w = 1 + (1 - p_0)^8 (1 + (1 - p_1)^8 (1 + (1 - p_2)^8)), the mean
          number of groups drawn for it, p_l its pass rate under hint l; a level without
          a hint falls out. f = p for prompts with pass rates above all chance to be
          hinted, up to 4 p for others. Exactly: one update per batch, no clip, tokens
          divided by a constant, temperature 1.
Here:     A completion drawn with a hint is trained at the prompt without it, its credit
          times pi(y | x) / pi(y | x, h). So its part of the update is as small as p_0,
          in expectation, and noisy: this is the yardstick, `sage` is the recipe.
          8 completions of 16 prompts. All prompts may be hinted: with fewer, w depends
          on the rest of the batch.
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
    hint,
    loss,
    modulate,
    objective,
    update,
)
from curax.config import Config, Evaluation, Hint, Sampling, Update, WarmStart
from curax.models import transformer
from curax.tasks import chain


def get_config() -> Config:
    return Config(
        task=partial(chain.task, depth=6, hints=True),
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
        hint=Hint(
            source=hint.reference_prefix,
            levels=3,
            width=7,
            trigger=hint.all_wrong,
            most=1.0,
            credit=hint.sequence_weighted,
        ),
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
