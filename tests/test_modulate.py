"""Token multipliers: definitions, laws of entropy, and where they are taken from."""

import dataclasses
from functools import cache, partial
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import small
import test_update
import tiny
from contracts import (
    are_the_same_however_they_run,
    by_member,
    close,
    follow_permutations,
    ignores_absent_entries,
    name,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from curax import aggregate, loss, modulate, update
from curax.config import Mesh, Update
from curax.step import mesh, optimise
from curax.types import Tokens

LOW, HIGH = 0.2, 0.28
half = partial(modulate.forking_tokens, share=0.5)
published = partial(modulate.dynamo, low=LOW, high=HIGH)
released = partial(
    modulate.dynamo,
    boost=0.4,
    tau=0.9,
    low=LOW,
    high=HIGH,
    change=modulate.released_entropy_change,
)
gain = partial(modulate.state_gain, most=1.5)
brake = partial(modulate.abs_brake, budget=0.05, low=LOW, high=HIGH)
cover = partial(modulate.clip_cov, share=0.3, least=0.1, most=1.0, low=LOW, high=HIGH)
both = partial(modulate.every, rules=(gain, brake))


def numbers(logits, token):
    """What float64 says of tokens taken from a softmax: log-prob to coupling."""
    logits = np.asarray(logits, float)
    logits = logits - logits.max(-1, keepdims=True)
    every = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    p = np.exp(every)
    entropy = -(p * every).sum(-1)
    logp = np.take_along_axis(every, token[..., None], -1)[..., 0]
    return SimpleNamespace(
        p=p,
        logp=logp,
        entropy=entropy,
        score_sq_norm=1 - 2 * np.exp(logp) + (p**2).sum(-1),
        entropy_logp_cov=(p**2 * (every + entropy[..., None])).sum(-1),
    )


def tokens_of(logits, token, credit=1.0, mask=True, moved=0.0):
    """Tokens `[..., M, T]` of logits `[..., M, T, V]`, float32."""
    of = numbers(logits, token)

    def wide(values):
        return np.float32(np.broadcast_to(values, token.shape))

    return Tokens(
        mask=np.zeros(token.shape, bool) | mask,
        credit=wide(credit),
        logp=wide(of.logp),
        logp_old=wide(of.logp - moved),
        entropy=wide(of.entropy),
        score_sq_norm=wide(of.score_sq_norm),
        entropy_logp_cov=wide(of.entropy_logp_cov),
    )


def some(shape=(3, 4), seed=0, vocab=5):
    """Random ones, with clipped ratios and credits of 0 among them."""
    random = np.random.default_rng(seed)
    logits = random.normal(size=(*shape, vocab)) * random.uniform(0.5, 4, (*shape, 1))
    credit = random.normal(size=shape) * (random.random(shape) < 0.8)
    return tokens_of(
        logits,
        random.integers(0, vocab, shape),
        credit,
        random.random(shape) < 0.8,
        0.3 * random.normal(size=shape),
    )


# ----- definitions


def float64(t):
    return SimpleNamespace(
        mask=t.mask,
        **{k: np.float64(v) for k, v in vars(t).items() if k != "mask"},
    )


def slope(t):
    ratio = np.exp(t.logp - t.logp_old)
    clipped = (t.credit > 0) & (ratio > 1 + HIGH) | (t.credit < 0) & (ratio < 1 - LOW)
    return np.where(clipped, 0, ratio * t.credit)


def change(t):
    return -slope(t) * (np.exp(t.logp) * (t.logp + t.entropy) - t.entropy_logp_cov)


def released_change(t):
    own = np.exp(t.logp) * (t.logp + t.entropy)
    mean = [row[m].mean() if m.any() else 0 for row, m in zip(own, t.mask, strict=True)]
    return -slope(t) * (own - np.array(mean)[:, None])


def of_dynamo(t, boost=0.2, tau=0.99, change=change):
    entropy = t.entropy[t.mask]
    gap = (entropy.max() - t.entropy) / np.ptp(entropy) if np.ptp(entropy) else 0
    size = abs(change(t))
    most = size[t.mask].max()
    x = size / most if most else 0 * size
    brake = 0.6 + 0.4 / (1 + np.exp(50 * (x - tau)))
    return np.where(t.credit > 0, 1 + boost * gap, 1) * brake


def of_forking(t, share=0.2):
    ranked = sorted(t.entropy[t.mask], reverse=True)
    return t.entropy >= ranked[max(round(share * len(ranked)), 1) - 1]


def of_gain(t):
    norm = t.score_sq_norm - 1 + 2 * np.exp(t.logp)
    m = np.minimum(1.5, (1 - norm + 1e-6) ** -0.5)
    return m / m[t.mask].mean()


def of_brake(t):
    return 0.05 / np.maximum(abs(change(t)), 0.05)


def of_cover(t):
    logp, credit = t.logp - t.logp[t.mask].mean(), t.credit - t.credit[t.mask].mean()
    covariance, ratio = logp * credit, np.exp(t.logp - t.logp_old)
    clipped = (t.credit > 0) & (ratio > 1 + HIGH) | (t.credit < 0) & (ratio < 1 - LOW)
    within = (covariance > 0.1) & (covariance < 1.0)
    where = np.argwhere(t.mask & within & ~clipped)
    ranked = sorted(map(tuple, where), key=lambda at: -covariance[at])
    result = np.ones(t.mask.shape)
    for at in ranked[: max(int(0.3 * t.mask.sum()), 1)]:
        result[at] = 0
    return result


RULES = {
    modulate.forking_tokens: of_forking,
    half: partial(of_forking, share=0.5),
    published: of_dynamo,
    released: partial(of_dynamo, boost=0.4, tau=0.9, change=released_change),
    gain: of_gain,
    brake: of_brake,
    cover: of_cover,
    both: lambda t: of_gain(t) * of_brake(t),
}
for_every_rule = pytest.mark.parametrize("rule", RULES, ids=name)
compiled = cache(jax.jit)


@settings(max_examples=25)
@given(seed=st.integers(0, 2**16))
def test_a_multiplier_is_its_definition(seed):
    t = some(seed=seed)
    for rule, got in by_member(RULES, t):
        want = RULES[rule](float64(t)) if t.mask.any() else 0
        close(got, np.where(t.mask, want, 0), rtol=1e-4, err_msg=name(rule))


@pytest.mark.parametrize(
    ("rule", "definition"),
    [
        (modulate.entropy_change, change),
        (modulate.released_entropy_change, released_change),
    ],
)
def test_entropy_changes_are_their_definitions(rule, definition):
    t = some((8, 6), seed=1)
    got = compiled(partial(rule, low=LOW, high=HIGH))(t)
    close(got, np.where(t.mask, definition(float64(t)), 0), rtol=1e-4)


def test_without_modulation_every_token_counts_once():
    np.testing.assert_array_equal(modulate.none(some()), np.ones((3, 4)))
    np.testing.assert_array_equal(modulate.every(some(), rules=()), np.ones((3, 4)))


def apart(rule):
    """The rule as a function of arrays."""
    structure = jax.tree.structure(some())

    def run(*arrays):
        return rule(jax.tree.unflatten(structure, arrays))

    run.__name__ = name(rule)
    return run


APART = [apart(rule) for rule in RULES]


def test_a_rule_ignores_the_masked_and_follows_its_tokens():
    t = some(seed=3)
    arrays = jax.tree.leaves(t)
    for run in APART:
        ignores_absent_entries(run, *arrays, counts=t.mask)
    for order, axis in [((2, 0, 1), 0), ((1, 3, 0, 2), 1)]:
        follow_permutations(APART, *arrays, order=order, axis=axis)


def test_a_rule_is_the_same_however_it_runs():
    """P12."""
    arrays = jax.tree.leaves(some((8, 3, 4), seed=4))
    are_the_same_however_they_run(APART, *arrays)


def test_nothing_to_train_on_is_nothing():
    t = dataclasses.replace(some(), mask=np.zeros((3, 4), bool))
    for rule, got in by_member(RULES, t):
        assert not got.any(), name(rule)


@pytest.mark.parametrize("share", [0.001, 0.1, 0.2, 0.7, 1.0])
def test_a_share_may_be_traced_and_is_rounded_to_tokens(share):
    t = dataclasses.replace(some((10, 10)), mask=np.ones((10, 10), bool))
    got = compiled(lambda t, share: modulate.forking_tokens(t, share=share))(t, share)
    close(got.sum(), max(round(100 * share), 1))


# ----- P12: what holds of multipliers


@given(seed=st.integers(0, 2**16))
@settings(max_examples=25)
def test_multipliers_keep_signs_and_never_lower_more_than_they_say(seed):
    """P12."""
    t = some(seed=seed)
    for rule, least, most in [
        (published, 0.6, 1.2),
        (released, 0.6, 1.4),
        (brake, 0, 1),
        (gain, 1e-6, 1e3),
    ]:
        got = np.asarray(compiled(rule)(t))[t.mask]
        assert ((got > least) & (got < most + 1e-5)).all()
    unbraked = compiled(partial(modulate.dynamo, floor=1.0))(t)
    close(np.asarray(unbraked)[t.mask & (t.credit <= 0)], 1)
    close(np.asarray(compiled(brake)(t))[t.mask & (t.credit == 0)], 1)


@for_every_rule
def test_no_gradient_goes_through_a_multiplier(rule):
    """P12."""
    t = some(seed=5)

    def total(values):
        return jnp.sum(rule(dataclasses.replace(t, **values)))

    values = {k: v for k, v in vars(t).items() if k != "mask"}
    for leaf in jax.tree.leaves(jax.jit(jax.grad(total))(values)):
        assert not np.asarray(leaf).any()


def test_the_published_vectors_of_both_modes():
    """L7 of DynaMO, and both modes of its release."""
    logits, token = np.log([[[0.7, 0.2, 0.1]] * 3]), np.arange(3)[None]
    of = numbers(logits, token)
    close(of.entropy[0, 0], 0.801819)
    close(of.entropy_logp_cov[0, 0], 0.170808, rtol=3e-6)
    got = modulate.entropy_change(tokens_of(logits, token))
    close(got[0], [-0.140793, 0.332332, 0.320885], rtol=3e-6)

    t = dataclasses.replace(
        tokens_of(np.zeros((1, 4, 5)), np.zeros((1, 4), int)),
        entropy=np.float32([[0, 0.5, 1, 2]]),
        credit=np.float32([[1, 1, 1, -1]]),
    )
    raised = partial(modulate.dynamo, floor=1.0)
    close(raised(t), [[1.2, 1.15, 1.1, 1]])
    close(raised(dataclasses.replace(t, entropy=0 * t.entropy)), np.ones((1, 4)))

    at = np.float32([[1, 0.99, 0.95, 0.9, 0.8]])  # Xi over its maximum
    t = tokens_of(np.zeros((1, 5, 3)), np.zeros((1, 5), int), credit=-at)
    for tau, want in [
        (0.99, (0.751016, 0.8, 0.952319, 0.995605, 0.99997)),
        (0.9, (0.602677, 0.604395, 0.630343, 0.8, 0.997323)),
    ]:
        got = modulate.dynamo(t, tau=tau, change=lambda t, low, high: t.credit)
        close(got, [want], rtol=2e-6)


# ----- laws


@cache
def states(vocab=7, count=200):
    """Every token at some softmax states: tokens `[S, V]`, and the softmaxes."""
    random = np.random.default_rng(0)
    logits = random.normal(size=(count, 1, vocab)) * random.uniform(0, 4, (count, 1, 1))
    logits = np.broadcast_to(logits, (count, vocab, vocab))
    token = np.broadcast_to(np.arange(vocab), (count, vocab))
    return logits, token, numbers(logits, token)


def test_raising_the_sure_multiplies_the_gradient_of_a_state():
    """L6 of DynaMO: by 1 + alpha h (1 - b), by enumeration; `state_gain` by m."""
    boost, baseline = 0.3, 0.35
    logits, token, of = states(5, 12)
    random = np.random.default_rng(1)
    q = random.random((12, 5))  # chance to be right, by state and token
    outcome = np.repeat([1.0, 0.0], 5)
    pair = partial(np.concatenate, axis=1)
    t = tokens_of(pair([logits, logits]), pair([token, token]), outcome - baseline)
    chance = of.p[:, 0]
    weight = pair([chance * q, chance * (1 - q)]) * (outcome - baseline)
    score = np.eye(5) - chance[:, None]  # [S, a, V]
    rate = np.einsum("sa,sav->sv", chance * q, score)  # of the state's pass rate
    h = (of.entropy.max() - of.entropy[:, 0]) / np.ptp(of.entropy)
    gained = np.asarray(modulate.state_gain(t))
    close(gained, np.broadcast_to(gained[:, :1], gained.shape), rtol=1e-4)
    close(gained.mean(), 1)
    for multiplier, want in [
        (modulate.dynamo(t, boost=boost, floor=1.0), 1 + boost * h * (1 - baseline)),
        (gained, gained[:, 0]),
    ]:
        each = weight * np.asarray(multiplier)
        got = np.einsum("sa,sav->sv", each[:, :5] + each[:, 5:], score)
        close(got, want[:, None] * rate, rtol=2e-4)


def test_the_change_of_entropy_is_that_of_a_small_step():
    """L7 of DynaMO, P11: by central differences."""
    logits, token, of = states()
    xi = np.random.default_rng(2).normal(size=token.shape)
    direction = xi[..., None] * (np.eye(7) - of.p)
    up, down = (numbers(logits + s * 1e-4 * direction, token).entropy for s in (1, -1))
    got = modulate.entropy_change(tokens_of(logits, token, xi))
    close(got, (up - down) / 2e-4, rtol=1e-4, atol=2e-6)


def test_softmax_identities():
    """L7 of DynaMO, P11."""
    logits, token, of = states()
    pa = np.exp(of.logp)
    norm = ((np.eye(7) - of.p) ** 2).sum(-1)
    close(of.score_sq_norm, norm)
    root = np.sqrt(norm)
    assert (root >= (1 - pa) * np.sqrt(7 / 6) - 1e-9).all()
    assert (root <= (1 - pa) * np.sqrt(2) + 1e-9).all()
    spread = (pa * norm).sum(-1)
    close(spread, 1 - (of.p[:, 0] ** 2).sum(-1))
    assert (spread <= 1 - np.exp(-of.entropy[:, 0]) + 1e-9).all()
    surprise = of.logp + of.entropy
    close((pa * surprise).sum(-1), 0)
    centred = (pa - (pa**2).sum(-1, keepdims=True)) * of.logp
    close(of.entropy_logp_cov[:, 0], (pa * centred).sum(-1))
    assert (of.entropy_logp_cov >= 0).all()
    credit = np.random.default_rng(3).normal(size=token.shape)
    got = np.asarray(modulate.entropy_change(tokens_of(logits, token, credit)))
    gap = credit - (pa * credit).sum(-1, keepdims=True)
    close((pa * got).sum(-1), -(pa**2 * surprise * gap).sum(-1), rtol=1e-4, atol=2e-6)
    even = modulate.entropy_change(tokens_of(np.zeros((7, 7, 7)), token[:7], 3.0))
    close(even, np.zeros((7, 7)))


@pytest.mark.first(1)
@pytest.mark.parametrize("sharp", [(1, 6), (2, 8), (6, 6)])
def test_the_released_change_of_entropy_names_other_tokens(sharp):
    """L8 of DynaMO: 200 completions of 200 tokens, 64 words, all of one credit."""
    random = np.random.default_rng(0)
    logits = random.normal(size=(200, 200, 64)) * random.uniform(*sharp, (200, 200, 1))
    token = (logits + random.gumbel(size=logits.shape)).argmax(-1)
    t = tokens_of(logits, token)
    exact = np.ravel(modulate.entropy_change(t))
    other = np.ravel(modulate.released_entropy_change(t))
    top = [set(np.argsort(abs(values))[-400:]) for values in (exact, other)]
    assert 0.55 <= np.corrcoef(abs(exact), abs(other))[0, 1] <= 0.69
    assert 0.73 <= (np.sign(exact) == np.sign(other)).mean() <= 0.90
    assert len(top[0] & top[1]) / 400 <= 0.07


def test_a_brake_by_the_maximum_knows_no_scale_and_one_by_a_budget_does():
    """L9 of DynaMO."""
    t = some((8, 5), seed=6)
    t = dataclasses.replace(t, logp_old=t.logp)
    halves = [jax.tree.map(lambda leaf, s=s: leaf[s::2], t) for s in (0, 1)]

    def joined(rule):
        return np.stack([rule(part) for part in halves], 1).reshape(8, 5)

    for tau, floor in [(0.99, 0.751016), (0.9, 0.602677)]:
        rule = partial(modulate.dynamo, boost=0.0, tau=tau)
        whole = rule(t)
        for scale in (1e-6, 1.0, 1e6):
            scaled = dataclasses.replace(t, credit=t.credit * np.float32(scale))
            close(rule(scaled), whole, rtol=1e-4)
        for tokens in (t, *halves):
            close(np.min(rule(tokens), where=tokens.mask, initial=2), floor)
        assert abs(joined(rule) - whole).max() > 0.01
    assert np.asarray(brake(t))[t.mask].min() < 0.9
    close(joined(brake), brake(t))
    small = dataclasses.replace(t, credit=t.credit * np.float32(0.01))
    close(np.asarray(brake(small))[t.mask], 1)


# ----- what is told of them


def test_the_cosine_is_that_of_gradients_in_the_logits():
    random = np.random.default_rng(7)
    logits, token = random.normal(size=(3, 4, 5)), random.integers(0, 5, (3, 4))
    t = tokens_of(
        logits, token, random.normal(size=(3, 4)), random.random((3, 4)) < 0.8
    )
    multiplier = np.float32(random.uniform(0.2, 2, (3, 4)))
    slope = np.where(t.mask, t.credit * np.float32(0.5), np.float32(np.nan))
    score = np.eye(5)[token] - numbers(logits, token).p
    plain = (np.where(t.mask, slope, 0)[..., None] * score).ravel()
    turned = (np.where(t.mask, multiplier * slope, 0)[..., None] * score).ravel()
    cosine = plain @ turned / np.sqrt(plain @ plain * (turned @ turned))
    got = {
        k: s / w
        for k, (s, w) in modulate.multiplier_metrics(t, multiplier, slope).items()
    }
    m, a = multiplier[t.mask], t.credit[t.mask]
    moved = 0.5 * multiplier * np.asarray(modulate.entropy_change(t))
    want = {
        "modulate/mean_positive": m[a > 0].mean(),
        "modulate/damped_fraction": (m < 0.99).mean(),
        "modulate/balance": (a * m).sum() / abs(a).sum(),
        "modulate/cosine": cosine,
        "entropy/change_nats": moved[t.mask].mean(),
    }
    assert got.keys() == want.keys()
    for metric, value in want.items():
        close(got[metric], value, rtol=1e-4, err_msg=metric)
    plain = modulate.multiplier_metrics(t, np.ones_like(multiplier), slope)
    close(plain["modulate/cosine"], 1)
    close(plain["modulate/damped_fraction"][0], 0)
    close(modulate.multiplier_metrics(t, multiplier, 0 * slope)["modulate/cosine"], 0)


# ----- on the path

RATE = 0.5
ALL = partial(modulate.every, rules=(published, gain, brake))


def optimised(modulator, params, batch):
    """Two epochs of `optimise.optimise`."""
    batch = dataclasses.replace(batch, multiplier=jnp.ones(batch.mask.shape))
    config = dataclasses.replace(
        small.get_config(),
        modulate=modulator,
        loss=partial(loss.clipped_ratio, low=LOW, high=HIGH),
        aggregate=aggregate.token_mean,
        update=Update(epochs=2, micro_batches=2, token_chunk=5, clip_norm=np.inf),
    )
    tx = update.transformation(partial(optax.sgd, RATE), np.inf)
    parts = SimpleNamespace(config=config, model=tiny.MODEL, train_rows=8, tx=tx)
    state = SimpleNamespace(params=params, opt_state=tx.init(params), frozen=None)
    params, _, tally = optimise.optimise(parts, state, tiny.CONTEXTS, batch)
    return params, tally


@cache
def by_hand():
    """The same, from logits of whole rows; the tokens of both updates."""
    rows, _ = test_update.batch()
    sequence, place = tiny.whole(tiny.CONTEXTS, rows.tokens, rows.context)
    weight = aggregate.token_mean(rows.mask)

    def read(params):
        every = tiny.full_logits(tiny.MODEL, params, sequence, place)
        every = jax.nn.log_softmax(every / small.get_config().sampling.temperature)
        return jnp.take_along_axis(every, rows.tokens[..., None], -1)[..., 0], every

    def value(params, multiplier, logp_old):
        each = loss.clipped_ratio(
            read(params)[0], logp_old, rows.credit, rows.mask, low=LOW, high=HIGH
        )
        return jnp.sum(weight * multiplier * each)

    read_, pull = jax.jit(read), jax.jit(jax.grad(value))
    params, seen = tiny.params(), []
    for first in (True, False):
        logp, every = read_(params)
        t = tokens_of(every, rows.tokens, rows.credit, rows.mask)
        t = dataclasses.replace(t, logp_old=t.logp if first else rows.logp_old)
        seen.append(t)
        grads = pull(params, ALL(t), np.where(first, logp, rows.logp_old))
        params = jax.tree.map(lambda p, g: p - RATE * g, params, grads)
    return params, seen


@pytest.mark.long
def test_every_update_modulates_by_the_policy_it_finds_and_all_of_its_rows():
    """P12: in two micro-batches on eight devices, beside whole rows on one."""
    with mesh.use(mesh.make(Mesh(data=2, fsdp=2, tensor=2))):
        run = jax.jit(partial(optimised, ALL))
        params, tally = run(tiny.params(), test_update.batch()[0])
    want, seen = by_hand()
    jax.tree.map(partial(close, rtol=1e-4, atol=1e-6), params, want)
    moved = jax.tree.map(lambda a, b: abs(a - b).max(), want, tiny.params())
    assert max(jax.tree.leaves(moved)) > 0.01
    changes = [np.asarray(modulate.entropy_change(t, low=LOW, high=HIGH)) for t in seen]
    total = sum((c * ALL(t))[t.mask].sum() for c, t in zip(changes, seen, strict=True))
    got, number = tally.means["entropy/change_nats"]
    close(got, total, rtol=1e-4)
    assert float(number) == 2 * seen[0].mask.sum()


def test_nothing_is_computed_for_a_recipe_that_does_not_modulate(monkeypatch):
    monkeypatch.setattr(update, "token_stats", None)
    run = partial(optimised, modulate.none)
    _, tally = jax.eval_shape(run, tiny.params(), test_update.batch()[0])
    assert not [metric for metric in tally.means if metric.startswith("modulate/")]
