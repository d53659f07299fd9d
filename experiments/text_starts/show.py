"""Tables of right ones alone beside RLOO from six starts, in their page.

Command:  python -m experiments.text_starts.show

A start takes for each arm the rate that has the highest mean over the other starts, so
that no start chooses its own. Gaps are of means of a start's seeds; their t-intervals
are over starts, those of the claims widened by Holm's procedure over the regimes.
"""

import json
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from curax.compare import runner
from curax.settings.cli import write_file
from curax.settings.tables import markdown
from experiments import in_small
from experiments.factorial import show as chains
from experiments.factorial.show import Effect
from experiments.map.show import between, number, plus_minus
from experiments.text.show import value
from experiments.text_starts import (
    again,
    again_papers,
    again_sparse,
    again_sparse_long,
    experiment,
    greedy,
    long,
)
from experiments.text_starts.experiment import ARMS, RATES, REGIMES, STARTS

HERE = Path(__file__).parent
BEGIN = "<!-- tables: python -m experiments.text_starts.show -->"
KINDS = {name: rate for rate, name in chains.NAMED.items()}
LONG = f"{long.REGIME}, {long.TIMES} times the tokens"


@cache
def ran(regime: str) -> tuple[Any, dict[str, Any]]:
    """The experiment that a regime is of, and the histories of what has run."""
    made, folder = (long, "results_long") if regime == LONG else (experiment, "results")
    return made.get_experiment(), finished(folder)


def named(name: str, rate: str, regime: str, start: int) -> str:
    """Name of an arm at a rate in a regime from a start."""
    place = long.REGIME if regime == LONG else regime
    return f"{experiment.arm(name, rate)} @ {experiment.condition(place, start)}"


def rates(regime: str) -> list[str]:
    """Rates at which both arms have run from all starts."""
    found = ran(regime)[1]
    every = [(arm, start) for arm in ARMS for start in STARTS]
    return [x for x in RATES if all(named(a, x, regime, s) in found for a, s in every)]


def regimes() -> list[str]:
    """Regimes of which that is so at a rate at least."""
    return [regime for regime in (*REGIMES, LONG) if rates(regime)]


@cache
def seen(regime: str, what: str = "rate", share: float = 1) -> np.ndarray:
    """`[arms, rates, starts, R]` values where a share of the tokens is drawn."""
    made, found = ran(regime)

    def one(name: str, rate: str, start: int) -> np.ndarray:
        return value(made, found[named(name, rate, regime, start)], what, share)

    return np.array(
        [[[one(a, x, s) for s in STARTS] for x in rates(regime)] for a in ARMS]
    )


def taken(regime: str) -> np.ndarray:
    """`[arms, starts]` which rate an arm has from a start: the best of the others."""
    means = seen(regime).mean(-1)
    others = means.sum(-1, keepdims=True) - means  # [arms, rates, starts]
    return others.argmax(1)


def of_starts(regime: str, what: str = "rate", share: float = 1) -> np.ndarray:
    """`[arms, starts, R]` values at the rates that are taken."""
    chosen = taken(regime)[:, None, :, None]
    return np.take_along_axis(seen(regime, what, share), chosen, 1)[:, 0]


def claims() -> list[Effect]:
    """The gap of right ones alone to RLOO in each regime, over starts.

    The longer runs, which were asked for when the others were known, are a family of
    their own.
    """
    families: tuple[list[Effect], list[Effect]] = [], []
    for regime in regimes():
        base, ours = of_starts(regime).mean(-1)
        one = Effect(regime, "claim", "right alone", ours - base)
        families[regime == LONG].append(one)
    return [one for own in families for one in chains.family(own)]


def apart(gap: np.ndarray) -> str:
    """Text of a mean over starts with half of its own 95 % interval."""
    return plus_minus(Effect("", "claim", "", gap).mean)


def claim_table() -> str:
    """Markdown of the claims, with where the starts are and what each arm reaches."""
    body = []
    for one in claims():
        begin = of_starts(one.regime, share=0).mean(-1)[0]
        ends = of_starts(one.regime).mean((1, 2))
        middle = (begin.mean(), begin.min(), begin.max())
        body.append(
            [
                *(one.regime, between(middle), *(number(x) for x in ends)),
                *(chains.told(one), f"{(one.of_seed > 0).sum()} of {len(STARTS)}"),
            ]
        )
    head = ["", "start [lowest, highest]", *ARMS, "gap over starts", "ahead from"]
    return markdown(head, body)


