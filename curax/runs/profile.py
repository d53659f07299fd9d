"""A trace of some steps of a run, for TensorBoard and Perfetto."""

from pathlib import Path

import jax

from curax.runs.checkpoint import system_reason
from curax.runs.rows import NotWrittenError


class Profile:
    """Trace of `steps` steps behind the first, which compiles; 0: no trace.

    `profile/plugins/profile/TIME/` of the run folder gets an `.xplane.pb`, which the
    profile plugin of TensorBoard reads, and `perfetto_trace.json.gz`, which
    ui.perfetto.dev opens.
    """

    def __init__(self, workdir: Path, steps: int, *, writes: bool = True):
        """Set folder and number of steps; nothing is traced yet.

        Args:
            workdir: run folder.
            steps: steps to trace; the same on all processes of a run.
            writes: whether this process traces; chunks are the same if it does not.
        """
        self._folder, self._steps = workdir / "profile", steps
        self._writes = writes
        self._on = False

    def begin(self, done: int, times: int) -> int:
        """Length of the next chunk; the trace begins here if it is due.

        Args:
            done: steps that this process has made.
            times: steps of the next chunk at most.
        """
        if done > self._steps or not self._steps:
            return times
        if done and self._writes and not self._on:
            jax.profiler.start_trace(self._folder, create_perfetto_trace=True)
            self._on = True
        return min(times, self._steps + 1 - done) if done else 1

    def end(self, done: int) -> str | None:
        """Write the trace if its steps are made; a sentence that says where."""
        if not self._on or done <= self._steps:
            return None
        self.close()
        return f"A trace of {self._steps} steps is written to {self._folder}."

    def close(self) -> None:
        """Write what was traced, if anything is.

        Raises:
            NotWrittenError: it could not be written.
        """
        if self._on:
            self._on = False
            try:
                jax.profiler.stop_trace()
            except (OSError, jax.errors.JaxRuntimeError) as error:
                raise NotWrittenError(
                    f"{self._folder} cannot be written ({system_reason(error)})"
                ) from error
