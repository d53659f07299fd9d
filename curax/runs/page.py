"""The pictures of a run, and one HTML page that tells it.

The page stands alone: pictures, styles and completions are inside, nothing is loaded
from anywhere, so it can be mailed or published as it is. Completions are text that a
model made up: they travel as JSON that cannot end its script element, and the page
shows them as text, never as markup.
"""

import base64
import html
import importlib.resources
import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from curax.runs import pictures, record
from curax.runs.record import (
    Row,
    Run,
    column,
    count,
    duration,
    interval,
    many,
    means,
    supervised,
)
from curax.settings.cli import write_whole

_SIDE = 5  # steps at either end of a run that are compared with the prediction
_MOST_ROLLOUTS = 2_000  # completions on a page
_MOST_WORDS = 400  # of a reference answer that are shown
_MOST_CHARACTERS = 3_000  # of a text on the page
_STAGES = (
    *("task", "allocate", "hint", "reflection", "objective", "gate", "downsample"),
    *("correct", "advantage", "modulate", "loss", "aggregate"),
)
_INSIDE = {"hint": "source", "reflection": "weights"}  # the function that names it
# What is drawn of a run that is supervised training alone, and how to read it.
_SUPERVISED = {
    "warm_start": "The loss of each supervised step, on a batch of its own.",
    "histogram": "Where the prompts that were held out stand after training; those at "
    "0% were never solved in any sample.",
}


def write(run: Path, *, title: str | None = None) -> Path:
    """Draw the pictures of a run folder and write its page; old ones are replaced.

    Args:
        run: a folder with at least `metrics.jsonl`; the run may be unfinished.
        title: headline of the page; by default the name of the folder.

    Returns:
        The path of the page, `report.html` in the folder. A picture is left out where
        the run has no numbers for it.

    Raises:
        RecordError: in one sentence, if the folder cannot be read.
    """
    told = record.read(run)
    figures = []
    for picture in _pictures(told):
        light = pictures.png(picture, told, pictures.LIGHT)
        dark = pictures.png(picture, told, pictures.DARK)
        if light and dark:
            write_whole(run / f"{picture.name}.png", light)
            figures.append(_figure(picture, light, dark))
    parts = {
        "title": html.escape(title or run.resolve().name),
        "recipe": "".join(_recipe(told)),
        "verdict": _verdict(told),
        "alarms": "\n".join(
            f'<p class="alarm">Step {row["step"]:,}: {html.escape(row["text"])}</p>'
            for row in told.alarms
        ),
        "tiles": "\n".join(_tiles(told)),
        "figures": "\n".join(figures),
        "metrics": "\n".join(_metrics(told)),
        "expected": _expected(told),
        "config": "\n".join(_config(told.config)),
        "rollouts": _json(_rollouts(told)),
        "footer": "".join(_footer(told)),
    }
    file = importlib.resources.files("curax.runs") / "page.html.tmpl"
    template = file.read_text("utf-8")
    if supervised(told):
        template = re.sub(
            "<!-- completions -->.*<!-- end -->", "", template, flags=re.S
        )
    page = re.sub(r"\{\{(\w+)\}\}", lambda name: parts[name[1]], template)
    path = run / "report.html"
    write_whole(path, page.encode("utf-8", "replace"))
    return path


def _pictures(run: Run) -> list[pictures.Picture]:
    """Those that can tell of a run; each is left out where it has no numbers."""
    if not supervised(run):
        return list(pictures.PICTURES)
    by_name = {picture.name: picture for picture in pictures.PICTURES}
    return [
        by_name[name]._replace(caption=caption)
        for name, caption in _SUPERVISED.items()
        if name in by_name
    ]


# The run in words


def _verdict(run: Run) -> str:
    """What came of the run, in a sentence; then what it took, and how sure it is."""
    headline, sure = "No pass rate has been measured yet.", ""
    for metric, name in (
        ("eval/pass_rate", "held-out pass rate"),
        ("eval/greedy_pass_rate", "held-out greedy pass rate"),
        ("outcome/mean", "mean outcome of the completions drawn in training"),
    ):
        rates = means(run.rows, metric)
        if rates:
            headline, sure = _told(run, metric, name, rates)
            break
    rest = " ".join(filter(None, [_cost(run), sure.strip()]))
    return f'<p class="lead">{headline}</p>\n<p>{rest}</p>'


