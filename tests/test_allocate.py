"""Budgets and rows, against definitions, brute force and the published vectors."""

from fractions import Fraction
from functools import cache, partial
from itertools import product

import jax
import numpy as np
import pytest
from contracts import close, name
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from curax import allocate
from curax.arrays import counts as whole
from curax.types import Difficulty

B, ROWS = 8, 16


# ----- naive definitions, float64 or exact


def naive_level(share, budget, least, most):
    """clip(c s, least, most) with sum `budget`; zeros evenly behind all others."""
    some = share > 0
    x = np.full(len(share), float(least))
    first = min(budget - least * (~some).sum(), most * some.sum())
    if some.any():
        low, high = 0.0, (most + 1) / share[some].min()
        for _ in range(200):
            middle = (low + high) / 2
            if np.clip(middle * share[some], least, most).sum() < first:
                low = middle
            else:
                high = middle
        x[some] = np.clip(high * share[some], least, most)
    if not some.all():
        x[~some] = (budget - x[some].sum()) / (~some).sum()
    return x


def naive_proportional(share, *, budget, least, most):
    """Largest remainder of the level."""
    budget = min(max(budget, least * len(share)), most * len(share))
    x = naive_level(np.float64(share), budget, least, most)
    n = np.floor(x + 1e-9).astype(int)
    for i in sorted(range(len(n)), key=lambda i: (-round(x[i] - n[i], 9), n[i], i)):
        n[i] += n.sum() < budget
    return n


def naive_greedy(variance, *, budget, least, most):
    """One completion at a time, to the largest gain, in fractions."""
    v = [Fraction(float(value)) for value in variance]
    n = [least] * len(v)

    def order(i):
        gain = (
            (1, v[i]) if n[i] == 0 and v[i] else (0, v[i] / max(n[i], 1) / (n[i] + 1))
        )
        return (-gain[0], -gain[1], n[i], i)

    for _ in range(min(budget, most * len(v)) - least * len(v)):
        n[min((i for i in range(len(v)) if n[i] < most), key=order)] += 1
    return np.array(n)


def total(v, n):
    """sum v / n in float64."""
    return (np.float64(v) / n).sum()


def rates(d):
    return (np.float64(d.solved) + 0.5) / (np.float64(d.draws) + 1)


def gvm_definition(d):
    p = np.float64(d.pass_rate)
    return d.norm / np.sqrt(p + 1e-3 / p)


def log_definition(d):
    return d.norm * np.sqrt((1 - np.float64(d.pass_rate)) / d.pass_rate)


def deviation_definition(d):
    return np.sqrt(rates(d) * (1 - rates(d)))


def dynamo_definition(d):
    n, k = np.float64(d.draws), np.float64(d.solved)
    priority = np.maximum(k * (n - k) / (n * (n - 1)) + 1e-6 * (1 - k / n), 0.01)
    return np.where(k / n >= 0.85, 0.01, priority)


def alive_definition(d):
    few = np.minimum(d.solved, d.draws - d.solved) <= 0.05 * d.draws
    return np.where((d.draws >= 8) & few, 0.0, 1.0)


def floor_and_share(share, *, budget, least, most):
    rest = {"budget": budget - least * len(share), "least": 0, "most": most - least}
    return least + naive_proportional(share, **rest)


def squared(weight, **bounds):
    return naive_greedy(np.square(weight), **bounds)


gvm_exact = partial(allocate.gvm, exact=True, least=1)
log_exact = partial(allocate.log_baseline, exact=True)
linear_variance = partial(
    allocate.bernoulli, estimate=allocate.unbiased_variance, power=1.0
)
per_token = partial(allocate.neyman, per_token=True)
dynamo_2 = partial(allocate.dynamo, least=2, initial_budget=4)

# Each allocator: its least, the weight it follows, how weights become counts.
TABLE = {
    allocate.uniform: (0, lambda d: np.ones(len(d.draws)), naive_proportional),
    allocate.inverse_pass_rate: (1, lambda d: 1 / d.pass_rate, floor_and_share),
    allocate.inverse_root: (2, lambda d: d.pass_rate**-0.5, naive_proportional),
    allocate.gvm: (0, gvm_definition, naive_proportional),
    gvm_exact: (1, gvm_definition, squared),
    allocate.log_baseline: (0, log_definition, naive_proportional),
    log_exact: (0, log_definition, squared),
    allocate.bernoulli: (2, deviation_definition, naive_proportional),
    linear_variance: (
        2,
        lambda d: (
            np.clip(d.solved * (d.draws - d.solved), 0, None)
            / np.float64(d.draws * (d.draws - 1))
        ),
        naive_proportional,
    ),
    allocate.neyman: (2, lambda d: deviation_definition(d) * d.norm, squared),
    partial(allocate.neyman, standardised=True, least=1): (
        *(1, lambda d: np.float64(d.norm), squared),
    ),
    per_token: (
        2,
        lambda d: deviation_definition(d) * d.norm / np.sqrt(np.float64(d.tokens)),
        naive_proportional,
    ),
    dynamo_2: (2, dynamo_definition, None),
    allocate.skip_dead: (1, alive_definition, naive_proportional),
}
ALLOCATORS = list(TABLE)
BUDGET, MOST = 61, 12  # a remainder, and a bound that binds
for_every_allocator = pytest.mark.parametrize("allocator", ALLOCATORS, ids=name)


@cache
def compiled(allocator, budget, most):
    return jax.jit(partial(allocator, budget=budget, most=most))


def counts_of(allocator, difficulty, budget=BUDGET, most=MOST):
    return np.asarray(compiled(allocator, budget, most)(difficulty))


@cache
def rule(function, **bounds):
    return jax.jit(partial(function, **bounds))


