"""The difficulty memory, against its definition and the reference."""

from math import comb

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from contracts import close, is_the_same_however_it_runs
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from curax import memory as memory_
from curax.types import PromptMemory

B, G, IDS = 4, 3, 6
observe = jax.jit(memory_.observe)
difficulty = jax.jit(memory_.difficulty)
dead_groups = jax.jit(memory_.dead_groups, static_argnames="most")


def some_memory():
    draws = np.random.default_rng(0).integers(1, 20, IDS).astype(np.float32)
    parts = {"solved": 0.3, "square": 1.7, "tokens": 40.0}
    sums = {key: np.float32(part) * draws for key, part in parts.items()}
    return PromptMemory(draws=draws, **sums)


def visit(memory, prompt_id, n, k, discount=0.9):
    """One prompt is drawn n times and solved k times."""
    at = np.arange(12)[None]
    outcome = np.where(at < k, np.float32(1), np.float32(0))
    square, tokens = np.full((1, 12), 2, np.float32), np.full((1, 12), 5)
    ids = np.int32([prompt_id])
    return observe(memory, ids, outcome, square, tokens, at < n, discount=discount)


def test_pass_rates_follow_the_reference_vector():
    """L20: rates and counts."""
    memory, ids = memory_.forget(IDS), np.int32([2])
    rates, draws, solved = [], [], []
    for n, k in [(0, 0), (8, 0), (8, 1), (12, 3)]:
        memory = visit(memory, 2, n, k)
        rates += difficulty(memory, ids, prior=(1.0, 16.0)).pass_rate.tolist()
        draws.append(memory.draws[2])
        solved.append(memory.solved[2])
    close(rates, [0.0588235, 0.04, 0.0621118, 0.1148079], rtol=1e-5)
    close(draws, [0, 8, 15.2, 25.68])
    close(solved, [0, 0, 1, 3.9])


@given(
    st.lists(st.integers(0, IDS - 1), min_size=B, max_size=B),
    hnp.arrays(np.float32, (B, G), elements=st.sampled_from([0.0, 0.5, 1.0])),
    hnp.arrays(np.float32, (B, G), elements=st.sampled_from([0.25, 1.0, 9.0])),
    hnp.arrays(np.int32, (B, G), elements=st.integers(1, 50)),
    hnp.arrays(np.bool_, (B, G)),
    st.sampled_from([1.0, 0.9, 0.25]),
)
def test_observing_is_its_definition(ids, outcome, square, tokens, exists, discount):
    memory = some_memory()
    # Ids may repeat: such a prompt is discounted once and counted twice.
    want = jax.tree.map(np.copy, memory)
    for prompt in {i for i, e in zip(ids, exists, strict=True) if e.any()}:
        for sums in jax.tree.leaves(want):
            sums[prompt] *= discount
    for b, prompt in enumerate(ids):
        want.draws[prompt] += exists[b].sum()
        want.solved[prompt] += outcome[b][exists[b]].sum()
        want.square[prompt] += square[b][exists[b]].sum()
        want.tokens[prompt] += tokens[b][exists[b]].sum()
    poisoned = (
        *(np.where(exists, values, np.float32(np.nan)) for values in (outcome, square)),
        np.where(exists, tokens, np.iinfo(np.int32).max),
    )
    got = observe(memory, np.int32(ids), *poisoned, exists, discount=discount)
    jax.tree.map(close, got, want)


def test_prompts_that_are_not_visited_keep_their_counts_bit_for_bit():
    draws = np.random.default_rng(0).random(IDS).astype(np.float32)
    memory = PromptMemory(
        draws=draws, solved=draws / 3, square=draws * 7, tokens=draws * 9
    )
    got = visit(memory, 1, 4, 2)
    others = np.arange(IDS) != 1
    for name in ("draws", "solved", "square", "tokens"):
        before, after = getattr(memory, name), getattr(got, name)
        np.testing.assert_array_equal(after[others], before[others])
        assert after[1] != before[1]
    nothing = visit(memory, 1, 0, 0)
    jax.tree.map(np.testing.assert_array_equal, nothing, memory)


