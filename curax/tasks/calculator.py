"""Chains of arithmetic modulo 97 with a calculator, which the policy asks turn by turn.

    41 + 7 * 9 =   ->   41 + 7 end [48] 48 * 9 end [44] is 44 end

A turn is a question of the form `value operator operand end`, which the calculator
answers with one number; or `is value end`, which ends the completion. Anything else is
answered by `?`. The outcome is 1 if the value is that of the chain. The policy is free
to answer at once; but a table of 97 x 8 x 3 results in its head for each link is more
than a policy of this size has.

The teacher of the warm start copies operations without a mistake and loses patience: at
every link it asks with probability `asks`, else it states a number at random. Its pass
rate on a chain of n links is known, asks^n + (1 - asks^n) / 97. So is the best: 1.

A hint is the first running values of the chain, in a block before the prompt. So that
the policy can use one, some traces follow a hint: the teacher goes on from its last
value.

As tokens, a prompt is a block of 5 for each link, `operator operand . . .`, then the
value and a go sign: what the policy copies is always at the same distance.
"""

import dataclasses
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from curax.settings.config_types import Count, Share
from curax.settings.declared import declares
from curax.tasks import blocks, chain, episodes
from curax.types import Environment, Hinting, Observation, Prompts, Task

MODULUS = 97
OPERATORS = ("+", "-", "*")
IS, END, PAD, GO, BLANK, ERROR = range(
    MODULUS + len(OPERATORS), MODULUS + len(OPERATORS) + 6
)
HINT = ERROR + 1  # first token of a block; only with hints
NAMES = (*map(str, range(MODULUS)), *OPERATORS, "is", "end", "", "=", "", "?", "hint:")
BLOCK = 5  # tokens of a question and its answer
TIMES = 12  # values are below 8 times this, so that a class modulo 8 has all of these


@declares(num_prompts="num_prompts")
def task(
    *,
    depth: Count = 6,
    num_prompts: Count = 1 << 14,
    num_held_out: Count = 1 << 12,
    asks: Share = 0.7,
    tool: bool = True,
    hints: bool = False,
    hinted_traces: Share = 0.25,
) -> Task:
    """The task, whose prompts are pure functions of their ids.

    Args:
        depth: links of a chain, at most; each number from 1 on is equally likely.
        num_prompts: size of the training set.
        num_held_out: size of the held-out set.
        asks: probability that the teacher asks at a link, and does not guess.
        tool: whether the calculator answers; else it says `?` to everything.
        hints: whether prompts can be hinted, which adds a token to the vocabulary.
        hinted_traces: share of the traces that follow a hint, if `hints`.

    Returns:
        The task; prompts take 5 depth + 2 tokens, completions 5 depth + 3 where every
        link is asked for.
    """
    environment = Environment(
        reset=reset, observe=partial(observe, tool=tool), measure=measure
    )
    of_teacher = partial(
        episodes.traces,
        environment=environment,
        teacher=partial(teacher, asks=asks),
        turns=depth + 1,
        max_tokens=BLOCK * depth + 3,
        pad=PAD,
    )
    behind = partial(hinted, share=hinted_traces, traces=of_teacher)
    hinting = Hinting(
        solution=solution,
        wrap=partial(blocks.block, sign=HINT, width=depth, blank=BLANK, pad=PAD),
        leaks=partial(blocks.last_in_place, solution),
    )
    contexts = partial(blocks.shown, hinting=hinting, share=hinted_traces)
    return Task(
        vocab_size=len(NAMES) if hints else HINT,
        pad=PAD,
        end=(END,),
        num_prompts=num_prompts,
        num_held_out=num_held_out,
        prompts=partial(prompts, depth=depth, held_out=False),
        held_out=partial(prompts, depth=depth, held_out=True),
        traces=behind if hints else of_teacher,
        on_device=True,
        decode=decode,
        environment=environment,
        hinting=hinting if hints else None,
        trace_contexts=contexts if hints else None,
    )


def prompts(prompt_id: jax.Array, *, depth: int, held_out: bool) -> Prompts:
    """The training or held-out prompts with these ids.

    A question is held out iff value + h = 0 mod 8, where h is a hash of everything but
    its value. So no question is both a training and a held-out one.

    Args:
        prompt_id: `[B]` int32.
        depth: links, at most.
        held_out: whether these are held-out prompts.

    Returns:
        Prompts of 5 depth + 2 tokens; the target is the chain and its value.
    """
    return jax.vmap(partial(_prompt, depth=depth, held_out=held_out))(prompt_id)


def _prompt(prompt_id, *, depth, held_out):
    signs = {"first": MODULUS, "blank": BLANK}
    ops, operands, value, length = chain.drawn(
        prompt_id, depth=depth, held_out=held_out, times=TIMES, **signs
    )
    used = jnp.arange(depth) < length
    links = jnp.full((depth, BLOCK), BLANK).at[:, 0].set(ops).at[:, 1].set(operands)
    tokens = jnp.concatenate([links.reshape(-1), value[None], jnp.array([GO])])
    tokens = tokens.astype(jnp.int32)

    def link(value, item):
        op, operand, used = item
        value = jnp.where(used, result(op, value, operand), value)
        return value, None

    answer, _ = jax.lax.scan(link, value, (ops, operands, used))
    target = {"ops": ops, "operands": operands, "value": value}
    target |= {"length": length, "answer": answer}
    target = {name: leaf.astype(jnp.int32) for name, leaf in target.items()}
    return blocks.full(tokens, prompt_id, target)


