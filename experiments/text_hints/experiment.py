"""Hints that are sentences, on word problems of three steps: SAGE, and controls of it.

Command:  python -m curax.compare experiments/text_hints

All start from one policy whose pretraining had a hint in half of its prompts;
README.md says how to make it.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from curax import hint
from curax.compare.experiment import Experiment
from curax.config import override
from curax.types import Hinting, Prompts
from experiments.text import experiment as text

START = "runs/text/hinted-40"
RATE = 3e-4
WIDE = {"hint.width": 56}  # words that the tokenizer has in pieces
WATCHED = (
    *("hint/hinted_fraction", "hint/pass_rate", "hint/plain_pass_rate"),
    *("hint/overlong", "hint/leaked"),
)


def of_others(hinting: Hinting, prompts: Prompts, **options: Any) -> tuple[Any, Any]:
    """`hint.from_file`, of the prompt before in the batch: hints that mislead."""
    others = jax.tree.map(partial(jnp.roll, shift=1, axis=0), prompts)
    return hint.from_file(hinting, others, **options)


def get_experiment() -> Experiment:
    """SAGE by three sources of hints, the same without them, and two other recipes.

    With 29 prompts for 16 a step without hints draws as much as one with *sentences*.
    """
    every = text.recipes()
    sage = every["sage"]
    recipes = {
        "rloo": every["centred-fixed-one"],
        "right_only": every["right-fixed-one"],
        "grpo": override(sage, {"hint": None}),
        "grpo_29": override(sage, {"hint": None, "sampling.prompts": 29}),
        "sentences": override(sage, {**WIDE, "hint.source": hint.from_file}),
        "of_others": override(sage, {**WIDE, "hint.source": of_others}),
        "solutions": override(sage, {"hint.width": 40}),
    }
    rate = {"optimizer.learning_rate": RATE}
    watched = (*text.HOW["watched"], *WATCHED)
    how = {**text.HOW, "tune": {}, "every": 11, "watched": watched}
    return Experiment(
        recipes={name: override(one, rate) for name, one in recipes.items()},
        common={
            **text.COMMON,
            **text.REGIMES["sparse"],
            "model.path": START,
            "task.hints": True,
            "evaluation.prompts": 512,
        },
        baseline="rloo",
        **how,
    )
