"""Per-token multipliers of the loss: `Tokens -> multiplier`.

Tokens are all those of an optimizer update, as the policy sees them at its start: the
statistics that a rule takes are those of the update, whatever number of micro-batches
or devices it is made on. A multiplier is a constant, and 0 where the mask is False.
"""

import dataclasses
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from jax import lax

from curax.arrays import checks, masked, metrics, ratios
from curax.settings.config_types import Fraction, Magnitude, Positive
from curax.types import FloatMT, Tokens

_BATCH = (-2, -1)


@checks.contract(constant=True)
def none(tokens: Tokens) -> FloatMT:
    """Every token counts once.

    Args:
        tokens: `[..., M, T]`; only the mask is read.

    Returns:
        `[..., M, T]` float32, 1 everywhere; the mask is in the token weights.

    Raises:
        AssertionError: while tracing, if shapes differ or dtypes are not bool for the
            mask and float for the rest.
    """
    return jnp.ones(tokens.mask.shape, jnp.float32)


@checks.contract()
def forking_tokens(tokens: Tokens, *, share: Fraction | jax.Array = 0.2) -> FloatMT:
    """Train only the tokens at which the policy is least sure.

        multiplier = 1[H_t >= tau],   tau = the round(share n)-th largest entropy

    among the n masked tokens of all rows, at least one of them. Tokens that tie with
    tau all count, so nothing depends on the order of rows. Token weights keep their
    denominators: the other tokens fall silent, those chosen do not grow louder. Which
    tokens count depends on content, so no effective weight in p describes it.

    Args:
        tokens: `[..., M, T]`; entropy and mask are read.
        share: fraction of masked tokens to train, in (0, 1].

    Returns:
        `[..., M, T]` float32, 1 on the chosen tokens, else 0; 0 off the mask.

    Raises:
        AssertionError: as `none`.

    References:
        Wang et al. 2025, "Beyond the 80/20 Rule: High-Entropy Minority Tokens Drive
        Effective Reinforcement Learning for LLM Reasoning", arXiv:2506.01939. It takes
        the threshold per micro-batch; here it is that of the update, so the number of
        micro-batches changes nothing.
    """
    tokens = _constant(tokens)
    count = jnp.maximum(jnp.round(share * _number(tokens)), 1.0)
    return _largest(tokens.entropy, tokens.mask, count)


@checks.contract()
def entropy_change(
    tokens: Tokens,
    *,
    low: Fraction | jax.Array = 0.2,
    high: Magnitude | jax.Array = 0.2,
) -> FloatMT:
    """How the update changes the entropy at each token, to first order, per unit step.

        Delta H_t = -xi_t (pi_a Lambda_a - E_pi[pi Lambda]),   Lambda = log pi + H
        xi_t = rho_t A_t   if rho_t is inside the clip that A_t meets, else 0

    Exact for a token with logits of its own, which the update moves by xi (e_a - pi)
    times a step; the expectation is over the whole vocabulary. Likely tokens that are
    raised lower the entropy, and so do unlikely ones that are lowered.

    Args:
        tokens: `[..., M, T]`.
        low: how far below 1 the ratio may lower a token, that of the loss.
        high: how far above 1 the ratio may raise a token, that of the loss.

    Returns:
        `[..., M, T]` float32, nats times the units of credit; 0 off the mask.

    Raises:
        AssertionError: as `none`.

    References:
        DynaMO, arXiv:2602.19208, equation 29, as its released code cites it.
    """
    tokens = _constant(tokens)
    return _slope(tokens, low, high) * _change(tokens, tokens.entropy_logp_cov)


@checks.contract()
def released_entropy_change(
    tokens: Tokens,
    *,
    low: Fraction | jax.Array = 0.2,
    high: Magnitude | jax.Array = 0.2,
) -> FloatMT:
    """What the released code of DynaMO takes for `entropy_change`.

        -xi_t (pi_a Lambda_a - mean of pi_a' Lambda_a' over the tokens t' of the row)

    The mean over tokens of the same completion stands for the expectation over the
    vocabulary at one of them. It is another number: of the tokens whose entropy changes
    most, it names few. The reason is that an unlikely token has pi_a Lambda_a near 0,
    so that what it does is all in the expectation at its own place.

    Args:
        tokens: `[..., M, T]`; all but score_sq_norm and entropy_logp_cov are read.
        low: as `entropy_change`.
        high: as `entropy_change`.

    Returns:
        As `entropy_change`.

    Raises:
        AssertionError: as `none`.

    References:
        The code of DynaMO since its commit 63e5ec9 (2026-04-12).
    """
    tokens = _constant(tokens)
    mean = masked.mean(_own(tokens), tokens.mask, keepdims=True)
    return _slope(tokens, low, high) * _change(tokens, mean)


