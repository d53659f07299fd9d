"""Recipes that sample adaptively, on the embedded task, at equal generated tokens.

Command:  python -m curax.compare experiments/allocation_smoke

All recipes start from the same warm-started policies, one per seed, train on the same
few prompts, make one optimizer update per step, and are sized to draw about as much per
update as GRPO does, 128 completions. Each goes on until every seed has generated 120
thousand tokens, pilots and what was thrown away included.
"""

from curax.comparison.experiment import Experiment


def get_experiment() -> Experiment:
    """Recipes, each with what is changed so that an update takes 128 completions."""
    return Experiment(
        recipes={
            "grpo": ("grpo", {"sampling.prompts": 16}),
            "rloo": ("rloo", {"sampling.prompts": 16, "sampling.group_size": 8}),
            "dapo": ("dapo", {"sampling.prompts": 8}),
            "ada_seq_balanced_published": (
                "ada_seq_balanced_published",
                {"sampling.prompts": 8},
            ),
            "ada_seq_balanced_exact": (
                "ada_seq_balanced_exact",
                {"sampling.prompts": 8},
            ),
            "neyman": ("neyman", {"sampling.prompts": 16}),
            "pods_published": ("pods_published", {"sampling.prompts": 4}),
            "gvm_raft_published": (
                "gvm_raft_published",
                # The config had no KL when this was measured.
                {"sampling.prompts": 8, "sampling.budget": 128, "kl": None},
            ),
            "gvm_raft_exact": (
                "gvm_raft_exact",
                {"sampling.prompts": 8, "sampling.budget": 128, "correct.rows": 12.0},
            ),
        },
        # 16 of 512 prompts per update come back after 32, so a memory has use.
        common={"update.minibatches": 1, "task.num_prompts": 512},
        warm_start={"task.num_prompts": 1 << 14},
        seeds=8,
        tokens=120_000,
        steps=480,
        threshold=0.7,
        watched=("group/signal_fraction", "rollout/drawn"),
    )
