"""R3: its definition, its published numbers, and which prompts are worth it."""

from functools import partial
from itertools import product
from math import ceil, floor

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from contracts import close, is_the_same_however_it_runs, poisoned
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from scipy import stats

from curax import advantage, reflect
from curax.step.methods import candidates

NAN = np.float32(np.nan)
few = settings(max_examples=20)
eighths = st.integers(-80, 0).map(lambda i: i / 8)
logps = hnp.arrays(np.float32, (2, 4, 5), elements=eighths)  # [B, G, Y]
existing = hnp.arrays(np.bool_, (2, 4))
masks = hnp.arrays(np.bool_, (2, 5))
lengths = hnp.arrays(np.int32, (2, 4), elements=st.integers(0, 300))
rewards = hnp.arrays(np.float32, (2, 4), elements=eighths)


def noise_taken_off(square, n, floor):
    if n < 2 or not square.size:
        return np.zeros_like(square)
    bessel = square * n / (n - 1)
    return np.maximum(
        bessel - np.median(bessel) * (1 + floor * (2 / (n - 1)) ** 0.5), 0
    )


# Weights with their definition, (variances of the tokens, completions) -> g. Options
# are such that no variance of eighths lies on a bound.
WEIGHTS = {
    reflect.mean: lambda square, n: np.ones_like(square),
    reflect.sigma: lambda square, n: np.sqrt(square),
    reflect.variance: lambda square, n: square,
    partial(reflect.denoised, floor=0.61): lambda square, n: noise_taken_off(
        square, n, 0.61
    ),
}
KINDS = [*WEIGHTS, reflect.denoised]
LOOKS = [
    *product(KINDS, (False, True), ["own"]),
    *product([reflect.sigma], (False, True), ["none", "shared"]),
]
WITHOUT_MEAN = [look for look in LOOKS if look[0] is not reflect.mean]


@jax.jit
def certainties(logp, exists, mask, shared, own):
    baselines = {"none": None, "shared": shared, "own": own}
    return [
        reflect.certainty(
            logp,
            exists,
            mask,
            weights=kind,
            leave_one_out=out,
            baseline=baselines[baseline],
        )
        for kind, out, baseline in LOOKS
    ]


def everything(logp, exists, mask, shared=None, own=None):
    """A certainty for each of LOOKS; two groups of four completions, or one of them."""
    logp, exists, mask = (
        np.broadcast_to(x, (2, *x.shape[-d:]))
        for x, d in ((logp, 2), (exists, 1), (mask, 1))
    )
    shared = np.zeros((2, 5), np.float32) if shared is None else shared
    own = np.zeros((2, 4, 5), np.float32) if own is None else own
    return dict(zip(LOOKS, certainties(logp, exists, mask, shared, own), strict=True))


def by_definition(define, out, logp, exists, mask):
    """`[n, T]` weights of one group's tokens, float64, and whether all vanished."""
    weight, empty = np.zeros((len(exists), mask.sum())), []
    for i in range(len(exists)):
        rows = exists & ~(out & (np.arange(len(exists)) == i))
        clipped = np.maximum(logp[rows][:, mask], -8.0).astype(np.float64)
        square = clipped.var(0) if rows.any() else np.zeros(mask.sum())
        given = define(square, rows.sum())
        empty += [not given.any()] if exists[i] or not out else []
        given = given if given.any() else np.ones_like(given)
        weight[i] = given / given.sum() if given.size else given
    return weight, all(empty)


@few
@given(logps, existing, masks, logps)
def test_certainty_is_its_definition(logp, exists, mask, other):
    baselines = {"none": 0.0, "shared": other[:, :1], "own": other}
    got = everything(logp, exists, mask, other[:, 0], other)
    for (kind, out, baseline), found in got.items():
        if kind is reflect.denoised:  # at 3, variances of eighths may lie on the bound
            continue
        weight, flat = np.zeros((2, 4, 5)), np.zeros(2, bool)
        for b in range(2):
            tokens, flat[b] = by_definition(
                WEIGHTS[kind], out, logp[b], exists[b], mask[b]
            )
            weight[b][:, mask[b]] = tokens
        value = (weight * (logp - baselines[baseline])).sum(-1)
        close(found.weight, weight)
        close(found.value, np.where(exists, value, 0), atol=1e-5)
        np.testing.assert_array_equal(found.flat, flat)
    for b in range(2):
        clipped = np.maximum(logp[b, exists[b]], -8.0)
        deviation = clipped.std(0) if exists[b].any() else 0.0
        close(found.spread[b], np.where(mask[b], deviation, 0), atol=1e-5)


