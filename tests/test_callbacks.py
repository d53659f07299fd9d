"""Tasks of the host that programs call: as they are called from outside, and mapped."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import test_text_hints

from curax import reward
from curax.step import callbacks
from curax.tasks import mastermind
from curax.types import HostEnvironment, Terms

B = 3  # prompts of a lane, of LANES
LANES = 2
RECORDS = [  # the first solution gives its answer away
    {"question": "Add 600 and 600.", "answer": "1200", "solution": "It is 1200, so."},
    {"question": "What is 2 + 2?", "answer": "4", "solution": "Two and two."},
    {"question": "What is 3 + 4?", "answer": "7", "solution": ""},
]


@pytest.fixture(scope="module")
def outside(tmp_path_factory):
    """A task of files and workers, which knows hints and references."""
    folder = tmp_path_factory.mktemp("outside")
    options = {"max_trace_tokens": 64, "reference": "{answer}"}
    return test_text_hints.task(folder, RECORDS, **options)


@pytest.fixture(scope="module")
def inside(outside):
    return callbacks.inside(outside)


def ids(task):
    return np.arange(LANES * B, dtype=np.int32).reshape(LANES, B) % task.num_prompts


def same(mapped, each):
    """Whether lanes of a program are what the host gives one after the other."""
    stacked = jax.tree.map(lambda *leaves: np.stack(leaves), *each)
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(mapped), stacked)
    assert jax.tree.leaves(stacked)


def test_a_program_reads_the_prompts_that_the_host_reads(inside, outside):
    assert inside.on_device
    assert not inside.in_files
    for name in ("prompts", "held_out"):
        number = ids(outside) % outside.num_held_out
        mapped = jax.jit(jax.vmap(getattr(inside, name)))(number)
        same(mapped, [*map(getattr(outside, name), number)])


@pytest.mark.parametrize("of", ["traces", "reference", "solution", "writing_contexts"])
def test_a_program_reads_what_the_host_knows_of_prompts(inside, outside, of):
    def told(task, prompts):
        if of == "traces":
            return task.traces(jax.random.key(0), prompts)
        return getattr(task if of == "reference" else task.hinting, of)(prompts)

    def mapped(ids):
        return told(inside, inside.prompts(ids))

    each = [told(outside, outside.prompts(lane)) for lane in ids(outside)]
    same(jax.jit(jax.vmap(mapped))(ids(outside)), each)
    constant = mapped(ids(outside)[0])
    assert all(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(constant))


def test_contexts_of_traces_are_read_without_a_key(outside):
    contexts = outside.hinting.writing_contexts
    told = dataclasses.replace(outside, trace_contexts=lambda _, asked: contexts(asked))
    made, number = callbacks.inside(told), ids(outside)
    key = jax.random.key(0)
    mapped = jax.jit(jax.vmap(lambda n: made.trace_contexts(key, made.prompts(n))))
    same(mapped(number), [contexts(outside.prompts(lane)) for lane in number])


def test_a_program_hints_as_the_host_does(inside, outside):
    def hinted(task, prompts):
        tokens, mask = task.hinting.solution(prompts)
        heads = tokens[:, None], mask[:, None]
        read = task.hinting.parse(prompts, tokens, mask)
        leaks = task.hinting.leaks(prompts, *heads)
        return task.hinting.wrap(*heads), leaks, read

    def mapped(ids):
        return hinted(inside, inside.prompts(ids))

    each = [hinted(outside, outside.prompts(lane)) for lane in ids(outside)]
    assert any(leaks.any() for _, leaks, _ in each)
    same(jax.jit(jax.vmap(mapped))(ids(outside)), each)


def test_a_program_asks_the_grader_of_the_host(inside, outside):
    prompts = outside.prompts(ids(outside)[0])
    tokens, mask = outside.reference(prompts)
    tokens = np.stack([tokens, np.roll(tokens, 1, 0)])
    mask = np.stack([mask, np.roll(mask, 1, 0)])
    mask[1, -1] = False  # there is no such row
    target = np.stack([prompts.target] * LANES)
    found = jax.jit(jax.vmap(inside.verify))(target, tokens, mask)
    lanes = zip(tokens, mask, strict=True)
    asked = [[t[m] for t, m in zip(*lane, strict=True)] for lane in lanes]
    each = np.stack(
        [reward.of_completions(outside, prompts.target, lane).outcome for lane in asked]
    )
    each[1, -1] = np.nan
    np.testing.assert_array_equal(found, each.astype(np.float32))
    assert found.dtype == jnp.float32
    assert set(each[0]) == {1.0}
    assert 0 in each[1]


def test_what_a_grader_does_not_say_is_missing(caplog):
    def moody(target, tokens):
        if target == 1:
            raise RuntimeError("not today")
        return None if target == 2 else tokens.sum() / 10

    task = dataclasses.replace(mastermind.task(), environment=None)
    task = callbacks.inside(
        dataclasses.replace(task, on_device=False, verify=moody, verify_all=None)
    )
    tokens = jnp.array([[1, 2], [1, 2], [1, 2], [3, 4]])
    mask = jnp.array([[True, True]] * 3 + [[True, False]])
    found = jax.jit(task.verify)(jnp.arange(4), tokens, mask)
    np.testing.assert_allclose(found, [0.3, np.nan, np.nan, 0.3], rtol=1e-6)
    assert "not today" in caplog.text


def test_what_needs_nothing_of_the_host_stays():
    task = mastermind.task()
    changed = callbacks.inside(task)
    fields = [field.name for field in dataclasses.fields(task)]
    assert all(getattr(task, name) is getattr(changed, name) for name in fields)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (
            {"environment": HostEnvironment(answer=list, measures=())},
            "task.environment is asked from the host, for one run at a time",
        ),
        (
            {"terms": Terms(weights={}, outcome="right", verify_all=dict)},
            "the reward of the task has several terms",
        ),
    ],
)
def test_what_a_program_cannot_call_is_said(outside, changes, said):
    with pytest.raises(ValueError, match=said):
        callbacks.inside(dataclasses.replace(outside, **changes))
