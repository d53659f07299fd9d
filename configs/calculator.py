"""A calculator in the loop: chains of arithmetic, asked for link by link.

Paper:    Liu et al. 2025, "Dr. GRPO", arXiv:2503.20783: mean baseline, constant length.
Command:  python -m curax.train --config configs/calculator.py
w(p):     1 - 1/8, whatever p: the objective is the pass rate itself.
Here:     completions have turns: the tokens of the calculator are read and not trained.
          The warm start asks for 70 % of the links and guesses else: a pass rate of
          .350. Asking always gives 1.
"""

from functools import partial

from curax import advantage, aggregate, loss
from curax.config import Config, Sampling
from curax.tasks import calculator
from curax.testbed import embedded


def get_config() -> Config:
    return embedded(
        task=calculator.task,
        sampling=Sampling(prompts=16, group_size=8, max_tokens=36),
        advantage=advantage.group_mean,
        loss=partial(loss.clipped_ratio, low=0.2, high=0.28),
        aggregate=partial(aggregate.constant_length, length=36),
    )
