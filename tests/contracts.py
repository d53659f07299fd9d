"""What every stage function promises, whatever it computes.

A test module has a table of the members of its stage, and one line for each promise
that all of them keep: `test_a_gate_is_its_definition = defined(...)`. Members are
compiled together, a program for each shape of the arrays, and held to it one by one.

Each check takes the function and its arrays, positional, the leading axis first.
"""

from collections.abc import Callable, Iterable
from functools import cache, partial
from math import comb

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import Mesh, NamedSharding, PartitionSpec

close = partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-6)
equal = partial(jax.tree.map, np.testing.assert_array_equal)  # of trees


def same_rows(got, want, rtol=1e-3, atol=1e-4):
    """The same metrics of the same steps, but for what says how long these took."""
    for mine, theirs in zip(got, want, strict=True):
        for metric in theirs:
            if not metric.startswith("time/"):
                pair = mine[metric], theirs[metric]
                close(*pair, rtol=rtol, atol=atol, err_msg=metric)


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
    return getattr(function, "__name__", "") + options


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
    np.testing.assert_array_equal(got, function(*arrays), err_msg=name(function))
    assert np.isfinite(got).all(), name(function)
    if got.shape == counts.shape:
        assert not got[~counts].any(), name(function)


@cache
def together(members):
    """All members as one program: `arrays -> [what each gives]`."""
    return jax.jit(lambda *arrays: [member(*arrays) for member in members])


def by_member(members, *arrays):
    """(member, what it gives for these arrays) of all members, compiled together."""
    members = tuple(members)
    return zip(members, map(np.asarray, together(members)(*arrays)), strict=True)


def each(members, values, wanted, **tolerance):
    """Every member has its value, by name where one has not."""
    for member, got, want in zip(members, values, wanted, strict=True):
        close(got, want, err_msg=name(member), **tolerance)


def reordered(array, order, axis):
    """An array reordered along an axis; as it is where it has no such axis."""
    return np.take(array, order, axis) if array.ndim > axis else array


def follows_permutations(function, *arrays, order, axis):
    """Reordered along `axis` of the arrays, the result is reordered or stays."""
    follow_permutations((function,), *arrays, order=order, axis=axis)


def follow_permutations(members, *arrays, order, axis):
    """As `follows_permutations`, of every member."""
    run = together(tuple(members))
    moved = run(*(reordered(array, order, axis) for array in arrays))
    wanted = (reordered(np.asarray(want), order, axis) for want in run(*arrays))
    each(members, moved, wanted)


def is_the_same_however_it_runs(function, *arrays):
    """Compiled, mapped, over two leading axes and on eight devices: one result.

    Args:
        function: gives one array with the leading axis of its arguments.
        *arrays: numpy arrays of shape `[8, ...]`.
    """
    are_the_same_however_they_run((function,), *arrays)


def are_the_same_however_they_run(members, *arrays):
    """As `is_the_same_however_it_runs`, of every member."""
    wanted = run_compiled_and_on_a_mesh(members, *arrays)
    compiled = together(tuple(members))
    mapped = jax.jit(jax.vmap(lambda *one: [member(*one) for member in members]))
    each(members, mapped(*arrays), wanted)
    alone = [compiled(*(array[i] for array in arrays)) for i in range(8)]
    each(members, map(np.stack, zip(*alone, strict=True)), wanted)
    folded = compiled(*(array.reshape(2, 4, *array.shape[1:]) for array in arrays))
    shapes = ((2, 4, *want.shape[1:]) for want in wanted)
    each(members, folded, map(np.reshape, wanted, shapes))


def runs_compiled_and_on_a_mesh(function, *arrays):
    """Eager on one device, compiled with the leading axis over eight: one result."""
    return run_compiled_and_on_a_mesh((function,), *arrays)[0]


def run_compiled_and_on_a_mesh(members, *arrays):
    """As `runs_compiled_and_on_a_mesh`, of every member."""
    wanted = [member(*arrays) for member in members]
    assert all(want.dtype in (jnp.float32, jnp.bool_) for want in wanted)
    mesh = Mesh(np.array(jax.devices()), ("data",))
    assert mesh.size == 8
    rows = NamedSharding(mesh, PartitionSpec("data"))
    got = together(tuple(members))(*(jax.device_put(array, rows) for array in arrays))
    each(members, jax.device_get(got), wanted)
    return wanted


# ----- tests of all members of a table


def defined(members, *drawn, naive: Callable, examples: int = 100, **tolerance):
    """Test that every member is its definition.

    Args:
        members: functions.
        *drawn: strategies of their arrays.
        naive: `(member, *arrays) ->` what it gives by definition.
        examples: how many are drawn.
        **tolerance: of `close`.
    """
    members = tuple(members)

    @settings(max_examples=examples)
    @given(st.tuples(*drawn))
    def test(arrays):
        wanted = [naive(member, *arrays) for member in members]
        each(members, together(members)(*arrays), wanted, **tolerance)

    return test


def kept_by_all(
    members, *drawn, counts: Callable, axes: Iterable[int], examples: int = 100
):
    """Test that no member reads what is absent, and that all follow permutations.

    Args:
        members: functions.
        *drawn: strategies of their arrays, of one shape `[B, G]` or a part of it.
        counts: `(*arrays) ->` which entries count.
        axes: along which arrays may be reordered.
        examples: how many are drawn.
    """
    members = tuple(members)

    @settings(max_examples=examples)
    @given(st.tuples(*drawn), st.data())
    def test(arrays, data):
        where = counts(*arrays)
        for member in members:
            ignores_absent_entries(member, *arrays, counts=where)
        for axis in axes:
            order = data.draw(st.permutations(range(where.shape[axis])))
            follow_permutations(members, *arrays, order=order, axis=axis)

    return test


def run_alike(members, *drawn):
    """Test that all members are the same however they run, with eight rows.

    Args:
        members: functions.
        *drawn: strategies of their arrays, of at least three rows.
    """

    @settings(max_examples=3)
    @given(st.tuples(*[st.tuples(*drawn)] * 3))
    def test(parts):
        arrays = (np.concatenate(each)[:8] for each in zip(*parts, strict=True))
        are_the_same_however_they_run(tuple(members), *arrays)

    return test


def pools(n):
    """`[n + 1, n]` rewards: every number of right completions among n."""
    return np.float32(np.arange(n) < np.arange(n + 1)[:, None])


def binomial(n, p):
    """`[..., n + 1]`: how likely 0 to n right ones are among n draws at rate p."""
    k, p = np.arange(n + 1), np.asarray(p, float)[..., None]
    return np.array([float(comb(n, i)) for i in k]) * p**k * (1 - p) ** (n - k)


def sides(credit, labels, p):
    """`[...]`: C+ / p - C- / (1 - p) of groups, whose mean over draws is the weight."""
    credit = np.asarray(credit, np.float64)
    return np.where(labels == 1, credit / p, -credit / (1 - p)).sum(-1)


def effective_weight(credit, p):
    """w with E[sum_j c_j grad log pi(y_j)] = w(p) grad p, for n draws at pass rate p.

        w = E[sum_right c_j] / p - E[sum_wrong c_j] / (1 - p)

    Args:
        credit: `[n + 1, n]`, the coefficients c of `pools(n)`.
        p: pass rate in (0, 1).
    """
    n = credit.shape[-1]
    return binomial(n, p) @ sides(credit, pools(n), p)
