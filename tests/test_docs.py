"""What the documents say of the code and the tests is there."""

import ast
import dataclasses
import re
import runpy
from functools import cache
from pathlib import Path

import pytest
from test_layers import STAGES

import curax
from curax import config as cf
from curax.config import ALIASES, load
from curax.settings import config_types
from curax.settings.config_paths import describe, flat

ROOT = Path(__file__).parents[1]
LAWS = (ROOT / "docs" / "laws.md").read_text()
PAGES = [*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), ROOT / "benchmarks/README.md"]


def test_every_test_that_the_table_of_faults_names_exists():
    rows = (ROOT / "docs" / "faults.md").read_text().splitlines()
    shown = [row.split("|")[3] for row in rows if row.startswith("| ") and "`" in row]
    assert len(shown) > 12
    for cell in shown:
        files = re.findall(r"test_\w+\.py", cell)
        text = "".join((ROOT / "tests" / name).read_text() for name in files)
        assert files
        for name in re.findall(r"\btest_\w+(?!\.py)\b", cell):
            assert name + ".py" in files or f"def {name}(" in text, name


def test_each_law_and_each_fault_has_a_test_that_is_not_long():
    """Of those that decide, `make test` leaves none out."""
    faults = (ROOT / "docs" / "faults.md").read_text().splitlines()
    told = [(row, named(row)) for row in faults if row.startswith("| ")]
    told += [(law, tests) for law, _, tests in laws()]
    assert len(told) > 60
    for what, tests in told:
        assert not tests or any(not is_long(*test) for test in tests), what


def named(row):
    """`(file, test)` of a row of the table of faults."""
    files = re.findall(r"test_\w+\.py", row)
    names = re.findall(r"\btest_\w+(?!\.py)\b", row)
    return [
        (file, name) for file in files for name in names if name in decorators(file)
    ]


@cache
def decorators(file):
    """Those of the tests of a module, by name, as they are written."""
    tree = ast.parse((ROOT / "tests" / file).read_text())
    defs = [node for node in tree.body if isinstance(node, ast.FunctionDef)]
    return {node.name: [*map(ast.unparse, node.decorator_list)] for node in defs}


def is_long(file, name):
    return bool({"long", "pytest.mark.long"} & {*decorators(file)[name]})


@cache
def laws():
    """`(name, statement, [(file, test)])` of each section of a law."""
    found = []
    for section in re.split(r"^### ", LAWS, flags=re.M)[1:]:
        section, *_ = section.split("\n## ")
        name, statement, tests = section.strip().split("\n\n")
        listed = [
            re.fullmatch(r"- `tests/(test_\w+\.py)::(test_\w+)`", line)
            for line in tests.split("\n")
        ]
        assert all(listed), name
        pairs = [(line[1], line[2]) for line in listed if line]
        found.append((name, " ".join(statement.split()), pairs))
    assert sum(len(pairs) for *_, pairs in found) == LAWS.count("::")
    return found


def test_every_test_that_a_law_lists_exists_and_names_its_law():
    assert len(laws()) > 40
    for law, _, tests in laws():
        number = law.split(",")[0].strip()
        assert len(tests) == len(set(tests)) > 0
        for file, name in tests:
            said = " ".join((docstrings(file)[name] or "").split())
            called = rf"\b{re.escape(number)}(?!\w| of DynaMO| \()"
            assert re.search(called, said), (number, file, name)


def test_no_law_is_listed_twice():
    for place in (0, 1):  # its name, its statement
        shown = [law[place] for law in laws()]
        assert len(shown) == len(set(shown))


def test_every_test_that_a_law_lists_calls_curax():
    named = {test for *_, tests in laws() for test in tests}
    assert len(named) > 150
    assert {
        (file, name) for file, name in named if not calls_curax(file, name)
    } == set()
    # What is asked, where the answer is no.
    assert not calls_curax("test_docs.py", "test_no_law_is_listed_twice")


@cache
def docstrings(file):
    """What the functions of a test module say, by name."""
    functions = [
        node for node in module(file).body if isinstance(node, ast.FunctionDef)
    ]
    return {node.name: ast.get_docstring(node) for node in functions}


@cache
def module(file):
    return ast.parse((ROOT / "tests" / file).read_text())


