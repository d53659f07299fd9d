import dataclasses
import json
import math
import subprocess
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import optax
import pytest
from hypothesis import given

from curax import config as cf
from curax.config import (
    KL,
    Config,
    ConfigError,
    Evaluation,
    Logging,
    Memory,
    Mesh,
    Sampling,
    Update,
    WarmStart,
)

HERE = __name__  # what a function defined below is called by


def task(*, depth: int = 3, name: str = "sums", hard: bool = False):
    return depth, name, hard


def power(p, *, alpha: float):
    return p**alpha


def identity(p):
    return p


def weight(outcome, exists, *, f: Callable, low: float | None = None):
    return f(outcome), exists, low


def dead(outcome, exists, finished, *, delta: float = 1e-6):
    return outcome, exists, finished, delta


def every(outcome, exists, finished, *, gates: Sequence[Callable]):
    return outcome, exists, finished, gates


def largest(key, reward, exists, *, m: int):
    return key, reward, exists, m


def clipped(
    logp, old, *, low: float = 0.2, high: float = 0.2, dual: float | None = None
):
    return logp, old, low, high, dual


def schedule(*, peak: float = 0.1, edges: tuple[int, ...] = (5, 10)):
    return peak, edges


def adam(learning_rate: float | Callable, b1: jax.typing.ArrayLike = 0.9):
    return learning_rate, b1


def untyped(x, *, half=0.5, count=2, pair=(1, 2), nothing=None, table=None):
    return x, half, count, pair, nothing, table


def plain(*arrays):
    return arrays


@dataclasses.dataclass(frozen=True)
class Size:
    width: int = 8
    name: str | None = None

    def __post_init__(self):
        if self.width % 2:
            raise ValueError(f"width {self.width} must be even.")


def network(*, size: Size = Size()):
    return size


def make(**changed: Any) -> Config:
    fields: dict[str, Any] = {
        "task": task,
        "model": network,
        "allocate": plain,
        "objective": partial(weight, f=partial(power, alpha=2.0)),
        "gate": partial(every, gates=(partial(dead, delta=0.1), plain)),
        "downsample": partial(largest, m=4),
        "correct": plain,
        "advantage": untyped,
        "modulate": plain,
        "loss": partial(clipped, high=0.3),
        "aggregate": plain,
        "optimizer": partial(adam, learning_rate=partial(schedule, peak=0.5)),
    }
    return Config(**(fields | changed))


def error_of(function, *args) -> str:
    with pytest.raises(ConfigError) as caught:
        function(*args)
    return str(caught.value)


def overridden(*assignments: str) -> Config:
    return cf.override(make(), assignments)


def leaves(config: Config) -> dict[str, Any]:
    shown = {name: value for name, _, value in cf.changes({}, cf.describe(config))}
    return {name: shown.get(name) for name in cf.fields_of(config)}


def sampling(**fields):
    return {"sampling": Sampling(**fields)}


def update(**fields):
    return {"update": Update(**fields)}


