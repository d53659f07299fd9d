"""Programs of a run, compiled side by side before they are called.

All their shapes are known before the first draw, and the compiler takes a core for
itself. A call waits for its own program alone; where that cannot be compiled the call
says why.
"""

from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any

import jax

from curax.arrays.sharding import platform
from curax.settings.machine import cores


class Program:
    """A jitted function, whose calls wait for those threads that compile it."""

    def __init__(self, function: Any, **options: Any):
        """Compile nothing. Arguments as `jax.jit`."""
        self._jitted = jax.jit(function, **options)
        self._compiling: list[Future[Any]] = []

    def __call__(self, *args: Any) -> Any:
        """Call the function; it compiles here unless it has been."""
        if self._compiling:
            wait(self._compiling)
        return self._jitted(*args)

    def __getattr__(self, name: str) -> Any:
        """`lower`, `trace`, `eval_shape` and the rest of a jitted function."""
        return getattr(self._jitted, name)

    def compile_in(self, pool: ThreadPoolExecutor, args: tuple[Any, ...]) -> None:
        """Begin to compile it, for arrays or their shapes."""
        self._compiling.append(pool.submit(lambda: self._jitted.lower(*args).compile()))


class Compiler:
    """Visitor of `Loop.rehearse` that has the programs compiled in threads.

    They are compiled in the order of their calls, from the first visit on. The last,
    which takes longest, has a thread of its own.

    Not on several devices, where shapes do not say how intermediate results lie, nor
    on GPUs, whose compiler times kernels while it chooses among them.
    """

    def __init__(self, *but: str):
        """Begin nothing. Programs whose names begin with those of `but` are left."""
        self._but, self._last = but, list[tuple[Program, tuple[Any, ...]]]()
        self._threads = ThreadPoolExecutor(max(cores() - 1, 1), "compile")
        self._thread = ThreadPoolExecutor(1, "compile-last")

    @property
    def compiles(self) -> bool:
        """Whether there are cores to spare, and the compiler times nothing.

        XLA compiles a program for a CPU in several threads: on two cores nothing was
        gained by another, and processor time was lost.
        """
        return cores() > 2 and platform() != "gpu"

    def __call__(self, name: str, program: Program, args: tuple[Any, ...]) -> Any:
        """Shapes and dtypes of the outputs, and that they lie on the device."""
        if not name.startswith(self._but):
            self._begin(self._threads)
            self._last = [(program, args)]
        where = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
        return jax.tree.map(
            lambda x: x.update(sharding=where), program.eval_shape(*args)
        )

    def _begin(self, threads: ThreadPoolExecutor) -> None:
        for program, args in self._last:
            program.compile_in(threads, args)

    def visited(self) -> None:
        """Begin the last one too."""
        self._begin(self._thread)

    def close(self) -> None:
        """Leave what has not begun."""
        for threads in (self._threads, self._thread):
            threads.shutdown(wait=False, cancel_futures=True)