@checks.contract()
def dynamo(
    tokens: Tokens,
    *,
    boost: Magnitude | jax.Array = 0.2,
    floor: Magnitude | jax.Array = 0.6,
    gamma: Magnitude | jax.Array = 50.0,
    tau: Fraction | jax.Array = 0.99,
    low: Fraction | jax.Array = 0.2,
    high: Magnitude | jax.Array = 0.2,
    change: Callable[..., jax.Array] = entropy_change,
) -> FloatMT:
    """Sure tokens of right answers are raised, great changes of entropy are braked.

        multiplier = comp stab
        comp = 1 + boost (H_max - H_t) / (H_max - H_min)   if A > 0, else 1
        stab = floor + (1 - floor) / (1 + exp(gamma (Xi_t / max Xi - tau)))

    with Xi = abs(change), and H_min, H_max and max Xi over all masked tokens of the
    update. The defaults are the mode `decay6_linearnorm` of the release, which its
    example script runs; `decay5_linearnorm` is boost 0.4, floor 0.6, gamma 50, tau 0.9.

    comp depends on the state alone, so with 0/1 outcomes and a baseline b it multiplies
    the gradient at a state by 1 + boost h (1 - b), h the normalised gap of entropies:
    hard prompts count for more by up to `boost`. Entropies are mostly near H_min, so
    nearly all of what it does is to raise all tokens of right answers by `boost`. stab
    knows no scale: whichever token changes the entropy most is always braked, to 0.751
    (0.603 in the other mode), however small all changes are; see `abs_brake`.

    Args:
        tokens: `[..., M, T]`.
        boost: largest relative raise, at least 0.
        floor: what is left of the token that changes the entropy most, at the least, in
            (0, 1]; 1 does not brake.
        gamma: steepness of the brake.
        tau: share of max Xi at which the brake is half applied.
        low: as `entropy_change`.
        high: as `entropy_change`.
        change: `(tokens, *, low, high) -> [..., M, T]`, nats; the paper's, or
            `released_entropy_change`.

    Returns:
        `[..., M, T]` float32, positive; 0 off the mask.

    Raises:
        AssertionError: as `none`.

    References:
        DynaMO, arXiv:2602.19208, Advantage Modulation; constants of the released code,
        which takes H_min, H_max and max Xi per micro-batch and device.
    """
    tokens = _constant(tokens)
    mask, entropy = tokens.mask, tokens.entropy
    least, most = masked.extent(entropy, mask, axis=_BATCH, keepdims=True)
    gap = _over(most - entropy, most - least)
    compensation = jnp.where(tokens.credit > 0, 1.0 + boost * gap, 1.0)
    size = jnp.abs(change(tokens, low=low, high=high))
    _, largest = masked.extent(size, mask, axis=_BATCH, keepdims=True)
    loose = jax.nn.sigmoid(gamma * (tau - _over(size, largest)))
    stabilisation = floor + (1.0 - floor) * loose
    return jnp.where(mask, compensation * stabilisation, 0.0)


@checks.contract()
def state_gain(
    tokens: Tokens,
    *,
    most: Positive | jax.Array = 3.0,
    eps: Magnitude | jax.Array = 1e-6,
) -> FloatMT:
    """Sure states are raised, for right and wrong tokens alike.

        m_t = min(most, (1 - |pi_t|^2 + eps)^(-1/2)),   over the mean of m in the update

    1 - |pi|^2 is the mean of |e_a - pi|^2, the squared norm of a token's score in the
    logits: m undoes how a softmax shrinks gradients where it is sure. It depends on the
    state and not on the token taken, so E[m A grad log pi] = m grad of the state's pass
    rate: each state keeps its direction, where `dynamo` bends it. A mean of 1 keeps the
    size of the step.

    Args:
        tokens: `[..., M, T]`; logp, score_sq_norm and mask are read.
        most: largest m before it is divided by the mean, positive.
        eps: positive; keeps a state without any choice finite.

    Returns:
        `[..., M, T]` float32, positive, of mean 1 over the mask; 0 off the mask.

    Raises:
        AssertionError: as `none`.

    References:
        curax's own; neither `most` nor `eps` is published.
    """
    tokens = _constant(tokens)
    # 1 - |pi|^2 = 2 (1 - pi_a) - score_sq_norm.
    spread = jnp.maximum(-2.0 * jnp.expm1(tokens.logp) - tokens.score_sq_norm, 0.0)
    gain = jnp.minimum(most, lax.rsqrt(spread + eps))
    mean = masked.mean(gain, tokens.mask, axis=_BATCH, keepdims=True)
    return jnp.where(tokens.mask, _over(gain, mean), 0.0)


