"""Both loops are one path: on one device and on eight, whole or in chunks."""

import threading
from dataclasses import replace
from functools import lru_cache, partial
from types import SimpleNamespace
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import small
from contracts import same_rows

from curax import (
    advantage,
    aggregate,
    allocate,
    correct,
    downsample,
    gate,
    loss,
    modulate,
    objective,
    reward,
    score,
    stop,
)
from curax.config import (
    KL,
    Config,
    Evaluation,
    Logging,
    Mesh,
    Pilot,
    Sampling,
    Stop,
    Update,
    WarmStart,
    override,
)
from curax.models import attention, transformer
from curax.runs.run import make_loop
from curax.step import draw, drivers, learn, loops, mesh, states
from curax.step.build import build
from curax.step.types import Graded, Method
from curax.tasks import chain
from curax.types import Terms

STEPS = 4
long = pytest.mark.long

TINY = Config(
    task=partial(chain.task, depth=1, num_prompts=64, num_held_out=32),
    model=partial(
        transformer.model,
        width=16,
        layers=1,
        heads=4,
        kv_heads=2,
        head_dim=8,
        mlp_width=32,
    ),
    warm_start=WarmStart(
        steps=80, rows=32, optimizer=partial(optax.adam, learning_rate=1e-2)
    ),
    sampling=Sampling(prompts=4, group_size=4, max_tokens=3),
    allocate=allocate.uniform,
    gate=gate.none,
    downsample=downsample.none,
    correct=correct.none,
    advantage=advantage.group_mean,
    objective=partial(objective.prompt_weight, f=objective.linear),
    modulate=modulate.none,
    loss=partial(loss.clipped_ratio, low=0.2, high=0.28),
    aggregate=aggregate.token_mean,
    # Epsilon is large, or Adam makes full steps of gradients that are rounding alone.
    optimizer=partial(optax.adam, learning_rate=1e-2, eps=1e-3),
    update=Update(epochs=1, minibatches=2),
    evaluation=Evaluation(every=2, prompts=8, samples=2),
    logging=Logging(every=4, rollout_prompts=2),
    kl=KL(estimator=loss.k3, coefficient=0.1),
    steps=STEPS,
)


@lru_cache
def warmed(seeds):
    """A policy after its warm start, on the host."""
    loop = loops.Jitted(build(replace(TINY, seeds=seeds)))
    state = loop.initial()
    for _ in range(20):
        state, _ = loop.warm(state, 4)
    return jax.device_get(state)


def trained(config, kind=loops.Jitted, chunks=(STEPS,)):
    """Final state and rows of a run in chunks of these sizes."""
    loop = kind(build(config))
    with loop.context():
        warm = replace(warmed(config.seeds), seed=loop.seeds)
        state, rows = loop.begin(warm), []
        for times in chunks:
            state, new, shown = loop.advance(state, times)
            rows += new
            assert len(shown) == times
    if kind is loops.Jitted:  # whatever was allocated, one program made all steps
        assert loop._chunk.jitted._cache_size() == 1
    return jax.device_get(state), rows


@lru_cache
def reference():
    return trained(TINY)


def assert_same(got, want, tolerance=1e-5):
    for name in ("params", "memory", "position", "step", "reference"):
        jax.tree.map(
            partial(np.testing.assert_allclose, rtol=tolerance, atol=tolerance),
            getattr(got[0], name),
            getattr(want[0], name),
        )
    same_rows(got[1], want[1])


@pytest.mark.long
def test_training_changes_the_parameters_and_solves_some_prompts():
    state, rows = reference()
    moved = jax.tree.map(
        lambda a, b: np.abs(a - b).max(), state.params, state.reference
    )
    assert min(jax.tree.leaves(moved)) > 1e-4
    assert any(0 < row["outcome/mean"] < 1 for row in rows)
    assert state.step == STEPS
    assert state.position == STEPS * TINY.sampling.prompts


def test_both_loops_give_the_same_parameters_and_metrics():
    assert_same(trained(TINY, loops.Staged), reference())


@long
def test_a_verifier_on_the_host_gives_what_the_one_on_the_device_gives():
    host = override(TINY, ["task.on_device=false"])
    assert_same(trained(host, loops.Staged), reference())


@long
def test_a_verifier_on_the_device_may_grade_prompts_that_the_host_makes():
    config = replace(TINY, task=partial(in_files, **TINY.task.keywords, on_device=True))
    loop = make_loop(config)
    assert isinstance(loop, loops.Staged)
    assert_same(trained(config, type(loop)), reference())


