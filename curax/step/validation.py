"""Evaluation on held-out prompts during training: pass rates and monitors.

Pass rates are sampled and greedy. Monitors are the diversity of sampled completions,
the confidence of the policy in them, and its KL to the policy at the start of RL.
"""

import operator
from collections import Counter
from collections.abc import Callable
from functools import lru_cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from curax import allocate, hint, reward, rollout, update
from curax.arrays import masked
from curax.arrays.keys import stage_key
from curax.config import cache_bytes
from curax.monitors import attempts, diversity
from curax.monitors.distance import from_base
from curax.processes import peers
from curax.settings.declared import RIGHT
from curax.step import grading
from curax.step.records import Components
from curax.types import Model, Prompts, Rollouts

_SHOWN = 60  # characters of a completion in an error
_opening, _spread = jax.jit(diversity.opening), jax.jit(diversity.spread)


class FormatError(RuntimeError):
    """`evaluation.format` failed on a completion, which the message quotes."""


def draw(
    parts: Components,
    model: Model,
    params: Any,
    seed: jax.Array,
    prompts: Prompts | None = None,
    *,
    samples: int,
) -> tuple[Prompts, Rollouts]:
    """Completions of the held-out prompts, always without hints.

    Args:
        parts: components of the run.
        model: the policy.
        params: its trained parameters.
        seed: `[]` uint32; the same seed draws with the same noise at every call.
        prompts: the held-out prompts, if the host has read them; None: generated here.
        samples: completions per prompt; 0: one greedy completion.

    Returns:
        E prompts, always the same, and E * max(samples, 1) rows.
    """
    cfg = parts.config
    count = cfg.evaluation.prompts
    if prompts is None:
        prompts = parts.task.held_out(jnp.arange(count, dtype=jnp.int32))
    each = jnp.full(count, max(samples, 1), jnp.int32)
    rollouts = rollout.sample(
        model,
        params,
        hint.none(prompts),
        allocate.plan(each, rows=count * max(samples, 1)),
        stage_key(seed, jnp.int32(0), "evaluate"),
        max_tokens=cfg.sampling.max_tokens,
        end=parts.task.end,
        pad=parts.task.pad,
        temperature=cfg.sampling.temperature if samples else 0,
        top_k=cfg.sampling.top_k,
        top_p=cfg.sampling.top_p,
        slots=cfg.sampling.slots,
        cache_bytes=cache_bytes(cfg),
    )
    return prompts, rollouts


def formats(parts: Components, rollouts: Rollouts) -> dict[str, np.ndarray]:
    """Diversity of the forms of held-out completions, and the share without an answer.

    Args:
        parts: components of the run; `evaluation.format` gives the form of a text;
            None: its first four tokens do.
        rollouts: of `draw`, sampled; leading axes, as of seeds, are kept.

    Returns:
        By name, `[...]` float32, of `curax.monitors.diversity.spread`; and the share
        of completions that state no answer, where the task knows.

    Raises:
        FormatError: `evaluation.format` raised, or gave no integer.
    """
    classify, task = parts.config.evaluation.format, parts.task
    kind = np.asarray(_opening(rollouts.tokens, rollouts.mask))
    if classify:
        tokens, mask = np.asarray(rollouts.tokens), np.asarray(rollouts.mask)
        kind, known = np.zeros_like(kind), {}
        for place in zip(*np.nonzero(np.asarray(rollouts.exists)), strict=True):
            form = _form(classify, task.decode(tokens[place][mask[place]]))
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
        told = rollouts.tokens, rollouts.mask, rollouts.exists
        rows = zip(*(np.asarray(x) for x in told), strict=True)
        said = [task.states(task.decode(t[m])) for t, m, exists in rows if exists]
        names["format/no_answer_fraction"] = np.float32(1 - np.mean(said))
    return jax.device_get(names)


def _form(classify: Callable[[str], Any], text: str) -> int:
    """Form of a text by the user's function; a FormatError where it fails."""
    shown = repr(text if len(text) <= _SHOWN else text[:_SHOWN] + "...")
    try:
        form = classify(text)
    except Exception as error:
        why = " ".join(str(error).split()).rstrip(".") or "no message"
        raise FormatError(
            f"evaluation.format raised {type(error).__name__} ({why}) on the "
            f"completion {shown}"
        ) from error
    try:
        return operator.index(form)
    except TypeError as error:
        raise FormatError(
            f"evaluation.format gave {form!r}, which is no integer, for the completion "
            f"{shown}"
        ) from error


