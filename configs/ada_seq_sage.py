"""Reinforce-Ada-Seq opens the gate where draws can, and SAGE where they cannot.

Paper:    Xiong et al. 2025, "Reinforce-Ada: An Adaptive Sampling Framework for
          Reinforce-Style LLM Training", arXiv:2510.04996, sequential sampling; and
          SAGE, arXiv:2602.03143, algorithm 1.
Command:  python -m curax.train --config configs/ada_seq_sage.py
w(p):     (1 - (1 - p)^32) / p of every pool under its own context, whatever the rule:
          log p, truncated at the 32 draws a pool may have. With p_l the pass rate under
          hint l, held fixed, a prompt ascends w(p_0) grad p_0 + (1 - p_0)^32 (w(p_1)
          grad p_1 + (1 - p_1)^32 (...)).
Here:     The mean over the right ones. It is exact when draws stop early, and a pool
          without a right one has no part in it, so that nothing is lost when a pool
          with a hint takes its place; `correct.control_variate` is less noisy, but such
          pools push their completions down, and dropping them would bring a bias.
          Rounds of 8, at most 4 of them, 4 right ones kept at random. Half of the
          prompts are hinted at most: those whose 32 draws were all wrong.
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
    stop,
    update,
)
from curax.config import Config, Evaluation, Hint, Sampling, Stop, Update, WarmStart
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
        sampling=Sampling(prompts=32, group_size=32, max_tokens=8),
        stop=Stop(rule=stop.positives, round_size=8),
        hint=Hint(
            source=hint.reference_prefix,
            levels=3,
            width=7,
            trigger=hint.all_wrong,
        ),
        allocate=allocate.uniform,
        gate=gate.accepted,
        downsample=partial(downsample.random, m=4),
        correct=partial(correct.accepted_mean, rows=4),
        advantage=advantage.raw,
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