def by_rule(function, weight, budget, least, most):
    run = rule(function, budget=budget, least=least, most=most)
    return np.asarray(run(np.float32(weight)))


level_of = partial(by_rule, whole.water_level)
proportional = partial(by_rule, whole.proportional)
greedy = partial(by_rule, whole.greedy)
within = partial(rule, whole.within_tokens)


def difficulty(**fields):
    """What is given, and for the rest what a run begins with."""
    fields = {key: np.float32(value) for key, value in fields.items()}
    prompts = len(next(iter(fields.values())))
    default = {"draws": 0, "solved": 0, "pass_rate": 0.5, "norm": 1, "tokens": 1}
    blank = {key: np.full(prompts, value, np.float32) for key, value in default.items()}
    return Difficulty(**(blank | fields))


def ordinary(seed, prompts=B):
    """Prompts seen often, no two of them alike."""
    random = np.random.default_rng(seed)
    draws = random.uniform(20, 60, prompts)
    rate = random.uniform(0.1, 0.8, prompts)
    return difficulty(
        draws=draws,
        solved=draws * rate,
        pass_rate=rate,
        norm=random.lognormal(0, 0.7, prompts),
        tokens=random.uniform(10, 1000, prompts),
    )


seeds = st.integers(0, 2**31 - 1)
awkward = [0.0, 0.125, 0.5, 1.0, 1e-30, 1e30, np.inf, np.nan, -1.0]
anything = st.builds(
    Difficulty,
    draws=hnp.arrays(np.float32, B, elements=st.sampled_from([0, 1, 3.5, 4, 16, 1e9])),
    solved=hnp.arrays(np.float32, B, elements=st.sampled_from([0, 1, 3.5, 4, np.nan])),
    pass_rate=hnp.arrays(np.float32, B, elements=st.sampled_from(awkward)),
    norm=hnp.arrays(np.float32, B, elements=st.sampled_from(awkward)),
    tokens=hnp.arrays(np.float32, B, elements=st.sampled_from(awkward)),
)


# ----- what every allocator promises


@pytest.mark.first(4)
@for_every_allocator
@given(anything)
def test_the_sum_is_the_budget_and_the_bounds_hold(allocator, d):
    """L8, P1: whatever is known of the prompts."""
    least = TABLE[allocator][0]
    n = counts_of(allocator, d)
    assert n.dtype == np.int32
    assert n.sum() == BUDGET
    assert least <= n.min()
    assert n.max() <= MOST


@pytest.mark.first(2)
@pytest.mark.parametrize("allocator", [allocate.inverse_pass_rate, dynamo_2], ids=name)
@pytest.mark.parametrize("budget", [0, 1000])
def test_a_budget_that_the_bounds_exclude_is_clipped(allocator, budget):
    """P1: the sum is the clipped budget."""
    least = TABLE[allocator][0]
    n = counts_of(allocator, ordinary(0), budget, 7)
    np.testing.assert_array_equal(n, 7 if budget else least)


@for_every_allocator
@given(seeds)
def test_an_allocator_is_its_definition(allocator, seed):
    least, weight, rounded = TABLE[allocator]
    d = ordinary(seed)
    got = counts_of(allocator, d)
    if rounded is None:  # dynamo: the order of its priorities; vectors below
        better = np.argsort(-weight(d), kind="stable")
        assert (np.diff(got[better]) <= 0).all()
        return
    want = rounded(weight(d), budget=BUDGET, least=least, most=MOST)
    np.testing.assert_array_equal(got, want)


@pytest.mark.first(4)
@for_every_allocator
@given(seeds, st.permutations(range(B)))
def test_counts_follow_permutations(allocator, seed, order):
    """P1: up to ties."""
    d, order = ordinary(seed), list(order)
    moved = jax.tree.map(lambda leaf: leaf[order], d)
    got = counts_of(allocator, moved)
    want = counts_of(allocator, d)
    if allocator in (allocate.uniform, allocate.skip_dead):  # all alike: by index
        np.testing.assert_array_equal(np.sort(got), np.sort(want))
    else:
        np.testing.assert_array_equal(got, want[order])


@pytest.mark.first(4)
@for_every_allocator
@given(seeds, st.sampled_from([2.0**-90, 0.25, 3.0, 2.0**90]))
def test_a_common_factor_of_norms_and_lengths_changes_nothing(allocator, seed, factor):
    """L8: all G scaled."""
    d = ordinary(seed)
    scaled = d.replace(norm=d.norm * np.float32(factor), tokens=d.tokens * 5)
    np.testing.assert_array_equal(counts_of(allocator, scaled), counts_of(allocator, d))


@pytest.mark.first(4)
@for_every_allocator
@given(seeds, st.integers(0, B - 1), st.sampled_from([1.001, 1.3, 10.0]))
def test_more_weight_never_gets_less(allocator, seed, i, factor):
    """P1: monotone in the weight of a prompt."""
    d = ordinary(seed)
    weight = TABLE[allocator][1]
    changed = {
        "norm": d.norm[i] * factor,
        "pass_rate": d.pass_rate[i] / factor,
        "solved": d.draws[i] / 2 + (d.solved[i] - d.draws[i] / 2) / factor,
    }
    before = counts_of(allocator, d)
    for field, value in changed.items():
        values = np.copy(getattr(d, field))
        values[i] = value
        more = d.replace(**{field: values})
        if weight(more)[i] >= weight(d)[i]:
            assert counts_of(allocator, more)[i] >= before[i]


@pytest.mark.first(4)
@for_every_allocator
@given(seeds)
def test_counts_are_in_the_order_of_the_weights(allocator, seed):
    """L8, P1: monotone between prompts."""
    d = ordinary(seed)
    weight = TABLE[allocator][1](d)
    n = counts_of(allocator, d)
    for i, j in product(range(B), repeat=2):
        assert n[i] >= n[j] or weight[i] < weight[j] * (1 + 1e-6)


