import dataclasses
import json
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any

import pytest
from outputs import message

from curax import config as cf
from curax.config import (
    KL,
    Config,
    ConfigError,
    Evaluation,
    Hint,
    Memory,
    Mesh,
    Pilot,
    Queries,
    Reflection,
    Sampling,
    Stop,
    Update,
    WarmStart,
    Writing,
)
from curax.settings import config_paths
from curax.settings.declared import declares
from curax.settings.packages import install

RECIPES = Path(__file__).parents[1] / "configs"
HERE = __name__  # what a function defined below is called by
error_of = partial(message, ConfigError)


def plain(*arrays):
    return arrays


def task(*, depth: int = 3):
    return depth


def power(p, *, alpha: float):
    return p**alpha


def weight(outcome, exists, *, f: Callable):
    return f(outcome), exists


@declares(floor="least")
def shared(difficulty, *, budget: int, most: int, least: int = 0):
    return difficulty, budget, most, least


@declares(rows_per_prompt="rows", most_draws="limit")
def scaled(*arrays, rows: float = 4.0, limit: int = 8):
    return arrays, rows, limit


def several(*arrays, rules: tuple[Callable, ...]):
    return arrays, rules


@declares(keeps="m")
def largest(key, reward, exists, *, m: int):
    return key, reward, exists, m


@declares(least_group=2)
def comparing(reward, exists):
    return reward, exists


@declares(least_group="least")
def demanding(*arrays, least: int):
    return arrays, least


@declares(has_ratio=False)
def without_ratio(*arrays, scale: float):
    return arrays, scale


@declares(equal_groups=True)
def evenly(difficulty, *, budget: int, most: int):
    return difficulty, budget, most


def remembering():
    """A method's function, which is never called here."""


@declares(method=remembering)
def recalling(*arrays):
    return arrays


def around(reward, exists, *, estimate: Callable):
    return estimate(reward, exists)


def make(**changed: Any) -> Config:
    stages = ("model", "allocate", "objective", "gate", "downsample", "correct")
    stages += ("advantage", "modulate", "loss", "aggregate", "optimizer")
    fields: dict[str, Any] = dict.fromkeys(stages, plain) | {
        "task": task,
        "downsample": partial(largest, m=4),
    }
    return Config(**(fields | changed))


def test_the_defaults_are_those_of_the_design():
    config = make()
    assert dataclasses.asdict(config.sampling) == {
        "group_size": 8,
        "prompts": 16,
        "budget": 0,
        "max_tokens": 64,
        "temperature": 1.0,
        "top_k": 0,
        "top_p": 1.0,
        "off_policy": None,
        "replay_support": False,
        "slots": 0,
        "cache_gib": 0.0,
        "attempts": 1,
        "chunks": 1,
        "engine": None,
        "ahead": 0,
    }
    assert config.evaluation == Evaluation(
        every=50, prompts=256, samples=8, distance=False, format=None
    )
    assert config.memory == Memory(half_life=6.6, prior=(1.0, 1.0))
    assert config.mesh == Mesh(data=1, fsdp=1, tensor=1)
    shown = config_paths.describe(config)
    alone = ("steps", "seed", "seeds", "staged", "kl", "entropy_bonus", "pilot", "stop")
    assert [shown[name] for name in alone] == [200, 0, 1, False, None, 0.0, None, None]


