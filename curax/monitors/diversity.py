"""How many ways of answering a policy has left.

Reinforcement tends to settle on one form of answer, not always the best, long before
it is done learning. The number of forms is watched, never rewarded.

A form, here a kind, is an integer for each completion: of its text, `kind_of`, or any
other `str -> int`; of its tokens, `opening`. Only equality counts.
"""

import re
from typing import NamedTuple

import jax
import jax.numpy as jnp

from curax.arrays import checks, masked

KINDS = ("empty", "call", "code", "list", "equations", "prose")
_CODE = re.compile(r"```|^\s*(?:def|class|import|from|for|while|return|print)\b.*$")
_CALL = re.compile(r"\s*(?:<tool|\{\s*[\"'])")
_ITEM = re.compile(r"\s*(?:[-*•]|\(?\d+[.)]|[Ss]tep \d+)(?:\s|:)")


class Spread(NamedTuple):
    """Of the kinds of many completions, `[...]` float32."""

    entropy: jax.Array  # nats, H = -sum_f share_f log share_f
    effective: jax.Array  # e^H, that many kinds of equal shares are as varied
    distinct: jax.Array  # kinds that occur
    evenness: jax.Array  # H / log distinct, in [0, 1]; 0 where fewer than two occur
    top: jax.Array  # share of the most frequent kind
    within: jax.Array  # nats, mean entropy of a prompt's completions
    between: jax.Array  # nats, entropy - within: what the prompt says of the kind


def kind_of(text: str) -> int:
    """What a text is like, as a place in `KINDS`.

    The first that fits: nothing but space; a call of a tool, or an object; code, fenced
    or half of the lines; a list, half of the lines; equations, where half of the lines
    have digits and fewer letters than other signs; prose.

    Args:
        text: of a completion.

    Returns:
        An integer in [0, len(KINDS)).
    """
    lines = [line for line in text.splitlines() if line.strip()]

    def most(fits) -> bool:
        return 2 * sum(map(bool, map(fits, lines))) >= len(lines)

    fits = (
        not lines,
        bool(_CALL.match(text)),
        "```" in text or most(_CODE.match),
        most(_ITEM.match),
        most(_is_equation),
    )
    return next((kind for kind, fit in enumerate(fits) if fit), len(fits))


def _is_equation(line: str) -> bool:
    signs = [sign for sign in line if not sign.isspace()]
    letters = sum(map(str.isalpha, signs))
    return any(map(str.isdigit, signs)) and 2 * letters < len(signs)


def opening(tokens: jax.Array, mask: jax.Array, *, n: int = 4) -> jax.Array:
    """A number for the first n tokens of each completion.

    Equal where these are equal, and as good as never otherwise: it is a hash of 32
    bits. A shorter completion has one of its own, as if nothing followed.

    Args:
        tokens: `[..., T]` integer.
        mask: `[..., T]` bool, True from the first token to the last.
        n: tokens of an opening, at least 1; static.

    Returns:
        `[...]` int32, of any sign.

    Raises:
        AssertionError: while tracing, if shapes differ or dtypes are not (int, bool).

    References:
        The mixing function: Appleby, MurmurHash3, in the public domain.
    """
    tokens, mask = checks.arrays(tokens=(tokens, int), mask=(mask, bool))
    found = jnp.full(mask.shape[:-1], n, jnp.uint32)
    for t in range(min(n, mask.shape[-1])):
        token = jnp.where(mask[..., t], tokens[..., t].astype(jnp.uint32) + 1, 0)
        found = _mixed(found * jnp.uint32(5) + token)
    return jax.lax.bitcast_convert_type(found, jnp.int32)


def _mixed(x: jax.Array) -> jax.Array:
    """A permutation of 32 bits of which every one depends on all."""
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
        x = (x ^ (x >> jnp.uint32(shift))) * jnp.uint32(factor)
    return x ^ (x >> jnp.uint32(16))


