"""The command curax, from a wheel that is installed outside of the clone."""

import html
import os
import re
import shutil
import subprocess
import sys
import tomllib
from functools import partial
from pathlib import Path

import pytest
import small
import terminal
from outputs import printed, ran, refusal

from curax import __main__ as commands
from curax import config as cf
from curax import train
from curax.commands import env
from curax.runs import templates
from curax.settings import config_paths, field_help, recipes

ROOT = Path(__file__).parents[1]
RECIPES = sorted((ROOT / "configs").glob("*.py"))
# Of the extras; the wheel is tried as if they were not installed.
EXTRAS = (
    *("matplotlib", "math_verify", "sympy", "pyarrow", "tokenizers", "huggingface_hub"),
    *("wandb", "trackio", "mlflow", "reasoning_gym", "tensorflow_datasets", "httpx"),
)
TAKES = ("curax", "configs", "pyproject.toml", "README.md", "LICENSE")


def pip(*words):
    quiet = ["--quiet", "--disable-pip-version-check", "--no-deps"]
    command = [sys.executable, "-m", "pip", words[0], *quiet, *words[1:]]
    subprocess.run(command, check=True, capture_output=True)


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    """Runs the script of an installed wheel, in a folder that holds nothing."""
    here = tmp_path_factory.mktemp("wheel")
    source, site, elsewhere = (here / name for name in ("source", "site", "elsewhere"))
    for folder in (source, elsewhere):
        folder.mkdir()
    ignored = shutil.ignore_patterns("__pycache__")
    for name in TAKES:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, source / name, ignore=ignored)
        else:
            shutil.copy(ROOT / name, source)
    pip("wheel", "--no-build-isolation", "--wheel-dir", str(here), str(source))
    (wheel,) = here.glob("*.whl")
    pip("install", "--target", str(site), str(wheel))
    shutil.rmtree(source)
    own = (ROOT / "tests" / "sitecustomize.py").read_text()
    hidden = f"import sys; sys.modules |= dict.fromkeys({EXTRAS})\n{own}"
    shutil.copy(ROOT / "tests" / "kept_programs.py", site)
    (site / "sitecustomize.py").write_text(hidden)

    run = partial(ran, site / "bin" / "curax", cwd=elsewhere, PYTHONPATH=str(site))
    return run, elsewhere, site


@pytest.mark.long
def test_the_wheel_has_every_module_and_every_recipe(installed):
    _, _, site = installed
    want = {
        *(path.relative_to(ROOT) for path in (ROOT / "curax").rglob("*.py")),
        *(path.relative_to(ROOT) for path in (ROOT / "curax").glob("*/html/*")),
        *(Path("curax", path.relative_to(ROOT)) for path in RECIPES),
        Path("curax", "py.typed"),  # says that annotations of curax may be read
    }
    files = (path.relative_to(site) for path in (site / "curax").rglob("*.*"))
    assert {path for path in files if path.suffix != ".pyc"} == want


@pytest.mark.long
def test_the_wheel_trains_by_the_name_of_a_recipe(installed):
    run, elsewhere, site = installed
    status, listed, _ = run("recipes")
    names = [line.split()[0] for line in listed.splitlines()]
    assert (status, names) == (0, [path.stem for path in RECIPES])
    sizes = [*small.SIZES.split(), "steps=2", "evaluation.every=2"]
    command = [sys.executable, str(site / "bin" / "curax"), "train", "quickstart"]
    status, told = terminal.run(
        [*command, "--set", *sizes], elsewhere, 60, PYTHONPATH=str(site)
    )
    assert status == 0, told
    assert "Traceback" not in told
    assert "2/2" in told
    assert templates.NO_PICTURES in told
    report = (elsewhere / "runs" / "quickstart" / "report.html").read_text()
    assert templates.NO_PICTURES in html.unescape(report)
    assert "<figure>" not in report
    _, shown, _ = run("env")
    assert re.search(rf"^curax +\S+ in {site}/curax$", shown, re.MULTILINE)
    assert run("train", "grpoo") == (
        2,
        "",
        "curax.train: grpoo: there is no such file, nor recipe; did you mean grpo or "
        "rloo or gspo?\n",
    )
    assert run("new", "own", "--from", "gspo")[0] == 0
    assert run("train", "own", "--print-config")[0] == 0
    (elsewhere / "shop.py").write_text("STEPS = 7")
    (elsewhere / "mine.py").write_text(
        "import curax, shop\n\n\ndef get_config():\n"
        "    return curax.override(curax.load('grpo'), {'steps': shop.STEPS})\n"
    )
    _, found, err = run("train", "mine.py", "--print-config")
    assert re.search(r"^steps = 7 ", found, re.MULTILINE), err


