"""Outcome of each completion, by a JAX function or on the host, and shaped rewards.

The outcome opens gates and feeds pass rates; other terms of a grader and shaping enter
the reward alone.
"""

import logging
import math
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from curax.arrays import checks
from curax.settings.config_types import ConfigError, Count, is_array, present
from curax.types import Float, Int, Prompts, Rollouts, Task, Terms

LOGGED = 3  # reasons for missing outcomes that are logged per call, the most frequent
NONE = "none"  # the reason where a verifier gave None or NaN


def on_device(task: Task, prompts: Prompts, rollouts: Rollouts) -> jax.Array:
    """`[N]` float32 outcomes by a verifier that is a JAX function, as `of_tokens`.

    With an environment they are what it gave: its sums of rewards.
    """
    if rollouts.turns is not None:
        return rollouts.turns.outcome
    given = rollouts.prompt, rollouts.tokens, rollouts.mask
    return of_tokens(task, prompts, *given)


def of_tokens(
    task: Task, prompts: Prompts, prompt: jax.Array, tokens: jax.Array, mask: jax.Array
) -> jax.Array:
    """`[N]` float32 outcomes of completions by a JAX function; NaN is missing.

    Args:
        task: whose verifier it is.
        prompts: B of them.
        prompt: `[N]` int32 in [0, B).
        tokens: `[N, T]` int32.
        mask: `[N, T]` bool.

    Raises:
        ValueError: while tracing, if they have another shape or are no floats.
    """
    target = jax.tree.map(lambda leaf: leaf[prompt], prompts.target)
    outcome = present(task.verify)(target, tokens, mask)
    shape, given = prompt.shape, type(outcome).__name__
    if is_array(outcome):
        if outcome.shape == shape and jnp.issubdtype(outcome.dtype, jnp.floating):
            return outcome.astype(jnp.float32)
        given = f"{outcome.dtype} {list(outcome.shape)}"
    raise ValueError(
        f"task.verify gives {given}, and must give float {list(shape)}, an outcome in "
        "[0, 1] for each completion; mend the verifier of the task, or name another."
    )


class Verdicts(NamedTuple):
    """Outcomes by a host verifier, and the reasons why others are missing."""

    outcome: np.ndarray  # [N] float, NaN where missing
    reasons: dict[int, str]  # by row, for rows that exist and have no outcome
    seconds: float = 0.0  # that they took
    terms: Mapping[str, np.ndarray] | None = None  # [N] float, NaN where the outcome is

    @property
    def missing(self) -> Counter[str]:
        """Rows without an outcome, by the kind of reason, its first word."""
        return Counter(reason.partition(":")[0] for reason in self.reasons.values())

    def why(self, row: int) -> str:
        """The reason why the outcome of a row is missing, if it is."""
        return self.reasons.get(row, NONE)

    @property
    def reason(self) -> str | None:
        """The commonest reason, in the verifier's words; None where none is missing."""
        for reason, _ in Counter(self.reasons.values()).most_common(1):
            kind, _, term = reason.partition(": ")
            return f"{term or 'it'} gave None or NaN" if kind == NONE else reason
        return None

    def at(self, rows: np.ndarray, count: int) -> "Verdicts":
        """The same as that of some of `count` rows; the others have none."""

        def placed(values: np.ndarray) -> np.ndarray:
            found = np.full(count, np.nan)
            found[rows] = values
            return found

        return self._replace(
            outcome=placed(self.outcome),
            reasons={int(rows[n]): why for n, why in self.reasons.items()},
            terms=self.terms and {name: placed(x) for name, x in self.terms.items()},
        )

    def reward(self, weights: Mapping[str, float]) -> np.ndarray:
        """`[N]` float, weighted sum of the terms; the outcome where there are none."""
        if self.terms is None:
            return self.outcome
        return np.sum([weights[name] * x for name, x in self.terms.items()], axis=0)

    def log(self) -> None:
        """Log the most frequent reasons."""
        every = self.reasons.values()
        reasons = Counter(why for why in every if why.partition(":")[0] != NONE)
        for reason, count in reasons.most_common(LOGGED):
            logging.getLogger("curax").warning(
                "No outcome for %d completions (%s); they count as missing.",
                count,
                reason,
            )


