"""Metrics of a step as sums and weights, so parts of a step can be put together."""

from typing import Any

import flax.struct
import jax
import jax.numpy as jnp

from curax.arrays import masked
from curax.types import Rollouts


@flax.struct.dataclass(kw_only=True)
class Tally:
    """What a part of a step adds to its metrics; keys are metric names."""

    means: dict[str, tuple[jax.Array, jax.Array]]  # (sum, weight), both [] float32
    counts: dict[str, jax.Array]  # [] float32


def mean(values: jax.Array, where: jax.Array) -> tuple[jax.Array, jax.Array]:
    """(sum, weight) of the values that count."""
    return masked.total(values, where, axis=None), count(where)


def count(where: jax.Array) -> jax.Array:
    """How many are True, `[]` float32 (exact to 2**24)."""
    return jnp.sum(where, dtype=jnp.float32)


def one(value: jax.Array) -> tuple[jax.Array, jax.Array]:
    """(sum, weight) of a single value."""
    return jnp.asarray(value, jnp.float32), jnp.float32(1)


def merge(a: Tally, b: Tally) -> Tally:
    """The tally of two parts of a step together; what one lacks is 0 there."""
    means = {
        name: (one[0] + two[0], one[1] + two[1])
        for name, one, two in _both(a.means, b.means, (jnp.float32(0),) * 2)
    }
    counts = {
        name: one + two for name, one, two in _both(a.counts, b.counts, jnp.float32(0))
    }
    return Tally(means=means, counts=counts)


def _both(a: dict, b: dict, nothing: Any) -> list[tuple[str, Any, Any]]:
    return [(name, a.get(name, nothing), b.get(name, nothing)) for name in a | b]


def join(a: Tally, b: Tally) -> Tally:
    """The tally of two parts that measured different things."""
    return Tally(means=a.means | b.means, counts=a.counts | b.counts)


def finish(tally: Tally) -> dict[str, Any]:
    """Name to `[]` float32: counts, and means, NaN where nothing counted."""
    means = {name: s / w for name, (s, w) in tally.means.items()}
    return means | tally.counts


def of_rollouts(
    rollouts: Rollouts, outcome: jax.Array, exists: jax.Array, *, missing: jax.Array
) -> Tally:
    """What completions say before anything is selected.

    Args:
        rollouts: `[N]` rows.
        outcome: `[B, G]` float32, 0 where it does not exist.
        exists: `[B, G]` bool, drawn and graded.
        missing: `[N]` bool, drawn but not graded.
    """
    drawn, some = rollouts.exists, jnp.any(exists, -1)
    best = jnp.max(outcome, -1, where=exists, initial=-jnp.inf)
    worst = jnp.min(outcome, -1, where=exists, initial=jnp.inf)
    length = jnp.sum(rollouts.mask, -1, dtype=jnp.float32)
    return Tally(
        means={
            "outcome/mean": mean(outcome, exists),
            "group/dead_fraction": mean(best == worst, some),
            "group/solved_fraction": mean(worst >= 1, some),
            "group/failed_fraction": mean(best <= 0, some),
            "rollout/length_tokens": mean(length, drawn),
            "rollout/unfinished_fraction": mean(~rollouts.finished, drawn),
            "policy/entropy_nats": mean(rollouts.entropy, rollouts.mask),
        },
        counts=_counts(rollouts, missing),
    )


def of_pilots(rollouts: Rollouts, *, missing: jax.Array) -> Tally:
    """What pilots cost: they count among all that was drawn, and by themselves."""
    counts = _counts(rollouts, missing)
    return Tally(means={}, counts=counts | {"pilot/drawn": counts["rollout/drawn"]})


def _counts(rollouts: Rollouts, missing: jax.Array) -> dict[str, jax.Array]:
    return {
        "rollout/drawn": count(rollouts.exists),
        "rollout/tokens": count(rollouts.mask),
        "outcome/missing": count(missing),
    }
