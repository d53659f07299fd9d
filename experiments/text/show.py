"""Tables of the arms on text, in their page, and the order of arms beside chains.

Command:  python -m experiments.text.show

Of every seed, where each run has drawn as many tokens. Gaps are of the same seed, of
means, and so are effects, as those of `experiments.factorial.show`; all their
t-intervals are widened by Holm's procedure over the page. A rank correlation is of
means of arms, text beside chains; its interval resamples the seeds of both sides.
"""

from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from scipy import stats

from curax.comparison import analysis, runner, statistics
from curax.comparison.experiment import Arm, arms, trials
from curax.settings.cli import write_file
from curax.settings.tables import markdown
from experiments import in_small
from experiments.factorial import show as chains
from experiments.factorial.run import ARMS, EFFECTS
from experiments.factorial.show import Effect
from experiments.map.show import between, number, plus_minus
from experiments.text.experiment import REGIMES, get_experiment

HERE = Path(__file__).parent
RESULTS = HERE / "results"  # --workdir of the comparison, whose arms are kept
BASE, CONTROL = "centred-fixed-one", "right-fixed-one"
RATE = "optimizer.learning_rate"
LIKE = {"sparse": ("sparse",), "mixed": ("sparse", "bimodal"), "solved": ("bimodal",)}
RESAMPLES = 2000
BEGIN = "<!-- tables: python -m experiments.text.show -->"


@cache
def experiment() -> tuple[Any, list[Arm], list[Arm], dict[str, Any]]:
    """The experiment, its arms, their trials, and the histories of what has run."""
    made = get_experiment()
    own = arms(made)
    return made, own, trials(made, own), runner.finished(RESULTS)


def of_arm(name: str, regime: str, what: str, share: float = 1) -> np.ndarray:
    """`[R]` values of an arm where each run has drawn a share of the tokens."""
    made, _, _, found = experiment()
    own = found[f"{name} @ {regime}"]
    if what in made.watched:
        values = np.array(own["watched"][what], float)
    else:
        values = np.array(own[what], float)
    drawn = np.array(own["drawn"], float)[-len(values) :]
    return statistics.at(drawn, values, share * made.tokens)


def rates(regime: str) -> dict[str, np.ndarray]:
    """`[R]` held-out pass rates of each arm that has run; none before all eight."""
    made, _, _, found = experiment()
    names = [name for name in made.recipes if f"{name} @ {regime}" in found]
    there = names if set(ARMS) <= set(names) else []
    return {name: of_arm(name, regime, "rate") for name in there}


def whole() -> list[str]:
    """Regimes of which all eight arms have run; of others the page says nothing yet."""
    return [regime for regime in REGIMES if rates(regime)]


def tried(name: str, regime: str) -> list[tuple[float, float]]:
    """Learning rates that tuning tried of an arm, and the mean rates that it saw."""
    made, _, every, found = experiment()
    own = [x for x in every if (x.recipe, x.condition) == (name, regime)]
    histories = [analysis.history_of(found[x.name]) for x in own]
    seen = analysis.trial_rates(histories, made.budgets)[2]
    return [(dict(x.changed)[RATE], y) for x, y in zip(own, seen, strict=True)]


def differences() -> list[Effect]:
    """Gaps to the baseline and to the control, and effects, of all regimes."""
    found = []
    for regime in whole():
        own = rates(regime)
        for than in (BASE, CONTROL):
            for name in own:
                if name not in (than, BASE):
                    gap = own[name] - own[than]
                    found.append(Effect(regime, "claim", f"{name} {than}", gap))
        eight = {name: own[name] for name in ARMS}
        for name, choices in EFFECTS.items():
            effect = chains.effect(eight, choices)
            found.append(Effect(regime, "claim", name, effect))
    return chains.family(found)


def at_updates(name: str, than: str, regime: str) -> str:
    """Gap of two arms at as many updates of both, with half of its 95 % interval."""
    found = experiment()[-1]
    both = [found[f"{one} @ {regime}"] for one in (name, than)]
    made = [of_arm(one, regime, "updates") for one in (name, than)]
    gap = chains.at_updates(both, made)
    return plus_minus(Effect(regime, "claim", name, gap).mean)