# The least or most of numbers, a value that is beyond it, and the nearest that is not.
RULES = {
    ("at least 1", 0, 1): """
        sampling.group_size sampling.max_tokens sampling.attempts sampling.chunks
        evaluation.every evaluation.prompts evaluation.samples evaluation.window
        warm_start.steps warm_start.rows warm_start.micro_batches update.epochs
        update.minibatches update.micro_batches update.length_buckets update.patience
        logging.every logging.checkpoint_every logging.keep pilot.draws pilot.every
        stop.round_size hint.levels hint.width hint.writing.max_tokens
        hint.writing.tries reflection.queries.every reflection.queries.candidates
        reflection.queries.draws seeds
    """,
    ("at least 1", -2, 1): "sampling.prompts",
    ("greater than 0.0", 0.0, 1.0): """
        sampling.temperature warm_start.clip_norm update.clip_norm memory.half_life
        memory.prior.0 memory.prior.1 logging.drift_nats reflection.clip_nats
    """,
    ("at least 0", -1, 0): """
        sampling.top_k sampling.slots sampling.budget evaluation.k evaluation.confidence
        update.tokens_per_micro_batch update.token_chunk sampling.ahead
        logging.rollout_prompts reflection.scorer_every steps
    """,
    ("greater than 0.0 and at most 1.0", 1.5, 1.0): "sampling.top_p hint.most",
    ("at least 0.0", -0.5, 0.0): "sampling.cache_gib",
    ("at least 1, or -1 for all that is left", 0, 1): """
        mesh.data mesh.fsdp mesh.tensor
    """,
    ("at least 0.0", -1.0, 0.0): "hint.writing.temperature entropy_bonus",
    ("at least 0.0", -0.1, 0.0): """
        reflection.length_weight reflection.direct reflection.queries.carried
        kl.coefficient
    """,
    ("at least 0 and at most 4294967295", 2**32, 2**32 - 1): "seed",
}
NAMES = {rule: names.split() for rule, names in RULES.items()}
MOST = max(map(len, NAMES.values()))
# One of each rule comes first.
BOUNDS = {
    each[i]: rule for i in range(MOST) for rule, each in NAMES.items() if each[i:]
}


ALONE = ("", "pilot", "stop", "hint", "reflection")  # what one config can have of these


def full(name: str = "") -> Config:
    """With as many fields as there can be; what excludes others only where named."""
    hint = Hint(source=plain, trigger=plain, writing=Writing())
    reflection = Reflection(weights=plain, queries=Queries(keep=plain))
    alone = {"pilot": Pilot(draws=1), "stop": Stop(rule=plain), "hint": hint}
    alone |= {"reflection": reflection}
    group = name.partition(".")[0]
    return make(
        **({group: alone[group]} if group in alone else {}),
        downsample=partial(largest, m=1),
        kl=KL(estimator=plain, coefficient=0.1),
        warm_start=WarmStart(steps=5, rows=4, optimizer=plain),
        logging=cf.Logging(drift_nats=0.01),
    )


@pytest.mark.first(20)
@pytest.mark.parametrize("name", BOUNDS)
def test_a_number_out_of_its_range_is_refused_with_the_nearest_in_it(name):
    rule, value, fix = BOUNDS[name]
    assert error_of(cf.override, full(name), [f"{name}={value}"]) == (
        f"{name}={value} must be {rule}; set {name} to {fix}."
    )
    cf.override(full(name), [f"{name}={fix}"])


def test_every_number_of_the_config_has_a_range():
    def numbers(tree: Any, name: str = "") -> set[str]:
        if isinstance(tree, dict):
            parts = [
                (key, part) for key, part in tree.items() if "function" not in tree
            ]
        elif isinstance(tree, list):
            parts = list(enumerate(tree))
        else:
            return {name} if type(tree) in (int, float) else set()
        return {
            n for key, part in parts for n in numbers(part, f"{name}.{key}".strip("."))
        }

    every = (numbers(config_paths.describe(full(group))) for group in ALONE)
    assert set().union(*every) == set(BOUNDS)


