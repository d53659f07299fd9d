"""A draw one step ahead: what a step trains on, whichever loop makes it, and when."""

import threading
from dataclasses import replace
from functools import lru_cache, partial
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import pytest
from outputs import message
from test_loops import STEPS, STOPPED, TINY, assert_same, trained, warmed

from curax import allocate, library, memory, score
from curax.config import ConfigError, Mesh, Pilot, override
from curax.planning import chips, planner
from curax.runs import dry_run, memory_io
from curax.step import ahead, draw, drivers, loops
from curax.step import mesh as meshes
from curax.step.build import build
from curax.step.learn import learn
from curax.step.step import completions
from curax.step.types import Method
from curax.tasks import chain

# Six prompts, of which a step takes four: each step meets prompts of the one before.
AHEAD = override(
    TINY,
    [
        "sampling.ahead=1",
        "sampling.off_policy=off_policy.truncated_ratio",
        "task.num_prompts=6",
        "memory.half_life=2",
    ],
)
HOST = override(AHEAD, ["task.on_device=false"])
PILOTS = replace(
    AHEAD,
    sampling=replace(AHEAD.sampling, group_size=8, budget=24),
    pilot=Pilot(draws=2, norm=score.logits),
    allocate=partial(allocate.gvm, least=1),
)
STOPS = override(STOPPED, ["sampling.ahead=1", "sampling.off_policy=off_policy.none"])


@lru_cache
def reference():
    return trained(AHEAD)


def test_a_step_trains_on_what_the_policy_before_the_last_update_drew():
    """By hand: states are kept, each draw is made by the one before, and is learnt."""
    parts = build(AHEAD)
    drive = drivers.Traced()
    drawn_by = jax.jit(lambda state: completions(drive, parts, state)[1])
    learnt = jax.jit(partial(learn, parts))
    observed = jax.jit(partial(draw.observe, parts))
    begun = loops.Jitted(parts).begin(jax.device_put(warmed(1)))

    def made(lag):
        """The state and metrics of steps whose draws are so many updates behind."""
        states, rows = [replace(begun, behaviour=None)], []
        for step in range(STEPS):
            state, by = states[-1], states[max(step - lag, 0)]
            own = replace(by, step=state.step, position=state.position)
            drawn = drawn_by(own)
            now = observed(state.memory, drawn.prompts, drawn.groups)
            state, (values, shown) = learnt(state, replace(drawn, memory=now))
            states.append(state)
            rows.append(values)
            assert np.all(shown.version == step)  # of a draw at once
        return jax.device_get(states[-1]), rows

    want, metrics = reference()
    state, rows = made(lag=1)
    rows = [
        row | {k: v for k, v in more.items() if "lag" in k or "time" in k}
        for row, more in zip(rows, metrics, strict=True)
    ]
    assert_same((state, rows), (want, metrics))
    same = jax.tree.map(np.array_equal, want.params, made(lag=0)[0].params)
    assert not all(jax.tree.leaves(same))


def at_once():
    return override(AHEAD, ["sampling.ahead=0"])


@pytest.mark.long
def test_nothing_lags_in_the_first_step_and_one_step_in_the_others():
    lags = [(row["sampler/lag_mean"], row["sampler/lag_max"]) for row in reference()[1]]
    assert lags == [(0, 0), *[(1, 1)] * (STEPS - 1)]
    drift = [row["sampler/drift_nats"] for row in reference()[1]]
    assert drift[0] < 1e-4 < min(drift[1:])
    loop = loops.Staged(build(AHEAD))
    _, _, shown = loop.advance(loop.begin(jax.device_put(warmed(1))), STEPS)
    versions = [set(one.version[one.exists]) for one in shown]
    assert versions == [{0}, {0}, {1}, {2}]


@pytest.mark.parametrize(
    ("config", "alike"),
    [
        pytest.param(AHEAD, AHEAD, marks=pytest.mark.long),
        (HOST, AHEAD),
        pytest.param(
            override(HOST, ["sampling.chunks=4"]), AHEAD, marks=pytest.mark.long
        ),
        pytest.param(
            override(STOPS, ["task.on_device=false"]), STOPS, marks=pytest.mark.long
        ),
        pytest.param(PILOTS, PILOTS, marks=pytest.mark.long),
        pytest.param(
            replace(AHEAD, mesh=Mesh(data=2, fsdp=2, tensor=2)),
            AHEAD,
            marks=pytest.mark.long,
        ),
    ],
    ids=["device", "host", "chunks", "rounds", "pilots", "eight devices"],
)
def test_what_runs_beside_the_update_is_what_one_program_computes(config, alike):
    want = reference() if alike is AHEAD else trained(alike)
    got = trained(config, loops.Staged, (1, 2, 1))
    assert_same(got, want)
    assert all(0 <= row["time/hidden_fraction"] < 1 for row in got[1])


