"""Prefixes: what is remembered of prompts, and the heads of it as hints."""

from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from test_configs import ROOT, shrunk

from curax.config import Writing, load
from curax.step import build, draw, drivers, learn, states
from curax.step.methods import hint_sources, prefixes
from curax.step.types import Graded

CONFIG = shrunk(load(ROOT / "configs" / "own_prefix.py"))


@pytest.fixture(scope="module")
def parts():
    return build.build(CONFIG)


@pytest.fixture(scope="module")
def state(parts):
    return states.begin(parts, tiny.warm(parts.model, seed=3))


def graded_step(parts):
    """`(state, outcome) -> (drawn, state after the step, metrics)`, compiled."""

    @jax.jit
    def walk(state, outcome):
        request = draw.next_request(drivers.Traced(), parts, state)
        rollouts = draw.draw(parts, state, request)
        graded = Graded.of(request, rollouts, outcome)
        drawn = draw.collect(parts, request, graded, None)
        after, (values, _) = learn.learn(parts, state, drawn)
        return drawn, after, values

    return walk


def test_the_first_right_completion_of_a_group_is_remembered_without_its_end(
    parts, state
):
    outcome = np.zeros((CONFIG.sampling.prompts, CONFIG.sampling.group_size))
    outcome[0, 1:3], outcome[1, 0] = 1.0, 0.5  # of prompt 1 nothing is right
    outcome[2:] = 1.0
    outcome[3, 0] = np.nan  # and one is missing
    walk = graded_step(parts)
    drawn, after, values = walk(state, jnp.asarray(outcome.reshape(-1), jnp.float32))
    solved = after.methods[prefixes.NAME]
    ids, tokens, mask = (
        np.asarray(x)
        for x in (drawn.prompts.id, drawn.rollouts.tokens, drawn.rollouts.mask)
    )
    row = {
        (int(b), int(s)): n
        for n, (b, s) in enumerate(
            zip(drawn.rollouts.prompt, drawn.rollouts.member, strict=True)
        )
    }
    for b, member in enumerate((1, None, 0, 1)):
        want = []
        if member is not None:
            said = tokens[row[b, member]][mask[row[b, member]]]
            want = [t for t in said.tolist() if t not in parts.task.end]
        count = int(solved.length[ids[b]])
        assert solved.tokens[ids[b], :count].tolist() == want
    assert values["prefix/known_fraction"] == 0
    others = np.setdiff1d(np.arange(parts.task.num_prompts), ids)
    assert not np.asarray(solved.length)[others].any()
    # What was wrong a second time takes nothing away.
    again = replace(after, position=state.position, step=state.step)
    _, later, values = walk(again, jnp.zeros(outcome.size))
    jax.tree.map(np.testing.assert_array_equal, later.methods[prefixes.NAME], solved)
    assert 0 < values["prefix/known_fraction"] < 1


@pytest.mark.long
def test_of_a_prompt_that_a_step_has_twice_the_last_right_group_is_remembered(
    parts, state
):
    """Tokens and length are those of one completion."""
    count, size = CONFIG.sampling.prompts, CONFIG.sampling.group_size
    assert count == 4
    rows, width = count * size, CONFIG.sampling.max_tokens
    tokens = jnp.arange(rows * width, dtype=jnp.int32).reshape(rows, width) + 100
    length = 1 + jnp.arange(rows, dtype=jnp.int32) % width
    drawn = SimpleNamespace(
        prompts=SimpleNamespace(id=jnp.int32([7, 5, 7, 7])),
        rollouts=SimpleNamespace(
            tokens=tokens, mask=jnp.arange(width)[None] < length[:, None]
        ),
    )
    right = np.zeros((count, size), bool)
    right[:3, 1] = True  # the last group of prompt 7 has none right
    seen = SimpleNamespace(
        row=jnp.arange(rows, dtype=jnp.int32).reshape(count, size),
        exists=jnp.ones((count, size), bool),
        outcome=jnp.asarray(right, jnp.float32),
    )
    drawn.groups = seen
    got = prefixes.after_update(drivers.Traced(), parts, state, drawn)
    for who, b in ((7, 2), (5, 1)):
        row = b * size + 1
        assert got.length[who] == length[row]
        assert got.tokens[who, : length[row]].tolist() == (
            tokens[row, : length[row]].tolist()
        )
    assert int(jnp.sum(got.length > 0)) == 2


@pytest.mark.long
def test_hints_are_heads_of_what_is_remembered_and_unsolved_prompts_have_none(
    parts, state
):
    count, width = parts.task.num_prompts, CONFIG.sampling.max_tokens
    prompts = parts.task.prompts(jnp.arange(4, dtype=jnp.int32))
    length = np.zeros(count, np.int32)
    length[[0, 1, 3]] = 6, 1, 4
    tokens = np.arange(1, width + 1, dtype=np.int32) * np.ones((count, 1), np.int32)
    solved = prefixes.Solved(tokens=jnp.asarray(tokens), length=jnp.asarray(length))
    there = replace(state, methods={**state.methods, prefixes.NAME: solved})
    written = prefixes.recall(parts, there, prompts)
    hints, mask = prefixes.own_prefix(
        parts.task.hinting, prompts, levels=3, written=written
    )
    for b in range(4):
        for level in range(1, 4):
            size = int(np.round(np.float32(level / 4) * length[b]))
            head = tokens[b, : max(size, 1) if length[b] else 0].tolist()
            assert np.asarray(hints[b, level - 1])[mask[b, level - 1]].tolist() == head
    made = partial(hint_sources.make, drivers.Traced(), parts)
    found, _ = jax.jit(made)(there, prompts, jnp.ones(4, bool))
    assert not np.asarray(found.mask)[2:3].any()


def test_the_policy_does_not_write_what_is_remembered():
    writing = replace(CONFIG.hint, writing=Writing(max_tokens=4))
    with pytest.raises(ValueError, match="set hint"):
        build.build(replace(CONFIG, hint=writing))
