"""The other side of `tasks.verifiers`: a program that runs episodes of verifiers.

    python -P verifiers_side.py      of an environment of Python that has verifiers

Lines of JSON come and go, one process for one task of curax:

    <- {"taskset": ..., "config": ..., "url": ..., ...}      what to load, once
    -> {"tasks": N}                             or {"fault": a sentence}
    <- {"start": episode, "task": n, "seed": s}              or {"stop": episode}
    -> {"trace": id, "of": episode}             its requests bear this id
    -> {"end": episode, "rewards": {id: sum}, "timeout": bool, "error": text}

Requests of the policy go to `url`, in the protocol of verifiers' client for training.
Where the standard input ends, so does this process, with all that it has started.
Nothing of curax is imported.
"""

import asyncio
import contextlib
import itertools
import json
import os
import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, TextIO

GRACE = 3.0  # seconds in which episodes may tidy up at the end
WORDS = 300  # characters of an error
RENDERER = Path(__file__).with_name("verifiers_renderer.py")
POLICY = "policy"  # name of the model
KEY = "CURAX_EPISODES_KEY"  # environment variable of what requests authenticate by


def main() -> None:
    """Load what the first line names, and serve the lines that follow."""
    lines = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what a taskset prints is no line of the protocol
    say = Lines(lines)
    setup = json.loads(sys.stdin.readline())
    sys.path.append(os.getcwd())  # where a taskset of one's own may be
    try:
        env, tasks = loaded(setup)
        context = contexts(setup)
    except BaseException as error:
        say(fault=words(error))
        return
    try:
        asyncio.run(Episodes(env, tasks, context, say).serve())
    except Exception as error:
        say(fault=words(error))


class Lines:
    """Lines of JSON, from whichever thread."""

    def __init__(self, to: TextIO):
        """Write nothing yet."""
        self._to, self._lock = to, threading.Lock()

    def __call__(self, **message: Any) -> None:
        """Write one line; nobody may be there to read it."""
        with self._lock, contextlib.suppress(OSError, ValueError):
            self._to.write(json.dumps(message) + "\n")


def loaded(setup: dict[str, Any]) -> tuple[Any, list[Any]]:
    """The environment of a taskset, and its first tasks."""
    import verifiers.v1 as vf  # pyright: ignore[reportMissingImports]

    config = dict(setup["config"])
    config["taskset"] = {**config.get("taskset", {}), "id": setup["taskset"]}
    env = vf.load_environment(vf.resolve_env_config(config))
    return env, [*itertools.islice(env.taskset, setup["size"])]


def contexts(setup: dict[str, Any]) -> Callable[[int], Any]:
    """`seed -> ModelContext` of the policy, whose requests go to curax."""
    import verifiers.v1 as vf  # pyright: ignore[reportMissingImports]

    renderer = {"name": setup["renderer"], **setup["rendering"]}
    if setup["renderer"] is None:
        own = {"import_path": f"{RENDERER}:Appending", "ends": setup["ends"]}
        renderer |= {"name": "custom", **own}
    client = vf.TrainClientConfig(
        base_url=setup["url"],
        api_key_var=KEY,
        renderer=renderer,
        renderer_model_name=setup["tokenizer"],
    )

    def of(seed: int) -> Any:
        sampling = vf.SamplingConfig(seed=seed)
        return vf.clients.ModelContext(model=POLICY, client=client, sampling=sampling)

    return of


class Episodes:
    """Episodes that run at the same time, by the names that curax gives them."""

    def __init__(
        self, env: Any, tasks: list[Any], context: Callable[[int], Any], say: Lines
    ):
        """Start nothing."""
        self._env, self._tasks, self._context, self._say = env, tasks, context, say
        self._running: dict[str, asyncio.Task[None]] = {}

    async def serve(self) -> None:
        """Start and stop episodes as told, until there is nobody who tells."""
        loop, over = asyncio.get_running_loop(), asyncio.Event()
        async with self._env.serving():
            threading.Thread(
                target=self._listen, args=(loop, over), daemon=True
            ).start()
            self._say(tasks=len(self._tasks))
            await over.wait()
            for one in self._running.values():
                one.cancel()
            await asyncio.gather(*self._running.values(), return_exceptions=True)

    def _listen(self, loop: asyncio.AbstractEventLoop, over: asyncio.Event) -> None:
        """Pass lines on to the loop; at their end, end whatever still runs."""
        for line in sys.stdin:
            loop.call_soon_threadsafe(self._heard, json.loads(line))
        threading.Timer(GRACE, end).start()
        with contextlib.suppress(RuntimeError):  # the loop is closed
            loop.call_soon_threadsafe(over.set)

    def _heard(self, message: dict[str, Any]) -> None:
        if name := message.get("stop"):
            if name in self._running:
                self._running[name].cancel()
            return
        name = message["start"]
        playing = asyncio.ensure_future(self._play(name, message))
        self._running[name] = playing
        playing.add_done_callback(lambda _: self._running.pop(name))

    async def _play(self, name: str, message: dict[str, Any]) -> None:
        """Run one episode, and tell how it ended."""
        try:
            episode = await self._env.run_episode(
                self._tasks[message["task"]],
                self._context(message["seed"]),
                on_trace=lambda trace: self._say(trace=trace.id, of=name),
            )
        except Exception as error:
            self._say(end=name, rewards={}, timeout=False, error=words(error))
            return
        found = {trace.id: total(trace) for trace in episode.traces}
        errors = [*episode.errors, *(e for t in episode.traces for e in t.errors)]
        late = episode.is_timeout or any(t.is_timeout for t in episode.traces)
        fault = None
        if not episode.ok:
            fault = "the episode failed"
            if errors:
                fault = short(f"{errors[-1].type}: {errors[-1].message}")
        self._say(end=name, rewards=found, timeout=late, error=fault)


def total(trace: Any) -> float | None:
    """The sum of weighted rewards; None where one of them is missing."""
    missing = any(reward is None for reward in trace.rewards.values())
    return None if missing else float(trace.reward)


def words(error: BaseException) -> str:
    """An error in a line."""
    return short(f"{type(error).__name__}: {error}")


def short(text: str) -> str:
    """A text in a line that is not too long."""
    line = " ".join(text.split())
    return line if len(line) <= WORDS else line[: WORDS - 3] + "..."


def end() -> None:
    """End this process and those of its group, which it leads."""
    if os.getpgrp() == os.getpid():
        os.killpg(0, signal.SIGKILL)
    os._exit(1)


if __name__ == "__main__":
    main()
    end()
