"""Functions by their names, as a command line or a config.json has them.

    advantage.leave_one_out     of curax; curax.advantage.leave_one_out is the same,
                                and so are graders.numbers and gym.task
    optax.adamw                 of any module that Python finds
    graders:within              of a module, one in the working directory too
    graders/mine.py:within      of a file

Only the standard library is imported.
"""

import difflib
import functools
import importlib
import inspect
import os
import sys
import traceback
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

from curax.settings.config_types import ConfigError
from curax.settings.packages import is_installed, missing

FOLDERS = ("curax.", "curax.verify.", "curax.tasks.", "")  # of modules named shortly
RAISED = Exception, SystemExit  # what a user's file may raise: a script ends itself


class NotFoundError(ValueError):
    """A function is not found. The message is the end of a sentence, with the fix."""


def executed(path: Path, name: str, source: bytes | None = None) -> types.ModuleType:
    """The module of a Python file, executed anew under a name.

    Compiled, not imported: no bytecode file, and no stale one after a quick edit. It
    may import modules of the working directory.
    """
    with_working_directory()
    module = types.ModuleType(name)
    module.__file__ = str(path)
    sys.modules[name] = module
    source = path.read_bytes() if source is None else source
    exec(compile(source, path, "exec"), module.__dict__)
    return module


def failure(path: Path, error: BaseException) -> str:
    """Sentence about an error raised in an executed file: `file:line`, what, a fix."""
    frames = traceback.extract_tb(error.__traceback__)
    lines = [frame.lineno for frame in frames if frame.filename == str(path)]
    text = " ".join(str(error).split()) or "no message"
    if isinstance(error, SyntaxError) and error.filename == str(path):
        lines, text = [error.lineno], error.msg
    where = f"{path}:{lines[-1]}" if lines else str(path)
    text = text.rstrip(".")
    if not isinstance(error, ConfigError):
        text = f"{type(error).__name__}: {text}; mend that line"
    return f"{where}: {missing(error) or f'{text}.'}"


def named(name: str) -> Callable[..., Any]:
    """The function that a name stands for.

    Args:
        name: as in the docstring of this module.

    Raises:
        NotFoundError: there is no such module, file or function.
    """
    home, colon, called = name.rpartition(":")
    if not colon:
        home, called = _split(name)
    if not (home and called):
        raise NotFoundError("is no name of a function; write MODULE.FUNCTION.")
    scope = _file(home) if home.endswith(".py") else _module(home)
    found: Any = scope
    for part in called.split("."):
        if not hasattr(found, part):
            known = functions_of(scope)
            exported = [key for key, value in vars(scope).items() if callable(value)]
            near = difflib.get_close_matches(called, [*known, *exported], 1)
            fix = f"it has {', '.join(known)}." if known else "name one that it has."
            fix = f"did you mean {home}{colon or '.'}{near[0]}?" if near else fix
            raise NotFoundError(f"is no function of {home}; {fix}")
        found = getattr(found, part)
    if not callable(found):
        raise NotFoundError(f"is no function, but {found!r}; name a function.")
    return found


def functions_of(scope: types.ModuleType) -> list[str]:
    """Names of the public functions that a module defines.

    A class whose name is in small letters is one: a config names it as any other.
    """
    return [
        key
        for key, value in vars(scope).items()
        if (inspect.isfunction(value) or (inspect.isclass(value) and key.islower()))
        and value.__module__ == scope.__name__
        and not key.startswith("_")
    ]


def _file(home: str) -> types.ModuleType:
    path = Path(home)
    if (known := sys.modules.get(home)) and known.__file__ == str(path):
        return known
    try:
        return executed(path, home)
    except OSError as error:
        raise NotFoundError(
            f"cannot be read ({error.strerror}); name a Python file and a function of "
            "it, FILE.py:FUNCTION."
        ) from error
    except RAISED as error:
        sys.modules.pop(home, None)
        raise NotFoundError(f"cannot be loaded, {failure(path, error)}") from error


def _split(name: str) -> tuple[str, str]:
    """Module and function of a dotted name; of curax without the folder in front too.

    Of several modules of that name it is the first that has the function.
    """
    with_working_directory()
    parts = name.split(".")
    for count in range(len(parts) - 1, 0, -1):
        home, called = (".".join(part) for part in (parts[:count], parts[count:]))
        every = (f"{folder}{home}" for folder in FOLDERS)
        homes = [one for one in every if one in sys.modules or is_installed(one)]
        has = [one for one in homes if hasattr(_module(one), called.partition(".")[0])]
        if homes:
            return (has or homes)[0], called
    return name.rpartition(".")[0], parts[-1]


def _module(home: str) -> types.ModuleType:
    """A module by its name, also of the working directory."""
    with_working_directory()
    try:
        return importlib.import_module(home)
    except RAISED as error:
        fix = f"({error}); write MODULE:FUNCTION, of a module that Python finds, or "
        fix += "FILE.py:FUNCTION."
        if isinstance(error, ModuleNotFoundError) and error.name == home.split(".")[0]:
            near = Path(*home.split(".")).with_suffix(".py")
            fix = f"because there is no module {home}, nor a file {near} here; write "
            fix += "MODULE:FUNCTION or FILE.py:FUNCTION."
        elif needed := missing(error):
            fix = f"because {needed}"
        raise NotFoundError(f"cannot be imported {fix}") from error


@functools.cache
def with_working_directory() -> None:
    """Let Python find modules in the working directory, behind all others.

    `python -m` does so in front of them; a console script does not at all.
    """
    here = os.getcwd()
    if "" not in sys.path and here not in sys.path:
        sys.path.append(here)
