"""Command lines: argument parser, output that may be closed, atomic writes."""

import _thread
import argparse
import atexit
import contextlib
import difflib
import errno
import functools
import logging
import os
import re
import shlex
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from curax.settings.config_paths import ConfigError
from curax.settings.errors import exhausted, interrupted, no_device, out_of_reach

DTYPES = ("float32", "bfloat16", "float16")  # of options --dtype


def program(command: str) -> str:
    """Name by which a command can be called here, `curax NAME` or by Python."""
    installed = Path(sys.argv[0]).stem == "curax"  # the script that pip installed
    return f"curax {command}" if installed else f"python -m curax {command}"


def again(command: str, argv: Sequence[str]) -> str:
    """Command line that resumes the work of a command, with options of Python's own."""
    if Path(sys.argv[0]).stem == "curax":  # the script that pip installed
        return shlex.join([sys.argv[0], command, *argv])
    as_module = getattr(sys.modules["__main__"], "__spec__", None)
    end = sys.orig_argv.index("-m") if as_module and "-m" in sys.orig_argv else 1
    return shlex.join([*sys.orig_argv[:end], "-m", f"curax.{command}", *argv])


class Parser(argparse.ArgumentParser):
    """An argument parser that raises a ConfigError of one sentence, without usage."""

    def __init__(self, command: str = "", **options: Any):
        """A parser of a command by its name, with the options of argparse."""
        if command:
            options["prog"] = program(command)
        super().__init__(allow_abbrev=False, **options)

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        """As argparse, but an option that is nearly one of these is told first."""
        known = {name[2:] for name in self._option_string_actions if name[:2] == "--"}
        words: list[str] = list(args or ())
        for word in words[: words.index("--") if "--" in words else None]:
            name, _, _ = word.removeprefix("--").partition("=")
            if word[:2] != "--" or name in known or " " in name:  # a value has blanks
                continue
            if near := difflib.get_close_matches(name, known, 1, cutoff=0.72):
                raise ConfigError(f"--{name} is no option; did you mean --{near[0]}?")
        return super().parse_known_args(args, namespace)

    def error(self, message: str) -> NoReturn:
        """Raise the ConfigError of a parsing error."""
        raise ConfigError(f"{message}; {self.prog} --help lists what there is.")

    def add_recipe(self, default: str | None = None) -> None:
        """Add `RECIPE`, and `--config FILE`, which names one too; see `recipe_of`."""
        otherwise = f" (default: {default})" if default else ""
        self.add_argument(
            "recipe",
            nargs="?",
            metavar="RECIPE",
            help="a recipe by its name, such as grpo, or a Python file with "
            f"get_config(){otherwise}",
        )
        self.add_argument("--config", metavar="FILE", help="the same as RECIPE")

    def add_out(self, *files: str) -> None:
        """Add `--out DIR`, without which nothing is written; see `keep`."""
        self.add_argument(
            "--out",
            type=Path,
            metavar="DIR",
            help=f"folder for {', '.join(files)} (default: nothing is written)",
        )

    def add_assignments(self) -> None:
        """Add `--set NAME=VALUE`, which changes fields and options of a config."""
        self.add_argument(
            "--set",
            dest="assignments",
            action="extend",
            nargs="+",
            default=[],
            metavar="NAME=VALUE",
            help="change a field, a function by its dotted name, or an option of a "
            "function, for example steps=400 sampling.group_size=16 loss.high=0.3 "
            "advantage=advantage.leave_one_out",
        )


def recipe_of(args: argparse.Namespace, default: str | None = None) -> str:
    """The recipe that a command line names.

    Raises:
        ConfigError: it names two, or none and there is no default.
    """
    named = [name for name in (args.recipe, args.config) if name is not None]
    if len(named) > 1:
        raise ConfigError(
            f"{named[0]} and --config {named[1]} are two recipes; leave one out."
        )
    if not named and default is None:
        raise ConfigError("no recipe is named; name one, such as grpo.")
    return named[0] if named else str(default)


def check_absent(args: argparse.Namespace, names: Iterable[str], what: str) -> None:
    """Check that none of some options is given.

    Args:
        args: of the command line.
        names: of the options.
        what: what they are for, and a fix.

    Raises:
        ConfigError: one is.
    """
    for name in names:
        if getattr(args, name) is not None:
            raise ConfigError(f"--{name.replace('_', '-')} is for {what}.")


def recipe_name(path: Path) -> str:
    """Name of a recipe: of its file, or of the folder of a config.py."""
    return path.parent.name if path.stem == "config" else path.stem