@checks.contract()
def abs_brake(
    tokens: Tokens,
    *,
    budget: float | jax.Array,
    low: Fraction | jax.Array = 0.2,
    high: Magnitude | jax.Array = 0.2,
) -> FloatMT:
    """No token changes the entropy by more than a budget.

        multiplier = min(1, budget / Xi_t),   Xi = abs(entropy_change)

    The budget is absolute: where updates are small, nothing is braked, and nothing
    depends on which tokens are in the same update. It is the user's to choose; a high
    quantile of Xi early in a run is a start. `entropy/change_nats` tells its mean.

    Args:
        tokens: `[..., M, T]`.
        budget: nats times the units of credit, per unit step in the logits; positive.
        low: as `entropy_change`.
        high: as `entropy_change`.

    Returns:
        `[..., M, T]` float32 in (0, 1]; 0 off the mask.

    Raises:
        AssertionError: as `none`.

    References:
        curax's own, in the place of DynaMO's brake; arXiv:2602.19208.
    """
    size = jnp.abs(entropy_change(tokens, low=low, high=high))
    return jnp.where(tokens.mask, budget / jnp.maximum(size, budget), 0.0)


@checks.contract()
def clip_cov(
    tokens: Tokens,
    *,
    share: Fraction | jax.Array = 2e-4,
    least: Magnitude | jax.Array = 1.0,
    most: Positive | jax.Array = 5.0,
    low: Fraction | jax.Array = 0.2,
    high: Magnitude | jax.Array = 0.2,
) -> FloatMT:
    """A few tokens whose log-prob and advantage go together most do not train.

        c_t = (log pi_t - mean log pi) (A_t - mean A)
        multiplier = 0   on max(floor(share n), 1) tokens with least < c_t < most

    of the n masked ones, else 1. To raise what is likely and credited, or to lower what
    is unlikely and discredited, is what takes entropy away. Those chosen have the
    largest c among the tokens within the bounds that the ratio does not clip already;
    ties all fall silent. Paper and release draw them at random from these, which asks
    for a key; and the release takes n and the means per micro-batch.

    Args:
        tokens: `[..., M, T]`; credit, log-probs and mask are read.
        share: fraction of masked tokens that do not train, in [0, 1].
        least: lower bound of c, nats times the units of credit; far above its mean.
        most: upper bound of c, likewise.
        low: how far below 1 the ratio may lower a token, that of the loss.
        high: how far above 1 the ratio may raise a token, that of the loss.

    Returns:
        `[..., M, T]` float32, 0 on the chosen tokens, else 1; 0 off the mask.

    Raises:
        AssertionError: as `none`.

    References:
        Cui et al. 2025, "The Entropy Mechanism of Reinforcement Learning for Reasoning
        Language Models", arXiv:2505.22617, Clip-Cov, with its published bounds.
    """
    tokens = _constant(tokens)
    logp, credit = (
        value - masked.mean(value, tokens.mask, axis=_BATCH, keepdims=True)
        for value in (tokens.logp, tokens.credit)
    )
    covariance = logp * credit
    eligible = tokens.mask & (least < covariance) & (covariance < most)
    eligible &= _inside(tokens, low, high)
    count = jnp.maximum(jnp.floor(share * _number(tokens)), 1.0)
    chosen = _largest(covariance, eligible, count)
    return jnp.where(tokens.mask, 1.0 - chosen, 0.0)


@checks.contract()
def every(tokens: Tokens, *, rules: Sequence[Callable[[Tokens], jax.Array]]) -> FloatMT:
    """The product of several rules, each of which sees all tokens as they are.

    Args:
        tokens: `[..., M, T]`.
        rules: functions of tokens; none at all is `none`.

    Returns:
        `[..., M, T]` float32.

    Raises:
        AssertionError: as `none`.
    """
    multiplier = none(tokens)
    for rule in rules:
        multiplier = multiplier * rule(tokens)
    return multiplier


