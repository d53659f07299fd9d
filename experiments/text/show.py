"""Tables of the arms on text, in their pages, and the order of arms beside chains.

Command:  python -m experiments.text.show

Of every seed, where each run has drawn as many tokens. Gaps are of the same seed, of
means, and so are effects, as those of `experiments.factorial.show`; all their
t-intervals are widened by Holm's procedure over the page. A rank correlation is of
means of arms, text beside chains; its interval resamples the seeds of both sides.
"""

from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from scipy import stats

from curax.compare import analysis, runner, statistics
from curax.compare.experiment import Arm, arms, trials
from curax.runs.reading import count_text
from curax.settings.cli import write_file
from curax.settings.tables import markdown
from experiments import in_small
from experiments.factorial import show as chains
from experiments.factorial.run import ARMS, EFFECTS
from experiments.factorial.show import Effect
from experiments.map.show import between, number, plus_minus
from experiments.text import experiment as short
from experiments.text_long import experiment as long
from experiments.text_solved import experiment as solved

EXPERIMENTS = Path(__file__).parents[1]
# By the folder of a page, whose `results` is --workdir of the comparison.
PAGES = {
    "text": short.get_experiment,
    "text_long": long.get_experiment,
    "text_solved": solved.get_experiment,
}
BASE, CONTROL = "centred-fixed-one", "right-fixed-one"
RATE = "optimizer.learning_rate"
LIKE = {"sparse": ("sparse",), "mixed": ("sparse", "bimodal"), "solved": ("bimodal",)}
PLACES = (1 / 8, 1 / 4, 1 / 2, 3 / 4, 1)  # shares of the tokens
RESAMPLES = 2000
BEGIN = "<!-- tables: python -m experiments.text.show -->"


@cache
def page_of(page: str) -> tuple[Any, list[Arm], dict[str, Any]]:
    """The experiment of a page, its trials, and the histories of what has run."""
    made = PAGES[page]()
    found = runner.finished(EXPERIMENTS / page / "results")
    return made, trials(made, arms(made)), found


def experiment(regime: str) -> tuple[Any, list[Arm], dict[str, Any]]:
    """`page_of` the page that tells of a regime."""
    (page,) = (page for page in PAGES if regime in page_of(page)[0].conditions)
    return page_of(page)


def of_arm(name: str, regime: str, what: str, share: float = 1) -> np.ndarray:
    """`[R]` values of an arm where each run has drawn a share of the tokens."""
    made, _, found = experiment(regime)
    return value(made, found[f"{name} @ {regime}"], what, share)


def value(made: Any, own: Any, what: str, share: float = 1) -> np.ndarray:
    """`[R]` values of a history where each run has drawn a share of the tokens."""
    values = np.array(
        own["watched"][what] if what in made.watched else own[what], float
    )
    drawn = np.array(own["drawn"], float)[-len(values) :]
    return statistics.at(drawn, values, share * made.tokens)


def rates(regime: str) -> dict[str, np.ndarray]:
    """`[R]` held-out pass rates of each arm that has run; none before all of `ARMS`."""
    made, _, found = experiment(regime)
    names = [name for name in made.recipes if f"{name} @ {regime}" in found]
    there = names if set(eight(made.recipes)) <= set(names) else []
    return {name: of_arm(name, regime, "rate") for name in there}


def eight(recipes: Iterable[str]) -> list[str]:
    """Those of the eight arms that are among recipes."""
    return [arm for arm in ARMS if arm in recipes]


def whole(page: str) -> list[str]:
    """Regimes of which all these have run; of others the page says nothing yet."""
    return [regime for regime in page_of(page)[0].conditions if rates(regime)]


def effects(page: str) -> dict[str, tuple[int, ...]]:
    """Effects of choices that the arms of a page differ in."""
    parts = zip(
        *(arm.split("-") for arm in eight(page_of(page)[0].recipes)), strict=True
    )
    differ = {i for i, names in enumerate(parts) if len(set(names)) > 1}
    return {name: own for name, own in EFFECTS.items() if differ.issuperset(own)}


def tried(name: str, regime: str) -> list[tuple[float, float]]:
    """Learning rates that tuning tried of an arm, and the mean rates that it saw."""
    made, every, found = experiment(regime)
    own = [x for x in every if (x.recipe, x.condition) == (name, regime)]
    histories = [analysis.history_of(found[x.name]) for x in own]
    seen = analysis.trial_rates(histories, made.budgets)[2]
    return [(dict(x.changed)[RATE], y) for x, y in zip(own, seen, strict=True)]


