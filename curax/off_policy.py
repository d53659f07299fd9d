"""Weights of tokens that were not drawn from the policy as the trainer has it.

Every rule is `(logp, logp_behaviour, mask) -> weight`, for `sampling.off_policy`: the
policy over what was drawn from, multiplied onto the policy term of the loss, beside
whatever `correct` undoes of a selection. pi is the policy at the start of the step as
the trainer has it, over the whole vocabulary; mu is the sampler's, after temperature,
top-k and top-p, of an earlier step where it lags. With `sampling.replay_support` pi is
over what mu has kept: then weights are of a lag alone, and without one all about 1.

**Decoupled and bypass.** The ratio of a loss is pi_theta / pi, so that a weight of
`ratio` makes it the decoupled objective, and a cap that with truncated weights:

    w min(u A, clip(u, 1 - low, 1 + high) A),   u = pi_theta / pi,  w = pi / mu

What bounds an update is then how far it has moved, not how far mu was. With
`update.behaviour_as_old` there are no weights and u = pi_theta / mu (bypass): no pass
for pi, and a token is silent from the start where mu was further off than the clip.

**Bias.** Let S be the completions that mu can draw. Then for every f

    E_mu[f(y) prod_t pi(y_t) / mu(y_t)] = E_pi[f(y) 1(y in S)] ,

so that weights correct what is drawn and give nothing back of what is cut off. Where
coefficients depend on labels alone, whole sequences so weighted have the update

    w(p) grad pi(right, S) + E[C-] / (1 - p) grad pi(S),   p = mu(right),

S held fixed: the first term alone with `advantage.raw`, whose C- is 0. Weighted token
by token, prefixes and continuations stay those of mu, Q its expected coefficient:

    sum_t E_mu[sum over kept a of grad pi(a | y_<t) Q(y_<t, a)] .

Of top-k and top-p alone a token's ratio is pi(kept), at most 1, and no cap of 1 or more
binds; above 1 it is where mu lags, or sampler and trainer compute differently.

**Variance.** Of whole sequences E_mu[w] = 1 and E_mu[w^2] = 1 + chi^2(pi, mu), which
grows with every token; a cap, a band and a mean over the sequence trade it for bias. By
enumeration, on a table whose sampler lags far (chi^2 = 1.30; one token or two, outcomes
as coefficients, the mean of three completions), bias over the norm of the gradient of
the pass rate, and variance over that of draws of pi:

    per                 token        sequence     geometric    mean
    none                .81   .93
    ratio               .63  2.00    .00  2.06    .38  1.27    .26  2.25
    truncated_ratio     .56  1.12    .14  1.55    .38  1.27    .27  1.48
    masked_ratio        .82   .74    .93   .59    .38  1.27    .38  1.28
    icepop              .69  1.26
    rejected            .51  1.03    .89   .56    .12  2.03    .34  1.38
    self_normalised     .65  1.45    .28  1.55    .50  1.23    .44  1.31

with default bounds: `rejected` by each, of the ratio of sequences; `self_normalised` of
`ratio`, over tokens and then over sequences.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

from curax.arrays import checks, masked, ratios
from curax.settings.config_types import Magnitude, Positive
from curax.types import BoolT, FloatT

Rule = Callable[[jax.Array, jax.Array, jax.Array], jax.Array]
PER = "token", "sequence", "geometric", "mean"  # what one ratio is of
OVER = "tokens", "sequences"  # whose mean weight is 1 once weights are normalised


@checks.contract(constant=True)
def none(logp: FloatT, logp_behaviour: FloatT, mask: BoolT) -> FloatT:
    """No weights: whatever bias there is stays, and no variance is added.

    A step does not call it, unless another rule does.

    Args:
        logp: as `ratio`.
        logp_behaviour: as `ratio`.
        mask: as `ratio`.

    Returns:
        `[..., M, T]` float32, 1; 0 off the mask.

    Raises:
        AssertionError: as `ratio`.
    """
    return mask.astype(jnp.float32)


@checks.contract(per="per")
def ratio(
    logp: FloatT, logp_behaviour: FloatT, mask: BoolT, *, per: str = "token"
) -> FloatT:
    """The policy over the behaviour, neither clipped nor masked.

        rho_t = pi(y_t) / mu(y_t)            per "token"
        prod_u rho_u                         per "sequence", for each of its n tokens
        (prod_u rho_u)^(1/n)                 per "geometric"
        mean_u rho_u                         per "mean"

    within 20 nats of 1. The product alone is unbiased, and its variance grows with
    every token. A token's ratio leaves prefixes and continuations those of mu, a bias
    of first order in log rho. So have the means over a sequence, whose variance does
    not grow with its length; the geometric one is at most the other, by Jensen, and 1
    where ups and downs cancel. As the weight of a loss with a ratio this is the
    decoupled objective, uncapped.

    Args:
        logp: `[..., M, T]` float, nats, of the policy at the start of the step.
        logp_behaviour: `[..., M, T]` float, nats, of what was drawn from.
        mask: `[..., M, T]` bool, True on tokens that train.
        per: what a ratio is of; static.

    Returns:
        `[..., M, T]` float32, a constant; 0 off the mask.

    Raises:
        AssertionError: while tracing, if shapes differ or dtypes are not
            (float, float, bool).
        ValueError: `per` is another word.

    References:
        Sequences: Precup, Sutton, Singh 2000, "Eligibility Traces for Off-Policy Policy
        Evaluation", ICML. Geometric: Zheng et al. 2025, GSPO, arXiv:2507.18071, there
        of the policy being trained. Decoupled: Hilton, Cobbe, Schulman 2021, "Batch
        size-invariance for policy optimization", arXiv:2110.00641; Fu et al. 2025,
        "AReaL: A Large-Scale Asynchronous Reinforcement Learning System for Language
        Reasoning", arXiv:2505.24298, section 5.
    """
    _check("per", per, PER)
    # Made finite before the difference: off the mask there may be anything.
    logp, logp_behaviour = (
        jnp.where(mask, jnp.asarray(values, jnp.float32), 0.0)
        for values in (logp, logp_behaviour)
    )
    log_ratio = lax.stop_gradient(logp - logp_behaviour)
    if per == "sequence":
        log_ratio = masked.total(log_ratio, mask, keepdims=True)
    elif per == "geometric":
        log_ratio = masked.mean(log_ratio, mask, keepdims=True)
    rho = ratios.ratio(log_ratio)
    if per == "mean":
        rho = masked.mean(rho, mask, keepdims=True)
    return jnp.where(mask, rho, 0.0)


@checks.contract(per="per")
def truncated_ratio(
    logp: FloatT,
    logp_behaviour: FloatT,
    mask: BoolT,
    *,
    cap: Positive | jax.Array = 2.0,
    per: str = "token",
) -> FloatT:
    """Truncated importance sampling (TIS): the ratio, clipped at a cap.

        w = min(rho, cap)        rho as in `ratio`

    A weight that is clipped still trains, by less than it should. To the bias of the
    ratio comes E_mu[(rho - cap)^+ f], of f what is weighed; E_mu[w^2] <= cap E_mu[rho].

    Args:
        logp: as `ratio`.
        logp_behaviour: as `ratio`.
        mask: as `ratio`.
        cap: largest weight, above 0.
        per: as `ratio`.

    Returns:
        `[..., M, T]` float32 in [0, cap]; 0 off the mask.

    Raises:
        AssertionError: as `ratio`.
        ValueError: as `ratio`.

    References:
        Yao et al. 2025, "Your Efficient RL Framework Secretly Brings You Off-Policy RL
        Training", https://fengyao.notion.site/off-policy-rl, of tokens; there mu is
        another program's policy. Ionides 2008, "Truncated Importance Sampling", Journal
        of Computational and Graphical Statistics 17.
    """
    return jnp.minimum(ratio(logp, logp_behaviour, mask, per=per), cap)


@checks.contract(per="per")
def masked_ratio(
    logp: FloatT,
    logp_behaviour: FloatT,
    mask: BoolT,
    *,
    cap: Positive | jax.Array = 2.0,
    per: str = "token",
) -> FloatT:
    """Masked importance sampling (MIS): what is above a cap is dropped, not clipped.

        w = rho if rho <= cap, else 0        rho as in `ratio`

    To the bias of the ratio comes E_mu[rho f 1(rho > cap)], more than a clip's; the
    variance of what mu hardly draws is gone with it.

    Args:
        logp: as `ratio`.
        logp_behaviour: as `ratio`.
        mask: as `ratio`.
        cap: largest ratio that trains, above 0.
        per: as `ratio`; what is dropped is that as well.

    Returns:
        `[..., M, T]` float32 in [0, cap]; 0 off the mask and where dropped.

    Raises:
        AssertionError: as `ratio`.
        ValueError: as `ratio`.

    References:
        Liu, Li et al. 2025, "When Speed Kills Stability: Demystifying RL Collapse from
        the Training-Inference Mismatch",
        https://richardli.xyz/post/rl-collapse-training-inference, of sequences.
    """
    rho = ratio(logp, logp_behaviour, mask, per=per)
    return jnp.where(rho <= cap, rho, 0.0)


@checks.contract()
def icepop(
    logp: FloatT,
    logp_behaviour: FloatT,
    mask: BoolT,
    *,
    low: Magnitude | jax.Array = 0.5,
    high: Magnitude | jax.Array = 5.0,
) -> FloatT:
    """IcePop: the ratio of a token inside a band; tokens outside of it are dropped.

        w_t = rho_t if low <= rho_t <= high, else 0        rho_t as in `ratio`

    Of top-k and top-p alone rho is pi(kept): tokens are dropped where more than 1 - low
    was cut off, which is a bias of its own. Tokens below `low` have little variance to
    lose: they are dropped as unlike, not as variable.

    Args:
        logp: as `ratio`.
        logp_behaviour: as `ratio`.
        mask: as `ratio`.
        low: smallest ratio that trains, in [0, 1].
        high: largest ratio that trains, at least 1.

    Returns:
        `[..., M, T]` float32, 0 or in [low, high].

    Raises:
        AssertionError: as `ratio`.

    References:
        Ling Team 2025, "Every Step Evolves: Scaling Reinforcement Learning for
        Trillion-Scale Thinking Model" (Ring-1T), arXiv:2510.18855. The band of 0.5 and
        5 is that of its blog post, "Small Leak Can Sink a Great Ship".
    """
    rho = ratio(logp, logp_behaviour, mask)
    return jnp.where((rho >= low) & (rho <= high), rho, 0.0)


@checks.contract(weighs="weigh")
def rejected(
    logp: FloatT,
    logp_behaviour: FloatT,
    mask: BoolT,
    *,
    weigh: Rule = truncated_ratio,
    by: str = "geometric",
    low: Magnitude | jax.Array = 0.5,
    high: Magnitude | jax.Array = 2.0,
) -> FloatT:
    """Rejection: a completion whose ratio is outside a band does not train.

        w = weigh(...) if low <= rho <= high, else 0        rho as in `ratio`, per `by`

    With weights of whole sequences the mean is that of the policy inside the band,
    E_pi[f(y) 1(low <= rho(y) <= high)]; with `weigh` = `none` it is that of mu inside.
    A band of the product takes in fewer of longer completions, one of the geometric
    mean does not go by length. By "token" it is tokens that are dropped.

    Args:
        logp: as `ratio`.
        logp_behaviour: as `ratio`.
        mask: as `ratio`.
        weigh: rule of this file that weighs what is left.
        by: whose ratio is looked at; static.
        low: smallest ratio that trains, in [0, 1].
        high: largest ratio that trains, at least 1.

    Returns:
        `[..., M, T]` float32, that of `weigh`; 0 where rejected.

    Raises:
        AssertionError: as `ratio`.
        ValueError: as `ratio`, of `by`.

    References:
        Liu, Li et al. 2025, as `masked_ratio`, of sequences and their geometric mean.
    """
    _check("by", by, PER)
    rho = ratio(logp, logp_behaviour, mask, per=by)
    weight = weigh(logp, logp_behaviour, mask)
    return jnp.where((rho >= low) & (rho <= high), weight, 0.0)


@checks.contract(weighs="weigh", of_batch=True)
def self_normalised(
    logp: FloatT,
    logp_behaviour: FloatT,
    mask: BoolT,
    *,
    weigh: Rule = truncated_ratio,
    over: str = "tokens",
) -> FloatT:
    """Self-normalised weights: divided by their mean over the rows of an update.

        w / mean w        over all tokens, or over sequences: mean_i mean_t w_it

    A constant factor of the weights cancels, and so does the size of the update that a
    cap takes away. A ratio of two means, so that its bias falls as 1 / M, to what
    `weigh` has relative to E_mu[w]; a sequence alone weighs 1. Log-probs of the policy
    at the start of the step are computed before an update, for all its rows: with one
    update per step that is a forward pass more.

    Args:
        logp: as `ratio`; M are the rows of an update.
        logp_behaviour: as `ratio`.
        mask: as `ratio`.
        weigh: rule of this file whose weights are normalised.
        over: "tokens", or "sequences" for weights of whole sequences; static.

    Returns:
        `[..., M, T]` float32; 0 where `weigh` is 0, all of them where it is 0 for all.

    Raises:
        AssertionError: as `ratio`.
        ValueError: `over` is another word.

    References:
        Owen 2013, "Monte Carlo theory, methods and examples", section 9.2.
    """
    _check("over", over, OVER)
    weight = weigh(logp, logp_behaviour, mask)
    if over == "tokens":
        mean = masked.mean(weight, mask, axis=(-2, -1), keepdims=True)
    else:
        some = jnp.any(mask, -1, keepdims=True)
        each = masked.mean(weight, mask, keepdims=True)
        mean = masked.mean(each, some, axis=-2, keepdims=True)
    return jnp.where(mask & (mean > 0), weight / jnp.where(mean > 0, mean, 1.0), 0.0)


def _check(name: str, value: str, known: tuple[str, ...]) -> None:
    if value not in known:
        words = ", ".join(known)
        raise ValueError(f"{name}={value!r} is none of {words}; set it to {known[0]}")
