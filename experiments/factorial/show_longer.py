"""Tables of the arms at four times the tokens, in their page.

Command:  python -m experiments.factorial.show_longer

Intervals are those of t, over seeds, widened by Holm's procedure over all effects of
that page; greedily, at a quarter and at as many updates they are of 95 % by themselves.
"""

from functools import partial
from pathlib import Path
from typing import Any

from curax.settings.cli import write_file
from curax.settings.tables import markdown
from experiments.factorial import longer, run, show, single
from experiments.factorial.greedy import TUNED
from experiments.factorial.longer import FOUR, LEADS, LIKE, RLOO
from experiments.factorial.run import ARMS, PLAIN
from experiments.factorial.show import Effect
from experiments.factorial.show_hints import by_itself, said
from experiments.map.show import between, number

PAGE = Path(__file__).parent / "longer.md"
KINDS = {"long": "", TUNED: ", tuned by greedy answers"}
KINDS |= {LIKE: ", at n = 2, 1e-3", FOUR: ", at n = 4, 1e-3"}
CENTRED_SINGLE, RIGHT_SINGLE = single.ARMS
# Gaps beside those of twins: the kind and arm of each side.
MORE = {
    "right at 1, for right at n": (("long", RIGHT_SINGLE), ("long", PLAIN[1])),
    "right at 1, for centred at 1": (("long", RIGHT_SINGLE), ("long", CENTRED_SINGLE)),
    "centred at 1, for RLOO at n": (("long", CENTRED_SINGLE), ("long", RLOO)),
    "right at 1, for RLOO at n": (("long", RIGHT_SINGLE), ("long", RLOO)),
    "right at 1, for RLOO at n = 4, 1e-3": (("long", RIGHT_SINGLE), (FOUR, RLOO)),
    "right at n, for centred at 1": (("long", PLAIN[1]), ("long", CENTRED_SINGLE)),
    "right alone, for RLOO at n = 2, 1e-3": (("long", PLAIN[1]), (LIKE, RLOO)),
    "right alone, for RLOO at n = 4, 1e-3": (("long", PLAIN[1]), (FOUR, RLOO)),
    "all three, for RLOO at n = 2, 1e-3": (("long", LEADS), (LIKE, RLOO)),
    "all three, for RLOO, each as tuned": (("long", LEADS), ("long", RLOO)),
    "the same by greedy answers": ((TUNED, LEADS), (TUNED, RLOO)),
    "the same, for RLOO tuned by draws": ((TUNED, LEADS), ("long", RLOO)),
}
CENTRED_DRAWN = "centred-drawn-log"
# Asked when all was known, and none of the family.
AFTER = {
    "right at 1, for right drawn log": (("long", RIGHT_SINGLE), ("long", LEADS)),
    "right at 1, for centred drawn log": (
        ("long", RIGHT_SINGLE),
        ("long", CENTRED_DRAWN),
    ),
    "right at 1, for right fixed log": (
        ("long", RIGHT_SINGLE),
        ("long", longer.LIKES[FOUR]),
    ),
    "right drawn log, for right fixed one": (("long", LEADS), ("long", PLAIN[1])),
    "right drawn log, for the same by greedy answers": (
        ("long", LEADS),
        (TUNED, LEADS),
    ),
    "the same by greedy answers, for RLOO at n = 4, 1e-3": (
        (TUNED, LEADS),
        (FOUR, RLOO),
    ),
    "1/p alone, for RLOO at n = 4, 1e-3": (
        ("long", "centred-fixed-log"),
        (FOUR, RLOO),
    ),
    "right at 1, for RLOO tuned by greedy answers": (
        ("long", RIGHT_SINGLE),
        (TUNED, RLOO),
    ),
    "centred at 1, for RLOO at n = 4, 1e-3": (("long", CENTRED_SINGLE), (FOUR, RLOO)),
}
Run = tuple[str, str]  # kind and arm


def read(regime: str) -> dict[Run, dict[str, Any]]:
    """What is measured of a regime; nothing until all is."""
    files = {x[1:]: longer.path(x) for x in longer.pieces() if x.regime == regime}
    whole = all(path.exists() for path in files.values())
    return {own: show.load(path) for own, path in files.items()} if whole else {}


def effects() -> list[tuple[Effect, list[dict[str, Any]]]]:
    """All effects of the page, one family, and the two runs of those that are gaps."""
    found, both = [], []
    for regime in longer.REGIMES:
        every = read(regime)
        ends = {own: end(regime, history) for own, history in every.items()}
        eight = {arm: ends["long", arm] for arm in ARMS if every}
        for name, choices in run.EFFECTS.items():
            if every:
                found.append(Effect(regime, "long", name, show.effect(eight, choices)))
                both.append([])
        twins = {k: [("long", x) for x in v] for k, v in show.twins(eight).items()}
        for name, (ours, other) in (twins | MORE).items():
            if ours in ends and other in ends:
                gap = ends[ours] - ends[other]
                found.append(Effect(regime, "long", name, gap))
                both.append([every[ours], every[other]])
    return list(zip(show.family(found), both, strict=True))


def end(regime: str, own: dict[str, Any], what: str = "rate", at: str = "long") -> Any:
    """`[R]` where each seed has drawn the tokens of a kind of piece."""
    return run.ends(own, run.tokens(regime, at), what)


def arm_table() -> str:
    """Markdown of all arms."""
    body = []
    for regime in longer.REGIMES:
        for (kind, arm), own in read(regime).items():
            cells = show.ended(own, run.tokens(regime, "long"))
            rest = end(regime, own, "greedy"), end(regime, own, at="claim")
            cells += [number(x.mean()) for x in (*rest, end(regime, own, "entropy"))]
            cells += [f"{end(regime, own, 'updates').mean():.0f}"]
            body.append([regime, said(arm) + KINDS[kind], *cells])
    head = ["regime", "arm at four times the tokens", "n", "rate", "pass rate", "mean"]
    return markdown([*head, "greedily", "at a quarter", "entropy", "updates"], body)


def effect_table() -> str:
    """Markdown of all effects; what is certain is bold."""
    body = []
    for one, both in effects():
        cells = one.regime, one.name, show.told(one), between(one.middle, "+")
        rest = [""] * 3
        if both:
            ours, other = (end(one.regime, own, at="claim") for own in both)
            rest = [by_itself(ours - other)]
            rest += [show.plus_minus(show.by_updates(one.regime, "long", both))]
            rest += [show.own_gap(one.regime, "long", both)]
        body.append([*cells, *rest])
    head = ["regime", "effect at four times the tokens", "of means"]
    head += ["interquartile mean", "at a quarter", "at as many updates"]
    return markdown([*head, "greedily, by itself"], body)


def after_table() -> str:
    """Markdown of gaps that were asked afterwards, by themselves."""
    body = []
    for regime in longer.REGIMES:
        every = read(regime)
        for name, pair in AFTER.items():
            if all(own in every for own in pair):
                both = [every[own] for own in pair]
                of = partial(show.own_gap, regime, "long", both)
                alike = show.plus_minus(show.by_updates(regime, "long", both))
                body.append([regime, name, of("rate"), alike, of("greedy")])
    head = ["regime", "asked afterwards, by itself", "sampled", "at as many updates"]
    return markdown([*head, "greedily"], body)


def tables() -> list[str]:
    """All tables of the page."""
    return [arm_table(), effect_table(), after_table()]


def main() -> None:
    """Renew the tables of the page."""
    page = show.renewed(PAGE.read_text("utf-8"), tables())
    write_file(PAGE, page.encode())


if __name__ == "__main__":
    main()
