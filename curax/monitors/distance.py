"""Distance of a policy from the policy that RL started from, as a KL divergence.

It is measured on a fixed set of prompts without hints, from completions of the policy
with log-probs under the policy and under the base.
"""

import jax
import jax.numpy as jnp

from curax import loss
from curax.arrays import checks, masked
from curax.types import BoolMT, FloatMT

ESTIMATORS = {"k1": loss.k1, "k2": loss.k2, "k3": loss.k3}


@checks.contract()
def from_base(logp: FloatMT, logp_base: FloatMT, mask: BoolMT) -> dict[str, jax.Array]:
    """KL(policy || base) by three estimators, per token and per completion.

        per token        D = sum_i s_i / sum_i n_i
        per completion   D = mean_i s_i,    s_i = sum over the n_i tokens of k(r_t)

    with r_t = log pi(y_t) - log pi_base(y_t) and k1 = r, k2 = r^2 / 2,
    k3 = e^-r - 1 + r. Under the policy k1 and k3 are unbiased, per completion too by
    the chain rule; k3 is non-negative and has the least variance. k3 of the ratio of
    whole completions would overflow and is not computed.

    Standard errors treat completions as independent, not tokens: std(s_i) / sqrt(N),
    and for the ratio of sums std(s_i - D n_i), by the delta method. They hold for other
    completions of the same prompts.

    Args:
        logp: `[..., N, T]` float, nats, under the policy that sampled the completions.
        logp_base: `[..., N, T]` float, nats, under the base, in the same context.
        mask: `[..., N, T]` bool, True on tokens the policy chose.

    Returns:
        `k1/token_nats`, `k1/token_error_nats`, `k1/completion_nats` and
        `k1/completion_error_nats`, and the same of k2 and k3, `[...]` float32. An error
        is NaN where fewer than two completions have a token, a mean where none has.

    Raises:
        AssertionError: while tracing, if shapes differ or dtypes are not
            (float, float, bool).

    References:
        Schulman 2020, "Approximating KL Divergence",
        http://joschu.net/blog/kl-approx.html. Distance to the base at equal reward:
        "Fast-Slow Training", arXiv:2605.12484.
    """
    some = jnp.any(mask, -1)
    length, count = masked.total(mask, mask), masked.total(some, some)
    tokens, metrics = jnp.sum(length, -1), {}
    for name, estimate in ESTIMATORS.items():
        sums = masked.total(estimate(logp, logp_base), mask)
        whole = masked.total(sums, some)
        mean, ratio = whole / count, whole / tokens
        for unit, value, rest, per in (
            ("token", ratio, sums - ratio[..., None] * length, tokens / count),
            ("completion", mean, sums - mean[..., None], jnp.ones_like(count)),
        ):
            square = masked.total(rest**2, some) / (count - 1.0) / count
            error = jnp.where(count > 1, jnp.sqrt(square) / per, jnp.nan)
            metrics[f"{name}/{unit}_nats"] = value
            metrics[f"{name}/{unit}_error_nats"] = error
    return metrics
