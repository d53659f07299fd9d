"""The config of a run: frozen dataclasses with checks, and one function per stage.

Options of a function are bound by `functools.partial`, so a default stands once, in a
signature. Every value has a dotted name: a field (`sampling.group_size`), an option of
a function (`loss.high`), an option of an option (`objective.f.alpha`) or an entry of a
tuple (`gate.gates.0.delta`). Errors, `override`, `describe` and `changes` use these
names. The fields stand in `settings/groups.py`, what conflicts in
`settings/conflicts.py`, what follows from them in `settings/sizes.py`. Only the
standard library is imported.
"""

import dataclasses
import inspect
import itertools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from curax.settings import files
from curax.settings.config_paths import (
    ConfigError,
    Place,
    assign,
    option,
    rebuild,
    wrong_options,
    wrong_values,
)
from curax.settings.conflicts import conflicts
from curax.settings.declared import declared
from curax.settings.groups import (
    KL,
    Evaluation,
    Fields,
    Hint,
    Logging,
    Memory,
    Mesh,
    Pilot,
    Queries,
    Reflection,
    Sampling,
    Stop,
    Update,
    WarmStart,
    Writing,
)
from curax.settings.recipes import file_of, loading, made_by, recipes

__all__ = [
    "ALIASES",
    "KL",
    "Config",
    "ConfigError",
    "Evaluation",
    "Hint",
    "Logging",
    "Memory",
    "Mesh",
    "Pilot",
    "Queries",
    "Reflection",
    "Sampling",
    "Stop",
    "Update",
    "WarmStart",
    "Writing",
    "load",
    "override",
    "recalled",
    "transferred",
]

# Stages called without keywords, so that all their options must be bound.
_STAGES = (
    *("objective", "gate", "downsample", "correct", "advantage", "modulate"),
    *("loss", "aggregate"),
)


@dataclass(frozen=True, kw_only=True)
class Config(Fields):
    """Config of a run. Stages have no default: a recipe, or its test bed, names each.

    Raises:
        ConfigError: on construction; the message names the first wrong field and a fix.
    """

    def __post_init__(self) -> None:
        place = Place(self)
        values, bound = wrong_values(place), wrong_options(place, _STAGES)
        for wrong in itertools.chain(values, bound, conflicts(self)):
            raise ConfigError(wrong)


def load(path: str | Path) -> Config:
    """Load the config that a Python file returns from its `get_config()`.

    Args:
        path: Python file, or the name of a recipe in configs/, such as grpo.

    Raises:
        ConfigError: the file is missing, is not Python, fails, or returns no Config.
    """
    file = file_of(Path(path))
    with loading(file):
        return made_by(file, "get_config", Config)


def transferred(recipe: Config, *, max_tokens: int, **fields: Any) -> Config:
    """A recipe on another task, with the same stages and numbers of completions.

    Lengths in tokens (`aggregate.length`, `shape_reward`, `hint.width`) are scaled with
    `sampling.max_tokens`. The warm start is dropped.

    Args:
        recipe: config of the recipe.
        max_tokens: tokens per completion on the other task.
        **fields: fields of `Config` to replace.
    """
    before = recipe.sampling.max_tokens
    config = dataclasses.replace(recipe, **{"warm_start": None, **fields})
    now: dict[str, Any] = {}
    for name in ("aggregate", "shape_reward"):
        stage = getattr(recipe, name)
        if stage and name not in fields:
            for key in declared(stage, "lengths", ()):
                now[f"{name}.{key}"] = option(stage, key)
    if recipe.hint and "hint" not in fields:
        now["hint.width"] = recipe.hint.width
        if recipe.hint.writing:
            now["hint.writing.max_tokens"] = recipe.hint.writing.max_tokens
    lengths = {
        name: type(length)(max(1, round(length * max_tokens / before)))
        for name, length in now.items()
        if length
    }
    lengths["sampling.max_tokens"] = max_tokens
    return override(config, lengths)


