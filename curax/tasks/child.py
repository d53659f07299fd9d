"""A child process for files of strangers; what fails there is an error here.

It renders chat templates and tries tokenizers, within limits of time and memory.
"""

import atexit
import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
from multiprocessing.connection import Pipe
from typing import Any

from curax.tasks import sandbox

_REPLY_BYTES = 16 * sandbox.CHARACTERS  # JSON has at most 12 bytes per character


class Child:
    """A process that runs functions of `sandbox`, started on demand and after a crash.

    It outlives a call, for a start takes a tenth of a second.
    """

    def __init__(self):
        """No process is started yet."""
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._pipe: Any = None

    def ask(
        self,
        name: str,
        *args: Any,
        seconds: float = sandbox.SECONDS,
        space: int = sandbox.SPACE,
    ) -> dict[str, Any]:
        """What one of `sandbox.FUNCTIONS` returns; `{"error": ...}` beyond its limits.

        Args:
            name: of the function.
            *args: its arguments, which JSON can hold.
            seconds: of processor time.
            space: bytes that it may take.

        Raises:
            TypeError: JSON cannot hold an argument.
            ValueError: likewise.
        """
        request = json.dumps([name, args, seconds, space]).encode()
        with self._lock:
            for _ in range(2):  # it may have been killed since
                ended = self._reply(request)
                if isinstance(ended, dict):
                    return ended
                if ended == -signal.SIGPROF:
                    limit = f"{seconds:g} s of processor time"
                    return {"error": f"TimeoutError: more than {limit}"}
                if ended == -signal.SIGABRT:  # by code outside Python
                    return {"error": f"MemoryError: more than {space >> 20} MiB"}
        return {"error": "the process that runs it ended twice"}

    def _reply(self, request: bytes) -> dict[str, Any] | int | None:
        """The reply; the exit status of the process where it ended."""
        try:
            if self._process is None:
                self._start()
            self._pipe.send_bytes(request)
            return json.loads(self._pipe.recv_bytes(_REPLY_BYTES))
        except (EOFError, OSError):
            return self.end(wait=5.0)
        except BaseException:  # a reply that was not waited for must not come later
            self.end()
            raise

    def _start(self) -> None:
        self._pipe, there = Pipe()
        program = (
            f"import sys; sys.path[:] = {sys.path!r}; "
            f"from curax.tasks.sandbox import serve; serve({there.fileno()})"
        )
        # In its own process group: Ctrl-C is for the parent. It ends with the pipe.
        self._process = subprocess.Popen(
            [sys.executable, "-c", program],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            pass_fds=(there.fileno(),),
            start_new_session=True,
        )
        there.close()

    def end(self, *, wait: float = 0.0) -> int | None:
        """End the process; its exit status, None where there was no process.

        Args:
            wait: seconds that it gets to end by itself.
        """
        process, self._process = self._process, None
        if process is None:
            return None
        self._pipe.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            return process.wait(wait)
        process.kill()
        return process.wait()

    def forget(self) -> None:
        """Drop the process after a fork; it belongs to the parent."""
        if self._process is not None:
            self._process.returncode = 0  # not ours to wait for
            self._pipe.close()
        self.__init__()


CHILD = Child()
ask = CHILD.ask
atexit.register(CHILD.end)
os.register_at_fork(after_in_child=CHILD.forget)
