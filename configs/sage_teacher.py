"""SAGE with a teacher: another model wrote the hints beforehand.

Paper:    SAGE, "self-hint aligned GRPO with privileged supervision",
          arXiv:2602.03143, equation 5 and figure 3, hints of a larger model.
Command:  python -m curax.train --config configs/sage_teacher.py
w(p):     E[sqrt(q (1 - q))] / (p (1 - p)), q = k / 8, k ~ Binomial(8, p), of
          every group under its own context. With p_0 the pass rate without a hint and
          p_l, grad p_l those under hint l, held fixed, a prompt that is hinted ascends
          w(p_0) grad p_0 + (1 - p_0)^8 (w(p_1) grad p_1 + (1 - p_1)^8 (...)): its
          own part is that of GRPO, for a group without a right one adds nothing.
          Exact for the first of the two updates per step, at ratio 1.
Here:     As sage, but the hints are read from a file (source=hint.from_file): a model
          other than the policy wrote them before RL, and drawing them costs nothing. On
          problems in files it is `task.hints_file`. On chains this teacher works the
          problem out by itself, with a fifth of the errors of the one whom the policy
          imitates (`task.hint_errors`): some hints are wrong, unlike the heads of
          solutions in sage. The paper has a large model that is shown the solution.
"""

from functools import partial

from curax import advantage, aggregate, correct, gate, hint, loss
from curax.config import Config, Hint, Sampling
from curax.tasks import chain
from curax.testbed import embedded


def get_config() -> Config:
    return embedded(
        task=partial(chain.task, hints=True, hint_errors=(0.01, 0.08, 0.17)),
        sampling=Sampling(prompts=16, group_size=8, max_tokens=8),
        hint=Hint(
            source=hint.from_file,
            levels=3,
            width=7,
            trigger=hint.all_wrong,
        ),
        gate=gate.zero_variance,
        correct=correct.none,
        advantage=advantage.standardised,
        loss=partial(loss.clipped_ratio, low=0.2, high=0.28, dual=3.0),
        aggregate=partial(aggregate.constant_length, length=8),
    )
