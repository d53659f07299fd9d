"""A probe of a policy: sums over the scores of many completions of some prompts.

All scores are by all trained parameters. A few of them exist at a time, and of a prompt
only sums are kept, so that memory is that of some twenty times the parameters.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from curax import score
from curax.arrays.keys import stage_key
from curax.config import Config, ConfigError
from curax.step import draw, drivers
from curax.step import mesh as meshes
from curax.step.types import Components
from curax.theory.gradient_stats import Sums
from curax.types import Contexts, TrainState

ENTRIES = 2**23  # of the scores that exist at a time


class Probe(NamedTuple):
    """Score sums of K prompts, and the weighted mean of their gradients."""

    sums: Sums  # `[3, K]`: of the first half of the completions, of the second, of all
    gradient: Any  # like params, mean over prompts of weight times estimated grad p
    weight: np.ndarray  # `[K]`
    by_bin: list[Any]  # terms of the gradient, a tree for each bin of pass rates
    bins: np.ndarray  # `[K]` int, the bin of each prompt


def check(config: Config) -> None:
    """Check that a run has right and wrong completions, and uses one device.

    Raises:
        ConfigError: in a sentence, if not.
    """
    if config.reflection:
        raise ConfigError(
            "reflection rewards by the log-prob of references, and gradients of a pass "
            "rate need right and wrong completions; name another recipe."
        )
    if meshes.make(config.mesh) is not None:
        raise ConfigError(
            "mesh spreads the run over several devices, and gradients of completions "
            "are taken on one; set mesh.data, mesh.fsdp and mesh.tensor to 1."
        )


def probe(
    parts: Components,
    state: TrainState,
    ids: np.ndarray,
    samples: int,
    *,
    drive: drivers.Hosted,
    weigh: Callable[[np.ndarray], np.ndarray] = np.ones_like,
    edges: Sequence[float] = (0.0, 1.01),
    on_progress: Callable[[int, int], None] = lambda done, total: None,
) -> Probe:
    """Draw completions of prompts, grade them, and sum up their scores.

    Args:
        parts: components of a run.
        state: its policy, at whose parameters scores are taken.
        ids: `[K]` int32, training prompts.
        samples: completions of each, even, 8 at least.
        drive: keeps the compiled programs.
        weigh: weights `[K]` of the prompts in the mean, from their shares of right
            ones.
        edges: of bins of pass rates, rising, one more than bins; a prompt's bin is that
            of the share of right ones in the first half of its completions.
        on_progress: called with the number of prompts done, and of all.
    """
    contexts, rows = drawn(parts, state, ids, samples, drive)
    weight = np.asarray(weigh(shares(rows[2])), np.float64)
    bins = np.digitize(shares(rows[2][:, : samples // 2]), edges) - 1
    totals = [optax.tree.zeros_like(state.params) for _ in edges[1:]]
    found = []
    for k in range(len(ids)):
        context = Contexts(
            tokens=contexts.tokens[k : k + 1], mask=contexts.mask[k : k + 1]
        )
        share = np.float32(weight[k] / len(ids))
        own, b = [part[k] for part in rows], bins[k]
        totals[b], sums = drive.call(
            add_scores, parts, state, totals[b], share, context, *own
        )
        found.append(sums)
        on_progress(k + 1, len(ids))
    each = jax.device_get(found)
    sums = Sums(*(np.stack(x, -1).astype(np.float64) for x in zip(*each, strict=True)))
    whole = jax.tree.map(lambda *x: sum(x[1:], x[0]), *totals)
    return Probe(sums, whole, weight, totals, bins)


def shares(outcome: np.ndarray) -> np.ndarray:
    """`[K]` pass rates from outcomes `[K, n]`; 0 where all are missing."""
    count = np.maximum(np.sum(~np.isnan(outcome), -1), 1)
    return np.nansum(outcome, -1) / count


def drawn(
    parts: Components,
    state: TrainState,
    ids: np.ndarray,
    samples: int,
    drive: drivers.Hosted,
) -> tuple[Contexts, tuple[np.ndarray, ...]]:
    """Drawn contexts `[K, P]`; tokens `[K, n, T]`, their mask, and outcomes `[K, n]`.

    Where a step notes kept sets, these `[K, n, T, S]` too.

    About as many completions are drawn at a time as in a step of the run.
    """
    size = min(max(parts.rows // samples, 1), len(ids))
    key = stage_key(state.seed, state.step, "probe")
    found = []
    for number, start in enumerate(range(0, len(ids), size)):
        some = np.resize(ids[start : start + size], size).astype(np.int32)
        prompts = drive.call_task(draw.prompts_of, parts, some)
        own = jax.random.fold_in(key, number)
        request = draw.plain(prompts, samples, own, draw.to_train(parts))
        graded = drive.draw_and_grade(parts, state, request)
        rollouts = graded.rollouts
        given = rollouts.tokens, rollouts.mask, graded.outcome
        if rollouts.support is not None:
            given += (rollouts.support,)
        grid = [np.asarray(x).reshape(size, samples, *x.shape[1:]) for x in given]
        shown = np.asarray(request.contexts.tokens), np.asarray(request.contexts.mask)
        found.append((*shown, *grid))
    tokens, mask, *rows = (
        np.concatenate(x)[: len(ids)] for x in zip(*found, strict=True)
    )
    contexts = Contexts(tokens=jnp.asarray(tokens), mask=jnp.asarray(mask))
    return contexts, tuple(rows)


def add_scores(
    parts: Components,
    state: TrainState,
    total: Any,
    share: jax.Array,
    context: Contexts,
    tokens: jax.Array,
    mask: jax.Array,
    outcome: jax.Array,
    support: jax.Array | None = None,
) -> tuple[Any, tuple[jax.Array, ...]]:
    """Sums of one prompt, and the total with its gradient added.

    Args:
        parts: components of the run.
        state: policy.
        total: like params.
        share: `[]` of the prompt's gradient in the total.
        context: `[1, P]`.
        tokens: `[n, T]` int32.
        mask: `[n, T]` bool.
        outcome: `[n]` float32, NaN where missing: as if it had not been drawn.
        support: `[n, T, S]`, kept sets within which scores are; None: all tokens.

    Returns:
        The total; fields of `Sums`, `[3]`.
    """
    model = draw.policy(parts, state)
    exists, n = ~jnp.isnan(outcome), outcome.shape[0]
    r = jnp.where(exists, outcome, 0.0)
    half = (jnp.arange(n) * 2 // n)[None] == jnp.arange(2)[:, None]
    half = (half & exists[None]).astype(jnp.float32)  # [2, n], 0 where missing
    power = jnp.stack([jnp.ones_like(r), r, r**2])
    factor = half[:, None] * power[None]  # [2, 3, n]

    def logp(params, tokens, mask, support):
        return score.completion_logp(
            model,
            params,
            context,
            tokens[None],
            mask[None],
            temperature=parts.config.sampling.temperature,
            token_chunk=parts.config.update.token_chunk,
            support=None if support is None else support[None],
        )

    def add(sums, rows):
        *given, own = rows
        scores = jax.vmap(jax.grad(logp), (None, 0, 0, 0))(state.params, *given)
        scores = jax.tree.map(lambda x: x.astype(jnp.float32), scores)
        sums = jax.tree.map(
            lambda a, x: a + jnp.einsum("nhk,n...->hk...", own, x, precision="highest"),
            sums,
            scores,
        )
        squares = [jnp.sum(x**2, range(1, x.ndim)) for x in jax.tree.leaves(scores)]
        return sums, sum(squares, jnp.zeros(own.shape[0]))

    parameters = sum(leaf.size for leaf in jax.tree.leaves(state.params))
    most = max(ENTRIES // parameters, 1)
    size = max(k for k in range(1, n + 1) if n % k == 0 and k <= most)
    rows = tokens, mask & exists[:, None], support, jnp.moveaxis(factor, -1, 0)
    rows = jax.tree.map(lambda x: x.reshape(n // size, size, *x.shape[1:]), rows)
    start = jax.tree.map(lambda x: jnp.zeros((2, 3, *x.shape)), state.params)
    sums, square = jax.lax.scan(add, start, rows)
    sums = jax.tree.map(lambda x: jnp.concatenate([x, x.sum(0, keepdims=True)]), sums)
    products = (
        jnp.einsum("hi...,hj...->hij", x, x, precision="highest")
        for x in jax.tree.leaves(sums)
    )
    gram = sum(products, jnp.zeros((3, 3, 3)))
    square, tokens_of = square.reshape(n), jnp.sum(mask, -1, dtype=jnp.float32)
    each = jnp.ones_like(r), tokens_of, r, r**2, square, r * square, r**2 * square
    halves = jnp.einsum("fn,hn->fh", jnp.stack(each), half, precision="highest")
    fields = jnp.concatenate([halves, halves.sum(-1, keepdims=True)], -1)
    count, solved = fields[0, 2], fields[2, 2]
    rate = solved / jnp.maximum(count, 1)
    own = jax.tree.map(lambda x: x[2, 1] - rate * x[2, 0], sums)
    scale = share / jnp.maximum(count - 1, 1)
    total = jax.tree.map(lambda a, x: a + (scale * x).astype(a.dtype), total, own)
    pairs = (gram[:, i, j] for i, j in ((0, 0), (1, 1), (0, 1), (0, 2)))
    return total, (*fields, *pairs)
