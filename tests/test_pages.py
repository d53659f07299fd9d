"""The pages for users: what they say to type runs, and what they say comes out does.

A page is followed from top to bottom in a folder that is laid out as it says, with a
random checkpoint and files made on the spot, by `curax demo` where the page says so.
Commands run as they stand there, but that `fewer` and `FEWER` make runs and evaluations
small. A block of python is a file, named in its first line, and so is one of YAML; a
block of text or JSON behind a command is what that prints.
"""

import contextlib
import inspect
import io
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import real
from test_folder import lines
from test_train import BUILT, compiled  # noqa: F401, as a fixture

from curax import __main__, loss, train, xray
from curax.commands import demo, export, new
from curax.config import load, override
from curax.evaluate import __main__ as evaluate
from curax.models import prompt_form
from curax.runs import ending
from curax.settings import functions
from curax.settings.cli import recipe_of
from curax.settings.config_paths import describe, flat, option
from curax.settings.declared import declared
from curax.tasks import file_task, gym, verifiers, word_problems
from curax.theory import population, summary
from curax.verify import graders

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
NAMES = (
    "bring_your_model",
    "write_a_grader",
    "choose_a_recipe",
    "add_a_method",
    "environments",
    "metrics",
    "from_trl",
    "from_verl",
    "evaluate",
)
# Modules that the pages write.
MADE = {
    "guess",
    "train_guess",
    "shop",
    "train_shop",
    "tolerant",
    "two_terms",
    "median",
    "spread",
    "of_verl",
}
COMMANDS = {
    "curax.new": new.main,
    "curax.demo": demo.main,
    "curax.train": train.main,
    "curax.evaluate": evaluate.main,
    "curax.export": export.main,
    "curax.xray": xray.main,
}
# What is added to every evaluation: 4 problems at a time, and of each file.
FEWER = ["--limit", "4", "--batch", "4", "--max-tokens", "8", "--workers", "1"]
for_every_page = pytest.mark.parametrize("name", NAMES)
long = pytest.mark.long  # by the pages that train several times, and by their runs
# These, and their runs.
LONG = {
    *("bring_your_model", "add_a_method", "metrics", "evaluate", "write_a_grader"),
    "environments",
}


class Block(NamedTuple):
    """What stands between fences."""

    kind: str
    text: str


def page(name: str) -> str:
    return (DOCS / f"{name}.md").read_text()


def blocks(name: str) -> list[Block]:
    found = re.findall(r"^```(\w*)\n(.*?)^```$", page(name), re.M | re.S)
    return [Block(*block) for block in found]


def fewer(argv: list[str]) -> list[str]:
    """Assignments that make a run of this command line small: 4 groups of 4, 8 tokens.

    Steps are a fiftieth, so that a longer run stays longer, and the last step of a run
    that is made longer is one that is evaluated anyway.
    """
    args = train.parser().parse_args(argv)
    config = override(load(recipe_of(args, train.DEFAULT)), args.assignments)
    small: dict[str, Any] = {
        "steps": config.steps // 50,
        "sampling.prompts": 4,
        "sampling.group_size": 4,
        "sampling.max_tokens": 8,
        "update.tokens_per_micro_batch": 16,
        "evaluation.every": 2,
        "evaluation.prompts": 4,
        "evaluation.samples": 2,
    }
    if config.steps == 0:
        small |= {"warm_start.steps": 2, "warm_start.rows": 4}
        small |= {"warm_start.micro_batches": 1}
    elif config.warm_start:
        small |= {"warm_start": None}
    either = {"downsample.m": 2, "aggregate.length": 8, "task.workers": 1}
    either |= {"update.token_chunk": 8 * (config.update.token_chunk > 0)}
    # One layer takes longer to compile as a loop, and with buckets.
    either |= {"model.scan_layers": False, "update.length_buckets": 1}
    # A policy that comes from no checkpoint.
    sizes = {"width": 8, "layers": 1, "heads": 1, "kv_heads": 1, "mlp_width": 8}
    either |= {f"model.{name}": size for name, size in sizes.items()}
    for name, value in either.items():
        place, _, key = name.partition(".")
        if option(getattr(config, place), key) is not None:
            small[name] = value
    return [f"{name}={value}" for name, value in small.items()]


