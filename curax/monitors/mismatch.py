"""How far what completions were drawn from is from the policy, and why.

The log-ratio of policy and behaviour has two parts, both known at each token drawn:

    log pi - log mu = (log pi_sampler - log mu) + (log pi - log pi_sampler)

mu is what was drawn from, pi_sampler the sampler's policy before top-k and top-p. The
first part is truncation; the second is the engine, where both computed from the same
parameters, and else the lag. With `sampling.replay_support` pi is over what mu has
kept, pi_sampler is mu, and there is no first part.
"""

import jax
import jax.numpy as jnp

from curax import loss
from curax.arrays import checks, masked, ratios
from curax.types import BoolMT, FloatMT


@checks.contract()
def gap(logp: FloatMT, logp_behaviour: FloatMT, mask: BoolMT) -> dict[str, jax.Array]:
    """Ratios of the tokens drawn, and estimates of how far two policies are apart.

        ratio_mean          mean rho, 1 in the mean where mu draws all that pi can say
        ratio_max           the largest rho
        effective_fraction  (sum rho)^2 / (n sum rho^2), n the number of tokens
        chi_square          mean rho^2 - 1, of chi^2(pi, mu) without bias
        perplexity_gap_nats mean over completions of mean_t (log mu - log pi), of
                            KL(mu, pi) per token; log of the ratio of perplexities

    with rho = pi(y_t) / mu(y_t). Where mu is pi they are 1, 1, 1, 0 and 0. Truncation
    has rho <= 1, so that its chi_square is at most 0 and its gap at least 0.

    Args:
        logp: `[..., M, T]` float, nats, of the policy.
        logp_behaviour: `[..., M, T]` float, nats, of what was drawn from.
        mask: `[..., M, T]` bool, True on tokens that count.

    Returns:
        `[...]` float32 each; 0 over nothing, and chi_square -1.

    Raises:
        AssertionError: while tracing, if shapes differ or dtypes are not
            (float, float, bool).
    """
    logp, logp_behaviour = (jnp.where(mask, x, 0.0) for x in (logp, logp_behaviour))
    log_ratio = loss.k1(logp, logp_behaviour)
    rho, every = ratios.ratio(log_ratio), (-2, -1)
    mean, square = (masked.mean(x, mask, axis=every) for x in (rho, rho**2))
    far = masked.mean(-log_ratio, mask)
    return {
        "ratio_mean": mean,
        "ratio_max": jnp.max(rho, every, where=mask, initial=0.0),
        "effective_fraction": mean**2 / jnp.where(square > 0, square, 1.0),
        "chi_square": square - 1.0,
        "perplexity_gap_nats": masked.mean(far, jnp.any(mask, -1)),
    }
