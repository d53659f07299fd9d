"""Ratios of probabilities from differences of log-probs."""

import jax
import jax.numpy as jnp

LARGEST = 20.0  # nats; exp of a larger log-ratio is noise, and at 88 it overflows


def ratio(log_ratio: jax.Array) -> jax.Array:
    """exp of a log-ratio, which is first held within 20 nats of 0."""
    return jnp.exp(jnp.clip(log_ratio, -LARGEST, LARGEST))