@pytest.mark.long
def test_seeds_side_by_side_call_back_for_prompts_and_outcomes():
    config = replace(TINY, seeds=2, warm_start=None)
    host = replace(config, task=partial(in_files, **TINY.task.keywords))
    assert isinstance(make_loop(host), loops.Jitted)
    got, want = (trained(each, loops.Jitted) for each in (host, config))
    for mine, theirs in zip(got[1], want[1], strict=True):
        for name in (
            "outcome/mean",
            "rollout/tokens",
            "group/pass_rate",
            "credit/right_sum",
        ):
            np.testing.assert_array_equal(mine[name], theirs[name], name)
    assert_same(got, want, tolerance=0)


def test_programs_of_a_run_are_compiled_as_the_mesh_says(monkeypatch):
    warm = jax.device_put(warmed(1))
    begun = loops.Jitted(build(TINY)).begin(warm)
    options = {"xla_no_such_option": 1}
    monkeypatch.setattr(mesh, "compiler_options", lambda *_, **__: options)
    for kind in (loops.Staged, loops.Jitted):
        loop = kind(build(TINY))
        for run in (
            loop.initial,
            partial(loop.begin, warm),
            partial(loop.warm, warm, 1),
            partial(loop.advance, begun, 1),
        ):
            with pytest.raises(jax.errors.JaxRuntimeError, match="xla_no_such_option"):
                run()


PARTS = override(TINY, ["task.on_device=false", "sampling.chunks=4"])


@pytest.mark.long
def test_a_draw_in_parts_gives_what_a_whole_one_gives():
    assert_same(trained(PARTS, loops.Staged), reference())


def in_files(*, on_device=False, **options):
    return small.of_host(chain.task(**options, on_device=on_device))


@pytest.mark.long
def test_prompts_that_the_host_makes_give_what_those_of_the_device_give():
    config = replace(TINY, task=partial(in_files, **TINY.task.keywords))
    assert_same(trained(config, loops.Staged), reference())
    loops_ = [loops.Staged(build(config)), loops.Jitted(build(TINY))]
    warm = [loop.warm(loop.initial(), 3) for loop in loops_]
    np.testing.assert_allclose(warm[0][1], warm[1][1], rtol=1e-5)
    jax.tree.map(
        partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-6),
        *(jax.device_get(state.params) for state, _ in warm),
    )
    state = jax.device_put(warmed(1))
    got, want = (loop.evaluate(loop.begin(state)) for loop in loops_)
    jax.tree.map(np.testing.assert_array_equal, got, want)


@long
def test_the_host_verifies_one_part_while_the_next_is_drawn():
    """Each part but the last is done only when the one behind it has been begun."""
    begun = [threading.Event() for _ in range(5)]
    graded = []

    def task(**options):
        made = chain.task(**options)

        def verify_all(targets, completions):
            number = len(graded)
            assert number == 3 or begun[number + 1].wait(60)
            graded.append(number)
            pairs = zip(targets, completions, strict=True)
            return [made.verify(target, tokens) for target, tokens in pairs]

        return replace(made, verify_all=verify_all)

    loop = loops.Staged(
        build(replace(PARTS, task=partial(task, **PARTS.task.keywords)))
    )
    call = loop._drive.call

    def spied(function, parts, *args):
        if function is draw.chunk_rows:
            begun[int(args[-1])].set()
        return call(function, parts, *args)

    loop._drive.call = spied
    _, (row,), _ = loop.advance(loop.begin(jax.device_put(warmed(1))), 1)
    assert graded == [0, 1, 2, 3]
    assert row["rollout/drawn"] == 16
    assert row["verify/timeout"] == row["verify/error"] == 0


def test_every_missing_outcome_is_counted_by_its_reason_or_as_another():
    clock = drivers.Clock()
    for said in (["none", *["timeout"] * 2, *["refused: no"] * 3, "busy"], ["error"]):
        outcome = np.full(len(said), np.nan)
        clock.graded(0.5, reward.Verdicts(outcome, dict(enumerate(said))))
    row = clock.row(on_device=False)
    got = {name: n for name, n in row.items() if name.startswith("verify/")}
    counts = {"none": 1, "error": 1, "timeout": 2, "crash": 0, "other": 4}
    assert got == {f"verify/{kind}": n for kind, n in counts.items()}