@for_every_allocator
def test_prompts_that_are_alike_differ_by_one_at_most(allocator):
    """P1: equal weights."""
    d = jax.tree.map(lambda leaf: np.full(B, leaf[0]), ordinary(0))
    n = counts_of(allocator, d)
    assert np.ptp(n) <= 1
    assert (np.diff(n) <= 0).all()  # ties go to the smaller index


@pytest.mark.first(4)
@for_every_allocator
def test_an_allocator_is_the_same_mapped_and_on_eight_devices(allocator):
    mesh = Mesh(np.array(jax.devices()), ("data",))
    assert mesh.size == 8
    prompts = NamedSharding(mesh, PartitionSpec(None, "data"))
    both = jax.tree.map(lambda *leaves: np.stack(leaves), ordinary(1), ordinary(2))
    spread = jax.device_put(both, prompts)
    got = jax.jit(jax.vmap(partial(allocator, budget=BUDGET, most=MOST)))(spread)
    want = [counts_of(allocator, ordinary(seed)) for seed in (1, 2)]
    np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize(
    ("allocator", "nothing"),
    [
        (allocate.gvm, {"pass_rate": 0}),
        (gvm_exact, {"norm": 0}),
        (allocate.log_baseline, {"pass_rate": 1}),
        (log_exact, {"norm": np.nan}),
        (allocate.neyman, {"norm": 0}),
        (per_token, {"norm": 0}),
        (linear_variance, {"draws": 16, "solved": 0}),
        (dynamo_2, {"draws": 0}),
        (allocate.skip_dead, {"draws": 16, "solved": 16}),
    ],
    ids=lambda value: name(value) if callable(value) else "",
)
def test_weights_that_are_all_zero_fall_back_to_uniform(allocator, nothing):
    everyone = {key: np.full(B, value) for key, value in nothing.items()}
    got = counts_of(allocator, difficulty(**everyone))
    want = counts_of(allocate.uniform, difficulty(**everyone))
    np.testing.assert_array_equal(got, want)


@pytest.mark.first(4)
@pytest.mark.parametrize("least", [-1, 9])
@pytest.mark.parametrize("allocator", ALLOCATORS[1:], ids=name)
def test_bounds_that_cross_are_refused(allocator, least):
    with pytest.raises(ValueError, match=r"^least=-?\d is not between 0 and most=8"):
        allocator(ordinary(0), budget=64, most=8, least=least)


def test_more_than_can_be_counted_is_refused():
    with pytest.raises(ValueError, match=r"set it to at most 134217728\.$"):
        allocate.gvm(ordinary(0), budget=2**31, most=2**28)


def test_wrong_shapes_and_dtypes_are_refused():
    bounds = {"budget": 8, "least": 1, "most": 4}
    for wrong in (np.ones((2, 4), np.float32), np.ones(4, np.int32)):
        for function in (whole.water_level, whole.proportional, whole.greedy):
            with pytest.raises(AssertionError):
                function(wrong, **bounds)
    for tokens in (np.ones(3, np.float32), np.ones(4, np.int32)):
        with pytest.raises(AssertionError):
            whole.within_tokens(
                np.ones(4, np.float32), tokens, token_budget=9, **bounds
            )


# ----- from weights to counts

shares_ = hnp.arrays(
    np.float32, B, elements=st.sampled_from([0, 1e-9, 0.25, 1, 2, 3, 7, 1e6])
)
LEVELS = [(40, 0, 40), (29, 1, 9), (13, 0, 2)]
for_all_levels = pytest.mark.parametrize(("budget", "least", "most"), LEVELS)


@for_all_levels
@given(shares_)
def test_a_water_level_is_its_definition(budget, least, most, share):
    got = level_of(share, budget, least, most)
    close(got, naive_level(np.float64(share), budget, least, most), atol=1e-4)


@pytest.mark.first(1)
@for_all_levels
@given(shares_)
def test_rounding_moves_a_level_by_less_than_one(budget, least, most, share):
    n = proportional(share, budget, least, most)
    assert n.sum() == budget
    x = naive_level(np.float64(share), budget, least, most)
    assert (abs(n - x) < 1 + 1e-4).all()
    # The largest remainders: nobody rounded down was nearer to the next integer.
    fraction = x - np.floor(x + 1e-4)
    some = share > 0
    up, down = (n > x + 1e-4) & some, (n < x - 1e-4) & some
    if up.any() and down.any():
        assert fraction[up].min() >= fraction[down].max() - 1e-4


@pytest.mark.first(1)
@for_all_levels
@given(shares_)
def test_a_share_of_zero_gets_more_than_least_only_behind_all_others(
    budget, least, most, share
):
    for rounded in (proportional, greedy):
        n = rounded(share, budget, least, most)
        if (n[share == 0] > least).any():
            np.testing.assert_array_equal(n[share > 0], most)


@pytest.mark.first(1)
@for_all_levels
@given(hnp.arrays(np.float32, B, elements=st.integers(0, 6)))
def test_greedy_gives_each_completion_to_the_largest_gain(
    budget, least, most, variance
):
    # Small integers have many gains that are equal: the order among those is checked.
    got = greedy(variance, budget, least, most)
    want = naive_greedy(variance, budget=budget, least=least, most=most)
    np.testing.assert_array_equal(got, want)


