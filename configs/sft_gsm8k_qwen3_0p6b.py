"""Supervised training on the reference solutions of GSM8K, and nothing else.

It is the warm start of a run without RL steps: same trainer, same data path. To go on
with RL, export the run and train from there, or give an RL config this warm start.

Paper:    Cobbe et al. 2021, arXiv:2110.14168 (GSM8K).
Command:  python -m curax.train --config configs/sft_gsm8k_qwen3_0p6b.py --set
          model.path=DIR task.train=train.jsonl task.held_out=test.jsonl
w(p):     None: pass rates are measured and nothing is weighted by them.
"""

from functools import partial

import optax

from curax import update
from curax.config import Config, Logging, WarmStart, load
from curax.tasks import file_task, layouts
from curax.testbed import from_checkpoint

STEPS = 350  # of 64 problems: three times through the 7,473 of GSM8K
RATE = partial(update.warmup_cosine, peak=1e-5, warmup=20, steps=STEPS, end=1e-6)


def get_config() -> Config:
    return from_checkpoint(
        load("dr_grpo"),
        path="models/Qwen3-0.6B",
        max_tokens=512,
        tokens_per_micro_batch=4096,
        task=partial(
            file_task.task,
            train="data/gsm8k/train.jsonl",
            held_out="data/gsm8k/test.jsonl",
            layout=layouts.gsm8k,
            template=layouts.STEP_BY_STEP,  # what RL asks
            thinking=False,
            trace="{solution}\nThe answer is \\boxed{{answer}}.",
            max_prompt_tokens=256,
            max_trace_tokens=512,
        ),
        warm_start=WarmStart(
            steps=STEPS,
            rows=64,
            optimizer=partial(
                optax.adamw, learning_rate=RATE, b2=0.95, weight_decay=0.0
            ),
        ),
        logging=Logging(every=1, checkpoint_every=50),
        steps=0,
    )
