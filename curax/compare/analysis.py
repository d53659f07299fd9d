"""Analysis of a comparison: statistics of its histories, and claims they support.

All functions are pure. An axis is the quantity held equal between recipes:

    tokens      tokens drawn, whatever became of them
    updates     of the optimizer
    cost        a * tokens drawn + b * tokens trained, in tokens drawn (a = 1), or
                where draws are free in tokens trained (b = 1)

On each axis all recipes are compared at one place: the budget, or where there is none
the furthest that every run of every recipe has come. Nothing is extrapolated.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from curax.compare import statistics
from curax.runs.reading import count_text
from curax.settings.config_types import present
from curax.settings.files import json_value

AXES = {
    "tokens": "generated tokens",
    "updates": "optimizer updates",
    "cost": "cost, in drawn tokens",
}
RATES = ("rate", "greedy")  # held-out, of an evaluation: sampled, and greedily
PLACES = 41  # of a curve
Strata = Sequence[np.ndarray]


def titles(prices: Sequence[float]) -> dict[str, str]:
    """`AXES` at these prices of a token drawn and of one trained."""
    return AXES if prices[0] else AXES | {"cost": "cost, in trained tokens"}


class History(NamedTuple):
    """Evaluations of one arm under one condition: K of R runs, `[K, R]` each."""

    rate: np.ndarray  # held-out pass rates, sampled
    greedy: np.ndarray  # and greedily
    drawn: np.ndarray  # tokens
    trained: np.ndarray  # tokens
    updates: np.ndarray

    def spent(self, axis: str, prices: tuple[float, float]) -> np.ndarray:
        """`[K, R]` tokens, updates or cost of each run up to each evaluation."""
        if axis == "updates":
            return self.updates
        if axis == "tokens":
            return self.drawn
        drawn, trained = prices
        unit = drawn or trained  # where draws are free, cost is in tokens trained
        return (drawn * self.drawn + trained * self.trained) / unit


def with_greedy(found: Mapping[str, Any]) -> dict[str, Any]:
    """A history as JSON values whose greedy rates are NaN where it has none."""
    return {"greedy": np.full(np.shape(found["rate"]), np.nan).tolist(), **found}


def history_of(found: Mapping[str, Any]) -> History:
    """A history from its JSON values, completed by `with_greedy`."""
    found = with_greedy(found)
    return History(*(np.array(found[name], float) for name in History._fields))


class Entry(NamedTuple):
    """A recipe, unchanged or at a swept value, with its histories by condition."""

    recipe: str
    setting: str  # swept; "": the recipe as it is
    value: Any  # of the setting that is swept, as JSON
    histories: Mapping[str, History]
    pairs: Mapping[str, str]  # condition -> text that arms with the same start share
    own: Mapping[str, Any] = {}  # swept settings and their values in the recipe


class Question(NamedTuple):
    """Settings of an analysis: baseline, prices, budgets and threshold."""

    baseline: str
    prices: tuple[float, float]  # of a token drawn and of one trained
    budgets: Mapping[str, float]  # axis -> place, where there is a budget
    threshold: float | None = None


def analyse(entries: Sequence[Entry], question: Question) -> dict[str, Any]:
    """All statistics of a comparison, as JSON values; unknown numbers are None.

    Args:
        entries: recipes as they are, and at swept values.
        question: what is asked.

    Returns:
        `places`: by axis and condition. `recipes`: by name and axis, the rate there,
        sampled and greedily, the mean of the former on the way, and what else was spent
        until then. `gaps`: by axis and name, against the baseline, sampled, and
        greedily by itself. `waits`: by axis, condition and name. `sensitivity`: by
        setting, recipe and axis.
    """
    plain = {entry.recipe: entry for entry in entries if not entry.setting}
    places = {axis: _places(plain.values(), axis, question) for axis in AXES}
    gaps = _gaps(plain, places, question)
    found = {
        "baseline": question.baseline,
        "prices": question.prices,
        "budgets": dict(question.budgets),
        "places": places,
        "recipes": {
            name: {axis: _at_place(entry, axis, places, question) for axis in AXES}
            for name, entry in plain.items()
        },
        "gaps": gaps,
        "sensitivity": _sensitivity(entries, plain, question),
    }
    if question.threshold is not None:
        found["threshold"] = question.threshold
        found["waits"] = {axis: _waits(plain, axis, question) for axis in AXES}
    return json_value(found)


def _places(entries: Any, axis: str, question: Question) -> dict[str, float]:
    """Value of an axis at which recipes are compared, by condition."""
    ends: dict[str, list[float]] = {}
    for entry in entries:
        for condition, history in entry.histories.items():
            end = history.spent(axis, question.prices)[-1].min()
            ends.setdefault(condition, []).append(float(end))
    budget = question.budgets.get(axis, math.inf)
    return {condition: min(budget, *own) for condition, own in ends.items()}


def trial_rates(
    histories: Sequence[History], budgets: Mapping[str, float]
) -> tuple[str, float, list[float]]:
    """Axis and place at which trials of a recipe are compared, and their mean rates.

    The axis is the first of the budgets; the place is the budget, or where a run ended
    before it the furthest that all have come.
    """
    axis = next(iter(budgets))
    question = Question("", (1.0, 0.0), budgets)
    entries = [Entry("", "", None, {"": history}, {}) for history in histories]
    places = {axis: _places(entries, axis, question)}
    rates = [np.mean(values_at(x, axis, 1.0, places, question)) for x in entries]
    return axis, places[axis][""], [float(rate) for rate in rates]


def best_of(rates: Sequence[float]) -> int | None:
    """Number of the highest rate, the first of equals; of a trial without one never."""
    return None if np.isnan(rates).all() else int(np.nanargmax(rates))


def ends_taken(tuned: Mapping[str, Any]) -> list[str]:
    """Numbers of which tuning took the highest or lowest: beyond may be better."""
    found, trials = [], tuned["trials"]
    for name, value in trials[tuned["taken"]]["settings"].items():
        tried = {trial["settings"][name] for trial in trials}
        switch = any(isinstance(x, bool) for x in tried)
        numbers = all(isinstance(x, int | float) for x in tried) and not switch
        if len(tried) > 1 and numbers:
            found += [name] * (value in (min(tried), max(tried)))
    return found


def values_at(
    entry: Entry,
    axis: str,
    share: Any,
    places: Any,
    question: Question,
    rate: str = "rate",
) -> list[np.ndarray]:
    """`[..., R]` pass rates by condition, at fractions `[...]` of the place.

    `rate` is one of `RATES`.
    """
    found = []
    for condition, history in entry.histories.items():
        spent = history.spent(axis, question.prices)
        place = np.asarray(share) * places[axis][condition]
        found.append(statistics.at(spent, getattr(history, rate), place))
    return found


def _at_place(
    entry: Entry, axis: str, places: Any, question: Question
) -> dict[str, Any]:
    """Pass rate of a recipe at the compared place of an axis, mean and spending."""
    values, greedy = (
        values_at(entry, axis, 1.0, places, question, rate) for rate in RATES
    )
    averages, others = [], {}
    for condition, history in entry.histories.items():
        place = places[axis][condition]
        spent = history.spent(axis, question.prices)
        # Nothing was spent, as where no update was ever made.
        averages.append(
            statistics.average(spent, history.rate, place) if place else history.rate[0]
        )
        for other in AXES:
            beside = history.spent(other, question.prices)
            then = statistics.at(spent, beside, place)
            others.setdefault(other, []).append(float(np.mean(then)))
    return {
        "rate": _spread(values),
        "greedy": _spread(greedy),
        "average": _spread(averages),
        "values": dict(zip(entry.histories, values, strict=True)),
        "spent": {
            name: dict(zip(entry.histories, each, strict=True))
            for name, each in others.items()
        },
    }


def _spread(values: Strata) -> list[float]:
    """[interquartile mean, lower, upper end] of rates."""
    found = statistics.center(values)
    low, high = found.interval()
    return [float(found.value), *(float(np.clip(end, 0, 1)) for end in (low, high))]


def curves(
    entries: Sequence[Entry], axis: str, condition: str, places: Any, question: Question
) -> dict[str, tuple[np.ndarray, ...]]:
    """Pass-rate curves by recipe: (x, middle, low, high), `[PLACES]` each."""
    shares, found = np.linspace(0, 1, PLACES), {}
    for entry in entries:
        own = entry._replace(histories={condition: entry.histories[condition]})
        spread = statistics.center(values_at(own, axis, shares, places, question))
        ends = (np.clip(end, 0, 1) for end in spread.interval())
        x = shares * places[axis][condition]
        found[entry.recipe] = (x, spread.value, *ends)
    return found


def _gaps(plain: Mapping[str, Entry], places: Any, question: Question) -> Any:
    """Gaps to the baseline by axis and recipe, with Holm's simultaneous intervals."""
    base, asked = plain[question.baseline], []
    for axis in AXES:
        for name, entry in plain.items():
            if name == question.baseline:
                continue
            paired = entry.pairs == base.pairs
            sides, greedy = (
                [values_at(x, axis, 1.0, places, question, rate) for x in (entry, base)]
                for rate in RATES
            )
            seen = statistics.gap(*sides, paired=paired)
            greedily = statistics.gap(*greedy, paired=paired)
            more = statistics.improvement(*sides, paired=paired)
            asked.append((axis, name, paired, seen, greedily, more))
    levels = statistics.holm([float(seen.p_value()) for *_, seen, _, _ in asked])
    found: dict[str, Any] = {axis: {} for axis in AXES}
    for one, level in zip(asked, levels, strict=True):
        axis, name, paired, seen, greedily, more = one
        low, high = seen.interval(level)
        found[axis][name] = {
            "middle": float(seen.value),
            "low": float(low),
            "high": float(high),
            "level": level,
            "alone_95": [float(end) for end in seen.interval()],
            "greedy": [float(x) for x in (greedily.value, *greedily.interval())],
            "paired": paired,
            "improvement": list(more),
        }
    return found


