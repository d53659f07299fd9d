"""Selection of a step's training prompts by a stateless shuffle, from one integer."""

import jax
import jax.numpy as jnp

from curax.arrays.keys import stage_key

ROUNDS = 8  # of the Feistel network; small sets need more than the usual four


def prompt_ids(
    seed: jax.Array, position: jax.Array, *, count: int, num_prompts: int
) -> jax.Array:
    """The next `count` prompt ids behind `position` prompts already taken.

    Epoch e is a permutation of all ids, drawn from (seed, e). It is computed id by id
    (a Feistel network on the smallest even number of bits, walked until it falls below
    `num_prompts`), so nothing is stored and any position is reached at once.

    Args:
        seed: `[]` uint32, the run.
        position: `[]` int32, prompts taken so far.
        count: prompts wanted.
        num_prompts: size of the training set.

    Returns:
        `[count]` int32 in [0, num_prompts); no id twice within an epoch.

    References:
        Black and Rogaway 2002, "Ciphers with Arbitrary Finite Domains" (cycle walking).
    """
    place = position + jnp.arange(count, dtype=jnp.int32)
    epoch, place = place // num_prompts, place % num_prompts
    half = max(1, ((num_prompts - 1).bit_length() + 1) // 2)
    low = jnp.uint32((1 << half) - 1)

    def secret(epoch):
        return jax.random.bits(stage_key(seed, epoch, "shuffle"), (ROUNDS,))

    secrets = jax.vmap(secret)(epoch)  # [count, ROUNDS]

    def shuffle(x):
        left, right = x >> half, x & low
        for r in range(ROUNDS):
            mixed = (right ^ secrets[:, r]) * jnp.uint32(0x9E3779B1)
            mixed = (mixed ^ (mixed >> 15)) * jnp.uint32(0x85EBCA6B)
            left, right = right, left ^ ((mixed ^ (mixed >> 13)) & low)
        return (left << half) | right

    outside = jnp.uint32(num_prompts)
    x = jax.lax.while_loop(
        lambda x: jnp.any(x >= outside),
        lambda x: jnp.where(x >= outside, shuffle(x), x),
        shuffle(place.astype(jnp.uint32)),
    )
    return x.astype(jnp.int32)
