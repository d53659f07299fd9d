"""python -m benchmarks.peers: iterations of curax, tunix and trl, one after another.

Every system runs in a process and an environment of its own, idle while the others
iterate. Each iteration records its wall and processor seconds and how many cores others
took meanwhile; where that was more than 0.2 it counts as disturbed and is repeated.
"""

import argparse
import json
import os
import re
import select
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from benchmarks import machine, show
from benchmarks.workload import WORKLOADS

ENVIRONMENTS = Path(__file__).parents[1] / ".venv-peers"
PACKAGES = {
    "tunix": ("google-tunix==0.1.7", "jax==0.10.2"),
    "trl": ("trl==1.16.0", "torch==2.13.0", "transformers==5.23.0"),
}
SYSTEMS = ("curax", "plain", *PACKAGES)
START = "start"  # not a workload: how long a user of curax waits at first
TRAIN = (sys.executable, "-m", "curax.train")


class FailedError(Exception):
    """A system did not do what it was told. Its text is one sentence."""


class Process:
    """A worker, started and its libraries imported.

    Attributes:
        said: what it said of its import: `import_s`, `versions`.
    """

    def __init__(
        self,
        system: str,
        python: str,
        work: str,
        limit: float,
        platforms: str | None = "cpu",
    ):
        """Start it with empty caches.

        Args:
            system: such as `tunix`, `tunix:4` for 4 micro-batches, or `curax@2` for
                as many devices of the processor, over which it lays the rows.
            python: interpreter of its environment.
            work: name of the workload, or its fields as JSON.
            limit: seconds to wait for an answer.
            platforms: where JAX looks for devices; None: everywhere.

        Raises:
            FailedError: it ended, or did not answer in time.
        """
        self._folder = tempfile.TemporaryDirectory()
        name, _, micro_batches = system.partition(":")
        name, _, devices = name.partition("@")
        own = environment(self._folder.name, platforms)
        if devices:
            own["XLA_FLAGS"] = f"--xla_force_host_platform_device_count={devices}"
        self._name, self._limit = name, limit
        self._log = Path(self._folder.name) / "log"
        command = [python, "-m", f"benchmarks.worker_{name}", work]
        with self._log.open("w") as log:
            self._process = subprocess.Popen(
                command + [micro_batches] * bool(micro_batches),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                cwd=machine.ROOT,
                env=own,
            )
        self.said = self._answer()

    def iterate(self) -> dict[str, Any]:
        """One iteration, and how much others took of the machine.

        Raises:
            FailedError: it ended, or did not answer in time.
        """
        assert self._process.stdin is not None
        load = machine.Load(self._process.pid)
        with suppress(BrokenPipeError):  # then the answer says why
            print("go", file=self._process.stdin, flush=True)
        answer = self._answer()
        return answer | load.told()

    def stop(self) -> None:
        """End it: the end of its input, then force."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.close()
            self._process.wait(20)
        except (OSError, subprocess.TimeoutExpired):
            self._process.kill()
            self._process.wait()
        self._folder.cleanup()

    def _answer(self) -> dict[str, Any]:
        pipe = self._process.stdout
        assert pipe is not None
        ready, _, _ = select.select([pipe], [], [], self._limit)
        line = pipe.readline() if ready else ""
        if line:
            return json.loads(line)
        if not ready:
            self._process.kill()
            why = f"gave no answer within {self._limit:g} s"
        elif (status := self._process.wait()) < 0:
            why = f"was ended by signal {-status}"
        else:
            lines = self._log.read_text(errors="replace").strip().splitlines()
            why = f"failed: {lines[-1]}" if lines else f"ended with status {status}"
        self.stop()
        raise FailedError(machine.without_paths(f"{self._name} {why}"))


def environment(cache: str, platforms: str | None = "cpu") -> dict[str, str]:
    """The variables of a measured process: its caches lie in a folder of ours."""
    kept = {k: v for k, v in os.environ.items() if k != "JAX_COMPILATION_CACHE_DIR"}
    ours = {"XDG_CACHE_HOME": cache, "HF_HUB_OFFLINE": "1"}
    return kept | ours | ({"JAX_PLATFORMS": platforms} if platforms else {})


def start(
    system: str, python: str, work: str, limit: float
) -> tuple[Process, dict[str, Any]]:
    """A fresh process, and what importing and the first iteration took.

    Raises:
        FailedError: one of them did not work.
    """
    process = Process(system, python, work, limit)
    first = process.iterate()
    say(work, system, "first iteration", first)
    return process, process.said | {"first": first}


def measure(
    work: str,
    pythons: dict[str, str],
    *,
    rounds: int,
    most: int,
    cold: int,
    limit: float,
    settle: bool = True,
) -> dict[str, Any]:
    """All systems on one workload.

    Args:
        work: name of the workload.
        pythons: interpreter of each system.
        rounds: quiet iterations wanted of each system.
        most: rounds after which to be content with fewer.
        cold: starts of each system; the last process of each goes on to the rounds.
        limit: seconds to wait for an answer.
        settle: a round that does not count comes before the first that does.

    Returns:
        By system: its starts, its iterations, and what failed, None if nothing did.
    """
    alive: dict[str, Process] = {}
    found = {s: {"failure": None, "starts": [], "iterations": []} for s in pythons}

    def attempt(action: Callable[..., None], system: str, *rest: int) -> None:
        try:
            action(system, *rest)
        except FailedError as failure:
            print(f"{work}  {system}  {failure}", flush=True)
            found[system]["failure"] = str(failure)
            alive.pop(system, None)

    def begin(system: str) -> None:
        alive[system], started = start(system, pythons[system], work, limit)
        found[system]["starts"].append(started)

    def iterate(system: str, number: int) -> None:
        one = alive[system].iterate()
        say(work, system, f"round {number}" if number else "to settle", one)
        found[system]["iterations"].append({"round": number} | one)

    def quiet(system: str) -> int:
        done = [i for i in found[system]["iterations"] if i["round"]]
        return sum(not one["disturbed"] for one in done)

    try:
        for again in reversed(range(cold)):
            for system in pythons:
                if not found[system]["failure"]:
                    attempt(begin, system)
                if again and system in alive:
                    alive.pop(system).stop()
        # Round 0 may still compile, and fills the caches of memory allocators.
        for number in range(0 if settle else 1, most + 1):
            if number and all(quiet(system) >= rounds for system in alive):
                break
            for system in list(alive):
                attempt(iterate, system, number)
    finally:
        for process in alive.values():
            process.stop()
    return found


def limits_here() -> dict[str, float]:
    """What the machine can do, measured by a process of its own."""
    command = (sys.executable, "-m", "benchmarks.limits")
    done = subprocess.run(
        command, cwd=machine.ROOT, capture_output=True, text=True, check=True
    )
    return json.loads(done.stdout)


def say(work: str, system: str, what: str, one: dict[str, Any]) -> None:
    """Progress: a line per iteration."""
    print(
        f"{work:8} {system:8} {what:15} {one['iteration_s']:7.2f} s "
        f"(rollout {one['rollout_s']:.2f}, update {one['update_s']:.2f}), "
        f"{one['peak_rss_mib']:.0f} MiB, others {one['others']:.2f} cores"
        f"{', disturbed' if one['disturbed'] else ''}",
        flush=True,
    )


# ----- how long a user waits


def waits(repeats: int) -> dict[str, Any]:
    """Seconds until curax helps, and until a run of the quickstart shows progress."""
    found: dict[str, Any] = {"help": [], "quickstart": []}
    for _ in range(repeats):
        with timed() as one:
            subprocess.run(
                (*TRAIN, "--help"), cwd=machine.ROOT, capture_output=True, check=True
            )
        found["help"].append(one)
        print(
            f"--help in {one['seconds']:.2f} s, others {one['others']:.2f}", flush=True
        )
    for _ in range(repeats):
        with tempfile.TemporaryDirectory() as cache:
            pair = {name: quickstart(cache) for name in ("cold", "warm")}
        found["quickstart"].append(pair)
        for name, one in pair.items():
            print(
                f"quickstart, {name} cache: first line in {one['line_s']:.1f} s, first "
                f"steps in {one['steps_s']:.1f} s, others {one['others']:.2f} cores",
                flush=True,
            )
    return found


@contextmanager
def timed() -> Iterator[dict[str, Any]]:
    """Times what is done inside, by processes that end in there."""
    load, begin, one = machine.Load(), time.perf_counter(), {}
    yield one
    one["seconds"] = time.perf_counter() - begin
    one |= load.told()


def quickstart(cache: str) -> dict[str, Any]:
    """Seconds from the start of the quickstart to its first lines of progress.

    Args:
        cache: folder of the compilation cache.

    Returns:
        `line_s`, to the first line with a step count, which comes before compilation;
        `steps_s`, to the first that counts a step done; load.
    """
    seen: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as workdir:
        command = (*TRAIN, "--config", "configs/quickstart.py", "--workdir", workdir)
        begin = time.perf_counter()
        process = subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            cwd=machine.ROOT,
            env=environment(cache),
        )
        load = machine.Load(process.pid)
        assert process.stdout is not None
        for line in process.stdout:
            done = re.search(r"\b(\d+)/\d+", line)
            if done:
                seen.setdefault("line_s", time.perf_counter() - begin)
            if done and int(done[1]):
                seen["steps_s"] = time.perf_counter() - begin
                break
        told = load.told()
        process.kill()
        process.wait()
    if "steps_s" not in seen:
        raise RuntimeError("The quickstart ended before it showed progress.")
    return seen | told


# ----- the command


def set_up() -> None:
    """Make the peers' environments; for a CPU, let pip find torch's CPU wheels."""
    for name, packages in PACKAGES.items():
        folder = ENVIRONMENTS / name
        print(f"Setting up {name}: {', '.join(packages)}", flush=True)
        subprocess.run((sys.executable, "-m", "venv", folder), check=True)
        install = (folder / "bin" / "python", "-m", "pip", "install", "--quiet")
        subprocess.run((*install, *packages), check=True)


def parser() -> argparse.ArgumentParser:
    """The command line."""
    result = argparse.ArgumentParser(
        prog="python -m benchmarks.peers", description="Measure curax beside its peers."
    )
    add = result.add_argument
    names = ",".join((*WORKLOADS, START))
    add("--setup", action="store_true", help="make the peers' environments, and stop")
    add("--workloads", default=names, help=f"some of {names} (default: all)")
    add(
        "--systems",
        default=",".join(SYSTEMS),
        help="which, each perhaps with its micro-batches of gradients, as in tunix:1, "
        "curax perhaps on several devices of the processor, as in curax@2 "
        "(default: %(default)s, with the micro-batches found fastest)",
    )
    add("--rounds", type=int, default=5, help="quiet iterations wanted (default: 5)")
    add("--most", type=int, help="rounds at most (default: three times --rounds)")
    add(
        "--cold", type=int, default=3, help="starts of each system on nano (default: 3)"
    )
    add(
        "--no-settle",
        dest="settle",
        action="store_false",
        help="count the second iteration of a process; for those of many minutes",
    )
    add("--limit", type=float, default=1800, help="seconds per iteration, at most")
    for name in PACKAGES:
        python = ENVIRONMENTS / name / "bin" / "python"
        add(f"--{name}", default=str(python), metavar="PYTHON", help=f"of {name}")
    add("--out", type=Path, default=Path("benchmarks/results"), help="folder")
    return result


def main(argv: Sequence[str] | None = None) -> None:
    """Measure, and write after each workload what was found."""
    command = parser()
    args = command.parse_args(argv)
    if args.setup:
        return set_up()
    systems = args.systems.split(",")
    pythons = {s: getattr(args, s.partition(":")[0], sys.executable) for s in systems}
    for system, python in pythons.items():
        if args.workloads != START and not shutil.which(python):
            command.error(f"{system} has no {python}; run with --setup first.")
    kept = ("workloads", "systems", "rounds", "cold")
    options = [f"--{name} {shlex.quote(str(getattr(args, name)))}" for name in kept]
    options += ["--no-settle"] * (not args.settle)
    file = args.out / show.PEERS[bool(machine.describe()["avx512"])]
    results = json.loads(file.read_text()) if file.exists() else {}
    for work in args.workloads.split(","):
        about = machine.about(f"python -m benchmarks.peers {' '.join(options)}")
        if work == START:
            found = waits(args.cold)
        else:
            found = measure(
                work,
                pythons,
                rounds=args.rounds,
                most=args.most or 3 * args.rounds,
                cold=args.cold if work == "nano" else 1,
                limit=args.limit,
                settle=args.settle,
            )
            about["parameters"] = WORKLOADS[work].parameters
            about["limits"] = limits_here()
        results[work] = about | {"found": found}
        machine.write(file, results)
    print("\n" + show.tables(results))


if __name__ == "__main__":
    main()
