"""Programs of a run: jitted functions, compiled side by side before they are called."""

from collections.abc import Callable
from concurrent.futures import Future, wait
from threading import Semaphore, Thread
from typing import Any

import jax
from jax.tree import leaves

from curax.arrays.sharding import placed
from curax.settings.cli import BESIDE
from curax.step import mesh as meshes


class Program:
    """A jitted function of a run; a call waits for what compiles in the background."""

    def __init__(
        self, function: Callable, where: Any, *, updates: bool = False, **options: Any
    ):
        """Jit the function; nothing is compiled yet.

        Args:
            function: to be jitted.
            where: tree of shardings of the mesh that it runs on; None: one device.
            updates: whether it updates parameters.
            options: others of `jax.jit`.
        """
        how = meshes.compiler_options(where, updates=updates)
        self.jitted = jax.jit(function, compiler_options=how, **options)
        self._begun: list[Future[Any]] = []

    def __call__(self, *args: Any) -> Any:
        """Call the function; what was not compiled yet, or failed to, is now."""
        wait(self._begun)
        return self.jitted(*args)

    def begin(self, beside: "Beside", args: tuple[Any, ...]) -> None:
        """Begin to compile for arguments of these shapes, dtypes and shardings."""
        # Lowered here, in the contexts of the caller; calls find what it compiles to.
        self._begun.append(beside.later(self.jitted.lower(*args).compile))

    def eval_shape(self, *args: Any) -> Any:
        """Shapes and dtypes of the outputs; the trace is kept."""
        return self.jitted.eval_shape(*args)

    def trace(self, *args: Any) -> jax.stages.Traced:
        """The function traced for these arguments, as that of a jitted function."""
        return self.jitted.trace(*args)

    def lower(self, *args: Any) -> jax.stages.Lowered:
        """The function lowered for these arguments, as that of a jitted function."""
        return self.jitted.lower(*args)


class Beside:
    """Visitor of `Loop.rehearse` that compiles programs side by side, in threads.

    A program is found compiled by a call whose arguments lie where those of the visit
    do, which is on the first device. Of a mesh it would be known from compiled programs
    alone where arrays lie that they make.
    """

    def __init__(self, threads: int):
        """Compile nothing yet; later so many programs at the same time."""
        self._free, self._closed = Semaphore(threads), False

    def __call__(self, name: str, program: Program, args: tuple[Any, ...]) -> Any:
        """Shapes and dtypes of the outputs, which is as far as the caller waits."""
        del name
        shapes = program.eval_shape(*args)
        program.begin(self, args)
        return placed(shapes, None) if any(map(_lies, leaves(args))) else shapes

    def later(self, function: Callable, *args: Any) -> Future[Any]:
        """Call a function as soon as a thread is free, in one that nobody waits for."""
        found = Future()

        def call() -> None:
            with self._free:
                if self._closed:
                    found.cancel()
                if not found.set_running_or_notify_cancel():
                    return
                try:
                    found.set_result(function(*args))
                except BaseException as error:  # which is raised where it is awaited
                    found.set_exception(error)

        Thread(target=call, name=BESIDE, daemon=True).start()
        return found

    def close(self) -> None:
        """Begin no more; what compiles now ends in its thread."""
        self._closed = True


def _lies(leaf: Any) -> bool:
    """Whether a device is chosen for an array, which then is that of what it makes."""
    return bool(getattr(leaf, "sharding", None) and getattr(leaf, "committed", True))
