"""Reading of run folders as arrays, statistics over seeds, and numbers as text.

An unfinished or killed run reads like a finished one with fewer rows; a partial last
line is left out. A run writes every step once, in order; any other file is damaged.
"""

import contextlib
import json
import math
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np

from curax.settings import files
from curax.settings.errors import WorkError

Row = Mapping[str, Any]


class DamagedError(WorkError, ValueError):
    """A run folder cannot be read. The message names file, line, fault and fix."""


class Run(NamedTuple):
    """Contents of a run folder; rows in the order of their steps."""

    config: Mapping[str, Any]  # resolved; functions are {"function": name, options}
    rows: Sequence[Row]  # metrics; step 0 is the state before RL
    warm: Sequence[Row] = ()  # metrics of the warm start
    before: np.ndarray | None = None  # [seeds, prompts] held-out pass rates, before RL
    after: np.ndarray | None = None  # the same prompts at the last evaluation
    samples: int = 0  # completions behind each of these pass rates
    rollouts: Sequence[Row] = ()  # completions of a few prompts per step
    expected: Mapping[str, Any] = {}  # metrics as predicted, before and after
    alarms: Sequence[Row] = ()  # rows of alarms.jsonl


def read(folder: Path) -> Run:
    """Read a run folder; only `metrics.jsonl` is required.

    Raises:
        DamagedError: `metrics.jsonl` is missing, or a file is damaged.
    """
    if not folder.is_dir():
        raise DamagedError(f"{folder}: no such folder; give the folder of a run.")
    path = folder / "metrics.jsonl"
    if not path.exists():
        raise DamagedError(
            f"{folder}: no metrics.jsonl in it; give the folder of a run."
        )
    metrics = _metrics(path)
    if not metrics:
        raise DamagedError(f"{path}: no rows yet; try again after the first step.")
    before, after, samples = evaluation(folder)
    return Run(
        config=read_json(folder / "config.json"),
        rows=metrics,
        warm=_metrics(folder / "warm_start.jsonl"),
        before=before,
        after=after,
        samples=samples,
        expected=expected(folder),
        rollouts=_rows(folder / "rollouts.jsonl", logged_error),
        alarms=tuple(_rows(folder / "alarms.jsonl", alarm_error)),
    )


def _metrics(path: Path) -> list[Row]:
    """Rows of metrics, a step each, of equally many seeds."""
    lines = list(read_lines(path, metrics_error))
    _check_seed_counts(path, lines)
    return [line.row for line in lines]


def _rows(path: Path, error: Callable[[Row], str | None]) -> list[Row]:
    """Rows of a file of JSON lines of which several may be of one step."""
    return [line.row for line in read_lines(path, error, once=False)]


class Line(NamedTuple):
    """A line of a file of rows."""

    number: int  # from 1
    end: int  # byte offset of the end of the line
    ended: bool  # whether it ends in a newline; the last line may not
    row: Row


def read_lines(
    path: Path,
    error: Callable[[Row], str | None],
    *,
    once: bool = True,
    start: int = -1,
    upto: float = math.inf,
) -> Iterator[Line]:
    """Yield the lines of a file of rows; a partial last line is left out.

    Args:
        path: file of rows; a missing file has none.
        error: `row -> message` for an invalid row, None for a valid one.
        once: steps must increase; False: they must not decrease.
        start: a step below that of every row.
        upto: step of a checkpoint; lines after it are neither checked nor yielded.

    Raises:
        DamagedError: a line up to the checkpoint is not a row, or out of order.
    """
    before, end = start, 0
    with _opened(path) as file:
        for number, text in enumerate(file or (), 1):
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
                raise DamagedError(
                    f"{path}:{number}: {wrong}; repair or delete this line."
                )
            before = row["step"]
            yield Line(number, end, text.endswith(b"\n"), row)


def _row_error(row: Any) -> str | None:
    """Message for a line that is not a row of any file, None for a row."""
    if not isinstance(row, dict):
        return "not a JSON object"
    step = row.get("step")
    if type(step) is not int or not 0 <= step < 2**63:
        return "no number under step"
    return None


