"""Hints (SAGE): groups that collapsed are drawn again with a hint, until one opens.

    collapsed -> make hints -> ask -> (draw, grade) -> take -> ask -> ...

Only prompts without a signal are drawn again, and a group is replaced as a whole: all
its completions share one context. Each visit starts without a hint, unless a controller
sets the level of hints between visits.

References:
    SAGE, arXiv:2602.03143, algorithm 1; SAGE-light, equation 12.
"""

import dataclasses
from functools import partial

import flax.struct
import jax
import jax.numpy as jnp

from curax import hint, update
from curax.arrays import grids, masked, metrics
from curax.arrays.metrics import Tally
from curax.config import Config
from curax.settings.config_types import present
from curax.settings.conflicts import Table
from curax.step import draw, stages
from curax.step.methods import hint_sources
from curax.step.optimise import settings_of_trained
from curax.step.types import (
    Components,
    Driver,
    Graded,
    Groups,
    Method,
    Selection,
    StepRequest,
    StepRollouts,
)
from curax.types import Contexts, HintMemory, Hints, Prompts, Task, TrainState

NAME = "hints"


def conflicts(config: Config, task: Task) -> Table:
    """Of a task without hints, or one that does not know how to ask for them."""
    gives, writes = task.hinting, present(config.hint).writing
    return [
        (
            gives is None,
            "hint needs a task that can give hints and this one cannot; set hint "
            "to None, or the task's option for hints.",
        ),
        (
            gives and gives.writing_contexts is None and writes,
            "hint.writing asks the policy for hints, and this task does not know "
            "how; set hint.writing to None and choose another hint.source.",
        ),
    ]


def init(drive: Driver, parts: Components, state: TrainState, what: None) -> HintMemory:
    """Initial hint memory: level 0, and no prompt ever hinted."""
    count = parts.task.num_prompts
    return HintMemory(level=jnp.zeros(count, jnp.int32), hinted=jnp.zeros(count, bool))


def limit(wanted: jax.Array, most: float | jax.Array) -> jax.Array:
    """`[B]` bool, the first of the wanted prompts, at most the share `most` of all."""
    rank = jnp.cumsum(wanted, dtype=jnp.float32)
    return wanted & (rank <= jnp.floor(most * wanted.shape[0] + 1e-4))


# ----- hint levels set by a controller between visits


def before_draw(
    drive: Driver, parts: Components, state: TrainState, request: StepRequest
) -> StepRequest:
    """The request with hints in its contexts, at levels set by the controller."""
    if not present(parts.config.hint).controller:
        return request
    level, wanted = drive.call(controlled_level, parts, state, request.prompts)
    hints, cost = hint_sources.make(drive, parts, state, request.prompts, wanted)
    return drive.call(with_hints, parts, request, hints, level, cost)


def controlled_level(
    parts: Components, state: TrainState, prompts: Prompts
) -> tuple[jax.Array, jax.Array]:
    """Hint level that a controller has set for each prompt, and which prompts get it.

    Returns:
        `[B]` int32, 0 for prompts beyond the share `hint.most`; `[B]` bool.
    """
    level = state.methods[NAME].level[prompts.id]
    wanted = limit(level > 0, present(parts.config.hint).most)
    return jnp.where(wanted, level, 0), wanted


def with_hints(
    parts: Components,
    request: StepRequest,
    hints: Hints,
    level: jax.Array,
    cost: Tally,
) -> StepRequest:
    """The request with hints of these levels in its contexts, and their cost."""
    contexts, level = at_level(request.prompts, hints, level)
    if request.explored:
        cost = metrics.merge(request.explored, cost)
    return dataclasses.replace(request, contexts=contexts, level=level, explored=cost)


# ----- hint levels tried in turn within a visit


@flax.struct.dataclass(kw_only=True)
class Search:
    """State of the search for the hint level at which each group opens."""

    drawn: StepRollouts  # with the groups replaced so far
    open: jax.Array  # [B] bool, still without a signal
    tried: jax.Array  # [] int32, levels tried so far
    hints: Hints


def after_draw(
    drive: Driver, parts: Components, state: TrainState, drawn: StepRollouts
) -> StepRollouts:
    """Completions with collapsed groups drawn again, with hints level by level."""
    drawn = drive.call(begin_metrics, parts, state, drawn)
    if present(parts.config.hint).controller:
        return drawn
    wanted = drive.call(collapsed_groups, parts, drawn)
    made = hint_sources.make(drive, parts, state, drawn.prompts, wanted)
    start = drive.call(begin, parts, drawn, wanted, made)

    def again(search: Search) -> Search:
        request = drive.call(ask, parts, state, search)
        graded = drive.draw_and_grade(parts, state, request)
        return drive.call(take, parts, search, request, graded)

    wants = partial(drive.call, wants_level, parts)
    return drive.repeat(wants, again, start).drawn