@pytest.mark.first(1)
@pytest.mark.parametrize(("budget", "least", "most"), [(11, 1, 5), (9, 0, 9)])
@given(hnp.arrays(np.float32, 4, elements=st.sampled_from([0.01, 0.3, 1, 2, 2.5, 9])))
def test_no_allocation_has_less_variance_than_the_greedy_one(
    budget, least, most, variance
):
    """L6, P1: brute force over four prompts."""
    every = np.array(list(product(range(max(least, 1), most + 1), repeat=4)))
    every = every[every.sum(-1) == budget]
    best = (np.float64(variance) / every).sum(-1).min()
    n = greedy(variance, budget, least, most)
    close(total(variance, n), best, rtol=1e-6)
    assert total(variance, proportional(variance**0.5, budget, 1, most)) >= best - 1e-6


@given(hnp.arrays(np.float32, B, elements=st.integers(0, 5)))
def test_first_completions_go_to_the_largest_variances(variance):
    n = greedy(variance, 4, 0, 9)
    some = np.count_nonzero(variance)
    if some >= 4:
        np.testing.assert_array_equal(
            np.flatnonzero(n), np.sort(np.argsort(-variance, kind="stable")[:4])
        )
        assert n.max() == 1
    else:
        assert (n[variance > 0] > 0).all()


def test_weights_beyond_all_bounds_are_still_weights():
    huge = np.float32([np.inf, 1, 1e-30, 1e-45, 0, np.nan, -1, 2])
    for rounded in (proportional, greedy):
        np.testing.assert_array_equal(rounded(huge, 29, 1, 9)[0], 9)
        assert rounded(huge, 29, 1, 9)[[4, 5, 6]].tolist() == [1, 1, 1]
    tiny = np.float32([1, 2, 3, 0, 4, 5, 6, 7]) * np.float32(2.0**-120)
    factor = np.float32(2.0**120)
    for rounded in (proportional, greedy):
        np.testing.assert_array_equal(
            rounded(tiny, 29, 1, 9), rounded(tiny * factor, 29, 1, 9)
        )


@pytest.mark.long
def test_a_hundred_thousand_prompts_get_exactly_their_budget():
    prompts, most = 100_000, 64
    weight = np.random.default_rng(0).lognormal(0, 1, prompts).astype(np.float32)
    budget = 16 * prompts + 7
    level = level_of(weight, budget, 2, 2**13)
    rounded = proportional(weight, budget, 2, 2**13)
    assert rounded.sum() == budget
    assert rounded.min() == 2
    assert (abs(rounded - level) < 1 + 1e-3).all()
    optimal = greedy(weight**2, budget, 2, most)
    assert optimal.sum() == budget
    assert (optimal.min(), optimal.max()) == (2, most)
    # No completion moved from one prompt to another would gain.
    v, n = np.float64(weight) ** 2, np.float64(optimal)
    gain, loss = v / (n * (n + 1)), v / (n * (n - 1))
    assert gain[n < most].max() <= loss[n > 2].min() * (1 + 1e-6)


# ----- a budget of tokens


def naive_within_tokens(v, c, *, token_budget, budget, least, most):
    """One completion at a time, to the largest gain per token that fits."""
    v, c = np.float64(v), np.int64(c)
    n = np.full(len(v), least)

    def order(i):
        first = int(n[i] == 0 and v[i] > 0)
        unit = Fraction(float(np.float32(v[i]) / np.float32(c[i])))
        return (-first, -unit / max(n[i], 1) / (n[i] + 1), n[i], i)

    while n.sum() < budget:
        left = token_budget - (n * c).sum()
        open_ = [i for i in range(len(v)) if n[i] < most and c[i] <= left]
        if not open_:
            break
        n[min(open_, key=order)] += 1
    return n


@pytest.mark.first(2)
@pytest.mark.parametrize("least", [0, 1])
@pytest.mark.parametrize(("token_budget", "budget"), [(700, 99), (2000, 40)])
@given(
    hnp.arrays(np.float32, B, elements=st.sampled_from([0, 0.5, 1, 2, 9])),
    hnp.arrays(np.float32, B, elements=st.sampled_from([1, 5, 30, 100, 101, 800])),
)
def test_tokens_go_to_the_largest_gain_that_fits_until_none_does(
    least, token_budget, budget, v, c
):
    bounds = {"token_budget": token_budget, "budget": budget, "least": least, "most": 6}
    got = np.asarray(within(**bounds)(v, c))
    np.testing.assert_array_equal(got, naive_within_tokens(v, c, **bounds))
    spent = (got * c.astype(int)).sum()
    assert spent <= max(token_budget, least * c.sum())
    assert got.sum() <= budget
    if got.sum() < budget and spent <= token_budget:
        assert (spent + c[got < 6] > token_budget).all()


def test_tokens_of_equal_cost_are_shared_as_completions_are():
    v = np.float32([3, 1, 4, 1, 5, 9, 2, 6])
    bounds = {"token_budget": 40 * 12.5, "budget": 99, "least": 1, "most": 16}
    got = within(**bounds)(v, np.full(B, 12.5, np.float32))
    np.testing.assert_array_equal(got, greedy(v, 40, 1, 16))


@pytest.mark.long
def test_lengths_beyond_all_bounds_are_never_affordable_and_never_overflow():
    tokens = np.float32([np.nan, np.inf, 3e38, 2**30, 1e9, 5e8, 0, -3])
    for token_budget in (1e12, 1e-20):
        bounds = {"token_budget": token_budget, "budget": 2000, "least": 0, "most": 100}
        got = np.asarray(within(**bounds)(np.ones(B, np.float32), tokens))
        assert got[:2].tolist() == [0, 0]
        assert got[6:].tolist() == [100, 100]
        spent = (got[2:6] * np.float64(tokens[2:6])).sum()
        assert spent <= token_budget
        assert (got[4:6] == 100).all() == (token_budget == 1e12)
    for wrong in (0.0, -1.0, np.inf, np.nan):
        with pytest.raises(ValueError, match="is not positive"):
            whole.within_tokens(
                tokens, tokens, token_budget=wrong, budget=9, least=0, most=1
            )