def _told(
    run: Run, metric: str, name: str, rates: Mapping[float, float]
) -> tuple[str, str]:
    """What became of a rate, and how sure that is; the interval chooses the words."""
    first, last = min(rates), max(rates)
    start, end = f"<b>{rates[first]:.1%}</b>", f"<b>{rates[last]:.1%}</b>"
    capital, sure = name[0].upper() + name[1:], ""
    words = _interval(run, metric)
    if words and _seeds(run) > 1:
        sure = f"The last rate is the mean of {_seeds(run)} seeds; the {words}."
    if first == last:
        at = f"at step {last:,.0f}"
        if supervised(run):
            at = f"after {many(run.warm[-1]['step'], 'supervised step')}"
        if words and _seeds(run) == 1:
            sure = f"The {words}."
        return f"{capital} is {end} {at}.", sure
    steps = f"in {many(last - first, 'step')}"
    gains, over = _gains(run, metric)
    mean, half = map(float, interval(gains)) if len(gains) else (math.nan, math.nan)
    if len(gains) > 1 and not gains.any():
        return f"{capital} stayed at {end} {steps}.", f"None of {over} moved."
    if not half > 0:
        sure = sure or "One seed does not tell how sure that is."
        went = f"went from {start} to {end}" if start != end else f"stayed at {end}"
        return f"{capital} {went} {steps}.", sure
    low, high = np.clip([mean - half, mean + half], -100, 100)
    paired = (
        ", each asked before and after; other seeds may differ"
        if _seeds(run) == 1
        else ""
    )
    note = f"{{}} points [{_signed(low)}, {_signed(high)}]"
    sure += f" In brackets: the 95% t-interval of the change over {over}{paired}."
    if low > 0 or high < 0:
        note = note.format(f"{'rose' if low > 0 else 'fell'} by {abs(mean):.1f}")
        return f"{capital} {note}, from {start} to {end}, {steps}.", sure.strip()
    note = note.format(_signed(mean))
    headline = f"No change that the interval shows: {name} went from {start} to {end} "
    return f"{headline}{steps}, {note}.", sure.strip()


def _signed(points: float) -> str:
    """To a tenth, with its sign; nothing has none."""
    rounded = round(points, 1)
    return f"{rounded:+.1f}" if rounded else "0.0"


def _interval(run: Run, metric: str) -> str:
    """The 95% t-interval of the last value of a rate, empty where nothing tells it.

    It is over seeds; of one seed over the held-out prompts, each with its pass rate.
    """
    _, values = column(run.rows, metric)
    last, over = values[-1], ""
    if _seeds(run) == 1:
        side = _of_prompts(run, metric, "before" if len(values) == 1 else "after")
        last = side[np.isfinite(side)]
        over = f" over {many(len(last), 'held-out prompt')}"
    mean, half = map(float, interval(last)) if len(last) else (math.nan, math.nan)
    if not half > 0:  # one value, or all are the same
        return ""
    low, high = np.clip([mean - half, mean + half], 0, 1)
    return f"95% t-interval is {low:.1%} to {high:.1%}{over}"


def _gains(run: Run, metric: str) -> tuple[np.ndarray, str]:
    """Changes of a rate in points, first to last, and over what they are.

    Over the seeds; of one seed over the held-out prompts, which are the same before and
    after. Nothing where neither is known.
    """
    if (seeds := _seeds(run)) > 1:
        _, values = column(run.rows, metric)
        found = values[-1] - values[0] if values.shape[-1] > 1 else np.zeros(0)
        over = f"the {seeds} seeds"
    else:
        before, after = (_of_prompts(run, metric, side) for side in ("before", "after"))
        found = after - before if after.shape == before.shape else np.zeros(0)
        over = f"the {many(int(np.isfinite(found).sum()), 'held-out prompt')}"
    return 100 * found[np.isfinite(found)], over


