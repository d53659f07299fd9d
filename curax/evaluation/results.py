"""What the samples of a file come to: estimates with intervals, lengths, what failed.

Everything is computed from the file alone, whoever wrote it and in how many goes.
"""

import itertools
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from curax.evaluation import estimates
from curax.runs.record import count, duration, many
from curax.verify import answers

FEW = 3  # of fewer completions the majority is as right as one of them
MANY = 0.5  # share of completions without an outcome that is told beside the figures
SUREST = {"": 1.0, " top 10%": 0.1}  # the share that votes, by the end of its name


class Tally(NamedTuple):
    """Of P problems with n sampled completions each."""

    outcome: np.ndarray  # [P, n] float, NaN where missing
    length: np.ndarray  # [P, n] int, tokens
    finished: np.ndarray  # [P, n] bool
    answer: np.ndarray  # [P, n] int, equal where answers of a problem are; -1: none
    greedy: np.ndarray  # [P] float, outcomes; NaN where missing, or not drawn
    missing: Counter[str]  # completions without an outcome, by reason; the greedy
    # ones count where no others were drawn
    level: Sequence[str | None]  # [P]
    subject: Sequence[str | None]  # [P]
    confidence: Mapping[str, np.ndarray]  # [P, n] float, nats, by score; {}: not told


def tally(blocks: Iterable[Sequence[Mapping[str, Any]]], n: int) -> Tally:
    """The rows of a samples file, one block per problem."""
    outcome, length, finished, answer, greedy = [], [], [], [], []
    missing, level, subject = Counter[str](), [], []
    sure: dict[str, list[list[float]]] = {}
    for block in blocks:
        sampled = [row for row in block if not row["greedy"]]
        outcome.append([_number(row["outcome"]) for row in sampled])
        length.append([row["length_tokens"] for row in sampled])
        finished.append([row["finished"] for row in sampled])
        said = [row["answer"] for row in sampled]
        answer.append(estimates.alike(said, answers.same))
        alone = [_number(row["outcome"]) for row in block if row["greedy"]]
        greedy.append(alone[0] if alone else math.nan)
        reasons = [row["reason"] for row in sampled or block if row["reason"]]
        missing.update(reason.partition(":")[0] for reason in reasons)
        for name in sampled[0].get("confidence_nats", ()) if sampled else ():
            each = [row["confidence_nats"][name] for row in sampled]
            sure.setdefault(name, []).append(each)
        level.append(block[0]["level"])
        subject.append(block[0]["subject"])
    shape = (len(outcome), n)
    return Tally(
        outcome=np.array(outcome, np.float64).reshape(shape),
        length=np.array(length, np.int64).reshape(shape),
        finished=np.array(finished, bool).reshape(shape),
        answer=np.array(answer, np.int64).reshape(shape),
        greedy=np.array(greedy, np.float64),
        missing=missing,
        level=level,
        subject=subject,
        confidence={
            name: np.array(each, np.float64).reshape(shape)
            for name, each in sure.items()
        },
    )


def _number(outcome: float | None) -> float:
    return math.nan if outcome is None else float(outcome)


def per_problem(told: Tally, ks: Sequence[int]) -> dict[str, np.ndarray]:
    """The value of each problem, `[P]`, by the name of the measure.

    A completion is right if its outcome is 1. `mean@n` is the mean outcome, in which
    verifiers that give parts of 1 count in full. Where confidence is told there are
    votes of all n by each score of it.

    Args:
        told: of a file.
        ks: of pass@k and maj@k.
    """
    n, found = told.outcome.shape[-1], {}
    graded = np.sum(~np.isnan(told.outcome), -1)
    right = np.sum(told.outcome >= 1, -1)
    if n:
        found[f"mean@{n}"] = estimates.mean(told.outcome)
    for k in ks if n else ():
        found[f"pass@{k}"] = estimates.pass_at_k(right, graded, k)
    for k in ks if np.any(told.answer >= 0) else ():
        if k >= FEW:
            pairs = zip(told.answer, told.outcome, strict=True)
            found[f"maj@{k}"] = np.array([estimates.majority(*p, k) for p in pairs])
    for (score, weight), (end, keep) in itertools.product(
        told.confidence.items() if n > 1 else (), SUREST.items()
    ):
        each = zip(told.answer, told.outcome, weight, strict=True)
        found[f"maj@{n} {score}{end}"] = np.array(
            [estimates.weighted(*one, keep=keep) for one in each]
        )
    if not np.isnan(told.greedy).all():
        found["greedy"] = told.greedy
    return found


