"""Deviation of a recipe's update from the effective-weight law, stage by stage.

The law says E[update] = mean over prompts of w(p) grad p. It holds for coefficients
that depend on labels alone, tokens summed, at the policy that sampled. A real step
departs from it in stages, all on the same completions:

    law           mean of w(p_x) grad p_x, from completions of its own
    credits       sum of credit times score, over the rows: what the law is about
    tokens        with the recipe's token weights and multipliers, `aggregate` and
                  `modulate`
    mini-batches  mean over the recipe's updates, each where the last one led, with the
                  plain ratio to the old policy
    loss          with the recipe's loss: clipping, ratios of sequences; KL, bonus
    norm          after clipping by global norm
    optimizer     minus the change of the parameters

Draws are repeated at the same policy on the same prompts. A product of two different
repetitions has no noise in its mean, so cosines and scales are those of the expected
updates, however noisy a single one is.
"""

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from curax import aggregate, loss, modulate, off_policy
from curax.config import Config, ConfigError
from curax.settings import errors
from curax.settings.sizes import is_cut_off
from curax.step import draw, drivers
from curax.step.learn import prepared
from curax.step.optimise import optimise
from curax.step.types import Components, StepRollouts
from curax.theory import gradient_stats, predict, probe
from curax.theory.gradient_stats import Sums
from curax.theory.population import LOWEST
from curax.types import TrainState

STAGES = "law", "credits", "tokens", "mini-batches", "loss", "norm", "optimizer"


def check(config: Config) -> None:
    """Check that a step trains the prompts that the data gives, without hints.

    Raises:
        ConfigError: in a sentence, if not.
    """
    probe.check(config)
    if config.hint:
        raise ConfigError(
            "hint draws some groups under hints, of which the law of a prompt says "
            "nothing; set hint to None."
        )
    if config.sampling.attempts > 1:
        raise ConfigError(
            f"sampling.attempts={config.sampling.attempts} replaces prompts, and the "
            "law is about those that were asked; set sampling.attempts to 1."
        )


def with_sums(config: Config, tx: optax.GradientTransformation, start: Any) -> Any:
    """The optimizer, with sums of gradients before and after clipping in its state."""
    clip = optax.clip_by_global_norm(config.update.clip_norm)

    def init(params: Any) -> Any:
        nothing = optax.tree.zeros_like(params)
        return start, nothing, nothing

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        made, own = tx.update(updates, state[0], params)
        clipped, _ = clip.update(updates, clip.init(params))
        add = optax.tree.add
        return made, (own, add(state[1], updates), add(state[2], clipped))

    return optax.GradientTransformation(init, update)


def variants(config: Config) -> list[Config]:
    """Variants of a recipe that add, one by one, what departs from the law."""
    summed: Any = partial(aggregate.constant_length, length=1)
    plain: Any = partial(loss.clipped_ratio, low=1.0, high=jnp.inf)
    over_old = ratio_over_old(config).update
    once = dataclasses.replace(over_old, minibatches=1, epochs=1)
    # Without weights, which of truncated draws must be said.
    rule = off_policy.none if is_cut_off(config) else None
    sampling = dataclasses.replace(config.sampling, off_policy=rule)
    several = dataclasses.replace(
        config,
        **{"kl": None, "entropy_bonus": 0.0, "loss": plain},
        **{"sampling": sampling, "update": over_old},
    )
    tokens = dataclasses.replace(several, loss=loss.reinforce, update=once)
    credits = dataclasses.replace(tokens, aggregate=summed, modulate=modulate.none)
    return [credits, tokens, several, config]


def ratio_over_old(config: Config) -> Config:
    """The recipe whose ratio is over the policy at the start of the step."""
    how = dataclasses.replace(config.update, behaviour_as_old=False)
    sampling = config.sampling
    if config.update.behaviour_as_old:
        sampling = dataclasses.replace(sampling, off_policy=off_policy.none)
    return dataclasses.replace(config, update=how, sampling=sampling)


def updates(
    parts: Components, state: TrainState, drawn: StepRollouts
) -> list[dict[str, Any]]:
    """Updates after each of STAGES but the law, in their order: trees like params."""
    # With log-probs of the old policy, which a ratio over others does without.
    over_old = dataclasses.replace(parts, config=ratio_over_old(parts.config))
    selected, _, batch = prepared(over_old, state, drawn)
    contexts = selected.drawn.contexts

    def made(config: Config) -> tuple[Any, Any, Any]:
        """Parameters, and minus the mean gradient before and after norm clipping."""
        tx = with_sums(config, parts.tx, state.opt_state)
        own = dataclasses.replace(state, opt_state=tx.init(state.params))
        less = dataclasses.replace(parts, config=config, tx=tx)
        params, (_, *sums), _ = optimise(less, own, contexts, batch)
        share = -1.0 / (config.update.minibatches * config.update.epochs)
        grads, clipped = (optax.tree.scale(share, x) for x in sums)
        return params, grads, clipped

    each = [made(config) for config in variants(parts.config)]
    params, _, clipped = each[-1]
    moved = optax.tree.sub(params, state.params)
    return [*(grads for _, grads, _ in each), clipped, moved]


