"""Chains of modular arithmetic, with traces of a teacher that makes systematic errors.

    7 + 3 - 9 rsub 2 =   ->   10 1 1 end

A prompt is a value and up to `depth` operations on it, modulo 16: add, subtract, and
reverse subtract (operand minus value). The completion is every running value, then the
end. The outcome is 1 only if all of it is right: the last value alone is right by
chance in one chain of sixteen. In the teacher's traces for the warm start each
operation is off by one with a probability of its own, and the chain continues from the
wrong value. So pass rates start anywhere between 0 and 1, and RL has a few shared
errors to remove.

As tokens, a prompt is the value, `depth` operators, `depth` operands and a go sign,
with blanks where the chain is shorter: the inputs of step i are always at the same
distance, which rotary attention learns at once.

A hint is a prefix of the solution, in a block of fixed width before the prompt, padded
with blanks: value i of it is always at the same distance from step i.

    hint: 10 1 . . . . | 7 + 3 - 9 rsub 2 =   ->   10 1 1 end

A policy of this size cannot use hints without training on them. So some traces follow
a hint and continue with the teacher's errors; others, after `ask:` and a whole
solution, copy that solution, from which the policy learns to write hints.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from curax.settings.config_types import Count, Magnitude
from curax.settings.declared import declares
from curax.tasks import blocks
from curax.types import Contexts, Hinting, Prompts, Task

MODULUS = 16
OPERATIONS = ("+", "-", "rsub")
OPERANDS = (2, 10)  # half-open
END, PAD, GO, BLANK = range(MODULUS + len(OPERATIONS), MODULUS + len(OPERATIONS) + 4)
HINT, ASK = BLANK + 1, BLANK + 2  # first tokens of a block; only with hints
NAMES = (*map(str, range(MODULUS)), *OPERATIONS, "end", "", "=", "", "hint:", "ask:")


@declares(num_prompts="num_prompts")
def task(
    *,
    depth: Count = 6,
    num_prompts: Count = 1 << 14,
    num_held_out: Count = 1 << 12,
    errors: tuple[float, float, float] = (0.05, 0.40, 0.85),
    on_device: bool = True,
    hints: bool = False,
    levels: Count = 3,
    hinted_traces: Magnitude = 0.25,
    asked_traces: Magnitude = 0.25,
    hint_errors: tuple[float, float, float] | None = None,
) -> Task:
    """The task, whose prompts are pure functions of their ids.

    Args:
        depth: operations in a prompt, at most; each number from 1 on is equally likely.
        num_prompts: size of the training set.
        num_held_out: size of the held-out set.
        errors: probability of a teacher's error at an add, a subtract and a reverse
            subtract.
        on_device: verify by a JAX function; otherwise by Python on the host.
        hints: whether prompts can be hinted, which adds two tokens to the vocabulary.
        levels: L, levels of hints in one completion that writes hints.
        hinted_traces: share of the traces that follow a hint, if `hints`.
        asked_traces: share of the traces that copy a solution, if `hints`.
        hint_errors: as `errors`, of whoever wrote the hints of `hint.from_file`; None:
            there are none.

    Returns:
        The task; prompts take 2 depth + 2 tokens, right completions at most depth + 1,
        hints depth + 1.
    """
    shares = (hinted_traces, asked_traces)
    teach = partial(hinted, shares=shares) if hints else traces
    return Task(
        vocab_size=len(NAMES) if hints else HINT,
        pad=PAD,
        end=(END,),
        num_prompts=num_prompts,
        num_held_out=num_held_out,
        prompts=partial(prompts, depth=depth, held_out=False),
        held_out=partial(prompts, depth=depth, held_out=True),
        traces=partial(teach, errors=errors),
        verify=verify if on_device else verify_one,
        on_device=on_device,
        decode=decode,
        hinting=(
            hinting(depth=depth, levels=levels, errors=hint_errors) if hints else None
        ),
        trace_contexts=partial(shown, shares=shares) if hints else None,
    )


def hinting(
    *, depth: int, levels: int, errors: tuple[float, float, float] | None = None
) -> Hinting:
    """The functions of hints, which are the first running values of a solution."""
    filed = None if errors is None else partial(file, levels=levels, errors=errors)
    return Hinting(
        solution=solution,
        wrap=partial(wrap, depth=depth),
        leaks=partial(blocks.last_in_place, solution),
        writing_contexts=ask,
        parse=partial(read, levels=levels),
        from_file=filed,
    )


def prompts(prompt_id: jax.Array, *, depth: int, held_out: bool) -> Prompts:
    """The training or held-out prompts with these ids.

    A question is held out iff value + h = 0 mod 8, where h is a hash of everything but
    its first value. So no question is both a training and a held-out one; the first
    value is chosen accordingly.

    Args:
        prompt_id: `[B]` int32.
        depth: operations, at most.
        held_out: whether these are held-out prompts.

    Returns:
        Prompts of 2 depth + 2 tokens; the target is the `[B, depth + 1]` right
        completion, padded.
    """
    return jax.vmap(partial(_prompt, depth=depth, held_out=held_out))(prompt_id)


def _prompt(prompt_id, *, depth, held_out):
    signs = {"first": MODULUS, "blank": BLANK}
    # Values 0..15 hold two of each class modulo 8.
    ops, operands, value, _ = drawn(
        prompt_id, depth=depth, held_out=held_out, times=2, **signs
    )
    tokens = jnp.concatenate([value[None], ops, operands, jnp.array([GO])])
    tokens = tokens.astype(jnp.int32)
    return blocks.full(tokens, prompt_id, run(tokens, jnp.zeros(depth, bool)))


def drawn(prompt_id, *, depth, held_out, times, first, blank):
    """The chain of an id: operators and operands `[depth]`, value and length `[]`.

    Operators are tokens from `first` on, and places without a link are `blank`. A value
    is one of `times` of its class modulo 8, by which the chain is held out or not.
    """
    side = jax.random.key(1 if held_out else 0)
    k_length, k_ops, k_operands, k_class, k_rest = jax.random.split(
        jax.random.fold_in(side, prompt_id), 5
    )
    length = jax.random.randint(k_length, (), 1, depth + 1)
    used = jnp.arange(depth) < length
    ops = first + jax.random.randint(k_ops, (depth,), 0, len(OPERATIONS))
    ops = jnp.where(used, ops, blank)
    operands = jax.random.randint(k_operands, (depth,), *OPERANDS)
    operands = jnp.where(used, operands, blank)
    h = jnp.uint32(0)
    for token in (*ops, *operands):
        mixed = (h ^ token.astype(jnp.uint32)) * jnp.uint32(2654435761)
        h = mixed ^ (mixed >> 15)
    wanted = 0 if held_out else jax.random.randint(k_class, (), 1, 8)
    rest = jax.random.randint(k_rest, (), 0, times)
    value = (wanted - (h % 8).astype(jnp.int32)) % 8 + 8 * rest
    return ops, operands, value, length


def run(tokens: jax.Array, wrong: jax.Array) -> jax.Array:
    """The running values of a prompt, then the end, then padding.

    Args:
        tokens: `[2 depth + 2]` int32, the prompt.
        wrong: `[depth]` bool, steps whose result is one too large.

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
    """The teacher's completion of each prompt, `[B, depth + 1]` tokens and mask."""
    tokens = jax.vmap(run)(prompts.tokens, _errors(key, prompts.tokens, errors))
    return tokens, tokens != PAD


