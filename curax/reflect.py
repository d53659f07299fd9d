"""Reward without a verifier: how likely a completion makes the reference answer. R3.

Each completion's thought is put before the reference answer, whose Y tokens are scored:
`logp [..., G, Y]`. What is made of these arrays is here: weights of tokens by how much
their log-probs differ over the completions of a group, the reward, rubrics, and which
prompts are worth training on. Who scores, and from what, is the caller's business.
"""

import math
from collections.abc import Callable
from typing import Annotated

import chex
import flax.struct
import jax
import jax.numpy as jnp
import numpy as np

from curax.arrays import checks, masked
from curax.settings.config_types import Fraction, Magnitude, Positive
from curax.types import BoolG, BoolY, Float, FloatG, FloatGY, FloatY, Int1, IntG

Scores = Annotated[jax.Array, "[F] float"]  # of candidates
Kept = Annotated[jax.Array, "[F] bool"]
Scalar = Annotated[jax.Array, "[] float"]


@flax.struct.dataclass(kw_only=True)
class Spread:
    """How log-probs of each reference token differ over completions of a group."""

    variance: FloatY  # [..., Y] float32, nats^2, over n and not n - 1; clipped below
    count: Float  # [...] float32, n, completions behind it


@flax.struct.dataclass(kw_only=True)
class Certainty:
    """R3 of each completion, and what it was made with."""

    value: jax.Array  # [..., G] float32, nats per token; 0 where there is none
    weight: jax.Array  # [..., G, Y] float32, adds up to 1 over the mask
    spread: jax.Array  # [..., Y] float32, nats, sigma over all completions
    flat: jax.Array  # [...] bool, no token had any weight: `mean` was used


@checks.contract()
def mean(spread: Spread, mask: BoolY) -> FloatY:
    """Every token counts the same: g = 1. R3 is then the mean log-prob, DRO-Aggr.

    In long references the few tokens that depend on the thought drown in noise.

    Args:
        spread: over the completions of the group; here and below not normalised, the
            weight of a token is g_j / sum_k g_k.
        mask: `[..., Y]` bool, tokens of the reference.

    Returns:
        `[..., Y]` float32, g, at least 0; 0 where `mask` is False.

    Raises:
        AssertionError: while tracing, if shapes differ or `mask` is not bool.

    References:
        Xu et al. 2025, "Direct Reasoning Optimization: LLMs Can Reward And Refine
        Their Own Reasoning for Open-Ended Tasks", arXiv:2506.13351, the aggregate
        certainty.
    """
    return jnp.where(mask, 1.0, 0.0)


@checks.contract()
def sigma(spread: Spread, mask: BoolY) -> FloatY:
    """Tokens count by their standard deviation: g = sigma.

    The nearest to what the paper says, which is that weights grow with sigma. With many
    tokens, most of the weight is on noise.

    Args:
        spread: as `mean`.
        mask: as `mean`.

    Returns:
        `[..., Y]` float32, g in nats; 0 where `mask` is False.

    Raises:
        AssertionError: as `mean`.

    References:
        arXiv:2506.13351, the reasoning reflection reward.
    """
    return jnp.where(mask, jnp.sqrt(spread.variance), 0.0)


@checks.contract()
def variance(spread: Spread, mask: BoolY) -> FloatY:
    """Tokens count by their variance: g = sigma^2.

    Args:
        spread: as `mean`.
        mask: as `mean`.

    Returns:
        `[..., Y]` float32, g in nats^2; 0 where `mask` is False.

    Raises:
        AssertionError: as `mean`.

    References:
        arXiv:2506.13351, where version 3 selects by the variance over completions.
    """
    return jnp.where(mask, spread.variance, 0.0)


