"""Files of recipes: found by their names, executed for what they return.

Only the standard library is imported.
"""

import contextlib
import difflib
from collections.abc import Iterator
from pathlib import Path
from typing import TypeVar

from curax.settings import functions
from curax.settings.config_paths import OF_FILE, ConfigError

Made = TypeVar("Made")


def made_by(
    path: Path, function: str, kind: type[Made], source: bytes | None = None
) -> Made:
    """Return value of a function in a Python file, checked to be of a class.

    Args:
        path: Python file, which exists.
        function: name of a function without arguments.
        kind: class of what it returns.
        source: what the file would hold, if it does not exist yet.

    Raises:
        ConfigError: the file is not Python, fails, or returns something else.
    """
    wanted = f"{'an' if kind.__name__[0] in 'AEIO' else 'a'} {kind.__name__}"
    try:
        module = functions.executed(path, module_of(path), source)
        if not hasattr(module, function):
            raise ConfigError(f"no {function}(); define one that returns {wanted}.")
        made = getattr(module, function)()
        if not isinstance(made, kind):
            found = type(made).__name__
            raise ConfigError(f"{function}() returned a {found}; return {wanted}.")
    except functions.RAISED as error:
        raise ConfigError(functions.failure(path, error)) from error
    return made


_HERE = Path(__file__).resolve().parents[1]
SHIPPED = next(  # the folder of recipes, in a wheel or in a clone
    folder / "configs"
    for folder in (_HERE, _HERE.parent)
    if (folder / "configs").is_dir() or folder != _HERE
)


_loading: list[Path] = []  # files that are executed at present


@contextlib.contextmanager
def loading(file: Path) -> Iterator[None]:
    """While a file is executed, `recipes` leaves it out."""
    _loading.append(file)
    try:
        yield
    finally:
        _loading.pop()


def recipes() -> dict[str, Path]:
    """Files of recipes by name: those of ./configs, then those of curax.

    A file of ./configs stands in place of one of curax that has its name, but not for
    itself: a name that it loads while it is loaded is that of another file.
    """
    found: dict[str, Path] = {}
    for folder in (Path("configs"), SHIPPED):
        for file in sorted(folder.glob("[!_]*.py")):
            own = any(file.samefile(other) for other in _loading if file.is_file())
            if file.is_file() and not own:
                found.setdefault(file.stem, file)
    return found


def is_shipped(path: Path) -> bool:
    """Whether a file is a recipe of curax."""
    return path.resolve().parent == SHIPPED


def file_of(path: Path) -> Path:
    """The config file of a path or a recipe name.

    Raises:
        ConfigError: there is none, where the message has the nearest names, or it is
            the config.json of a run.
    """
    if path.is_file() and path.suffix == ".json":
        raise ConfigError(
            f"{path}: JSON, and a config is a Python file; train --resume "
            f"{path.parent} goes on with the run of a folder."
        )
    if path.is_file():
        return path
    known = recipes() if path.name == str(path) and path.suffix in ("", ".py") else {}
    if path.stem in known:
        return known[path.stem]
    if known:
        near = difflib.get_close_matches(path.stem, known, 3)
        fix = f"did you mean {' or '.join(near)}?" if near else "curax recipes has all."
        raise ConfigError(f"{path}: there is no such file, nor recipe; {fix}")
    files = sorted(file.name for file in path.parent.glob("*.py"))
    near = " or ".join(difflib.get_close_matches(path.name, files, 3, cutoff=0))
    fix = f"did you mean {near}?" if near else "no Python file is beside it either."
    raise ConfigError(f"{path}: there is no such file; {fix}")


def module_of(path: str | Path) -> str:
    """Module name of a config file."""
    return OF_FILE + Path(path).stem.replace(".", "_")
