"""DAPO in small: which of its parts does what.

Command:  python -m curax.compare experiments/dapo

8 completions of 16 prompts, 8 of 8 where closed groups are replaced, one update per
batch. `open_groups` is GRPO without groups whose outcomes are all equal, `no_refill`
is `dapo` of 16 prompts drawn once, `no_price` is it without its price on length.
"""

from curax import gate
from curax.compare.experiment import Experiment


def get_experiment() -> Experiment:
    """GRPO, also of open groups alone, DAPO, and DAPO without one of its parts."""
    return Experiment(
        recipes={
            "grpo": ("grpo", {"kl": None}),
            "raft_plus_plus": (
                "raft_plus_plus",
                {"sampling.prompts": 16, "sampling.group_size": 8},
            ),
            "open_groups": ("grpo", {"kl": None, "gate": gate.zero_variance}),
            "dapo": ("dapo", {"sampling.prompts": 8}),
            "no_refill": ("dapo", {"sampling.attempts": 1}),
            "no_price": ("dapo", {"sampling.prompts": 8, "shape_reward": None}),
        },
        common={"update.minibatches": 1},
        tune={"optimizer.learning_rate": (1e-4, 3e-4, 1e-3, 3e-3)},
        seeds=16,
        tokens=120_000,
        steps=480,
        threshold=0.7,
        watched=("group/signal_fraction", "rollout/length_tokens"),
    )
