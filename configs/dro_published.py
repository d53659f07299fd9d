"""DRO as published, as far as it is: R3 by sigma, its length reward, its query filter.

Paper:    Xu et al. 2025, "Direct Reasoning Optimization: LLMs Can Reward And Refine
          Their Own Reasoning for Open-Ended Tasks", arXiv:2506.13351, version 1.
Command:  python -m curax.train --config configs/dro_published.py
w(p):     None: the reward is no function of whether a completion is right, so there is
          no pass rate of which a w(p) could be the slope.
Here:     As there: 16 completions, drawn at top-p 0.95,
          the bias of which nothing corrects; the loss of Dr. GRPO with
          rewards divided by their deviation, clipped by 0.2; a KL of 1e-3 to the policy
          that RL starts from; those cut off do not train; every token of a completion
          gets its credit; 16 completions of each prompt looked at, a tenth of the
          prompts carried over. Not published, so ours: weights that are sigma itself,
          divided by their sum; the length reward in nats per token, with a slope of
          0.5, which a completion of 22 tokens cannot bring below its bound; that the
          policy scores; the half that is dropped as flattest, a hardest rank of 10 in
          the worst fifth of the reference, the 10 steps between two looks, and twice as
          many candidates as are wanted. Of a task and a model this small: 16 prompts in
          2 updates, there 128 or 256; the learning rate and its warm-up.
"""

from dataclasses import replace
from functools import partial

from curax import advantage, aggregate, correct, gate, loss, off_policy, reflect
from curax.config import KL, Config, Queries, Reflection, Sampling
from curax.tasks import rationale
from curax.testbed import embedded

SIZES = Sampling(prompts=16, group_size=16, max_tokens=22)


def get_config() -> Config:
    keep = partial(reflect.percentile, flattest=0.5, hardest=10.0)
    return embedded(
        task=rationale.task,
        # As published: nothing corrects what top-p cuts off.
        sampling=replace(SIZES, top_p=0.95, off_policy=off_policy.none),
        reflection=Reflection(
            weights=reflect.sigma,
            answers=True,
            length=partial(reflect.length_term, slope=0.5),
            queries=Queries(every=10, candidates=2, draws=16, keep=keep, carried=0.1),
        ),
        gate=gate.overlong,
        correct=correct.none,
        advantage=advantage.standardised,
        loss=partial(loss.clipped_ratio, low=0.2, high=0.2),
        aggregate=partial(aggregate.constant_length, length=22),
        kl=KL(estimator=loss.k3, coefficient=1e-3),
    )
