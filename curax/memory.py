"""The difficulty memory: discounted counts from earlier visits to each prompt."""

import jax
import jax.numpy as jnp

from curax.arrays import checks, masked
from curax.types import BoolB, Difficulty, Float, FloatB, IntB, PromptMemory


def forget(num_prompts: int) -> PromptMemory:
    """An empty memory: `[num_prompts]` zeros."""
    return PromptMemory(
        draws=jnp.zeros(num_prompts, jnp.float32),
        solved=jnp.zeros(num_prompts, jnp.float32),
        square=jnp.zeros(num_prompts, jnp.float32),
        tokens=jnp.zeros(num_prompts, jnp.float32),
    )


def discount(half_life: float | jax.Array) -> jax.Array:
    """Discount per visit, under which counts halve in `half_life` visits."""
    return jnp.exp2(-1.0 / jnp.asarray(half_life, jnp.float32))


def observe(
    memory: PromptMemory,
    prompt_id: jax.Array,
    outcome: jax.Array,
    square: jax.Array,
    tokens: jax.Array,
    exists: jax.Array,
    *,
    discount: float | jax.Array,
) -> PromptMemory:
    """The memory after a visit: S <- lambda S + n, S+ <- lambda S+ + k.

    Squared score norms and lengths are summed likewise; what is not finite, as of a
    policy that diverged, is left out. A prompt that is not in the
    batch, or of which nothing exists, keeps its sums. One that is there twice is
    discounted once and counted twice.

    Args:
        memory: sums before.
        prompt_id: `[B]` int32 in [0, num_prompts).
        outcome: `[B, G]` float in [0, 1].
        square: `[B, G]` float, squared score norm of each completion.
        tokens: `[B, G]` integer, length of each completion.
        exists: `[B, G]` bool, False where nothing was drawn or the outcome is missing.
        discount: lambda in (0, 1], per visit.

    Returns:
        Sums after, same shapes.

    References:
        Xiong et al. 2025, "Reinforce-Ada", arXiv:2510.04996, section on estimation.
    """
    n = jnp.sum(exists, -1, dtype=jnp.float32)
    visits = jnp.zeros_like(memory.draws).at[prompt_id].add(n)
    keep = jnp.where(visits > 0, discount, 1.0)

    def add(old: jax.Array, values: jax.Array) -> jax.Array:
        values = values.astype(jnp.float32)
        new = jnp.sum(values, -1, where=exists & jnp.isfinite(values))
        return (old * keep).at[prompt_id].add(new)

    return PromptMemory(
        draws=(memory.draws * keep).at[prompt_id].add(n),
        solved=add(memory.solved, outcome),
        square=add(memory.square, square),
        tokens=add(memory.tokens, tokens),
    )


def difficulty(
    memory: PromptMemory, prompt_id: jax.Array, *, prior: tuple[float, float]
) -> Difficulty:
    """Estimated difficulty of prompts, from the memory and a Beta prior.

        pass_rate = (S+ + a) / (S + a + b)        under a Beta(a, b) prior

    Norm and length of a prompt without visits are those of the whole memory, 1 while
    that is empty.

    Args:
        memory: of the run.
        prompt_id: `[B]` int32 in [0, num_prompts).
        prior: a and b, pseudo-counts of right and of wrong completions.

    Returns:
        Estimates, `[B]`; the norm is the root mean square.
    """
    a, b = prior
    draws, solved = memory.draws[prompt_id], memory.solved[prompt_id]

    def average(sums: jax.Array) -> jax.Array:
        total = jnp.sum(memory.draws)
        common = jnp.where(total > 0, jnp.sum(sums) / jnp.maximum(total, 1e-9), 1.0)
        own = sums[prompt_id] / jnp.where(draws > 0, draws, 1.0)
        return jnp.where(draws > 0, own, common)

    return Difficulty(
        draws=draws,
        solved=solved,
        pass_rate=(solved + a) / (draws + a + b),
        norm=jnp.sqrt(average(memory.square)),
        tokens=average(memory.tokens),
    )


@checks.contract()
def dead_groups(
    solved: FloatB, failed: FloatB, draws: IntB, dead: BoolB, *, most: int
) -> tuple[Float, Float, Float]:
    """Expected share of dead groups, its standard deviation, and z of the observed one.

        P(dead) = prod_{j<n} (b + j) / (a + b + j) + prod_{j<n} (a + j) / (a + b + j)

    the chance that n completions are all wrong or all right, of a prompt whose pass
    rate is Beta(a, b): exact, where the pass rate were known it would be
    (1-p)^n + p^n. The share of dead groups has this mean over prompts, and z counts its
    standard deviations from there. z stays far from 0 where outcomes are not those that
    the memory has seen: a policy that moves faster than its half-life, a verifier that
    changed, completions of a group that are not drawn apart.

    It holds where n is given before anything is drawn: not under a rule that stops a
    prompt by its outcomes, nor for the groups that a refill replaces.

    Args:
        solved: `[..., B]` float, a: right completions and those of the prior, positive.
        failed: `[..., B]` float, b: likewise of wrong ones.
        draws: `[..., B]` integer in [0, most], n; prompts with 0 do not count.
        dead: `[..., B]` bool, whether all outcomes of the group are equal.
        most: G; static.

    Returns:
        The expected share of dead groups, its standard deviation, and z, `[...]`
        float32. z is 0 where the share is certain, as in groups of one.

    Raises:
        AssertionError: while tracing, if shapes differ or dtypes are not (float, float,
            int, bool).
    """
    exists = draws > 0
    a, b = (
        jnp.where(exists, jnp.asarray(x, jnp.float32), 1.0)[..., None]
        for x in (solved, failed)
    )
    j = jnp.arange(most, dtype=jnp.float32).reshape(*(1,) * draws.ndim, -1)
    drawn = j < draws[..., None].astype(jnp.float32)
    wrong, right = (
        jnp.prod(jnp.where(drawn, (one + j) / (a + b + j), 1.0), -1) for one in (b, a)
    )
    chance = jnp.where(draws > 1, wrong + right, 1.0)
    count = jnp.maximum(masked.total(exists, exists), 1.0)
    expected = masked.mean(chance, exists)
    deviation = jnp.sqrt(masked.total(chance * (1.0 - chance), exists)) / count
    above = masked.mean(dead, exists) - expected
    z = jnp.where(deviation > 0, above / jnp.where(deviation > 0, deviation, 1.0), 0.0)
    return expected, deviation, z
