"""Chat templates, rendered by a process that cannot take this one with it."""

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

_MOST = 16 * sandbox.MOST  # bytes of a reply; JSON has at most 12 for a character


class TemplateError(ValueError):
    """A template fails. Its text says how; `line` is where, if that is known."""

    def __init__(self, said: str, line: int | None = None):
        super().__init__(said)
        self.line = line


class Renderer:
    """A process that renders; it is started when it is needed, and again if it died."""

    def __init__(self):
        """No process is started yet."""
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._pipe: Any = None

    def render(self, template: str, context: Mapping[str, Any]) -> str:
        """The text that a template makes of a context, which JSON can hold.

        Raises:
            TemplateError: it fails, or takes too much time or memory.
            TypeError: JSON cannot hold the context.
            ValueError: likewise.
        """
        asked = json.dumps([template, context, sandbox.SECONDS]).encode()
        with self._lock:
            reply = self._asked(asked) or self._asked(asked)
            if reply is None:
                raise TemplateError("the process that renders it ended twice")
        if "error" in reply:
            raise TemplateError(reply["error"], reply.get("line"))
        return reply["text"]

    def _asked(self, asked: bytes) -> dict[str, Any] | None:
        """The reply; None if the process was killed, not by the limit of its time."""
        try:
            if self._process is None:
                self._start()
            self._pipe.send_bytes(asked)
            return json.loads(self._pipe.recv_bytes(_MOST))
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
        # A group of its own: Ctrl-C is for the parent. It ends when the pipe does.
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
        """End the process, if there is one; what it returned.

        Args:
            wait: seconds that it may take to end by itself.
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
        """Leave the process to the one that this was forked from."""
        if self._process is not None:
            self._process.returncode = 0  # not ours to wait for
            self._pipe.close()
        self.__init__()


RENDERER = Renderer()
render = RENDERER.render
atexit.register(RENDERER.end)
os.register_at_fork(after_in_child=RENDERER.forget)