@pytest.mark.long
def test_sums_of_tokens_neither_wrap_nor_lose_fractions():
    alike = np.ones(B, np.float32)
    # One of them is the whole budget; three overflow an int32.
    tokens = np.full(B, 2**30 - 64, np.float32)
    bounds = {"budget": 99, "least": 0, "most": 100}
    got = within(token_budget=2**30 - 64, **bounds)(alike, tokens)
    assert got.tolist() == [1] + [0] * 7
    # Without their fractions, 512 of these would fit.
    tokens = np.full(B, 2**20 + 0.875, np.float32)
    bounds["budget"] = 999
    assert np.sum(within(token_budget=2**29, **bounds)(alike, tokens)) == 511


def test_neyman_within_tokens_shares_out_the_tokens_of_the_memory():
    d = ordinary(0).replace(tokens=np.float32([10, 20, 30, 40, 50, 60, 70, 80]))
    bounds = {"token_budget": 1500, "budget": 64, "least": 2, "most": 24}
    got = jax.jit(partial(allocate.neyman_within_tokens, **bounds))(d)
    v = np.float32((deviation_definition(d) * d.norm) ** 2)
    want = naive_within_tokens(v, d.tokens, **bounds)
    np.testing.assert_array_equal(got, want)
    assert (want * d.tokens).sum() <= 1500


# ----- published vectors


def test_gvm_weights_are_the_published_ones():
    """L8: the published weights, and zeros."""
    p = np.float32([0.01, 0.0625, 0.125, 0.25, 0.375, 0.5, 0.75, 0.875, 1])
    weight = partial(allocate.gvm_weight, alpha=1e-3, beta=2.0)
    want = [3.015113, 3.569153, 2.742042, 1.984189, 1.627218]
    want += [1.411394, 1.153676, 1.068347, 0.999500]
    close(weight(p, np.ones(9, np.float32)), want)
    assert weight(np.float32(0), np.float32(1)) == 0
    assert weight(np.float32(1), np.float32(0)) == 0
    at = np.float32([0.0316, 0.031623, 0.0317])  # the peak, (alpha (beta - 1))^(1/beta)
    values = weight(at, np.ones(3, np.float32))
    close(values[1], 3.976354)
    assert values.argmax() == 1


def test_gvm_gives_the_published_counts():
    """L5: level, objective and integers."""
    norm, p = [1, 2, 1.5, 3, 1, 0.7], [0.125, 0.25, 0.5, 0.75, 0.875, 1]
    d = difficulty(norm=norm, pass_rate=p)
    weight = allocate.gvm_weight(d.pass_rate, d.norm, alpha=1e-3, beta=2.0)
    level = level_of(weight, 48, 0, 48)
    want = [9.363476, 13.551147, 7.229401, 11.818649, 3.648173, 2.389153]
    close(level, want)
    close(total(np.square(weight), level), 4.116379314764738)
    close(np.sum(weight) ** 2 / 48, 4.116379314764738)
    for exact in (False, True):
        n = counts_of(partial(allocate.gvm, exact=exact), d, 48, 48)
        assert n.tolist() == [9, 14, 7, 12, 4, 2]
        close(total(np.square(weight), n), 4.128899456164946)


def test_gvm_finds_the_published_optimum():
    """L6: the published vector."""
    d = difficulty(norm=[1, 2, 1, 3], pass_rate=[0.125, 0.5, 0.25, 1])
    weight = allocate.gvm_weight(d.pass_rate, d.norm, alpha=1e-3, beta=2.0)
    n = counts_of(partial(allocate.gvm, exact=True), d, 12, 12)
    assert n.tolist() == [3, 3, 2, 4]
    close(total(np.square(weight), n), 9.37856434560047)
    close(level_of(weight, 12, 0, 12), [3.119644, 3.211508, 2.257429, 3.411419])


def test_rounding_by_remainder_falls_into_the_published_traps():
    """L7: rounding traps."""
    d = difficulty(norm=[1, 1, 3], pass_rate=[0.75, 0.125, 0.125])
    square = np.square(allocate.gvm_weight(d.pass_rate, d.norm, alpha=1e-3, beta=2.0))
    rounded, exact = (
        counts_of(partial(allocate.gvm, exact=exact), d, 7, 7)
        for exact in (False, True)
    )
    assert rounded.tolist() == [1, 1, 5]
    assert exact.tolist() == [1, 2, 4]
    close(total(square, rounded), 22.383599)
    close(total(square, exact), 22.007659)
    close(np.sqrt(square).sum() ** 2 / 7, 20.991305)
    d = difficulty(norm=[4, 0.5, 0.5, 0.5], pass_rate=[0.25, 0.875, 0.875, 0.625])
    assert counts_of(allocate.gvm, d, 10, 10).tolist() == [8, 1, 0, 1]
    assert counts_of(gvm_exact, d, 10, 10).tolist() == [7, 1, 1, 1]


@pytest.mark.long
def test_gvm_counts_in_groups():
    d = difficulty(
        norm=[1, 2, 1.5, 3, 1, 0.7], pass_rate=[0.125, 0.25, 0.5, 0.75, 1, 0]
    )
    for exact in (False, True):
        plain = partial(allocate.gvm, exact=exact, least=1)
        got = counts_of(partial(plain, unit=4, least=4), d, 96, 51)
        np.testing.assert_array_equal(got, 4 * counts_of(plain, d, 24, 12))
    for wrong in ({"budget": 30}, {"budget": 32, "least": 2}, {"budget": 8, "unit": 0}):
        with pytest.raises(ValueError, match="does not divide budget"):
            allocate.gvm(d, **{"most": 16, "unit": 4, **wrong})


