"""The machine, and who else is using it. Standard library only; reads Linux's /proc."""

import datetime
import json
import os
import platform
import re
import resource
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
QUIET = 0.2  # cores that others may take before a measurement counts as disturbed
_TICK = os.sysconf("SC_CLK_TCK") if hasattr(os, "sysconf") else 100


def describe() -> dict[str, object]:
    """Processor, cores, memory, Python: nothing that names the machine."""
    info = Path("/proc/cpuinfo").read_text()
    models = [line for line in info.splitlines() if line.startswith("model name")]
    pages = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return {
        "cpu": models[0].partition(":")[2].strip() if models else platform.machine(),
        "avx512": " avx512f" in info,
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(pages / 2**30, 1),
        "system": platform.system(),
        "python": platform.python_version(),
    }


def commit() -> str:
    """The commit that is checked out; with a plus if curax/ differs from it."""

    def git(*words: str) -> str:
        run = subprocess.run(
            ("git", *words), cwd=ROOT, capture_output=True, text=True, check=False
        )
        return run.stdout.strip()

    return git("rev-parse", "--short", "HEAD") + "+" * bool(
        git("status", "--porcelain", "--", "curax")
    )


def about(command: str) -> dict[str, Any]:
    """When, of which commit, by which command and where something is measured."""
    return {
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "commit": commit(),
        "command": command,
        "machine": describe(),
    }


def write(file: Path, results: object) -> None:
    """Results as JSON; the folder of the file is made."""
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(results, indent=1) + "\n")


def repeated(function: Callable[[], Any], times: int) -> list[float]:
    """Seconds of each call."""
    seconds = []
    for _ in range(times):
        start = time.perf_counter()
        function()
        seconds.append(time.perf_counter() - start)
    return seconds


def busy_s() -> float:
    """Seconds all cores have been busy since boot, or taken by the hypervisor."""
    fields = Path("/proc/stat").read_text().splitlines()[0].split()[1:]
    user, nice, system, _, _, irq, softirq, steal = map(int, fields[:8])
    return (user + nice + system + irq + softirq + steal) / _TICK


def tree_cpu_s(root: int) -> float:
    """Processor seconds of a process and of all that descend from it."""
    spent, parent = {}, {}
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            try:
                # Behind the name, which may contain anything but ends in the last ")".
                fields = (folder / "stat").read_text().rpartition(")")[2].split()
            except OSError:  # gone meanwhile
                continue
            parent[int(folder.name)] = int(fields[1])
            spent[int(folder.name)] = sum(map(int, fields[11:15])) / _TICK

    def below(pid: int) -> bool:
        while pid not in (0, root):
            pid = parent.get(pid, 0)
        return pid == root

    return sum(seconds for pid, seconds in spent.items() if below(pid))


def peak_rss_mib() -> float:
    """The most memory this process has held at once."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def available_bytes() -> int:
    """Memory that a new process could take."""
    lines = dict(
        line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines()
    )
    return int(lines["MemAvailable"].split()[0]) * 1024


def without_paths(text: str) -> str:
    """A sentence in which no path of this machine is left."""
    text = re.sub(r"(/[\w.@+-]+){2,}", "PATH", text)
    return " ".join(text.split())[:300].rstrip(".") + "."


class Load:
    """How many cores others take while something is measured."""

    def __init__(self, pid: int | None = None):
        """Start.

        Args:
            pid: the measured process, with all that descend from it. None: this one,
                and children of it that will have ended by then.
        """
        self._pid = pid
        self._start = time.perf_counter()
        self._busy, self._own = busy_s(), self._own_s()

    def others(self) -> float:
        """Cores taken by others since the start."""
        busy, own = busy_s() - self._busy, self._own_s() - self._own
        return max(busy - own, 0.0) / (time.perf_counter() - self._start)

    def told(self) -> dict[str, Any]:
        """Cores taken by others, and whether these disturbed what was measured."""
        others = self.others()
        return {"others": others, "disturbed": others > QUIET}

    def _own_s(self) -> float:
        if self._pid is not None:
            own = 0.0 if self._pid == os.getpid() else time.process_time()
            return own + tree_cpu_s(self._pid)
        ended = resource.getrusage(resource.RUSAGE_CHILDREN)
        return time.process_time() + ended.ru_utime + ended.ru_stime
