"""What every process does first that tests start with this folder on its path.

Its programs are kept for the next one, and traces, which are many small objects, are
not searched for cycles again and again.
"""

import gc
import os

import kept_programs

kept_programs.install()
if os.environ.get("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS") == "1e9":
    os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
gc.set_threshold(100_000, 20, 100)
