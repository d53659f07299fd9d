"""The process that runs episodes of verifiers, and the server that their policy is.

    begin -> episode -> its request, of all tokens so far -> drawn tokens, as the reply
                     -> its next request, or its end -> ...

Episodes run at the same time in one process, of an environment of Python of its own
(`verifiers_side.py` says what is spoken with it). A request waits in a thread of this
process until somebody has drawn what it asks for.
"""

import atexit
import contextlib
import itertools
import json
import os
import queue
import secrets
import signal
import subprocess
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future, InvalidStateError
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, NamedTuple

from curax.tasks import verifiers_side
from curax.tasks.verifiers_side import KEY, POLICY

SIDE = Path(verifiers_side.__file__)
START = 300.0  # seconds for the process to load what it is to run
MEETING = 10.0  # seconds in which a request and the line about its episode meet
LONGEST = 2**20  # tokens that a policy may have in a context, as the client is told
LOCAL = "127.0.0.1,localhost"


class Ended(NamedTuple):
    """How an episode ended."""

    rewards: dict[str, float | None]  # by the trace of an agent; None: one is missing
    fault: str | None  # the reason why there is none, as of `Task.verify_all`


class Asked:
    """A request of an episode: what the policy has read, until it has written."""

    def __init__(self, trace: str, tokens: list[int]):
        """Ask; nothing is written yet."""
        self.trace, self.tokens = trace, tokens
        self._written = Future[list[int] | None]()

    def reply(self, tokens: list[int] | None) -> None:
        """Say what the policy has written, once; None: it will write nothing."""
        with contextlib.suppress(InvalidStateError):
            self._written.set_result(tokens)

    def written(self) -> list[int] | None:
        """What the policy has written, once it has."""
        return self._written.result()


class Episode:
    """An episode: what it asks and how it ends, in order."""

    def __init__(self, name: str, process: "_Process"):
        """It has asked nothing."""
        self.name, self.process = name, process
        self.row, self.trace = list[int](), ""  # of the completion
        self.asked = list[Asked]()
        self.events = queue.SimpleQueue[Asked | Ended]()

    def hold(self, asked: Asked) -> None:
        """Take a request as the next of the completion."""
        self.row, self.trace, self._held = asked.tokens, asked.trace, asked

    def write(self, turn: list[int]) -> None:
        """What the policy has written at the request that is held."""
        self.row = [*self.row, *turn]
        self._held.reply(turn)

    def next(self, end: float) -> Asked | Ended:
        """What comes next; by the time `end` it is a timeout."""
        try:
            return self.events.get(timeout=max(end - time.monotonic(), 1e-3))
        except queue.Empty:
            return Ended({}, "timeout")


class Side:
    """The process, started anew where it has died, and its episodes by name."""

    def __init__(self, python: str, setup: dict[str, Any]):
        """Listen; no process is started yet.

        Args:
            python: interpreter that has verifiers.
            setup: what the process is told first, but for the address.
        """
        self._python, self._setup = python, setup
        self._key = secrets.token_urlsafe(24)  # of this process and the other alone
        self._server = _Server(self, self._key)
        self._lock, self._news = threading.Lock(), threading.Condition()
        self._process: _Process | None = None
        self._names = map(str, itertools.count())
        self._episodes: dict[str, Episode] = {}
        self._traces: dict[str, str] = {}
        atexit.register(self.end)

    def start(self) -> int:
        """Number of tasks, by a process that is started where none runs.

        Raises:
            RuntimeError: it does not start; the message says why, as it does itself.
        """
        return self._running().tasks

    def _running(self) -> "_Process":
        with self._lock:
            process = self._process
            if process is None or process.over.is_set():
                url = f"http://127.0.0.1:{self._server.server_port}/v1"
                try:
                    self._process = process = _Process(self._python, self._key, self)
                except (FileNotFoundError, PermissionError) as error:
                    raise RuntimeError(
                        f"task.python={self._python!r} cannot be run "
                        f"({error.strerror}); name the Python of an environment that "
                        "has verifiers."
                    ) from error
                process.say(**self._setup, url=url)
                process.ready.wait(START)
            if not process.tasks:
                process.kill()
                raise RuntimeError(process.fault or "it has not started in time")
            return process

    def begin(self, task: int, seed: int) -> Episode:
        """Begin an episode of a task.

        Raises:
            RuntimeError: as of `start`.
        """
        process = self._running()
        episode = Episode(next(self._names), process)
        with self._news:
            self._episodes[episode.name] = episode
        start = {"start": episode.name, "task": task, "seed": seed % 2**63}
        if not process.say(**start):
            episode.events.put(Ended({}, "crash"))
        return episode

    def episode(self, name: str) -> Episode | None:
        """The episode of a name; None: it has been closed."""
        return self._episodes.get(name)

    def close(self, names: Sequence[str]) -> None:
        """End episodes, whose requests are refused from now on."""
        for name in names:
            with self._news:
                episode = self._episodes.pop(name, None)
                gone = [t for t, of in self._traces.items() if of == name]
                for trace in gone:
                    del self._traces[trace]
            if episode is None:
                continue
            episode.process.say(stop=name)
            for asked in episode.asked:
                asked.reply(None)

    def end(self) -> None:
        """End all episodes, the process with what it has started, and the server."""
        if self._process:
            self._process.end()
        self.close([*self._episodes])
        self._server.shutdown()
        self._server.server_close()

    def asks(self, trace: str, tokens: list[int]) -> list[int] | None:
        """What the policy writes when an agent of an episode asks; None: nothing."""
        with self._news:
            self._news.wait_for(lambda: trace in self._traces, MEETING)
            episode = self._episodes.get(self._traces.get(trace, ""))
            if episode is None:
                return None
            asked = Asked(trace, tokens)
            episode.asked.append(asked)
            episode.events.put(asked)
        return asked.written()

    def hear(self, message: dict[str, Any]) -> None:
        """What the process says of an episode."""
        with self._news:
            if "trace" in message and message["of"] in self._episodes:
                self._traces[message["trace"]] = message["of"]
                self._news.notify_all()
            episode = self._episodes.get(message.get("end", ""))
            if episode is not None:
                fault = message["error"] and f"error: {message['error']}"
                fault = "timeout" if message["timeout"] else fault
                episode.events.put(Ended(message["rewards"], fault))

    def died(self, process: "_Process") -> None:
        """All episodes of a process have ended with it."""
        with self._news:
            for episode in self._episodes.values():
                if episode.process is process:
                    episode.events.put(Ended({}, "crash"))


