"""The difficulty memory as a file, and runs that begin with that of another run."""

import hashlib
import json
import os
import shutil
import signal
import struct
import time
from dataclasses import fields, replace
from functools import partial

import hypothesis.extra.numpy as hnp
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import small
import test_train
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import NamedSharding, PartitionSpec
from outputs import message
from run_files import assert_same_run, state
from test_folder import files_of_at_most, lines
from test_train import call

from curax import memory
from curax.config import ConfigError, Mesh, load, override
from curax.runs import checkpoint, folder, memory_io
from curax.runs.rows import NotWrittenError
from curax.step import loops, mesh
from curax.tasks import chain
from curax.types import PromptMemory, Prompts, TrainState

compiled, quick, signals = test_train.compiled, test_train.quick, test_train.signals

QUESTIONS = ((1, 2, -1), (7,), (7, 7), (1, 2), (5,), (0,), ())
N = len(QUESTIONS)


def task_of(questions, *, width=4, junk=0):
    """A task that asks these, by id."""
    mask = np.array([[i >= width - len(q) for i in range(width)] for q in questions])
    tokens = np.full(mask.shape, junk, np.int32)
    tokens[mask] = [token for question in questions for token in question]

    def prompts(prompt_id):
        return Prompts(
            tokens=jnp.asarray(tokens)[prompt_id],
            mask=jnp.asarray(mask)[prompt_id],
            id=prompt_id,
            target=prompt_id,
        )

    return replace(chain.task(depth=1), num_prompts=len(questions), prompts=prompts)


def key_of(tokens) -> str:
    packed = b"".join(struct.pack("<i", token) for token in tokens)
    return hashlib.blake2b(packed, digest_size=16).hexdigest()


def table(memory):
    """`[4, ..., num_prompts]`"""
    return np.stack([np.asarray(getattr(memory, name)) for name in memory_io.SUMS])


def memory_of(sums):
    return PromptMemory(**dict(zip(memory_io.SUMS, np.float32(sums), strict=True)))


any_sums = st.floats(0, 100, width=32)
whole_sums = st.integers(0, 50).map(float)  # added up without rounding


@st.composite
def memories(draw, shape=(N,), elements=any_sums):
    sums = draw(hnp.arrays(np.float32, (4, *shape), elements=elements))
    sums[1] = np.minimum(sums[0], sums[1])
    return memory_of(np.where(sums[0] > 0, sums, 0.0))


# Keys


def test_a_file_has_every_sum_of_a_memory():
    assert sorted(memory_io.SUMS) == sorted(
        field.name for field in fields(PromptMemory)
    )


def test_a_key_is_a_digest_of_the_tokens():
    got = memory_io.prompt_keys(task_of(QUESTIONS))
    assert got == [key_of(question) for question in QUESTIONS]
    # What b2sum -l 128 says of the same bytes.
    assert got[:2] == [
        "67348348c2e1789da508f7854c02ca4e",
        "99850724010e3222888eeb8478c9ffd3",
    ]


def test_padding_and_what_stands_under_it_do_not_matter():
    want = memory_io.prompt_keys(task_of(QUESTIONS))
    assert memory_io.prompt_keys(task_of(QUESTIONS, width=9, junk=3)) == want


@pytest.mark.parametrize("chunk", [1, 2, 3, N, N + 1])
def test_keys_are_made_in_chunks_of_any_size_by_one_program(monkeypatch, chunk):
    task, traced = task_of(QUESTIONS), []
    made = task.prompts

    def prompts(prompt_id):
        traced.append(prompt_id.shape)
        return made(prompt_id)

    def asked(prompt_id):
        traced.append(prompt_id.tolist())
        return made(prompt_id)

    monkeypatch.setattr(memory_io, "CHUNK", chunk)
    got = memory_io.prompt_keys(replace(task, prompts=prompts))
    assert got == [key_of(question) for question in QUESTIONS]
    assert traced == [(min(chunk, N),)]
    traced.clear()  # a task of files has no prompts beyond its last
    got = memory_io.prompt_keys(replace(task, prompts=asked, in_files=True))
    assert got == [key_of(question) for question in QUESTIONS]
    assert max(map(max, traced)) == N - 1


def test_keys_are_the_same_on_a_mesh_of_eight():
    task = task_of(QUESTIONS)
    with mesh.use(mesh.make(Mesh(data=8))):
        assert memory_io.prompt_keys(task) == [
            key_of(question) for question in QUESTIONS
        ]


