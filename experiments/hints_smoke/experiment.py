"""Hints, modulated tokens and both beside GRPO, at equal generated tokens.

Command:  python -m curax.compare experiments/hints_smoke

All recipes start from the same warm-started policies, one per seed, which know how to
read a hint and how to write one; train on the same prompts, most of which no completion
of a group solves at first; and make one optimizer update per step. Each goes on until
every seed has generated 120 thousand tokens, completions under hints and the writing of
hints included. Held-out prompts never have a hint.
"""

from curax import hint
from curax.comparison.experiment import Experiment
from curax.config import Writing

SELF = {"hint.source": hint.self_written, "hint.writing": Writing(max_tokens=8)}


def get_experiment() -> Experiment:
    """Recipes with hints, the same without, and others."""
    return Experiment(
        recipes={
            "grpo": ("sage", {"hint": None}),
            "sage": "sage",
            "sage_self": ("sage", SELF),
            "sage_light": "sage_light",
            "sage_exact": "sage_exact",
            "dynamo": "dynamo",
            "ada_seq": ("ada_seq_sage", {"hint": None, "sampling.prompts": 8}),
            "ada_seq_sage": ("ada_seq_sage", {"sampling.prompts": 8}),
        },
        common={
            "update.minibatches": 1,
            "task.hints": True,
            # Of the teacher: reverse subtractions hardly ever succeed.
            "task.errors": (0.05, 0.40, 0.97),
        },
        warm_start={"task.num_prompts": 1 << 14},
        seeds=8,
        tokens=120_000,
        steps=480,
        threshold=0.7,
        watched=(
            *("hint/hinted_fraction", "hint/pass_rate", "hint/transfer_pass_rate"),
            *("outcome/mean", "group/failed_fraction"),
        ),
    )
