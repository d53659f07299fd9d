"""Kill a run at random moments, resume it, and compare it with one that was not killed.

    python tests/killed.py --times 50
    python tests/killed.py --times 50 --set staged=true

Every process is killed with -9: while it starts, in the warm start, between steps, or
while a checkpoint is being written. A run that gets to its end is compared, bit for
bit, and the next one starts.
"""

import argparse
import os
import random
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import small
from run_files import assert_same_run

from curax.config import load, override
from curax.runs import folder

ROOT = Path(__file__).parents[1]
STEPS = 30
WORDS = ["--set", f"steps={STEPS}", "warm_start.steps=9", "task.slow=0.005"]
MOMENTS = ("warm start", "saving", "step", "starting")
UNFINISHED = "*.orbax-checkpoint-tmp*"  # a checkpoint that is being written


def start(
    workdir: Path, env: dict[str, str], command: list[str] | None = None, **options
) -> subprocess.Popen:
    """A process that begins a run, or goes on with it."""
    begin = [sys.executable, "-m", "curax.train", "--config", str(small.FILE)]
    begin += ["--workdir", str(workdir), *WORDS]
    begin += ["--resume"] if (workdir / folder.CONFIG).exists() else []
    return subprocess.Popen(
        command or begin,
        env=os.environ | env | {"PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        **options,
    )


def rows(path: Path) -> int:
    return path.read_bytes().count(b"\n") if path.exists() else 0


def saving(workdir: Path) -> bool:
    places = (folder.CHECKPOINTS, folder.WARM_CHECKPOINTS)
    return any(next((workdir / name).glob(UNFINISHED), None) for name in places)


def after(seconds: float) -> Iterator[bool]:
    """Whether so much time has passed, asked again and again."""
    end = time.monotonic() + seconds
    while True:
        yield time.monotonic() > end


def ready(workdir: Path, moment: str, chance: random.Random) -> Iterator[bool]:
    """Whether the moment has come, asked again and again."""
    if moment == "starting":
        yield from after(chance.uniform(0, 5))
    if moment == "warm start":
        there = workdir / folder.WARM
        wanted = rows(there) + chance.randint(1, 6)
        while True:
            yield rows(there) >= wanted or rows(workdir / folder.METRICS) > 1
    if moment == "saving":
        seen = False
        while not seen:
            seen = saving(workdir)
            yield seen
    there = workdir / folder.METRICS
    before = rows(there)
    wanted = chance.randint(1, 8)
    while True:  # the rows behind the last checkpoint are cut off first
        before = min(before, rows(there))
        yield rows(there) >= before + wanted


def wait(
    come: Iterator[bool],
    moment: str,
    chance: random.Random,
    processes: Sequence[subprocess.Popen],
) -> None:
    """Until the moment has come, or a process has ended."""
    for now in come:
        if now or any(process.poll() is not None for process in processes):
            break
        time.sleep(0.001)
    if moment == "step":
        time.sleep(chance.uniform(0, 0.1))


def kill_once(
    workdir: Path, moment: str, chance: random.Random, env: dict[str, str]
) -> bool:
    """Go on until the moment, then kill; False if the run came to its end before."""
    process = start(workdir, env)
    wait(ready(workdir, moment, chance), moment, chance, [process])
    process.kill()
    out, err = process.communicate()
    assert process.returncode in (0, -9), (process.returncode, out, err)
    assert err == "", err
    return process.returncode != 0


def finish(workdir: Path, env: dict[str, str]) -> None:
    """Let a run come to its end."""
    process = start(workdir, env)
    out, err = process.communicate()
    assert (process.returncode, err) == (0, ""), (process.returncode, out, err)


def kill(
    place: Path,
    times: int,
    *,
    seed: int,
    env: dict[str, str],
    finish: Callable[[Path, dict[str, str]], None] = finish,
    once: Callable[..., Any] = kill_once,
    moments: Sequence[str] = MOMENTS,
) -> Iterator[tuple[str, Path, Any]]:
    """Kill processes; after each, the moment, the run, and what `once` gave.

    Args:
        place: folder for the runs.
        times: processes to be killed.
        seed: of the moments.
        env: environment of the processes.
        finish: lets a run come to its end; where not said, another process does.
        once: kills one, as `kill_once`.
        moments: of which each comes as often as may be.

    Yields:
        What happened; where nothing was killed, a run at its end waits to be compared.
    """
    chance, number, done = random.Random(seed), 0, Counter()
    while done.total() < times:
        workdir, killed = place / f"killed-{number}", True
        while done.total() < times and killed:
            begun = rows(workdir / folder.METRICS) > 0
            left = [m for m in moments if not (begun and m == "warm start")]
            moment = min(left, key=lambda m: done[m])
            killed = once(workdir, moment, chance, env)
            done[moment] += bool(killed)
            yield moment, workdir, killed
        if killed:
            finish(workdir, env)
            yield "end", workdir, None
        number += 1


def main() -> None:
    """Kill, compare, and say what came of it."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--times", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--set", nargs="+", default=[], help="more settings of runs")
    args = parser.parse_args()
    WORDS.extend(args.set)
    config = override(load(small.FILE), WORDS[1:])
    counts, compared = Counter(), 0
    with tempfile.TemporaryDirectory() as name:
        place = Path(name)
        env = {"XDG_CACHE_HOME": str(place / "cache")}
        finish(place / "whole", env)
        for moment, workdir, killed in kill(place, args.times, seed=args.seed, env=env):
            if killed:
                counts[moment] += 1
                print(f"{counts.total()}: killed in {moment}", flush=True)
            else:
                assert_same_run(workdir, place / "whole", step=STEPS, config=config)
                compared += 1
                print(f"{workdir.name}: the same, bit for bit", flush=True)
    told = ", ".join(f"{count} in {moment}" for moment, count in counts.items())
    print(
        f"{counts.total()} kills ({told}); {compared} runs came to their end, all with "
        "the rows, completions and parameters of the run that was not killed."
    )


if __name__ == "__main__":
    main()
