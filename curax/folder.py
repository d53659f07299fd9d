"""The run folder: config, metrics and rollouts as JSON lines, TensorBoard events.

Rows are appended whole and flushed. On resume those behind the checkpoint, and a half
row at the end if there is one, are cut off, and the run writes them anew.
"""

import json
import math
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import jax
import numpy as np

from curax.config import ConfigError
from curax.types import Task

CONFIG = "config.json"
METRICS, ROLLOUTS = "metrics.jsonl", "rollouts.jsonl"
WARM, EVALUATION = "warm_start.jsonl", "evaluation.json"
CHECKPOINTS, EVENTS = "checkpoints", "tensorboard"


def plain(value: Any) -> Any:
    """Arrays as numbers or lists for JSON; what is not finite as None."""
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if hasattr(value, "tolist"):
        return plain(np.asarray(value).tolist())
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def write_json(path: Path, value: Any) -> None:
    """Write a whole file or nothing."""
    partial = path.with_name(path.name + ".tmp")
    partial.write_text(json.dumps(plain(value), indent=1) + "\n")
    os.replace(partial, path)


class Rows:
    """A file of JSON objects, one per line, each with a `step`."""

    def __init__(self, path: Path, *, upto: int | None):
        """Open for appending; rows with a step above `upto` are dropped (None: all)."""
        kept = []
        if path.exists() and upto is not None:
            for line in path.read_text().splitlines():
                try:
                    row = json.loads(line)
                except ValueError:
                    break  # the last line of a run that was killed
                if row["step"] <= upto:
                    kept.append(line + "\n")
        partial = path.with_name(path.name + ".tmp")
        partial.write_text("".join(kept))
        os.replace(partial, path)
        self._file = path.open("a")

    def write(self, rows: Iterable[dict[str, Any]]) -> None:
        """Append rows."""
        self._file.write("".join(json.dumps(plain(row)) + "\n" for row in rows))
        self._file.flush()

    def close(self) -> None:
        """Close the file."""
        self._file.close()


class Events:
    """TensorBoard scalars; with several seeds, their mean."""

    def __init__(self, path: Path, *, upto: int):
        """Open; events behind `upto` of an earlier process are hidden."""
        from tensorboardX import SummaryWriter

        self._writer = SummaryWriter(str(path), purge_step=upto + 1, flush_secs=10)

    def write(self, rows: Iterable[dict[str, Any]]) -> None:
        """One scalar per metric and row."""
        for row in rows:
            for name, value in row.items():
                number = np.mean(np.asarray(value, np.float64))
                if name != "step" and np.isfinite(number):
                    self._writer.add_scalar(name, float(number), row["step"])

    def close(self) -> None:
        """Flush and close."""
        self._writer.close()


def read_config(path: Path) -> dict[str, Any]:
    """The resolved config of a run.

    Raises:
        ConfigError: if the file is no JSON.
    """
    try:
        return json.loads(path.read_text())
    except ValueError as error:
        raise ConfigError(
            f"{path}: {error}; the run cannot be resumed, name another --workdir."
        ) from error


def completions(
    step: int, shown: Any, task: Task, seeds: Any
) -> Iterable[dict[str, Any]]:
    """One object per completion of the prompts that a step shows.

    Args:
        step: its number.
        shown: `curax.pipeline.Shown`, with an axis of seeds in front if there are many.
        task: decodes tokens.
        seeds: `[]` or `[R]`, the seeds of the run.
    """
    for r, seed in enumerate(np.atleast_1d(seeds)):
        one = shown if np.ndim(seeds) == 0 else jax.tree.map(lambda x, r=r: x[r], shown)
        for b, prompt_id in enumerate(one.prompts.id):
            prompt = one.prompts.tokens[b][one.prompts.mask[b]]
            for slot in np.flatnonzero(one.exists[b]):
                tokens = one.tokens[b, slot][one.mask[b, slot]]
                yield {
                    "step": step,
                    "seed": seed,
                    "prompt_id": prompt_id,
                    "prompt": task.decode(prompt),
                    "slot": slot,
                    "text": task.decode(tokens),
                    "tokens": tokens,
                    "outcome": one.outcome[b, slot],
                    "reward": one.reward[b, slot],
                    "advantage": one.credit[b, slot],
                    "kept": one.keep[b, slot],
                }