@pytest.mark.long
def test_devices_of_their_own_draw_what_those_that_train_would():
    """Bit for bit what one mesh of that size does, and as exactly resumed."""
    apart = replace(HOST, mesh=Mesh(data=2, draw_share=0.5))
    warmed(1)
    loop, other = (loops.Staged(build(apart)) for _ in range(2))
    assert_same(trained(apart, loops.Staged, (1, 2, 1)), reference())
    with loop.context():
        state = loop.begin(jax.device_put(warmed(1), loop.warm_sharding))
        for _ in range(2):  # of what is copied nothing is used up
            state, rows, _ = loop.advance(state, 1)
            trains, draws = map(devices, (state.params, state.behaviour))
            assert (trains, draws) == ({0}, {1})
        assert rows[0]["sampler/lag_mean"] == 1
        saved = jax.tree.map(np.array, jax.device_get(state))
        want = jax.device_get(loop.advance(state, 2)[0])
    with other.context():
        got = other.advance(jax.device_put(saved, other.sharding), 2)[0]
        jax.tree.map(np.testing.assert_array_equal, jax.device_get(got), want)


def devices(tree):
    return {device.id for leaf in jax.tree.leaves(tree) for device in leaf.devices()}


@pytest.mark.parametrize(
    ("data", "share", "near"), [(4, 0.3, "0.25"), (4, 1.0, "0.75"), (3, 0.1, "0.333")]
)
def test_a_share_is_a_whole_number_of_devices(data, share, near):
    with pytest.raises(ConfigError, match=rf"mesh\.data={data}.*; set it to {near}"):
        meshes.split(Mesh(data=data, draw_share=share))
    made = meshes.split(Mesh(data=data, draw_share=float(near)))
    assert made.draw.size == round(data * float(near))
    with pytest.raises(ConfigError, match=r"set mesh\.data to 2 or more"):
        meshes.split(Mesh(fsdp=2, draw_share=0.5))


def test_a_mesh_is_cut_along_the_data_axis():
    made = meshes.split(Mesh(data=4, fsdp=2, draw_share=0.25))
    assert (made.train.size, made.draw.size) == (6, 2)
    assert made.draw.shape == {"data": 1, "fsdp": 2, "tensor": 1}
    ids = [{device.id for device in one.devices.flat} for one in made]
    assert not ids[0] & ids[1]


@pytest.mark.parametrize(
    ("words", "fix"),
    [
        (["mesh.draw_share=.5"], "set sampling.ahead to 1 or mesh.draw_share to None"),
        (["sampling.ahead=1", "mesh.draw_share=.5", "seeds=2"], "set seeds to 1"),
    ],
)
def test_where_no_devices_can_draw_by_themselves(words, fix):
    weighed = "sampling.off_policy=off_policy.truncated_ratio"
    with pytest.raises(ConfigError, match=fix):
        override(TINY, [weighed, *words])


@pytest.mark.long
def test_a_state_that_is_read_again_draws_again_what_was_under_way():
    """Bit for bit, by another loop: the state has all that the draw began from."""
    loop, other = (loops.Staged(build(HOST)) for _ in range(2))
    state, _, _ = loop.advance(loop.begin(jax.device_put(warmed(1))), 2)
    saved = jax.tree.map(np.array, jax.device_get(state))
    want = jax.device_get(loop.advance(state, 2)[0])
    got = jax.device_get(other.advance(jax.device_put(saved), 2)[0])
    jax.tree.map(np.testing.assert_array_equal, got, want)


@pytest.mark.long
def test_the_next_draw_has_begun_before_this_one_is_graded():
    begun = [threading.Event() for _ in range(STEPS + 1)]
    graded = []

    def task(**options):
        made = chain.task(**options)

        def verify_all(targets, completions):
            step = len(graded)  # the first is made before anything else
            assert not 1 <= step < STEPS - 1 or begun[step + 1].wait(60)
            graded.append(step)
            pairs = zip(targets, completions, strict=True)
            return [made.verify(target, tokens) for target, tokens in pairs]

        return replace(made, verify_all=verify_all)

    parts = build(replace(HOST, task=partial(task, **HOST.task.keywords)))
    loop = loops.Staged(parts)
    jitted = loop._drive.jitted

    def spied(function, parts, **options):
        program = jitted(function, parts, **options)
        if function is not draw.ask:
            return program

        def call(state, *args):
            begun[int(state.step)].set()
            return program(state, *args)

        return call

    loop._drive.jitted = spied
    _, rows, _ = loop.advance(loop.begin(jax.device_put(warmed(1))), STEPS)
    assert graded == [*range(STEPS)]
    assert not begun[STEPS].is_set()  # there is no step to draw for
    assert sum(row["rollout/drawn"] for row in rows) == 16 * STEPS