def rising(difficulty, *, budget, most):
    """Groups of unequal sizes: 3, 4, 5 and `most` completions."""
    del budget
    return most - jnp.arange(difficulty.prompts, dtype=jnp.int32)[::-1]


STOPPED = replace(
    TINY,
    allocate=rising,
    sampling=Sampling(prompts=4, group_size=6, max_tokens=3),
    stop=Stop(rule=partial(stop.balanced, right=1, wrong=1), round_size=2),
    downsample=partial(downsample.balanced, m=4),
    correct=correct.horvitz_thompson,
)


@pytest.mark.long
def test_a_stopping_rule_draws_the_same_in_the_decoding_loop_and_between_rounds():
    """The host cannot look into the loop, and tests the rule round by round.

    No prompt draws more than the allocator gives it.
    """
    want = trained(STOPPED)
    drawn = {float(row["group/draws"]) for row in want[1]}
    assert len(drawn) > 1
    assert 2 <= min(drawn) < max(drawn) <= (3 + 4 + 5 + 6) / 4
    assert any(row["stop/met_fraction"] > 0 for row in want[1])
    assert_same(trained(STOPPED, loops.Staged), want)
    host = override(STOPPED, ["task.on_device=false"])
    assert_same(trained(host, loops.Staged), want)


@pytest.mark.long
def test_pilots_decide_what_is_drawn_and_do_not_train_in_both_loops():
    """L23: pilots are not among the rows that train."""
    config = replace(
        TINY,
        sampling=Sampling(prompts=4, group_size=8, max_tokens=3, budget=24),
        pilot=Pilot(draws=2, norm=score.logits),
        allocate=partial(allocate.gvm, least=1),
    )
    want = trained(config)
    assert_same(trained(config, loops.Staged), want)
    for row in want[1]:
        assert row["pilot/drawn"] == 8
        assert row["rollout/drawn"] == 24
        assert row["train/rows"] == 16
        assert row["group/draws"] == 4
    # Both kinds of completions are remembered: all of one visit, none discounted.
    drawn = np.asarray(want[0].memory.draws)
    assert set(drawn[drawn > 0]) >= {6.0}


def test_pilots_of_several_steps_are_drawn_by_one_policy():
    """As if at once: the first step of each K is that of fresh pilots."""
    config = replace(TINY, pilot=Pilot(draws=1, every=3))
    parts = build(config)
    (own,) = (method for method in parts.methods if method.name == "pilots")
    assert own.init
    assert own.after_update
    assert build(replace(TINY, pilot=Pilot(draws=1))).methods[0].init is None
    held, seen = {"x": jnp.float32(0)}, []
    for step in range(6):
        seen.append(float(held["x"]))
        after = SimpleNamespace(
            params={"x": jnp.float32(step + 1)},
            step=jnp.int32(step + 1),
            methods={"pilots": held},
        )
        held = own.after_update(drivers.Traced(), parts, after, None)
    assert seen == [0, 0, 0, 3, 3, 3]


@pytest.mark.long
def test_chunks_of_any_size_give_the_same_bits():
    for chunks in ((1, 3), (1, 1, 1, 1)):
        state, rows = trained(TINY, chunks=chunks)
        jax.tree.map(np.testing.assert_array_equal, state, reference()[0])
        same_rows(rows, reference()[1], rtol=0, atol=0)


MAGNITUDES = ("optimizer.learning_rate", "loss.high", "sampling.temperature")


def run(seed, *magnitudes):
    """A run whose magnitudes may be traced: they are set while it is."""
    values = dict(zip(MAGNITUDES, magnitudes, strict=True))
    return loops.run(build(override(TINY, values)), seed)


run_alone = jax.jit(run)


@pytest.mark.long
def test_the_whole_run_is_one_pure_function_of_its_seed():
    state, values = run_alone(jnp.uint32(TINY.seed), 1e-2, 0.28, 1.0)
    rows = [{name: value[i] for name, value in values.items()} for i in range(STEPS)]
    want = [{n: v for n, v in row.items() if n in values} for row in reference()[1]]
    assert_same((jax.device_get(state), rows), (reference()[0], want))