def test_every_package_is_in_the_wheel():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    found = {path.parent for path in (ROOT / "curax").rglob("__init__.py")}
    names = {".".join(path.relative_to(ROOT).parts) for path in found}
    assert {*project["tool"]["setuptools"]["packages"]} == names | {"curax.configs"}


said = partial(printed, commands.main)


def test_every_recipe_has_a_line():
    status, out, _ = said("recipes")
    assert status == 0
    for line, path in zip(out.splitlines(), RECIPES, strict=True):
        name, text = line.split(maxsplit=1)
        assert name == path.stem
        assert text.rstrip() in path.read_text().splitlines()[0]


def test_recipes_of_a_user_stand_beside_those_of_curax(tmp_path, monkeypatch):
    shipped = [path.stem for path in RECIPES]
    monkeypatch.chdir(tmp_path)
    (tmp_path / "configs").mkdir()
    for name, text in (("mine", ""), ("broken", "def"), ("dapo", '"""Ours."""')):
        (tmp_path / "configs" / f"{name}.py").write_text(text)
    status, out, _ = said("recipes")
    lines = {line.split()[0]: line for line in out.splitlines()}
    assert status == 0
    assert sorted(lines) == sorted({*shipped, "mine", "broken"})
    assert lines["mine"].split() == ["mine", "(configs/mine.py)"]
    assert lines["dapo"].split() == ["dapo", "Ours", "(configs/dapo.py)"]
    assert "(" not in lines["grpo"].split(":")[0]
    assert cf.load("dr_grpo").steps
    with pytest.raises(cf.ConfigError, match=r"configs/dapo\.py: no get_config"):
        cf.load("dapo")


def test_what_is_no_file_of_a_recipe_is_not_listed(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "configs" / "folder.py").mkdir(parents=True)
    (tmp_path / "configs" / "__init__.py").touch()
    (tmp_path / "configs" / "dead.py").symlink_to("nowhere")
    os.mkfifo(tmp_path / "configs" / "pipe.py")  # would be waited for
    assert [*recipes.recipes()] == [path.stem for path in RECIPES]


def test_a_recipe_that_loads_its_own_name_gets_that_of_curax(tmp_path, monkeypatch):
    shipped = cf.load("grpo")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "configs").mkdir()
    mine = "import curax\ndef get_config():\n    return curax."
    changed = f"{mine}override(curax.load('grpo'), ['steps=3'])"
    Path("configs/grpo.py").write_text(changed)
    want = config_paths.describe(cf.override(shipped, {"steps": 3}))
    for name in ("grpo", "configs/grpo.py", tmp_path / "configs" / "grpo.py"):
        assert config_paths.describe(cf.load(name)) == want
    for name, other in (("one", "two"), ("two", "one")):
        Path(f"configs/{name}.py").write_text(f"{mine}load('{other}')")
    with pytest.raises(cf.ConfigError, match=r"two\.py:3: one: there is no such file"):
        cf.load("one")


@pytest.mark.parametrize("shell", commands.SHELLS)
def test_a_shell_completes_commands_options_and_recipes(shell):
    status, out, _ = said("completion", shell)
    assert status == 0
    for word in (*commands.MODULES, *commands.HERE, "print-config", "gvm_raft_exact"):
        assert word in out
    assert "advantage=advantage.leave_one_out" in out


TYPED = {  # what stands on the line, as bash cuts it, and what completes it
    "advantage=advantage.lea": "advantage=advantage.leave_one_out",
    "advantage = advantage.lea": "advantage.leave_one_out",
    "steps = 3 loss = loss.gs": "loss.gspo",
    "sampling.off_policy = off_policy.tr": "off_policy.truncated_ratio",
    "downsample =": "downsample.none downsample.max_variance downsample.random "
    "downsample.max_reward downsample.percentile downsample.balanced",
}


@pytest.mark.parametrize("typed", TYPED)
def test_bash_completes_the_function_of_a_field(typed):
    _, script, _ = said("completion", "bash")
    words = ["curax", "train", "grpo", "--set", *typed.split()]
    ask = f"\nCOMP_WORDS=({' '.join(words)})\nCOMP_CWORD={len(words) - 1}\n"
    ask += '_shtab_curax\necho "${COMPREPLY[*]}"\n'
    done = subprocess.run(
        ["bash", "--norc"], input=script + ask, capture_output=True, text=True
    )
    assert done.stdout.split() == TYPED[typed].split(), done.stderr


def test_folders_and_files_are_completed_where_an_option_takes_one():
    _, out, _ = said("completion", "bash")
    for word in ("train___workdir", "evaluate___model", "export_pos_0"):
        assert f"{word}_COMPGEN=_shtab_compgen_dirs" in out
    assert "xray___trl_COMPGEN=_shtab_compgen_files" in out


