"""Hints that are a prefix of the policy's own right completion.

The last right completion of every prompt is stored. Where a later visit goes bad,
the prompt is drawn with a head of it in its context, and a controller moves the cut
until about half of the completions are right. A prompt that was never solved has none.

    hint of level l = the first l / (L + 1) of the stored completion
"""

from typing import Any

import flax.struct
import jax
import jax.numpy as jnp

from curax import hint
from curax.arrays import grids, masked, metrics
from curax.arrays.metrics import Tally
from curax.config import Config
from curax.settings.conflicts import Table
from curax.settings.declared import declares
from curax.step.types import Components, Driver, Method, StepRollouts
from curax.types import Hinting, Prompts, Task, TrainState

NAME = "prefixes"


@flax.struct.dataclass(kw_only=True)
class Solved:
    """The last right completion of each prompt id, without its end."""

    tokens: jax.Array  # [num_prompts, T] int32
    length: jax.Array  # [num_prompts] int32 tokens; 0: the prompt was never solved


def conflicts(config: Config, task: Task) -> Table:
    """Of a policy that is also to write hints."""
    return [
        (
            config.hint and config.hint.writing,
            "hint.source=own_prefix remembers what hints say, and hint.writing has the "
            "policy write them; set hint.writing to None.",
        )
    ]


def init(drive: Driver, parts: Components, state: TrainState, what: None) -> Solved:
    """Memory without any solved prompt."""
    count, most = parts.task.num_prompts, parts.config.sampling.max_tokens
    return Solved(
        tokens=jnp.zeros((count, most), jnp.int32), length=jnp.zeros(count, jnp.int32)
    )


def recall(
    parts: Components, state: TrainState, prompts: Prompts
) -> tuple[jax.Array, jax.Array]:
    """`[B, T]` int32 tokens and bool mask of the stored completions of prompts."""
    solved: Solved = state.methods[NAME]
    tokens, length = solved.tokens[prompts.id], solved.length[prompts.id]
    place = jnp.arange(tokens.shape[-1], dtype=jnp.int32)[None]
    return tokens, place < length[:, None]


def after_update(
    drive: Driver, parts: Components, state: TrainState, drawn: StepRollouts
) -> Solved:
    """The memory with the first right completion of each group of the step.

    Right is an outcome above 0.5, with a hint or without. Of a prompt that the step has
    twice the last such group counts.
    """
    solved: Solved = state.methods[NAME]
    seen = drawn.groups
    right = masked.right(seen.outcome, seen.exists)
    place = jnp.argmax(right, -1)[:, None]
    row = jnp.take_along_axis(seen.row, place, -1)[:, 0]
    row = jnp.minimum(row, parts.rows - 1)
    tokens, mask = drawn.rollouts.tokens[row], drawn.rollouts.mask[row]
    mask = mask & ~jnp.isin(tokens, jnp.asarray(parts.task.end, jnp.int32))
    length = jnp.sum(mask, -1, dtype=jnp.int32)
    size = solved.length.shape[0]
    who = jnp.where(jnp.any(right, -1), drawn.prompts.id, size)
    who = jnp.where(grids.last_of_each(who, size=size), who, size)  # out: dropped
    return Solved(
        tokens=solved.tokens.at[who].set(jnp.where(mask, tokens, 0), mode="drop"),
        length=solved.length.at[who].set(length, mode="drop"),
    )


def metrics_of(
    drive: Driver, parts: Components, state: TrainState, drawn: StepRollouts
) -> Tally:
    """Metric: share of the step's prompts that were solved before it."""
    known = state.methods[NAME].length[drawn.prompts.id] > 0
    share = metrics.mean(known, jnp.ones_like(known))
    return Tally(means={"prefix/known_fraction": share}, counts={})


def method() -> Method:
    """The method, as `methods` of a config names it."""
    return Method(
        name=NAME,
        conflicts=conflicts,
        init=init,
        after_update=after_update,
        metrics=metrics_of,
    )


@declares(method=method, recall=recall)
def own_prefix(
    hinting: Hinting,
    prompts: Prompts,
    *,
    levels: int,
    shares: tuple[float, ...] | None = None,
    written: tuple[Any, Any] | None,
) -> tuple[Any, Any]:
    """Prefixes of the policy's own right completions as hints, a `hint.source`.

    Args:
        hinting: not used.
        prompts: not used.
        levels: L, levels of hints; static.
        shares: of the completion, by level, as of `hint.reference_prefix`.
        written: `[B, T]` int32 tokens and bool mask, the stored completions.

    Returns:
        `[B, L, T]` int32 tokens, `[B, L, T]` bool mask; a prompt that was never solved
        has no hints.
    """
    assert written is not None
    return hint.heads(*written, levels=levels, shares=shares)
