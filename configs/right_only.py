"""Right completions alone: REINFORCE without a baseline, and without wrong ones.

Paper:    Xiong et al. 2025, "A Minimalist Approach to LLM Reasoning: from Rejection
          Sampling to Reinforce", arXiv:2504.11343: RAFT, online, with the loss and
          the divisor of rloo.
Command:  python -m curax.train --config configs/right_only.py
w(p):     1, whatever p; f = p. The policy gradient of the pass rate without a baseline,
          exactly: a sum over right completions, divided by a constant.
Here:     2 completions of 64 prompts, as many as the 4 of 32 of rloo. RAFT++ divides by
          how many are right in a mini-batch and each by its length, and clips. By the
          x-ray noisier than rloo where most is right, and less noisy where little is.
          Tune the learning rate: where next to nothing is right, 1e-3 was the better
          one, for rloo too (experiments/factorial).
"""

from functools import partial

from curax import advantage, aggregate, correct, gate, loss
from curax.config import Config, Sampling, Update
from curax.testbed import embedded


def get_config() -> Config:
    return embedded(
        sampling=Sampling(prompts=64, group_size=2, max_tokens=8),
        gate=gate.accepted,
        correct=correct.none,
        advantage=advantage.raw,
        loss=loss.reinforce,
        aggregate=partial(aggregate.constant_length, length=8),
        update=Update(minibatches=1),
    )
