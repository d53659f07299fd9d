"""Imports point in one direction: from what joins to what is joined."""

import ast
import sys
from pathlib import Path

import pytest

import curax

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "curax"

STAGES = {
    *("data", "objective", "allocate", "memory", "stop", "score", "hint", "rollout"),
    *("reward", "reflect", "gate", "downsample", "correct", "advantage", "modulate"),
    *("off_policy", "loss", "aggregate", "update"),
}
COMMANDS = {"train", "xray", "commands", "__main__"}

# Room: what it may import. A room is a package or a module of curax; STAGES stands for
# each of them, and stages import no other stage but for those of BETWEEN_STAGES.
BASE = {"types", "arrays", "settings"}
MAY_IMPORT = {
    "settings": set(),
    "types": set(),
    "arrays": {"types", "settings"},
    "config": {"settings"},
    "processes": {"settings"},
    "hub": {"settings"},
    **dict.fromkeys(STAGES, BASE),
    "monitors": BASE | {"loss"},
    "verify": {"settings"},
    "tasks": BASE | {"verify", "hub"},
    "models": BASE | {"hub"},
    "handover": BASE | {"models", "processes", "verify"},
    "engine": BASE | {"handover", "verify"},
    "testbed": BASE | STAGES | {"config", "models", "tasks"},
    "step": BASE | STAGES | {"config", "handover", "monitors", "processes"},
    "theory": BASE | STAGES | {"config", "step"},
    "library": {"types", "settings", "config", "hint", "update", "step", "theory"}
    | {"arrays", "models"},
    "runs": BASE
    | {"config", "step", "theory", "planning", "models", "tasks", "processes", "hub"}
    | {"verify", "handover"},
    "planning": BASE | {"rollout", "config", "step", "models", "hub"},
    "evaluate": BASE
    | {"rollout", "update", "config", "models", "monitors", "step", "runs"}
    | {"tasks", "verify", "hub"},
    "compare": BASE | {"config", "step", "runs"},
    **{
        command: {"config", "settings", "step", "theory", "runs"}
        for command in COMMANDS
    },
}
BETWEEN_STAGES = {
    "rollout": {"monitors"},
    "score": {"rollout"},
    "update": {"rollout"},
}
COMMANDS_BESIDE = {
    "commands": {"models", "tasks", "planning", "testbed"} | STAGES,
    "train": {"processes"},
    "xray": {"commands"},
}
for room, more in (BETWEEN_STAGES | COMMANDS_BESIDE).items():
    MAY_IMPORT[room] = MAY_IMPORT[room] | more

NO_JAX = {
    *("settings", "config", "hub", "models/prompt_form", "runs/xray_picture"),
    *(f"theory/{name}" for name in ("frontier", "population", "table")),
    *(f"theory/{name}" for name in ("advice_table", "advice_options", "sizes")),
    "theory/gradient_table",
    *(f"runs/{name}" for name in ("reading", "pictures", "page", "templates")),
    *("runs/drawing", "runs/progress", "runs/alarms"),
    *(
        f"compare/{name}"
        for name in ("experiment", "statistics", "analysis", "figures", "page")
    ),
    *("runs/interrupt", "processes/watch", "processes/clusters"),
}
STANDARD_LIBRARY_ONLY = {
    *("settings", "config", "runs/interrupt", "models/prompt_form"),
    *("processes/watch", "processes/clusters"),
}
JAX = {"jax", "jaxlib", "flax", "optax", "chex", "orbax"}
# What a room may take of another, where that is not all of it.
TAKES = {
    ("update", "rollout"): {"Prefix", "extend", "prefill"},
    ("xray", "commands"): {"foreign"},
}


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
        if parts[0] == "curax":
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


def named(path):
    """The room of a file, and its place in it, as sets of files name them."""
    place = path.relative_to(PACKAGE).with_suffix("").as_posix()
    return {place, module_of(path)}


@for_every_file
def test_what_needs_no_arrays_imports_no_jax(path):
    others = {name.split(".")[0] for name, _ in imports(path)}
    if named(path) & STANDARD_LIBRARY_ONLY:
        assert others <= {*sys.stdlib_module_names, "curax"}
    if named(path) & NO_JAX:
        assert not others & JAX
    assert not others & {"torch", "transformers", "configs", "experiments", "tests"}


def test_grids_are_the_business_of_those_who_join_the_stages():
    users = {module_of(path) for path in FILES if ("arrays", "grids") in own(path)}
    assert users == {"step"}


@pytest.mark.parametrize("path", sorted(PACKAGE.glob("*/**/__init__.py")), ids=str)
def test_a_room_is_no_module_of_its_own(path):
    (doc,) = ast.parse(path.read_text()).body
    assert isinstance(doc, ast.Expr)


def test_the_package_imports_what_it_names_only_when_it_is_asked_for():
    """Of curax, inside `if TYPE_CHECKING:` alone; the names are those of `__all__`."""
    _, *body = ast.parse((PACKAGE / "__init__.py").read_text()).body
    (checked,) = [node for node in body if isinstance(node, ast.If)]
    assert ast.unparse(checked.test) == "TYPE_CHECKING"
    assert not checked.orelse
    taken = {}
    for node in checked.body:
        assert isinstance(node, ast.ImportFrom)
        taken |= {alias.name: node.module for alias in node.names}
    assert set(taken) == set(curax.__all__)
    at_once = [node for node in body if isinstance(node, ast.Import | ast.ImportFrom)]
    modules = {"importlib", "typing", "curax.settings"}
    assert {node.module for node in at_once} == modules
    modules = {name for name, of in taken.items() if of == "curax"}
    assert modules == STAGES | {"config", "types"}
    for name in curax.__all__:
        found = getattr(curax, name)
        place = found.__name__ if name in modules else found.__module__
        assert place == (f"curax.{name}" if name in modules else taken[name])
