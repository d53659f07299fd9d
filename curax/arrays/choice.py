"""The next token of each row: chosen by its log-probs, cut to the likeliest ones."""

import math
from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp

from curax.arrays import supports
from curax.arrays.sharding import platform
from curax.types import Rollouts

# A vocabulary of so many tokens is neither given a random number each nor sorted.
MANY = 4096
BLOCKS, FEW = 256, 16  # of tokens; fewer are cut into so many, whose last are filled up


def choose(
    key: jax.Array,
    logits: jax.Array,
    *,
    temperature: float | jax.Array = 1.0,
    top_k: int = 0,
    top_p: float | jax.Array = 1.0,
    support: bool = False,
) -> tuple[jax.Array, ...]:
    """Sampled token of each row, with its log-probs, entropy and score norm.

    Args:
        key: `[N]` PRNG keys.
        logits: `[N, V]` float32.
        temperature: divides the logits; the number 0 takes the likeliest token.
        top_k: keep the k likeliest tokens only (ties kept too); 0 keeps all.
        top_p: then keep the smallest set of likeliest tokens with this mass.
        support: give the kept set as well. It has top_k tokens at most: of ties for the
            last place those of smaller ids.

    Returns:
        Token `[N]` int32; its log-prob under what was drawn from and under the policy
        before truncation, `[N]` float32 nats; the policy's entropy, `[N]` float32 nats;
        |d logp / d logits|^2 of the policy at this temperature, `[N]` float32:

            |e_a - pi|^2 = 1 - 2 pi_a + sum_b pi_b^2

        With `support`, pi of the last one is what was drawn from, and the kept set
        `[N, ...]` follows, as `supports.packed`; the temperature is not 0.
    """
    greedy = isinstance(temperature, int | float) and temperature == 0
    z = logits if greedy else logits / temperature
    whole = not (greedy or top_k or support) and _keeps_all(top_p)
    if whole and z.shape[-1] >= MANY:
        return of_many(key, z)
    logp = jax.nn.log_softmax(z)
    chance = jnp.exp(logp)
    entropy = -jnp.sum(chance * logp, -1)
    noted = ()
    if greedy:
        token = largest(z)
        behaviour = jnp.zeros_like(entropy)
    else:
        cut = truncate(logp, top_k=top_k, top_p=top_p, ties=not support)
        token = categorical(key, cut)
        behaviour = pick(cut, token)
        if support:
            noted, chance = (supports.packed(cut, top_k=top_k),), jnp.exp(cut)
    score = score_sq_norm(pick(chance, token), jnp.sum(chance**2, -1))
    return token, behaviour, pick(logp, token), entropy, score, *noted


def of_many(key: jax.Array, z: jax.Array) -> tuple[jax.Array, ...]:
    """`choose` of logits of `MANY` tokens or more, all kept, at temperature 1.

    They are read for their maximum m, and once more for all else. With
    e_b = exp(z_b - m) and s = sum_b e_b,

        H = log s - sum_b e_b (z_b - m) / s,   sum_b pi_b^2 = sum_b e_b^2 / s^2

    A CPU sums rows fastest as they are, and e is computed there once; elsewhere no
    other array of their size is needed.
    """
    on_cpu = platform() == "cpu"
    blocks = in_blocks(z)
    rows = z if on_cpu else blocks
    axes = tuple(range(1, rows.ndim))
    most = jnp.max(rows, axes, keepdims=True)
    e = jnp.exp(rows - most)
    if on_cpu:
        e = jax.lax.optimization_barrier(e)
    mass = jnp.sum(in_blocks(e, fill=0.0) if on_cpu else e, -1)
    total = jnp.sum(mass, -1)
    mean = jnp.sum(e * (rows - most), axes) / total
    squares = jnp.sum(e**2, axes) / total**2
    token, own = of_blocks(key, mass, blocks, z.shape[-1])
    logp = own - most.reshape(-1) - jnp.log(total)
    score = score_sq_norm(jnp.exp(logp), squares)
    return token, logp, logp, jnp.log(total) - mean, score