# What is wrong only together, and the one sentence that says so.
UNCORRECTED = (
    "draws from another distribution than the policy that trains, and nothing corrects "
    "that bias; set sampling.replay_support=True to train what is drawn, "
    "sampling.off_policy=off_policy.truncated_ratio (TIS), "
    "off_policy.masked_ratio (MIS) or off_policy.icepop, off_policy.none to leave the "
    "bias, or"
)
CONFLICTS = {
    "update.behaviour_as_old=True puts the ratio of the loss over what was drawn "
    "from, and sampling.off_policy would weigh by the same once more; set "
    "sampling.off_policy to None, or update.behaviour_as_old to False.": {
        "sampling": Sampling(off_policy=plain),
        "update": Update(behaviour_as_old=True),
    },
    "update.behaviour_as_old=True says what the ratio of the loss is over, and "
    f"{HERE}.without_ratio has none; set update.behaviour_as_old to False, or loss to "
    "loss.clipped_ratio.": {
        "loss": partial(without_ratio, scale=2.0),
        "update": Update(behaviour_as_old=True),
    },
    "sampling.group_size=8 cannot keep downsample.m=12 completions; "
    "set downsample.m to at most 8.": {"downsample": partial(largest, m=12)},
    "downsample.m=0 must be at least 1; set downsample.m to 1.": {
        "downsample": partial(largest, m=0)
    },
    "update.minibatches=3 times update.micro_batches=2 must divide the 64 rows "
    "trained per step; set them to 2 and 2.": {
        "update": Update(minibatches=3, micro_batches=2)
    },
    "update.minibatches=1 times update.micro_batches=100 must divide the 64 rows "
    "trained per step; set them to 1 and 64.": {"update": Update(micro_batches=100)},
    "update.micro_batches=2 and update.tokens_per_micro_batch=64 both say how large a "
    "micro-batch is; set update.micro_batches to 1, or update.tokens_per_micro_batch "
    "to 0.": {"update": Update(micro_batches=2, tokens_per_micro_batch=64)},
    "warm_start.micro_batches=4 and update.tokens_per_micro_batch=64 both say how "
    "large a micro-batch is; set warm_start.micro_batches to 1, or "
    "update.tokens_per_micro_batch to 0.": {
        "update": Update(tokens_per_micro_batch=64),
        "warm_start": WarmStart(steps=1, rows=64, micro_batches=4, optimizer=plain),
    },
    "mesh.data=-1 and mesh.fsdp=-1 cannot both be what the others leave; set mesh.data "
    "to 1.": {"mesh": Mesh(data=-1, fsdp=-1)},
    "sampling.chunks=2 lets the host verify beside the device, and seeds=2 are "
    "verified within one program; set sampling.chunks to 1.": {
        "sampling": Sampling(chunks=2),
        "seeds": 2,
    },
    "seeds=2 cannot run side by side with staged=True; "
    "set seeds to 1 or staged to False.": {"seeds": 2, "staged": True},
    f"downsample.m is not set, but {HERE}.largest needs it; "
    "set downsample.m, or bind it with functools.partial(..., m=...).": {
        "downsample": largest
    },
    "kl=0.1 must be a KL or none; give one.": {"kl": 0.1},
    "evaluation.format=3 must be a function or none; give one.": {
        "evaluation": Evaluation(format=3)  # pyright: ignore[reportArgumentType]
    },
    "evaluation.distance=1 must be true or false; set evaluation.distance to True, for "
    "example.": {"evaluation": Evaluation(distance=1)},  # pyright: ignore[reportArgumentType]
    "sampling.budget=200 is more than sampling.group_size=8 completions of "
    "sampling.prompts=16, pilots apart; set it to at most 128.": {
        "sampling": Sampling(budget=200)
    },
    "pilot.draws=5 for sampling.prompts=16 leave nothing of the budget to train on; "
    "set pilot.draws to at most 3.": {
        "sampling": Sampling(budget=64),
        "pilot": Pilot(draws=5),
    },
    "allocate.least=5 for each of 16 prompts is more than the 64 completions of a "
    "step; set allocate.least to at most 4.": {
        "sampling": Sampling(budget=64),
        "allocate": partial(shared, least=5),
    },
    "stop decides how much each prompt draws, and so does pilot; "
    "set one of them to its default.": {
        "stop": Stop(rule=plain),
        "pilot": Pilot(draws=1),
    },
    "stop decides how much each prompt draws, and so does sampling.budget; "
    "set one of them to its default.": {
        "stop": Stop(rule=plain),
        "sampling": Sampling(budget=64),
    },
    "sampling.chunks=3 must divide the 128 completions of a step; "
    "set sampling.chunks to 2.": {"sampling": Sampling(chunks=3)},
    "sampling.chunks=2 takes a prompt's completions apart, and stop counts them "
    "together; set sampling.chunks to 1.": {
        "stop": Stop(rule=plain),
        "sampling": Sampling(chunks=2),
    },
    "reflection gives rewards by itself and knows nothing of pilot; "
    "set pilot to None.": {
        "reflection": Reflection(weights=plain),
        "pilot": Pilot(draws=1),
    },
    "sampling.attempts=2 follows what a verifier says, and reflection asks none; "
    "set sampling.attempts to 1.": {
        "reflection": Reflection(weights=plain),
        "sampling": Sampling(attempts=2),
    },
    "reflection.queries.carried=1.5 is more than there is; "
    "set reflection.queries.carried to 1.0.": {
        "reflection": Reflection(
            weights=plain, queries=Queries(keep=plain, carried=1.5)
        )
    },
    "warm_start.micro_batches=6 must divide warm_start.rows=64; "
    "set warm_start.micro_batches to 2.": {
        "warm_start": WarmStart(steps=1, rows=64, micro_batches=6, optimizer=plain)
    },
    "sampling.attempts=2 gives the place of a dead group to another prompt, and hint "
    "asks the same one again; set sampling.attempts to 1 or hint to None.": {
        "hint": Hint(source=plain, trigger=plain),
        "sampling": Sampling(attempts=2),
    },
    f"sampling.top_p=0.9 {UNCORRECTED} sampling.top_p=1.0.": {
        "sampling": Sampling(top_p=0.9)
    },
    f"sampling.top_k=20 {UNCORRECTED} sampling.top_k=0.": {
        "sampling": Sampling(top_k=20, top_p=0.9)
    },
    "sampling.replay_support=True trains within what sampling.top_k and sampling.top_p "
    "keep, and they keep all; set sampling.replay_support to False, or "
    "sampling.top_p=0.95.": {"sampling": Sampling(replay_support=True)},
    "update.epochs=2 times update.minibatches=1 are 2 updates per batch, and "
    f"{HERE}.without_ratio has no ratio that corrects those behind the first; set both "
    "to 1, or loss to loss.clipped_ratio.": {
        "loss": partial(without_ratio, scale=2.0),
        "update": Update(epochs=2),
    },
    f"sampling.group_size=1 gives {HERE}.comparing groups of 1, and it learns nothing "
    "from fewer than 2; set sampling.group_size to at least 2.": {
        "advantage": partial(around, estimate=comparing),
        "sampling": Sampling(group_size=1),
        "downsample": plain,
    },
    f"sampling.group_size=2 gives {HERE}.demanding groups of 2, and it learns nothing "
    "from fewer than 3; set sampling.group_size to at least 3.": {
        "gate": partial(several, rules=(plain, partial(demanding, least=3))),
        "sampling": Sampling(group_size=2),
        "downsample": plain,
    },
    f"sampling.budget=16 gives {HERE}.comparing groups of 1, and it learns nothing "
    "from fewer than 2; set sampling.budget to at least 32.": {
        "advantage": comparing,
        "allocate": evenly,
        "sampling": Sampling(budget=16),
        "downsample": plain,
    },
    f"downsample.m=1 gives {HERE}.comparing groups of 1, and it learns nothing from "
    "fewer than 2; set downsample.m to at least 2.": {
        "advantage": comparing,
        "downsample": partial(largest, m=1),
        "pool_statistics": False,
    },
    f"hint.source={HERE}.recalling reads what {HERE}.remembering keeps; set methods to "
    f"({HERE}.remembering,).": {"hint": Hint(source=recalling, trigger=plain)},
    "correct.rows=5.0 must be the rows trained per prompt, 4; set correct.rows to 4.": {
        "correct": partial(scaled, rows=5.0)
    },
    "correct.rules.1.limit=4 must be the most that a prompt draws, 8; "
    "set correct.rules.1.limit to 8.": {
        "correct": partial(several, rules=(plain, partial(scaled, limit=4)))
    },
}