# Files


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return tmp_path_factory.mktemp("recall") / "memory.jsonl"


@given(memories())
def test_a_line_tells_one_prompt_that_was_drawn(path, known):
    memory_io.write(path, task_of(QUESTIONS), known)
    want = [
        {"prompt": key_of(question), **dict(zip(memory_io.SUMS, sums, strict=True))}
        for question, sums in zip(QUESTIONS, table(known).T.tolist(), strict=True)
        if sums[0] > 0
    ]
    assert lines(path) == want
    assert [list(line) for line in lines(path)] == [["prompt", *memory_io.SUMS]] * len(
        want
    )


@pytest.mark.long
@given(memories(), st.permutations(range(N)))
def test_a_task_with_other_ids_gets_the_same_sums_for_the_same_questions(
    path, known, order
):
    memory_io.write(path, task_of(QUESTIONS), known)
    asked = [QUESTIONS[i] for i in order]
    got = memory_io.read(path, task_of([*asked, (9, 9)]))
    want = np.concatenate([table(known)[:, list(order)], np.zeros((4, 1))], -1)
    np.testing.assert_array_equal(table(got.memory), want)
    assert all(leaf.dtype == np.float32 for leaf in jax.tree.leaves(got.memory))
    assert got[1:] == (np.sum(known.draws > 0), 0)


@pytest.mark.long
@given(memories())
def test_lines_of_prompts_that_a_task_lacks_are_left_out_and_counted(path, known):
    memory_io.write(path, task_of(QUESTIONS), known)
    got = memory_io.read(path, task_of(QUESTIONS[2:4]))
    np.testing.assert_array_equal(table(got.memory), table(known)[:, 2:4])
    drawn = known.draws > 0
    assert got[1:] == (drawn.sum(), np.delete(drawn, [2, 3]).sum())


@pytest.mark.long
@given(memories(elements=whole_sums))
def test_ids_that_ask_the_same_share_their_sums(path, known):
    asked = [QUESTIONS[i] for i in (0, 1, 0, 2, 1, 0, 3)]
    memory_io.write(path, task_of(asked), known)
    sums = table(known)
    want = np.zeros((4, N))
    for i, question in enumerate(asked):
        for j, other in enumerate(asked):
            want[:, i] += sums[:, j] if question == other else 0.0
    got = memory_io.read(path, task_of(asked))
    np.testing.assert_array_equal(table(got.memory), want)
    assert len({line["prompt"] for line in lines(path)}) == got.lines <= 4


@given(memories(shape=(3, N), elements=whole_sums))
def test_the_sums_of_many_seeds_are_added(path, known):
    memory_io.write(path, task_of(QUESTIONS), known)
    got = memory_io.read(path, task_of(QUESTIONS))
    np.testing.assert_array_equal(table(got.memory), table(known).sum(1))


@pytest.mark.long
@given(memories(elements=whole_sums), memories(elements=whole_sums))
def test_files_can_be_joined_end_to_end(path, one, other):
    text = ""
    for known in (one, other):
        memory_io.write(path, task_of(QUESTIONS), known)
        text += path.read_text() + "\n"
    path.write_text(text)
    got = memory_io.read(path, task_of(QUESTIONS))
    np.testing.assert_array_equal(table(got.memory), table(one) + table(other))


def test_a_memory_that_has_seen_nothing_is_an_empty_file(path):
    task = task_of(QUESTIONS)
    memory_io.write(path, task, memory.forget(N))
    assert path.read_bytes() == b""
    got = memory_io.read(path, task)
    np.testing.assert_array_equal(table(got.memory), table(memory.forget(N)))
    assert got[1:] == (0, 0)


def test_what_is_read_is_what_observing_the_same_would_have_given(path):
    task, number = task_of(QUESTIONS), np.random.default_rng(0)
    known = memory.forget(N)
    for _ in range(3):
        known = memory.observe(
            known,
            jnp.asarray(number.integers(0, N, 4), jnp.int32),
            jnp.asarray(number.integers(0, 2, (4, 5)), jnp.float32),
            jnp.asarray(number.uniform(0, 2, (4, 5)), jnp.float32),
            jnp.asarray(number.integers(1, 9, (4, 5)), jnp.int32),
            jnp.asarray(number.random((4, 5)) < 0.7),
            discount=memory.discount(6.6),
        )
    memory_io.write(path, task, known)
    got = memory_io.read(path, task).memory
    np.testing.assert_array_equal(table(got), table(known))
    ids = jnp.arange(N, dtype=jnp.int32)
    (mine, theirs) = (
        memory.difficulty(m, ids, prior=(1.0, 1.0))
        for m in (jax.tree.map(jnp.asarray, got), known)
    )
    jax.tree.map(np.testing.assert_array_equal, mine, theirs)


