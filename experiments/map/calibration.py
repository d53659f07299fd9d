"""Calibration of predicted ends: all that were judged beside what was measured.

Command:  python -m experiments.map.calibration

Of the recipes of the map and the arms of the factorial that `course` predicted: where
they end, and where they were measured to, at the settings that tuning took. RLOO, whose
measured end sets the length of the steps, is the baseline and no row. The picture and
the table stand in README.md, beside that of prompts that were never right; the worst
errors of gaps to RLOO are those by which `curax xray --advise` widens its intervals.
"""

import json
from itertools import groupby
from typing import Any, NamedTuple

import numpy as np
from scipy.stats import rankdata

from curax.runs.drawing import LIGHT, canvas, label
from curax.settings.cli import write_file
from curax.settings.tables import markdown
from curax.theory import advice
from experiments.factorial import hints, never
from experiments.factorial import predict as arms
from experiments.factorial import run as factorial
from experiments.factorial import show as effects
from experiments.factorial import show_hints as of_hints
from experiments.map import predict, regimes, show
from experiments.map.show import number

PAGE, PICTURE = show.HERE / "README.md", show.HERE / "calibration.png"


class Judged(NamedTuple):
    """A recipe in a regime, predicted and measured; so is its baseline."""

    page: str
    regime: str
    name: str
    told: tuple[float, float, float]  # low, predicted, high
    rates: np.ndarray  # [R] measured
    base: tuple[float, float]  # predicted, measured

    @property
    def gap(self) -> tuple[float, float]:
        """Gap to the baseline, predicted and measured."""
        return self.told[1] - self.base[0], float(self.rates.mean()) - self.base[1]

    @property
    def error(self) -> float:
        """What the predicted gap missed the measured one by."""
        return abs(self.gap[0] - self.gap[1])

    @property
    def drawn(self) -> bool:
        """Whether a rule decides the draws of a prompt."""
        return "drawn" in self.name or self.name.startswith("ada_seq")

    @property
    def right(self) -> bool:
        """Whether a fixed number is drawn, of which right ones alone train."""
        return self.name.startswith(("right-fixed", "right_only", "raft"))


def every() -> list[Judged]:
    """All rows, by page and regime."""
    found = []
    for regime in regimes.SINGLE:
        told, curves = show.told_by(regime, predict.BY_COURSE), show.curves(regime)
        place = show.budget(regime)
        rates = {name: show.rates_at(curves[name], place) for name in told}
        found += _rows("map", regime, told, rates, "rloo")
    hinted = {hints.REGIME: of_hints.rates("claim")}
    for regime in (*factorial.REGIMES, *hinted):
        path = factorial.RESULTS / regime / "predicted.json"
        told = json.loads(path.read_text()) if path.exists() else {}
        rates = hinted.get(regime) or effects.rates(regime, "claim")
        found += _rows("factorial", regime, told, rates, arms.BASE)
    return found


def _rows(
    page: str, regime: str, told: dict[str, Any], rates: dict[str, Any], base: str
) -> list[Judged]:
    """Rows of a regime that was predicted and has run, but for its baseline."""
    return [
        Judged(
            *(page, regime, name, (own["low"], own["progress"], own["high"])),
            rates[name],
            (told[base]["progress"], float(rates[base].mean())),
        )
        for name, own in told.items()
        if name != base and {name, base} <= rates.keys()
    ]


def kinds(rows: list[Judged]) -> dict[str, list[Judged]]:
    """Rows by what decides draws, and by whether right ones alone train."""
    return {
        "fixed draws, right ones alone": [x for x in rows if x.right],
        "fixed draws, others": [x for x in rows if not (x.right or x.drawn)],
        "drawn until a rule ends": [x for x in rows if x.drawn],
    }


def worst(rows: list[Judged]) -> tuple[float, float]:
    """Worst errors of predicted gaps: at a fixed number of draws, and by a rule."""
    by = {one.drawn: max(x.error for x in rows if x.drawn == one.drawn) for one in rows}
    return by[False], by[True]


def by_regime(rows: list[Judged]) -> list[list[Judged]]:
    """The rows of each regime of each page."""
    return [list(own) for _, own in groupby(rows, lambda one: one[:2])]


def rank(own: list[Judged]) -> float:
    """Spearman's correlation of predicted and measured ends, with the baseline's."""
    ends = [own[0].base, *((one.told[1], float(one.rates.mean())) for one in own)]
    return float(np.corrcoef(*rankdata(ends, axis=0).T)[0, 1])


def table(rows: list[Judged]) -> str:
    """Markdown of how predicted ends fared, by regime; then of all, by kind."""
    body = [
        [f"{own[0].regime}, {own[0].page}", *_cells(own), number(rank(own), "+", 2)]
        for own in by_regime(rows)
    ]
    body += [[name, *_cells(x), ""] for name, x in {"all": rows, **kinds(rows)}.items()]
    head = ["judged", "rows", "error of the gap", "if all ended as RLOO", "worst"]
    return markdown([*head, "inside", "correlation of ranks"], body)


def _cells(own: list[Judged]) -> list[str]:
    """Number, mean error, that of saying nothing, the worst, how many are inside."""
    inside = sum(x.told[0] <= x.rates.mean() <= x.told[2] for x in own)
    means = [np.mean([x.error for x in own]), np.mean([abs(x.gap[1]) for x in own])]
    figures = (*means, max(x.error for x in own))
    return [str(len(own)), *(number(float(x)) for x in figures), str(inside)]


def draw(rows: list[Judged]) -> Any:
    """The picture: predicted ends and gaps with their intervals, beside measured."""
    figure, (ends, gaps) = canvas(LIGHT, (1, 1))
    figure.set_size_inches(9.6, 4.6)
    colors = zip(kinds(rows).items(), (LIGHT.blue, LIGHT.muted, LIGHT.red), strict=True)
    for (name, own), color in colors:
        base, below = np.array([one.base for one in own]).T
        told = np.array([one.told for one in own]).T
        measured = np.array([one.rates.mean() for one in own])
        for axes, x, y in (
            (ends, told, measured),
            (gaps, told - base, measured - below),
        ):
            axes.hlines(y, x[0], x[2], color=color, linewidth=0.8, alpha=0.5)
            axes.plot(x[1], y, "o", color=color, markersize=4, label=name)
    for error in (0, advice.WORST, advice.WORST_DRAWN):
        for axes in (ends, gaps):
            for by in {error, -error}:
                line = {"linewidth": 0.8, "linestyle": ":" if error else "-"}
                axes.axline((0, by), slope=1, color=LIGHT.muted, **line)
    ends.set(xlim=(0, 1), ylim=(0, 1))
    gaps.set(xlim=(-0.3, 0.5), ylim=(-0.2, 0.3))
    label(ends, LIGHT, "predicted end", "measured end")
    gaps.set_xlabel("predicted gap to RLOO", color=LIGHT.ink, fontsize=10)
    gaps.set_ylabel("measured gap to RLOO", color=LIGHT.ink, fontsize=10)
    return figure


def main() -> None:
    """Renew the tables of the page; draw the picture."""
    rows = every()
    tables = table(rows), never.table()
    write_file(PAGE, effects.renewed(PAGE.read_text("utf-8"), tables).encode())
    draw(rows).savefig(PICTURE, metadata={"Software": None})


if __name__ == "__main__":
    main()