def add_updates(
    parts: Components, state: TrainState, drawn: StepRollouts, sums: Any
) -> tuple[Any, jax.Array]:
    """Sums of updates, leaves `[6, ...]`, plus those of a step; products of these."""
    each = updates(parts, state, drawn)
    stacked = jax.tree.map(lambda *x: jnp.stack(x).astype(jnp.float32), *each)
    return optax.tree.add(sums, stacked), products(stacked, stacked)


def products(x: Any, y: Any) -> jax.Array:
    """`[a, b]` inner products of trees with leaves `[a, ...]` and `[b, ...]`."""
    of = partial(jnp.einsum, "i...,j...->ij", precision="highest")
    leaves = zip(jax.tree.leaves(x), jax.tree.leaves(y), strict=True)
    return sum((of(a, b) for a, b in leaves), jnp.float32(0))


def residual(
    parts: Components,
    state: TrainState,
    samples: int,
    repeats: int,
    on_progress: Callable[[int, int], None] = lambda done, total: None,
) -> list[dict[str, Any]]:
    """Cosine and scale of the expected update after each of STAGES.

    Args:
        parts: components of a run, which `check` lets pass.
        state: at the start of a step; its optimizer too.
        samples: completions of each prompt of the step for the law, as `probe.probe`.
        repeats: draws of the step, 2 at least.
        on_progress: called with the number of repeats done, and of all.

    Returns:
        As JSON, a row of each of STAGES: "cosine" and "scale" to the law,
        "cosine_before" and "scale_before" to the row before, of expected updates, and
        "single_cosine", of a single update to the law. Null where noise leaves
        nothing.
    """
    drive, config = drivers.Hosted(), parts.config
    often = 0 if int(state.step) == 0 else None

    def weigh(p: np.ndarray) -> np.ndarray:
        rates = np.clip(p, max(0.5 / samples, LOWEST), 1 - max(0.5 / samples, LOWEST))
        every = np.unique(rates)
        with errors.config_errors(config):
            seen = predict.predict(config, every, rates, often=often)
        return np.interp(rates, every, seen.weight)

    ids = np.asarray(drive.call(draw.next_ids, parts, state, jnp.int32(0)))
    found = probe.probe(parts, state, ids, samples, drive=drive, weigh=weigh)
    law, count = found.gradient, len(ids)
    each = gradient_stats.estimates(Sums(*(x[2] for x in found.sums)))
    size = float(optax.tree.norm(law, squared=True))
    size += float(np.sum(found.weight**2 * (each.gradient - each.own))) / count**2
    total = jax.tree.map(lambda x: jnp.zeros((6, *x.shape)), state.params)
    gram = np.zeros((6, 6))
    for number in range(repeats):
        now = dataclasses.replace(state, step=state.step + jnp.int32(number))
        drawn = draw.attempt(drive, parts, now, None)
        total, own = drive.call(add_updates, parts, now, drawn, total)
        gram += np.asarray(own, np.float64)
        on_progress(number + 1, repeats)
    whole = np.asarray(products(total, total), np.float64)
    one = jax.tree.map(lambda x: x[None], law)
    along = np.asarray(products(one, total), np.float64)[0] / repeats
    return rows(whole, gram, along, size, repeats)


def rows(
    whole: np.ndarray, gram: np.ndarray, along: np.ndarray, size: float, repeats: int
) -> list[dict[str, Any]]:
    """Rows of `residual` from products of updates.

    Args:
        whole: `[6, 6]` products of their sums over the repetitions.
        gram: `[6, 6]` sums of their products within a repetition.
        along: `[6]` products of their means with the law.
        size: squared norm of the law, without its noise.
        repeats: how many.
    """
    expected = np.empty((7, 7))
    expected[1:, 1:] = (whole - gram) / (repeats * (repeats - 1))
    expected[0, 1:] = expected[1:, 0] = along
    expected[0, 0] = size
    single = np.sqrt(np.diag(gram) / repeats * max(size, 0))

    def ratio(value: float, by: float) -> float | None:
        return float(value / by) if by > 0 else None

    found = []
    for i, name in enumerate(STAGES):
        before = max(i - 1, 0)
        norms = [max(expected[k, k], 0) for k in (0, before, i)]
        found.append(
            {
                "stage": name,
                "cosine": ratio(expected[0, i], np.sqrt(norms[0] * norms[2])),
                "scale": ratio(expected[0, i], norms[0]),
                "cosine_before": ratio(
                    expected[before, i], np.sqrt(norms[1] * norms[2])
                ),
                "scale_before": ratio(expected[before, i], norms[1]),
                "single_cosine": 1.0 if i == 0 else ratio(along[i - 1], single[i - 1]),
            }
        )
    return found
