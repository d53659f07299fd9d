"""Evaluation on held-out prompts during training: pass rates and monitors.

    requests -> draw and grade, as everywhere -> pass_rates, pass_at_k

Pass rates are sampled and greedy. Monitors are the diversity of sampled completions,
the confidence of the policy in them, and its KL to the policy at the start of RL.
"""

import dataclasses
import operator
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from curax import hint, rollout, update
from curax.arrays import masked, turns
from curax.arrays.keys import stage_key
from curax.monitors import attempts, diversity
from curax.monitors.distance import from_base
from curax.settings import errors
from curax.settings.declared import RIGHT
from curax.step import draw, optimise
from curax.step.types import Components, Driver, Request, Subject
from curax.types import Prompts, Rollouts, Task, TrainState

_SHOWN = 60  # characters of a completion in an error
_opening, _spread = jax.jit(diversity.opening), jax.jit(diversity.spread)


class FormatError(errors.WorkError, RuntimeError):
    """`evaluation.format` failed on a completion, which the message quotes."""


def held_out(parts: Subject, ids: Any) -> Prompts:
    """Held-out prompts with these ids."""
    return parts.task.held_out(ids)


def requests(drive: Driver, parts: Components, seed: jax.Array) -> tuple[Request, ...]:
    """Requests for completions of the held-out prompts: sampled, and greedy ones.

    Prompts are always the same, and without hints.

    Args:
        drive: driver that calls functions.
        parts: components of the run.
        seed: `[]` uint32; the same seed draws with the same noise at every call. `[R]`
            where the driver runs so many seeds side by side.
    """
    count = parts.config.evaluation.prompts
    ids = np.broadcast_to(np.arange(count, dtype=np.int32), (*seed.shape, count))
    prompts = drive.call_task(held_out, parts, ids)
    return tuple(
        drive.call(ask, parts, seed, prompts) for ask in (ask_sampled, ask_greedy)
    )


def ask_sampled(parts: Components, seed: jax.Array, prompts: Prompts) -> Request:
    """Request for `evaluation.samples` completions of each held-out prompt."""
    each, how = parts.config.evaluation.samples, draw.settings(parts)
    return draw.plain(prompts, each, draw_key(seed), how)


def ask_greedy(parts: Components, seed: jax.Array, prompts: Prompts) -> Request:
    """Request for one greedy completion of each held-out prompt."""
    how = dataclasses.replace(draw.settings(parts), temperature=0)
    return draw.plain(prompts, 1, draw_key(seed), how)


def draw_key(seed: jax.Array) -> jax.Array:
    """Random key of every evaluation of a run."""
    return stage_key(seed, jnp.int32(0), "evaluate")


def formats(parts: Components, rollouts: Rollouts) -> dict[str, np.ndarray]:
    """Diversity of the forms of held-out completions, and the share without an answer.

    Args:
        parts: components of the run; `evaluation.format` gives the form of a text;
            None: its first four tokens do.
        rollouts: sampled; leading axes, as of seeds, are kept.

    Returns:
        By name, `[...]` float32, of `curax.monitors.diversity.spread`; and the share
        of completions that state no answer, where the task knows.

    Raises:
        FormatError: `evaluation.format` raised, or gave no integer.
    """
    classify, task = parts.config.evaluation.format, parts.task
    tokens, mask = rollouts.tokens, rollouts.mask
    if rollouts.turns is not None:  # those of the policy, one behind the other
        tokens, mask = turns.in_front(tokens, mask)
    kind = np.asarray(_opening(tokens, mask))
    if classify:
        kind, known = np.zeros_like(kind), {}
        for place, text in _texts(task, rollouts):
            form = _form(classify, text)
            kind[place] = known.setdefault(form, len(known))  # of any size: equality
    shape = (*kind.shape[:-1], parts.config.evaluation.prompts, -1)
    exists = np.asarray(rollouts.exists).reshape(shape)
    found = _spread(kind.reshape(shape), exists)
    names = {
        "format/entropy_nats": found.entropy,
        "format/effective_number": found.effective,
        "format/top_fraction": found.top,
        "format/within_prompt_nats": found.within,
    }
    if task.states:
        said = np.full(kind.shape, np.nan)
        for place, text in _texts(task, rollouts):
            said[place] = task.states(text)
        answered = np.nanmean(said, -1)
        names["format/no_answer_fraction"] = np.float32(1 - answered)
    return jax.device_get(names)


def _texts(task: Task, rollouts: Rollouts) -> Iterator[tuple[tuple[int, ...], str]]:
    """Where a completion exists, and what the policy wrote in it."""
    tokens, written = np.asarray(rollouts.tokens), np.asarray(rollouts.written)
    for place in zip(*np.nonzero(np.asarray(rollouts.exists)), strict=True):
        yield place, task.decode(tokens[place][written[place]])


