"""SAGE: groups in which nothing is right are drawn again, with a hint in the prompt.

Paper:    SAGE, "self-hint aligned GRPO with privileged supervision",
          arXiv:2602.03143, equation 5 and algorithm 1.
Command:  python -m curax.train --config configs/sage.py
w(p):     E[sqrt(q (1 - q))] / (p (1 - p)), q = k / 8, k ~ Binomial(8, p), of
          every group under its own context. With p_0 the pass rate without a hint and
          p_l, grad p_l those under hint l, held fixed, a prompt that is hinted ascends
          w(p_0) grad p_0 + (1 - p_0)^8 (w(p_1) grad p_1 + (1 - p_1)^8 (...)): its
          own part is that of GRPO, for a group without a right one adds nothing.
          Exact for the first of the two updates per step, at ratio 1.
Here:     Eight completions of 16 prompts, there 128, three levels of hints, half of the
          prompts hinted at most, there all. Hints are the head of the solution: a
          policy of this size writes poor ones. With source=hint.self_written,
          writing=Writing(max_tokens=8) it writes them itself, as in the paper. The
          standard deviation is that of the group (ddof 0, the code has 1) and tokens
          are summed over a constant, both as in the paper; the cap of the ratio at 3 is
          the code's. A hint that gives the last value away is dropped: chains of one
          operation have none.
"""

from functools import partial

from curax import advantage, aggregate, correct, gate, hint, loss
from curax.config import Config, Hint, Sampling
from curax.tasks import chain
from curax.testbed import embedded


def get_config() -> Config:
    return embedded(
        task=partial(chain.task, hints=True),
        sampling=Sampling(prompts=16, group_size=8, max_tokens=8),
        hint=Hint(
            source=hint.reference_prefix, levels=3, width=7, trigger=hint.all_wrong
        ),
        gate=gate.zero_variance,
        correct=correct.none,
        advantage=advantage.standardised,
        loss=partial(loss.clipped_ratio, low=0.2, high=0.28, dual=3.0),
        aggregate=partial(aggregate.constant_length, length=8),
    )
