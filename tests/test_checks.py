"""Stage functions called from numpy: what they take, and how they refuse the rest."""

import dataclasses
import inspect
import operator
import pickle
import typing
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from outputs import message

from curax import (
    advantage,
    aggregate,
    allocate,
    correct,
    downsample,
    gate,
    hint,
    loss,
    memory,
    modulate,
    objective,
    reflect,
    reward,
    score,
    stop,
)
from curax.arrays import checks, counts
from curax.monitors import confidence, distance, diversity
from curax.settings.config_paths import (
    Place,
    full_name,
    options,
    wrong_options,
    wrong_values,
)
from curax.settings.config_types import Count
from curax.settings.declared import declared
from curax.settings.functions import functions_of
from curax.step import stages
from curax.types import Bool, BoolG, Difficulty, Float, FloatG

REWARD, TRUE = np.zeros((2, 3)), np.ones((2, 3), bool)


def wrong(function, name, given, kind):
    fix = f"give jnp.asarray({name}, {kind}), for example."
    return f"{function}: {name} is {given} and must be {kind}; {fix}"


GVM = partial(allocate.gvm, budget=8, most=4)

# A call, and what is said of it.
REFUSED = {
    lambda: advantage.leave_one_out(REWARD, np.ones((2, 3))): wrong(
        "advantage.leave_one_out", "exists", "float64", "bool"
    ),
    lambda: jax.jit(advantage.raw)(REWARD.astype(int), TRUE): wrong(
        "advantage.raw", "reward", "int32", "float"
    ),
    lambda: advantage.raw([[0, 1]], TRUE): wrong(
        "advantage.raw", "reward", "int32", "float"
    ),
    lambda: partial(advantage.standardised, eps=1.0)(REWARD, TRUE[:1]): (
        "advantage.standardised: exists has shape (1, 3) and must have (2, 3), as "
        "reward has."
    ),
    lambda: advantage.raw([[0.0, 1.0], [0.0]], TRUE): "advantage.raw: reward is no arr",
    lambda: advantage.raw(None, TRUE): "advantage.raw: reward is no array",
    lambda: gate.zero_variance(REWARD, TRUE, REWARD): wrong(
        "gate.zero_variance", "finished", "float64", "bool"
    ),
    lambda: correct.horvitz_thompson(REWARD, TRUE, REWARD): wrong(
        "correct.horvitz_thompson", "keep", "float64", "bool"
    ),
    lambda: stop.never(REWARD, REWARD): wrong(
        "stop.never", "exists", "float64", "bool"
    ),
    lambda: objective.prompt_weight(REWARD, TRUE, REWARD, f=objective.linear): (
        "objective.prompt_weight: history has shape (2, 3) and must have (2,)."
    ),
    lambda: aggregate.token_mean(REWARD): wrong(
        "aggregate.token_mean", "mask", "float64", "bool"
    ),
    lambda: loss.clipped_ratio(REWARD, REWARD, REWARD[:1], TRUE, low=0.2, high=0.2): (
        "loss.clipped_ratio: advantage has shape (1, 3) and must have (2, 3)."
    ),
    lambda: loss.clipped_ratio(REWARD, REWARD, REWARD[0], TRUE, low=0.2, high=0.2): (
        "loss.clipped_ratio: advantage has shape (3,) and must have (2,)."
    ),
    lambda: GVM(Difficulty(pass_rate=np.ones(2), norm=np.ones(2, int))): wrong(
        "allocate.gvm", "difficulty.norm", "int64", "float"
    ),
    lambda: GVM(Difficulty(pass_rate=np.ones(2), norm=np.ones(3))): (
        "allocate.gvm: difficulty.pass_rate has shape (2,) and must have (3,), as "
        "difficulty.draws has."
    ),
}


@pytest.mark.parametrize("call", REFUSED, ids=range(len(REFUSED)))
def test_what_is_refused_is_named_with_the_function_in_one_sentence(call):
    said = message(AssertionError, call)
    assert said.startswith(REFUSED[call])
    assert said.endswith(".")
    assert "\n" not in said


