"""The HTML report of a run: summary, pictures, metrics, config and completions.

Completions are untrusted text: they are embedded as JSON that cannot end its script
element, and shown as text, never as markup.
"""

import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from curax.runs import pictures, reading
from curax.runs.drawing import Picture
from curax.runs.reading import (
    Row,
    Run,
    column,
    count_text,
    duration_text,
    is_supervised,
    means,
    plural,
    t_interval,
)
from curax.runs.rows import write_errors
from curax.runs.templates import drawn, filled
from curax.settings.cli import write_whole
from curax.settings.config_paths import flat
from curax.settings.files import json_value

_SIDE = 5  # first and last steps that are compared with the prediction
_MAX_ROLLOUTS = 2_000  # completions on a page
_MAX_WORDS = 400  # tokens shown of a reference answer
_MAX_CHARACTERS = 3_000  # characters shown of a text
_STAGES = (
    *("task", "allocate", "hint", "reflection", "objective", "gate", "downsample"),
    *("correct", "advantage", "modulate", "loss", "aggregate"),
)
_INSIDE = {"hint": "source", "reflection": "weights"}  # field whose function is named
# Pictures of a run of supervised training alone, with their captions.
_SUPERVISED = {
    "warm_start": "The loss of each supervised step, on a batch of its own.",
    "histogram": "Where the prompts that were held out stand after training; those at "
    "0% were never solved in any sample.",
}


def write(run: Path, *, title: str | None = None) -> Path:
    """Write the pictures and report.html of a run folder; old ones are replaced.

    Args:
        run: folder with at least `metrics.jsonl`; the run may be unfinished.
        title: headline of the page; None: the name of the folder.

    Returns:
        Path of the page. Pictures without data in the run are left out, and all of them
        where matplotlib is not installed, which the page says.

    Raises:
        DamagedError: the folder cannot be read.
        NotWrittenError: a file cannot be written.
    """
    text, drawn = render(reading.read(run), title or run.resolve().name)
    path = run / "report.html"
    files = {run / f"{name}.png": data for name, data in drawn.items()} | {path: text}
    for file, data in files.items():
        with write_errors(file):
            write_whole(file, data)
    return path


def render(
    read: Run, title: str, *, version: str | None = None
) -> tuple[bytes, dict[str, bytes]]:
    """The page of a run as UTF-8, and its pictures as PNG by name.

    Args:
        read: the run.
        title: headline of the page.
        version: as `templates.filled`.
    """
    shown, files = drawn(_pictures(read), read)
    lead, rest = _verdict(read)
    steps = min(_SIDE, sum(row["step"] > 0 for row in read.rows))
    page = filled(
        "curax.runs/run.html",
        version=version,
        title=title,
        lead=lead,
        rest=rest,
        alarms=[f"Step {row['step']:,}: {row['text']}" for row in read.alarms],
        recipe=list(_recipe(read)),
        tiles=list(_tiles(read)),
        predicted=list(_comparison_rows(read)),
        sides=plural(steps, "step").removeprefix("1 "),
        metrics=list(_metric_rows(read)),
        config=list(options(read).items()),
        rollouts=json_value(_rollouts(read)),
        supervised=is_supervised(read),
        seeds=_seeds(read),
        **shown,
    )
    return page, files


def _pictures(run: Run) -> list[Picture]:
    """The pictures to draw: all, or those of supervised training."""
    if not is_supervised(run):
        return list(pictures.PICTURES)
    return [
        picture._replace(caption=_SUPERVISED[picture.name])
        for picture in reversed(pictures.PICTURES)  # the loss is the last one
        if picture.name in _SUPERVISED
    ]


# Sentences


def _verdict(run: Run) -> tuple[str, str]:
    """HTML of the change of the pass rate; text on cost and confidence interval."""
    headline, certainty = "No pass rate has been measured yet.", ""
    for metric, name in (
        ("eval/pass_rate", "held-out pass rate"),
        ("eval/greedy_pass_rate", "held-out greedy pass rate"),
        ("outcome/mean", "mean outcome of the completions drawn in training"),
    ):
        rates = means(run.rows, metric)
        if rates:
            headline, certainty = _rate_sentence(run, metric, name, rates)
            break
    rest = " ".join(filter(None, [_cost_sentences(run), certainty.strip()]))
    return headline, rest


