"""Tables of the arms with hints, in their page.

Command:  python -m experiments.factorial.show_hints

Intervals are those of t, over seeds, widened by Holm's procedure over all effects of
that page; greedily, and at as many updates, they are of 95 % by themselves.
"""

from pathlib import Path
from typing import Any

import numpy as np

from curax.comparison import statistics
from curax.settings.cli import write_file
from curax.settings.tables import markdown
from experiments.factorial import hints, run, show
from experiments.factorial.hints import AGAIN, BARE, HINT, REGIME
from experiments.factorial.run import ARMS, PLAIN
from experiments.factorial.show import Effect
from experiments.map.show import between, number, numbers, plus_minus

PAGE = Path(__file__).parent / "hints.md"
RLOO, RIGHT = PLAIN
KINDS = {"claim": "", "long": ", four times the tokens"}
WITH = "a hint, "


def read(kind: str) -> dict[str, dict[str, Any]]:
    """What is measured of a kind, by arm."""
    files = {x.arm: hints.path(x) for x in hints.pieces() if x.kind == kind}
    return {arm: show.load(path) for arm, path in files.items() if path.exists()}


def pairs(kind: str) -> dict[str, tuple[str, str]]:
    """Arms whose gap is of the family, by what it is of."""
    right = {"right alone, no hint, for RLOO with": (RIGHT, RLOO + HINT)}
    if kind == "long":
        found = {WITH + said(arm): (arm + HINT, arm) for arm in PLAIN}
        found |= {"right alone, no hint, for RLOO without": (RIGHT, RLOO)}
        return found | right | {"right alone, both hinted": (RIGHT + HINT, RLOO + HINT)}
    found = {WITH + said(arm): (arm + HINT, arm) for arm in BARE}
    for arm in PLAIN:
        found[f"{WITH}for as many draws without, {said(arm)}"] = arm + HINT, arm + AGAIN
    return found | right | show.twins(ARMS) | show.SINGLE


def effects(kind: str) -> list[Effect]:
    """All effects at a horizon."""
    place, every = run.tokens(REGIME, kind), read(kind)
    ends = {arm: run.ends(own, place) for arm, own in every.items()}
    gaps = {name: ends[a] - ends[b] for name, (a, b) in pairs(kind).items()}
    if kind == "claim":
        bare = {arm: ends[arm] for arm in ARMS}
        helped = {arm: gaps[WITH + said(arm)] for arm in ARMS}
        gaps |= {name: show.effect(bare, at) for name, at in run.EFFECTS.items()}
        gaps[f"{WITH}mean of the eight"] = np.mean(list(helped.values()), 0)
        for i, name in enumerate(show.NAMES):
            gaps[f"{WITH}more with {name}"] = show.effect(helped, (i,))
    return [Effect(REGIME, kind, name, gap) for name, gap in gaps.items()]


def said(arm: str) -> str:
    """An arm in words."""
    return arm.replace("-", " ")


def arm_table() -> str:
    """Markdown of all arms at both horizons."""
    body = []
    for kind, horizon in KINDS.items():
        for arm, own in read(kind).items():
            setting = run.Setting(*own["settings"][0])
            ends = {
                what: run.ends(own, run.tokens(REGIME, kind), what)
                for what in ("rate", "greedy", *show.UPDATED[:1])
            }
            middle = statistics.center([ends["rate"]])
            cells = said(arm) + horizon, f"{setting.value:g}", show.power(setting.rate)
            cells += (between(numbers(middle.value, middle.interval())),)
            cells += number(ends["rate"].mean()), number(ends["greedy"].mean())
            body.append([*cells, f"{ends['updates'].mean():.0f}"])
    head = ["arm with a hint or without", "n", "rate", "pass rate", "mean", "greedily"]
    return markdown([*head, "updates"], body)


def effect_table(kind: str, family: list[Effect]) -> str:
    """Markdown of all effects at a horizon; what is certain is bold."""
    body, every, among = [], read(kind), pairs(kind)
    for one in family:
        if one.kind != kind:
            continue
        cells = one.name, show.told(one), between(one.middle, "+")
        both = [every[arm] for arm in among.get(one.name, ())]
        alike = plus_minus(show.by_updates(REGIME, kind, both)) if both else ""
        greedily = show.own_gap(REGIME, kind, both) if both else ""
        body.append([*cells, alike, greedily])
    head = [f"effect{KINDS[kind]}", "of means", "interquartile mean"]
    return markdown([*head, "at as many updates", "greedily, by itself"], body)


def tables() -> list[str]:
    """All tables of the page."""
    family = show.family([one for kind in KINDS for one in effects(kind)])
    return [arm_table(), *(effect_table(kind, family) for kind in KINDS)]


def main() -> None:
    """Renew the tables of the page."""
    page = show.renewed(PAGE.read_text("utf-8"), tables())
    write_file(PAGE, page.encode())


if __name__ == "__main__":
    main()