def on_host(
    task: Task, prompts: Prompts, rollouts: Rollouts, *, terms: bool = False
) -> Verdicts:
    """Outcomes by a Python verifier, which sees each completion without padding.

    Args:
        task: its `verify_all`, or else its `verify`, one completion at a time.
        prompts: numpy arrays.
        rollouts: numpy arrays.
        terms: ask for all terms of the reward too, where the task has any. A completion
            that lacks one has no outcome either, for its reward is not known.

    Returns:
        `[N]` outcomes, NaN where there is no row and where the verifier gave none; why
        it gave none: `none` where it returned None or NaN, `error` and a message where
        it raised or returned no number, `timeout`, `crash` and what else a task may
        say.
    """
    target = jax.tree.map(lambda leaf: leaf[rollouts.prompt], prompts.target)
    args = task, target, rollouts.tokens, rollouts.mask
    return of_rows(*args, np.flatnonzero(rollouts.exists), terms=terms)


def of_rows(
    task: Task, target: Any, tokens: Any, mask: Any, rows: np.ndarray, **how: bool
) -> Verdicts:
    """`of_completions` of some rows of N targets, tokens and masks; NaN of others."""
    targets = [jax.tree.map(lambda leaf, n=n: leaf[n], target) for n in rows]
    completions = [np.asarray(tokens[n])[np.asarray(mask[n])] for n in rows]
    return of_completions(task, targets, completions, **how).at(rows, len(tokens))


def of_completions(
    task: Task,
    targets: Sequence[Any],
    completions: Sequence[np.ndarray],
    *,
    terms: bool = False,
) -> Verdicts:
    """What a Python verifier says of completions without padding; see `on_host`."""
    start = time.perf_counter()
    targets, completions = [*targets], [*completions]
    by_term: Mapping[str, Any] = {}
    if terms and task.terms:
        by_term = task.terms.verify_all(targets, completions)
        for name, values in by_term.items():
            check_count(f"the term {name} of the reward", values, completions)
        each = zip(*by_term.values(), strict=True)
        given = [dict(zip(by_term, values, strict=True)) for values in each]
        results = [_outcome(task.terms, one) for one in given]
    elif task.verify_all:
        results = list(task.verify_all(targets, completions))
        check_count("verify_all of the task", results, completions)
    else:
        pairs = zip(targets, completions, strict=True)
        results = [_one(task, target, tokens) for target, tokens in pairs]
    outcome = np.full(len(completions), np.nan)
    reasons: dict[int, str] = {}
    for n, result in enumerate(results):
        if isinstance(result, str):
            reasons[n] = result
        elif _is_missing(result):
            reasons[n] = NONE
        else:
            outcome[n] = result
    found = {name: _where_known(outcome, values) for name, values in by_term.items()}
    return Verdicts(outcome, reasons, time.perf_counter() - start, found or None)


def check_count(
    name: str,
    given: Sequence[Any],
    asked: Sequence[Any],
    what: tuple[str, str, str] = ("outcomes", "completions", "None"),
) -> None:
    """Raise a ConfigError where outcomes would be those of other completions.

    Or other things of others: `what` has their names, and that of what is missing.
    """
    each, of, none = what
    if len(given) != len(asked):
        raise ConfigError(
            f"{name} gives {len(given)} {each} of {len(asked)} {of}; let it give one "
            f"of each, and {none} where there is none."
        )


def _is_missing(result: float | str | None) -> bool:
    return result is None or isinstance(result, str) or math.isnan(result)


def _outcome(terms: Terms, given: Mapping[str, float | str | None]) -> Any:
    """The outcome of a completion by all of its terms, or why the first is missing."""
    for name, result in given.items():
        if isinstance(result, str):
            kind, colon, words = result.partition(":")
            return f"{kind}: {name}{colon}{words}"
        if _is_missing(result):
            return f"{NONE}: {name}"
    return given[terms.outcome]


def _where_known(outcome: np.ndarray, values: Sequence[Any]) -> np.ndarray:
    """`[n]` float values of a term, NaN where there is no outcome."""
    missing = np.isnan(outcome)
    every = zip(values, missing, strict=True)
    return np.array([np.nan if gone else value for value, gone in every], float)


def _one(task: Task, target: Any, tokens: np.ndarray) -> float | str | None:
    """Outcome of one completion, or the reason why it is missing."""
    try:
        result = present(task.verify)(target, tokens)
        return None if result is None else float(result)
    except Exception as error:
        return f"error: {type(error).__name__}: {error}"


@checks.contract(lengths=("max_tokens", "margin"))
def soft_overlong(
    outcome: Float, length: Int, *, max_tokens: Count, margin: Count
) -> Float:
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
