"""Mastermind: guess a hidden code from what is said of each guess.

    20 [0 1] =   ->   12 end [1 0] 32 end

A prompt is a first guess with its answer: how many colours are in their place, and how
many others are in the code at another place. The code is drawn, for each completion
anew, from those for which that answer is true. Every turn is another guess, with the
same answer to it; the outcome is 1 if one of `guesses` is the code. What is no guess is
answered by `?` and counts as one. A code is one token, and so is an answer.

The best that can be done is known, by search over what may still be true: three guesses
find .979 of the codes of held-out prompts (`tests/test_environments.py`). The teacher
of the warm start makes a guess that agrees with all that is known with probability
`careful`, and else any.

A hint names codes that agree with the answer of the prompt, in a block before it. So
that the policy can use one, some traces follow a hint, and there the teacher is always
careful.
"""

import itertools
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from curax.settings.config_types import ConfigError, Count, Share
from curax.settings.declared import declares
from curax.tasks import blocks, episodes
from curax.types import Environment, Hinting, Observation, Prompts, Task

HELD_OUT = 8  # every so many-th question is held out
MANY = 4096  # codes


@declares(num_prompts="num_prompts")
def task(
    *,
    pegs: Count = 2,
    colours: Count = 5,
    guesses: Count = 3,
    num_prompts: Count = 1 << 14,
    careful: Share = 0.5,
    hints: bool = False,
    hinted_traces: Share = 0.25,
) -> Task:
    """The task; prompts with ids beyond the number of questions repeat these.

    Args:
        pegs: places of a code.
        colours: that each place may have.
        guesses: that the policy has, besides the one in the prompt.
        num_prompts: size of the training set.
        careful: probability that a guess of the teacher agrees with what is known.
        hints: whether prompts can be hinted, which adds two tokens to the vocabulary.
        hinted_traces: share of the traces that follow a hint, if `hints`.

    Returns:
        The task; prompts take 3 tokens, completions 3 for each guess.

    Raises:
        ConfigError: there is nothing to guess, or more codes than are searched.
    """
    if colours < 2 or not 4 <= colours**pegs <= MANY:
        raise ConfigError(
            f"task.colours={colours} and task.pegs={pegs} make {colours**pegs} codes, "
            f"and from 4 to {MANY} of two colours or more are asked for; set "
            "task.colours=5 and task.pegs=2."
        )
    words = Words(pegs, colours)
    environment = Environment(
        reset=partial(reset, words),
        observe=partial(observe, words, guesses),
        measure=measure,
    )
    held_out = questions(words, held_out=True)
    of_teacher = partial(
        episodes.traces,
        environment=environment,
        turns=guesses,
        max_tokens=3 * guesses,
        pad=words.pad,
    )
    some, sure = (
        partial(of_teacher, teacher=partial(teacher, words, careful=share))
        for share in (careful, 1.0)
    )
    behind = partial(hinted, share=hinted_traces, traces=some, behind_hints=sure)
    signs = {"sign": words.hint, "blank": words.blank, "pad": words.pad}
    hinting = Hinting(
        solution=partial(solution, words),
        wrap=partial(blocks.block, width=words.most, **signs),
        leaks=leaks,
    )
    contexts = partial(blocks.shown, hinting=hinting, share=hinted_traces)
    return Task(
        vocab_size=words.size if hints else words.hint,
        pad=words.pad,
        end=(words.end,),
        num_prompts=num_prompts,
        num_held_out=len(held_out[0]),
        prompts=partial(prompts, words, questions(words, held_out=False)),
        held_out=partial(prompts, words, held_out),
        traces=behind if hints else some,
        on_device=True,
        decode=partial(decode, words),
        environment=environment,
        hinting=hinting if hints else None,
        trace_contexts=contexts if hints else None,
    )


class Words:
    """Codes of a game and answers to guesses; as tokens codes, answers, then signs."""

    def __init__(self, pegs: int, colours: int):
        """Number the codes of `pegs` places and `colours` colours."""
        self.pegs = pegs
        every = itertools.product(range(colours), repeat=pegs)
        self.codes = np.array(list(every), np.int32)  # [K, pegs]
        self.answers = answers(self.codes, colours)  # [K, K]
        self.first = len(self.codes)  # token of the answer 0
        first = self.first + (pegs + 1) ** 2
        self.end, self.pad, self.go, self.error = range(first, first + 4)
        self.hint, self.blank, self.size = range(first + 4, first + 7)
        # Codes that the answer to a first guess leaves, at most.
        self.most = max(int(np.bincount(row).max()) for row in self.answers)


def answers(codes: np.ndarray, colours: int) -> np.ndarray:
    """`[K, K]` int32, answer to guess i of code j: in place (pegs + 1) + elsewhere."""
    place = (codes[:, None] == codes[None]).sum(-1)
    each = (codes[..., None] == np.arange(colours)).sum(1)  # [K, colours]
    common = np.minimum(each[:, None], each[None]).sum(-1)
    return (place * (codes.shape[1] + 1) + common - place).astype(np.int32)


