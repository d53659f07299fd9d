"""DRO in small: rewards by reference answers, without a verifier.

Command:  python -m curax.compare experiments/dro

`aggregate` weighs all tokens of a reference alike; `published` by their deviation, with
its filter; `dro` above the noise, with a look at prompts beforehand; `dro_in_step`
without one, but a filter in each step, and `dro_in_step_sigma` by deviation with that
filter. `verifier` and RAFT++, the controls, alone ask the verifier, which grades
held-out completions of all. Task, model and warm start are those of the map's regime
without a verifier, in which a verifier gains .23.
"""

from dataclasses import replace
from functools import partial

from curax import advantage, reflect
from curax.compare.experiment import Experiment
from curax.config import load


def get_experiment() -> Experiment:
    """Two filters, their absence, the published recipe and a control."""
    dro = load("dro")
    assert dro.reflection
    plain = replace(dro.reflection, weights=reflect.mean, queries=None)
    return Experiment(
        recipes={
            "aggregate": replace(dro, reflection=plain),
            "dro_published": "dro_published",
            "dro": dro,
            "dro_in_step": "dro_in_step",
            "dro_in_step_sigma": (
                "dro_in_step",
                {
                    "reflection.weights": reflect.sigma,
                    "reflection.leave_one_out": False,
                },
            ),
            "verifier": replace(
                dro, reflection=None, advantage=partial(advantage.standardised)
            ),
            "raft_plus_plus": replace(
                load("raft_plus_plus"), task=dro.task, sampling=dro.sampling
            ),
        },
        common={
            "task.depth": 3,
            "task.words": 4,
            "model.layers": 1,
            "warm_start.steps": 1200,
            "warm_start.rows": 64,
            "warm_start.optimizer.learning_rate.peak": 1e-2,
            "warm_start.optimizer.learning_rate.steps": 1200,
            "update.minibatches": 1,
            "sampling.prompts": 4,
            "sampling.max_tokens": 11,
            "evaluation.samples": 4,
        },
        tune={"optimizer.learning_rate": (1e-4, 3e-4, 1e-3, 3e-3)},
        seeds=16,
        tokens=200_000,
        steps=400,
        watched=("rollout/length_tokens",),
    )