def _rate_sentence(
    run: Run, metric: str, name: str, rates: Mapping[float, float]
) -> tuple[str, str]:
    """Sentence about the change of a rate, and one about its interval.

    "rose" and "fell" are said only where the 95% interval excludes 0.
    """
    first, last = min(rates), max(rates)
    start, end = f"<b>{rates[first]:.1%}</b>", f"<b>{rates[last]:.1%}</b>"
    capital, certainty = name[0].upper() + name[1:], ""
    words = _interval_text(run, metric)
    if words and _seeds(run) > 1:
        certainty = f"The last rate is the mean of {_seeds(run)} seeds; the {words}."
    if first == last:
        at = f"at step {last:,.0f}"
        if is_supervised(run):
            at = f"after {plural(run.warm[-1]['step'], 'supervised step')}"
        if words and _seeds(run) == 1:
            certainty = f"The {words}."
        return f"{capital} is {end} {at}.", certainty
    steps = f"in {plural(last - first, 'step')}"
    gains, over = _changes(run, metric)
    mean, half = map(float, t_interval(gains)) if len(gains) else (math.nan, math.nan)
    if len(gains) > 1 and not gains.any():
        return f"{capital} stayed at {end} {steps}.", f"None of {over} moved."
    if not half > 0:
        certainty = certainty or "One seed does not tell how sure that is."
        went = f"went from {start} to {end}" if start != end else f"stayed at {end}"
        return f"{capital} {went} {steps}.", certainty
    low, high = np.clip([mean - half, mean + half], -100, 100)
    paired = (
        ", each asked before and after; other seeds may differ"
        if _seeds(run) == 1
        else ""
    )
    note = f"{{}} points [{_signed_tenths(low)}, {_signed_tenths(high)}]"
    certainty += f" In brackets: the 95% t-interval of the change over {over}{paired}."
    if low > 0 or high < 0:
        note = note.format(f"{'rose' if low > 0 else 'fell'} by {abs(mean):.1f}")
        return f"{capital} {note}, from {start} to {end}, {steps}.", certainty.strip()
    note = note.format(_signed_tenths(mean))
    headline = f"No change that the interval shows: {name} went from {start} to {end} "
    return f"{headline}{steps}, {note}.", certainty.strip()


def _signed_tenths(points: float) -> str:
    """A number with sign and one decimal; 0.0 has no sign."""
    rounded = round(points, 1)
    return f"{rounded:+.1f}" if rounded else "0.0"


def _interval_text(run: Run, metric: str) -> str:
    """Text of the 95% t-interval of the last value of a rate; empty without one.

    The interval is over seeds; with one seed it is over held-out prompts.
    """
    last, over = last_values(run, metric), ""
    if _seeds(run) == 1:
        over = f" over {plural(len(last), 'held-out prompt')}"
    mean, half = map(float, t_interval(last)) if len(last) else (math.nan, math.nan)
    if not half > 0:  # one value, or all are the same
        return ""
    low, high = np.clip([mean - half, mean + half], 0, 1)
    return f"95% t-interval is {low:.1%} to {high:.1%}{over}"


def last_values(run: Run, metric: str) -> np.ndarray:
    """`[n]` values whose mean is the last value of a rate: one per seed.

    With one seed they are those of held-out prompts, empty where these are unknown.
    """
    _, values = column(run.rows, metric)
    if _seeds(run) > 1:
        return values[-1]
    side = _prompt_rates(run, metric, "before" if len(values) == 1 else "after")
    return side[np.isfinite(side)]


