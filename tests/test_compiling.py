"""Programs compile side by side, and are those that calls would compile."""

import threading
from collections import Counter
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import monitoring
from test_loops import STOPPED, TINY, in_files

from curax import gate
from curax.config import override
from curax.processes import peers
from curax.settings import machine
from curax.settings.cli import BESIDE
from curax.settings.config_paths import options
from curax.step import loops
from curax.step.build import build
from curax.step.compiling import Beside, Program

COMPILES = "/jax/core/compile/backend_compile_duration"
SHORT = override(TINY, ["warm_start.steps=2", "steps=2"])
HOST = override(SHORT, ["task.on_device=false"])
STAGED = {
    "staged": SHORT,
    "graded on the host": HOST,
    "in parts": override(HOST, ["sampling.chunks=2"]),
    "refilled": override(
        replace(HOST, gate=gate.zero_variance), ["sampling.attempts=2"]
    ),
    "in rounds": override(STOPPED, ["warm_start.steps=2", "task.on_device=false"]),
    "ahead": override(
        HOST, ["sampling.ahead=1", "sampling.off_policy=off_policy.truncated_ratio"]
    ),
    "from files": replace(SHORT, task=partial(in_files, **options(TINY.task))),
}
JITTED = {
    "jitted": SHORT,
    "no warm start": replace(SHORT, warm_start=None),
    "seeds": override(SHORT, ["seeds=2"]),
}
QUICK = ("jitted", "graded on the host")
KINDS = [
    pytest.param(kind, config, id=name, marks=[pytest.mark.long] * (name not in QUICK))
    for kind, all_ in ((loops.Staged, STAGED), (loops.Jitted, JITTED))
    for name, config in all_.items()
]


@pytest.fixture
def compiled():
    """Names of all that is compiled, each time that it is, and in which thread."""
    names = []

    def note(event: str, duration_secs: float, **about: Any) -> None:
        del duration_secs
        if event == COMPILES:
            names.append((about.get("fun_name"), threading.current_thread().name))

    monitoring.register_event_duration_secs_listener(note)
    yield names
    monitoring.unregister_event_duration_listener(note)


def run(loop):
    """All that a run calls: of its beginning, of an evaluation, and of two steps."""
    with loop.context(), loop.compiling():
        state = loop.begin(loop.warmed())
        rates = loop.evaluate(state)
        for _ in range(2):
            state, *_ = loop.advance(state, 1)
    return jax.device_get((state, rates))


def on_cores(patch, cores):
    patch.setattr(machine, "cores", lambda: cores)


@pytest.mark.parametrize(("kind", "config"), KINDS)
def test_what_compiles_side_by_side_is_what_calls_would_compile(
    kind, config, compiled, monkeypatch
):
    counts, results = [], []
    for cores in (1, 2):
        on_cores(monkeypatch, cores)
        compiled.clear()
        results.append(run(kind(build(config))))
        counts.append(Counter(name for name, _ in compiled))
    assert not counts[1] - counts[0], "calls did not find what was compiled"
    beside = {name for name, thread in compiled if thread == BESIDE}
    last = "learn_beside" if config.sampling.ahead else "learn"
    last = last if kind is loops.Staged else "steps"
    assert {"jit(initial)", "jit(draw)", f"jit({last})"} <= beside
    jax.tree.map(np.testing.assert_array_equal, *results)


@pytest.mark.long
def test_lanes_compile_side_by_side_too(compiled, monkeypatch):
    on_cores(monkeypatch, 2)
    lanes = loops.Lanes(build(SHORT), {"optimizer.learning_rate": (1e-3, 1e-2)})
    warm = loops.Jitted(lanes.parts).warmed()
    compiled.clear()
    with lanes.compiling():
        state = lanes.begin(warm)
        lanes.pass_rates(state)
        state, *_ = lanes.advance(state, 1)
    beside = {name for name, thread in compiled if thread == BESIDE}
    assert beside == {"jit(begin)", "jit(held_out_outcomes)", "jit(steps)"}
    assert not beside & {name for name, thread in compiled if thread == "MainThread"}


@pytest.mark.long
def test_a_run_that_goes_on_compiles_nothing_of_how_it_began(compiled, monkeypatch):
    on_cores(monkeypatch, 2)
    loop = loops.Jitted(build(SHORT))
    with loop.context():
        state = jax.device_get(loop.begin(loop.warmed()))
        state = jax.device_put(state, jax.devices()[0])
        loop = loops.Jitted(loop.parts)
        compiled.clear()
        with loop.compiling(state):
            loop.advance(state, 1)
    names = {name for name, _ in compiled}
    assert "jit(steps)" in names
    assert not {"jit(initial)", "jit(warm_steps)", "jit(begin)"} & names


def test_weights_that_are_not_read_yet_are_no_reason_to_draw_others(
    compiled, monkeypatch
):
    on_cores(monkeypatch, 2)
    parts = build(replace(SHORT, warm_start=None))
    drawn = jax.device_get(parts.model.init(jax.random.key(1)))
    model = replace(parts.model, load=lambda _: jax.device_put(drawn))
    loop = loops.Jitted(replace(parts, model=model))
    compiled.clear()
    with loop.context(), loop.compiling():
        got = loop.begin(loop.initial()).params
    jax.tree.map(np.testing.assert_array_equal, got, drawn)
    names = [name for name, _ in compiled]
    assert names.count("jit(initial)") == names.count("jit(begin)") == 1


@pytest.mark.parametrize("alone", ["one core", "several processes", "a mesh"])
def test_programs_compile_as_they_are_called(alone, monkeypatch):
    on_cores(monkeypatch, 1 if alone == "one core" else 2)
    monkeypatch.setattr(peers, "count", lambda: 1 + (alone == "several processes"))
    loop = loops.Jitted(build(override(SHORT, ["mesh.data=2"] * (alone == "a mesh"))))
    monkeypatch.setattr(loop, "_rehearse_start", None)
    with loop.compiling():
        pass


def test_a_call_waits_for_what_compiles_in_the_background(monkeypatch):
    program, goes_on = Program(lambda x: x + 1, None), threading.Event()
    lowered = SimpleNamespace(compile=goes_on.wait)
    jitted = SimpleNamespace(lower=lambda *_: lowered, eval_shape=jax.eval_shape)
    beside, called = Beside(1), []
    with monkeypatch.context() as patch:
        patch.setattr(program, "jitted", jitted)
        patch.setattr(jitted, "eval_shape", lambda x: x)
        beside("one", program, (jax.ShapeDtypeStruct((), jnp.float32),))
    caller = threading.Thread(target=lambda: called.append(program(1.0)))
    caller.start()
    caller.join(0.2)
    assert caller.is_alive()
    goes_on.set()
    caller.join(60)
    assert called == [2]
    beside.close()


def test_what_cannot_be_compiled_is_told_by_the_call():
    def fails():
        raise ValueError("too large")

    program = Program(lambda x: x + 1, None)
    beside = Beside(1)
    program._begun.append(beside.later(fails))
    assert program(1.0) == 2
    beside.close()
