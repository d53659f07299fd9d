import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from curax import checkpoint
from curax.types import Memory, TrainState


def state(seed=0):
    params = {
        "head": jax.random.normal(jax.random.key(seed), (8, 4)),
        "bias": jnp.ones(3),
    }
    return TrainState(
        params=params,
        opt_state=optax.adam(0.1).init(params),
        reference=None,
        memory=Memory(draws=jnp.arange(16.0), solved=jnp.zeros(16)),
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


def test_the_latest_are_kept(opened, tmp_path):
    assert opened.latest() is None
    for step in (0, 2, 4, 10):
        opened.save(step, state(step), {})
    assert opened.latest() == 10
    assert {int(p.name) for p in (tmp_path / "saved").iterdir()} == {4, 10}
    assert_identical(opened.restore(4, like(state()))[0], state(4))


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


@pytest.mark.parametrize(("saved", "restored"), [(8, None), (None, 8), (8, 4)])
def test_a_run_moves_to_another_number_of_devices(opened, saved, restored):
    original = state() if saved is None else jax.device_put(state(), over(saved))
    opened.save(1, original, {})
    where = restored and over(restored)
    got, _ = opened.restore(1, like(state()), where)
    assert_identical(got, state())
    devices = {len(leaf.sharding.device_set) for leaf in jax.tree.leaves(got)}
    assert devices == {restored or 1}
