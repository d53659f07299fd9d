"""Visits of a run to each prompt, and the draws that its memory then holds."""

import numpy as np

from curax import memory as memories
from curax.config import Config
from curax.settings.declared import declared
from curax.settings.sizes import declared_option, rows_of

MOST_TRIALS = 2**16  # a pass rate is then known to 0.002


def remembers(config: Config) -> bool:
    """Whether the number of completions of a prompt depends on the memory."""
    return not (config.pilot or declared(config.allocate, "equal_groups", False))


def num_prompts(config: Config) -> int | None:
    """Number of prompts in the options of the task; None if they do not contain it."""
    prompts = declared_option(config.task, "num_prompts")
    return prompts if isinstance(prompts, int) else None


def visits(config: Config, prompts: int | None = None) -> int:
    """Number of visits of a run to each prompt; 0: it ends within the first epoch.

    Args:
        config: the recipe.
        prompts: number of prompts of the task; None: from its options. If these do not
            contain it, every prompt returns in every step.
    """
    prompts = num_prompts(config) if prompts is None else prompts
    drawn = config.steps * config.sampling.prompts
    if prompts is None:
        return config.steps
    return 0 if drawn <= prompts else min(config.steps, drawn // prompts)


def memory_draws(
    config: Config, remembered: float | None, often: int
) -> tuple[float, int]:
    """Draws of a prompt in a pilot or in the memory, and the equivalent equal trials.

    After visits of n draws a memory holds D = n sum_i lambda^i discounted ones. Their
    share of right ones has the variance of n (sum_i lambda^i)^2 / sum_i lambda^2i equal
    trials. Before any visit it holds nothing.
    """
    if config.pilot:
        return float(config.pilot.draws), config.pilot.draws
    visit = rows_of(config) / config.sampling.prompts
    discount = float(memories.discount(config.memory.half_life))
    kept = discount ** np.arange(often)
    draws, squares = visit * kept.sum(), (kept**2).sum()
    precision = kept.sum() / squares if draws else 1.0
    draws = draws if remembered is None else remembered
    return draws, max(round(min(draws * precision, MOST_TRIALS)), 1)
