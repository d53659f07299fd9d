"""DRO on FinQA at the size of its paper.

Paper:    Xu et al. 2025, "Direct Reasoning Optimization: LLMs Can Reward And Refine
          Their Own Reasoning for Open-Ended Tasks", arXiv:2506.13351, version 1;
          paper.toml has every value.
Command:  python -m curax.train --config experiments/dro/config.py --set
          model.path=DIR task.train=train.jsonl task.held_out=held_out.jsonl
w(p):     None: that of dro_published.
Here:     What is not published is as in dro_published: the weights, the length reward,
          the shares of the filter, who scores. So are the number of steps, hence the 40
          of warm-up (a fifth), and the updates per batch.
"""

from dataclasses import replace
from functools import partial

import optax

from curax import update
from curax.config import Config, Evaluation, Update, load
from curax.tasks import file_task, layouts
from curax.testbed import from_checkpoint

RECIPE = "dro_published"
STEPS = 200
RATE = partial(
    update.warmup_cosine, peak=1e-6, warmup=80, steps=2 * STEPS, end=1e-6
)  # 2 updates per step


def get_config() -> Config:
    """The config of the run."""
    recipe = load(RECIPE)
    return from_checkpoint(
        recipe,
        path="models/DeepSeek-R1-Distill-Qwen-7B",
        max_tokens=10_000,
        tokens_per_micro_batch=16384,
        task=partial(
            file_task.task,
            train="data/finqa/train.jsonl",
            held_out="data/finqa/test.jsonl",
            layout=layouts.detect,
            thinking=True,
            max_prompt_tokens=2048,
            reference="{answer}",
            delimiter="</think>",
        ),
        sampling=replace(recipe.sampling, prompts=256, group_size=16),
        optimizer=partial(optax.adamw, learning_rate=RATE, weight_decay=0.0),
        update=Update(minibatches=2, tokens_per_micro_batch=16384, token_chunk=512),
        evaluation=Evaluation(every=20, prompts=256, samples=16, k=16),
        steps=STEPS,
    )
