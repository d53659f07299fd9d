"""The objective that a recipe claims, and the known one whose slope is nearest."""

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from curax import objective
from curax.config import Config, ConfigError
from curax.settings.config_paths import full_name
from curax.settings.sizes import declared_option
from curax.theory import outcome_states
from curax.theory.predict import Prediction


class Claim(NamedTuple):
    """The objective f that a recipe claims to optimise."""

    name: str
    slope: Callable[[np.ndarray], np.ndarray] | None  # f'; None: no objective stated
    series: Callable[[int], np.ndarray] | None  # d_k of f' = sum_k d_k (1-p)^k, if any


def claimed(config: Config) -> Claim:
    """The claimed objective of a recipe: its name, slope and series.

    It is `claim` where that is set, else the option that the objective stage declares
    as its `objective`, else its `series`. A stage with neither states none. The slope
    raises a ConfigError if f cannot be differentiated.
    """
    f = config.claim or declared_option(config.objective, "objective")
    if f is not None:
        slopes = jax.jit(jax.vmap(jax.grad(lambda rate: f(rate))))
        series = None
        if full_name(f).startswith(objective.__name__ + "."):
            series = getattr(objective, _short(f) + "_coefficients", None)
            series = series and partial(series, **getattr(f, "keywords", {}))

        def slope(p: np.ndarray) -> np.ndarray:
            try:
                return np.asarray(slopes(jnp.asarray(p, jnp.float32)), np.float64)
            except TypeError as error:
                raise ConfigError(
                    f"claim={full_name(f)} cannot be differentiated; write it with "
                    "jax.numpy, as a function of one pass rate."
                ) from error

        return Claim(_written(f), slope, series)
    coefficients = declared_option(config.objective, "series")
    if coefficients is None:
        return Claim("nothing", None, None)
    terms = declared_option(config.objective, "terms")
    count = _TERMS if terms is None else terms

    def sums(p: np.ndarray) -> np.ndarray:
        power = (1 - np.asarray(p, np.float64)[:, None]) ** np.arange(count)
        return power @ coefficients(count)

    name = _written(coefficients) + (f", {terms} terms" if terms else "")
    return Claim(name, sums, None if terms else coefficients)


_TERMS = 4096  # at p = 0.005 the rest of a series is below 1e-8
_NAMES = {
    "linear": "p",
    "log": "log p",
    "power": "p^{alpha:g}",
    "arcsine": "2 asin sqrt p",
    "logit": "log(p / (1 - p)) / 2",
    "pass_at_k": "pass@{k}",
}


def _short(function: Any) -> str:
    return full_name(function).rpartition(".")[2]


def _written(function: Any) -> str:
    """Formula of an objective of curax; for any other function, its name."""
    short = _short(function).removesuffix("_coefficients")
    bound = dict(getattr(function, "keywords", {}))
    if short in _NAMES:
        return _NAMES[short].format(**bound)
    options = ", ".join(f"{key}={value}" for key, value in bound.items())
    return short.strip("<>") + (f"({options})" if options else "")


def reached(claim: Claim, seen: Prediction) -> np.ndarray | None:
    """`[R]` expected partial sums of the claimed series; None without a series.

        E[sum_{k < n} d_k (1-p)^k]        n draws made where nothing is right

    An estimate from n draws has a polynomial of degree n - 1 as its expectation.
    """
    if claim.series is None:
        return None
    size = seen.most.shape[1] - 1
    terms = (1 - seen.p[:, None]) ** np.arange(size) * claim.series(size)
    sums = np.concatenate([np.zeros((len(terms), 1)), np.cumsum(terms, 1)], 1)
    return (seen.most * sums).sum(1)


def family(draws: Sequence[int]) -> dict[str, Callable[[np.ndarray], np.ndarray]]:
    """Slopes of objectives that known recipes follow, by name.

    Args:
        draws: group sizes whose finite forms are among them.
    """
    members: dict[str, Callable[[np.ndarray], np.ndarray]] = {
        "p": lambda p: np.ones_like(p),
        "log p": lambda p: 1 / p,
        "2 sqrt p": lambda p: 1 / np.sqrt(p),
        "2 asin sqrt p": lambda p: 1 / np.sqrt(p * (1 - p)),
        "log(p / (1 - p)) / 2": lambda p: 1 / (2 * p * (1 - p)),
        "log(p / (1 - p)) / 2 - p": lambda p: 1 / (2 * p * (1 - p)) - 1,
        "pass@4": lambda p: 4 * (1 - p) ** 3,
    }
    for n in sorted({m for most in draws for m in (most - 1, most) if m > 1}):
        members[f"log p of {n} draws"] = lambda p, n=n: (1 - (1 - p) ** n) / p
        members[f"GRPO of {n} draws"] = lambda p, n=n: grpo(n, p)[0]
    return members


def distance(weight: np.ndarray, slope: np.ndarray, p: np.ndarray) -> np.ndarray:
    """`[R]` weight / slope, divided by its value at p = 1/2."""
    with np.errstate(divide="ignore", invalid="ignore"):
        ratio = weight / slope
        return ratio / np.interp(0.5, p, ratio)


def nearest(
    weight: np.ndarray,
    p: np.ndarray,
    members: Mapping[str, Callable[[np.ndarray], np.ndarray]],
) -> tuple[str, float]:
    """Name of the slope nearest to a weight up to a factor, and the largest ratio.

    Nearest is the smallest mean square of the logarithm of their ratio, over p; of
    equally good ones the first.

    Args:
        weight: `[R]`.
        p: `[R]`, increasing.
        members: of `family`.

    Returns:
        Its name, and the largest ratio of both for p in [0.05, 0.95]; infinite if the
        weight is not positive everywhere.
    """
    if not (weight > 0).all():
        return next(iter(members)), math.inf
    share = np.gradient(p)
    inside = (p >= 0.05) & (p <= 0.95)

    def apart(slope: Callable[[np.ndarray], np.ndarray]) -> tuple[float, float]:
        ratio = np.log(weight / slope(p))
        ratio = ratio - np.average(ratio, weights=share)
        far = float(np.exp(np.abs(ratio[inside]).max()))
        return float(np.average(ratio**2, weights=share)), far

    found = {name: apart(slope) for name, slope in members.items()}
    least = min(mean for mean, _ in found.values())
    name = next(name for name, (mean, _) in found.items() if mean <= least + _TIE)
    return name, found[name][1]


_TIE = 1e-7  # a factor of 1.0003


def integral(weight: np.ndarray, p: np.ndarray) -> np.ndarray:
    """`[R]` f(p), the integral of a weight from the first p.

    By trapezoids over log(p / (1 - p)), where the integrand is smooth.
    """
    slope, place = weight * p * (1 - p), np.log(p) - np.log1p(-p)
    steps = (slope[1:] + slope[:-1]) / 2 * np.diff(place)
    return np.concatenate([[0.0], np.cumsum(steps)])


def grpo(n: int, p: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Weight and noise of GRPO with groups of n, a reference for other recipes.

        w = E[sqrt(q (1 - q))] / (p (1 - p)),   noise = (1 - p^n - (1-p)^n) / w^2

    where q = k / n, k ~ Binomial(n, p): the squares of the advantages of a group sum to
    n unless its outcomes are all equal.
    """
    q = np.arange(n + 1) / n
    chance = outcome_states.binomial(n, p)
    weight = np.sqrt(q * (1 - q)) @ chance / (p * (1 - p))
    return weight, chance[1:-1].sum(0) / weight**2