def test_sums_that_are_not_finite_are_left_out(path):
    sums = np.ones((4, N))
    sums[2, 1], sums[3, 4] = np.nan, np.inf
    memory_io.write(path, task_of(QUESTIONS), memory_of(sums))
    written = [line["prompt"] for line in lines(path)]
    assert written == [key_of(QUESTIONS[i]) for i in (0, 2, 3, 5, 6)]
    memory_io.read(path, task_of(QUESTIONS))


def test_rounding_does_not_make_a_file_that_cannot_be_read(path):
    sums = np.ones((4, N), np.float32)
    sums[1] = np.nextafter(sums[0], np.float32(2))
    memory_io.write(path, task_of(QUESTIONS), memory_of(sums))
    got = memory_io.read(path, task_of(QUESTIONS))
    np.testing.assert_array_equal(got.memory.solved, np.ones(N))


def test_a_file_for_which_there_is_no_room_is_told_and_the_old_one_stays(tmp_path):
    path, task = tmp_path / "memory.jsonl", task_of(QUESTIONS)
    memory_io.write(path, task, memory_of(np.ones((4, N))))
    before = path.read_bytes()
    other = memory_of(np.full((4, N), 2.0))
    with files_of_at_most(200):
        said = message(NotWrittenError, memory_io.write, path, task, other)
    assert said == f"{path} cannot be written (File too large)"
    assert list(tmp_path.iterdir()) == [path]
    assert path.read_bytes() == before


# Files that cannot be read

GOOD = {"prompt": "0" * 32, "draws": 2, "solved": 1.5, "square": 0.0, "tokens": 4}
WRONG = {
    "{": "not a JSON object",
    "[1]": "not a JSON object",
    '{"prompt": "\xff"': "not a JSON object",
    json.dumps(GOOD)[:-9]: "not a JSON object",
    json.dumps({k: v for k, v in GOOD.items() if k != "prompt"}): "there is no prompt",
    json.dumps({k: v for k, v in GOOD.items() if k != "square"}): "there is no square",
    "[" * 10**5: "not a JSON object",
    **{
        json.dumps(GOOD | {"prompt": key}): f"prompt={json.dumps(key)} must be 32 of "
        "the digits 0-9a-f"
        for key in ("0" * 31, "0" * 33, "0" * 31 + "g", "A" * 32, "0" * 32 + "\n", 7)
    },
    **{
        json.dumps(GOOD | {name: value}): f"{name}={json.dumps(value)} must be a "
        "number from 0 to 1e+30"
        for name, value in (
            *(("draws", "2"), ("draws", None), ("draws", True), ("draws", [2])),
            *(("draws", -1), ("solved", -0.5), ("square", -1e-9), ("tokens", 1e31)),
            *(("draws", float("nan")), ("square", float("inf")), ("tokens", -np.inf)),
        )
    },
    json.dumps(GOOD | {"solved": 2.5}): "solved=2.5 must be at most draws=2",
}


@pytest.mark.parametrize("line", WRONG, ids=lambda line: line[:99])
def test_a_bad_line_is_told_in_a_sentence(tmp_path, line):
    path = tmp_path / "memory.jsonl"
    good = json.dumps(GOOD)
    path.write_bytes(f"{good}\n\n{line}\n{good}\n".encode("latin1"))
    assert message(ConfigError, memory_io.read, path, task_of(QUESTIONS)) == (
        f"memory.load={path}:3: {WRONG[line]}; mend or delete this line."
    )
    path.write_text(f"{good}\n\n{good}")
    assert memory_io.read(path, task_of(QUESTIONS))[1:] == (2, 2)


def test_a_long_value_is_told_in_part(tmp_path):
    path = tmp_path / "memory.jsonl"
    path.write_text(json.dumps(GOOD | {"draws": [0] * 999}))
    said = message(ConfigError, memory_io.read, path, task_of(QUESTIONS))
    assert len(said) < len(str(path)) + 150