def test_log_objectives_give_the_published_levels():
    """L10 (allocation): with a baseline and without."""
    p = np.float32([0.1, 0.25, 0.5, 0.9])
    baseline = [31.655044, 18.276048, 10.551681, 3.517227]
    close(level_of(np.sqrt((1 - p) / p), 64, 0, 64), baseline)
    got = counts_of(allocate.log_baseline, difficulty(pass_rate=p), 64, 64)
    assert got.tolist() == [32, 18, 11, 3]
    raft = [26.522973, 16.774601, 11.861434, 8.840992]
    close(level_of(1 / np.sqrt(p), 64, 0, 64), raft)
    unregularised = partial(allocate.gvm, alpha=0.0)
    got = counts_of(unregularised, difficulty(pass_rate=p), 64, 64)
    assert got.tolist() == [26, 17, 12, 9]


def test_estimates_give_the_published_counts():
    """L21: the implicit rule and the hybrid one."""
    d = difficulty(pass_rate=[1 / 17, 0.1, 0.5, 0.9])
    got = counts_of(allocate.inverse_pass_rate, d, 32, 32)
    assert got.tolist() == [17, 10, 3, 2]
    d = difficulty(pass_rate=[0.01, 0.04, 0.25, 1])
    got = counts_of(allocate.inverse_root, d, 32, 16)
    assert got.tolist() == [16, 10, 4, 2]
    d = difficulty(pass_rate=[1e-4, 0.01, 0.25, 1, 1])
    got = counts_of(partial(allocate.inverse_root, least=4), d, 40, 16)
    assert got.tolist() == [16, 12, 4, 4, 4]


def test_a_pass_rate_of_zero_takes_all_it_may():
    d = difficulty(pass_rate=[0, 0.1, 0.5, 0.9])
    for allocator in (allocate.inverse_pass_rate, allocate.inverse_root):
        assert counts_of(allocator, d, 32, 16)[0] == 16


@pytest.mark.parametrize(
    ("solved", "want"),
    [
        ([8, 4, 1, 0], [24, 20, 12, 8]),
        ([13, 14, 16, 0], [24, 14, 14, 12]),
        ([5, 5, 5, 5], [16, 16, 16, 16]),
        ([16, 16, 16, 8], [14, 13, 13, 24]),
    ],
)
def test_dynamo_gives_the_published_counts(solved, want):
    d = difficulty(draws=[16] * 4, solved=solved)
    assert counts_of(allocate.dynamo, d, 64, 24).tolist() == want


@pytest.mark.long
def test_dynamo_keeps_the_bounds_where_the_release_breaks_them():
    # Released: [27, 11, 10], above the cap.
    d = difficulty(draws=[0, 100, 100])
    unknown = partial(allocate.dynamo, least=4, initial_budget=20, known=np.inf)
    assert counts_of(unknown, d, 48, 24).tolist() == [24, 12, 12]
    # Released: [0, 2, 1], below the floor.
    d = difficulty(draws=[40, 0, 3])
    got = counts_of(partial(allocate.dynamo, least=1), d, 3, 2)
    assert got.tolist() == [1, 1, 1]


@pytest.mark.long
def test_dynamo_explores_what_was_drawn_too_seldom():
    d = difficulty(draws=[0, 10, 16, 40], solved=[0, 5, 8, 20])
    explore = partial(allocate.dynamo, least=4, initial_budget=20)
    # 20 and 10 to explore, 4 and 4; nothing is left to share.
    assert counts_of(explore, d, 38, 24).tolist() == [20, 10, 4, 4]
    # Cut short: 8 in proportion to the 16 and the 6 beyond the floor.
    assert counts_of(explore, d, 24, 24).tolist() == [10, 6, 4, 4]
    # With the rest shared by priority: .277778, .266667 and .256411 for the known.
    assert counts_of(explore, d, 50, 24).tolist() == [20, 14, 8, 8]


def test_dynamo_priorities_fall_off_a_cliff():
    d = difficulty(draws=[16, 16], solved=[13, 14])
    n = counts_of(allocate.dynamo, d, 16 + 69, 77)
    np.testing.assert_array_equal(n - 8, [65, 4])  # .162501 to .01


def test_dynamo_prefers_the_harder_of_two_that_vary_alike():
    d = difficulty(draws=[16, 16], solved=[12, 4])
    assert counts_of(allocate.dynamo, d, 25, 24).tolist() == [12, 13]


def test_dynamo_is_its_definition_with_exact_fractions():
    random = np.random.default_rng(0)
    for _ in range(60):
        draws = random.integers(8, 40, B)
        solved = random.integers(0, draws + 1)
        share = dynamo_definition(difficulty(draws=draws, solved=solved))
        want = np.full(B, 2)
        while want.sum() < BUDGET:
            room = want < MOST
            x = np.where(room, share, 0) / share[room].sum() * (BUDGET - want.sum())
            more = np.floor(x + 1e-6)
            order = sorted(range(B), key=lambda i: (-round(x[i] - more[i], 5), i))
            for i in order[: BUDGET - want.sum() - int(more.sum())]:
                more[i] += 1
            want = np.minimum(want + more.astype(int), MOST)
        d = difficulty(draws=draws, solved=solved)
        got = counts_of(dynamo_2, d)
        np.testing.assert_array_equal(got, want)


V = np.float64([0.25, 0.09, 0.01, 0.0025])