def test_lists_and_float64_are_taken_as_jax_takes_them():
    reward, exists = [[1.0, 0.0, 1.0]], [[True, True, False]]
    want = advantage.leave_one_out(np.float32(reward), np.array(exists))
    for given in (reward, np.array(reward)):
        got = advantage.leave_one_out(given, exists)
        assert got.dtype == np.float32
        np.testing.assert_array_equal(got, want)
    ended = [[True] * 3]
    np.testing.assert_array_equal(gate.zero_variance(reward, exists, ended), exists)
    kept = downsample.random(jax.random.key(0), reward, exists, m=2)
    np.testing.assert_array_equal(kept, exists)
    assert stop.positives(reward, exists, right=1).tolist() == [True]
    assert aggregate.token_mean(exists).shape == (1, 3)


def test_an_allocator_needs_those_fields_that_it_reads():
    bounds = {"budget": 10, "most": 8}
    for known in (
        Difficulty(draws=np.zeros(4)),
        Difficulty(pass_rate=[0.1, 0.2, 0.3, 0.4]),
        Difficulty(**dict.fromkeys(("draws", "solved", "norm"), np.ones(4))),
    ):
        assert allocate.uniform(known, **bounds).tolist() == [3, 3, 2, 2]
    rate = np.array([0.1, 0.2, 0.4, 0.8])
    full = {"draws": 0.0, "solved": 0.0, "norm": 1.0, "tokens": 1.0}
    full = {name: np.full(4, value, np.float32) for name, value in full.items()}
    for rule in (allocate.inverse_pass_rate, allocate.inverse_root, allocate.gvm):
        got = rule(Difficulty(pass_rate=list(rate)), **bounds)
        want = rule(Difficulty(pass_rate=np.float32(rate), **full), **bounds)
        assert got.tolist() == want.tolist()


def test_traced_arrays_pass_as_they_are():
    given = []

    @checks.contract()
    def same(reward: FloatG, exists: BoolG, known: Difficulty) -> FloatG:
        assert all(map(operator.is_, (reward, exists, known.norm), given))
        return reward

    def traced(reward, exists, norm):
        given[:] = reward, exists, norm
        known = Difficulty(**dict.fromkeys(("draws", "solved", "norm"), norm))
        return same(reward, exists, known.replace(pass_rate=norm, tokens=norm))

    arrays = np.float32(REWARD), TRUE, np.ones(3, np.float32)
    assert not jax.make_jaxpr(traced)(*arrays).eqns


@checks.contract(least_group="least", lengths=())
def mine(
    reward: FloatG,
    exists: BoolG,
    wanted: FloatG | Float | None = None,
    *,
    least: Count = 1,
) -> tuple[FloatG, Bool]:
    """Of a user."""
    return jnp.where(exists, reward, 0.0), jnp.any(exists, -1)


def test_a_function_with_a_contract_is_as_it_was_for_those_who_look_at_it():
    assert [*inspect.signature(mine).parameters] == [
        *("reward", "exists", "wanted", "least")
    ]
    assert inspect.signature(mine).parameters["least"].default == 1
    assert (mine.__name__, mine.__doc__) == ("mine", "Of a user.")
    assert "def mine(" in inspect.getsource(mine)
    assert pickle.loads(pickle.dumps(mine)) is mine
    bound = pickle.loads(pickle.dumps(partial(mine, least=2)))
    assert bound.keywords == {"least": 2}
    assert declared(bound, "least_group", 1) == "least"
    assert options(bound) == {"wanted": None, "least": 2}
    assert [*wrong_values(Place(partial(mine, least=0)), "gate")] == [
        "gate.least=0 must be at least 1; set gate.least to 1."
    ]
    assert [*wrong_options(Place({"gate": partial(mine, leas=1)}), ())] == [
        f"gate.leas=1: {__name__}.mine has no option 'leas'; did you mean 'least'?"
    ]


