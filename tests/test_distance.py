"""Distance to the base: the published vectors, errors by simulation, frontiers."""

import jax
import numpy as np
import pytest
from contracts import close
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from curax.monitors import distance
from curax.theory import frontier

few = settings(max_examples=25)
from_base = jax.jit(distance.from_base)
P, Q = np.array([0.5, 0.3, 0.2]), np.array([0.4, 0.4, 0.2])
logps = hnp.arrays(
    np.float32, (5, 4), elements=st.integers(-16, 0).map(lambda i: i / 4)
)
points = st.lists(
    st.tuples(st.integers(0, 8), st.integers(0, 8)), min_size=1, max_size=9
)


def between(at, x, y):
    """What a frontier reaches at a place; NaN outside of it."""
    return np.interp(at, x, y, left=np.nan, right=np.nan)


def test_estimators_of_the_divergence_are_those_of_the_published_vectors():
    """P14: KL estimators."""
    # Ten completions of a token, as often as the policy draws it.
    drawn = np.repeat([0, 1, 2], [5, 3, 2])
    logp, base = (np.log(x, dtype=np.float32)[drawn, None] for x in (P, Q))
    got = from_base(logp, base, np.ones((10, 1), bool))
    want = {"k1": (0.0252672, 0.2216), "k2": (0.0248624, 0.0143)}
    want |= {"k3": (0.0252672, 0.0160)}
    for name, (mean, deviation) in want.items():
        for unit in ("token", "completion"):
            close(got[f"{name}/{unit}_nats"], mean)
            error = got[f"{name}/{unit}_error_nats"]
            close(error * np.sqrt(9), deviation, rtol=0, atol=5.1e-5)


@few
@given(logps, logps, hnp.arrays(np.int32, 5, elements=st.integers(0, 4)))
def test_distances_are_their_definitions_and_see_no_masked_token(logp, base, length):
    mask = np.arange(4) < length[:, None]
    nan = np.float32(np.nan)
    got = from_base(np.where(mask, logp, nan), np.where(mask, base, nan), mask)
    ratio = (logp - base).astype(np.float64)
    values = {"k1": ratio, "k2": ratio**2 / 2, "k3": np.exp(-ratio) - 1 + ratio}
    some = length > 0
    n, count = length[some], some.sum()
    for name, value in values.items():
        sums = np.where(mask, value, 0).sum(-1)[some]
        if count:
            close(got[f"{name}/token_nats"], sums.sum() / n.sum(), atol=1e-5)
            close(got[f"{name}/completion_nats"], sums.mean(), atol=1e-5)
        if count > 1:
            rest = sums - sums.sum() / n.sum() * n
            error = np.sqrt(np.sum(rest**2) / (count - 1) * count) / n.sum()
            close(got[f"{name}/token_error_nats"], error, atol=1e-5, rtol=1e-4)
            error = np.std(sums, ddof=1) / np.sqrt(count)
            close(got[f"{name}/completion_error_nats"], error, atol=1e-5, rtol=1e-4)
        assert np.isnan(got[f"{name}/token_nats"]) == (count == 0)
        assert np.isnan(got[f"{name}/token_error_nats"]) == (count < 2)
        assert np.isnan(got[f"{name}/completion_error_nats"]) == (count < 2)
    assert not got["k3/token_nats"] < 0


def test_per_completion_the_mean_is_the_divergence_of_the_whole_and_errors_are_right():
    # Two tokens, of which the second depends on the first, drawn by the policy.
    random, trials, n = np.random.default_rng(0), 1500, 16
    second = np.array([P, Q, P[::-1]])
    base = np.array([Q, Q, Q])
    first = random.choice(3, (trials, n), p=P)
    pick = random.random((trials, n, 1)) > np.cumsum(second, -1)[first]
    after = pick.sum(-1)
    mask = np.stack([np.ones_like(first), first != 1], -1).astype(bool)  # 1 ends it
    logp, other = (
        np.log(np.stack([a[first], b[first, after]], -1), dtype=np.float32)
        for a, b in ((P, second), (Q, base))
    )
    got = from_base(logp, other, mask)
    divergence = np.sum(P * np.log(P / Q))
    later = np.sum(second * np.log(second / base), -1)
    whole = divergence + P[0] * later[0] + P[2] * later[2]
    per_token = whole / (1 + P[0] + P[2])
    for name in ("k1", "k3"):
        for unit, want in (("completion", whole), ("token", per_token)):
            value, error = (got[f"{name}/{unit}{end}_nats"] for end in ("", "_error"))
            spread = np.std(value)
            assert abs(np.mean(value) - want) < 5 * spread / np.sqrt(trials) + 2e-3
            close(np.sqrt(np.mean(np.square(error))), spread, rtol=0.08)


# ----- frontiers


@few
@given(points, st.integers(0, 32).map(lambda i: i / 4))
def test_the_frontier_is_what_the_toss_of_a_coin_between_two_policies_reaches(
    points, at
):
    kl, reward = np.array(points, float).T
    found = frontier.frontier(kl, reward)
    assert set(zip(*found, strict=True)) <= {tuple(map(float, x)) for x in points}
    assert (np.diff(found.kl) > 0).all()
    assert (np.diff(found.reward) > 0).all()
    slopes = np.diff(found.reward) / np.diff(found.kl)
    assert (np.diff(slopes) < 0).all()
    # All mixtures of two, by how far they are.
    share = np.linspace(0, 1, 97)[:, None, None]
    x = share * kl + (1 - share) * kl[:, None]
    y = share * reward + (1 - share) * reward[:, None]
    got = between(at, found.kl, found.reward)
    inside = found.kl[0] <= at <= found.kl[-1]
    assert np.isnan(got) != inside
    if inside:
        assert y[x <= at + 1e-9].max() <= got + 1e-9
        close(between(got, found.reward, found.kl), at)
        hits = np.abs(x - at) < 0.05
        assert y[hits].max() >= got - 0.5


def test_runs_are_compared_at_equal_reward_and_at_equal_distance():
    near = frontier.frontier(np.array([0, 1, 2, np.nan]), np.array([0.2, 0.6, 0.7, 9]))
    far = frontier.frontier(np.array([0, 4, 3]), np.array([0.2, 0.6, 0.1]))
    close([between(0.5, one.reward, one.kl) for one in (near, far)], [0.75, 3.0])
    close([between(1.5, one.kl, one.reward) for one in (near, far)], [0.65, 0.35])
    close([near.kl[-1], near.reward[0], far.reward[-1]], [2, 0.2, 0.6])
    close(far.kl, [0, 4])


def test_policies_that_were_not_measured_have_no_frontier():
    with pytest.raises(ValueError, match="measure one"):
        frontier.frontier(np.array([np.nan]), np.array([1.0]))
    with pytest.raises(ValueError, match="same K"):
        frontier.frontier(np.zeros(2), np.zeros(3))