@long
def test_many_seeds_take_no_kernel_that_cannot_be_mapped_over(monkeypatch):
    taken = set()

    @jax.custom_batching.custom_vmap
    def flash(q, k, v, seen):
        return q

    @flash.def_vmap
    def _(*_):
        raise AssertionError("mapped over")

    def long(*arrays, causal):
        taken.add("flash_long")
        return attention.plain(*arrays, causal=causal)

    monkeypatch.setattr(attention, "platform", lambda: "gpu")
    monkeypatch.setattr(attention, "ampere", lambda: True)
    monkeypatch.setattr(attention, "flash", lambda *arrays, causal: flash(*arrays))
    monkeypatch.setattr(attention, "flash_long", long)
    half = override(TINY, {"model.dtype": "bfloat16"})
    loop = loops.Jitted(build(replace(half, seeds=2, warm_start=None)))
    loop.advance(loop.begin(loop.initial()), 1)
    assert taken == {"flash_long"}


@pytest.mark.long
def test_runs_are_vmapped_over_seeds_and_over_magnitudes():
    columns = (
        jnp.array([0, 1, 0], jnp.uint32),
        jnp.array([1e-2, 1e-2, 1e-3]),
        jnp.array([0.28, 0.28, 0.1]),
        jnp.array([1.0, 1.0, 0.7]),
    )
    many = jax.jit(jax.vmap(run))(*columns)
    close = partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-4)
    embedded = many[0].params["embed"]
    for i in range(3):
        alone = run_alone(*(column[i] for column in columns))
        jax.tree.map(lambda got, want, i=i: close(got[i], want), many, alone)
        assert np.abs(embedded[i] - embedded[i - 1]).max() > 1e-3


@pytest.mark.long
@pytest.mark.parametrize("kind", [loops.Jitted, loops.Staged])
def test_eight_devices_give_what_one_gives(kind):
    config = replace(TINY, mesh=Mesh(data=2, fsdp=2, tensor=2))
    loop = kind(build(config))
    with loop.context():
        state = loop.begin(loop.initial())
        shard = state.params["layers"]["0"]["q"]["kernel"].sharding.shard_shape(
            (16, 32)
        )
    assert shard == (8, 16)  # over fsdp and over tensor
    assert_same(trained(config, kind), reference())


# All at once first, then one by one.
COSTS = ("update.length_buckets=3", "update.token_chunk=5", "sampling.slots=3")


@long
@pytest.mark.parametrize(
    "words",
    [
        [*COSTS, "update.micro_batches=4"],
        ["update.micro_batches=4"],
        ["update.micro_batches=4", "update.length_buckets=3"],
        ["update.token_chunk=5"],
        ["update.tokens_per_micro_batch=12"],
        ["sampling.slots=3"],
    ],
    ids=str,
)
def test_what_only_costs_memory_or_time_changes_no_result(words):
    assert_same(trained(override(TINY, words)), reference())


def test_sampler_and_trainer_agree_to_a_ten_thousandth_of_a_nat():
    for row in reference()[1]:
        assert 0 < row["sampler/drift_nats"] < 1e-4


@pytest.mark.long
def test_a_second_mini_batch_is_off_policy_and_a_first_is_not():
    one = trained(override(TINY, ["update.minibatches=1"]))[1]
    assert max(row["kl/behaviour_nats"] for row in one) < 1e-9
    assert max(row["kl/behaviour_nats"] for row in reference()[1]) > 1e-6


@long
@pytest.mark.parametrize(
    "gate_", [pytest.param(gate.none, marks=long), gate.zero_variance]
)
def test_without_a_right_completion_nothing_is_updated_and_nothing_is_nan(gate_):
    hopeless = replace(TINY, gate=gate_, kl=None)
    hopeless = override(hopeless, ["sampling.max_tokens=1"])
    state, rows = trained(hopeless, chunks=(2,))
    jax.tree.map(np.testing.assert_array_equal, state.params, warmed(1).params)
    for row in rows:
        assert row["group/dead_fraction"] == 1
        assert row["update/count"] == 0
        assert row["update/skipped"] == 2
        assert np.isfinite(row["loss/mean"])


@long
def test_groups_are_refilled_alike_in_both_loops():
    refilling = replace(TINY, gate=gate.zero_variance)
    refilling = override(refilling, ["sampling.attempts=3"])
    want = trained(refilling)
    assert_same(trained(refilling, loops.Staged), want)
    drawn = [row["rollout/drawn"] for row in want[1]]
    assert max(drawn) > 16
    assert want[0].position == sum(drawn) / TINY.sampling.group_size


def of_terms(**options):
    """The task with a reward of one and a half times the outcome, in two terms."""
    made = chain.task(**options, on_device=False)

    def verify_all(targets, completions):
        pairs = zip(targets, completions, strict=True)
        right = [made.verify(target, tokens) for target, tokens in pairs]
        return {"again": right, "right": right}

    terms = Terms(
        weights={"right": 1.0, "again": 0.5}, outcome="right", verify_all=verify_all
    )
    return replace(made, terms=terms)