# What is wrong, and the one sentence that says so.
WRONG = {
    "sampling.group_size=8 cannot keep downsample.m=12 completions; "
    "set downsample.m to at most 8.": {"downsample": partial(largest, m=12)},
    "downsample.m=0 must be at least 1; set downsample.m to 1.": {
        "downsample": partial(largest, m=0)
    },
    "sampling.group_size=0 must be at least 1; set sampling.group_size to 1.": sampling(
        group_size=0
    ),
    "sampling.prompts=-2 must be at least 1; set sampling.prompts to 1.": sampling(
        prompts=-2
    ),
    "sampling.max_tokens=0 must be at least 1; set sampling.max_tokens to 1.": sampling(
        max_tokens=0
    ),
    "sampling.temperature=0 must be greater than 0.0; "
    "set sampling.temperature to 1.0.": sampling(temperature=0),
    "sampling.temperature=nan must be greater than 0.0; "
    "set sampling.temperature to 1.0.": sampling(temperature=math.nan),
    "sampling.top_k=-1 must be at least 0; set sampling.top_k to 0.": sampling(
        top_k=-1
    ),
    "sampling.top_p=0.0 must be greater than 0.0 and at most 1.0; "
    "set sampling.top_p to 1.0.": sampling(top_p=0.0),
    "sampling.top_p=1.5 must be greater than 0.0 and at most 1.0; "
    "set sampling.top_p to 1.0.": sampling(top_p=1.5),
    "sampling.slots=-1 must be at least 0; set sampling.slots to 0.": sampling(
        slots=-1
    ),
    "sampling.rounds=0 must be at least 1; set sampling.rounds to 1.": sampling(
        rounds=0
    ),
    "evaluation.every=0 must be at least 1; set evaluation.every to 1.": {
        "evaluation": Evaluation(every=0)
    },
    "evaluation.samples=0 must be at least 1; set evaluation.samples to 1.": {
        "evaluation": Evaluation(samples=0)
    },
    "warm_start.rows=0 must be at least 1; set warm_start.rows to 1.": {
        "warm_start": WarmStart(steps=1, rows=0, optimizer=adam)
    },
    "update.epochs=0 must be at least 1; set update.epochs to 1.": update(epochs=0),
    "update.clip_norm=0.0 must be greater than 0.0; "
    "set update.clip_norm to 1.0.": update(clip_norm=0.0),
    "update.minibatches=3 times update.micro_batches=2 must divide the 64 rows "
    "trained per step; set them to 2 and 2.": update(minibatches=3, micro_batches=2),
    "update.minibatches=1 times update.micro_batches=100 must divide the 64 rows "
    "trained per step; set them to 1 and 64.": update(micro_batches=100),
    "memory.discount=0.0 must be greater than 0.0 and at most 1.0; "
    "set memory.discount to 1.0.": {"memory": Memory(discount=0.0)},
    "memory.prior.1=0.0 must be greater than 0.0; set memory.prior.1 to 1.0.": {
        "memory": Memory(prior=(1.0, 0.0))
    },
    "memory.prior=(1.0,) must be a tuple; "
    "set memory.prior to (1.0, 1.0), for example.": {
        "memory": Memory(prior=(1.0,))  # pyright: ignore[reportArgumentType]
    },
    "mesh.fsdp=0 must be at least 1; set mesh.fsdp to 1.": {"mesh": Mesh(fsdp=0)},
    "logging.every=0 must be at least 1; set logging.every to 1.": {
        "logging": Logging(every=0)
    },
    "kl.coefficient=-0.1 must be at least 0.0; set kl.coefficient to 0.0.": {
        "kl": KL(estimator=plain, coefficient=-0.1)
    },
    "entropy_bonus=-1.0 must be at least 0.0; set entropy_bonus to 0.0.": {
        "entropy_bonus": -1.0
    },
    "seed=4294967296 must be at least 0 and at most 4294967295; "
    "set seed to 4294967295.": {"seed": 2**32},
    "seeds=2 cannot run side by side with staged=True; "
    "set seeds to 1 or staged to False.": {"seeds": 2, "staged": True},
    "steps=2.0 must be an integer; set steps to 1, for example.": {"steps": 2.0},
    "steps=True must be an integer; set steps to 1, for example.": {"steps": True},
    "staged=1 must be true or false; set staged to True, for example.": {"staged": 1},
    "sampling=3 must be a Sampling; give one.": {"sampling": 3},
    "loss='clipped' must be a function; give one.": {"loss": "clipped"},
    "kl=0.1 must be a KL or none; give one.": {"kl": 0.1},
    f"loss.hgih=0.3: {HERE}.clipped has no option 'hgih'; did you mean 'high'? "
    "It has dual, high, low.": {"loss": partial(clipped, **{"hgih": 0.3})},
    f"advantage.m=3: {HERE}.plain has no option 'm'; it has none.": {
        "advantage": partial(plain, **{"m": 3})
    },
    f"downsample.m is not set, but {HERE}.largest needs it; "
    "bind it with functools.partial(..., m=...).": {"downsample": largest},
    f"objective.f.alpha is not set, but {HERE}.power needs it; "
    "bind it with functools.partial(..., alpha=...).": {
        "objective": partial(weight, f=power)
    },
    f"optimizer binds options of {HERE}.adam by position; bind them by name.": {
        "optimizer": partial(adam, 0.1)
    },
}

