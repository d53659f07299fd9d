"""One process per folder: a lock that ends with the process, however that ends."""

import contextlib
import errno
import fcntl
import json
import os
import socket
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from curax.settings.config_paths import ConfigError

FILE = "lock"
TRIES = 100  # to open a file that other processes make and remove
_HELD: set[int] = set()  # descriptors of locks; a child of this process has none


def _let_go_in_child() -> None:
    """Else a child that outlives its parent would keep the folder locked."""
    while _HELD:
        os.close(_HELD.pop())


os.register_at_fork(after_in_child=_let_go_in_child)


@contextlib.contextmanager
def hold(folder: Path, option: str) -> Iterator[None]:
    """Make the folder and keep all other processes from writing to it.

    The lock is `flock` on a file in the folder, which names the process. It is gone as
    soon as the process is, and whatever the file holds then means nothing. What was
    made here and is still empty at the end goes; a folder that one process made and
    another then held first stays, empty.

    Args:
        folder: to be written to, there or not.
        option: of the command line that named it.

    Raises:
        ConfigError: the folder cannot be made, or another process holds it.
    """
    made: list[Path] = []
    try:
        file = _locked(folder, option, made)
        try:
            yield
        finally:
            if file is not None:
                with contextlib.suppress(OSError):  # the folder has gone
                    if os.path.samestat(os.fstat(file), (folder / FILE).stat()):
                        (folder / FILE).unlink()  # before others may have it
                _HELD.discard(file)
                os.close(file)
    finally:
        for path in reversed(made):
            with contextlib.suppress(OSError):  # it is no longer empty
                path.rmdir()


def _locked(folder: Path, option: str, made: list[Path]) -> int | None:
    """Descriptor of the locked file; None where the file system has no locks."""
    path = folder / FILE
    for last in (*[False] * TRIES, True):
        try:
            _make(folder, made)
            file = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        except OSError as error:
            if isinstance(error, FileNotFoundError) and not last:
                continue  # another process has just removed what it had made
            raise ConfigError(
                f"{option} {folder} cannot be written: {error.strerror}; name another "
                "folder."
            ) from error
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError):
            holder = _holder(file)
            os.close(file)
            raise ConfigError(
                f"{option} {folder} is being written by {holder}; wait until that "
                "process ends, or name another folder."
            ) from None
        except OSError as error:
            os.close(file)
            path.unlink(missing_ok=True)
            print(
                f"Warning: {folder} cannot be locked ({error.strerror}), so see to it "
                "that no second process writes there.",
                file=sys.stderr,
            )
            return None
        # Whoever held it may have removed the file since it was opened here.
        with contextlib.suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(file), path.stat()):
                break
        os.close(file)
    else:
        raise ConfigError(
            f"{option} {folder} is being written by others; name another folder."
        )
    _HELD.add(file)
    now = time.strftime("%Y-%m-%d %H:%M:%S")
    about = {"pid": os.getpid(), "host": socket.gethostname(), "since": now}
    with contextlib.suppress(OSError):  # a full disk is told by what is written next
        os.truncate(file, 0)
        os.write(file, (json.dumps(about) + "\n").encode())
    return file


def _make(folder: Path, made: list[Path]) -> None:
    """Make the folder and those above it; `made` gets those that were not there."""
    for path in (*reversed(folder.absolute().parents), folder.absolute()):
        if not path.is_dir():
            with contextlib.suppress(FileExistsError):
                path.mkdir()
                made.append(path)
    if not folder.is_dir():
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR))


def _holder(file: int) -> str:
    """The process that holds a lock, in words."""
    try:
        about = json.loads(os.pread(file, 4096, 0))
        return f"process {about['pid']} on {about['host']}, since {about['since']}"
    except (OSError, ValueError, TypeError, KeyError):
        return "another process"