@few
@given(logps, existing, masks, logps)
def test_nothing_is_read_where_nothing_counts(logp, exists, mask, other):
    counts = exists[..., None] & mask[:, None]
    holes, other_holes = poisoned((logp, other), counts)
    shared = np.where(mask, other[:, 0], NAN)
    got = everything(holes, exists, mask, shared, other_holes)
    for look, want in everything(logp, exists, mask, other[:, 0], other).items():
        jax.tree.map(np.testing.assert_array_equal, got[look], want)
        assert not np.asarray(want.value)[~exists].any()


def first(sizes, width):
    """`[F, width]` True on as many as each size says."""
    return np.arange(width) < np.asarray(sizes)[:, None]


def r3(logp, exists, mask):
    return reflect.certainty(
        logp,
        exists,
        mask,
        weights=reflect.denoised,
        leave_one_out=True,
        baseline=logp[..., 0, :],
    ).value


def together(logp, exists, mask, rank):
    """`[..., G + 1]` what sorts, and what is mapped over completions."""
    hard = candidates.worst_rank(rank, exists, mask)
    return jnp.concatenate([r3(logp, exists, mask), hard[..., None]], axis=-1)


def eight_groups():
    """Arrays of `together`."""
    random = np.random.default_rng(0)
    logp = -random.exponential(size=(8, 4, 5)).astype(np.float32)
    exists, mask = (random.random((8, n)) < 0.8 for n in (4, 5))
    rank = random.integers(1, 20, (8, 4, 5), dtype=np.int32)
    exists[:, 0] = mask[:, 0] = True  # infinity is not close to itself
    return logp, exists, mask, rank


def test_functions_are_the_same_however_they_run():
    is_the_same_however_it_runs(together, *eight_groups())


def test_nothing_is_read_uncompiled_either():
    """A compiler may make a selection of a product with a mask."""
    logp, exists, mask, _ = eight_groups()
    holes = np.where(exists[..., None] & mask[:, None], logp, NAN)
    got = r3(holes, exists, mask)
    np.testing.assert_array_equal(got, r3(logp, exists, mask))
    assert np.isfinite(got).all()


VECTOR = np.log(
    np.float32(
        [
            [0.90, 0.80, 0.60, 0.95, 0.99],
            [0.90, 0.80, 0.20, 0.95, 0.98],
            [0.91, 0.79, 0.70, 0.95, 0.99],
            [0.89, 0.81, 0.10, 0.70, 0.97],
        ]
    )
)
ALL, REFERENCE = np.ones(4, bool), np.ones(5, bool)
printed = partial(np.testing.assert_allclose, rtol=0, atol=1.5e-6)


@pytest.mark.parametrize(
    ("kind", "weight", "value"),
    [
        (
            reflect.sigma,
            [0.008194, 0.009219, 0.835858, 0.137909, 0.008820],
            [-0.437061, -1.355434, -0.308238, -1.976989],
        ),
        (reflect.mean, [0.2] * 5, [-0.180135, -0.401888, -0.149610, -0.603395]),
        (
            reflect.variance,
            [0.000094, 0.000118, 0.973188, 0.026492, 0.000108],
            [-0.498525, -1.567683, -0.348508, -2.250336],
        ),
        (
            reflect.denoised,
            [0, 0, 0.973887, 0.026113, 0],
            [-0.498826, -1.568750, -0.348700, -2.251771],
        ),
    ],
    ids=["sigma", "mean", "variance", "denoised"],
)
def test_the_published_group_has_its_weights_and_rewards(kind, weight, value):
    """P7: the vectors."""
    got = everything(VECTOR, ALL, REFERENCE)[kind, False, "own"]
    printed(got.spread[0], [0.007857, 0.008839, 0.801465, 0.132234, 0.008457])
    printed(got.weight[0], np.tile(np.float32(weight), (4, 1)))
    printed(got.value[0], value)
    assert not got.flat.any()