def rate_table() -> str:
    """Markdown of each rate: what both arms have over starts, and their gap."""
    body = []
    for regime in regimes():
        for i, rate in enumerate(rates(regime)):
            base, ours = seen(regime).mean(-1)[:, i]
            entropy = seen(regime, "policy/entropy_nats").mean((-1, -2))[:, i]
            made = seen(regime, "updates").mean((-1, -2))[:, i]
            body.append(
                [
                    *(regime, rate, number(base.mean()), number(ours.mean())),
                    *(apart(ours - base), *(number(x) for x in entropy)),
                    "{:.0f}, {:.0f}".format(*made),
                ]
            )
    head = ["", "rate, both", *ARMS, "gap, by itself"]
    head += [*(f"entropy, {arm.split('-')[0]}" for arm in ARMS), "updates"]
    return markdown(head, body)


def start_table() -> str:
    """Markdown of each start: its rates where several ran, and its gap over seeds."""
    body = []
    for regime in regimes():
        values, tried = of_starts(regime), rates(regime)
        begin = of_starts(regime, share=0).mean(-1)[0]
        for i, start in enumerate(STARTS):
            chosen = [tried[x] for x in taken(regime)[:, i]]
            best = [tried[x] for x in seen(regime).mean(-1)[:, :, i].argmax(1)]
            if len(tried) == 1:
                chosen, best = tried, []
            gap = values[1, i] - values[0, i]
            body.append(
                [
                    *(regime, str(start), number(begin[i]), ", ".join(chosen)),
                    *(", ".join(best), *(number(x) for x in values[:, i].mean(-1))),
                    apart(gap),
                ]
            )
    head = ["", "start", "before RL", "rates taken", "its own best"]
    return markdown([*head, *ARMS, "gap, over seeds"], body)


def spread() -> str:
    """Markdown of how far gaps of starts differ, and how far four seeds explain it."""
    body = []
    for regime in regimes():
        base, ours = of_starts(regime)
        gaps = ours - base  # [starts, R]
        seeds = (gaps.var(-1, ddof=1) / gaps.shape[-1]).mean() ** 0.5
        body.append(
            [regime, number(gaps.mean(-1).std(ddof=1)), number(seeds)],
        )
    head = ["", "standard deviation of the gap over starts", "of that by seeds"]
    return markdown(head, body)


def long_table() -> str:
    """Markdown of the longer runs on their way: rates, gaps, and those of entropies."""
    body, first = [], None
    for share in (0.25, 0.5, 0.75, 1.0):
        base, ours = of_starts(LONG, share=share).mean(-1)
        first = ours - base if first is None else first
        entropy = of_starts(LONG, "policy/entropy_nats", share).mean(-1)
        body.append(
            [
                f"{share * ran(LONG)[0].tokens / 1000:.0f} k",
                *(number(x.mean()) for x in (base, ours)),
                *(apart(ours - base), apart(ours - base - first) if body else ""),
                *(number(x.mean()) for x in entropy),
                apart(entropy[1] - entropy[0]),
            ]
        )
    head = [f"{LONG}, at", *ARMS, "gap, by itself", "less the first"]
    head += [*(f"entropy, {arm.split('-')[0]}" for arm in ARMS), "gap of it"]
    return markdown(head, body)


def again_ran(module: Any) -> dict[str, Any]:
    """Histories of what has run of an experiment from the starts of `again`."""
    own = module is again_sparse_long
    return finished("results_again_sparse_long" if own else "results_again")


@cache
def finished(folder: str) -> dict[str, Any]:
    """Histories of a folder of this page."""
    return runner.finished(HERE / folder)


def again_rates(module: Any, share: float | None) -> np.ndarray:
    """`[kinds, 3, starts]` means of an experiment: before RL, of each of its two arms.

    All of draws, then greedily, where a share of the tokens is drawn, or None: at the
    last evaluation; starts from which an arm has not run are left out.
    """
    made, ran = module.get_experiment(), again_ran(module)
    names = [
        [f"{name} @ {place}" for name in made.recipes] for place in made.conditions
    ]
    pairs = [
        [ran[name] for name in pair]
        for pair in names
        if all(name in ran for name in pair)
    ]
    found = np.empty((len(KINDS), 3, len(pairs)))
    for i, rate in enumerate(KINDS.values()):
        for j, pair in enumerate(pairs):
            ends = [
                np.mean(own[rate][-1])
                if share is None
                else value(made, own, rate, share).mean()
                for own in pair
            ]
            found[i, :, j] = np.mean(pair[0][rate][0]), *ends
    return found