def _of_prompts(run: Run, metric: str, side: str) -> np.ndarray:
    """Pass rates behind the first (before) or last (after) value of a metric.

    One per held-out prompt; none where the file is not of that evaluation, as where a
    run was killed behind its last one.
    """
    rates = run.before if side == "before" else run.after
    if metric != "eval/pass_rate" or rates is None:
        return np.zeros(0)
    shown = list(means(run.rows, metric).values())[0 if side == "before" else -1]
    return rates.ravel() if abs(np.nanmean(rates) - shown) < 1e-4 else np.zeros(0)


def _cost(run: Run) -> str:
    """What the run has taken until its last row."""
    each = " per seed" if _seeds(run) > 1 else ""
    if supervised(run):
        return f"{_losses(run)} No reinforcement learning followed (steps=0)."
    took = [
        f"{count(value)} {name}{'' if value == 1 else 's'}{each}"
        for name, value in (
            ("generated token", _last(run.rows, "rollout/tokens")),
            ("optimizer update", _last(run.rows, "update/count")),
        )
        if value is not None
    ]
    if spent := record.times(run.rows):
        took.append(duration(spent.total))
    step, steps = run.rows[-1]["step"], run.config.get("steps")
    unfinished = isinstance(steps, int) and step < steps
    words = (
        f"The run is unfinished, at step {step:,} of {steps:,}. " if unfinished else ""
    )
    if took:
        words += "So far it took " if unfinished else "It took "
        words += " and ".join([*filter(None, [", ".join(took[:-1])]), took[-1]]) + "."
    return words


def _losses(run: Run) -> str:
    """What became of the loss of supervised training."""
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
    """The last value of a metric, its mean over seeds."""
    return next(reversed(means(rows, name).values()), None)


def _seeds(run: Run) -> int:
    lists = (v for row in run.rows for v in row.values() if isinstance(v, list))
    return len(next(lists, [0]))


def _tiles(run: Run) -> Iterator[str]:
    """The key numbers."""
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
            if supervised(run):
                start = "after supervised training"
            sure = _interval(run, metric).replace("t-interval is ", "")
            note = f"{start}; {sure}" if sure else start
            yield _tile(name, f"{rates[last]:.1%}", note)
    if supervised(run):
        rows = (run.config.get("warm_start") or {}).get("rows")
        note = f"of {many(rows, 'trace')} each" if isinstance(rows, int) else ""
        yield _tile("Supervised steps", count(run.warm[-1]["step"]), note)
        if losses := list(means(run.warm, "warm/loss_nats").values()):
            note = f"nats per token, from {losses[0]:.3f}"
            yield _tile("Loss of a batch", f"{losses[-1]:.3f}", note)
        return
    if (tokens := _last(rows, "rollout/tokens")) is not None:
        exact = f"{tokens:,.0f}" if tokens >= 1000 else "in training"
        yield _tile("Generated tokens", count(tokens), each or exact)
    if (updates := _last(rows, "update/count")) is not None:
        done, steps = rows[-1]["step"], run.config.get("steps")
        where = many(done, "step")
        if isinstance(steps, int):
            where = f"{done:,.0f} of {many(steps, 'step')}"
        note = f"{each} in {where}".strip()
        yield _tile("Optimizer updates", count(updates), note)
    if skipped := sum(means(rows, "update/skipped").values()):
        odd = sum(means(rows, "update/nonfinite").values())
        note = f"{count(skipped - odd)} had no gradient, {count(odd)} were not finite"
        yield _tile("Updates skipped", count(skipped), f"{note} {each}".strip())
    if dead := means(rows, "group/dead_fraction"):
        shares = [
            f"{np.mean(list(share.values())):.0%} {end}"
            for end in ("failed", "solved")
            if (share := means(rows, f"group/{end}_fraction"))
        ]
        note = ", ".join(shares) or "of all groups"
        yield _tile(
            "Groups that taught nothing", f"{np.mean(list(dead.values())):.0%}", note
        )
    if lengths := list(means(rows, "rollout/length_tokens").values()):
        note = f"tokens, from {lengths[0]:.1f}"
        yield _tile("Completion length", f"{lengths[-1]:.1f}", note)
    if entropy := list(means(rows, "policy/entropy_nats").values()):
        note = f"nats per token, from {entropy[0]:.2f}"
        yield _tile("Policy entropy", f"{entropy[-1]:.2f}", note)
    if spent := record.times(rows):
        note = "all of it in first steps, which compile"
        if spent.first < spent.total:
            stage, (_, seconds) = next(iter(spent.stages.items()))
            behind = sum(float(each.sum()) for _, each in spent.stages.values())
            share = seconds.sum() / max(behind, 1e-9)
            note = f"{duration(spent.first)} in first steps, which compile; of the rest"
            note += f" {share:.0%} {stage}"
        yield _tile("Time in all stages", duration(spent.total), note)