@pytest.mark.parametrize("sentence", CONFLICTS)
def test_a_wrong_config_says_what_is_wrong_and_how_to_mend_it(sentence):
    assert error_of(lambda: make(**CONFLICTS[sentence])) == sentence


WHAT_PASSES = {
    "what is read is kept": {
        "hint": Hint(source=recalling, trigger=plain),
        "methods": (remembering,),
    },
    "nothing trains": {"sampling": Sampling(top_p=0.9), "steps": 0},
    "the bias is accepted": {"sampling": Sampling(top_k=9, off_policy=plain)},
    "what is drawn trains": {"sampling": Sampling(top_k=9, replay_support=True)},
    "the ratio is over what is drawn": {
        "sampling": Sampling(top_k=9, ahead=1),
        "update": Update(behaviour_as_old=True),
    },
    "one update": {"loss": partial(without_ratio, scale=2.0)},
    "all of the pool is seen": {
        "advantage": comparing,
        "downsample": partial(largest, m=1),
    },
    "some groups are larger": {
        "advantage": comparing,
        "allocate": shared,
        "sampling": Sampling(budget=16),
        "downsample": plain,
    },
    "pairs are compared": {
        "advantage": comparing,
        "sampling": Sampling(group_size=2),
        "downsample": plain,
    },
}


@pytest.mark.parametrize("why", WHAT_PASSES)
def test_what_can_train_without_bias_or_by_a_written_word_passes(why):
    make(**WHAT_PASSES[why])


