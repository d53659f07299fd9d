"""DynaMO as curax would have it: draws by the deviation, gains by the state alone.

Paper:    DynaMO, arXiv:2602.19208, whose two aims these are by other means.
Command:  python -m curax.train --config configs/dynamo.py
w(p):     1, whatever p: the objective is the pass rate itself. A gain depends on the
          state and not on the token taken, so that each state keeps the direction of
          its gradient; how much it counts then depends on content, as does the brake.
Here:     `modulate.state_gain` for the boost, on right and wrong tokens alike;
          `modulate.abs_brake` for the brake, silent while updates are small. Its budget
          is chosen, not tuned: by softmaxes drawn at random, a token of credit 1 rarely
          changes the entropy by more than 0.3 nats per unit step. Leave one out without
          std, and weights 16 / n, so that draws change no objective. The allocation as
          in dynamo_allocation_exact.py.
"""

from functools import partial

from curax import advantage, aggregate, allocate, correct, loss, modulate
from curax.config import Config, Sampling
from curax.tasks import chain
from curax.testbed import embedded


def get_config() -> Config:
    return embedded(
        task=partial(chain.task, num_prompts=512),
        sampling=Sampling(prompts=8, group_size=24, max_tokens=8, budget=128),
        allocate=partial(allocate.bernoulli, least=8),
        correct=partial(correct.per_prompt, rows=16),
        advantage=advantage.leave_one_out,
        modulate=partial(
            modulate.every,
            rules=(
                modulate.state_gain,
                partial(modulate.abs_brake, budget=0.3, low=0.2, high=0.28),
            ),
        ),
        loss=partial(loss.clipped_ratio, low=0.2, high=0.28),
        aggregate=partial(aggregate.constant_length, length=8),
    )