@cache
def named_in(file):
    """By name: None where curax has it, else what it is made of, `{(file, name)}`.

    Of functions, classes and assignments at the top of a test module, and of what it
    takes from other modules of tests; a fixture is an argument of its name.
    """
    found = {}
    for node in module(file).body:
        if isinstance(node, ast.ImportFrom):
            other = f"{node.module}.py"
            for alias in node.names:
                if node.module.split(".")[0] == "curax":
                    found[alias.asname or alias.name] = None
                elif (ROOT / "tests" / other).exists():
                    found[alias.asname or alias.name] = {(other, alias.name)}
            continue
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            made = [node.name]
        elif isinstance(node, ast.Assign):
            targets = (ast.walk(target) for target in node.targets)
            made = [n.id for each in targets for n in each if isinstance(n, ast.Name)]
        else:
            continue
        used = {n.id for n in ast.walk(node) if isinstance(n, ast.Name)}
        used |= {n.arg for n in ast.walk(node) if isinstance(n, ast.arg)}
        found |= {name: {(file, own) for own in used} for name in made}
    return found


def calls_curax(file, name):
    """Whether a test names something of curax, itself or in what it calls in turn."""
    seen, left = set(), {(file, name)}
    while left:
        at = left.pop()
        seen.add(at)
        found = named_in(at[0]).get(at[1], set())
        if found is None:
            return True
        left |= found - seen
    return False


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page):
    for link in re.findall(r"\]\(([^)#]+)\)", page.read_text()):
        assert "://" in link or (page.parent / link).exists(), link


def test_the_tree_of_the_architecture_names_every_module_once():
    page = (ROOT / "docs" / "architecture.md").read_text()
    tree = page.partition("## Where things are")[2]
    lines = tree.partition("    curax/\n")[2].splitlines()
    end = next(i for i, line in enumerate(lines) if not line.startswith(" " * 6))
    top = [line for line in lines[:end] if not line.startswith(" " * 8)]
    shown = [name for line in top for name in re.findall(r"\w+\.py\b|\w+/", line)]
    package = ROOT / "curax"
    there = [path.name for path in package.glob("*.py") if path.stem != "__init__"]
    there += [f"{path.parent.name}/" for path in package.glob("*/__init__.py")]
    assert sorted(shown) == sorted(there)


def groups_of_fields(kind=cf.Config, name=""):
    """(class, dotted name) of a config and of all groups in it."""
    yield kind, name
    for key, below in config_types.field_types(kind).items():
        for one in config_types.groups_in(below):
            yield from groups_of_fields(one, f"{name}.{key}".strip("."))


def test_every_field_of_a_config_is_set_somewhere_or_named_by_a_page():
    pages = "".join(page.read_text() for page in PAGES)
    folders = ("configs", "experiments", "benchmarks")
    code = [path for folder in folders for path in (ROOT / folder).rglob("*.py")]
    set_there = {
        f"{ast.unparse(node.func).rpartition('.')[2]}.{word.arg}"
        for path in [*code, ROOT / "curax" / "testbed.py"]
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call)
        for word in node.keywords
    }
    for kind, group in groups_of_fields():
        for field in dataclasses.fields(kind):
            name = f"{group}.{field.name}".strip(".")
            makers = (kind.__name__, "replace", *(["embedded"] if not group else []))
            places = {f"{one}.{field.name}" for one in makers}
            shown = re.search(rf"`[^`]*\b{re.escape(name)}\b", pages)
            assert shown or places & set_there, name


def test_every_function_of_a_stage_is_used_or_named_by_a_page():
    pages = "".join(page.read_text() for page in PAGES)
    code = [*ROOT.glob("curax/**/*.py"), *ROOT.glob("configs/*.py")]
    trees = {path: ast.parse(path.read_text()) for path in code}
    attributes = {
        node.attr
        for tree in trees.values()
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute)
    }
    for stage in sorted(STAGES):
        tree = trees[ROOT / "curax" / f"{stage}.py"]
        names = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
        for node in tree.body:
            if isinstance(node, ast.FunctionDef) and not node.name.startswith("_"):
                shown = re.search(rf"\b{stage}\.{node.name}\b", pages)
                used = node.name in attributes | names
                assert shown or used, f"{stage}.{node.name}"


