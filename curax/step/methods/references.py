"""R3: rewards by the log-prob of the reference answer after a completion's thought.

The scorer runs over context, thought and reference with the same model as sampler and
trainer; the answer of the policy itself is discarded.

References:
    Xu et al. 2025, "Direct Reasoning Optimization", arXiv:2506.13351.
"""

import dataclasses
from functools import partial
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp

from curax import reflect, update
from curax.arrays import grids, masked, metrics
from curax.arrays.metrics import Tally
from curax.arrays.micro_batches import over_micro_batches
from curax.config import Config
from curax.rollout import extend, prefill
from curax.settings.config_types import present
from curax.settings.conflicts import Table
from curax.step import stages
from curax.step.draw import policy
from curax.step.methods import candidates
from curax.step.optimise import settings
from curax.step.types import (
    Components,
    Driver,
    Graded,
    Method,
    Selection,
    StepRollouts,
    Ungraded,
    grid_of,
)
from curax.types import Contexts, Imitated, Prompts, Rollouts, Task, TrainState

NAME = "references"
References = tuple[jax.Array, jax.Array]  # [B, Y] int32 tokens and bool mask


def conflicts(config: Config, task: Task) -> Table:
    """Of a task without reference answers, or without a delimiter before them."""
    return [
        (
            task.reference is None or not task.delimiter,
            "reflection needs reference answers, and a delimiter that ends the "
            "thought, and this task has none; set reflection to None or choose another "
            "task.",
        )
    ]


# ----- the scorer


def init(drive: Driver, parts: Components, state: TrainState, what: None) -> Any:
    """Parameters of the scorer, a copy of the policy; None: the policy itself."""
    if present(parts.config.reflection).scorer_every == 1:
        return None
    return jax.tree.map(jnp.copy, state.params)


def after_update(
    drive: Driver, parts: Components, state: TrainState, drawn: StepRollouts
) -> Any:
    """Parameters of the scorer in the next step; None: the policy's."""
    scorer = state.methods[NAME]
    every = present(parts.config.reflection).scorer_every
    if scorer is None or every == 0:
        return scorer
    due = state.step % every == 0
    return jax.tree.map(lambda old, new: jnp.where(due, new, old), scorer, state.params)


# ----- log-probs of references


def thoughts(rollouts: Rollouts, delimiter: tuple[int, ...]) -> jax.Array:
    """`[N]` int32 tokens of thoughts, their first delimiter included; 0: none."""
    tokens, mask = rollouts.tokens, rollouts.mask
    width, size = tokens.shape[-1], len(delimiter)
    here = jnp.ones((tokens.shape[0], width), bool)
    for k, token in enumerate(delimiter):
        fits = jnp.pad((tokens == token) & mask, ((0, 0), (0, size)))
        here = here & fits[:, k : k + width]
    length = jnp.argmax(here, -1).astype(jnp.int32) + size
    return jnp.where(jnp.any(here, -1), length, 0)


def references_of(parts: Components, prompts: Prompts) -> References:
    """Reference answers of prompts."""
    return present(parts.task.reference)(prompts)


def logprobs(
    parts: Components,
    state: TrainState,
    contexts: Contexts,
    context: jax.Array,
    tokens: jax.Array,
    length: jax.Array,
    reference: References,
    *,
    ranks: bool = False,
) -> jax.Array:
    """Log-probs of references after thoughts, under the scorer, at temperature 1.

    Args:
        parts: components of the run.
        state: train state at the start of the step.
        contexts: `[C, P]`.
        context: `[N]` int32 in [0, C), context of each row.
        tokens: `[N, T]` int32, completions.
        length: `[N]` int32, tokens of their thoughts.
        reference: `[N, Y]` tokens and mask.
        ranks: return ranks in the vocabulary instead, 1 the likeliest.

    Returns:
        `[N, Y]` float32 nats, or int32 ranks; any finite value off the mask.
    """
    tokens, mask, columns = grids.append_after(tokens, length, *reference)
    how = settings(parts.config)
    most = how.micro_batches
    count = next(k for k in range(most, 0, -1) if tokens.shape[0] % k == 0)
    how = dataclasses.replace(how, temperature=1.0, micro_batches=count)
    scorer = state.methods[NAME]
    params = state.params if scorer is None else scorer
    model = policy(parts, state)
    if not ranks:
        args = model, params, contexts, tokens, mask, context, how
        return jnp.take_along_axis(update.logprobs(*args), columns, -1)
    prefix = prefill(model, params, contexts)

    def read(rows):
        tokens, context = rows
        seen = contexts.mask[context]
        features = extend(model, params, prefix.take(context), seen, tokens)
        head, chunk = model.head(params), how.token_chunk
        return (), masked.rank(features, head, tokens, chunk=chunk)

    count, buckets = how.count(*mask.shape), how.length_buckets
    _, rank = over_micro_batches(
        read, (tokens, context), mask, count=count, buckets=buckets
    )
    return jnp.take_along_axis(rank, columns, -1)


