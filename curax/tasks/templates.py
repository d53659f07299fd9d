"""Chat templates, rendered by a child process whose failure is an error here."""

import atexit
import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping
from multiprocessing.connection import Pipe
from typing import Any

from curax.tasks import sandbox

_REPLY_BYTES = 16 * sandbox.CHARACTERS  # JSON has at most 12 bytes per character


class TemplateError(ValueError):
    """A template fails. Its text is the reason; `line` is None where not known."""

    def __init__(self, reason: str, line: int | None = None):
        super().__init__(reason)
        self.line = line


class Renderer:
    """A child process that renders templates, started on demand and after a crash."""

    def __init__(self):
        """No process is started yet."""
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._pipe: Any = None

    def render(self, template: str, context: Mapping[str, Any]) -> str:
        """The text of a template in a context that JSON can hold.

        Raises:
            TemplateError: it fails, or takes too much time or memory.
            TypeError: JSON cannot hold the context.
            ValueError: likewise.
        """
        request = json.dumps([template, context, sandbox.SECONDS]).encode()
        with self._lock:
            reply = self._reply(request) or self._reply(request)
            if reply is None:
                raise TemplateError("the process that renders it ended twice")
        if "error" in reply:
            raise TemplateError(reply["error"], reply.get("line"))
        return reply["text"]

    def _reply(self, request: bytes) -> dict[str, Any] | None:
        """The reply; None if the process died, but not of its time limit."""
        try:
            if self._process is None:
                self._start()
            self._pipe.send_bytes(request)
            return json.loads(self._pipe.recv_bytes(_REPLY_BYTES))
        except (EOFError, OSError):
            if self.end(wait=5.0) == -signal.SIGPROF:
                limit = f"{sandbox.SECONDS:g} s of processor time"
                return {"error": f"TimeoutError: more than {limit}"}
            return None
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


RENDERER = Renderer()
render = RENDERER.render
atexit.register(RENDERER.end)
os.register_at_fork(after_in_child=RENDERER.forget)
