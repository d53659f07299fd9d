"""RLOO: REINFORCE on whole completions, the others of the group as baseline.

Paper:    Ahmadian et al. 2024, "Back to Basics: Revisiting REINFORCE Style Optimization
          for Learning from Human Feedback in LLMs", arXiv:2402.14740; k = 4.
Command:  python -m curax.train --config configs/rloo.py
w(p):     1, whatever p; f = p. The plain policy gradient of the pass rate, exactly:
          one update per batch, no clip, tokens divided by a constant.
Here:     4 completions of 32 prompts. The paper's reward comes from a reward model,
          less a KL penalty; this one is the outcome.
"""

from functools import partial

from curax import advantage, aggregate, loss
from curax.config import Config, Sampling, Update
from curax.testbed import embedded


def get_config() -> Config:
    return embedded(
        sampling=Sampling(prompts=32, group_size=4, max_tokens=8),
        advantage=advantage.leave_one_out,
        loss=loss.reinforce,
        aggregate=partial(aggregate.constant_length, length=8),
        update=Update(minibatches=1),
    )
