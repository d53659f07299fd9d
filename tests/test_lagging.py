"""Completions drawn from a policy that lags: what weights give back, at which price.

All completions of `test_truncated` are listed, drawn from another table: mu can say all
that pi can. Expectations are sums over completions, or over groups of them.
"""

import re
from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from contracts import close
from test_truncated import (
    LOG_PI,
    LOGITS,
    MASK,
    OF_PI,
    PI,
    PLAIN,
    RIGHT,
    ROW,
    SCORES,
    TOKENS,
    grad,
    of_tokens,
)

from curax import off_policy
from curax.config import override
from curax.monitors import mismatch
from curax.step import optimise

LAG = np.random.default_rng(11).normal(size=LOGITS.shape)
LOG_MU = np.asarray(jax.nn.log_softmax(jnp.asarray(np.float32(LOGITS + LAG))))
MU = np.exp(np.float64(LOG_MU))
MU /= MU.sum(-1, keepdims=True)
OF_MU = np.where(MASK, MU[ROW, TOKENS], 1).prod(-1)
RHO = np.where(MASK, (PI / MU)[ROW, TOKENS], 1)  # [Y, T]
WHOLE = RHO.prod(-1)
F = np.random.default_rng(0).normal(size=(len(TOKENS), 5))
FLAT = SCORES.reshape(*MASK.shape, -1)
of_sequences = partial(off_policy.ratio, per="sequence")


@cache
def groups(n):
    """`[S, n]`: all groups of n completions."""
    every = [np.arange(len(TOKENS))] * n
    return np.stack(np.meshgrid(*every, indexing="ij"), -1).reshape(-1, n)


@cache
def weights(rule, n=1, log_mu=None):
    """`[S, n, T]`: weights of a rule in all groups of n, which are its batch."""
    log_mu = LOG_MU if log_mu is None else np.reshape(log_mu, LOG_MU.shape)
    tables = (np.float32(of_tokens(table)) for table in (LOG_PI, log_mu))
    arrays = [array[groups(n)] for array in (*tables, MASK)]
    return np.asarray(jax.jit(rule)(*arrays), np.float64)


def moments(weight, chance):
    """Mean of the mean of r sum_t w_t s_t over each group, and its total variance."""
    which = groups(weight.shape[1])
    each = np.einsum("sit,sitk->sk", RIGHT[which, None] * weight, FLAT[which])
    each /= weight.shape[1]
    probability = chance[which].prod(-1)
    mean = probability @ each
    return mean, probability @ (each**2).sum(-1) - (mean**2).sum()


def bias_and_variance(rule, n=3):
    """Of groups of n drawn from mu: relative to the gradient, and to draws of pi."""
    truth = grad(RIGHT.astype(float)).ravel()
    mean, variance = moments(weights(rule, n), OF_MU)
    _, own = moments(
        np.broadcast_to(MASK[groups(n)] * 1.0, (*groups(n).shape, 2)), OF_PI
    )
    return np.linalg.norm(mean - truth) / np.linalg.norm(truth), variance / own


OF_TABLE = {
    "none": lambda per: off_policy.none,
    "ratio": lambda per: partial(off_policy.ratio, per=per),
    "truncated_ratio": lambda per: partial(off_policy.truncated_ratio, per=per),
    "masked_ratio": lambda per: partial(off_policy.masked_ratio, per=per),
    "icepop": lambda per: off_policy.icepop,
    "rejected": lambda per: partial(off_policy.rejected, by=per, weigh=of_sequences),
    "self_normalised": lambda per: partial(
        off_policy.self_normalised,
        weigh=partial(off_policy.ratio, per=per),
        over="tokens" if per == "token" else "sequences",
    ),
}


