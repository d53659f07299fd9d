"""Runs of the small config: what they left behind, and that two left the same."""

import jax
import numpy as np
import small
from test_folder import events, lines

from curax.config import load
from curax.runs import checkpoint, folder, run


def rows(workdir, name=folder.METRICS):
    """Without times, which are never the same."""
    return [
        {name: value for name, value in row.items() if not name.startswith("time/")}
        for row in lines(workdir / name)
    ]


def state(workdir, step=6, config=None):
    """The train state in a checkpoint, as numpy."""
    config = config or load(small.FILE)
    saved = checkpoint.Checkpoints(workdir / folder.CHECKPOINTS, keep=2)
    like = run.make_loop(config).abstract
    restored, totals = saved.restore(step, like)
    saved.close()
    return jax.device_get(restored), totals


def assert_same_run(got, want, step=6, config=None):
    for name in (folder.METRICS, folder.ROLLOUTS, folder.WARM, folder.ALARMS):
        assert rows(got, name) == rows(want, name), name
    for name in (folder.EVALUATION,):
        assert (got / name).read_text() == (want / name).read_text()
    mine, theirs = (
        {
            key: value
            for key, value in events(path / folder.EVENTS).items()
            if "time/" not in key[1]
        }
        for path in (got, want)
    )
    assert mine == theirs
    jax.tree.map(
        np.testing.assert_array_equal,
        state(got, step, config),
        state(want, step, config),
    )
