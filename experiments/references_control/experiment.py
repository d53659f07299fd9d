"""How much of a reward by references is the reference: controls beside it.

Command:  python -m curax.compare experiments/references_control

`aggregate` of `experiments.references`, and the same with references of other problems,
with wrong numbers in the own ones, with rewards of other completions of the group, and
with how likely the own answer is or how many others agree. From the start of that page.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from curax import advantage
from curax.compare.experiment import Experiment
from curax.config import override
from curax.settings.config_types import CheckpointPath, Count
from curax.settings.declared import declares
from curax.tasks import word_problems
from curax.tasks.prompt_format import padded_rows
from curax.types import Prompts, Task
from experiments.references import experiment
from experiments.references_control import own_answer
from experiments.text.experiment import HOW

RATES = {"1e-4": 1e-4, "3e-4": 3e-4}
TAKEN = "3e-4"  # by `aggregate` in its own experiment
BEHIND = 7  # problems between one and the other: of other steps, too
TRIED = 8  # problems from there on, of which one has another number
Reference = Callable[[Prompts], tuple[Any, Any]]


def permuted(reward: jax.Array, exists: jax.Array, **options: Any) -> jax.Array:
    """`standardised`, of the reward of the completion before in the same group.

    One behind a completion that does not exist gets 0.
    """
    return advantage.standardised(jnp.roll(reward, 1, -1), exists, **options)


def shuffled(reward: jax.Array, exists: jax.Array, **options: Any) -> jax.Array:
    """`standardised`, of rewards that are handed out anew among those that exist.

    All orders are as likely, also for each completion by itself: on average over them
    an advantage is 0.
    """

    def one(reward: jax.Array, exists: jax.Array) -> jax.Array:
        drawn = jax.random.uniform(
            jax.random.key(jax.lax.bitcast_convert_type(reward.sum(), jnp.uint32)),
            reward.shape,
        )
        mine = jnp.argsort(jnp.where(exists, 0, 2))
        theirs = jnp.argsort(jnp.where(exists, drawn, 2))
        return reward.at[mine].set(reward[theirs])

    handed = jnp.vectorize(one, signature="(g),(g)->(g)")(reward, exists)
    return advantage.standardised(handed, exists, **options)


def references(
    tokenizer: CheckpointPath | None,
    size: int,
    max_prompt_tokens: int,
    make: Callable[[Task, Reference, Prompts], tuple[Any, Any]],
) -> Task:
    """Word problems answered in sentences, with other references."""
    task = word_problems.task(
        tokenizer=tokenizer,
        size=size,
        max_prompt_tokens=max_prompt_tokens,
        sentences=True,
    )
    assert task.reference
    return replace(task, reference=partial(make, task, task.reference))


def behind(task: Task, prompts: Prompts, lag: int) -> Prompts:
    """The prompts whose targets are those of later problems."""
    return replace(prompts, target=(prompts.target + lag) % task.num_prompts)


def parts(task: Task, row: Sequence[int]) -> tuple[list[int], ...]:
    """Tokens before the number of an answer, those of the number, those behind it."""
    digit = [task.decode(np.array([token])).isdigit() for token in row]
    first = digit.index(True)
    last = first + sum(digit)
    return list(row[:first]), list(row[first:last]), list(row[last:])


@declares(tokenizer="tokenizer", prompt_tokens="max_prompt_tokens")
def of_others(
    *,
    tokenizer: CheckpointPath | None = None,
    size: Count = 6000,
    max_prompt_tokens: Count = word_problems.MAX_PROMPT_TOKENS,
) -> Task:
    """Word problems in sentences whose references are those of other problems."""

    def make(task: Task, own: Reference, prompts: Prompts) -> tuple[Any, Any]:
        return own(behind(task, prompts, BEHIND))

    return references(tokenizer, size, max_prompt_tokens, make)


@declares(tokenizer="tokenizer", prompt_tokens="max_prompt_tokens")
def wrong_number(
    *,
    tokenizer: CheckpointPath | None = None,
    size: Count = 6000,
    max_prompt_tokens: Count = word_problems.MAX_PROMPT_TOKENS,
) -> Task:
    """Word problems in sentences whose references have the number of another problem.

    That is of the first of those from `BEHIND` on whose number is another.
    """

    def make(task: Task, own: Reference, prompts: Prompts) -> tuple[Any, Any]:
        def cut(lag: int) -> list[tuple[list[int], ...]]:
            return [
                parts(task, row[mask].tolist())
                for row, mask in zip(*own(behind(task, prompts, lag)), strict=True)
            ]

        others = list(zip(*(cut(BEHIND + i) for i in range(TRIED)), strict=True))
        rows = [
            [*head, *next(x for _, x, _ in other if x != number), *tail]
            for (head, number, tail), other in zip(cut(0), others, strict=True)
        ]
        width = own(prompts)[0].shape[1] + 1  # a number may be longer by a digit
        return padded_rows(rows, width, pad=task.pad, left=False)

    return references(tokenizer, size, max_prompt_tokens, make)


def get_experiment() -> Experiment:
    """Rewards by the right references, by rewards of others, by others' references."""
    made = experiment.get_experiment()
    base = made.recipes["aggregate"]
    own = replace(base, reflection=None)
    agreed = partial(own_answer.method, score=own_answer.agreed)
    arms = {
        "aggregate": base,
        "permuted": replace(
            base, advantage=partial(permuted, **base.advantage.keywords)
        ),
        "of_others": replace(base, task=of_others),
        "wrong_number": replace(base, task=wrong_number),
        "shuffled": replace(
            base, advantage=partial(shuffled, **base.advantage.keywords)
        ),
        "own_answer": replace(own, methods=(own_answer.method,)),
        "agreement": replace(own, methods=(agreed,)),
    }
    recipes = {
        f"{name}-{text}": override(arm, {"optimizer.learning_rate": rate})
        for text, rate in RATES.items()
        for name, arm in arms.items()
    }
    return replace(
        made, recipes=recipes, baseline=f"aggregate-{TAKEN}", **{**HOW, "tune": {}}
    )