def score_sq_norm(chance: jax.Array, squares: jax.Array) -> jax.Array:
    """1 - 2 pi_a + sum_b pi_b^2, not below 0 by rounding."""
    return jnp.maximum(1.0 - 2.0 * chance + squares, 0.0)


def categorical(key: jax.Array, logp: jax.Array) -> jax.Array:
    """Token drawn from the log-probs of each row, `[N]` int32.

    The largest of logp plus Gumbel noise; of `MANY` tokens or more, for which V random
    numbers a row take longer than all else, the inverse of the distribution function,
    in two levels of one number each: first a block of `in_blocks` by its mass, then a
    token in it. Random numbers are multiples of 2^-23, so chances of a block, and in
    it, are exact to that.

    Args:
        key: `[N]` PRNG keys.
        logp: `[N, V]` float32, normalised; -inf where a token is never drawn.
    """
    if logp.shape[-1] < MANY:
        like = {"shape": logp.shape[1:], "dtype": logp.dtype}
        return largest(logp + jax.vmap(partial(jax.random.gumbel, **like))(key))
    blocks = in_blocks(logp)
    mass = jnp.sum(jnp.exp(blocks), -1)
    return of_blocks(key, mass, blocks, logp.shape[-1])[0]


def largest(x: jax.Array) -> jax.Array:
    """First place of the largest entry of each row, `[N]` int32.

    As argmax, which reduces pairs of an entry and its place; a CPU does that without
    vector instructions, and has two reductions of numbers instead.
    """
    if platform() != "cpu":
        return jnp.argmax(x, -1).astype(jnp.int32)
    x = jax.lax.optimization_barrier(x)  # or rounded twice it might equal no maximum
    place = jax.lax.broadcasted_iota(jnp.int32, x.shape, 1)
    less = x < jnp.max(x, -1, keepdims=True)
    return jnp.min(jnp.where(less, x.shape[1], place), -1)


