"""Rewards by reference answers, weighed in several ways, without any verifier.

Command:  python -m curax.compare experiments/dro_smoke

All recipes start from the same warm-started policies, one per seed, draw as many
completions per update, make one optimizer update per step, and go on until every seed
has generated 600 thousand tokens, those drawn to choose prompts included. Held-out
completions are graded by a verifier that none of the recipes but the control has asked.
"""

from dataclasses import replace
from functools import partial
from typing import Any

from curax import advantage, reflect
from curax.comparison.experiment import Experiment
from curax.config import Config, load


def control(config: Config) -> Config:
    """The same recipe with the outcome of the verifier as its reward."""
    plain = partial(advantage.standardised)
    return replace(config, reflection=None, advantage=plain)


def weighed(config: Config, weights: Any) -> Config:
    """Every prompt in turn, reference tokens weighed like this."""
    assert config.reflection
    how = replace(config.reflection, weights=weights, queries=None)
    return replace(config, reflection=how)


def get_experiment() -> Experiment:
    """Three weights of reference tokens, a control with a verifier, and DRO."""
    dro = load("dro")
    return Experiment(
        recipes={
            "mean": weighed(dro, reflect.mean),
            "sigma": weighed(dro, reflect.sigma),
            "denoised": weighed(dro, reflect.denoised),
            "verifier": control(dro),
            "dro": dro,
        },
        common={
            "update.minibatches": 1,
            "sampling.prompts": 8,
            "evaluation.samples": 4,
        },
        seeds=8,
        tokens=600_000,
        steps=300,
        watched=(
            *("reflect/certainty_nats", "reflect/thought_tokens"),
            "reflect/top_weight",
        ),
    )