def collapsed_groups(parts: Components, drawn: StepRollouts) -> jax.Array:
    """`[B]` bool: collapsed groups, the first ones up to the share `hint.most`."""
    return limit(collapsed(parts, drawn.groups), present(parts.config.hint).most)


def collapsed(parts: Components, seen: Groups) -> jax.Array:
    """`[B]` bool: groups that `hint.trigger` says to have collapsed."""
    return stages.called(parts.config, "hint.trigger", seen.outcome, seen.exists)


def begin(
    parts: Components, drawn: StepRollouts, wanted: jax.Array, made: tuple[Hints, Tally]
) -> Search:
    """The search before its first level.

    Args:
        parts: components of the run.
        drawn: completions without hints.
        wanted: `[B]` bool, `collapsed_groups`.
        made: hints of all levels, and metrics of their cost.
    """
    hints, cost = made
    drawn = dataclasses.replace(drawn, tally=metrics.merge(drawn.tally, cost))
    return Search(drawn=drawn, open=wanted, tried=jnp.int32(0), hints=hints)


def wants_level(parts: Components, search: Search) -> jax.Array:
    """`[]` bool: some group has no signal and a hint that was not tried."""
    level = jnp.arange(present(parts.config.hint).levels, dtype=jnp.int32)
    some = jnp.any(search.hints.mask, -1) & (level >= search.tried)[None]
    return jnp.any(search.open[:, None] & some)


def ask(parts: Components, state: TrainState, search: Search) -> StepRequest:
    """Request for the prompts without a signal, with hints of the next level."""
    drawn, number = search.drawn, search.tried + 1
    contexts, level = at_level(drawn.prompts, search.hints, number)
    plain = draw.ask(parts, state, drawn.memory, drawn.prompts, number)
    request = dataclasses.replace(
        plain, contexts=contexts, level=level, known=drawn.known
    )
    return draw.allocated(parts, request, wanted=search.open & (level > 0))


def at_level(
    prompts: Prompts, hints: Hints, level: jax.Array
) -> tuple[Contexts, jax.Array]:
    """Contexts with hints of a level, and `[B]` these levels; 0: there is none.

    Args:
        prompts: B of them.
        hints: of these prompts.
        level: `[]` or `[B]` int32; 0: no hint.
    """
    level = jnp.broadcast_to(level, hints.mask.shape[:1])
    place = jnp.maximum(level - 1, 0)[:, None, None]
    tokens, mask = (
        jnp.take_along_axis(x, place, 1)[:, 0] for x in (hints.tokens, hints.mask)
    )
    mask = mask & (level > 0)[:, None]
    there = jnp.any(mask, -1)
    return hint.joined(prompts, tokens, mask), jnp.where(there, level, 0)


def take(
    parts: Components, search: Search, request: StepRequest, graded: Graded
) -> Search:
    """The search after a level: groups drawn with its hint replace the old ones.

    A group is replaced as a whole, if `hint.replaces` says so, and keeps its place.

    Args:
        parts: components of the run.
        search: state before the level.
        request: of `ask`.
        graded: its completions.
    """
    old = search.drawn
    rollouts, outcome = graded.rollouts, graded.outcome
    before, seen = old.groups, graded.groups
    mine = search.open & (request.level > 0)
    swap = mine & hint.replaces(
        seen.outcome, seen.exists, before.outcome, before.exists
    )
    opens = mine & ~collapsed(parts, seen)

    # A prompt that stopped early has free places, which it may fill.
    place = old.rollouts
    free = place.exists if parts.config.stop is None else jnp.ones_like(place.exists)
    row = seen.row[place.prompt, place.member]  # [N], the new row for each old one
    there = swap[place.prompt] & free
    source = jnp.minimum(row, parts.rows - 1)

    picked = dataclasses.replace(
        draw.pick_rows(rollouts, place, there, source),
        exists=jnp.where(there, row < parts.rows, place.exists),
    )
    tally = level_metrics(parts, request.level, mine, opens, seen)
    counts = tally.counts | metrics.counts_of(rollouts, outcome)
    tally = dataclasses.replace(tally, counts=counts)
    drawn = dataclasses.replace(
        old,
        contexts=draw.pick(request.contexts, old.contexts, swap),
        rollouts=picked,
        outcome=draw.pick(outcome, old.outcome, there, source),
        level=draw.pick(request.level, old.level, swap),
        tally=metrics.merge(old.tally, tally),
    )
    return dataclasses.replace(
        search, drawn=drawn, open=search.open & ~opens, tried=search.tried + 1
    )


# ----- credit for training without the hint of the draw


