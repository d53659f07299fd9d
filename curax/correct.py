"""Weights that undo what a selection did to the expected update, or leave it.

Every rule is `(reward, pool, keep) -> weight`, 0 where not kept.
"""

import chex
import jax
import jax.numpy as jnp

from curax import masked


def none(reward: jax.Array, pool: jax.Array, keep: jax.Array) -> jax.Array:
    """Every kept completion counts once: the selection is part of the objective.

    Args:
        reward: `[..., G]` float; not read.
        pool: `[..., G]` bool, completions that could have been kept.
        keep: `[..., G]` bool, those that were; a subset of `pool`.

    Returns:
        `[..., G]` float32, 1 where `keep`, else 0.

    Raises:
        AssertionError: while tracing, if shapes differ or dtypes are not
            (float, bool, bool).
    """
    _check(reward, pool, keep)
    return jnp.asarray(keep, jnp.float32)


def horvitz_thompson(reward: jax.Array, pool: jax.Array, keep: jax.Array) -> jax.Array:
    """Inverse inclusion rates, one per reward value: the pool's update, in expectation.

        omega_j = (N_c / N) / (n_c / n)

    with N, n the sizes of pool and kept set, and N_c, n_c those of their members with
    the reward of j. If the kept members of every class are a uniformly random part of
    it, then for any vectors phi and any A computed from the whole pool

        E[(1/n) sum_kept omega_j A_j phi_j | pool] = (1/N) sum_pool A_j phi_j ,

    however unequally the classes were kept. Statistics of the kept set alone break
    this; so does a class of which nothing was kept, to which no weight can give back
    what it lost. That happens to all inner values under `downsample.max_variance`, and
    makes continuous rewards a case to avoid. After `downsample.random` it stratifies,
    which is worth it only while no class can be lost.

    Args:
        reward: `[..., G]` float, outcome of each completion; a class is a value.
        pool: `[..., G]` bool, completions that could have been kept.
        keep: `[..., G]` bool, those that were; a subset of `pool`.

    Returns:
        `[..., G]` float32, 0 where not `keep`; its mean over the kept is 1 if no class
        was lost. All 1 where everything was kept.

    Raises:
        AssertionError: while tracing, if shapes differ or dtypes are not
            (float, bool, bool).

    References:
        Horvitz and Thompson 1952, "A Generalization of Sampling Without Replacement
        From a Finite Universe", Journal of the American Statistical Association 47.
        Neither Reinforce-Ada (arXiv:2510.04996) nor PODS (arXiv:2504.13818) applies
        it: Reinforce-Ada divides the whole group by the pass rate, or by nothing.
    """
    _check(reward, pool, keep)
    reward = jnp.asarray(reward)
    same = reward[..., :, None] == reward[..., None, :]

    def share(among: jax.Array) -> jax.Array:
        """Fraction of `among` that has the reward of j, `[..., G]`."""
        shape = (*among.shape, among.shape[-1])
        return masked.mean(same, jnp.broadcast_to(among[..., None, :], shape))

    kept_share = jnp.where(keep, share(keep), 1.0)
    return jnp.where(keep, share(pool) / kept_share, 0.0)


def _check(reward: jax.Array, pool: jax.Array, keep: jax.Array) -> None:
    chex.assert_equal_shape([reward, pool, keep])
    chex.assert_type([reward, pool, keep], [float, bool, bool])
