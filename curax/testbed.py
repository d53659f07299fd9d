"""Test beds of configs/: task, model, warm start and evaluation for a recipe.

A recipe states its method; everything else stands here, once.
"""

from dataclasses import replace
from functools import partial
from typing import Any

import optax

from curax import allocate, correct, downsample, gate, modulate, objective, update
from curax.config import (
    Config,
    ConfigError,
    Evaluation,
    Logging,
    Sampling,
    Update,
    WarmStart,
    transferred,
)
from curax.models import pretrained, transformer
from curax.settings.config_types import Function
from curax.tasks import chain, word_problems

# Fields by which some prompts or completions count more than others.
SELECTION = ("allocate", "pilot", "stop", "gate", "downsample")


def embedded(
    *,
    sampling: Sampling,
    advantage: Function,
    loss: Function,
    aggregate: Function,
    **fields: Any,
) -> Config:
    """A recipe on the embedded task, chains of modular arithmetic, in CPU minutes.

    The policy is a transformer of two layers; 500 supervised steps on the traces of a
    teacher with bad habits are its warm start. RL is 200 steps of two Adam updates
    each. 256 held-out prompts are evaluated every 50 steps, 8 completions each.

    A stage that is not named does nothing: prompts draw equally many completions, all
    of them train, and the objective is the pass rate itself. `correct` may be left out
    only where nothing is selected (`SELECTION`): a recipe that selects says how that is
    undone.

    Args:
        sampling: numbers of prompts, completions and tokens; right completions take up
            to 7 tokens.
        advantage: credit of a completion.
        loss: loss of a token.
        aggregate: weight of a token.
        **fields: of `Config`, in place of what is said above.

    Returns:
        The config of the recipe.

    Raises:
        ConfigError: `correct` is missing where something is selected; or what `Config`
            raises.
    """
    selects = [name for name in SELECTION if name in fields]
    if selects and "correct" not in fields:
        raise ConfigError(
            f"correct is not set, but {' and '.join(selects)} may select; set correct "
            "to what undoes that, or to correct.none."
        )
    warm_up = partial(update.warmup_cosine, peak=8e-3, warmup=20, steps=500, end=3e-4)
    shared: dict[str, Any] = {
        "task": chain.task,
        "model": partial(transformer.model, width=64, layers=2, heads=4, kv_heads=2),
        "warm_start": WarmStart(
            steps=500,
            rows=128,
            optimizer=partial(optax.adamw, learning_rate=warm_up, weight_decay=0.01),
        ),
        "allocate": allocate.uniform,
        "gate": gate.none,
        "downsample": downsample.none,
        "objective": partial(objective.prompt_weight, f=objective.linear),
        "correct": correct.none,
        "modulate": modulate.none,
        "optimizer": partial(optax.adam, learning_rate=3e-4, b2=0.99),
        "update": Update(minibatches=2),
        "evaluation": Evaluation(every=50, prompts=256, samples=8),
        "steps": 200,
    }
    return Config(
        sampling=sampling,
        advantage=advantage,
        loss=loss,
        aggregate=aggregate,
        **(shared | fields),
    )


def from_checkpoint(
    recipe: Config,
    *,
    path: str,
    max_tokens: int,
    tokens_per_micro_batch: int,
    **fields: Any,
) -> Config:
    """A recipe on a Hugging Face checkpoint and a task of one's own.

    The stages of the recipe stay, and so do its numbers of completions and of updates
    per batch (`transferred`). The policy computes in bfloat16 and recomputes
    activations; RL is 200 steps of AdamW at a rate of 1e-6, with the logits of 512
    tokens at a time and rows in three lengths. 256 held-out prompts are
    evaluated every 20 steps, 4 completions each, and there is no warm start.

    Args:
        recipe: what `load` gives of a file in configs/.
        path: folder of the checkpoint.
        max_tokens: of a completion.
        tokens_per_micro_batch: that each device, or group of devices that share its
            rows, scores at a time; fewer take less memory.
        **fields: of `Config`, in place of what is said above; `task` is needed.

    Returns:
        The config of the run.

    Raises:
        ConfigError: what `Config` raises.
    """
    shared = {
        "model": partial(pretrained.model, path=path, remat="everything"),
        "optimizer": partial(
            optax.adamw, learning_rate=1e-6, b2=0.95, weight_decay=0.0
        ),
        "update": replace(
            recipe.update,
            tokens_per_micro_batch=tokens_per_micro_batch,
            token_chunk=512,
            length_buckets=3,
        ),
        "evaluation": Evaluation(every=20, prompts=256, samples=4),
        "logging": Logging(every=1, checkpoint_every=20),
        "steps": 200,
    }
    return transferred(recipe, max_tokens=max_tokens, **(shared | fields))


def in_words(recipe: Config, **fields: Any) -> Config:
    """A recipe on generated word problems, in text and from nothing.

    The policy is a transformer of 3.4 million parameters in the form of Qwen3; its warm
    start is pretraining on the solutions of a teacher with bad habits. The stages of
    the recipe stay, and so do its numbers of completions of a prompt and of updates of
    a batch; there are four times its prompts, and its budget.

    Args:
        recipe: what `load` gives of a file in configs/.
        **fields: of `Config`, in place of what is said above.

    Returns:
        The config of the run.

    Raises:
        ConfigError: what `Config` raises.
    """
    warm_up = partial(update.warmup_cosine, peak=2e-3, warmup=50, steps=450, end=1e-4)
    shared: dict[str, Any] = {
        "sampling": replace(
            recipe.sampling,
            prompts=4 * recipe.sampling.prompts,
            budget=4 * recipe.sampling.budget,
        ),
        "task": partial(word_problems.task, hints=bool(recipe.hint)),
        "model": partial(
            transformer.model,
            width=256,
            layers=4,
            heads=4,
            kv_heads=2,
            head_dim=64,
            mlp_width=768,
        ),
        "warm_start": WarmStart(
            steps=450,
            rows=32,
            optimizer=partial(optax.adamw, learning_rate=warm_up, b2=0.98),
        ),
        "optimizer": partial(optax.adam, learning_rate=2e-4, b2=0.99),
        "update": replace(recipe.update, tokens_per_micro_batch=2048),
        "evaluation": Evaluation(every=20, prompts=96, samples=16, k=16),
        "logging": Logging(every=1, checkpoint_every=20),
        "steps": 60,
    }
    return transferred(recipe, max_tokens=40, **(shared | fields))