class Site:
    """A folder in which pages are followed, each once."""

    def __init__(self, folder: Path):
        """Lay out what pages but the first take: a checkpoint, GSM8K, lengths."""
        self.folder = folder
        shutil.copytree(ROOT / "configs", folder / "configs")
        shutil.copytree(real.checkpoint(small=True), folder / "models" / "Qwen3-0.6B")
        (folder / "data" / "gsm8k").mkdir(parents=True)
        records = list(demo.problems(count=400, wrong=0.0))
        published = [
            {"question": r["question"], "answer": r["solution"]} for r in records
        ]
        demo.write_lines(folder / "data/gsm8k/train.jsonl", published[:300])
        demo.write_lines(folder / "data/gsm8k/test.jsonl", published[300:])
        demo.write_lines(
            folder / "data/lengths.jsonl",
            (
                {
                    "question": f"How long are {n} boards of 2 m in a row?",
                    "answer": f"{2 * n} m",
                    "solution": f"{n} times 2 m is {2 * n} m",
                }
                for n in range(1, 41)
            ),
        )
        self._followed: set[str] = set()

    def follow(self, name: str) -> None:
        """Do what a page says, from top to bottom."""
        if name in self._followed:
            return
        self._followed.add(name)
        said, found = "", blocks(name)
        for i, (kind, text) in enumerate(found):
            if kind in ("python", "yaml"):
                file = re.match(r"# (\S+\.(?:py|yaml))\n", text)
                assert file, text
                (self.folder / file[1]).write_text(text)
            elif kind == "bash":
                after = found[i + 1] if i + 1 < len(found) else Block("", "")
                refused = after.kind == "text" and after.text.startswith("curax.")
                said = self._typed(text, status=2 if refused else 0)
            elif kind == "json":
                assert json.loads(said) == json.loads(text)
            elif kind == "text":
                assert_said(said, text)
            else:  # of other libraries
                assert (kind, "transformers" in text) == ("py", True)

    def _typed(self, text: str, *, status: int) -> str:
        """What the commands print; the last of them ends with this status."""
        found, out = commands(text), ""
        for i, command in enumerate(found):
            got, said = self._run(command)
            assert got == (status if i == len(found) - 1 else 0), said
            out += said
        return out

    def _run(self, command: str) -> tuple[int, str]:
        typed = shlex.split(
            re.sub(r"^python -m curax (\w)", r"python -m curax.\1", command)
        )
        if typed[:2] == ["python", "-m"] and typed[2] in COMMANDS:
            return called(typed[2], typed[3:])
        typed = shlex.split(command)
        if typed[0] == "python":
            typed[0] = sys.executable
        env = os.environ | {"PYTHONPATH": str(ROOT)}
        done = subprocess.run(
            shlex.join(typed) if typed[0] == sys.executable else command,
            shell=True,
            capture_output=True,
            text=True,
            env=env,
        )
        return done.returncode, done.stdout + done.stderr


def commands(text: str) -> list[str]:
    """Its lines; one goes on behind a backslash, and where a quotation is open."""
    found, command = [], ""
    for line in text.replace("\\\n", " ").splitlines():
        command += line
        try:
            shlex.split(command)
        except ValueError:
            command += "\n"
        else:
            found, command = [*found, command], ""
    assert not command
    return found


def called(module: str, argv: list[str]) -> tuple[int, str]:
    """Exit status and output of a command of ours, in this process."""
    if module == "curax.train" and "runs/x" not in argv:
        argv = [*argv, "--set", *fewer(argv)]
    if module == "curax.evaluate":
        argv = [*argv, *FEWER]
    out = io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
        status = COMMANDS[module](argv)
    return status, out.getvalue()


def assert_said(said: str, text: str) -> None:
    """The lines stand in the output, in this order; `...` stands for anything."""
    rest = said
    for line in text.splitlines():
        pattern = re.escape(line.rstrip()).replace(re.escape("..."), ".*")
        found = re.search(rf"^{pattern}\s*$", rest, re.M)
        assert found, f"{line}\n--- is not in\n{said}"
        rest = rest[found.end() :]