@pytest.mark.parametrize(
    "stage",
    ["objective", "gate", "correct", "advantage", "modulate", "loss", "aggregate"],
)
def test_a_stage_gets_arrays_alone_so_its_options_must_be_bound(stage):
    assert error_of(lambda: make(**{stage: power})) == (
        f"{stage}.alpha is not set, but {HERE}.power needs it; "
        f"set {stage}.alpha, or bind it with functools.partial(..., alpha=...)."
    )
    make(**{stage: partial(power, alpha=1.0)}, task=power)


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


def test_what_declares_no_most_that_it_keeps_trains_every_completion_of_a_group():
    update = Update(minibatches=128)
    assert make(downsample=plain, update=update).update.minibatches == 128
    assert error_of(lambda: make(update=update)) == (
        "update.minibatches=128 times update.micro_batches=1 must divide the 64 rows "
        "trained per step; set them to 64 and 1."
    )


def test_assignments_are_checked_together_in_any_order():
    both = ["downsample.m=16", "sampling.group_size=16"]
    for assignments in (both, both[::-1]):
        assert cf.override(make(), assignments).sampling.group_size == 16
    assert error_of(cf.override, make(), both[:1]) == (
        "sampling.group_size=8 cannot keep downsample.m=16 completions; "
        "set downsample.m to at most 8."
    )


def test_overriding_leaves_the_config_as_it_was():
    config = make()
    before = config_paths.describe(config)
    cf.override(config, ["downsample.m=2", "steps=3", "sampling.prompts=2"])
    assert config_paths.describe(config) == before


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

def task(*, local=Local(), file=__file__):
    return local, file

def get_config():
    return make(task=task)
