"""Metrics: parts put together are the whole; each is what its name says."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import tiny
from contracts import close

from curax.arrays import grids, metrics
from curax.arrays.metrics import Tally

SHAPE = (3, 4)
of_rollouts = jax.jit(metrics.of_rollouts)


def graded():
    """Rollouts with outcomes, two of them missing."""
    rows = tiny.drawn()
    outcome = np.float32([1, 1, 1, 0, 0, np.nan, 0, 0.5, np.nan, np.nan])
    grid = grids.grid(jnp.asarray(outcome), grids.index(rows, SHAPE), fill=np.nan)
    return rows, outcome, np.asarray(grid)


def tally(rows, outcome, grid):
    exists = ~np.isnan(grid)
    return of_rollouts(rows, np.where(exists, grid, 0), exists, graded=outcome)


def test_outcomes_outside_their_range_are_counted_in_pilots_too():
    """And those of rows that do not exist are not."""
    rows, outcome, _ = graded()
    outcome = np.where(np.asarray(rows.exists), outcome, 7)
    outcome[:2] = -0.5, 1.5
    got = metrics.of_pilots(rows, jnp.asarray(outcome)).counts
    assert got["outcome/out_of_range"] == 2
    assert got["outcome/missing"] == 1
    assert got["pilot/drawn"] == got["rollout/drawn"] == 8


def test_rollout_metrics_are_what_their_names_say():
    rows, outcome, grid = graded()
    got = metrics.finish(tally(rows, outcome, grid))
    rows = jax.device_get(rows)
    length = rows.mask.sum(-1)[rows.exists]
    want = {
        "outcome/mean": np.nanmean(outcome),
        # Solved, failed and mixed; of the last group one outcome is missing.
        "group/dead_fraction": 2 / 3,
        "group/solved_fraction": 1 / 3,
        "group/failed_fraction": 1 / 3,
        "rollout/length_tokens": length.mean(),
        "rollout/unfinished_fraction": 1 - rows.finished[rows.exists].mean(),
        "policy/entropy_nats": rows.entropy[rows.mask].mean(),
        "rollout/drawn": 8,
        "rollout/tokens": length.sum(),
        "outcome/missing": 1,
        "outcome/out_of_range": 0,
    }
    assert set(got) == set(want)
    for name, value in want.items():
        close(got[name], value, err_msg=name)
        assert got[name].dtype == jnp.float32
        assert got[name].shape == ()


def test_merged_parts_are_the_whole():
    rows, outcome, grid = graded()

    def part(prompts):
        mine = np.isin(rows.prompt, prompts)
        some = dataclasses.replace(
            rows, exists=rows.exists & mine, mask=rows.mask & mine[:, None]
        )
        place = np.isin(np.arange(3), prompts)[:, None]
        return tally(some, outcome, np.where(place, grid, np.float32(np.nan)))

    whole = metrics.finish(tally(rows, outcome, grid))
    for parts in ([[0], [1, 2]], [[2], [0, 1]], [[], [0, 1, 2]]):
        merged = metrics.finish(metrics.merge(*map(part, parts)))
        jax.tree.map(close, merged, whole)


def test_a_mean_counts_by_weight_and_not_by_part():
    where = np.array([True, True, True, False])
    many = Tally(means={"x": metrics.mean(np.float32([1, 2, 3, 9]), where)}, counts={})
    few = Tally(means={"x": metrics.one(np.float32(10))}, counts={})
    close(metrics.finish(metrics.merge(many, few))["x"], 4)


def test_a_mean_over_nothing_is_nan_and_adds_nothing():
    none = np.zeros(2, bool)
    poison = np.float32([np.nan, 5])
    empty = Tally(
        means={"x": metrics.mean(poison, none)}, counts={"n": metrics.count(none)}
    )
    assert np.isnan(metrics.finish(empty)["x"])
    assert metrics.finish(empty)["n"] == 0
    some = Tally(means={"x": metrics.one(np.float32(3))}, counts={"n": jnp.float32(2)})
    got = metrics.finish(metrics.merge(empty, some))
    assert (got["x"], got["n"]) == (3, 2)


def test_joined_parts_keep_all_their_names():
    a = Tally(means={"x": metrics.one(np.float32(1))}, counts={"n": jnp.float32(2)})
    b = Tally(means={"y": metrics.one(np.float32(3))}, counts={"m": jnp.float32(4)})
    got = metrics.finish(metrics.join(a, b))
    assert {name: float(v) for name, v in got.items()} == {
        "x": 1,
        "y": 3,
        "n": 2,
        "m": 4,
    }
