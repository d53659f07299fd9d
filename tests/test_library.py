"""`import curax`: the names it gives, and the page that shows each of them."""

import errno
import re
import subprocess
import sys
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any
from unittest import mock

import jax
import numpy as np
import optax
import pytest
import small
from safetensors import numpy

import curax
from curax import advantage, aggregate, library
from curax.config import ConfigError, override
from curax.step import draw, drivers
from curax.theory import predict
from curax.types import HostEnvironment, Prompts

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "use_as_a_library.md").read_text()
README = (ROOT / "README.md").read_text()
BLOCKS = re.findall(r"^```python\n(.*?)^```$", PAGE, re.M | re.S)
TINY = """
from dataclasses import replace
from functools import partial

import small
from curax.tasks import chain


def get_config():
    task = partial(chain.task, num_prompts=64, num_held_out=32)
    return replace(small.get_config(), task=task)
"""


@pytest.fixture(scope="module")
def followed(tmp_path_factory):
    """What the names of the page hold behind its last line; its quickstart is small."""
    folder = tmp_path_factory.mktemp("library")
    (folder / "configs").mkdir()
    (folder / "configs" / "quickstart.py").write_text(TINY)
    for name in ("grpo", "maxrl"):
        text = (ROOT / "configs" / f"{name}.py").read_text()
        (folder / "configs" / f"{name}.py").write_text(text)
    names = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        for block in BLOCKS:
            exec(compile(block, "docs/use_as_a_library.md", "exec"), names)
    return names


@pytest.fixture(scope="module")
def begun(followed):
    """The state before the first step of the page."""
    return curax.init(followed["parts"], seed=0)


@pytest.mark.long
def test_every_block_of_the_page_runs_as_it_stands(followed):
    assert len(BLOCKS) == 7
    assert int(followed["mine"].step) == 4
    assert followed["config"].steps == 50
    assert int(followed["state"].step) == 3
    assert followed["metrics"]["reward/mean"].shape == (8, 50)
    assert np.argmax(followed["logits"]) == 3
    assert all(len(block.strip().splitlines()) <= 22 for block in BLOCKS)


@pytest.mark.long
def test_a_run_is_init_and_steps_of_the_same_seed(followed, begun):
    """Seed 0 of eight; three steps by hand."""
    state, step = begun, followed["step"]
    for i in range(3):
        state, metrics = step(state)
        for name, value in metrics.items():
            close = {"rtol": 1e-3, "atol": 1e-3, "err_msg": name}
            np.testing.assert_allclose(followed["metrics"][name][0, i], value, **close)
    jax.tree.map(np.testing.assert_array_equal, followed["state"].params, state.params)


def test_a_run_is_a_function_of_magnitudes_too():
    """Traced without a program, for what it would return; with a warm start."""
    plain = override(small.get_config(), {"steps": 50})

    def trained(rate):
        config = override(plain, {"optimizer.learning_rate": rate})
        return curax.run(curax.build(config), 0)

    rates = jax.ShapeDtypeStruct((3,), "float32")
    state, metrics = jax.eval_shape(jax.vmap(trained), rates)
    assert metrics["reward/mean"].shape == (3, 50)
    one = jax.eval_shape(lambda: curax.init(curax.build(plain), 0))
    many = jax.tree.map(lambda x: (3, *x.shape), one)
    assert jax.tree.map(lambda x: x.shape, state) == many


@pytest.mark.long
def test_the_x_ray_as_numbers_is_that_of_the_command(followed):
    del followed  # its programs are compiled
    p = np.array([0.01, 0.5])
    config = curax.load(ROOT / "configs" / "maxrl.py")
    want = predict.predict(config, p, np.array([0.2, 0.5, 0.8]))
    got = curax.predict(config, list(p), [0.2, 0.5, 0.8])
    np.testing.assert_array_equal(got.weight, want.weight)
    np.testing.assert_allclose(got.weight, (1 - (1 - p) ** 7) / p, rtol=1e-5)


def host_task(*, files, **options):
    """The task of `small`, graded in Python; its prompts are numpy arrays if so."""
    made = small.task(**options, on_device=False)
    return small.of_host(made) if files else made