def evaluation(folder: Path) -> tuple[np.ndarray | None, np.ndarray | None, int]:
    """Held-out pass rates before and after RL, and samples per pass rate.

    Returns:
        Two arrays `[R, E]` of seeds and prompts, None where not measured; an integer.

    Raises:
        DamagedError: evaluation.json is damaged.
    """
    path = folder / "evaluation.json"
    both = read_json(path)
    before, after = (_pass_rates(path, both, side) for side in ("before", "after"))
    if before is not None and after is not None and before.shape != after.shape:
        raise DamagedError(
            f"{path}: before.pass_rates and after.pass_rates are of other prompts; "
            "repair or delete the file."
        )
    measured = both.get("after") or both.get("before") or {}
    samples = measured.get("samples")
    if type(samples) is not int or not 0 <= samples < 2**31:
        samples = 0
    return before, after, samples


def expected(folder: Path) -> dict[str, Any]:
    """Predicted metrics by name, under "before" and "after"; empty without the file.

    Raises:
        DamagedError: expected.json is damaged.
    """
    path = folder / "expected.json"
    sides = read_json(path)
    for side, values in sides.items():
        if not isinstance(values, dict) or not all(map(_is_number, values.values())):
            raise DamagedError(
                f"{path}: {side} is no object of numbers; repair or delete the file."
            )
    return sides


def _is_number(value: Any) -> bool:
    """Whether a JSON value is null or a number that fits into a float."""
    if type(value) is int:
        return abs(value) < 2**1000
    return value is None or type(value) is float


def metrics_error(row: Row) -> str | None:
    """Message for an invalid row of metrics, None for a valid one."""
    for name, value in row.items():
        values = value if isinstance(value, list) and value else [value]
        if not all(map(_is_number, values)):
            return f"{name} is neither a number nor a list of numbers"
    return None


def _check_seed_counts(path: Path, lines: Sequence[Line]) -> None:
    """Check that all lists, one number per seed, have the same length."""
    seeds = 0
    for line in lines:
        for name, value in line.row.items():
            if isinstance(value, list):
                seeds = seeds or len(value)
                if len(value) != seeds:
                    raise DamagedError(
                        f"{path}:{line.number}: {name} has {len(value)} numbers where "
                        f"the lines before have {seeds}; repair or delete this line."
                    )


def logged_error(row: Row) -> str | None:
    """Message for an invalid row of rollouts.jsonl, None for a valid one."""
    return wrong_field(row, LOGGED, all_of=False)


def alarm_error(row: Row) -> str | None:
    """Message for an invalid row of alarms.jsonl, None for a valid one."""
    return wrong_field(row, ALARM, all_of=True)


def wrong_field(row: Row, fields: Mapping[str, str], *, all_of: bool) -> str | None:
    """Message for the first invalid field of a row, None for a valid row.

    Args:
        row: JSON object.
        fields: kind of each, a key of `KINDS`; a row may have others.
        all_of: whether all must be there; else some may be left out.
    """
    for name, kind in fields.items():
        value = row.get(name)
        there = name in row
        if (all_of and not there) or (there and not KINDS[kind](value)):
            return f"{name} is {json.dumps(value)[:40]}, which is not {kind}"
    return None


# What a field of a row may be, by the words of the message about any other value.
KINDS: Mapping[str, Callable[[Any], bool]] = {
    "a number": _is_number,
    "from 0 to 1": lambda x: _is_number(x) and (x is None or 0 <= x <= 1),
    "a whole number": lambda x: type(x) is int,
    "true or false": lambda x: type(x) is bool,
    "a text": lambda x: isinstance(x, str),
    "a text or null": lambda x: isinstance(x, str | None),
    "a list": lambda x: isinstance(x, list | None),
    "a list of numbers": lambda x: (
        isinstance(x, list | None) and all(map(_is_number, x or ()))
    ),
}
ALARM = {"kind": "a text", "text": "a text"}
# Rows of completions, as training logs some and an evaluation keeps all of them.
COMPLETION = {"slot": "a whole number", "text": "a text", "outcome": "a number"}
LOGGED = COMPLETION | {
    "reward": "a number",
    "advantage": "a number",
    "tokens": "a list",
    "reference": "a list",  # texts of the tokens of a reference answer
    "weights": "a list of numbers",  # of these
}
EVALUATED = COMPLETION | {
    "problem": "a whole number",
    "digest": "a text",
    "greedy": "true or false",
    "level": "a text or null",
    "subject": "a text or null",
    "answer": "a text or null",
    "outcome": "from 0 to 1",
    "reason": "a text or null",
    "length_tokens": "a whole number",
    "finished": "true or false",
}


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[BinaryIO | None]:
    """A regular file, opened to be read; None where there is nothing at its path."""
    with contextlib.ExitStack() as held:
        try:
            file, _ = held.enter_context(files.opened(path))
        except FileNotFoundError:
            file = None
        except ValueError as error:
            raise DamagedError(f"{path}: {error}; remove it.") from None
        yield file