def result(op: jax.Array, value: jax.Array, operand: jax.Array) -> jax.Array:
    """`[]` int32 in [0, 97), what the calculator computes; op is a token."""
    every = jnp.stack([value + operand, value - operand, value * operand])
    which = jnp.clip(op - MODULUS, 0, len(OPERATORS) - 1)
    return (every[which] % MODULUS).astype(jnp.int32)


def reset(key: jax.Array, target: Any) -> dict[str, jax.Array]:
    """The chain, and what has been asked of the calculator: nothing."""
    start = {"asked": jnp.int32(0), "refused": jnp.int32(0), "last": target["value"]}
    return {**target, **start}


def observe(
    state: dict[str, jax.Array], tokens: jax.Array, length: jax.Array, *, tool: bool
) -> tuple[dict[str, jax.Array], Observation]:
    """The calculator's answer to a question, or the outcome of an answer."""
    first, second, third = tokens[0], tokens[1], tokens[2]
    is_op = (second >= MODULUS) & (second < MODULUS + len(OPERATORS))
    asks = (length == 4) & (first < MODULUS) & is_op & (third < MODULUS)
    asks = asks & tool
    done = (length == 3) & (first == IS) & (second < MODULUS)
    given = jnp.where(asks, result(second, first, third), ERROR).astype(jnp.int32)
    after = {
        "asked": state["asked"] + asks.astype(jnp.int32),
        "refused": state["refused"] + (~asks & ~done).astype(jnp.int32),
        "last": jnp.where(asks, given, state["last"]),
    }
    right = done & (second == state["answer"])
    return {**state, **after}, episodes.one_token(given, done, right)


def measure(state: dict[str, jax.Array]) -> dict[str, jax.Array]:
    """Questions that the calculator answered, and turns that it did not understand."""
    return {name: state[name].astype(jnp.float32) for name in ("asked", "refused")}


def teacher(
    key: jax.Array, state: dict[str, jax.Array], *, asks: float
) -> tuple[jax.Array, jax.Array]:
    """A turn of the teacher: the next question, an answer, or a guess, `[4]` tokens."""
    k_asks, k_guess = jax.random.split(key)
    step, finished = state["asked"], state["asked"] >= state["length"]
    here = jnp.minimum(step, state["ops"].shape[0] - 1)
    question = [state["last"], state["ops"][here], state["operands"][here], END]
    guess = jax.random.randint(k_guess, (), 0, MODULUS)
    answer = [IS, jnp.where(finished, state["last"], guess), END, PAD]
    goes_on = ~finished & (jax.random.uniform(k_asks) < asks)
    both = [
        jnp.stack([jnp.asarray(x, jnp.int32) for x in y]) for y in (question, answer)
    ]
    return jnp.where(goes_on, *both), jnp.where(goes_on, 4, 3).astype(jnp.int32)


def solution(prompts: Prompts) -> tuple[jax.Array, jax.Array]:
    """The running values of the chains, `[B, depth]` tokens and mask."""

    def values(target):
        used = jnp.arange(target["ops"].shape[0]) < target["length"]

        def link(value, item):
            value = result(item[0], value, item[1])
            return value, value

        items = target["ops"], target["operands"]
        return jnp.where(used, jax.lax.scan(link, target["value"], items)[1], PAD), used

    return jax.vmap(values)(prompts.target)


def hinted(
    key: jax.Array, prompts: Prompts, *, share: float, traces: Any
) -> tuple[jax.Array, jax.Array]:
    """The teacher's completions in the contexts of `blocks.shown` for the same key.

    They are those of the chains that are left behind the hints.
    """
    target = prompts.target
    number = blocks.given(key, target["length"], share)
    values, _ = solution(prompts)
    depth = values.shape[-1]
    place = jnp.arange(depth)[None] + number[:, None]

    def later(tokens):
        moved = jnp.take_along_axis(tokens, jnp.minimum(place, depth - 1), -1)
        return jnp.where(place < depth, moved, BLANK)

    last = jnp.maximum(number - 1, 0)[:, None]
    reached = jnp.take_along_axis(values, last, -1)[:, 0]
    rest = {
        "ops": later(target["ops"]),
        "operands": later(target["operands"]),
        "value": jnp.where(number > 0, reached, target["value"]),
        "length": target["length"] - number,
    }
    return traces(key, dataclasses.replace(prompts, target=target | rest))


def decode(tokens: Any) -> str:
    """Readable text of a prompt or a completion, without padding and blanks."""
    tokens = [int(t) for t in tokens]
    if tokens[-1:] == [GO]:  # a prompt: its value stands before the operations
        tokens = [tokens[-2], *tokens[:-2], GO]
    return " ".join(NAMES[t] for t in tokens if NAMES[t])