@pytest.mark.long
@pytest.mark.parametrize("files", [True, False], ids=["in files", "generated"])
def test_a_task_that_is_graded_in_python_takes_steps_too(files):
    """They are those of the task that is graded by a JAX function."""
    config = small.get_config()
    device = curax.build(config)
    host = curax.build(replace(config, task=partial(host_task, files=files)))
    states = [curax.init(parts, seed=5) for parts in (host, device)]
    steps = [curax.train_step(parts) for parts in (host, device)]
    for _ in range(2):
        before, params = states[0], jax.device_get(states[0].params)
        (one, got), (other, want) = (
            step(state) for step, state in zip(steps, states, strict=True)
        )
        jax.tree.map(np.testing.assert_array_equal, before.params, params)  # valid
        states = [one, other]
        assert got.keys() - want.keys() == {
            f"verify/{kind}" for kind in ("none", "error", "timeout", "crash", "other")
        }
        for name, value in want.items():
            close = {"rtol": 1e-3, "atol": 1e-4, "err_msg": name}
            np.testing.assert_allclose(got[name], value, **close)
            assert (got[name].shape, got[name].dtype) == ((), np.float32)
    jax.tree.map(
        partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-5),
        *(state.params for state in states),
    )
    assert int(states[0].seed) == 5


@pytest.mark.long
def test_a_run_calls_back_for_a_task_that_the_host_reads_and_grades():
    config = replace(small.get_config(), warm_start=None)
    tasks = config.task, partial(host_task, files=True)
    each = [curax.build(replace(config, task=task)) for task in tasks]
    two = np.arange(2, dtype=np.uint32)
    device, host = (jax.jit(jax.vmap(partial(curax.run, x)))(two) for x in each)
    jax.tree.map(np.testing.assert_array_equal, host, device)


def test_what_no_program_can_call_is_refused_in_a_sentence():
    meshed = curax.build(override(small.get_config(), {"mesh.data": 2}))
    built = curax.build(small.get_config())
    with pytest.raises(ConfigError, match=r"^sampling\.engine draws.*curax\.train\.$"):
        curax.run(replace(built, engine=object()))
    terms = replace(built.task, on_device=False, terms=object())
    with pytest.raises(ConfigError, match=r"set task\.grader to one of them\.$"):
        curax.run(replace(built, task=terms))
    two = replace(small.get_config(), seeds=2, task=lambda: terms)
    with pytest.raises(ConfigError, match=r"^seeds=2, but the reward of the task has"):
        curax.build(two)
    learnt = override(small.get_config(), {"memory.load": "memory.jsonl"})
    for call in (curax.init, curax.run):
        with pytest.raises(
            ConfigError, match=r"^memory\.load=.* set memory\.load to N"
        ):
            call(curax.build(learnt))
    nothing: Any = [None] * 4
    asked = replace(
        built.task, environment=HostEnvironment(answer=list), on_device=False
    )
    with pytest.raises(ConfigError, match=r"^task\.environment is asked from the host"):
        curax.sample(replace(built, task=asked), *nothing)
    with pytest.raises(ConfigError, match=r"^each=0 must be at least 1\.$"):
        curax.sample(built, None, None, 0, None)  # pyright: ignore[reportArgumentType]
    for call in (curax.init, curax.train_step, curax.run):
        with pytest.raises(ConfigError, match=r"mesh\.data, .* to 1"):
            call(meshed)
    config = override(curax.load(ROOT / "configs" / "dro.py"), {"steps": 1})
    with pytest.raises(ConfigError, match="set reflection to None"):
        curax.predict(config, 0.5)
    grpo = curax.load(ROOT / "configs" / "grpo.py")
    for rates in ([0.5, 0.0], 1.0, 1.5, np.nan, [], [[0.5]], "half", None):
        with pytest.raises(ConfigError, match=r"^p=.* give numbers in \(0, 1\)\.$"):
            curax.predict(grpo, rates)
    with pytest.raises(ConfigError, match=r"^population=.* numbers in \[0, 1\]\.$"):
        curax.predict(grpo, 0.5, [0.0, 1.1])
    with pytest.raises(ConfigError, match="holds out"):
        curax.build(override(small.get_config(), {"evaluation.prompts": 1000}))


