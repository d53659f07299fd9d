"""Progress of a run: a live display on a terminal, plain lines elsewhere.

They are plain too on a terminal that says by TERM=dumb that it redraws nothing, and on
one without room for a note beside its phase.
"""

import contextlib
import logging
import sys
import time
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from rich.console import Console
from rich.progress import BarColumn, ProgressColumn, SpinnerColumn, Task, TextColumn
from rich.progress import Progress as Bars
from rich.table import Column
from rich.text import Text

from curax.runs.reading import overall_mean

NARROW = 60  # columns of a terminal below which no bar is drawn
LEAST = 40  # below which nothing is redrawn


class ElapsedColumn(ProgressColumn):
    """Seconds since a task began, shown while its first call compiles."""

    def render(self, task: Task) -> Text:
        """The column's text; empty once a step is done."""
        waits = task.fields.get("waits") and task.elapsed is not None
        return Text(f"{task.elapsed:.0f} s" if waits else "")


class Progress:
    """Display of step, pass rate, dead groups, tokens per second and time left."""

    unit = "chunk of steps"  # what is done before a signal stops the work

    def __init__(self, console: Console | None = None):
        """Make the display; it starts when the context is entered."""
        self._console = console or Console(highlight=False)
        redraws = self._console.is_terminal and not self._console.is_dumb_terminal
        self._live = redraws and self._console.width >= LEAST
        self._bars = Bars(
            SpinnerColumn(
                "dots" if self._console.encoding.startswith("utf") else "line",
                finished_text=" ",
            ),
            # What is waited for may wrap, and never crushes what stands beside it.
            TextColumn("{task.description}", table_column=Column(min_width=10)),
            *([BarColumn(bar_width=12)] if self._console.width >= NARROW else []),
            TextColumn("{task.fields[count]}", table_column=Column(no_wrap=True)),
            # The note alone may wrap where the terminal is narrow.
            TextColumn("{task.fields[note]}", table_column=Column(no_wrap=False)),
            ElapsedColumn(),
            console=self._console,
            disable=not self._live,
        )
        self._held_out = ""
        self._phase: Any = None  # name, id of its bar, steps in all
        self._first: tuple[float, float] | None = None  # clock and step after compiling
        self._last: tuple[float, int] | None = None  # clock and tokens, last call
        self._redirected: list[tuple[logging.StreamHandler[Any], Any]] = []

    def __enter__(self) -> "Progress":
        """Start the display; what is logged on the same terminal goes above it."""
        before = sys.stderr
        self._bars.start()
        seen = before is not None and before.isatty()  # None: closed
        for handler in logging.getLogger().handlers if seen else ():
            if isinstance(handler, logging.StreamHandler) and handler.stream is before:
                handler.setStream(sys.stderr)
                self._redirected.append((handler, before))
        return self

    def __exit__(self, *_: object) -> None:
        """Stop the display; its last state stays on the screen."""
        while self._redirected:
            handler, stream = self._redirected.pop()
            handler.setStream(stream)
        self._bars.stop()

    def say(self, text: str) -> None:
        """Print a line above the display."""
        self._console.print(text, markup=False, soft_wrap=True)

    def stopping(self, again: bool) -> None:
        """Tell the user that a signal came; `again`: the second, which ends the run."""
        if again:
            self._console.show_cursor()
        else:
            self.say(f"Stopping after this {self.unit}; once more to stop at once.")

    def begin(
        self,
        name: str,
        done: float,
        total: int,
        compiling: str = "compiling",
        *,
        share: bool = False,
    ) -> None:
        """Begin a phase.

        Args:
            name: name of the phase.
            done: steps that are done.
            total: steps in all.
            compiling: text shown until the first call returns.
            share: show how much is done as a percentage.
        """
        bar = self._bars.add_task(name, total=total, note="", count="", waits=True)
        self._phase = name, bar, share, total
        self._first = self._last = None
        self._show(done, f"{self._held_out}{compiling}", waits=True)

    @contextlib.contextmanager
    def waiting(self, what: str) -> Iterator[None]:
        """Show a line with elapsed seconds while the block runs."""
        fields = {"note": "", "count": "", "waits": True}
        bar = self._bars.add_task(what, total=None, visible=False, **fields)
        if self._live:
            self._bars.update(bar, visible=True)
        else:
            self.say(what)
        try:
            yield
        finally:
            self._bars.remove_task(bar)

    def warm(self, done: int, loss: Any) -> None:
        """Show the progress of the warm start and its last loss."""
        self.note(done, f"loss {np.mean(loss):.3f} nats")

    def note(self, done: float, note: str) -> None:
        """Show how much of a phase is done, any text, and the time left."""
        self._show(done, note + self._remaining(done))

    def evaluated(self, pass_rate: Any) -> None:
        """Set the held-out pass rate, shown from the next call on."""
        self._held_out = f"held-out {overall_mean(pass_rate):.3f}  "

    def step(self, rows: Sequence[dict[str, Any]]) -> None:
        """Show the last of `rows`, the metrics of all steps since the last call."""
        done, now = rows[-1]["step"], time.monotonic()
        tokens = int(np.sum(rows[-1]["rollout/tokens"]))
        right, dead = (
            overall_mean([row[name] for row in rows])
            for name in ("outcome/mean", "group/dead_fraction")
        )
        note = f"{self._held_out}train {right:.3f}  dead groups {dead:.0%}"
        if self._last:
            before, drawn = self._last
            note += f"  {(tokens - drawn) / max(now - before, 1e-9):,.0f} tokens/s"
        self._last = now, tokens
        self.note(done, note)

    def _remaining(self, done: float) -> str:
        """Text of the time left, by the mean seconds per step after the first call."""
        now, total = time.monotonic(), self._phase[-1]
        began, first = self._first = self._first or (now, done)
        if done in (first, total):
            return ""
        left = round((now - began) / (done - first) * (total - done))
        return f"  left {left // 60}:{left % 60:02d}"

    def _show(self, done: float, note: str, *, waits: bool = False) -> None:
        name, bar, share, total = self._phase
        # A share is never rounded up to all of it.
        count = f"{int(100 * done / total)} %" if share else f"{done:.0f}/{total:.0f}"
        fields = {"note": note, "count": count, "waits": waits}
        self._bars.update(bar, completed=done, **fields)
        if not self._live:
            self.say(f"{name} {count}  {note}")
