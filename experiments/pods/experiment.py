"""PODS in small: what down-sampling buys where a completion trained costs 2.3 drawn.

Command:  python -m curax.compare experiments/pods

The cost is the one fitted to the released timings on one L40S, .058 s per completion
drawn and .13 s per completion trained; `--cost A:B` asks for another machine.
"""

from curax.compare.experiment import Experiment


def get_experiment() -> Experiment:
    """16 of 64 kept, beside GRPO with 16 and with 64, four prompts each."""
    few, many = ({"sampling.prompts": 4, "sampling.group_size": n} for n in (16, 64))
    kept = many | {"downsample.m": 16}
    return Experiment(
        recipes={
            "grpo_16": ("grpo", few | {"kl": None}),
            "grpo_64": ("grpo", many | {"kl": None}),
            "raft_plus_plus": ("raft_plus_plus", few),
            "pods_published": ("pods_published", kept),
            "pods_exact": ("pods_exact", kept),
        },
        common={"update.minibatches": 1},
        tune={"optimizer.learning_rate": (1e-4, 3e-4, 1e-3, 3e-3)},
        seeds=16,
        tokens=200_000,
        steps=800,
        threshold=0.7,
        cost=(1.0, 2.3),
        watched=("rollout/drawn", "train/rows"),
    )
