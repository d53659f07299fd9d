"""Chains of modular arithmetic, and a teacher with bad habits to start from.

    7 + 3 - 9 rsub 2 =   ->   10 1 1 end

A prompt is a value and up to `depth` operations on it, modulo 16: add, subtract, and
reverse subtract (operand minus value). The completion is every running value, then the
end. It is right only as a whole: judging the last value alone would pay one lucky
chain in sixteen. The teacher's traces for the warm start are wrong in a systematic
way: each operation is off by one with its own probability, and the chain goes on from
the wrong value. So pass rates start anywhere between 0 and 1, and RL has a few shared
habits to remove.

As tokens, a prompt is the value, `depth` operators, `depth` operands and a go sign,
with blanks where the chain is shorter: what step i needs is always equally far back,
which is what rotary attention finds at once.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from curax.kinds import Count
from curax.types import Prompts, Task

MODULUS = 16
OPERATIONS = ("+", "-", "rsub")
OPERANDS = (2, 10)  # half-open
END, PAD, GO, BLANK = range(MODULUS + len(OPERATIONS), MODULUS + len(OPERATIONS) + 4)
NAMES = (*map(str, range(MODULUS)), *OPERATIONS, "end", "", "=", "")


def task(
    *,
    depth: Count = 6,
    num_prompts: Count = 1 << 14,
    num_held_out: Count = 1 << 12,
    errors: tuple[float, float, float] = (0.05, 0.40, 0.85),
    on_device: bool = True,
) -> Task:
    """The task; a prompt is a pure function of its id.

    Args:
        depth: most operations in a prompt; every number from 1 on is equally likely.
        num_prompts: size of the training set.
        num_held_out: size of the held-out set.
        errors: chance that the teacher is off by one at an add, a subtract, a reverse
            subtract.
        on_device: verify by a JAX function; otherwise by Python on the host.

    Returns:
        The task; prompts take 2 depth + 2 tokens, right completions at most depth + 1.
    """
    return Task(
        vocab_size=len(NAMES),
        pad=PAD,
        end=(END,),
        num_prompts=num_prompts,
        num_held_out=num_held_out,
        prompts=partial(prompts, depth=depth, held_out=False),
        held_out=partial(prompts, depth=depth, held_out=True),
        traces=partial(traces, errors=errors),
        verify=verify if on_device else verify_one,
        on_device=on_device,
        decode=decode,
    )


def prompts(prompt_id: jax.Array, *, depth: int, held_out: bool) -> Prompts:
    """The prompts with these ids.

    Whether a question is held out is a function of the question itself: everything but
    its first value is hashed to h, and it is held out iff value + h = 0 mod 8. So the
    two sides share no question, and the first value alone is chosen to fit the side.

    Args:
        prompt_id: `[B]` int32.
        depth: most operations.
        held_out: which side.

    Returns:
        Prompts of 2 depth + 2 tokens; the target is the `[B, depth + 1]` right
        completion, padded.
    """
    return jax.vmap(partial(_prompt, depth=depth, held_out=held_out))(prompt_id)


def _prompt(prompt_id, *, depth, held_out):
    side = jax.random.key(1 if held_out else 0)
    k_length, k_ops, k_operands, k_class, k_half = jax.random.split(
        jax.random.fold_in(side, prompt_id), 5
    )
    used = jnp.arange(depth) < jax.random.randint(k_length, (), 1, depth + 1)
    ops = MODULUS + jax.random.randint(k_ops, (depth,), 0, len(OPERATIONS))
    ops = jnp.where(used, ops, BLANK)
    operands = jax.random.randint(k_operands, (depth,), *OPERANDS)
    operands = jnp.where(used, operands, BLANK)
    h = jnp.uint32(0)
    for token in (*ops, *operands):
        mixed = (h ^ token.astype(jnp.uint32)) * jnp.uint32(2654435761)
        h = mixed ^ (mixed >> 15)
    # Values 0..15 hold two of each class modulo 8.
    wanted = 0 if held_out else jax.random.randint(k_class, (), 1, 8)
    half = jax.random.randint(k_half, (), 0, 2)
    value = (wanted - (h % 8).astype(jnp.int32)) % 8 + 8 * half
    tokens = jnp.concatenate([value[None], ops, operands, jnp.array([GO])])
    tokens = tokens.astype(jnp.int32)
    return Prompts(
        tokens=tokens,
        mask=jnp.ones(tokens.shape, bool),
        id=prompt_id,
        target=run(tokens, jnp.zeros(depth, bool)),
    )


def run(tokens: jax.Array, wrong: jax.Array) -> jax.Array:
    """Running values of a prompt, then the end, then padding.

    Args:
        tokens: `[2 depth + 2]` int32, the prompt.
        wrong: `[depth]` bool, steps that are off by one.

    Returns:
        `[depth + 1]` int32.
    """
    depth = wrong.shape[0]
    ops, operands = tokens[1 : depth + 1], tokens[depth + 1 : -1]

    def apply(value, item):
        op, operand, off = item
        results = jnp.stack([value + operand, value - operand, operand - value])
        value = (results[jnp.clip(op - MODULUS, 0, 2)] + off) % MODULUS
        return value, value

    _, values = jax.lax.scan(apply, tokens[0], (ops, operands, wrong.astype(jnp.int32)))
    used = ops != BLANK
    place, length = jnp.arange(depth + 1), jnp.sum(used)
    tail = jnp.where(place == length, END, PAD)
    return jnp.where(place < length, jnp.append(values, PAD), tail).astype(jnp.int32)


def traces(
    key: jax.Array, prompts: Prompts, *, errors: tuple[float, float, float]
) -> tuple[jax.Array, jax.Array]:
    """What the teacher writes for each prompt: `[B, depth + 1]` tokens and mask."""
    depth = prompts.tokens.shape[-1] // 2 - 1
    ops = jnp.clip(prompts.tokens[:, 1 : depth + 1] - MODULUS, 0, len(OPERATIONS) - 1)
    wrong = jax.random.uniform(key, ops.shape) < jnp.asarray(errors)[ops]
    tokens = jax.vmap(run)(prompts.tokens, wrong)
    return tokens, tokens != PAD


def verify(target: jax.Array, tokens: jax.Array, mask: jax.Array) -> jax.Array:
    """`[N]` float32: 1 where the completion is the target, end included, else 0."""
    width = max(target.shape[-1], tokens.shape[-1])

    def widen(x):
        return jnp.pad(x, ((0, 0), (0, width - x.shape[-1])), constant_values=PAD)

    said = widen(jnp.where(mask, tokens, PAD))
    return jnp.all(said == widen(target), -1).astype(jnp.float32)


def verify_one(target: np.ndarray, tokens: np.ndarray) -> float:
    """The same for one completion, on the host."""
    want: list[Any] = [int(t) for t in target if t != PAD]
    return float([int(t) for t in tokens] == want)


def decode(tokens: Any) -> str:
    """Readable text of a prompt or a completion; padding and blanks vanish."""
    tokens = [int(t) for t in tokens]
    if tokens[-1:] == [GO] and len(tokens) % 2 == 0:  # a prompt: pair its operations
        half = len(tokens) // 2
        pairs = zip(tokens[1:half], tokens[half:-1], strict=True)
        tokens = [tokens[0], *(t for pair in pairs for t in pair), GO]
    return " ".join(NAMES[t] for t in tokens if NAMES[t])
