"""Tables and picture of recipes on tasks with turns.

Command:  python -m experiments.turns.show

As `experiments.map.show`, of the regimes of turns.
"""

import json
from pathlib import Path

import numpy as np

from curax.compare import statistics
from curax.settings.tables import markdown
from experiments.map import regimes, run, show

HERE = Path(__file__).parent


def every() -> list[list[show.Judged]]:
    """The recipes of each regime that are measured; the baseline comes first."""
    return [own for regime in regimes.TURNS if (own := show.judged(regime))]


def tables(found: list[list[show.Judged]]) -> list[str]:
    """Markdown: the regimes, their recipes, and right ones alone beside drawing."""
    head = ["regime", "which", "right", "histogram", "never", "visits", "length, cv"]
    starts = [show.start(regime)[: len(head)] for regime in regimes.TURNS]
    beside = [line[:3] for regime in regimes.TURNS for line in show.against(regime)]
    return [
        markdown(head, starts),
        show.table(found),
        markdown(["regime", "control", f"less {show.DRAWN}"], beside),
    ]


def tuned(regime: str, rate: float) -> str:
    """Markdown of what tuning saw of recipes with sizes at a learning rate, by size."""
    body = []
    for name in regimes.TURNS[regime].recipes:
        if regimes.RECIPES[name].values != regimes.SIZES:
            continue
        settings, rates = [], []
        for number, _ in enumerate(regimes.TURNS[regime].chunks(name)):
            own = json.loads(run.Piece(regime, "tune", name, number).path.read_text())
            settings += own["settings"]
            rates += run.trial_rates(own, regime).tolist()
        at = {s[1]: r for s, r in zip(settings, rates, strict=True) if s[2] == rate}
        body.append([regime, name, *(show.number(at[n]) for n in regimes.SIZES)])
    return markdown(
        ["tuning at 1e-3", "recipe", *(f"n = {n:g}" for n in regimes.SIZES)], body
    )


def differences(regime: str, one: str, other: str) -> list[str]:
    """Mean difference of two recipes, of the same seeds: at places of three kinds.

    At the tokens of the claim, all seeds and those of either half; at 20 updates; at
    two fifths of the tokens, where tuning read.
    """
    found, place = show.curves(regime), show.budget(regime)
    pair = [show.rates_at(found[x], place) for x in (one, other)]
    halves = [[x[part] for x in pair] for part in (slice(10), slice(10, None))]
    early = [show.rates_at(found[x], 0.4 * place) for x in (one, other)]
    updates = [_at_updates(regime, x, 20) for x in (one, other)]
    every = [pair, *halves, updates, early]
    return [regime, one, other, *(show.plus_minus(show.mean_gap(*x)) for x in every)]


def _at_updates(regime: str, name: str, place: int) -> np.ndarray:
    """`[R]` rates after as many updates."""
    own = json.loads(run.Piece(regime, "claim", name).path.read_text())
    rate = np.array(own["rate"], float)
    steps = np.broadcast_to(np.array(own["steps"], float)[:, None], rate.shape)
    return statistics.at(steps, rate, place)


ASKED = (  # what the page says of pairs
    ("calculator", "raft", "right_only"),
    ("calculator", "sage", "rloo"),
    ("calculator", "sage", "grpo"),
    ("calculator", "dapo", "rloo"),
    ("calculator", "dapo", "grpo"),
    ("calculator", show.DRAWN, "rloo"),
    ("mastermind", "raft", "grpo"),
    ("mastermind", "right_only", "grpo"),
    ("mastermind", "raft", "right_only"),
    ("mastermind", "rloo", "grpo"),
)


def figures() -> list[str]:
    """Markdown of what the sentences of the page are made of."""
    head = ["regime", "recipe", "less", "at the claim", "first ten seeds", "others"]
    head += ["at 20 updates", "at two fifths of the tokens"]
    return [
        *(tuned(regime, 1e-3) for regime in regimes.TURNS),
        markdown(head, [differences(*pair) for pair in ASKED]),
    ]


def main() -> None:
    """Print the tables; draw the picture of what is measured."""
    found = every()
    print(*tables(found), *figures(), sep="\n\n")
    if found:
        show.draw(HERE / "turns.png", found)


if __name__ == "__main__":
    main()