# ----- rewards


@flax.struct.dataclass(kw_only=True)
class Scored:
    """Rewards by the likelihood of the reference answer, and their components."""

    reward: jax.Array  # [N] float32, total, nats per token
    rest: jax.Array  # [N] float32, of that the part of length reward and rubric
    thought: jax.Array  # [N] int32, tokens up to the end of the delimiter
    certainty: reflect.Certainty  # [B, G]
    kept: jax.Array | None = None  # [B] bool, groups that train; None: all


def grade(
    drive: Driver, parts: Components, state: TrainState, drawn: Ungraded
) -> Graded:
    """Outcomes and rewards by reference answers; the host may read these."""
    request, rollouts = drawn.request, drawn.rollouts
    wanted = drive.call_task(references_of, parts, request.prompts)
    args = state, request.contexts, rollouts, wanted
    outcome, scored, reference = drive.call(score, parts, *args)
    rollouts = dataclasses.replace(rollouts, reward=scored.reward)
    more = {"reference": reference, "found": {NAME: scored}}
    return Graded.of(request, rollouts, outcome, **more)


def score(
    parts: Components,
    state: TrainState,
    contexts: Contexts,
    rollouts: Rollouts,
    reference: References,
) -> tuple[jax.Array, Scored, tuple[jax.Array, ...]]:
    """Outcomes and rewards of completions by reference answers.

        reward = R3 + length_weight * length(answer, reference), then the rubric

    Args:
        parts: components of the run.
        state: train state at the start of the step.
        contexts: of the completions.
        rollouts: `[N]`.
        reference: `[B, Y]` tokens and mask.

    Returns:
        `[N]` float32 outcomes in [0, 1], exp of the certainty, NaN where there is no
        thought; the rewards and their components; tokens and mask of the references
        with the mean weight of each token over the completions, `[B, Y]` float32.
    """
    how = present(parts.config.reflection)
    wanted, mask = reference
    own = wanted[rollouts.prompt], mask[rollouts.prompt]
    thought = thoughts(rollouts, parts.task.delimiter)
    index = grids.index(rollouts, grid_of(parts.config))

    def grid(values, fill: Any = 0.0):
        return grids.grid(values, index, fill=fill)

    def read(tokens, length):
        given = parts, state, contexts, rollouts.context
        return grid(logprobs(*given, tokens, length, own))

    logp = read(rollouts.tokens, thought)
    exists = grid(rollouts.exists & (thought > 0), fill=False)
    exists = reflect.scored(logp, exists, mask)
    baseline = None
    if how.baseline:
        sizes = {"delimiter": parts.task.delimiter, "pad": parts.task.pad}
        baseline = read(*how.baseline(rollouts.tokens, thought, **sizes))
    found = reflect.certainty(
        logp,
        exists,
        mask,
        weights=partial(stages.called, parts.config, "reflection.weights"),
        clip_nats=how.clip_nats,
        leave_one_out=how.leave_one_out,
        baseline=baseline,
    )
    kept = None
    if how.keep:
        null = candidates.null_chance(logp, exists, mask, clip_nats=how.clip_nats)
        spread = jnp.max(found.spread, -1, where=mask, initial=0.0)
        # Nothing says how hard a prompt is here, but for those that nothing measured,
        # and no state is kept.
        hard = jnp.where(jnp.any(exists, -1), 0.0, jnp.nan)
        given = hard, spread, null, jnp.float32(jnp.nan)
        kept, _ = stages.several(parts.config, "reflection.keep", *given)
        kept = kept & jnp.any(exists, -1)
        exists = exists & kept[:, None]
    reward, rest = found.value, jnp.zeros_like(found.value)
    answer_tokens = jnp.sum(rollouts.mask, -1, dtype=jnp.int32) - thought
    if how.length:
        length = jnp.sum(mask, -1, dtype=jnp.int32)[:, None]
        arrays = grid(answer_tokens, fill=0), length
        earned = stages.called(parts.config, "reflection.length", *arrays)
        rest = how.length_weight * earned
        reward = reward + rest
    if how.rubric:
        fit = grid(rollouts.finished & (answer_tokens > 0), fill=False)
        arrays = reward, exists, fit
        ruled, exists = stages.several(parts.config, "reflection.rubric", *arrays)
        reward, rest = ruled, rest + ruled - reward

    def rows(values):
        return values[rollouts.prompt, rollouts.member]

    fine = rows(exists) & rollouts.exists
    likely = jnp.exp(jnp.minimum(rows(found.value), 0.0))
    outcome = jnp.where(fine, likely, jnp.nan)
    graded = ~jnp.isnan(grid(outcome, fill=jnp.nan))
    weight = jnp.moveaxis(found.weight, -1, -2)  # [B, Y, G]
    graded = jnp.broadcast_to(graded[:, None], weight.shape)
    scored = Scored(
        reward=rows(reward),
        rest=rows(rest),
        thought=thought,
        certainty=found,
        kept=kept,
    )
    return outcome, scored, (wanted, mask, masked.mean(weight, graded))


