"""Completions drawn by top-k and top-p: their update, with weights, without, replayed.

All completions of one prompt are listed, of one token or two, under a policy that is a
table. pi is the policy, mu what `choice.truncate` makes of it, and the weights are
those that the loss of a step multiplies: `optimise.token_loss`.
"""

from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from contracts import close, effective_weight, name
from test_law import coefficients, composed

from curax import advantage, aggregate, correct, loss, off_policy
from curax.arrays import choice, masked, supports
from curax.config import override
from curax.step import optimise

V, END, TOP = 4, 0, {"top_k": 3, "top_p": 0.8}
LOGITS = np.random.default_rng(5).normal(size=(V + 1, V)).astype(np.float32)
# The row of the first token, and of the second one behind each first one.
COMPLETIONS = [(END, -1)] + [(a, b) for a in range(1, V) for b in range(V)]
TOKENS = np.array(COMPLETIONS)
MASK = TOKENS >= 0
ROW = np.stack([np.zeros(len(TOKENS), int), TOKENS[:, 0] + 1], 1)
RIGHT = np.isin(np.arange(len(TOKENS)), [0, 2, 5, 8, 9])
SEQUENCE = [
    partial(off_policy.truncated_ratio, per="sequence"),
    partial(off_policy.masked_ratio, per="sequence"),
]
BY_TOKEN = [off_policy.truncated_ratio, off_policy.masked_ratio, off_policy.icepop]
N = 3  # completions of a group
ESTIMATES = [advantage.raw, advantage.leave_one_out, advantage.standardised]


def log_tables():
    """`[V + 1, V]` log pi and log mu, the latter -inf where cut off, float32."""
    logp = jax.nn.log_softmax(jnp.asarray(LOGITS))
    return np.asarray(logp), np.asarray(choice.truncate(logp, **TOP))


def of_tokens(table):
    """`[Y, T]` entries at the tokens of each completion, 0 where there is none."""
    return np.where(MASK, table[ROW, TOKENS], 0)


LOG_PI, LOG_MU = log_tables()
KEPT = np.isfinite(LOG_MU)
DRAWN = (of_tokens(KEPT.astype(int)) == MASK).all(-1)  # S, those that mu can draw
PI, MU = np.exp(np.float64(LOG_PI)), np.exp(np.float64(LOG_MU))
PI, MU = (table / table.sum(-1, keepdims=True) for table in (PI, MU))
OF_PI, OF_MU = (np.where(MASK, table[ROW, TOKENS], 1).prod(-1) for table in (PI, MU))
MASS = np.where(KEPT, PI, 0).sum(-1)  # kept of each row of the table


def scores():
    """`[Y, T, V + 1, V]`: d log pi(y_t) / d logits."""
    at = np.zeros((*MASK.shape, V + 1, V))
    for y, t in np.argwhere(MASK):
        row = ROW[y, t]
        at[y, t, row] = np.eye(V)[TOKENS[y, t]] - PI[row]
    return at


SCORES = scores()


def grad(weight):
    """`[V + 1, V]`: the gradient of sum_y weight(y) pi(y)."""
    return np.einsum("y,ytrv->rv", weight * OF_PI, SCORES)


PLAIN = composed(
    1,
    advantage=advantage.raw,
    loss=loss.clipped_ratio,
    aggregate=partial(aggregate.constant_length, length=2),
)


@cache
def weights(rule):
    """`[Y, T]`: what the loss of a step multiplies the score of each token with."""
    config = override(PLAIN, {"sampling.off_policy": rule})
    old = np.float32(of_tokens(LOG_PI))
    behaviour = of_tokens(np.where(KEPT, LOG_MU, 0))
    rows = tiny.batch(MASK & DRAWN[:, None], old, logp_behaviour=behaviour)
    value = optimise.token_loss(config)
    pull = jax.grad(lambda logp: jnp.sum(value(logp, 0 * old, rows)))(jnp.asarray(old))
    return -np.asarray(pull, np.float64)


@cache
def drawn_groups():
    """All groups of N that mu can draw: which completions, and their chances."""
    some = np.flatnonzero(DRAWN)
    groups = np.stack(np.meshgrid(*[some] * N, indexing="ij"), -1).reshape(-1, N)
    return groups, OF_MU[groups].prod(-1)


