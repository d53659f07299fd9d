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
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
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
        end = time.monotonic() + chance.uniform(0, 8)
        while True:
            yield time.monotonic() > end
    while not (held.exists() and held.stat().st_mtime > began):
        yield False
    if moment == "compiling":
        end = time.monotonic() + chance.uniform(0, 5)
        while True:
            yield time.monotonic() > end
    if moment != "saving":
        yield from killed.ready(workdir, moment, chance)
    places = (folder.CHECKPOINTS, folder.WARM_CHECKPOINTS)
    while True:  # what a killed process was writing lies there still
        found = [p for name in places for p in (workdir / name).glob(killed.UNFINISHED)]
        with contextlib.suppress(FileNotFoundError):
            yield any(path.stat().st_mtime > began for path in found)


def kill_once(
    workdir: Path,
    count: int,
    moment: str,
    chance: random.Random,
    env: dict[str, str],
    words: tuple[str, ...] = WORDS,
) -> Kill | None:
    """Go on until the moment, then kill one; None if the run came to its end before."""
    resume = (workdir / folder.CONFIG).exists()
    processes = many.start([workdir] * count, *words, resume=resume, env=env)
    for come in ready(workdir, moment, chance):
        if come or any(process.poll() is not None for process in processes):
            break
        time.sleep(0.001)
    if moment == "step":
        time.sleep(chance.uniform(0, 0.1))
    victim = chance.randrange(count)
    alive = all(process.poll() is None for process in processes)
    processes[victim].kill()
    start = time.monotonic()
    ends = many.ends(processes, MOST if alive else many.SECONDS)
    seconds = time.monotonic() - start
    if ends[victim][0] != -9 or not alive:
        assert all(status == 0 for status, *_ in ends), ends
        return None
    others = [end for process, end in enumerate(ends) if process != victim]
    assert all(status not in (0, None) for status, *_ in others), ends
    told = sum(bool(SENTENCE.search(err)) for *_, err in others)
    return Kill(moment, victim, seconds, told)


def finish(
    workdir: Path,
    count: int,
    env: dict[str, str],
    words: tuple[str, ...] = WORDS,
    devices: int = 1,
) -> None:
    """Let a run come to its end."""
    resume = (workdir / folder.CONFIG).exists()
    workdirs = [workdir] * count
    started = many.start(workdirs, *words, resume=resume, env=env, devices=devices)
    ends = many.ends(started)
    assert all((status, err) == (0, "") for status, _, err in ends), ends


def main() -> None:
    """Kill, compare, and say what came of it."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--times", type=int, default=20)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    chance, kills, compared = random.Random(args.seed), [], 0
    config = override(load(many.FILE), list(WORDS))
    with tempfile.TemporaryDirectory() as name:
        place = Path(name)
        env = {"XDG_CACHE_HOME": str(place / "cache")}
        finish(place / "whole", args.processes, env)
        while len(kills) < args.times:
            workdir, found = place / f"killed-{compared}", None
            while len(kills) < args.times:
                begun = killed.rows(workdir / folder.METRICS) > 0
                done = Counter(kill.moment for kill in kills)
                moments = [m for m in MOMENTS if not (begun and m == "warm start")]
                moment = min(moments, key=lambda m: done[m])
                found = kill_once(workdir, args.processes, moment, chance, env)
                if found is None:
                    break
                kills.append(found)
                print(f"{len(kills)}: {found}", flush=True)
            if found is not None:
                finish(workdir, args.processes, env)
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