def in_blocks(x: jax.Array, fill: float | None = None) -> jax.Array:
    """Values of tokens `[N, V]` by block, `[N, B, W]`.

    B = gcd(V, 256), as shards of the vocabulary are cut between blocks. Where that is
    below `FEW` each is cut further, B = 256, and its last blocks are filled up, with
    the lowest number if nothing is said.
    """
    n, vocabulary = x.shape
    fill = float(jnp.finfo(x.dtype).min) if fill is None else fill
    blocks = math.gcd(vocabulary, BLOCKS)
    if blocks < FEW:
        missing = -(vocabulary // blocks) % (BLOCKS // blocks)
        x = x.reshape(n, blocks, -1)
        x = jnp.pad(x, ((0, 0), (0, 0), (0, missing)), constant_values=fill)
        blocks = BLOCKS
    return x.reshape(n, blocks, -1)


def of_blocks(
    key: jax.Array, mass: jax.Array, z: jax.Array, vocabulary: int
) -> tuple[jax.Array, jax.Array]:
    """`categorical` in two levels: token `[N]` int32, and its z `[N]`.

    Args:
        key: `[N]` PRNG keys.
        mass: `[N, B]` float32, in proportion to that of each block.
        z: `[N, B, W]` float32, log-probs up to a constant of each row.
        vocabulary: V, of `in_blocks`.
    """
    which, where = jax.vmap(partial(jax.random.uniform, shape=(2,)))(key).T
    block = inverse(mass, which)
    own = jnp.take_along_axis(z, block[:, None, None], 1)[:, 0]
    inside = inverse(jnp.exp(own - jnp.max(own, -1, keepdims=True)), where)
    cut = math.gcd(vocabulary, BLOCKS)
    each = z.shape[1] // cut
    first = block // each * (vocabulary // cut) + block % each * z.shape[-1]
    return first + inside, pick(own, inside)


def inverse(mass: jax.Array, share: jax.Array) -> jax.Array:
    """First place up to which more than a share of the mass lies, `[N]` int32.

    Never one without mass, however sums are rounded.

    Args:
        mass: `[N, K]` float32, not negative.
        share: `[N]` float32 in [0, 1).
    """
    upto = jnp.cumsum(mass, -1)
    more = upto > share[:, None] * upto[:, -1:]
    place = jnp.argmax(jnp.where(mass > 0, more.astype(jnp.int8), -1), -1)
    return place.astype(jnp.int32)


def truncate(
    logp: jax.Array, *, top_k: int, top_p: float | jax.Array, ties: bool = True
) -> jax.Array:
    """Log-probs renormalised over the top-k, then top-p, tokens; -inf elsewhere.

    Args:
        logp: `[N, V]` float32.
        top_k: as `choose`.
        top_p: as `choose`; what is as likely as the last of the set is in it too.
        ties: what is as likely as the k-th of top-k is kept too; False: k are kept, of
            equally likely ones those of smaller ids.
    """

    def keep(logp, weigh, wanted, ties=True):
        least = least_kept(logp, weigh, wanted)
        kept = logp >= least
        if not ties:
            last = logp == least
            room = wanted - jnp.sum(kept & ~last, -1, keepdims=True, dtype=jnp.int32)
            kept &= ~last | (jnp.cumsum(last, -1, dtype=jnp.int32) <= room)
        return jax.nn.log_softmax(jnp.where(kept, logp, -jnp.inf))

    if top_k:
        logp = keep(logp, jnp.ones_like, min(top_k, logp.shape[-1]), ties)
    return logp if _keeps_all(top_p) else keep(logp, jnp.exp, top_p)


def _keeps_all(top_p: float | jax.Array) -> bool:
    """Whether top-p is a number that keeps all tokens."""
    return isinstance(top_p, int | float) and top_p >= 1


def least_kept(
    logp: jax.Array,
    weigh: Callable[[jax.Array], jax.Array],
    wanted: float | jax.Array,
) -> jax.Array:
    """Log-prob of the last of the likeliest tokens that have a weight of `wanted`.

    Few tokens are sorted. Of `MANY` or more it is -t for the least t for which tokens
    with logp >= -t have that weight, found bit by bit: floats that are not negative
    have the order of their bits.

    Args:
        logp: `[N, V]` float32, at most 0.
        weigh: of log-probs: a token's chance for top-p, 1 for top-k.
        wanted: sum of weights, above 0.

    Returns:
        `[N, 1]` float32; the least of all where rounding leaves a sum below `wanted`.
    """
    if logp.shape[-1] < MANY:
        ordered = jnp.sort(logp, -1, descending=True)
        weight = weigh(ordered)
        before = jnp.cumsum(weight, -1) - weight
        last = jnp.sum(before < wanted, -1, keepdims=True) - 1
        return jnp.take_along_axis(ordered, last, -1)
    weight, bits = weigh(logp), jax.lax.bitcast_convert_type(-logp, jnp.int32)
    bits = jnp.maximum(bits, 0)  # -0.0 is 0

    def one(number, found):
        half = jnp.int32(1) << (30 - number)
        sum_ = jnp.sum(weight, -1, keepdims=True, where=bits < found + half)
        return jnp.where(sum_ < wanted, found + half, found)

    found = jax.lax.fori_loop(0, 31, one, jnp.zeros((*logp.shape[:-1], 1), jnp.int32))
    return jnp.min(jnp.where(bits <= found, logp, jnp.inf), -1, keepdims=True)


def cut_mass(rollouts: Rollouts) -> jax.Array:
    """Probability that top-k and top-p remove from the policy, `[N, T]` in [0, 1).

        1 - sum_{b kept} pi_b = 1 - pi_a / mu_a

    for mu is pi over what is kept, divided by its sum, and a is kept. 0 off the mask.
    """
    cut = -jnp.expm1(rollouts.logp_policy - rollouts.logp_behaviour)
    return jnp.where(rollouts.mask, jnp.maximum(cut, 0.0), 0.0)


def pick(values: jax.Array, index: jax.Array) -> jax.Array:
    """`values[n, index[n]]`."""
    return jnp.take_along_axis(values, index[:, None], -1)[:, 0]
