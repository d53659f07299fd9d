"""Diversity of the forms of completions: entropy and effective number of kinds.

RL tends to collapse on one form of answer, not always the best, early in training. The
number of forms is a metric, never a reward.

The kind of a completion is an integer: of its text, `kind_of` or any other
`str -> int`; of its tokens, `opening`. Only equality of kinds matters.
"""

import re
from typing import NamedTuple

import jax
import jax.numpy as jnp

from curax.arrays import checks, masked
from curax.types import BoolBG, BoolT, Int, IntBG, IntT

KINDS = ("empty", "call", "code", "list", "equations", "prose")
_CODE = re.compile(r"```|^\s*(?:def|class|import|from|for|while|return|print)\b.*$")
_CALL = re.compile(r"\s*(?:<tool|\{\s*[\"'])")
_ITEM = re.compile(r"\s*(?:[-*•]|\(?\d+[.)]|[Ss]tep \d+)(?:\s|:)")


class Spread(NamedTuple):
    """Diversity of the kinds of completions, `[...]` float32 each."""

    entropy: jax.Array  # nats, H = -sum_f share_f log share_f
    effective: jax.Array  # e^H, the number of equally frequent kinds of the same H
    top: jax.Array  # share of the most frequent kind
    within: jax.Array  # nats, mean entropy of a prompt's completions


def kind_of(text: str) -> int:
    """Kind of a text as an index into `KINDS`, by its lines.

    The first that fits: empty; a tool call or an object; code, fenced or in half of the
    lines; a list in half of the lines; equations, where half of the lines have digits
    and more other signs than letters; prose.

    Args:
        text: text of a completion.

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


@checks.contract()
def opening(tokens: IntT, mask: BoolT, *, n: int = 4) -> Int:
    """32-bit hash of the first n tokens of each completion.

    Missing tokens are hashed as a symbol of their own, so a completion that is shorter
    than n differs from all longer ones.

    Args:
        tokens: `[..., T]` integer.
        mask: `[..., T]` bool, True from the first token to the last.
        n: tokens that are hashed, at least 1; static.

    Returns:
        `[...]` int32, of any sign.

    Raises:
        AssertionError: while tracing, if shapes differ or dtypes are not (int, bool).

    References:
        The mixing function: Appleby, MurmurHash3, in the public domain.
    """
    digest = jnp.full(mask.shape[:-1], n, jnp.uint32)
    for t in range(min(n, mask.shape[-1])):
        token = jnp.where(mask[..., t], tokens[..., t].astype(jnp.uint32) + 1, 0)
        digest = _mixed(digest * jnp.uint32(5) + token)
    return jax.lax.bitcast_convert_type(digest, jnp.int32)


def _mixed(x: jax.Array) -> jax.Array:
    """A bijection of uint32 in which every input bit affects every output bit."""
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
        x = (x ^ (x >> jnp.uint32(shift))) * jnp.uint32(factor)
    return x ^ (x >> jnp.uint32(16))


@checks.contract()
def spread(kind: IntBG, exists: BoolBG) -> Spread:
    """Entropy of the kinds of a batch, split into within and between prompts.

        H = -1/N sum_i log(n_i / N)

    with n_i of the N completions of the same kind as i. `within` is the mean of H over
    groups, weighted by their sizes. Where it is 0 the policy answers every prompt in
    one form, whatever the entropy over the batch.

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
    """
    flat = (*kind.shape[:-2], kind.shape[-2] * kind.shape[-1])
    every = _same_kind_count(kind.reshape(flat), exists.reshape(flat))
    every = every.reshape(kind.shape)
    whole = jnp.sum(exists, (-2, -1), keepdims=True, dtype=jnp.float32)
    own = jnp.sum(exists, -1, keepdims=True, dtype=jnp.float32)

    def surprise(count: jax.Array, of: jax.Array) -> jax.Array:
        share = jnp.where(exists, count, 1.0) / jnp.where(exists, of, 1.0)
        return masked.mean(-jnp.log(share), exists, axis=(-2, -1))

    some = jnp.any(exists, (-2, -1))
    entropy = surprise(every, whole)
    within = surprise(_same_kind_count(kind, exists), own)
    top = jnp.max(every, (-2, -1), where=exists, initial=0.0)
    return Spread(
        entropy=entropy,
        effective=jnp.where(some, jnp.exp(entropy), 0.0),
        top=top / jnp.maximum(whole[..., 0, 0], 1.0),
        within=within,
    )


def _same_kind_count(kind: jax.Array, exists: jax.Array) -> jax.Array:
    """`[..., N]` float32, number of existing completions of the same kind as each."""
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
