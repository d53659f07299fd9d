"""DRO whose filter looks at the completions it trains on: no separate look is paid for.

Paper:    Xu et al. 2025, "Direct Reasoning Optimization: LLMs Can Reward And Refine
          Their Own Reasoning for Open-Ended Tasks", arXiv:2506.13351; a filter in the
          step is ours.
Command:  python -m curax.train --config configs/dro_in_step.py
w(p):     None: the reward is no function of whether a completion is right, so there is
          no pass rate of which a w(p) could be the slope. What it pays for is the
          log-prob of the reference, where completions of a group make it differ.
Here:     As dro, but no prompts are looked at beforehand: all come in turn, and a group
          trains where a token of its reference stands out over its own 16 completions
          more than noise makes it, 5% of the others by chance. That costs no draw, and
          does not wait for the next look; a step has fewer groups to train on, and
          draws are spent on those that it drops. Nor can it keep prompts that are too
          hard away, for it ranks no tokens. With the weights of the paper, by
          deviation, which experiments/dro compares, it is this and
          --set reflection.weights=reflect.sigma reflection.leave_one_out=False.
"""

from functools import partial

from curax import advantage, aggregate, loss, reflect
from curax.config import Config, Reflection, Sampling
from curax.tasks import rationale
from curax.testbed import embedded


def get_config() -> Config:
    return embedded(
        task=rationale.task,
        sampling=Sampling(prompts=16, group_size=16, max_tokens=22),
        reflection=Reflection(
            weights=reflect.denoised,
            leave_one_out=True,
            keep=reflect.null_test,
        ),
        advantage=partial(advantage.standardised, floor=0.05),
        loss=partial(loss.clipped_ratio, low=0.2, high=0.28),
        aggregate=partial(aggregate.constant_length, length=8),
    )
