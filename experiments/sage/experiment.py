"""SAGE in small: prompts that are never solved, and who writes their hints.

Command:  python -m curax.compare experiments/sage

The teacher hardly ever gets a reverse subtraction right, so that most groups are all
wrong at first. Hints are heads of the solution (`sage`), written by the policy
(`sage_self`), by the policy before RL (`sage_offline`), or by another model
(`sage_teacher`), whose errors are a fifth of the teacher's. Held-out prompts never have
a hint.
"""

from curax.compare.experiment import Experiment


def get_experiment() -> Experiment:
    """GRPO and SAGE with each source of hints, all at the same sizes."""
    return Experiment(
        recipes={
            "grpo": ("sage", {"hint": None}),
            "raft_plus_plus": (
                "raft_plus_plus",
                {"sampling.prompts": 16, "sampling.group_size": 8},
            ),
            "sage": "sage",
            "sage_self": "sage_self",
            "sage_offline": "sage_offline",
            "sage_teacher": "sage_teacher",
            "sage_light": "sage_light",
        },
        common={
            "update.minibatches": 1,
            "task.hints": True,
            "task.errors": (0.05, 0.40, 0.97),
            "task.hint_errors": (0.01, 0.08, 0.19),
        },
        warm_start={"task.num_prompts": 1 << 14},
        tune={"optimizer.learning_rate": (3e-4, 1e-3, 3e-3)},
        seeds=16,
        tokens=120_000,
        steps=480,
        threshold=0.7,
        watched=(*("outcome/mean", "group/failed_fraction"),),
    )
