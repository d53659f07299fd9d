"""MaxRL in small: log p, truncated, beside p and GRPO on hard prompts.

Command:  python -m curax.compare experiments/maxrl

The teacher hardly ever gets a reverse subtraction right. 128 completions per update, in
groups of 8 and of 16, one update per batch.
"""

from curax.compare.experiment import Experiment


def get_experiment() -> Experiment:
    """p, GRPO and the truncated log, in groups of 8 and 16."""
    wide = {"sampling.prompts": 8, "sampling.group_size": 16}
    even = {"sampling.prompts": 16, "sampling.group_size": 8}
    return Experiment(
        recipes={
            "rloo": ("rloo", even),
            "grpo": ("grpo", even | {"kl": None}),
            "raft_plus_plus": ("raft_plus_plus", even),
            "maxrl": "maxrl",
            "rloo_16": ("rloo", wide),
            "maxrl_16": ("maxrl", wide),
        },
        common={"update.minibatches": 1, "task.errors": (0.05, 0.40, 0.97)},
        tune={"optimizer.learning_rate": (1e-4, 3e-4, 1e-3, 3e-3)},
        seeds=16,
        tokens=120_000,
        steps=320,
        threshold=0.7,
        watched=("group/dead_fraction", "outcome/mean"),
    )
