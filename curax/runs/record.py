"""What a run has written, read back: its folder as numbers, and numbers as words.

A run that is still going, or was killed, reads like a finished one with less in it: a
last line that was cut off in the middle is left out. A run writes every step once, in
order, so any other file is damaged, and refused.
"""

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

Row = Mapping[str, Any]


class RecordError(ValueError):
    """A run folder cannot be read. Its text is one sentence: where, what, the fix."""


class Run(NamedTuple):
    """All that a run folder holds, in the order of its steps."""

    config: Mapping[str, Any]  # resolved; functions are {"function": name, options}
    rows: Sequence[Row]  # metrics; step 0 is the state before RL
    warm: Sequence[Row] = ()  # metrics of the warm start
    before: np.ndarray | None = None  # [seeds, prompts] held-out pass rates, before RL
    after: np.ndarray | None = None  # the same prompts at the last evaluation
    samples: int = 0  # completions behind each of these pass rates
    rollouts: Sequence[Row] = ()  # completions of a few prompts per step
    expected: Mapping[str, Any] = {}  # metrics as predicted, before and after
    alarms: Sequence[Row] = ()  # what the run was warned of


def read(folder: Path) -> Run:
    """Everything in a run folder; only `metrics.jsonl` must be there.

    Raises:
        RecordError: if it is not there, or a file is not what a run writes.
    """
    if not folder.is_dir():
        raise RecordError(f"{folder}: no such folder; give the folder of a run.")
    path = folder / "metrics.jsonl"
    if not path.is_file():
        raise RecordError(
            f"{folder}: no metrics.jsonl in it; give the folder of a run."
        )
    metrics = _lines(path, metrics_error)
    if not metrics:
        raise RecordError(f"{path}: no rows yet; try again after the first step.")
    _check_seeds(path, metrics)
    before, after, samples = evaluation(folder)
    return Run(
        config=whole(folder / "config.json"),
        rows=[row for _, row in metrics],
        warm=[row for _, row in _lines(folder / "warm_start.jsonl", metrics_error)],
        before=before,
        after=after,
        samples=samples,
        expected=expected(folder),
        rollouts=[
            row
            for _, row in _lines(folder / "rollouts.jsonl", rollout_error, once=False)
        ],
        alarms=tuple(
            row for _, row in _lines(folder / "alarms.jsonl", alarm_error, once=False)
        ),
    )


def _lines(
    path: Path, error: Callable[[Row], str | None], *, once: bool = True
) -> list[tuple[int, Row]]:
    """The rows of a file, each with its line number."""
    return [(line.number, line.row) for line in lines(path, error, once=once)]


class Line(NamedTuple):
    """A row in its file."""

    number: int  # of the line, from 1
    end: int  # bytes from the beginning of the file to the end of the line
    ended: bool  # by a newline; the last one of a file may not be
    row: Row


def lines(
    path: Path,
    error: Callable[[Row], str | None],
    *,
    once: bool = True,
    start: int = -1,
    upto: float = math.inf,
) -> Iterator[Line]:
    """The rows of a file, up to what a killed run may have left at its end.

    Args:
        path: of the file; nothing is in one that is not there.
        error: says what is wrong with a row.
        once: whether steps must rise; else they must not fall.
        start: a step before all rows.
        upto: step of a checkpoint. Behind it nothing is looked at, whatever it is.

    Raises:
        RecordError: a line that belongs to the checkpoint is no row, or out of order.
    """
    if not path.is_file():
        return
    before, end = start, 0
    with path.open("rb") as file:
        for number, text in enumerate(file, 1):
            end += len(text)
            if not text.strip():
                continue
            row: Any = None
            try:
                row = json.loads(text)
            except (ValueError, RecursionError):
                if not text.endswith(b"\n"):  # still being written
                    return
            wrong = _row_error(row) or error(row)
            if wrong and (upto < 0 or (once and before >= upto)):
                return
            if not wrong and row["step"] > upto:
                return
            if not wrong and row["step"] < before + once:
                wrong = f"step {row['step']} behind step {before}"
            if wrong:
                raise RecordError(
                    f"{path}:{number}: {wrong}; repair or delete this line."
                )
            before = row["step"]
            yield Line(number, end, text.endswith(b"\n"), row)


def _row_error(row: Any) -> str | None:
    """What is wrong with a line, whatever file it is in."""
    if not isinstance(row, dict):
        return "not a JSON object"
    step = row.get("step")
    if type(step) is not int or not 0 <= step < 2**63:
        return "no number under step"
    return None