def test_an_unknown_command_or_shell_is_told_in_a_line():
    for argv in (["trian"], ["completion", "ksh"], ["recipes", "dapo"]):
        assert refusal(commands.main, *argv).startswith("curax: ")
    for name, fix in {
        "trian": "did you mean curax train?",
        "complete": "did you mean curax completion?",
        "dapo": "did you mean curax train dapo?",
        "zzz": "there are train, new, xray, plan, compare, evaluate, export, demo, "
        "report, env, recipes, completion.",
    }.items():
        err = refusal(commands.main, name, "--config", "grpo")
        assert err == f"curax: {name} is no command; {fix}\n"
    assert refusal(commands.main, "train", "dapo", "--config", "grpo") == (
        "curax.train: dapo and --config grpo are two recipes; leave one out.\n"
    )
    _, _, err = said("train", "--set", "steps=3", "grpo")
    assert "'grpo' sets nothing; name the recipe in front of --set." in err


def test_a_bug_report_names_versions_devices_and_settings(monkeypatch):
    monkeypatch.setenv("JAX_SOMETHING", "7")
    status, out, _ = said("env")
    rows = dict(line.split(maxsplit=1) for line in out.splitlines())
    assert status == 0
    assert rows["JAX_SOMETHING"] == "7"
    assert rows["devices"] == "8 of cpu (cpu), 1 process"
    assert {"python", "jaxlib", "flax", "processor"} <= {*rows}
    assert "cores" in env.processor()


@pytest.mark.first(10)
@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_every_field_is_shown_once_with_what_it_means(path):
    config = cf.load(path)
    found = field_help.fields(config)
    names = [field.name for field in found]
    assert len(names) == len({*names})
    listed = {*config_paths.flat(config_paths.describe(config))}
    values = {re.sub(r"(\.\d+)+$", "", name) for name in listed}
    assert {*names} <= values | listed
    for name in values:  # lists of plain values are one field
        assert name in names or any(n.startswith(f"{name}.") for n in names), name
    third = ("optimizer.", "warm_start.optimizer.")  # optax's own arguments
    for field in found:
        if not field.name.startswith(third):
            assert field.comment or field.name[-1].isdigit(), field.name


def test_where_a_value_came_from_is_told(capsys):
    argv = ["grpo", "--print-config", "--set", "kl.coefficient=.25", "seed=0"]
    assert train.main(argv) == 0
    out = capsys.readouterr().out
    lines = {line.split(" = ")[0]: line for line in out.splitlines()}
    config = cf.load("grpo")
    want = {
        "kl.coefficient": ("0.25", "--set"),
        "seed": ("0", "--set"),  # although it is the default too
        "loss": ("loss.clipped_ratio", "recipe"),
        "sampling.max_tokens": (str(config.sampling.max_tokens), "recipe"),
        "mesh.data": ("1", "default"),
        "pilot": ("none", "default"),
        "optimizer": ("optax.adam", "recipe"),
    }
    assert "curax new NAME --from grpo --set kl.coefficient=.25 seed=0\n" in out
    for name, (value, source) in want.items():
        shown, came = lines[name].split("#")
        assert shown.split(" = ")[1].strip() == value
        assert came.strip() == source


@pytest.mark.parametrize("text", ["\n\nHint:\n{hint}", "", " a ", "\\boxed{}\t", "é"])
def test_a_text_is_printed_on_one_line_as_set_takes_it(text):
    path, field = "gsm8k_qwen3_0p6b", "task.template"
    config = cf.override(cf.load(path), {field: text})
    (line,) = (
        line
        for line in field_help.resolved(config, [field]).splitlines()
        if line.startswith(f"{field} = ")
    )
    shown = line.removeprefix(f"{field} = ").removesuffix("# --set").strip()
    assert config_paths.describe(cf.override(cf.load(path), [f"{field}={shown}"])) == (
        config_paths.describe(config)
    )


def test_the_help_of_a_recipe_has_its_fields_and_their_defaults(capsys):
    assert train.main(["grpo", "--help"]) == 0
    shown = capsys.readouterr().out
    assert "fields of grpo:\n  task=tasks.chain.task\n" in shown
    assert "  sampling.group_size=8\n      G, completions per prompt at most\n" in shown
    steps = cf.load("grpo").steps
    assert f"  steps={steps}\n      RL steps; 0: the warm start alone" in shown
    assert "advantage=advantage.leave_one_out" in shown  # what --set takes
    others = " ".join(shown.split("  loss=")[1].split("  loss.")[0].split())
    assert others.endswith(
        "loss.reinforce, loss.clipped_ratio, loss.gspo, loss.cispo, or one of yours"
    )
    assert all(len(line) <= field_help.WIDTH for line in shown.splitlines())