def _waits(plain: Mapping[str, Entry], axis: str, question: Question) -> Any:
    """Times to the threshold by condition and recipe: median, interval, run counts."""
    found: dict[str, Any] = {}
    threshold = present(question.threshold)
    for name, entry in plain.items():
        for condition, history in entry.histories.items():
            spent = history.spent(axis, question.prices)
            seen = statistics.waits(spent, history.rate, threshold)
            median, low, high = statistics.survival(seen).median()
            found.setdefault(condition, {})[name] = {
                "median": median,
                "low": low,
                "high": high,
                "reached": int(seen.reached.sum()),
                "runs": len(seen.reached),
                "times": seen.time,
            }
    return found


def _sensitivity(
    entries: Sequence[Entry], plain: Mapping[str, Entry], question: Question
) -> Any:
    """Pass rates by setting and recipe, over the values of the setting.

    They are taken as far as all arms have come, those of swept values too.
    """
    found: dict[str, Any] = {}
    places = {axis: _places(entries, axis, question) for axis in AXES}
    for name, base in plain.items():
        for setting, own in base.own.items():
            tried = [(own, base)]
            tried += [
                (entry.value, entry)
                for entry in entries
                if (entry.recipe, entry.setting) == (name, setting)
            ]
            if all(isinstance(value, int | float) for value, _ in tried):
                tried.sort(key=lambda pair: pair[0])
            found.setdefault(setting, {})[name] = [
                {"value": value, "own": entry is base}
                | {
                    axis: _spread(values_at(entry, axis, 1.0, places, question))
                    for axis in AXES
                }
                for value, entry in tried
            ]
    return found


