"""The command curax: `curax train grpo`, `curax xray grpo`, `curax recipes`, ..."""

import argparse
import ast
import difflib
import importlib
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

from curax.config import ConfigError, load
from curax.settings.cli import Parser, command_line
from curax.settings.config_paths import Place, functions_for
from curax.settings.packages import VERSION
from curax.settings.recipes import is_shipped, recipes
from curax.settings.tables import aligned

ABOUT = "Curate the learning signal of RLVR, in JAX."
# Where the commands are that `python -m curax.NAME` runs too.
BY_PYTHON = {
    "train": "curax.train",
    "xray": "curax.xray",
    "compare": "curax.compare.__main__",
    "evaluate": "curax.evaluate.__main__",
}
MODULES = {
    "train": "train a policy by a recipe, or resume a run",
    "new": "write a recipe to edit, from one of these or from TRL",
    "xray": "compute which objective a recipe really optimises",
    "plan": "say whether a run fits a slice of chips that is not here",
    "compare": "run recipes beside each other, at equal tokens, updates and cost",
    "evaluate": "measure a policy on problems with answers",
    "export": "write the policy of a run as a Hugging Face checkpoint",
    "demo": "write a tiny model and problems, to try the commands on",
    "report": "draw the pictures of a run and write its page",
    "env": "print versions and devices, for a bug report",
}
HERE = {
    "recipes": "list the recipes, a line each",
    "completion": "print a script that completes these commands in a shell",
}
SHELLS = ("bash", "zsh", "tcsh", "fish")
# Words NAME=FUNCTION in bash, which takes what stands behind "=" for a word of its own.
IN_BASH = """
_curax_set() {
  local name="" word="$1"
  if [ "$word" = "=" ]; then
    name="${COMP_WORDS[COMP_CWORD-1]}="
    word=""
  elif [ "${COMP_WORDS[COMP_CWORD-1]}" = "=" ]; then
    name="${COMP_WORDS[COMP_CWORD-2]}="
  fi
  compgen -W "FUNCTIONS" -- "$name$word" | while read -r one; do
    echo "${one#"$name"}"
  done
}
"""
# What completes an argument that is called so.
PATHS = {"FILE": "FILE", "EXPERIMENT": "FILE", "DIR": "DIRECTORY", "RUN": "DIRECTORY"}


def parser() -> Parser:
    """Argument parser of `curax`; what follows the command is the command's own."""
    rows = [f"  {line}" for line in aligned((MODULES | HERE).items(), left=(0, 1))]
    result = Parser(
        prog="curax",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        description="\n".join([ABOUT, "", "commands:", *rows]),
        epilog="curax COMMAND --help says what a command takes.",
    )
    result.add_argument("--version", action="version", version=VERSION)
    result.add_argument("command", metavar="COMMAND")
    result.add_argument("rest", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    return result


@command_line("curax")
def main(argv: list[str]) -> int:
    """Exit status: that of the command; 2 for bad input."""
    if not argv:
        parser().print_help()
        return 0
    name = known(parser().parse_args(argv[:1]).command)
    if name == "recipes":
        Parser(prog="curax recipes", description=HERE[name]).parse_args(argv[1:])
        print(listed())
        return 0
    if name == "completion":
        print(completion(argv[1:]))
        return 0
    return module(name).main(argv[1:])


def module(name: str) -> ModuleType:
    """The module of a command, which has its `parser` and its `main`."""
    place = BY_PYTHON.get(name, f"curax.commands.{name}")
    return importlib.import_module(place)


def known(name: str) -> str:
    """The name of a command, as it was given.

    Raises:
        ConfigError: there is no such command; the message has the nearest.
    """
    names = [*MODULES, *HERE]
    if name in names:
        return name
    near = difflib.get_close_matches(name, names, 1)
    near = [f"train {name}"] if name in recipes() else near
    fix = f"did you mean curax {near[0]}?" if near else f"there are {', '.join(names)}."
    raise ConfigError(f"{name} is no command; {fix}")


def listed() -> str:
    """A line for each recipe: its name and the first line of its file.

    Those of ./configs that curax has not, or has otherwise, are told by their paths.
    """
    known = recipes()
    rows = [
        (name, _first_line(path) + ("" if is_shipped(path) else f" ({path})"))
        for name, path in known.items()
    ]
    return "\n".join(aligned(rows, left=(0, 1)))


def _first_line(path: Path) -> str:
    """The first line of a file's docstring; empty where there is none."""
    try:
        text = ast.get_docstring(ast.parse(path.read_bytes())) or ""
    except (SyntaxError, ValueError, OSError):  # told where the file is loaded
        return ""
    return text.partition("\n")[0].rstrip(".")


def completion(argv: Sequence[str]) -> str:
    """A script that completes commands, options, recipes, and functions of a recipe.

    Raises:
        ConfigError: the shell is none of SHELLS.
    """
    import shtab

    words = Parser(prog="curax completion", description=HERE["completion"])
    words.add_argument("shell", choices=SHELLS, help="the shell it is for")
    shell = words.parse_args(argv).shell
    whole = argparse.ArgumentParser(prog="curax")
    commands = whole.add_subparsers()
    config = Place(load("quickstart"))
    named = [
        f"{name}={function}"
        for name, place in config.walk()
        for function in functions_for(name, place)
    ]
    for name, text in HERE.items():
        commands.add_parser(name, help=text)
    for name, text in MODULES.items():
        inner = module(name).parser()
        for action in inner._actions:
            if action.dest == "recipe":
                action.choices = [*recipes()]
            elif action.metavar in PATHS:
                action.complete = getattr(shtab, PATHS[action.metavar])
            elif action.dest == "assignments" and shell == "bash":
                action.complete = {"bash": "_curax_set"}
            elif action.dest == "assignments":
                action.choices = named
        commands.add_parser(
            name, help=text, parents=[inner], add_help=False, conflict_handler="resolve"
        )
    ours = IN_BASH.replace("FUNCTIONS", " ".join(named)) if shell == "bash" else ""
    return shtab.complete(whole, shell=shell, preamble=ours)


if __name__ == "__main__":
    sys.exit(main())
