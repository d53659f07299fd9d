"""The program of a worker process: import a function, and serve what a pipe asks.

A grader gets checks and gives verdicts; an environment gets turns and gives answers.
"""

import base64
import contextlib
import ctypes
import functools
import importlib.util
import inspect
import itertools
import json
import math
import os
import pickle
import resource
import select
import signal
import socket
import sys
import time
import types
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

from curax.settings import machine
from curax.settings.declared import declared
from curax.settings.packages import is_installed, missing

Grader = Callable[[str, str, Any], float | None]
Verdict = float | str  # outcome in [0, 1], or the reason why it is missing


class Service(NamedTuple):
    """What kind of function a worker serves, and how it is called."""

    name: str
    arguments: tuple[str, ...]
    returns: str


GRADER = Service("grader", ("prompt", "completion", "answer"), "a number")
ENVIRONMENT = Service("environment", (), "a types.Environment")
STATE_BYTES = 2**20  # of a pickled state, at most
TOKENS = 2**18  # or characters, of an observation; what is behind them is not sent.
# An opening is sent whole, or not at all.

_CHARACTERS = 200  # of an error that are reported
_SET_DEATH_SIGNAL, _SET_SUBREAPER = 1, 36  # options of prctl


class Source(NamedTuple):
    """Module, file and options by which another process imports a function."""

    module: str | None  # imported by this name where that works; None: never
    called: str  # its `__name__`
    path: str  # file that is executed otherwise; empty: there is none
    code: bytes  # its content now, so that workers started later run the same
    name: str  # of the function
    bound: bytes  # the arguments that a partial adds, pickled


def source_of(served: Callable[..., Any], service: Service = GRADER) -> Source:
    """The source by which another process imports a function that it is to serve.

    Args:
        served: a function at the top level of a module or of a config file, with
            options bound by `functools.partial` or not.
        service: what it serves as.

    Raises:
        ValueError: it is a lambda, a closure, a method of an object, or otherwise
            cannot be imported by its name; or it does not take the arguments of the
            service.
    """
    partial = isinstance(served, functools.partial)
    function: Any = served.func if partial else served
    name = getattr(function, "__qualname__", "")
    scope = _scope(function, name) or {}
    spec, file = scope.get("__spec__"), scope.get("__file__")
    if spec is None and file is None:
        raise ValueError(
            f"the {service.name} {name or type(function).__name__!r} cannot be found "
            "by its name in another process; define it with def at the top level of a "
            "file."
        )
    check_call(served, name, service)
    try:
        bound = (served.args, served.keywords) if partial else ((), {})
        pickled = pickle.dumps(bound)
    except Exception as error:
        raise ValueError(
            f"the options bound to the {service.name} {name!r} cannot be sent to "
            f"another process ({error_line(error)}); bind numbers, text or functions "
            "of a module."
        ) from error
    # A module that was run with -m has its name there alone.
    module, called = spec and spec.name, scope["__name__"]
    path = os.path.abspath(file) if file and file.endswith(".py") else ""
    code = Path(path).read_bytes() if path else b""
    return Source(module, called, path, code, name, pickled)


def check_call(
    served: Callable[..., Any], name: str, service: Service = GRADER
) -> None:
    """Refuse a function that cannot be called with the arguments of a service."""
    asynchronous = inspect.iscoroutinefunction(served)
    if asynchronous or inspect.isgeneratorfunction(served):
        kind = "is asynchronous" if asynchronous else "yields"
        raise ValueError(
            f"the {service.name} {name!r} {kind}; define it with def, and return "
            f"{service.returns}."
        )
    try:
        # The signature of what is called, not of what a decorator wraps.
        signature = inspect.signature(served, follow_wrapped=False)
    except ValueError:
        if not isinstance(served, functools.partial):
            return  # native code has no signature
        fault = "it has no option of a name that is bound"
    else:
        try:
            signature.bind(*service.arguments)
            return
        except TypeError as error:
            fault = str(error)
    call = ", ".join(service.arguments)
    takes = "let it take these three, and give each further" if call else "give each"
    raise ValueError(
        f"the {service.name} {name!r} cannot be called as {name}({call}): {fault}; "
        f"{takes} option a default or bind it by its name with functools.partial."
    )


def _scope(function: Any, name: str) -> dict[str, Any] | None:
    """The namespace of the module that holds the function; None: there is none."""
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


def _imported_function(source: Source) -> Callable[..., Any]:
    """The function of a source, imported into this process and started."""
    module = _imported(source)
    function: Any = functools.reduce(getattr, source.name.split("."), module)
    getattr(function, "start", lambda: None)()
    args, keywords = pickle.loads(source.bound)
    return functools.partial(function, *args, **keywords)