def recalled(path: str | Path) -> Config:
    """Load the config that a run wrote as config.json.

    Raises:
        ConfigError: the file cannot be read, or names a function that does not exist.
    """
    found = {}
    try:
        read = files.json_of(files.read(Path(path)))
        found = read if isinstance(read, dict) else {}
        return rebuild(found, Config)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from error
    except OSError as error:
        raise ConfigError(
            f"{path} cannot be read ({error.strerror}); name the folder of a run."
        ) from error
    except (ValueError, TypeError, AttributeError) as error:
        lacks = _lacking(found) if isinstance(error, TypeError) else []
        why = f"it lacks {', '.join(lacks)}" if lacks else error
        raise ConfigError(f"{path}: {why}; name the folder of a run.") from error


def _lacking(description: Mapping[str, Any]) -> list[str]:
    """Fields without a default that a description of a config has not."""
    fields = inspect.signature(Config).parameters.values()
    needs = [field.name for field in fields if field.default is field.empty]
    return [name for name in needs if name not in description]


def override(config: Config, assignments: Iterable[str] | Mapping[str, Any]) -> Config:
    """A config with values set by dotted name; it is checked once all are set.

    Args:
        config: config to change.
        assignments: `NAME=VALUE` strings, VALUE a Python literal, true, false, none,
            inf or else text; or a mapping from names to values. Numbers may be arrays,
            so that a run can be vmapped over magnitudes.

    Raises:
        ConfigError: an unknown name, a value of the wrong type, or a failed check.
    """
    return dataclasses.replace(assign(config, assignments, recipes, ALIASES))


# What other programs call a field, by the last part of its name, or the last two.
_CALLED = {
    "advantage": (
        "adv_estimator advantage_estimator norm_adv_by_std_in_grpo scale_rewards"
    ),
    "aggregate": "loss_agg_mode loss_type",
    "entropy_bonus": "entropy_coef entropy_coeff",
    "evaluation.every": "eval_every eval_every_n_steps eval_steps test_freq",
    "evaluation.samples": "num_generations_eval",
    "gate": "mask_truncated_completions",
    "kl.coefficient": "beta kl_coef kl_coeff kl_loss_coef",
    "kl.estimator": "kl_loss_mode kl_loss_type",
    "logging.checkpoint_every": "save_every save_freq save_steps",
    "logging.every": "log_every logging_steps",
    "logging.keep": "max_actor_ckpt_to_keep save_total_limit",
    "loss": "importance_sampling_level loss_algo loss_mode",
    "loss.dual": "clip_ratio_c",
    "loss.high": "clip clip_range clip_ratio clip_ratio_high epsilon epsilon_high",
    "loss.low": "clip_ratio_low epsilon_low",
    "modulate": "top_entropy_quantile",
    "optimizer.learning_rate": "lr",
    "sampling.off_policy": (
        "rollout_is rollout_is_batch_normalize rollout_is_threshold rollout_rs "
        "rollout_rs_threshold sampler_is "
        "vllm_importance_sampling_clip_max "
        "vllm_importance_sampling_correction vllm_importance_sampling_mode"
    ),
    "sampling.group_size": "num_generations num_samples rollout.n rollout_n rollouts",
    "sampling.max_tokens": (
        "max_completion_length max_length max_new_tokens max_response_length "
        "max_tokens_to_generate"
    ),
    "sampling.prompts": "batch_size per_device_train_batch_size train_batch_size",
    "sampling.attempts": "max_num_gen_batches",
    "sampling.slots": "max_num_seqs",
    "steps": "max_steps num_steps total_steps total_training_steps",
    "update.behaviour_as_old": "bypass_mode",
    "update.clip_norm": "grad_clip max_grad_norm",
    "update.epochs": "num_epochs num_iterations ppo_epochs",
    "update.micro_batches": "gradient_accumulation_steps",
    "update.minibatches": "mini_batches",
    "update.tokens_per_micro_batch": "ppo_max_token_len_per_gpu",
}
ALIASES = {name: field for field, names in _CALLED.items() for name in names.split()}