@pytest.mark.parametrize("rule", OF_TABLE)
def test_bias_and_variance_are_those_of_the_docstring(rule):
    """Lag: three completions of a table, all groups of them listed."""
    doc = off_policy.__doc__ or ""
    number = r"(\d?\.\d\d)"
    (row,) = re.findall(rf"^    {rule} +({number}.*)$", doc, re.M)
    printed = [float(x) for x in re.findall(number, row[0])]
    pers = off_policy.PER[: len(printed) // 2]
    assert len(pers) == (1 if rule in ("none", "icepop") else 4)
    got = np.ravel([bias_and_variance(OF_TABLE[rule](per)) for per in pers])
    close(got, printed, rtol=0, atol=0.0051)
    assert f"chi^2 = {OF_MU @ WHOLE**2 - 1:.2f};" in doc


def test_of_all_that_is_drawn_weighted_sequences_are_unbiased():
    """Lag: E_mu[f prod pi / mu] = E_pi[f], and their second moment is 1 + chi^2."""
    weight = weights(of_sequences)[:, 0, 0]
    close((OF_MU * weight) @ F, OF_PI @ F, rtol=1e-5)
    chi_square = ((OF_PI - OF_MU) ** 2 / OF_MU).sum()
    close(OF_MU @ weight**2, 1 + chi_square, rtol=1e-5)
    first = weights(off_policy.ratio)[:, 0, 0]  # of a prefix: it grows with each token
    assert 1.1 < OF_MU @ first**2 < 0.9 * OF_MU @ weight**2
    mean, _ = moments(weights(of_sequences, 2), OF_MU)
    close(mean, grad(RIGHT.astype(float)).ravel(), atol=1e-6)


def test_weighted_tokens_leave_prefixes_and_continuations_to_what_lags():
    """Lag: E_mu[f rho_t] is of mu before and behind t, and of pi at t."""
    for t in range(2):
        at = MASK[:, t]
        chance = np.where(at, OF_MU / MU[ROW[:, t], TOKENS[:, t]], 0)
        chance = chance * PI[ROW[:, t], TOKENS[:, t]]
        got = (OF_MU * weights(off_policy.ratio)[:, 0, t]) @ F
        close(got, chance @ F, atol=1e-6)
        assert np.abs(got - (OF_PI * at) @ F).max() > 0.01


@pytest.mark.parametrize("per", off_policy.PER)
def test_a_cap_is_biased_by_what_is_above_it_and_bounds_the_second_moment(per):
    """Lag: E_mu[(rho - w) f] = E_mu[(rho - cap)^+ f]; E_mu[w^2] <= cap E_mu[rho]."""
    rho = weights(partial(off_policy.ratio, per=per))[:, 0, 0]
    cut, gone = (
        weights(partial(rule, cap=1.25, per=per))[:, 0, 0]
        for rule in (off_policy.truncated_ratio, off_policy.masked_ratio)
    )
    close(rho - cut, np.maximum(rho - 1.25, 0), atol=1e-6)
    close(rho - gone, np.where(rho > 1.25, rho, 0), atol=1e-6)
    assert (rho > 1.25).any()
    assert OF_MU @ gone**2 <= OF_MU @ cut**2 <= 1.25 * (OF_MU @ rho)


def test_what_is_not_rejected_has_the_mean_of_the_policy_inside_the_band():
    """Lag: E_pi[f; band] with weights of sequences, E_mu[f; band] without any."""
    band = (WHOLE >= 0.5) & (WHOLE <= 2)
    assert 0 < band.sum() < len(band)
    for weigh, chance in ((of_sequences, OF_PI), (off_policy.none, OF_MU)):
        rule = partial(off_policy.rejected, weigh=weigh, by="sequence")
        close((OF_MU * weights(rule)[:, 0, 0]) @ F, (chance * band) @ F, rtol=1e-5)


def test_the_geometric_mean_is_below_the_mean_and_the_root_of_the_product():
    """Lag: of one token all kinds are its ratio."""
    token, product, root, mean = (
        weights(partial(off_policy.ratio, per=per))[:, 0] for per in off_policy.PER
    )
    length = MASK.sum(-1)
    close(root[:, 0] ** length, product[:, 0], rtol=1e-5)
    assert (root <= mean + 1e-6).all()
    alone = length == 1
    for other in (product, root, mean):
        close(other[alone], token[alone], rtol=1e-6)
    close(mean[:, 0], token.sum(-1) / length, rtol=1e-6)


def test_normalised_weights_forget_a_factor_and_their_bias_falls_with_the_batch():
    """Lag: sum w = M; of M completions the bias is about 1 / M of one's."""
    rule = partial(off_policy.self_normalised, weigh=of_sequences, over="sequences")
    each = [bias_and_variance(rule, n)[0] for n in (1, 2, 3, 4)]
    assert each == sorted(each, reverse=True)
    assert each[3] < 0.35 * each[0]
    weight = weights(rule, 3)
    close(np.where(MASK[groups(3)], weight, 0)[..., 0].sum(-1), 3, rtol=1e-5)
    tokens = partial(off_policy.self_normalised, weigh=off_policy.ratio)
    close(weights(tokens, 3).sum((1, 2)), MASK[groups(3)].sum((1, 2)), rtol=1e-5)
    shifted = weights(tokens, 3, tuple((LOG_MU + 0.7).ravel().tolist()))
    close(shifted, weights(tokens, 3), rtol=1e-4)
    none_left = partial(
        off_policy.self_normalised, weigh=partial(off_policy.masked_ratio, cap=1e-9)
    )
    assert not weights(none_left).any()


# ----- decoupled and bypass


def batch(now):
    """`[Y, T]` rows: old log-probs are pi's, behaviour's mu's, credit of both signs."""
    credit = np.float32(np.where(RIGHT, 1.0, -0.5)[:, None] * MASK)
    old, behaviour = (np.float32(of_tokens(table)) for table in (LOG_PI, LOG_MU))
    known = {"tokens": TOKENS.astype(np.int32), "credit": credit, "logp_old": old}
    return tiny.batch(MASK, behaviour, **known), np.float32(of_tokens(now))


def values(now, **fields):
    """Loss of each token of a step's update, and its gradient in the log-prob."""
    rows, logp = batch(now)
    value = optimise.token_loss(override(PLAIN, fields))

    def total(logp):
        each = value(logp, jnp.zeros_like(logp), rows)
        return jnp.sum(each), each

    (_, each), pull = jax.value_and_grad(total, has_aux=True)(jnp.asarray(logp))
    return np.asarray(each, np.float64), np.asarray(pull, np.float64)


def bounded(now, base, weight, low=0.2, high=0.2):
    """- min(w u A, w clip(u) A), u = pi_theta / base, and its gradient."""
    rows, _ = batch(now)
    u = np.exp(np.float64(of_tokens(now)) - of_tokens(base))
    a = np.float64(rows.credit)
    held = np.clip(u, 1 - low, 1 + high)
    value = -np.minimum(weight * u * a, weight * held * a)
    return value, np.where(held * a < u * a, 0, -weight * u * a)


MOVED = LOG_PI + 0.3 * np.random.default_rng(3).normal(size=LOG_PI.shape)
MOVED = np.asarray(jax.nn.log_softmax(jnp.asarray(np.float32(MOVED))))


@pytest.mark.parametrize("now", [LOG_PI, MOVED], ids=["at the start", "later"])
@pytest.mark.parametrize("cap", [np.inf, 2.0])
def test_weights_beside_a_ratio_to_the_start_of_the_step_are_decoupled_clipping(
    now, cap
):
    """Decoupled: pi_prox / pi_behav min(u A, clip(u) A), u = pi_theta / pi_prox."""
    rule = off_policy.ratio
    if cap < np.inf:
        rule = partial(off_policy.truncated_ratio, cap=cap)
    got = values(now, **{"sampling.off_policy": rule})
    want = bounded(now, LOG_PI, np.minimum(RHO, cap) * MASK)
    for mine, its in zip(got, want, strict=True):
        close(mine, its * MASK, atol=1e-5)
    assert (RHO[MASK] > 2).any()


@pytest.mark.parametrize("now", [LOG_PI, MOVED], ids=["at the start", "later"])
def test_bypass_is_the_ratio_over_what_was_drawn_from(now):
    """Decoupled: bypass clips pi_theta / mu, so lag alone silences tokens."""
    got = values(now, **{"update.behaviour_as_old": True})
    want = bounded(now, LOG_MU, 1.0)
    for mine, its in zip(got, want, strict=True):
        close(mine, its * MASK, atol=1e-5)
    _, decoupled = values(LOG_PI, **{"sampling.off_policy": off_policy.ratio})
    _, bypassed = values(LOG_PI, **{"update.behaviour_as_old": True})
    assert decoupled[MASK].all()
    silent = MASK & (bypassed == 0)
    assert silent.any()
    assert (np.abs(np.log(RHO[silent])) > 0.18).all()
    close(bypassed[MASK & ~silent], decoupled[MASK & ~silent], rtol=1e-5)


# ----- how far


def test_a_gap_is_its_definition():
    random = np.random.default_rng(1)
    logp, behaviour = np.float32(-random.exponential(size=(2, 4, 8, 3)))
    mask = random.random((4, 8, 3)) < 0.6
    mask[1] = False
    got = jax.jit(mismatch.gap)(
        np.where(mask, logp, np.nan), np.where(mask, behaviour, np.nan), mask
    )
    for i in range(4):
        far = [
            np.mean((behaviour - logp)[i, m][mask[i, m]])
            for m in range(8)
            if mask[i, m].any()
        ]
        rho = np.exp(np.float64(logp - behaviour)[i][mask[i]])
        want = {
            "ratio_mean": np.mean(rho) if rho.size else 0,
            "ratio_max": max(rho, default=0),
            "effective_fraction": sum(rho) ** 2 / sum(rho**2) / len(rho)
            if rho.size
            else 0,
            "chi_square": np.mean(rho**2) - 1 if rho.size else -1,
            "perplexity_gap_nats": np.mean(far) if far else 0,
        }
        for key, value in want.items():
            close(got[key][i], value, rtol=1e-4, err_msg=key)


def test_the_gap_of_single_tokens_estimates_both_divergences():
    """Lag: over draws of mu its means are chi^2(pi, mu) and KL(mu, pi)."""
    arrays = (np.float32(table[0][:, None, None]) for table in (LOG_PI, LOG_MU))
    got = mismatch.gap(*arrays, np.ones((4, 1, 1), bool))
    close(MU[0] @ got["ratio_mean"], 1, rtol=1e-5)
    close(MU[0] @ got["chi_square"], (PI[0] - MU[0]) ** 2 @ (1 / MU[0]), rtol=1e-4)
    kl = MU[0] @ np.log(MU[0] / PI[0])
    close(MU[0] @ got["perplexity_gap_nats"], kl, rtol=1e-4)