def differences(page: str) -> list[Effect]:
    """Gaps to the baseline and to the control, and effects, of a page's regimes."""
    found = []
    for regime in whole(page):
        own = rates(regime)
        for than in (BASE, CONTROL):
            for name in own:
                if name not in (than, BASE):
                    gap = own[name] - own[than]
                    found.append(Effect(regime, "claim", f"{name} {than}", gap))
        those = {name: own[name] for name in eight(own)}
        for name, choices in effects(page).items():
            effect = chains.effect(those, choices)
            found.append(Effect(regime, "claim", name, effect))
    return chains.family(found)


def at_updates(name: str, than: str, regime: str) -> str:
    """Gap of two arms at as many updates of both, with half of its 95 % interval."""
    found = experiment(regime)[-1]
    both = [found[f"{one} @ {regime}"] for one in (name, than)]
    made = [of_arm(one, regime, "updates") for one in (name, than)]
    gap = chains.at_updates(both, made)
    return plus_minus(Effect(regime, "claim", name, gap).mean)


def arm_table(regime: str, every: list[Effect]) -> str:
    """Markdown of the arms of a regime, in the order of the experiment."""
    gaps = {one.name: chains.told(one) for one in every if one.regime == regime}
    head = [regime, "rate", "mean", "interquartile mean", f"less {BASE}"]
    head += [f"less {CONTROL}", "updates", "trained", "entropy"]
    body, tokens = [], experiment(regime)[0].tokens
    for name, own in rates(regime).items():
        best = max(tried(name, regime), key=lambda trial: trial[1])[0]
        middle = statistics.center([own])
        ends = [float(x) for x in (middle.value, *middle.interval())]
        body.append(
            [
                *(name, f"{best:.0e}".replace("e-0", "e-"), number(own.mean())),
                between((ends[0], ends[1], ends[2])),
                *(gaps.get(f"{name} {than}", "") for than in (BASE, CONTROL)),
                f"{of_arm(name, regime, 'updates').mean():.0f}",
                number(of_arm(name, regime, "trained").mean() / tokens),
                number(of_arm(name, regime, "policy/entropy_nats").mean()),
            ]
        )
    return markdown(head, body)


def updates_table(page: str) -> str:
    """Markdown of the gaps at as many updates."""
    body = [
        [regime, name, *("" if x == name else at_updates(name, x, regime) for x in two)]
        for two in [(BASE, CONTROL)]
        for regime in whole(page)
        for name in rates(regime)
    ]
    head = ["at as many updates", "arm", f"less {BASE}", f"less {CONTROL}"]
    return markdown(head, body)


def twin_table(page: str) -> str:
    """Markdown of each choice at each combination of the others; none of the family."""
    body = []
    for regime in whole(page):
        for name, pair in chains.twins(eight(rates(regime))).items():
            gap = np.subtract(*(rates(regime)[arm] for arm in pair))
            told = plus_minus(Effect(regime, "claim", name, gap).mean)
            body.append([regime, *name.split(", "), told, at_updates(*pair, regime)])
        own = {arm: rates(regime)[arm] for arm in eight(rates(regime))}
        for draws in dict.fromkeys(arm.split("-")[1] for arm in own):
            four = [
                f"{credit}-{draws}-{weight}"
                for credit in ("right", "centred")
                for weight in ("log", "one")
            ]
            if own.keys() >= set(four):
                gap = np.dot([1, -1, -1, 1], [own[arm] for arm in four])
                told = plus_minus(Effect(regime, "claim", draws, gap).mean)
                body.append([regime, "right alone x 1/p", draws, told, ""])
    head = ["twins", "choice", "at", "equal tokens", "as many updates"]
    return markdown(head, body)


def course_table(page: str) -> str:
    """Markdown of where arms begin, what they gain, and what in the last quarter."""
    body = []
    for regime in whole(page):
        for name, end in rates(regime).items():
            begin, then = (of_arm(name, regime, "rate", share) for share in (0, 0.75))
            gains = (Effect(regime, "claim", name, end - x).mean for x in (begin, then))
            body.append(
                [regime, name, number(begin.mean()), *(plus_minus(x) for x in gains)]
            )
    head = ["course", "arm", "start", "gained", "in the last quarter of the tokens"]
    return markdown(head, body)