@checks.contract()
def denoised(
    spread: Spread, mask: BoolY, *, floor: Magnitude | jax.Array = 3.0
) -> FloatY:
    """Tokens count by the variance that is above the noise of the reference.

        g = max(0, s^2 - s0^2 (1 + floor sqrt(2 / (n - 1))))

    with s^2 = sigma^2 n / (n - 1) and s0^2 its median over the tokens. Of Gaussian
    noise with 8, 16 and 32 completions 2.1%, 1.2% and 0.7% of the tokens are left. It
    takes for noise what most tokens do: where all of them depend on the thought, and in
    a reference of a single token, nothing is left, and R3 is that of `mean`.

    Args:
        spread: as `mean`; fewer than 2 completions give 0.
        mask: as `mean`.
        floor: standard errors of s^2 that count as noise, at least 0.

    Returns:
        `[..., Y]` float32, g in nats^2; 0 where `mask` is False.

    Raises:
        AssertionError: as `mean`.

    References:
        Ours, for the weights that arXiv:2506.13351 leaves open.
    """
    degrees = jnp.maximum(spread.count - 1.0, 1.0)[..., None]
    square = spread.variance * (degrees + 1.0) / degrees
    lower, upper = middle(square, mask)
    noise = 0.5 * (lower + upper)[..., None]
    above = square - noise * (1.0 + floor * jnp.sqrt(2.0 / degrees))
    return jnp.where(mask, jnp.maximum(above, 0.0), 0.0)


@checks.contract()
def scored(logp: FloatGY, exists: BoolG, mask: BoolY) -> BoolG:
    """Completions that can be compared by their log-probs of the reference.

    A completion with a log-prob that is not finite is dropped, and so is all of a group
    with fewer than 2 left, or without a reference. What was dropped is the difference
    to `exists`. Log-probs of a baseline can be asked about in the same way.

    Args:
        logp: `[..., G, Y]` float, nats; may be anything where nothing counts.
        exists: `[..., G]` bool, completions with a thought that ended.
        mask: `[..., Y]` bool, tokens of the reference.

    Returns:
        `[..., G]` bool, a subset of `exists` with none or at least 2 of a group.

    Raises:
        AssertionError: while tracing, if shapes do not fit or dtypes are not (float,
            bool, bool).
    """
    fine = jnp.isfinite(logp) | ~mask[..., None, :]
    some = jnp.any(mask, axis=-1, keepdims=True)
    return _at_least_two(exists & jnp.all(fine, axis=-1) & some)


@checks.contract()
def certainty(
    logp: FloatGY,
    exists: BoolG,
    mask: BoolY,
    *,
    weights: Callable[[Spread, jax.Array], jax.Array],
    clip_nats: Positive | jax.Array = 8.0,
    leave_one_out: bool = False,
    baseline: FloatY | FloatGY | None = None,
) -> Certainty:
    """How certain each completion makes the reference, where completions differ. R3.

        R_i = sum_j w_j (logp_ij - baseline_ij),
        w_j = g_j / sum_k g_k,  g = weights(variance_i max(logp_ij, -clip_nats), mask)

    Clipping keeps one improbable token of one completion from taking all of the weight;
    the sum has log-probs as they are. If no token has any weight the group is flat, and
    the weights are those of `mean`. Completions that are all alike are exactly flat,
    and have the same R3.

    A baseline `[..., Y]` moves all of a group alike and cancels in every centred
    advantage: it matters where R3 is clipped or compared between prompts, and under
    `leave_one_out`, where weights are a completion's own.

    With `leave_one_out` w_j is taken over the other completions: R_i is then a fixed
    linear function of logp_i given these, as the policy gradient asks of a reward. Each
    completion can be flat by itself; with 2 in a group all are.

    Args:
        logp: `[..., G, Y]` float, nats, of the reference behind each completion's
            thought; finite where `exists` and `mask`, see `scored`.
        exists: `[..., G]` bool, completions that are compared.
        mask: `[..., Y]` bool, tokens of the reference, its end included.
        weights: g, one of `mean`, `sigma`, `variance` and `denoised`.
        clip_nats: log-probs below -clip_nats count as that in the spread, positive.
        leave_one_out: whether a completion has no say in its own weights; static.
        baseline: `[..., Y]` or `[..., G, Y]` float, nats, log-probs of the reference
            behind a masked thought, finite like `logp`; None: 0.

    Returns:
        Values, weights, spread and flatness. Weights are there for absent completions
        too; only without any reference are they 0.

    Raises:
        AssertionError: as `scored`.

    References:
        Xu et al. 2025, arXiv:2506.13351, R3 and R3 with a masked baseline. Form and
        normalisation of the weights, clipping and leave-one-out are ours.
    """
    logp = jnp.asarray(logp, jnp.float32)
    counts = exists[..., :, None] & mask[..., None, :]
    gap = logp
    if baseline is not None:
        shared = jnp.ndim(baseline) == mask.ndim
        level = jnp.asarray(baseline, jnp.float32)
        gap = logp - (level[..., None, :] if shared else level)

    whole = spread_of(logp, exists, mask, clip_nats)
    if leave_one_out:

        def without(one: jax.Array) -> Spread:
            others = exists & ~jnp.broadcast_to(one, exists.shape)
            return spread_of(logp, others, mask, clip_nats)

        each = jnp.eye(exists.shape[-1], dtype=bool)
        axes = Spread(variance=-2, count=-1)  # pyright: ignore[reportArgumentType]
        spread = jax.vmap(without, out_axes=axes)(each)
        among = jnp.broadcast_to(mask[..., None, :], logp.shape)
        weight, empty = _shares(weights, spread, among)
        flat = jnp.all(empty | ~exists, axis=-1)
    else:
        weight, flat = _shares(weights, whole, mask)
        weight = jnp.broadcast_to(weight[..., None, :], logp.shape)
    value = masked.total(weight * gap, counts)
    deviation = jnp.sqrt(whole.variance)
    return Certainty(value=value, weight=weight, spread=deviation, flat=flat)


