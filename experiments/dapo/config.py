"""DAPO with its published numbers of prompts, completions and updates.

Paper:    Yu et al. 2025, "DAPO: An Open-Source LLM Reinforcement Learning System at
          Scale", arXiv:2503.14476; paper.toml has what is known here.
Command:  python -m curax.train --config experiments/dapo/config.py --set
          model.path=DIR task.train=train.jsonl task.held_out=held_out.jsonl
w(p):     That of dapo, whose stages these are, in groups of 16.
Here:     Model, data, rates and lengths are ours, by the table that README.md shows,
          which is not that of the paper. Groups are drawn again at most three times,
          there until the batch is full.
"""

from dataclasses import replace
from functools import partial

import optax

from curax import loss, reward
from curax.config import Config, Evaluation, Update, load
from curax.tasks import file_task, layouts
from curax.testbed import from_checkpoint


def get_config() -> Config:
    """The config of the run."""
    recipe = load("dapo")
    return from_checkpoint(
        recipe,
        path="models/Qwen2.5-Math-1.5B",
        max_tokens=2560,
        tokens_per_micro_batch=8192,
        task=partial(
            file_task.task,
            train="data/dapo_math/train.parquet",
            held_out="data/math/math500.jsonl",
            layout=layouts.dapo_math,
            held_out_layout=layouts.math,
            max_prompt_tokens=1024,
        ),
        sampling=replace(recipe.sampling, prompts=512, group_size=16, attempts=3),
        loss=partial(loss.clipped_ratio, low=0.2, high=0.28),
        shape_reward=partial(reward.soft_overlong, max_tokens=2560, margin=512),
        optimizer=partial(optax.adamw, learning_rate=1e-6, weight_decay=0.0),
        update=Update(minibatches=16, tokens_per_micro_batch=8192, token_chunk=512),
        evaluation=Evaluation(every=20, prompts=500, samples=32),
    )
