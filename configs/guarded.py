"""Leave one out, but groups with a single right completion do not train.

Paper:    The finding that over-hard prompts do harm: arXiv:2605.28388. The count is
          ours, and so is that of `advantage.least_positives`.
Command:  python -m curax.train --config configs/guarded.py
w(p):     1 - (1 - p)^6: the pass rate, but for hard prompts, whose rare right ones may
          well be accidents. It is the chance that one of the other 6 is right where a
          right and a wrong one are compared.
Here:     8 completions of 16 prompts, of which 2 must be right: by accident alone 2 are
          so in 5 groups of 100, at most, where the verifier passes 4.6% of what is
          wrong. All-right groups stay open and have no credit.
          What a lone right one says is not looked at, for a gate reads outcomes: an
          answer without a derivation is the grader's to refuse.
"""

from functools import partial

from curax import advantage, aggregate, correct, gate, loss
from curax.config import Config, Sampling
from curax.testbed import embedded


def get_config() -> Config:
    return embedded(
        sampling=Sampling(prompts=16, group_size=8, max_tokens=8),
        gate=partial(gate.minimum_right, least=2),
        correct=correct.none,
        advantage=advantage.leave_one_out,
        loss=partial(loss.clipped_ratio, low=0.2, high=0.28),
        aggregate=partial(aggregate.constant_length, length=8),
    )
