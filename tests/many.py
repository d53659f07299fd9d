"""Runs of several processes, one device each: their config, and how they start."""

import os
import random
import socket
import subprocess
import sys
import time
from dataclasses import replace
from functools import partial
from pathlib import Path

import small
import tiny

from benchmarks.turns import here
from curax.config import Config, override
from curax.runs import folder, page
from curax.types import Environment, Observation, Task

FILE = Path(__file__)
ROOT = FILE.parents[1]
SECONDS = 240  # until a process is given up
folder.SHARING = float(os.environ.get("SHARING", folder.SHARING))
if "NO_PICTURES" in os.environ:  # they take seconds; other tests look at them
    page.write = lambda workdir: workdir / "report.html"


def task(
    *,
    on_device: bool = True,
    moody: bool = False,
    slow: float = 0.0,
    turns: bool = False,
) -> Task:
    """The task of `small`, where a completion is right that begins with an odd token.

    Args:
        on_device: verify by a JAX function.
        moody: the verifier on the host is slow at times, and answers at random:
            no two processes would agree.
        slow: seconds that it takes to decode one text.
        turns: an environment of the host answers in place of the verifier; a turn ends
            at every fourth token of the vocabulary.
    """
    built = small.task(on_device=on_device, slow=slow)

    def by_mood(target, tokens):
        time.sleep(0.05 * (random.random() < 0.1))
        return random.choice([0.0, 1.0, None])

    def odd(target, tokens, mask=None):
        return (tokens[..., 0] % 2).astype("float32")

    if turns:
        world = Environment(reset=lambda key, _: [key % 5, 0], observe=observe)
        world = here(world)
        end = tuple(range(0, built.vocab_size, 4))
        return replace(built, verify=None, end=end, on_device=False, environment=world)
    return replace(built, verify=by_mood if moody else odd)


def observe(state, turn):
    """Two words after each of three turns; an odd one has a quarter of an outcome."""
    luck, number = state
    words = [(luck + sum(turn)) % 7, luck]
    gain = 1 / 4 if (turn[0] + luck) % 2 else 0.0
    seen = Observation(tokens=words, done=number == 2, reward=gain)
    return [luck + 1, number + 1], seen


def get_config() -> Config:
    """The small config with a policy that takes seconds to compile."""
    config = replace(small.get_config(), task=partial(task), model=partial(tiny.table))
    return override(config, ["mesh.data=-1", "steps=4", "warm_start.steps=3"])


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("localhost", 0))
        return sock.getsockname()[1]


def start(
    workdirs: list[Path],
    *assignments: str,
    devices: int = 1,
    env: dict[str, str] | None = None,
    resume: bool = False,
    config: Path = FILE,
    typed: tuple[str, ...] = (),
) -> list[subprocess.Popen]:
    """The processes of a run, one for each folder; these are one and the same.

    Args:
        workdirs: a folder for each process.
        assignments: words behind --set.
        devices: of each process.
        env: more of the environment.
        resume: go on with the run.
        config: the file.
        typed: more words of the command.
    """
    port, count = free_port(), len(workdirs)
    flags = [
        flag
        for flag in os.environ.get("XLA_FLAGS", "").split()
        if "device_count" not in flag
    ]
    flags.append(f"--xla_force_host_platform_device_count={devices}")
    path = f"{ROOT}{os.pathsep}{ROOT / 'tests'}"
    started = []
    for process, workdir in enumerate(workdirs):
        argv = [sys.executable, "-m", "curax.train", "--config", str(config)]
        argv += ["--workdir", str(workdir), *typed]
        argv += ["--set", *assignments] if assignments else []
        if count > 1:
            argv += ["--coordinator", f"localhost:{port}"]
            argv += ["--processes", str(count), "--process", str(process)]
        started.append(
            subprocess.Popen(
                [*argv, "--resume"] if resume else argv,
                env=os.environ
                | {"PYTHONPATH": path, "XLA_FLAGS": " ".join(flags)}
                | {"JAX_PLATFORMS": "cpu", "NO_PICTURES": "1"}
                | (env or {}),
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
        )
    return started


def ends(
    processes: list[subprocess.Popen], seconds: float = SECONDS
) -> list[tuple[int, str, str]]:
    """Exit status, stdout and stderr of each; none is left behind."""
    end, found = time.monotonic() + seconds, []
    try:
        for process in processes:
            out, err = process.communicate(timeout=max(end - time.monotonic(), 0.1))
            found.append((process.returncode, out, err))
    finally:
        for process in processes:
            if process.poll() is None:
                process.kill()
                process.communicate()
    return found