def _errors(key, tokens, errors):
    """`[B, depth]` bool, steps with an error, drawn at the rates of each operation."""
    depth = tokens.shape[-1] // 2 - 1
    ops = jnp.clip(tokens[:, 1 : depth + 1] - MODULUS, 0, len(OPERATIONS) - 1)
    return jax.random.uniform(key, ops.shape) < jnp.asarray(errors)[ops]


def solution(prompts: Prompts) -> tuple[jax.Array, jax.Array]:
    """The right running values, `[B, depth]` tokens and mask."""
    tokens = prompts.target[:, :-1]
    mask = tokens < MODULUS
    return jnp.where(mask, tokens, PAD), mask


def wrap(
    tokens: jax.Array, mask: jax.Array, *, depth: int, sign: jax.Array | int = HINT
) -> tuple[jax.Array, jax.Array]:
    """The block of each hint, `[..., depth + 1]`: a sign, then `depth` values."""
    return blocks.block(tokens, mask, sign=sign, width=depth, blank=BLANK, pad=PAD)


def ask(prompts: Prompts) -> Contexts:
    """Contexts that request hints: the solution as a block, then the prompt."""
    tokens, mask = solution(prompts)
    block = wrap(tokens, mask, depth=mask.shape[-1], sign=ASK)
    return blocks.before(prompts, *block)


def read(
    prompts: Prompts, tokens: jax.Array, mask: jax.Array, *, levels: int
) -> tuple[jax.Array, jax.Array]:
    """The hints in completions that write hints.

    The hint of level l = 1 .. L is the first round(l n / (L + 1)) of the n values with
    which a completion begins; where that is 0, the hint is missing.

    Args:
        prompts: `[B]`, not used.
        tokens: `[B, T]` int32, completions of the contexts of `ask`.
        mask: `[B, T]` bool.
        levels: L.

    Returns:
        `[B, L, T]` tokens and mask.
    """
    value = jnp.cumprod(mask & (tokens < MODULUS), -1, dtype=jnp.int32)
    level = jnp.arange(1, levels + 1, dtype=jnp.int32)[None]
    n = jnp.sum(value, -1, keepdims=True)  # [B, 1]
    given = jnp.round(level * n / (levels + 1)).astype(jnp.int32)
    keep = jnp.arange(tokens.shape[-1])[None, None] < given[..., None]
    return jnp.where(keep, tokens[:, None], PAD), keep


