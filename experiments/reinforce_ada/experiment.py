"""Reinforce-Ada in small: Seq, Est and GRPO at equal generated tokens.

Command:  python -m curax.compare experiments/reinforce_ada

All are sized to draw about 128 completions per update. `grpo_16` has the pool of 16
that the paper compares with, and so has RAFT++, the control;
`ada_seq_positive_accepted` and the exact ones are what follows log p of 32 or of 4
draws.
"""

from curax.compare.experiment import Experiment


def get_experiment() -> Experiment:
    """GRPO in groups of 4 and 16, and the published and exact forms of Seq and Est."""
    few = {"sampling.prompts": 8}
    pools = {
        n: {"sampling.prompts": 128 // n, "sampling.group_size": n} for n in (4, 16)
    }
    return Experiment(
        recipes={
            "grpo_4": ("grpo", pools[4] | {"kl": None}),
            "grpo_16": ("grpo", pools[16] | {"kl": None}),
            "raft_plus_plus": ("raft_plus_plus", pools[16]),
            "ada_seq_positive_published": ("ada_seq_positive_published", few),
            "ada_seq_positive_accepted": ("ada_seq_positive_accepted", few),
            "ada_seq_balanced_published": ("ada_seq_balanced_published", few),
            "ada_seq_balanced_exact": ("ada_seq_balanced_exact", few),
            "ada_est_published": "ada_est_published",
            "ada_est_exact": "ada_est_exact",
        },
        # 16 of 512 prompts per update come back after 32, so a memory has use.
        common={"update.minibatches": 1, "task.num_prompts": 512},
        warm_start={"task.num_prompts": 1 << 14},
        tune={"optimizer.learning_rate": (1e-4, 3e-4, 1e-3, 3e-3)},
        seeds=16,
        tokens=120_000,
        steps=480,
        threshold=0.7,
        watched=("group/signal_fraction", "rollout/drawn"),
    )
