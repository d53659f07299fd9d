"""SAGE with self-hints: the policy writes the hints of the groups it fails.

Paper:    SAGE, "self-hint aligned GRPO with privileged supervision",
          arXiv:2602.03143, equation 5 and algorithm 1.
Command:  python -m curax.train --config configs/sage_self.py
w(p):     E[sqrt(q (1 - q))] / (p (1 - p)), q = k / 8, k ~ Binomial(8, p), of
          every group under its own context. With p_0 the pass rate without a hint and
          p_l, grad p_l those under hint l, held fixed, a prompt that is hinted ascends
          w(p_0) grad p_0 + (1 - p_0)^8 (w(p_1) grad p_1 + (1 - p_1)^8 (...)): its
          own part is that of GRPO, for a group without a right one adds nothing.
          Exact for the first of the two updates per step, at ratio 1.
Here:     As sage, but the policy writes the hints when it is shown the solution, at the
          step where its group collapsed and with the weights of that step: the online
          form. A writing has all three levels, is drawn at temperature 1 (the code has
          0) and tried three times until it can be read; it is paid for in tokens. A
          policy of this size writes poor hints. sage_offline and
          sage_teacher are the other forms of the paper.
"""

from functools import partial

from curax import advantage, aggregate, correct, gate, hint, loss
from curax.config import Config, Hint, Sampling, Writing
from curax.tasks import chain
from curax.testbed import embedded


def get_config() -> Config:
    return embedded(
        task=partial(chain.task, hints=True),
        sampling=Sampling(prompts=16, group_size=8, max_tokens=8),
        hint=Hint(
            source=hint.self_written,
            levels=3,
            width=7,
            writing=Writing(max_tokens=8),
            trigger=hint.all_wrong,
        ),
        gate=gate.zero_variance,
        correct=correct.none,
        advantage=advantage.standardised,
        loss=partial(loss.clipped_ratio, low=0.2, high=0.28, dual=3.0),
        aggregate=partial(aggregate.constant_length, length=8),
    )
