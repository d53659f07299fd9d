"""Errors as sentences: which a user is told, and how; others keep their traceback.

Wrong input is a `ConfigError`, raised before the work of a command begins. What fails
during the work, as a disk, a file or a function of the user's does, is a `WorkError`.
The rest, memory and paths that are closed apart, is a fault of the program.
"""

import contextlib
import errno
import os
import re
import sys
import sysconfig
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from curax.settings.config_paths import ConfigError, Place
from curax.settings.packages import missing

PACKAGE = str(Path(__file__).parents[1])  # folder of curax
LIBRARY = sysconfig.get_path("stdlib")
LONGEST = 600  # characters of a library's error that are shown
LINES = 12  # of a sentence that are shown
BY_JAX = r"^KeyboardInterrupt\b|ptxas exited with non-zero error code 2\b"  # SIGINT


class WorkError(Exception):
    """An error of the work, not of the program. The message begins a sentence."""


def work_error(error: BaseException) -> tuple[BaseException, str] | None:
    """The error to report in place of one that ended the work, and its phrase.

    The phrase has no full stop. Where several followed each other, the first is
    reported, for others are of closing files. None: a fault of the program.
    """
    what = exhausted(error)
    if what is None and not isinstance(error, WorkError):
        return None
    before: BaseException | None = error
    while before := before.__context__:
        if isinstance(before, WorkError):
            error = before
    return error, what or str(error).rstrip(".")


def exhausted(error: BaseException) -> str | None:
    """Phrase for an error of Python or JAX that is one of memory; None for others."""
    text = _line(error)[:200].rstrip(".")
    of_jax = type(error).__name__ == "JaxRuntimeError" and (
        "RESOURCE_EXHAUSTED" in text or "Out of memory" in text
    )
    of_system = isinstance(error, OSError) and error.errno == errno.ENOMEM
    if not (of_jax or of_system or isinstance(error, MemoryError)):
        return None
    return f"there is not enough memory{f' ({text})' if text else ''}"


def out_of_reach(error: BaseException) -> str | None:
    """Sentence for a path that curax finds closed by the system; None for others."""
    if not (isinstance(error, OSError) and error.filename):
        return None
    if error.errno not in (errno.EACCES, errno.ENAMETOOLONG):
        return None
    if PACKAGE not in frames(error)[-1].filename:  # in a function of the user's
        return None
    return f"{error.filename} cannot be used: {error.strerror}; name another path."


def no_device(error: BaseException) -> str | None:
    """Sentence for an error by which JAX tells that it has no device; None for others.

    JAX asserts that there is one where its package for a platform is not installed.
    """
    told, jax = _line(error), sys.modules.get("jax")
    asserted = isinstance(error, AssertionError) and not told
    if jax is None or not (asserted or "Unable to initialize backend" in told):
        return None
    try:
        jax.devices()
    except (AssertionError, RuntimeError) as again:
        wanted = os.environ.get("JAX_PLATFORMS")
        where = f" for JAX_PLATFORMS={wanted}" if wanted else ""
        why = f" ({text(again)})" if str(again) else ""
        fix = "unset that, or install JAX for it" if wanted else "set JAX_PLATFORMS=cpu"
        return f"JAX has no device{where}{why}; {fix}."
    return None


def interrupted(error: BaseException) -> bool:
    """Whether an error is a Ctrl-C, as one that JAX tells of as its own.

    So it does where a program had called back for Python, and on NVIDIA GPUs where one
    is compiled, as all processes of a terminal get the signal. A module in C++ that is
    being imported has it as the cause of an ImportError.
    """
    if isinstance(error, ImportError):
        return isinstance(error.__cause__, KeyboardInterrupt)
    if type(error).__name__ == "JaxRuntimeError":
        return re.search(BY_JAX, str(error), re.MULTILINE) is not None
    return isinstance(error, KeyboardInterrupt)


@contextlib.contextmanager
def config_errors(config: Any = None) -> Iterator[None]:
    """Context that turns exceptions while building or tracing into a ConfigError.

    Args:
        config: whose functions may fail; None: only a sentence that curax itself
            raises, or a missing package, is turned.

    Raises:
        ConfigError: a sentence with the missing package, the option that the error
            quotes, or the line that failed.
    """
    try:
        yield
    except ConfigError:
        raise
    except Exception as error:
        if exhausted(error):  # no fault of the config's
            raise
        if needed := missing(error):
            raise ConfigError(needed) from error
        last = frames(error)[-1]
        if closed := out_of_reach(error) or no_device(error):
            raise ConfigError(closed) from error
        if config is None and PACKAGE not in last.filename:
            raise
        if by_hand(error, last):  # broken records stand on lines of their own
            raise ConfigError(_sentence(_lines(error))) from error
        if config is None:
            raise
        where = f"{last.filename}:{last.lineno}: {type(error).__name__}: {text(error)}"
        fix = "change the option that this line reads, or mend the line"
        if quoted := _culprit(config, text(error)):
            where = f"{quoted} fails at {where}"
            fix = f"set {quoted.partition('=')[0]} to another value"
        raise ConfigError(f"{where}; {fix}.") from error


@contextlib.contextmanager
def refusals(kinds: Any = ConfigError, *, of: str = "") -> Iterator[None]:
    """Context that turns errors whose messages are sentences into a ConfigError.

    Args:
        kinds: class of the errors, or several.
        of: whose sentences they are; it stands before them, with a colon.

    Raises:
        ConfigError: for an error of these kinds.
    """
    try:
        yield
    except kinds as error:
        raise ConfigError(f"{of}: {error}" if of else str(error)) from error


def frames(error: BaseException) -> list[traceback.FrameSummary]:
    """Stack frames of an error, without those inside other libraries."""
    return [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if PACKAGE in frame.filename
        or not ("site-packages" in frame.filename or frame.filename.startswith(LIBRARY))
    ]


def by_hand(error: BaseException, last: traceback.FrameSummary) -> str | None:
    """Sentence of a ValueError that its last frame raises; None for other errors."""
    if not (isinstance(error, ValueError) and (last.line or "").startswith("raise")):
        return None
    return _sentence(_line(error))


def text(error: BaseException) -> str:
    """Message of an error in one line, without a full stop; a long one is cut off."""
    return _line(error)[:LONGEST].rstrip(".") or "no message"


def _line(error: BaseException) -> str:
    return " ".join(str(error).split())


def _lines(error: BaseException) -> str:
    lines = [" ".join(line.split()) for line in str(error).splitlines()]
    return "\n".join([line for line in lines if line][:LINES])


def _sentence(said: str) -> str:
    said = said.rstrip(".") or "no message"
    return said if said.endswith("?") else f"{said}."


def _culprit(config: Any, text: str) -> str | None:
    """The option whose value an error quotes, as `name='text'`; None without one."""
    for name, place in Place(config).walk():
        value = place.value
        if isinstance(value, str) and len(value) > 1 and repr(value) in text:
            return f"{name}={value!r}"
    return None