@pytest.mark.long
@pytest.mark.parametrize("pilots", [False, True])
def test_memory_is_what_observing_the_present_one_gives(pilots):
    """As if what was drawn had been seen by the memory that it meets."""
    parts = build(AHEAD)
    drive = drivers.Traced()
    state = loops.Jitted(parts).begin(jax.device_put(warmed(1)))

    def observed(sums, drawn):
        if pilots:
            sums = draw.observe(parts, sums, drawn.prompts, drawn.groups)
        return draw.observe(parts, sums, drawn.prompts, drawn.groups, again=pilots)

    @jax.jit
    def both(before, now):
        own = replace(state.behaviour, memory=before)
        _, drawn = completions(drive, parts, ahead.of_step(state))
        drawn = replace(drawn, memory=observed(before, drawn))
        met = ahead.met(parts, replace(state, behaviour=own, memory=now), drawn)
        return met.memory, observed(now, drawn), before

    rng = np.random.default_rng(0)
    for _ in range(5):
        sums = [rng.uniform(0, 9, (2, 6)).astype(np.float32) for _ in range(4)]
        names = ("draws", "solved", "square", "tokens")
        before, now = (
            memory.PromptMemory(**{n: x[i] for n, x in zip(names, sums, strict=True)})
            for i in (0, 1)
        )
        got, want, start = both(before, now)
        jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-5), got, want)
        untouched = np.flatnonzero(want.draws == now.draws)
        assert len(untouched) == 2
        np.testing.assert_array_equal(got.tokens[untouched], now.tokens[untouched])
        del start


def test_a_memory_that_is_loaded_is_known_to_the_first_draw():
    state = loops.Jitted(build(AHEAD)).begin(jax.device_put(warmed(1)))
    sums = jax.tree.map(lambda x: np.arange(6, dtype=np.float32), state.memory)
    loaded = memory_io.with_memory(state, sums)
    for own in (loaded, loaded.behaviour):
        jax.tree.map(np.testing.assert_array_equal, own.memory, sums)


def test_memory_of_a_dry_run_has_the_draw_beside_the_update():
    sizes = {"warm start": 90, "held-out draw": 80, "ask": 1, "draw": 30, "learn": 60}
    reports = [
        SimpleNamespace(name=name, temporaries=size, made=size / 10)
        for name, size in sizes.items()
    ]
    compiler: Any = SimpleNamespace(reports=reports)
    assert dry_run.beside(loops.Staged(build(AHEAD)), compiler) == 33
    assert dry_run.beside(loops.Jitted(build(AHEAD)), compiler) == 0
    assert dry_run.beside(loops.Staged(build(at_once())), compiler) == 0


@pytest.mark.long
def test_a_run_with_a_draw_ahead_can_be_planned():
    run = planner.traced(AHEAD)
    assert run.calls[-1].function.__name__ == "learn_beside"
    assert run.sizes.rows == 16
    place = chips.topology("v5e:2x2")
    beside = planner.layout(run, place, Mesh(data=2, fsdp=2))
    apart = planner.layout(run, place, Mesh(data=2, fsdp=2, draw_share=0.5))
    size = sum(leaf.nbytes for leaf in jax.tree.leaves(reference()[0].params))
    assert beside.work["learn"].memory["the next draw"] == sum(
        beside.work["draw"].memory.values()
    )
    assert "what draws ahead" not in apart.held("learn")
    assert apart.held("draw")["what draws ahead"] >= size / 2
    assert apart.work["draw"].total.received >= apart.held("draw")["what draws ahead"]


@pytest.mark.long
def test_the_library_begins_nothing_that_nobody_asks_for():
    asked = []

    def task(**options):
        made = chain.task(**options)

        def verify(target, tokens):
            asked.append(1)
            return made.verify(target, tokens)

        return replace(made, verify=verify)

    parts = build(replace(HOST, task=partial(task, **HOST.task.keywords)))
    state = loops.Jitted(build(AHEAD)).begin(jax.device_put(warmed(1)))
    step = library.train_step(parts)
    for _ in range(2):
        state, _ = step(state)
    assert len(asked) == 2 * 16


SAID = {
    "sampling.ahead=2": (
        "sampling.ahead=2 is more than the one step that a draw can be ahead; set "
        "sampling.ahead to 1."
    ),
    "sampling.attempts=2": (
        "sampling.attempts=2 takes as many prompts as outcomes ask for, and "
        "sampling.ahead=1 draws the next ones before these are known; set "
        "sampling.attempts to 1 or sampling.ahead to 0."
    ),
    "sampling.off_policy=none": (
        "sampling.ahead=1 draws from the policy of a step before, and nothing corrects "
        "that bias; set sampling.off_policy=off_policy.truncated_ratio (TIS) or "
        "another function of curax.off_policy, off_policy.none to leave the bias, or "
        "sampling.ahead=0."
    ),
}


@pytest.mark.parametrize("word", SAID)
def test_what_cannot_be_drawn_ahead_is_said(word):
    assert message(ConfigError, override, AHEAD, [word]) == SAID[word]


def test_a_method_that_chooses_prompts_cannot_know_them_a_step_ahead():
    def choosing():
        return Method(name="mine", choose=lambda drive, parts, state, what: None)

    assert message(ValueError, build, replace(AHEAD, methods=(choosing,))) == (
        "sampling.ahead=1 draws the next prompts of the data before a step ends, and "
        "mine chooses them by what it brought; set sampling.ahead to 0."
    )