def test_neyman_gives_the_published_counts():
    """L1 of DynaMO: the optimum."""
    free, boxed = level_of(V**0.5, 32, 0, 32), level_of(V**0.5, 32, 4, 16)
    close(free, [16.8421, 10.1053, 3.3684, 1.6842], atol=1e-4)
    close(total(V, free), 0.028203, atol=5e-7)
    close(total(V, 8), 0.044063, atol=5e-7)
    close(boxed, [15, 9, 4, 4])
    close(total(V, boxed), 0.029792, atol=5e-7)
    # All draws equal: the variance of the outcome is a common factor.
    d = difficulty(norm=V**0.5)
    for options in ({}, {"standardised": True}, {"per_token": True}):
        got = counts_of(partial(allocate.neyman, least=4, **options), d, 32, 16)
        assert got.tolist() == [15, 9, 4, 4]
    got = counts_of(partial(allocate.neyman, least=1), d, 32, 32)
    assert got.tolist() == [17, 10, 3, 2]
    nothing = difficulty(norm=np.zeros(3))
    assert counts_of(allocate.neyman, nothing, 9, 5).tolist() == [3, 3, 3]


def test_proportional_to_the_variance_is_no_better_than_uniform():
    """L1 of DynaMO, L2 of DynaMO, P2: the published vectors."""
    linear, root = level_of(V, 32, 0, 32), level_of(V**0.5, 32, 0, 32)
    close(total(V, linear) / 16, 0.002754, atol=5e-7)
    close(total(V, np.full(4, 8)) / 16, 0.002754, atol=5e-7)
    close(total(V, root) / 16, 0.001763, atol=5e-7)
    # Divided by a constant, the prompts weigh n_i / 32 and the variance grows.
    close((V * linear).sum() / 32**2, 0.006268, atol=5e-7)
    close((V * root).sum() / 32**2, 0.005037, atol=5e-7)
    close((V * 8).sum() / 32**2, 0.002754, atol=5e-7)


@given(seeds)
def test_neyman_has_no_more_variance_than_any_other_allocator(seed):
    """P1, P2: and on the interior w / n is equal."""
    d = ordinary(seed)
    v = (deviation_definition(d) * d.norm) ** 2
    best = total(v, counts_of(allocate.neyman, d))
    for allocator, (least, _, _) in TABLE.items():
        n = counts_of(allocator, d)
        if least >= 2:
            assert best <= total(v, n) * (1 + 1e-6)
    level = level_of(v**0.5, BUDGET, 2, MOST)
    assert total(v, level) <= best * (1 + 1e-6)
    inner = (level > 2 + 1e-4) & (level < MOST - 1e-4)
    close(np.ptp(v[inner] / level[inner] ** 2), 0, atol=1e-4 * v.max())


def test_variances_are_their_definitions():
    draws, solved = np.float32([0, 1, 16, 16, 16, 2]), np.float32([0, 1, 8, 0, 13, 1])
    p = (solved + 0.5) / (draws + 1)
    close(allocate.smoothed_variance(draws, solved), p * (1 - p))
    want = [0.25, 0.25, 0.266667, 0, 0.1625, 0.5]
    close(allocate.unbiased_variance(draws, solved), want)


@pytest.mark.long
def test_prompts_right_or_wrong_by_luck_are_not_starved_when_smoothed():
    d = difficulty(draws=[4, 4, 4, 4], solved=[0, 1, 2, 4])
    smoothed = counts_of(allocate.bernoulli, d, 64, 64)
    raw = partial(allocate.bernoulli, estimate=allocate.unbiased_variance)
    assert counts_of(raw, d, 64, 64)[[0, 3]].tolist() == [2, 2]
    assert (smoothed[[0, 3]] >= 11).all()


@pytest.mark.long
def test_the_dead_are_skipped_until_something_changes():
    d = difficulty(
        draws=[100, 100, 100, 7, 0, 8],
        solved=[0, 100, 5, 0, 0, 1],
    )
    assert counts_of(allocate.skip_dead, d, 48, 24).tolist() == [1, 1, 1, 15, 15, 15]
    patient = partial(allocate.skip_dead, draws=200.0)
    assert counts_of(patient, d, 48, 24).tolist() == [8] * 6
    strict = partial(allocate.skip_dead, margin=0.0, least=0)
    assert counts_of(strict, d, 48, 24).tolist() == [0, 0, 12, 12, 12, 12]
    # What the living have no room for goes back to the dead.
    assert counts_of(strict, d, 48, 11).tolist() == [2, 2, 11, 11, 11, 11]


# ----- uniform, rows_to_draw


@pytest.mark.parametrize("prompts", [1, 3, 7])
@pytest.mark.parametrize("budget", [0, 1, 7, 20])
def test_a_uniform_budget_is_spent_evenly_and_whole(prompts, budget):
    d = difficulty(draws=np.zeros(prompts))
    counts = np.asarray(allocate.uniform(d, budget=budget, most=20))
    assert counts.dtype == np.int32
    assert counts.sum() == budget
    assert np.ptp(counts) <= 1
    assert (np.diff(counts) <= 0).all()


rows_to_draw = jax.jit(partial(allocate.rows_to_draw, rows=ROWS))


@given(hnp.arrays(np.int32, 4, elements=st.integers(0, 4)))
def test_a_plan_is_its_definition(counts):
    got = jax.device_get(rows_to_draw(counts))
    want = [(b, member) for b in range(4) for member in range(counts[b])]
    named = list(zip(got.prompt.tolist(), got.member.tolist(), strict=True))
    assert named[: len(want)] == want
    np.testing.assert_array_equal(got.exists, np.arange(ROWS) < len(want))
    np.testing.assert_array_equal(got.context, got.prompt)
    # Rows that do not exist still index something that does.
    assert set(named[len(want) :]) <= {(0, 0)}
    assert {got.prompt.dtype, got.member.dtype, got.context.dtype} == {
        np.dtype("int32")
    }


# ----- what few draws know


def raw_variance(draws, solved):
    """k/n (1 - k/n): 0 for a prompt all right or all wrong so far."""
    return solved / draws * (1 - solved / draws)