@checks.contract()
def multiplier_metrics(
    tokens: Tokens, multiplier: FloatMT, slope: FloatMT
) -> dict[str, tuple[jax.Array, jax.Array]]:
    """What a multiplier does, as sums and weights of metrics.

    The cosine is that of the modulated and the plain gradient in the logits,

        sum m g^2 s / sqrt(sum g^2 s  sum m^2 g^2 s),   g slopes, s squares,

    where tokens weigh the same in the loss: exact for a policy in which every token has
    logits of its own, and no more than a sign of danger where parameters are shared.

    Args:
        tokens: `[M, T]`.
        multiplier: `[M, T]` float32, of these tokens.
        slope: `[M, T]` float32, minus the derivative of the loss in each log-prob
            before it is modulated: credit times ratio, 0 where clipped.

    Returns:
        Metric name to (sum, weight), both `[]` float32.
    """
    tokens = _constant(tokens)
    mask, credit = tokens.mask, tokens.credit
    multiplier, slope = (jnp.where(mask, value, 0.0) for value in (multiplier, slope))
    pull = slope**2 * tokens.score_sq_norm
    along, plain, modulated = (jnp.sum(pull * multiplier**power) for power in (1, 0, 2))
    moves = (plain > 0) & (modulated > 0)
    cosine = _over(along, jnp.sqrt(plain) * jnp.sqrt(modulated))
    change = multiplier * slope * _change(tokens, tokens.entropy_logp_cov)

    return {
        "modulate/mean_positive": metrics.mean(multiplier, credit > 0),
        "modulate/damped_fraction": metrics.mean(multiplier < 0.99, credit != 0),
        "modulate/balance": (jnp.sum(credit * multiplier), jnp.sum(jnp.abs(credit))),
        "modulate/cosine": (cosine, jnp.asarray(moves, jnp.float32)),
        "entropy/change_nats": metrics.mean(change, mask),
    }


def _change(tokens: Tokens, expected: jax.Array) -> jax.Array:
    """Entropy per unit of slope: -(pi_a Lambda_a - expected)."""
    return expected - _own(tokens)


def _own(tokens: Tokens) -> jax.Array:
    """pi_a Lambda_a."""
    return jnp.exp(tokens.logp) * (tokens.logp + tokens.entropy)


def _slope(
    tokens: Tokens, low: float | jax.Array, high: float | jax.Array
) -> jax.Array:
    """xi, credit times ratio, 0 where the ratio is clipped."""
    inside = _inside(tokens, low, high)
    return jnp.where(inside, _ratio(tokens) * tokens.credit, 0.0)


def _inside(
    tokens: Tokens, low: float | jax.Array, high: float | jax.Array
) -> jax.Array:
    """Whether the ratio is on this side of the bound that the credit meets."""
    ratio, credit = _ratio(tokens), tokens.credit
    raised = (credit > 0) & (ratio > 1.0 + high)
    return ~(raised | (credit < 0) & (ratio < 1.0 - low))


def _ratio(tokens: Tokens) -> jax.Array:
    return ratios.ratio(tokens.logp - tokens.logp_old)


def _number(tokens: Tokens) -> jax.Array:
    """`[...]` float32, masked tokens of all rows."""
    return masked.total(tokens.mask, tokens.mask, axis=_BATCH)


def _largest(values: jax.Array, where: jax.Array, count: jax.Array) -> jax.Array:
    """1 on the `count` largest of the values that count, and on what ties with them."""
    values = jnp.where(where, values, -jnp.inf)
    descending = jnp.sort(
        values.reshape(*values.shape[:-2], -1), axis=-1, descending=True
    )
    last = count.astype(jnp.int32)[..., None] - 1
    threshold = jnp.take_along_axis(descending, last, axis=-1)[..., None]
    return jnp.asarray(where & (values >= threshold), jnp.float32)


def _over(value: jax.Array, whole: jax.Array) -> jax.Array:
    """value / whole; 0 where the whole is."""
    return jnp.where(whole > 0, value / jnp.where(whole > 0, whole, 1.0), 0.0)


def _constant(tokens: Tokens) -> Tokens:
    """Float32, 0 off the mask, and without a gradient."""

    def settled(values):
        kept = jnp.where(tokens.mask, jnp.asarray(values, jnp.float32), 0.0)
        return lax.stop_gradient(kept)

    names = [field.name for field in dataclasses.fields(tokens)]
    values = {name: settled(getattr(tokens, name)) for name in names if name != "mask"}
    return dataclasses.replace(tokens, **values)
