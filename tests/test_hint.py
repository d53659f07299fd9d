"""Hints: where they stand, when they are sought, what is learnt of them, enumerated."""

from functools import partial
from itertools import product

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from contracts import (
    are_the_same_however_they_run,
    by_member,
    close,
    defined,
    effective_weight,
    follow_permutations,
    ignores_absent_entries,
    is_the_same_however_it_runs,
    kept_by_all,
    name,
    pools,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from curax import advantage, hint
from curax.step.methods import hint_sources
from curax.types import Hinting, Prompts

gate_of_four = partial(hint.gate_chance, size=4)

outcomes = hnp.arrays(
    np.float32, (3, 4), elements=st.integers(0, 4).map((0.25).__mul__)
)
existing = hnp.arrays(np.bool_, (3, 4))


def drawn(n):
    """`[2^n, n]` float32: every group of n outcomes."""
    return np.float32(list(product((0, 1), repeat=n)))


def chances(groups, p):
    """How likely each of these groups is at pass rate p, one or one per completion."""
    return np.where(groups == 1, p, 1 - np.asarray(p)).prod(-1)


# ----- contexts


def prompts_of(lengths, tail, width=5):
    """Left-padded prompts of tokens 1, 2, 3 ...; what is padding is 99."""
    place = np.arange(width) - (width - np.asarray(lengths)[:, None])
    return Prompts(
        tokens=np.where(place >= 0, place + 1, 99).astype(np.int32),
        mask=place >= 0,
        id=np.arange(len(lengths), dtype=np.int32),
        target=None,
        tail=None if tail is None else np.int32(tail),
    )


def padded_left(tokens, width):
    return [0] * (width - len(tokens)) + list(tokens)


two = st.lists(st.integers(0, 5), min_size=2, max_size=2)
either_tail = st.none() | st.lists(st.integers(0, 6), min_size=2, max_size=2)
some_hints = hnp.arrays(np.bool_, (2, 3))
joined = jax.jit(hint.joined)
mapped = jax.jit(jax.vmap(hint.joined))


@settings(max_examples=25)
@given(two, either_tail, some_hints)
def test_a_hinted_context_is_its_prompt_with_a_block_inside(lengths, tail, mask):
    prompts = prompts_of(lengths, tail)
    tokens = np.int32([[11, 12, 13], [21, 22, 23]])
    got, plain = joined(prompts, tokens, mask), hint.widened(prompts, 3)
    assert got.tokens.shape == got.mask.shape == plain.tokens.shape == (2, 8)
    assert (got.tokens.dtype, got.mask.dtype) == (jnp.int32, jnp.bool_)
    for b, length in enumerate(lengths):
        real = list(range(1, length + 1))
        block = tokens[b][mask[b]].tolist()
        place = max(length - tail[b], 0) if tail else 0
        want = real[:place] + block + real[place:]
        assert got.tokens[b].tolist() == padded_left(want, 8)
        assert got.mask[b].tolist() == padded_left([True] * len(want), 8)
        assert plain.tokens[b].tolist() == padded_left(real, 8)
        assert plain.mask[b].tolist() == padded_left([True] * length, 8)
    for one in (mapped(prompts, tokens, mask), hint.joined(prompts, tokens, mask)):
        jax.tree.map(np.testing.assert_array_equal, one, got)


def test_without_columns_for_hints_a_context_is_its_prompt():
    prompts = prompts_of([5, 2], [1, 1])
    got, plain = hint.widened(prompts, 0), hint.none(prompts)
    np.testing.assert_array_equal(got.mask, plain.mask)
    np.testing.assert_array_equal(got.tokens, np.where(plain.mask, plain.tokens, 0))
    assert plain.tokens is prompts.tokens


# ----- triggers, and what decides between groups


def open_chance(row):
    """That a group of four has both kinds, at the share right of these outcomes."""
    p = np.mean(row > 0.5) if len(row) else 0.0
    return 1 - p**4 - (1 - p) ** 4


def is_one_sided(row):
    return len(row) > 0 and np.mean(row > 0.5) in (0, 1)


# Every judge of groups with its definition, of the outcomes that exist.
JUDGES = {
    hint.all_wrong: lambda row: len(row) > 0 and not any(row > 0.5),
    hint.no_signal: is_one_sided,
    gate_of_four: open_chance,
}


def naive(judge, outcome, exists):
    return [JUDGES[judge](o[e]) for o, e in zip(outcome, exists, strict=True)]


STAGE = JUDGES, outcomes, existing
test_a_judge_of_groups_is_its_definition = defined(*STAGE, naive=naive)
test_a_judge_reads_what_exists_in_any_order = kept_by_all(
    *STAGE, counts=lambda outcome, exists: exists, axes=(0, 1), examples=15
)


@given(outcomes, existing, outcomes, existing)
def test_the_more_mixed_group_stays_and_of_equal_ones_the_last(new, given_, old, had):
    got = jax.jit(hint.replaces)(new, given_, old, had)
    for b in range(3):
        rows = new[b, given_[b]], old[b, had[b]]
        now, before = (open_chance(row) for row in rows)
        assert got[b] == (len(rows[0]) > 0 and now >= before - 1e-12)
    absent = np.float32(np.nan)
    poisoned = np.where(given_, new, absent), np.where(had, old, absent)
    np.testing.assert_array_equal(
        hint.replaces(poisoned[0], given_, poisoned[1], had), got
    )


def test_a_judge_is_the_same_however_it_runs():
    random = np.random.default_rng(0)
    grids = [random.integers(0, 2, (8, 4)).astype(np.float32) for _ in range(2)]
    exists = [random.random((8, 4)) < 0.8 for _ in range(2)]
    are_the_same_however_they_run(JUDGES, grids[0], exists[0])
    arrays = [grids[0], exists[0], grids[1], exists[1]]
    is_the_same_however_it_runs(hint.replaces, *arrays)


def test_all_wrong_is_asked_again_and_all_right_is_not():
    """SAGE 1: which groups a hint is sought for."""
    outcome = np.float32([[0, 0, 0, 0], [1, 1, 1, 1], [0, 1, 0, 0]])
    exists = np.ones((3, 4), bool)
    assert hint.all_wrong(outcome, exists).tolist() == [True, False, False]
    assert hint.no_signal(outcome, exists).tolist() == [True, True, False]


def test_right_and_wrong_exchanged_make_the_same_gate_to_the_last_bit():
    width = np.arange(7)
    n, k = np.array([(n, k) for n in range(8) for k in range(n + 1)]).T
    exists = width < n[:, None]
    right, wrong = np.float32(width < k[:, None]), np.float32(width >= k[:, None])
    got = hint.gate_chance(right, exists, size=7)
    np.testing.assert_array_equal(got, hint.gate_chance(wrong, exists, size=7))
    np.testing.assert_array_equal(hint.replaces(right, exists, wrong, exists), n > 0)


GATE = {  # u(p) at p of .01, .05, .1, .2, .3, .5, .9
    2: (0.0198, 0.095, 0.18, 0.32, 0.42, 0.5, 0.18),
    4: (0.039404, 0.185488, 0.3438, 0.5888, 0.7518, 0.875, 0.3438),
    8: (0.077255, 0.336580, 0.569533, 0.832225, 0.942286, 0.992188, 0.569533),
    16: (0.148542, 0.559873, 0.814698, 0.971853, 0.996677, 0.999969, 0.814698),
    32: (0.275020, 0.806289, 0.965663, 0.999208, 0.999989, 1.0, 0.965663),
}


def mixed_chances(p, sizes):
    """`[sizes, ...]`, compiled as one."""
    return np.asarray(
        jax.jit(lambda p: jnp.stack([hint.mixed_chance(p, size=n) for n in sizes]))(p)
    )


def test_the_chance_of_a_mixed_group_is_the_published_one():
    """SAGE, gate: the table, and the chance over all groups of eight."""
    p = np.float32([0.01, 0.05, 0.1, 0.2, 0.3, 0.5, 0.9, 1e-12, 0, 1])
    got = mixed_chances(p, GATE)
    np.testing.assert_allclose(got[:, :7], list(GATE.values()), rtol=0, atol=1e-6)
    np.testing.assert_allclose(got[2, 7], 7.999999999972e-12, rtol=3e-7)
    np.testing.assert_array_equal(got[:, 8:], 0)
    groups = drawn(8)
    mixed = ~np.asarray(hint.no_signal(groups, np.ones(groups.shape, bool)))
    close(got[2, :7], [chances(groups, q) @ mixed for q in np.float64(p[:7])])


def test_the_chance_of_a_mixed_group_keeps_its_digits_and_its_shape():
    """SAGE, gate: symmetric, concave, largest at 1/2, and no digits lost near 0."""
    random, p = np.random.default_rng(0), np.linspace(0, 1, 201)
    rates, q = random.random((50, 3)), random.dirichlet(np.ones(3), 50)
    least = {8: 0.25, 16: 0.134, 32: 0.069}  # of p for which u is at least 0.9
    around = np.array([[rate - 0.001, rate + 0.001] for rate in least.values()])
    at = [[1e-12], p, rates.ravel(), (q * rates).sum(-1), around.ravel()]
    ends, sizes = np.cumsum([len(x) for x in at])[:-1], (2, 3, 4, 8, 16, 32)
    with jax.enable_x64(True):
        u = mixed_chances(np.concatenate(at), sizes)
    parts = {n: np.split(row, ends) for n, row in zip(sizes, u, strict=True)}
    np.testing.assert_allclose(parts[8][0], 7.999999999972e-12, rtol=1e-12)
    for _, curve, of_rates, of_mean, _ in parts.values():
        np.testing.assert_allclose(curve, curve[::-1], rtol=1e-12)
        assert curve.argmax() == 100
        assert ((q * of_rates.reshape(50, 3)).sum(-1) < of_mean).all()
    for n in (2, 3, 8):
        assert (np.diff(parts[n][1], 2) < 0).all()
    for i, n in enumerate(least):
        assert (parts[n][4].reshape(3, 2)[i] >= 0.9).tolist() == [False, True]
    assert parts[4][1].max() == 0.875


def test_hints_of_their_own_open_more_groups_than_one_they_share():
    """SAGE, remark 3.4, corrected: it is not the gate that asks for a shared hint."""
    groups = drawn(8)
    mixed = ~np.asarray(hint.no_signal(groups, np.ones(groups.shape, bool)))
    shared = np.mean([chances(groups, p) @ mixed for p in (0.1, 0.9)])
    own = np.mean(  # each completion has the hint at 0.1 or that at 0.9, evenly
        [chances(groups, np.array(p)) @ mixed for p in product((0.1, 0.9), repeat=8)]
    )
    assert (round(shared, 4), round(own, 4)) == (0.5695, 0.9922)


# ----- controllers

NEXT = {  # from level 1, by the number of right completions
    (hint.paper, 4): (2, 2, 1, 1, 1),
    (hint.paper, 8): (2, 2, 2, 1, 1, 1, 1, 1, 1),
    (hint.hysteresis, 4): (2, 1, 0, 0, 0),
    (hint.hysteresis, 8): (2, 1, 1, 0, 0, 0, 0, 0, 0),
}


@pytest.mark.parametrize(
    ("controller", "size"), NEXT, ids=[f"{name(rule)}-{size}" for rule, size in NEXT]
)
def test_the_next_level_is_the_tabled_one(controller, size):
    """SAGE 9: from every level, clipped at both ends."""
    rate = np.float32(np.arange(size + 1)) / np.float32(size)
    step = jax.jit(partial(controller, levels=3))
    got = [step(np.full(size + 1, level, np.int32), rate) for level in range(4)]
    change = np.array(NEXT[controller, size]) - 1
    for level in range(4):
        np.testing.assert_array_equal(got[level], np.clip(level + change, 0, 3))
    assert got[0].dtype == jnp.int32


@pytest.mark.parametrize("controller", [hint.paper, hint.hysteresis], ids=name)
def test_a_level_that_was_not_measured_stays(controller):
    """SAGE 9: the first visit is without a hint."""
    level, rate = np.int32([0, 1, 2, 3, 5]), np.full(5, np.nan, np.float32)
    assert controller(level, rate, levels=3).tolist() == [0, 1, 2, 3, 3]


def test_the_bounds_of_a_controller_are_on_the_side_they_are_said_to_be():
    level, rate = np.ones(3, np.int32), np.float32([0.1, 0.35, 0.36])
    assert hint.paper(level, rate, levels=3).tolist() == [2, 1, 1]
    assert hint.hysteresis(level, rate, levels=3).tolist() == [2, 1, 0]
    assert hint.paper(level, rate, levels=3, alpha=0.1).tolist() == [1, 1, 1]
    same = hint.hysteresis(level, rate, levels=3, low=0.35, high=0.35)
    assert same.tolist() == [2, 2, 0]
    with pytest.raises(ValueError, match=r"low=0\.4 is above high=0\.2.*at most 0\.2"):
        hint.hysteresis(level, rate, levels=3, low=0.4, high=0.2)


# ----- sources


def solutions(prompts):
    """10, 20, 30 ... as long as the prompt's id says."""
    n = prompts.id[:, None]
    xp = n.__array_namespace__()
    place = xp.arange(10, dtype=xp.int32)[None]
    return 10 * (place + 1), place + 0 * n < n


def between(tokens, mask):
    """A token in front of a hint, one that hints may not have; a missing one stays."""
    xp = tokens.__array_namespace__()
    some = mask.any(-1, keepdims=True)
    front = 0 * tokens[..., :1] + 80
    return xp.concatenate([front, tokens], -1), xp.concatenate([some, mask], -1)


def names_eighty(prompts, tokens, mask):
    return ((tokens == 80) & mask).any(-1)


HINTING = Hinting(solution=solutions, wrap=between, leaks=names_eighty)


def of_lengths(*lengths):
    prompts = prompts_of([3] * len(lengths), None)
    return prompts.replace(id=np.int32(lengths))


@pytest.mark.parametrize(
    ("shares", "want"),
    [
        (None, [[0, 0, 0], [1, 1, 1], [1, 2, 3], [2, 3, 4], [2, 5, 8]]),
        ((0.05, 0.5, 1.0), [[0, 0, 0], [1, 1, 1], [1, 2, 4], [1, 3, 6], [1, 5, 10]]),
    ],
)
def test_a_prefix_is_the_beginning_of_the_solution(shares, want):
    """Halves to even: 2.5 is 2, 7.5 is 8; something of every solution."""
    prompts = of_lengths(0, 1, 4, 6, 10)
    source = partial(
        hint.reference_prefix, HINTING, levels=3, shares=shares, written=None
    )
    tokens, mask = source(prompts)
    assert isinstance(tokens, np.ndarray)
    assert isinstance(mask, np.ndarray)
    for b, level in product(range(5), range(3)):
        assert tokens[b, level][mask[b, level]].tolist() == [
            10 * (i + 1) for i in range(want[b][level])
        ]
        assert mask[b, level].tolist() == [True] * want[b][level] + [False] * (
            10 - want[b][level]
        )
    compiled = jax.jit(source)(prompts)
    jax.tree.map(np.testing.assert_array_equal, compiled, (tokens, mask))
    assert (tokens.dtype, mask.dtype) == (np.int32, np.bool_)


@pytest.mark.parametrize("run", [lambda f: f, jax.jit], ids=["numpy", "compiled"])
def test_hints_are_wrapped_whole_or_missing(run):
    prompts = of_lengths(0, 4, 6, 10)

    @run
    def made(prompts):
        tokens, mask = hint.reference_prefix(HINTING, prompts, levels=3, written=None)
        narrow = hint_sources.ready(HINTING, prompts, tokens, mask, width=4)
        return narrow, hint_sources.ready(HINTING, prompts, tokens, mask, width=20)

    (narrow, why), (wide, wide_why) = made(prompts)
    assert narrow.tokens.shape == narrow.mask.shape == (4, 3, 4)
    assert wide.tokens.shape == wide.mask.shape == (4, 3, 20)
    hints = [0, 0, 0], [1, 2, 3], [2, 3, 4], [2, 5, 8]  # the last of ten names 80
    assert np.asarray(why["missing"]).tolist() == [[True] * 3] + [[False] * 3] * 3
    assert np.asarray(why["leaked"]).tolist() == [[False] * 3] * 3 + [[0, 0, 1]]
    long = np.asarray(why["overlong"]).tolist()
    assert long == [[False] * 3] * 2 + [[0, 0, 1], [0, 1, 0]]
    assert not np.asarray(wide_why["overlong"]).any()
    dropped = sum(np.asarray(w).astype(int) for w in why.values())
    assert dropped.max() == 1  # one reason each
    for b, level in product(range(4), range(3)):
        want = [80, *(10 * (i + 1) for i in range(hints[b][level]))]
        for got, reasons in ((narrow, why), (wide, wide_why)):
            left = [] if any(w[b, level] for w in reasons.values()) else want
            width = got.tokens.shape[-1]
            assert got.tokens[b, level].tolist() == left + [0] * (width - len(left))
            assert got.mask[b, level].sum() == len(left)
            assert got.mask[b, level][: len(left)].all()
    assert isinstance(narrow.tokens, np.ndarray if run is not jax.jit else jax.Array)
    assert (narrow.tokens.dtype, narrow.mask.dtype) == (np.int32, np.bool_)


def test_hints_are_read_where_they_are_written_and_kept():
    prompts, levels = of_lengths(1, 2), (np.ones((2, 3, 4), np.int32), None)

    def read(prompts, tokens, mask):
        return tokens + prompts.id[:, None, None], mask

    hinting = Hinting(
        solution=None, wrap=between, leaks=names_eighty, parse=read, from_file=solutions
    )
    tokens, _ = hint.self_written(hinting, prompts, levels=3, written=levels)
    assert tokens[:, 0, 0].tolist() == [2, 3]
    filed = Hinting(
        solution=None,
        wrap=between,
        leaks=names_eighty,
        from_file=lambda prompts: levels,
    )
    assert hint.from_file(filed, prompts, levels=3, written=None) is levels
    for source, task in ((hint.self_written, hinting), (hint.from_file, filed)):
        with pytest.raises(ValueError, match=r"levels=2, .* 3 levels; set hint.levels"):
            source(task, prompts, levels=2, written=levels)
    with pytest.raises(ValueError, match=r"self_written needs hint\.writing"):
        hint.self_written(hinting, prompts, levels=3, written=None)
    with pytest.raises(ValueError, match="self_written needs"):
        hint.self_written(filed, prompts, levels=3, written=levels)
    with pytest.raises(ValueError, match="from_file needs a file"):
        hint.from_file(HINTING, prompts, levels=3, written=None)
    with pytest.raises(ValueError, match="reference_prefix needs reference solutions"):
        hint.reference_prefix(filed, prompts, levels=3, written=None)


@pytest.mark.parametrize("shares", [(0.5,), (0.5, 0.5), (0.0, 0.5), (0.5, 1.1)])
def test_shares_are_one_per_level_and_ascend(shares):
    with pytest.raises(ValueError, match="2 numbers in"):
        hint.reference_prefix(
            HINTING, of_lengths(4), levels=2, shares=shares, written=None
        )


# ----- credit of completions drawn with a hint and trained without


def normalised(credit, outcome, log_ratio):
    right = outcome > 0.5
    rho = np.exp(log_ratio - max(log_ratio[right], default=0)) * right
    return len(rho) * rho / rho.sum() if right.any() else np.zeros(len(rho))


# Every mode with its definition, of the completions of a hinted group that exist.
MODES = {
    hint.dropped: lambda credit, outcome, log_ratio: credit,
    hint.sequence_weighted: lambda c, o, log_ratio: (
        np.exp(np.minimum(log_ratio, 20)) * c
    ),
    hint.self_normalised: normalised,
}
credits = hnp.arrays(np.float32, (3, 4), elements=st.integers(-8, 8).map((0.5).__mul__))
log_ratios = hnp.arrays(
    np.float32, (3, 4), elements=st.integers(-160, 120).map((0.25).__mul__)
)
hinted_ones = hnp.arrays(np.bool_, 3)


def undone(mode, credit, outcome, exists, log_ratio, hinted):
    want = np.where(exists, credit, 0).astype(np.float64)
    for b in np.flatnonzero(hinted):
        row = exists[b]
        group = (x[b, row].astype(np.float64) for x in (credit, outcome, log_ratio))
        want[b, row] = MODES[mode](*group)
    return want


@given(st.tuples(credits, outcomes, existing, log_ratios, hinted_ones))
def test_a_mode_is_its_definition(arrays):
    for mode, got in by_member(MODES, *arrays):
        close(got, undone(mode, *arrays), err_msg=name(mode))
        ignores_absent_entries(mode, *arrays, counts=arrays[2])


def test_a_mode_is_the_same_however_it_runs():
    random = np.random.default_rng(0)
    credit, log_ratio = np.float32(random.normal(size=(2, 8, 4)))
    outcome, exists = np.float32(random.random((8, 4))), random.random((8, 4)) < 0.8
    hinted = random.random(8) < 0.7
    arrays = (credit, outcome, exists, log_ratio, hinted)
    are_the_same_however_they_run(MODES, *arrays)
    follow_permutations(MODES, *arrays, order=[2, 0, 3, 1], axis=1)


def test_what_cannot_or_must_be_said_without_the_hint_keeps_credit_finite():
    ones, exists = np.ones((2, 3), np.float32), np.ones((2, 3), bool)
    log_ratio = np.float32([[-np.inf, 0, np.inf], [-np.inf] * 3])
    arrays = (ones, ones, exists, log_ratio, np.ones(2, bool))
    close(hint.sequence_weighted(*arrays)[0], [0, 1, np.exp(20)])
    never = np.float32([[-np.inf, 0, -200], [-np.inf] * 3])
    got = hint.self_normalised(*arrays[:3], never, arrays[4])
    close(got, [[0, 3, 0], [0, 0, 0]])


class Toy:
    """Two steps of four tokens; logits are shared ones plus those of the context.

    Under the hint each step has the chances (1/2, 1/4, 1/8, 1/8) in some order, so 64
    completions can be drawn just as often as they are likely.
    """

    def __init__(self, *, shared):
        random = np.random.default_rng(3)
        self.right = np.zeros(16)
        self.right[[1, 6, 14]] = 1.0
        own, common = random.normal(size=(2, 5, 4))
        wanted = np.log([random.permutation([1 / 2, 1 / 4, 1 / 8, 1 / 8]) for _ in own])
        common = common if shared else np.zeros((5, 4))
        self.shared = shared
        self.theta = np.stack([common, own, wanted - common])  # and x, and (x, h)

    def logp_tokens(self, theta, context):
        """`[16, 2]`: what each completion's tokens have in this context."""
        logits = theta[context] + (theta[0] if self.shared else 0)
        logp = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
        return np.array(
            [[logp[0, a], logp[1 + a, b]] for a, b in product(range(4), repeat=2)]
        )

    def logp(self, theta, context):
        return self.logp_tokens(theta, context).sum(-1)

    def slope(self, function):
        """By complex steps: exact up to rounding. `[..., 60]`."""
        steps = 1e-30j * np.eye(self.theta.size).reshape(-1, *self.theta.shape)
        return np.stack([function(self.theta + s).imag / 1e-30 for s in steps], -1)

    def pass_rate(self, theta, context):
        return self.right @ np.exp(self.logp(theta, context))


@pytest.fixture(scope="module")
def toy():
    return Toy(shared=True)


def test_without_shared_parameters_a_hinted_gradient_leaves_the_plain_policy_alone():
    """SAGE 6, over all groups of three: exactly 0 there, and grad p_0 if corrected."""
    toy = Toy(shared=False)
    index = np.array(list(product(range(16), repeat=3)))  # [4096, 3]
    outcome, exists = np.float32(toy.right[index]), np.ones(index.shape, bool)
    plain, hinted = (toy.logp(toy.theta, context)[index] for context in (1, 2))
    credit = advantage.leave_one_out(outcome, exists)
    arrays = (credit, outcome, exists, np.float32(plain - hinted), exists[:, 0])
    weighted = hint.sequence_weighted(*arrays)

    def update(credit, context):
        """Expected one of all parameters: `[shared, of x, of (x, h)]`."""
        each = np.exp(hinted.sum(-1))[:, None] * np.float64(credit) / 3
        score = toy.slope(lambda theta: toy.logp(theta, context))
        return (np.bincount(index.reshape(-1), each.reshape(-1), 16) @ score).reshape(
            3, 20
        )

    def slope(context):
        return toy.slope(lambda theta: toy.pass_rate(theta, context)).reshape(3, 20)

    as_drawn, without = update(credit, 2), update(weighted, 1)
    assert not as_drawn[:2].any()
    for got, want in ((as_drawn, slope(2)), (without, slope(1))):
        assert abs(want).max() > 1e-3
        np.testing.assert_allclose(got, want, rtol=0, atol=1e-5 * abs(want).max())


def test_both_weight_and_score_without_the_hint_make_the_gradient_exact(toy):
    """SAGE 7, enumerated in float64, with the baseline and the transfer bound.

    Of all completions at once, `hint.sequence_weighted` has the credit of the law.
    """
    p0, ph = (toy.pass_rate(toy.theta, context) for context in (1, 2))
    grad = toy.slope(lambda theta: toy.pass_rate(theta, 1))
    plain, hinted = (toy.logp(toy.theta, context) for context in (1, 2))
    scores = [toy.slope(lambda theta, c=c: toy.logp(theta, c)) for c in (1, 2)]
    chance, rho = np.exp(hinted), np.exp(plain - hinted)
    exact = (chance * rho * toy.right) @ scores[0]
    np.testing.assert_allclose(exact, grad, rtol=0, atol=1e-12)
    right, every = np.float32(toy.right), np.ones(16, bool)
    arrays = (right, right, every, np.float32(plain - hinted), np.array(True))
    credit = np.asarray(hint.sequence_weighted(*arrays), np.float64)
    close(credit, rho * toy.right)
    assert abs(chance @ (rho * toy.right) - p0) < 1e-12
    assert p0 >= ph * np.exp((chance * toy.right / ph) @ (plain - hinted))
    # A baseline changes nothing.
    based = (chance * rho * (toy.right - 0.3)) @ scores[0]
    np.testing.assert_allclose(based, grad, rtol=0, atol=1e-12)
    # The score under the hint, no ratio, and ratios of single tokens are wrong.
    tokens = [toy.logp_tokens(toy.theta, context) for context in (1, 2)]
    token_scores = toy.slope(lambda theta: toy.logp_tokens(theta, 1))
    by_token = (chance * toy.right)[:, None] * np.exp(tokens[0] - tokens[1])
    for wrong in (
        np.einsum("nt,ntd->d", by_token, token_scores),
        (chance * rho * toy.right) @ scores[1],
        (chance * toy.right) @ scores[0],
    ):
        assert np.linalg.norm(wrong - grad) > 0.1 * np.linalg.norm(grad)


def group_of_64(toy):
    """(completions as often as they are likely under the hint, their log-ratios)."""
    hinted = toy.logp(toy.theta, 2)
    times = np.rint(64 * np.exp(hinted)).astype(int)
    np.testing.assert_allclose(times, 64 * np.exp(hinted), rtol=1e-12)
    drawn = np.repeat(np.arange(16), times)
    assert len(drawn) == 64
    return drawn, (toy.logp(toy.theta, 1) - hinted)[drawn]


def test_a_group_like_its_policy_gives_the_gradients_of_p_and_of_log_p(toy):
    """SAGE 7 by the functions themselves, in float32."""
    drawn, log_ratio = group_of_64(toy)
    outcome, exists = np.float32(toy.right[drawn]), np.ones(64, bool)
    score = toy.slope(lambda theta: toy.logp(theta, 1))[drawn]
    grad = toy.slope(lambda theta: toy.pass_rate(theta, 1))
    arrays = (outcome, outcome, exists, np.float32(log_ratio), np.array(True))
    of_p = np.asarray(hint.sequence_weighted(*arrays)) @ score / 64
    of_log_p = np.asarray(hint.self_normalised(*arrays)) @ score / 64
    p0 = toy.pass_rate(toy.theta, 1)
    np.testing.assert_allclose(of_p, grad, rtol=0, atol=1e-5 * abs(grad).max())
    of_log = abs(grad).max() / p0
    np.testing.assert_allclose(of_log_p, grad / p0, rtol=0, atol=1e-5 * of_log)


ESTIMATORS = [advantage.leave_one_out, advantage.group_mean, advantage.standardised]


@pytest.mark.parametrize("estimate", ESTIMATORS, ids=name)
def test_over_all_groups_a_mode_ascends_what_it_says(toy, estimate):
    """SAGE 7 over all groups of three: w(p_h) grad p_0, or of E[(r - p_h) log pi]."""
    index = np.array(list(product(range(16), repeat=3)))  # [4096, 3]
    logp = [toy.logp(toy.theta, context) for context in (1, 2)]
    outcome, exists = np.float32(toy.right[index]), np.ones(index.shape, bool)
    log_ratio = np.float32((logp[0] - logp[1])[index])
    chance = np.exp(logp[1][index].sum(-1))
    score = toy.slope(lambda theta: toy.logp(theta, 1))
    arrays = (estimate(outcome, exists), outcome, exists, log_ratio, exists[:, 0])

    def expected(mode):
        """E of the mean over a group of credit times score; credit of a completion."""
        credit = np.asarray(mode(*arrays), np.float64) * chance[:, None] / 3
        return np.bincount(index.reshape(-1), credit.reshape(-1), 16) @ score

    ph = toy.pass_rate(toy.theta, 2)
    pool = np.asarray(estimate(pools(3), np.ones((4, 3), bool)))
    w = effective_weight(pool / 3, ph)
    grad = toy.slope(lambda theta: toy.pass_rate(theta, 1))
    weighted = expected(hint.sequence_weighted)
    np.testing.assert_allclose(weighted, w * grad, rtol=0, atol=1e-5 * abs(grad).max())
    imitated = (np.exp(logp[1]) * (toy.right - ph)) @ score
    close(expected(hint.dropped), w * imitated, atol=1e-5 * abs(imitated).max())
    if estimate is advantage.leave_one_out:
        assert abs(w - 1) < 1e-6
