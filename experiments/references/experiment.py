"""DRO on word problems whose references are sentences, beside the verifier.

Command:  python -m curax.compare experiments/references

A thought ends with the word `So`; what follows is an answer in words, of which one
number depends on the thought. The start is made as README.md says.
"""

from dataclasses import replace
from functools import partial

from curax import advantage, reflect
from curax.compare.experiment import Experiment
from curax.config import load
from curax.models import pretrained
from curax.tasks import word_problems
from curax.testbed import in_words
from experiments.text import experiment

PROMPTS, SIZE = 8, 8  # completions of a step: 64


def get_experiment() -> Experiment:
    """Four ways to use references, and two that ask the verifier."""
    dro = load("dro")
    assert dro.reflection
    assert dro.reflection.queries
    every = replace(dro.reflection, queries=None)
    mean = replace(every, weights=reflect.mean)
    look = replace(dro.reflection.queries, draws=SIZE // 2)
    recipes = {
        "aggregate": replace(dro, reflection=mean),
        "r3": replace(dro, reflection=every),
        "dro_in_step": load("dro_in_step"),
        "dro": replace(dro, reflection=replace(dro.reflection, queries=look)),
        "verifier": replace(
            dro, reflection=None, advantage=partial(advantage.standardised)
        ),
        "raft_plus_plus": load("raft_plus_plus"),
    }
    task = partial(word_problems.task, sentences=True)
    model = partial(pretrained.model, path="runs/text/sentences")
    own = {"task": task, "model": model, "warm_start": None}
    return Experiment(
        recipes={name: in_words(recipe, **own) for name, recipe in recipes.items()},
        common={
            **experiment.COMMON,
            "sampling.prompts": PROMPTS,
            "sampling.group_size": SIZE,
        },
        baseline="aggregate",
        **experiment.HOW,
    )
