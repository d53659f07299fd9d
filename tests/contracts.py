"""What every stage function promises, whatever it computes.

Each check takes the function and its arrays, positional, the leading axis first. The
tables of the test modules run all of their members through them.
"""

from functools import partial
from math import comb

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

close = partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-6)


def name(function) -> str:
    """How a member of a table is called in test ids."""
    options = ""
    while isinstance(function, partial):
        options += "".join(
            f"-{key}={name(value) if callable(value) else value}"
            for key, value in function.keywords.items()
            if isinstance(value, int | float | str) or callable(value)
        )
        function = function.func
    return function.__name__ + options


def poisoned(arrays, counts):
    """`arrays` with NaN in every float entry that does not count."""
    return tuple(
        np.where(counts, array, np.float32(np.nan))
        if array.dtype == np.float32 and array.shape == counts.shape
        else array
        for array in arrays
    )


def ignores_absent_entries(function, *arrays, counts):
    """NaN where `counts` is False changes nothing; a grid is 0 or False there."""
    # Eagerly: compiled, a product with a mask would pass for a selection.
    got = np.asarray(function(*poisoned(arrays, counts)))
    np.testing.assert_array_equal(got, function(*arrays))
    assert np.isfinite(got).all()
    if got.shape == counts.shape:
        assert not got[~counts].any()


def follows_permutations(function, *arrays, order, axis):
    """Reordered along `axis` of the arrays, the result is reordered or stays."""
    want = np.asarray(jax.jit(function)(*arrays))
    moved = [np.take(a, order, axis) if a.ndim > axis else a for a in arrays]
    want = np.take(want, order, axis) if want.ndim > axis else want
    close(jax.jit(function)(*moved), want)


def is_the_same_however_it_runs(function, *arrays):
    """Compiled, mapped, over two leading axes and on eight devices: one result.

    Args:
        function: gives one array with the leading axis of its arguments.
        *arrays: numpy arrays of shape `[8, ...]`.
    """
    want = runs_compiled_and_on_a_mesh(function, *arrays)
    compiled = jax.jit(function)
    close(jax.jit(jax.vmap(function))(*arrays), want)
    close([compiled(*(array[i] for array in arrays)) for i in range(8)], want)
    folded = (array.reshape(2, 4, *array.shape[1:]) for array in arrays)
    close(compiled(*folded), np.reshape(want, (2, 4, *want.shape[1:])))


def runs_compiled_and_on_a_mesh(function, *arrays):
    """Eager on one device, compiled with the leading axis over eight: one result."""
    want = function(*arrays)
    assert want.dtype in (jnp.float32, jnp.bool_)
    mesh = Mesh(np.array(jax.devices()), ("data",))
    assert mesh.size == 8
    rows = NamedSharding(mesh, PartitionSpec("data"))
    got = jax.jit(function)(*(jax.device_put(array, rows) for array in arrays))
    close(jax.device_get(got), want)
    return want


def pools(n):
    """`[n + 1, n]` rewards: every number of right completions among n."""
    return np.float32(np.arange(n) < np.arange(n + 1)[:, None])


def effective_weight(credit, p):
    """w with E[sum_j c_j grad log pi(y_j)] = w(p) grad p, for n draws at pass rate p.

        w = E[sum_right c_j] / p - E[sum_wrong c_j] / (1 - p)

    Args:
        credit: `[n + 1, n]`, the coefficients c of `pools(n)`.
        p: pass rate in (0, 1).
    """
    n = credit.shape[-1]
    k = np.arange(n + 1)
    chance = np.array([comb(n, i) for i in k]) * p**k * (1 - p) ** (n - k)
    sides = np.where(pools(n) == 1, credit / p, -credit / (1 - p))
    return chance @ sides.astype(np.float64).sum(-1)
