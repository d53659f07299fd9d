"""curax new: write a recipe to edit, from another recipe or from a file of TRL."""

import ast
import dataclasses
import json
import math
import os
import re
import shlex
import sys
import textwrap
import tokenize
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from curax.config import Config, ConfigError, load, override
from curax.settings.cli import Parser, command_line, made_folder, write_file
from curax.settings.config_paths import changes, describe
from curax.settings.field_help import WIDTH, shown
from curax.settings.packages import VERSION
from curax.settings.recipes import file_of, made_by, recipes

ALWAYS = ("prompts", "group_size", "max_tokens")  # said by every recipe
MADE = "# Made by curax"  # begins the first of three lines
TRL = "trl"  # in front of a file with options of TRL
OF_TRL = '''"""GRPO as a configuration of TRL has it, on the embedded task.

To train a model of yours by it:
    curax new NAME --from gsm8k_qwen3_0p6b, and RECIPE = "{name}" in that file.
{remarks}
"""

from functools import partial

import optax

from curax import {modules}
from curax.config import {classes}
from curax.testbed import embedded


def get_config() -> Config:
    return embedded(
{fields}
    )
'''


def parser() -> Parser:
    """Argument parser of `curax new`."""
    result = Parser(
        "new",
        description="Write a recipe to edit, configs/NAME.py, which curax train NAME, "
        "curax xray NAME and other commands read.",
    )
    result.add_argument("name", metavar="NAME", help="what the recipe is called")
    result.add_argument(
        "--from",
        dest="recipe",
        nargs="+",
        required=True,
        metavar=("RECIPE", "FILE"),
        help="a recipe by its name, such as grpo, or a Python file with get_config(); "
        "or trl and a YAML or JSON file with options of TRL's GRPOConfig",
    )
    result.add_assignments()
    result.add_argument(
        "--out",
        type=Path,
        default=Path("configs"),
        metavar="DIR",
        help="folder of the file (default: configs, where names are looked for)",
    )
    return result


@command_line("curax.new")
def main(argv: list[str]) -> int:
    """Exit status: 0 done, 2 bad input."""
    args = parser().parse_args(argv)
    if not re.fullmatch(r"[^\W_][\w-]*", args.name):
        raise ConfigError(
            f"NAME={args.name} must be letters, digits, _ and -, and begin with one of "
            "the first two; write one such as mine."
        )
    path, replaces = args.out / f"{args.name}.py", args.name in recipes()
    if os.path.lexists(path):
        raise ConfigError(f"{path} is there; take another name, or remove it.")
    named, home = shlex.join(args.recipe), args.out
    if len(args.recipe) == 1 and args.recipe != [TRL]:
        source = file_of(Path(args.recipe[0]))
        home = source.parent
        config, text = copied(source, path)
    elif len(args.recipe) == 2 and args.recipe[0] == TRL:
        config, text = of_trl(Path(args.recipe[1]), args.name)
    else:
        fix = f"write --from grpo, for example, or --from {TRL} grpo.yaml"
        raise ConfigError(f"--from {named} is no recipe, nor {TRL} and a file; {fix}.")
    config = override(config, args.assignments)
    if args.assignments:
        text = with_assignments(text, args.assignments, named)
    at_home = path.resolve().parent == Path("configs").resolve()
    called = args.name if at_home else shlex.quote(str(path))
    text = (
        f"{MADE} {VERSION} from {' '.join(named.split())}, to be changed.\n"
        f"# All that can be set: curax train {called} --help\n"
        f"# What it optimises: curax xray {called}\n{text}"
    )
    data = text.encode("utf-8", "backslashreplace")  # of a name that is no UTF-8
    check(path, data, config, named, home)
    with made_folder(args.out):
        write_file(path, data)
    print(f"Written: {path}. To run it: curax train {called}")
    if at_home and replaces:
        print(f"In this folder it stands in place of the recipe {args.name} of curax.")
    return 0


def copied(source: Path, path: Path) -> tuple[Config, str]:
    """Config and text of a recipe, whose own commands become those of another path.

    Raises:
        ConfigError: the recipe cannot be loaded.
    """
    config = load(source)
    with tokenize.open(source) as file:
        text = re.sub(rf"\A{MADE}(.*\n){{3}}", "", file.read())
    return config, text.replace(f"configs/{source.name}", str(path))


def check(path: Path, data: bytes, config: Config, source: str, home: Path) -> None:
    """Check that a file would load, and give a config.

    Args:
        path: where it would be.
        data: what it would hold.
        config: that it is to give.
        source: what it is made from, for messages.
        home: folder of that, where it may find what it does not elsewhere.

    Raises:
        ConfigError: it would not.
    """
    if wrong := _wrong(path, data, config):
        if not _wrong(home / path.name, data, config):
            found = (
                f"add --out {shlex.quote(str(home))}, to have it beside what it reads"
            )
            wrong = f"{wrong.rpartition('; ')[0]}; {found}."
        raise ConfigError(f"{source} cannot be copied: {wrong}")


