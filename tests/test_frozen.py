"""Parameters that are not trained are arguments, and no part of what is trained."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny

from curax import rollout, update
from curax.arrays import frozen

LORA = tiny.model(lora_rank=2, lora_modules=("q", "up"))


def params():
    """Random ones, those of the adapters too."""
    return tiny.random_params(LORA)


def names(tree):
    return {
        "/".join(key.key for key in path)
        for path, _ in jax.tree_util.tree_leaves_with_path(tree)
    }


def test_splitting_and_joining_gives_the_tree_back():
    trained, rest = frozen.split(LORA, params())
    assert all(name.rpartition("/")[2].startswith("lora_") for name in names(trained))
    assert len(names(trained)) == 2 * 2 * 2  # layers, matrices, factors
    assert not names(trained) & names(rest)
    whole = frozen.join(rest, trained)
    jax.tree.map(np.testing.assert_array_equal, whole, params())
    assert frozen.split(tiny.MODEL, tiny.params())[1] is None
    assert frozen.join(tiny.params(), None) is tiny.params()
    assert frozen.over(tiny.MODEL, None) is tiny.MODEL


def test_what_comes_second_wins_in_a_join():
    got = frozen.join({"a": {"b": 1, "c": 2}}, {"a": {"b": 3}, "d": 4})
    assert got == {"a": {"b": 3, "c": 2}, "d": 4}


@pytest.mark.long
def test_the_bound_model_says_what_the_whole_one_says():
    trained, rest = frozen.split(LORA, params())
    draw = jax.jit(
        lambda model_params, rest: rollout.sample(
            frozen.over(LORA, rest),
            model_params,
            tiny.CONTEXTS,
            tiny.ROWS,
            jax.random.key(0),
            tiny.settings(),
        )
    )
    got, want = draw(trained, rest), draw(params(), None)
    jax.tree.map(np.testing.assert_array_equal, got, want)


def test_the_gradient_of_the_trained_ones_is_that_of_the_whole():
    trained, rest = frozen.split(LORA, params())
    rows = tiny.drawn()

    def nats(trained, rest):
        return jnp.sum(
            update.logprobs(
                frozen.over(LORA, rest),
                trained,
                tiny.CONTEXTS,
                rows.tokens,
                rows.mask,
                rows.context,
                update.Settings(),
            ),
            where=rows.mask,
        )

    got = jax.jit(jax.grad(nats))(trained, rest)
    want = frozen.split(LORA, jax.jit(jax.grad(nats))(params(), None))[0]
    assert names(got) == names(trained)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5), got, want
    )
    assert all(np.abs(leaf).max() > 0 for leaf in jax.tree.leaves(got))
