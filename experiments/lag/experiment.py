"""What a draw one step ahead costs in learning, and what correcting the lag gives back.

Command:  python -m curax.compare experiments/lag

GRPO on the embedded task from the same warm-started policies, one per seed, at the
learning rate of the recipe and at ten times it; its updates differ in what they are
drawn from alone. A completion has up to eight tokens.
"""

from curax import off_policy
from curax.compare.experiment import Experiment

AHEAD = {"sampling.ahead": 1}


def get_experiment() -> Experiment:
    """On policy; one step ahead uncorrected, and with each of three corrections."""
    rules = {
        "uncorrected": {"sampling.off_policy": off_policy.none},
        "tokens": {"sampling.off_policy": off_policy.truncated_ratio},
        "sequences": {
            "sampling.off_policy": off_policy.truncated_ratio,
            "sampling.off_policy.per": "sequence",
        },
        "bypass": {"update.behaviour_as_old": True},
    }
    ahead = {name: ("grpo", AHEAD | rule) for name, rule in rules.items()}
    return Experiment(
        recipes={"on_policy": "grpo", **ahead},
        common={
            "sampling.prompts": 16,
            "update.minibatches": 1,
            "task.num_prompts": 512,
        },
        warm_start={"task.num_prompts": 1 << 14},
        sweep={"optimizer.learning_rate": (3e-3,)},
        seeds=8,
        tokens=120_000,
        steps=480,
        watched=("kl/behaviour_nats", "gradient/norm"),
    )