def results(told: Tally, ks: Sequence[int], *, seed: int) -> dict[str, Any]:
    """All that is said of a file, ready for JSON.

    Args:
        told: of a file.
        ks: of pass@k and maj@k.
        seed: of the intervals.
    """
    values = per_problem(told, ks)
    found: dict[str, Any] = {
        "problems": len(told.greedy),
        "completions": told.outcome.size or told.greedy.size,
        "measures": _measured(values, seed),
        "missing": dict(sorted(told.missing.items())),
    }
    if told.outcome.size:
        right, wrong = told.outcome >= 1, told.outcome < 1
        some = {"all": np.ones_like(right), "right": right, "wrong": wrong}
        found["length_tokens"] = {
            name: _lengths(told.length[which]) for name, which in some.items()
        }
        cut = 1 - estimates.mean(told.finished.astype(np.float64))
        found["truncated"] = _measured({"truncated": cut}, seed)["truncated"]
    for kind, of in (("levels", told.level), ("subjects", told.subject)):
        names = sorted({name for name in of if name is not None}, key=_in_order)
        if names:
            found[kind] = {
                name: _measured(_of(values, [one == name for one in of]), seed)
                for name in names
            }
    return found


def _measured(values: Mapping[str, np.ndarray], seed: int) -> dict[str, Any]:
    """Mean and interval of each measure; all see the same problems drawn."""
    if not values:
        return {}
    stacked = np.stack(list(values.values()))
    low, high = estimates.bootstrap(stacked, seed=seed)
    columns = zip(
        values, estimates.mean(stacked), low, high, ~np.isnan(stacked), strict=True
    )
    return {
        name: {
            "value": _finite(mean),
            "low": _finite(bottom),
            "high": _finite(top),
            "problems": int(known.sum()),
        }
        for name, mean, bottom, top, known in columns
    }


def _of(values: Mapping[str, np.ndarray], which: Sequence[bool]) -> dict[str, Any]:
    """Some of the problems; majorities are for the whole."""
    at = np.flatnonzero(which)
    return {name: v[at] for name, v in values.items() if not name.startswith("maj@")}


def _lengths(length: np.ndarray) -> dict[str, Any]:
    mean = float(length.mean()) if length.size else math.nan
    shares = {"mean": mean} | {
        name: float(estimates.quantile(length, share))
        for name, share in (("median", 0.5), ("p95", 0.95))
    }
    return {name: _finite(value) for name, value in shares.items()}


def _finite(value: float) -> float | None:
    """What JSON has of a number."""
    return float(value) if math.isfinite(value) else None


def _in_order(name: str) -> tuple[bool, float, str]:
    """Numbers by their size, before words."""
    number = float(name) if name.isdigit() else 0.0
    return not name.isdigit(), number, name


# ----- in words


def table(name: str, found: Mapping[str, Any]) -> str:
    """What is said of a file, for a terminal."""
    problems, completions = found["problems"], found["completions"]
    lines = [f"{name}: {many(problems, 'problem')}"]
    missing = found["missing"]
    share = sum(missing.values()) / max(completions, 1)
    if share > MANY:
        lines.append(
            f"Most completions have no outcome: {share:.1%} of {completions}. The "
            "figures are of the others alone."
        )
    lines += [_head(""), *(_line(key, row) for key, row in found["measures"].items())]
    if "truncated" in found:
        lines.append(_line("truncated", found["truncated"]))
        for kind, row in found["length_tokens"].items():
            if row["mean"] is not None:  # there are some
                said = ", ".join(f"{key} {row[key]:.0f}" for key in row)
                lines.append(f"length of {kind}: {said} tokens")
    if missing:
        said = ", ".join(f"{times} {reason}" for reason, times in missing.items())
        lines.append(f"without an outcome: {share:.1%} ({said})")
    if speed := found.get("speed"):
        lines.append(
            f"speed: {count(speed['completions_per_s'])} completions/s, "
            f"{count(speed['tokens_per_s'])} tokens/s, drawn and graded in "
            f"{duration(speed['seconds'])}; compiling took "
            f"{duration(speed['compile_s'])} more"
        )
    for kind in ("levels", "subjects"):
        groups = found.get(kind, {})
        for key in next(iter(groups.values()), {}):
            lines += ["", _head(f"{key} by {kind[:-1]}")]
            lines += [_line(group, rows[key]) for group, rows in groups.items()]
    return "\n".join(lines)


def _head(name: str) -> str:
    return f"{name:<24} value   95% interval   problems"


def _line(name: str, row: Mapping[str, Any]) -> str:
    value, low, high = (_shown(row[key], ".3f") for key in ("value", "low", "high"))
    return f"{name:<24} {value:>5}  {low:>5} to {high:>5}   {row['problems']:>8}"


def _shown(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)