@pytest.fixture(scope="module")
def site(tmp_path_factory, compiled) -> Iterator[Site]:  # noqa: F811
    folder = tmp_path_factory.mktemp("site")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.syspath_prepend(str(folder))
        # Pictures take a second; other tests look at them.
        patch.setattr(ending.page, "write", lambda workdir: workdir / "report.html")
        # A checkpoint of the sizes of the other pages', for its programs.
        for name, size in real.SMALL.items():
            patch.setitem(demo.SIZES, name, size)
        yield Site(folder)
        BUILT.clear()
        for name in MADE:
            sys.modules.pop(name, None)


@pytest.mark.first(1)
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[long] * (name in LONG)) for name in NAMES]
)
def test_what_a_page_says_to_type_runs_and_prints_what_it_says(site, name):
    site.follow(name)


@for_every_page
def test_every_program_on_a_page_is_used_by_a_later_command(name):
    found = blocks(name)
    for i, (kind, text) in enumerate(found):
        if kind == "python":
            module = re.findall(r"\w+", text.split("\n")[0])[-2]
            later = [block.text for block in found[i + 1 :]]
            assert any(re.search(rf"\b{module}\b", text) for text in later), module


@for_every_page
def test_links_lead_to_headings_that_are_there(name):
    for file, anchor in re.findall(r"\]\(([^)#:]*)#([\w-]+)\)", page(name)):
        text = (DOCS / file).read_text() if file else page(name)
        heads = re.findall(r"^#+ (.*)$", text, re.M)
        slugs = [re.sub(r"[^\w -]", "", head.lower()) for head in heads]
        assert anchor in [slug.replace(" ", "-") for slug in slugs]


def test_what_the_readme_says_to_type_is_understood(monkeypatch):
    monkeypatch.chdir(ROOT)
    text = (ROOT / "README.md").read_text()
    called = r"^    (?:\.venv/bin/)?(?:python -m curax[. ]|curax )(\w+)((?:.*\\\n)*.*)$"
    typed = re.findall(called, text, re.M)
    assert len(typed) > 9
    parsers = {"train": train, "evaluate": evaluate, "export": export, "xray": xray}
    for command, rest in typed:
        argv = shlex.split(rest.replace("\\\n", " "))
        if "--help" in argv or command in __main__.HERE:
            continue
        args = parsers[command].parser().parse_args(argv)
        if command in ("train", "xray"):
            override(load(recipe_of(args, train.DEFAULT)), args.assignments)


def test_what_the_readme_shows_of_the_x_ray_is_what_it_prints(capsys, monkeypatch):
    monkeypatch.chdir(ROOT)
    command = r"^    \.venv/bin/python -m curax\.xray (.*)\n\n((?:    .*\n)+)"
    ((typed, shown),) = re.findall(command, (ROOT / "README.md").read_text(), re.M)
    assert xray.main(shlex.split(typed)) == 0
    out, err = capsys.readouterr()
    said = (out + err).splitlines()
    assert [
        line.strip() for line in shown.splitlines() if line.strip() not in said
    ] == []


# ----- names


@cache
def known() -> set[str]:
    """Dotted names of all fields and options of the configs that pages speak of."""
    names = ("gsm8k_qwen3_0p6b", "sft_gsm8k_qwen3_0p6b", "grpo")
    configs = [load(ROOT / "configs" / f"{name}.py") for name in names]
    names = {name for config in configs for name in flat(describe(config))}
    for task in (gym.task, verifiers.task, word_problems.task):
        names |= {f"task.{name}" for name in inspect.signature(task).parameters}
    return names | {re.sub(r"\.\d+$", "", name) for name in names}  # of a tuple


@for_every_page
def test_every_field_that_a_page_names_is_one(name):
    groups = "task|model|sampling|update|evaluation|logging|memory|mesh|kl|loss"
    found = set(re.findall(rf"`(?:--set )?((?:{groups})\.[a-z_.0-9]+)", page(name)))
    functions = {one for one in found if hasattr(loss, one.removeprefix("loss."))}
    files = {one for one in found if one.endswith((".json", ".jsonl"))}
    of_page = {
        one for one in found if one.startswith(("task.grader.", "task.options."))
    }
    assert found - files - of_page - functions <= known()


@for_every_page
def test_every_metric_that_a_page_names_is_documented(name):
    groups = {metric.split("/")[0] for metric, _ in documented() if "/" in metric}
    found = re.findall(rf"`((?:{'|'.join(groups)})/\w+)`", page(name))
    assert {*found} <= {metric for metric, _ in documented()} | {"warm/loss_nats"}