# A wrong assignment, and the one sentence that says so.
REFUSED = {
    "loss.hgih=0.3": f"{HERE}.clipped has no option 'hgih'; did you mean 'high'? "
    "It has dual, high, low.",
    "loss.zzz=1": f"{HERE}.clipped has no option 'zzz'; it has dual, high, low.",
    "sampling.max_token=5": "sampling has no option 'max_token'; did you mean "
    "'max_tokens'? It has group_size, max_tokens, prompts, rounds, slots, "
    "temperature, top_k, top_p.",
    "optimizer.peak=1": f"{HERE}.adam has no option 'peak'; did you mean "
    "'optimizer.learning_rate.peak'? It has b1, learning_rate.",
    "steps.more=1": "steps has no option 'more'; it has none.",
    "kl.coefficient=1": "kl has no option 'coefficient'; it has none.",
    "gate.gates.7.delta=1": "gate.gates has no option '7'; it has 0, 1.",
    "correct.x=1": f"{HERE}.plain has no option 'x'; it has none.",
    "steps=abc": "expected an integer (it is 200 now); "
    "write for example --set steps=200.",
    "steps=200.0": "expected an integer (it is 200 now); "
    "write for example --set steps=200.",
    "steps=true": "expected an integer (it is 200 now); "
    "write for example --set steps=200.",
    "steps=none": "expected an integer (it is 200 now); "
    "write for example --set steps=200.",
    "staged=1": "expected true or false (it is False now); "
    "write for example --set staged=False.",
    "loss.high='0.3'": "expected a number (it is 0.3 now); "
    "write for example --set loss.high=0.3.",
    "loss.high=none": "expected a number (it is 0.3 now); "
    "write for example --set loss.high=0.3.",
    "loss.dual=x": "expected a number or none (it is None now); "
    "write for example --set loss.dual=0.1.",
    "memory.prior=(1,)": "expected a tuple (it is (1.0, 1.0) now); "
    "write for example --set memory.prior=(1.0, 1.0).",
    "memory.prior.0=x": "expected a number (it is 1.0 now); "
    "write for example --set memory.prior.0=1.0.",
    "optimizer.learning_rate.edges=(1.5,)": "expected a tuple (it is (5, 10) now); "
    "write for example --set optimizer.learning_rate.edges=(5, 10).",
    "optimizer.b1=true": "expected a number (it is 0.9 now); "
    "write for example --set optimizer.b1=0.9.",
    "advantage.count=1.5": "expected an integer (it is 2 now); "
    "write for example --set advantage.count=2.",
    "advantage.pair=(1,)": "expected a tuple (it is (1, 2) now); "
    "write for example --set advantage.pair=(1, 2).",
    "loss=foo": "functions and groups of options are chosen in the config file; "
    "--set reaches single options, here loss.low, loss.high, loss.dual.",
    "correct=foo": "functions and groups of options are chosen in the config file; "
    "--set reaches single options, here none.",
    "mesh=8": "functions and groups of options are chosen in the config file; "
    "--set reaches single options, here mesh.data, mesh.fsdp, mesh.tensor.",
    "gate.gates=3": "functions and groups of options are chosen in the config file; "
    "--set reaches single options, here gate.gates.0, gate.gates.1.",
    "gate.gates=(1, 2)": "functions and groups of options are chosen in the config "
    "file; --set reaches single options, here gate.gates.0, gate.gates.1.",
    "model.size.width=3": "width 3 must be even.",
    "model.size=3": "functions and groups of options are chosen in the config file; "
    "--set reaches single options, here model.size.width, model.size.name.",
}

