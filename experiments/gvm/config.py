"""GVM-RAFT++ at the size of its paper.

Paper:    Yao et al. 2025, "Optimizing Chain-of-Thought Reasoners via Gradient Variance
          Minimization in Rejection Sampling and RL", arXiv:2505.02391; paper.toml has
          every value.
Command:  python -m curax.train --config experiments/gvm/config.py --set
          model.path=DIR task.train=train.jsonl task.held_out=held_out.jsonl
w(p):     That of gvm_raft_published, whose stages these are, with 8 pilots.
Here:     Pilots are drawn by a copy of the policy that is renewed every nine steps,
          as if for nine steps at once; there with a reference and an optimizer of
          their own. A prompt gets at most 64 completions, there any
          number. 4 updates per batch, as a mini-batch of 256 of 1024 prompts says; the
          released trainer makes 32.
"""

from dataclasses import replace
from functools import partial

import optax

from curax import loss
from curax.config import Config, Evaluation, Pilot, Update, load
from curax.tasks import file_task, layouts
from curax.testbed import from_checkpoint


def get_config() -> Config:
    """The config of the run."""
    recipe = load("gvm_raft_published")
    assert isinstance(recipe.pilot, Pilot)
    return from_checkpoint(
        recipe,
        path="models/Qwen2.5-Math-1.5B",
        max_tokens=3072,
        tokens_per_micro_batch=8192,
        task=partial(
            file_task.task,
            train="data/numina_math/train.jsonl",
            held_out="data/math/math500.jsonl",
            template=layouts.STEP_BY_STEP,
            max_prompt_tokens=1024,
        ),
        sampling=replace(
            recipe.sampling, prompts=1024, group_size=64, budget=(8 + 8) * 1024
        ),
        pilot=replace(recipe.pilot, draws=8, every=9),
        loss=partial(loss.clipped_ratio, low=0.2, high=0.2, dual=3.0),
        optimizer=partial(optax.adamw, learning_rate=1e-6, weight_decay=0.01),
        update=Update(minibatches=4, tokens_per_micro_batch=8192, token_chunk=512),
        evaluation=Evaluation(every=9, prompts=500, samples=8),
        steps=135,
    )
