"""Sources of hints: the task, or the policy itself in hint mode."""

import dataclasses
from typing import Any

import chex
import jax
import jax.numpy as jnp

from curax import allocate
from curax.arrays import metrics
from curax.arrays.keys import stage_key
from curax.arrays.metrics import Tally
from curax.config import Writing
from curax.settings.config_types import present
from curax.settings.declared import declared
from curax.step.draw import plain, settings
from curax.step.types import Components, Driver, Request
from curax.types import Contexts, Hinting, Hints, Prompts, Rollouts, TrainState

Written = tuple[jax.Array, jax.Array]  # [B, T] int32 tokens and bool mask


def writing(parts: Components) -> Writing:
    """How the policy writes hints: `config.hint.writing`."""
    return present(present(parts.config.hint).writing)


def make(
    drive: Driver,
    parts: Components,
    state: TrainState,
    prompts: Prompts,
    wanted: jax.Array,
) -> tuple[Hints, Tally]:
    """Hints of all levels for selected prompts, and metrics of their cost.

    Args:
        drive: driver of the step.
        parts: components of the run.
        state: train state at the start of the step: its policy writes hints.
        prompts: B of them.
        wanted: `[B]` bool, prompts that get hints.
    """
    how = present(parts.config.hint)
    recall = declared(how.source, "recall", None)
    written = drive.call(recall, parts, state, prompts) if recall else None
    nothing = jnp.float32(0)  # under each name that the carry of `write` has
    counts = {"rollout/tokens": nothing, "hint/written_tokens": nothing}
    cost = Tally(means={}, counts=counts)
    if how.writing:
        written, cost = write(drive, parts, state, prompts, wanted, cost)
    return drive.call_task(read, parts, prompts, wanted, written, cost)


def write(
    drive: Driver,
    parts: Components,
    state: TrainState,
    prompts: Prompts,
    wanted: jax.Array,
    cost: Tally,
) -> tuple[Written, Tally]:
    """Hint texts written by the policy, and metrics of their cost.

    Those that cannot be parsed are written again, up to `hint.writing.tries` times.
    """
    contexts = drive.call_task(contexts_of, parts, prompts)
    writer = writer_of(parts, state)

    def unread(carry: tuple[jax.Array, Written, Tally]) -> jax.Array:
        number, written, _ = carry
        todo = drive.call_task(unreadable, parts, prompts, wanted, written)
        return drive.call(wants_try, parts, number, todo)

    def again(
        carry: tuple[jax.Array, Written, Tally],
    ) -> tuple[jax.Array, Written, Tally]:
        number, written, cost = carry
        todo = drive.call_task(unreadable, parts, prompts, wanted, written)
        request = drive.call(ask, parts, state, prompts, contexts, todo, number)
        new = drive.draw(parts, writer, request)
        return number + 1, *drive.call(rewrite, parts, written, cost, new)

    start = drive.call(blank, parts, contexts)
    _, written, cost = drive.repeat(unread, again, (jnp.int32(0), start, cost))
    return written, cost


def writer_of(parts: Components, state: TrainState) -> TrainState:
    """The state of the policy that writes: at the start of RL, or of the step."""
    if not writing(parts).frozen:
        return state
    return dataclasses.replace(state, params=state.reference)


def wants_try(parts: Components, number: jax.Array, todo: jax.Array) -> jax.Array:
    """`[]` bool: some text cannot be parsed, and tries are left."""
    return (number < writing(parts).tries) & jnp.any(todo)


def contexts_of(parts: Components, prompts: Prompts) -> Contexts:
    """Contexts in which the policy writes hints, by the task."""
    return present(present(parts.task.hinting).writing_contexts)(prompts)


def ask(
    parts: Components,
    state: TrainState,
    prompts: Prompts,
    contexts: Contexts,
    todo: jax.Array,
    number: jax.Array,
) -> Request:
    """Request for completions that write hints, one per selected prompt.

    Args:
        parts: components of the run.
        state: train state at the start of the step.
        prompts: B of them.
        contexts: `[B, ...]`, of `contexts_of`.
        todo: `[B]` bool, prompts to write hints for.
        number: `[]` int32, number of the try, folded into the random key.
    """
    how = writing(parts)
    todo = todo & jnp.any(contexts.mask, -1)
    key = stage_key(state.seed, state.step, "hint")
    sizes = dataclasses.replace(
        settings(parts),
        max_tokens=how.max_tokens,
        temperature=how.temperature,
        top_k=0,
        top_p=1.0,
    )
    return dataclasses.replace(
        plain(prompts, 1, jax.random.fold_in(key, number), sizes),
        contexts=contexts,
        rows=allocate.rows_to_draw(todo.astype(jnp.int32), rows=todo.shape[0]),
    )


