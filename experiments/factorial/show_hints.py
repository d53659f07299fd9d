"""Tables of the arms with hints, in their page.

Command:  python -m experiments.factorial.show_hints

Intervals are those of t, over seeds, widened by Holm's procedure over all effects of
that page; greedily, and at as many updates, they are of 95 % by themselves.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from scipy import stats

from curax.settings.cli import write_file
from curax.settings.tables import markdown
from experiments.factorial import hints, run, show
from experiments.factorial.greedy import TUNED
from experiments.factorial.hints import AGAIN, ALIKE, BARE, FIXED, HINT, REGIME
from experiments.factorial.run import ARMS, PLAIN
from experiments.factorial.show import Effect
from experiments.map.show import between, number, plus_minus

PAGE = Path(__file__).parent / "hints.md"
RLOO, RIGHT = PLAIN
KINDS = {"claim": "", "long": ", four times the tokens"}
WITH = "a hint, "
ENDS = "rate", "greedy"


def read(kind: str) -> dict[str, dict[str, Any]]:
    """What is measured of a kind, by arm."""
    files = {x.arm: hints.path(x) for x in hints.pieces() if x.kind == kind}
    return {arm: show.load(path) for arm, path in files.items() if path.exists()}


def pairs(kind: str) -> dict[str, tuple[str, str]]:
    """Arms whose gap is of the family, by what it is of."""
    right = {"right alone, no hint, for RLOO with": (RIGHT, RLOO + HINT)}
    right[f"{WITH}RLOO at one setting"] = RLOO + HINT, ALIKE
    right["right alone, no hint, for RLOO at that setting"] = RIGHT, ALIKE
    if kind == "long":
        found = {WITH + said(arm): (arm + HINT, arm) for arm in PLAIN}
        found |= {"right alone, no hint, for RLOO without": (RIGHT, RLOO)}
        return found | right | {"right alone, both hinted": (RIGHT + HINT, RLOO + HINT)}
    found = {WITH + said(arm): (arm + HINT, arm) for arm in BARE}
    for arm in PLAIN:
        found[f"{WITH}for redrawing without, {said(arm)}"] = arm + HINT, arm + AGAIN
    return found | right | show.twins(ARMS) | show.SINGLE


def rates(kind: str, what: str = "rate") -> dict[str, np.ndarray]:
    """`[R]` held-out pass rates of each arm at equal tokens."""
    place = run.tokens(REGIME, kind)
    return {arm: run.ends(own, place, what) for arm, own in read(kind).items()}


def gaps(kind: str, what: str = "rate") -> dict[str, np.ndarray]:
    """`[R]` of each effect at a horizon."""
    ends = rates(kind, what)
    found = {name: ends[a] - ends[b] for name, (a, b) in pairs(kind).items()}
    if kind == "claim":
        bare = {arm: ends[arm] for arm in ARMS}
        helped = {arm: found[WITH + said(arm)] for arm in ARMS}
        found |= {name: show.effect(bare, at) for name, at in run.EFFECTS.items()}
        found[f"{WITH}mean of the eight"] = np.mean(list(helped.values()), 0)
        for i, name in enumerate(show.NAMES):
            found[f"{WITH}more with {name}"] = show.effect(helped, (i,))
    return found


def effects() -> list[Effect]:
    """All effects of the page: one family."""
    return show.family(
        [
            Effect(REGIME, kind, name, gap)
            for kind in KINDS
            for name, gap in gaps(kind).items()
        ]
    )


def by_itself(gap: Any) -> str:
    """A mean with half of its 95 % interval, which is none of the family."""
    return plus_minus(Effect(REGIME, "", "", np.array(gap)).mean)


def said(arm: str) -> str:
    """An arm in words."""
    return arm.replace("-", " ")


def arm_table() -> str:
    """Markdown of all arms at both horizons."""
    body = []
    for kind, horizon in KINDS.items():
        for arm, own in read(kind).items():
            place = run.tokens(REGIME, kind)
            greedy, made = (
                run.ends(own, place, what).mean() for what in ("greedy", "updates")
            )
            cells = show.ended(own, place)
            body.append([said(arm) + horizon, *cells, number(greedy), f"{made:.0f}"])
    head = ["arm with a hint or without", "n", "rate", "pass rate", "mean", "greedily"]
    return markdown([*head, "updates"], body)


def effect_table(kind: str, family: list[Effect]) -> str:
    """Markdown of all effects at a horizon; what is certain is bold."""
    body, every, among = [], read(kind), pairs(kind)
    greedily = gaps(kind, "greedy")
    for one in family:
        if one.kind != kind:
            continue
        cells = one.name, show.told(one), between(one.middle, "+")
        both = [every[arm] for arm in among.get(one.name, ())]
        alike = plus_minus(show.by_updates(REGIME, kind, both)) if both else ""
        body.append([*cells, alike, by_itself(greedily[one.name])])
    head = [f"effect{KINDS[kind]}", "of means", "interquartile mean"]
    return markdown([*head, "at as many updates", "greedily, by itself"], body)


def tuned_table() -> str:
    """Markdown of arms tuned by greedy answers, beside the like without a hint."""
    body, tuned, drawn = [], read(TUNED), read("claim")
    for arm in FIXED:
        bare, place = arm.removesuffix(HINT), run.tokens(REGIME, "claim")
        _, n, rate = tuned[arm]["settings"][0]
        ends = {
            what: run.ends(tuned[arm], place, what).mean()
            for what in ("greedy", *show.UPDATED[::-1])
        }
        cells = said(arm), f"{n:g}", show.power(rate)
        cells += tuple(number(ends[what]) for what in ("greedy", "rate"))
        gaps = [
            show.own_gap(REGIME, "claim", (tuned[arm], other[bare]), what)
            for other in (tuned, drawn)
            for what in ("greedy", "rate")
            if bare != arm
        ]
        body.append([*cells, f"{ends['updates']:.0f}", *(gaps or [""] * 4)])
    head = ["tuned by greedy answers", "n", "rate", "greedily", "in draws", "updates"]
    head += ["a hint, greedily", "in draws"]
    return markdown([*head, "for no hint tuned by draws, greedily", "in draws"], body)


def predicted_table() -> str:
    """Markdown of where arms without hints are predicted to end, and do."""
    told = show.load(run.RESULTS / REGIME / "predicted.json")
    ends = {arm: own.mean() for arm, own in rates("claim").items()}
    body = [
        [
            *(said(arm), own["best"], number(ends[arm])),
            between((own["progress"], own["low"], own["high"])),
        ]
        for arm, own in told.items()
    ]
    both = [(own["progress"], ends[arm]) for arm, own in told.items()]
    ranks = float(np.corrcoef(*stats.rankdata(both, axis=0).T)[0, 1])
    body.append(["correlation of ranks", "", "", number(ranks, "+", 2)])
    return markdown(["arm without a hint", "at", "measured", "predicted"], body)


def hinted_table() -> str:
    """Markdown of the choices among arms with hints; none of the family."""
    body = []
    for i, name in enumerate(show.NAMES):
        of = (
            {arm: ends[arm + HINT] for arm in ARMS}
            for ends in (rates("claim", what) for what in ENDS)
        )
        body.append([name, *(by_itself(show.effect(own, (i,))) for own in of)])
    return markdown(["among arms with hints", "in draws", "greedily"], body)


def again_table() -> str:
    """Markdown of hints beside redrawing, at as many steps; none of the family."""
    body, every, place = [], read("claim"), run.tokens(REGIME, "claim")
    for arm in PLAIN:
        both = [every[arm + end] for end in (HINT, AGAIN)]
        made = [steps(own, place) for own in both]
        fewer = np.min(made, 0)
        cells = [f"{place / number.mean():.0f}" for number in made]
        for what in ENDS:
            hinted, redrawn = (at_steps(own, what, fewer) for own in both)
            cells.append(by_itself(hinted - redrawn))
        body.append([said(arm), *cells])
    head = ["a hint, for redrawing without", "tokens a step, hinted", "redrawn"]
    return markdown([*head, "at as many steps, in draws", "greedily"], body)


def steps(own: Mapping[str, Any], place: float) -> np.ndarray:
    """`[R]` steps of each seed where it has drawn as many tokens."""
    drawn = np.array(own["drawn"], float).T
    return np.array([np.interp(place, x, own["steps"]) for x in drawn])


def at_steps(own: Mapping[str, Any], what: str, places: np.ndarray) -> np.ndarray:
    """`[R]` rates of each seed at its own number of steps."""
    curves = zip(places, np.array(own[what], float).T, strict=True)
    return np.array([np.interp(place, own["steps"], y) for place, y in curves])


def imitated_table() -> str:
    """Markdown of what imitating the solutions gives, beside right ones with hints."""
    own = show.load(hints.path(hints.IMITATED))
    cells = [by_itself(own[x]).replace("+", "") for x in ENDS]
    for kind in KINDS:
        hinted = (rates(kind, what)[RIGHT + HINT] for what in ENDS)
        cells += [by_itself(own[x] - y) for x, y in zip(ENDS, hinted, strict=True)]
    head = ["imitated", "in draws", "greedily", "less right ones with hints, in draws"]
    head += ["greedily", "at four times the tokens, in draws", "greedily"]
    return markdown(head, [["solutions", *cells]])


def tables() -> list[str]:
    """All tables of the page."""
    family = effects()
    of_kinds = (effect_table(kind, family) for kind in KINDS)
    found = [arm_table(), *of_kinds, hinted_table(), again_table(), tuned_table()]
    return [*found, imitated_table(), predicted_table()]


def main() -> None:
    """Renew the tables of the page."""
    page = show.renewed(PAGE.read_text("utf-8"), tables())
    write_file(PAGE, page.encode())


if __name__ == "__main__":
    main()
