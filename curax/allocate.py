"""How many completions each prompt gets, and the difficulty memory it is read from."""

import jax
import jax.numpy as jnp

from curax.types import Memory, Plan


def uniform(pass_rate: jax.Array, draws: jax.Array, *, budget: int) -> jax.Array:
    """The same number for every prompt; what does not divide goes to the first ones.

    Args:
        pass_rate: `[B]` float32 in [0, 1], estimate from earlier visits; unused.
        draws: `[B]` float32, discounted completions behind that estimate; unused.
        budget: completions of the whole step.

    Returns:
        `[B]` int32 with sum `budget`.
    """
    prompts = pass_rate.shape[0]
    extra = jnp.arange(prompts, dtype=jnp.int32) < budget % prompts
    return budget // prompts + extra.astype(jnp.int32)


def plan(counts: jax.Array, *, rows: int) -> Plan:
    """The rows that give prompt b its `counts[b]` completions, each in its own prompt.

    Args:
        counts: `[B]` int32, sum at most `rows`.
        rows: N, the static number of rows of a step.

    Returns:
        Rows in prompt order; those beyond the sum of `counts` do not exist.
    """
    end = jnp.cumsum(counts)
    row = jnp.arange(rows, dtype=counts.dtype)
    prompt = jnp.searchsorted(end, row, side="right").astype(jnp.int32)
    exists = row < end[-1]
    prompt = jnp.where(exists, prompt, 0)
    slot = jnp.where(exists, row - (end - counts)[prompt], 0)
    return Plan(prompt=prompt, slot=slot, context=prompt, exists=exists)


def forget(num_prompts: int) -> Memory:
    """A memory that has seen nothing: `[num_prompts]` zeros."""
    return Memory(
        draws=jnp.zeros(num_prompts, jnp.float32),
        solved=jnp.zeros(num_prompts, jnp.float32),
    )


def observe(
    memory: Memory,
    prompt_id: jax.Array,
    outcome: jax.Array,
    exists: jax.Array,
    *,
    discount: float | jax.Array,
) -> Memory:
    """The memory after a visit: S <- lambda S + n, S+ <- lambda S+ + k.

    A prompt that is not in the batch, or of which nothing exists, keeps its counts. One
    that is there twice is discounted once and counted twice.

    Args:
        memory: counts before.
        prompt_id: `[B]` int32 in [0, num_prompts).
        outcome: `[B, G]` float in [0, 1].
        exists: `[B, G]` bool, False where nothing was drawn or the outcome is missing.
        discount: lambda in (0, 1], per visit.

    Returns:
        Counts after, same shapes.

    References:
        Xiong et al. 2025, "Reinforce-Ada", arXiv:2510.04996, section on estimation.
    """
    n = jnp.sum(exists, -1, dtype=jnp.float32)
    k = jnp.sum(outcome, -1, where=exists)
    visits = jnp.zeros_like(memory.draws).at[prompt_id].add(n)
    keep = jnp.where(visits > 0, discount, 1.0)
    return Memory(
        draws=(memory.draws * keep).at[prompt_id].add(n),
        solved=(memory.solved * keep).at[prompt_id].add(k),
    )


def pass_rate(
    memory: Memory, prompt_id: jax.Array, *, prior: tuple[float, float]
) -> jax.Array:
    """`[B]` posterior mean (S+ + a) / (S + a + b) under a Beta(a, b) prior."""
    a, b = prior
    return (memory.solved[prompt_id] + a) / (memory.draws[prompt_id] + a + b)
