"""Metrics of a step as sums and weights, which can be merged over parts of a step."""

from typing import Any

import flax.struct
import jax
import jax.numpy as jnp

from curax.arrays import masked
from curax.settings.declared import RIGHT
from curax.types import Rollouts, Turns


@flax.struct.dataclass(kw_only=True)
class Tally:
    """Sums of a part of a step, by metric name."""

    means: dict[str, tuple[jax.Array, jax.Array]]  # (sum, weight), both [] float32
    counts: dict[str, jax.Array]  # [] float32


def mean(values: jax.Array, where: jax.Array) -> tuple[jax.Array, jax.Array]:
    """(sum, weight) of the values where `where` is True."""
    return masked.total(values, where, axis=None), count(where)


def count(where: jax.Array) -> jax.Array:
    """Number of True entries, `[]` float32, exact up to 2**24."""
    return jnp.sum(where, dtype=jnp.float32)


def one(value: jax.Array) -> tuple[jax.Array, jax.Array]:
    """(sum, weight) of a single value."""
    return jnp.asarray(value, jnp.float32), jnp.float32(1)


def merge(a: Tally, b: Tally) -> Tally:
    """Sum of two tallies; a metric that one lacks counts as 0 there."""
    nothing = jax.tree.map(jnp.zeros_like, join(a, b))
    return jax.tree.map(jnp.add, join(nothing, a), join(nothing, b))


def join(a: Tally, b: Tally) -> Tally:
    """Union of two tallies with different metrics."""
    return Tally(means=a.means | b.means, counts=a.counts | b.counts)


def finish(tally: Tally) -> dict[str, Any]:
    """Metrics by name, `[]` float32: counts, and means, NaN where the weight is 0."""
    means = {name: s / w for name, (s, w) in tally.means.items()}
    return means | tally.counts


def of_rollouts(
    rollouts: Rollouts, outcome: jax.Array, exists: jax.Array, *, graded: jax.Array
) -> Tally:
    """Metrics of all completions drawn, before any selection.

    Args:
        rollouts: `[N]` rows.
        outcome: `[B, G]` float32, 0 where not `exists`.
        exists: `[B, G]` bool, drawn and graded.
        graded: `[N]` float32, outcomes as they came, NaN where missing.
    """
    drawn, some = rollouts.exists, jnp.any(exists, -1)
    given = drawn & jnp.any(rollouts.mask, -1)  # an engine may give none
    best = jnp.max(outcome, -1, where=exists, initial=-jnp.inf)
    worst = jnp.min(outcome, -1, where=exists, initial=jnp.inf)
    dead = best == worst
    length = jnp.sum(rollouts.mask, -1, dtype=jnp.float32)
    turns = of_turns(rollouts.turns, drawn) if rollouts.turns else {}
    return Tally(
        means={
            "outcome/mean": mean(outcome, exists),
            "group/dead_fraction": mean(dead, some),
            "group/solved_fraction": mean(dead & (worst > RIGHT), some),
            "group/failed_fraction": mean(dead & (best <= RIGHT), some),
            "rollout/length_tokens": mean(length, drawn),
            "rollout/unfinished_fraction": mean(~rollouts.finished, given),
            "policy/entropy_nats": mean(rollouts.entropy, rollouts.mask),
            **turns,
        },
        counts=counts_of(rollouts, graded),
    )


def of_turns(turns: Turns, drawn: jax.Array) -> dict[str, tuple[jax.Array, jax.Array]]:
    """Means over completions of what an environment did, by name.

    What it measures is NaN where it was never asked, and then does not count.

    Args:
        turns: of `[N]` completions.
        drawn: `[N]` bool, those that exist.
    """
    read = jnp.sum(turns.observed, -1, dtype=jnp.float32)
    found = {
        f"environment/{name}": mean(x, drawn & ~jnp.isnan(x))
        for name, x in turns.found.items()
    }
    return {
        "turns/count": mean(turns.count.astype(jnp.float32), drawn),
        "turns/observed_tokens": mean(read, drawn),
    } | found


def of_pilots(rollouts: Rollouts, outcome: jax.Array) -> Tally:
    """Counts of pilot completions, under the names of all rollouts and their own."""
    counts = counts_of(rollouts, outcome)
    return Tally(means={}, counts=counts | {"pilot/drawn": counts["rollout/drawn"]})


def counts_of(rollouts: Rollouts, outcome: jax.Array) -> dict[str, jax.Array]:
    """Counts of completions, tokens, missing outcomes and impossible ones, by name.

    Args:
        rollouts: `[N]` completions.
        outcome: `[N]` float32, NaN where missing.
    """
    drawn = rollouts.exists
    return {
        "rollout/drawn": count(drawn),
        "rollout/tokens": count(rollouts.mask),
        "outcome/missing": count(drawn & jnp.isnan(outcome)),
        "outcome/out_of_range": count(drawn & ((outcome < 0) | (outcome > 1))),
    }
