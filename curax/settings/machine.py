"""Memory of this machine."""

import os


def memory() -> float:
    """Bytes of main memory; NaN where the system does not say."""
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):
        return float("nan")
