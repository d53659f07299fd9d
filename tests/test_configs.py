"""Every file in configs/ loads, says what it is, and trains."""

import ast
import inspect
import json
import shlex
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import real
import test_testbed
import tiny
from kinds import FIRST, one_of_each_first

from curax import train
from curax.config import load, override
from curax.runs import run
from curax.settings.cli import recipe_of
from curax.settings.config_paths import describe, option
from curax.settings.recipes import recipes
from curax.step import loops, states
from curax.step.build import build
from curax.tasks import chain, layouts
from curax.testbed import embedded

ROOT = Path(__file__).parent.parent
FILES = sorted([*ROOT.glob("configs/*.py"), *ROOT.glob("experiments/*/config.py")])
EMBEDDED = [path for path in FILES if "return embedded(" in path.read_text()]
# Those without a verifier, which `test_reflected` trains, and none takes over.
REFLECTIVE = [path for path in EMBEDDED if "rationale.task" in path.read_text()]
RECIPES = [path for path in EMBEDDED if path not in REFLECTIVE]
# Those that take one of them to a real model.
REAL = [
    path for path in FILES if path not in EMBEDDED and path.parent.name == "configs"
]  # those of papers take a step in `test_papers`
GENERATED = {"text.py"}  # on no files: `test_word_problems` trains it
ON_FILES = [path for path in REAL if path.name not in GENERATED]
SUPERVISED = {"sft_gsm8k_qwen3_0p6b.py"}  # by supervised steps alone: has no recipe


def name(path):
    return str(path.relative_to(ROOT))


def for_each(paths):
    return pytest.mark.parametrize("path", paths, ids=name)


for_every_config = for_each(FILES)

SMALL = {"logging.every": 1, "steps": 1}


def task(*, hints=False):
    """The task of the recipes, but luck solves half of it and soon comes to an end."""

    def verify(target, tokens, mask):
        return (tokens[:, 0] % 2 == 0).astype(jnp.float32)

    filed = (0.05, 0.4, 0.85) if hints else None
    strict = chain.task(depth=2, num_prompts=64, hints=hints, hint_errors=filed)
    return replace(strict, verify=verify, end=tuple(range(chain.MODULUS)))


def shrunk(config):
    """The config with its functions and its structure, but few and small arrays."""
    group = min(config.sampling.group_size, 4)
    prompts = 16 // group
    small = SMALL | {"sampling.group_size": group, "sampling.prompts": prompts}
    each = group
    if option(config.downsample, "m"):
        small["downsample.m"] = each = 2
    if config.sampling.budget:
        small["sampling.budget"] = 3 * prompts
        each = 3
    if config.pilot:
        small["pilot.draws"], each = 1, 2
    # What follows from these, and what would ask for more than there is.
    follow = {"correct.rows": each, "correct.limit": group, "allocate.unit": 1}
    for name, value in (follow | {"allocate.least": 1, "stop.round_size": 2}).items():
        stage, _, key = name.partition(".")
        if option(getattr(config, stage), key) or (stage == "stop" and config.stop):
            small[name] = value
    own = partial(task, hints=config.hint is not None)
    config = replace(config, task=own, model=tiny.table, warm_start=None)
    return override(config, small)


@for_every_config
def test_a_config_loads_and_describes_itself_in_json(path):
    config = load(path)
    text = json.dumps(describe(config), allow_nan=False)
    assert json.loads(text) == describe(load(path))


@for_every_config
def test_a_docstring_says_which_paper_how_to_run_it_and_what_it_optimises(path):
    says = ast.get_docstring(ast.parse(path.read_text())) or ""
    parts = {}
    for line in says.splitlines()[2:]:
        key, colon, text = line.partition(":")
        if colon and not line.startswith(" "):
            parts[key] = text
        else:
            parts[list(parts)[-1]] += f" {line}"
    assert {"Paper", "Command", "w(p)"} <= set(parts)
    assert "arXiv:" in parts["Paper"]

    python, module, name, *arguments = shlex.split(parts["Command"])
    assert (python, module, name) == ("python", "-m", train.__name__)
    args = train.parser().parse_args(arguments)
    name = recipe_of(args, train.DEFAULT)
    assert recipes().get(name, ROOT / name).resolve() == path


