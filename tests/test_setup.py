"""README's two commands, the Makefile, CI and the pinned versions agree."""

import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from curax.settings import packages

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
OF_RUNS = ("runs", "data", "models")  # folders of a clone that hold no code of curax


def text(name):
    return (ROOT / name).read_text()


def called(lines):
    """The targets of make that lines of a shell call, in order."""
    found = re.findall(r"^ *make +([a-z][a-z -]*)", lines, re.MULTILINE)
    return [target for words in found for target in words.split()]


def targets():
    """What each target of the Makefile depends on."""
    rules = re.findall(r"^([\w$()/.-]+):(?!=) *(.*)$", text("Makefile"), re.MULTILINE)
    return {name: needs.split() for name, needs in rules}


def section(page, title):
    return text(page).split(f"\n## {title}\n")[1].split("\n## ")[0]


def test_ci_runs_the_two_commands_of_the_readme_in_its_order_and_then_all_checks():
    commands = called(section("README.md", "Two commands"))
    assert commands == ["quickstart", "test"]
    run = called(text(".ci/run"))
    assert run[:3] == [*commands, "test-long"]
    assert sorted(run[1:]) == sorted(targets()["check"])


def test_each_test_is_of_one_of_the_two_targets_that_make_all_tests():
    assert targets()["test-all"] == ["test", "test-long"]
    begin = "$(BIN)/python -m pytest "
    (options,) = re.findall(
        rf"^PYTEST = {re.escape(begin)}(.*)$", text("Makefile"), re.M
    )
    assert not re.search(r"(^| )-[km]", options)
    recipes = dict(
        re.findall(r"^(test[a-z-]*):.*\n\t\$\(PYTEST\) (.*)$", text("Makefile"), re.M)
    )
    assert recipes == {"test": '-m "not long"', "test-long": "-m long"}
    markers = PROJECT["tool"]["pytest"]["ini_options"]["markers"]
    assert [line.split(":")[0] for line in markers] == ["long", "first(n)"]
    assert "$(MAKE) test-all " in text("Makefile").split("\ntest-newest:")[1]


def test_every_target_that_a_page_names_is_in_the_makefile():
    known = targets()
    phony = set(known.pop(".PHONY"))
    assert phony == {name for name in known if re.fullmatch(r"[a-z-]+", name)}
    for page in ("README.md", "CONTRIBUTING.md", "docs/benchmarks.md", ".ci/run"):
        spoken = re.findall(r"`make ([a-z-]+)`", text(page))
        assert {*called(text(page)), *spoken} <= phony, page


def test_set_up_is_done_again_when_what_it_installs_changes():
    takes = {"pyproject.toml", "constraints.txt"}
    assert f"SET_UP = {' '.join(sorted(takes, reverse=True))}\n" in text("Makefile")
    for stamp in ("run", "dev"):
        assert "$(SET_UP)" in targets()[f"$(VENV)/{stamp}.stamp"]
    for name in ("test", "test-long", "lint", "types"):
        assert targets()[name] == ["$(VENV)/dev.stamp"]
    assert targets()["quickstart"] == ["$(VENV)/run.stamp"]


def test_every_dependency_is_pinned_for_the_python_of_ci_and_no_other():
    lines = [line for line in text("constraints.txt").splitlines() if line[0] != "#"]
    pins = {}
    for line in lines:
        pin = Requirement(line)
        assert str(pin.specifier).startswith("=="), line
        assert str(pin.marker) == 'python_version == "3.11"', line
        pins[canonicalize_name(pin.name)] = str(pin.specifier).removeprefix("==")
    assert len(pins) == len(lines)
    extras = PROJECT["project"]["optional-dependencies"]
    installed, lines = {"dev", "docs"}, list(PROJECT["project"]["dependencies"])
    for extra in (known := list(installed)):
        for line in extras[extra]:
            more = Requirement(line).extras if line.startswith("curax[") else set()
            known += more - installed
            installed |= more
            lines += [line] * (not more)
    for line in lines:
        needed = Requirement(line)
        assert needed.specifier.contains(pins[canonicalize_name(needed.name)]), line
    # What set-up never installs: accelerators, and two of the dashboards.
    elsewhere = {"tpu", "cuda", "trackio", "mlflow"}
    assert set(extras) - installed == elsewhere
    # New releases of these find fault with code in which nothing has changed.
    for tool in ("ruff", "basedpyright"):
        assert f"{tool}=={pins[tool]}" in extras["dev"]


@pytest.mark.parametrize("extra", sorted({*packages.OF_CURAX.values(), "tpu", "cuda"}))
def test_what_an_extra_brings_is_installed_by_its_name(extra, monkeypatch):
    """Of a clone, a wheel or an address; of curax itself where it is not installed."""
    pip, install, *words = shlex.split(packages.install(extra))
    assert (pip, install) == ("pip", "install")
    wanted = PROJECT["project"]["optional-dependencies"][extra]
    assert {*map(Requirement, words)} == {*map(Requirement, wanted)}

    def without(name):
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "requires", without)
    by_clone = packages.install.__wrapped__(extra)
    assert shlex.split(by_clone) == [pip, install, f"{ROOT}[{extra}]"]


def test_no_page_or_message_installs_curax_from_an_index():
    files = [*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("docs/*/*.ipynb")]
    for folder in ("curax", "benchmarks", "experiments"):
        files += (ROOT / folder).rglob("*.py")
    by_index = re.compile(r"pip install (-\S+ )*['\"]?curax\b(?! @)")
    for path in files:
        found = by_index.search(path.read_text())
        assert path.name == "CHANGELOG.md" or not found, path


def test_a_run_folder_changes_nothing_of_what_the_linter_says(tmp_path):
    def said():
        ruff = Path(sys.executable).with_name("ruff")
        done = subprocess.run(
            [ruff, "check", "--no-cache", "--output-format", "concise", "."],
            cwd=tmp_path,
            capture_output=True,
            text=True,
        )
        return done.returncode, done.stdout

    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    ignored = shutil.ignore_patterns("__pycache__", "golden", "results")
    for folder in ("curax", "tests"):
        shutil.copytree(ROOT / folder, tmp_path / folder, ignore=ignored)
    clean = said()
    assert clean[0] == 0, clean[1]
    helpers = [path.stem for path in (ROOT / "tests").glob("[a-su-z]*.py")]
    for folder in (*OF_RUNS, ".venv-newest", *helpers):
        (tmp_path / folder).mkdir()
    for folder in (*OF_RUNS, ".venv-newest"):
        (tmp_path / folder / "theirs.py").write_text("import os\n")
    assert said() == clean
    (tmp_path / "curax" / "models" / "ours.py").write_text("import os\n")
    assert said()[0] == 1


def test_git_ignores_checkpoints_and_runs_at_the_top_and_nothing_of_the_package():
    for folder in OF_RUNS:
        assert f"/{folder}/" in text(".gitignore").splitlines()
    assert "models/" not in text(".gitignore").splitlines()


def test_types_are_checked_in_the_folders_of_the_project_alone():
    included = PROJECT["tool"]["basedpyright"]["include"]
    assert set(included) == {"curax", "configs", "benchmarks", "experiments"}
    assert not set(included) & set(OF_RUNS)
