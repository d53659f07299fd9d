"""Hints of a prompt's own success: a head of its earlier right completion.

Paper:    None; levels and their controller as in SAGE-light, arXiv:2602.03143. It is
          not Prefix Sampling, arXiv:2605.05112, which replays a head as the beginning
          of the response and masks it from the loss; here it is part of the prompt.
Command:  python -m curax.train --config configs/own_prefix.py
w(p):     E[sqrt(q (1 - q))] / (p (1 - p)), q = k / 8, k ~ Binomial(8, p), with p
          the pass rate under the level that is set: a visit at level l ascends
          w(p_l) grad p_l, and without a hint only where l = 0.
          Exact for the first of the two updates per step, at ratio 1.
Here:     The last right completion of every prompt is kept in the state of the run. A
          visit with at most a quarter right makes the head longer by a quarter of it,
          one with more than three quarters shorter, so that about half are right. A
          prompt that was never solved is drawn without. Eight completions of 16
          prompts; so that a prompt comes back, there are 512 of them.
"""

from functools import partial

from curax import advantage, aggregate, correct, gate, hint, loss
from curax.config import Config, Hint, Sampling
from curax.step.methods import prefixes
from curax.tasks import chain
from curax.testbed import embedded


def get_config() -> Config:
    return embedded(
        task=partial(chain.task, num_prompts=512, hints=True),
        sampling=Sampling(prompts=16, group_size=8, max_tokens=8),
        hint=Hint(
            source=prefixes.own_prefix,
            levels=3,
            width=7,
            trigger=hint.all_wrong,
            controller=partial(hint.hysteresis, low=0.25, high=0.75),
        ),
        methods=(prefixes.method,),
        gate=gate.zero_variance,
        correct=correct.none,
        advantage=advantage.standardised,
        loss=partial(loss.clipped_ratio, low=0.2, high=0.28, dual=3.0),
        aggregate=partial(aggregate.constant_length, length=8),
    )
