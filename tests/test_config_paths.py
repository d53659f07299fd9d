"""By dotted names a tree is described, compared, changed and checked."""

import dataclasses
import json
import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import optax
import pytest
from hypothesis import given
from outputs import message

from curax.settings import config_paths as paths
from curax.settings.config_paths import ConfigError, Place
from curax.settings.config_types import Count, Function, Positive, Share

HERE = __name__  # what a function defined below is called by
error_of = partial(message, ConfigError)


def task(*, depth: Count = 3, name: str = "sums", hard: bool = False):
    return depth, name, hard


def power(p, *, alpha: float):
    return p**alpha


def weight(outcome, exists, *, f: Callable, low: float | None = None):
    return f(outcome), exists, low


def dead(outcome, exists, finished, *, delta: float = 1e-6):
    return outcome, exists, finished, delta


def every(outcome, exists, finished, *, gates: Sequence[Callable]):
    return outcome, exists, finished, gates


def clipped(logp, *, low: float = 0.2, high: float = 0.2, dual: float | None = None):
    return logp, low, high, dual


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


@dataclasses.dataclass(frozen=True)
class Memory:
    discount: Share = 0.9
    prior: tuple[Positive, Positive] = (1.0, 1.0)


@dataclasses.dataclass(frozen=True)
class Pilot:
    draws: Count
    every: Count = 1


@dataclasses.dataclass(frozen=True)
class Tree:
    """One of everything that may stand in a config."""

    task: Function
    model: Function
    objective: Function
    gate: Function
    advantage: Function
    loss: Function
    optimizer: Function
    correct: Function
    memory: Memory = Memory()
    shape: Function | None = None
    pilot: Pilot | None = None
    words: tuple[str, ...] = ("one",)
    temperature: Positive = 1.0
    steps: Count = 200
    staged: bool = False


def tree(**changed: Any) -> Tree:
    fields: dict[str, Any] = {
        "task": task,
        "model": network,
        "objective": partial(weight, f=partial(power, alpha=2.0)),
        "gate": partial(every, gates=(partial(dead, delta=0.1), plain)),
        "advantage": untyped,
        "loss": partial(clipped, high=0.3),
        "optimizer": partial(adam, learning_rate=partial(schedule, peak=0.5)),
        "correct": plain,
    }
    return Tree(**(fields | changed))


def assigned(*assignments: str) -> Tree:
    return paths.assign(tree(), assignments)


def leaves(tree: Any) -> dict[str, Any]:
    shown = {name: value for name, _, value in paths.changes({}, paths.describe(tree))}
    return {name: shown.get(name) for name in paths.flat(paths.describe(tree))}


def expected(words: str, now: Any, example: str) -> str:
    return f"expected {words} (it is {now} now); write for example --set {example}."


ONLY = (
    "a function is set by its dotted name, a group of options in the config file; "
    "options here are"
)

# A wrong assignment, and the one sentence that says so.
REFUSED = {
    "loss.hgih=0.3": f"{HERE}.clipped has no option 'hgih'; did you mean 'high'?",
    "loss.zzz=1": f"{HERE}.clipped has no option 'zzz'; it has dual, high, low.",
    "memory.prio=5": "memory has no option 'prio'; did you mean 'prior'?",
    "optimizer.peak=1": f"{HERE}.adam has no option 'peak'; did you mean "
    "'optimizer.learning_rate.peak'?",
    "steps.more=1": "steps has no option 'more'; it has none.",
    "shape.margin=1": "shape is none in this config; name a function for shape in its "
    "file.",
    "pilot.draws=4": "pilot is none in this config; write pilot=Pilot(draws=...) in "
    "its file.",
    "pilot.every=4": "pilot is none in this config; write pilot=Pilot(draws=..., "
    "every=...) in its file.",
    "gate.gates.7.delta=1": "gate.gates has no option '7'; it has 0, 1.",
    "correct.x=1": f"{HERE}.plain has no option 'x'; it has none.",
    "steps=abc": expected("an integer", 200, "steps=200"),
    "steps=200.0": expected("an integer", 200, "steps=200"),
    "steps=true": expected("an integer", 200, "steps=200"),
    "steps=none": expected("an integer", 200, "steps=200"),
    "staged=1": expected("true or false", False, "staged=False"),
    "loss.high='0.3'": expected("a number", 0.3, "loss.high=0.3"),
    "loss.dual=x": expected("a number or none", None, "loss.dual=0.1"),
    "memory.prior=(1,)": expected(
        "a tuple of 2 numbers", (1.0, 1.0), "memory.prior=(1.0, 1.0)"
    ),
    "memory.prior.0=x": expected("a number", 1.0, "memory.prior.0=1.0"),
    "optimizer.learning_rate.edges=(1.5,)": expected(
        "a tuple", (5, 10), "optimizer.learning_rate.edges=(5, 10)"
    ),
    "optimizer.b1=true": expected("a number", 0.9, "optimizer.b1=0.9"),
    "advantage.count=1.5": expected("an integer", 2, "advantage.count=2"),
    "advantage.pair=(1,)": expected(
        "a tuple of 2 integers", (1, 2), "advantage.pair=(1, 2)"
    ),
    "loss=foo": f"{ONLY} loss.low, loss.high, loss.dual.",
    "correct=foo": f"{ONLY} none.",
    "memory=8": f"{ONLY} memory.discount, memory.prior.",
    "gate.gates=(1, 2)": f"{ONLY} gate.gates.0, gate.gates.1.",
    "model.size=3": f"{ONLY} model.size.width, model.size.name.",
    "model.size.width=3": "width 3 must be even.",
}

