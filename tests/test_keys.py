"""Keys are functions of (seed, step, stage, row) and of nothing else."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np

from curax.arrays import keys


def data(key):
    return tuple(np.asarray(jax.random.key_data(key)).tolist())


def test_seed_step_and_stage_each_make_another_key():
    names = ["data", "rollout", "shuffle", "downsample", "evaluate", "init"]
    every = itertools.product((0, 1, 2**32 - 1), (0, 1, 2), names)
    drawn = [data(keys.stage_key(jnp.uint32(s), jnp.int32(t), n)) for s, t, n in every]
    assert len(set(drawn)) == len(drawn) == 54


def test_a_stage_key_is_the_same_at_every_call_and_compiled():
    make = jax.jit(keys.stage_key, static_argnums=2)
    for step in (0, 7):
        args = jnp.uint32(3), jnp.int32(step), "rollout"
        assert data(keys.stage_key(*args)) == data(keys.stage_key(*args))
        assert data(make(*args)) == data(keys.stage_key(*args))


def test_stage_keys_map_over_seeds():
    seeds = jnp.arange(3, dtype=jnp.uint32)
    got = jax.vmap(lambda seed: keys.stage_key(seed, jnp.int32(5), "rollout"))(seeds)
    for i in range(3):
        want = keys.stage_key(seeds[i], jnp.int32(5), "rollout")
        assert data(got[i]) == data(want)


def test_row_keys_depend_on_prompt_and_slot_alone():
    key = jax.random.key(0)
    prompt, member = (i.reshape(-1) for i in np.indices((5, 4), np.int32))
    rows = keys.row_keys(key, prompt, member)
    named = dict(zip(zip(prompt, member, strict=True), map(data, rows), strict=True))
    assert len(set(named.values())) == 20  # so (1, 2) and (2, 1) differ too
    order = np.random.default_rng(0).permutation(20)[:7]
    some = keys.row_keys(key, prompt[order], member[order])
    for n, row in zip(order, some, strict=True):
        assert data(row) == named[prompt[n], member[n]]
    other = keys.row_keys(jax.random.key(1), prompt, member)
    assert not set(map(data, other)) & set(named.values())


def test_a_row_of_a_prompt_with_a_key_of_its_own_depends_on_that_and_its_slot_alone():
    prompt, member = (i.reshape(-1) for i in np.indices((5, 4), np.int32))
    own = jax.random.split(jax.random.key(0), 5)
    rows = keys.row_keys(own, prompt, member)
    assert len(set(map(data, rows))) == 20
    order = np.array([3, 0, 4])
    again = keys.row_keys(own[order], prompt[:12], member[:12])
    for b, number in enumerate(order):
        for s in range(4):
            assert data(again[4 * b + s]) == data(rows[4 * number + s])