class _Quiet:
    """A text stream that drops its output after the first failed write.

    What its encoding lacks, such as a path in another script, is written as `\\u043f`.
    """

    def __init__(self, stream: Any):
        self._stream = stream

    def write(self, text: str) -> int:
        """Write text, or drop it; its length is returned either way."""
        with self._silenced():
            try:
                self._stream.write(text)
            except UnicodeEncodeError as error:
                known = text.encode(error.encoding, "backslashreplace")
                self._stream.write(known.decode(error.encoding))
        return len(text)

    def flush(self) -> None:
        """Flush the stream, or drop what is buffered."""
        with self._silenced():
            self._stream.flush()

    @contextlib.contextmanager
    def _silenced(self) -> Iterator[None]:
        try:
            yield
        except OSError:
            # Buffered output would fail again, at the latest when the process ends.
            with contextlib.suppress(OSError, ValueError):
                nowhere = os.open(os.devnull, os.O_WRONLY)
                os.dup2(nowhere, self._stream.fileno())
                os.close(nowhere)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def survives_closed_output(main: Callable[..., int]) -> Callable[..., int]:
    """Decorator: a command line that continues when its output is closed.

    The reader of a pipe may end, as `head` does, or the terminal may be closed.
    """

    @functools.wraps(main)
    def whole(*args: Any, **named: Any) -> int:
        for number in range(3):
            with contextlib.suppress(OSError):
                os.fstat(number)
                continue
            # The descriptor is closed; the next file opened would get the output.
            os.open(os.devnull, os.O_RDWR)
        streams = sys.stdout, sys.stderr
        sys.stdout, sys.stderr = (_Quiet(one) if one else None for one in streams)
        try:
            return main(*args, **named)
        finally:
            for quiet in (sys.stdout, sys.stderr):
                if isinstance(quiet, _Quiet):
                    quiet.flush()
            sys.stdout, sys.stderr = streams

    return whole


@contextlib.contextmanager
def hears_interrupts() -> Iterator[None]:
    """Context in which a Ctrl-C that Python drops is sent again.

    Dropped is what is raised where nobody can catch it, as in a callback of the garbage
    collector; JAX has one that takes long. One that comes in what a program calls back
    for ends the program; JAX logs that as a failure, which is dropped here.
    """
    before, of_programs = sys.unraisablehook, logging.getLogger("jax._src.callback")

    def hook(dropped: Any) -> None:
        if dropped.exc_type is KeyboardInterrupt:
            # No threading.Thread: its locks may be held where the collection began.
            _thread.start_new_thread(_interrupt_soon, ())
        else:
            before(dropped)

    def failed(record: logging.LogRecord) -> bool:
        return not record.exc_info or record.exc_info[0] is not KeyboardInterrupt

    sys.unraisablehook = hook
    of_programs.addFilter(failed)
    try:
        yield
    finally:
        sys.unraisablehook = before
        of_programs.removeFilter(failed)


def _interrupt_soon() -> None:
    """Send SIGINT once the hook has returned, for it would be dropped in there too."""
    time.sleep(0.05)
    os.kill(os.getpid(), signal.SIGINT)


class _Leaving:
    """How a process ends whose work a Ctrl-C has left, or threads that still compile.

    What JAX compiled then goes on. At its exit JAX would wait for that, however long it
    takes, and crash; so the process ends without it, after all later exit handlers.
    Threads read the program that they compile until then, so its frames are kept.
    """

    def __init__(self):
        self._ready, self._left_by = False, None
        self._status: int | None = None  # of a process that is left

    def prepare(self) -> None:
        """To be called by a command that is the whole of its process, before JAX."""
        if not self._ready:
            atexit.register(self._exit)
        self._ready = True

    def leave(self, error: BaseException | None, status: int) -> None:
        """Leave what JAX is doing, an error's frames with it, when the process ends."""
        api: Any = sys.modules.get("jax._src.api")  # no public name
        if self._ready and hasattr(api, "clean_up"):
            self._left_by, self._status = self._left_by or error, status
            atexit.unregister(api.clean_up)

    def _exit(self) -> None:
        if self._left_by or (self._status is not None and compiles_beside()):
            with contextlib.suppress(OSError, ValueError):
                sys.stdout.flush()
            os._exit(self._status or 0)


_LEAVING = _Leaving()
BESIDE = "compiles beside"  # name of threads whose work a process that ends leaves


def compiles_beside() -> bool:
    """Whether a program still compiles in a thread that nobody waits for."""
    return any(thread.name == BESIDE for thread in threading.enumerate())


