"""The page of several runs: pass rates at equal tokens, updates and seconds."""

import functools
from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from curax.runs import page, reading
from curax.runs.drawing import COUNTS, PERCENT, Panel, Picture, Sheet, in_legend, pens
from curax.runs.pictures import rates_at
from curax.runs.reading import Row, Run
from curax.runs.templates import drawn, filled

RATE = "eval/pass_rate"
TOKENS, UPDATES = "rollout/tokens", "update/count"


def spent(rows: Sequence[Row]) -> dict[str, dict[float, float]]:
    """Tokens, updates and seconds up to each step, by axis; means over seeds."""
    return {
        "generated tokens": reading.means(rows, TOKENS),
        "optimizer updates": reading.means(rows, UPDATES),
        "seconds": reading.seconds_so_far(rows),
    }


def render(
    runs: Mapping[str, Run],
    title: str,
    *,
    version: str | None = None,
    links: Sequence[str] = (),
    waiting: Mapping[str, str] | None = None,
) -> bytes:
    """The page as UTF-8.

    Args:
        runs: as they were read, by name, at least one.
        title: headline of the page.
        version: as `templates.filled`.
        links: address of the page of each run, in their order; empty: there are none.
        waiting: by the name of a run that has no rows yet, why not.
    """
    shown, _ = drawn(AXES, runs)
    return filled(
        "curax.runs/runs.html",
        version=version,
        title=title,
        waiting=list((waiting or {}).items()),
        runs=list(_run_rows(runs)),
        links=links,
        names=list(runs),
        settings=list(_differences(runs)),
        **shown,
    )


def _rates(axis: str, runs: Mapping[str, Run]) -> Sheet:
    """Pass rates of all runs over one axis; nothing where nothing was evaluated."""
    marks = []
    for name, pen in pens(runs).items():
        place = spent(runs[name].rows)[axis]
        marks += rates_at(runs[name], RATE, place, in_legend(name), *pen)
    return Sheet([Panel(axis, "pass rate", marks, (PERCENT, COUNTS))])


AXES = [
    Picture(
        axis,
        f"Held-out pass rate over {axis}",
        caption,
        functools.partial(_rates, axis),
    )
    for axis, caption in {
        "generated tokens": "At equal tokens drawn: what a recipe makes of its "
        "rollouts.",
        "optimizer updates": "At equal updates: draws are free here, so more of them "
        "only help.",
        "seconds": "Of all stages, compiling included; compare runs of one machine.",
    }.items()
]


def _run_rows(runs: Mapping[str, Run]) -> Iterator[list[str]]:
    """Name of each run, and what it has reached and spent."""
    for name, run in runs.items():
        last = {
            axis: max(each.values(), default=0.0)
            for axis, each in spent(run.rows).items()
        }
        step, steps = run.rows[-1]["step"], run.config.get("steps")
        yield [
            name,
            _last_rate(run),
            f"{step:,} of {steps:,}" if isinstance(steps, int) else f"{step:,}",
            reading.count_text(last["generated tokens"]),
            reading.count_text(last["optimizer updates"]),
            reading.duration_text(last["seconds"]),
            str(len(run.alarms)),
        ]


def _last_rate(run: Run) -> str:
    """Text of the last pass rate with the half width of its interval."""
    _, values = reading.column(run.rows, RATE)
    if not values.size:
        return "-"
    sample = page.last_values(run, RATE)
    _, half = reading.t_interval(sample) if sample.size else (0.0, np.nan)
    width = f" ± {half:.1%}" if np.isfinite(half) else ""
    return f"{np.nanmean(values[-1]):.1%}{width}"


def _differences(runs: Mapping[str, Run]) -> Iterator[list[str]]:
    """Name of each setting in which the runs differ, and its values."""
    settings = [page.options(run) for run in runs.values()]
    for name in dict.fromkeys(name for each in settings for name in each):
        values = [each.get(name, "-") for each in settings]
        if len(set(values)) > 1:
            yield [name, *values]