def distance(
    parts: Components,
    model: Model,
    params: Any,
    base: Any,
    prompts: Prompts,
    rollouts: Rollouts,
) -> dict[str, jax.Array]:
    """KL of the policy to a base policy on held-out completions, by three estimators.

    Args:
        parts: components of the run.
        model: the policy.
        params: its trained parameters.
        base: trained parameters of the base policy.
        prompts: of `draw`.
        rollouts: of `draw`, sampled at a temperature.

    Returns:
        By name, `[]` float32, of `distance.from_base`, under that temperature;
        top_k and top_p are ignored, as they are in training.
    """
    count = rollouts.tokens.shape[0]
    least = min(count, -(-count // parts.train_rows))
    cuts = next(k for k in range(least, count + 1) if count % k == 0)
    how = update.Settings(
        temperature=parts.config.sampling.temperature,
        micro_batches=cuts,
        tokens_per_micro_batch=parts.config.update.tokens_per_micro_batch,
        token_chunk=parts.config.update.token_chunk,
    )
    rows = rollouts.tokens, rollouts.mask, rollouts.context

    def logprobs(params):
        return update.logprobs(model, params, hint.none(prompts), *rows, how)

    found = from_base(logprobs(params), logprobs(base), rollouts.mask)
    return {f"distance/{name.replace('/', '_')}": x for name, x in found.items()}


def confidence(
    parts: Components, model: Model, params: Any, prompts: Prompts, rollouts: Rollouts
) -> dict[str, jax.Array]:
    """Mean confidence scores of the policy on held-out completions.

    Args:
        parts: components of the run.
        model: the policy.
        params: its trained parameters.
        prompts: of `draw`.
        rollouts: of `draw`, sampled at a temperature.

    Returns:
        By name, `[]` float32 nats, of `curax.monitors.confidence.scores`.
    """
    how = parts.config.evaluation
    found = update.confidences(
        model,
        params,
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


def outcomes(
    parts: Components, prompts: Prompts, rollouts: Rollouts
) -> reward.Verdicts:
    """`[..., N]` outcomes of completions; leading axes, as of seeds, are kept.

    A host verifier gets numpy arrays, and gives the outcomes of the completions that
    this process grades.
    """
    if not parts.task.on_device:
        return reward.on_host(parts.task, prompts, grading.own(rollouts))
    grade = _on_device(parts, rollouts.prompt.ndim - 1)
    outcome = np.asarray(peers.fetch(grade(prompts, rollouts)))
    return reward.Verdicts(outcome, Counter())


@lru_cache(maxsize=1)
def _on_device(parts: Components, axes: int) -> Callable[[Prompts, Rollouts], Any]:
    """The task's verifier, jitted, under so many leading axes; kept for the next one.

    Every evaluation of a run calls it, with samples and with greedy completions.
    """
    grade = jax.jit(partial(reward.on_device, parts.task))
    for _ in range(axes):
        grade = jax.vmap(grade)
    return grade


def pass_rates(
    parts: Components, rollouts: Rollouts, outcome: np.ndarray
) -> np.ndarray:
    """`[..., E]` pass rate per prompt over the completions that were graded.

    NaN where none was. Leading axes, as of seeds, are kept.
    """
    each = _by_prompt(parts, rollouts, outcome)
    graded = (~np.isnan(each)).sum(-1)
    return np.where(graded, np.nansum(each, -1) / np.maximum(graded, 1), np.nan)


def pass_at_k(
    parts: Components, rollouts: Rollouts, outcome: np.ndarray
) -> dict[str, np.ndarray]:
    """`eval/pass_at_K`, K = `evaluation.k`: mean over prompts of the chance that one
    of K completions is right.

    The estimate is unbiased (`attempts.pass_at_k`); prompts of which fewer than K were
    graded are left out, and it is NaN if all are.

    Args:
        parts: components of the run.
        rollouts: of `draw`, sampled.
        outcome: `[..., N]` float, NaN where missing; right above `RIGHT`.

    Returns:
        `[...]` float64; nothing if `evaluation.k` is 0.
    """
    k = parts.config.evaluation.k
    if not k:
        return {}
    each = _by_prompt(parts, rollouts, outcome)
    chance = attempts.pass_at_k((each > RIGHT).sum(-1), (~np.isnan(each)).sum(-1), k)
    known = ~np.isnan(chance)
    total = np.where(known, chance, 0.0).sum(-1)
    count = np.where(known.any(-1), known.sum(-1), np.nan)
    return {f"eval/pass_at_{k}": total / count}


def _by_prompt(
    parts: Components, rollouts: Rollouts, outcome: np.ndarray
) -> np.ndarray:
    """`[..., E, S]` outcomes of the S completions of each prompt, NaN where missing."""
    # Every seed draws the same rows.
    prompt, slot = (
        np.asarray(of).reshape(-1, outcome.shape[-1])[0]
        for of in (rollouts.prompt, rollouts.slot)
    )
    shape = (parts.config.evaluation.prompts, int(slot.max()) + 1)
    each = np.full((*outcome.shape[:-1], *shape), np.nan)
    each[..., prompt, slot] = outcome
    return each