class _Process:
    """A process of the other side."""

    def __init__(self, python: str, key: str, side: Side):
        self.tasks, self.fault = 0, ""
        self.ready, self.over = threading.Event(), threading.Event()
        self.ended = threading.Event()
        own = {KEY: key, "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
        beside = os.path.dirname(python)  # programs of that environment, as uv
        own["PATH"] = os.pathsep.join([beside, os.environ.get("PATH", "")])
        for name in ("NO_PROXY", "no_proxy"):  # of requests that stay on this machine
            own[name] = ",".join(filter(None, (os.environ.get(name), LOCAL)))
        self._words = list[str]()
        self._lock = threading.Lock()
        # Not its own folder on its path: there is a module called verifiers. In its
        # own group: Ctrl-C is for this process, and what it starts ends with it.
        self._process = subprocess.Popen(
            [python, "-P", str(SIDE)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            env=os.environ | own,
            start_new_session=True,
        )
        listening = threading.Thread(target=self._overhear, daemon=True)
        listening.start()
        threading.Thread(
            target=self._listen, args=(side, listening), daemon=True
        ).start()

    def say(self, **message: Any) -> bool:
        """Write a line; whether somebody may read it."""
        try:
            with self._lock:
                self._process.stdin.write(json.dumps(message) + "\n")  # pyright: ignore[reportOptionalMemberAccess]
                self._process.stdin.flush()  # pyright: ignore[reportOptionalMemberAccess]
        except (OSError, ValueError):
            return False
        return not self.over.is_set()

    def kill(self) -> None:
        """End it and its group at once."""
        with contextlib.suppress(OSError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def end(self) -> None:
        """The same, and wait until that is known here."""
        self.kill()
        self.ended.wait(5.0)

    def _listen(self, side: Side, listening: threading.Thread) -> None:
        with self._process.stdout or contextlib.nullcontext([]) as lines:
            for line in lines:
                with contextlib.suppress(ValueError):  # what is no line of JSON
                    self._hear(side, json.loads(line))
        self.over.set()
        self.kill()
        with self._lock, contextlib.suppress(OSError):
            self._process.stdin.close()  # pyright: ignore[reportOptionalMemberAccess]
        listening.join(1.0)
        self.fault = self.fault or ": ".join(["it has ended", *self._words])
        self.ready.set()
        side.died(self)
        self.ended.set()

    def _hear(self, side: Side, message: dict[str, Any]) -> None:
        if "tasks" in message or "fault" in message:
            self.tasks = message.get("tasks", 0)
            self.fault = message.get("fault") or "it has no tasks"
            self.ready.set()
        else:
            side.hear(message)

    def _overhear(self) -> None:
        """Keep the last line that is meant for a person."""
        with self._process.stderr or contextlib.nullcontext([]) as lines:
            for line in lines:
                self._words = [line.strip()] if line.strip() else self._words


class _Server(ThreadingHTTPServer):
    """Answers requests for turns of a policy, on this machine alone."""

    daemon_threads, request_queue_size = True, 1024

    def __init__(self, side: Side, key: str):
        super().__init__(("127.0.0.1", 0), _Handler)
        self.side, self.key = side, key
        threading.Thread(target=self.serve_forever, daemon=True).start()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Nothing: whoever asked has gone."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Any

    def do_GET(self) -> None:
        """Say which policy there is."""
        if self._known("/v1/models"):
            card = {"id": POLICY, "object": "model", "max_model_len": LONGEST}
            self._send(200, {"object": "list", "data": [card]})

    def do_POST(self) -> None:
        """Write what the policy writes, when it has."""
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        if not self._known("/inference/v1/generate"):
            return
        trace = self.headers.get("X-Session-ID", "")
        written = self.server.side.asks(trace, json.loads(body)["token_ids"])
        if written is None:
            self._send(503, {"error": "the completion has ended"})
            return
        # The protocol asks for log-probs. Those of a completion are noted where it is
        # drawn, and nobody reads these.
        said = [{"token": f"token_id:{token}", "logprob": 0.0} for token in written]
        choice = {"index": 0, "token_ids": written, "finish_reason": "stop"}
        self._send(200, {"choices": [{**choice, "logprobs": {"content": said}}]})

    def _known(self, path: str) -> bool:
        """Whether the request is one of these; it is refused otherwise."""
        given = self.headers.get("Authorization", "")
        right = secrets.compare_digest(
            given.encode(), f"Bearer {self.server.key}".encode()
        )
        if not right or self.path != path:
            self._send(404 if right else 401, {"error": "nothing is here"})
        return right and self.path == path

    def _send(self, status: int, value: Any) -> None:
        data = json.dumps(value).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing."""