def test_pass_rates_lie_inside_zero_and_one_and_start_at_the_prior():
    """L20: the open interval."""
    ids = np.arange(IDS, dtype=np.int32)
    fresh = memory_.forget(IDS)
    close(difficulty(fresh, ids, prior=(2.0, 6.0)).pass_rate, 0.25)
    for k in (0, 12):
        seen = difficulty(visit(fresh, 0, 12, k), ids[:1], prior=(1.0, 1.0))
        assert 0 < seen.pass_rate[0] < 1


def test_what_is_known_are_means_over_earlier_completions():
    memory, ids = some_memory(), np.int32([4, 0, 4])
    got = difficulty(memory, ids, prior=(1.0, 3.0))
    close(got.draws, memory.draws[ids])
    close(got.solved, memory.solved[ids])
    rate = (memory.solved[ids] + 1) / (memory.draws[ids] + 4)
    close(got.pass_rate, rate)
    close(got.norm, np.sqrt(memory.square[ids] / memory.draws[ids]))
    close(got.tokens, memory.tokens[ids] / memory.draws[ids])
    assert all(leaf.dtype == jnp.float32 for leaf in jax.tree.leaves(got))


def test_means_do_not_depend_on_the_discount_when_nothing_changes():
    memory = memory_.forget(IDS)
    for _ in range(5):
        memory = visit(memory, 3, 8, 4, discount=0.5)
    seen = difficulty(memory, np.int32([3]), prior=(0.0, 0.0))
    close(seen.norm, np.sqrt(2))
    close(seen.tokens, 5)
    close(seen.pass_rate, 0.5)


def test_prompts_without_visits_are_like_the_whole_memory():
    ids = np.int32([1, 5])
    fresh = difficulty(memory_.forget(IDS), ids, prior=(1.0, 1.0))
    close(fresh.norm, 1)
    close(fresh.tokens, 1)
    close(fresh.draws, 0)
    memory = PromptMemory(
        draws=np.float32([2, 6, 0, 0, 0, 0]),
        solved=np.float32([1, 0, 0, 0, 0, 0]),
        square=np.float32([2 * 9, 6 * 1, 0, 0, 0, 0]),
        tokens=np.float32([2 * 100, 6 * 20, 0, 0, 0, 0]),
    )
    got = difficulty(memory, ids, prior=(1.0, 1.0))
    # Each completion counts once: (18 + 6) / 8 and (200 + 120) / 8.
    close(got.norm, [1, np.sqrt(3)])
    close(got.tokens, [20, 40])
    close(got.pass_rate, [1 / 8, 1 / 2])
    faded = jax.tree.map(lambda leaf: leaf / 80, memory)  # a tenth of a completion
    late = difficulty(faded, ids, prior=(1.0, 1.0))
    close(late.norm, got.norm)
    close(late.tokens, got.tokens)


def test_a_half_life_halves():
    for half_life in (1.0, 4.0, 30.0):
        close(memory_.discount(half_life) ** half_life, 0.5)
    assert memory_.discount(np.inf) == 1
    memory = visit(memory_.forget(IDS), 0, 12, 12)
    for _ in range(4):  # visits of another prompt change nothing
        memory = visit(memory, 1, 1, 0, discount=memory_.discount(4.0))
    close(memory.draws[0], 12)
    for _ in range(4):
        memory = visit(memory, 0, 1, 0, discount=memory_.discount(4.0))
    close(memory.solved[0], 6)


def test_a_memory_never_changes_its_shapes_and_dtypes():
    memory = memory_.forget(IDS)
    form = jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), memory)
    # Also under a scan, which would refuse anything else, and with a traced discount.
    ones = np.ones((2, G), np.float32)
    args = (
        np.int32([1, 1]),
        ones,
        ones,
        np.ones((2, G), np.int32),
        np.ones((2, G), bool),
    )

    @jax.jit
    def three_visits(memory, discount):
        def one(memory, _):
            return memory_.observe(memory, *args, discount=discount), None

        return jax.lax.scan(one, memory, length=3)[0]

    memory = three_visits(memory, np.float32(0.5))
    assert jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), memory) == form
    for sums in jax.tree.leaves(memory):
        close(sums[1], 6 * (1 + 0.5 + 0.25))


# ----- dead groups


