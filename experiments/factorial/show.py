"""Tables and picture of what is measured of the factorial, in its page.

Command:  python -m experiments.factorial.show

An effect is, with s = +1 where a choice is made and -1 where it is not,

    of one      sum_arms s r / 4
    of a pair   sum_arms s s' r / 2, how much more one does where the other is made
    of all      sum_arms s s' s'' r, how much more a pair does where the third is

and at a combination of the others, r of the arm where it is made less r of its twin;
of every seed, r its held-out pass rate at equal tokens. Intervals are those of t, over
seeds, widened by Holm's procedure over all effects of the page.
"""

import itertools
import json
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from scipy import stats

from curax.compare import analysis, statistics
from curax.runs.drawing import LIGHT, grid
from curax.settings.cli import write_file
from curax.settings.tables import markdown
from curax.theory import predict
from experiments.factorial import greedy, run, single
from experiments.factorial.run import ARMS, EFFECTS, REGIMES, Piece
from experiments.map import show
from experiments.map.show import between, number, plus_minus

HERE = Path(__file__).parent
RATES = (0.01, 0.05, 0.1, 0.5, 0.9)
KINDS = ("claim", "long")
MADE = ("right", "drawn", "log")  # + of each choice
NAMES = tuple(EFFECTS)[:3]
UPDATED = "updates", "rate"
ACROSS = 3  # panels of the picture
NAMED = dict(zip(analysis.RATES, ("draws", "greedy"), strict=True))
CENTRED, RIGHT = single.ARMS
CONTROL = "right for RLOO, both at n = 2, 1e-3, four times the tokens"
# Gaps where one draw is taken of each prompt; "at n" is by the n that tuning took.
SINGLE = {
    "right at 1, for right at n": (RIGHT, run.PLAIN[1]),
    "right at 1, for centred at 1": (RIGHT, CENTRED),
    "right at 1, for RLOO at n": (RIGHT, run.PLAIN[0]),
    "centred at 1, for RLOO at n": (CENTRED, run.PLAIN[0]),
}


class Effect(NamedTuple):
    """A choice, or several together, in a regime."""

    regime: str
    kind: str  # claim or long
    name: str
    of_seed: np.ndarray  # [R]
    level: float = 0.95  # of Holm's procedure, over all effects of the page

    @property
    def p(self) -> float:
        """Of a t-test, by itself."""
        t = abs(self.of_seed.mean()) / stats.sem(self.of_seed)
        return float(2 * stats.t.sf(t, len(self.of_seed) - 1))

    @property
    def mean(self) -> tuple[float, float]:
        """The mean, and half of its interval."""
        quantile = stats.t.ppf((1 + self.level) / 2, len(self.of_seed) - 1)
        return float(self.of_seed.mean()), float(quantile * stats.sem(self.of_seed))

    @property
    def middle(self) -> tuple[float, float, float]:
        """The interquartile mean with its interval."""
        found = statistics.center([self.of_seed])
        return show.numbers(found.value, found.interval(self.level))


def measured(regime: str, kind: str) -> list[str]:
    """The arms of a regime at a horizon, where all are measured."""
    arms = run.asked(regime, kind)
    return arms if all(Piece(regime, kind, x).path.exists() for x in arms) else []


def read(regime: str, kind: str, arm: str) -> dict[str, Any]:
    """A piece that is measured."""
    return load(Piece(regime, kind, arm).path)


def load(path: Path) -> dict[str, Any]:
    """What the file of a piece holds."""
    return json.loads(path.read_text())


def rates(regime: str, kind: str, at: str = "") -> dict[str, np.ndarray]:
    """`[R]` held-out pass rates of each arm where another kind ends, or its own."""
    place = run.tokens(regime, at or kind)
    arms = measured(regime, kind)
    return {arm: run.ends(read(regime, kind, arm), place) for arm in arms}


def effect(found: dict[str, np.ndarray], choices: tuple[int, ...]) -> np.ndarray:
    """`[R]` of each seed, of all eight arms."""
    total: Any = 0
    for arm, own in found.items():
        signs = [1 if arm.split("-")[i] == MADE[i] else -1 for i in choices]
        total += np.prod(signs) * own
    return total * 2 ** len(choices) / len(found)