def test_the_published_baseline_cancels_in_the_advantage():
    """P7: a common baseline is a constant, unless each has weights of its own."""
    masked = np.log(np.float32([[0.88, 0.78, 0.30, 0.90, 0.97]] * 2))
    found = everything(VECTOR, ALL, REFERENCE, masked)
    plain, moved = (
        found[reflect.sigma, False, baseline].value for baseline in ("none", "shared")
    )
    printed(plain - moved, np.full((2, 4), -1.024487))
    want = [0.850659, -0.490795, 1.038828, -1.398691]
    printed(standard(plain), [want] * 2)
    close(standard(moved), standard(plain))
    plain, moved = (
        found[reflect.sigma, True, baseline].value for baseline in ("none", "shared")
    )
    assert np.abs(standard(plain) - standard(moved)).max() > 0.01


def standard(values):
    """Values of groups without absent ones in standard deviations, in float64."""
    values = np.asarray(values, np.float64)
    centred = values - values.mean(-1, keepdims=True)
    return centred / centred.std(-1, keepdims=True)


@few
@given(logps, existing, masks, st.integers(-8, 8), st.permutations(range(4)))
def test_r3_follows_completions_and_forgets_common_constants(
    logp, exists, mask, move, order
):
    """P7: constants, permutations, weights that add up to 1 over the mask alone."""
    found = everything(logp, exists, mask, logp[:, 0], logp)
    again = everything(
        logp[:, order], exists[:, order], mask, logp[:, 0], logp[:, order]
    )
    less = [b + np.float32(move) for b in (logp[:, 0], logp)]
    less = everything(logp, exists, mask, *less)
    some = np.broadcast_to(mask.any(-1, keepdims=True), exists.shape)
    for look, want in found.items():
        close(again[look].value, want.value[:, order], atol=1e-5)
        close(again[look].spread, want.spread, atol=1e-5)
        np.testing.assert_array_equal(again[look].flat, want.flat)
        close(want.weight.sum(-1), some.astype(np.float32))
        assert not np.asarray(want.weight).transpose(0, 2, 1)[~mask].any()
        assert (np.asarray(want.weight) >= 0).all()
        moved = np.where(exists & some & (look[2] != "none"), np.float32(move), 0)
        close(want.value - less[look].value, moved, atol=2e-5)


@few
@given(logps, existing, st.permutations(range(5)))
def test_padding_the_reference_changes_nothing(logp, exists, order):
    """P7: padding."""
    mask = first([3, 3], 5)
    padded = np.where(mask[:, None], logp, NAN)[..., order]
    got = everything(padded, exists, mask[:, order])
    for look, want in everything(logp, exists, mask).items():
        close(got[look].value, want.value, atol=1e-5)
        np.testing.assert_array_equal(got[look].flat, want.flat)


@few
@given(logps, existing, st.integers(0, 4))
def test_a_reference_of_one_token_knows_one_kind_of_weights(logp, exists, token):
    """P7: T = 1."""
    mask = np.arange(5) == token
    for got in everything(logp, exists, mask).values():
        close(got.value, np.where(exists, logp[..., token], 0))


@few
@given(logps, existing, masks)
def test_completions_that_are_alike_are_flat_and_learn_nothing(logp, exists, mask):
    """P7: identical thoughts; P15: a group without any difference."""
    alike = np.broadcast_to(logp[:, :1] - np.float32(0.1), logp.shape)
    found = everything(alike, exists, mask)
    for look in WITHOUT_MEAN:
        assert np.asarray(found[look].flat).all()
        assert not np.asarray(found[look].spread).any()
        value = np.asarray(found[look].value)
        for b in range(2):
            assert len(set(value[b, exists[b]])) < 2


@given(hnp.arrays(np.float32, (2, 5), elements=st.integers(0, 64)), masks)
def test_sigma_is_homogeneous(square, mask):
    """P7: sigma doubles with the standard deviation."""
    count = np.full(2, 4, np.float32)
    spread, wider = (
        reflect.Spread(variance=v, count=count) for v in (square, 4 * square)
    )
    np.testing.assert_array_equal(
        reflect.sigma(wider, mask), 2 * reflect.sigma(spread, mask)
    )


@few
@given(logps, masks, hnp.arrays(np.float32, (2, 5), elements=eighths))
def test_weights_without_oneself_are_a_function_of_the_others(logp, mask, new):
    """P7: a reward is linear in the log-probs of its own completion."""
    changed = logp.copy()
    changed[:, 0] = new
    before, after = (everything(x, ALL, mask) for x in (logp, changed))
    for look in LOOKS:
        if look[1]:
            weight = np.asarray(before[look].weight[:, 0])
            np.testing.assert_array_equal(after[look].weight[:, 0], weight)
            close(after[look].value[:, 0], (weight * new).sum(-1), atol=1e-5)