# ----- what trains


def credit(
    drive: Driver, parts: Components, state: TrainState, trains: Selection
) -> Selection:
    """What trains, with separate credit for thought and answer tokens.

    R3 does not depend on the answer of the policy itself: its tokens get the credit of
    length reward and rubric alone, centred as the recipe does. With `reflection.direct`
    the reference after the thought is imitated besides.
    """
    drawn, given, row = trains.drawn, trains.given, trains.row
    how, scored = present(parts.config.reflection), drawn.found[NAME]
    seen, rollouts, some = drawn.groups, drawn.rollouts, jnp.any(trains.mask, -1)
    thought = scored.thought[row]
    column = jnp.arange(trains.mask.shape[-1], dtype=jnp.int32)[None]
    if not how.answers:
        rest = jnp.where(seen.exists, grids.grid(scored.rest, seen.row, fill=0.0), 0.0)
        args = parts.config, rest, seen.exists, given.keep, given.factor
        own = stages.advantage_credit(*args).reshape(-1)[trains.place]
        own = jnp.where(some, own, 0.0)
        answer = trains.mask & (column >= thought[:, None])
        of_tokens = jnp.where(answer, own[:, None], trains.credit)
        trains = dataclasses.replace(trains, of_tokens=of_tokens)
    if isinstance(how.direct, int | float) and how.direct == 0:
        return trains
    prompt, member = rollouts.prompt[row], rollouts.member[row]
    reference, there = (x[prompt] for x in present(drawn.reference)[:2])
    tokens, mask, columns = grids.append_after(
        rollouts.tokens[row], thought, reference, there
    )
    weight = jnp.where(there, scored.certainty.weight[prompt, member], 0.0)
    which = jnp.arange(mask.shape[0])[:, None]
    spread = jnp.zeros(mask.shape, jnp.float32).at[which, columns].set(weight)
    mask = mask & some[:, None]
    imitated = Imitated(tokens=tokens, mask=mask, weight=how.direct * spread)
    return dataclasses.replace(trains, imitated=imitated)


# ----- metrics


def metrics_of(
    drive: Driver, parts: Components, state: TrainState, drawn: StepRollouts
) -> Tally:
    """Metrics: certainty, spread, weights, and lengths of thoughts and answers."""
    scored: Scored = drawn.found[NAME]
    seen = drawn.groups
    found, some = scored.certainty, jnp.any(seen.exists, -1)
    ended = drawn.rollouts.exists & (scored.thought > 0)
    length = jnp.sum(drawn.rollouts.mask, -1, dtype=jnp.int32)
    means = {
        "reflect/certainty_nats": metrics.mean(found.value, seen.exists),
        "reflect/flat_fraction": metrics.mean(found.flat, some),
        "reflect/spread_nats": metrics.mean(jnp.max(found.spread, -1), some),
        "reflect/top_weight": metrics.mean(jnp.max(found.weight, -1), seen.exists),
        "reflect/thought_fraction": metrics.mean(ended, drawn.rollouts.exists),
        "reflect/thought_tokens": metrics.mean(scored.thought, ended),
        "reflect/answer_tokens": metrics.mean(length - scored.thought, ended),
    }
    if scored.kept is not None:
        everyone = jnp.ones_like(scored.kept)
        means["reflect/kept_fraction"] = metrics.mean(scored.kept, everyone)
    return Tally(means=means, counts={})


METHOD = Method(
    name=NAME,
    conflicts=conflicts,
    init=init,
    grade=grade,
    credit=credit,
    after_update=after_update,
    metrics=metrics_of,
)
