"""RAFT++ and Reinforce-Rej in small: what of Reinforce helps, and what entropy does.

Command:  python -m curax.compare experiments/raft

Two updates per batch, so that ratios leave 1 and the clip has something to do; 32
prompts of 4 completions. `reinforce` is Reinforce-Rej without its gate; two others drop
one kind of uniform groups each.
"""

from functools import partial

from curax import gate
from curax.compare.experiment import Experiment


def get_experiment() -> Experiment:
    """Reinforce, what is dropped of it, RAFT++ and GRPO, at equal updates."""
    band = gate.pass_rate_band
    return Experiment(
        recipes={
            "reinforce": ("reinforce_rej", {"gate": gate.none}),
            "no_all_wrong": (
                "reinforce_rej",
                {"gate": partial(band, low=0.01, high=1.0)},
            ),
            "no_all_right": (
                "reinforce_rej",
                {"gate": partial(band, low=0.0, high=0.99)},
            ),
            "reinforce_rej": "reinforce_rej",
            "raft_plus_plus": "raft_plus_plus",
            "grpo": (
                "grpo",
                {"sampling.prompts": 32, "sampling.group_size": 4, "kl": None},
            ),
        },
        common={"update.minibatches": 2},
        tune={"optimizer.learning_rate": (1e-4, 3e-4, 1e-3, 3e-3)},
        seeds=16,
        updates=400,
        steps=240,
        threshold=0.7,
        watched=("policy/entropy_nats", "group/dead_fraction"),
    )