# An assignment, and what then stands at its name.
TAKEN: dict[str, Any] = {
    "steps=7": 7,
    "loss.high=0.4": 0.4,
    "loss.low=1": 1.0,
    "loss.dual=3": 3.0,
    "task.depth=4": 4,
    "task.name=products": "products",
    "task.name=5": "5",
    "task.name='5'": "5",
    "task.name=true": "true",
    "task.hard=TRUE": True,
    "pool_statistics=false": False,
    "model.size.width=16": 16,
    "model.size.name=small": "small",
    "sampling.temperature=0.5": 0.5,
    "sampling.temperature=1e-1": 0.1,
    " sampling.group_size = 4": 4,
    "update.clip_norm=inf": "inf",
    "memory.prior.0=2": 2.0,
    "objective.f.alpha=0.5": 0.5,
    "objective.low=0.5": 0.5,
    "gate.gates.0.delta=0": 0.0,
    "optimizer.b1=0.8": 0.8,
    "optimizer.learning_rate=1e-4": 1e-4,
    "optimizer.learning_rate.peak=1e-3": 1e-3,
    "advantage.half=1": 1.0,
    "advantage.nothing=0.1": 0.1,
    "advantage.nothing=word": "word",
}


def test_the_defaults_are_those_of_the_design():
    config = make()
    assert config.sampling == Sampling(
        group_size=8,
        prompts=16,
        max_tokens=64,
        temperature=1.0,
        top_k=0,
        top_p=1.0,
        slots=0,
        rounds=1,
    )
    assert config.evaluation == Evaluation(every=50, prompts=256, samples=8)
    assert config.memory == Memory(discount=0.9, prior=(1.0, 1.0))
    assert config.mesh == Mesh(data=1, fsdp=1, tensor=1)
    assert (config.steps, config.seed, config.seeds, config.staged) == (
        200,
        0,
        1,
        False,
    )


@pytest.mark.parametrize("sentence", WRONG)
def test_a_wrong_config_says_what_is_wrong_and_how_to_mend_it(sentence):
    assert error_of(lambda: make(**WRONG[sentence])) == sentence


def test_a_recipe_must_say_how_it_corrects():
    fields = {f.name: getattr(make(), f.name) for f in dataclasses.fields(Config)}
    del fields["correct"]
    with pytest.raises(
        TypeError, match=r"missing 1 required keyword-only .* 'correct'"
    ):
        Config(**fields)


def test_fields_are_keyword_only_and_frozen():
    with pytest.raises(TypeError):
        Sampling(8)  # pyright: ignore[reportCallIssue]
    with pytest.raises(dataclasses.FrozenInstanceError):
        make().steps = 3  # pyright: ignore[reportAttributeAccessIssue]


def test_without_an_option_m_every_completion_of_a_group_is_trained():
    assert make(downsample=plain, **update(minibatches=128)).update.minibatches == 128
    assert error_of(lambda: make(**update(minibatches=128))) == (
        "update.minibatches=128 times update.micro_batches=1 must divide the 64 rows "
        "trained per step; set them to 64 and 1."
    )


@pytest.mark.parametrize("assignment", REFUSED)
def test_a_refused_assignment_says_why_and_what_to_write(assignment):
    got = error_of(overridden, assignment)
    assert got == f"{assignment}: {REFUSED[assignment]}"


@pytest.mark.parametrize("assignment", TAKEN)
def test_an_assignment_changes_what_it_names_and_nothing_else(assignment):
    name, before = assignment.partition("=")[0].strip(), cf.describe(make())
    after = cf.describe(overridden(assignment))
    assert leaves(overridden(assignment))[name] == TAKEN[assignment]
    changed = {changed for changed, _, _ in cf.changes(before, after)}
    assert changed <= {name} | {n for n in changed if n.startswith(f"{name}.")}
    assert name in changed or before == after


@pytest.mark.parametrize("text", ["steps", "=3", "steps 3"])
def test_an_assignment_needs_a_name_and_an_equals_sign(text):
    assert error_of(overridden, text) == (
        f"{text!r} sets nothing; write --set NAME=VALUE, for example --set steps=200."
    )


def test_an_assignment_can_break_a_rule_of_the_config():
    assert error_of(overridden, "downsample.m=12") == (
        "sampling.group_size=8 cannot keep downsample.m=12 completions; "
        "set downsample.m to at most 8."
    )


