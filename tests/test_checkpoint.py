import contextlib
import dataclasses
import errno
import os
import re
import shutil
import threading
import time
from functools import partial
from unittest.mock import Mock

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from outputs import message
from test_folder import files_of_at_most

from curax.config import ConfigError
from curax.runs import alarms, checkpoint
from curax.types import PromptMemory, TrainState


def state(seed=0):
    params = {
        "head": jax.random.normal(jax.random.key(seed), (8, 4)),
        "bias": jnp.ones(3),
    }
    return TrainState(
        params=params,
        opt_state=optax.adam(0.1).init(params),
        reference=None,
        memory=PromptMemory(
            draws=jnp.arange(16.0),
            solved=jnp.zeros(16),
            square=jnp.ones(16),
            tokens=jnp.ones(16),
        ),
        position=jnp.int32(2**31 - 1),
        step=jnp.int32(3),
        seed=jnp.uint32(2**32 - 1),
    )


@pytest.fixture
def opened(tmp_path):
    checkpoints = checkpoint.Checkpoints(tmp_path / "saved", keep=2)
    yield checkpoints
    checkpoints.close()


def like(tree):
    return jax.eval_shape(lambda: tree)


def assert_identical(got, want):
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for mine, theirs in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert mine.dtype == theirs.dtype
        np.testing.assert_array_equal(mine, theirs)


def test_what_is_restored_is_what_was_saved(opened):
    totals = {"rollout/tokens": [2**53 + 1, 3], "update/count": 7}
    opened.save(3, state(), totals)
    got, counted = opened.restore(3, like(state()))
    assert_identical(got, state())
    assert counted == totals


def test_frozen_parameters_are_not_saved_and_must_be_those_of_before(opened):
    frozen = {"base": jnp.arange(6.0)}
    whole = dataclasses.replace(state(), frozen=frozen)
    for step in (2, 4):
        opened.save(step, whole, {})
    got, _ = opened.restore(4, like(whole))
    assert_identical(got, state())

    def with_base(base):
        return lambda state: dataclasses.replace(state, frozen={"base": base})

    found = opened.newest(like(whole), None, with_base(jnp.arange(6.0)))
    assert found is not None
    assert_identical(found.state, whole)
    half = with_base(jnp.arange(6, dtype=jnp.bfloat16))  # the same numbers
    assert opened.newest(like(whole), None, half) is not None
    with pytest.raises(checkpoint.OtherBaseError, match="not trained differ from"):
        opened.newest(like(whole), None, with_base(jnp.arange(6.0) + 1))


def test_totals_are_whole_numbers_of_each_seed_since_step_0():
    totals, seeds = alarms.Totals(), np.zeros(2)
    assert totals.add({}, seeds) == {"rollout/tokens": [0, 0], "update/count": [0, 0]}
    row = {"rollout/tokens": np.float32([2**24, 1]), "update/count": np.ones(2)}
    for _ in range(3):
        totals.add({**row, "loss/mean": np.ones(2)}, seeds)
    assert totals.add(row, seeds)["rollout/tokens"] == [2**26, 4]
    assert alarms.Totals(**dataclasses.asdict(totals)) == totals


def test_a_checkpoint_is_that_of_its_step_and_of_its_run(tmp_path):
    def opened(seed, folder="saved"):
        about = {"seed": seed, "loss.low": 0.2}
        path = tmp_path / folder
        return checkpoint.Checkpoints(path, keep=9, about=about)

    for seed, name in ((1, "saved"), (2, "other")):
        with contextlib.closing(opened(seed, name)) as saved:
            for step in (2, 4):
                saved.save(step, state(step), {})
    shutil.copytree(tmp_path / "saved" / "2", tmp_path / "saved" / "6")
    shutil.copytree(tmp_path / "other" / "4", tmp_path / "saved" / "8")
    with contextlib.closing(opened(1)) as saved:
        for step, said in ((6, "as step 2"), (8, "run, with seed=2 in place of 1")):
            with pytest.raises(checkpoint.DamagedError, match=said):
                saved.restore(step, like(state()))
        found = saved.newest(like(state()))
    assert found is not None
    assert (found.step, {path.name for path in found.skipped}) == (
        4,
        {"6.unreadable", "8.unreadable"},
    )


