"""MaxRL on a checkpoint; its estimator is all that is known here of its runs.

Paper:    MaxRL, arXiv:2602.02710; paper.toml has what is known here.
Command:  python -m curax.train --config experiments/maxrl/config.py --set
          model.path=DIR task.train=train.jsonl task.held_out=held_out.jsonl
w(p):     (1 - (1 - p)^15) / p, that of maxrl in groups of 16.
Here:     Everything but the estimator is ours: the published settings are not at hand.
"""

from dataclasses import replace
from functools import partial

import optax

from curax.config import Config, Evaluation, load
from curax.tasks import file_task, layouts
from curax.testbed import from_checkpoint


def get_config() -> Config:
    """The config of the run."""
    recipe = load("maxrl")
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
        sampling=replace(recipe.sampling, prompts=128, group_size=16),
        optimizer=partial(optax.adamw, learning_rate=1e-6, weight_decay=0.0),
        evaluation=Evaluation(every=20, prompts=500, samples=32),
    )
