"""Properties that a stage function declares of itself, for those who join the stages.

    equal_groups    an allocator gives every prompt one number, up to 1
    has_ratio       a loss undoes that the policy has left the one that sampled
    least_group     completions below which a group teaches nothing; or the name of the
                    option that says so
    constant        a multiplier is 1 for every token
    method          the `step.records.Method` that keeps what a function reads
    recall          the completions that a source of hints reads, of a method's state
    keeps           the option of a down-sampling that is the most it keeps of a prompt
    floor           the option of an allocator that is the least it gives a prompt
    rows_per_prompt the option of a correction that is the rows trained per prompt
    most_draws      the option of a correction that is the most a prompt draws

Nothing is decided by the identity of a function or by its name: one of a user's own
declares what it needs in the same way. Only the standard library is imported.
"""

import functools
from collections.abc import Callable
from typing import Any, TypeVar

F = TypeVar("F", bound=Callable[..., Any])


def declares(**properties: Any) -> Callable[[F], F]:
    """A decorator that gives a function these properties, and changes nothing else."""

    def marked(function: F) -> F:
        vars(function).update(properties)
        return function

    return marked


def declared(function: Any, name: str, default: Any) -> Any:
    """A property of a function, whatever is bound to it; `default`: it has none."""
    while isinstance(function, functools.partial):
        function = function.func
    return getattr(function, name, default)
