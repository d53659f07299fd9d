"""The effective-weight law, by which every estimator and every recipe is held.

Let n completions of a prompt be drawn, and let their coefficients c depend on who is
right alone. Then E[sum_j c_j grad log pi(y_j)] = w(p) grad p with

    w(p) = E[sum over right ones of c] / p - E[sum over wrong ones of c] / (1 - p) .

Coefficients always come from `learn.compute_credit`, the function that trains. L and P
are the laws of the notes that recipes were derived in, by number.
"""

import ast
from dataclasses import replace
from functools import cache, partial
from itertools import product
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from contracts import binomial, close, effective_weight, pools, sides
from test_stop import PUBLISHED

from curax import (
    advantage,
    aggregate,
    correct,
    downsample,
    gate,
    loss,
    objective,
    stop,
)
from curax.config import Sampling, Update, load, override
from curax.settings.config_paths import option
from curax.step import learn, optimise
from curax.theory import moments, predict

CONFIGS = Path(__file__).parent.parent / "configs"
PLAIN = load(CONFIGS / "quickstart.py")
TOKENS = 8  # of every completion; the length that recipes divide by
KEY = jax.random.key(0)
RATES = (0.01, 0.05, 0.1, 0.25, 0.5, 0.75, 0.9)


def recipes():
    """Those on the embedded task; the others take one of them over."""
    texts = {path.stem: path.read_text() for path in CONFIGS.glob("*.py")}
    return sorted(
        name
        for name, text in texts.items()
        if "return embedded(" in text and "rationale.task" not in text
    )


@cache
def loaded(recipe):
    """Its config, the same object every time: so it is compiled once."""
    return load(CONFIGS / f"{recipe}.py")


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
    return jax.jit(partial(learn.compute_credit, config))


def assigned(config, outcome, exists=True, finished=True, history=0.5):
    """What `compute_credit` keeps of outcomes `[..., B, G]`, and with which credit."""
    outcome = np.asarray(outcome, np.float32)
    exists, finished = (np.zeros(outcome.shape, bool) | m for m in (exists, finished))
    history = np.full(outcome.shape[:-1], history, np.float32)
    reward = outcome
    if config.shape_reward:
        reward = config.shape_reward(outcome, np.full(outcome.shape, TOKENS, np.int32))
    given = assign(config)(KEY, outcome, reward, exists, finished, history)
    return np.asarray(given.keep), np.asarray(given.credit, np.float64)


def by_count(config):
    """`[n + 1, n]` what is kept and credits, by how many of the n of one prompt are
    right; the right ones stand first."""
    keep, credit = assigned(config, pools(config.sampling.group_size)[:, None])
    return keep[:, 0], credit[:, 0]


