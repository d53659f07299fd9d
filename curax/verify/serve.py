"""What a worker process does: find its grader, and grade what it is sent."""

import contextlib
import fcntl
import functools
import importlib
import os
import pickle
import resource
import signal
import sys
import types
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

from curax.packages import missing

Grader = Callable[[str, str, Any], float | None]
Verdict = float | str  # in [0, 1], or why it is missing

_CHARACTERS = 200  # of an error that are reported


class Source(NamedTuple):
    """Where another process finds a grader."""

    module: str | None  # imported by this name where that works; None: never
    called: str  # what it calls itself
    path: str  # of the file that is executed otherwise; empty: there is none
    code: bytes  # of that file now, so that workers started later run the same
    name: str  # of the grader
    bound: bytes  # the arguments that a partial adds, pickled


def source_of(grader: Grader) -> Source:
    """Where another process finds a grader.

    Args:
        grader: a function at the top level of a module or of a config file, with
            options bound by `functools.partial` or not.

    Raises:
        ValueError: it is a lambda, a closure, a method of an object, or otherwise not
            to be found by its name.
    """
    partial = isinstance(grader, functools.partial)
    function: Any = grader.func if partial else grader
    name = getattr(function, "__qualname__", "")
    scope = _scope(function, name) or {}
    spec, file = scope.get("__spec__"), scope.get("__file__")
    if spec is None and file is None:
        raise ValueError(
            f"the grader {name or type(function).__name__!r} cannot be found by its "
            "name in another process; define it with def at the top level of a file."
        )
    try:
        bound = (grader.args, grader.keywords) if partial else ((), {})
        pickled = pickle.dumps(bound)
    except Exception as error:
        raise ValueError(
            f"the options bound to the grader {name!r} cannot be sent to another "
            f"process ({told(error)}); bind numbers, text or functions of a module."
        ) from error
    # A module that was run with -m has its name there alone.
    module, called = spec and spec.name, scope["__name__"]
    path = os.path.abspath(file) if file and file.endswith(".py") else ""
    code = Path(path).read_bytes() if path else b""
    return Source(module, called, path, code, name, pickled)


def _scope(function: Any, name: str) -> dict[str, Any] | None:
    """The names of the module that has the function under its name, if one has."""
    module = sys.modules.get(getattr(function, "__module__", None) or "")
    # A config file that was loaded again has another module of the same name.
    for scope in (
        getattr(module, "__dict__", {}),
        getattr(function, "__globals__", {}),
    ):
        first, *rest = name.split(".")
        found = scope.get(first)
        for part in rest:
            found = getattr(found, part, None)
        if found is function and name:
            return scope
    return None


def _found(source: Source) -> Grader:
    """The grader, in this process."""
    module = _imported(source)
    function: Any = functools.reduce(getattr, source.name.split("."), module)
    getattr(function, "start", lambda: None)()
    args, keywords = pickle.loads(source.bound)
    return functools.partial(function, *args, **keywords)


def _imported(source: Source) -> types.ModuleType:
    if source.module is not None:
        try:
            return importlib.import_module(source.module)
        except ModuleNotFoundError as error:
            if not (source.path and f"{source.module}.".startswith(f"{error.name}.")):
                raise
    # Not called "__main__", whose guard would run the program itself.
    name = source.called.replace("__main__", "__worker__")
    module = types.ModuleType(name)
    module.__file__ = source.path
    sys.modules[source.called] = sys.modules[name] = module
    exec(compile(source.code, source.path, "exec"), module.__dict__)
    return module


def serve(pipe: int, lifeline: int) -> None:
    """Grade what comes through a pipe until it is closed; what a worker runs.

    Args:
        pipe: descriptor. Comes first: the source and the memory; then lists of pickled
            checks. Goes: why there is no grader, or None; then the verdicts, singly.
        lifeline: descriptor of a socket that is closed when the parent is no more.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _die_with(lifeline)
    connection = Connection(pipe)
    with contextlib.suppress(EOFError, OSError):  # the parent closed it, or is gone
        source, memory_mb = connection.recv()
        try:
            grader = _found(source)
        except BaseException as error:
            connection.send(missing(error) or f"{told(error)}; mend that.")
            return
        _limit(memory_mb)
        connection.send(None)
        while True:
            for check in connection.recv():
                connection.send(_verdict(grader, check))


def _die_with(lifeline: int) -> None:
    """Have the kernel end this process, whatever it does, when a socket is closed.

    The signal of prctl would come when the thread that started this process ends, and
    a thread here would never run beside a regular expression that does not end.
    """
    if hasattr(os, "O_ASYNC"):
        # Elsewhere the default is to do nothing.
        end = signal.SIG_DFL if sys.platform == "linux" else lambda *_: os._exit(1)
        signal.signal(signal.SIGIO, end)
        fcntl.fcntl(lifeline, fcntl.F_SETOWN, os.getpid())
        flags = fcntl.fcntl(lifeline, fcntl.F_GETFL)
        fcntl.fcntl(lifeline, fcntl.F_SETFL, flags | os.O_ASYNC)


def _limit(memory_mb: int) -> None:
    """Limit the memory to so much more than what the imports have reserved."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    reserved = Path("/proc/self/statm")
    if reserved.exists():
        pages = int(reserved.read_text().split()[0])
        most = pages * resource.getpagesize() + memory_mb * 2**20
        _, hard = resource.getrlimit(resource.RLIMIT_AS)
        soft = most if hard == resource.RLIM_INFINITY else min(most, hard)
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


def _verdict(grader: Grader, check: bytes) -> Verdict:
    try:
        result: Any = grader(*pickle.loads(check))
        if result is None:
            return "none"
        if not hasattr(result, "__float__"):
            return f"error: returned {_short(repr(result))}, which is not a number"
        value = float(result)
        if not 0 <= value <= 1:
            return f"error: returned {_short(repr(value))}, which is not in [0, 1]"
        return value
    except BaseException as error:  # SystemExit as well
        return f"error: {told(error)}"


def told(error: BaseException) -> str:
    """An error in one line."""
    try:
        text = str(error)
    except Exception:
        text = ""
    return _short(f"{type(error).__name__}: {text}".rstrip(": "))


def _short(text: str) -> str:
    text = " ".join(text[: 2 * _CHARACTERS].split())
    return text if len(text) <= _CHARACTERS else f"{text[: _CHARACTERS - 3]}..."
