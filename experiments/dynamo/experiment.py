"""DynaMO in small: stability and entropy, of allocation and of modulation.

Command:  python -m curax.compare experiments/dynamo

16 completions of 8 prompts on average, four updates per batch, so that the clip acts.
`grpo` has the upper clip of 1.28 that the released code has in effect, so that it is
not what is compared.
"""

from curax.compare.experiment import Experiment


def get_experiment() -> Experiment:
    """GRPO with the higher clip, DynaMO's allocation, and modulated tokens on top."""
    return Experiment(
        recipes={
            "grpo": (
                "grpo",
                {
                    "sampling.prompts": 8,
                    "sampling.group_size": 16,
                    "kl": None,
                    "loss.high": 0.28,
                },
            ),
            "raft_plus_plus": (
                "raft_plus_plus",
                {"sampling.prompts": 8, "sampling.group_size": 16},
            ),
            "dynamo_allocation_published": "dynamo_allocation_published",
            "dynamo_published": "dynamo_published",
            "dynamo_allocation_exact": "dynamo_allocation_exact",
            "dynamo": "dynamo",
        },
        common={"update.minibatches": 4, "task.num_prompts": 512},
        warm_start={"task.num_prompts": 1 << 14},
        tune={"optimizer.learning_rate": (1e-4, 3e-4, 1e-3, 3e-3)},
        seeds=16,
        tokens=120_000,
        steps=320,
        threshold=0.7,
        watched=("policy/entropy_nats", "gradient/norm", "ratio/clipped_fraction"),
    )
