"""Groups that collapsed are drawn again with hints, level by level, until one opens.

    found -> hints -> ask -> (verifier) -> take -> ask -> ... -> Drawn

Only the prompts that still have no signal are drawn, and a group is replaced as a
whole: all its completions share one context. Nothing of it stays for the next visit,
unless a controller sets the level of hints between visits (`meant`).
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp

from curax import allocate, hint, rollout
from curax.arrays import metrics
from curax.arrays.keys import stage_key
from curax.arrays.metrics import Tally
from curax.step import stages
from curax.step.build import Parts
from curax.step.draws import Asked, at, graded, grid_of, policy
from curax.step.pipeline import Drawn
from curax.types import (
    Contexts,
    HintMemory,
    Hints,
    Prompts,
    Rollouts,
    TrainState,
)


def forgotten(num_prompts: int) -> HintMemory:
    """No prompt was ever hinted."""
    return HintMemory(
        level=jnp.zeros(num_prompts, jnp.int32), hinted=jnp.zeros(num_prompts, bool)
    )


@flax.struct.dataclass(kw_only=True)
class Search:
    """How far the search for hints that open has come."""

    drawn: Drawn  # groups as they stand
    open: jax.Array  # [B] bool, still without a signal
    tried: jax.Array  # [] int32, levels tried so far
    hints: Hints


def found(parts: Parts, drawn: Drawn) -> jax.Array:
    """`[B]` bool: groups that collapsed; the first of them, if they are too many."""
    how = parts.config.hint
    assert how
    seen = graded(grid_of(parts.config), drawn.rollouts, drawn.outcome)
    collapsed = stages.called(
        "hint.trigger",
        how.trigger,
        seen.outcome,
        seen.exists,
        shape=seen.exists.shape[:-1],
        kind="bool",
    )
    return capped(collapsed, how.most)


def capped(wanted: jax.Array, most: float | jax.Array) -> jax.Array:
    """The first of those wanted, as many as `most` of all allow."""
    rank = jnp.cumsum(wanted, dtype=jnp.float32)
    return wanted & (rank <= jnp.floor(most * wanted.shape[0] + 1e-4))


def begin(drawn: Drawn, wanted: jax.Array, made: tuple[Hints, Tally]) -> Search:
    """The search, before its first level.

    Args:
        drawn: without hints, `noted`.
        wanted: `[B]` bool, `found`.
        made: hints of all levels, and what making them cost.
    """
    hints, cost = made
    drawn = dataclasses.replace(drawn, tally=metrics.merge(drawn.tally, cost))
    return Search(drawn=drawn, open=wanted, tried=jnp.int32(0), hints=hints)


def goes_on(parts: Parts, search: Search) -> jax.Array:
    """`[]` bool: a group is without a signal and has a hint that was not tried."""
    assert parts.config.hint
    level = jnp.arange(parts.config.hint.levels, dtype=jnp.int32)
    some = jnp.any(search.hints.mask, -1) & (level >= search.tried)[None]
    return jnp.any(search.open[:, None] & some)


def ask(search: Search) -> Asked:
    """The prompts without a signal, with hints of the next level."""
    asked = at_level(search.drawn.prompts, search.hints, search.tried + 1)
    wanted = search.open & (asked.level > 0)
    return dataclasses.replace(asked, wanted=wanted)


def at_level(prompts: Prompts, hints: Hints, level: jax.Array) -> Asked:
    """Prompts with hints of a level, each its own; where there is none, without.

    Args:
        prompts: B of them.
        hints: theirs.
        level: `[]` or `[B]` int32; 0: no hint.
    """
    level = jnp.broadcast_to(level, hints.mask.shape[:1])
    place = jnp.maximum(level - 1, 0)[:, None, None]
    tokens, mask = (
        jnp.take_along_axis(x, place, 1)[:, 0] for x in (hints.tokens, hints.mask)
    )
    mask = mask & (level > 0)[:, None]
    there = jnp.any(mask, -1)
    return Asked(
        contexts=hint.joined(prompts, tokens, mask),
        level=jnp.where(there, level, 0),
        wanted=jnp.ones_like(there),
    )


def take(
    parts: Parts,
    search: Search,
    asked: Asked,
    sampled: tuple[Prompts, Contexts, Rollouts],
    outcome: jax.Array,
) -> Search:
    """Take in what was drawn at a level: groups are replaced whole, by place.

    Args:
        parts: of the run.
        search: before.
        asked: `ask`.
        sampled: what was drawn of them.
        outcome: `[N]` float32 in [0, 1], NaN where missing.
    """
    how, shape = parts.config.hint, grid_of(parts.config)
    assert how
    _, contexts, rollouts = sampled
    old = search.drawn
    before = graded(shape, old.rollouts, old.outcome)
    seen = graded(shape, rollouts, outcome)
    mine = asked.wanted
    swap = mine & hint.replaces(
        seen.outcome, seen.exists, before.outcome, before.exists
    )
    opens = mine & hint.settled(
        seen.outcome, seen.exists, trigger=how.trigger, gate=how.gate
    )

    # A prompt that stopped early left places free, which are its own.
    place = old.rollouts
    free = place.exists if parts.config.stop is None else jnp.ones_like(place.exists)
    row = seen.row[place.prompt, place.slot]  # [N], the new row for each old one
    there = swap[place.prompt] & free
    source = jnp.minimum(row, parts.rows - 1)

    def pick(new, old):
        where = there.reshape(-1, *(1,) * (old.ndim - 1))
        return jnp.where(where, new[source], old)

    picked = jax.tree.map(pick, rollouts, place)
    picked = dataclasses.replace(
        picked,
        prompt=place.prompt,
        slot=place.slot,
        context=place.context,
        exists=jnp.where(there, row < parts.rows, place.exists),
    )
    missing = rollouts.exists & jnp.isnan(outcome)
    counts = {
        "rollout/drawn": metrics.count(rollouts.exists),
        "rollout/tokens": metrics.count(rollouts.mask),
        "outcome/missing": metrics.count(missing),
    }
    tally = with_levels(parts, asked.level, mine, opens, seen)
    tally = dataclasses.replace(tally, counts=tally.counts | counts)
    drawn = dataclasses.replace(
        old,
        contexts=jax.tree.map(
            lambda new, old: jnp.where(swap[:, None], new, old),
            contexts,
            old.contexts,
        ),
        rollouts=picked,
        outcome=pick(outcome, old.outcome),
        level=jnp.where(swap, asked.level, old.level),
        tally=metrics.merge(old.tally, tally),
    )
    return dataclasses.replace(
        search, drawn=drawn, open=search.open & ~opens, tried=search.tried + 1
    )


# ----- where hints come from


def hints(
    parts: Parts, state: TrainState, prompts: Prompts, wanted: jax.Array
) -> tuple[Hints, Tally]:
    """Hints of all levels on the device, for the prompts that are wanted.

    Args:
        parts: of the run.
        state: at the start of the step: its policy writes.
        prompts: B of them.
        wanted: `[B]` bool.

    Returns:
        The hints; missing for the others. What they cost and what became of them.
    """
    how, hinting = parts.config.hint, parts.task.hinting
    assert how
    assert hinting
    cost = told(how.levels)
    if how.writing is None:
        return read(parts, prompts, wanted, None, cost)
    assert hinting.ask
    contexts, tries = hinting.ask(prompts), how.writing.tries

    def unread(carry):
        number, written, _ = carry
        todo = unreadable(parts, prompts, wanted, written)
        return (number < tries) & jnp.any(todo)

    def write(carry):
        number, written, cost = carry
        todo = unreadable(parts, prompts, wanted, written)
        new = writing(parts, state, contexts, todo, number)
        return number + 1, rewritten(written, new), paid(cost, new)

    carry = (jnp.int32(0), blank(parts, contexts), cost)
    _, written, cost = jax.lax.while_loop(unread, write, carry)
    return read(parts, prompts, wanted, written, cost)


def hints_by_host(
    parts: Parts,
    prompts: Prompts,
    wanted: Any,
    write: Callable[[Contexts, jax.Array, jax.Array], Rollouts],
) -> tuple[Hints, Tally]:
    """The same where prompts lie in files: the host asks, and reads what was written.

    Args:
        parts: of the run.
        prompts: B of them, numpy arrays.
        wanted: `[B]` bool.
        write: `writing`, as a function of contexts, todo and number.
    """
    how, hinting = parts.config.hint, parts.task.hinting
    assert how
    assert hinting
    cost = told(how.levels)
    if how.writing is None:
        return read(parts, prompts, wanted, None, cost)
    assert hinting.ask
    contexts = hinting.ask(prompts)
    written = blank(parts, contexts)
    for number in range(how.writing.tries):
        todo = unreadable(parts, prompts, wanted, jax.device_get(written))
        if not jnp.any(todo):
            break
        new = write(contexts, todo, jnp.int32(number))
        written, cost = rewritten(written, new), paid(cost, new)
    return read(parts, prompts, wanted, jax.device_get(written), cost)


def writing(
    parts: Parts, state: TrainState, contexts: Contexts, todo, number: jax.Array
) -> Rollouts:
    """The policy writes hints: one completion of each prompt in hint mode.

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
    key = jax.random.fold_in(stage_key(*at(state), "hint"), number)
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


