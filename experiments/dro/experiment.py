"""DRO in small: rewards by reference answers, without a verifier.

Command:  python -m curax.compare experiments/dro

`aggregate` weighs all tokens of a reference alike; `published` by their deviation, with
its filter; `dro` above the noise, with a look at prompts beforehand; `dro_in_step`
without one. The control alone asks the verifier, which grades held-out completions of
all.
"""

from dataclasses import replace
from functools import partial

from curax import advantage, reflect
from curax.comparison.experiment import Experiment
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
            "verifier": replace(
                dro, reflection=None, advantage=partial(advantage.standardised)
            ),
        },
        common={
            "update.minibatches": 1,
            "sampling.prompts": 8,
            "evaluation.samples": 4,
        },
        seeds=8,
        tokens=600_000,
        steps=300,
        watched=("rollout/length_tokens",),
    )
