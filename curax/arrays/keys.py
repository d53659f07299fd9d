"""Random keys. A key is a function of (seed, step, stage, row), never of call order."""

import zlib

import jax


def stage_key(seed: jax.Array, step: jax.Array, stage: str) -> jax.Array:
    """The random key of a stage in a step of a run.

    Args:
        seed: `[]` integer, seed of the run.
        step: `[]` integer, number of the step; the warm start has its own stage name.
        stage: name of what draws; folded in as a 32-bit hash.

    Returns:
        A typed PRNG key.
    """
    key = jax.random.fold_in(jax.random.key(seed), zlib.crc32(stage.encode()))
    return jax.random.fold_in(key, step)


def row_keys(key: jax.Array, prompt: jax.Array, member: jax.Array) -> jax.Array:
    """`[N]` keys, each a function of `key` and the row's (prompt, member) alone.

    Args:
        key: `[]`; or `[B]`, the key of each prompt, whose number then changes nothing.
        prompt: `[N]` int32 in [0, B).
        member: `[N]` int32.
    """
    fold = jax.vmap(jax.random.fold_in)
    if key.ndim:
        key, prompt = key[prompt], jax.numpy.zeros_like(prompt)
    return fold(fold(jax.numpy.broadcast_to(key, prompt.shape), prompt), member)