@for_each(EMBEDDED)
def test_a_recipe_is_at_most_25_lines_of_code(path):
    text = path.read_text()
    code = text.splitlines()[ast.parse(text).body[1].lineno - 1 :]
    assert len([line for line in code if line.strip(" ").partition("#")[0]]) <= 25


@for_each(EMBEDDED)
def test_a_recipe_repeats_nothing_that_its_test_bed_says(path):
    calls = [n for n in ast.walk(ast.parse(path.read_text())) if type(n) is ast.Call]
    (call,) = [call for call in calls if ast.unparse(call.func) == "embedded"]
    said = {keyword.arg for keyword in call.keywords}
    left_open = set(inspect.signature(embedded).parameters) | {"correct"}
    config, bed = describe(load(path)), describe(test_testbed.bed())
    assert not {name for name in said - left_open if config[name] == bed[name]}


# Recipe: lower and upper clip, dual clip and KL of the code or the paper it names.
RELEASED = {
    "gvm_raft_published": (0.2, 0.2, None, 1e-3),  # no advantage is negative
    "gvm_grpo_published": (0.2, 0.2, 3.0, 1e-3),
    "ada_seq_positive_published": (0.2, 0.28, 10.0, None),
    "ada_seq_balanced_published": (0.2, 0.28, 10.0, None),
    "ada_est_published": (0.2, 0.28, 10.0, None),
    "dynamo_allocation_published": (0.2, 0.28, 10.0, None),
    "dynamo_published": (0.2, 0.28, 10.0, None),
    "dro_published": (0.2, 0.2, None, 1e-3),
    "sage": (0.2, 0.28, 3.0, None),
    "own_prefix": (0.2, 0.28, 3.0, None),
    "sage_light": (0.2, 0.28, 3.0, None),
    "sage_offline": (0.2, 0.28, 3.0, None),
    "sage_self": (0.2, 0.28, 3.0, None),
    "sage_teacher": (0.2, 0.28, 3.0, None),
}


@pytest.mark.parametrize("recipe", RELEASED)
def test_a_recipe_as_released_has_its_clips_and_its_kl(recipe):
    config = load(ROOT / "configs" / f"{recipe}.py")
    clips = tuple(option(config.loss, name) for name in ("low", "high", "dual"))
    assert (*clips, config.kl and config.kl.coefficient) == RELEASED[recipe]
    assert config.entropy_bonus == 0


def kinds(path):
    """What a step of this recipe has and one of another may not have."""
    config, fields = load(path), ("pilot", "stop", "kl", "shape_reward")
    told = describe(config)
    hint = told["hint"] or {}
    found = {field for field in fields if told[field]}
    found |= {f"hint.{field}" for field in ("controller", "credit") if hint.get(field)}
    found |= {hint["source"]["function"]} if hint else set()
    modulates = told["modulate"]["function"] != "curax.modulate.none"
    found |= {"modulate"} if modulates else set()
    found |= {"refills"} if config.sampling.attempts > 1 else set()
    return found | ({"budget"} if config.sampling.budget else set())


def test_a_recipe_of_each_kind_takes_a_step_in_the_tests_that_are_not_long():
    every = {path: kinds(path) for path in RECIPES}
    first = [every[path] for path in RECIPES if path.stem in FIRST]
    assert set().union(*first) == set().union(*every.values())


