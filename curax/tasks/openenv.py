"""Environments that an OpenEnv server plays, an episode for each connection.

    curax train gsm8k_qwen3_0p6b --workdir runs/game --set task=worlds.task
    task.environment=openenv.environment task.environment.url=http://127.0.0.1:8000
    model.path=DIR

Needs the package websockets. A server keeps an episode as long as its connection to
`/ws` is open, so it must allow as many at a time as completions are drawn
(`max_concurrent_envs`).
"""

import contextlib
import json
import math
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, NamedTuple

from curax.settings.config_types import Count, Positive
from curax.settings.declared import declares
from curax.settings.packages import install, is_installed
from curax.tasks.environments import outcome_between
from curax.types import Answer, HostEnvironment, Turn

LARGEST = 2**22  # bytes of a message


class Server(NamedTuple):
    """A server, and what its messages are read as."""

    url: str  # of its websocket
    says: str  # field of an action
    shows: str  # field of an observation
    timeout: float  # seconds
    outcome: Callable[[float], float]  # of a sum of rewards, in [0, 1]


class Episode:
    """An episode between two turns: its connection, and what it has given."""

    def __init__(self, server: Server, seed: int):
        """Open a connection and begin.

        Raises:
            EpisodeError: the server does not let it.
        """
        from websockets.sync.client import connect

        self._server, self._total, self._given = server, 0.0, 0.0
        self._opened = contextlib.ExitStack()
        opened = partial(connect, server.url, max_size=LARGEST, close_timeout=1.0)
        with _said_as_episode_errors():
            begun = opened(open_timeout=server.timeout)
            self._connection = self._opened.enter_context(begun)
        try:
            self.words, *_ = self._ask({"type": "reset", "data": {"seed": seed}})
        except EpisodeError:
            self.close()
            raise

    def step(self, text: str) -> Answer:
        """What the server says to a turn.

        Raises:
            EpisodeError: it does not answer, or not as it must.
        """
        action = {"type": "step", "data": {self._server.says: text}}
        words, reward, done = self._ask(action)
        self._total += reward
        before, self._given = self._given, self._server.outcome(self._total)
        if done:
            self.close()
        return Answer(self, words, done, self._given - before, {})

    def close(self) -> None:
        """End the episode; the server is told."""
        with contextlib.suppress(Exception):
            self._opened.close()

    def _ask(self, message: dict[str, Any]) -> tuple[str, float, bool]:
        with _said_as_episode_errors():
            self._connection.send(json.dumps(message))
            reply = self._connection.recv(timeout=self._server.timeout)
        return read(reply, self._server.shows)


class EpisodeError(Exception):
    """Why an episode does not go on, as a reason for a missing outcome."""


@contextlib.contextmanager
def _said_as_episode_errors():
    try:
        yield
    except TimeoutError as error:
        raise EpisodeError("timeout") from error
    except Exception as error:  # of sockets, and of websockets
        text = " ".join(str(error).split()) or type(error).__name__
        raise EpisodeError(f"crash: {text}") from error


def read(reply: str | bytes, shows: str) -> tuple[str, float, bool]:
    """Observation as text, reward, and whether the episode has ended.

    Args:
        reply: message of the server.
        shows: field of the observation.

    Raises:
        EpisodeError: it is no observation with such a field, or an error.
    """
    try:
        message = json.loads(reply)
        kind, data = message["type"], message["data"]
        if kind == "error":
            raise EpisodeError(f"error: {data.get('message')}")
        seen, reward, done = data["observation"], data["reward"], data["done"]
        total = 0.0 if reward is None else float(reward)
        words = seen.get(shows)
        if not math.isfinite(total):
            raise ValueError
    except (
        *(ValueError, TypeError, KeyError, AttributeError),
        *(OverflowError, RecursionError),  # numbers of any size, and any depth
    ) as error:
        raise EpisodeError("error: the server sent no observation") from error
    if words is None and not done:
        has = ", ".join(map(str, seen)) or "none"
        raise EpisodeError(f"error: the observation has no field {shows!r}, but {has}")
    words = "" if words is None else words
    return words if isinstance(words, str) else json.dumps(words), total, bool(done)


def seed_of(target: Any) -> int:
    """The seed that a target is.

    Raises:
        EpisodeError: it is none, as the answer of a problem may be.
    """
    try:
        return int(target)
    except (TypeError, ValueError, OverflowError) as error:
        raise EpisodeError(
            f"error: an episode begins by a seed, and its target is {target!r:.40}; "
            "take worlds.task, or integers as answers"
        ) from error


@declares(package="websockets", server=True)
def environment(
    *,
    url: str,
    says: str = "message",
    shows: str = "prompt",
    timeout: Positive = 30.0,
    parallel: Count = 32,
    lowest: float = 0.0,
    highest: float = 1.0,
) -> HostEnvironment:
    """Episodes of an OpenEnv server, as text.

    The outcome is (sum of rewards - lowest) / (highest - lowest), cut to [0, 1]. An
    episode that the server ends with an error, or does not go on with in time, is
    missing.

    Args:
        url: of the server.
        says: field of its action that a turn becomes.
        shows: field of its observation that is read.
        timeout: seconds for an answer.
        parallel: turns that are asked about at the same time.
        lowest: sum of rewards whose outcome is 0.
        highest: sum of rewards whose outcome is 1.

    Raises:
        ValueError: in a sentence, for an option.
    """
    scheme, _, rest = url.partition("://")
    if scheme not in ("http", "https") or not rest:
        raise ValueError(
            f"task.environment.url={url!r} is no address; write one such as "
            "http://127.0.0.1:8000."
        )
    outcome = outcome_between(lowest, highest)
    if not is_installed("websockets"):
        raise ValueError(
            f"task.environment asks {url} and the package websockets is not installed; "
            f"run {install('openenv')}."
        )
    secure = "s" if scheme == "https" else ""
    place = f"ws{secure}://{rest.rstrip('/')}/ws"
    server = Server(place, says, shows, timeout, outcome)
    threads = ThreadPoolExecutor(parallel, "openenv")

    def answered(turn: Turn) -> Answer | str:
        episode = turn.state
        try:
            if episode is None:
                episode = Episode(server, seed_of(turn.target))
            return episode.step(turn.tokens)
        except EpisodeError as error:
            if episode is not None:
                episode.close()
            return str(error)

    def opening(seed: Any) -> Answer | str:
        try:
            episode = Episode(server, int(seed))
        except EpisodeError as error:
            return str(error)
        episode.close()
        return Answer(None, episode.words, False, 0.0, {})

    def each(function: Callable[[Any], Any]) -> Callable[[list[Any]], Sequence[Any]]:
        return lambda every: list(threads.map(function, every))

    return HostEnvironment(
        answer=each(answered), openings=each(opening), closed=each(Episode.close)
    )
