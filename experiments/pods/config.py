"""PODS on GSM8K at the size of its single-GPU runs.

Paper:    Xu et al. 2025, "Not All Rollouts are Useful: Down-Sampling Rollouts in LLM
          Reinforcement Learning", arXiv:2504.13818; paper.toml has every value.
Command:  python -m curax.train --config experiments/pods/config.py --set
          model.path=DIR task.train=train.jsonl task.held_out=held_out.jsonl
w(p):     That of pods_published with 16 kept of 64.
Here:     The outcome alone is the reward, there a format and tags too. The base model
          is not quantised, and moments are not in 8 bits. Runs were held to hours, not
          to steps.
"""

from dataclasses import replace
from functools import partial

import optax

from curax import advantage, downsample
from curax.config import Config, Evaluation, Update, load
from curax.models import pretrained
from curax.tasks import file_task, layouts
from curax.testbed import from_checkpoint


def get_config() -> Config:
    """The config of the run."""
    recipe = load("pods_published")
    return from_checkpoint(
        recipe,
        path="models/Qwen2.5-3B-Instruct",
        max_tokens=512,
        tokens_per_micro_batch=8192,
        model=partial(
            pretrained.model,
            path="models/Qwen2.5-3B-Instruct",
            dtype="bfloat16",
            remat=True,
            lora_rank=64,
            lora_alpha=64.0,
        ),
        task=partial(
            file_task.task,
            train="data/gsm8k/train.jsonl",
            held_out="data/gsm8k/test.jsonl",
            layout=layouts.gsm8k,
            template=layouts.STEP_BY_STEP,
            max_prompt_tokens=512,
        ),
        sampling=replace(recipe.sampling, prompts=1, group_size=64, temperature=0.9),
        downsample=partial(downsample.max_variance, m=16),
        advantage=partial(advantage.standardised, eps=1e-4, bessel=True),
        optimizer=partial(
            optax.adamw, learning_rate=5e-6, b1=0.9, b2=0.99, weight_decay=0.1
        ),
        update=Update(clip_norm=0.1, tokens_per_micro_batch=8192, token_chunk=512),
        evaluation=Evaluation(every=100, prompts=1319, samples=5),
        steps=2000,
    )