def spread(kind: jax.Array, exists: jax.Array) -> Spread:
    """How varied the kinds of a batch are, and whether prompts alone make them so.

        H = -1/N sum_i log(n_i / N)

    with n_i the completions of N that are of the kind of i. Within a prompt N and n_i
    are of its group; `within` is the mean of H over groups, weighed by their sizes.

    A policy whose kinds vary between prompts but not within them answers each prompt in
    one way: its group teaches nothing about the others.

    Args:
        kind: `[..., B, G]` integer, of any size and sign.
        exists: `[..., B, G]` bool.

    Returns:
        `[...]` each; 0 where nothing exists.

    Raises:
        AssertionError: while tracing, if shapes differ, there is no prompt axis or
            dtypes are not (int, bool).

    References:
        The finding that training settles on one format: Zhao et al. 2025, "Echo
        Chamber: RL Post-training Amplifies Behaviors Learned in Pretraining",
        arXiv:2504.07912. e^H: Hill 1973, "Diversity and Evenness", Ecology 54.
        Evenness: Pielou 1966, Journal of Theoretical Biology 13.
    """
    kind, exists = checks.arrays(kind=(kind, int), exists=(exists, bool))
    flat = (*kind.shape[:-2], kind.shape[-2] * kind.shape[-1])
    every = _alike(kind.reshape(flat), exists.reshape(flat)).reshape(kind.shape)
    whole = jnp.sum(exists, (-2, -1), keepdims=True, dtype=jnp.float32)
    own = jnp.sum(exists, -1, keepdims=True, dtype=jnp.float32)

    def surprise(count: jax.Array, of: jax.Array) -> jax.Array:
        share = jnp.where(exists, count, 1.0) / jnp.where(exists, of, 1.0)
        return masked.mean(-jnp.log(share), exists, axis=(-2, -1))

    some = jnp.any(exists, (-2, -1))
    entropy = surprise(every, whole)
    within = surprise(_alike(kind, exists), own)
    distinct = _distinct(every, exists, axis=(-2, -1))
    evenness = entropy / jnp.log(jnp.maximum(distinct, 2.0))
    top = jnp.max(every, (-2, -1), where=exists, initial=0.0)
    return Spread(
        entropy=entropy,
        effective=jnp.where(some, jnp.exp(entropy), 0.0),
        distinct=distinct,
        evenness=jnp.where(distinct > 1, evenness, 0.0),
        top=top / jnp.maximum(whole[..., 0, 0], 1.0),
        within=within,
        between=entropy - within,
    )


def distinct(kind: jax.Array, exists: jax.Array) -> jax.Array:
    """How many different kinds, or answers, each group has.

    Args:
        kind: `[..., G]` integer.
        exists: `[..., G]` bool; False, too, for a completion without an answer.

    Returns:
        `[...]` float32, whole numbers.

    Raises:
        AssertionError: while tracing, if shapes differ or dtypes are not (int, bool).
    """
    kind, exists = checks.arrays(kind=(kind, int), exists=(exists, bool))
    return _distinct(_alike(kind, exists), exists, axis=-1)


def _alike(kind: jax.Array, exists: jax.Array) -> jax.Array:
    """`[..., N]` float32: how many that exist are of the kind of each."""
    last = jnp.iinfo(jnp.int32).max
    key = jnp.where(exists, kind.astype(jnp.int32), last)
    absent = jnp.sum(~exists, -1, dtype=jnp.int32)

    def count(key: jax.Array, absent: jax.Array) -> jax.Array:
        order = jnp.sort(key)
        first, behind = (
            jnp.searchsorted(order, key, side=side) for side in ("left", "right")
        )
        return behind - first - jnp.where(key == last, absent, 0)

    for _ in range(key.ndim - 1):
        count = jax.vmap(count)
    return jnp.where(exists, count(key, absent), 0).astype(jnp.float32)


def _distinct(alike: jax.Array, exists: jax.Array, *, axis: masked.Axis) -> jax.Array:
    shares = 1.0 / jnp.where(exists, alike, 1.0)
    return jnp.round(masked.total(shares, exists, axis=axis))
