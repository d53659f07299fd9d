"""Prompts of embedded tasks, and hints before them: a block of a fixed width."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from curax.types import Contexts, Hinting, Prompts


def full(tokens: jax.Array, prompt_id: jax.Array, target: Any) -> Prompts:
    """Prompts of one length: all of their tokens count."""
    mask = jnp.ones(tokens.shape, bool)
    return Prompts(tokens=tokens, mask=mask, id=prompt_id, target=target)


def block(
    tokens: jax.Array,
    mask: jax.Array,
    *,
    sign: jax.Array | int,
    width: int,
    blank: int,
    pad: int,
) -> tuple[jax.Array, jax.Array]:
    """The block of each hint: a sign, then `width` tokens or blanks.

    Args:
        tokens: `[..., S]` int32; those after the first `width` are dropped.
        mask: `[..., S]` bool, False throughout where there is no hint.
        sign: `[...]` int32, or one for all.
        width: tokens of a block, its sign left out.
        blank: token where a hint has none.
        pad: token where there is no hint.

    Returns:
        `[..., width + 1]` tokens and mask, True throughout or, without a hint, False.
    """
    short = [(0, 0)] * (mask.ndim - 1) + [(0, max(width - mask.shape[-1], 0))]
    tokens, mask = (jnp.pad(x, short)[..., :width] for x in (tokens, mask))
    there = jnp.any(mask, -1, keepdims=True)
    sign = jnp.broadcast_to(jnp.asarray(sign, tokens.dtype), mask.shape[:-1])
    whole = jnp.concatenate([sign[..., None], jnp.where(mask, tokens, blank)], -1)
    return jnp.where(there, whole, pad), jnp.broadcast_to(there, whole.shape)


def before(prompts: Prompts, tokens: jax.Array, mask: jax.Array) -> Contexts:
    """Contexts of a block and then a prompt, left-padded where there is no block."""
    return Contexts(
        tokens=jnp.concatenate([tokens, prompts.tokens], -1),
        mask=jnp.concatenate([mask, prompts.mask], -1),
    )


def last_in_place(
    solution: Callable[[Prompts], tuple[jax.Array, jax.Array]],
    prompts: Prompts,
    tokens: jax.Array,
    mask: jax.Array,
) -> jax.Array:
    """`[B, L]` bool, whether hints hold the last token of a solution at its place.

    Args:
        solution: of `Hinting`, solutions `[B, S]` and their mask.
        prompts: B of them.
        tokens: `[B, L, S']` int32, hints.
        mask: `[B, L, S']` bool.
    """
    right, counts = solution(prompts)
    width = min(right.shape[-1], tokens.shape[-1])
    last = jnp.sum(counts, -1) - 1  # [B]
    same = mask[..., :width] & (tokens[..., :width] == right[:, None, :width])
    return jnp.any(same & (jnp.arange(width)[None, None] == last[:, None, None]), -1)


def given(key: jax.Array, most: jax.Array, share: float) -> jax.Array:
    """How many tokens the hint of each trace has, `[B]` int32; 0: there is none.

    Args:
        key: that of the traces.
        most: `[B]` int32, tokens of a whole hint.
        share: of the traces that have a hint; its number is uniform on 1 .. `most`.
    """
    k_kind, k_given = jax.random.split(jax.random.fold_in(key, 1))
    number = jax.random.randint(k_given, most.shape, 1, most + 1)
    return jnp.where(jax.random.uniform(k_kind, most.shape) < share, number, 0)


def shown(
    key: jax.Array, prompts: Prompts, *, hinting: Hinting, share: float
) -> Contexts:
    """Contexts of traces, of which a share has the beginning of its solution before it.

    How much of it, `given` says.
    """
    assert hinting.solution
    tokens, mask = hinting.solution(prompts)
    number = given(key, jnp.sum(mask, -1), share)
    mask = mask & (jnp.arange(mask.shape[-1])[None] < number[:, None])
    return before(prompts, *hinting.wrap(tokens, mask))
