"""Rotary position embeddings, and their rescaling to longer contexts.

A pair of entries of a query or key at position t is rotated by t times the pair's
frequency, so that their inner product depends on the distance alone.
"""

import dataclasses
import math

import jax
import jax.numpy as jnp

from curax.arrays.sharding import platform
from curax.settings.config_types import Count, Positive


@dataclasses.dataclass(frozen=True, kw_only=True)
class RopeScaling:
    """The rescaling of Llama 3: low frequencies are divided by `factor`.

    A frequency of at most `low_freq_factor` turns within the original context is low;
    one of at least `high_freq_factor` turns is kept; in between it is interpolated.

    Attributes:
        factor: ratio of the longest context to the original one.
        low_freq_factor: turns.
        high_freq_factor: turns, more than `low_freq_factor`.
        original_max_position_embeddings: tokens of the original context.

    Raises:
        ValueError: if `high_freq_factor` is not above `low_freq_factor`.
    """

    factor: Positive = 8.0
    low_freq_factor: Positive = 1.0
    high_freq_factor: Positive = 4.0
    original_max_position_embeddings: Count = 8192

    def __post_init__(self):
        if not self.high_freq_factor > self.low_freq_factor:  # NaN neither
            raise ValueError(
                f"rope_scaling.high_freq_factor={self.high_freq_factor} must be above "
                f"low_freq_factor={self.low_freq_factor}; set it to "
                f"{4 * self.low_freq_factor}."
            )

    def rescaled(self, frequency: jax.Array) -> jax.Array:
        """The rescaled frequencies, `[d / 2]` float32, radians per token.

        References:
            Grattafiori et al. 2024, "The Llama 3 Herd of Models", arXiv:2407.21783; the
            rule is in the models' published code.
        """
        turns = frequency * (self.original_max_position_embeddings / (2 * math.pi))
        width = self.high_freq_factor - self.low_freq_factor
        quick = jnp.clip((turns - self.low_freq_factor) / width, 0.0, 1.0)
        return quick * frequency + (1 - quick) * (frequency / self.factor)


def cos_sin(
    positions: jax.Array, d: int, theta: float, scaling: RopeScaling | None = None
) -> tuple[jax.Array, jax.Array]:
    """Cosine and sine `[N, 1, Q, d / 2]` of the angles at positions `[N, Q]`, float32.

    On a CPU they are arrays of their own. Its compiler holds both for cheap and would
    compute them in all that reads them, anew for every head; a barrier does not keep it
    from that, but a condition that it cannot know does.
    """
    half = d // 2
    frequency = theta ** (-jnp.arange(half, dtype=jnp.float32) / half)
    if scaling:
        frequency = scaling.rescaled(frequency)
    angle = (
        positions[:, None, :, None].astype(jnp.float32) * frequency[None, None, None]
    )

    def both(angle):
        return jnp.cos(angle), jnp.sin(angle)

    if platform() != "cpu":
        return both(angle)
    true = jax.lax.optimization_barrier(jnp.bool_(True))
    return jax.lax.cond(true, both, lambda angle: (angle, angle), angle)


def rotate(x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    """`x` `[N, heads, Q, d]` rotated as `cos_sin` says; entry i pairs with i + d/2.

    Computed in float32, returned in the dtype of `x`.
    """
    half = x.shape[-1] // 2
    a, b = x[..., :half].astype(jnp.float32), x[..., half:].astype(jnp.float32)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], -1).astype(x.dtype)