def no_thought(
    tokens: jax.Array, length: jax.Array, *, delimiter: tuple[int, ...], pad: int
) -> tuple[jax.Array, jax.Array]:
    """The masked thought of a baseline: none at all, the same for the whole group.

    Args:
        tokens: `[N, T]` int32, completions.
        length: `[N]` int32 tokens of their thoughts, the delimiter included; 0: none.
        delimiter: tokens that end a thought; static.
        pad: not read.

    Returns:
        `[N, T]` int32, the delimiter and whatever; `[N]` int32, its length.

    References:
        arXiv:2506.13351, R3 with a masked baseline; what masks is not published.
    """
    end = jnp.asarray(delimiter, tokens.dtype)
    return tokens.at[:, : end.shape[0]].set(end), jnp.full_like(length, end.shape[0])


def blank_thought(
    tokens: jax.Array, length: jax.Array, *, delimiter: tuple[int, ...], pad: int
) -> tuple[jax.Array, jax.Array]:
    """The masked thought of a baseline: as long as the completion's own, and blank.

    The baseline differs within a group by length alone, so it takes from the reward
    what a long thought brings by its length. Arguments as `no_thought`; `pad` stands
    for every token of the thought but the delimiter.
    """
    column = jnp.arange(tokens.shape[-1], dtype=jnp.int32)[None]
    inside = column < length[:, None] - len(delimiter)
    return jnp.where(inside, jnp.asarray(pad, tokens.dtype), tokens), length


@checks.contract()
def length_term(
    length: IntG,
    wanted: IntG | Int1,
    *,
    slope: Magnitude | jax.Array = 0.5,
    least: float | jax.Array = -1.0,
) -> FloatG:
    """Reward of an answer for being as long as the reference.

        max(least, 1 - slope |wanted - length| / wanted)

    R3 never reads the answer that was given, which may grow without end.

    Args:
        length: `[..., G]` int, tokens of each answer.
        wanted: `[..., G]` or `[..., 1]` int, tokens of the reference; 0 counts as 1.
        slope: what is lost where an answer is missing, or twice as long; at least 0.
        least: smallest reward; the paper has none.

    Returns:
        `[..., G]` float32 in [least, 1].

    Raises:
        AssertionError: while tracing, if ranks differ or dtypes are not int.

    References:
        arXiv:2506.13351, the length reward. Its slopes are not published.
    """
    wanted = jnp.maximum(jnp.asarray(wanted, jnp.float32), 1.0)
    away = jnp.abs(wanted - jnp.asarray(length, jnp.float32)) / wanted
    return jnp.maximum(1.0 - slope * away, least)


@checks.contract()
def drop(reward: FloatG, exists: BoolG, fit: BoolG) -> tuple[FloatG, BoolG]:
    """Completions with an unfit answer leave their group.

    The others are compared among themselves, and a single one with nothing. Unfit
    answers are not pushed down: `floor` does that.

    Args:
        reward: `[..., G]` float, R3 and what was added to it, nats per token.
        exists: `[..., G]` bool, completions that are compared.
        fit: `[..., G]` bool, True where the answer meets the rubric.

    Returns:
        `[..., G]` float32, the reward, 0 where nothing is left; `[..., G]` bool, what
        is left: none or at least 2 of a group.

    Raises:
        AssertionError: while tracing, if shapes differ or dtypes are not (float, bool,
            bool).

    References:
        arXiv:2506.13351, versions 2 and 3, rubrics as constraints. Accounts differ on
        what is dropped, the completion or its group.
    """
    return _compared(reward, _at_least_two(exists & fit))


