"""RAFT++: train on right completions alone, with ratio and clip.

Paper:    Xiong et al. 2025, "A Minimalist Approach to LLM Reasoning: from Rejection
          Sampling to Reinforce", arXiv:2504.11343, the objective of RAFT++.
Command:  python -m curax.train --config configs/raft_plus_plus.py
w(p):     1, whatever p; f = p: the policy gradient of the pass rate without a baseline.
          That is for a sum over right completions divided by a constant. The objective
          divides it by how many are right in the mini-batch, nearly the same for all
          prompts of a large one, and each by its length; both depend on content.
Here:     4 completions of 32 prompts, the paper has 4 of 1024. A completion is accepted
          if it is right; the argmax of the paper would accept all of an all-wrong
          group. Advantages are 0 or 1, so the lower clip never binds. Not here, for the
          paper states none of it, but in the released code: a KL of 1e-3 to the start,
          an entropy bonus of 1e-3, a dual clip of 3 (which would never bind), a mean
          over the tokens of all completions, wrong ones too, and 4 updates per batch,
          here 2.
"""

from curax import advantage, aggregate, correct, gate, loss
from curax.config import Config, Sampling
from curax.testbed import embedded


def get_config() -> Config:
    return embedded(
        sampling=Sampling(prompts=32, group_size=4, max_tokens=8),
        gate=gate.accepted,
        correct=correct.none,
        advantage=advantage.raw,
        loss=loss.clipped_ratio,
        aggregate=aggregate.sequence_mean,
    )
