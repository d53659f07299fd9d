"""Nim against an opponent who plays at random: take turns, and take the last one.

    3 17 =   ->   1 end [14] 2 end [11] 3 end [5] 1 end [1] 1 end

A prompt says how many may be taken at a time, m, and how many lie there. Every turn is
a number from 1 to m; what then lies there after the opponent's turn is read. Who takes
the last one wins: the outcome. Another turn than a number that may be taken loses.

Games are long, and a turn matters less the earlier it is. The value of every pile is
known (`values` of `tests/test_environments.py`), for the best policy and for one that
plays at random, which is the teacher of the warm start.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from curax.settings.config_types import ConfigError, Count
from curax.settings.declared import declares
from curax.tasks import blocks, episodes
from curax.types import Environment, Observation, Prompts, Task

MOST = (2, 3, 4)  # m
HELD_OUT = 4  # every so many-th pair of m and pile is held out


@declares(num_prompts="num_prompts")
def task(
    *, largest: Count = 24, smallest: Count = 12, num_prompts: Count = 1 << 14
) -> Task:
    """The task; prompts with ids beyond the number of questions repeat these.

    Args:
        largest: pile of a prompt at most.
        smallest: pile of a prompt at least.
        num_prompts: size of the training set.

    Returns:
        The task; prompts take 3 tokens, completions 3 for each turn, of which there are
        at most (largest + 1) / 2.

    Raises:
        ConfigError: no pile lies between the bounds, or all are too small.
    """
    if largest < (least := max(smallest, max(MOST))):
        raise ConfigError(
            f"task.largest={largest} is less than task.smallest={smallest} or than "
            f"the {max(MOST)} that may be taken; set task.largest to at least {least}."
        )
    words = Words(largest)
    environment = Environment(
        reset=reset, observe=partial(observe, words), measure=measure
    )
    held_out = questions(smallest, largest, held_out=True)
    turns = (largest + 1) // 2
    return Task(
        vocab_size=words.size,
        pad=words.pad,
        end=(words.end,),
        num_prompts=num_prompts,
        num_held_out=len(held_out),
        prompts=partial(prompts, words, questions(smallest, largest, held_out=False)),
        held_out=partial(prompts, words, held_out),
        traces=partial(
            episodes.traces,
            environment=environment,
            teacher=partial(teacher, words),
            turns=turns,
            max_tokens=3 * turns,
            pad=words.pad,
        ),
        on_device=True,
        decode=partial(decode, words),
        environment=environment,
    )


class Words:
    """Tokens: numbers up to the largest pile, then signs."""

    def __init__(self, largest: int):
        """Number the signs."""
        self.end, self.pad, self.go, self.size = range(largest + 1, largest + 5)


def questions(smallest: int, largest: int, *, held_out: bool) -> np.ndarray:
    """`[Q, 2]` int32, pairs of m and a pile, every fourth of them held out."""
    every = [(m, pile) for pile in range(smallest, largest + 1) for m in MOST]
    chosen = [x for i, x in enumerate(every) if (i % HELD_OUT == 0) == held_out]
    return np.array(chosen, np.int32)


def prompts(words: Words, asked: np.ndarray, prompt_id: jax.Array) -> Prompts:
    """The prompts with these ids, of 3 tokens; the target is m and the pile."""
    pair = jnp.asarray(asked)[prompt_id % len(asked)]
    go = jnp.full((*prompt_id.shape, 1), words.go, jnp.int32)
    tokens = jnp.concatenate([pair, go], -1)
    return blocks.full(tokens, prompt_id, pair)


def reset(key: jax.Array, target: jax.Array) -> dict[str, jax.Array]:
    """The pile, before the first turn, and the key of the opponent's turns."""
    start = {"turns": jnp.int32(0), "best": jnp.int32(0)}
    return {"most": target[0], "pile": target[1], "key": key, **start}


def observe(
    words: Words, state: dict[str, jax.Array], tokens: jax.Array, length: jax.Array
) -> tuple[dict[str, jax.Array], Observation]:
    """What lies there after the opponent's turn; nothing if the game is over."""
    take, most, pile = tokens[0], state["most"], state["pile"]
    allowed = (length == 2) & (take >= 1) & (take <= jnp.minimum(most, pile))
    left = jnp.where(allowed, pile - take, pile)
    won = allowed & (left == 0)
    key = jax.random.fold_in(state["key"], state["turns"])
    its = jax.random.randint(key, (), 1, jnp.minimum(most, jnp.maximum(left, 1)) + 1)
    after = jnp.maximum(left - its, 0).astype(jnp.int32)
    best = allowed & (left % (most + 1) == 0)
    return {
        "most": most,
        "pile": after,
        "key": state["key"],
        "turns": state["turns"] + 1,
        "best": state["best"] + best.astype(jnp.int32),
    }, episodes.one_token(after, ~allowed | (after == 0), won)


def measure(state: dict[str, jax.Array]) -> dict[str, jax.Array]:
    """Share of the turns that left a multiple of m + 1, from which nobody wins."""
    turns = jnp.maximum(state["turns"], 1).astype(jnp.float32)
    return {"safe": state["best"].astype(jnp.float32) / turns}


def teacher(
    words: Words, key: jax.Array, state: dict[str, jax.Array]
) -> tuple[jax.Array, jax.Array]:
    """Any number that may be taken, and the end: `[2]` tokens."""
    limit = jnp.minimum(state["most"], jnp.maximum(state["pile"], 1))
    take = jax.random.randint(key, (), 1, limit + 1)
    return jnp.stack([take, jnp.asarray(words.end)]).astype(jnp.int32), jnp.int32(2)


def decode(words: Words, tokens: Any) -> str:
    """Readable text of a prompt or a completion, without padding."""
    signs = {words.end: "end", words.go: "="}
    tokens = [int(t) for t in tokens if int(t) != words.pad]
    return " ".join(signs.get(t, str(t)) for t in tokens)
