"""DRO as curax would have it: R3 with weights above the noise, of the thought alone.

Paper:    Xu et al. 2025, "Direct Reasoning Optimization: LLMs Can Reward And Refine
          Their Own Reasoning for Open-Ended Tasks", arXiv:2506.13351; its choices where
          they were measured to matter, ours elsewhere.
Command:  python -m curax.train --config configs/dro.py
w(p):     None: the reward is no function of whether a completion is right, so there is
          no pass rate of which a w(p) could be the slope. What it pays for is the
          log-prob of the reference, where completions of a group make it differ.
Here:     `rationale.task`: nobody verifies but the held-out prompts. 16 completions of
          16 prompts. Weights are `denoised`, and a completion has no say in its own.
          The deviation that divides is at least 0.05 nats: without, a group whose
          thoughts do not matter would train on rounding. Answers are masked out, for R3
          never reads them. Every 10 steps twice as many prompts as are wanted are
          looked at, 8 completions of each, and those stay in which a token stands out
          more than noise makes it, 5% of the others by chance; a tenth is carried over.
          The policy scores.
"""

from functools import partial

from curax import advantage, aggregate, loss, reflect
from curax.config import Config, Queries, Reflection, Sampling
from curax.tasks import rationale
from curax.testbed import embedded


def get_config() -> Config:
    return embedded(
        task=rationale.task,
        sampling=Sampling(prompts=16, group_size=16, max_tokens=22),
        reflection=Reflection(
            weights=reflect.denoised,
            leave_one_out=True,
            queries=Queries(
                every=10, candidates=2, draws=8, keep=reflect.null_test, carried=0.1
            ),
        ),
        advantage=partial(advantage.standardised, floor=0.05),
        loss=partial(loss.clipped_ratio, low=0.2, high=0.28),
        aggregate=partial(aggregate.constant_length, length=8),
    )