def test_weights_with_oneself_are_not():
    changed = VECTOR.copy()
    changed[0, 0] = -3.0
    before, after = (everything(x, ALL, REFERENCE) for x in (VECTOR, changed))
    for look in WITHOUT_MEAN:
        same = np.isclose(before[look].weight[0], after[look].weight[0]).all(-1)
        np.testing.assert_array_equal(same, [look[1], False, False, False])


def test_one_improbable_token_takes_less_of_the_weight_when_clipped():
    """One at -20 among 16 of -0.1, beside tokens whose sigmas add up to 0.9175: the sum
    that the published 84% and 56% have in common."""
    logp = np.full((16, 11), np.float32(-0.1))
    logp[0, 0] = -20.0
    logp[:, 1:] = -1.0 + 0.09175 * np.where(np.arange(16) % 2, 1, -1)[:, None]
    masks = np.ones(16, bool), np.ones(11, bool)
    look = jax.jit(partial(reflect.certainty, weights=reflect.sigma))
    for clip, share in ((100.0, 0.84), (8.0, None), (5.0, 0.56)):
        got = look(logp, *masks, clip_nats=clip)
        deviation = (min(clip, 20.0) - 0.1) * np.sqrt(15) / 16
        close(got.spread[0], deviation, rtol=1e-5)
        close(got.weight[0, 0], deviation / (deviation + 0.9175), rtol=1e-4)
        if share:
            close(got.weight[0, 0], share, rtol=0, atol=5e-3)
        # The sum has the log-prob as it is.
        close(got.value[0] - got.value[2], -19.9 * got.weight[0, 0], rtol=1e-4)
        close(standard(got.value)[0], -3.87, rtol=0, atol=2e-2)
    default = look(logp, *masks)
    close(default.spread[0], 7.9 * np.sqrt(15) / 16, rtol=1e-5)
    close(look(logp, *masks, clip_nats=100.0).spread[0], 4.82, rtol=0, atol=5e-3)


def test_noise_alone_is_amplified_unless_the_deviation_has_a_floor():
    random = np.random.default_rng(0)
    reward = random.normal(scale=1.1e-4, size=(500, 16)).astype(np.float32)
    exists = np.ones(reward.shape, bool)
    size = [
        float(np.abs(advantage.standardised(reward, exists, floor=floor)).mean())
        for floor in (0.0, 0.05)
    ]
    # A mean of 8,000 is known to 0.01 of itself.
    close(size[0], 0.79, rtol=0, atol=0.02)
    close(size[1], 0.002, rtol=0, atol=5e-4)


def test_long_references_drown_the_mean_and_not_the_denoised():
    """Correlation of R3 with the quality of the thought; of 300 groups standard errors
    are below 0.02, and below 0.002 where it is 0.97 or more."""
    kinds = (reflect.mean, reflect.sigma, reflect.variance, reflect.denoised)
    looks = jax.jit(
        lambda *a: [reflect.certainty(*a, weights=kind).value for kind in kinds]
    )
    random, exists = np.random.default_rng(1), np.ones((300, 16), bool)
    for t, m, noise, want in (
        (50, 3, 0.1, (0.90, 0.987, 0.992, 0.993)),
        (200, 3, 0.3, (0.35, 0.54, 0.70, 0.90)),
        (8, 8, 0.3, (0.977, 0.976, 0.975, 0.975)),
    ):
        quality = random.normal(size=(300, 16, 1)).astype(np.float32)
        logp = random.normal(-3.0, noise, size=(300, 16, 200)).astype(np.float32)
        logp[..., :m] += np.float32(0.5) * quality
        values = looks(logp, exists, first([t] * 300, 200))
        got = [(standard(quality[..., 0]) * standard(x)).mean() for x in values]
        for one, published in zip(got, want, strict=True):
            close(one, published, rtol=0, atol=6e-3 if published > 0.96 else 0.05)