def mean_update(estimate, rule, scores=SCORES):
    """E[sum_i c_i sum_t w_t s_t] over all groups, and (w(p), E[C+], E[C-])."""
    config = composed(N, advantage=estimate)
    groups, chance = drawn_groups()
    labels = RIGHT[groups]
    c = coefficients(config, labels[:, None])[:, 0]
    each = np.einsum("yt,ytrv->yrv", weights(rule), scores)
    mean = np.einsum("g,gn,gnrv->rv", chance, c, each[groups])
    plus, minus = (chance @ (c * side).sum(-1) for side in (labels, ~labels))
    per_label = [chance @ (c[:, 0] * (labels[:, 0] == side)) for side in (False, True)]
    value = np.where(RIGHT, per_label[1] / P, per_label[0] / (1 - P)) * N
    return mean, (plus / P - minus / (1 - P), plus, minus), value


P = OF_MU[RIGHT].sum()


def test_something_is_cut_off_and_something_of_each_kind_is_left():
    np.testing.assert_array_equal(DRAWN, OF_MU > 0)
    close(OF_MU.sum(), 1, rtol=1e-12)
    close(OF_PI.sum(), 1, rtol=1e-12)
    assert 0.1 < P < 0.9
    assert (RIGHT & ~DRAWN).any()
    assert np.ptp(MASS[[0, *TOKENS[DRAWN, 0] + 1]]) > 0.05
    for estimate in ESTIMATES:  # the law itself, with labels alone
        c = coefficients(composed(N, advantage=estimate), np.tri(N + 1, N, -1)[:, None])
        _, (w, _, _), _ = mean_update(estimate, correct.none)
        close(w, effective_weight(c[:, 0], P), rtol=1e-10)


@pytest.mark.parametrize("rule", SEQUENCE, ids=name)
def test_weighted_sequences_have_the_mean_of_the_policy_inside_what_is_drawn(rule):
    """Truncation: E_mu[f prod pi / mu] = E_pi[f; S], for any f."""
    weight = np.where(DRAWN, weights(rule)[:, 0], 0)
    f = np.random.default_rng(0).normal(size=(len(TOKENS), 5))
    close((OF_MU * weight) @ f, (OF_PI * DRAWN) @ f, rtol=1e-5)
    gap = np.abs((OF_MU * weight) @ f - OF_PI @ f)
    assert gap.max() > 0.05


@pytest.mark.parametrize("estimate", ESTIMATES, ids=name)
@pytest.mark.parametrize("rule", SEQUENCE, ids=name)
def test_weighted_sequences_ascend_being_right_inside_what_is_drawn(estimate, rule):
    """Truncation: w(p) grad pi(right, S) + E[C-] / (1 - p) grad pi(S)."""
    mean, (w, _, minus), _ = mean_update(estimate, rule)
    inside, right = DRAWN.astype(float), RIGHT & DRAWN
    close(mean, w * grad(right) + minus / (1 - P) * grad(inside), atol=1e-6)
    assert np.abs(mean - w * grad(RIGHT)).max() > 0.01
    if estimate is advantage.raw:
        close(mean, grad(right), atol=1e-6)


@pytest.mark.parametrize("estimate", ESTIMATES, ids=name)
@pytest.mark.parametrize("rule", BY_TOKEN, ids=name)
def test_weighted_tokens_have_the_policy_s_gradient_at_what_is_drawn(estimate, rule):
    """Truncation: sum_t E_mu[sum over kept a of grad pi(a) Q(y_<t, a)]."""
    mean, (w, _, minus), value = mean_update(estimate, rule)
    want = np.zeros_like(mean)
    for y, t in np.argwhere(MASK & DRAWN[:, None]):
        # mu of the rest, pi of this token: prefix and continuation are those of mu.
        chance = OF_MU[y] / MU[ROW[y, t], TOKENS[y, t]] * PI[ROW[y, t], TOKENS[y, t]]
        want += chance * value[y] * SCORES[y, t]
    close(mean, want, atol=1e-6)
    whole = w * grad(RIGHT & DRAWN) + minus / (1 - P) * grad(DRAWN.astype(float))
    assert np.abs(mean - whole).max() > 0.005