def _form(classify: Callable[[str], Any], text: str) -> int:
    """Form of a text by the user's function; a FormatError where it fails."""
    shown = repr(text if len(text) <= _SHOWN else text[:_SHOWN] + "...")
    try:
        form = classify(text)
    except Exception as error:
        raise FormatError(
            f"evaluation.format raised {type(error).__name__} ({errors.text(error)}) "
            f"on the completion {shown}"
        ) from error
    try:
        return operator.index(form)
    except TypeError as error:
        raise FormatError(
            f"evaluation.format gave {form!r}, which is no integer, for the completion "
            f"{shown}"
        ) from error


def measured(
    parts: Components, state: TrainState, prompts: Prompts, rollouts: Rollouts
) -> dict[str, jax.Array]:
    """Distance and confidence on held-out completions, where they are configured.

    Args:
        parts: components of the run.
        state: train state, whose policy has drawn.
        prompts: the held-out prompts.
        rollouts: sampled completions of them.

    Returns:
        By name, `[]` float32.
    """
    how, given = parts.config.evaluation, (parts, state, prompts, rollouts)
    found = distance(*given) if how.distance else {}
    return found | (confidence(*given) if how.confidence else {})


def distance(
    parts: Components, state: TrainState, prompts: Prompts, rollouts: Rollouts
) -> dict[str, jax.Array]:
    """KL of the policy to that at the start of RL, on held-out completions.

    By three estimators. Arguments as `measured`.

    Returns:
        By name, `[]` float32, of `distance.from_base`, under the temperature of the
        samples; top_k and top_p are ignored, as they are in training.
    """
    count = rollouts.tokens.shape[0]
    least = min(count, -(-count // parts.train_rows))
    cuts = next(k for k in range(least, count + 1) if count % k == 0)
    how = optimise.settings(parts.config)
    how = dataclasses.replace(how, micro_batches=cuts, length_buckets=1)
    model, contexts = draw.policy(parts, state), hint.none(prompts)
    rows = rollouts.tokens, rollouts.mask, rollouts.context
    logp, logp_base = (
        update.logprobs(model, params, contexts, *rows, how)
        for params in (state.params, state.reference)
    )
    found = from_base(logp, logp_base, rollouts.mask)
    return {f"distance/{name.replace('/', '_')}": x for name, x in found.items()}


def confidence(
    parts: Components, state: TrainState, prompts: Prompts, rollouts: Rollouts
) -> dict[str, jax.Array]:
    """Mean confidence scores of the policy on held-out completions.

    Arguments as `measured`.

    Returns:
        By name, `[]` float32 nats, of `curax.monitors.confidence.scores`.
    """
    how = parts.config.evaluation
    found = rollout.confidences(
        draw.policy(parts, state),
        state.params,
        hint.none(prompts),
        rollouts,
        temperature=parts.config.sampling.temperature,
        k=how.confidence,
        window=how.window,
    )
    each = rollouts.exists & jnp.any(rollouts.mask, -1)
    return {
        f"confidence/{name}_nats": masked.mean(score, each)
        for name, score in found._asdict().items()
    }


def pass_rates(
    parts: Components, rollouts: Rollouts, outcome: np.ndarray
) -> np.ndarray:
    """`[..., E]` pass rate per prompt over the completions that were graded.

    NaN where none was. Leading axes, as of seeds, are kept.
    """
    return mean_of_known(_by_prompt(parts, rollouts, outcome))


def pass_at_k(
    parts: Components, rollouts: Rollouts, outcome: np.ndarray
) -> dict[str, np.ndarray]:
    """`eval/pass_at_K`, K = `evaluation.k`: mean over prompts of the chance that one
    of K completions is right.

    The estimate is unbiased (`attempts.pass_at_k`); prompts of which fewer than K were
    graded are left out, and it is NaN if all are.

    Args:
        parts: components of the run.
        rollouts: sampled.
        outcome: `[..., N]` float, NaN where missing; right above `RIGHT`.

    Returns:
        `[...]` float64; nothing if `evaluation.k` is 0.
    """
    k = parts.config.evaluation.k
    if not k:
        return {}
    each = _by_prompt(parts, rollouts, outcome)
    chance = attempts.pass_at_k((each > RIGHT).sum(-1), (~np.isnan(each)).sum(-1), k)
    return {f"eval/pass_at_{k}": mean_of_known(chance)}


def mean_of_known(values: np.ndarray) -> np.ndarray:
    """Mean over the last axis of values that are not NaN; NaN where none is."""
    known = ~np.isnan(values)
    count = np.where(known.any(-1), known.sum(-1), np.nan)
    return np.where(known, values, 0.0).sum(-1) / count


def _by_prompt(
    parts: Components, rollouts: Rollouts, outcome: np.ndarray
) -> np.ndarray:
    """`[..., E, S]` outcomes of the S completions of each prompt, NaN where missing."""
    # Every seed draws the same rows.
    prompt, member = (
        np.asarray(of).reshape(-1, outcome.shape[-1])[0]
        for of in (rollouts.prompt, rollouts.member)
    )
    shape = (parts.config.evaluation.prompts, int(member.max()) + 1)
    each = np.full((*outcome.shape[:-1], *shape), np.nan)
    each[..., prompt, member] = outcome
    return each