def read_json(path: Path, fix: str = "repair or delete the file") -> dict[str, Any]:
    """The JSON object in a file; empty where the file is missing.

    Args:
        path: the file.
        fix: what to do where it is damaged, for the message.

    Raises:
        DamagedError: the file holds no JSON object.
    """
    with _opened(path) as file:
        if file is None:
            return {}
        text = file.read()
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        raise DamagedError(f"{path}:{error.lineno}: not JSON; {fix}.") from None
    except (UnicodeDecodeError, RecursionError):
        value = None
    if not isinstance(value, dict):
        raise DamagedError(f"{path}:1: not a JSON object; {fix}.")
    return value


def _pass_rates(path: Path, evaluation: Row, side: str) -> np.ndarray | None:
    """`[R, E]` pass rates of a side, NaN where missing; None without an evaluation."""
    if not evaluation.get(side):
        return None
    try:
        rates = np.array(evaluation[side]["pass_rates"], float)
    except (KeyError, TypeError, ValueError, OverflowError):
        rates = np.zeros(())
    if rates.ndim not in (1, 2):
        raise DamagedError(
            f"{path}: {side}.pass_rates is neither a list of numbers nor a list of "
            "those per seed; repair or delete the file."
        )
    outside = rates[(rates < 0) | (rates > 1)]
    if outside.size:
        raise DamagedError(
            f"{path}: {side}.pass_rates has {outside[0]:g}, and rates lie in [0, 1]; "
            "repair or delete the file."
        )
    return np.atleast_2d(rates) if np.isfinite(rates).any() else None


def is_supervised(run: Run) -> bool:
    """Whether a run is supervised training alone: a warm start and no RL step."""
    at_0 = run.config.get("steps") == 0 and run.rows[-1]["step"] == 0
    return at_0 and bool(run.warm)


# Numbers


def column(rows: Sequence[Row], name: str) -> tuple[np.ndarray, np.ndarray]:
    """A metric over steps: `[K]` steps and `[K, R]` values, float64, for R seeds.

    Rows without a finite value of the metric are left out. A seed without a finite
    value is NaN. A metric that is one number for all seeds has R = 1.
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
    """Mean of a metric over seeds, by step; steps without a value are left out."""
    steps, values = column(rows, name)
    return {step: float(np.nanmean(v)) for step, v in zip(steps, values, strict=True)}


def finite_mean(values: np.ndarray) -> np.ndarray:
    """Mean over the last axis of values that are finite; NaN where none is."""
    known = np.isfinite(values)
    count = np.where(known.any(-1), known.sum(-1), np.nan)
    return np.where(known, values, 0.0).sum(-1) / count


def overall_mean(values: Any) -> float:
    """Mean of all values that are finite; NaN where none is."""
    return float(finite_mean(np.ravel(np.asarray(values, np.float64))))


def t_interval(values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Mean over the last axis and half the width of its 95% t-interval.

        half = t_{0.975, n-1} s / sqrt(n)        over the n >= 1 values that are not NaN

    `half` is NaN where n = 1.

    Args:
        values: `[..., R]` float, NaN where missing; at least one is not.

    Returns:
        Mean and half width, `[...]` each.
    """
    from scipy.special import stdtrit

    n = np.sum(np.isfinite(values), axis=-1)
    freedom = np.maximum(n - 1, 1)
    mean = np.nanmean(values, axis=-1)
    variance = np.nansum((values - mean[..., None]) ** 2, axis=-1) / freedom
    t = stdtrit(freedom, 0.975)
    return mean, np.where(n > 1, t * np.sqrt(variance / np.maximum(n, 1)), np.nan)


def bootstrap(
    samples: Sequence[np.ndarray],
    statistic: Callable[..., np.ndarray],
    *,
    draws: int,
    seed: int,
    batch: int | None = None,
) -> Any:
    """Result of `scipy.stats.bootstrap` of a statistic over the last axis.

    Args:
        samples: `[..., n]` each, resampled independently; leading axes share that.
        statistic: `samples -> [...]`, over the last axes.
        draws: number of resamples.
        seed: seed of the resampling.
        batch: resamples that are held at a time; None: all.
    """
    from scipy import stats

    with warnings.catch_warnings(category=stats.DegenerateDataWarning, action="ignore"):
        return stats.bootstrap(
            samples,
            lambda *parts, axis: statistic(*parts),
            n_resamples=draws,
            batch=batch,
            vectorized=True,
            axis=-1,
            method="percentile",
            rng=np.random.default_rng(seed),
        )


