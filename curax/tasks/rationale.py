"""Chains with an answer in words: nobody verifies, there is a reference answer alone.

    7 + 3 - 9 rsub 2 =   ->   kindly 10 1 1 then well so well 1 well well end

The question is that of `chain`. A completion thinks first: how it means to sound, then
every running value. Behind `then` it answers: the value that it ended with, among
words. A word follows the style that the writer chose, most of the time; nothing in the
question decides the style. So it is with the reference answer, whose value is right.

One token of an answer depends on what matters about a thought, the others on what does
not: the sum of the reference's log-probs pays for a lucky style, and the reward has to
find the token that counts by itself. The teacher's traces for the warm start have the
systematic errors of `chain`, and state whatever value they ended with.
"""

import dataclasses
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from curax.settings.config_types import Count, Share
from curax.tasks import chain
from curax.tasks.chain import END, MODULUS, PAD
from curax.types import Prompts, Task

STYLES = ("plainly", "kindly", "gravely", "gaily")
WORDS = ("so", "well", "hence", "hey")  # of the styles
THEN = chain.HINT  # the first that chains without hints do not know
STYLE = THEN + 1  # the first of four
WORD = STYLE + len(STYLES)  # the first of four
NAMES = (*chain.NAMES[:THEN], "then", *STYLES, *WORDS)


def task(
    *,
    depth: Count = 4,
    words: Count = 12,
    follow: Share = 0.7,
    num_prompts: Count = 1 << 14,
    num_held_out: Count = 1 << 12,
    errors: tuple[float, float, float] = (0.05, 0.40, 0.85),
) -> Task:
    """The task; a prompt and its reference are pure functions of its id.

    The verifier is for held-out prompts: what trains without one never asks it.

    Args:
        depth: most operations in a prompt; every number from 1 on is equally likely.
        words: of an answer, its value and its end apart.
        follow: chance that a word is one of the style chosen; the others share the
            rest.
        num_prompts: size of the training set.
        num_held_out: size of the held-out set.
        errors: chance that the teacher is off by one at an add, a subtract, a reverse
            subtract.

    Returns:
        The task; prompts take 2 depth + 2 tokens, answers words + 2, completions at
        most depth + words + 4.
    """
    return Task(
        vocab_size=len(NAMES),
        pad=PAD,
        end=(END,),
        num_prompts=num_prompts,
        num_held_out=num_held_out,
        prompts=partial(prompts, depth=depth, held_out=False),
        held_out=partial(prompts, depth=depth, held_out=True),
        traces=partial(traces, words=words, follow=follow, errors=errors),
        verify=verify,
        on_device=True,
        decode=decode,
        reference=partial(reference, words=words, follow=follow),
        delimiter=(THEN,),
    )


def prompts(prompt_id: jax.Array, *, depth: int, held_out: bool) -> Prompts:
    """The prompts of `chain` with these ids; the target is the last value, `[B]`."""
    made = chain.prompts(prompt_id, depth=depth, held_out=held_out)
    return dataclasses.replace(made, target=_last(made.target))


def _last(values):
    """The last running value of each row, which one of more tokens ends."""
    place = jnp.argmax(values == END, -1)[..., None] - 1
    return jnp.take_along_axis(values, place, -1)[..., 0]


def traces(
    key: jax.Array,
    prompts: Prompts,
    *,
    words: int,
    follow: float,
    errors: tuple[float, float, float],
) -> tuple[jax.Array, jax.Array]:
    """What the teacher writes for each prompt, in a style drawn at random.

    Args:
        key: draws styles, words and errors.
        prompts: `[B]`.
        words: of an answer.
        follow: chance that a word is one of the style.
        errors: as `chain.traces`.

    Returns:
        `[B, depth + words + 4]` tokens and mask.
    """
    k_errors, k_style, k_words = jax.random.split(key, 3)
    values, _ = chain.traces(k_errors, prompts, errors=errors)  # [B, depth + 1]
    b, width = values.shape
    style = jax.random.randint(k_style, (b,), 0, len(STYLES))
    keys = jax.random.split(k_words, b)
    answers = _answers(keys, style, _last(values), words=words, follow=follow)
    thought = jnp.concatenate([STYLE + style[:, None], values], -1)
    thought = jnp.where(thought == END, THEN, thought)
    # The answer moves up to the end of the thought.
    thought = jnp.pad(thought, ((0, 0), (0, words + 2)), constant_values=PAD)
    then = jnp.argmax(thought == THEN, -1)[:, None]
    place = jnp.arange(width + words + 3)[None] - then - 1  # in the answer
    moved = jnp.take_along_axis(answers, jnp.clip(place, 0, words + 1), -1)
    tokens = jnp.where((place >= 0) & (place < words + 2), moved, thought)
    return tokens, tokens != PAD


def reference(
    prompts: Prompts, *, words: int, follow: float
) -> tuple[jax.Array, jax.Array]:
    """Reference answers, `[B, words + 2]` tokens and mask: the right value in words.

    The style and the words are those of the prompt's id, which says nothing of them.
    """
    keys = jax.vmap(partial(jax.random.fold_in, jax.random.key(2)))(prompts.id)
    k_style, k_words = jnp.unstack(jax.vmap(jax.random.split)(keys), axis=1)
    style = jax.vmap(lambda k: jax.random.randint(k, (), 0, len(STYLES)))(k_style)
    tokens = _answers(k_words, style, prompts.target, words=words, follow=follow)
    return tokens, jnp.ones(tokens.shape, bool)


def _answers(keys, style, value, *, words, follow):
    """`[B, words + 2]`: half of the words, the value, the other half, the end."""

    def draw(key, style):
        k_follow, k_other = jax.random.split(key)
        follows = jax.random.uniform(k_follow, (words,)) < follow
        other = jax.random.randint(k_other, (words,), 1, len(WORDS))
        return WORD + (style + jnp.where(follows, 0, other)) % len(WORDS)

    said = jax.vmap(draw)(keys, style)
    half, end = (words + 1) // 2, jnp.full_like(value, END)
    parts = [said[:, :half], value[:, None], said[:, half:], end[:, None]]
    return jnp.concatenate(parts, -1).astype(jnp.int32)


def verify(target: jax.Array, tokens: jax.Array, mask: jax.Array) -> jax.Array:
    """Whether each answer states the right value, and no other.

    Args:
        target: `[N]` int32, the right value.
        tokens: `[N, T]` int32, completions.
        mask: `[N, T]` bool.

    Returns:
        `[N]` float32: 1 where there is a value behind the first `then` and all there
        are right, else 0. Neither the thought nor the words count.
    """
    behind = jnp.cumsum(mask & (tokens == THEN), -1, dtype=jnp.int32) > 0
    stated = mask & behind & (tokens < MODULUS)
    right = jnp.all(~stated | (tokens == target[:, None]), -1)
    return (right & jnp.any(stated, -1)).astype(jnp.float32)


def decode(tokens: Any) -> str:
    """Readable text of a prompt or a completion; padding and blanks vanish."""
    tokens = [int(t) for t in tokens]
    if max(tokens, default=0) < THEN:
        return chain.decode(tokens)
    return " ".join(NAMES[t] for t in tokens if NAMES[t])
