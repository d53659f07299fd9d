"""Dynamic sampling: groups that the gate closed give their place to later ones."""

from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from hypothesis import given
from hypothesis import strategies as st

from curax import allocate, gate
from curax import memory as memories
from curax.config import Sampling, load
from curax.step import draw
from curax.step.build import build
from curax.step.methods import refill
from curax.step.types import Graded
from curax.types import Contexts, Prompts

B, G, T = 4, 3, 2
ROUNDS = 3
QUICKSTART = load(Path(__file__).parent.parent / "configs" / "quickstart.py")
CONFIG = replace(
    QUICKSTART,
    sampling=Sampling(prompts=B, group_size=G, max_tokens=T, attempts=ROUNDS),
    gate=gate.zero_variance,
)
PARTS = build(CONFIG)
ONE_ROUND = replace(CONFIG.sampling, attempts=1)
ONCE = build(replace(CONFIG, sampling=ONE_ROUND))

# Outcomes of a group, NaN where the verifier failed, by what a gate makes of it.
OPEN = [(1, 0, 0), (0, 1, 1), (np.nan, 1, 0)]
CLOSED = [(0, 0, 0), (1, 1, 1), (np.nan,) * 3, (1, np.nan, np.nan)]

groups = st.sampled_from(OPEN + CLOSED)
batches = st.lists(groups, min_size=B, max_size=B)
attempts = st.lists(batches, min_size=ROUNDS, max_size=ROUNDS)
orders = st.lists(st.permutations(range(B * G)), min_size=ROUNDS, max_size=ROUNDS)