@checks.contract()
def floor(
    reward: FloatG, exists: BoolG, fit: BoolG, *, margin: Magnitude | jax.Array
) -> tuple[FloatG, BoolG]:
    """Completions with an unfit answer get less than any other of their group.

        r_i = min_j r_j - margin        where unfit

    So what the rubric asks for is learnt too, from groups in which some answers are
    fit: where none is, all rewards are equal.

    Args:
        reward: as `drop`.
        exists: as `drop`.
        fit: as `drop`.
        margin: how far below the smallest reward of the group, its unfit ones included;
            nats per token, at least 0.

    Returns:
        As `drop`; `exists` is not changed, but where a completion is alone.

    Raises:
        AssertionError: as `drop`.

    References:
        As `drop`; the floor is ours.
    """
    least, _ = masked.extent(reward, exists, keepdims=True)
    reward = jnp.where(fit, jnp.asarray(reward, jnp.float32), least - margin)
    return _compared(reward, _at_least_two(exists))


@checks.contract(ranks="hardest")
def percentile(
    hard: Scores,
    spread: Scores,
    null: Scores,
    state: Scalar,
    *,
    flattest: Fraction,
    hardest: float | jax.Array | None = None,
) -> tuple[Kept, Scalar]:
    """Keep the prompts with the largest spread, if they are not too hard.

        keep = (hard <= hardest) and not among the floor(flattest F) smallest spreads

    Both are asked of every candidate, so that a harder one never admits another. A
    candidate without a finite `hard` and `spread` could not be measured: none of the
    rules keeps it, and F does not count it. Of equal spreads the later are flatter.

    Args:
        hard: `[F]` float32, `worst_rank` of each candidate.
        spread: `[F]` float32, its `flatness`, or the standard deviation of its R3;
            nats.
        null: `[F]` float32 in [0, 1], its `null_chance`; not read.
        state: `[]` float32, what the rule remembers; begins as NaN. Not changed.
        flattest: share of the candidates that is dropped, in [0, 1], read to 6
            decimals; static.
        hardest: largest `hard` of a prompt that is kept; None: any.

    Returns:
        `[F]` bool, candidates that stay; `[]` float32, the state.

    Raises:
        AssertionError: while tracing, if shapes or dtypes are not these.

    References:
        arXiv:2506.13351, the query filter. Share and bound are not published.
    """
    known, easy = _known(hard, spread, hardest)
    size = spread.shape[-1]
    dropped = jnp.asarray(multiples(flattest, size, math.floor))[jnp.sum(known)]
    order = jnp.argsort(jnp.where(known, spread, -jnp.inf), descending=True)
    place = jnp.argsort(order)
    return known & easy & (place < jnp.sum(known) - dropped), state


@checks.contract(remembers=True, ranks="hardest")
def ema(
    hard: Scores,
    spread: Scores,
    null: Scores,
    state: Scalar,
    *,
    ratio: Fraction | jax.Array = 0.99,
    factor: Magnitude | jax.Array = 0.5,
    hardest: float | jax.Array | None = None,
) -> tuple[Kept, Scalar]:
    """Keep the prompts whose spread is not far below what it was on average.

        keep = (hard <= hardest) and (spread >= factor state),
        state <- ratio state + (1 - ratio) mean spread

    The state is that of the selections before; the first keeps all, and sets it.

    Args:
        hard: as `percentile`.
        spread: as `percentile`.
        null: as `percentile`; not read.
        state: `[]` float32, running mean of the spread, nats; NaN at first.
        ratio: what is left of it at each selection, in [0, 1).
        factor: least spread that is kept, in units of the state.
        hardest: as `percentile`.

    Returns:
        As `percentile`.

    Raises:
        AssertionError: as `percentile`.

    References:
        Yu et al. 2025, "RLPR: Extrapolating RLVR to General Domains without Verifiers",
        arXiv:2506.18254; its code filters by the deviation of rewards with a factor of
        0.5 to 1, from the 11th step on.
    """
    known, easy = _known(hard, spread, hardest)
    first = jnp.isnan(state)
    keep = known & easy & (first | (spread >= factor * state))
    now = masked.mean(spread, known)
    after = jnp.where(first, now, ratio * state + (1.0 - ratio) * now)
    return keep, jnp.where(jnp.any(known), after, state)