def greedy_rates() -> np.ndarray:
    """`[kinds, 3, starts]` as `again_rates`, of what `greedy.py` ran."""
    found = json.loads(greedy.RESULTS.read_text())
    read = [
        [[found[f"{arm} @ {start}"][kind] for start in STARTS] for arm in ARMS]
        for kind in KINDS
    ]
    before, ends = np.moveaxis(np.array(read).mean(-1), -1, 0)  # [kinds, arms, starts]
    return np.concatenate([before[:, :1], ends], 1)


def greedy_table() -> str:
    """Markdown of draws and greedy answers of the same runs, at 3e-4."""
    first = greedy_rates()
    whole, quarter = (again_rates(again, share) for share in (1, 1 / long.TIMES))
    old, new = (f"{own[0]} to {own[-1]}" for own in (STARTS, again.STARTS))
    rows = [
        ("mixed, 64 k", old, first),
        ("mixed, 64 k", new, quarter),
        ("mixed, 64 k", "all", np.concatenate([first, quarter], -1)),
        ("mixed, 256 k", new, whole),
        ("sparse, 64 k", new, again_rates(again_sparse, 1)),
        ("sparse, 45 updates, 95 k", new, again_rates(again_sparse, None)),
        ("sparse, 256 k", new, again_rates(again_sparse_long, 1)),
    ]
    body = []
    for regime, starts, found in (row for row in rows if row[2].size):
        gaps = found[:, 2] - found[:, 1]
        for kind, (before, *ends), gap in zip(KINDS, found, gaps, strict=True):
            body.append(
                [
                    *(regime, starts, kind, number(before.mean())),
                    *(number(x.mean()) for x in ends),
                    *(apart(x - before) for x in ends),
                    *(apart(gap), f"{(gap > 0).sum()} of {gap.size}"),
                ]
            )
        less = gaps[0] - gaps[1]
        count = f"{(less > 0).sum()} of {less.size}"
        body.append([regime, starts, "the former less", *[""] * 5, apart(less), count])
    head = ["3e-4", "starts", "", "before", *ARMS]
    head += [f"{arm.split('-')[0]} less before" for arm in ARMS]
    return markdown([*head, "gap, by itself", "ahead from"], body)


def papers_table() -> str:
    """Markdown of methods of papers less both arms, from the starts of `again`."""
    made, body = again_papers.get_experiment(), []
    both = again_rates(again, 1 / long.TIMES)
    for name in made.recipes:
        own = [again_ran(again).get(f"{name} @ {place}") for place in made.conditions]
        found = [one for one in own if one]
        if len(found) < len(own):
            continue
        updates = np.mean([value(made, one, "updates") for one in found])
        for (kind, rate), (_, *arms) in zip(KINDS.items(), both, strict=True):
            ends = np.array([value(made, one, rate).mean() for one in found])
            gaps = [ends - arm for arm in arms]
            cells = [[apart(x), f"{(x > 0).sum()} of {x.size}"] for x in gaps]
            body.append(
                [
                    *(name.removesuffix(f"-{again.RATE}"), kind, number(ends.mean())),
                    *(*cells[0], *cells[1], f"{updates:.0f}"),
                ]
            )
    head = ["mixed, 64 k", "", again.RATE]
    for arm in ARMS:
        head += [f"less {arm}, by itself", "ahead from"]
    return markdown([*head, "updates"], body)


def tables() -> list[str]:
    """Markdown of all tables of the page."""
    shown = claim_table(), rate_table(), start_table(), spread(), long_table()
    return [*shown, greedy_table(), papers_table()]


def main() -> None:
    """Renew the tables of the page."""
    path = HERE / "README.md"
    found = in_small.renewed(path.read_text("utf-8"), tables(), BEGIN)
    write_file(path, found.encode())


if __name__ == "__main__":
    main()
