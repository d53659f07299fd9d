"""Candidates: what is measured of prompts before they train, and a pool of those kept.

How hard a reference is, and how far completions differ in it: by these the rules of
`reflect`, such as `percentile`, keep prompts.
"""

import math
from typing import Annotated

import chex
import jax
import jax.numpy as jnp
import numpy as np
from jax.scipy.special import gammainc, gammaincc

from curax import reflect
from curax.arrays import checks, masked
from curax.reflect import Kept
from curax.types import BoolG, BoolY, Float, FloatGY, IntGY

_NODES = 64  # of the integral in `null_chance`; more change its fifth digit at most

CandidateIds = Annotated[jax.Array, "[F] int"]
Ids = Annotated[jax.Array, "[P] int"]


@checks.contract()
def worst_rank(rank: IntGY, exists: BoolG, mask: BoolY, *, share: float = 0.2) -> Float:
    """How hard a prompt is: the worst ranks of the reference, after the best thought.

        min_i mean of the ceil(share T) largest rank_ij,  T tokens of the reference

    Args:
        rank: `[..., G, Y]` int, place of each reference token among all tokens, sorted
            by probability: 1 is the likeliest.
        exists: `[..., G]` bool, completions that are compared.
        mask: `[..., Y]` bool, tokens of the reference.
        share: of the reference that is looked at, one token at least; in [0, 1], read
            to 6 decimals; static.

    Returns:
        `[...]` float32, at least 1; inf without completions or without a reference.

    Raises:
        AssertionError: while tracing, if shapes do not fit or dtypes are not (int,
            bool, bool).

    References:
        arXiv:2506.13351, the query filter. Its share and its bound are not published.
    """
    width = rank.shape[-1]
    table = jnp.asarray(np.maximum(reflect.multiples(share, width, math.ceil), 1))
    worst = table[jnp.sum(mask, axis=-1)][..., None, None]
    order = jnp.sort(jnp.where(mask[..., None, :], rank, 0), -1, descending=True)
    taken = jnp.arange(width).reshape(*(1,) * (rank.ndim - 1), -1) < worst
    taken = jnp.broadcast_to(taken, rank.shape)
    hard = masked.mean(order, taken)
    some = exists & jnp.any(mask, axis=-1, keepdims=True)
    return jnp.min(hard, axis=-1, where=some, initial=jnp.inf)


@checks.contract()
def flatness(
    logp: FloatGY, exists: BoolG, mask: BoolY, *, clip_nats: float | jax.Array = 8.0
) -> Float:
    """The largest spread of a token: max_j sigma_j. Small where thoughts do not matter.

    Noise alone makes it larger the longer the reference is, by a third from 5 tokens to
    600 with 16 completions. The standard deviation of R3 and `null_chance` do not.

    Args:
        logp: as `reflect.certainty`.
        exists: as `reflect.certainty`.
        mask: as `reflect.certainty`.
        clip_nats: as `reflect.certainty`.

    Returns:
        `[...]` float32, nats; 0 with fewer than 2 completions or without a reference.

    Raises:
        AssertionError: as `reflect.certainty`.

    References:
        arXiv:2506.13351, the query filter.
    """
    square = reflect.spread_of(logp, exists, mask, clip_nats).variance
    return jnp.sqrt(jnp.max(square, axis=-1, where=mask, initial=0.0))