def _imported(source: Source) -> types.ModuleType:
    if source.module is not None:
        try:
            return _as_it_was(source.module, source)
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


def _as_it_was(name: str, source: Source) -> types.ModuleType:
    """The module of a source by its name, with its content of then."""
    path = Path(source.path)
    if not (source.path and path.is_file()) or path.read_bytes() == source.code:
        return importlib.import_module(name)
    spec = importlib.util.find_spec(name)
    assert spec is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    exec(compile(source.code, source.path, "exec"), module.__dict__)
    return module


def serve(pipe: int, lifeline: int, parent: int) -> None:
    """Run a worker: fork a process that serves, and end it when the parent asks.

    Args:
        pipe: descriptor of a socket. It receives, pickled, the source, service, memory
            limit and nonce, then lists of pickled checks. It sends lines of JSON,
            `[nonce, number, verdict]`, numbered from 0: first null, or why there is no
            function, then the verdict of each check in order.
        lifeline: descriptor of a socket that is closed when the worker is to end.
        parent: id of the parent process.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _prctl(_SET_SUBREAPER, 1)
    keeper = os.getpid()
    grading = os.fork()
    if grading:
        os.close(pipe)
        os._exit(_keep(grading, lifeline, parent))
    os.close(lifeline)
    os.setsid()  # what a grader sends to its group does not reach the keeper
    _prctl(_SET_DEATH_SIGNAL, signal.SIGKILL)
    # Where memory is short, the kernel ends this process before the parent.
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("500")
    if os.getppid() == keeper:
        # The pipe has ended, maybe within a message.
        with contextlib.suppress(EOFError, OSError, pickle.UnpicklingError):
            _grade(pipe)
    os._exit(0)  # threads of a grader are not waited for


def _prctl(option: int, value: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(option, *map(ctypes.c_ulong, (value, 0, 0, 0)))


def _grade(pipe: int) -> None:
    """Answer the checks that a pipe receives until it is closed."""
    os.register_at_fork(after_in_child=functools.partial(_close, pipe))
    process, number = os.getpid(), 0
    asked = open(pipe, "rb", closefd=False)  # noqa: SIM115 - as long as the process
    source, service, memory_mb, nonce = pickle.load(asked)

    def send(verdict: Any) -> None:
        nonlocal number
        if os.getpid() != process:
            os._exit(1)  # a fork that came back from a grader
        _write(pipe, f"{json.dumps([nonce, number, verdict])}\n".encode())
        number += 1

    try:
        served = _imported_function(source)
        package = declared(served, "package", None)
        if package and not is_installed(package):
            raise ModuleNotFoundError(name=package)
        respond = _SERVICES[service](served)
    except BaseException as error:
        send(missing(error) or f"{error_line(error)}; mend that.")
        return
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    machine.limit_bytes(memory_mb * 2**20, for_good=True)  # beyond its imports
    send(None)
    while True:
        for check in pickle.load(asked):
            send(respond(check))


def _close(descriptor: int) -> None:
    with contextlib.suppress(OSError):
        os.close(descriptor)


def _write(pipe: int, data: bytes) -> None:
    while data:
        data = data[os.write(pipe, data) :]


def _keep(grading: int, lifeline: int, parent: int) -> int:
    """Wait for the end of a process or of the lifeline; kill it and its descendants.

    On Linux orphans of the process become children of this one, which runs no code of a
    grader. Elsewhere only the group of the process is killed.

    Returns:
        The status of the process as of a shell, 128 plus the number of a signal.
    """
    heard, signalled = socket.socketpair()
    heard.setblocking(False)
    signalled.setblocking(False)
    signal.set_wakeup_fd(signalled.fileno(), warn_on_full_buffer=False)
    for number in (signal.SIGCHLD, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda *_: None)
    ended, left = _reaped()
    # The lifeline may be held open by a fork of the parent; then its number tells.
    while grading not in ended and os.getppid() == parent:
        ready, _, _ = select.select([lifeline, heard], [], [], 1.0)
        if lifeline in ready:
            break
        if heard in ready and set(heard.recv(4096)) != {signal.SIGCHLD}:
            break
        ended, left = _reaped()
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(grading, signal.SIGKILL)
    while left:
        # Children of those that are killed here become children of this process.
        for child in {grading, *_children()} - ended.keys():
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(child, signal.SIGKILL)
        time.sleep(0.002)
        more, left = _reaped()
        ended |= more
    code = os.waitstatus_to_exitcode(ended[grading])
    return code if code >= 0 else 128 - code


def _reaped() -> tuple[dict[int, int], bool]:
    """Exit statuses of the children that have ended, and whether others are left."""
    ended: dict[int, int] = {}
    while True:
        try:
            child, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return ended, False
        if not child:
            return ended, True
        ended[child] = status


def _children() -> list[int]:
    """Ids of the children of this process; empty where /proc does not list them."""
    process = os.getpid()
    try:
        return [
            int(child)
            for child in Path(f"/proc/self/task/{process}/children").read_text().split()
        ]
    except OSError:
        return []


def _verdict(grader: Grader, check: bytes) -> Verdict:
    try:
        return verdict_of(grader(*pickle.loads(check)))
    except BaseException as error:  # SystemExit as well
        return f"error: {error_line(error)}"


def _answers_of(make: Callable[[], Any]) -> Callable[[bytes], Any]:
    """What answers turns, in the environment that a function makes.

    Raises:
        TypeError: it makes another thing.
    """
    made = make()
    for name in ("reset", "observe"):
        if not callable(getattr(made, name, None)):
            raise TypeError(
                f"what it gives, {type(made).__name__}, has no function {name}; let it "
                "give a types.Environment"
            )
    return functools.partial(_answer, made, tuple(declared(make, "measures", ())))


def _answer(environment: Any, measures: tuple[str, ...], check: bytes) -> Any:
    """The answer of an environment to a turn, as JSON; or why there is none.

    No turn asks what the policy reads before the first.
    """
    try:
        state, key, target, turn = pickle.loads(check)
        if state is None:
            before = environment.reset(key, target)
        else:
            before = pickle.loads(base64.b64decode(state))
        if turn is None:
            words = environment.opening(before)
            if not isinstance(words, str):
                return f"error: opening gives {short(repr(words))}"
            if len(words) > TOKENS:
                return f"error: opening gives {len(words)} characters, above {TOKENS}"
            rest = {"state": "", "done": False, "reward": 0.0, "found": {}}
            return {"tokens": words, **rest}
        after, seen = after_a_turn(environment.observe(before, turn))
        found = environment.measure(after) if environment.measure else {}
        if {*found} != {*measures}:
            return (
                f"error: measures {', '.join(map(str, found)) or 'nothing'}, and "
                f"declares {', '.join(measures) or 'nothing'}"
            )
        after = pickle.dumps(after)
        if len(after) > STATE_BYTES:
            return f"error: a state of {len(after)} bytes is too large to be sent"
        words, reward = seen.tokens, seen.reward
        if isinstance(words, str):
            words = words[:TOKENS]
        else:
            words = [int(t) for t in itertools.islice(words, TOKENS)]
        reward = math.nan if reward is None else float(reward)
        if math.isinf(reward):
            return f"error: a reward of {reward}, which is not in [0, 1]"
        return {
            "state": base64.b64encode(after).decode(),
            "tokens": words,
            "done": bool(seen.done),
            "reward": reward,
            "found": {name: float(value) for name, value in found.items()},
        }
    except BaseException as error:  # SystemExit as well
        return f"error: {error_line(error)}"


def after_a_turn(observed: Any) -> tuple[Any, Any]:
    """What `observe` of an environment gives: a state and an observation.

    Raises:
        TypeError: it is something else, or its tokens are.
    """
    if not isinstance(observed, tuple) or len(observed) != 2:
        raise TypeError(
            f"observe gives {short(repr(observed))}; let it give a state and an "
            "Observation"
        )
    if not hasattr(observed[1], "tokens"):
        raise TypeError(
            f"observe gives {short(repr(observed[1]))} beside the state; let it give "
            "an Observation"
        )
    words = observed[1].tokens
    if not isinstance(words, Iterable) or isinstance(words, bytes):
        raise TypeError(
            f"observe gives {short(repr(words))} as tokens; let it give text, or a "
            "list of tokens"
        )
    return observed


def verdict_of(result: Any) -> Verdict:
    """The verdict that the result of a grader stands for."""
    if result is None:
        return "none"
    if not hasattr(result, "__float__"):
        return f"error: returned {short(repr(result))}, which is not a number"
    value = float(result)
    if not 0 <= value <= 1:
        return f"error: returned {short(repr(value))}, which is not in [0, 1]"
    return value


def error_line(error: BaseException) -> str:
    """The class and message of an error in one line of at most 200 characters."""
    try:
        text = str(error)
    except Exception:
        text = ""
    return short(f"{type(error).__name__}: {text}".rstrip(": "))


def short(text: str) -> str:
    """A text in one line of at most 200 characters."""
    text = " ".join(text[: 2 * _CHARACTERS].split())
    return text if len(text) <= _CHARACTERS else f"{text[: _CHARACTERS - 3]}..."


def printable(text: str) -> str:
    """A text with escapes for what a terminal would not show."""
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)


_SERVICES: dict[str, Callable[..., Callable[[bytes], Any]]] = {
    GRADER.name: lambda grader: functools.partial(_verdict, grader),
    ENVIRONMENT.name: _answers_of,
}
