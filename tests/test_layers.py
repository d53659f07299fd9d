"""Imports point in one direction: from what joins to what is joined."""

import ast
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "curax"

BASE = {
    *("types", "masked", "keys", "kinds", "counts", "checks", "declared"),
    "prompt_form",
}
STAGES = {
    *("memory", "stop", "reflect"),
    *("objective", "allocate", "rollout", "reward", "gate", "hint", "downsample"),
    *("correct", "advantage", "modulate", "loss", "aggregate", "reflect"),
}
MONITORS = {"diversity", "distance", "confidence", "content"}  # look, change nothing
INNER = {"models", "tasks"}  # packages
WORDS = {"kinds", "packages", "places", "config"}  # of configs; no arrays
PAGES = {"record", "frontier", "pictures", "report"}  # of a run folder; no devices
JOINED = (
    BASE
    | STAGES
    | MONITORS
    | {"data", "frozen", "grids", "metrics", "update", "config", "stages"}
)

# Module: what it may import. A package stands for each of its files.
MAY_IMPORT = {
    "types": set(),
    "masked": set(),
    "checks": set(),
    "counts": {"checks"},
    "keys": set(),
    "grids": BASE,
    "metrics": BASE,
    "declared": set(),
    "prompt_form": set(),
    "kinds": set(),
    "packages": set(),
    "places": {"kinds", "packages"},
    "config": {"declared", "kinds", "packages", "places"},
    **dict.fromkeys(STAGES, BASE),
    **dict.fromkeys(MONITORS, BASE),
    "distance": BASE | {"loss"},
    "files": set(),
    "models": BASE | {"files"},
    "tasks": BASE | {"files", "verify"},
    "verify": {"kinds", "packages"},
    "frozen": {"types"},
    "data": BASE,
    "score": BASE | {"rollout", "update"},
    "update": BASE | {"rollout", "confidence"},
    "stages": {"types", "config", "packages", "places"},
    "rehearsal": {"types", "config", "draws", "stages"},
    "parts": {"types", "config", "declared", "update"},
    "draws": JOINED | {"parts"},
    "optimise": JOINED | {"parts", "draws"},
    "pipeline": JOINED | {"parts", "draws", "optimise"},
    "hinted": JOINED | {"parts", "draws", "pipeline"},
    "reflected": JOINED | {"parts", "draws", "optimise", "pipeline"},
    "imitate": JOINED | {"parts"},
    "held_out": JOINED | {"parts", "diversity", "distance"},
    "mesh": {"config"},
    "loops": JOINED
    | {
        "parts",
        "draws",
        "pipeline",
        "hinted",
        "reflected",
        "imitate",
        "held_out",
        "mesh",
    },
    "staged": JOINED
    | {"parts", "draws", "pipeline", "hinted", "reflected", "imitate", "loops"},
    "checkpoint": {"types"},
    "folder": {"types", "config", "command", "record"},
    "recall": {"types", "config", "command", "folder"},
    "progress": {"config"},
    "interrupt": set(),
    "lock": {"places"},
    "compile_times": {"command"},
    "watch": set(),
    "record": set(),
    "frontier": set(),
    "pictures": {"record", "frontier"},
    "report": {"command", "record", "pictures"},
    "run": {
        *("types", "config", "parts", "loops", "staged", "checkpoint", "folder"),
        *("progress", "interrupt", "recall", "record", "report", "watch"),
        *("expect", "held_out", "compile_times", "prompt_form", "rehearsal", "stages"),
        "packages",
    },
    "policies": {
        *("types", "config", "checkpoint", "folder", "frozen", "loops", "mesh"),
        *("files", "models", "places", "run"),
    },
    "exams": {
        *("types", "keys", "rollout", "config", "checkpoint", "folder", "mesh"),
        *("policies", "run", "record", "interrupt", "lock", "progress", "tasks"),
        *("verify", "update", "confidence", "packages", "prompt_form"),
    },
    "evaluate": {"kinds", "command", "config", "exams"},
    "export": {"command", "config", "policies", "models", "prompt_form"},
    "command": {"places"},
    "train": {"command", "config", "folder", "lock", "run"},
    "chances": set(),
    "claims": {"chances", "config", "objective", "places", "predict"},
    "levels": {"chances", "config", "hint", "hinted", "masked"},
    "predict": {"chances", "levels"} | JOINED | {"places", "pipeline"},
    "expect": {"config", "predict"},
    "xray": {
        *("command", "config", "places", "claims", "levels", "predict", "pictures"),
        *("packages", "parts", "rehearsal", "stages"),
    },
}
STANDARD_LIBRARY_ONLY = WORDS | {
    *("interrupt", "files", "lock", "declared", "prompt_form"),
}
NO_JAX = WORDS | PAGES | {"progress", "watch"}
JAX = {"jax", "jaxlib", "flax", "optax", "chex", "orbax"}
# What a module may take of another, where that is not all of it.
TAKES = {("update", "rollout"): {"Prefix", "extend", "prefill", "shard_rows"}}


def imports(path):
    """(module, name) pairs of all imports in a file, in functions too."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from ((alias.name, "") for alias in node.names)
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: a relative import"
            yield from ((node.module, alias.name) for alias in node.names)


def module_of(path):
    """The first name below curax of a file in it."""
    return path.relative_to(PACKAGE).with_suffix("").parts[0]


def own(path):
    """(module of curax, name taken from it) of each import of the package."""
    for module, name in imports(path):
        parts = module.split(".")
        if parts[0] == "curax" and name != "__version__":
            yield (parts[1], name) if len(parts) > 1 else (name, "")


FILES = sorted(path for path in PACKAGE.rglob("*.py") if path.name != "__init__.py")
for_every_file = pytest.mark.parametrize(
    "path", FILES, ids=lambda path: str(path.relative_to(PACKAGE))
)


@for_every_file
def test_no_import_points_back(path):
    module = module_of(path)
    assert module in MAY_IMPORT, f"say in this test what {module} may import"
    back = {of for of, _ in own(path)} - MAY_IMPORT[module] - {module}
    assert not back, f"{module} imports {back}"
    for of, name in own(path):
        assert name in TAKES.get((module, of), {name})


def test_the_layers_have_no_cycle():
    done = set()
    while ready := {m for m, below in MAY_IMPORT.items() if m not in done} - {
        m for m, below in MAY_IMPORT.items() if not below <= done
    }:
        done |= ready
    assert done == set(MAY_IMPORT)


@for_every_file
def test_what_needs_no_arrays_imports_no_jax(path):
    module, others = module_of(path), {name.split(".")[0] for name, _ in imports(path)}
    if module in STANDARD_LIBRARY_ONLY:
        assert others <= {*sys.stdlib_module_names, "curax"}
    if module in NO_JAX:
        assert not others & JAX
    assert not others & {"torch", "transformers", "configs", "experiments", "tests"}


def test_grids_are_the_business_of_those_who_join_the_stages():
    users = {module_of(path) for path in FILES if ("grids", "") in own(path)}
    assert users == {"draws", "pipeline", "reflected"}


@pytest.mark.parametrize("path", sorted(PACKAGE.rglob("__init__.py")), ids=str)
def test_a_package_holds_nothing_but_its_version(path):
    doc, *body = ast.parse(path.read_text()).body
    assert isinstance(doc, ast.Expr)
    names = [target.id for node in body for target in node.targets]
    assert names == (["__version__"] if path.parent == PACKAGE else [])