def _changes(run: Run, metric: str) -> tuple[np.ndarray, str]:
    """Changes of a rate from first to last value, in points, and over what, as text.

    One per seed; with one seed one per held-out prompt, paired before and after. Empty
    where neither is known.
    """
    if (seeds := _seeds(run)) > 1:
        _, values = column(run.rows, metric)
        change = values[-1] - values[0] if values.shape[-1] > 1 else np.zeros(0)
        over = f"the {seeds} seeds"
    else:
        before, after = (_prompt_rates(run, metric, s) for s in ("before", "after"))
        change = after - before if after.shape == before.shape else np.zeros(0)
        over = f"the {plural(int(np.isfinite(change).sum()), 'held-out prompt')}"
    return 100 * change[np.isfinite(change)], over


def _prompt_rates(run: Run, metric: str, side: str) -> np.ndarray:
    """`[E]` pass rates of held-out prompts behind the first or last value of a metric.

    Empty where evaluation.json is of another evaluation, as after a killed run.
    """
    rates = run.before if side == "before" else run.after
    if metric != "eval/pass_rate" or rates is None:
        return np.zeros(0)
    shown = list(means(run.rows, metric).values())[0 if side == "before" else -1]
    return rates.ravel() if abs(np.nanmean(rates) - shown) < 1e-4 else np.zeros(0)


def _cost_sentences(run: Run) -> str:
    """Sentences about the cost of a run: tokens, updates, time."""
    each = " per seed" if _seeds(run) > 1 else ""
    if is_supervised(run):
        return f"{_loss_sentence(run)} No reinforcement learning followed (steps=0)."
    took = [
        f"{count_text(value)} {name}{'' if value == 1 else 's'}{each}"
        for name, metric in (
            ("generated token", "rollout/tokens"),
            ("optimizer update", "update/count"),
        )
        if (value := _last(run.rows, metric)) is not None
    ]
    if spent := reading.times(run.rows):
        took.append(duration_text(spent.total))
    step, steps = run.rows[-1]["step"], run.config.get("steps")
    unfinished = isinstance(steps, int) and step < steps
    words = (
        f"The run is unfinished, at step {step:,} of {steps:,}. " if unfinished else ""
    )
    if took:
        words += "So far it took " if unfinished else "It took "
        words += " and ".join([*filter(None, [", ".join(took[:-1])]), took[-1]]) + "."
    return words


def _loss_sentence(run: Run) -> str:
    """Sentence about the first and last loss of supervised training."""
    losses = means(run.warm, "warm/loss_nats")
    if not losses:
        return "This is supervised training."
    first, last = min(losses), max(losses)
    return (
        f"This is supervised training: the loss of a batch went from "
        f"{losses[first]:.3f} nats per token at step {first:,.0f} to "
        f"{losses[last]:.3f} at step {last:,.0f}."
    )


def _last(rows: Sequence[Row], name: str) -> float | None:
    """Last value of a metric, a mean over seeds; None without any."""
    return next(reversed(means(rows, name).values()), None)


def _seeds(run: Run) -> int:
    """Number of seeds, the length of any list in the rows."""
    lists = (v for row in run.rows for v in row.values() if isinstance(v, list))
    return len(next(lists, [0]))