# An assignment, and what then stands at its name.
TAKEN: dict[str, Any] = {
    "steps=7": 7,
    " memory.discount = 0.5": 0.5,
    "loss.low=1": 1.0,
    "loss.dual=3": 3.0,
    "task.depth=4": 4,
    "task.name=products": "products",
    "task.name=5": "5",
    "task.name='5'": "5",
    "task.name=true": "true",
    "task.hard=TRUE": True,
    "model.size.width=16": 16,
    "model.size.name=small": "small",
    "temperature=1e-1": 0.1,
    "temperature=inf": "inf",
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


@pytest.mark.parametrize("assignment", REFUSED)
def test_a_refused_assignment_says_why_and_what_to_write(assignment):
    assert error_of(assigned, assignment) == f"{assignment}: {REFUSED[assignment]}"


@pytest.mark.parametrize("text", ["steps", "=3", "steps 3"])
def test_an_assignment_needs_a_name_and_an_equals_sign(text):
    assert error_of(assigned, text) == (
        f"{text!r} sets nothing; write --set NAME=VALUE, for example --set steps=200."
    )


@pytest.mark.parametrize("text", ["two", "two,three", "'two', 'three'"])
def test_a_word_alone_and_words_between_commas_are_a_tuple_of_words(text):
    want = ("two", "three") if "," in text else ("two",)
    assert assigned(f"words={text}").words == want


@pytest.mark.parametrize("assignment", TAKEN)
def test_an_assignment_changes_what_it_names_and_nothing_else(assignment):
    name = assignment.partition("=")[0].strip()
    after = assigned(assignment)
    assert leaves(after)[name] == TAKEN[assignment]
    changes = paths.changes(paths.describe(tree()), paths.describe(after))
    changed = {changed for changed, _, _ in changes}
    assert all(f"{other}.".startswith(f"{name}.") for other in changed)


def test_the_last_of_two_assignments_to_a_name_counts():
    assert assigned("steps=3", "steps=4").steps == 4
    assert assigned("memory.prior=[3, 4]", "memory.prior.0=2").memory.prior == (2, 4)


def test_an_assignment_that_undoes_one_before_it_is_refused():
    both = ["shape.high=0.2", "shape=test_config_paths.clipped"]
    built = tree(shape=partial(clipped, high=0.1))
    assert leaves(paths.assign(built, both[::-1]))["shape.high"] == 0.2
    for values in (both, {"shape.high": 0.2, "shape": clipped}):
        said = error_of(paths.assign, built, values)
        assert "would undo shape.high=0.2, which stands before it; set shape" in said
    assert paths.assign(built, ["shape.high=0.2", "shape=none"]).shape is None


def test_a_tuple_takes_any_length_only_where_its_annotation_says_so():
    got = assigned("optimizer.learning_rate.edges=[1, 2, 3]")
    rate = paths.option(got.optimizer, "learning_rate")
    assert paths.option(rate, "edges") == (1, 2, 3)


def test_what_may_be_none_can_be_switched_off():
    built = tree(shape=partial(clipped, high=0.1))
    on = paths.assign(built, ["shape.high=0.2"])
    assert leaves(on)["shape.high"] == 0.2
    assert paths.assign(built, ["shape=none"]).shape is None
    assert leaves(built)["shape.high"] == 0.1  # the tree itself stays


def test_options_of_dicts_and_lists_have_names_too():
    built = tree(advantage=partial(untyped, table={"a": 1, "b": [1.0, 2.0]}))
    built = paths.assign(built, ["advantage.table.a=2", "advantage.table.b.1=3"])
    assert paths.option(built.advantage, "table") == {"a": 2, "b": [1.0, 3.0]}


def test_a_mapping_may_set_arrays_where_numbers_are():
    def trained(rate, high):
        names = {"optimizer.learning_rate": rate, "loss.high": high, "loss.dual": high}
        built = paths.assign(tree(), names | {"temperature": rate})
        assert not list(paths.wrong_values(Place(built)))
        got = paths.options(built.loss) | paths.options(built.optimizer)
        return got["learning_rate"] + got["high"] + got["dual"] + built.temperature

    got = jax.jit(jax.vmap(trained))(jnp.arange(3.0), jnp.arange(3.0))
    assert got.tolist() == [0.0, 4.0, 8.0]


def test_a_mapping_is_not_parsed_but_is_checked():
    assert error_of(paths.assign, tree(), {"steps": "300"}) == (
        f"steps=300: {expected('an integer', 200, 'steps=200')}"
    )
    assert error_of(paths.assign, tree(), {"task.hard": jnp.ones(())}).startswith(
        "task.hard=1.0: expected true or false (it is False now)"
    )


NUMBERS = {
    "steps": st.integers(1, 10**6),
    "temperature": st.floats(0.01, 100.0),
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
    before, new = leaves(tree())[name], assigned(f"{name}={value!r}")
    want = [(name, before, value)] if value != before else []
    assert paths.changes(paths.describe(tree()), paths.describe(new)) == want
    set_directly = paths.assign(tree(), {name: value})
    assert paths.describe(set_directly) == paths.describe(new)


@given(st.text())
def test_whatever_is_assigned_gives_a_tree_or_a_sentence(text):
    for name in ("steps", "loss.high", "staged", "memory.prior", "loss", text):
        try:
            end = type(assigned(f"{name}={text}")).__name__
        except ConfigError as error:
            end = str(error)
        assert end == "Tree" or end.endswith(".")


# What is wrong in a tree, and the one sentence that says so.
WRONG = {
    "temperature=0 must be greater than 0.0; set temperature to 1.0.": {
        "temperature": 0
    },
    "temperature=nan must be greater than 0.0; set temperature to 1.0.": {
        "temperature": math.nan
    },
    "steps=0 must be at least 1; set steps to 1.": {"steps": 0},
    "steps=2.0 must be an integer; set steps to 1, for example.": {"steps": 2.0},
    "steps=True must be an integer; set steps to 1, for example.": {"steps": True},
    "staged=1 must be true or false; set staged to True, for example.": {"staged": 1},
    "memory=3 must be a Memory; give one.": {"memory": 3},
    "memory.discount=1.5 must be greater than 0.0 and at most 1.0; "
    "set memory.discount to 1.0.": {"memory": Memory(discount=1.5)},
    "memory.prior.1=0.0 must be greater than 0.0; set memory.prior.1 to 1.0.": {
        "memory": Memory(prior=(1.0, 0.0))
    },
    "memory.prior=(1.0,) must be a tuple of 2 numbers; "
    "set memory.prior to (1.0, 1.0), for example.": {
        "memory": Memory(prior=(1.0,))  # pyright: ignore[reportArgumentType]
    },
    "words='two' must be a tuple; set words to ('two',), for example.": {
        "words": "two"
    },
    "loss='clipped' must be a function; give one.": {"loss": "clipped"},
    "shape=0.1 must be a function or none; give one.": {"shape": 0.1},
    "task.depth=0 must be at least 1; set task.depth to 1.": {
        "task": partial(task, depth=0)
    },
    f"loss.hgih=0.3: {HERE}.clipped has no option 'hgih'; did you mean 'high'?": {
        "loss": partial(clipped, **{"hgih": 0.3})
    },
    f"correct.m=3: {HERE}.plain has no option 'm'; it has none.": {
        "correct": partial(plain, **{"m": 3})
    },
    f"objective.f.alpha is not set, but {HERE}.power needs it; "
    "set objective.f.alpha, or bind it with functools.partial(..., alpha=...).": {
        "objective": partial(weight, f=power)
    },
    f"optimizer binds options of {HERE}.adam by position; bind them by name.": {
        "optimizer": partial(adam, 0.1)
    },
}


@pytest.mark.parametrize("sentence", WRONG)
def test_what_is_wrong_in_a_tree_is_said_with_a_fix(sentence):
    place = Place(tree(**WRONG[sentence]))
    wrong = [
        *paths.wrong_values(place),
        *paths.wrong_options(place, ["objective"]),
    ]
    assert wrong == [sentence]


def test_options_resolve_bound_keywords_over_defaults():
    options, option = paths.options, paths.option
    assert options(partial(clipped, high=0.3)) == {
        "low": 0.2,
        "high": 0.3,
        "dual": None,
    }
    assert options(plain) == options(power) == options(int) == {}
    assert options(adam) == {"b1": 0.9}
    assert option(partial(power, alpha=3), "alpha") == 3
    assert option(power, "alpha") is None
    assert option(power, "alpha", 8) == 8


def test_options_of_optax_functions_are_found_and_checked():
    built = tree(optimizer=partial(optax.adamw, learning_rate=1e-3))
    got = paths.assign(built, ["optimizer.learning_rate=1", "optimizer.b2=0.95"])
    changed = {"learning_rate": 1.0, "b2": 0.95}
    assert paths.options(got.optimizer) == paths.options(built.optimizer) | changed
    for wrong in ("optimizer.learning_rate=fast", "optimizer.b1=true"):
        said = error_of(paths.assign, built, [wrong])
        assert said.startswith(f"{wrong}: expected ")


@dataclasses.dataclass(frozen=True)
class Power:
    alpha: float = 1.0

    def __call__(self, p):
        return p**self.alpha


def test_an_object_may_stand_for_a_function_and_its_fields_for_options():
    built = tree(objective=partial(weight, f=Power()))
    built = paths.assign(built, ["objective.f.alpha=3"])
    assert paths.options(built.objective)["f"] == Power(3.0)
    assert paths.describe(built)["objective"]["f"] == {
        "function": f"{HERE}.Power",
        "alpha": 3.0,
    }


def test_a_description_names_every_function_and_resolves_every_option():
    got = paths.describe(tree())
    assert list(got) == [field.name for field in dataclasses.fields(Tree)]
    high = {"low": 0.2, "high": 0.3, "dual": None}
    assert got["loss"] == {"function": f"{HERE}.clipped"} | high
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
    built = tree(advantage=partial(untyped, nothing=value, table=jnp.ones(2)))
    text = json.dumps(paths.describe(built), allow_nan=False)
    assert json.loads(text) == paths.describe(built)
    assert " at 0x" not in text
    assert paths.changes(json.loads(text), paths.describe(built)) == []


def test_fields_are_the_leaves_of_the_description():
    names = paths.flat(paths.describe(tree()))
    assert {"loss", "loss.high", "gate.gates.0.delta", "objective.f.alpha"} < {*names}
    assert {"memory.prior.1", "shape", "advantage.nothing"} < {*names}
    assert not {"memory", "loss.function"} & {*names}


def test_every_value_can_be_set_to_itself_by_name():
    values = leaves(tree())
    functions = [n for n, v in values.items() if str(v).startswith(HERE)]
    same = assigned(*(f"{n}={values[n]}" for n in values if n not in functions))
    assert paths.describe(same) == paths.describe(tree())
    for name in functions:
        short = name.rpartition(".")[2]
        assert "is set by its dotted name" in error_of(assigned, f"{name}={short}")


def test_changes_name_what_differs():
    new = tree(loss=plain, steps=3, shape=partial(power, alpha=0.1))
    assert paths.changes(paths.describe(tree()), paths.describe(new)) == [
        ("loss", f"{HERE}.clipped", f"{HERE}.plain"),
        ("shape", None, f"{HERE}.power"),
        ("shape.alpha", None, 0.1),
        ("steps", 200, 3),
        ("loss.low", 0.2, None),
        ("loss.high", 0.3, None),
    ]
