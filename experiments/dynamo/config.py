"""DynaMO at the size of its released script.

Paper:    DynaMO, arXiv:2602.19208, by its README and released script; paper.toml has
          every value.
Command:  python -m curax.train --config experiments/dynamo/config.py --set
          model.path=DIR task.train=train.jsonl task.held_out=held_out.jsonl
w(p):     That of dynamo_published, whose stages these are.
Here:     Model, data and lengths are blank in the script: the model is one of its
          tables, the lengths are ours. Every response is graded against its own answer,
          which the release does not do once groups differ in size.
"""

from dataclasses import replace
from functools import partial

import optax

from curax import update
from curax.config import Config, Evaluation, Logging, Update, load
from curax.tasks import file_task, layouts
from curax.testbed import from_checkpoint

RATE = partial(update.warmup_cosine, peak=1e-6, warmup=10, steps=32_000, end=1e-6)


def get_config() -> Config:
    """The config of the run."""
    recipe = load("dynamo_published")
    return from_checkpoint(
        recipe,
        path="models/Qwen2.5-Math-1.5B",
        max_tokens=3072,
        tokens_per_micro_batch=8192,
        task=partial(
            file_task.task,
            train="data/math/train.jsonl",
            held_out="data/math/math500.jsonl",
            template=layouts.STEP_BY_STEP,
            max_prompt_tokens=1024,
        ),
        sampling=replace(recipe.sampling, prompts=512, group_size=24, budget=16 * 512),
        optimizer=partial(optax.adamw, learning_rate=RATE, weight_decay=0.1),
        update=Update(minibatches=16, tokens_per_micro_batch=8192, token_chunk=512),
        evaluation=Evaluation(every=5, prompts=500, samples=32, k=32),
        logging=Logging(every=1, checkpoint_every=20),
        steps=2000,
    )
