"""Kept sets: the tokens that each token was drawn from, in as few bytes as it takes.

    ids    [..., k] int32, likeliest first, -1 where fewer are kept    if 0 < k < W
    bits   [..., W] uint32, W = ceil(V / 32)                           else

k is that of top-k and V the vocabulary. Token v is bit v // W of word v % W, so that
what is unpacked is 32 pieces of W tokens, one after the other.
"""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

BITS = 32


def shape(vocab: int, top_k: int) -> jax.ShapeDtypeStruct:
    """Shape and dtype of the kept set of one token.

    Args:
        vocab: V.
        top_k: k, the most tokens that are kept; 0: all may be.
    """
    words = -(-vocab // BITS)
    if 0 < top_k < words:
        return jax.ShapeDtypeStruct((top_k,), jnp.int32)
    return jax.ShapeDtypeStruct((words,), jnp.uint32)


def most(like: jax.ShapeDtypeStruct, vocab: int) -> int:
    """The most tokens that a kept set of this shape can hold."""
    return like.shape[0] if like.dtype == jnp.int32 else vocab


def packed(logp: jax.Array, *, top_k: int) -> jax.Array:
    """Kept sets of the tokens that can be drawn, `[..., k]` or `[..., W]`.

    Args:
        logp: `[..., V]` float32, -inf where a token is cut off, which all but k are.
        top_k: k; 0: any number is kept.
    """
    *lead, vocab = logp.shape
    how = shape(vocab, top_k)
    if how.dtype == jnp.int32:
        own, ids = jax.lax.top_k(logp, top_k)
        return jnp.where(own > -jnp.inf, ids.astype(jnp.int32), -1)
    words = how.shape[0]
    behind = ((0, 0),) * len(lead) + ((0, BITS * words - vocab),)
    kept = jnp.pad(logp > -jnp.inf, behind).reshape(*lead, BITS, words)
    place = jnp.arange(BITS, dtype=jnp.uint32)[:, None]
    place = place.reshape(*(1,) * len(lead), BITS, 1)
    return jnp.sum(kept.astype(jnp.uint32) << place, -2, dtype=jnp.uint32)


def of_ids(kept: Sequence[Sequence[int]], like: jax.ShapeDtypeStruct) -> np.ndarray:
    """Kept sets given as lists of ids, `[T, k]` or `[T, W]`, on the host.

    Args:
        kept: T lists in any order, of at most k ids.
        like: of one token, as of `shape`.
    """
    lengths = [len(ids) for ids in kept]
    row = np.repeat(np.arange(len(kept)), lengths)
    ids = np.array([one for each in kept for one in each], np.int64)
    if like.dtype == jnp.int32:
        made = np.full((len(kept), *like.shape), -1, np.int32)
        made[row, np.concatenate([*map(np.arange, lengths), ids[:0]])] = ids
        return made
    made = np.zeros((len(kept), *like.shape), np.uint32)
    bit = np.uint32(1) << (ids // like.shape[0]).astype(np.uint32)
    np.bitwise_or.at(made, (row, ids % like.shape[0]), bit)
    return made


def among(support: jax.Array, first: int | jax.Array, count: int) -> jax.Array:
    """Which of some tokens are kept, `[..., count]` bool.

    Args:
        support: `[..., k]` or `[..., W]`, as `packed`.
        first: the first of these tokens, of a part of the vocabulary.
        count: how many they are; those behind the vocabulary are not kept.
    """
    *lead, size = support.shape
    if support.dtype == jnp.int32:
        here = (support >= first) & (support < first + count)
        place = jnp.where(here, support - first, count).reshape(-1, size)
        kept = jnp.zeros((place.shape[0], count), bool)
        row = jnp.arange(place.shape[0])[:, None]
        return kept.at[row, place].set(True, mode="drop").reshape(*lead, count)
    place = jnp.arange(BITS, dtype=jnp.uint32).reshape(*(1,) * len(lead), BITS, 1)
    kept = (support[..., None, :] >> place) & 1 != 0
    kept = kept.reshape(*lead, BITS * size)
    # Longer by `count`, for a slice that would lie over the end begins earlier.
    kept = jnp.pad(kept, ((0, 0),) * len(lead) + ((0, count),))
    return jax.lax.dynamic_slice_in_dim(kept, first, count, axis=-1)