def test_arguments_are_checked_by_name_and_by_place():
    got, some = mine(exists=TRUE, reward=REWARD.tolist(), wanted=None)
    assert isinstance(got, jax.Array)
    assert some.shape == (2,)
    assert mine(REWARD, TRUE, REWARD[:, 0])[0].dtype == np.float32
    with pytest.raises(TypeError, match=r"missing 1 required .* 'exists'"):
        mine(REWARD)
    with pytest.raises(TypeError, match="takes from 2 to 3 positional arguments"):
        mine(REWARD, TRUE, None, 1, 2)
    with pytest.raises(TypeError, match="multiple values for argument 'reward'"):
        mine(REWARD, TRUE, reward=REWARD)
    for given, says in (
        ({"exists": TRUE[:1]}, "exists has shape (1, 3) and must have (2, 3), as rew"),
        ({"wanted": REWARD[0]}, "wanted has shape (3,) and must have (2,)."),
        ({"wanted": REWARD[:1]}, "wanted has shape (1, 3) and must have (2, 3)."),
        ({"exists": None}, "exists is no array ("),
        ({"least": 0}, "least is 0 and must be at least 1; set it to 1."),
    ):
        said = message(
            AssertionError, mine, **{"reward": REWARD, "exists": TRUE} | given
        )
        assert said.startswith(f"{__name__}.mine: {says}")
    with pytest.raises(AssertionError, match=r"mask has shape \(3,\) .* \[..., M, T\]"):
        aggregate.token_mean(TRUE[0])
    with pytest.raises(AssertionError, match=r"has shape \(3,\) .* \[..., B, G\]"):
        advantage.batch_standardised(REWARD[0], TRUE[0])
    with pytest.raises(AssertionError, match=r"\(2, 3\) and must have \[B\]\.$"):
        GVM(Difficulty(draws=REWARD))


def test_outputs_are_those_of_the_arguments():
    assert checks.outputs(mine, REWARD, TRUE) == [("float", (2, 3)), ("bool", (2,))]
    norms = Difficulty(norm=np.ones(4))
    assert checks.outputs(allocate.uniform, norms) == [("int", (4,))]
    for field, function in stages.CONTRACTS.items():
        gives = function.contract.gives
        assert gives, field
        assert {*gives[0].shapes[0]} <= {*axes_of(function.contract.takes)}


def axes_of(takes):
    """Names of all axes that arguments have."""
    return [
        axis for _, part in parts_of(takes) for axes in part.shapes for axis in axes
    ]


def parts_of(takes):
    """(argument, or record and field; what is stated of it) of all that is stated."""
    for name, each in takes.items():
        fields = each if isinstance(each, dict) else {None: each}
        yield from (((name, key), part) for key, part in fields.items() if part)


# Every function with a contract, whatever it computes.
MODULES = [advantage, aggregate, allocate, correct, downsample, gate, hint, loss]
MODULES += [memory, modulate, objective, reflect, reward, score, stop]
MODULES += [confidence, counts, distance, diversity]
EVERY = [
    getattr(module, key)
    for module in MODULES
    for key in functions_of(module)
    if hasattr(getattr(module, key), "contract")
]
ZEROS = {"float": np.float32(0), "int": np.int32(0), "bool": np.bool_(0)}
SIZES = dict(zip("1BDFGMNPTVY", (1, *range(3, 13)), strict=True)) | {"...": 2}


def arguments(function, wrong=None, change=None):
    """Arrays as a function takes them; of the argument `wrong` as `change` has them."""
    hints, given = typing.get_type_hints(function), {}
    for (name, key), part in parts_of(function.contract.takes):
        array = np.full([SIZES[axis] for axis in part.shapes[0]], ZEROS[part.kind])
        array = change(array, part) if (name, key) == wrong else array
        if key is None:
            given[name] = array
        else:
            fields = dict.fromkeys(f.name for f in dataclasses.fields(hints[name]))
            given.setdefault(name, hints[name](**fields))
            given[name] = dataclasses.replace(given[name], **{key: array})
    return given


@pytest.mark.first(30)
@pytest.mark.parametrize("function", EVERY, ids=full_name)
def test_wrong_shapes_and_dtypes_are_refused_by_name(function):
    takes = function.contract.takes
    axes = axes_of(takes)

    def reshaped(array, part):
        last = part.shapes[0][-1:]
        if axes.count(*last or [None]) > len(part.shapes) - (len(part.shapes) > 1):
            return np.zeros((*array.shape[:-1], array.shape[-1] + 1), array.dtype)
        named = [axis for axis in part.shapes[0] if axis != "..."]
        return np.zeros([3] * (len(named) - 1) if named else [1], array.dtype)

    found = checks._checked(function.contract, arguments(function))
    assert found.keys() == {name for (name, _), _ in parts_of(takes)}
    called = rf"\.{function.__name__}: "
    for (name, key), part in parts_of(takes):
        for kind in ZEROS.keys() - {part.kind}:
            other = arguments(
                function, (name, key), lambda array, _, k=kind: array.astype(k)
            )
            says = f"{called}{name}.* must be {part.kind}; give"
            with pytest.raises(AssertionError, match=says):
                function(**other)
        other = arguments(function, (name, key), reshaped)
        with pytest.raises(AssertionError, match=f"{called}.* has shape .* must have"):
            function(**other)
