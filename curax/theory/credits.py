"""Credit of one prompt in many batches, by the stage functions, and its dependences.

A group that a gate closes has credit 0, as in a step.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from curax.config import Config
from curax.step import learn, stages

SAMPLES = 64  # random batches by which dependences of credit are found
CHUNK = 2**21  # pairs of completions at a time: some corrections compare all


class Credits:
    """Credit of the first prompt in each of many batches; compiled once per size."""

    def __init__(self, config: Config):
        self._config = config
        self._compiled = jax.jit(jax.vmap(self._one))

    def _one(self, seed, outcome, exists, history, finished, length):
        config, key = self._config, jax.random.key(seed)
        reward = stages.shaped(config, outcome, length)
        arrays = outcome, reward, exists, finished, history
        given = learn.compute_credit(config, key, *arrays)
        open_ = stages.called(config, "gate", outcome, exists, finished)
        return given.credit[0], given.keep[0], jnp.any(open_[0])

    def __call__(self, seed, outcome, exists, history, *, least=1, ends=True, length=1):
        """Credit and kept completions of the first prompt; whether its gate is open.

        Args:
            seed: `[N]`, of the random keys of down-sampling.
            outcome: `[N, B, G]`.
            exists: `[N, B, G]` bool.
            history: `[N, B]`, known pass rates.
            least: smallest number of prompts in a batch, reached by prompts without
                completions.
            ends: whether completions end by themselves; as `exists`, or one for all.
            length: their tokens; as `exists`, or one for all.

        Returns:
            `[N, G]` float64, `[N, G]` bool, `[N]` bool.
        """
        lacking = max(least - outcome.shape[1], 0)
        fill = (0, 0), (0, lacking), (0, 0)
        outcome, exists = np.pad(outcome, fill), np.pad(exists, fill)
        history = np.pad(history, fill[:2])
        _, prompts, group = outcome.shape
        size = int(np.clip(CHUNK // (prompts * group * group), 1, 1024))
        credit, keep, open_ = in_chunks(
            self._compiled,
            size,
            seed.astype(np.uint32),
            outcome.astype(np.float32),
            exists,
            history.astype(np.float32),
            exists & ends,
            np.where(exists, length, 0).astype(np.int32),
        )
        return credit.astype(np.float64), keep, open_


# C+, C-, any credit, n, n > 0, k / n, sum of c^2, that of right ones, gate open, 1,
# C+^2, C+ C-, C-^2.
MOMENTS = (
    *("right", "wrong", "signal", "draws", "some", "share"),
    *("square", "right_square", "open", "all"),
    *("right_right", "right_wrong", "wrong_wrong"),
)
OPEN = MOMENTS.index("open")


def moments(credit, open_, outcome, exists, per_prompt: float) -> np.ndarray:
    """`[N, moments]` float64, MOMENTS of one prompt in each batch, not averaged.

    C+ and C- are sums of credit over right and wrong completions, over `per_prompt`.

    Args:
        credit: `[N, G]`.
        open_: `[N]` whether the gate leaves the group open.
        outcome: `[N, G]`.
        exists: `[N, G]` bool.
        per_prompt: rows trained per prompt.
    """
    plus = (credit * outcome).sum(-1) / per_prompt
    minus = (credit * (1 - outcome)).sum(-1) / per_prompt
    n = exists.sum(-1)
    parts = (
        *(plus, minus, (credit != 0).any(-1)),
        *(n, n > 0, (outcome * exists).sum(-1) / np.maximum(n, 1)),
        *((credit**2).sum(-1) / per_prompt**2,),
        *((credit**2 * outcome).sum(-1) / per_prompt**2, open_, np.ones_like(plus)),
        *(plus**2, plus * minus, minus**2),
    )
    return np.stack([np.asarray(part, np.float64) for part in parts], -1)


class Reads(NamedTuple):
    """What a prompt's credit depends on, besides how many of its n are right."""

    history: bool  # the pass rate known before the draw
    batch: bool  # the other prompts
    blind: bool  # a random selection that is independent of outcomes
    key: bool  # any other random selection, by the random key
    first: bool  # the place of the first right completion
    order: bool  # the places of the others
    lengths: bool  # how completions end, or how long they are