def test_of_noise_hardly_a_token_is_left():
    weigh, random = jax.jit(reflect.denoised), np.random.default_rng(0)
    mask = np.ones((20, 10_000), bool)
    for n, left in ((8, 0.021), (16, 0.012), (32, 0.007)):
        square = random.chisquare(n - 1, mask.shape).astype(np.float32)
        count = np.full(20, n, np.float32)
        got = np.asarray(weigh(reflect.Spread(variance=square, count=count), mask))
        # Of 200,000 tokens the standard error of the share is below 0.0004.
        close((got > 0).mean(), left, rtol=0, atol=1.2e-3)
        want = noise_taken_off(square[0].astype(np.float64), n, 3.0)
        close(got[0], want, rtol=1e-4, atol=1e-4)


def test_weights_of_a_single_completion_are_finite():
    """P15: n < 2 has no variance, and none above noise."""
    for n in (0, 1):
        exists = np.arange(4) < n
        want = [np.where(exists, VECTOR.mean(-1), 0.0)] * 2
        found = everything(VECTOR, exists, REFERENCE)
        for look in LOOKS:
            close(found[look].value, want)
            assert found[look].flat.all() or look not in WITHOUT_MEAN


@few
@given(logps, existing, masks, hnp.arrays(np.bool_, (2, 4, 5)), st.booleans())
def test_completions_that_cannot_be_compared_are_dropped(logp, exists, mask, bad, inf):
    """P15: NaN log-probs, empty references, one survivor."""
    holes = np.where(bad, -np.float32(np.inf) if inf else NAN, logp)
    got = np.asarray(jax.jit(reflect.scored)(holes, exists, mask))
    for b in range(2):
        fine = [
            i
            for i in range(4)
            if exists[b, i] and np.isfinite(holes[b, i, mask[b]]).all()
        ]
        fine = fine if len(fine) > 1 and mask[b].any() else []
        np.testing.assert_array_equal(got[b].nonzero()[0], fine)
    for found in everything(holes, got, mask).values():
        assert np.isfinite(found.value).all()


def test_two_completions_are_the_least_there_are():
    """P15: n = 2; without oneself, one is left and says nothing of spread."""
    pair = np.array([True, False, True, False])
    found = everything(VECTOR, pair, REFERENCE)
    for look in WITHOUT_MEAN:
        value = np.asarray(found[look].value)[0]
        if look[1]:
            assert found[look].flat.all()
            close(value, np.where(pair, VECTOR.mean(-1), 0.0))
        else:
            close(standard(value[pair]), [-1, 1])
    assert not found[reflect.sigma, False, "own"].flat.any()


def test_the_published_lengths_have_their_rewards():
    """P9: the vectors, and the floor that the paper does not have."""
    length = np.int32([0, 50, 100, 150, 300, 1000])
    wanted = np.int32([100])
    plain = reflect.length_term(length, wanted, least=-np.inf)
    close(plain, [0.5, 0.75, 1.0, 0.75, 0.0, -3.5])
    clamped = reflect.length_term(length, wanted)
    close(clamped, [0.5, 0.75, 1.0, 0.75, 0.0, -1.0])
    nothing = reflect.length_term(length[:2], 0 * length[:1])  # P15: no reference
    close(nothing, [0.5, -1.0])


term = jax.jit(reflect.length_term)


@few
@given(lengths, lengths, st.integers(0, 300))
def test_the_length_wanted_is_the_best_and_both_sides_are_alike(length, wanted, away):
    """P9: largest at the length wanted, symmetric, clamped."""
    got = np.asarray(term(length, wanted))
    assert ((got >= -1) & (got <= 1)).all()
    np.testing.assert_array_equal(got == 1, length == np.maximum(wanted, 1))
    close(term(wanted, wanted), np.where(wanted > 0, 1.0, 0.5))
    up, down = wanted + np.int32(away), np.maximum(wanted - np.int32(away), 0)
    both = np.asarray(wanted >= away)
    close(np.where(both, term(up, wanted), 0), np.where(both, term(down, wanted), 0))


floored = partial(reflect.floor, margin=0.25)
RULES = {
    reflect.drop: lambda r, fit: (r, fit),
    floored: lambda r, fit: (
        np.where(fit, r, r.min() - 0.25),
        np.ones(len(r), bool),
    ),
}