def test_the_raw_variance_of_a_small_pilot_starves_what_it_takes_for_dead():
    """L10 of DynaMO: total variance over that of uniform, after pilots of 4.

    Prompts differ in pass rate and length, and V = p (1 - p) E[G^2] with E[G^2] in
    proportion to the length.
    """
    random, prompts, pilot, mean = np.random.default_rng(0), 200, 4, 16
    p, length = random.random(prompts), random.integers(1, 8, prompts)
    v = p * (1 - p) * length
    assert total(v, mean * v**0.5 / np.mean(v**0.5)) < 0.9 * total(v, mean)  # if known
    rules = [
        partial(allocate.bernoulli, least=4, estimate=raw_variance),
        partial(allocate.bernoulli, least=4),
        partial(allocate.neyman, least=4),
    ]
    ratios = []
    for _ in range(10):
        square = random.gamma(2 * pilot, length / (2 * pilot))  # mean of what was drawn
        d = difficulty(
            draws=np.full(prompts, pilot),
            solved=random.binomial(pilot, p),
            norm=np.sqrt(square),
        )
        counts = [counts_of(rule, d, mean * prompts, 64) for rule in rules]
        ratios.append([total(v, n) / total(v, mean) for n in counts])
    raw, smoothed, normed = np.array(ratios).T
    assert raw.min() > 1.3
    assert smoothed.max() < 1.05
    close(smoothed.mean(), 1, rtol=0.03)
    assert normed.max() < 1


QUANTILES = 1024


def beta(a, b, count=20_000):
    """Points in (0, 1), and how much each counts, of a Beta(a, b) distribution.

    From either end to the middle evenly in p^a and (1 - p)^b, so poles do no harm.
    """
    u = (np.arange(count) + 0.5) / count
    low, high = (u * 0.5**a) ** (1 / a), (u * 0.5**b) ** (1 / b)
    weight = np.concatenate(
        [(1 - low) ** (b - 1) * 0.5**a / a, (1 - high) ** (a - 1) * 0.5**b / b]
    )
    return np.concatenate([low, 1 - high]), weight / weight.sum()


@pytest.mark.parametrize(
    ("shape", "root", "floored", "floored_root"),
    [
        ((1.0, 1.0), 0.925, 0.934, 0.949),
        ((0.5, 0.5), 0.811, 0.846, 0.872),
        ((1.0, 4.0), 0.885, 0.898, 0.920),
        ((2.0, 2.0), 0.976, 0.977, 0.983),
        ((0.3, 0.9), 0.707, 0.769, 0.800),
    ],
)
def test_shares_by_the_variance_gain_nothing_and_the_floor_rescues_them(
    shape, root, floored, floored_root
):
    """L1 of DynaMO: by V, sum V / n is that of equal n; by the root it is least.

    Over prompts at the quantiles of a Beta distribution, by the level that allocators
    round.
    """
    points, weight = beta(*shape)
    p = np.interp((np.arange(QUANTILES) + 0.5) / QUANTILES, weight.cumsum(), points)
    variance, budget = p * (1 - p), 16 * QUANTILES

    def against_uniform(share, floor=0):
        """Variance with a floor of so many, and the rest by shares."""
        rest = budget - floor * QUANTILES
        return total(variance, floor + level_of(share, rest, 0, rest)) / total(
            variance, 16
        )

    close(against_uniform(variance), 1.0)
    close(against_uniform(np.sqrt(variance)), root, rtol=0, atol=2e-3)
    close(against_uniform(variance, 8), floored, rtol=0, atol=2e-3)
    close(against_uniform(np.sqrt(variance), 8), floored_root, rtol=0, atol=2e-3)
    if shape == (1.0, 1.0):
        close(against_uniform(np.sqrt(variance)), 6 * (np.pi / 8) ** 2, rtol=1e-3)


@pytest.mark.first(1)
@pytest.mark.parametrize("lengths", [(5, 6), (1, 8)])
def test_dividing_by_the_deviation_leaves_nothing_for_the_pass_rate_to_say(lengths):
    """L3 of DynaMO: with std-scaled advantages, shares by p (1 - p) are worse than even

    Policies over some sequences of tokens: scores add up over the tokens, and one
    answer is right. V = b ((1 - p) S+ + p S-) - |grad p|^2, b = p (1 - p); divided by
    the deviation V / b remains.
    """
    random = np.random.default_rng(0)
    b, variance = [], []
    for _ in range(200):
        steps = random.integers(*lengths)
        chance = random.dirichlet(np.ones(4), steps)  # of 4 tokens at each place
        right = random.integers(0, 4, steps)
        sure = chance[np.arange(steps), right].prod()
        own = chance[np.arange(steps), right]
        squares = (chance**2).sum(-1)
        s_right = (1 - 2 * own + squares).sum()
        s_all = (1 - squares).sum()  # E |e_a - pi|^2, summed over independent tokens
        s_wrong = (s_all - sure * s_right) / (1 - sure)
        spread = sure * (1 - sure)
        b.append(spread)
        total = spread * ((1 - sure) * s_right + sure * s_wrong)
        variance.append(total - sure**2 * s_right)
    b, scaled = np.array(b), np.array(variance) / np.array(b)
    assert (np.array(variance) > 0).all()

    def against_uniform(share):
        n = share / share.mean()
        return (scaled / n).mean() / scaled.mean()

    best = against_uniform(np.sqrt(scaled))
    assert best <= 1
    assert against_uniform(np.sqrt(b)) > 1.05
    assert against_uniform(b) > 1.2 * against_uniform(np.sqrt(b))
    # `neyman` knows of this: told of it, it goes by the norms alone.
    d = difficulty(
        draws=np.full(3, 10, np.float32),
        solved=np.float32([1, 5, 9]),
        norm=np.full(3, 2, np.float32),
    )
    counts = allocate.neyman(d, budget=24, most=24, standardised=True)
    np.testing.assert_array_equal(counts, [8, 8, 8])