def test_assignments_are_checked_together_in_any_order():
    both = ["downsample.m=16", "sampling.group_size=16"]
    assert overridden(*both).sampling.group_size == 16
    assert cf.describe(overridden(*both)) == cf.describe(overridden(*both[::-1]))


def test_the_last_of_two_assignments_to_a_name_counts():
    assert overridden("steps=3", "steps=4").steps == 4
    assert overridden("memory.prior=[3, 4]", "memory.prior.0=2").memory.prior == (2, 4)


def test_a_tuple_takes_any_length_only_where_its_annotation_says_so():
    got = overridden("optimizer.learning_rate.edges=[1, 2, 3]")
    assert cf.option(cf.option(got.optimizer, "learning_rate"), "edges") == (1, 2, 3)


def test_what_may_be_none_can_be_switched_off():
    config = make(kl=KL(estimator=plain, coefficient=0.1))
    assert leaves(cf.override(config, ["kl.coefficient=0.2"]))["kl.coefficient"] == 0.2
    assert cf.override(config, ["kl=none"]).kl is None


def test_overriding_leaves_the_config_as_it_was():
    config = make()
    before = cf.describe(config)
    cf.override(config, ["loss.high=0.9", "steps=3"])
    assert cf.describe(config) == before


def test_options_of_dicts_and_lists_have_names_too():
    config = make(advantage=partial(untyped, table={"a": 1, "b": [1.0, 2.0]}))
    config = cf.override(config, ["advantage.table.a=2", "advantage.table.b.1=3"])
    assert cf.option(config.advantage, "table") == {"a": 2, "b": [1.0, 3.0]}


def test_a_mapping_may_set_arrays_where_numbers_are():
    def trained(rate, high):
        names = {"optimizer.learning_rate": rate, "loss.high": high, "loss.dual": high}
        config = cf.override(make(), names | {"entropy_bonus": rate})
        got = cf.options(config.loss) | cf.options(config.optimizer)
        return got["learning_rate"] + got["high"] + got["dual"] + config.entropy_bonus

    got = jax.jit(jax.vmap(trained))(jnp.arange(3.0), jnp.arange(3.0))
    assert got.tolist() == [0.0, 4.0, 8.0]


def test_a_mapping_is_not_parsed_but_is_checked():
    assert error_of(cf.override, make(), {"steps": "300"}) == (
        "steps=300: expected an integer (it is 200 now); "
        "write for example --set steps=200."
    )
    assert error_of(cf.override, make(), {"task.hard": jnp.ones(())}).startswith(
        "task.hard=1.0: expected true or false (it is False now)"
    )


def test_options_resolve_bound_keywords_over_defaults():
    assert cf.options(partial(clipped, high=0.3)) == {
        "low": 0.2,
        "high": 0.3,
        "dual": None,
    }
    assert cf.options(plain) == cf.options(power) == cf.options(int) == {}
    assert cf.options(adam) == {"b1": 0.9}
    assert cf.option(partial(largest, m=3), "m") == 3
    assert cf.option(largest, "m") is None
    assert cf.option(largest, "m", 8) == 8


def test_options_of_optax_functions_are_found_and_checked():
    config = make(optimizer=partial(optax.adamw, learning_rate=1e-3))
    got = cf.override(config, ["optimizer.learning_rate=1", "optimizer.b2=0.95"])
    assert cf.options(got.optimizer) == cf.options(config.optimizer) | {
        "learning_rate": 1.0,
        "b2": 0.95,
    }
    for wrong in ("optimizer.learning_rate=fast", "optimizer.b1=true"):
        assert error_of(cf.override, config, [wrong]).startswith(f"{wrong}: expected ")


