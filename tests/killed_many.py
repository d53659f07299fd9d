"""Kill one of several processes of a run at random moments, resume, and compare.

    python tests/killed_many.py --times 20

The process is killed with -9: the first, which is the coordinator, or another; before
they have found each other, while programs compile, in the warm start, between steps, or
while a checkpoint is being written. The others have to end within a minute, not with 0,
with a sentence that names the last checkpoint. A run that gets to its end is compared,
bit for bit, with one that was not killed.
"""

import argparse
import contextlib
import random
import re
import subprocess
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import NamedTuple

import killed
import many
from run_files import assert_same_run

from curax.config import load, override
from curax.runs import folder
from curax.settings import lock

STEPS = 30
WORDS = (f"steps={STEPS}", "warm_start.steps=9", "task.slow=0.01")
MOMENTS = ("warm start", "saving", "step", "compiling", "starting")
SENTENCE = re.compile(
    r"curax\.train: (?:process \d of \d .*; go on with --resume|the processes of this "
    r"run did not all find each other .*): "
    r"(the checkpoint of step \d+ is intact|there is no checkpoint yet)"
)
MOST = 60.0  # seconds for the others to end


class Kill(NamedTuple):
    """What was killed when, and what came of it."""

    moment: str
    process: int
    seconds: float  # until the last of the others had ended
    told: int  # of the others, those with the sentence


def ready(workdir: Path, moment: str, chance: random.Random) -> Iterator[bool]:
    """Whether the moment has come, asked again and again."""
    began, held = time.time(), workdir / lock.FILE
    if moment == "starting":
        yield from killed.after(chance.uniform(0, 8))
    while not (held.exists() and held.stat().st_mtime > began):
        yield False
    if moment == "compiling":
        yield from killed.after(chance.uniform(0, 5))
    if moment != "saving":
        yield from killed.ready(workdir, moment, chance)
    places = (folder.CHECKPOINTS, folder.WARM_CHECKPOINTS)
    while True:  # what a killed process was writing lies there still
        found = [p for name in places for p in (workdir / name).glob(killed.UNFINISHED)]
        with contextlib.suppress(FileNotFoundError):
            yield any(path.stat().st_mtime > began for path in found)


def start(count: int, workdir: Path, env: dict[str, str]) -> list[subprocess.Popen]:
    """Processes that begin a run, or go on with it."""
    resume = (workdir / folder.CONFIG).exists()
    return many.start([workdir] * count, *WORDS, resume=resume, env=env)


def kill_once(
    count: int, workdir: Path, moment: str, chance: random.Random, env: dict[str, str]
) -> Kill | None:
    """Go on until the moment, then kill one; None if the run came to its end before."""
    processes = start(count, workdir, env)
    killed.wait(ready(workdir, moment, chance), moment, chance, processes)
    victim = chance.randrange(count)
    alive = all(process.poll() is None for process in processes)
    processes[victim].kill()
    begun = time.monotonic()
    ends = many.ends(processes, MOST if alive else many.SECONDS)
    seconds = time.monotonic() - begun
    if ends[victim][0] != -9 or not alive:
        assert all(status == 0 for status, *_ in ends), ends
        return None
    others = [end for process, end in enumerate(ends) if process != victim]
    assert all(status not in (0, None) for status, *_ in others), ends
    told = sum(bool(SENTENCE.search(err)) for *_, err in others)
    return Kill(moment, victim, seconds, told)


def finish(count: int, workdir: Path, env: dict[str, str]) -> None:
    """Let a run come to its end."""
    ends = many.ends(start(count, workdir, env))
    assert all((status, err) == (0, "") for status, _, err in ends), ends


def main() -> None:
    """Kill, compare, and say what came of it."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--times", type=int, default=20)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    kills, compared = list[Kill](), 0
    config = override(load(many.FILE), list(WORDS))
    with tempfile.TemporaryDirectory() as name:
        place = Path(name)
        env = {"XDG_CACHE_HOME": str(place / "cache")}
        finish(args.processes, place / "whole", env)
        for _, workdir, found in killed.kill(
            *(place, args.times),
            seed=args.seed,
            env=env,
            finish=partial(finish, args.processes),
            once=partial(kill_once, args.processes),
            moments=MOMENTS,
        ):
            if found:
                kills.append(found)
                print(f"{len(kills)}: {found}", flush=True)
            else:
                assert_same_run(workdir, place / "whole", step=STEPS, config=config)
                compared += 1
                print(f"{workdir.name}: the same, bit for bit", flush=True)
    told = ", ".join(
        f"{n} in {moment}" for moment, n in Counter(k.moment for k in kills).items()
    )
    first = sum(kill.process == 0 for kill in kills)
    print(
        f"{len(kills)} kills ({told}), {first} of process 0; the others ended within "
        f"{max(kill.seconds for kill in kills):.1f} s, "
        f"{sum(kill.told for kill in kills)} of {len(kills) * (args.processes - 1)} "
        f"with the sentence; {compared} runs came to their end, with 0 rows, "
        "completions or parameters that differ."
    )


if __name__ == "__main__":
    main()
