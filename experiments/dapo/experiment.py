"""DAPO in small: which of its parts does what.

Command:  python -m curax.compare experiments/dapo

8 completions of 16 prompts, 8 of 8 where closed groups are replaced, one update per
batch. `no_refill` is `dapo` of 16 prompts drawn once, `no_price` is it without its
price on length.
"""

from curax.comparison.experiment import Experiment


def get_experiment() -> Experiment:
    """GRPO, DAPO, and DAPO without refills or without its price on length."""
    return Experiment(
        recipes={
            "grpo": ("grpo", {"kl": None}),
            "raft_plus_plus": (
                "raft_plus_plus",
                {"sampling.prompts": 16, "sampling.group_size": 8},
            ),
            "dapo": ("dapo", {"sampling.prompts": 8}),
            "no_refill": ("dapo", {"sampling.attempts": 1}),
            "no_price": ("dapo", {"sampling.prompts": 8, "shape_reward": None}),
        },
        common={"update.minibatches": 1},
        tune={"optimizer.learning_rate": (1e-4, 3e-4, 1e-3)},
        seeds=16,
        tokens=120_000,
        steps=480,
        threshold=0.7,
        watched=("group/signal_fraction", "rollout/length_tokens"),
    )