def test_import_curax_is_cheap_and_its_names_are_there():
    code = (
        "import sys, curax; from curax import load, override, config; dir(curax); "
        "assert not {'jax', 'numpy', 'flax'} & set(sys.modules), 'heavy'; "
        "assert callable(curax.predict) and curax.run is curax.run; "
        "assert all(hasattr(curax, name) for name in curax.__all__); "
        "assert not hasattr(curax, 'trainer') and not hasattr(curax, '__wrapped__'); "
        "from curax import advantage; assert advantage is curax.advantage; "
        "from curax.theory import predict; assert callable(predict.predict); "
        "assert callable(curax.predict)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)


def test_the_page_has_every_name():
    functions = set(re.findall(r"^\| `curax\.(\w+)\(", PAGE, re.M))
    assert functions == {n for n in curax.__all__ if callable(getattr(curax, n))}


@pytest.mark.long
def test_the_block_of_the_readme_runs_too(followed, begun, monkeypatch):
    """By the programs of the page, which are compiled; small as its quickstart."""
    (block,) = re.findall(r"^```python\n(.*?)^```$", README, re.M | re.S)
    assert len(block.strip().splitlines()) <= 7
    small_parts, program = followed["parts"], followed["step"]
    monkeypatch.setattr(library, "build", lambda config: small_parts)
    monkeypatch.setattr(library, "init", lambda parts, seed: begun)
    monkeypatch.setattr(library, "train_step", lambda parts: program)
    names = {}
    exec(compile(block, "README.md", "exec"), names)
    assert int(names["state"].step) == small_parts.config.steps
    assert names["metrics"].keys() == followed["metrics"].keys()


def test_rows_to_train_on_fit_their_prompts():
    """Indices behind the last prompt would be those of the last, without a word."""
    tokens = np.zeros((6, 3), np.int32)
    two: Any = {"tokens": tokens[:2], "mask": tokens[:2] == 0, "id": np.arange(2)}
    prompts = Prompts(**two, target=None)
    mask, context = tokens == 0, np.arange(6) // 3
    assert curax.datum(prompts, tokens, mask, context=context).batch.mask.shape == (
        6,
        3,
    )
    plain = curax.datum(prompts, tokens[:2], mask[:2])
    assert (plain.batch.credit == 1).all()
    with pytest.raises(ConfigError, match="given 6 rows of 2 prompts; give context"):
        curax.datum(prompts, tokens, mask)
    wrong = {
        "logp": mask[:, :2],
        "context": context[:2],
        "tokens": tokens[:, :1],
        "advantage": np.ones(3),
        "support": tokens[:4, :, None],
        "mask": mask[:0],
    }
    given: Any = {"tokens": tokens, "mask": mask, "context": context}
    for name, value in wrong.items():
        with pytest.raises(ConfigError, match=f"^{name} of curax.datum has shape"):
            curax.datum(prompts, **given | {name: value})
    for place in (2, -1):
        with pytest.raises(ConfigError, match=f"has {place}, and there are 2 prompts"):
            curax.datum(prompts, **given | {"context": np.full(6, place)})
    for credit in (np.ones(6), np.ones((6, 3)), 0.5):
        rows = curax.datum(prompts, **given, advantage=credit)
        assert rows.batch.credit.shape == (6, 3)


def even(target, tokens, mask):
    """A verifier that a random policy satisfies now and then."""
    return (tokens[:, 0] % 2 == 0).astype(np.float32)


@cache
def small_run(**changes):
    """Components and first state of a small recipe of one update."""
    config = override(
        small.get_config(),
        {
            "warm_start": None,
            "advantage": advantage.leave_one_out,
            "aggregate": aggregate.token_mean,
            "optimizer": partial(optax.sgd, learning_rate=0.1),
            "update.minibatches": 1,
        }
        | {f"sampling.{name}": value for name, value in changes.items()},
    )
    task = config.task
    parts = curax.build(replace(config, task=lambda: replace(task(), verify=even)))
    return parts, curax.init(parts, seed=3)


def test_prompts_may_be_of_the_host_as_those_of_files_are():
    parts, state = small_run()
    prompts = parts.task.prompts(jax.numpy.arange(2))
    given = []
    for asked in (prompts, jax.tree.map(np.asarray, prompts)):

        @jax.jit
        def drawn(state, key, asked=asked):
            own = curax.sample(parts, state, asked, 2, key)
            rows = curax.datum(asked, own.tokens, own.mask, context=own.context)
            return own.tokens, curax.compute_logprobs(parts, state, rows)

        given.append(drawn(state, jax.random.key(0)))
    jax.tree.map(np.testing.assert_array_equal, *given)


def test_the_share_of_each_token_is_asked_for():
    """One of rows would be taken for one of columns, where there are as many."""
    parts, state = small_run()
    tokens = np.ones((4, 4), np.int32)
    rows = curax.datum(parts.task.prompts(np.arange(4)), tokens, tokens > 0)
    with pytest.raises(ConfigError, match=r"weight of .* has shape \(4,\)"):
        curax.forward_backward(
            parts, state, rows, curax.loss.reinforce, weight=np.ones(4)
        )


@pytest.mark.parametrize(
    "changes",
    [
        {},
        pytest.param(
            {"top_p": 0.8, "replay_support": True},
            marks=pytest.mark.long,
        ),
    ],
    ids=["whole", "replayed"],
)
def test_the_parts_of_a_step_make_the_update_of_the_shipped_one(tmp_path, changes):
    """One step of a recipe, from its own rollouts, by the functions for other loops."""
    parts, state = small_run(**changes)

    @jax.jit
    def by_hand(state):
        drive = drivers.Traced()
        request = draw.next_request(drive, parts, state)
        prompts = request.prompts
        drawn = curax.sample(parts, state, prompts, 4, request.key)
        outcome = curax.reward.on_device(parts.task, prompts, drawn).reshape(4, 4)
        credit = advantage.leave_one_out(outcome, outcome >= 0).reshape(-1)
        policy = {"logp": drawn.logp_behaviour, "context": drawn.context}
        policy["support"] = drawn.support
        rows = curax.datum(
            prompts, drawn.tokens, drawn.mask, advantage=credit, **policy
        )
        share = aggregate.token_mean(drawn.mask)
        loss = curax.loss.clipped_ratio
        gradient, seen = curax.forward_backward(parts, state, rows, loss, weight=share)
        logp = curax.compute_logprobs(parts, state, rows)
        return curax.optim_step(parts, state, gradient), seen, logp, drawn

    got, seen, logp, drawn = by_hand(state)
    want, metrics = curax.train_step(parts)(state)
    close = partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-6)
    jax.tree.map(close, got.params, want.params)
    close(seen["loss"], metrics["loss/mean"])
    kept = np.asarray(drawn.mask)
    close(logp[kept], drawn.logp_behaviour[kept], atol=1e-5)
    np.testing.assert_array_equal(seen["logp"][kept], logp[kept])
    moved = jax.tree.map(np.array_equal, got.params, state.params)
    assert not any(jax.tree.leaves(moved))
    assert int(got.step) == 1
    curax.save_for_sampler(parts, got, tmp_path / "policy")
    saved = numpy.load_file(tmp_path / "policy" / "model.safetensors")
    embed = saved["model.embed_tokens.weight"]
    np.testing.assert_array_equal(embed, got.params["embed"])
    with pytest.raises(ConfigError, match="cannot be written: Not a directory"):
        curax.save_for_sampler(parts, got, tmp_path / "policy/config.json/inside")
    full = mock.Mock(side_effect=OSError(errno.ENOSPC, "No space left on device"))
    written = mock.patch.object(Path, "write_bytes", full)
    with written, pytest.raises(OSError, match="No space"):
        curax.save_for_sampler(parts, got, tmp_path / "other")
