"""Prompts whose groups keep coming back dead are mostly skipped.

Paper:    Zheng et al. 2025, "Act Only When It Pays: Efficient Reinforcement Learning
          for LLM Reasoning via Selective Rollouts" (GRESO), arXiv:2506.02177.
Command:  python -m curax.train --config configs/greso.py
w(p):     1, whatever p: skipping changes how well a prompt is seen, not how much it
          counts.
Here:     A prompt is dead when the memory holds at least 8 draws that are all right or
          all wrong, but for a twentieth. It gets 2 draws, so that it can come back, and
          the others share the rest; GRESO skips by chance, with a rate that adapts.
          Leave one out, weights 8 / n.
          512 prompts to train on: what is remembered of one is read when it comes
          back.
"""

from functools import partial

from curax import advantage, aggregate, allocate, correct, loss
from curax.config import Config, Sampling
from curax.tasks import chain
from curax.testbed import embedded


def get_config() -> Config:
    return embedded(
        task=partial(chain.task, num_prompts=512),
        sampling=Sampling(prompts=16, group_size=16, max_tokens=8, budget=128),
        allocate=partial(allocate.skip_dead, least=2),
        correct=partial(correct.per_prompt, rows=8),
        advantage=advantage.leave_one_out,
        loss=partial(loss.clipped_ratio, low=0.2, high=0.28),
        aggregate=partial(aggregate.constant_length, length=8),
    )