def half_more(outcome, length):
    return 1.5 * outcome


@pytest.mark.long
@pytest.mark.parametrize("how", ["parts", "whole", "rounds", "refills"])
def test_terms_of_a_reward_follow_their_completions_however_these_are_drawn(how):
    config = {
        "whole": TINY,
        "parts": override(TINY, ["sampling.chunks=4"]),
        "rounds": STOPPED,
        "refills": override(
            replace(TINY, gate=gate.zero_variance), ["sampling.attempts=3"]
        ),
    }[how]
    one = replace(config, shape_reward=half_more)
    want = trained(override(one, ["sampling.chunks=1"]))
    several = replace(config, task=partial(of_terms, **TINY.task.keywords))
    loop = loops.Staged(build(several))
    loop.rehearse()
    got = trained(several, loops.Staged)
    assert_same(got, want)
    for row in got[1]:
        assert row["term/right"] == row["term/again"]
        if how in ("whole", "parts"):
            np.testing.assert_allclose(row["term/right"], row["outcome/mean"])
            np.testing.assert_allclose(row["reward/mean"], 1.5 * row["outcome/mean"])


def test_terms_that_nobody_would_ask_are_refused():
    several = replace(TINY, task=partial(of_terms, **TINY.task.keywords))

    def grading():
        return Method(name="mine", grade=lambda drive, parts, state, drawn: None)

    with pytest.raises(ValueError, match="terms") as caught:
        build(replace(several, methods=(grading,)))
    assert str(caught.value) == (
        "mine grades in place of the verifier, and the terms of graders.weighted would "
        "not be asked; set methods without it, or task.grader to one of them."
    )

    def on_device(**options):
        return replace(of_terms(**options), on_device=True)

    with pytest.raises(ValueError, match="terms") as caught:
        build(replace(several, task=partial(on_device, **TINY.task.keywords)))
    assert str(caught.value) == (
        "the terms of a reward are graded on the host, and this task is verified on "
        "the device; set on_device of the task to False."
    )
    guarded = partial(advantage.guarded, estimate=advantage.group_mean, least=2)
    with pytest.raises(ValueError, match=r"^advantage\.least=2 counts .* task\.grader"):
        build(replace(several, advantage=guarded))


@long
def test_a_missing_outcome_is_neither_right_nor_wrong():
    parts = build(TINY)
    state = states.begin(parts, jax.device_put(warmed(1)))
    outcome = jnp.zeros(16).at[::4].set(jnp.nan).at[1::4].set(1.0)

    @jax.jit
    def made(state, outcome):
        request = draw.next_request(drivers.Traced(), parts, state)
        rollouts = draw.draw(parts, state, request)
        graded = Graded.of(request, rollouts, outcome)
        drawn = draw.collect(parts, request, graded, None)
        return drawn, learn.learn(parts, state, drawn)

    drawn, (_, (values, shown)) = made(state, outcome)
    np.testing.assert_allclose(drawn.memory.draws[drawn.prompts.id], 3.0)
    np.testing.assert_allclose(drawn.memory.solved[drawn.prompts.id], 1.0)
    assert values["outcome/missing"] == 4
    assert values["train/rows"] == 12
    assert np.isnan(shown.outcome[:, 0]).all()
    assert not shown.keep[:, 0].any()
    np.testing.assert_allclose(shown.credit[:, 1], 2 / 3, rtol=1e-6)
    np.testing.assert_allclose(values["group/pass_rate"], 1 / 3, rtol=1e-6)
    # Groups without any outcome have no pass rate, in place of one of 0.
    _, (_, (values, _)) = made(state, outcome.at[4:].set(jnp.nan))
    np.testing.assert_allclose(values["group/pass_rate"], 1 / 3, rtol=1e-6)


def test_a_chunk_runs_one_program_and_draws_nothing_to_throw_away():
    calls = []

    def chunk(state, magnitudes, times):
        calls.append(times)
        return state, ({"outcome/mean": np.zeros(times)}, np.zeros((times, 1)))

    only = SimpleNamespace(_chunk=chunk, magnitudes={}, many=False)
    _, rows, shown = loops.Jitted.advance(cast(Any, only), cast(Any, None), 2)
    assert calls == [2]
    assert [set(row) for row in rows] == [{"outcome/mean", "time/step_s"}] * 2
    assert len(shown) == 2
