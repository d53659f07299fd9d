"""Results of a samples file: estimates with intervals, lengths, missing outcomes.

They are computed from the file alone, however many processes wrote it.
"""

import itertools
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from curax.evaluate import estimates
from curax.monitors.attempts import pass_at_k
from curax.runs.reading import count_text, duration_text, finite_mean, plural
from curax.settings import tables
from curax.settings.declared import RIGHT
from curax.settings.files import json_value
from curax.tasks.sources import left_out
from curax.verify import answers, graders

FEW = 3  # smallest k of maj@k; below it the majority is the mean outcome
MANY = 0.5  # share of missing outcomes above which the table has a warning
SUREST = {"": 1.0, " top 10%": 0.1}  # share of completions that vote, by name suffix


class FileSamples(NamedTuple):
    """Graded completions of P problems, n sampled ones each."""

    outcome: np.ndarray  # [P, n] float, NaN where missing
    length: np.ndarray  # [P, n] int, tokens
    finished: np.ndarray  # [P, n] bool
    answer: np.ndarray  # [P, n] int, labels of equal answers of a problem; -1: none
    greedy: np.ndarray  # [P] float, outcome of the greedy one; NaN: missing, not drawn
    missing: Counter[str]  # missing outcomes by reason; of greedy completions only
    # where no others were drawn
    level: Sequence[str | None]  # [P]
    subject: Sequence[str | None]  # [P]
    confidence: Mapping[str, np.ndarray]  # [P, n] float, nats, by score; may be empty
    silent: int = 0  # completions that state no answer, of those that `missing` counts


def collect(blocks: Iterable[Sequence[Mapping[str, Any]]], n: int) -> FileSamples:
    """Rows of a samples file as arrays.

    Args:
        blocks: rows of each problem.
        n: sampled completions per problem.
    """
    outcome, length, finished, answer, greedy = [], [], [], [], []
    missing, level, subject = Counter[str](), [], []
    confidence: dict[str, list[list[float]]] = {}
    silent = 0
    for block in blocks:
        sampled = [row for row in block if not row["greedy"]]
        outcome.append([row["outcome"] for row in sampled])
        length.append([row["length_tokens"] for row in sampled])
        finished.append([row["finished"] for row in sampled])
        texts = [row["answer"] for row in sampled]
        answer.append(estimates.answer_labels(texts, answers.same))
        greedy.append(next((r["outcome"] for r in block if r["greedy"]), None))
        reasons = [row["reason"] for row in sampled or block if row["reason"]]
        silent += reasons.count(graders.NO_ANSWER)
        reasons = [reason for reason in reasons if reason != graders.NO_ANSWER]
        missing.update(reason.partition(":")[0] for reason in reasons)
        for name in sampled[0].get("confidence_nats", ()) if sampled else ():
            each = [row["confidence_nats"][name] for row in sampled]
            confidence.setdefault(name, []).append(each)
        level.append(block[0]["level"])
        subject.append(block[0]["subject"])
    shape = (len(outcome), n)  # a missing outcome, None, becomes NaN
    return FileSamples(
        outcome=np.array(outcome, np.float64).reshape(shape),
        length=np.array(length, np.int64).reshape(shape),
        finished=np.array(finished, bool).reshape(shape),
        answer=np.array(answer, np.int64).reshape(shape),
        greedy=np.array(greedy, np.float64),
        missing=missing,
        level=level,
        subject=subject,
        silent=silent,
        confidence={
            name: np.array(each, np.float64).reshape(shape)
            for name, each in confidence.items()
        },
    )


def per_problem(samples: FileSamples, ks: Sequence[int]) -> dict[str, np.ndarray]:
    """`[P]` values of each measure by name: mean@n, pass@k, maj@k, greedy.

    A completion is right if its outcome is above `RIGHT`; `mean@n` averages fractional
    outcomes. With confidence scores there is a weighted maj@n for each of them.

    Args:
        samples: completions of a file.
        ks: values of k of pass@k and maj@k.
    """
    n, measures = samples.outcome.shape[-1], {}
    graded = np.sum(~np.isnan(samples.outcome), -1)
    right = np.sum(samples.outcome > RIGHT, -1)
    if n:
        measures[f"mean@{n}"] = finite_mean(samples.outcome)
    for k in ks if n else ():
        measures[f"pass@{k}"] = pass_at_k(right, graded, k)
    for k in ks if np.any(samples.answer >= 0) else ():
        if k >= FEW:
            pairs = zip(samples.answer, samples.outcome, strict=True)
            measures[f"maj@{k}"] = np.array([estimates.majority(*p, k) for p in pairs])
    for (score, weight), (end, keep) in itertools.product(
        samples.confidence.items() if n > 1 else (), SUREST.items()
    ):
        each = zip(samples.answer, samples.outcome, weight, strict=True)
        measures[f"maj@{n} {score}{end}"] = np.array(
            [estimates.weighted_majority(*one, keep=keep) for one in each]
        )
    if not np.isnan(samples.greedy).all():
        measures["greedy"] = samples.greedy
    return measures


