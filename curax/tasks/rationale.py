"""Chains answered in words, for training on reference answers without a verifier.

    7 + 3 - 9 rsub 2 =   ->   kindly 10 1 1 then well so well 1 well well end

The question is that of `chain`. A completion begins with a thought: a style, then every
running value. After `then` comes the answer: the last of these values, among words.
Most words are those of the style, which is independent of the question. A reference
answer is written likewise, and its value is right.

One token of a reference answer depends on the values of a thought, all others only on
its style: the plain sum of their log-probs rewards a lucky style, so that a reward has
to weight the token that matters. The teacher's traces for the warm start have the
systematic errors of `chain`, and answer with their own last value.
"""

import dataclasses
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from curax.settings.config_types import Count, Share
from curax.settings.declared import declares
from curax.tasks import chain
from curax.tasks.chain import END, MODULUS, PAD
from curax.types import Prompts, Task

STYLES = ("plainly", "kindly", "gravely", "gaily")
WORDS = ("so", "well", "hence", "hey")  # of the styles
THEN = chain.HINT  # the first that chains without hints do not know
STYLE = THEN + 1  # the first of four
WORD = STYLE + len(STYLES)  # the first of four
NAMES = (*chain.NAMES[:THEN], "then", *STYLES, *WORDS)


@declares(num_prompts="num_prompts")
def task(
    *,
    depth: Count = 4,
    words: Count = 12,
    follow: Share = 0.7,
    num_prompts: Count = 1 << 14,
    num_held_out: Count = 1 << 12,
    errors: tuple[float, float, float] = (0.05, 0.40, 0.85),
) -> Task:
    """The task, whose prompts and reference answers are pure functions of their ids.

    Its verifier is for held-out prompts; training on references does not use it.

    Args:
        depth: operations in a prompt, at most; each number from 1 on is equally likely.
        words: words of an answer, without its value and its end.
        follow: probability that a word is that of the style; the other words share the
            rest.
        num_prompts: size of the training set.
        num_held_out: size of the held-out set.
        errors: probability of a teacher's error at an add, a subtract and a reverse
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
    """The value before the end of each row, `[B, depth + 1]` to `[B]`."""
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
    """The teacher's completion of each prompt, in a style drawn at random.

    Args:
        key: draws styles, words and errors.
        prompts: `[B]`.
        words: of an answer.
        follow: probability that a word is that of the style.
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
    """Reference answers, `[B, words + 2]` tokens and mask: the right value among words.

    Style and words are drawn by the prompt's id, independently of the question.
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

    drawn = jax.vmap(draw)(keys, style)
    half, end = (words + 1) // 2, jnp.full_like(value, END)
    parts = [drawn[:, :half], value[:, None], drawn[:, half:], end[:, None]]
    return jnp.concatenate(parts, -1).astype(jnp.int32)


def verify(target: jax.Array, tokens: jax.Array, mask: jax.Array) -> jax.Array:
    """The outcome of each completion: whether its answer states the right value alone.

    Args:
        target: `[N]` int32, the right value.
        tokens: `[N, T]` int32, completions.
        mask: `[N, T]` bool.

    Returns:
        `[N]` float32: 1 where at least one value stands after the first `then` and all
        of them are right, else 0.
    """
    behind = jnp.cumsum(mask & (tokens == THEN), -1, dtype=jnp.int32) > 0
    stated = mask & behind & (tokens < MODULUS)
    right = jnp.all(~stated | (tokens == target[:, None]), -1)
    return (right & jnp.any(stated, -1)).astype(jnp.float32)


def decode(tokens: Any) -> str:
    """Readable text of a prompt or a completion, without padding and blanks."""
    tokens = [int(t) for t in tokens]
    if max(tokens, default=0) < THEN:
        return chain.decode(tokens)
    return " ".join(NAMES[t] for t in tokens if NAMES[t])
