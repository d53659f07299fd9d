"""SAGE-light: a prompt is hinted as its last visit says, and no group is drawn twice.

Paper:    SAGE, "self-hint aligned GRPO with privileged supervision",
          arXiv:2602.03143, equation 12.
Command:  python -m curax.train --config configs/sage_light.py
w(p):     E[sqrt(q (1 - q))] / (p (1 - p)), q = k / 8, k ~ Binomial(8, p), with p
          the pass rate under the level that is set: a visit at level l ascends
          w(p_l) grad p_l, and without a hint only where l = 0.
          Exact for the first of the two updates per step, at ratio 1.
Here:     The controller is the released one: a level more where at most .1 was right,
          one less above .35. That of equation 12, which never goes down, is
          controller=hint.paper. A prompt whose hint of that level is missing is drawn
          without, and keeps its level, which the release sets to 0. Eight completions
          of 16 prompts; so that a prompt comes back, there are 512 of them.
"""

from functools import partial

from curax import advantage, aggregate, correct, gate, hint, loss
from curax.config import Config, Hint, Sampling
from curax.tasks import chain
from curax.testbed import embedded


def get_config() -> Config:
    return embedded(
        task=partial(chain.task, num_prompts=512, hints=True),
        sampling=Sampling(prompts=16, group_size=8, max_tokens=8),
        hint=Hint(
            source=hint.reference_prefix,
            levels=3,
            width=7,
            trigger=hint.all_wrong,
            controller=partial(hint.hysteresis, low=0.1, high=0.35),
        ),
        gate=gate.zero_variance,
        correct=correct.none,
        advantage=advantage.standardised,
        loss=partial(loss.clipped_ratio, low=0.2, high=0.28, dual=3.0),
        aggregate=partial(aggregate.constant_length, length=8),
    )
