"""Budgets, plans and the difficulty memory, against their definitions."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from contracts import close
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from curax import allocate
from curax.types import Memory

B, G, ROWS, IDS = 4, 3, 16, 6
counts_ = hnp.arrays(np.int32, B, elements=st.integers(0, 4))
plan = jax.jit(partial(allocate.plan, rows=ROWS))
observe = jax.jit(allocate.observe)
pass_rate = jax.jit(allocate.pass_rate)


@pytest.mark.parametrize("prompts", [1, 3, 7])
@pytest.mark.parametrize("budget", [0, 1, 7, 20])
def test_a_uniform_budget_is_spent_evenly_and_whole(prompts, budget):
    unused = jnp.zeros(prompts)
    counts = np.asarray(allocate.uniform(unused, unused, budget=budget))
    assert counts.dtype == np.int32
    assert counts.sum() == budget
    assert np.ptp(counts) <= 1
    assert (np.diff(counts) <= 0).all()


@given(counts_)
def test_a_plan_is_its_definition(counts):
    got = jax.device_get(plan(counts))
    want = [(b, slot) for b in range(B) for slot in range(counts[b])]
    named = list(zip(got.prompt.tolist(), got.slot.tolist(), strict=True))
    assert named[: len(want)] == want
    np.testing.assert_array_equal(got.exists, np.arange(ROWS) < len(want))
    np.testing.assert_array_equal(got.context, got.prompt)
    # Rows that do not exist still index something that does.
    assert set(named[len(want) :]) <= {(0, 0)}
    assert {got.prompt.dtype, got.slot.dtype, got.context.dtype} == {np.dtype("int32")}


# ----- memory


def visit(memory, prompt_id, n, k, discount=0.9):
    """One prompt is drawn n times and solved k times."""
    at = np.arange(12)[None]
    outcome = np.where(at < k, np.float32(1), np.float32(0))
    return observe(memory, np.int32([prompt_id]), outcome, at < n, discount=discount)


def test_pass_rates_follow_the_reference_vector():
    memory, ids = allocate.forget(IDS), np.int32([2])
    rates, draws, solved = [], [], []
    for n, k in [(0, 0), (8, 0), (8, 1), (12, 3)]:
        memory = visit(memory, 2, n, k)
        rates += pass_rate(memory, ids, prior=(1.0, 16.0)).tolist()
        draws.append(memory.draws[2])
        solved.append(memory.solved[2])
    close(rates, [0.0588235, 0.04, 0.0621118, 0.1148079], rtol=1e-5)
    close(draws, [0, 8, 15.2, 25.68])
    close(solved, [0, 0, 1, 3.9])


@given(
    st.lists(st.integers(0, IDS - 1), min_size=B, max_size=B),
    hnp.arrays(np.float32, (B, G), elements=st.sampled_from([0.0, 0.5, 1.0])),
    hnp.arrays(np.bool_, (B, G)),
    st.sampled_from([1.0, 0.9, 0.25]),
)
def test_observing_is_its_definition(ids, outcome, exists, discount):
    random = np.random.default_rng(0)
    draws = random.integers(1, 20, IDS).astype(np.float32)
    memory = Memory(draws=draws, solved=np.float32(0.3) * draws)
    # Ids may repeat: such a prompt is discounted once and counted twice.
    want_draws, want_solved = memory.draws.copy(), memory.solved.copy()
    for prompt in {i for i, e in zip(ids, exists, strict=True) if e.any()}:
        want_draws[prompt] *= discount
        want_solved[prompt] *= discount
    for b, prompt in enumerate(ids):
        want_draws[prompt] += exists[b].sum()
        want_solved[prompt] += outcome[b][exists[b]].sum()
    poisoned = np.where(exists, outcome, np.float32(np.nan))
    got = observe(memory, np.int32(ids), poisoned, exists, discount=discount)
    close(got.draws, want_draws)
    close(got.solved, want_solved)


def test_prompts_that_are_not_visited_keep_their_counts_bit_for_bit():
    draws = np.random.default_rng(0).random(IDS).astype(np.float32)
    memory = Memory(draws=draws, solved=draws / 3)
    got = visit(memory, 1, 4, 2)
    others = np.arange(IDS) != 1
    np.testing.assert_array_equal(got.draws[others], memory.draws[others])
    np.testing.assert_array_equal(got.solved[others], memory.solved[others])
    nothing = visit(memory, 1, 0, 0)
    jax.tree.map(np.testing.assert_array_equal, nothing, memory)


def test_pass_rates_lie_inside_zero_and_one_and_start_at_the_prior():
    ids = np.arange(IDS, dtype=np.int32)
    fresh = allocate.forget(IDS)
    close(pass_rate(fresh, ids, prior=(2.0, 6.0)), 0.25)
    for k in (0, 12):
        rate = pass_rate(visit(fresh, 0, 12, k), ids[:1], prior=(1.0, 1.0))
        assert 0 < rate[0] < 1


def test_a_memory_never_changes_its_shapes_and_dtypes():
    memory = allocate.forget(IDS)
    form = jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), memory)
    # Also under a scan, which would refuse anything else, and with a traced discount.
    args = np.int32([1, 1]), np.ones((2, G), np.float32), np.ones((2, G), bool)

    @jax.jit
    def three_visits(memory, discount):
        def one(memory, _):
            return allocate.observe(memory, *args, discount=discount), None

        return jax.lax.scan(one, memory, length=3)[0]

    memory = three_visits(memory, np.float32(0.5))
    assert jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), memory) == form
    close(memory.draws[1], 6 * (1 + 0.5 + 0.25))