def twins(found: Iterable[str]) -> dict[str, tuple[str, str]]:
    """Arms that differ in one choice alone, by the choice and what they share."""
    there, pairs = list(found), {}
    for i, (name, made) in enumerate(zip(NAMES, MADE, strict=True)):
        for arm in there:
            parts = arm.split("-")
            twin = "-".join((*parts[:i], run.CHOICES[i][0], *parts[i + 1 :]))
            if parts[i] == made and twin in there:
                rest = " ".join((*parts[:i], *parts[i + 1 :]))
                pairs[f"{name}, {rest}"] = arm, twin
    return pairs


def apart(found: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """`[R]` of each choice at each combination of the others: an arm less its twin."""
    return {
        name: found[arm] - found[twin] for name, (arm, twin) in twins(found).items()
    }


def by_updates(
    regime: str, kind: str, both: Sequence[Mapping[str, Any]]
) -> tuple[float, float]:
    """Gap of two histories where each seed has made as many updates of both.

    With half of its 95 % interval, which is none of the family.
    """
    place = run.tokens(regime, kind)
    gap = at_updates(both, [run.ends(own, place, "updates") for own in both])
    return Effect(regime, kind, "", gap).mean


def at_updates(both: Sequence[Mapping[str, Any]], made: Sequence[Any]) -> np.ndarray:
    """`[R]` gaps of two histories where each seed has made as many updates of both.

    Args:
        both: histories of two arms, with the same seeds.
        made: `[R]` updates of each at equal tokens; the fewer are the place.
    """
    fewer = np.min(made, 0)
    ours, other = (
        np.array(
            [
                np.interp(n, at, rate)
                for n, at, rate in zip(
                    fewer, *(np.array(own[x], float).T for x in UPDATED), strict=True
                )
            ]
        )
        for own in both
    )
    return ours - other


def effects() -> list[Effect]:
    """All effects of the page: one family."""
    found = []
    for kind in KINDS:
        for regime in REGIMES:
            if not (own := rates(regime, kind)):
                continue
            named = EFFECTS if len(own) == len(ARMS) else {}
            every = {name: effect(own, choices) for name, choices in named.items()}
            for name, gap in (every | apart(own)).items():
                found.append(Effect(regime, kind, name, gap))
    for regime in single_regimes():
        for name, pair in SINGLE.items():
            ours, other = (
                run.ends(own, run.tokens(regime, "claim"))
                for own in singles(regime, pair)
            )
            found.append(Effect(regime, "single", name, ours - other))
    if single.path(single.CONTROL).exists():
        place = run.tokens(*single.CONTROL[:2])
        ours, other = (run.ends(own, place) for own in controls())
        found.append(Effect(single.CONTROL.regime, "control", CONTROL, ours - other))
    return family(found)


def single_regimes() -> list[str]:
    """Regimes in which all of one draw of each prompt is measured."""
    every = single.pieces()
    return [
        regime
        for regime in single.REGIMES
        if all(single.path(x).exists() for x in every if x.regime == regime)
    ]


def singles(regime: str, arms: Iterable[str]) -> list[dict[str, Any]]:
    """Claims of one draw of each prompt, and of what was run beside it."""
    return [load(single.path(Piece(regime, "claim", arm))) for arm in arms]


def controls() -> list[dict[str, Any]]:
    """Right ones alone and the control of four times the tokens, of one setting."""
    regime, kind, _ = single.CONTROL
    return [read(regime, kind, run.PLAIN[1]), load(single.path(single.CONTROL))]


def single_tables(every: list[Effect]) -> list[str]:
    """Markdown of one draw of each prompt: arms and what tuning saw, and gaps."""
    tuned = sorted({*run.RATES, *run.BEYOND.values()} - {1e-2})
    rows, gaps, arms = [], [], (*single.ARMS, *run.PLAIN)
    for regime in single_regimes():
        for arm, own in zip(arms, singles(regime, arms), strict=True):
            seen = single.trials(regime, arm) if arm in single.ARMS else []
            by = {setting.rate: rate for setting, rate in seen}
            cells = [number(by[rate]) if rate in by else "" for rate in tuned]
            setting = run.Setting(*own["settings"][0])
            place = run.tokens(regime, "claim")
            ends = [run.ends(own, place, what).mean() for what in UPDATED]
            cells += [f"{setting.value:g}", power(setting.rate), number(ends[1])]
            rows.append([regime, arm.split("-")[0], *cells, f"{ends[0]:.0f}"])
    for one in every:
        if one.kind in ("single", "control"):
            kind = "claim" if one.kind == "single" else "long"
            both = (
                controls() if kind == "long" else singles(one.regime, SINGLE[one.name])
            )
            alike = plus_minus(by_updates(one.regime, kind, both))
            cells = told(one), between(one.middle, "+"), alike
            gaps.append([one.regime, one.name, *cells, own_gap(one.regime, kind, both)])
    for regime in single_regimes():  # asked afterwards, and none of the family
        both = singles(regime, (run.PLAIN[1], CENTRED))
        of = partial(own_gap, regime, "claim", both)
        cells = of("rate"), "", "", of()
        gaps.append([regime, "right at n, for centred at 1, by itself", *cells])
    head = ["regime", "credit", *map(power, tuned), "n", "rate", "mean", "updates"]
    first = ["regime", "n = 1; a control", "of means", "interquartile mean"]
    first += ["at as many updates", "greedily, by itself"]
    return [markdown(head, rows), markdown(first, gaps)]


def own_gap(
    regime: str, kind: str, both: Sequence[Mapping[str, Any]], what: str = "greedy"
) -> str:
    """Text of the gap of two histories by itself; empty where it was not measured."""
    if not all(own.get(what) for own in both):
        return ""
    ours, other = (run.ends(own, run.tokens(regime, kind), what) for own in both)
    return plus_minus(Effect(regime, kind, "", ours - other).mean)


def power(rate: float) -> str:
    """A learning rate, as tables have it."""
    return f"{rate:.0e}".replace("e-0", "e-")


def family(found: list[Effect]) -> list[Effect]:
    """The same, each at the level that Holm's procedure gives it among them."""
    levels = statistics.holm([one.p for one in found])
    return [one._replace(level=x) for one, x in zip(found, levels, strict=True)]


def effect_table(every: list[Effect], kind: str) -> str:
    """Markdown of the effects at a horizon; what is certain is bold."""
    body = []
    for one in every:
        if one.kind == kind and one.name in EFFECTS:
            body.append([one.regime, one.name, told(one), between(one.middle, "+")])
    return markdown(["regime", "effect", "of means", "interquartile mean"], body)


def told(one: Effect) -> str:
    """The mean of an effect with half of its interval, bold where that leaves out 0."""
    mean, half = one.mean
    said = plus_minus((mean, half))
    return f"**{said}**" if abs(mean) > half else said


def apart_table(every: list[Effect], kind: str) -> str:
    """Markdown of each choice at each combination of the others."""
    head = ["regime", "choice", "at", "of means", "interquartile mean"]
    body = []
    for one in every:
        if one.kind == kind and one.name not in EFFECTS:
            pair = twins(measured(one.regime, kind))[one.name]
            cells = told(one), between(one.middle, "+")
            both = [read(one.regime, kind, arm) for arm in pair]
            alike = plus_minus(by_updates(one.regime, kind, both))
            cells = *cells, alike, own_gap(one.regime, kind, both)
            body.append([one.regime, *one.name.split(", "), *cells])
    head += ["at as many updates", "greedily, by itself"]
    return markdown(head, body)


def grown_table() -> str:
    """Markdown of the gaps of twins along the long runs; none of the family."""
    body = []
    for regime in REGIMES:
        early, late = (rates(regime, "long", at) for at in KINDS)
        for name, pair in twins(early).items():
            first, last = (own[pair[0]] - own[pair[1]] for own in (early, late))
            gaps = first, last, last - first
            cells = (plus_minus(Effect(regime, "long", name, x).mean) for x in gaps)
            body.append([regime, *name.split(", "), *cells])
    head = ["along the long runs", "choice", "at", "at a quarter", "at the end", "more"]
    return markdown(head, body)


def arm_table(kind: str) -> str:
    """Markdown of the arms of all regimes that are whole at a horizon."""
    head = ["regime", "arm", "n", "rate", "pass rate", "mean", "updates"]
    head += ["entropy", "at equal pass rate", "greedily"]
    body = []
    for regime in REGIMES:
        alike = entropies(regime, kind)
        for arm in measured(regime, kind):
            piece, place = read(regime, kind, arm), run.tokens(regime, kind)
            at = {
                what: run.ends(piece, place, what).mean()
                for what in ("updates", "entropy", "greedy")
                if piece.get(what)
            }
            cells = *ended(piece, place), f"{at['updates']:.0f}"
            cells += number(at["entropy"]), number(alike[arm])
            cells += (number(at["greedy"]) if "greedy" in at else "",)
            body.append([regime, arm.replace("-", " "), *cells])
    return markdown(head, body)


def ended(own: Mapping[str, Any], place: float) -> list[str]:
    """Cells of an arm at so many tokens: n, rate, pass rate with interval, mean."""
    setting, rates = run.Setting(*own["settings"][0]), run.ends(own, place)
    middle = statistics.center([rates])
    cells = [f"{setting.value:g}", power(setting.rate)]
    cells += [between(show.numbers(middle.value, middle.interval()))]
    return [*cells, number(rates.mean())]


def entropies(regime: str, kind: str) -> dict[str, float]:
    """Mean entropy of each arm where its mean pass rate is, for good, at one level.

    The level is the lowest at which a mean curve of the regime ends.
    """
    grid = np.linspace(0, run.tokens(regime, kind), 401)
    curves, spread = {}, {}
    for arm in measured(regime, kind):
        own = read(regime, kind, arm)
        drawn, rate = (np.array(own[x], float) for x in ("drawn", "rate"))
        curves[arm] = statistics.at(drawn, rate, grid).mean(-1)
        known = np.clip(grid[:, None], drawn[1], None)
        columns = [
            np.interp(known[:, i], drawn[1:, i], np.array(own["entropy"])[:, i])
            for i in range(drawn.shape[1])
        ]
        spread[arm] = np.mean(columns, 0)
    level = min([curve[-1] for curve in curves.values()], default=0.0)
    found = {}
    for arm, curve in curves.items():
        cost = show.reached(show.Curve(grid, curve), grid[-1], level)
        found[arm] = float(np.interp(cost, grid, spread[arm]))
    return found


def whole_regimes() -> list[str]:
    """Regimes in which all arms were run; of others the page says nothing yet."""
    return [r for r in REGIMES if all(Piece(r, "claim", a).path.exists() for a in ARMS)]


def weight_table() -> str:
    """Markdown of w(p) of the arms at the n that tuning took, and what wrong ones get.

    That is their share of the squared credit, at pass rates of .05 and .5.
    """
    p, body = np.array(RATES), []
    for arm in ARMS:
        for n in sorted({int(run.chosen(r, arm).value or 0) for r in whole_regimes()}):
            seen = predict.predict(run.plain(arm, n), p, p)
            cells = [f"{w:.3g}" for w in seen.weight]
            wrong = [f"{1 - seen.of_right[RATES.index(x)]:.0%}" for x in (0.05, 0.5)]
            body.append([arm.replace("-", " "), str(n), *cells, ", ".join(wrong)])
    head = ["arm", "n", *(f"w({number(p, digits=2)})" for p in RATES)]
    return markdown([*head, "wrong ones"], body)


def tuning_table() -> str:
    """Markdown of what tuning saw: the best of each n, and the rate that was taken."""
    head = ["regime", "arm", *(f"n = {n:g}" for n in run.SIZES)]
    tuned = sorted({*run.RATES, *run.BEYOND.values()})
    head += map(power, tuned)
    body = []
    for regime in whole_regimes():
        for arm in ARMS:
            tried = run.trials(regime, arm)
            by = [
                max((r for s, r in tried if s[place] == value), default=None)
                for place, values in ((1, run.SIZES), (2, tuned))
                for value in values
            ]
            cells = ["" if rate is None else number(rate) for rate in by]
            body.append([regime, arm.replace("-", " "), *cells])
    return markdown(head, body)


def greedy_table() -> str:
    """Markdown of draws and greedy completions of the same runs, where both are."""
    body = []
    for regime, (kind, said) in itertools.product(greedy.REGIMES, greedy.KINDS.items()):
        every = [greedy.path(Piece(regime, kind, arm)) for arm in greedy.ARMS]
        found = [load(path) for path in every if path.exists()]
        for rate in NAMED if len(found) == len(every) else ():
            start = float(np.mean([own[rate][0] for own in found]))
            ends = [run.ends(own, run.tokens(regime, kind), rate) for own in found]
            gap = Effect(regime, kind, rate, ends[1] - ends[0]).mean
            shown = (number(x) for x in (start, *(own.mean() for own in ends)))
            body.append([regime + said, NAMED[rate], *shown, plus_minus(gap)])
    return markdown(["regime", "", "start", *greedy.ARMS, "gap, by itself"], body)


def tuned_table() -> str:
    """Markdown of arms tuned by greedy answers, beside RLOO so tuned, and by draws."""
    body = []
    for regime in run.DENSE:
        paths = {x: greedy.path(Piece(regime, greedy.TUNED, x)) for x in ARMS}
        if not all(path.exists() for path in paths.values()):
            continue
        found = {arm: load(path) for arm, path in paths.items()}
        place, base = run.tokens(regime, "claim"), found[run.PLAIN[0]]
        for arm, own in found.items():
            _, n, rate = own["settings"][0]
            greedily, drawn, made = (
                run.ends(own, place, what).mean()
                for what in ("greedy", "rate", "updates")
            )
            gaps = [
                own_gap(regime, "claim", (own, other), what) if own is not other else ""
                for other in (base, read(regime, "claim", run.PLAIN[0]))
                for what in ("greedy", "rate")
            ]
            cells = regime, arm.replace("-", " "), f"{n:g}", power(rate)
            cells += number(greedily), number(drawn), f"{made:.0f}"
            body.append([*cells, *gaps])
    head = ["tuned by greedy answers", "arm", "n", "rate", "greedily", "in draws"]
    head += ["updates", "less RLOO, greedily", "in draws"]
    return markdown([*head, "less RLOO tuned by draws, greedily", "in draws"], body)


def predicted_table() -> str:
    """Markdown of where arms are predicted to end, beside where they were measured to.

    And of each regime that was measured Spearman's correlation of both.
    """
    body = []
    for regime in REGIMES:
        path = run.RESULTS / regime / "predicted.json"
        told = json.loads(path.read_text()) if path.exists() else {}
        found = {arm: own.mean() for arm, own in rates(regime, "claim").items()}
        both = [(own["progress"], found.get(arm, 0)) for arm, own in told.items()]
        for arm, own in told.items():
            cell = between((own["progress"], own["low"], own["high"]))
            there = number(found[arm]) if arm in found else ""
            body.append([regime, arm.replace("-", " "), own["best"], cell, there])
        if found and told:
            ranks = np.corrcoef(*stats.rankdata(both, axis=0).T)[0, 1]
            rank = number(float(ranks), "+", 2)
            body.append([regime, "correlation of ranks", "", "", rank])
    return markdown(["regime", "arm", "at", "predicted", "measured"], body)


def draw(path: Path, every: list[Effect]) -> None:
    """Effects with their intervals, a panel for each regime."""
    names = list(EFFECTS)
    shown = [r for r in REGIMES if any(one.regime == r for one in every)]
    rows = -(-len(shown) // ACROSS)
    figure, panels = grid(LIGHT, rows, [1] * ACROSS, (11.1, 3.4 * rows))
    for axes in panels.flat[len(shown) :]:
        axes.set_axis_off()
    for i, (axes, regime) in enumerate(zip(panels.flat, shown, strict=False)):
        for one in every:
            if one.regime == regime and one.name in EFFECTS:
                mean, half = one.mean
                y = names.index(one.name) + 0.3 * KINDS.index(one.kind)
                color = show.COLORS[2 if one.kind == "claim" else 3]
                show.interval(axes, y, (mean, mean - half, mean + half), color)
        axes.axvline(0, color=show.COLORS[1], linewidth=0.8)
        axes.set_ylim(len(names) - 0.4, -0.5)
        said = names if i % ACROSS == 0 else [""] * len(names)
        axes.set_yticks(range(len(names)), said)
        axes.tick_params(axis="y", length=0, labelsize=8)
        axes.tick_params(axis="x", labelsize=7)
        axes.set_title(regime, fontsize=9)
        axes.set_xlabel("effect on the pass rate", fontsize=9)
    figure.savefig(path, metadata={"Software": None})


def tables() -> list[str]:
    """All tables of the page."""
    every = effects()
    found = [weight_table(), tuning_table(), predicted_table(), greedy_table()]
    found.append(tuned_table())
    found += single_tables(every) if single_regimes() else []
    for kind in KINDS:
        if any(one.kind == kind for one in every):
            found += [arm_table(kind), effect_table(every, kind)]
            found.append(apart_table(every, kind))
    return [*found, grown_table()]


def renewed(page: str, tables: Iterable[str]) -> str:
    """A page with its tables renewed: each stands where one of its head stood.

    Of tables with one head the first of the page is the first of those given.
    """
    begun: dict[str, int] = {}
    for table in tables:
        head = table.partition("\n")[0]
        at = page.index(head, begun.get(head, 0))
        end = page.find("\n\n", at)
        page = page[:at] + table.rstrip("\n") + page[end:]
        begun[head] = at + len(head)
    return page


def main() -> None:
    """Renew the tables of the page; draw the picture."""
    page = HERE / "README.md"
    write_file(page, renewed(page.read_text("utf-8"), tables()).encode())
    if every := effects():
        draw(HERE / "effects.png", every)


if __name__ == "__main__":
    main()