def test_the_options_of_the_task_are_those_of_the_page():
    _, _, text = page("bring_your_model").partition("| option | says | default |")
    rows = text.partition("\n\n")[0].splitlines()[2:]
    named = {name for row in rows for name in re.findall(r"`(\w+)`", row.split("|")[1])}
    signature = set(inspect.signature(file_task.task).parameters)
    elsewhere = {"tokenizer", "train", "layout", "held_out_layout"}
    assert named == signature - elsewhere - {"workers", "deadline", "memory_mb"}


def test_the_options_of_a_taskset_are_those_of_the_page():
    _, _, text = page("environments").partition("| option | says | default |")
    rows = text.partition("\n\n")[0].splitlines()[2:]
    named = {name for row in rows for name in re.findall(r"`(\w+)`", row.split("|")[1])}
    assert named == {*inspect.signature(verifiers.task).parameters} - {"tokenizer"}


def test_the_graders_of_the_page_are_those_there_are():
    of_page = set(re.findall(r"^\| `graders\.(\w+)`", page("write_a_grader"), re.M))
    found = inspect.getmembers(graders, inspect.isfunction)
    first = ["prompt", "completion", "answer"]  # of a grader; others are about them
    public = {n for n, f in found if [*inspect.signature(f).parameters][:3] == first}
    assert of_page == {name for name in public if not name.startswith("_")}


def test_the_recipes_that_pages_name_are_in_configs():
    _, _, text = page("choose_a_recipe").partition("| recipe | what to know |")
    cells = [row.split("|")[3] for row in text.partition("\n\n")[0].splitlines()[2:]]
    named = {name for cell in cells for name in re.findall(r"`([a-z_]+)`", cell)}
    assert len(named) > 8
    for name in named | {row[0] for row in told()}:
        assert (ROOT / "configs" / f"{name}.py").exists(), name


# ----- numbers


@cache
def told() -> list[tuple[str, ...]]:
    """The rows of the table of x-rays."""
    _, _, text = page("choose_a_recipe").partition("| recipe | A B |")
    rows = text.partition("\n\n")[0].splitlines()[2:]
    return [tuple(cell.strip() for cell in row.split("|")[1:-1]) for row in rows]


@pytest.mark.first(2)
@pytest.mark.parametrize("row", told(), ids=lambda row: f"{row[0]} {row[1]}")
def test_the_x_ray_says_of_a_recipe_what_the_page_says(row):
    recipe, beta, *numbers = row
    a, b = map(float, beta.split())
    prompts = population.of_beta(a, b)
    found = summary.summarise(load(ROOT / "configs" / f"{recipe}.py"), prompts)
    by = {key: np.array(v, float) for key, v in found["by_pass_rate"].items()}
    low, middle, high = (np.flatnonzero(by["p"] == p)[0] for p in (0.1, 0.5, 0.9))
    weight, noise = by["weight"], by["noise_against_grpo"]
    want = [100 * found["mean"]["signal"], found["mean"]["draws"]]
    want += [weight[i] / weight[middle] for i in (low, high)]
    want += [noise[i] for i in (low, middle, high)]
    got = re.findall(r"[\d.]+", " ".join(numbers))
    # Rounded; what is averaged over random draws may move with the version of JAX.
    loose = 0.03 if found["averaged"] else 1e-6
    for shown, value in zip(got, want, strict=True):
        digits = len(shown.partition(".")[2])
        assert abs(float(shown) - value) <= 0.5001 * 10**-digits + loose * value


# ----- metrics


@cache
def documented() -> list[tuple[str, str]]:
    """Metrics and when they are written, by the tables of the page."""
    rows = re.findall(r"^\| `([a-z_]+(?:/\w+)?)` \| ([^|]*) \|", page("metrics"), re.M)
    assert len({metric for metric, _ in rows}) == len(rows) > 40
    return [(metric, when.strip()) for metric, when in rows]


