"""Outcome of each completion, by a JAX function or on the host, and shaped rewards.

The outcome opens gates and feeds pass rates; shaping enters the reward alone.
"""

import logging
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from curax.types import Prompts, Rollouts, Task


def on_device(task: Task, prompts: Prompts, rollouts: Rollouts) -> jax.Array:
    """`[N]` float32 outcomes by a verifier that is a JAX function; NaN is missing."""
    target = jax.tree.map(lambda leaf: leaf[rollouts.prompt], prompts.target)
    return task.verify(target, rollouts.tokens, rollouts.mask)


def on_host(task: Task, prompts: Prompts, rollouts: Rollouts) -> np.ndarray:
    """`[N]` float32 outcomes by a Python verifier, one completion at a time.

    Args:
        task: its `verify(target, tokens) -> float | None` sees one completion, without
            padding.
        prompts: numpy arrays.
        rollouts: numpy arrays.

    Returns:
        NaN where there is no row, where the verifier returned None, and where it
        raised or returned no number; both are logged.
    """
    outcome = np.full(rollouts.prompt.shape, np.nan, np.float32)
    for n in np.flatnonzero(rollouts.exists):
        target = jax.tree.map(
            lambda leaf, n=n: leaf[rollouts.prompt[n]], prompts.target
        )
        said: Any = np.asarray(rollouts.tokens[n])[np.asarray(rollouts.mask[n])]
        try:
            result = task.verify(target, said)
            outcome[n] = np.nan if result is None else result
        except Exception as error:
            logging.getLogger("curax").warning(
                "The verifier raised %s: %s; the outcome counts as missing.",
                type(error).__name__,
                error,
            )
    return outcome


def soft_overlong(
    outcome: jax.Array, length: jax.Array, *, max_tokens: int, margin: int
) -> jax.Array:
    """The outcome, less a penalty that grows over the last `margin` tokens.

        r = outcome - clip((length - (max_tokens - margin)) / margin, 0, 1)

    Args:
        outcome: `[...]` float.
        length: `[...]` int32 tokens.
        max_tokens: length at which the penalty is 1.
        margin: tokens over which it grows from 0.

    Returns:
        `[...]` float32 in the units of `outcome`.

    References:
        Yu et al. 2025, "DAPO", arXiv:2503.14476, Eq. 13.
    """
    over = length.astype(jnp.float32) - (max_tokens - margin)
    return outcome - jnp.clip(over / margin, 0.0, 1.0)
