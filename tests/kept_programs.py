"""Compiled programs are kept whole or not at all, whoever is killed meanwhile."""

import os
import sys
from importlib.machinery import PathFinder
from pathlib import Path

CACHE = "jax._src.lru_cache"


def put(self, key: str, value: bytes) -> None:
    """In place of JAX's, which writes where processes beside it read."""
    path = Path(str(self.path)) / f"{key}-cache"
    if not path.exists():
        part = path.with_name(f"{key}.{os.getpid()}.part")
        try:
            part.write_bytes(value)
            part.replace(path)
        except OSError:  # no room, and nothing is lost
            part.unlink(missing_ok=True)


class WhenImported:
    """Finder of JAX's cache, should this process import it: it gets our `put`."""

    def find_spec(self, name, path=None, target=None):
        """The spec of the cache, and None of any other module."""
        if name != CACHE:
            return None
        sys.meta_path.remove(self)
        spec = PathFinder.find_spec(name, path, target)
        if spec is None or spec.loader is None:
            return spec
        run = spec.loader.exec_module

        def run_and_put(module):
            run(module)
            patch(module)

        spec.loader.exec_module = run_and_put
        return spec


def patch(module) -> None:
    """Give JAX's cache our `put`, in versions that have the class."""
    if hasattr(module, "LRUCache"):
        module.LRUCache.put = put


def install() -> None:
    """Patch JAX's cache now, or as soon as it is imported."""
    if CACHE in sys.modules:
        patch(sys.modules[CACHE])
    else:
        sys.meta_path.insert(0, WhenImported())
