"""Reinforce-Ada-Seq opens the gate where draws can, and SAGE where they cannot.

Paper:    Xiong et al. 2025, "Reinforce-Ada: An Adaptive Sampling Framework for
          Reinforce-Style LLM Training", arXiv:2510.04996, sequential sampling; and
          SAGE, arXiv:2602.03143, algorithm 1.
Command:  python -m curax.train --config configs/ada_seq_sage.py
w(p):     (1 - (1 - p)^32) / p of every pool under its own context, whatever the rule:
          log p, truncated at the 32 draws a pool may have. With p_l the pass rate under
          hint l, held fixed, a prompt ascends w(p_0) grad p_0 + (1 - p_0)^32 (w(p_1)
          grad p_1 + (1 - p_1)^32 (...)).
Here:     The mean over the right ones. It is exact when draws stop early, and a pool
          without a right one has no part in it, so that nothing is lost when a pool
          with a hint takes its place; `correct.control_variate` is less noisy, but such
          pools push their completions down, and dropping them would bring a bias.
          Rounds of 8, at most 4 of them, 4 right ones kept at random. Half of the
          prompts are hinted at most: those whose 32 draws were all wrong.
"""

from functools import partial

from curax import advantage, aggregate, correct, downsample, gate, loss, objective, stop
from curax.config import Config, Hint, Sampling, Stop
from curax.hint import all_wrong, reference_prefix
from curax.tasks import chain
from curax.testbed import embedded


def get_config() -> Config:
    return embedded(
        task=partial(chain.task, hints=True),
        sampling=Sampling(prompts=32, group_size=32, max_tokens=8),
        stop=Stop(rule=stop.positives, round_size=8),
        hint=Hint(source=reference_prefix, levels=3, width=7, trigger=all_wrong),
        gate=gate.accepted,
        downsample=partial(downsample.random, m=4),
        correct=partial(correct.accepted_mean, rows=4),
        advantage=advantage.raw,
        claim=objective.log,
        loss=partial(loss.clipped_ratio, low=0.2, high=0.28),
        aggregate=partial(aggregate.constant_length, length=8),
    )