# The parts of the page


def _tile(name: str, value: str, note: str) -> str:
    name, value, note = map(html.escape, (name, value, note))
    return f"<div><span>{name}</span><b>{value}</b><small>{note}</small></div>"


def _figure(picture: pictures.Picture, light: bytes, dark: bytes) -> str:
    shown, shaded = (
        f"data:image/png;base64,{base64.b64encode(png).decode()}"
        for png in (light, dark)
    )
    return (
        '<figure><picture><source media="(prefers-color-scheme: dark)" '
        f'srcset="{shaded}"><img src="{shown}" width="768" height="432" '
        f'alt="{html.escape(picture.title)}"></picture>'
        f"<figcaption>{html.escape(picture.caption)}</figcaption></figure>"
    )


def _recipe(run: Run) -> Iterator[str]:
    """The function of each stage, in the order in which a batch meets them."""
    for stage in ("task",) if supervised(run) else _STAGES:
        chosen = run.config.get(stage)
        if isinstance(chosen, dict) and stage in _INSIDE:
            chosen = chosen.get(_INSIDE[stage])
        name = chosen.get("function") if isinstance(chosen, dict) else chosen
        if isinstance(name, str):
            name = name.removeprefix("curax.").removeprefix(f"{stage}.")
            name = name.removeprefix("reflect.")
            name = html.escape(name.removeprefix("tasks.").removesuffix(".task"))
            yield f"<li><span>{stage}</span> {name}</li>"
    if supervised(run):
        yield "<li><span>training</span> supervised</li>"
    if (seeds := _seeds(run)) > 1:
        yield f"<li><span>seeds</span> {seeds}</li>"


def _metrics(run: Run) -> Iterator[str]:
    """A table row per metric: its name, its first and last value, its mean."""
    rows = [*run.rows, *run.warm]
    names = {name for row in rows for name in row} - {"step"}
    if supervised(run):
        names -= {"rollout/tokens", "update/count"}  # none, as there were no steps
    for name in sorted(names):
        values = list(means(rows, name).values())
        if values:
            cells = (
                f"{x:,.5g}" for x in (values[0], values[-1], float(np.mean(values)))
            )
            numbers = "".join(f"<td>{cell}</td>" for cell in cells)
            yield f"<tr><th>{html.escape(name)}</th>{numbers}</tr>"


def _expected(run: Run) -> str:
    """What was measured beside what was predicted; nothing where nothing was."""
    rows = "\n".join(_compared(run))
    if not rows:
        return ""
    sides = many(
        min(_SIDE, sum(row["step"] > 0 for row in run.rows)), "step"
    ).removeprefix("1 ")
    return (
        "<h2>Measured and predicted</h2>\n"
        f"<p>Means over the first and the last {sides}, beside what the stages "
        "of this recipe make of the held-out pass rates before and after.</p>\n"
        '<section class="panel"><table class="values"><thead><tr><th>per prompt</th>'
        "<th>first</th><th>predicted</th><th>last</th><th>predicted</th></tr></thead>"
        f"<tbody>\n{rows}\n</tbody></table></section>\n"
    )


def _compared(run: Run) -> Iterator[str]:
    """A table row per quantity: as measured and as predicted, early and late."""
    steps = sorted(row["step"] for row in run.rows if row["step"] > 0)
    sides = {"before": steps[:_SIDE], "after": steps[-_SIDE:]}
    for name in run.expected.get("before", {}):
        measured = means(run.rows, name)
        cells = []
        for side, chosen in sides.items():
            seen = [measured[step] for step in chosen if step in measured]
            asked = run.expected.get(side, {}).get(name)
            cells += [
                f"{float(np.mean(seen)):,.3g}" if seen else "",
                f"{asked:,.3g}" if isinstance(asked, int | float) else "",
            ]
        numbers = "".join(f"<td>{cell}</td>" for cell in cells)
        yield f"<tr><th>{html.escape(name)}</th>{numbers}</tr>"


