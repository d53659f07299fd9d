"""SAGE with self-written hints at the size of its paper.

Paper:    SAGE, "self-hint aligned GRPO with privileged supervision", arXiv:2602.03143;
          paper.toml has every value.
Command:  python -m curax.train --config experiments/sage/config.py --set
          model.path=DIR task.train=train.jsonl task.held_out=held_out.jsonl
w(p):     That of sage_self, whose stages these are.
Here:     Every prompt may be hinted, and hints are written at temperature 0, as in the
          code. The standard deviation is that of the group and tokens are summed, as in
          the paper. The record needs a field `solution`. sage_light by the line RECIPE;
          sage_teacher with a file of hints in `task.hints_file`.
"""

from dataclasses import replace
from functools import partial

import optax

from curax import loss
from curax.config import Config, Evaluation, Logging, Update, Writing, load
from curax.tasks import file_task, layouts
from curax.testbed import from_checkpoint

RECIPE = "sage_self"


def get_config() -> Config:
    """The config of the run."""
    recipe = load(RECIPE)
    assert recipe.hint
    writing = Writing(max_tokens=8192, temperature=0.0, tries=3)
    return from_checkpoint(
        recipe,
        path="models/Qwen2.5-7B-Instruct",
        max_tokens=8192,
        tokens_per_micro_batch=16384,
        task=partial(
            file_task.task,
            train="data/openr1_math/train.jsonl",
            held_out="data/math/math500.jsonl",
            template=layouts.STEP_BY_STEP,
            max_prompt_tokens=2048,
            hints=True,
            max_hint_prompt_tokens=2048,
        ),
        sampling=replace(recipe.sampling, prompts=128, group_size=8),
        hint=replace(
            recipe.hint,
            levels=3,
            width=1024,
            most=1.0,
            writing=recipe.hint.writing and writing,
        ),
        loss=partial(loss.clipped_ratio, low=0.2, high=0.28, dual=3.0),
        optimizer=partial(
            optax.adamw, learning_rate=1e-6, b1=0.9, b2=0.999, weight_decay=0.01
        ),
        update=Update(minibatches=2, tokens_per_micro_batch=16384, token_chunk=512),
        evaluation=Evaluation(every=50, prompts=500, samples=16),
        logging=Logging(every=1, checkpoint_every=50),
        steps=500,
    )