def questions(words: Words, *, held_out: bool) -> tuple[np.ndarray, np.ndarray]:
    """`[Q]` int32 first guesses and `[Q, K]` bool, the codes that their answers leave.

    Of all pairs of a guess and an answer that leaves two codes or more, in an order by
    chance, every eighth is held out.
    """
    found = []
    for guess, row in enumerate(words.answers):
        for answer in np.unique(row):
            fits = row == answer
            if fits.sum() > 1:
                found.append((guess, fits))
    order = np.random.default_rng(0).permutation(len(found))
    chosen = [found[n] for i, n in enumerate(order) if (i % HELD_OUT == 0) == held_out]
    guess, fits = zip(*chosen, strict=True)
    return np.array(guess, np.int32), np.array(fits)


def prompts(
    words: Words, asked: tuple[np.ndarray, np.ndarray], prompt_id: jax.Array
) -> Prompts:
    """The prompts with these ids, of 3 tokens; the target are the codes left."""
    which = prompt_id % len(asked[0])
    guess, fits = (jnp.asarray(x)[which] for x in asked)
    code = jnp.argmax(fits, -1)
    answer = jnp.asarray(words.answers)[guess, code] + words.first
    tokens = jnp.stack([guess, answer, jnp.full_like(guess, words.go)], -1)
    return blocks.full(tokens, prompt_id, fits)


def reset(words: Words, key: jax.Array, target: jax.Array) -> dict[str, jax.Array]:
    """A code among those that the prompt leaves; nothing more is known of it."""
    code = jax.random.categorical(key, jnp.where(target, 0.0, -jnp.inf))
    start = jnp.int32(0)
    return {
        "code": code.astype(jnp.int32),
        "fits": target,
        "turns": start,
        "careful": start,
    }


def observe(
    words: Words,
    guesses: int,
    state: dict[str, jax.Array],
    tokens: jax.Array,
    length: jax.Array,
) -> tuple[dict[str, jax.Array], Observation]:
    """The answer to a guess; after the last one, or the right one, the game is over."""
    every = jnp.asarray(words.answers)
    valid = (length == 2) & (tokens[0] < words.first)
    guess = jnp.where(valid, tokens[0], 0)
    answer = every[guess, state["code"]]
    agrees = every[guess] == answer
    turns = state["turns"] + 1
    careful = valid & state["fits"][guess]
    right = valid & (guess == state["code"])
    said = jnp.where(valid, answer + words.first, words.error)
    return {
        "code": state["code"],
        "fits": jnp.where(valid, state["fits"] & agrees, state["fits"]),
        "turns": turns,
        "careful": state["careful"] + careful.astype(jnp.int32),
    }, episodes.one_token(said, right | (turns == guesses), right)


def measure(state: dict[str, jax.Array]) -> dict[str, jax.Array]:
    """Share of the guesses that agreed with all that was known."""
    turns = jnp.maximum(state["turns"], 1).astype(jnp.float32)
    return {"careful": state["careful"].astype(jnp.float32) / turns}


def teacher(
    words: Words, key: jax.Array, state: dict[str, jax.Array], *, careful: float
) -> tuple[jax.Array, jax.Array]:
    """A guess that agrees with what is known, or any, and the end: `[2]` tokens."""
    k_careful, k_code = jax.random.split(key)
    cares = jax.random.uniform(k_careful) < careful
    chance = jnp.where(state["fits"] | ~cares, 0.0, -jnp.inf)
    code = jax.random.categorical(k_code, chance)
    said = jnp.stack([code, jnp.asarray(words.end)]).astype(jnp.int32)
    return said, jnp.int32(2)


def solution(words: Words, prompts: Prompts) -> tuple[jax.Array, jax.Array]:
    """The codes that are left, `[B, S]` tokens and mask."""
    order = jnp.argsort(~prompts.target, -1, stable=True)[:, : words.most]
    count = jnp.sum(prompts.target, -1, keepdims=True)
    mask = jnp.arange(words.most)[None] < count
    return jnp.where(mask, order, words.pad).astype(jnp.int32), mask


def leaks(prompts: Prompts, tokens: jax.Array, mask: jax.Array) -> jax.Array:
    """`[B, L]` bool, all False: no hint says which of the codes that are left it is."""
    return jnp.zeros(mask.shape[:-1], bool)


def hinted(
    key: jax.Array, prompts: Prompts, *, share: float, traces: Any, behind_hints: Any
) -> tuple[jax.Array, jax.Array]:
    """The teacher's completions in the contexts of `blocks.shown` for the same key."""
    number = blocks.given(key, jnp.sum(prompts.target, -1), share)
    both = behind_hints(key, prompts), traces(key, prompts)
    tokens, mask = (
        jnp.where((number > 0)[:, None], *x) for x in zip(*both, strict=True)
    )
    return tokens, mask


def decode(words: Words, tokens: Any) -> str:
    """Readable text of a prompt or a completion, without padding."""
    signs = {words.end: "end", words.go: "=", words.error: "?", words.hint: "hint:"}

    def said(token: int) -> str:
        if token in (words.pad, words.blank):
            return ""
        if token < words.first:
            return "".join(map(str, words.codes[token]))
        place, elsewhere = divmod(token - words.first, words.pegs + 1)
        return signs.get(token) or f"[{place} {elsewhere}]"

    return " ".join(text for t in tokens if (text := said(int(t))))