def evaluation(folder: Path) -> tuple[np.ndarray | None, np.ndarray | None, int]:
    """Held-out pass rates before and after, `[seeds, prompts]`, and their samples.

    Raises:
        RecordError: the file is not what a run writes.
    """
    path = folder / "evaluation.json"
    both = whole(path)
    before, after = (_pass_rates(path, both, side) for side in ("before", "after"))
    measured = both.get("after") or both.get("before") or {}
    samples = measured.get("samples")
    return before, after, samples if isinstance(samples, int) else 0


def expected(folder: Path) -> dict[str, Any]:
    """Metrics as predicted, before and after.

    Raises:
        RecordError: the file is not what a run writes.
    """
    path = folder / "expected.json"
    sides = whole(path)
    for side, values in sides.items():
        if not isinstance(values, dict) or not all(map(_number, values.values())):
            raise RecordError(
                f"{path}: {side} is no object of numbers; repair or delete the file."
            )
    return sides


def _number(value: Any) -> bool:
    """Whether a value can be a float, or is null."""
    if type(value) is int:
        return abs(value) < 2**1000
    return value is None or type(value) is float


def metrics_error(row: Row) -> str | None:
    """What is wrong with a row of metrics."""
    for name, value in row.items():
        values = value if isinstance(value, list) and value else [value]
        if not all(map(_number, values)):
            return f"{name} is neither a number nor a list of numbers"
    return None


def _check_seeds(path: Path, rows: Sequence[tuple[int, Row]]) -> None:
    """Lists are one number per seed, so all are as long as the first."""
    seeds = 0
    for number, row in rows:
        for name, value in row.items():
            if isinstance(value, list):
                seeds = seeds or len(value)
                if len(value) != seeds:
                    raise RecordError(
                        f"{path}:{number}: {name} has {len(value)} numbers where the "
                        f"lines before have {seeds}; repair or delete this line."
                    )


def rollout_error(row: Row) -> str | None:
    """What is wrong with the row of a completion."""
    for name in ("outcome", "reward", "advantage"):
        if not _number(row.get(name)):
            return f"{name} is not a number"
    for name in ("tokens", "reference", "weights"):
        if not isinstance(row.get(name), list | None):
            return f"{name} is not a list"
    if not all(map(_number, row.get("weights") or ())):
        return "weights are not numbers"
    return None


def alarm_error(row: Row) -> str | None:
    """What is wrong with the row of an alarm."""
    for name in ("kind", "text"):
        if not isinstance(row.get(name), str):
            return f"{name} is not a text"
    return None


def whole(path: Path) -> dict[str, Any]:
    """The JSON object of a file, empty where there is no file.

    Raises:
        RecordError: there is none in the file.
    """
    if not path.is_file():
        return {}
    try:
        value = json.loads(path.read_bytes())
    except json.JSONDecodeError as error:
        raise RecordError(
            f"{path}:{error.lineno}: not JSON; repair or delete the file."
        ) from None
    except (UnicodeDecodeError, RecursionError):
        value = None
    if not isinstance(value, dict):
        raise RecordError(f"{path}:1: not a JSON object; repair or delete the file.")
    return value


def _pass_rates(path: Path, evaluation: Row, side: str) -> np.ndarray | None:
    """`[seeds, prompts]`, missing ones NaN; None where there was no evaluation."""
    if not evaluation.get(side):
        return None
    try:
        rates = np.array(evaluation[side]["pass_rates"], float)
    except (KeyError, TypeError, ValueError):
        rates = np.zeros(())
    if rates.ndim not in (1, 2):
        raise RecordError(
            f"{path}: {side}.pass_rates is neither a list of numbers nor a list of "
            "those per seed; repair or delete the file."
        )
    return np.atleast_2d(rates) if np.isfinite(rates).any() else None


def supervised(run: Run) -> bool:
    """Whether a run is supervised training, a warm start that no RL step follows."""
    at_0 = run.config.get("steps") == 0 and run.rows[-1]["step"] == 0
    return at_0 and bool(run.warm)


# Numbers


def column(rows: Sequence[Row], name: str) -> tuple[np.ndarray, np.ndarray]:
    """Every value a metric took: `(step [K], value [K, R])`, float64, R seeds.

    Rows that lack the metric, or hold no finite value of it, are left out. A seed
    without a finite value is NaN. A metric that is one number for all seeds has R = 1.
    """
    given = [row for row in rows if name in row]
    values = [np.atleast_1d(np.array(row[name], float)) for row in given]
    known = [i for i, value in enumerate(values) if np.isfinite(value).any()]
    if not known:
        return np.zeros(0), np.zeros((0, 1))
    seeds = max(values[i].size for i in known)
    table = np.stack([np.broadcast_to(values[i], seeds) for i in known])
    steps = np.array([given[i]["step"] for i in known], float)
    return steps, np.where(np.isfinite(table), table, np.nan)