def test_the_path_of_the_architecture_links_functions_that_are_there():
    page = (ROOT / "docs" / "architecture.md").read_text()
    rows = re.findall(r"^\| \d+ \| (.*?) \|", page, re.M)
    stages = re.findall(r"\[(\w+)<br/>", page)
    assert len(rows) == 20
    assert len(stages) > 12
    shown = set()
    for row in rows:
        for module, name, file in re.findall(r"\[(\w+)\.(\w+)\]\(\.\./(.*?)\)", row):
            assert Path(file).stem == module
            tree = ast.parse((ROOT / file).read_text()).body
            assert name in {n.name for n in tree if isinstance(n, ast.FunctionDef)}
            shown.add(module)
    assert set(stages) <= shown


def test_every_recipe_has_one_row_in_the_index_of_papers():
    index = (ROOT / "docs" / "papers.md").read_text().partition("\n## ")[0]
    rows = re.findall(r"^\| .*", index, re.M)[1:]
    shown = []
    for row in rows:
        _, number, recipes, _ = row.strip("| ").split(" | ")
        for name in re.findall(r"configs/(\w+)\.py", recipes):
            doc = ast.get_docstring(
                ast.parse((ROOT / f"configs/{name}.py").read_text())
            )
            assert re.findall(r"\d{4}\.\d{5}", number)[0] in (doc or ""), name
            shown.append(name)
    assert sorted(shown) == sorted(path.stem for path in ROOT.glob("configs/*.py"))


def test_every_page_has_its_place_on_the_site_and_its_links_too():
    site = runpy.run_path(str(ROOT / "docs" / "make_site.py"))
    known = (ROOT / "mkdocs.yml").read_text()
    for page in site["pages"]():
        site["with_links"](page.read_text(), page)  # raises where one leads nowhere
        if page.parent == ROOT / "docs":
            assert f" docs/{page.name}\n" in known, page
    text, linked = site["with_links"](
        "[a](../curax/loss.py) [b](../configs/grpo.py#x)\n```\n[c](d)\n```",
        ROOT / "docs" / "laws.md",
    )
    assert "[a](../api/curax.loss.md) [b](../recipes/grpo.md#x)" in text
    assert linked == {ROOT / "curax/loss.py", ROOT / "configs/grpo.py"}
    shown = site["weights"]((ROOT / "docs" / "recipes.md").read_text())
    assert shown["rloo"][0.5] == 1.0
    assert len(shown) > 30


GLOSSARY = (ROOT / "docs" / "glossary.md").read_text()


def in_glossary(part):
    """The cells of the rows below a heading of the glossary."""
    text = GLOSSARY.partition(f"## {part}")[2].partition("\n## ")[0]
    rows = [row for row in text.splitlines() if row.startswith("| ")]
    return [[c.strip() for c in re.split(r" ?\| ?", row)[1:-1]] for row in rows]


@pytest.mark.parametrize(("part", "least"), [("Options", 25), ("Papers", 25)])
def test_what_the_glossary_calls_by_a_name_of_curax_is_there(part, least):
    """Fields of a config, functions of a stage, names of `curax`, metrics."""
    configs = [load(ROOT / f"configs/{name}.py") for name in ("grpo", "sage", "dro")]
    configs += [load(ROOT / "configs/gvm_raft_published.py")]
    known = {name for config in configs for name in flat(describe(config))}
    metrics = (ROOT / "docs" / "metrics.md").read_text()
    rows = in_glossary(part)
    assert len(rows) > least
    for *_, here in rows:
        for name in re.findall(r"`([a-z_]+[./][a-z_0-9.]+)`", here):
            room, _, function = name.partition(".")
            if "/" in name:
                assert f"`{name}`" in metrics
            elif name not in known:
                module = curax if room == "curax" else getattr(curax, room)
                assert hasattr(module, function), name


def test_what_a_user_of_another_program_types_is_in_the_glossary():
    """And leads to the field that the last column of its row names."""
    rows = in_glossary("Options")
    for name in ("num_generations", "beta", "epsilon_high", "num_iterations"):
        assert name in ALIASES
    found = set()
    for *others, here in rows:
        for called in re.findall(r"`([\w.]+)[`=]", " ".join(others)):
            last = called.rpartition(".")[2]
            alias = ALIASES.get(".".join(called.split(".")[-2:])) or ALIASES.get(last)
            if alias and not any(" / " in cell for cell in others):
                stage = alias.partition(".")[0]
                assert f"`{alias}`" in here or f"`{stage}." in here, (called, alias)
                found.add(last)
    assert len(found) > 35