def chance_of_death(a, b, n):
    """P(k = 0) + P(k = n) by the density of the pass rate, on a fine grid."""
    p = (np.arange(200_000) + 0.5) / 200_000
    density = p ** (a - 1) * (1 - p) ** (b - 1)
    return np.sum(density * ((1 - p) ** n + p**n)) / np.sum(density)


@given(
    hnp.arrays(np.float32, (3, 2), elements=st.sampled_from([1.0, 1.5, 4.0, 30.0])),
    hnp.arrays(np.int32, 3, elements=st.integers(0, 6)),
    hnp.arrays(np.bool_, 3),
)
def test_the_forecast_of_dead_groups_is_that_of_beta_binomials(counts, draws, dead):
    exists = draws > 0
    poisoned = np.where(exists[:, None], counts, np.float32(np.nan))
    got = dead_groups(*poisoned.T, draws, dead, most=6)
    rows = [(*counts[b], draws[b]) for b in np.flatnonzero(exists)]
    chance = np.array([1.0 if n == 1 else chance_of_death(a, b, n) for a, b, n in rows])
    n = max(len(rows), 1)
    expected, deviation = np.sum(chance) / n, np.sqrt(np.sum(chance * (1 - chance))) / n
    close(got[0], expected, rtol=1e-4)
    close(got[1], deviation, rtol=1e-4, atol=1e-5)
    seen = np.sum(dead & exists) / n
    close(got[2] * got[1], (seen - expected) * (deviation > 0), rtol=1e-4, atol=1e-5)
    assert np.isfinite(got[2])


def test_a_known_pass_rate_gives_the_binomial_chances():
    p, n = np.float32([0.1, 0.5, 0.9, 0.25]), np.int32([8, 2, 4, 1])
    strength = np.float32(1e6)
    got = dead_groups(p * strength, (1 - p) * strength, n, np.zeros(4, bool), most=8)
    chance = np.where(n > 1, p**n + (1 - p) ** n, 1)
    close(got[0], chance.mean(), rtol=1e-4)
    close(got[2], -got[0] / got[1], rtol=1e-4)


def test_groups_of_one_are_dead_and_no_surprise():
    solved = np.random.default_rng(0).uniform(0.1, 9, 400).astype(np.float32)
    ones, dead = np.ones(400, np.int32), np.ones(400, bool)
    got = dead_groups(solved, solved[::-1], ones, dead, most=4)
    assert [float(x) for x in got] == [1, 0, 0]
    # A prompt that is as good as hopeless: rounding must not take it beyond.
    tiny = np.full(400, 1e-9, np.float32)
    got = dead_groups(tiny, solved, 3 * ones, dead, most=4)
    close(got, [1, 0, 0], atol=1e-3)
    nothing = dead_groups(solved, solved, 0 * ones, dead, most=4)
    assert [float(x) for x in nothing] == [0, 0, 0]


def test_believed_pass_rates_make_z_a_standard_score():
    random, trials, b, n = np.random.default_rng(0), 4000, 40, 4
    p = random.beta(1.0, 3.0, (trials, b))
    right = random.binomial(n, p)
    one, three = (
        np.full((trials, b), 1, np.float32),
        np.full((trials, b), 3, np.float32),
    )
    draws = np.full((trials, b), n, np.int32)
    z = dead_groups(one, three, draws, (right == 0) | (right == n), most=n)[2]
    assert abs(np.mean(z)) < 0.07
    assert abs(np.std(z) - 1) < 0.05
    # A verifier that says one thing to all is far off at once.
    broken = dead_groups(one, three, draws, np.ones((trials, b), bool), most=n)[2]
    assert (np.asarray(broken) > 4).all()
    # The exact numbers of right ones have the chances that the forecast sums.
    want = sum(comb(n, k) * np.mean(p**k * (1 - p) ** (n - k)) for k in (0, n))
    close(dead_groups(one, three, draws, draws > 9, most=n)[0][0], want, rtol=0.02)


@pytest.mark.long
def test_the_forecast_is_the_same_however_it_runs():
    random = np.random.default_rng(0)
    counts = random.uniform(0.5, 9, (2, 8, 3)).astype(np.float32)
    draws, dead = random.integers(0, 5, (8, 3), np.int32), random.random((8, 3)) < 0.5
    is_the_same_however_it_runs(
        lambda *args: memory_.dead_groups(*args, most=4)[2], *counts, draws, dead
    )