def test_what_is_in_the_way_of_a_damaged_checkpoint_is_replaced_or_named(
    opened, tmp_path, monkeypatch
):
    opened.save(2, state(), {})
    opened.save(4, state(), {})
    opened.wait()
    folder = tmp_path / "saved"
    shutil.copytree(folder / "2", folder / "6")
    (folder / "6.unreadable").write_text("a file")

    def refuse(*_):
        raise PermissionError(errno.EACCES, "Permission denied")

    with monkeypatch.context() as patched:
        patched.setattr(checkpoint.os, "replace", refuse)
        opened._manager.reload()
        with pytest.raises(checkpoint.NotSavedError, match=r"6 cannot be renamed to"):
            opened.newest(like(state()))
    found = opened.newest(like(state()))
    assert found is not None
    assert found.step == 4
    assert (folder / "6.unreadable").is_dir()


def test_the_latest_are_kept(opened, tmp_path):
    assert opened.latest() is None
    for step in (0, 2, 4, 10):
        opened.save(step, state(step), {})
    opened.wait()
    assert (opened.latest(), opened.best()) == (10, None)
    assert there(tmp_path) == {4, 10}
    assert_identical(opened.restore(4, like(state()))[0], state(4))


def there(tmp_path):
    return {int(path.name) for path in (tmp_path / "saved").iterdir()}


SCORES = {0: 0.5, 2: 0.9, 4: 0.1, 5: 0.9, 6: None, 8: float("nan"), 9: 0.3}


def test_the_best_is_kept_beside_the_latest_also_by_the_next_run(tmp_path):
    for upto, kept in ((4, {2, 4}), (5, {4, 5}), (9, {5, 8, 9})):
        checkpoints = checkpoint.Checkpoints(tmp_path / "saved", keep=2)
        for step, score in SCORES.items():
            if (checkpoints.latest() or -1) < step <= upto:
                checkpoints.save(step, state(step), {}, score=score)
        checkpoints.close()
        assert there(tmp_path) == kept
        assert checkpoints.best() == (5 if upto > 4 else 2)


def test_state_and_totals_may_change_as_soon_as_they_are_being_saved(opened):
    overwrite = jax.jit(
        lambda tree: jax.tree.map(lambda x: x + jnp.ones_like(x), tree),
        donate_argnums=0,
    )
    mine, totals = jax.jit(state)(), {"update/count": [0]}
    for step in range(20):
        opened.save(step, mine, totals)
        want = jax.device_get(jax.tree.map(jnp.copy, mine))
        mine = overwrite(mine)
        totals["update/count"][0] += 1
    opened.wait()
    got, counted = opened.restore(19, like(state()))
    assert_identical(got, want)
    assert counted == {"update/count": [19]}


def test_a_step_that_was_saved_is_not_saved_again(opened):
    opened.save(2, state(), {"update/count": 1})
    opened.save(2, state(5), {"update/count": 2})
    got, totals = opened.restore(2, like(state()))
    assert_identical(got, state())
    assert totals == {"update/count": 1}


def test_the_latest_step_is_found_without_touching_the_folder(opened, tmp_path):
    folder = tmp_path / "saved"
    assert checkpoint.latest(tmp_path / "none") is None
    assert not (tmp_path / "none").exists()
    assert checkpoint.latest(folder) is None
    opened.save(2, state(), {})
    opened.save(12, state(), {})
    opened.wait()
    (folder / "14.orbax-checkpoint-tmp-1").mkdir()  # what a killed run leaves behind
    assert checkpoint.latest(folder) == 12
    again = checkpoint.Checkpoints(folder, keep=2)
    assert again.latest() == 12
    again.close()


def over(devices):
    """Rows of the parameters over devices, the rest on all of them."""
    mesh = Mesh(np.array(jax.devices()[:devices]), ("fsdp",))
    return jax.tree.map(
        lambda x: NamedSharding(
            mesh, PartitionSpec("fsdp") if x.shape[:1] == (8,) else PartitionSpec()
        ),
        state(),
    )


@pytest.mark.first(1)
@pytest.mark.parametrize(("saved", "restored"), [(8, None), (None, 8), (8, 4)])
def test_a_run_moves_to_another_number_of_devices(opened, saved, restored):
    original = state() if saved is None else jax.device_put(state(), over(saved))
    opened.save(1, original, {})
    where = restored and over(restored)
    got, _ = opened.restore(1, like(state()), where)
    assert_identical(got, state())
    devices = {len(leaf.sharding.device_set) for leaf in jax.tree.leaves(got)}
    assert devices == {restored or 1}


