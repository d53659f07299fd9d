"""The order of training prompts: a permutation per epoch, reached anywhere at once."""

from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from curax import data


@cache
def compiled(count, num_prompts):
    return jax.jit(partial(data.prompt_ids, count=count, num_prompts=num_prompts))


def ids(position, count, num_prompts, seed=0):
    get = compiled(count, num_prompts)
    got = get(jnp.uint32(seed), jnp.int32(position))
    assert got.dtype == jnp.int32
    assert got.shape == (count,)
    return np.asarray(got)


SIZES = [1, 2, 3, 4, 5, 16, 17, 100, 1000]


@pytest.mark.first(3)
@pytest.mark.parametrize("size", SIZES)
def test_every_epoch_is_a_permutation(size):
    for epoch in (0, 1, 6):
        got = ids(epoch * size, size, size)
        np.testing.assert_array_equal(np.sort(got), np.arange(size))


def test_epochs_and_seeds_are_shuffled_differently():
    first = ids(0, 100, 100)
    others = [ids(100, 100, 100), ids(200, 100, 100), ids(0, 100, 100, seed=1)]
    for other in [*others, np.arange(100)]:
        assert (first != other).mean() > 0.9
    np.testing.assert_array_equal(first, ids(0, 100, 100))


def test_any_position_is_reached_at_once_and_batches_straddle_epochs():
    size = 17
    whole = np.concatenate([ids(e * size, size, size) for e in range(4)])
    for position in range(0, 3 * size, 5):
        got = ids(position, 7, size)
        np.testing.assert_array_equal(got, whole[position : position + 7])
    # A batch may be longer than an epoch.
    np.testing.assert_array_equal(ids(3, 40, size), whole[3:43])


def test_a_position_far_away_is_reached_at_once():
    far = 1000 * 2_000_000
    got = ids(far, 1000, 1000)
    np.testing.assert_array_equal(np.sort(got), np.arange(1000))


def test_the_order_maps_over_seeds():
    get = partial(data.prompt_ids, count=7, num_prompts=17)
    seeds = jnp.arange(3, dtype=jnp.uint32)
    got = jax.jit(jax.vmap(get, in_axes=(0, None)))(seeds, jnp.int32(14))
    for seed in range(3):
        np.testing.assert_array_equal(got[seed], ids(14, 7, 17, seed))


def test_every_prompt_is_as_likely_as_any_other_in_every_place():
    size, seeds = 100, 4000
    get = partial(data.prompt_ids, count=size, num_prompts=size)
    get = jax.jit(jax.vmap(get, in_axes=(0, None)))
    got = np.asarray(get(jnp.arange(seeds, dtype=jnp.uint32), jnp.int32(0)))
    counts = np.stack([np.bincount(place, minlength=size) for place in got.T])
    want = seeds / size
    chi_square = ((counts - want) ** 2 / want).sum()
    freedom = (size - 1) ** 2
    assert abs(chi_square - freedom) < 4 * np.sqrt(2 * freedom)
    step = np.bincount((got[:, 1] - got[:, 0]) % size, minlength=size)[1:]
    want = seeds / (size - 1)
    assert ((step - want) ** 2 / want).sum() < 98 + 4 * np.sqrt(2 * 98)