def test_a_description_names_every_function_and_resolves_every_option():
    got = cf.describe(make(kl=KL(estimator=plain, coefficient=0.1)))
    assert list(got) == [field.name for field in dataclasses.fields(Config)]
    assert got["sampling"] == dataclasses.asdict(Sampling())
    assert got["loss"] == {
        "function": f"{HERE}.clipped",
        "low": 0.2,
        "high": 0.3,
        "dual": None,
    }
    assert got["kl"] == {"estimator": {"function": f"{HERE}.plain"}, "coefficient": 0.1}
    assert got["memory"] == {"discount": 0.9, "prior": [1.0, 1.0]}
    assert got["gate"]["gates"] == [
        {"function": f"{HERE}.dead", "delta": 0.1},
        {"function": f"{HERE}.plain"},
    ]
    rate = {"function": f"{HERE}.schedule", "peak": 0.5, "edges": [5, 10]}
    assert got["optimizer"] == {
        "function": f"{HERE}.adam",
        "learning_rate": rate,
        "b1": 0.9,
    }
    assert got["model"]["size"] == {"width": 8, "name": None}


@pytest.mark.parametrize("value", [math.inf, math.nan, jnp.float32, object(), 1j])
def test_a_description_is_strict_json_and_the_same_every_time(value):
    config = make(advantage=partial(untyped, nothing=value, table=jnp.ones(2)))
    text = json.dumps(cf.describe(config), allow_nan=False)
    assert json.loads(text) == cf.describe(config)
    assert " at 0x" not in text
    assert cf.changes(json.loads(text), cf.describe(config)) == []


@dataclasses.dataclass(frozen=True)
class Power:
    alpha: float = 1.0

    def __call__(self, p):
        return p**self.alpha


def test_an_object_may_stand_for_a_function_and_its_fields_for_options():
    config = make(objective=partial(weight, f=Power()))
    config = cf.override(config, ["objective.f.alpha=3"])
    assert cf.options(config.objective)["f"] == Power(3.0)
    assert cf.describe(config)["objective"]["f"] == {
        "function": f"{HERE}.Power",
        "alpha": 3.0,
    }


def test_fields_are_the_leaves_of_the_description():
    names = cf.fields_of(make())
    assert len(set(names)) == len(names)
    assert {"loss", "loss.high", "gate.gates.0.delta", "objective.f.alpha"} < {*names}
    assert {"sampling.top_p", "memory.prior.1", "kl", "advantage.nothing"} < {*names}
    assert "sampling" not in names
    assert "downsample.function" not in names


def test_every_value_of_a_config_can_be_set_to_itself_by_name():
    config = make()
    values = leaves(config)
    functions = [n for n, v in values.items() if str(v).startswith(HERE)]
    assignments = [f"{n}={values[n]}" for n in values if n not in functions]
    assert cf.describe(cf.override(config, assignments)) == cf.describe(config)
    for name in functions:
        assert "functions and groups" in error_of(overridden, f"{name}={name}")


def test_changes_name_what_differs():
    old = make()
    new = make(loss=plain, steps=3, kl=KL(estimator=plain, coefficient=0.1))
    assert cf.changes(cf.describe(old), cf.describe(new)) == [
        ("loss", f"{HERE}.clipped", f"{HERE}.plain"),
        ("kl.estimator", None, f"{HERE}.plain"),
        ("kl.coefficient", None, 0.1),
        ("steps", 200, 3),
        ("loss.low", 0.2, None),
        ("loss.high", 0.3, None),
    ]


NUMBERS = {
    "steps": st.integers(1, 10**6),
    "seed": st.integers(0, 2**32 - 1),
    "sampling.temperature": st.floats(0.01, 100.0),
    "sampling.top_p": st.floats(0.01, 1.0),
    "memory.prior.1": st.floats(0.01, 100.0),
    "loss.low": st.floats(-1e9, 1e9),
    "task.depth": st.integers(-9, 9),
    "gate.gates.0.delta": st.floats(0.0, 1.0),
    "objective.f.alpha": st.floats(-5.0, 5.0),
    "optimizer.learning_rate.peak": st.floats(0.0, 1.0),
}