def blank(parts: Parts, contexts: Contexts) -> tuple[jax.Array, jax.Array]:
    """`[B, T]` tokens and mask of writings, before any."""
    assert parts.config.hint
    assert parts.config.hint.writing
    shape = (contexts.tokens.shape[0], parts.config.hint.writing.max_tokens)
    return jnp.full(shape, parts.task.pad, jnp.int32), jnp.zeros(shape, bool)


def rewritten(
    old: tuple[jax.Array, jax.Array], new: Rollouts
) -> tuple[jax.Array, jax.Array]:
    """`[B, T]` writings with those that were written anew."""
    count = old[0].shape[0]
    where = jnp.where(new.exists, new.prompt, count)  # out: dropped
    tokens, mask = old
    return (
        tokens.at[where].set(new.tokens, mode="drop"),
        mask.at[where].set(new.mask, mode="drop"),
    )


def unreadable(
    parts: Parts, prompts: Prompts, wanted: Any, written: tuple
) -> jax.Array:
    """`[B]` bool: prompts whose hints cannot be read, of those wanted."""
    how, hinting = parts.config.hint, parts.task.hinting
    assert how
    assert hinting
    _, mask = how.source(hinting, prompts, levels=how.levels, written=written)
    return wanted & ~jnp.any(mask, (-2, -1))