def summary(samples: FileSamples, ks: Sequence[int], *, seed: int) -> dict[str, Any]:
    """Results of a file as JSON: measures, lengths, missing outcomes, levels, subjects.

    Args:
        samples: completions of a file.
        ks: values of k of pass@k and maj@k.
        seed: seed of the bootstrap.
    """
    values = per_problem(samples, ks)
    result: dict[str, Any] = {
        "problems": len(samples.greedy),
        "completions": samples.outcome.size or samples.greedy.size,
        "measures": _with_intervals(values, seed),
        "missing": dict(sorted(samples.missing.items())),
        "no_answer": samples.silent,
    }
    if samples.outcome.size:
        right, wrong = samples.outcome > RIGHT, samples.outcome <= RIGHT
        subsets = {"all": np.ones_like(right), "right": right, "wrong": wrong}
        result["length_tokens"] = {
            name: _lengths(samples.length[which]) for name, which in subsets.items()
        }
        cut = 1 - finite_mean(samples.finished.astype(np.float64))
        result["truncated"] = _with_intervals({"truncated": cut}, seed)["truncated"]
    for kind, of in (("levels", samples.level), ("subjects", samples.subject)):
        names = sorted({name for name in of if name is not None}, key=_sort_key)
        if names:
            result[kind] = {
                name: _with_intervals(
                    _subset(values, [one == name for one in of]), seed
                )
                for name in names
            }
    return json_value(result)


def _with_intervals(values: Mapping[str, np.ndarray], seed: int) -> dict[str, Any]:
    """Mean, bootstrap interval and number of problems of each measure.

    All measures share the resampled problems.
    """
    if not values:
        return {}
    stacked = np.stack(list(values.values()))
    low, high = estimates.bootstrap(stacked, seed=seed)
    columns = {"value": finite_mean(stacked), "low": low, "high": high}
    columns["problems"] = np.sum(~np.isnan(stacked), -1)
    return {
        name: {key: column[i] for key, column in columns.items()}
        for i, name in enumerate(values)
    }


def _subset(values: Mapping[str, np.ndarray], which: Sequence[bool]) -> dict[str, Any]:
    """The measures on a subset of problems, without majorities."""
    at = np.flatnonzero(which)
    return {name: v[at] for name, v in values.items() if not name.startswith("maj@")}


def _lengths(length: np.ndarray) -> dict[str, Any]:
    """Mean, median and 95th percentile; None without values."""
    mean = float(length.mean()) if length.size else math.nan
    return {"mean": mean} | {
        name: float(estimates.quantile(length, share))
        for name, share in (("median", 0.5), ("p95", 0.95))
    }


def _sort_key(name: str) -> tuple[bool, float, str]:
    """Sort key: numbers by value, then words."""
    number = float(name) if name.isdecimal() else 0.0
    return not name.isdecimal(), number, name


# ----- text


def table(name: str, result: Mapping[str, Any]) -> str:
    """Results of a file as a text table.

    Args:
        name: heading.
        result: results from `summary`, with `speed` if known.
    """
    problems, completions = result["problems"], result["completions"]
    lines = [f"{name}: {plural(problems, 'problem')}"]
    missing = result["missing"]
    share = sum(missing.values()) / max(completions, 1)
    if share > MANY:
        lines.append(
            f"Most completions have no outcome: {share:.1%} of {completions}. The "
            "figures are of the others alone."
        )
    silent = result.get("no_answer", 0) / max(completions, 1)
    if silent > MANY:
        lines.append(f"Warning: {silent:.0%} of the completions {graders.SILENT}.")
    if out := left_out(result.get("left_out", {})):
        lines.append(f"left out of the file: {out}")
    cut = {"truncated": result["truncated"]} if "truncated" in result else {}
    lines += _lines("", result["measures"] | cut)
    if cut:
        for kind, row in result["length_tokens"].items():
            if row["mean"] is not None:  # there are some
                lengths = ", ".join(f"{key} {row[key]:.0f}" for key in row)
                lines.append(f"length of {kind}: {lengths} tokens")
    if missing:
        reasons = ", ".join(f"{times} {reason}" for reason, times in missing.items())
        lines.append(f"without an outcome: {share:.1%} ({reasons})")
    if silent:
        lines.append(f"wrong, without an answer: {silent:.1%}")
    if speed := result.get("speed"):
        lines.append(
            f"speed: {count_text(speed['completions_per_s'])} completions/s, "
            f"{count_text(speed['tokens_per_s'])} tokens/s, drawn and graded in "
            f"{duration_text(speed['seconds'])}; compiling took "
            f"{duration_text(speed['compile_s'])} more"
        )
    for kind in ("levels", "subjects"):
        groups = result.get(kind, {})
        for key in next(iter(groups.values()), {}):
            of_key = {group: rows[key] for group, rows in groups.items()}
            lines += ["", *_lines(f"{key} by {kind[:-1]}", of_key)]
    return "\n".join(lines)


def _lines(name: str, rows: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Lines of a table of measures, their intervals, and problems behind them."""
    columns = {name: "{name}", "value": "{value:.3f}"}
    columns |= {"95% interval": "{low:.3f} to {high:.3f}", "problems": "{problems}"}
    named = ({"name": key, **row} for key, row in rows.items())
    return tables.table(columns, named, least=(24,))