def command_line(
    name: str, *, goes_on: bool = False
) -> Callable[[Callable[[list[str]], int]], Callable[..., int]]:
    """Decorator of the main function of a command: errors become exit statuses.

    A ConfigError is printed on stderr behind the name, status 2, as is a path that the
    system keeps closed, and what there is no memory for, status 1; Ctrl-C is 130.
    Called without arguments, the main function gets those of the process.

    Args:
        name: that its messages begin with, as curax.train.
        goes_on: whether it says after Ctrl-C that the same command goes on.
    """

    def decorated(main: Callable[[list[str]], int]) -> Callable[..., int]:
        @survives_closed_output
        @functools.wraps(main)
        def whole(argv: Sequence[str] | None = None) -> int:
            if argv is None:
                _LEAVING.prepare()
                argv = sys.argv[1:]
            status = 1  # of what is raised
            try:
                status = ended([at_home(argument) for argument in argv])
            finally:
                if compiles_beside():
                    _LEAVING.leave(None, status)
            return status

        def ended(argv: list[str]) -> int:
            try:
                with hears_interrupts():
                    return main(argv)
            except ConfigError as error:
                print(f"{name}: {error}", file=sys.stderr)
                return 2
            except (KeyboardInterrupt, Exception) as error:
                if interrupted(error):
                    _LEAVING.leave(error, 130)
                    if goes_on:
                        command = again(name.removeprefix("curax."), argv)
                        print(f"Stopped; to go on: {command}")
                    return 130
                if closed := out_of_reach(error) or no_device(error):
                    print(f"{name}: {closed}", file=sys.stderr)
                    return 2
                if (why := exhausted(error)) is None:
                    raise
                print(f"{name}: {why}; ask for less, or allow more.", file=sys.stderr)
                return 1

        return whole

    return decorated


def at_home(argument: str) -> str:
    """An argument in which `~` in front of a value, a path, is the home folder.

    Shells make it that at the beginning of a word, and not in `model.path=~/x`.
    """
    if found := re.fullmatch(r"([\w.-]+=)(~/[^\s{]*)", argument):
        return found[1] + os.path.expanduser(found[2])
    return argument


def still_there(path: Path, was: os.stat_result) -> bool:
    """Whether a path leads to the same file or folder as it did."""
    try:
        return os.path.samestat(path.stat(), was)
    except OSError:
        return False


def write_whole(path: Path, data: bytes) -> None:
    """Write a file atomically: a failed write leaves the old file."""
    if not path.name:  # "." and "/" have none
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    partial = path.with_name(path.name + ".tmp")
    try:
        partial.unlink(missing_ok=True)  # a pipe of that name would be waited for
        partial.write_bytes(data)
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)


def count(what: str, done: int, total: int) -> None:
    """Print progress on stderr: on one line of a terminal, else by quarters.

    So too where TERM=dumb says that no line is redrawn.
    """
    if sys.stderr.isatty() and os.environ.get("TERM") != "dumb":
        end = "\n" if done == total else ""
        print(f"\r{done} of {total} {what}", end=end, file=sys.stderr, flush=True)
    elif done * 4 // total > (done - 1) * 4 // total:
        print(f"{done} of {total} {what}", file=sys.stderr)


@contextlib.contextmanager
def made_folder(out: Path | None) -> Iterator[None]:
    """Context with the folder of --out, if there is one; failing, it leaves none empty.

    Raises:
        ConfigError: it cannot be made, or not be written to.
    """
    folders = (out, *out.parents) if out else ()
    new = [one for one in folders if not os.path.exists(one)]
    try:
        if out:
            _make_folder(out)
        yield
    except BaseException:
        for one in new:
            with contextlib.suppress(OSError):  # it is not empty
                one.rmdir()
        raise


def _make_folder(out: Path) -> None:
    try:
        out.mkdir(parents=True, exist_ok=True)
        if not os.access(out, os.W_OK):
            raise PermissionError(13, "Permission denied")
    except OSError as error:
        raise ConfigError(
            f"--out {out} cannot be written to ({error.strerror}); name a folder that "
            "can."
        ) from error


def keep(out: Path | None, files: Mapping[str, bytes]) -> str:
    """Write files to the folder of --out, if there is one; says what was written.

    Raises:
        ConfigError: one cannot be written.
    """
    if out is None:
        return "Nothing is written; --out DIR does that."
    for name, content in files.items():
        write_file(out / name, content)
    return f"Written: {', '.join(f'{out}/{name}' for name in files)}"


def write_file(path: Path, content: bytes) -> None:
    """Write a file atomically: a failed write leaves the old file.

    Raises:
        ConfigError: it cannot be written.
    """
    with written_to(path, "another folder"):
        write_whole(path, content)


@contextlib.contextmanager
def written_to(what: object, other: str) -> Iterator[None]:
    """Context that turns an OSError into a ConfigError about what cannot be written.

    Args:
        what: the file or folder, with the option that named it if one did.
        other: what to name in its place.
    """
    try:
        yield
    except OSError as error:
        why = error.strerror or error
        raise ConfigError(f"{what} cannot be written ({why}); name {other}.") from error
