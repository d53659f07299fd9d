"""A recipe in numbers: w(p), objective, signal, draws and noise, ready for JSON."""

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from curax.config import Config, ConfigError
from curax.settings import errors
from curax.settings.config_types import present
from curax.settings.files import json_value
from curax.settings.sizes import updates_of
from curax.step import rehearsal
from curax.theory import hint_levels, predict, remarks, stated_objective
from curax.theory.population import LIFT, LOWEST, SHOWN, Population, means
from curax.theory.predict import Prediction
from curax.theory.stated_objective import Claim

CLOSE = 1.2  # a weight within this factor follows a slope
BINS = 20  # of the histogram of pass rates


def pass_rates() -> np.ndarray:
    """`[R]` pass rates of the columns, rising, from LOWEST to 1 - LOWEST."""
    ends = math.log(LOWEST / (1 - LOWEST))
    dense = 1 / (1 + np.exp(-np.linspace(ends, -ends, 30)))
    return np.unique(np.concatenate([SHOWN, dense, np.arange(3, 18) / 20]).round(6))


def summarise(
    config: Config,
    population: Population,
    lift: float = LIFT,
    *,
    num_prompts: int | None = None,
) -> dict[str, Any]:
    """Prediction, claim, nearest known objective and remarks of a recipe, as JSON.

    Args:
        config: the recipe.
        population: pass rates of the prompts it is examined with.
        lift: nats that each level of a hint adds to the log-odds of a pass rate.
        num_prompts: number of prompts of the task, as of `visits.visits`.

    Returns:
        Numbers, texts, and by name the columns `[R]` over `pass_rates`; None stands for
        what is not finite. With hints there are columns by level, under "hints".

    Raises:
        ConfigError: in a sentence, if its functions fail on made-up outcomes, or its
            rewards are not outcomes.
    """
    if config.reflection:
        raise ConfigError(
            "reflection pays for the log-prob of reference answers, and the x-ray "
            "asks what becomes of right and wrong ones; set reflection to None."
        )
    p = pass_rates()
    held = None if population.draws is None else float(population.draws.mean())
    with errors.config_errors(config):
        rehearsal.check(config)
        plain = predict.predict(
            config, p, population.rates, remembered=held, lift=lift, prompts=num_prompts
        )
        seen = predict.with_hints(config, plain)
        claim = stated_objective.claimed(config)
        asked = claim.slope(p) if claim.slope else np.full_like(p, np.nan)
        reach = stated_objective.reached(claim, seen)
        notes = remarks.assumptions(config, seen, num_prompts)
        notes += remarks.hint_assumptions(config, plain, num_prompts)
    average = partial(plain.mean, population.rates)
    group = max(round(average(plain.draws * plain.attempts)), 2)
    each = means(population, population.tokens, p)
    tokens = config.sampling.max_tokens if each is None else each
    columns = _columns(seen, asked, group, tokens)
    name, factor = _nearest(config, seen, claim, reach, group)
    off = remarks.differences(p, columns["over_claimed"], claim.name)
    if reach is not None and _follows(seen, reach):
        few = f"Its draws reach {claim.name} only so far: it"
        notes, off = [f"{few} {text}" for text in off] + notes, []
    counts, _ = np.histogram(population.rates, BINS, (0, 1))
    result = {
        "population": population.source,
        "claim": claim.name,
        "nearest": name,
        "nearest_factor": factor,
        "exact": not seen.how,
        "averaged": list(seen.how),
        "mean": {
            "draws": average(columns["draws"]),
            "tokens": average(columns["tokens"]),
            "signal": average(seen.signal),
            "pass_rate_bias": average(columns["pass_rate_bias"]),
        },
        "tokens_are": "at most" if each is None else "as measured",
        "updates_per_step": updates_of(config),
        "grpo_group": group,
        "histogram": counts / len(population.rates),
        "by_pass_rate": columns,
        "warnings": off + remarks.warnings(claim, seen),
        "notes": notes,
    }
    if plain.hints:
        result["hints"] = _hints(config, plain, lift, average)
    return json_value(result)


def _columns(
    seen: Prediction, asked: np.ndarray, group: int, tokens: int | np.ndarray
) -> dict[str, np.ndarray]:
    """`[R]` columns by name, over the pass rates of the prediction.

    Args:
        seen: prediction, with hints.
        asked: `[R]` slope of the claimed objective; NaN: none.
        group: completions of the GRPO group that noise is divided by.
        tokens: `[R]` or `[]` tokens per completion.
    """
    p, draws = seen.p, seen.draws * seen.attempts
    _, grpo = stated_objective.grpo(group, p)
    return {
        "p": p,
        "weight": seen.weight,
        "half_interval": seen.half,
        "objective": stated_objective.integral(seen.weight, p),
        "claimed_weight": asked,
        "claimed_objective": stated_objective.integral(asked, p),
        "over_claimed": stated_objective.distance(seen.weight, asked, p),
        "signal": seen.signal,
        "advantage_energy": seen.weight * p * (1 - p),
        "draws": draws,
        "tokens": draws * tokens,
        "pass_rate_bias": seen.rate - p,
        "noise_against_grpo": seen.noise / seen.placed / grpo,
        "spread": seen.spread,
        "right": seen.right,
        "wrong": seen.wrong,
    }


def _nearest(
    config: Config, seen: Prediction, claim: Claim, reach: np.ndarray | None, group: int
) -> tuple[str, float]:
    """Name of the known objective whose slope is nearest, and the largest ratio."""
    known = stated_objective.family((config.sampling.group_size, group))
    if reach is not None:
        known[f"{claim.name} as far as its draws reach"] = lambda _: reach
    if claim.slope is not None:
        known.setdefault(claim.name, claim.slope)
    return stated_objective.nearest(seen.weight, seen.p, known)


def _follows(seen: Prediction, slope: np.ndarray) -> bool:
    """Whether the weight is proportional to this slope, within a factor CLOSE."""
    low, high = remarks.SIDES
    rest = stated_objective.distance(seen.weight, slope, seen.p)
    rest = rest[(seen.p >= low) & (seen.p <= high)]
    return bool(((rest < CLOSE) & (rest > 1 / CLOSE)).all())


def _hints(
    config: Config,
    seen: Prediction,
    lift: float,
    average: Callable[[np.ndarray], float],
) -> dict[str, Any]:
    """Columns `[L + 1, R]` by level of hints; the first row is without a hint."""
    hints, how = present(seen.hints), present(config.hint)
    names = ("drawn", "trains", "weight", "signal", "draws", "end", "end_weight")
    columns = {"pass_rate": hints.p} | {name: getattr(hints, name) for name in names}
    return {
        "lift": lift,
        "levels": how.levels,
        "gradient": {1: "hint", 0: "prompt", None: None}[hint_levels.credited(how)],
        "controller": how.controller is not None,
        "signal_without": seen.signal,
        "mean": {
            "signal_without": average(seen.signal),
            "drawn": [average(row) for row in hints.drawn],
            "trains": [average(row) for row in hints.trains],
        },
        "by_level": {k: x for k, x in columns.items() if x is not None},
    }