@pytest.mark.parametrize("name", ["missing.jsonl", "", "memory.jsonl/x", "pipe"])
def test_a_file_that_is_not_there_is_told_in_a_sentence(tmp_path, name):
    (tmp_path / "memory.jsonl").write_text("")
    os.mkfifo(tmp_path / "pipe")  # which would be waited for
    path = tmp_path / name
    said = message(ConfigError, memory_io.read, path, task_of(QUESTIONS))
    assert said in {
        f"memory.load={path} cannot be read: {reason}; name the memory.jsonl of a run, "
        "or set memory.load to none."
        for reason in (
            *("No such file or directory", "Not a directory"),
            *("it is a folder, not a file", "it is a named pipe, not a file"),
        )
    }


# States


def state_with(memory):
    number = jnp.int32(0)
    return TrainState(
        params=jnp.ones(3),
        opt_state=None,
        reference=None,
        memory=memory,
        position=number,
        step=number,
        seed=jnp.uint32(0),
    )


@pytest.mark.parametrize("seeds", [(), (3,)])
@pytest.mark.parametrize("devices", [1, 8])
def test_a_state_begins_with_the_same_memory_for_all_seeds_and_where_its_own_was(
    seeds, devices
):
    place = jax.devices()[0]
    if devices == 8:
        place = NamedSharding(mesh.make(Mesh(data=8)), PartitionSpec())
    own = memory_of(np.zeros((4, *seeds, N)))
    before = state_with(jax.device_put(own, place))
    sums = np.float32(np.random.default_rng(0).uniform(0, 9, (4, N)))
    got = memory_io.with_memory(before, memory_of(sums))
    want = np.broadcast_to(np.expand_dims(sums, (1,) * len(seeds)), (4, *seeds, N))
    np.testing.assert_array_equal(table(got.memory), want)
    for new, old in zip(*map(jax.tree.leaves, (got, before)), strict=True):
        assert (new.shape, new.dtype) == (old.shape, old.dtype)
        assert (new.sharding, new.committed) == (old.sharding, old.committed)
    np.testing.assert_array_equal(got.params, before.params)


def test_what_was_read_survives_a_step_that_takes_the_state_over():
    sums = np.full((4, 4096), 2.0, np.float32)
    read = memory_of(sums)
    begun = memory_io.with_memory(state_with(jax.tree.map(jnp.zeros_like, read)), read)
    double = jax.jit(partial(jax.tree.map, lambda x: x + x), donate_argnums=0)
    assert (table(double(begun.memory)) == 4.0).all()
    assert (table(read) == 2.0).all()


# Runs

WORDS = ("steps=4", "evaluation.every=4")
SMALL = small.task()
ASKED = jax.jit(SMALL.prompts)(np.arange(SMALL.num_prompts, dtype=np.int32))
KEYS = [key_of(row) for row in np.asarray(ASKED.tokens)]  # none is padded


def saved(workdir, step, *words):
    """The memory in a checkpoint."""
    config = override(load(small.FILE), [*WORDS, *words])
    return state(workdir, step, config)[0].memory


def told(workdir):
    """Key to sums."""
    return {
        line["prompt"]: [line[name] for name in memory_io.SUMS]
        for line in lines(workdir / folder.MEMORY)
    }


def by_key(memory):
    """What `told` should be: sums of ids and of seeds added up."""
    added = dict.fromkeys(KEYS, np.zeros(4))
    sums = table(memory).astype(float).reshape(4, -1, len(KEYS)).sum(1).T
    for key, own in zip(KEYS, sums, strict=True):
        added[key] = added[key] + own
    return {key: sums.tolist() for key, sums in added.items() if sums[0] > 0}


def expected(known):
    """`[4, num_prompts]`: what a run begins with that read what was `told`."""
    return np.array([known.get(key, [0.0] * 4) for key in KEYS], np.float32).T


@pytest.fixture(scope="module")
def first(tmp_path_factory, compiled):
    workdir = tmp_path_factory.mktemp("first") / "run"
    assert call(workdir, *WORDS)[::2] == (0, "")
    return workdir


@pytest.fixture(scope="module")
def source(first, tmp_path_factory):
    """The memory of the first run, and of one prompt more."""
    path = tmp_path_factory.mktemp("source") / "memory.jsonl"
    text = (first / folder.MEMORY).read_text()
    path.write_text(json.dumps(GOOD) + "\n" + text)
    return path


@pytest.fixture(scope="module")
def second(source, tmp_path_factory):
    """A run that began with it, what sets it apart, and what it printed."""
    workdir = tmp_path_factory.mktemp("second") / "run"
    words = ("seed=7", f"memory.load={source}")
    status, out, err = call(workdir, *WORDS, *words)
    assert (status, err) == (0, "")
    return workdir, words, out


