"""RAFT++ at the size of its paper; Reinforce-Rej by one line.

Paper:    Xiong et al. 2025, "A Minimalist Approach to LLM Reasoning: from Rejection
          Sampling to Reinforce", arXiv:2504.11343; paper.toml has every value.
Command:  python -m curax.train --config experiments/raft/config.py --set
          model.path=DIR task.train=train.jsonl task.held_out=held_out.jsonl
w(p):     That of the recipe that RECIPE names.
Here:     Where paper and code differ, the paper: 2 updates per batch, 4096 tokens, a
          mean over tokens and then over completions. KL, entropy bonus and dual clip
          are those of the code, for the paper states none. Steps and evaluation
          interval are published nowhere.
"""

from dataclasses import replace
from functools import partial

import optax

from curax import loss
from curax.config import KL, Config, Evaluation, load
from curax.tasks import file_task, layouts
from curax.testbed import from_checkpoint

RECIPE = "raft_plus_plus"  # or reinforce_rej


def get_config() -> Config:
    """The config of the run."""
    recipe = load(RECIPE)
    return from_checkpoint(
        recipe,
        path="models/Qwen2.5-Math-7B",
        max_tokens=4096,
        tokens_per_micro_batch=8192,
        task=partial(
            file_task.task,
            train="data/numina_math/train.jsonl",
            held_out="data/math/math500.jsonl",
            template=layouts.STEP_BY_STEP,
            max_prompt_tokens=1024,
        ),
        sampling=replace(recipe.sampling, prompts=1024, group_size=4),
        loss=partial(loss.clipped_ratio, low=0.2, high=0.2, dual=3.0),
        kl=KL(estimator=loss.k3, coefficient=1e-3),
        entropy_bonus=1e-3,
        optimizer=partial(optax.adamw, learning_rate=1e-6, weight_decay=0.01),
        evaluation=Evaluation(every=20, prompts=500, samples=16),
    )
