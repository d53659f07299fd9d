"""Per-token losses and KL estimators; never reduced here.

Every loss is `(logp, logp_old, advantage, mask) -> loss`, to be weighted, summed and
minimised; a step gives the advantage of each token. Whatever is off the mask may hold
anything: it costs 0 and its gradient is 0.
"""

import jax
import jax.numpy as jnp
from jax import lax

from curax.arrays import checks, masked, ratios
from curax.settings.config_types import AboveOne, Fraction, Magnitude
from curax.types import BoolT, Float, FloatT


@checks.contract(has_ratio=False)
def reinforce(
    logp: FloatT, logp_old: FloatT, advantage: FloatT | Float, mask: BoolT
) -> FloatT:
    """The policy gradient itself.

        loss = -A log pi(y_t)

    Right while the policy is the one that sampled; later updates on the same rows are
    off-policy and nothing corrects them. With A in {0, 1} this is RAFT.

    Args:
        logp: `[..., M, T]` float, nats, of the policy being trained.
        logp_old: `[..., M, T]` float, nats, at the start of the update; not read.
        advantage: `[..., M, T]` float, credit of each token, or `[..., M]`, of each
            row; a constant.
        mask: `[..., M, T]` bool, True on tokens that train.

    Returns:
        `[..., M, T]` float32, units of `advantage` times nats; 0 off the mask.

    Raises:
        AssertionError: while tracing, if shapes do not fit or dtypes are not
            (float, float, float, bool).

    References:
        Williams 1992, "Simple Statistical Gradient-Following Algorithms for
        Connectionist Reinforcement Learning", Machine Learning 8. Dong et al. 2023,
        RAFT, arXiv:2304.06767.
    """
    logp, _, credit = _finite(logp, logp_old, advantage, mask)
    return -credit * logp


@checks.contract()
def clipped_ratio(
    logp: FloatT,
    logp_old: FloatT,
    advantage: FloatT | Float,
    mask: BoolT,
    *,
    low: Fraction | jax.Array = 0.2,
    high: Magnitude | jax.Array = 0.2,
    dual: AboveOne | jax.Array | None = None,
) -> FloatT:
    """Importance-weighted, and silent once a token has moved far enough.

        loss = -min(rho A, clip(rho, 1 - low, 1 + high) A),   rho = pi / pi_old
             = -A min(rho, 1 + high)     if A > 0
             = -A max(rho, 1 - low)      if A < 0

    so each sign of A meets one bound only; in RAFT++, where A is 0 or 1, `low` is
    inert. With `dual` = c the ratio of a token with A < 0 is also capped at c: its loss
    is at most -c A, and no longer grows as the token becomes likelier.

    Args:
        logp: `[..., M, T]` float, nats, of the policy being trained.
        logp_old: `[..., M, T]` float, nats, at the start of the update; a constant.
        advantage: `[..., M, T]` float, credit of each token, or `[..., M]`, of each
            row; a constant.
        mask: `[..., M, T]` bool, True on tokens that train.
        low: how far below 1 the ratio may lower a token, in [0, 1].
        high: how far above 1 the ratio may raise a token, at least 0.
        dual: cap of the ratio where A < 0, more than 1; None does without.

    Returns:
        `[..., M, T]` float32 in the units of `advantage`; 0 off the mask.

    Raises:
        AssertionError: while tracing, if shapes do not fit or dtypes are not
            (float, float, float, bool).

    References:
        Schulman et al. 2017, "Proximal Policy Optimization Algorithms",
        arXiv:1707.06347, equation 7. high > low: Yu et al. 2025, DAPO,
        arXiv:2503.14476. dual: Ye et al. 2020, "Mastering Complex Control in MOBA Games
        with Deep Reinforcement Learning", arXiv:1912.09729. A in {0, 1}: RAFT++ of
        Xiong et al. 2025, arXiv:2504.11343.
    """
    logp, logp_old, credit = _finite(logp, logp_old, advantage, mask)
    return -credit * _bounded(ratios.ratio(logp - logp_old), credit, low, high, dual)


