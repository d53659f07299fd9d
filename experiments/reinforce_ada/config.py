"""Reinforce-Ada-Seq, balanced, at the size of its paper.

Paper:    Xiong et al. 2025, "Reinforce-Ada: An Adaptive Sampling Framework for
          Reinforce-Style LLM Training", arXiv:2510.04996; paper.toml has every value.
Command:  python -m curax.train --config experiments/reinforce_ada/config.py --set
          model.path=DIR task.train=train.jsonl task.held_out=held_out.jsonl
w(p):     That of ada_seq_balanced_published, whose stages these are.
Here:     Where paper and code differ, the paper: 600 steps and an entropy bonus of
          1e-4. The training file is ours; theirs is filtered beforehand, by 16
          completions of the base model (paper.toml). ada_seq_positive_published,
          ada_est_published and the exact ones by the line RECIPE.
"""

from dataclasses import replace
from functools import partial

import optax

from curax import loss, update
from curax.config import Config, Evaluation, Update, load
from curax.tasks import file_task, layouts
from curax.testbed import from_checkpoint

RECIPE = "ada_seq_balanced_published"
RATE = partial(update.warmup_cosine, peak=1e-6, warmup=10, steps=2400, end=1e-6)


def get_config() -> Config:
    """The config of the run."""
    recipe = load(RECIPE)
    return from_checkpoint(
        recipe,
        path="models/Qwen2.5-Math-1.5B",
        max_tokens=2048,
        tokens_per_micro_batch=8192,
        task=partial(
            file_task.task,
            train="data/math/train.jsonl",
            held_out="data/math/math500.jsonl",
            template=layouts.STEP_BY_STEP,
            max_prompt_tokens=1024,
        ),
        sampling=replace(recipe.sampling, prompts=512),
        loss=partial(loss.clipped_ratio, low=0.2, high=0.28, dual=10.0),
        entropy_bonus=1e-4,
        optimizer=partial(optax.adamw, learning_rate=RATE, weight_decay=0.0),
        update=Update(minibatches=4, tokens_per_micro_batch=8192, token_chunk=512),
        evaluation=Evaluation(every=50, prompts=500, samples=32),
        steps=600,
    )
