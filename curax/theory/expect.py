"""Metrics of a run that theory predicts from the pass rates it measured.

The report shows them beside the measured ones: where they differ, credit depends on
something other than 0/1 outcomes, or a stage does not do what it says.
"""

from typing import Any

import numpy as np

from curax.config import Config
from curax.theory.predict import predict

# Metric of a step, and the field of a prediction that predicts it.
METRICS = {
    "group/draws": "draws",
    "group/signal_fraction": "signal",
    "group/pass_rate": "rate",
    "credit/right_sum": "right",
    "credit/wrong_sum": "wrong",
}
RATES = np.array([0.002, 0.01, 0.03, 0.08, 0.15, 0.25, 0.4, 0.5, 0.6, 0.75, 0.85])
RATES = np.concatenate([RATES, [0.92, 0.97, 0.99, 0.998]])
PER_PROMPT = 8  # draws from the posterior of each prompt


def spread(rates: np.ndarray, samples: int) -> np.ndarray:
    """`[K]` draws from the posterior of the pass rates, given their measurement.

    Shares of few completions lie further apart than the pass rates they estimate. Their
    prior is the Beta distribution with the moments of a beta-binomial; each prompt then
    gives draws from its posterior.

    Args:
        rates: `[...]` measured pass rates, NaN where there is none.
        samples: completions behind each, at least 2: one tells nothing of a spread.
    """
    rates = rates[np.isfinite(rates)]
    mean = float(np.clip(rates.mean(), 0.001, 0.999))
    noise = mean * (1 - mean)
    # Var of a share = noise (1 / n + (1 - 1 / n) rho), rho = 1 / (a + b + 1).
    rho = (rates.var() / noise - 1 / samples) / (1 - 1 / samples)
    total = 1 / float(np.clip(rho, 0.01, 0.9)) - 1
    solved = rates * samples
    random = np.random.default_rng(0)
    drawn = random.beta(
        solved + mean * total,
        samples - solved + (1 - mean) * total,
        (PER_PROMPT, len(rates)),
    )
    return np.clip(drawn.ravel(), RATES[0], RATES[-1])


def expected(
    config: Config, rates: np.ndarray, samples: int, *, prompts: int | None = None
) -> dict[str, Any]:
    """Predicted metrics of a step by name, for a policy with these held-out pass rates.

    Draws leave out the pilots, as the metric does. Empty with hints, whose effect is
    not known before, with rewards by reference answers, and with one sample each, of
    which no spread of pass rates follows.

    Args:
        config: config of the run.
        rates: `[E]` held-out pass rates.
        samples: completions behind each.
        prompts: number of prompts of the task, from which visits per prompt follow.
    """
    if config.hint or config.reflection or samples < 2:
        return {}
    population = spread(rates, samples)
    seen = predict(config, RATES, population, prompts=prompts)
    means = {
        metric: seen.mean(population, getattr(seen, field))
        for metric, field in METRICS.items()
    }
    if config.pilot:
        means["group/draws"] -= config.pilot.draws
    return means
