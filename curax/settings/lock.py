"""Lock of a folder for one process; it ends with the process, killed or not."""

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
TRIES = 100  # attempts to open the lock file while others make and remove it
_HELD: set[int] = set()  # descriptors of locks; children of this process close them


def _close_in_child() -> None:
    """Close inherited locks; a child would keep them after its parent's end."""
    while _HELD:
        os.close(_HELD.pop())


os.register_at_fork(after_in_child=_close_in_child)


@contextlib.contextmanager
def hold(folder: Path, option: str) -> Iterator[None]:
    """Make a folder and lock it for this process.

    The lock is `flock` on a file in the folder that names the process. The kernel drops
    it with the process; the file's content then means nothing. Folders that were made
    here and are still empty at the end are removed; a folder that one process made and
    another locked first stays, empty.

    Args:
        folder: folder to lock; made if it is missing.
        option: command-line option that named it, for messages.

    Raises:
        ConfigError: the folder cannot be made, or another process holds the lock.
    """
    made: list[Path] = []
    try:
        file = _locked(folder, option, made)
        try:
            yield
        finally:
            if file is not None:
                with contextlib.suppress(OSError):  # the folder was removed
                    if os.path.samestat(os.fstat(file), (folder / FILE).stat()):
                        (folder / FILE).unlink()  # while it is still locked
                _HELD.discard(file)
                os.close(file)
    finally:
        for path in reversed(made):
            with contextlib.suppress(OSError):  # it is not empty
                path.rmdir()


def _locked(folder: Path, option: str, made: list[Path]) -> int | None:
    """Descriptor of the locked file; None on a file system without locks."""
    path = folder / FILE
    for last in (*[False] * TRIES, True):
        try:
            _make(folder, made)
            file = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        except OSError as error:
            if isinstance(error, FileNotFoundError) and not last:
                continue  # another process has just removed the folder
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
        # The holder before may have removed the file after it was opened here.
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
    with contextlib.suppress(OSError):  # the next write reports a full disk
        os.truncate(file, 0)
        os.write(file, (json.dumps(about) + "\n").encode())
    return file


def _make(folder: Path, made: list[Path]) -> None:
    """Make the folder and its parents; those that were missing are added to `made`."""
    for path in (*reversed(folder.absolute().parents), folder.absolute()):
        if not path.is_dir():
            with contextlib.suppress(FileExistsError):
                path.mkdir()
                made.append(path)
    if not folder.is_dir():
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR))


def _holder(file: int) -> str:
    """Text that names the process holding a lock."""
    try:
        about = json.loads(os.pread(file, 4096, 0))
        return f"process {about['pid']} on {about['host']}, since {about['since']}"
    except (OSError, ValueError, TypeError, KeyError):
        return "another process"