@checks.contract()
def gspo(
    logp: FloatT,
    logp_old: FloatT,
    advantage: FloatT | Float,
    mask: BoolT,
    *,
    low: Fraction | jax.Array = 3e-4,
    high: Magnitude | jax.Array = 4e-4,
) -> FloatT:
    """Ratio and clip of whole completions.

        loss = -min(s A, clip(s, 1 - low, 1 + high) A)
        s = exp(mean_t (log pi(y_t) - log pi_old(y_t)))

    the same for all tokens of a row. The gradient of a token's loss goes to its own
    log-prob, -A s grad log pi(y_t) while unclipped, so that a per-token multiplier acts
    on its token alone. Where the tokens of a row weigh the same, the gradient is that
    of the sequence form; with `aggregate.sequence_mean` the loss is the paper's.

    Args:
        logp: `[..., M, T]` float, nats, of the policy being trained.
        logp_old: `[..., M, T]` float, nats, at the start of the update; a constant.
        advantage: `[..., M, T]` float, credit of each token, or `[..., M]`, of each
            row; a constant.
        mask: `[..., M, T]` bool, True on tokens that train.
        low: how far below 1 the ratio may lower a completion, in [0, 1].
        high: how far above 1 the ratio may raise a completion, at least 0.

    Returns:
        `[..., M, T]` float32 in the units of `advantage`; 0 off the mask.

    Raises:
        AssertionError: while tracing, if shapes do not fit or dtypes are not
            (float, float, float, bool).

    References:
        Zheng et al. 2025, "Group Sequence Policy Optimization", arXiv:2507.18071,
        equations 5 and 7; the gradient is routed as in its GSPO-token variant.
    """
    logp, logp_old, credit = _finite(logp, logp_old, advantage, mask)
    sequence = masked.mean(logp - logp_old, mask, keepdims=True)
    ratio = ratios.ratio(lax.stop_gradient(sequence - logp) + logp)
    return -credit * _bounded(ratio, credit, low, high)


@checks.contract()
def cispo(
    logp: FloatT,
    logp_old: FloatT,
    advantage: FloatT | Float,
    mask: BoolT,
    *,
    low: Fraction | jax.Array = 1.0,
    high: Magnitude | jax.Array = 4.0,
) -> FloatT:
    """Importance-weighted policy gradient whose weight is clipped, not its gradient.

        loss = -sg(clip(rho, 1 - low, 1 + high)) A log pi(y_t),   rho = pi / pi_old

    No token falls silent, however far it has moved: rare tokens that turn a chain of
    thought keep their gradient. low = 1 never binds, as in the paper.

    Args:
        logp: `[..., M, T]` float, nats, of the policy being trained.
        logp_old: `[..., M, T]` float, nats, at the start of the update; a constant.
        advantage: `[..., M, T]` float, credit of each token, or `[..., M]`, of each
            row; a constant.
        mask: `[..., M, T]` bool, True on tokens that train.
        low: how far below 1 the weight may be, in [0, 1].
        high: how far above 1 the weight may be, at least 0. The paper tunes this one
            and does not publish it.

    Returns:
        `[..., M, T]` float32, units of `advantage` times nats; 0 off the mask.

    Raises:
        AssertionError: while tracing, if shapes do not fit or dtypes are not
            (float, float, float, bool).

    References:
        MiniMax 2025, "MiniMax-M1: Scaling Test-Time Compute Efficiently with Lightning
        Attention", arXiv:2506.13585, equations 4 and 5.
    """
    logp, logp_old, credit = _finite(logp, logp_old, advantage, mask)
    ratio = lax.stop_gradient(ratios.ratio(logp - logp_old))
    return -credit * jnp.clip(ratio, 1.0 - low, 1.0 + high) * logp