@pytest.mark.parametrize("estimate", ESTIMATES, ids=name)
def test_without_weights_the_mass_that_is_kept_is_pulled_as_well(estimate):
    """Truncation: w(p) grad mu(right) + E[C+] E[z | right] + E[C-] E[z | wrong]."""
    mean, (w, plus, minus), _ = mean_update(estimate, correct.none)
    of_mass = np.zeros_like(SCORES)  # grad log of the mass kept at each token
    for y, t in np.argwhere(MASK & DRAWN[:, None]):
        row = ROW[y, t]
        of_mass[y, t, row] = MU[row] - PI[row]
    z, s = of_mass.sum(1), SCORES.sum(1) - of_mass.sum(1)
    close(OF_MU @ s.reshape(len(s), -1), 0, atol=1e-12)  # s, the score of mu

    def among(values, side):
        return np.einsum("y,yrv->rv", OF_MU * side / (OF_MU * side).sum(), values)

    slope = np.einsum("y,yrv->rv", OF_MU * RIGHT, s)
    pulled = plus * among(z, RIGHT) + minus * among(z, ~RIGHT)
    close(mean, w * slope + pulled, atol=1e-6)
    assert np.abs(pulled).max() > 0.005


def scores_within():
    """`[Y, T, V + 1, V]`: as `SCORES`, of what the trainer says within kept sets."""
    noted = supports.packed(jnp.asarray(LOG_MU), top_k=TOP["top_k"])[ROW]

    def logp(logits):
        # The features of a token say which row of the table it is.
        rows = jax.nn.one_hot(ROW, V + 1, dtype=jnp.float32)
        tokens = jnp.maximum(TOKENS, 0).astype(jnp.int32)
        return masked.token_logprobs(rows, logits.T, tokens, support=noted)[0]

    own, slope = jax.jit(logp)(LOGITS), jax.jit(jax.jacrev(logp))(LOGITS)
    on = MASK & DRAWN[:, None]
    close(np.where(on, own, 0), np.where(on, of_tokens(LOG_MU), 0), atol=1e-6)
    return np.where(on[..., None, None], slope, 0)


def test_replayed_the_update_is_that_of_the_pass_rate_of_what_is_drawn():
    """Replay: w(p) grad mu(right), S held fixed, whatever the estimator."""
    scores = scores_within()
    close(OF_MU @ scores.sum(1).reshape(len(scores), -1), 0, atol=1e-6)
    slope = np.zeros(LOGITS.shape)
    for y, t in np.argwhere(MASK & DRAWN[:, None] & RIGHT[:, None]):
        own = np.eye(V)[TOKENS[y, t]] - MU[ROW[y, t]]  # 0 of what is cut off
        slope[ROW[y, t]] += OF_MU[y] * own
    for estimate in ESTIMATES:
        mean, (w, _, _), _ = mean_update(estimate, correct.none, scores)
        close(mean, w * slope, atol=1e-6)
    assert not np.abs(slope)[~KEPT].any()
    assert np.abs(slope).max() > 0.05


@pytest.mark.parametrize("rule", [*SEQUENCE, *BY_TOKEN], ids=name)
def test_a_ratio_of_what_is_cut_off_is_the_mass_that_is_kept(rule):
    """Truncation: at most 1, so that no cap binds; a band drops what lost too much."""
    mass = np.where(MASK, MASS[ROW], 1)
    want = mass.prod(-1, keepdims=True) if rule in SEQUENCE else mass
    on = MASK & DRAWN[:, None]
    close(weights(rule)[on], np.broadcast_to(want, MASK.shape)[on], rtol=1e-5)
    assert weights(rule)[on].max() <= 1
    assert not weights(rule)[~on].any()
    narrow = weights(partial(off_policy.icepop, low=0.9))
    close(narrow[on], np.where(mass >= 0.9, mass, 0)[on], rtol=1e-5)
    assert (narrow[on] == 0).any()
    assert (narrow[on] > 0).any()
