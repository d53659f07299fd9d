"""Who draws how often, at one truncation: Est, Seq and fixed groups beside each other.

Command:  python -m curax.compare experiments/est_seq

Three arms follow log p truncated at 4 draws, w(p) = (1 - (1 - p)^4) / p, and differ in
who draws: all prompts 4 (`log_4`), those with a memory of failures more (`est_4`), or
one by one until one is right, at most 4 (`seq_4`). Beside them the pass rate itself
(`rloo`), right completions alone (`right_only`), and Seq truncated at 32, as it is
elsewhere. Task, model and warm start are those of bimodal in the map; the learning rate
of each arm is tuned.
"""

from functools import partial

from curax import advantage, correct, gate, objective, stop
from curax.compare.experiment import Experiment
from curax.config import Stop
from experiments.map import regimes

LOG = partial(objective.series, coefficients=objective.log_coefficients)
FIXED = {"sampling.prompts": 16, "sampling.group_size": 4}


def one_by_one(most: int, prompts: int) -> dict:
    """Draws until one is right, at most so many; without bias, whatever stopped."""
    return {
        "sampling.prompts": prompts,
        "sampling.group_size": most,
        "stop": Stop(rule=stop.positives, round_size=1),
        "correct": partial(correct.control_variate, rows=most, limit=most),
        "advantage": advantage.signed,
    }


def get_experiment() -> Experiment:
    """Three ways to draw for one objective, and what else there is."""
    like = regimes.experiment("bimodal", {"rloo": regimes.Setting("", 4.0, 1e-3)})
    recipes = {
        "log_4": ("rloo", FIXED | {"objective": LOG}),
        "est_4": ("ada_est_exact", regimes.SHARED),
        "seq_4": ("rloo", one_by_one(4, 32)),
        "seq_32": ("rloo", one_by_one(32, 8)),
        "rloo": ("rloo", FIXED),
        "right_only": (
            "rloo",
            {**FIXED, "gate": gate.accepted, "advantage": advantage.raw},
        ),
    }
    return Experiment(
        recipes={
            name: (recipe, {**own, **regimes.LENGTH})
            for name, (recipe, own) in recipes.items()
        },
        common=like.common,
        warm_start=like.warm_start,
        tune={regimes.RATE: (1e-4, 3e-4, 1e-3, 3e-3)},
        seeds=16,
        tokens=40_000,
        steps=1500,
        watched=("policy/entropy_nats", "rollout/drawn"),
    )