@checks.contract()
def k1(logp: Float, logp_ref: Float) -> Float:
    """The log-ratio itself, log pi - log pi_ref.

    Over completions of the policy its mean is KL(pi || pi_ref), and its gradient
    through `logp` has mean 0: good as a metric or inside the reward, useless in a loss.

    Args:
        logp: `[...]` float, nats, of the policy.
        logp_ref: `[...]` float, nats, of the reference; a constant.

    Returns:
        `[...]` float32, nats, of either sign. Elementwise: the caller masks.

    Raises:
        AssertionError: while tracing, if shapes differ or dtypes are not float.

    References:
        Schulman 2020, "Approximating KL Divergence",
        http://joschu.net/blog/kl-approx.html.
    """
    return -_towards(logp, logp_ref)


@checks.contract()
def k2(logp: Float, logp_ref: Float) -> Float:
    """Half the squared log-ratio, d^2 / 2 with d = log pi_ref - log pi.

    Biased as an estimate of KL(pi || pi_ref), by little while d is small; its gradient
    over completions of the policy is that of KL(pi || pi_ref), without bias.

    Args:
        logp: as `k1`.
        logp_ref: as `k1`.

    Returns:
        `[...]` float32, squared nats, at least 0. Elementwise: the caller masks.

    Raises:
        AssertionError: as `k1`.

    References:
        Schulman 2020, as `k1`. The gradient: Hu et al. 2025, REINFORCE++,
        arXiv:2501.03262.
    """
    return 0.5 * _towards(logp, logp_ref) ** 2


@checks.contract()
def k3(logp: Float, logp_ref: Float) -> Float:
    """Never negative and unbiased: exp(d) - d - 1 with d = log pi_ref - log pi.

    Over completions of the policy its mean is KL(pi || pi_ref), with less noise than
    `k1`; its gradient is that of the reverse, KL(pi_ref || pi). d is capped at 20 nats,
    beyond which the gradient is 0.

    Args:
        logp: as `k1`.
        logp_ref: as `k1`.

    Returns:
        `[...]` float32, nats, at least 0. Elementwise: the caller masks.

    Raises:
        AssertionError: as `k1`.

    References:
        Schulman 2020, as `k1`. Shao et al. 2024, DeepSeekMath, arXiv:2402.03300,
        equation 4.
    """
    d = jnp.minimum(_towards(logp, logp_ref), ratios.LARGEST)
    return jnp.expm1(d) - d


def _bounded(
    ratio: jax.Array,
    credit: jax.Array,
    low: float | jax.Array,
    high: float | jax.Array,
    dual: float | jax.Array | None = None,
) -> jax.Array:
    """The ratio, held where moving on would only overdo what `credit` asks for.

    At a bound itself it is not held, so that with a bound of 1 the first update moves.
    """
    raised = jnp.where(ratio > 1.0 + high, 1.0 + high, ratio)
    lowered = jnp.where(ratio < 1.0 - low, 1.0 - low, ratio)
    if dual is not None:
        lowered = jnp.where(lowered > dual, dual, lowered)
    return jnp.where(credit > 0, raised, lowered)


def _towards(logp: jax.Array, logp_ref: jax.Array) -> jax.Array:
    return jnp.asarray(logp_ref, jnp.float32) - jnp.asarray(logp, jnp.float32)


def _finite(
    logp: jax.Array, logp_old: jax.Array, advantage: jax.Array, mask: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Both log-probs and the credit of every token, 0 off the mask, all `[..., M, T]`.

    Made finite before any exp or product: a `where` around the result alone would
    leave NaN in the gradient.
    """
    each = advantage.ndim == mask.ndim
    credit = jnp.broadcast_to(advantage if each else advantage[..., None], mask.shape)
    logp, logp_old, credit = (
        jnp.where(mask, jnp.asarray(values, jnp.float32), 0.0)
        for values in (logp, logp_old, credit)
    )
    return logp, lax.stop_gradient(logp_old), lax.stop_gradient(credit)