def blank(parts: Components, contexts: Contexts) -> Written:
    """Empty hint texts: `[B, T]` tokens and mask."""
    shape = (contexts.tokens.shape[0], writing(parts).max_tokens)
    return jnp.full(shape, parts.task.pad, jnp.int32), jnp.zeros(shape, bool)


def rewrite(
    parts: Components, old: Written, cost: Tally, new: Rollouts
) -> tuple[Written, Tally]:
    """Hint texts updated by new ones, and the cost with their tokens."""
    count = old[0].shape[0]
    where = jnp.where(new.exists, new.prompt, count)  # out: dropped
    tokens, mask = old
    written = (
        tokens.at[where].set(new.tokens, mode="drop"),
        mask.at[where].set(new.mask, mode="drop"),
    )
    more, counts = metrics.count(new.mask), dict(cost.counts)
    for name in ("rollout/tokens", "hint/written_tokens"):
        counts[name] = counts[name] + more
    return written, dataclasses.replace(cost, counts=counts)


def unreadable(
    parts: Components, prompts: Prompts, wanted: Any, written: Any
) -> jax.Array:
    """`[B]` bool: selected prompts whose text contains no hint."""
    how, hinting = present(parts.config.hint), present(parts.task.hinting)
    _, mask = how.source(hinting, prompts, levels=how.levels, written=written)
    return wanted & ~jnp.any(mask, (-2, -1))


def read(
    parts: Components, prompts: Prompts, wanted: Any, written: Any, cost: Tally
) -> tuple[Hints, Tally]:
    """Hints of all levels, parsed and filtered, and metrics with those left out.

    Args:
        parts: components of the run.
        prompts: B of them.
        wanted: `[B]` bool; the others get no hints.
        written: `[B, T]` tokens and mask of what the policy wrote, if it did.
        cost: metrics of the writing.
    """
    how, hinting = present(parts.config.hint), present(parts.task.hinting)
    tokens, mask = how.source(hinting, prompts, levels=how.levels, written=written)
    hints, lost = ready(hinting, prompts, tokens, mask, width=how.width)
    some = jnp.asarray(wanted)[:, None]
    hints = dataclasses.replace(hints, mask=hints.mask & some[..., None])
    counts = {f"hint/{name}": metrics.count(x & some) for name, x in lost.items()}
    return hints, dataclasses.replace(cost, counts=cost.counts | counts)


def ready(
    hinting: Hinting, prompts: Prompts, tokens: Any, mask: Any, *, width: int
) -> tuple[Hints, dict[str, Any]]:
    """Hints as they go into contexts: none that leaks, wrapped, none too long.

    A hint that gives the answer away is dropped, and so is one that is longer than
    `width` with the words around it: half a hint is another hint. A level that is
    dropped is missing and can be told from one that never was given.

    Args:
        hinting: whose `leaks` and `wrap` are asked, in this order.
        prompts: B prompts.
        tokens: `[B, L, S]` int32, what a source gave.
        mask: `[B, L, S]` bool.
        width: H, tokens of a hint at most, its introduction included; static.

    Returns:
        Hints of width H, token 0 where their mask is False, and three grids `[B, L]`
        bool, True on levels without a hint, each with the first reason: "missing",
        nothing was given; "leaked"; "overlong". Arrays of the kind that came in.

    Raises:
        AssertionError: while tracing, if the shapes of tokens and mask differ.
    """
    chex.assert_equal_shape([tokens, mask])
    given = mask.any(-1)
    leaked = given & hinting.leaks(prompts, tokens, mask)
    tokens, mask = hinting.wrap(tokens, mask)
    overlong = given & ~leaked & mask[..., width:].any(-1)
    xp: Any = tokens.__array_namespace__()
    more = ((0, 0), (0, 0), (0, max(width - tokens.shape[-1], 0)))
    stays = given & ~leaked & ~overlong
    mask = xp.pad(mask[..., :width], more) & stays[..., None]
    tokens = xp.where(mask, xp.pad(tokens[..., :width], more), 0)
    why = {"missing": ~given, "leaked": leaked, "overlong": overlong}
    return Hints(tokens=tokens, mask=mask), why