def effect_table(page: str, every: list[Effect]) -> str:
    """Markdown of the effects of the three choices."""
    own = {(one.regime, one.name): chains.told(one) for one in every}
    body = [
        [name, *(own[regime, name] for regime in whole(page))] for name in effects(page)
    ]
    return markdown(["effect", *whole(page)], body)


def correlation(regime: str) -> tuple[float, float, float]:
    """Spearman's rank correlation of the eight arms beside those of chains.

    Where two regimes of chains are named it is with the mean of both ranks.
    """
    own = rates(regime)
    rng = np.random.default_rng(0)

    def ranks(found: dict[str, np.ndarray]) -> np.ndarray:  # [arms, 1 + resamples]
        each = np.array([found[name] for name in ARMS])
        rows = rng.integers(0, each.shape[1], (RESAMPLES, each.shape[1]))
        means = each[:, np.concatenate([[np.arange(each.shape[1])], rows])].mean(-1)
        return stats.rankdata(means, axis=0)

    theirs = sum(ranks(chains.rates(like, "claim")) for like in LIKE[regime])
    ours, theirs = ranks(own), stats.rankdata(theirs, axis=0)
    found = [np.corrcoef(x, y)[0, 1] for x, y in zip(ours.T, theirs.T, strict=True)]
    low, high = np.quantile(found[1:], (0.025, 0.975))
    return float(found[0]), float(low), float(high)


def order_table(page: str) -> str:
    """Markdown of the rank correlations, regime by regime."""
    body = [
        [regime, " and ".join(LIKE[regime]), between(correlation(regime), digits=2)]
        for regime in whole(page)
    ]
    return markdown(["order on text", "on chains", "Spearman"], body)


def tuning_table(page: str) -> str:
    """Markdown of what tuning saw; what it took is bold."""
    made, body = page_of(page)[0], []
    for regime in whole(page):
        for name in rates(regime):
            seen = tried(name, regime)
            cells = [number(rate) for _, rate in seen]
            best = int(np.argmax([rate for _, rate in seen]))
            cells[best] = f"**{cells[best]}**"
            body.append([regime, name, *cells])
    values = [f"{x:.0e}".replace("e-0", "e-") for x in made.tune[RATE]]
    return markdown(["tuning", "arm", *values], body)


def horizon_table(page: str) -> str:
    """Markdown of right ones alone less centred ones at shares of the tokens."""
    body, made = [], page_of(page)[0]
    for regime in whole(page):
        for what in ("rate", *made.watched):
            for name, pair in chains.twins(eight(rates(regime))).items():
                choice, at = name.split(", ")
                if choice == next(iter(EFFECTS)):
                    gaps = [
                        np.subtract(*(of_arm(arm, regime, what, x) for arm in pair))
                        for x in PLACES
                    ]
                    gaps += [gaps[-1] - gaps[1], gaps[-1] - gaps[-2]]
                    told = (
                        plus_minus(Effect(regime, "claim", at, gap).mean)
                        if np.isfinite(gap).all()
                        else ""  # before the first value that was kept
                        for gap in gaps
                    )
                    body.append([regime, what, at, *told])
    at = [count_text(share * made.tokens) for share in PLACES]
    head = [*(f"at {place} tokens" for place in at), f"from {at[1]} on"]
    head.append(f"from {at[-2]} on")
    return markdown(["right alone", "of", "at", *head], body)


def tables(page: str) -> list[str]:
    """Markdown of all tables of a page."""
    every = differences(page)
    found = [arm_table(regime, every) for regime in whole(page)]
    all_ran = len(eight(page_of(page)[0].recipes)) == len(ARMS)
    own = order_table if all_ran else horizon_table
    apart = (updates_table, twin_table, course_table, own, tuning_table)
    return [*found, effect_table(page, every), *(table(page) for table in apart)]


def main() -> None:
    """Renew the tables of all pages."""
    for page in PAGES:
        path = EXPERIMENTS / page / "README.md"
        found = in_small.renewed(path.read_text("utf-8"), tables(page), BEGIN)
        write_file(path, found.encode())


if __name__ == "__main__":
    main()