def is_due(when: str, config: dict[str, Any], row: dict[str, Any]) -> bool:
    """Whether a metric that is written `when` is in this row of a run."""
    first, last = row["step"] == 0, row["step"] == config["steps"]
    evaluated = row["step"] % config["evaluation"]["every"] == 0 or last
    of = config["task"]["function"].split(".")[-2]
    host = of in ("file_task", "worlds")
    asked = config["task"].get("environment")
    plays = asked or of in ("calculator", "mastermind", "nim", "guess")
    modulates = config["modulate"]["function"] != "curax.modulate.none"
    reflects = config["reflection"] or {}
    source = (config["hint"] or {"source": {"function": ""}})["source"]["function"]
    own_prefix = source == "curax.step.methods.prefixes.own_prefix"
    grader = None if asked else config["task"].get("grader")
    grader = grader["function"] if isinstance(grader, dict) else grader
    reads = grader and declared(functions.named(grader), "states", None)
    sums = grader and declared(functions.named(grader), "other_terms", False)
    sampling, evaluation = config["sampling"], config["evaluation"]
    cut, replayed = sampling["top_p"] < 1, sampling["replay_support"]
    ahead, by_engine = sampling["ahead"], sampling["engine"]
    weighs = sampling["off_policy"] is not None
    off = weighs or config["update"]["behaviour_as_old"] or ahead
    off = off or (cut and not replayed)
    of_every_row = {
        "every row": True,
        "step 0, every `evaluation.every`, the last": evaluated,
        "as above": evaluated,
        "where evaluated": evaluated,
        "where evaluated, with a grader that declares it": evaluated and bool(reads),
        "with `evaluation.confidence`": evaluated and evaluation["confidence"] > 0,
        "with `evaluation.k`": evaluated and evaluation["k"] > 0,
        "with `evaluation.distance`": evaluated and evaluation["distance"],
    }
    of_steps = {
        "always": True,
        "without `stop` and `pilot`": not (config["stop"] or config["pilot"]),
        "with an [environment](environments.md)": plays,
        "with an environment": plays,
        "with an environment that measures": plays,
        "where `stop` is set": config["stop"] is not None,
        "where `hint` is set": config["hint"] is not None,
        "where `hint.source` is `own_prefix`": own_prefix,
        "where `pilot` is set": config["pilot"] is not None,
        "where `top_k` or `top_p` truncates": cut,
        "where `top_k` or `top_p` truncates, without `sampling.replay_support`": cut
        and not replayed,
        "where behaviour is not the policy": off,
        "where behaviour is not the policy, without `sampling.ahead` or with "
        "`sampling.engine`": off and (not ahead or by_engine),
        "where `sampling.off_policy` weighs": weighs,
        "where `sampling.engine` is set": by_engine,
        "where `sampling.ahead` is 1": ahead == 1,
        "where `kl` is set": config["kl"] is not None,
        "with `graders.weighted`": sums,
        "where `modulate` is set": modulates,
        "where `reflection` is set": reflects,
        "where `reflection.keep` is set": reflects.get("keep"),
        "where `reflection.queries` is set": reflects.get("queries"),
        "verifier on the host": host,
        "verifier on the host, or `staged`": host or config["staged"],
        "verifier on the device, without `staged`": not (host or config["staged"]),
    }
    if when in of_every_row:
        return of_every_row[when]
    return bool(of_steps[when]) and not first


OTHERS = """
from dataclasses import replace
from functools import partial

import small
import test_engine
from curax import hint, loss, modulate, off_policy, reflect, stop
from curax.config import KL, Hint, Pilot, Queries, Reflection, Stop
from curax.step.methods import prefixes
from curax.runs import ending
from curax.tasks import calculator, chain, rationale


def get_config():
    config = small.get_config()
    return replace(config, warm_start=None, steps=2, {changed})
"""
CHANGED = {
    "explores": "pilot=Pilot(draws=1), kl=KL(estimator=loss.k3, coefficient=0.1), "
    "modulate=modulate.dynamo, sampling=replace(config.sampling, top_p=0.9, "
    "replay_support=True), evaluation=replace(config.evaluation, distance=True, "
    "confidence=2, k=2)",
    "hints": "methods=(prefixes.method,), hint=Hint(source=prefixes.own_prefix, "
    "levels=1, width=3, trigger=hint.all_wrong), task=partial(chain.task, depth=2, "
    "num_prompts=64, num_held_out=32, hints=True)",
    "stops": "staged=True, sampling=replace(config.sampling, ahead=1, "
    "off_policy=off_policy.truncated_ratio), "
    "stop=Stop(rule=partial(stop.positives, right=1), round_size=2)",
    "reflects": "task=partial(rationale.task, depth=1, words=2, num_prompts=64), "
    "reflection=Reflection(weights=reflect.mean, keep=reflect.null_test, "
    "queries=Queries(every=2, draws=2, keep=reflect.null_test)), "
    "sampling=replace(config.sampling, top_p=0.9, "
    "off_policy=off_policy.truncated_ratio)",
    "plays": "task=partial(calculator.task, depth=1, num_prompts=64, num_held_out=32)",
    "asks": "staged=True, sampling=replace(config.sampling, engine=test_engine.Alone, "
    "off_policy=off_policy.truncated_ratio)",
}


