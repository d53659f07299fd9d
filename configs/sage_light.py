"""SAGE-light: a prompt is hinted as its last visit says, and no group is drawn twice.

Paper:    SAGE, "self-hint aligned GRPO with privileged supervision",
          arXiv:2602.03143, equation 12.
Command:  python -m curax.train --config configs/sage_light.py
w(p):     E[sqrt(q (1 - q))] / (p (1 - p)), q = k / 8, k ~ Binomial(8, p), with p
          the pass rate under the level that is set: a visit at level l ascends
          w(p_l) grad p_l, and without a hint only where l = 0.
          Exact for the first of the two updates per step, at ratio 1.
Here:     The controller is the released one: a level more where at most .1 was right,
          one less above .35. That of equation 12, which never goes down, is
          controller=hint.paper. A prompt whose hint of that level is missing is drawn
          without, and keeps its level, which the release sets to 0. Eight completions
          of 16 prompts; so that a prompt comes back, there are 512 of them.
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
        task=partial(chain.task, depth=6, num_prompts=512, hints=True),
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
            controller=partial(hint.hysteresis, low=0.1, high=0.35),
        ),
        allocate=allocate.uniform,
        gate=gate.zero_variance,
        downsample=downsample.none,
        correct=correct.none,
        advantage=advantage.standardised,
        objective=partial(objective.prompt_weight, f=objective.linear),
        modulate=modulate.none,
        loss=partial(loss.clipped_ratio, low=0.2, high=0.28, dual=3.0),
        aggregate=partial(aggregate.constant_length, length=8),
        optimizer=partial(optax.adam, learning_rate=3e-4, b2=0.99),
        update=Update(minibatches=2, clip_norm=1.0),
        evaluation=Evaluation(every=50, prompts=256, samples=8),
        steps=200,
    )