def reads_of(config: Config, credits: Credits) -> Reads:
    """Dependences of credit, found by changing one input at a time."""
    random, group = np.random.default_rng(0), config.sampling.group_size
    shape = (SAMPLES, 2, group)
    number = random.integers(1, group + 1, shape[:2])
    number[: SAMPLES // 2] = group
    place = np.arange(group)
    exists = place < number[..., None]
    outcome = (random.random(shape) < random.random((SAMPLES, 2, 1))) & exists
    history = np.full(shape[:2], 0.5)
    same, seeds = np.zeros(SAMPLES), np.arange(SAMPLES)
    labels, drawn = outcome[:, 0], exists[:, 0]

    def sums(seed=same, outcome=outcome, exists=exists, history=history, **ends):
        credit, _, open_ = credits(seed, outcome, exists, history, **ends)
        return moments(credit, open_, outcome[:, 0], exists[:, 0], 1.0)

    plain = sums()

    def differs(**changed: Any) -> bool:
        scale = 1e-4 * (np.abs(plain).max(0) + 1e-6)
        return bool((np.abs(sums(**changed) - plain) > scale).any())

    def differ(moved: np.ndarray) -> bool:
        """Whether credit changes if the first prompt's outcomes are permuted."""
        at = np.where(drawn, moved, place)
        labels = np.take_along_axis(outcome[:, 0], at, -1)
        return differs(outcome=np.stack([labels, outcome[:, 1]], 1))

    def sorted_by(value: np.ndarray) -> np.ndarray:
        return np.argsort(np.where(drawn, value, group + 1), -1, stable=True)

    lots = random.random((SAMPLES, group))
    key, blind = differs(seed=seeds), False
    if key:
        # Blind: the same set of whole groups is kept whatever their outcomes, and order
        # matters neither inside nor outside of it.
        whole = np.arange(SAMPLES) < SAMPLES // 2
        keep = credits(same, outcome, exists, history)[1][whole]
        keep = keep[keep.any(-1)]
        if len(keep) > 1 and (keep == keep[0]).all():
            moved = place.copy()
            for part in np.flatnonzero(keep[0]), np.flatnonzero(~keep[0]):
                moved[part] = random.permutation(part)
            blind = not differ(np.where(whole[:, None], moved, place))
    lottery = key and not blind
    before = np.cumsum(labels, -1) - labels == 0  # up to the first right one
    others = random.permuted(np.arange(SAMPLES))
    rest = {
        "outcome": np.stack([labels, outcome[others, 1]], 1),
        "exists": np.stack([drawn, exists[others, 1]], 1),
        "history": np.stack([history[:, 0], random.random(SAMPLES)], 1),
    }
    own = np.stack([random.random(SAMPLES), history[:, 1]], 1)
    some = random.integers(1, config.sampling.max_tokens + 1, shape)
    return Reads(
        history=differs(history=own),
        batch=differs(**rest),
        blind=blind,
        key=lottery,
        # Under random selection, effects of order cannot be separated from it.
        first=lottery or (not key and differ(sorted_by(lots))),
        order=not key and differ(sorted_by(np.where(before, place - group, lots))),
        lengths=differs(ends=random.random(shape) < 0.5) or differs(length=some),
    )


def in_chunks(function: Callable[..., Any], size: int, *arrays: Any) -> Any:
    """Outputs for `[N, ...]` arrays, by calls of a function on exactly `size` rows."""
    total, found = len(arrays[0]), []
    for start in range(0, total, size):
        at = np.minimum(np.arange(start, start + size), total - 1)
        made = function(*(array[at] for array in arrays))
        found.append([np.asarray(part)[: total - start] for part in made])
    return tuple(map(np.concatenate, zip(*found, strict=True)))