@checks.contract(ranks="hardest")
def null_test(
    hard: Scores,
    spread: Scores,
    null: Scores,
    state: Scalar,
    *,
    level: Fraction | jax.Array = 0.05,
    hardest: float | jax.Array | None = None,
) -> tuple[Kept, Scalar]:
    """Keep the prompts with a token that stands out more than noise makes it.

        keep = (hard <= hardest) and (null <= level)

    Of prompts that are noise alone a share of `level` is kept, however long the
    reference is.

    Args:
        hard: as `percentile`.
        spread: as `percentile`; read only for whether it is finite.
        null: as `percentile`, and read.
        state: as `percentile`.
        level: largest chance under noise of a prompt that is kept, in [0, 1].
        hardest: as `percentile`.

    Returns:
        As `percentile`.

    Raises:
        AssertionError: as `percentile`.

    References:
        Ours.
    """
    known, easy = _known(hard, spread, hardest)
    return known & easy & (null <= level), state


def spread_of(
    logp: jax.Array, exists: jax.Array, mask: jax.Array, clip_nats: float | jax.Array
) -> Spread:
    """The spread of log-probs `[..., G, Y]`; arguments as `certainty`."""
    counts = exists[..., :, None] & mask[..., None, :]
    clipped = jnp.maximum(jnp.asarray(logp, jnp.float32), -clip_nats)
    low, _ = masked.extent(clipped, counts, axis=-2, keepdims=True)
    # Taken from the smallest, equal ones have exactly no variance.
    square = masked.variance(clipped - low, counts, axis=-2)
    return Spread(variance=square, count=masked.total(exists, exists))


def middle(values: jax.Array, mask: jax.Array) -> tuple[jax.Array, jax.Array]:
    """`[...]`, the two of the values `[..., Y]` in the middle, the lower one first.

    Both are the median of an odd number of values that count; 0 where none does.
    """
    order, count = jnp.sort(jnp.where(mask, values, jnp.inf), -1), jnp.sum(mask, -1)

    def at(place: jax.Array) -> jax.Array:
        place = jnp.maximum(place, 0)[..., None]
        found = jnp.take_along_axis(order, place, axis=-1)[..., 0]
        return jnp.where(jnp.isfinite(found), found, 0.0)

    return at((count - 1) // 2), at(count // 2)


def multiples(share: float, most: int, rounded: Callable[[float], int]) -> np.ndarray:
    """`[most + 1]` int32: share n for n = 0 .. most, as decimals make it."""
    values = [rounded(round(share * n, 6)) for n in range(most + 1)]
    return np.asarray(values, np.int32)


def _shares(
    weights: Callable[[Spread, jax.Array], jax.Array], spread: Spread, mask: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """`[..., Y]` weights that add up to 1, and `[...]` whether `mean` had to help."""
    given = weights(spread, mask)
    chex.assert_equal_shape([given, mask])
    empty = ~jnp.any(given > 0, axis=-1, keepdims=True)
    given = jnp.where(empty, mean(spread, mask), given)
    total = masked.total(given, mask, keepdims=True)
    return given / jnp.where(total > 0, total, 1.0), empty[..., 0]


def _at_least_two(exists: jax.Array) -> jax.Array:
    return exists & (masked.total(exists, exists, keepdims=True) > 1)


def _compared(reward: jax.Array, exists: jax.Array) -> tuple[jax.Array, jax.Array]:
    return jnp.where(exists, jnp.asarray(reward, jnp.float32), 0.0), exists


def _known(
    hard: jax.Array, spread: jax.Array, hardest: float | jax.Array | None
) -> tuple[jax.Array, jax.Array]:
    """Candidates that were measured, and those that are not too hard."""
    known = jnp.isfinite(hard) & jnp.isfinite(spread)
    return known, known if hardest is None else hard <= hardest