def test_a_run_leaves_the_memory_of_its_last_checkpoint(first):
    assert told(first) == by_key(saved(first, 4))
    draws = [draws for draws, *_ in told(first).values()]
    assert 4 <= len(draws) <= 4 * 4
    assert 0 < sum(draws) <= 4 * 16


@pytest.mark.long
def test_a_run_of_another_seed_begins_with_it_and_says_what_was_left_out(
    first, source, second
):
    workdir, words, out = second
    middle = saved(workdir, 2, *words)
    assert (
        f"Warning: 1 of the {len(lines(source))} prompts in memory.load={source} are "
        "not in this task and are left out.\n"
    ) in out
    assert told(workdir) == by_key(saved(workdir, 4, *words)) != by_key(middle)


@pytest.mark.long
def test_a_stopped_run_leaves_it_and_goes_on_with_that_of_its_checkpoint(
    tmp_path, first, source, second, signals
):
    whole, words, _ = second
    workdir, away = tmp_path / "run", tmp_path / "away"
    # A warm start has yet to begin with the file.
    signals("warm", 1, signal.SIGINT)
    assert call(workdir, *WORDS, *words)[0] == 128 + signal.SIGINT
    assert not (workdir / folder.MEMORY).exists()
    source.rename(away)
    status, _, err = call(workdir, *WORDS, *words, resume=True)
    assert (status, err.split(" cannot")[0]) == (2, f"curax.train: {words[1]}")
    away.rename(source)
    signals("advance", 1, signal.SIGTERM)
    assert call(workdir, *WORDS, *words, resume=True)[0] == 128 + signal.SIGTERM
    start, after = (saved(workdir, step, *words) for step in (0, 2))
    np.testing.assert_array_equal(table(start), expected(told(first)))
    assert told(workdir) == by_key(after) != by_key(start)
    # A checkpoint has begun.
    source.rename(away)
    try:
        assert call(workdir, *WORDS, *words, resume=True)[::2] == (0, "")
    finally:
        away.rename(source)
    assert_same_run(workdir, whole, step=4)
    assert told(workdir) == told(whole)


def test_a_run_killed_before_it_has_left_it_is_not_complete(
    tmp_path, first, monkeypatch
):
    workdir = shutil.copytree(first, tmp_path / "run")
    shutil.rmtree(workdir / folder.CHECKPOINTS / "4")
    (workdir / folder.MEMORY).unlink()

    def killed(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(memory_io, "write", killed)
        assert call(workdir, *WORDS, resume=True)[0] == 130
    assert checkpoint.latest(workdir / folder.CHECKPOINTS) == 2
    assert call(workdir, *WORDS, resume=True)[::2] == (0, "")
    assert told(workdir) == told(first)


@pytest.fixture
def untraced(monkeypatch):
    """What is not run need not be traced."""
    monkeypatch.setattr(loops.Loop, "rehearse", lambda self: None)


@pytest.mark.long
def test_all_seeds_begin_with_it_and_leave_the_sum_of_theirs(
    tmp_path, first, source, monkeypatch, untraced
):
    def stopped(self, state):
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(0.2)
        return np.zeros((2, 8)), np.zeros((2, 8)), {}

    monkeypatch.setattr(loops.Loop, "evaluate", stopped)
    words = ("seeds=2", "warm_start=none", f"memory.load={source}")
    assert call(tmp_path / "run", *WORDS, *words)[0] == 128 + signal.SIGTERM
    start, want = table(saved(tmp_path / "run", 0, *words)), expected(told(first))
    np.testing.assert_array_equal(start, np.stack([want, want], axis=1))
    assert told(tmp_path / "run") == by_key(memory_of(start))


@pytest.mark.parametrize("text", ["{", None])
def test_a_bad_file_gets_one_sentence_and_nothing_is_written(tmp_path, untraced, text):
    source, workdir = tmp_path / "memory.jsonl", tmp_path / "run"
    why = " cannot be read: No such file or directory; name the memory.jsonl of a run, "
    why += "or set memory.load to none."
    if text is not None:
        source.write_text(text)
        why = ":1: not a JSON object; mend or delete this line."
    got = call(workdir, *WORDS, f"memory.load={source}")
    assert got == (2, "", f"curax.train: memory.load={source}{why}\n")
    assert not workdir.exists()
