"""Arms of the factorial, and four methods of papers, on word problems in text.

Command:  python -m curax.compare experiments/text

Three regimes, each from a checkpoint of its own, which README.md says how to make.
"""

from functools import partial
from typing import Any

from curax import gate
from curax.compare.experiment import Experiment
from curax.config import Config, load, override
from curax.models import pretrained
from curax.testbed import in_words
from experiments.factorial import run as factorial

N = 4  # completions of a prompt where their number is fixed, and of a round
ROWS = 64  # completions of a step, where their number is fixed
RATES = (1e-4, 3e-4, 1e-3)
# Where the policy begins and what it is asked: problems of one to three steps.
REGIMES = {
    "sparse": {"task.least_steps": 3},
    "mixed": {},
    "solved": {"task.most_steps": 2, "task.distractors": 0.0},
}
COMMON = {
    "update.minibatches": 1,
    "update.tokens_per_micro_batch": 1024,
    "task.size": 6000,
    "evaluation.prompts": 128,
    "evaluation.samples": 2,
    "evaluation.k": 1,
}
HOW: dict[str, Any] = {
    "tune": {"optimizer.learning_rate": RATES},
    "tuning_seeds": 2,
    "seeds": 8,
    "tokens": 64_000,
    "steps": 400,
    "every": 10,
    "cost": (1.0, 0.0),
    "watched": ("policy/entropy_nats",),
}
PAPERS = {
    "pods_exact": {
        "sampling.prompts": 4,
        "sampling.group_size": 16,
        "downsample.m": 4,
    },
    "dapo": {
        "sampling.prompts": 8,
        "sampling.group_size": 8,
        "gate": gate.zero_variance,
        "shape_reward": None,
    },
    "gvm_raft_exact": {"sampling.prompts": 8, "sampling.budget": 96},
    "sage": {"sampling.prompts": 16, "sampling.group_size": 4},
}


def in_text(recipe: Config, changes: dict[str, Any]) -> Config:
    """A recipe on word problems, from a checkpoint, with sizes of this page."""
    model = partial(pretrained.model, path=f"runs/text/{next(iter(REGIMES))}")
    return override(in_words(recipe, model=model, warm_start=None), changes)


def recipes() -> dict[str, Config]:
    """Eight arms that differ in three choices, and four methods."""
    found = {}
    for arm in factorial.ARMS:
        prompts = ROWS // N if "fixed" in arm else factorial.PROMPTS
        sizes = {"sampling.prompts": prompts, "aggregate.length": 40}
        found[arm] = in_text(factorial.plain(arm, N), sizes)
    return found | {name: in_text(load(name), own) for name, own in PAPERS.items()}


def get_experiment() -> Experiment:
    """All of them in three regimes, each rate tuned, at equal tokens drawn."""
    return Experiment(
        recipes=recipes(),
        common=COMMON,
        conditions={
            name: {"model.path": f"runs/text/{name}", **task}
            for name, task in REGIMES.items()
        },
        **HOW,
    )
