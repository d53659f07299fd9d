"""The terminal: a live display, or plain lines where output is no terminal."""

import contextlib
import time
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from rich.console import Console
from rich.progress import BarColumn, ProgressColumn, SpinnerColumn, Task, TextColumn
from rich.progress import Progress as Bars
from rich.table import Column
from rich.text import Text


class Waited(ProgressColumn):
    """Seconds since a task began, while it compiles."""

    def render(self, task: Task) -> Text:
        """Empty as soon as something was done."""
        waits = task.fields.get("waits") and task.elapsed is not None
        return Text(f"{task.elapsed:.0f} s" if waits else "")


class Progress:
    """Step, pass rate, dead groups, tokens per second and time left of a run."""

    def __init__(self, console: Console | None = None):
        """Show nothing yet."""
        self._console = console or Console(highlight=False)
        self._bars = Bars(
            SpinnerColumn(finished_text=" "),
            TextColumn("{task.description}"),
            BarColumn(bar_width=12),
            TextColumn("{task.completed:.0f}/{task.total:.0f}"),
            # The note alone may wrap where the terminal is narrow.
            TextColumn("{task.fields[note]}", table_column=Column(no_wrap=False)),
            Waited(),
            console=self._console,
            disable=not self._console.is_terminal,
        )
        self._held_out = ""
        self._phase: Any = None  # name, id of its bar, steps in all
        self._first: tuple[float, int] | None = None  # clock and step, behind compiling
        self._last: tuple[float, int] | None = None  # clock and tokens, last call

    def __enter__(self) -> "Progress":
        """Start the display."""
        self._bars.start()
        return self

    def __exit__(self, *_: object) -> None:
        """Leave the last state on the screen."""
        self._bars.stop()

    def say(self, text: str) -> None:
        """A line of its own, above the display."""
        self._console.print(text, markup=False, soft_wrap=True)

    def stopping(self, again: bool) -> None:
        """A signal has come, `again` if not for the first time."""
        if again:
            self._console.show_cursor()
        else:
            self.say("Stopping after this chunk of steps; once more to stop at once.")

    def begin(
        self, name: str, done: int, total: int, compiling: str = "compiling"
    ) -> None:
        """A phase begins, at `done` of its `total` steps; what it compiles at first."""
        bar = self._bars.add_task(name, total=total, note="", waits=True)
        self._phase = name, bar, total
        self._first = self._last = None
        self._show(done, f"{self._held_out}{compiling}", waits=True)

    @contextlib.contextmanager
    def waiting(self, what: str) -> Iterator[None]:
        """Something that takes long, and has no steps, goes on inside."""
        bar = self._bars.add_task(what, total=None, note="", waits=True, visible=False)
        if self._console.is_terminal:
            self._bars.update(bar, visible=True)
        else:
            self.say(what)
        try:
            yield
        finally:
            self._bars.remove_task(bar)

    def warm(self, done: int, loss: Any) -> None:
        """Warm-start steps were done."""
        self._show(done, f"loss {np.mean(loss):.3f} nats{self._left(done)}")

    def held_out(self, pass_rate: Any) -> None:
        """The policy was evaluated; shown from the next call on."""
        self._held_out = f"held-out {_mean(pass_rate):.3f}  "

    def step(self, rows: Sequence[dict[str, Any]]) -> None:
        """Steps were done; `rows` are all since the last call."""
        done, now = rows[-1]["step"], time.monotonic()
        tokens = int(np.sum(rows[-1]["rollout/tokens"]))
        note = (
            f"{self._held_out}train {_mean([r['outcome/mean'] for r in rows]):.3f}  "
            f"dead groups {_mean([r['group/dead_fraction'] for r in rows]):.0%}"
        )
        if self._last:
            before, drawn = self._last
            note += f"  {(tokens - drawn) / max(now - before, 1e-9):,.0f} tokens/s"
        self._last = now, tokens
        self._show(done, note + self._left(done))

    def _left(self, done: int) -> str:
        """Time left, by the steps since the phase's first call, which compiled."""
        now, total = time.monotonic(), self._phase[-1]
        began, first = self._first = self._first or (now, done)
        if done in (first, total):
            return ""
        left = round((now - began) / (done - first) * (total - done))
        return f"  left {left // 60}:{left % 60:02d}"

    def _show(self, done: int, note: str, *, waits: bool = False) -> None:
        name, bar, total = self._phase
        self._bars.update(bar, completed=done, note=note, waits=waits)
        if not self._console.is_terminal:
            self.say(f"{name} {done}/{total}  {note}")


def _mean(values: Any) -> float:
    """Of all that is finite, NaN if nothing is."""
    values = np.asarray(values, np.float64)
    values = values[np.isfinite(values)]
    return float(values.mean()) if values.size else float("nan")
