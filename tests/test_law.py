"""The effective-weight law, by which every estimator and every recipe is held.

Let n completions of a prompt be drawn, and let their coefficients c depend on who is
right alone. Then E[sum_j c_j grad log pi(y_j)] = w(p) grad p with

    w(p) = E[sum over right ones of c] / p - E[sum over wrong ones of c] / (1 - p) .

Coefficients always come from `pipeline.assign`, the function that trains.
"""

import ast
from dataclasses import replace
from functools import cache, partial
from itertools import product
from math import comb
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from contracts import close, effective_weight, pools
from tiny import jit

from curax import (
    advantage,
    aggregate,
    correct,
    downsample,
    gate,
    loss,
    objective,
    pipeline,
)
from curax.config import Sampling, Update, load, option
from curax.types import Batch

CONFIGS = Path(__file__).parent.parent / "configs"
PLAIN = load(CONFIGS / "quickstart.py")
TOKENS = 8  # of every completion; the length that recipes divide by
KEY = jax.random.key(0)
RATES = (0.01, 0.05, 0.1, 0.25, 0.5, 0.75, 0.9)


def composed(n, **stages):
    """A config of one prompt with n completions; the stages named are exchanged."""
    one_prompt = Sampling(prompts=1, group_size=n)
    plain = {
        "advantage": advantage.group_mean,
        "aggregate": partial(aggregate.constant_length, length=TOKENS),
    }
    return replace(PLAIN, sampling=one_prompt, update=Update(), **plain | stages)


@cache
def assign(config):
    return jit(partial(pipeline.assign, config))


def assigned(config, outcome, exists=True, finished=True):
    """What `pipeline.assign` keeps of outcomes `[..., B, G]`, and with which credit."""
    outcome = np.asarray(outcome, np.float32)
    exists, finished = (np.zeros(outcome.shape, bool) | m for m in (exists, finished))
    reward = outcome
    if config.shape_reward:
        reward = config.shape_reward(outcome, np.full(outcome.shape, TOKENS, np.int32))
    given = assign(config)(KEY, outcome, reward, exists, finished)
    return np.asarray(given.keep), np.asarray(given.credit, np.float64)


def by_count(config):
    """`[n + 1, n]` what is kept and credits, by how many of the n of one prompt are
    right; the right ones stand first."""
    keep, credit = assigned(config, pools(config.sampling.group_size)[:, None])
    return keep[:, 0], credit[:, 0]


def coefficients(config, outcome):
    """What each completion's score is multiplied with, like `outcome [..., B, G]`.

    Credit times the weight of a row in the loss, where all rows are kept and equally
    long: then no aggregation has a denominator that depends on content.
    """
    prompts, group = np.shape(outcome)[-2:]
    rows = prompts * option(config.downsample, "m", group)
    share = np.asarray(config.aggregate(np.ones((rows, TOKENS), bool))).sum(-1)
    close(share, 1 / rows)
    return assigned(config, outcome)[1] / rows


def weight(config, p):
    """w(p) of a config, from all numbers of right completions.

    Of one prompt, where completions are compared within a prompt; of a batch of prompts
    that share p, where each has a single completion.
    """
    return [effective_weight(counted(config), rate) for rate in np.atleast_1d(p)]


@cache
def counted(config):
    """`[n + 1, n]` coefficients by how many of n are right."""
    group = config.sampling.group_size
    prompts = 1 if group > 1 else config.sampling.prompts
    n = prompts * group
    outcome = pools(n).reshape(n + 1, prompts, group)
    return coefficients(config, outcome).reshape(n + 1, n)


def expected(n, p, value):
    """E[value(k)], k ~ Binomial(n, p)."""
    k = np.arange(n + 1)
    chance = np.array([float(comb(n, i)) for i in k]) * p**k * (1 - p) ** (n - k)
    return chance @ np.array([value(i) for i in range(n + 1)], float)


def deviation(q):
    return np.sqrt(q * (1 - q))


def grpo(n):
    return lambda p: expected(n, p, lambda k: deviation(k / n)) / (p * (1 - p))