def means(rows: Sequence[Row], name: str) -> dict[float, float]:
    """Mean of a metric over the seeds, by step; steps without a value are left out."""
    steps, values = column(rows, name)
    return {step: float(np.nanmean(v)) for step, v in zip(steps, values, strict=True)}


def interval(values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Mean over the last axis and half the width of its 95% t-interval.

        half = t_{0.975, n-1} s / sqrt(n)        over the n >= 1 values that are not NaN

    A single value has no interval: its `half` is NaN.
    """
    from scipy.special import stdtrit

    n = np.sum(np.isfinite(values), axis=-1)
    freedom = np.maximum(n - 1, 1)
    mean = np.nanmean(values, axis=-1)
    variance = np.nansum((values - mean[..., None]) ** 2, axis=-1) / freedom
    t = stdtrit(freedom, 0.975)
    return mean, np.where(n > 1, t * np.sqrt(variance / np.maximum(n, 1)), np.nan)


_PARTS = {"rollout", "update", "verify"}  # of a step, whose time has them in it
_HIDDEN = ("verify hidden",)  # beside other stages, in the same seconds


def stage_seconds(rows: Sequence[Row]) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Steps and seconds of each timed stage, the costliest in total first."""
    times = {}
    names = {name for row in rows for name in row if name.startswith("time/")}
    for name in sorted(names):
        steps, values = column(rows, name)
        if steps.size:
            stage = name.removeprefix("time/").removesuffix("_s").replace("_", " ")
            times[stage] = steps, np.nanmean(values, axis=-1)
    return dict(sorted(times.items(), key=lambda item: -item[1][1].sum()))


class Times(NamedTuple):
    """Where the seconds of a run went. First values also compile, and stand apart.

    A stage that is timed once per chunk of steps has the same value in all of them; its
    first value is that of the first chunk.
    """

    total: float  # of all stages; what is hidden behind another counts for nothing
    first: float  # of the total, the seconds of first values
    stages: Mapping[str, tuple[np.ndarray, np.ndarray]]  # what is behind them; the
    # costliest first; all values where there are no others
    once: Mapping[str, float]  # parts of a step with a first value alone


def times(rows: Sequence[Row]) -> Times | None:
    """The seconds of a run; None where nothing was timed."""
    found = stage_seconds(rows)
    for hidden in _HIDDEN:
        found.pop(hidden, None)
    if not found:
        return None
    firsts = {name: _firsts(seconds) for name, (_, seconds) in found.items()}
    behind = {
        name: (steps[firsts[name] :], seconds[firsts[name] :])
        for name, (steps, seconds) in found.items()
        if firsts[name] < seconds.size
    }
    inside = _PARTS & found.keys() if "step" in found else set()
    counted = {
        name: seconds for name, (_, seconds) in found.items() if name not in inside
    }
    shown = {name: behind[name] for name in behind if name not in inside}
    if inside & behind.keys():
        shown = {name: behind[name] for name in behind if name != "step"}
    shown = shown or {name: found[name] for name in counted}
    return Times(
        total=float(sum(seconds.sum() for seconds in counted.values())),
        first=float(sum(s[: firsts[name]].sum() for name, s in counted.items())),
        stages=dict(sorted(shown.items(), key=lambda item: -item[1][1].sum())),
        once={
            name: float(found[name][1][0])
            for name in sorted(inside - behind.keys())
            if behind
        },
    )


def _firsts(seconds: np.ndarray) -> int:
    """How many steps the first value is of."""
    others = np.flatnonzero(seconds != seconds[0])
    return int(others[0]) if others.size else len(seconds)


def count(value: float) -> str:
    """A count as people say it: 950, 12.3 k, 4.56 M."""
    for size, unit in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if float(f"{abs(value):.3g}") >= size:
            return f"{value / size:.3g} {unit}"
    return f"{value:.4g}"


def many(number: float, name: str) -> str:
    """A whole number of things: 1 step, 1,000 steps."""
    return f"{number:,.0f} {name}{'' if number == 1 else 's'}"


def duration(seconds: float) -> str:
    """A time as people say it: 2.7 ms, 4.2 s, 3 min 20 s, 2 h 5 min."""
    if 0 < seconds < 0.00995:
        return f"{1000 * seconds:.2g} ms"
    if seconds < 59.5:
        return f"{seconds:.2g} s" if seconds < 9.95 else f"{seconds:.0f} s"
    if seconds < 3599.5:
        return "{} min {} s".format(*divmod(round(seconds), 60))
    return "{} h {} min".format(*divmod(round(seconds / 60), 60))