# What cannot be read, what cannot be written


def spoil(path, number):
    """Damage the data of a checkpoint, or a file that nothing goes without."""
    if number < 2:
        for file in (path / "state").rglob("d/*"):
            data = file.read_bytes()
            cut, flipped = data[: len(data) // 2], bytes(byte ^ 16 for byte in data)
            file.write_bytes(flipped if number else cut)
    elif number == 2:
        (path / "state" / "_METADATA").write_text("{")
    elif number == 3:
        (path / "totals" / "metadata").unlink()
    else:
        told = (path / "totals" / "metadata").read_text()
        (path / "totals" / "metadata").write_text(told.replace("7", "8"))


@pytest.mark.first(2)
@pytest.mark.parametrize("number", range(5))
def test_a_damaged_checkpoint_is_passed_over_and_kept(opened, tmp_path, number):
    assert opened.newest(like(state())) is None
    for step in (3, 5):
        opened.save(step, state(step), {"update/count": 7})
    opened.wait()
    found = opened.newest(like(state()))
    assert found is not None
    assert (found.step, found.totals) == (5, {"update/count": 7})
    assert not found.skipped
    path = tmp_path / "saved" / "5"
    spoil(path, number)
    found = opened.newest(like(state()))
    assert found.step == opened.latest() == 3
    assert_identical(found.state, state(3))
    assert list(found.skipped) == [path.with_name("5.unreadable")]
    opened.save(5, state(6), {})
    opened.wait()
    assert_identical(opened.newest(like(state())).state, state(6))


@pytest.mark.long
@pytest.mark.parametrize("times", [20, pytest.param(60, marks=pytest.mark.long)])
def test_a_flipped_bit_is_found_out_or_does_no_harm(opened, tmp_path, times):
    totals = {"update/count": 7}
    opened.save(1, state(), totals)
    opened.wait()
    path = tmp_path / "saved" / "1"
    files = [one for one in path.rglob("*") if one.is_file() and one.stat().st_size]
    values = path / "state" / "manifest.ocdbt", path / "totals" / "metadata"
    values += tuple((path / "state" / "d").iterdir())  # with a sum of what they hold
    files = [*values, *sorted(set(files) - set(values))]
    random, refused = np.random.default_rng(0), set()
    for number in range(times):
        file = files[number % len(files)]
        whole = file.read_bytes()
        data = bytearray(whole)
        data[random.integers(len(data))] ^= 1 << random.integers(8)
        file.write_bytes(data)
        try:
            got, counted = opened.restore(1, like(state()))
            assert_identical(got, state())
            assert counted == totals
        except checkpoint.DamagedError:
            refused.add(file)
        file.write_bytes(whole)
    assert refused.issuperset(values)


def test_a_state_of_other_shapes_is_told_by_the_first_array_that_differs(
    opened, tmp_path
):
    folder = tmp_path / "saved"
    checkpoint.check_shapes(folder, like(state()))  # there is none yet
    for step in (3, 5):
        opened.save(step, dataclasses.replace(state(), frozen=jnp.ones(2)), {})
    opened.wait()
    checkpoint.check_shapes(folder, like(state()))
    states = []
    for name, leaf, was, now in (
        ("head", jnp.ones((8, 6)), "float32[8, 4]", "float32[8, 6]"),
        ("bias", jnp.ones(3, jnp.bfloat16), "float32[3]", "bfloat16[3]"),
        ("more", jnp.ones(()), "missing", "float32[]"),
    ):
        other = dataclasses.replace(state(), params=state().params | {name: leaf})
        said = message(ConfigError, checkpoint.check_shapes, folder, like(other))
        assert said.startswith(f"params.{name} is {was} in {folder}/5 and {now} now; ")
        states.append(other)
    spoil(folder / "5", 2)  # of which nothing is known
    checkpoint.check_shapes(folder, like(state()))
    for other in states:
        with pytest.raises(ConfigError, match=f" in {folder}/3 and "):
            checkpoint.check_shapes(folder, like(other))


def test_where_none_can_be_read_nothing_is_renamed(opened, tmp_path):
    for step in (3, 5):
        opened.save(step, state(), {})
    opened.wait()
    for step in (3, 5):
        spoil(tmp_path / "saved" / str(step), 2)
    said = message(checkpoint.DamagedError, opened.newest, like(state()))
    assert re.fullmatch(rf"{tmp_path}/saved/5 \(\w+\)", said)
    assert there(tmp_path) == {3, 5}
    opened.clear()
    assert opened.newest(like(state())) is None


@pytest.mark.first(1)
@pytest.mark.parametrize("late", [False, True])
def test_a_disk_without_room_is_told_and_the_checkpoint_before_stays(tmp_path, late):
    opened = checkpoint.Checkpoints(tmp_path / "saved", keep=1)
    opened.save(1, state(1), {})
    opened.wait()
    sentence = rf"{tmp_path}/saved cannot be written \(File too large\)"
    noise = jax.random.normal(jax.random.key(0), (90_000,))
    large = dataclasses.replace(state(2), reference=noise)
    with files_of_at_most(50_000):
        opened.save(2, large, {})
        with pytest.raises(checkpoint.NotSavedError, match=f"^{sentence}$"):
            (partial(opened.save, 3, state(3), {}) if late else opened.wait)()
    opened.close()
    for _ in range(50):  # writers of the failed save may go on for a moment
        again = checkpoint.Checkpoints(tmp_path / "saved", keep=1)
        assert again.newest(like(state())).step == 1
        again.close()
        names = {path.name for path in (tmp_path / "saved").iterdir()}
        if names == {"1"}:
            break
        time.sleep(0.1)
    assert names == {"1"}


def test_where_no_folder_can_be_made_no_thread_waits_for_it(tmp_path, monkeypatch):
    opened = checkpoint.Checkpoints(tmp_path / "saved", keep=1)
    full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    monkeypatch.setattr(os, "mkdir", Mock(side_effect=full))
    with pytest.raises(checkpoint.NotSavedError, match=r"\(No space left on device\)$"):
        opened.save(1, state(), {})
    opened.close()
    waiting = [one for one in threading.enumerate() if "Signal" in type(one).__name__]
    for one in waiting:
        one.join(5.0)
    assert not any(one.is_alive() for one in waiting)


# Fingerprints


def naive_mix(x):
    for multiplier in (0x7FEB352D, 0x846CA68B):
        x = (x ^ x >> 16) * multiplier % 2**32
    return x ^ x >> 16


def naive_fingerprint(tree):
    total = 0
    for number, leaf in enumerate(jax.tree.leaves(jax.device_get(tree)), 1):
        words = np.array(leaf)
        words = words.view(f"u{words.dtype.itemsize}")
        for place, word in np.ndenumerate(words):
            h = number
            for i in place:
                h = (naive_mix(h) + i) % 2**32
            total += naive_mix(int(word) ^ naive_mix(h))
    return total % 2**32


def test_a_fingerprint_is_its_definition_however_it_is_sharded():
    want = naive_fingerprint(state())
    assert checkpoint.fingerprint(state()) == want
    assert checkpoint.fingerprint(jax.device_put(state(), over(8))) == want


@pytest.mark.first(1)
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.int8, bool])
def test_a_fingerprint_changes_with_every_bit_and_every_move(dtype):
    values = jax.random.normal(jax.random.key(0), (6, 5)) * 3
    values = values > 0 if dtype is bool else values.astype(dtype)
    known = {checkpoint.fingerprint((values, values))}
    moved = [values.T.reshape(6, 5), values[::-1], jnp.roll(values, 1, 1)]
    if dtype is not bool:
        width = values.dtype.itemsize
        word = {1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32}[width]
        bits = jax.lax.bitcast_convert_type(values, word)
        for bit in range(8 * width):
            flip = jnp.asarray(1 << bit, word)
            flipped = bits.at[bit % 6, bit % 5].set(bits[bit % 6, bit % 5] ^ flip)
            moved.append(jax.lax.bitcast_convert_type(flipped, dtype))
    for other in moved:
        known.add(checkpoint.fingerprint((other, values)))
        known.add(checkpoint.fingerprint((values, other)))
    assert len(known) == 1 + 2 * len(moved)
