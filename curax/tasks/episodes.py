"""Completions of a scripted policy in an environment: traces for a warm start."""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from curax.arrays.turns import observed, to_read
from curax.types import Environment, Observation, Prompts

# (key, state of the environment) -> tokens [U] int32 of the next turn, their number []
Teacher = Callable[[jax.Array, Any], tuple[jax.Array, jax.Array]]


class Played(NamedTuple):
    """Completions of a teacher, `[B, T]`."""

    tokens: jax.Array  # int32, with observations; `pad` after the end
    mask: jax.Array  # bool, tokens that the teacher wrote
    outcome: jax.Array  # [B] float32, sum of the rewards of turns that end in the row


def one_token(token: jax.Array, done: jax.Array, right: jax.Array) -> Observation:
    """An observation of one token, whose reward is 1 where the turn was right."""
    return Observation(
        tokens=token[None],
        length=jnp.int32(1),
        done=done,
        reward=right.astype(jnp.float32),
    )


def played(
    environment: Environment,
    teacher: Teacher,
    key: jax.Array,
    prompts: Prompts,
    *,
    turns: int,
    max_tokens: int,
    pad: int,
) -> Played:
    """A completion of each prompt, whose turns a teacher writes.

    The teacher may look at the state of the environment, which a policy cannot. It
    plays `turns` turns or fewer; what comes after `max_tokens` is cut off.

    Args:
        environment: that answers.
        teacher: `(key, state) -> (tokens [U] int32, length [] int32)`, one turn with
            its end token; U is static, and at most `max_tokens`.
        key: random key.
        prompts: B of them.
        turns: that are played at most.
        max_tokens: T.
        pad: token after the end.

    Raises:
        ValueError: while tracing, as `arrays.turns.observed`.
    """
    each = jax.random.split(key, prompts.tokens.shape[0])
    play = partial(_played, environment, teacher, turns, max_tokens, pad)
    return Played(*jax.vmap(play)(each, prompts.target))


def traces(
    key: jax.Array, prompts: Prompts, *, environment: Environment, **how: Any
) -> tuple[jax.Array, jax.Array]:
    """`[B, T]` tokens and mask of `played`, as `Task.traces` gives them."""
    found = played(environment, how.pop("teacher"), key, prompts, **how)
    return found.tokens, found.mask


def _played(environment, teacher, turns, max_tokens, pad, key, target):
    k_reset, k_turns = jax.random.split(key)

    def turn(carry, key):
        state, tokens, mask, count, done, total = carry
        said, length = teacher(key, state)
        whole = jnp.full(max_tokens, pad, jnp.int32).at[: said.shape[0]].set(said)
        whole = jnp.where(jnp.arange(max_tokens) < length, whole, pad)
        one = jax.tree.map(lambda x: jnp.asarray(x)[None], (state, whole, length))
        answer = observed(environment.observe, *one)
        after, seen = jax.tree.map(lambda x: x[0], answer)
        mine = jnp.where(done, 0, length)
        behind = count + mine
        its = jnp.where(done, 0, to_read(seen))

        def put(values, start, number, new):
            place = jnp.arange(jnp.size(new), dtype=jnp.int32)
            at = jnp.where(place < number, start + place, max_tokens)
            return values.at[at].set(new, mode="drop")

        tokens = put(tokens, count, mine, said)
        tokens = put(tokens, behind, its, seen.tokens)
        mask = put(mask, count, mine, jnp.ones(said.shape, bool))
        state = jax.tree.map(lambda a, b: jnp.where(done, a, b), state, after)
        total += jnp.where(done | (behind > max_tokens), 0.0, seen.reward)
        return (state, tokens, mask, behind + its, done | seen.done, total), None

    start = (
        environment.reset(k_reset, target),
        jnp.full(max_tokens, pad, jnp.int32),
        jnp.zeros(max_tokens, bool),
        jnp.int32(0),
        jnp.bool_(False),
        jnp.float32(0),
    )
    (_, tokens, mask, *_, total), _ = jax.lax.scan(
        turn, start, jax.random.split(k_turns, turns)
    )
    return tokens, mask, total