@checks.contract()
def null_chance(
    logp: FloatGY, exists: BoolG, mask: BoolY, *, clip_nats: float | jax.Array = 8.0
) -> Float:
    """The chance that noise alone makes one token stand out as much as it does.

        P(max_j s_j^2 / s0^2 >= what was seen),  s0^2 the k-th smallest s_j^2,
        k = ceil(T / 2),  (n - 1) s_j^2 / v ~ chi^2(n - 1), independent, any v

    For an odd number T of tokens s0^2 is their median, for an even one the lower of the
    two in the middle. The law of the ratio is exact, with s0^2 as random as it is:
    given s0^2, the T - k variances above it are independent draws of chi^2 above that,

        P(ratio < x) = E[(1 - S(x s0^2) / S(s0^2))^(T - k)],  S(u) = P(chi^2 >= u),

    and F(s0^2) = 1 - S(s0^2) is a draw of Beta(k, T - k + 1); the mean is an integral
    over log s0^2, by the trapezoid rule. So under noise this is uniform on [0, 1],
    whatever T and n are. Tokens whose noise differs in size pass for signal.

    Args:
        logp: as `reflect.certainty`.
        exists: as `reflect.certainty`.
        mask: as `reflect.certainty`.
        clip_nats: as `reflect.certainty`.

    Returns:
        `[...]` float32 in [0, 1]; 1 where there is nothing to compare: with fewer than
        2 completions or tokens, or without any spread.

    Raises:
        AssertionError: as `reflect.certainty`.

    References:
        Ours, for the cut by `flatness` in arXiv:2506.13351.
    """
    spread = reflect.spread_of(logp, exists, mask, clip_nats)
    tokens, (noise, _) = jnp.sum(mask, -1), reflect.middle(spread.variance, mask)
    largest = jnp.max(spread.variance, axis=-1, where=mask, initial=0.0)
    able = (tokens > 1) & (spread.count > 1) & (largest > 0)
    ratio = jnp.where(noise > 0, largest / jnp.where(noise > 0, noise, 1.0), 1.0)

    shape = jnp.where(able, 0.5 * (spread.count - 1.0), 1.0)[..., None]
    n = jnp.where(able, tokens, 2).astype(jnp.float32)[..., None]
    k = jnp.ceil(0.5 * n)
    # log of the median of Gamma(shape), the width of its estimate, and the left tail,
    # where the density of log s0^2 falls like exp(shape k log s0^2).
    centre = jnp.log(shape) + 3.0 * jnp.log1p(-1.0 / (9.0 * shape))
    width = 1.25 / jnp.sqrt(shape * n)
    low, high = 6.0 * width + 18.0 / (shape * k), 8.0 * width
    nodes = jnp.linspace(0.0, 1.0, _NODES).reshape(*(1,) * mask[..., 0].ndim, -1)
    at = centre - low + nodes * (low + high)
    u, a = jnp.exp(at), jnp.broadcast_to(shape, at.shape)
    tiny = jnp.finfo(jnp.float32).tiny
    above = jnp.maximum(gammaincc(a, u), tiny)
    density = (k - 1.0) * jnp.log(jnp.maximum(gammainc(a, u), tiny))
    density += (n - k) * jnp.log(above) + a * at - u
    density = jax.nn.softmax(density, axis=-1)
    beyond = jnp.minimum(gammaincc(a, ratio[..., None] * u) / above, 1.0)
    chance = -jnp.sum(density * jnp.expm1((n - k) * jnp.log1p(-beyond)), axis=-1)
    chance = jnp.where(noise > 0, jnp.clip(chance, 0.0, 1.0), 0.0)
    return jnp.where(able, chance, 1.0)


@checks.contract()
def pool(
    keep: Kept, before: Ids, ids: CandidateIds, *, count: int, carried: int
) -> jax.Array:
    """The prompts of the next pool: candidates that were kept, then some of the last.

    Kept candidates come in their order, and again from the first one where they are too
    few; if none was kept, all candidates count as kept. Behind them stand the first of
    the pool before, which were new in it as long as `carried` is at most half of it: no
    prompt is carried twice in a row.

    Args:
        keep: `[F]` bool, candidates that stay.
        before: `[P]` int32, ids of the pool before, P at least `carried`; below 0:
            there was none, and all are taken of the candidates.
        ids: `[F]` int32, ids of the candidates, at least one.
        count: size of the pool; static.
        carried: how many of them come from the pool before, at most `count`; static.

    Returns:
        `[count]` int32, ids.

    Raises:
        AssertionError: while tracing, if shapes, dtypes or counts are not these.

    References:
        arXiv:2506.13351 carries a tenth of the training set from filter to filter.
    """
    chex.assert_scalar_in(carried, 0, min(count, before.shape[0]))
    taken = keep | ~jnp.any(keep)
    order = jnp.argsort(~taken)  # stable: those taken stand first, in their order
    place = jnp.arange(count)
    new = ids[order[place % jnp.sum(taken)]]
    if not carried:
        return new
    own = place - (count - carried)
    old = before[jnp.maximum(own, 0)]
    return jnp.where((own >= 0) & (old >= 0), old, new)
