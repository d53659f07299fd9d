"""Measured gradients of a policy: what --advise assumes, and what allocators gain."""

from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import optax

from curax.config import ConfigError
from curax.settings.sizes import rows_of
from curax.step import drivers
from curax.step.types import Components
from curax.theory import gradient_stats, probe
from curax.theory.gradient_stats import Sums
from curax.types import TrainState


def summarise(
    parts: Components,
    state: TrainState,
    prompts: int,
    samples: int,
    on_progress: Callable[[int, int], None] = lambda done, total: None,
) -> dict[str, Any]:
    """Measured variance of the gradients of a policy, as JSON.

    Prompts are training prompts, spread evenly over those of the task. Those of which
    fewer than 4 completions of either half have outcomes are left out.

    Args:
        parts: components of a run.
        state: its policy.
        prompts: K, at most those of the task.
        samples: completions of each, even, 8 at least.
        on_progress: as `probe.probe`.

    Returns:
        "explained", "shared" and "varied", the beliefs of `progress`; "by_pass_rate"
        and "cosines" between its rows; "correlations", "allocations" and "floors" of
        `gradient_stats`; "prompts", a row of each; sizes.
    """
    count = min(prompts, parts.task.num_prompts)
    ids = np.arange(count) * parts.task.num_prompts // count
    drive = drivers.Hosted()
    found = probe.probe(
        parts,
        state,
        ids,
        samples,
        drive=drive,
        edges=gradient_stats.BINS,
        on_progress=on_progress,
    )
    products = [[optax.tree.vdot(a, b) for a in found.by_bin] for b in found.by_bin]
    gram = np.array(jax.device_get(products), np.float64) * count**2
    mean = rows_of(parts.config) / parts.config.sampling.prompts
    return {
        "step": int(state.step),
        "seed": int(state.seed),
        "parameters": sum(leaf.size for leaf in jax.tree.leaves(state.params)),
        "completions": samples,
    } | statistics(
        ids, found.sums, found.bins, gram, max(round(mean), gradient_stats.LEAST)
    )


def statistics(
    ids: np.ndarray, sums: Sums, bins: np.ndarray, gram: np.ndarray, mean: int
) -> dict[str, Any]:
    """Statistics of `summarise`, from the sums of a probe.

    Args:
        ids: `[K]`.
        sums: `[3, K]`, as of `probe.Probe`.
        bins: `[K]`, likewise.
        gram: `[B, B]` products of the sums of the estimated grad p of bins.
        mean: completions per prompt that allocators share out.

    Raises:
        ConfigError: fewer than two prompts have right and wrong completions.
    """
    kept = (sums.n[:2] >= 4).all(0)
    known, measured, each = (
        gradient_stats.estimates(Sums(*(x[half][kept] for x in sums)))
        for half in range(3)
    )
    alive = int(np.sum(each.outcome > 0))
    if alive < 2 or not measured.variance.any() or not known.variance.any():
        raise ConfigError(
            f"{alive} of {len(ids)} prompts have right and wrong completions, and "
            "gradients of others are 0; measure a policy that solves some, or more of "
            "them with --probe."
        )
    draws, total = sums.n[0][kept], float(np.sum(gram))
    cosines = gradient_stats.cosines(each, bins[kept], gram)
    there = np.unique(bins[kept])  # as `by_pass_rate`
    common = gradient_stats.shared_square(each, total)
    believed = gradient_stats.shrunk(known, draws)
    names = ("pass_rate", "score_square", "gradient_square", "variance", "length")
    columns = each.p, each.square, each.gradient, each.variance, each.length
    rows = zip(ids[kept].tolist(), *map(np.ndarray.tolist, columns), strict=True)
    return {
        "probed": len(each.p),
        "group": mean,
        "explained": gradient_stats.explained(each),
        "shared": gradient_stats.shared(each, total),
        "varied": gradient_stats.varied(Sums(*(x[2][kept] for x in sums))),
        "common_square": common,
        "by_pass_rate": gradient_stats.by_pass_rate(known, measured, each),
        "cosines": cosines[np.ix_(there, there)].tolist(),
        "correlations": gradient_stats.correlations(known, measured),
        "allocations": gradient_stats.allocations(known, draws, measured, mean),
        "floors": gradient_stats.floors(believed, measured, each, common, mean),
        "prompts": [dict(zip(("id", *names), row, strict=True)) for row in rows],
    }
