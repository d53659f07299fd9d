"""RAFT++: train on right completions alone, with ratio and clip.

Paper:    Xiong et al. 2025, "A Minimalist Approach to LLM Reasoning: from Rejection
          Sampling to Reinforce", arXiv:2504.11343, the objective of RAFT++.
Command:  python -m curax.train --config configs/raft_plus_plus.py
w(p):     1, whatever p; f = p: the policy gradient of the pass rate without a baseline.
          That is for a sum over right completions divided by a constant. The objective
          divides it by how many are right in the mini-batch, nearly the same for all
          prompts of a large one, and each by its length; both depend on content.
Here:     4 completions of 32 prompts, the paper has 4 of 1024. A completion is accepted
          if it is right; the argmax of the paper would accept all of an all-wrong
          group. Advantages are 0 or 1, so the lower clip never binds. Not here, for the
          paper states none of it, but in the released code: a KL of 1e-3 to the start,
          an entropy bonus of 1e-3, a dual clip of 3 (which would never bind), a mean
          over the tokens of all completions, wrong ones too, and 4 updates per batch,
          here 2.
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
        gate=gate.accepted,
        downsample=downsample.none,
        correct=correct.none,
        advantage=advantage.raw,
        objective=partial(objective.prompt_weight, f=objective.linear),
        modulate=modulate.none,
        loss=loss.clipped_ratio,
        aggregate=aggregate.sequence_mean,
        optimizer=partial(optax.adam, learning_rate=3e-4, b2=0.99),
        update=Update(minibatches=2, clip_norm=1.0),
        evaluation=Evaluation(every=50, prompts=256, samples=8),
        steps=200,
    )