def sampled(attempt, order=range(B * G), first_ids=range(B)):
    """What a draw gives: all that is said of a completion names prompt and member."""
    ids = np.array(range(attempt * B, attempt * B + B) if attempt else first_ids)
    ids, row = np.int32(ids), np.array(order)
    prompt, member = np.int32(row // G), np.int32(row % G)
    name = np.float32(ids[prompt] + member / 10)
    grid = np.repeat(name[:, None], T, 1)
    asked = np.repeat(ids[:, None], 5, 1)
    everywhere = np.ones(asked.shape, bool)
    return (
        Prompts(tokens=asked, mask=everywhere, id=ids, target=(ids, asked)),
        Contexts(tokens=asked, mask=everywhere),
        tiny.rollouts(
            tokens=np.stack([ids[prompt], member], -1),
            mask=np.arange(T) <= (name % 2 > 1)[:, None],
            **dict(zip(tiny.FLOATS, (-grid, -grid, grid, grid), strict=True)),
            finished=name % 2 > 1,
            prompt=prompt,
            member=member,
        ),
    )


def rows(outcomes, rollouts):
    """Outcomes of groups as outcomes of rows."""
    return np.float32(outcomes)[rollouts.prompt, rollouts.member]


STATE: Any = SimpleNamespace(seed=jnp.uint32(0), step=jnp.int32(0))


def collected(memory, drawn, new, outcome):
    """What an attempt adds: asked for, allocated, drawn, graded and collected."""
    prompts, contexts, rollouts = new
    number = jnp.int32(0) if drawn is None else drawn.attempts
    request = draw.ask(PARTS, STATE, memory, prompts, number)
    request = draw.allocated(PARTS, replace(request, contexts=contexts))
    graded = Graded.of(request, rollouts, outcome)
    return draw.collect(PARTS, request, graded, drawn)


ANOTHER = jax.jit(collected)
WANTS = jax.jit(partial(refill.wants, PARTS))
WANTS_ONCE = jax.jit(partial(refill.wants, ONCE))


def absorbed(outcomes, orders=(range(B * G),) * ROUNDS, first_ids=range(B)):
    """After several attempts, from the outcomes of their groups and orders of rows."""
    drawn, memory = None, memories.forget(PARTS.task.num_prompts)
    for attempt, said in enumerate(outcomes):
        new = sampled(attempt, orders[attempt], first_ids)
        drawn = ANOTHER(memory, drawn, new, rows(said, new[2]))
        memory = drawn.memory
    return jax.device_get(drawn)


def places(outcomes):
    """The prompt id that ends up in each place, by the rule as it is said."""
    here = list(range(B))
    said = [group for batch in outcomes for group in batch]
    for attempt in range(1, len(outcomes)):
        fresh = [attempt * B + b for b in range(B) if outcomes[attempt][b] in OPEN]
        for place in range(B):
            if fresh and said[here[place]] not in OPEN:
                here[place] = fresh.pop(0)
    return here


def test_closed_groups_are_replaced_by_open_ones_in_order():
    no, yes = CLOSED[0], OPEN[0]
    drawn = absorbed([[yes, no, no, yes], [no, yes, no, yes]])
    np.testing.assert_array_equal(drawn.prompts.id, [0, 5, 7, 3])
    drawn = absorbed([[yes, no, no, no], [no, no, yes, no]])
    np.testing.assert_array_equal(drawn.prompts.id, [0, 6, 2, 3])
    drawn = absorbed([[no, yes, yes, yes], [yes, yes, yes, yes]])
    np.testing.assert_array_equal(drawn.prompts.id, [4, 1, 2, 3])


@given(attempts, orders)
def test_every_row_of_a_place_comes_whole_from_one_prompt(outcomes, orders):
    said = np.array([group for batch in outcomes for group in batch], np.float32)
    for count in range(1, ROUNDS + 1):
        drawn = absorbed(outcomes[:count], orders)
        ids = np.array(places(outcomes[:count]))
        np.testing.assert_array_equal(drawn.prompts.id, ids)
        got = drawn.rollouts
        # Places keep their rows.
        np.testing.assert_array_equal(got.prompt, np.array(orders[0]) // G)
        np.testing.assert_array_equal(got.member, np.array(orders[0]) % G)
        np.testing.assert_array_equal(got.context, got.prompt)
        # What stands in them is what was said of the prompt that is there now.
        origin = [sampled(attempt) for attempt in range(count)]
        for mine, *theirs in zip(
            jax.tree.leaves((drawn.prompts, drawn.contexts)),
            *(jax.tree.leaves(new[:2]) for new in origin),
            strict=True,
        ):
            np.testing.assert_array_equal(mine, np.concatenate(theirs)[ids])
        row = ids[got.prompt] * G + got.member
        for field in ("tokens", "mask", "logp_behaviour", "entropy", "finished"):
            whole = np.concatenate([getattr(new[2], field) for new in origin])
            np.testing.assert_array_equal(getattr(got, field), whole[row])
        np.testing.assert_array_equal(drawn.outcome, said.reshape(-1)[row])


@given(attempts)
def test_an_open_group_is_never_replaced(outcomes):
    for count in range(1, ROUNDS):
        before = absorbed(outcomes[:count]).prompts.id
        after = absorbed(outcomes[: count + 1]).prompts.id
        said = [group for batch in outcomes for group in batch]
        kept = np.array([said[i] in OPEN for i in before])
        np.testing.assert_array_equal(after[kept], before[kept])


@given(attempts)
def test_memory_and_counts_include_what_was_thrown_away(outcomes):
    drawn = absorbed(outcomes)
    said = np.array([group for batch in outcomes for group in batch], np.float32)
    tried = np.arange(ROUNDS * B)
    np.testing.assert_array_equal(drawn.memory.draws[tried], (~np.isnan(said)).sum(-1))
    np.testing.assert_array_equal(drawn.memory.solved[tried], np.nansum(said, -1))
    assert drawn.memory.draws.sum() == (~np.isnan(said)).sum()
    assert drawn.attempts == ROUNDS
    counts = drawn.tally.counts
    assert counts["rollout/drawn"] == ROUNDS * B * G
    tokens = [sampled(attempt)[2].mask.sum() for attempt in range(ROUNDS)]
    assert counts["rollout/tokens"] == sum(tokens)
    assert counts["outcome/missing"] == np.isnan(said).sum()
    total, weight = drawn.tally.means["outcome/mean"]
    assert (total, weight) == (np.nansum(said), (~np.isnan(said)).sum())


@given(attempts, st.permutations(range(B)))
def test_prompts_in_another_order_find_the_same_replacements(outcomes, order):
    first, *later = outcomes
    straight = absorbed(outcomes).prompts.id
    shuffled = absorbed([[first[i] for i in order], *later], first_ids=order).prompts.id
    new = {int(i) for i in straight if i >= B}
    assert {int(i) for i in shuffled if i >= B} == new
    stayed = [first[i] in OPEN for i in order]
    np.testing.assert_array_equal(shuffled[stayed], np.array(order)[stayed])


@given(attempts)
def test_it_goes_on_until_all_are_open_or_rounds_are_over(outcomes):
    for count in range(1, ROUNDS + 1):
        drawn = absorbed(outcomes[:count])
        said = [group for batch in outcomes for group in batch]
        closed = any(said[i] not in OPEN for i in drawn.prompts.id)
        assert WANTS(drawn) == (closed and count < ROUNDS)
        assert not WANTS_ONCE(drawn)


def skewed(pass_rate, draws, *, budget):
    return jnp.zeros(pass_rate.shape, jnp.int32).at[0].set(budget)


def test_refilling_needs_groups_of_one_size():
    uneven = replace(CONFIG, allocate=skewed)
    with pytest.raises(ValueError, match=r"^sampling\.attempts=3 .*allocate\.uniform"):
        build(uneven)
    build(replace(uneven, sampling=ONE_ROUND))
    build(replace(CONFIG, allocate=partial(allocate.uniform)))
