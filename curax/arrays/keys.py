"""Random keys. A key is a function of (seed, step, stage, row), never of call order."""

import zlib

import jax


def stage_key(seed: jax.Array, step: jax.Array, stage: str) -> jax.Array:
    """The key of one stage in one step of one run.

    Args:
        seed: `[]` integer, the run.
        step: `[]` integer, the step; warm-up phases use a stage name of their own.
        stage: names who draws; two names never share a key.

    Returns:
        A typed PRNG key.
    """
    key = jax.random.fold_in(jax.random.key(seed), zlib.crc32(stage.encode()))
    return jax.random.fold_in(key, step)


def row_keys(key: jax.Array, prompt: jax.Array, slot: jax.Array) -> jax.Array:
    """`[N]` keys that depend on (prompt, slot) alone, so row order changes nothing."""
    fold = jax.vmap(jax.random.fold_in)
    return fold(fold(jax.numpy.broadcast_to(key, prompt.shape), prompt), slot)
