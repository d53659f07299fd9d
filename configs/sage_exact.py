"""SAGE, exact: what is drawn with a hint ascends the pass rate without it.

Paper:    SAGE, "self-hint aligned GRPO with privileged supervision",
          arXiv:2602.03143, algorithm 1; the correction is derived here.
Command:  python -m curax.train --config configs/sage_exact.py
w(p):     1, whatever p, of every group, hinted or not; so a prompt ascends w grad p_0
          with w = 1 + (1 - p_0)^8 (1 + (1 - p_1)^8 (1 + (1 - p_2)^8)), the mean
          number of groups drawn for it, p_l its pass rate under hint l; a level without
          a hint falls out. f = p for prompts with pass rates above all chance to be
          hinted, up to 4 p for others. Exactly: one update per batch, no clip, tokens
          divided by a constant, temperature 1.
Here:     A completion drawn with a hint is trained at the prompt without it, its credit
          times pi(y | x) / pi(y | x, h). So its part of the update is as small as p_0,
          in expectation, and noisy: this is the yardstick, `sage` is the recipe.
          8 completions of 16 prompts. All prompts may be hinted: with fewer, w depends
          on the rest of the batch.
"""

from functools import partial

from curax import advantage, aggregate, hint, loss
from curax.config import Config, Hint, Sampling, Update
from curax.tasks import chain
from curax.testbed import embedded


def get_config() -> Config:
    return embedded(
        task=partial(chain.task, hints=True),
        sampling=Sampling(prompts=16, group_size=8, max_tokens=8),
        hint=Hint(
            source=hint.reference_prefix,
            levels=3,
            width=7,
            trigger=hint.all_wrong,
            most=1.0,
            credit=hint.sequence_weighted,
        ),
        advantage=advantage.leave_one_out,
        loss=loss.reinforce,
        aggregate=partial(aggregate.constant_length, length=8),
        update=Update(minibatches=1),
    )