def file(
    prompts: Prompts, *, levels: int, errors: tuple[float, float, float]
) -> tuple[jax.Array, jax.Array]:
    """Precomputed hints with errors, by prompt id: the same at every visit.

    Args:
        prompts: `[B]`.
        levels: L.
        errors: as of `task`, of who wrote them; an error is carried on.

    Returns:
        `[B, L, depth]` tokens and mask, cut to levels as by `read`.
    """

    def wrong(prompt_id, tokens):
        key = jax.random.fold_in(jax.random.key(3), prompt_id)
        return _errors(key, tokens[None], errors)[0]

    steps = jax.vmap(wrong)(prompts.id, prompts.tokens)
    tokens = jax.vmap(run)(prompts.tokens, steps)[:, :-1]
    return read(prompts, tokens, tokens < MODULUS, levels=levels)


def hinted(
    key: jax.Array,
    prompts: Prompts,
    *,
    errors: tuple[float, float, float],
    shares: tuple[float, float],
) -> tuple[jax.Array, jax.Array]:
    """The teacher's completions in the contexts that `shown` makes of the same key.

    The values of a hint are right; after them the teacher errs as without a hint.
    After `ask:` it makes no error. `[B, depth + 1]` tokens and mask.
    """
    depth = prompts.tokens.shape[-1] // 2 - 1
    _, given = _hint_lengths(key, prompts, shares)
    free = jnp.arange(depth)[None] >= given[:, None]
    tokens = jax.vmap(run)(prompts.tokens, _errors(key, prompts.tokens, errors) & free)
    return tokens, tokens != PAD


def shown(key: jax.Array, prompts: Prompts, *, shares: tuple[float, float]) -> Contexts:
    """The contexts of the traces of `hinted`: some hold a hint, some request one.

    Args:
        key: that of the traces.
        prompts: `[B]`.
        shares: of the contexts with a hint, and of those that request one. The number
            of values in a hint is uniform on 1 .. all.

    Returns:
        `[B, 3 depth + 3]`.
    """
    tokens, _ = solution(prompts)
    asked, given = _hint_lengths(key, prompts, shares)
    depth = tokens.shape[-1]
    mask = jnp.arange(depth)[None] < given[:, None]
    sign = jnp.where(asked, ASK, HINT)
    return blocks.before(prompts, *wrap(tokens, mask, depth=depth, sign=sign))


def _hint_lengths(key, prompts, shares):
    """Which contexts request hints, and how many values stand in each: `[B]` both."""
    length = jnp.sum(solution(prompts)[1], -1)
    asked = blocks.given(key, length, shares[1]) > 0
    return asked, jnp.where(asked, length, blocks.given(key, length, sum(shares)))


def verify(target: jax.Array, tokens: jax.Array, mask: jax.Array) -> jax.Array:
    """`[N]` float32 outcome: 1 where the completion equals the target, else 0."""
    width = max(target.shape[-1], tokens.shape[-1])

    def widen(x):
        return jnp.pad(x, ((0, 0), (0, width - x.shape[-1])), constant_values=PAD)

    completion = widen(jnp.where(mask, tokens, PAD))
    return jnp.all(completion == widen(target), -1).astype(jnp.float32)


def verify_one(target: np.ndarray, tokens: np.ndarray) -> float:
    """The outcome of one completion, on the host."""
    want: list[Any] = [int(t) for t in target if t != PAD]
    return float([int(t) for t in tokens] == want)


def decode(tokens: Any) -> str:
    """Readable text of a context or a completion, without padding and blanks."""
    tokens, block = [int(t) for t in tokens], []
    if tokens[-1:] == [GO] and len(tokens) % 3 == 0 and tokens[0] in (HINT, ASK):
        width = len(tokens) // 3
        block, tokens = tokens[:width], tokens[width:]
    if tokens[-1:] == [GO] and len(tokens) % 2 == 0:  # a prompt: pair its operations
        half = len(tokens) // 2
        pairs = zip(tokens[1:half], tokens[half:-1], strict=True)
        tokens = [tokens[0], *(t for pair in pairs for t in pair), GO]
    parts = (" ".join(NAMES[t] for t in part if NAMES[t]) for part in (block, tokens))
    return " | ".join(part for part in parts if part)