def coefficients(config, outcome, exists=True, history=0.5):
    """What each completion's score is multiplied with, like `outcome [..., B, G]`.

    Credit times the weight of a row in the loss, where every row is taken and all are
    equally long: then no aggregation has a denominator that depends on content.
    """
    rows = np.shape(outcome)[-2] * moments.rows_per_prompt(config)
    tokens = option(config.aggregate, "length") or TOKENS
    share = np.asarray(config.aggregate(np.ones((int(rows), tokens), bool))).sum(-1)
    close(share, 1 / rows)
    return assigned(config, outcome, exists, history=history)[1] / rows


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
    return binomial(n, p) @ np.array([value(i) for i in range(n + 1)], float)


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
    of_p = (lambda p: 1.0, lambda p: p)
    return {
        "reward": (composed(n, **raw), *of_p),
        "sign": (composed(n, **signed), lambda p: 2.0, lambda p: 2 * p),
        "group mean": (
            composed(n),
            lambda p: 1 - 1 / n,
            lambda p: (1 - 1 / n) * p,
        ),
        "leave one out": (composed(n, advantage=advantage.leave_one_out), *of_p),
        "grpo": (composed(n, advantage=biased), grpo(n), None),
        "grpo, bessel": (
            composed(n, advantage=bessel),
            lambda p: grpo(n)(p) * np.sqrt((n - 1) / n),
            None,
        ),
        "raft": (composed(n, **raw, gate=gate.accepted), *of_p),
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


@pytest.mark.first(8)
@for_every_estimator
def test_an_estimator_weighs_prompts_by_its_closed_form(estimator):
    """L1: the table of effective weights."""
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


@pytest.mark.first(15)
@for_every_estimator
@pytest.mark.parametrize(("actions", "right", "n"), [(3, [1], 5), (4, [0, 2], 3)])
def test_the_expected_update_is_w_grad_p_and_its_spread_as_derived(
    estimator, actions, right, n
):
    """L1: by enumeration, mean and trace of the covariance."""
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


@pytest.mark.parametrize(
    ("policy", "right", "want"),
    [
        ([0.5, 0.5], [0], 0.0),
        ([0.5, 0.3, 0.2], [0], 0.06),
        ([0.5] + [0.0005] * 1000, [0], 0.124875),
        ([0.1, 0.4, 0.2, 0.3], [1, 3], None),
    ],
    ids=["two", "three", "many", "uneven"],
)
def test_the_spread_of_one_draw_is_not_that_of_its_outcome(policy, right, want):
    """P5: with p as baseline, b ((1 - p) S+ + p S-) - |grad p|^2 and not b = p (1 - p),
    S the mean squared norms of the scores of right and wrong ones."""
    policy, action = np.array(policy), np.arange(len(policy))
    is_right = np.isin(action, right)
    p = policy[is_right].sum()
    c = coefficients(composed(1, advantage=advantage.raw), is_right[:, None, None])
    update = (c[:, 0] - p) * (np.eye(len(policy)) - policy)
    grad_p = policy @ update
    close(grad_p, policy * (is_right - p), rtol=1e-12, atol=1e-12)
    spread = policy @ (update**2).sum(-1) - (grad_p**2).sum()

    def norm(members):
        square = 1 - 2 * policy + (policy**2).sum()
        return policy[members] @ square[members] / policy[members].sum()

    mean = (1 - p) * norm(is_right) + p * norm(~is_right)
    close(spread, p * (1 - p) * mean - (grad_p**2).sum(), rtol=1e-12, atol=1e-12)
    assert spread > -1e-12
    if want is not None:
        close(spread, want, rtol=1e-9, atol=1e-12)


def test_grpo_in_small_groups_is_far_flatter_than_its_limit():
    """L1: the published weights of finite groups."""
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
    """L4."""
    rates = np.array([0.05, 0.1, 0.25, 0.5])
    config = composed(n, gate=gate.zero_variance, advantage=advantage.signed)
    close(weight(config, rates), want, rtol=1e-6)
    close(weight(config, 1 - rates), want, rtol=1e-6)
    assert not by_count(config)[1][[0, -1]].any()


def test_the_mean_over_the_accepted_of_one_prompt_ascends_the_truncated_log():
    """L1: RAFT, a mean over the accepted."""
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
    """L1: GVM without weights."""
    group, p = 6, 0.3
    for estimate, of in [(advantage.raw, 0), (advantage.group_mean, 1)]:
        config = composed(group, advantage=estimate)
        for n in range(1, group + 1):
            exists = np.broadcast_to(np.arange(group) < n, (n + 1, group))
            outcome = np.zeros((n + 1, group), np.float32)
            outcome[:, :n] = pools(n)
            _, credit = assigned(config, outcome[:, None], exists[:, None])
            close(effective_weight(credit[:, 0, :n] / group, p), (n - of) / group)


CENTRED = ("leave one out", "grpo", "log")  # on the group


@pytest.mark.parametrize("estimator", [*CENTRED, "reward", "sign"])
def test_the_advantage_energy_is_w_p_times_the_variance_less_a_covariance(estimator):
    """L1: E[sum c (r - p)] = w(p) p (1 - p); with q for p, less Cov(sum c, q)."""
    n = 6
    config, w, _ = table(n)[estimator]
    c, outcome, q = counted(config), pools(n), np.arange(n + 1) / n
    got = learn.advantage_energy(
        jnp.float32(c), jnp.asarray(outcome), jnp.ones((n + 1, n), bool)
    )
    for p in RATES:
        chance = binomial(n, p)
        exact = w(p) * p * (1 - p)
        close(chance @ (c * (outcome - p)).sum(-1), exact)
        bias = chance @ (c.sum(-1) * (q - p))
        close(chance @ np.asarray(got), exact - bias, atol=1e-6)
        if estimator in CENTRED:
            close(bias, 0)
        if estimator == "reward":
            close(exact - bias, (1 - 1 / n) * exact)


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


def test_an_even_choice_weighs_both_ends_up_as_much_and_the_middle_not_at_all():
    """L22: the balance factor, whose integral is log(p / (1 - p)) / 2 - p."""
    even = partial(downsample.balanced, m=4)
    config = composed(256, downsample=even)
    rates = np.array([0.05, 0.1, 0.3, 0.5])
    factor = weight(config, rates)
    close(factor, [9.526316, 4.555556, 1.380952, 1.0], rtol=1e-4)
    close(weight(config, 1 - rates), factor, rtol=1e-4)
    undone = replace(config, correct=correct.horvitz_thompson)
    close(weight(undone, [*rates, 0.9]), 1 - 1 / 256)

    def integral(p):
        return np.log(p / (1 - p)) / 2 - p

    close(factor, (integral(rates + 1e-5) - integral(rates - 1e-5)) / 2e-5, rtol=1e-3)


def test_two_right_of_eight_kept_two_and_two_give_the_published_advantages():
    """L12."""
    log = {"objective": partial(objective.prompt_weight, f=objective.log)}
    ht, published = correct.horvitz_thompson, correct.inverse_pass_rate
    raw, signed = {"advantage": advantage.raw}, {"advantage": advantage.signed}
    mean = {"correct": partial(correct.accepted_mean, rows=4)}
    control = partial(correct.control_variate, rows=4, limit=32)
    vectors = [
        ({}, (0.75, -0.25)),
        (log, (3, -1)),
        ({"correct": ht}, (0.375, -0.375)),
        ({"correct": ht, "advantage": advantage.leave_one_out}, (0.428571, -0.428571)),
        ({"correct": ht} | log, (1.5, -1.5)),
        ({"correct": published}, (3, -1)),
        ({"correct": partial(published, power=0.5)}, (1.5, -0.5)),
        (mean | raw, (2, 0)),
        (mean | signed, (2, 0)),
        ({"correct": control} | signed, (1.875, -0.375)),
        ({"correct": partial(control, strength=0.0)} | signed, (2, 0)),
    ]
    best = partial(downsample.max_variance, m=4)
    outcome, exists = (grid[:, None] for grid in padded(8, 32))
    for stages, (right, wrong) in vectors:
        given = assigned(composed(32, downsample=best, **stages), outcome, exists)
        keep, credit = (grid[:, 0] for grid in given)
        assert keep[2, :2].all()
        close(credit[2, :2], right)
        close(credit[2, 2:][keep[2, 2:]], wrong)
        assert not credit[~keep].any()
        if "advantage" not in stages or stages["correct"] is ht:  # centred on the group
            assert not credit[[0, -1]].any()
    omega = np.asarray(ht(outcome[:, 0], exists[:, 0], keep))
    close(omega[2][keep[2]], [0.5, 0.5, 1.5, 1.5])


SEVEN = composed(7, advantage=advantage.standardised, gate=gate.overlong)


@pytest.mark.first(4)
@pytest.mark.parametrize("m", range(2, 8))
@pytest.mark.parametrize("where", ["drawn", "finished"])
def test_the_correction_gives_back_the_pool_whatever_was_kept(where, m):
    """L13, PODS: the mean over all subsets within classes, of pools of up to seven.

    The pool is all that was drawn, or what a gate left of seven.
    """
    sizes = np.array([(n, k) for n in range(2, 8) for k in range(1, n)])
    n, k = sizes[:, :1], sizes[:, 1:]
    pool, right = np.arange(7) < n, np.arange(7) < k
    masks = {"exists" if where == "drawn" else "finished": pool[:, None]}
    best = partial(downsample.max_variance, m=m)
    kept = replace(SEVEN, downsample=best, correct=correct.horvitz_thompson)
    of_pool = assigned(SEVEN, right[:, None], **masks)[1][:, 0]
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
    """L13, PODS: over random draws, by five standard errors."""
    n, m, draws = 6, 4, 4096
    whole = composed(n, advantage=advantage.standardised)
    config = replace(whole, downsample=partial(rule, m=m), correct=undo)
    outcome, everything = pools(n), np.ones((n + 1, n), bool)
    history = np.zeros(n + 1, np.float32)  # not read

    def credit(key):
        arrays = outcome, outcome, everything, everything, history
        return learn.compute_credit(config, key, *arrays).credit / m

    drawn = jax.jit(jax.vmap(credit))(jax.random.split(KEY, draws))
    mean = np.asarray(drawn, np.float64).mean(0)
    want = by_count(whole)[1] / n
    # Whoever is kept with chance c >= 1/2 has a deviation of sqrt(1 / c - 1) <= 1
    # times the mean: five standard errors.
    assert (np.abs(mean - want) <= 5 * np.abs(want) / np.sqrt(draws)).all()


RIGHT_ALONE = {
    correct.expansion: {},
    correct.inverse_pass_rate: {},
    correct.accepted_mean: {"rows": 3},
    correct.control_variate: {"rows": 3, "limit": 4},
    correct.first_success: {
        **{"rows": 3, "limit": 4, "coefficients": objective.log_coefficients}
    },
}


@pytest.mark.parametrize("rule", RIGHT_ALONE, ids=lambda rule: rule.__name__)
def test_rules_in_a_product_go_by_outcomes_where_they_do_alone(rule):
    """And those that compare rewards by rewards, beside them too."""
    outcome = np.float32([[1, 0, 1, 0]])
    reward = np.float32([[0.25, 0.25, 0.4, 0]])  # shaped: none is above 1/2
    ones, history = np.ones((1, 4), bool), np.zeros(1, np.float32)
    best = partial(downsample.max_reward, m=3)

    def factor(undo):
        config = composed(4, correct=undo, downsample=best)
        arrays = outcome, reward, ones, ones, history
        return np.asarray(learn.compute_credit(config, KEY, *arrays).factor)

    one, fair = partial(rule, **RIGHT_ALONE[rule]), correct.horvitz_thompson
    alone = factor(one)
    assert alone.any()
    close(factor(partial(correct.every, rules=(one,))), alone)
    both = partial(correct.every, rules=(fair, partial(correct.every, rules=(one,))))
    close(factor(both), alone * factor(fair))
    with pytest.raises(AssertionError):  # rewards and outcomes make other classes
        close(factor(fair), fair(outcome, ones, factor(fair) > 0))


def test_two_of_six_corrected_weigh_as_the_six_would():
    """L14."""
    log = partial(objective.prompt_weight, f=objective.log)
    best, ht = partial(downsample.max_variance, m=2), correct.horvitz_thompson
    two_of_six = partial(composed, 6, downsample=best)
    unbiased = two_of_six(correct=ht, advantage=advantage.leave_one_out)
    corrected = two_of_six(correct=ht, objective=log)
    published = two_of_six(correct=correct.inverse_pass_rate)
    close(by_count(published)[1], by_count(two_of_six(objective=log))[1])
    mean = partial(correct.accepted_mean, rows=2)
    right_ones = two_of_six(advantage=advantage.raw, correct=mean)
    positives = composed(6, gate=gate.accepted, advantage=advantage.raw, objective=log)
    for p in (0.1, 0.3134797966, 0.5, 0.9):
        close(weight(right_ones, p), (1 - (1 - p) ** 6) / p)
        close(weight(corrected, p), (1 - (1 - p) ** 5) / p)
        close(weight(unbiased, p), 1.0)
        close(weight(positives, p), (1 - (1 - p) ** 6) / p)
        for limit in (5, 6):
            log_weight = (1 - (1 - p) ** limit) / p
            assert abs(weight(published, p)[0] / log_weight - 1) > 0.01


# w(p) of groups of 16, of 64, and of 16 of 64 kept: as released, by statistics of the
# pool, and those corrected.
OF_PODS = {
    0.001: (3.859, 7.798, 15.203, 31.169, 7.798),
    0.01: (3.733, 6.736, 12.983, 26.738, 6.736),
    0.05: (3.267, 4.336, 7.803, 16.637, 4.336),
    0.1: (2.848, 3.255, 5.205, 11.405, 3.255),
    0.2: (2.346, 2.469, 3.121, 5.393, 2.469),
    0.3: (2.092, 2.162, 2.381, 3.060, 2.162),
    0.5: (1.934, 1.984, 2.000, 2.016, 1.984),
}


def test_pods_weighs_prompts_as_derived_and_the_correction_gives_grpo_back():
    """PODS: the published table of weights."""
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
    rates = list(OF_PODS)
    got = np.transpose([weight(config, rates) for config in columns])
    close(got, list(OF_PODS.values()), rtol=0, atol=6e-4)
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
        joint = np.outer(*binomial(3, p)).reshape(-1)
        return joint @ sides(credit, outcome, np.array(p)[:, None])

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
    joint = np.outer(*binomial(half, rates)).reshape(-1)
    got = joint @ sides(credit / half, grid, rates[:, None])
    close(got, 1 / deviation(0.5), rtol=2 / 128)


# ----- from coefficients to gradients


def batch(rows=4, lengths=(3, 8, 1, 5)):
    random = np.random.default_rng(0)
    logp = np.float32(-random.exponential(size=(rows, TOKENS)))
    mask = np.arange(TOKENS) < np.array(lengths)[:, None]
    credit = np.float32([[1.5], [-0.5], [0.25], [-1.25]]) + 0 * logp
    return logp, tiny.batch(mask, logp, credit=credit, logp_ref=logp)


def pull(config, rows, logp):
    """`[M, T]`, minus the gradient of the loss with respect to each log-prob."""
    share, value = config.aggregate(rows.mask), optimise.token_loss(config)
    entropy = jnp.zeros_like(logp)
    grad = jax.grad(lambda logp: jnp.sum(share * value(logp, entropy, rows)))
    return -np.asarray(grad(jnp.asarray(logp)))


@pytest.mark.first(20)
@pytest.mark.parametrize("recipe", recipes())
def test_at_ratio_one_every_recipe_is_the_policy_gradient(recipe):
    """L2: up to the weights of tokens."""
    config = loaded(recipe)
    logp, rows = batch()
    want = np.asarray(config.aggregate(rows.mask)) * np.asarray(rows.credit)
    close(pull(config, rows, logp), want)


def test_a_loss_over_a_constant_sums_credit_times_scores():
    """L2: at ratio 1."""
    config = composed(4, loss=loss.clipped_ratio)
    logp, rows = batch()
    score = np.random.default_rng(1).normal(size=(4, TOKENS, 5))  # d logp / d theta
    got = np.einsum("mt,mta->a", pull(config, rows, logp), score)
    whole = (score * rows.mask[..., None]).sum(1)  # of each completion
    close(got, rows.credit[:, 0] @ whole / (4 * TOKENS), atol=1e-6)


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
    """L2: a constant denominator tells no row of another."""
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
IN_GROUPS = "E[n(p) v(p, n)] / {rows} with v(p, n) = sqrt((n - 1) / n) "
IN_GROUPS += "E[sqrt(q (1 - q))] / (p (1 - p)), q = k / n"
TEXT = "(C+, C-) = E[(j / 4) (1 - q) / q], E[-(1 - j / 4); q > 0]"
STOPPED = "(C+, C-) = E[(j / 4) (1 - q)], E[-(1 - j / 4) q]"


def one(at):
    return 1.0


def less_the_mean(at):
    return 1 - 1 / at.n


def log_of_all(at):
    return (1 - (1 - at.p) ** at.n) / at.p


def log_of_terms(at):
    """As many as it has, at most those that the objective stops at."""
    n = min(at.n, option(at.config.objective, "terms"))
    return (1 - (1 - at.p) ** n) / at.p


def grpo_of_all(at):
    return grpo(at.n)(at.p)


def grpo_times_draws(at):
    return at.n / at.rows * np.sqrt((at.n - 1) / at.n) * grpo(at.n)(at.p)


def root_of_draws(at):
    """Draws times the inverse root of their own pass rate."""

    def value(k):
        return np.sqrt(k / at.n) * (1 - k / at.n)

    return at.n / at.rows * expected(at.n, at.p, value) / (at.p * (1 - at.p))


def stopped_and_balanced(at, power=0):
    """Pools as the rule leaves them, m of each kept, half of them right if possible.

    Each over the pass rate of its pool to some power.
    """
    m, total = option(at.config.downsample, "m"), 0.0
    for (n, k), chance in ended(at.config, at.p).items():
        right = min(m // 2, k)
        right = min(m - min(m - right, n - k), k)
        plus, minus = right / m * (1 - k / n), (right / m - 1) * k / n
        chance = chance * (n / k) ** power if k else 0.0
        total += chance * (plus / at.p - minus / (1 - at.p))
    return total


def with_a_second_right(at):
    """One of the others is right: `least` is 2, and one of a pair."""
    return 1 - (1 - at.p) ** (at.n - 2)


# What the docstring of each recipe says of w(p), and the same as a function of p, the
# n draws that the prompt has, the pass rate q that was known of it, the rows R that are
# trained per prompt, and the config, for its other sizes. Of a recipe with hints it is
# that of a group under its own context; `test_hinted` joins the levels.
LAWS = {
    "ada_est_exact gvm_grpo_exact gvm_raft_exact": (
        "(1 - (1 - p)^4) / p",
        log_of_terms,
    ),
    "ada_est_hybrid_exact": (
        "E[n(q) / sqrt(q)] / 16",
        lambda at: at.n / np.sqrt(at.q) / (2 * at.rows),
    ),
    "ada_est_hybrid_published": (
        "E[n sqrt(q) (1 - q)] / (8 p (1 - p)), q = k / n",
        root_of_draws,
    ),
    "ada_est_published": ("(E[n(p)] - 1) / 8", lambda at: (at.n - 1) / at.rows),
    "ada_seq_balanced_exact ada_seq_positive_exact ada_seq_positive_accepted "
    "ada_seq_sage": ("(1 - (1 - p)^32) / p", log_of_all),
    "ada_seq_balanced_published ada_seq_positive_published": (
        STOPPED,
        stopped_and_balanced,
    ),
    "ada_seq_balanced_text ada_seq_positive_text": (
        TEXT,
        partial(stopped_and_balanced, power=1),
    ),
    "calculator dr_grpo quickstart": ("1 - 1/8, whatever p", less_the_mean),
    "cispo dapo grpo gspo own_prefix": (GRPO.format(n=8), grpo_of_all),
    "dynamo dynamo_allocation_exact greso neyman": ("1, whatever p", one),
    "dynamo_allocation_published dynamo_published": (
        IN_GROUPS.format(rows=16),
        grpo_times_draws,
    ),
    "guarded": ("1 - (1 - p)^6", with_a_second_right),
    "gvm_grpo_published": (IN_GROUPS.format(rows=8), grpo_times_draws),
    "gvm_raft_published": ("E[n(p)] / 8", lambda at: at.n / at.rows),
    "mastermind nim": ("1 - 1/16, whatever p", less_the_mean),
    "maxrl": (
        "(1 - (1 - p)^7) / p",
        lambda at: (1 - (1 - at.p) ** (at.n - 1)) / at.p,
    ),
    "pods_exact": (GRPO.format(n=32), grpo_of_all),
    "pods_published": (
        PODS,
        lambda at: pods(at.n, option(at.config.downsample, "m"))(at.p),
    ),
    "raft_plus_plus right_only rloo sage_exact": ("1, whatever p", one),
    "reinforce_plus_plus": (GRPO.format(n=128), grpo_of_all),
    "reinforce_rej": (
        "2 - p^3 - (1 - p)^3",
        lambda at: 2 - at.p ** (at.n - 1) - (1 - at.p) ** (at.n - 1),
    ),
    "sage sage_light sage_offline sage_self sage_teacher": (
        GRPO.format(n=8),
        grpo_of_all,
    ),
}
STATEMENTS = {recipe: law for names, law in LAWS.items() for recipe in names.split()}


def stated(recipe, config, p, *, n=None, q=0.5):
    """w(p) as the docstring of a recipe has it, at the sizes of a config.

    Args:
        recipe: its name.
        config: of this recipe, of any sizes.
        p: pass rate.
        n: completions that the prompt draws, at most where a rule stops it; None: as
            many as it may, or as the batch has where a prompt has one.
        q: its pass rate as it was known before.
    """
    sizes = config.sampling
    most = sizes.group_size if sizes.group_size > 1 else sizes.prompts
    rows = moments.rows_per_prompt(config)
    at = SimpleNamespace(p=p, n=n or most, q=q, rows=rows, config=config)
    return STATEMENTS[recipe][1](at)


def of_kind(wanted):
    """Parameters: recipes that allocate, that stop, or whose groups have one size."""
    kinds = {"stopped": [], "allocated": [], "fixed": []}
    for recipe in recipes():
        config = loaded(recipe)
        unequal = "allocated" if config.sampling.budget else "fixed"
        kinds["stopped" if config.stop else unequal].append(recipe)
    return pytest.mark.parametrize("recipe", kinds[wanted])


def law_of(recipe):
    """What the docstring of a recipe says of w(p)."""
    says = ast.get_docstring(ast.parse((CONFIGS / f"{recipe}.py").read_text())) or ""
    return " ".join(says.partition("w(p):")[2].partition("Here:")[0].split())


@pytest.mark.parametrize("recipe", recipes())
def test_a_docstring_says_what_is_tested(recipe):
    assert STATEMENTS[recipe][0] in law_of(recipe)


@pytest.mark.first(12)
@of_kind("fixed")
def test_a_recipe_weighs_prompts_as_its_docstring_says(recipe):
    config = loaded(recipe)
    close(weight(config, RATES), [stated(recipe, config, p) for p in RATES])


# ----- recipes that allocate


def sizes_drawn(config):
    """Some numbers of completions that the allocator may give a prompt."""
    least, unit = (option(config.allocate, name, 1) for name in ("least", "unit"))
    least = max(least, unit)
    return sorted({least, least + unit, 8, config.sampling.group_size})


def padded(n, group):
    """`[n + 1, G]` outcomes and existence: every number of right ones among n."""
    outcome = np.zeros((n + 1, group), np.float32)
    outcome[:, :n] = pools(n)
    return outcome, np.broadcast_to(np.arange(group) < n, outcome.shape)


@pytest.mark.first(14)
@of_kind("allocated")
@pytest.mark.parametrize("q", [0.07, 0.6])
def test_given_its_draws_a_prompt_weighs_as_the_docstring_says(recipe, q):
    """L1, P4: whatever the allocation gave to others."""
    config = loaded(recipe)
    numbers = sizes_drawn(config)
    grids = [padded(n, config.sampling.group_size) for n in numbers]
    outcome, exists = (
        np.concatenate(part)[:, None] for part in zip(*grids, strict=True)
    )
    credit = coefficients(config, outcome, exists, q)[:, 0]
    assert not credit[~exists[:, 0]].any()
    ends = np.cumsum([n + 1 for n in numbers])
    for n, own in zip(numbers, np.split(credit, ends[:-1]), strict=True):
        close(
            [effective_weight(own[:, :n], p) for p in RATES],
            [stated(recipe, config, p, n=n, q=q) for p in RATES],
        )


def test_the_root_of_a_noisy_pass_rate_weighs_hard_prompts_too_little():
    table = {  # share of 1 / p that is left
        8: (0.338, 0.508, 0.663, 0.846, 0.914),
        32: (0.658, 0.850, 0.935, 0.972, 0.980),
    }
    recipe = "ada_est_hybrid_published"
    config = loaded(recipe)
    rows = moments.rows_per_prompt(config)
    for n, want in table.items():
        got = [
            stated(recipe, config, p, n=n) * np.sqrt(p) * rows / n
            for p in (0.02, 0.05, 0.1, 0.25, 0.5)
        ]
        close(got, want, rtol=0, atol=6e-4)


def small(config):
    """The recipe at sizes at which all of its draws can be listed; one update."""
    sizes, group, rows = {"sampling.max_tokens": 1}, 3, 3
    config = replace(config, update=Update(clip_norm=np.inf))
    if config.stop:
        group, rows = 4, 2
        sizes |= {"stop.round_size": 2, "downsample.m": rows}
        if option(config.stop.rule, "wrong"):
            sizes |= {"stop.rule.right": 1, "stop.rule.wrong": 1}
    elif option(config.downsample, "m"):
        group, rows = 4, 2
        sizes["downsample.m"] = rows
    elif config.sampling.budget:
        group, prompts = 4, 2
        sizes["sampling.budget"] = prompts * rows
        if config.pilot:
            sizes["pilot.draws"] = 1
            sizes["sampling.budget"] += prompts
        least = min(option(config.allocate, "least"), 2)
        sizes["allocate.least"] = max(least, 1)
        if option(config.allocate, "unit"):
            sizes["allocate.unit"] = 1
    alone = config.sampling.group_size == 1
    sizes |= {"sampling.prompts": 4 if alone else 2}
    sizes |= {"sampling.group_size": 1 if alone else group}
    for name, size in {"rows": rows, "limit": group}.items():
        if option(config.correct, name):
            sizes[f"correct.{name}"] = size
    return override(config, sizes)


def by_place(difficulty, *, budget, most):
    """As much as it may have for the first of two prompts."""
    return jnp.array([most, budget - most], jnp.int32)


@pytest.mark.first(4)
@of_kind("allocated")
def test_a_prediction_is_the_mean_over_allocations(recipe):
    """L1: a prompt is either of the two, and has 4 or 2 completions."""
    config = replace(small(loaded(recipe)), allocate=by_place)
    config = override(config, {"memory.half_life": 1e9})  # nothing is forgotten
    rates = np.array([0.1, 0.6])
    got = predict.predict(config, rates, np.array([0.3, 0.9]), remembered=2.0)
    a, b = config.memory.prior
    for i, p in enumerate(rates):
        # What the memory knows of two draws, read by one recipe alone.
        chance = [(1 - p) ** 2, 2 * p * (1 - p), p**2]
        known = [(k + a) / (2 + a + b) for k in range(3)]
        mean = [
            np.mean([stated(recipe, config, p, n=n, q=q) for n in (2, 4)])
            for q in known
        ]
        close(got.weight[i], np.dot(chance, mean))
    assert not got.half.any()
    close(got.draws, 3 + (config.pilot is not None))


@pytest.mark.first(1)
@pytest.mark.parametrize(
    "recipe", ["gvm_raft_published", "gvm_grpo_published", "ada_est_hybrid_published"]
)
def test_a_prediction_is_the_mean_over_the_allocations_it_expects(recipe):
    """L1: by the allocator of the recipe."""
    config, rates = small(loaded(recipe)), np.array([0.1, 0.6])
    got = predict.predict(config, rates, np.array([0.1, 0.3, 0.9]), remembered=2.0)
    assert ((got.most > 0).sum(-1) > 1).all()
    for i, p in enumerate(rates):
        drawn = [(chance, n) for n, chance in enumerate(got.most[i]) if chance]
        close(sum(chance for chance, _ in drawn), 1, rtol=1e-12)
        want = sum(chance * stated(recipe, config, p, n=n) for chance, n in drawn)
        close(got.weight[i], want)


# ----- recipes that stop


@cache
def stops(config):
    """(drawn, right): whether a pool stops there, by how many draws it may have."""
    size, most = config.stop.round_size, config.sampling.group_size
    drawn = range(size, most + 1, size)
    at = [(n, k) for n in drawn for k in range(n + 1)]
    n, k = np.array(at).T[..., None]
    slot = np.arange(most)
    met = np.asarray(config.stop.rule(np.float32(slot < k), slot < n))
    return {
        pool: bool(done) or pool[0] == most for pool, done in zip(at, met, strict=True)
    }


def ended(config, p):
    """Chances of (drawn, right) when the draws stop: round by round, by convolution."""
    size, done = config.stop.round_size, stops(config)
    of_round = binomial(size, p)
    active, ends = {(0, 0): 1.0}, {}
    while active:
        after = {}
        for (n, k), chance in active.items():
            for more, share in enumerate(of_round):
                pool = n + size, k + more
                into = ends if done[pool] else after
                into[pool] = into.get(pool, 0.0) + chance * share
        active = after
    return ends


@pytest.mark.first(2)
@of_kind("stopped")
def test_over_the_pools_it_stops_a_recipe_weighs_as_its_docstring_says(recipe):
    """L16, L18, L19: at its own sizes, against the published table as well."""
    config = loaded(recipe)
    at = sorted(ended(config, 0.5))
    n, k = np.array(at).T[..., None]
    slot = np.arange(config.sampling.group_size)
    labels, exists = np.float32(slot < k), slot < n
    credit = coefficients(config, labels[:, None], exists[:, None])[:, 0]

    def weigh(p):
        chance = ended(config, p)
        close(sum(chance.values()), 1, rtol=1e-12)
        return np.array([chance[pool] for pool in at]) @ sides(credit, labels, p)

    close([weigh(p) for p in RATES], [stated(recipe, config, p) for p in RATES])

    rule = stop.balanced if option(config.stop.rule, "wrong") else stop.positives
    p, draws, *columns = np.array(PUBLISHED[rule], float).T
    want = columns[{"published": 3, "text": 4}.get(recipe.rpartition("_")[2], 6)]
    close([weigh(rate) for rate in p], want, rtol=2e-6, atol=5e-5)
    # Predicted by other means, and how much is drawn.
    got = predict.predict(config, p, np.array([0.1, 0.9]))
    close(got.weight, want, rtol=2e-6, atol=5e-5)
    close(got.draws, draws, rtol=0, atol=5e-4)
    assert not got.half.any()
    assert not got.how


@pytest.mark.first(2)
@of_kind("stopped")
def test_every_sequence_of_labels_stops_and_weighs_as_stated(recipe):
    """L15: rounds of 2, at most 3; one each of right and wrong, or one right, stop it.

    Draw by draw over all sequences: which completions are kept depends on their order.
    """
    config, sizes = small(loaded(recipe)), {"sampling.group_size": 6}
    if option(config.correct, "limit"):
        sizes["correct.limit"] = 6
    config = override(config, sizes)
    wrong = option(config.stop.rule, "wrong", 0)
    sequences = np.array(list(product([0, 1], repeat=6)))
    drawn = []
    for labels in sequences.tolist():
        n = 2
        while n < 6 and not (1 in labels[:n] and labels[:n].count(0) >= wrong):
            n += 2
        drawn.append(n)
    exists = np.arange(6) < np.array(drawn)[:, None]
    assert set(drawn) == {2, 4, 6}
    labels = np.float32(sequences) * exists
    credit = coefficients(config, labels[:, None], exists[:, None])[:, 0]
    rates = np.array([0.05, 0.3134797966, 0.7])
    got = []
    for p in rates:
        chance = np.where(sequences == 1, p, 1 - p).prod(-1)
        got.append(chance @ sides(credit, labels, p))
    close(got, [stated(recipe, config, p) for p in rates])
    if not recipe.endswith(("published", "text")):
        close(got[1], 2.8560259946)
    close(predict.predict(config, rates, np.array([0.5])).weight, got)


# ----- batches


@pytest.mark.first(4)
@pytest.mark.parametrize("recipe", recipes())
def test_a_prompt_weighs_the_same_in_every_batch_unless_statistics_span_it(recipe):
    config = loaded(recipe)
    group = max(config.sampling.group_size, 4)  # a single one has nothing beside it
    outcome, prompt = pools(group), np.arange(group + 1)
    # Every prompt in a batch of its own, where the others do not exist; then together.
    exists = np.ones((group + 2, group + 1, group), bool)
    exists[:-1] = (prompt[:, None] == prompt)[..., None]
    _, credit = assigned(config, np.broadcast_to(outcome, exists.shape), exists)

    def totals(credit):
        """`[n + 1, 2]`: the coefficients of right and of wrong ones, summed."""
        return np.stack([(credit * (outcome == side)).sum(-1) for side in (1, 0)], -1)

    alone, together = totals(credit[prompt, prompt]), totals(credit[-1])
    assert not credit[~exists].any()
    spans = config.advantage is advantage.batch_standardised
    assert np.allclose(alone, together, rtol=1e-5, atol=1e-5) != spans