@pytest.fixture(scope="module")
def runs(site):
    """Run folders of both loops, with whatever makes metrics of its own."""
    site.follow("bring_your_model")
    site.follow("add_a_method")
    site.follow("write_a_grader")
    for name, changed in CHANGED.items():
        (site.folder / f"{name}.py").write_text(OTHERS.format(changed=changed))
        assert train.main(["--config", f"{name}.py"]) == 0
    found = sorted((site.folder / "runs").glob("*/metrics.jsonl"))
    assert len(found) > 6
    return [path.parent for path in found]


@long
def test_every_row_has_the_metrics_of_the_page_when_it_says_and_no_others(runs):
    seen = set()
    for path in runs:
        config = json.loads((path / "config.json").read_text())
        for row in lines(path / "metrics.jsonl"):
            due = {name for name, when in documented() if is_due(when, config, row)}
            names = {re.sub(r"(?<=/pass_at_)\d+$", "K", name) for name in row}
            pattern = r"^(term|environment)/.*"
            names = {re.sub(pattern, r"\1/NAME", name) for name in names}
            assert names == due, (path.name, row["step"])
            seen |= due
    assert seen == {name for name, _ in documented()}


def fields(file: str) -> set[str]:
    """What the page says a file holds."""
    (row,) = re.findall(
        rf"^\| `?{re.escape(file)}.* \| (.*) \|$", page("metrics"), re.M
    )
    return set(re.findall(r"`([a-z_/]+)`", row))


def keys(value: Any) -> set[str]:
    """Of all objects in this one."""
    if not isinstance(value, dict):
        return set()
    return set(value).union(*(keys(inner) for inner in value.values()))


@long
def test_the_other_files_have_the_fields_that_the_page_says(runs):
    (path,) = (path for path in runs if path.name == "words")
    for name in ("rollouts.jsonl", "memory.jsonl"):
        assert all(set(row) == fields(name) for row in lines(path / name))
    for name in ("evaluation.json", "expected.json", "questions.json"):
        assert keys(json.loads((path / name).read_text())) == fields(name)
    sft = path.with_name("sft")
    losses = lines(sft / "warm_start.jsonl")
    assert all(set(row) == {"step", "warm/loss_nats"} for row in losses)


@long
def test_before_and_after_are_asked_alike(site):
    site.follow("bring_your_model")
    before, after = (
        json.loads((site.folder / "runs" / name / "settings.json").read_text())
        for name in ("before", "after")
    )
    for setting in ("form", "sampling", "grader", "limit"):
        assert before[setting] == after[setting]


@long
def test_an_export_is_what_was_trained_in_the_form_of_what_it_came_from(site):
    site.follow("bring_your_model")
    base, trained = (site.folder / "demo" / name for name in ("model", "sft"))
    names = {file.name for file in base.iterdir()}
    own = {prompt_form.FILE, "README.md"}
    assert {file.name for file in trained.iterdir()} == names | own
    for name in names:
        same = (base / name).read_bytes() == (trained / name).read_bytes()
        assert same == (not name.endswith(".safetensors"))


@long
def test_results_and_samples_have_the_fields_that_the_page_says(site):
    site.follow("bring_your_model")
    path = site.folder / "runs" / "before"
    found = json.loads((path / "results.json").read_text())
    assert set(found) == fields("results.json")
    result = found["results"]["test.jsonl"]
    assert set(result) == fields("of each file in it") - {"subjects"}
    for measure in result["measures"].values():
        assert set(measure) == fields("of each measure")
    samples = lines(path / "test.jsonl")
    assert all(set(row) == fields("NAME.jsonl") for row in samples)
