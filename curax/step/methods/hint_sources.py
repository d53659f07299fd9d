"""Where hints come from: read from the task, or written by the policy in hint mode."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from curax import allocate, hint, rollout
from curax.arrays import metrics
from curax.arrays.keys import stage_key
from curax.arrays.metrics import Tally
from curax.settings.declared import declared
from curax.step.draw import policy
from curax.step.records import Components, Driver
from curax.types import Contexts, Hints, Prompts, Rollouts, TrainState

Written = tuple[jax.Array, jax.Array]  # [B, T] int32 tokens and bool mask


def make(
    drive: Driver,
    parts: Components,
    state: TrainState,
    prompts: Prompts,
    wanted: jax.Array,
) -> tuple[Hints, Tally]:
    """Hints of all levels for the prompts that are wanted; what they cost.

    Args:
        drive: calls, and repeats.
        parts: of the run.
        state: at the start of the step: its policy writes.
        prompts: B of them.
        wanted: `[B]` bool; the others have no hints.
    """
    how = parts.config.hint
    assert how
    recall = declared(how.source, "recall", None)
    written = drive.call(recall, parts, state, prompts) if recall else None
    cost = zero_tally(how.levels)
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
    """What the policy writes, again and again where it cannot be read."""
    contexts = drive.call_task(contexts_of, parts, prompts)

    def unread(carry: tuple[jax.Array, Written, Tally]) -> jax.Array:
        number, written, _ = carry
        todo = drive.call_task(unreadable, parts, prompts, wanted, written)
        return drive.call(wants_try, parts, number, todo)

    def again(
        carry: tuple[jax.Array, Written, Tally],
    ) -> tuple[jax.Array, Written, Tally]:
        number, written, cost = carry
        todo = drive.call_task(unreadable, parts, prompts, wanted, written)
        with drive.timed("rollout"):
            args = state, contexts, todo, number
            new = drive.call(sample, parts, *args)
        return number + 1, *drive.call(rewrite, parts, written, cost, new)

    start = drive.call(blank, parts, contexts)
    _, written, cost = drive.repeat(unread, again, (jnp.int32(0), start, cost))
    return written, cost


def wants_try(parts: Components, number: jax.Array, todo: jax.Array) -> jax.Array:
    """`[]` bool: hints of a prompt cannot be read and there are tries left."""
    assert parts.config.hint
    assert parts.config.hint.writing
    return (number < parts.config.hint.writing.tries) & jnp.any(todo)


def contexts_of(parts: Components, prompts: Prompts) -> Contexts:
    """Prompts in hint mode, as the task asks for hints."""
    assert parts.task.hinting
    assert parts.task.hinting.ask
    return parts.task.hinting.ask(prompts)


def sample(
    parts: Components,
    state: TrainState,
    contexts: Contexts,
    todo: jax.Array,
    number: jax.Array,
) -> Rollouts:
    """One writing of each prompt in hint mode.

    Args:
        parts: of the run.
        state: at the start of the step.
        contexts: `[B, ...]`, prompts in hint mode.
        todo: `[B]` bool, those for which it is to write.
        number: `[]` int32, the try; each has its own noise.
    """
    how, sizes = parts.config.hint, parts.config.sampling
    assert how
    assert how.writing
    todo = todo & jnp.any(contexts.mask, -1)
    key = jax.random.fold_in(stage_key(state.seed, state.step, "hint"), number)
    return rollout.sample(
        policy(parts, state),
        state.params,
        contexts,
        allocate.plan(todo.astype(jnp.int32), rows=sizes.prompts),
        key,
        max_tokens=how.writing.max_tokens,
        end=parts.task.end,
        pad=parts.task.pad,
        temperature=how.writing.temperature,
        slots=sizes.slots,
    )


def blank(parts: Components, contexts: Contexts) -> Written:
    """`[B, T]` tokens and mask of writings, before any."""
    assert parts.config.hint
    assert parts.config.hint.writing
    shape = (contexts.tokens.shape[0], parts.config.hint.writing.max_tokens)
    return jnp.full(shape, parts.task.pad, jnp.int32), jnp.zeros(shape, bool)


def rewrite(
    parts: Components, old: Written, cost: Tally, new: Rollouts
) -> tuple[Written, Tally]:
    """Writings with those that were written anew; the cost with their tokens."""
    del parts
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
    """`[B]` bool: prompts whose hints cannot be read, of those wanted."""
    how, hinting = parts.config.hint, parts.task.hinting
    assert how
    assert hinting
    _, mask = how.source(hinting, prompts, levels=how.levels, written=written)
    return wanted & ~jnp.any(mask, (-2, -1))


def read(
    parts: Components, prompts: Prompts, wanted: Any, written: Any, cost: Tally
) -> tuple[Hints, Tally]:
    """What hints say, and what of them may be used.

    Args:
        parts: of the run.
        prompts: B of them.
        wanted: `[B]` bool; the others have no hints.
        written: `[B, T]` tokens and mask of what the policy wrote, if it did.
        cost: of that.
    """
    how, hinting = parts.config.hint, parts.task.hinting
    assert how
    assert hinting
    tokens, mask = how.source(hinting, prompts, levels=how.levels, written=written)
    hints, lost = hint.ready(hinting, prompts, tokens, mask, width=how.width)
    some = jnp.asarray(wanted)[:, None]
    hints = dataclasses.replace(hints, mask=hints.mask & some[..., None])
    counts = {f"hint/{name}": metrics.count(x & some) for name, x in lost.items()}
    return hints, dataclasses.replace(cost, counts=cost.counts | counts)


def zero_tally(levels: int) -> Tally:
    """The metrics of hints before any, so that loops have all of them."""
    zero = jnp.float32(0)
    names = ["rollout/drawn", "rollout/tokens", "outcome/missing"]
    names += [f"hint/{x}" for x in ("written_tokens", "leaked", "overlong", "missing")]
    for k in range(1, levels + 1):
        names += [f"hint/asked_{k}", f"hint/opened_{k}"]
    counts = {name: jnp.zeros_like(zero) for name in names}
    return Tally(means={"hint/pass_rate": (zero, zero)}, counts=counts)
