"""How much of a reward by references is the reference: two controls beside it.

Command:  python -m curax.compare experiments/references_control

`aggregate` of `experiments.references`, at two rates; the same where the reward of a
completion is that of another one of its group, and where references are of another
problem. From the start of that page.
"""

from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from curax import advantage
from curax.comparison.experiment import Experiment
from curax.config import override
from curax.settings.config_types import CheckpointPath, Count
from curax.settings.declared import declares
from curax.tasks import word_problems
from curax.types import Prompts, Task
from experiments.references import experiment
from experiments.text.experiment import HOW

RATES = {"1e-4": 1e-4, "3e-4": 3e-4}
BEHIND = 7  # problems between one and the other: of other steps, too


def permuted(reward: jax.Array, exists: jax.Array, **options: Any) -> jax.Array:
    """`standardised`, of the reward of the completion before in the same group."""
    return advantage.standardised(jnp.roll(reward, 1, -1), exists, **options)


@declares(tokenizer="tokenizer", prompt_tokens="max_prompt_tokens")
def of_others(
    *,
    tokenizer: CheckpointPath | None = None,
    size: Count = 6000,
    max_prompt_tokens: Count = word_problems.MAX_PROMPT_TOKENS,
) -> Task:
    """Word problems in sentences whose references are those of other problems."""
    task = word_problems.task(
        tokenizer=tokenizer,
        size=size,
        max_prompt_tokens=max_prompt_tokens,
        sentences=True,
    )
    own = task.reference
    assert own

    def reference(prompts: Prompts) -> tuple[Any, Any]:
        other = (prompts.target + BEHIND) % task.num_prompts
        return own(replace(prompts, target=other))

    return replace(task, reference=reference)


def get_experiment() -> Experiment:
    """Rewards by the right references, by rewards of others, by others' references."""
    made = experiment.get_experiment()
    base = made.recipes["aggregate"]
    arms = {
        "aggregate": base,
        "permuted": replace(
            base, advantage=partial(permuted, **base.advantage.keywords)
        ),
        "of_others": replace(base, task=of_others),
    }
    recipes = {
        f"{name}-{text}": override(arm, {"optimizer.learning_rate": rate})
        for text, rate in RATES.items()
        for name, arm in arms.items()
    }
    return replace(
        made, recipes=recipes, baseline="aggregate-3e-4", **{**HOW, "tune": {}}
    )