def credit(
    drive: Driver, parts: Components, state: TrainState, trains: Selection
) -> Selection:
    """Completions in contexts without hints, and credit reweighted for that change.

    Args:
        drive: not used.
        parts: components of the run.
        state: train state at the start of the step.
        trains: completions of the step, with credit before the reweighting.

    Returns:
        `trains` with contexts, log-probs and credit without hints; unchanged if
        `hint.credit` is None.
    """
    how = present(parts.config.hint)
    if how.credit is None:
        return trains
    drawn, given, row = trains.drawn, trains.given, trains.row
    seen, mask = drawn.groups, trains.mask
    rollouts, contexts = drawn.rollouts, hint.none(drawn.prompts)
    logp = update.logprobs(
        draw.policy(parts, state),
        state.params,
        contexts,
        rollouts.tokens[row],
        mask,
        rollouts.context[row],
        settings_of_trained(parts.config),
        trains.support,
    )
    hinted = drawn.level > 0
    ratio = masked.total(logp - rollouts.logp_behaviour[row], mask)
    zeros, used = jnp.zeros(parts.rows, jnp.float32), trains.used
    ratio = zeros.at[row].add(jnp.where(used, ratio, 0.0))
    undone = stages.called(
        parts.config,
        "hint.credit",
        given.credit,
        seen.outcome,
        given.keep,
        grids.grid(ratio, seen.row, fill=0.0),
        hinted,
    )
    other = used & hinted[rollouts.prompt[row]]
    where = jnp.where(other, row, parts.rows)  # out: dropped

    def put(old):
        return old.at[where].set(logp, mode="drop")

    rollouts = dataclasses.replace(
        rollouts,
        logp_policy=put(rollouts.logp_policy),
        logp_behaviour=put(rollouts.logp_behaviour),
    )
    drawn = dataclasses.replace(drawn, contexts=contexts, rollouts=rollouts)
    given = dataclasses.replace(given, credit=undone)
    return dataclasses.replace(trains, drawn=drawn, given=given)


# ----- memory


def after_update(
    drive: Driver, parts: Components, state: TrainState, drawn: StepRollouts
) -> HintMemory:
    """Memory of hints after a step: the level of the next visit, and who had a hint.

    A prompt that was not drawn at the level set for it keeps that level. Of one
    that the step has twice the last group decides.
    """
    how, memory = present(parts.config.hint), state.methods[NAME]
    seen = drawn.groups
    who, level = drawn.prompts.id, memory.level
    if how.controller:
        rate = masked.mean(seen.outcome, seen.exists)
        rate = jnp.where(jnp.any(seen.exists, -1), rate, jnp.nan)
        given = level[who]
        then = stages.called(
            parts.config, "hint.controller", given, rate, levels=how.levels
        )
        size = level.shape[0]
        once = jnp.where(grids.last_of_each(who, size=size), who, size)  # out: dropped
        level = level.at[once].set(
            jnp.where(drawn.level == given, then, given), mode="drop"
        )
    return HintMemory(level=level, hinted=memory.hinted.at[who].max(drawn.level > 0))


# ----- metrics


def begin_metrics(
    parts: Components, state: TrainState, drawn: StepRollouts
) -> StepRollouts:
    """Completions of the first draw, with metrics of hints added.

    Args:
        parts: components of the run.
        state: train state at the start of the step.
        drawn: of the first draw, with hints where a controller has set their level.
    """
    seen = drawn.groups
    plain = drawn.level == 0
    opens = ~collapsed(parts, seen)
    before = plain & state.methods[NAME].hinted[drawn.prompts.id]
    tally = level_metrics(parts, drawn.level, ~plain, opens, seen)
    for name, which in (("plain", plain), ("transfer", before)):
        rate = metrics.mean(seen.outcome, seen.exists & which[:, None])
        tally.means[f"hint/{name}_pass_rate"] = rate
    return dataclasses.replace(drawn, tally=metrics.merge(drawn.tally, tally))


def level_metrics(
    parts: Components,
    level: jax.Array,
    asked: jax.Array,
    opens: jax.Array,
    seen: Groups,
) -> Tally:
    """Metrics by level: pass rate with hints, and counts of groups asked and opened."""
    rate, counts = metrics.mean(seen.outcome, seen.exists & asked[:, None]), {}
    for k in range(1, present(parts.config.hint).levels + 1):
        mine = asked & (level == k)
        counts[f"hint/asked_{k}"] = metrics.count(mine)
        counts[f"hint/opened_{k}"] = metrics.count(mine & opens)
    return Tally(means={"hint/pass_rate": rate}, counts=counts)


def metrics_of(
    drive: Driver, parts: Components, state: TrainState, drawn: StepRollouts
) -> Tally:
    """Metric: share of prompts that trained with a hint."""
    hinted = drawn.level > 0
    share = metrics.mean(hinted, jnp.ones_like(hinted))
    return Tally(means={"hint/hinted_fraction": share}, counts={})


METHOD = Method(
    name=NAME,
    conflicts=conflicts,
    init=init,
    before_draw=before_draw,
    after_draw=after_draw,
    credit=credit,
    after_update=after_update,
    metrics=metrics_of,
)