"""


def test_a_config_file_is_a_python_file_with_get_config(written):
    path = written(GOOD)
    config = cf.override(cf.load(path), ["task.local.depth=3"])
    assert config_paths.describe(config)["task"] == {
        "function": "config_countdown.task",
        "local": {"depth": 3},
        "file": str(path),
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
    "\nraise SystemExit\n": ":2: SystemExit: no message; mend that line.",
    "x = 1\n": ": no get_config(); define one that returns a Config.",
    "def get_config():\n    return {}\n": ": get_config() returned a dict; "
    "return a Config.",
    f"from {HERE} import make\ndef get_config():\n    return make(steps=-1)\n": (
        ":3: steps=-1 must be at least 0; set steps to 0."
    ),
    f"from {HERE} import make\ndef get_config():\n    return make(stepz=1)\n": (
        ":3: TypeError: Config.__init__() got an unexpected keyword argument 'stepz'; "
        "mend that line."
    ),
}


@pytest.mark.parametrize("text", BROKEN)
def test_a_broken_config_file_is_named_with_its_line(written, text):
    path = written(text)
    said = error_of(cf.load, path).replace(". Did you mean 'steps'?", "")  # of 3.13
    assert said == f"{path}{BROKEN[text]}"


def test_the_config_of_a_run_is_no_config_file(tmp_path):
    path = tmp_path / "run" / "config.json"
    path.parent.mkdir()
    path.write_text('{\n"steps": null}\n')
    said = f"train --resume {path.parent} goes on with the run of a folder."
    assert error_of(cf.load, path) == (
        f"{path}: JSON, and a config is a Python file; {said}"
    )


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


# Where a package is missing, what is said in place of "mend that line".
PIP = (
    "the package nowhere is not installed; run pip install nowhere, or put its folder "
)
PIP += "on PYTHONPATH if it is yours."
GYM = f"the package reasoning-gym is not installed; run {install('gym')}."
MISSING = {
    "import nowhere": PIP,
    "from nowhere.inside import x": PIP,
    "import reasoning_gym": GYM,
    "from reasoning_gym.factory import DATASETS": GYM,
    "import curax.nothing": "ModuleNotFoundError: No module named 'curax.nothing'; "
    "mend that line.",
}


def without(monkeypatch, name):
    """As if a package were not installed."""
    for module in [m for m in sys.modules if m.partition(".")[0] == name]:
        monkeypatch.delitem(sys.modules, module)
    find = PathFinder.find_spec

    def found(wanted, *args, **more):
        return None if wanted.partition(".")[0] == name else find(wanted, *args, **more)

    monkeypatch.setattr(PathFinder, "find_spec", found)


@pytest.mark.parametrize("line", MISSING)
def test_a_config_that_needs_what_is_not_installed_gets_the_line_that_installs_it(
    written, monkeypatch, line
):
    without(monkeypatch, "reasoning_gym")
    path = written(f"\n{line}\n")
    assert error_of(cf.load, path) == f"{path}:2: {MISSING[line]}"


def test_a_recipe_is_found_by_its_name_in_any_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    want = config_paths.describe(cf.load(RECIPES / "grpo.py"))
    for name in ("grpo", "grpo.py"):
        assert config_paths.describe(cf.load(name)) == want
    for name, near in {"grop": "grpo", "dr-grpo": "dr_grpo", "Gspo.py": "gspo"}.items():
        said = error_of(cf.load, name)
        assert said.startswith(f"{name}: there is no such file, nor recipe; did you ")
        assert near in said
    assert error_of(cf.load, "zzz") == (
        "zzz: there is no such file, nor recipe; curax recipes has all."
    )
    # Recipes of this folder go first, and a file that is there before them.
    (tmp_path / "configs").mkdir()
    other = f"from {HERE} import make\ndef get_config():\n    return make(steps={{}})\n"
    (tmp_path / "configs" / "grpo.py").write_text(other.format(3))
    (tmp_path / "grpo.py").write_text(other.format(4))
    assert cf.load("grpo").steps == 3
    assert cf.load("grpo.py").steps == 4


def test_usual_names_of_fields_get_those_of_here():
    config = cf.load(RECIPES / "grpo.py")
    other = cf.override(config, {"kl": KL(estimator=plain, coefficient=1)})
    fields = config_paths.flat(config_paths.describe(other))
    for name, here in cf.ALIASES.items():
        assert here in fields, name
        said = error_of(cf.override, config, [f"{name}=1"])
        assert f"did you mean {here!r}?" in said
    for name in ("learning_rate", "temperature", "group_size", "max_tokens"):
        said = error_of(cf.override, config, [f"{name}=1"])
        assert re.search(rf"did you mean '(optimizer|sampling)\.{name}'\?", said)


def test_a_function_by_its_short_name_gets_the_way_to_choose_it():
    config = cf.load(RECIPES / "grpo.py")
    for word in ("gspo", "GSPO", "gspoo"):
        said = error_of(cf.override, config, [f"loss={word}"])
        assert said.startswith(
            f"loss={word}: a function is set by its dotted name, a group of options in "
            "the config file, write loss=loss.gspo"
        )
    said = error_of(cf.override, config, ["loss=gspo"])
    assert "loss.gspo or start from --config gspo; options here are" in said
    said = error_of(cf.override, config, ["advantage=sage_exact"])
    assert "config file, start from --config sage_exact; options here" in said


CHOSEN = {
    "advantage": ["advantage.leave_one_out"],
    "gate": ["curax.gate.accepted"],
    "sampling.off_policy": [
        "off_policy.truncated_ratio",
        "sampling.off_policy.cap=3.5",
    ],
    "allocate": ["allocate.neyman", "allocate.least=2"],
    "optimizer": ["optax.sgd", "optimizer.learning_rate=0.25"],
    "shape_reward": ["own.py:shaped", "shape_reward.weight=0.5"],
    "objective": ["own_module:weighed"],
}


def test_functions_of_a_tuple_are_chosen_by_their_names():
    name = f"methods={HERE}:remembering, step.methods.prefixes.method"
    config = cf.override(cf.load("grpo"), [name])
    own, ours = config.methods
    assert own.__name__ == "remembering"
    assert ours.__module__ == "curax.step.methods.prefixes"
    said = error_of(cf.override, config, [f"methods={HERE}.remember"])
    assert "remember is no function of" in said
    assert "did you mean" in said


@pytest.mark.parametrize("field", CHOSEN)
def test_a_function_is_chosen_by_its_name_and_then_its_options(
    field, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    text = "def shaped(outcome, length, *, weight: float = 1.0):\n    return outcome\n"
    Path("own.py").write_text(text)
    Path("own_module.py").write_text(text.replace("shaped", "weighed"))
    name, *more = CHOSEN[field]
    config = cf.override(cf.load("rloo"), [f"{field}={name}", *more])
    written = json.dumps(config_paths.describe(config))
    again = cf.rebuild(json.loads(written), cf.Config)
    assert json.dumps(config_paths.describe(again)) == written
    chosen = config_paths.flat(json.loads(written))[field]
    assert chosen.replace(":", ".").endswith(name.rpartition(".")[2].replace(":", "."))
    values = config_paths.flat(json.loads(written)).items()
    assert {*more} <= {f"{name}={value}" for name, value in values}


REFUSED = {
    "advantage=gate.accepted": "advantage takes a function of curax.advantage, ",
    "advantage=advantage.leave_one": "advantage.leave_one is no function of "
    "curax.advantage; did you mean curax.advantage.leave_one_out?",
    "optimizer=optax.sgdd": "optax.sgdd is no function of optax; did you mean "
    "optax.sgd?",
    "sampling.engine=engine.trt": "engine.trt is no function of curax.engine; it has "
    "status, real, whole, sets, vllm, sampling, shape, sglang.",
    "optimizer=optax:zq": "optax:zq is no function of optax; name one that it has.",
    "gate=nowhere:f": "nowhere:f cannot be imported because there is no module "
    "nowhere, nor a file nowhere.py here; write MODULE:FUNCTION or FILE.py:FUNCTION.",
    "gate=no.py:f": "no.py:f cannot be read (No such file or directory); name a ",
    "gate=broken.py:f": "broken.py:f cannot be loaded, broken.py:2: ZeroDivisionE",
}


@pytest.mark.parametrize("assignment", REFUSED)
def test_a_function_that_is_none_for_its_place_is_refused(
    assignment, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    Path("broken.py").write_text("\n1 / 0\n")
    said = error_of(cf.override, cf.load("rloo"), [assignment])
    assert said.startswith(f"{assignment}: {REFUSED[assignment]}")


def test_what_a_bias_is_answered_by_is_what_set_takes():
    """Once the advice led in a circle."""
    recipe = cf.load("grpo")
    said = error_of(cf.override, recipe, ["sampling.top_p=0.9"])
    replay, rule = re.findall(r"(sampling\.(?:off_policy|replay_support)=\S+)", said)
    for fix in (replay, rule):
        fixed = cf.override(recipe, ["sampling.top_p=0.9", fix]).sampling
        assert bool(fixed.off_policy) != fixed.replay_support


def test_config_imports_nothing_but_the_standard_library():
    code = (
        f"import sys; sys.path.insert(0, {str(Path(cf.__file__).parents[1])!r}); "
        "import curax.config; names = {name.split('.')[0] for name in sys.modules}; "
        "print(names - {'__main__'} - sys.stdlib_module_names)"
    )
    bare = [sys.executable, "-I", "-S", "-c", code]
    shown = subprocess.run(bare, capture_output=True, text=True, check=True)
    assert shown.stdout.strip() == "{'curax'}"


@pytest.mark.first(15)
@pytest.mark.parametrize("path", sorted(RECIPES.glob("*.py")), ids=lambda p: p.stem)
def test_a_config_is_recalled_from_what_a_run_writes_of_it(path, tmp_path):
    config = cf.load(path)
    written = json.dumps(config_paths.describe(config))
    (tmp_path / "config.json").write_text(written)
    again = cf.recalled(tmp_path / "config.json")
    assert json.dumps(config_paths.describe(again)) == written
    assert type(again) is cf.Config


def test_what_cannot_be_recalled_is_told_in_a_sentence(tmp_path):
    path = tmp_path / "config.json"
    with pytest.raises(ConfigError, match=r"cannot be read .*; name the folder of a"):
        cf.recalled(path)
    path.write_text('{"task": {"function": "nowhere.task"}}')
    assert error_of(cf.recalled, path) == (
        f"{path}: task: nowhere.task cannot be imported because there is no module "
        "nowhere, nor a file nowhere.py here; write MODULE:FUNCTION or "
        "FILE.py:FUNCTION."
    )


# What stands in place of a field that a run wrote, None: nothing; and what is said.
UNREAD = {
    "loss": (None, "it lacks loss; name the folder of a run."),
    "zz": (3, "Config.__init__() got an unexpected keyword argument 'zz'; name the "),
    "sampling": ({"zz": 3}, "Sampling.__init__() got an unexpected keyword argument "),
    "gate": ({"function": 3}, ""),
}


@pytest.mark.parametrize("field", UNREAD)
def test_what_no_run_wrote_is_told_with_what_it_lacks(field, tmp_path):
    wrong, says = UNREAD[field]
    written = config_paths.describe(cf.load("rloo")) | {field: wrong}
    kept = {name: value for name, value in written.items() if name != field or wrong}
    (path := tmp_path / "config.json").write_text(json.dumps(kept))
    said = error_of(cf.recalled, path)
    assert said.startswith(f"{path}: {says}")
    assert said.endswith("; name the folder of a run.")


@pytest.mark.parametrize("text", ["{}", "[]", "3"])
def test_what_is_no_config_at_all_is_told_with_all_that_it_lacks(text, tmp_path):
    (path := tmp_path / "config.json").write_text(text)
    assert error_of(cf.recalled, path) == (
        f"{path}: it lacks task, model, allocate, objective, gate, downsample, "
        "correct, advantage, modulate, loss, aggregate, optimizer; name the folder of "
        "a run."
    )


PRICE = ("max_tokens", "margin")  # options of the shaped reward


def test_a_recipe_on_another_task_keeps_its_stages_and_scales_its_lengths():
    recipe = cf.load(RECIPES / "dapo.py")
    config = cf.transferred(recipe, max_tokens=1000, task=plain, steps=7)
    assert config.sampling == replace(recipe.sampling, max_tokens=1000)
    shaped = {name: config_paths.option(config.shape_reward, name) for name in PRICE}
    before = {name: config_paths.option(recipe.shape_reward, name) for name in PRICE}
    factor = 1000 / recipe.sampling.max_tokens
    assert shaped == {name: round(value * factor) for name, value in before.items()}
    assert (config.task, config.steps, config.warm_start) == (plain, 7, None)
    assert config_paths.describe(config.gate) == config_paths.describe(recipe.gate)
    constant = cf.transferred(cf.load(RECIPES / "dr_grpo.py"), max_tokens=64)
    assert config_paths.option(constant.aggregate, "length") == 64
    sage = cf.transferred(cf.load(RECIPES / "sage.py"), max_tokens=1024)
    assert sage.hint
    assert sage.hint.width == 896  # 7 of 8
    own = cf.transferred(recipe, max_tokens=64, shape_reward=None)
    assert own.shape_reward is None


@pytest.mark.parametrize(
    ("word", "said"),
    [
        ("shape_reward.max_tokens=0", "at least 1; set shape_reward.max_tokens to 1."),
        ("shape_reward.margin=0", "at least 1; set shape_reward.margin to 1."),
        ("loss.low=-1.0", "at least 0.0 and at most 1.0; set loss.low to 0.0."),
        ("loss.high=-0.5", "at least 0.0; set loss.high to 0.0."),
        ("loss.dual=1.0", "greater than 1.0; set loss.dual to 2.0."),
        ("advantage.eps=-1.0", "at least 0.0; set advantage.eps to 0.0."),
        ("gate.gates.0.delta=-1.0", "at least 0.0; set gate.gates.0.delta to 0.0."),
        ("optimizer.learning_rate=-0.1", "at least 0; set it to 0.001, for example."),
    ],
)
def test_options_of_functions_have_the_ranges_of_their_docstrings(word, said):
    """Out of them they would train backwards, or not at all, without a word."""
    got = error_of(cf.override, cf.load(RECIPES / "dapo.py"), [word])
    assert got == f"{word} must be {said}"


def test_right_is_one_thing_in_a_recipe():
    recipe = cf.load("ada_seq_positive_accepted")
    assert error_of(cf.override, recipe, ["stop.rule.threshold=0.7"]) == (
        "gate.threshold=0.5 and stop.rule.threshold=0.7 call different completions "
        "right; set gate.threshold to 0.7."
    )
    names = ("stop.rule.threshold", "gate.threshold", "correct.threshold")
    cf.override(recipe, dict.fromkeys(names, 0.7))
    hinted = cf.load("ada_seq_sage")
    said = error_of(cf.override, hinted, ["stop.rule.threshold=0.7"])
    assert said.startswith("stop.rule.threshold=0.7 and curax.settings.declared.RIGHT=")


def test_an_estimator_that_counts_right_ones_by_rewards_needs_outcomes_there():
    words = ["advantage=advantage.guarded", "advantage.estimate=advantage.group_mean"]
    words += ["advantage.least=2"]
    said = error_of(cf.override, cf.load(RECIPES / "dapo.py"), words)
    assert said == (
        "advantage.least=2 counts right completions by rewards, which shape_reward "
        "changes; set it to None, or advantage.least to 0, for gate.minimum_right "
        "counts outcomes."
    )
    cf.override(cf.load(RECIPES / "dapo.py"), words[:2])
    cf.override(cf.load("guarded"), words)