@pytest.mark.first(1)
@for_each(one_of_each_first(RECIPES, [p for p in RECIPES if p.stem in FIRST]))
def test_a_config_takes_a_step(path):
    config = shrunk(load(path))
    parts = build(config)
    loop = loops.Jitted(parts)
    with loop.context():
        state = states.begin(parts, states.initial(parts, loop.seeds))
        before = jax.device_get(state.params)
        state, [row], _ = loop.advance(state, 1)
    assert np.isfinite(row["loss/mean"])
    assert np.isfinite(row["gradient/norm"])
    assert 0 < row["outcome/mean"] < 1
    updates = config.update.epochs * config.update.minibatches
    assert row["update/count"] + row["update/skipped"] == updates
    assert row["update/count"] > 0
    moved = jax.tree.map(lambda a, b: np.abs(a - b).max(), before, state.params)
    assert max(jax.tree.leaves(moved)) > 0
    attempts, rest = divmod(int(state.position), config.sampling.prompts)
    assert rest == 0
    assert 1 <= attempts <= config.sampling.attempts
    if config.stop:
        assert (
            config.stop.round_size <= row["group/draws"] <= config.sampling.group_size
        )
    else:
        pilots = row.get("pilot/drawn", 0)
        asked = sum(row[name] for name in row if name.startswith("hint/asked_"))
        if config.hint and config.hint.controller:  # nothing is drawn twice
            asked = 0
        again = asked * config.sampling.group_size
        assert row["rollout/drawn"] == attempts * parts.rows + pilots + again
    assert row["train/rows"] <= parts.train_rows
    assert row["allocate/dropped_rows"] == row["outcome/out_of_range"] == 0


# What a folder on disk says, and sizes at which a step takes a second.
FILES_ON_DISK = {
    "task.layout": layouts.detect,
    "task.workers": 1,
    "task.max_prompt_tokens": 256,
    "model.dtype": "float32",
    "update.micro_batches": 8,
    "update.tokens_per_micro_batch": 0,
    "update.token_chunk": 0,
    "update.length_buckets": 1,
    "evaluation.prompts": 2,
    "evaluation.samples": 1,
    "sampling.max_tokens": 4,
}


def named():
    return dict(pair.split("=", 1) for pair in real.named())


def with_recipe(file, name):
    """A config for files with another recipe, by its one line."""
    lines = file.read_text().splitlines()
    (line,) = [line for line in lines if line.startswith("RECIPE = ")]
    module: dict[str, Any] = {"__file__": str(file)}
    exec("\n".join(lines).replace(line, f'RECIPE = "{name}"'), module)
    return module["get_config"]()


@pytest.mark.long
@for_each(one_of_each_first(ON_FILES, ON_FILES[:1]))
def test_a_config_for_files_trains_on_them(path):
    changes = FILES_ON_DISK | named() | {"model.path": str(real.checkpoint(small=True))}
    loop = run.make_loop(override(load(path), changes))
    warm = loop.initial()
    if loop.parts.config.warm_start:
        before = jax.device_get(warm.params)
        warm, _ = loop.warm(warm, 1)  # the first rate is 0
        state, (loss,) = loop.warm(warm, 1)
        row = {"update/count": 1}
    else:
        state = loop.begin(warm)
        before = jax.device_get(state.params)
        state, [row], _ = loop.advance(state, 1)
        loss = row["loss/mean"]
    assert np.isfinite(loss)
    moved = jax.tree.map(lambda a, b: np.abs(a - b).max(), before, state.params)
    assert max(jax.tree.leaves(moved)) > 0 or not row["update/count"]


@for_each(RECIPES)
@pytest.mark.parametrize("there", sorted({path.name for path in REAL} - SUPERVISED))
def test_a_config_for_files_takes_any_recipe_by_one_line(path, there):
    config, recipe = with_recipe(ROOT / "configs" / there, path.stem), load(path)
    for stage in (
        *("allocate", "pilot", "stop", "gate", "downsample", "correct", "advantage"),
        *("objective", "modulate", "loss", "kl"),
    ):
        assert describe(getattr(config, stage)) == describe(getattr(recipe, stage))
    more = 4 if there in GENERATED else 1  # prompts: `testbed.in_words`
    before = recipe.sampling
    sizes = replace(
        before,
        max_tokens=config.sampling.max_tokens,
        prompts=more * before.prompts,
        budget=more * before.budget,
    )
    assert config.sampling == sizes
    for size in ("epochs", "minibatches", "clip_norm"):  # they decide what w(p) is of
        assert getattr(config.update, size) == getattr(recipe.update, size)
    length = option(recipe.aggregate, "length")
    assert option(config.aggregate, "length") == (length and sizes.max_tokens)
