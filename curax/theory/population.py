"""Pass rates of the prompts for which a recipe is examined.

They are quantiles of a Beta distribution, or those that the memory of a run measured.
"""

import glob
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from curax.config import Config, ConfigError
from curax.settings import errors
from curax.settings.config_paths import option
from curax.settings.sizes import checkpoint_of

LOWEST = 0.001  # pass rates lie between this and 1 - LOWEST
SHOWN = (0.01, 0.05, 0.1, 0.25, 0.5, 0.75, 0.9, 0.95, 0.99)  # rows of the table
LIFT = 1.0  # nats that each level of a hint adds to the log-odds of a pass rate


class Population(NamedTuple):
    """Pass rates of K prompts, all equally likely."""

    source: str  # where the pass rates come from, as text
    rates: np.ndarray  # [K] float64 in [LOWEST, 1 - LOWEST]
    draws: np.ndarray | None = None  # [K] completions in memory
    tokens: np.ndarray | None = None  # [K] tokens of these completions; None: unknown
    square: np.ndarray | None = None  # [K] squared score norms of them, summed


def of_beta(a: float, b: float, count: int = 200) -> Population:
    """Quantiles of Beta(a, b) at (i + 1/2) / K, i = 0 .. K - 1, as pass rates.

    Args:
        a: as of Beta(a, b), in (0, 1e6).
        b: the same.
        count: K.

    Raises:
        ConfigError: if there is no such distribution.
    """
    if not (0 < a < 1e6 and 0 < b < 1e6):
        raise ConfigError(
            f"--beta {a:g} {b:g}: both must be above 0, and below a million; write 1 1."
        )
    from scipy.special import betaincinv

    rates = betaincinv(a, b, (np.arange(count) + 0.5) / count)
    return Population(f"Beta({a:g}, {b:g})", np.clip(rates, LOWEST, 1 - LOWEST))


def of_memory(path: Path) -> Population:
    """Pass rates of a memory.jsonl, smoothed by Beta(1, 1): (solved + 1) / (n + 2).

    Raises:
        ConfigError: in a sentence with file, line and fix, if it cannot be read.
    """
    wanted, holds = "the memory.jsonl of a run", "numbers solved <= draws, and tokens"
    sums = _parsed("--memory", path, wanted, holds, _sums)
    rows = [row for row in sums if row[0] > 0]
    if not rows:
        raise ConfigError(
            f"--memory {path}: it has no prompt; name that of a real run."
        )
    draws, solved, tokens, square = np.array(rows, np.float64).T
    rates = np.clip((solved + 1) / (draws + 2), LOWEST, 1 - LOWEST)
    known = [sums if (sums > 0).all() else None for sums in (tokens, square)]
    return Population(str(path), rates, draws, *known)


def of_evaluation(path: Path) -> Population:
    """Pass rates of the problems of an evaluation, from its file of samples.

    Shares of few samples lie further apart than pass rates: each problem gives draws
    from its posterior (`expect.spread`).

    Raises:
        ConfigError: in a sentence with file, line and fix, if it cannot be read.
    """
    from curax.theory.expect import spread

    wanted = "a file of samples that curax.evaluate wrote, such as held_out.jsonl"
    found: dict[Any, list[float]] = {}
    holds = "problem, greedy, and outcome from 0 to 1"
    for problem, outcome in _parsed("--evaluation", path, wanted, holds, _sample):
        found.setdefault(problem, []).extend(outcome)
    graded = [each for each in found.values() if each]
    if not graded:
        raise ConfigError(
            f"--evaluation {path}: it has no graded sample; evaluate with --n 4 or so."
        )
    shares = np.array([np.mean(each) for each in graded])
    samples = round(np.mean([len(each) for each in graded]))
    if samples < 2:
        raise ConfigError(
            f"--evaluation {path}: one sample of a problem tells nothing of how far "
            "pass rates lie apart; evaluate with --n 4 or so."
        )
    rates = np.clip(spread(shares, samples), LOWEST, 1 - LOWEST)
    return Population(str(path), np.sort(rates))


def _parsed(
    option: str, path: Path, wanted: str, holds: str, parse: Callable[[Any], Any]
) -> list[Any]:
    """What is parsed of each line of JSON that is not empty.

    Args:
        option: by which the file is named.
        path: of the file.
        wanted: the file that it should be, for a message.
        holds: what a line should hold, likewise.
        parse: of the value of a line; ValueError, KeyError or TypeError refuse it.
    """
    try:
        text = path.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        why = getattr(error, "strerror", None) or "no text"
        raise ConfigError(
            f"{option} {path} cannot be read ({why}); name {wanted}."
        ) from error
    found = []
    for number, line in enumerate(text.split("\n"), 1):
        try:
            found += [parse(json.loads(line))] if line.strip() else []
        except (ValueError, KeyError, TypeError, RecursionError):
            raise ConfigError(
                f"{option} {path}:{number}: no JSON object with {holds}; mend or "
                "delete this line."
            ) from None
    return found


def _sums(row: Any) -> list[float]:
    """Draws, solved, tokens and square of a line of a memory; 0 where it has none."""
    sums = [row["draws"], row["solved"], row["tokens"], row.get("square", 0)]
    whole = all(type(value) in (int, float) and 0 <= value < 1e30 for value in sums)
    if not whole or sums[1] > sums[0]:
        raise ValueError
    return sums


def _sample(row: Any) -> tuple[Any, list[float]]:
    """Problem of a line of samples, and its outcome if it was drawn and graded."""
    problem, outcome = row["problem"], row["outcome"]
    hash(problem)
    if row["greedy"] or outcome is None:
        return problem, []
    if not 0 <= outcome <= 1:
        raise ValueError
    return problem, [float(outcome)]


def means(
    population: Population, sums: np.ndarray | None, p: np.ndarray
) -> np.ndarray | None:
    """`[R]` means per completion near each pass rate; None if not known.

    The mean is over a tenth of the prompts, 20 at least: those whose pass rates are
    nearest.

    Args:
        population: K prompts.
        sums: `[K]` over the completions of each, as `tokens` and `square`; None: not
            known.
        p: `[R]` pass rates.
    """
    if population.draws is None or sums is None:
        return None
    size = len(population.rates)
    count = min(max(20, size // 10), size)
    order = np.argsort(population.rates, kind="stable")
    middle = np.searchsorted(population.rates[order], p)
    start = np.clip(middle - count // 2, 0, size - count)
    total, draws = (
        np.concatenate([[0.0], np.cumsum(values[order])])
        for values in (sums, population.draws)
    )
    return (total[start + count] - total[start]) / (draws[start + count] - draws[start])


def task_size(config: Config) -> int | None:
    """Number of training prompts of the task; None where its files are missing.

    Task, model and optimizer are made as a run makes them, so that what a run refuses
    of them is refused here.

    Raises:
        ConfigError: they cannot be made.
    """
    from curax.step import build
    from curax.theory import visits

    if missing_files(config):
        return visits.num_prompts(config)
    with errors.config_errors(config):
        return build.build(config).task.num_prompts


def missing_files(config: Config) -> list[str]:
    """Names of the options of task and model whose file or folder does not exist."""
    named = {
        "model.path": checkpoint_of(config),
        "task.tokenizer": option(config.task, "tokenizer"),
        "task.train": option(config.task, "train"),
        "task.held_out": option(config.task, "held_out"),
    }
    return [
        name
        for name, path in named.items()
        if isinstance(path, str) and not (Path(path).exists() or glob.glob(path))
    ]