_INSIDE = {"rollout", "update", "verify"}  # stages whose time is part of a step's
_HIDDEN = {"time/verify_hidden_s"}  # stages that overlap others and add no seconds


def stage_seconds(rows: Sequence[Row]) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Steps `[K]` and seconds `[K]` by stage, the largest total first.

    Stages that overlap others are left out.
    """
    times = {}
    names = {name for row in rows for name in row if name.startswith("time/")}
    for name in sorted(name for name in names - _HIDDEN if name.endswith("_s")):
        steps, values = column(rows, name)
        if steps.size:
            stage = name.removeprefix("time/").removesuffix("_s").replace("_", " ")
            times[stage] = steps, np.nanmean(values, axis=-1)
    return dict(sorted(times.items(), key=lambda item: -item[1][1].sum()))


def seconds_so_far(rows: Sequence[Row]) -> dict[float, float]:
    """Seconds of all stages from the beginning up to each step, by step."""
    stages = stage_seconds(rows)
    inside = _INSIDE & stages.keys() if "step" in stages else set()
    spent = dict.fromkeys((float(row["step"]) for row in rows), 0.0)
    for name in stages.keys() - inside:
        for step, seconds in zip(*stages[name], strict=True):
            spent[step] += float(seconds)
    steps = sorted(spent)
    return dict(zip(steps, np.cumsum([spent[step] for step in steps]), strict=True))


class Times(NamedTuple):
    """Seconds of a run by stage; the first chunk of a stage, which compiles, is apart.

    A stage that is timed once per chunk has the same value in all steps of the chunk.
    """

    total: float  # seconds of all stages that do not overlap others
    first: float  # seconds of first chunks, part of the total
    stages: Mapping[str, tuple[np.ndarray, np.ndarray]]  # steps and seconds after the
    # first chunk, the largest total first; all chunks where there is only the first
    once: Mapping[str, float]  # seconds of parts of a step that were timed once


def times(rows: Sequence[Row]) -> Times | None:
    """Seconds of a run by stage; None where nothing was timed."""
    stages = stage_seconds(rows)
    if not stages:
        return None
    firsts = {name: _first_chunk(seconds) for name, (_, seconds) in stages.items()}
    behind = {
        name: (steps[firsts[name] :], seconds[firsts[name] :])
        for name, (steps, seconds) in stages.items()
        if firsts[name] < seconds.size
    }
    inside = _INSIDE & stages.keys() if "step" in stages else set()
    counted = {
        name: seconds for name, (_, seconds) in stages.items() if name not in inside
    }
    shown = {name: behind[name] for name in behind if name not in inside}
    if inside & behind.keys():
        shown = {name: behind[name] for name in behind if name != "step"}
    shown = shown or {name: stages[name] for name in counted}
    return Times(
        total=float(sum(seconds.sum() for seconds in counted.values())),
        first=float(sum(s[: firsts[name]].sum() for name, s in counted.items())),
        stages=dict(sorted(shown.items(), key=lambda item: -item[1][1].sum())),
        once={
            name: float(stages[name][1][0])
            for name in sorted(inside - behind.keys())
            if behind
        },
    )


def _first_chunk(seconds: np.ndarray) -> int:
    """Number of leading steps that have the value of the first: its chunk."""
    others = np.flatnonzero(seconds != seconds[0])
    return int(others[0]) if others.size else len(seconds)


def count_text(value: float) -> str:
    """A count with three digits and a unit: 950, 12.3 k, 4.56 M."""
    for size, unit in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if float(f"{abs(value):.3g}") >= size:
            return f"{value / size:.3g} {unit}"
    return f"{value:.4g}"


def plural(number: float, name: str) -> str:
    """A whole number and a noun in its number: 1 step, 1,000 steps."""
    return f"{number:,.0f} {name}{'' if number == 1 else 's'}"


def duration_text(seconds: float) -> str:
    """A duration with its unit: 2.7 ms, 4.2 s, 3 min 20 s, 2 h 5 min."""
    if 0 < seconds < 0.00995:
        return f"{1000 * seconds:.2g} ms"
    if seconds < 59.5:
        return f"{seconds:.2g} s" if seconds < 9.95 else f"{seconds:.0f} s"
    if seconds < 3599.5:
        return "{} min {} s".format(*divmod(round(seconds), 60))
    return "{} h {} min".format(*divmod(round(seconds / 60), 60))
