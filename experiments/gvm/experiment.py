"""GVM in small: allocation by pilots, with and without its weights.

Command:  python -m curax.compare experiments/gvm

4 pilots and 8 more completions of 16 prompts, in every step. `gvm_raft_stale` draws its
pilots from a copy of the policy that is renewed every nine steps, as if nine steps were
allocated at once, which is published; the others from the policy itself.
`accepted_mean` is the M-step of Algorithm 1, which divides by |D|; `published` has no
weights, as equation 8 and the code. Pilots are tokens and are counted.
"""

from functools import partial

from curax import correct, gate, objective
from curax.compare.experiment import Experiment


def get_experiment() -> Experiment:
    """RAFT++ and GRPO with equal groups, and what GVM makes of each."""
    even = {"sampling.prompts": 16, "sampling.group_size": 8}
    algorithm = {
        "gate": gate.accepted,
        "correct": partial(correct.accepted_mean, rows=8),
        "objective": partial(objective.prompt_weight, f=objective.linear),
    }
    return Experiment(
        recipes={
            "raft_plus_plus": ("raft_plus_plus", even),
            "gvm_raft_published": "gvm_raft_published",
            "gvm_raft_stale": ("gvm_raft_published", {"pilot.every": 9}),
            "gvm_raft_accepted_mean": ("gvm_raft_exact", algorithm),
            "gvm_raft_exact": "gvm_raft_exact",
            "grpo": ("grpo", even | {"kl": None}),
            "gvm_grpo_published": "gvm_grpo_published",
            "gvm_grpo_exact": "gvm_grpo_exact",
        },
        common={"update.minibatches": 1},
        tune={"optimizer.learning_rate": (3e-4, 1e-3, 3e-3)},
        seeds=16,
        tokens=120_000,
        steps=320,
        threshold=0.7,
        watched=("outcome/mean", "rollout/drawn"),
    )
