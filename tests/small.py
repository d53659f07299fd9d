"""The quickstart, shrunk, with a task that can be slow or fail: for whole runs."""

import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from curax.config import Config, load, override
from curax.settings.config_types import Count
from curax.tasks import chain
from curax.types import Task

FILE = Path(__file__)
QUICKSTART = FILE.parents[1] / "configs" / "quickstart.py"
SIZES = """
    model.width=16 model.layers=1 model.heads=2 model.kv_heads=1 model.head_dim=8
    model.mlp_width=16
    warm_start.steps=5 warm_start.rows=32
    warm_start.optimizer.learning_rate.peak=0.05
    warm_start.optimizer.learning_rate.warmup=1
    warm_start.optimizer.learning_rate.steps=5
    sampling.prompts=4 sampling.group_size=4 sampling.max_tokens=2 aggregate.length=2
    optimizer.learning_rate=0.01
    evaluation.every=3 evaluation.prompts=8 evaluation.samples=4
    logging.every=2 logging.checkpoint_every=2
    steps=6 seed=3
"""


def task(
    *,
    num_held_out: Count = 32,
    on_device: bool = True,
    slow: float = 0.0,
    broken: int = 0,
) -> Task:
    """Chains of one operation.

    Args:
        num_held_out: size of the held-out set.
        on_device: verify by a JAX function.
        slow: seconds that it takes to decode one text.
        broken: the verifier on the host raises for one completion in so many.
    """
    built = chain.task(
        depth=1, num_prompts=64, num_held_out=num_held_out, on_device=on_device
    )

    def decode(tokens):
        time.sleep(slow)
        return built.decode(tokens)

    def verify(target, tokens):
        if int(tokens[0]) % broken == 0:
            raise ValueError("cannot tell")
        return built.verify(target, tokens)

    return replace(built, decode=decode, verify=verify if broken else built.verify)


def get_config() -> Config:
    config = override(load(QUICKSTART), SIZES.split())
    return replace(config, task=partial(task))


def of_host(made: Task, **changes: Any) -> Task:
    """The task with prompts and traces as numpy arrays, made outside of any program."""

    def table(make, count):
        rows = jax.device_get(jax.jit(make)(jnp.arange(count, dtype=jnp.int32)))
        return lambda ids: jax.tree.map(lambda leaf: leaf[np.asarray(ids)], rows)

    traces = made.traces and jax.jit(made.traces)
    return replace(
        made,
        prompts=table(made.prompts, made.num_prompts),
        held_out=table(made.held_out, made.num_held_out),
        traces=traces and (lambda *args: jax.device_get(traces(*args))),
        in_files=True,
        **changes,
    )
