"""Cores and memory of this machine and of this process."""

import contextlib
import os
import resource
from pathlib import Path


def cores() -> int:
    """Cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def ram() -> float:
    """Bytes of main memory; NaN where the system does not say."""
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):
        return float("nan")


def limit_bytes(more: int, *, for_good: bool = False) -> None:
    """Let this process take so many bytes more than it has reserved.

    Systems that do not say what it has reserved set no limit.

    Args:
        more: bytes.
        for_good: whether it cannot raise the limit again.
    """
    with contextlib.suppress(OSError, ValueError):
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        hard = resource.getrlimit(resource.RLIMIT_AS)[1]
        most = pages * resource.getpagesize() + more
        most = most if hard == resource.RLIM_INFINITY else min(most, hard)
        resource.setrlimit(resource.RLIMIT_AS, (most, most if for_good else hard))
