"""curax: curate the learning signal of RLVR, in JAX.

`curax.load`, `curax.build` and the other names of `__all__` are imported when first
used, and so are the stages, such as `curax.advantage`: `import curax` by itself
imports no JAX. docs/use_as_a_library.md shows each.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from curax.settings import packages

if TYPE_CHECKING:
    from curax import (
        advantage,
        aggregate,
        allocate,
        config,
        correct,
        data,
        downsample,
        gate,
        hint,
        loss,
        memory,
        modulate,
        objective,
        off_policy,
        reflect,
        reward,
        rollout,
        score,
        stop,
        types,
        update,
    )
    from curax.config import load, override
    from curax.library import (
        build,
        compute_logprobs,
        datum,
        forward_backward,
        init,
        optim_step,
        predict,
        run,
        sample,
        save_for_sampler,
        train_step,
    )

__version__ = packages.VERSION
__all__ = [
    "advantage",
    "aggregate",
    "allocate",
    "build",
    "compute_logprobs",
    "config",
    "correct",
    "data",
    "datum",
    "downsample",
    "forward_backward",
    "gate",
    "hint",
    "init",
    "load",
    "loss",
    "memory",
    "modulate",
    "objective",
    "off_policy",
    "optim_step",
    "override",
    "predict",
    "reflect",
    "reward",
    "rollout",
    "run",
    "sample",
    "save_for_sampler",
    "score",
    "stop",
    "train_step",
    "types",
    "update",
]

_FUNCTIONS = {"load": "config", "override": "config"} | dict.fromkeys(
    (
        *("build", "init", "predict", "run", "train_step"),
        *("compute_logprobs", "datum", "forward_backward", "optim_step", "sample"),
        "save_for_sampler",
    ),
    "library",
)


def __getattr__(name: str) -> Any:
    """A name of `__all__`, imported when it is first used."""
    if name not in __all__:
        raise AttributeError(f"module 'curax' has no attribute {name!r}")
    if name not in _FUNCTIONS:
        return import_module(f"curax.{name}")
    return getattr(import_module(f"curax.{_FUNCTIONS[name]}"), name)


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])
