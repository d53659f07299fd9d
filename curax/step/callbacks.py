"""Tasks of the host inside programs: what Python computes, a program calls back for.

    program -- ids --> host: file, tokenizer -- tokens, mask --> program
    program -- completions --> host: grader -- outcomes --> program

So runs on files, and by graders in Python, stand side by side in one program. A run by
itself has its host functions called between programs, in the background (`drivers`).
"""

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from curax import reward
from curax.settings.config_types import present
from curax.types import Task


def inside(task: Task) -> Task:
    """The task, of functions that a program may call, under `vmap` too.

    Those of the host must be pure, as a program may call them as often as it likes; the
    key of its traces is not passed on to them. An outcome that is missing is NaN, and
    the reason is lost.

    Args:
        task: any; one that needs nothing of the host is given back as it is.

    Raises:
        ValueError: the host answers turns, or grades terms of a reward.
    """
    if task.environment is not None and not task.on_device:
        raise ValueError(
            "task.environment is asked from the host, for one run at a time; name a "
            "task whose environment is a JAX function, such as calculator.task."
        )
    if task.terms:
        raise ValueError(
            "the reward of the task has several terms, which the host grades for one "
            "run at a time; set task.grader to one of them."
        )
    changes: dict[str, Any] = {"on_device": True, "in_files": False}
    if task.in_files:
        for name in ("prompts", "held_out", "reference"):
            changes[name] = _called(getattr(task, name))
        for name in ("traces", "trace_contexts"):
            changes[name] = _without_key(getattr(task, name))
        if task.hinting:
            every = [field.name for field in dataclasses.fields(task.hinting)]
            functions = {name: _called(getattr(task.hinting, name)) for name in every}
            changes["hinting"] = dataclasses.replace(task.hinting, **functions)
    if not task.on_device:
        changes["verify"] = _called(partial(_outcomes, task))
        changes["verify_all"] = None
    return dataclasses.replace(task, **changes)


def _outcomes(task: Task, target: Any, tokens: Any, mask: Any) -> Any:
    """`[N]` float32 outcomes by the verifier of the host, NaN where nothing is said."""
    said = reward.of_rows(task, target, tokens, mask, np.flatnonzero(mask.any(-1)))
    said.log()
    return said.outcome.astype(np.float32)


def _without_key(function: Callable | None) -> Callable | None:
    """As `_called`, of a function whose first argument is a key."""
    if function is None:
        return None
    called = present(_called(partial(function, None)))
    return lambda _, prompts: called(prompts)


def _called(function: Callable | None) -> Callable | None:
    """A function of numpy arrays as one of JAX; shapes follow from those of the input.

    It is called once with zeros while it is traced, and `vmap` calls it once a lane.
    """
    if function is None:
        return None

    def of_arrays(*args: Any) -> Any:
        zeros = jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), args)
        shapes = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype),
            jax.eval_shape(lambda: jax.tree.map(jnp.asarray, function(*zeros))),
        )
        called = partial(_on_host, function)
        return jax.pure_callback(called, shapes, *args, vmap_method="sequential")

    return of_arrays


def _on_host(function: Callable, *args: Any) -> Any:
    return function(*jax.tree.map(np.asarray, args))
