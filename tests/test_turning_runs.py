"""Whole runs with an environment: one path in both loops, and what is refused."""

import re
from dataclasses import replace
from functools import lru_cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import test_loops
from contracts import close

from benchmarks.turns import from_jax, here
from curax import hint, off_policy, stop
from curax.config import ConfigError, Evaluation, Hint, Mesh, Pilot, Stop, override
from curax.runs.folder import completion_rows
from curax.step import loops
from curax.step.build import build
from curax.step.methods import prefixes
from curax.tasks import chain, nim

STEPS = test_loops.STEPS
TINY = override(
    replace(
        test_loops.TINY,
        task=partial(nim.task, largest=6, smallest=3, num_prompts=64),
        evaluation=Evaluation(every=2, prompts=3, samples=4),
        kl=None,
    ),
    ["sampling.max_tokens=9"],
)


@lru_cache
def warmed():
    """A policy after its warm start, on the host."""
    loop = loops.Jitted(build(TINY))
    state = loop.initial()
    for _ in range(20):
        state, _ = loop.warm(state, 4)
    return jax.device_get(state)


def trained(config, kind=loops.Jitted):
    """Final state, rows and completions of a run."""
    loop, start = kind(build(config)), warmed()
    with loop.context():
        state = loop.begin(replace(start, seed=loop.seeds))
        state, rows, shown = loop.advance(state, STEPS)
    return jax.device_get(state), rows, jax.device_get(shown)


@lru_cache
def reference():
    return trained(TINY)


assert_same = partial(test_loops.assert_same, tolerance=1e-5)


def test_a_run_has_games_of_several_turns_whose_replies_are_not_counted():
    _, rows, shown = reference()
    for row in rows:
        assert 1 < row["turns/count"] < 4
        assert 0 < row["turns/observed_tokens"] < row["turns/count"]
        assert row["rollout/length_tokens"] > row["turns/count"]
        assert row["sampler/drift_nats"] < 1e-4
        drawn = row["rollout/drawn"]
        assert row["train/tokens"] <= drawn * row["rollout/length_tokens"] * 1.001
        assert 0 <= row["environment/safe"] <= 1
        assert row["outcome/missing"] == 0
    assert any(0 < row["outcome/mean"] < 1 for row in rows)
    assert any(one.observed.any() for one in shown)


@pytest.mark.long
def test_both_loops_give_the_same_parameters_and_metrics():
    assert_same(trained(TINY, loops.Staged)[:2], reference()[:2])


@pytest.mark.long
@pytest.mark.parametrize("kind", [loops.Staged, loops.Jitted])
def test_eight_devices_give_what_one_gives(kind):
    config = replace(TINY, mesh=Mesh(data=2, fsdp=2, tensor=2))
    assert_same(trained(config, kind)[:2], reference()[:2])


def test_a_logged_completion_says_which_of_its_tokens_the_environment_wrote():
    _, _, shown = reference()
    task = build(TINY).task
    for row in completion_rows(1, shown[0], task, np.uint32(0)):
        said, seen = row["tokens"], row["observed"]
        assert len(said) == len(seen)
        assert row["text"] == task.decode(said)
        # A turn is two tokens, and one of the opponent stands between two of them.
        if np.isin(said[~seen], [7]).sum() > 1:
            assert seen.any()


def nim_by_host(**options):
    """The same game, asked from the host."""
    made = nim.task(**options)
    world = from_jax(made.environment, steps=9, pad=made.pad)
    world = here(world, measures=("safe",))
    return replace(made, on_device=False, environment=world)


@pytest.mark.long
@pytest.mark.parametrize("mesh", [Mesh(), Mesh(data=2, fsdp=2, tensor=2)])
def test_a_run_whose_turns_the_host_answers_is_the_same_run(mesh):
    """To the order of sums: what a row holds is read by a pass, not token by token."""
    config = replace(TINY, task=partial(nim_by_host, **TINY.task.keywords), mesh=mesh)
    state, rows, shown = trained(config, loops.Staged)
    wanted, others, seen = reference()
    for one, other in zip(shown, seen, strict=True):
        np.testing.assert_array_equal(one.tokens, other.tokens)
        np.testing.assert_array_equal(one.observed, other.observed)
        np.testing.assert_array_equal(one.outcome, other.outcome)
    jax.tree.map(partial(close, rtol=0, atol=2e-4), state.params, wanted.params)
    for row, other in zip(rows, others, strict=True):
        for name in ("outcome/mean", "turns/count", "environment/safe", "train/tokens"):
            assert row[name] == pytest.approx(other[name], abs=1e-6)
        assert row["verify/error"] == row["verify/none"] == 0


OTHERS = {
    "refills": {"sampling": replace(TINY.sampling, attempts=2)},
    "pilots": {"pilot": Pilot(draws=1)},
    "rounds": {
        "stop": Stop(rule=partial(stop.balanced, right=1, wrong=1), round_size=2)
    },
    "a draw ahead": {
        "sampling": replace(
            TINY.sampling, ahead=1, off_policy=off_policy.truncated_ratio
        )
    },
}


@pytest.mark.long
@pytest.mark.parametrize("what", OTHERS)
def test_what_draws_otherwise_draws_turns_as_well(what):
    config = replace(TINY, **OTHERS[what])
    by_host = replace(config, task=partial(nim_by_host, **TINY.task.keywords))
    runs = (config, loops.Jitted), (config, loops.Staged), (by_host, loops.Staged)
    for config, kind in runs:
        loop = kind(build(config))
        with loop.context():
            state = loop.begin(loop.initial())
            _, rows, _ = loop.advance(state, 2)
        assert all(row["turns/count"] > 0 for row in rows)


# ----- what is refused


def of_task(**fields):
    """The config with other fields of its task."""
    return replace(TINY, task=lambda: replace(TINY.task(), **fields))


def unasked():
    raise AssertionError("no engine is made")


def verify(target, tokens, mask):
    del target, tokens
    return jnp.zeros(len(mask))


REFUSED = {
    "task.environment is a JAX function, and the task says that the host": of_task(
        on_device=False
    ),
    "task.environment gives outcomes, and task.verify would not be asked": of_task(
        verify=verify
    ),
    "task.environment is a function; let the task give a types.Environment": of_task(
        environment=unasked
    ),
    "task.verify=None leaves outcomes to an environment and the task has": of_task(
        environment=None
    ),
    "evaluation.confidence=5 is averaged over tokens in a row": override(
        TINY, ["evaluation.confidence=5"]
    ),
    "shape_reward=reward.soft_overlong counts the tokens of the policy": override(
        TINY, ["shape_reward=reward.soft_overlong", "shape_reward.margin=4"]
    ),
    "sampling.engine draws one turn and knows nothing of task.environment": replace(
        TINY,
        sampling=replace(
            TINY.sampling, engine=unasked, off_policy=off_policy.truncated_ratio
        ),
    ),
    "hint.source=own_prefix cuts completions, which hold what": replace(
        of_task(hinting=chain.hinting(depth=1, levels=3)),
        hint=Hint(source=prefixes.own_prefix, width=9, trigger=hint.all_wrong),
        methods=(prefixes.method,),
    ),
}


@pytest.mark.parametrize("words", REFUSED)
def test_what_makes_no_sense_with_turns_is_refused_in_a_sentence(words):
    with pytest.raises((ValueError, ConfigError), match=re.escape(words)):
        build(REFUSED[words])