@given(rewards, existing, hnp.arrays(np.bool_, (2, 4)))
def test_a_rubric_is_its_definition(reward, exists, fit):
    """P15: a single survivor trains nothing."""
    poison = np.where(exists, reward, NAN)
    for rule, define in RULES.items():
        got, left = map(np.asarray, jax.jit(rule)(poison, exists, fit))
        for b, rows in enumerate(exists):
            want, kept = np.zeros(4), np.zeros(4, bool)
            if rows.any():
                want[rows], kept[rows] = define(reward[b, rows], fit[b, rows])
            kept &= kept.sum() > 1
            np.testing.assert_array_equal(left[b], kept)
            close(got[b], np.where(kept, want, 0))


def test_groups_without_a_fit_answer_learn_nothing_of_the_floor():
    reward, exists = np.float32([[-1, -2, -4, -2]] * 2), np.ones((2, 4), bool)
    fit = np.array([[False] * 4, [True, False, True, True]])
    got, left = map(np.asarray, jax.jit(floored)(reward, exists, fit))
    assert left.all()
    assert (got[0] == got[0, 0]).all()
    assert got[1].argmin() == 1


HARD = np.int32(
    [
        [1, 1, 5, 1, 1, 40, 1, 2, 1, 1],
        [1, 1, 3, 1, 1, 6, 1, 2, 1, 1],
        [2, 1, 80, 1, 9, 300, 1, 2, 1, 1],
    ]
)


def test_the_published_ranks_are_as_hard_as_published():
    """P8: the vectors. What is alone is all there is, and the best of three counts."""
    rank, mask = np.tile(HARD, (4, 1, 1)), np.ones((4, 10), bool)
    exists = np.concatenate([np.eye(3, dtype=bool), np.ones((1, 3), bool)])
    close(hardness(rank, exists, mask), [22.5, 4.5, 190.0, 4.5])
    close(hardness(rank, exists, mask, share=0.1), [40.0, 6.0, 300.0, 6.0])


hardness = jax.jit(candidates.worst_rank, static_argnames="share")
ranks = hnp.arrays(np.int32, (2, 4, 5), elements=st.integers(1, 999))


@given(ranks, existing, masks, ranks, st.sampled_from([0.0, 0.6]))
def test_hardness_is_its_definition_and_rises_with_ranks(
    rank, exists, mask, more, share
):
    """P8: raising a rank never makes a prompt easier; P15: nothing to look at."""
    got = hardness(rank, exists, mask, share=share)
    for b in range(2):
        most = max(1, ceil(round(share * mask[b].sum(), 9)))
        each = [
            np.sort(r[mask[b]])[::-1][:most].mean()
            for r in rank[b, exists[b]]
            if mask[b].any()
        ]
        close(got[b], min(each, default=np.inf))
    raised = np.maximum(rank, more)
    assert (hardness(raised, exists, mask, share=share) >= got).all()


def test_shares_are_those_of_decimals():
    """P8: 0.07 of 100 is 7 and 0.29 is 29, though the product of floats is not."""
    for k in range(101):
        assert reflect.multiples(k / 100, 100, ceil)[100] == k
        assert reflect.multiples(k / 100, 100, floor)[100] == k
    assert reflect.multiples(0.1, 3, ceil).tolist() == [0, 1, 1, 1]
    assert reflect.multiples(0.4, 3, floor).tolist() == [0, 0, 0, 1]


def test_the_largest_sigma_of_noise_grows_with_the_reference():
    """The published table, to 0.01, is of deviations over n - 1; by the law of the
    largest, and by `flatness` of 500 groups: its standard error is below 0.011."""
    table = {
        8: (1.28, 1.48, 1.69, 1.86),
        16: (1.19, 1.34, 1.47, 1.58),
        32: (1.14, 1.23, 1.32, 1.41),
    }
    x, look = np.linspace(0, 4, 8001), jax.jit(candidates.flatness)
    random, mask = np.random.default_rng(0), np.ones((500, 20), bool)
    for n, means in table.items():
        below = stats.chi2(n - 1).cdf((n - 1) * x**2)
        for t, want in zip((5, 20, 100, 600), means, strict=True):
            close(np.trapezoid(1 - below**t, x), want, rtol=0, atol=1e-2)
        logp = random.normal(size=(500, 32, 20)).astype(np.float32)
        got = np.asarray(look(logp, first([n] * 500, 32), mask)).mean()
        want = np.trapezoid(1 - below**20, x)
        close(got * np.sqrt(n / (n - 1)), want, rtol=0, atol=0.035)


chance = jax.jit(partial(candidates.null_chance, clip_nats=100.0))