def pods(n, m):
    """m of n kept, min(max(m / 2, k - (n - m)), k) of them right."""

    def spread(k):
        return deviation(min(max(m // 2, k - (n - m)), k) / m)

    return lambda p: expected(n, p, spread) / (p * (1 - p))


# ----- estimators


@cache
def table(n):
    """Estimator by name: config, w(p), and f with f' = w where it has a short form."""
    band, mixed = gate.pass_rate_band, gate.zero_variance
    best = partial(downsample.max_variance, m=2)
    log = partial(objective.prompt_weight, f=objective.log)
    biased = partial(advantage.standardised, eps=0.0)
    bessel = partial(biased, bessel=True)
    signed, raw = {"advantage": advantage.signed}, {"advantage": advantage.raw}
    keep_two = {"downsample": best, "correct": correct.horvitz_thompson}
    return {
        "reward": (composed(n, **raw), lambda p: 1.0, lambda p: p),
        "sign": (composed(n, **signed), lambda p: 2.0, lambda p: 2 * p),
        "group mean": (
            composed(n),
            lambda p: 1 - 1 / n,
            lambda p: (1 - 1 / n) * p,
        ),
        "leave one out": (
            composed(n, advantage=advantage.leave_one_out),
            lambda p: 1.0,
            lambda p: p,
        ),
        "grpo": (composed(n, advantage=biased), grpo(n), None),
        "grpo, bessel": (
            composed(n, advantage=bessel),
            lambda p: grpo(n)(p) * np.sqrt((n - 1) / n),
            None,
        ),
        "raft": (
            composed(n, **raw, gate=gate.accepted),
            lambda p: 1.0,
            lambda p: p,
        ),
        "log": (
            composed(n, objective=log),
            lambda p: (1 - (1 - p) ** (n - 1)) / p,
            lambda p: sum((1 - (1 - p) ** k) / k for k in range(1, n)),
        ),
        "reinforce-rej": (
            composed(n, **signed, gate=mixed),
            lambda p: 2 - p ** (n - 1) - (1 - p) ** (n - 1),
            lambda p: 2 * p - p**n / n + (1 - p) ** n / n,
        ),
        "reinforce-rej, released": (
            composed(n, **raw, gate=mixed),
            lambda p: 1 - p ** (n - 1),
            lambda p: p - p**n / n,
        ),
        "sign, no all-wrong": (
            composed(n, **signed, gate=partial(band, low=0.5 / n, high=1.0)),
            lambda p: 2 - (1 - p) ** (n - 1),
            lambda p: 2 * p + (1 - p) ** n / n,
        ),
        "sign, no all-right": (
            composed(n, **signed, gate=partial(band, low=0.0, high=1 - 0.5 / n)),
            lambda p: 2 - p ** (n - 1),
            lambda p: 2 * p - p**n / n,
        ),
        "pods": (
            composed(n, downsample=best, advantage=biased, pool_statistics=False),
            pods(n, 2),
            None,
        ),
        "pods, corrected": (composed(n, **keep_two, advantage=biased), grpo(n), None),
        "log, two kept, corrected": (
            composed(n, **keep_two, objective=log),
            lambda p: (1 - (1 - p) ** (n - 1)) / p,
            None,
        ),
    }


for_every_estimator = pytest.mark.parametrize("estimator", table(6))


@for_every_estimator
def test_an_estimator_weighs_prompts_by_its_closed_form(estimator):
    config, w, f = table(6)[estimator]
    close(weight(config, RATES), [w(p) for p in RATES])
    if f:
        step = 1e-5
        slope = [(f(p + step) - f(p - step)) / (2 * step) for p in RATES]
        close([w(p) for p in RATES], slope)


def enumerated(config, n, logits, right):
    """All K^n draws from a softmax over K actions.

    Returns chances `[S]`, coefficients `[S, n]`, labels `[S, n]` and scores `[S, n, K]`
    (gradients of the log-probability with respect to the logits). Coefficients are
    computed once per pattern of labels, so they cannot depend on anything else.
    """
    chance = np.exp(logits) / np.exp(logits).sum()
    actions = np.array(list(product(range(len(logits)), repeat=n)))
    labels = np.isin(actions, right)
    patterns = np.array(list(product([0.0, 1.0], repeat=n)))
    credit = coefficients(config, patterns[:, None])[:, 0]
    c = credit[labels @ (2 ** np.arange(n)[::-1])]
    return chance[actions].prod(-1), c, labels, np.eye(len(logits))[actions] - chance


@for_every_estimator
@pytest.mark.parametrize(("actions", "right", "n"), [(3, [1], 5), (4, [0, 2], 3)])
def test_the_expected_update_is_w_grad_p_and_its_spread_as_derived(
    estimator, actions, right, n
):
    config, w, _ = table(n)[estimator]
    logits = np.random.default_rng(actions).normal(size=actions)
    chance, c, labels, score = enumerated(config, n, logits, right)
    policy = np.exp(logits) / np.exp(logits).sum()
    is_right = np.isin(np.arange(actions), right)
    p = policy[is_right].sum()
    grad_p = policy * (is_right - p)
    update = (c[..., None] * score).sum(1)
    mean = chance @ update
    c_right, c_wrong = (c * labels).sum(-1), (c * ~labels).sum(-1)
    own = chance @ (c_right / p - c_wrong / (1 - p))
    close(mean, own * grad_p, rtol=1e-12, atol=1e-12)
    close(mean, w(p) * grad_p, atol=1e-7)

    def spread(members):
        """Trace of the covariance of one draw's score among some actions."""
        part = policy * members / policy[members].sum()
        scores = np.eye(actions) - policy
        return part @ (scores**2).sum(-1) - ((part @ scores) ** 2).sum()

    trace = chance @ (update**2).sum(-1) - (mean**2).sum()
    signal = c_right / p - c_wrong / (1 - p)
    close(
        trace,
        (grad_p**2).sum() * (chance @ signal**2 - own**2)
        + chance @ (c**2 * labels).sum(-1) * spread(is_right)
        + chance @ (c**2 * ~labels).sum(-1) * spread(~is_right),
        rtol=1e-12,
        atol=1e-12,
    )


def test_grpo_in_small_groups_is_far_flatter_than_its_limit():
    table = {
        4: (1.496, 1.481, 1.464, 1.425, 1.400),
        16: (3.615, 3.163, 2.757, 2.128, 1.873),
    }
    for n, want in table.items():
        with_bessel = partial(advantage.standardised, bessel=True)
        got = weight(composed(n, advantage=with_bessel), (0.01, 0.05, 0.1, 0.25, 0.5))
        close(got, want, rtol=0, atol=6e-4)
    without = composed(16, advantage=partial(advantage.standardised, eps=0.0))
    close(weight(without, 1e-6), 3.872969, rtol=1e-5)


@pytest.mark.parametrize(
    ("n", "want"),
    [(4, (1.1425, 1.27, 1.5625, 1.75)), (8, (1.301663, 1.521703, 1.866455, 1.984375))],
)
def test_reinforce_rej_weighs_easy_and_hard_prompts_alike(n, want):
    rates = np.array([0.05, 0.1, 0.25, 0.5])
    config = composed(n, gate=gate.zero_variance, advantage=advantage.signed)
    close(weight(config, rates), want, rtol=1e-6)
    close(weight(config, 1 - rates), want, rtol=1e-6)
    assert not by_count(config)[1][[0, -1]].any()


def test_the_mean_over_the_accepted_of_one_prompt_ascends_the_truncated_log():
    n = 5
    for mean in (aggregate.sequence_mean, aggregate.token_mean):
        config = composed(
            n, gate=gate.accepted, advantage=advantage.raw, aggregate=mean
        )
        keep, credit = by_count(config)
        mask = np.broadcast_to(keep[..., None], (n + 1, n, TOKENS))
        share = np.asarray(config.aggregate(mask), np.float64).sum(-1)
        for p in RATES:
            close(effective_weight(credit * share, p), (1 - (1 - p) ** n) / p)


def test_over_a_constant_a_prompt_counts_by_the_completions_it_was_given():
    group, p = 6, 0.3
    for estimate, of in [(advantage.raw, 0), (advantage.group_mean, 1)]:
        config = composed(group, advantage=estimate)
        for n in range(1, group + 1):
            exists = np.broadcast_to(np.arange(group) < n, (n + 1, group))
            outcome = np.zeros((n + 1, group), np.float32)
            outcome[:, :n] = pools(n)
            _, credit = assigned(config, outcome[:, None], exists[:, None])
            close(effective_weight(credit[:, 0, :n] / group, p), (n - of) / group)


# ----- objectives

SLOPES = {
    objective.linear: lambda q: 1.0,
    objective.log: lambda q: 1 / q,
    partial(objective.power, alpha=0.5): lambda q: 0.5 / np.sqrt(q),
    objective.arcsine: lambda q: 1 / deviation(q),
    partial(objective.pass_at_k, k=4): lambda q: 4 * (1 - q) ** 3,
}


@pytest.mark.parametrize("f", SLOPES)
@pytest.mark.parametrize("n", [2, 6])
def test_an_objective_weighs_prompts_by_its_own_finite_sum(f, n):
    config = composed(n, objective=partial(objective.prompt_weight, f=f))

    def value(k):
        q = k / n
        return SLOPES[f](q) * q * (1 - q) if 0 < k < n else 0.0

    close(
        weight(config, RATES),
        [expected(n, p, value) / (p * (1 - p)) for p in RATES],
    )
    if f is objective.log:
        close(weight(config, RATES), [(1 - (1 - p) ** (n - 1)) / p for p in RATES])
    if f is objective.arcsine:
        close(weight(config, RATES), [grpo(n)(p) for p in RATES])


# ----- selection


def test_down_sampling_keeps_both_classes_as_evenly_as_it_can():
    splits = {
        4: {(0, 8): (0, 4), (1, 7): (1, 3), (2, 6): (2, 2), (3, 5): (2, 2)}
        | {(5, 3): (2, 2), (7, 1): (3, 1), (8, 0): (4, 0)},
        5: {(4, 4): (2, 3), (7, 1): (4, 1)},
    }
    for m, cases in splits.items():
        config = composed(8, downsample=partial(downsample.max_variance, m=m))
        keep, _ = by_count(config)
        for (right, _), kept in cases.items():
            among = keep[right]
            assert (among[:right].sum(), among[right:].sum()) == kept


def test_two_right_of_eight_kept_two_and_two_give_the_published_advantages():
    log = partial(objective.prompt_weight, f=objective.log)
    ht = correct.horvitz_thompson
    vectors = [
        ({}, (0.75, -0.25)),
        ({"objective": log}, (3, -1)),
        ({"correct": ht}, (0.375, -0.375)),
        ({"correct": ht, "advantage": advantage.leave_one_out}, (0.428571, -0.428571)),
        ({"correct": ht, "objective": log}, (1.5, -1.5)),
    ]
    for stages, (right, wrong) in vectors:
        best = partial(downsample.max_variance, m=4)
        keep, credit = by_count(composed(8, downsample=best, **stages))
        assert keep[2, :2].all()
        close(credit[2, :2], right)
        close(credit[2, 2:][keep[2, 2:]], wrong)
        assert not credit[[0, -1]].any()
        assert not credit[~keep].any()


@pytest.mark.parametrize("m", range(2, 8))
@pytest.mark.parametrize("where", ["drawn", "finished"])
def test_the_correction_gives_back_the_pool_whatever_was_kept(where, m):
    """The mean over all subsets within classes, for all pools of at most seven.

    The pool is all that was drawn, or what a gate left of seven.
    """
    sizes = np.array([(n, k) for n in range(2, 8) for k in range(1, n)])
    n, k = sizes[:, :1], sizes[:, 1:]
    pool, right = np.arange(7) < n, np.arange(7) < k
    masks = {"exists" if where == "drawn" else "finished": pool[:, None]}
    whole = composed(7, advantage=advantage.standardised, gate=gate.overlong)
    best = partial(downsample.max_variance, m=m)
    kept = replace(whole, downsample=best, correct=correct.horvitz_thompson)
    of_pool = assigned(whole, right[:, None], **masks)[1][:, 0]
    keep, of_kept = (grid[:, 0] for grid in assigned(kept, right[:, None], **masks))
    size = keep.sum(-1, keepdims=True)
    np.testing.assert_array_equal(size, np.minimum(m, n))
    fair = []
    for members in (right & pool, ~right & pool):
        among = keep & members
        assert among.any(-1).all()
        share = among.sum(-1, keepdims=True) / members.sum(-1, keepdims=True)
        own = np.where(among, of_kept, -np.inf).max(-1, keepdims=True)
        close(of_kept[among], np.broadcast_to(own, among.shape)[among], rtol=1e-6)
        # Each member is in `share` of the subsets, and has the same credit in each.
        close(share * own / size * members, of_pool / n * members)
        fair.append(np.isclose(share, size / n))
        uncorrected = share * of_pool / size
        same = np.isclose(uncorrected, of_pool / n, rtol=1e-3, atol=0) | ~members
        np.testing.assert_array_equal(same.all(-1, keepdims=True), fair[-1])
    assert all(fair[0] == fair[1])
    assert np.all(fair) == (m == 7)


@pytest.mark.parametrize(
    ("rule", "undo"),
    [
        (downsample.max_variance, correct.horvitz_thompson),
        (downsample.random, correct.none),
    ],
)
def test_over_the_draws_of_a_selection_its_mean_is_the_pool(rule, undo):
    n, m, draws = 6, 4, 4096
    whole = composed(n, advantage=advantage.standardised)
    config = replace(whole, downsample=partial(rule, m=m), correct=undo)
    outcome, everything = pools(n), np.ones((n + 1, n), bool)

    def credit(key):
        arrays = outcome, outcome, everything, everything
        return pipeline.assign(config, key, *arrays).credit / m

    drawn = jit(jax.vmap(credit))(jax.random.split(KEY, draws))
    mean = np.asarray(drawn, np.float64).mean(0)
    want = by_count(whole)[1] / n
    # Whoever is kept with chance c >= 1/2 has a deviation of sqrt(1 / c - 1) <= 1
    # times the mean: five standard errors.
    assert (np.abs(mean - want) <= 5 * np.abs(want) / np.sqrt(draws)).all()


def test_two_of_six_corrected_weigh_as_the_six_would():
    log = partial(objective.prompt_weight, f=objective.log)
    best, ht = partial(downsample.max_variance, m=2), correct.horvitz_thompson
    two_of_six = partial(composed, 6, downsample=best)
    unbiased = two_of_six(correct=ht, advantage=advantage.leave_one_out)
    corrected = two_of_six(correct=ht, objective=log)
    published = two_of_six(objective=log)
    positives = composed(6, gate=gate.accepted, advantage=advantage.raw, objective=log)
    for p in (0.1, 0.3134797966, 0.5, 0.9):
        close(weight(corrected, p), (1 - (1 - p) ** 5) / p)
        close(weight(unbiased, p), 1.0)
        close(weight(positives, p), (1 - (1 - p) ** 6) / p)
        for limit in (5, 6):
            log_weight = (1 - (1 - p) ** limit) / p
            assert abs(weight(published, p)[0] / log_weight - 1) > 0.01


def test_pods_weighs_prompts_as_derived_and_the_correction_gives_grpo_back():
    score = partial(advantage.standardised, eps=0.0)
    best = partial(downsample.max_variance, m=16)
    wide = partial(composed, 64, advantage=score, downsample=best)
    columns = [
        composed(16, advantage=score),
        composed(64, advantage=score),
        wide(pool_statistics=False),
        wide(),
        wide(correct=correct.horvitz_thompson),
    ]
    table = {
        0.001: (3.859, 7.798, 15.203, 31.169, 7.798),
        0.01: (3.733, 6.736, 12.983, 26.738, 6.736),
        0.05: (3.267, 4.336, 7.803, 16.637, 4.336),
        0.1: (2.848, 3.255, 5.205, 11.405, 3.255),
        0.2: (2.346, 2.469, 3.121, 5.393, 2.469),
        0.3: (2.092, 2.162, 2.381, 3.060, 2.162),
        0.5: (1.934, 1.984, 2.000, 2.016, 1.984),
    }
    rates = list(table)
    got = np.transpose([weight(config, rates) for config in columns])
    close(got, list(table.values()), rtol=0, atol=6e-4)
    mirrored = np.transpose([weight(config, 1 - np.array(rates)) for config in columns])
    close(mirrored, got, rtol=1e-4)
    close(got[:, 4], got[:, 1])
    close(weight(columns[2], 1e-7), 15.49193, rtol=1e-4)


# ----- statistics of the whole batch


def test_batch_statistics_keep_the_direction_and_tie_the_weight_to_the_batch():
    config = composed(3, advantage=advantage.batch_standardised)
    k = np.arange(4)

    def weights(p):
        """w of either of two prompts with pass rates p, three completions each."""
        outcome = np.stack([pools(3)[list(pair)] for pair in product(k, k)])
        credit = coefficients(config, outcome)
        chance = [[comb(3, i) * q**i * (1 - q) ** (3 - i) for i in k] for q in p]
        joint = np.outer(*chance).reshape(-1)
        sides = np.where(outcome == 1, credit, 0), np.where(outcome == 0, credit, 0)
        right, wrong = (joint @ side.sum(-1) for side in sides)
        return right / p - wrong / (1 - np.array(p))

    first = [weights((0.3, other))[0] for other in (0.2, 0.5, 0.9)]
    assert np.ptp(first) > 0.01 * np.mean(first)
    same = weights((0.3, 0.3))
    close(same[0], same[1])
    # Of two prompts that share p the two weights are those of one group of six; each is
    # half, since a prompt has half of the rows.
    close(same.sum(), grpo(6)(0.3))

    # Every draw of two softmax policies: each prompt's update is along its own grad p.
    policies = [np.array([0.3, 0.5, 0.2]), np.array([0.8, 0.1, 0.1])]  # 0 is right
    draws = np.array(list(product(range(3), repeat=6))).reshape(-1, 2, 3)
    outcome = (draws == 0).astype(np.float32)
    credit = coefficients(config, outcome)
    chance = np.prod([policies[b][draws[:, b]].prod(-1) for b in (0, 1)], axis=0)
    for b, policy in enumerate(policies):
        score = np.eye(3)[draws[:, b]] - policy
        mean = np.einsum("s,sj,sja->a", chance, credit[:, b], score)
        grad_p = policy * (np.eye(3)[0] - policy[0])
        close(mean, weights((0.3, 0.8))[b] * grad_p, atol=1e-7)


def test_batch_statistics_weigh_all_prompts_of_a_large_batch_alike():
    half, rates = 64, np.array([0.2, 0.8])
    config = load(CONFIGS / "reinforce_plus_plus.py")
    pairs = list(product(range(half + 1), repeat=2))
    outcome = np.stack([pools(half)[list(pair)].reshape(-1, 1) for pair in pairs])
    credit = assigned(config, outcome)[1].reshape(-1, 2, half)
    grid = outcome.reshape(-1, 2, half)
    k = np.arange(half + 1)
    binomial = [np.array([float(comb(half, i)) for i in k]) for _ in rates]
    chance = [
        c * q**k * (1 - q) ** (half - k) for c, q in zip(binomial, rates, strict=True)
    ]
    joint = np.outer(*chance).reshape(-1)
    right = joint @ np.where(grid == 1, credit, 0.0).mean(-1)
    wrong = joint @ np.where(grid == 0, credit, 0.0).mean(-1)
    got = right / rates - wrong / (1 - rates)
    close(got, 1 / deviation(0.5), rtol=2 / 128)


# ----- from coefficients to gradients


def batch(rows=4, lengths=(3, 8, 1, 5)):
    random = np.random.default_rng(0)
    logp = np.float32(-random.exponential(size=(rows, TOKENS)))
    zeros = np.zeros((rows, TOKENS), np.float32)
    return logp, Batch(
        tokens=zeros.astype(np.int32),
        mask=np.arange(TOKENS) < np.array(lengths)[:, None],
        context=np.arange(rows, dtype=np.int32),
        credit=np.float32([1.5, -0.5, 0.25, -1.25]),
        multiplier=zeros + 1,
        logp_behaviour=logp,
        logp_policy=logp,
        logp_old=logp,
        logp_ref=logp,
    )


def pull(config, rows, logp):
    """`[M, T]`, minus the gradient of the loss with respect to each log-prob."""
    share, value = config.aggregate(rows.mask), pipeline.token_loss(config)
    entropy = jnp.zeros_like(logp)
    grad = jax.grad(lambda logp: jnp.sum(share * value(logp, entropy, rows)))
    return -np.asarray(grad(jnp.asarray(logp)))


def recipes():
    return sorted(path.stem for path in CONFIGS.glob("*.py"))


@pytest.mark.parametrize("recipe", recipes())
def test_at_ratio_one_every_recipe_is_the_policy_gradient(recipe):
    config = load(CONFIGS / f"{recipe}.py")
    logp, rows = batch()
    want = np.asarray(config.aggregate(rows.mask)) * np.asarray(rows.credit)[:, None]
    close(pull(config, rows, logp), want)


def test_a_loss_over_a_constant_sums_credit_times_scores():
    config = composed(4, loss=loss.clipped_ratio)
    logp, rows = batch()
    score = np.random.default_rng(1).normal(size=(4, TOKENS, 5))  # d logp / d theta
    got = np.einsum("mt,mta->a", pull(config, rows, logp), score)
    whole = (score * rows.mask[..., None]).sum(1)  # of each completion
    close(got, rows.credit @ whole / (4 * TOKENS), atol=1e-6)


@pytest.mark.parametrize(
    ("rule", "longer", "gone"),
    [
        (partial(aggregate.constant_length, length=TOKENS), False, False),
        (aggregate.sequence_mean, False, True),
        (aggregate.token_mean, True, True),
    ],
)
def test_a_longer_or_a_dropped_completion_reaches_others_through_denominators(
    rule, longer, gone
):
    config = composed(4, aggregate=rule)
    logp, rows = batch()
    before = pull(config, rows, logp)[1:]
    for length, reaches in [(8, longer), (0, gone)]:
        _, rows = batch(lengths=(length, 8, 1, 5))
        after = pull(config, rows, logp)[1:]
        assert reaches == (not np.array_equal(before, after))


# ----- recipes

GRPO = "E[sqrt(q (1 - q))] / (p (1 - p)), q = k / {n}, k ~ Binomial({n}, p)"
PODS = "E[sqrt(q (1 - q))] / (p (1 - p)), q = j / 8, j = min(max(4, k - 24), k), "
PODS += "k ~ Binomial(32, p)"

# What the docstring of each recipe says of w(p), and the same as a function.
STATEMENTS = {
    "cispo": (GRPO.format(n=8), grpo(8)),
    "dapo": (GRPO.format(n=8), grpo(8)),
    "dr_grpo": ("1 - 1/8, whatever p", lambda p: 1 - 1 / 8),
    "grpo": (GRPO.format(n=8), grpo(8)),
    "gspo": (GRPO.format(n=8), grpo(8)),
    "pods": (PODS, pods(32, 8)),
    "pods_exact": (GRPO.format(n=32), grpo(32)),
    "quickstart": ("1 - 1/8, whatever p", lambda p: 1 - 1 / 8),
    "raft_plus_plus": ("1, whatever p", lambda p: 1.0),
    "reinforce_plus_plus": (GRPO.format(n=128), grpo(128)),
    "reinforce_rej": (
        "2 - p^3 - (1 - p)^3",
        lambda p: 2 - p**3 - (1 - p) ** 3,
    ),
    "rloo": ("1, whatever p", lambda p: 1.0),
}


@pytest.mark.parametrize("recipe", recipes())
def test_a_recipe_weighs_prompts_as_its_docstring_says(recipe):
    statement, w = STATEMENTS[recipe]
    path = CONFIGS / f"{recipe}.py"
    says = ast.get_docstring(ast.parse(path.read_text())) or ""
    assert statement in " ".join(says.partition("w(p):")[2].split())
    close(weight(load(path), RATES), [w(p) for p in RATES])


@pytest.mark.parametrize("recipe", recipes())
def test_a_prompt_weighs_the_same_in_every_batch_unless_statistics_span_it(recipe):
    config = load(CONFIGS / f"{recipe}.py")
    group = max(config.sampling.group_size, 4)  # a single one has nothing beside it
    outcome = pools(group)

    def totals(grid):
        """`[n + 1, 2]`: the coefficients of right and of wrong ones, summed."""
        credit = assigned(config, grid)[1].reshape(group + 1, group)
        sides = [(credit * (outcome == side)).sum(-1) for side in (1, 0)]
        return np.stack(sides, -1)

    alone, together = totals(outcome[:, None]), totals(outcome)
    spans = config.advantage is advantage.batch_standardised
    assert np.allclose(alone, together, rtol=1e-5, atol=1e-5) != spans