def _footer(run: Run) -> Iterator[str]:
    """Words of the page, explained."""
    yield "Written by curax from the files of the run folder."
    if not supervised(run):
        yield " A group is the completions of one prompt."
    if _seeds(run) > 1:
        yield " Rates and lengths are means over the seeds."


def _config(config: Mapping[str, Any]) -> Iterator[str]:
    for name, value in _flat(config, ""):
        name, value = html.escape(name), html.escape(value)
        yield f"<tr><th>{name}</th><td>{value}</td></tr>"


def _flat(value: Any, name: str) -> Iterator[tuple[str, str]]:
    """Dotted name and value of every setting; a function's name stands at its place."""
    if isinstance(value, dict) and value:
        for key, child in value.items():
            at = name if key == "function" and name else f"{name}.{key}".lstrip(".")
            yield from _flat(child, at)
    elif isinstance(value, list) and any(isinstance(child, dict) for child in value):
        for i, child in enumerate(value):
            yield from _flat(child, f"{name}.{i}")
    elif name:
        yield name, value if isinstance(value, str) else json.dumps(value)


def _rollouts(run: Run) -> dict[str, Any]:
    """The completions that the page shows, and how many it leaves out."""
    chosen = _chosen(run.rollouts)
    steps = {step: i for i, step in enumerate(dict.fromkeys(r["step"] for r in chosen))}
    texts = {text: i for i, text in enumerate(dict.fromkeys(map(_prompt, chosen)))}
    strips = {strip: i for i, strip in enumerate(dict.fromkeys(map(_strip, chosen)))}
    rows = [
        [
            *(steps[row["step"]], row.get("seed", 0), texts[_prompt(row)]),
            *(row.get("prompt_id"), row.get("slot"), _cut(str(row.get("text", "")))),
            *(len(row.get("tokens") or ()), _finite(row.get("outcome"))),
            *(_finite(row.get("reward")), _finite(row.get("advantage"))),
            *(strips[_strip(row)], row.get("hint_level")),
        ]
        for row in chosen
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


def _chosen(rollouts: Sequence[Row]) -> list[Row]:
    """The first and the last step, and evenly spaced others as far as there is room."""
    steps: dict[float, list[Row]] = {}
    for row in rollouts:
        steps.setdefault(row["step"], []).append(row)
    groups = list(steps.values())
    ends = [groups[0], groups[-1]] if len(groups) > 1 else groups
    if sum(map(len, ends)) > _MOST_ROLLOUTS:
        return [row for group in ends for row in group[: _MOST_ROLLOUTS // len(ends)]]
    for n in range(min(len(groups), _MOST_ROLLOUTS), 2, -1):
        places = np.linspace(0, len(groups) - 1, n).round().astype(int)
        picked = [row for i in places for row in groups[i]]
        if len(picked) <= _MOST_ROLLOUTS:
            return picked
    return [row for group in ends for row in group]


def _prompt(row: Row) -> str:
    return _cut(str(row.get("prompt", "")))


def _strip(row: Row) -> tuple[tuple[str, float], ...]:
    """The words of a reference answer, each with its weight."""
    words, weights = row.get("reference") or (), row.get("weights") or ()
    pairs = list(zip(words, weights, strict=False))[:_MOST_WORDS]
    return tuple(
        (str(word), round(_finite(weight) or 0.0, 4)) for word, weight in pairs
    )


def _cut(text: str) -> str:
    """A long text without its middle: the answer stands at the end."""
    extra = len(text) - _MOST_CHARACTERS
    if extra <= 0:
        return text
    head, tail = _MOST_CHARACTERS * 2 // 3, _MOST_CHARACTERS // 3
    return f"{text[:head]}\n[{extra:,} characters left out]\n{text[-tail:]}"


def _finite(value: Any) -> float | None:
    return value if value is not None and math.isfinite(value) else None


def _json(value: Any) -> str:
    """JSON for the inside of a script element, which no `</script>` in it can end."""
    text = json.dumps(value, separators=(",", ":"), allow_nan=False)
    return text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")
