"""Weights of tokens that were not drawn from the policy as the trainer has it.

Every rule is `(logp, logp_behaviour, mask) -> weight`, for `sampling.off_policy`: the
policy over what was drawn from, multiplied onto the policy term of the loss, beside
whatever `correct` undoes of a selection. pi is the policy at the start of the step as
the trainer has it, over the whole vocabulary; mu is the sampler's, after temperature,
top-k and top-p. Let S be the completions that mu can draw. Then for every f

    E_mu[f(y) prod_t pi(y_t) / mu(y_t)] = E_pi[f(y) 1(y in S)] ,

so that weights correct what is drawn and give nothing back of what is cut off. Where
coefficients depend on labels alone, whole sequences so weighted have the update

    w(p) grad pi(right, S) + E[C-] / (1 - p) grad pi(S),   p = mu(right),

S held fixed: the first term alone with `advantage.raw`, whose C- is 0. Weighted token
by token, prefixes and continuations stay those of mu, Q its expected coefficient:

    sum_t E_mu[sum over kept a of grad pi(a | y_<t) Q(y_<t, a)] .

Of top-k and top-p alone a token's ratio is pi(kept), at most 1, and no cap of 1 or more
binds; above 1 it is where sampler and trainer compute differently.
"""

import jax
import jax.numpy as jnp
from jax import lax

from curax.arrays import checks, masked, ratios
from curax.types import BoolT, FloatT


@checks.contract(constant=True)
def none(logp: FloatT, logp_behaviour: FloatT, mask: BoolT) -> FloatT:
    """No weights: the bias of top-k and top-p stays. A step does not call it.

    Args:
        logp: as `ratio`.
        logp_behaviour: as `ratio`.
        mask: as `ratio`.

    Returns:
        `[..., M, T]` float32, 1; 0 off the mask.

    Raises:
        AssertionError: as `ratio`.
    """
    del logp, logp_behaviour
    return mask.astype(jnp.float32)


@checks.contract()
def ratio(
    logp: FloatT, logp_behaviour: FloatT, mask: BoolT, *, sequence: bool = False
) -> FloatT:
    """The policy over the behaviour, neither clipped nor masked.

        rho_t = pi(y_t) / mu(y_t);   prod_u rho_u for every token, if `sequence`

    within 20 nats of 1. For metrics: a weight that differs was clipped or masked.

    Args:
        logp: `[..., M, T]` float, nats, of the policy at the start of the step.
        logp_behaviour: `[..., M, T]` float, nats, of what was drawn from.
        mask: `[..., M, T]` bool, True on tokens that train.
        sequence: whether a token has the ratio of its whole completion; static.

    Returns:
        `[..., M, T]` float32, a constant; 0 off the mask.

    Raises:
        AssertionError: while tracing, if shapes differ or dtypes are not
            (float, float, bool).
    """
    # Made finite before the difference: off the mask there may be anything.
    logp, logp_behaviour = (
        jnp.where(mask, jnp.asarray(values, jnp.float32), 0.0)
        for values in (logp, logp_behaviour)
    )
    log_ratio = lax.stop_gradient(logp - logp_behaviour)
    if sequence:
        log_ratio = masked.total(log_ratio, mask, keepdims=True)
    return jnp.where(mask, ratios.ratio(log_ratio), 0.0)


@checks.contract(of_sequence="sequence")
def truncated_ratio(
    logp: FloatT,
    logp_behaviour: FloatT,
    mask: BoolT,
    *,
    cap: float | jax.Array = 2.0,
    sequence: bool = False,
) -> FloatT:
    """Truncated importance sampling (TIS): the ratio, clipped at a cap.

        w = min(rho, cap)        rho as in `ratio`, of the token or of the sequence

    A weight that is clipped still trains, by less than it should.

    Args:
        logp: as `ratio`.
        logp_behaviour: as `ratio`.
        mask: as `ratio`.
        cap: largest weight, above 0.
        sequence: weigh whole completions; static. False weighs tokens.

    Returns:
        `[..., M, T]` float32 in [0, cap]; 0 off the mask.

    Raises:
        AssertionError: as `ratio`.

    References:
        Yao et al. 2025, "Your Efficient RL Framework Secretly Brings You Off-Policy RL
        Training", https://fengyao.notion.site/off-policy-rl, of tokens; there mu is
        another program's policy. Ionides 2008, "Truncated Importance Sampling", Journal
        of Computational and Graphical Statistics 17.
    """
    return jnp.minimum(ratio(logp, logp_behaviour, mask, sequence=sequence), cap)


@checks.contract(of_sequence="sequence")
def masked_ratio(
    logp: FloatT,
    logp_behaviour: FloatT,
    mask: BoolT,
    *,
    cap: float | jax.Array = 2.0,
    sequence: bool = False,
) -> FloatT:
    """Masked importance sampling (MIS): what is above a cap is dropped, not clipped.

        w = rho if rho <= cap, else 0        rho as in `ratio`

    Args:
        logp: as `ratio`.
        logp_behaviour: as `ratio`.
        mask: as `ratio`.
        cap: largest ratio that trains, above 0.
        sequence: weigh, and drop, whole completions; static. False: tokens.

    Returns:
        `[..., M, T]` float32 in [0, cap]; 0 off the mask and where dropped.

    Raises:
        AssertionError: as `ratio`.

    References:
        Liu, Li et al. 2025, "When Speed Kills Stability: Demystifying RL Collapse from
        the Training-Inference Mismatch",
        https://richardli.xyz/post/rl-collapse-training-inference, of sequences.
    """
    rho = ratio(logp, logp_behaviour, mask, sequence=sequence)
    return jnp.where(rho <= cap, rho, 0.0)


@checks.contract()
def icepop(
    logp: FloatT,
    logp_behaviour: FloatT,
    mask: BoolT,
    *,
    low: float | jax.Array = 0.5,
    high: float | jax.Array = 5.0,
) -> FloatT:
    """IcePop: the ratio of a token inside a band; tokens outside of it are dropped.

        w_t = rho_t if low <= rho_t <= high, else 0        rho_t as in `ratio`

    Of top-k and top-p alone rho is pi(kept): tokens are dropped where more than 1 - low
    was cut off, which is a bias of its own.

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