# ----- words


def settings_text(trial: Mapping[str, Any]) -> str:
    """Settings of a trial, as `optimizer.learning_rate=0.001`."""
    return " ".join(f"{name}={value}" for name, value in trial["settings"].items())


def tuned_texts(found: Mapping[str, Any]) -> list[str]:
    """Sentences on what tuning took, from results of a comparison; none untuned."""
    said = []
    for name, own in found.get("tuned", {}).items():
        taken = settings_text(own["trials"][own["taken"]])
        ends = " and ".join(ends_taken(own))
        beyond = f", an end of what was tried of {ends}" if ends else ""
        said.append(f"{name} was tuned to {taken}{beyond}.")
    return said


def sentence(name: str, baseline: str, axis: str, gap: Mapping[str, Any]) -> str:
    """Sentence on a gap: above or below only where its interval excludes 0.

    Args:
        name: the recipe.
        baseline: the recipe that it is compared with.
        axis: what is held equal.
        gap: `low` and `high`, None where one run gives no interval; `middle`; and
            `greedy`, the three of greedy completions.
    """
    low, high = gap["low"], gap["high"]
    if low is None or high is None:
        return f"Of {name} there is too little to say how far it is from {baseline}."
    by = _apart(gap["middle"], low, high)
    if None not in gap["greedy"]:
        by += f"; greedily {_apart(*gap['greedy'])} by itself"
    at = f"at equal {'cost' if axis == 'cost' else AXES[axis]}"
    if low > 0 or high < 0:
        side = "above" if low > 0 else "below"
        return f"{name} is {side} {baseline} {at}: {by}."
    return f"{name} and {baseline} cannot be told apart {at}: {by}."


def _apart(middle: float, low: float, high: float) -> str:
    return f"{middle:+.3f} [{low:+.3f}, {high:+.3f}]"


def claims(found: Mapping[str, Any]) -> list[str]:
    """Sentences on the gaps whose intervals exclude 0, from results of `analyse`."""
    return [
        sentence(name, found["baseline"], axis, gap)
        for axis, gaps in found["gaps"].items()
        for name, gap in gaps.items()
        if gap["low"] is not None and (gap["low"] > 0 or gap["high"] < 0)
    ]


def without_claims(found: Mapping[str, Any]) -> str:
    """Sentence in place of claims where there are none."""
    gaps = [gap for each in found["gaps"].values() for gap in each.values()]
    if not gaps:
        return "One recipe, and nothing to compare it with."
    if all(gap["low"] is None for gap in gaps):
        return "No interval of any gap, so nothing is said of differences."
    return "No difference that the intervals show."


def percent_text(share: float) -> str:
    """A share in percent, not rounded to whole ones, as 60% and 62.5%."""
    return f"{100 * share:.4g}%"


def wait_text(found: Mapping[str, Any]) -> str:
    """Median time to the threshold with its interval, as `62 k [48 k, -]`."""
    median, low, high = (
        "-" if found[end] is None else count_text(found[end])
        for end in ("median", "low", "high")
    )
    return f"{median} [{low}, {high}]"
