"""No field of a config is dead: changing any one changes something that can be seen.

What can be seen is the programs of a run, as far as their results depend on them; which
loop runs them, from which seeds, on which devices; the order of what the host does; and
whether the config is refused. What must change nothing but speed or memory (slots,
micro-batches, the mesh, ...) changes a program here, and `test_loops` shows that the
results stay.
"""

import contextlib
from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import small
from jax.interpreters import partial_eval

from curax import (
    advantage,
    aggregate,
    allocate,
    correct,
    downsample,
    evaluate,
    gate,
    loops,
    loss,
    modulate,
    objective,
    pipeline,
    reward,
    run,
)
from curax.config import KL, Config, ConfigError, fields_of, load, override
from curax.models import transformer
from curax.tasks import chain

CONFIG = replace(
    small.get_config(),
    # Small, and with as many options as one config can have.
    task=load(small.QUICKSTART).task,
    objective=partial(objective.prompt_weight, f=partial(objective.power, alpha=0.5)),
    gate=partial(gate.pass_rate_band, low=0.1, high=0.9),
    downsample=partial(downsample.max_variance, m=2),
    correct=correct.horvitz_thompson,
    advantage=partial(advantage.standardised, eps=1e-4),
    modulate=partial(modulate.forking_tokens, share=0.5),
    shape_reward=partial(reward.soft_overlong, max_tokens=2, margin=1),
    kl=KL(estimator=loss.k3, coefficient=0.1),
    entropy_bonus=0.01,
)
CONFIG = override(CONFIG, ["task.depth=1", "task.num_prompts=64", "task.num_held_out=32"])


def set_to(name: str, value: Any) -> Config:
    """The config with another value; functions and groups are replaced as a whole."""
    if callable(value) or value is None:
        return replace(CONFIG, **{name: value})
    return override(CONFIG, {name: value})