def read(
    parts: Parts,
    prompts: Prompts,
    wanted: Any,
    written: tuple | None,
    tally: Tally,
) -> tuple[Hints, Tally]:
    """What hints say, and what of them may be used.

    Args:
        parts: of the run.
        prompts: B of them.
        wanted: `[B]` bool; the others have no hints.
        written: `[B, T]` tokens and mask of what the policy wrote, if it did.
        tally: what that cost.
    """
    how, hinting = parts.config.hint, parts.task.hinting
    assert how
    assert hinting
    tokens, mask = how.source(hinting, prompts, levels=how.levels, written=written)
    hints, lost = hint.ready(hinting, prompts, tokens, mask, width=how.width)
    some = jnp.asarray(wanted)[:, None]
    hints = dataclasses.replace(hints, mask=hints.mask & some[..., None])
    counts = {f"hint/{name}": metrics.count(x & some) for name, x in lost.items()}
    return hints, dataclasses.replace(tally, counts=tally.counts | counts)


def paid(tally: Tally, new: Rollouts) -> Tally:
    """The tally with the tokens of another writing."""
    tokens = metrics.count(new.mask)
    counts = dict(tally.counts)
    for name in ("rollout/tokens", "hint/written_tokens"):
        counts[name] = counts[name] + tokens
    return dataclasses.replace(tally, counts=counts)


# ----- a level that is set between visits


def meant(parts: Parts, state: TrainState, prompts: Prompts) -> jax.Array:
    """`[B]` int32: the level that a controller has set; 0 beyond the most allowed."""
    assert parts.config.hint
    assert state.hints is not None
    level = state.hints.level[prompts.id]
    return jnp.where(capped(level > 0, parts.config.hint.most), level, 0)


# ----- metrics


def noted(parts: Parts, state: TrainState, drawn: Drawn, cost: Tally | None) -> Drawn:
    """What was drawn first, with the metrics of hints begun.

    Args:
        parts: of the run.
        state: at the start of the step.
        drawn: of the first draw, with hints where a controller has set their level.
        cost: of these hints.
    """
    how = parts.config.hint
    assert how
    assert state.hints is not None
    seen = graded(grid_of(parts.config), drawn.rollouts, drawn.outcome)
    plain = drawn.level == 0
    opens = hint.settled(seen.outcome, seen.exists, trigger=how.trigger, gate=how.gate)
    before = plain & state.hints.hinted[drawn.prompts.id]
    tally = with_levels(parts, drawn.level, ~plain, opens, seen)
    for name, which in (("plain", plain), ("transfer", before)):
        rate = metrics.mean(seen.outcome, seen.exists & which[:, None])
        tally.means[f"hint/{name}_pass_rate"] = rate
    tally = metrics.merge(tally, cost or told(how.levels))
    return dataclasses.replace(drawn, tally=metrics.merge(drawn.tally, tally))


def with_levels(parts: Parts, level, asked, opens, seen) -> Tally:
    """Of prompts at their levels: how many were asked, and how many opened."""
    assert parts.config.hint
    tally = told(parts.config.hint.levels)
    rate = metrics.mean(seen.outcome, seen.exists & asked[:, None])
    tally.means["hint/pass_rate"] = rate
    for k in range(1, parts.config.hint.levels + 1):
        mine = asked & (level == k)
        tally.counts[f"hint/asked_{k}"] = metrics.count(mine)
        tally.counts[f"hint/opened_{k}"] = metrics.count(mine & opens)
    return tally


def told(levels: int) -> Tally:
    """All metrics of hints, with nothing in them."""
    zero = jnp.float32(0)
    names = ["rollout/drawn", "rollout/tokens", "outcome/missing"]
    names += [f"hint/{x}" for x in ("written_tokens", "leaked", "overlong", "missing")]
    for k in range(1, levels + 1):
        names += [f"hint/asked_{k}", f"hint/opened_{k}"]
    counts = {name: jnp.zeros_like(zero) for name in names}
    return Tally(means={"hint/pass_rate": (zero, zero)}, counts=counts)