def _wrong(path: Path, data: bytes, config: Config) -> str:
    """Sentence on a file that would not load, or give a config; empty: it would."""
    try:
        found = made_by(path, "get_config", Config, data)
    except ConfigError as error:
        return str(error)
    for name, want, got in changes(describe(config), describe(found)):
        return f"{name} would be {got}, not {want}; copy the file by hand."
    return ""


def with_assignments(text: str, assignments: Sequence[str], source: str) -> str:
    """The text of a config file whose config has values set, in the words of `--set`.

    Raises:
        ConfigError: there is not one `return` in its `get_config()`, or no line of its
            own begins with it.
    """
    made = [n for n in ast.parse(text).body if getattr(n, "name", "") == "get_config"]
    found = [n for one in made for n in ast.walk(one) if isinstance(n, ast.Return)]
    lines = text.rstrip("\n").split("\n")
    before = [lines[n.lineno - 1][: n.col_offset] for n in found]
    if len(before) != 1 or before[0].strip():
        raise ConfigError(
            f"{source} has not one return in get_config(), on a line of its own, where "
            "--set could stand; leave --set out, and change the new file."
        )
    (end,), (pad,) = found, before
    lines[end.lineno - 1] = lines[end.lineno - 1].replace("return", "config =", 1)
    lines[end.end_lineno : end.end_lineno] = [
        f"{pad}# As --set takes them, each in place of what is said above.",
        f"{pad}changed = [",
        *(f"{pad}    {json.dumps(word, ensure_ascii=False)}," for word in assignments),
        f"{pad}]",
        f"{pad}return override(config, changed)",
    ]
    begin, names = "from curax.config import ", ["override"]
    for i, line in enumerate(lines):
        if re.fullmatch(rf"{begin}[\w, ]+", line):
            names += line.removeprefix(begin).split(", ")
            lines[i] = f"{begin}{in_order(names)}"
            break
    else:
        (first,) = made
        decorators = getattr(first, "decorator_list", [])
        at = min(node.lineno for node in (first, *decorators)) - 1
        lines[at:at] = [f"{begin}override", "", ""]
    return "\n".join([*lines, ""])


# From TRL


def of_trl(file: Path, name: str) -> tuple[Config, str]:
    """Config and text of the recipe that options of TRL describe.

    Raises:
        ConfigError: the file cannot be read or converted.
    """
    from curax.commands import foreign

    found = foreign.read_trl(file)
    remarks = list(found.remarks)
    if found.unread:
        # A stranger's name does not end the docstring.
        names = (re.sub(r"\W", "_", key) for key in found.unread)
        remarks.append(f"not read, without a counterpart: {', '.join(names)}")
    # What is none or 0 is so by default too.
    fields = [argument(key, value) for key, value in found.fields.items() if value]
    body = "\n".join(fields)
    return found.config(), OF_TRL.format(
        name=name,
        remarks="\n".join(
            textwrap.fill(f"- {line}", WIDTH, subsequent_indent="  ")
            for line in remarks
        ),
        modules=in_order({*re.findall(r"\b([a-z_]+)\.[a-z]", body)} - {"optax"}),
        classes=in_order({"Config", *re.findall(r"\b([A-Z]\w*)\(", body)}),
        fields=body,
    )


def argument(name: str, value: Any) -> str:
    """A line `name=value,` of a call, or several where one would be too long."""
    pad, (begin, parts) = " " * 8, words(value)
    if parts is None:
        return f"{pad}{name}={begin},"
    whole = f"{pad}{name}={begin}({', '.join(parts)}),"
    inner = f"{pad}    {', '.join(parts)}"
    if len(whole) <= WIDTH:
        return whole
    if len(inner) > WIDTH:
        inner = "\n".join(f"{pad}    {part}," for part in parts)
    return f"{pad}{name}={begin}(\n{inner}\n{pad}),"


def words(value: Any) -> tuple[str, list[str] | None]:
    """A value as Python: what is called, and its arguments, if it is a call."""
    bound: Mapping[str, Any] | None = None
    front = list[str]()
    if isinstance(value, partial):
        called, bound, front = "partial", value.keywords, [shown(value.func)]
    elif dataclasses.is_dataclass(value):
        called = type(value).__name__
        bound = {
            field.name: part
            for field in dataclasses.fields(value)
            if (part := getattr(value, field.name)) != field.default
            or field.name in ALWAYS
        }
    elif isinstance(value, float) and math.isinf(value):
        return 'float("inf")', None
    else:
        return shown(value) if callable(value) else repr(value), None
    arguments = front + [f"{key}={written(part)}" for key, part in bound.items()]
    return called, arguments


def written(value: Any) -> str:
    """A value as Python, on one line."""
    called, parts = words(value)
    return called if parts is None else f"{called}({', '.join(parts)})"


def in_order(names: Sequence[str] | set[str]) -> str:
    """Names of an import in the order of ruff: KL, Config, load."""
    once = sorted({*names}, key=lambda n: (not n.isupper(), n.islower(), n))
    return ", ".join(once)


if __name__ == "__main__":
    sys.exit(main())