@given(
    st.sampled_from(sorted(NUMBERS)).flatmap(
        lambda n: st.tuples(st.just(n), NUMBERS[n])
    )
)
def test_a_number_arrives_exactly_where_its_name_says(named):
    name, value = named
    before = leaves(make())[name]
    new = overridden(f"{name}={value!r}")
    want = [(name, before, value)] if value != before else []
    assert cf.changes(cf.describe(make()), cf.describe(new)) == want
    assert cf.describe(cf.override(make(), {name: value})) == cf.describe(new)


@given(st.text())
def test_whatever_is_assigned_gives_a_config_or_a_sentence(text):
    for name in ("steps", "loss.high", "staged", "memory.prior", "loss", text):
        try:
            end = type(overridden(f"{name}={text}")).__name__
        except ConfigError as error:
            end = str(error)
        assert end == "Config" or end.endswith(".")


@pytest.fixture
def written(tmp_path) -> Callable[[str], Any]:
    def write(text: str):
        path = tmp_path / "countdown.py"
        path.write_text(text)
        return path

    return write


GOOD = f"""
from __future__ import annotations
from dataclasses import dataclass
from {HERE} import make

@dataclass
class Local:
    depth: int = 1

def task(*, local=Local()):
    return local

def get_config():
    return make(task=task)
"""


def test_a_config_file_is_a_python_file_with_get_config(written):
    path = written(GOOD)
    config = cf.override(cf.load(path), ["task.local.depth=3"])
    assert cf.describe(config)["task"] == {
        "function": "config_countdown.task",
        "local": {"depth": 3},
    }
    assert cf.load(str(path)).steps == 200
    assert [file.name for file in path.parent.iterdir()] == ["countdown.py"]


# A config file, and what the one sentence about it says after its name.
BROKEN = {
    "x = (1,\n": ":1: SyntaxError: '(' was never closed; mend that line.",
    "steps: 3\nloss: - a\n  b\n": ":3: IndentationError: unexpected indent; "
    "mend that line.",
    "\nx = 1 / 0\n": ":2: ZeroDivisionError: division by zero; mend that line.",
    "import json\n\n\njson.loads('')\n": ":4: JSONDecodeError: Expecting value: "
    "line 1 column 1 (char 0); mend that line.",
    "def get_config():\n    assert False\n": ":2: AssertionError: no message; "
    "mend that line.",
    "x = 1\n": ": no get_config(); define one that returns a Config.",
    "def get_config():\n    return {}\n": ": get_config() returned a dict; "
    "return a Config.",
    f"from {HERE} import make\ndef get_config():\n    return make(steps=0)\n": (
        ":3: steps=0 must be at least 1; set steps to 1."
    ),
    f"from {HERE} import make\ndef get_config():\n    return make(stepz=1)\n": (
        ":3: TypeError: Config.__init__() got an unexpected keyword argument 'stepz'; "
        "mend that line."
    ),
}


@pytest.mark.parametrize("text", BROKEN)
def test_a_broken_config_file_is_named_with_its_line(written, text):
    path = written(text)
    assert error_of(cf.load, path) == f"{path}{BROKEN[text]}"


def test_a_missing_config_file_is_told_from_its_neighbours(tmp_path):
    path = tmp_path / "cuntdown.py"
    assert error_of(cf.load, path) == (
        f"{path}: there is no such file; no Python file is beside it either."
    )
    for name in ("parity.py", "countdown.py", "notes.md"):
        (tmp_path / name).touch()
    assert error_of(cf.load, path) == (
        f"{path}: there is no such file; did you mean countdown.py or parity.py?"
    )
    assert error_of(cf.load, tmp_path).startswith(f"{tmp_path}: there is no such file")


def test_config_imports_nothing_but_the_standard_library():
    code = (
        f"import sys; sys.path.insert(0, {str(Path(cf.__file__).parents[1])!r}); "
        "import curax.config; names = {name.split('.')[0] for name in sys.modules}; "
        "print(names - {'__main__'} - sys.stdlib_module_names)"
    )
    bare = [sys.executable, "-I", "-S", "-c", code]
    shown = subprocess.run(bare, capture_output=True, text=True, check=True)
    assert shown.stdout.strip() == "{'curax'}"