def arm_table(regime: str, every: list[Effect]) -> str:
    """Markdown of the arms of a regime, in the order of the experiment."""
    gaps = {one.name: chains.told(one) for one in every if one.regime == regime}
    head = [regime, "rate", "mean", "interquartile mean", f"less {BASE}"]
    head += [f"less {CONTROL}", "updates", "trained", "entropy"]
    body = []
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
                number(of_arm(name, regime, "trained").mean() / experiment()[0].tokens),
                number(of_arm(name, regime, "policy/entropy_nats").mean()),
            ]
        )
    return markdown(head, body)


def updates_table() -> str:
    """Markdown of the gaps at as many updates."""
    body = [
        [regime, name, *("" if x == name else at_updates(name, x, regime) for x in two)]
        for two in [(BASE, CONTROL)]
        for regime in whole()
        for name in rates(regime)
    ]
    head = ["at as many updates", "arm", f"less {BASE}", f"less {CONTROL}"]
    return markdown(head, body)


def twin_table() -> str:
    """Markdown of each choice at each combination of the others; none of the family."""
    body = []
    for regime in whole():
        for name, pair in chains.twins(ARMS).items():
            gap = np.subtract(*(rates(regime)[arm] for arm in pair))
            told = plus_minus(Effect(regime, "claim", name, gap).mean)
            body.append([regime, *name.split(", "), told, at_updates(*pair, regime)])
        for draws in ("fixed", "drawn"):
            four = [
                rates(regime)[f"{credit}-{draws}-{weight}"]
                for credit in ("right", "centred")
                for weight in ("log", "one")
            ]
            told = plus_minus(
                Effect(regime, "claim", draws, np.dot([1, -1, -1, 1], four)).mean
            )
            body.append([regime, "right alone x 1/p", draws, told, ""])
    head = ["twins", "choice", "at", "equal tokens", "as many updates"]
    return markdown(head, body)


def course_table() -> str:
    """Markdown of where arms begin, what they gain, and what in the last quarter."""
    body = []
    for regime in whole():
        for name, end in rates(regime).items():
            begin, then = (of_arm(name, regime, "rate", share) for share in (0, 0.75))
            gains = (Effect(regime, "claim", name, end - x).mean for x in (begin, then))
            body.append(
                [regime, name, number(begin.mean()), *(plus_minus(x) for x in gains)]
            )
    head = ["course", "arm", "start", "gained", "in the last quarter of the tokens"]
    return markdown(head, body)


def effect_table(every: list[Effect]) -> str:
    """Markdown of the effects of the three choices."""
    own = {(one.regime, one.name): chains.told(one) for one in every}
    body = [[name, *(own[regime, name] for regime in whole())] for name in EFFECTS]
    return markdown(["effect", *whole()], body)


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


def order_table() -> str:
    """Markdown of the rank correlations, regime by regime."""
    body = [
        [regime, " and ".join(LIKE[regime]), between(correlation(regime), digits=2)]
        for regime in whole()
    ]
    return markdown(["order on text", "on chains", "Spearman"], body)


def tuning_table() -> str:
    """Markdown of what tuning saw; what it took is bold."""
    made = experiment()[0]
    body = []
    for regime in whole():
        for name in rates(regime):
            seen = tried(name, regime)
            cells = [number(rate) for _, rate in seen]
            best = int(np.argmax([rate for _, rate in seen]))
            cells[best] = f"**{cells[best]}**"
            body.append([regime, name, *cells])
    values = [f"{x:.0e}".replace("e-0", "e-") for x in made.tune[RATE]]
    return markdown(["tuning", "arm", *values], body)


def tables() -> list[str]:
    """Markdown of all tables."""
    every = differences()
    found = [arm_table(regime, every) for regime in whole()]
    apart = [updates_table(), twin_table(), course_table(), order_table()]
    apart.append(tuning_table())
    return [*found, effect_table(every), *apart]


def main() -> None:
    """Renew the tables of the page."""
    page = HERE / "README.md"
    found = in_small.renewed(page.read_text("utf-8"), tables(), BEGIN)
    write_file(page, found.encode())


if __name__ == "__main__":
    main()
