"""Check of every stage of a config on made-up outcomes, before anything is drawn.

Training and the x-ray both begin with it, so both refuse the same configs. Shapes and
dtypes are checked by `stages`, values here.
"""

from collections.abc import Mapping
from operator import attrgetter
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from curax.config import Config, ConfigError
from curax.settings.sizes import kept_of, rows_of
from curax.step import stages
from curax.step.types import grid_of
from curax.types import Difficulty, Tokens

TRIALS = 4  # batches of made-up outcomes
ROWS, TOKENS = 4, 6  # shape of the per-token arrays


def check(config: Config) -> None:
    """Call every stage on made-up outcomes and check the values it returns.

        allocate      integers in [0, group_size], sum at most the completions of a step
        gate          a subset of what exists
        downsample    a subset of the gate's, at most its option m of a group
        the others    finite numbers where they count

    Raises:
        ConfigError: in a sentence with field, function and fix, for the first stage
            that fails or returns a value out of range.
    """
    _check_counts(config)
    _check_credit(config)
    _check_tokens(config)


def _refused(config: Config, field: str, what: str) -> ConfigError:
    called = stages.named(field, attrgetter(field)(config))
    return ConfigError(f"{called} {what}; mend the function, or name another.")


def _check_finite(config: Config, found: Mapping[str, np.ndarray]) -> None:
    """Check what functions gave, by their fields."""
    for field, values in found.items():
        if not np.isfinite(values).all():
            bad = values[~np.isfinite(values)][0]
            raise _refused(config, field, f"gives {bad}, which is not finite")


def _check_counts(config: Config) -> None:
    """Check the allocator's counts, on prompts with and without draws in memory."""
    sizes, budget = config.sampling, rows_of(config)
    prompts, most = sizes.prompts, sizes.group_size

    @jax.jit
    def counts(solved: jax.Array, drawn: jax.Array) -> jax.Array:
        known = Difficulty(
            draws=drawn,
            solved=solved,
            pass_rate=(solved + 1.0) / (drawn + 2.0),
            norm=jnp.ones_like(drawn),
            tokens=jnp.full_like(drawn, sizes.max_tokens),
        )
        return stages.called(config, "allocate", known, budget=budget, most=most)

    random = np.random.default_rng(0)
    for trial in range(TRIALS):
        drawn = np.full(prompts, 8.0 * (trial > 0), np.float32)
        share = random.integers(0, 9, prompts) / 8 if trial > 1 else np.zeros(prompts)
        got = np.asarray(counts(np.float32(share) * drawn, drawn))
        outside = got[(got < 0) | (got > most)]
        if outside.size:
            raise _refused(
                config,
                "allocate",
                f"gives a prompt {outside[0]} completions, and must give from 0 to "
                f"sampling.group_size={most}",
            )
        if got.sum() > budget:
            raise _refused(
                config,
                "allocate",
                f"gives {got.sum()} completions to {prompts} prompts, and a step has "
                f"{budget}, so that {got.sum() - budget} would be dropped",
            )


def _check_credit(config: Config) -> None:
    """Check gate to advantage on whole and partial groups with random outcomes."""
    shape = grid_of(config)
    most = kept_of(config)

    @jax.jit
    def credit(seed, outcome, exists):
        length = jnp.where(exists, 1, 0)
        reward = stages.shaped(config, outcome, length)
        history = jnp.full(shape[:1], 0.5, jnp.float32)
        pool = stages.called(config, "gate", outcome, exists, exists)
        key = jax.random.key(seed)
        keep = stages.called(config, "downsample", key, reward, pool)
        sees = exists if config.pool_statistics else keep
        found = {"shape_reward": jnp.where(exists, reward, 0.0)}
        for field, arrays in {
            "correct": (reward, pool, keep),
            "objective": (outcome, exists, history),
            "advantage": (reward, sees),
        }.items():
            found[field] = jnp.where(keep, stages.called(config, field, *arrays), 0.0)
        if config.stop:
            found["stop.rule"] = stages.called(config, "stop.rule", outcome, exists)
        return pool, keep, found

    random = np.random.default_rng(0)
    place = np.arange(shape[1])
    for trial in range(TRIALS):
        number = random.integers(0, shape[1] + 1, (shape[0], 1))
        exists = place < (shape[1] if trial % 2 else number)
        exists = np.broadcast_to(exists, shape)
        rate = random.choice([0.0, 0.2, 0.5, 1.0], (shape[0], 1))
        outcome = ((random.random(shape) < rate) & exists).astype(np.float32)
        pool, keep, found = jax.device_get(credit(np.uint32(trial), outcome, exists))
        if (pool & ~exists).any():
            raise _refused(config, "gate", "lets completions train that do not exist")
        if (keep & ~pool).any():
            raise _refused(config, "downsample", "keeps what the gate has closed")
        if isinstance(most, int) and (keep.sum(-1) > most).any():
            raise _refused(
                config,
                "downsample",
                f"keeps {keep.sum(-1).max()} completions of a prompt, and its m is "
                f"{most}",
            )
        fields = ("shape_reward", "correct", "objective", "advantage")
        _check_finite(config, {field: found[field] for field in fields})


def _check_tokens(config: Config) -> None:
    """Check the per-token stages on long, short and empty rows."""
    mask = np.arange(TOKENS) < np.array([TOKENS, 3, 1, 0])[:, None]
    logp = np.where(mask, -np.linspace(0.1, 2.0, mask.size).reshape(mask.shape), 0)

    @jax.jit
    def values(logp, mask):
        each = jnp.asarray([1.0, -1.0, 0.5, 0.0])
        credit = jnp.broadcast_to(each[:, None], mask.shape)
        spread = jnp.full(mask.shape, 0.5)
        tokens = Tokens(
            mask=mask,
            credit=jnp.where(mask, credit, 0.0),
            logp=logp,
            logp_old=logp,
            entropy=spread,
            score_sq_norm=spread,
            entropy_logp_cov=-spread,
        )
        given: dict[str, tuple[Any, ...]] = {
            "loss": (logp, logp, credit, mask),
            "aggregate": (mask,),
            "modulate": (tokens,),
        }
        if config.kl:
            given["kl.estimator"] = (logp, logp)
        return {
            field: jnp.where(mask, stages.called(config, field, *arrays), 0.0)
            for field, arrays in given.items()
        }

    _check_finite(config, jax.device_get(values(logp.astype(np.float32), mask)))