def _tiles(run: Run) -> Iterator[tuple[str, str, str]]:
    """(name, value, note) of each key number."""
    rows = run.rows
    each = "per seed" if _seeds(run) > 1 else ""
    for name, metric in (
        ("Held-out pass rate", "eval/pass_rate"),
        ("Greedy pass rate", "eval/greedy_pass_rate"),
    ):
        if rates := means(rows, metric):
            first, last = min(rates), max(rates)
            start = (
                f"from {rates[first]:.1%}" if last > first else f"at step {last:.0f}"
            )
            if is_supervised(run):
                start = "after supervised training"
            certainty = _interval_text(run, metric).replace("t-interval is ", "")
            note = f"{start}; {certainty}" if certainty else start
            yield name, f"{rates[last]:.1%}", note
    if is_supervised(run):
        rows = (run.config.get("warm_start") or {}).get("rows")
        note = f"of {plural(rows, 'trace')} each" if isinstance(rows, int) else ""
        yield "Supervised steps", count_text(run.warm[-1]["step"]), note
        if losses := list(means(run.warm, "warm/loss_nats").values()):
            note = f"nats per token, from {losses[0]:.3f}"
            yield "Loss of a batch", f"{losses[-1]:.3f}", note
        return
    if (tokens := _last(rows, "rollout/tokens")) is not None:
        exact = f"{tokens:,.0f}" if tokens >= 1000 else "in training"
        yield "Generated tokens", count_text(tokens), each or exact
    if (updates := _last(rows, "update/count")) is not None:
        done, steps = rows[-1]["step"], run.config.get("steps")
        where = plural(done, "step")
        if isinstance(steps, int):
            where = f"{done:,.0f} of {plural(steps, 'step')}"
        note = f"{each} in {where}".strip()
        yield "Optimizer updates", count_text(updates), note
    if skipped := sum(means(rows, "update/skipped").values()):
        odd = sum(means(rows, "update/nonfinite").values())
        note = f"{count_text(skipped - odd)} had no gradient, "
        note += f"{count_text(odd)} were not finite"
        yield "Updates skipped", count_text(skipped), f"{note} {each}".strip()
    if dead := means(rows, "group/dead_fraction"):
        shares = [
            f"{np.mean(list(share.values())):.0%} {end}"
            for end in ("failed", "solved")
            if (share := means(rows, f"group/{end}_fraction"))
        ]
        note = ", ".join(shares) or "of all groups"
        yield "Groups that taught nothing", f"{np.mean(list(dead.values())):.0%}", note
    if lengths := list(means(rows, "rollout/length_tokens").values()):
        note = f"tokens, from {lengths[0]:.1f}"
        yield "Completion length", f"{lengths[-1]:.1f}", note
    if entropy := list(means(rows, "policy/entropy_nats").values()):
        note = f"nats per token, from {entropy[0]:.2f}"
        yield "Policy entropy", f"{entropy[-1]:.2f}", note
    if spent := reading.times(rows):
        note = "all of it in first steps, which compile"
        if spent.first < spent.total:
            stage, (_, seconds) = next(iter(spent.stages.items()))
            behind = sum(float(each.sum()) for _, each in spent.stages.values())
            share = seconds.sum() / max(behind, 1e-9)
            note = f"{duration_text(spent.first)} in first steps, which compile; "
            note += f"of the rest {share:.0%} {stage}"
        yield "Time in all stages", duration_text(spent.total), note


# Parts of the page


def _recipe(run: Run) -> Iterator[tuple[str, str]]:
    """(stage, name of its function), in the order of a step."""
    for stage in ("task",) if is_supervised(run) else _STAGES:
        value = run.config.get(stage)
        if isinstance(value, dict) and stage in _INSIDE:
            value = value.get(_INSIDE[stage])
        name = value.get("function") if isinstance(value, dict) else value
        if isinstance(name, str):
            name = name.removeprefix("curax.").removeprefix(f"{stage}.")
            name = name.removeprefix("reflect.")
            yield stage, name.removeprefix("tasks.").removesuffix(".task")
    if is_supervised(run):
        yield "training", "supervised"
    if (seeds := _seeds(run)) > 1:
        yield "seeds", str(seeds)


def _metric_rows(run: Run) -> Iterator[list[str]]:
    """Name, first value, last value and mean of each metric."""
    rows = [*run.rows, *run.warm]
    names = {name for row in rows for name in row} - {"step"}
    if is_supervised(run):
        names -= {"rollout/tokens", "update/count"}  # 0 without RL steps
    for name in sorted(names):
        values = list(means(rows, name).values())
        if values:
            each = values[0], values[-1], float(np.mean(values))
            yield [name, *(f"{x:,.5g}" for x in each)]


