"""The terminal: a live display, or plain lines where output is no terminal."""

import time
from collections.abc import Sequence
from typing import Any

import numpy as np
from rich.console import Console
from rich.progress import BarColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bars

from curax.config import Config


class Progress:
    """Step, pass rate, dead groups, tokens per second and time left of a run."""

    def __init__(self, config: Config):
        """Show nothing yet."""
        self._steps = config.steps
        self._console = Console()
        self._live = self._console.is_terminal
        self._bars = Bars(
            TextColumn("{task.description:>10}"),
            BarColumn(bar_width=24),
            TextColumn("{task.completed:.0f}/{task.total:.0f}"),
            TextColumn("{task.fields[note]}"),
            TimeRemainingColumn(),
            console=self._console,
            disable=not self._live,
        )
        self._tasks: dict[str, Any] = {}
        self._held_out = ""
        self._start: tuple[float, int] | None = None

    def __enter__(self) -> "Progress":
        """Start the display."""
        self._bars.start()
        return self

    def __exit__(self, *_: object) -> None:
        """Leave the last state on the screen."""
        self._bars.stop()

    def warm(self, done: int, total: int, loss: Any) -> None:
        """A warm-start step was done."""
        note = f"loss {np.mean(loss):.3f} nats"
        self._show("warm start", done, total, note)

    def step(self, row: dict[str, Any], rows: Sequence[dict[str, Any]] = ()) -> None:
        """Steps were done; `row` is the last, `rows` are all since the last call."""
        if "eval/pass_rate" in row:
            self._held_out = f"held-out {np.mean(row['eval/pass_rate']):.3f}  "
        note = self._held_out
        if rows:
            seconds = sum(r["time/rollout_s"] + r["time/update_s"] for r in rows)
            drawn = sum(
                float(np.sum(r["rollout/drawn"])) * np.mean(r["rollout/length_tokens"])
                for r in rows
            )
            note += (
                f"train {_mean(rows, 'outcome/mean'):.3f}  "
                f"dead groups {_mean(rows, 'group/dead_fraction'):.0%}  "
                f"{drawn / max(seconds, 1e-9):,.0f} tokens/s"
            )
        self._show("RL", row["step"], self._steps, note)

    def _show(self, name: str, done: int, total: int, note: str) -> None:
        if name not in self._tasks:
            self._tasks[name] = self._bars.add_task(name, total=total, note="")
            self._began = time.monotonic(), done
        self._bars.update(self._tasks[name], completed=done, note=note)
        if not self._live:
            began, first = self._began
            rate = (time.monotonic() - began) / max(done - first, 1)
            left = int(rate * (total - done)) if done > first else None
            tail = "" if left is None else f"  left {left // 60}:{left % 60:02d}"
            print(f"{name} {done}/{total}  {note}{tail}", flush=True)


def _mean(rows: Sequence[dict[str, Any]], name: str) -> float:
    return float(np.nanmean([np.mean(row[name]) for row in rows]))