def test_the_chance_under_noise_is_exact_whatever_the_length():
    """P8: it is the share of pure noise that has as large a ratio, so a level passes
    that share of noise, in groups and references of every size. 20,000 draws of each
    size have a standard error below 0.0036. Of two variances the ratio is one of F."""
    random = np.random.default_rng(0)
    sizes = np.array(list(product((2, 3, 8, 16), (2, 3, 4, 9, 40))))
    logp = random.normal(size=(20, 16, 40)).astype(np.float32)
    exists, mask = first(sizes[:, 0], 16), first(sizes[:, 1], 40)
    got = np.asarray(chance(logp, exists, mask))
    assert np.ptp(got) > 0.9
    for (n, t), x, found in zip(sizes, logp.astype(np.float64), got, strict=True):
        square = np.sort(x[:n, :t].var(0))
        noise = np.sort(random.chisquare(n - 1, (20_000, t)))
        middle = -(-t // 2) - 1
        ratio = square[-1] / square[middle]
        as_large = noise[:, -1] >= ratio * noise[:, middle]
        close(found, as_large.mean(), rtol=0, atol=0.0125)
        if t == 2:
            close(found, 2 * stats.f(n - 1, n - 1).sf(ratio), rtol=2e-5)


def test_the_chance_is_its_integral():
    """Over F(s0^2), which is a draw of Beta; the function integrates over log s0^2."""
    sizes = [(2, 3), (3, 40), (16, 9)]
    logp = np.random.default_rng(0).normal(size=(20, 16, 40)).astype(np.float32)
    exists, mask = (np.ones((20, n), bool) for n in (16, 40))
    for b, (n, t) in enumerate(sizes):
        exists[b, n:] = mask[b, t:] = False
    got = np.asarray(chance(logp, exists, mask))
    for b, (n, t) in enumerate(sizes):
        square = np.sort(logp[b, :n, :t].astype(np.float64).var(0))
        k, law = (t + 1) // 2, stats.chi2(n - 1)
        ratio, place = square[-1] / square[k - 1], stats.beta(k, t - k + 1)
        f = np.linspace(0, 1, 20_002)[1:-1]
        beyond = law.sf(ratio * law.ppf(f)) / (1 - f)
        want = np.trapezoid(place.pdf(f) * (1 - (1 - beyond) ** (t - k)), f)
        close(got[b], want, rtol=2e-4)


def test_the_chance_is_of_what_stands_out_and_defined_everywhere():
    """P15: nothing to compare is no evidence."""
    random = np.random.default_rng(0)
    logp = 0.1 * random.normal(size=(20, 16, 40)).astype(np.float32)
    logp[:2, :, 7] *= 10  # one token stands out
    logp[1] *= 3
    logp[2] = -1.0  # all alike
    logp[3, :, 1:] = -1.0  # all but one token alike
    exists = first([16, 16, 16, 16, 16, 1, 0] + [4] * 13, 16)
    mask = first([40, 40, 40, 40, 1, 40, 0] + [9] * 13, 40)
    got = np.asarray(chance(logp, exists, mask))
    assert got[0] < 1e-6
    close(got[1], got[0], rtol=1e-3, atol=1e-9)
    np.testing.assert_array_equal(got[2:7], [1, 0, 1, 1, 1])
    poison = np.where(exists[..., None] & mask[:, None], logp, NAN)
    np.testing.assert_array_equal(chance(poison, exists, mask), got)
    shape = (4, 5)
    folded = (x.reshape(*shape, *x.shape[1:]) for x in (logp, exists, mask))
    close(chance(*folded), got.reshape(shape), atol=1e-7)


F = 8
hards = hnp.arrays(np.float32, F, elements=st.sampled_from([1.0, 4.5, 22.5, np.inf]))
spreads = hnp.arrays(np.float32, F, elements=st.integers(0, 16).map(lambda i: i / 8))
chances = hnp.arrays(np.float32, F, elements=st.sampled_from([0.0, 0.01, 0.05, 0.9]))
states = st.sampled_from([np.nan, 0.0, 0.5, 2.0]).map(np.float32)
flattest = partial(reflect.percentile, flattest=0.3, hardest=10.0)
KEEPERS = [flattest, partial(reflect.ema, hardest=10.0), reflect.null_test]
rules = [jax.jit(keeper) for keeper in KEEPERS]


@given(hards, spreads, chances, states)
def test_a_keeper_is_its_definition(hard, spread, null, state):
    known = np.isfinite(hard)
    for keeper, rule in enumerate(rules):
        got, after = rule(hard, spread, null, state)
        want = known & (null <= np.float32(0.05))
        now = state
        if keeper == 0:
            order = sorted(known.nonzero()[0], key=lambda i: -spread[i])
            stay = order[: len(order) - int(0.3 * len(order) + 1e-9)]
            want = np.isin(np.arange(F), stay) & (hard <= 10)
        if keeper == 1:
            want = known & (hard <= 10) & ~(spread < 0.5 * state)
            if known.any():
                mean = spread[known].mean()
                now = mean if np.isnan(state) else 0.99 * state + 0.01 * mean
        np.testing.assert_array_equal(got, want)
        close(after, now)


@given(hards, spreads, chances, states, st.integers(0, F - 1))
def test_a_harder_candidate_admits_nobody_and_scale_changes_nothing(
    hard, spread, null, state, which
):
    """P8: filters are monotone in the ranks, the percentile invariant to scale."""
    harder = hard.copy()
    harder[which] *= 4
    for rule in rules:
        before, after = (rule(h, spread, null, state)[0] for h in (hard, harder))
        assert not (np.asarray(after) & ~np.asarray(before)).any()
    scaled = rules[0](hard, 4 * spread, null, state)[0]
    np.testing.assert_array_equal(scaled, rules[0](hard, spread, null, state)[0])


def test_what_could_not_be_measured_is_never_kept():
    """P15: an empty reference, and a prompt without a completion that was scored."""
    exists, mask = np.ones((4, 3), bool), np.ones((4, 10), bool)
    exists[1] = mask[2] = False
    hard = np.asarray(hardness(np.tile(HARD, (4, 1, 1)), exists, mask))
    hard = np.concatenate([hard, hard])
    spread = np.float32([1, 1, 1, NAN, 1, 1, 1, 1])
    everyone = jax.jit(partial(reflect.percentile, flattest=0.0))
    for rule, left in zip([*rules, everyone], ([0, 4, 7],) * 4, strict=True):
        kept, _ = rule(hard, spread, np.zeros(F, np.float32), NAN)
        np.testing.assert_array_equal(np.nonzero(kept)[0], left)


@given(
    hnp.arrays(np.bool_, F),
    st.sampled_from([(5, 0), (10, 1), (3, 3), (20, 2)]),
    st.booleans(),
)
def test_a_pool_is_its_definition(keep, sizes, any_before):
    """P8: exactly the share asked for is carried over."""
    count, carried = sizes
    ids = np.arange(100, 100 + F, dtype=np.int32)
    before = (
        np.arange(count, dtype=np.int32) if any_before else np.full(count, -1, np.int32)
    )
    got = np.asarray(pool(keep, before, ids, count=count, carried=carried))
    new = list(ids[keep] if keep.any() else ids) * 20
    old = list(before[:carried]) if any_before else []
    assert got.tolist() == new[: count - len(old)] + old
    assert (got < 100).sum() == len(old)


pool = jax.jit(candidates.pool, static_argnames=("count", "carried"))


def test_no_prompt_is_carried_twice_in_a_row():
    """P8: what is carried over leaves room for the others to come again."""
    before = np.full(10, -1, np.int32)
    for look in range(5):
        ids = np.arange(20, dtype=np.int32) + 20 * look
        after = np.asarray(pool(ids % 2 == 0, before, ids, count=10, carried=1))
        assert (after >= 20 * look).sum() == (9 if look else 10)
        assert (after >= 20 * (look - 1)).all()
        before = after


def test_weights_baselines_and_counts_that_do_not_fit_are_refused():
    logp = np.zeros((2, 4, 5), np.float32)
    arrays = logp, np.ones((2, 4), bool), np.ones((2, 5), bool)
    with pytest.raises(AssertionError):
        reflect.certainty(*arrays, weights=lambda spread, mask: mask[0])
    with pytest.raises(AssertionError):
        reflect.certainty(*arrays, weights=reflect.sigma, baseline=logp[:1])
    ids = np.zeros(3, np.int32)
    for count in (3, 9):
        with pytest.raises(AssertionError):
            candidates.pool(ids == 0, ids, ids, count=count, carried=4)