def _comparison_rows(run: Run) -> Iterator[list[str]]:
    """Name of each predicted metric; measured, predicted in first and last steps."""
    steps = sorted(row["step"] for row in run.rows if row["step"] > 0)
    sides = {"before": steps[:_SIDE], "after": steps[-_SIDE:]}
    for name in run.expected.get("before", {}):
        measured = means(run.rows, name)
        cells = [name]
        for side, its_steps in sides.items():
            values = [measured[step] for step in its_steps if step in measured]
            predicted = run.expected.get(side, {}).get(name)
            cells += [
                f"{float(np.mean(values)):,.3g}" if values else "",
                f"{predicted:,.3g}" if isinstance(predicted, int | float) else "",
            ]
        yield cells


def options(run: Run) -> dict[str, str]:
    """Text of the value of every option of a run, by dotted name."""
    return {
        name: value if isinstance(value, str) else json.dumps(value)
        for name, value in flat(run.config).items()
        if name
    }


def _rollouts(run: Run) -> dict[str, Any]:
    """JSON of the shown completions; steps, prompts and references are stored once."""
    shown = _shown_rollouts(run.rollouts)
    steps = _numbered(row["step"] for row in shown)
    texts = _numbered(map(_prompt, shown))
    strips = _numbered(map(_reference_weights, shown))
    rows = [
        [
            *(steps[row["step"]], row.get("seed", 0), texts[_prompt(row)]),
            *(
                row.get("prompt_id"),
                row.get("slot"),
                _without_middle(str(row.get("text", ""))),
            ),
            *(len(row.get("tokens") or ()), row.get("outcome")),
            *(row.get("reward"), row.get("advantage")),
            *(strips[_reference_weights(row)], row.get("hint_level")),
        ]
        for row in shown
    ]
    finished = run.rows[-1]["step"] == run.config.get("steps", run.rows[-1]["step"])
    return {
        "steps": list(steps),
        "finished": finished and list(steps)[-1:] == [run.rows[-1]["step"]],
        "prompts": list(texts),
        "strips": list(strips),
        "rows": rows,
        "logged": len(run.rollouts),
        "logged_steps": len({row["step"] for row in run.rollouts}),
    }


def _numbered(values: Iterable[Any]) -> dict[Any, int]:
    """Index of each distinct value in order of first occurrence."""
    return {value: i for i, value in enumerate(dict.fromkeys(values))}


def _shown_rollouts(rollouts: Sequence[Row]) -> list[Row]:
    """Completions of the first, the last and evenly spaced steps, at most 2,000."""
    steps: dict[float, list[Row]] = {}
    for row in rollouts:
        steps.setdefault(row["step"], []).append(row)
    groups = list(steps.values())
    ends = [groups[0], groups[-1]] if len(groups) > 1 else groups
    if sum(map(len, ends)) > _MAX_ROLLOUTS:
        return [row for group in ends for row in group[: _MAX_ROLLOUTS // len(ends)]]
    for n in range(min(len(groups), _MAX_ROLLOUTS), 2, -1):
        places = np.linspace(0, len(groups) - 1, n).round().astype(int)
        picked = [row for i in places for row in groups[i]]
        if len(picked) <= _MAX_ROLLOUTS:
            return picked
    return [row for group in ends for row in group]


def _prompt(row: Row) -> str:
    """The prompt's text, shortened."""
    return _without_middle(str(row.get("prompt", "")))


def _reference_weights(row: Row) -> tuple[tuple[str, float], ...]:
    """(token, weight) pairs of a row's reference answer."""
    words, weights = row.get("reference") or (), row.get("weights") or ()
    pairs = list(zip(words, weights, strict=False))[:_MAX_WORDS]
    return tuple(
        (str(word), round(json_value(weight) or 0.0, 4)) for word, weight in pairs
    )


def _without_middle(text: str) -> str:
    """A text without its middle where it is long; the end holds the answer."""
    extra = len(text) - _MAX_CHARACTERS
    if extra <= 0:
        return text
    head, tail = _MAX_CHARACTERS * 2 // 3, _MAX_CHARACTERS // 3
    return f"{text[:head]}\n[{extra:,} characters left out]\n{text[-tail:]}"
