"""Functions that the regimes of the map need and no recipe does."""

from dataclasses import replace
from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np

from curax import allocate
from curax.settings.config_types import Count, Magnitude, Natural, Positive, Share
from curax.settings.declared import RIGHT
from curax.tasks import chain, mastermind
from curax.types import Difficulty, Prompts, Task

QUESTIONS = 38  # of mastermind with four colours, that are trained on
RSUB = chain.MODULUS + chain.OPERATIONS.index("rsub")


def no_credit(reward: jax.Array, exists: jax.Array) -> jax.Array:
    """No credit for any completion: what is drawn is not reinforced.

    Args:
        reward: `[..., G]` float; not read.
        exists: `[..., G]` bool.

    Returns:
        `[..., G]` float32, 0.
    """
    del reward
    return jnp.zeros(exists.shape, jnp.float32)


def equal_groups(
    difficulty: Difficulty, *, budget: int, most: int, size: Positive = 8.0
) -> jax.Array:
    """Groups of one size for as many prompts as the budget has room for, others none.

        n_i = size for i < budget / size, else 0

    The size may be traced: so every size is a lane of one program, and none of its own
    has to be compiled. That of a run is a constant; a prompt without a draw is passed
    over until it comes back.

    Args:
        difficulty: of the B prompts; only their number is read.
        budget: completions of the whole step; static.
        most: largest number that one prompt may get; static.
        size: completions of a group, a whole number that divides the budget.

    Returns:
        `[B]` int32 with sum `budget`, where B prompts are enough for it.
    """
    known = allocate.uniform(difficulty, budget=budget, most=most)
    each = jnp.minimum(jnp.round(size).astype(jnp.int32), most)
    place = jnp.arange(known.shape[0], dtype=jnp.int32)
    return jnp.where(place < budget // each, each, 0)


def enough_right(
    outcome: jax.Array, exists: jax.Array, *, right: Positive = 1.0
) -> jax.Array:
    """Enough right completions: N+ >= right. `stop.positives`, but `right` is traced.

    Args:
        outcome: `[..., G]` float in [0, 1], what the verifier said.
        exists: `[..., G]` bool, True where there is a completion with an outcome.
        right: right completions that are enough.

    Returns:
        `[...]` bool, True where the prompt needs no more.
    """
    found = jnp.sum(exists & (outcome > 0.5), -1, dtype=jnp.float32)
    return found >= right


def right_in_rounds(
    outcome: jax.Array, exists: jax.Array, *, size: Positive = 2.0
) -> jax.Array:
    """One right completion at least, looked for after every `size`: as `stop.positives`
    with rounds of `size`, which `stop.round_size` divides and which may be traced.

    Args:
        outcome: `[..., G]` float in [0, 1], in the order of drawing.
        exists: `[..., G]` bool, True where there is a completion with an outcome.
        size: completions of a round, a whole number.

    Returns:
        `[...]` bool, True where a whole round ends and a right one is there.
    """
    drawn = jnp.sum(exists, -1, keepdims=True, dtype=jnp.float32)
    inside = jnp.cumsum(exists, -1, dtype=jnp.float32) <= drawn // size * size
    return jnp.any(exists & inside & (outcome > RIGHT), -1)


def task(
    *,
    depth: Count = 3,
    num_prompts: Natural = 1 << 14,
    errors: tuple[float, float, float] = (0.05, 0.40, 0.85),
    hard: Magnitude = 0.0,
    ways: Count = 1,
    accepted: Magnitude = 0.0,
    hints: bool = False,
    whole: bool = False,
    hint_errors: tuple[float, float, float] | None = None,
) -> Task:
    """Chains of arithmetic, of which some are hard, and a verifier that may err.

    Args:
        depth: operations in a prompt, at most.
        num_prompts: size of the training set.
        errors: of the teacher, as `chain.task`.
        hard: share of the prompts that have a reverse subtraction; 0: as they come.
        ways: right tokens for each value, those equal to it modulo 16 / ways, so that a
            chain of k values has ways^k right completions; the teacher's choose at
            random. A divisor of 16.
        accepted: share of wrong completions of training prompts that the verifier
            passes, by a hash of prompt and completion; it is never wrong on held-out
            prompts.
        hints: whether prompts can be hinted.
        whole: whether all chains have `depth` operations; else 1 to `depth`.
        hint_errors: of another who writes hints; None: there is none.

    Returns:
        The task.
    """
    made = chain.task(
        depth=depth,
        num_prompts=num_prompts,
        errors=errors,
        hints=hints,
        hint_errors=hint_errors,
    )
    if whole:
        made = replace(
            made,
            prompts=partial(_whole, depth=depth, held_out=False),
            held_out=partial(_whole, depth=depth, held_out=True),
        )
    if hard:
        made = replace(
            made,
            prompts=partial(_mixed, depth=depth, hard=hard, held_out=False),
            held_out=partial(_mixed, depth=depth, hard=hard, held_out=True),
        )
    if ways > 1:
        made = replace(
            made,
            traces=partial(_any_way, made.traces, ways=ways),
            verify=partial(_in_any_way, ways=ways),
        )
    if accepted:
        made = replace(
            made,
            prompts=partial(_marked, made.prompts, errs=True),
            held_out=partial(_marked, made.held_out, errs=False),
            verify=partial(_erring, accepted=accepted),
        )
    return made


def guessing(*, hints: bool = False, num_prompts: Natural = 1 << 14) -> Task:
    """Mastermind of four colours, evaluated on what it trains on, of codes drawn anew.

    Of 44 questions 6 are held out, and what is learnt of the others tells little of
    these; so what is measured is how far a recipe gets in what it trains on.

    Args:
        hints: whether prompts can be hinted.
        num_prompts: size of the training set, in which the questions repeat.

    Returns:
        The task.
    """
    made = mastermind.task(colours=4, hints=hints, num_prompts=num_prompts)
    return replace(made, held_out=made.prompts, num_held_out=QUESTIONS)


def _any_way(traces, key, prompts, *, ways: int) -> tuple[jax.Array, jax.Array]:
    """A teacher's traces, each value in one of the ways to write it."""
    tokens, mask = traces(key, prompts)
    kind = jax.random.randint(jax.random.fold_in(key, 1), tokens.shape, 0, ways)
    other = (tokens + chain.MODULUS // ways * kind) % chain.MODULUS
    return jnp.where(tokens < chain.MODULUS, other, tokens), mask


def _in_any_way(target, tokens, mask, *, ways: int) -> jax.Array:
    """Outcomes, 1 where every value is one of those that are right."""

    def alike(x):
        return jnp.where(x < chain.MODULUS, x % (chain.MODULUS // ways), x)

    return chain.verify(alike(target), alike(tokens), mask)


def _mixed(prompt_id, *, depth: int, hard: Share, held_out: bool) -> Prompts:
    """Every k-th prompt is a hard one, k = 1 / hard: ids of `chain` that fit."""
    every = round(1 / hard)
    easy, difficult = _ids(depth, held_out)
    which = prompt_id // every, prompt_id - prompt_id // every - 1
    is_hard = prompt_id % every == 0
    own = jnp.where(
        is_hard,
        jnp.asarray(difficult)[which[0] % len(difficult)],
        jnp.asarray(easy)[which[1] % len(easy)],
    )
    made = chain.prompts(own.astype(jnp.int32), depth=depth, held_out=held_out)
    return replace(made, id=prompt_id)


def _ids(depth: int, held_out: bool) -> tuple[np.ndarray, np.ndarray]:
    """Ids of prompts without and with a reverse subtraction."""
    hard = np.any(_tokens(depth, held_out, 4096) == RSUB, -1)
    return np.flatnonzero(~hard), np.flatnonzero(hard)


@cache
def _tokens(depth: int, held_out: bool, count: int) -> np.ndarray:
    """Tokens of the first prompts of `chain`."""
    with jax.ensure_compile_time_eval():
        ids = jnp.arange(count, dtype=jnp.int32)
        return np.asarray(chain.prompts(ids, depth=depth, held_out=held_out).tokens)


def _whole(prompt_id, *, depth: int, held_out: bool) -> Prompts:
    """Prompts of `depth` operations: ids of `chain` that have no blank, in turn."""
    ids = np.flatnonzero(np.all(_tokens(depth, held_out, 1 << 15) != chain.BLANK, -1))
    own = jnp.asarray(ids.astype(np.int32))[prompt_id % len(ids)]
    return replace(chain.prompts(own, depth=depth, held_out=held_out), id=prompt_id)


def _marked(prompts, prompt_id, *, errs: bool) -> Prompts:
    """Prompts whose targets end with their id + 1 where the verifier errs, else 0."""
    made = prompts(prompt_id)
    mark = prompt_id + 1 if errs else jnp.zeros_like(prompt_id)
    column = mark[..., None].astype(made.target.dtype)
    return replace(made, target=jnp.concatenate([made.target, column], -1))


def _erring(target, tokens, mask, *, accepted: float) -> jax.Array:
    """Outcomes, 1 for some of the wrong ones where the target is marked."""
    right = chain.verify(target[:, :-1], tokens, mask)
    told = jnp.concatenate([target, jnp.where(mask, tokens, chain.PAD)], -1)
    h = jnp.zeros(told.shape[0], jnp.uint32)
    for column in told.T:
        mixed = (h ^ column.astype(jnp.uint32)) * jnp.uint32(2654435761)
        h = mixed ^ (mixed >> 15)
    lucky = (h >> 8).astype(jnp.float32) < accepted * 2.0**24
    return jnp.maximum(right, (lucky & (target[:, -1] > 0)).astype(jnp.float32))
