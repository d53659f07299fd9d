"""A configuration of TRL as a recipe: what its GRPO would optimise, without TRL.

Names, defaults and meanings are those of `trl.GRPOConfig` 1.16.0. An option that
changes the objective is converted or refused; docs/from_trl.md has the table.
"""

import dataclasses
import difflib
import math
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import optax
import yaml

from curax import advantage, aggregate, correct, gate, loss, modulate, off_policy
from curax.config import KL, Config, ConfigError, Sampling, Update
from curax.settings import files
from curax.settings.errors import refusals
from curax.testbed import embedded

# What decides the objective and the batch, with the defaults of TRL and transformers.
DEFAULTS: Mapping[str, Any] = {
    "num_generations": 8,
    "per_device_train_batch_size": 8,
    "gradient_accumulation_steps": 1,
    "generation_batch_size": None,
    "steps_per_generation": None,
    "num_iterations": 1,
    "max_steps": -1,
    "max_completion_length": 512,
    "temperature": 1.0,
    "top_p": 1.0,
    "top_k": 0,
    "min_p": None,
    "repetition_penalty": 1.0,
    "generation_kwargs": None,
    "beta": 0.0,
    "use_bias_correction_kl": True,
    "sync_ref_model": False,
    "epsilon": 0.2,
    "epsilon_high": None,
    "delta": None,
    "importance_sampling_level": "token",
    "off_policy_mask_threshold": None,
    "loss_type": "dapo",
    "scale_rewards": "group",
    "reward_weights": None,
    "multi_objective_aggregation": "sum_then_normalize",
    "mask_truncated_completions": False,
    "top_entropy_quantile": 1.0,
    "entropy_coef": 0.0,
    "use_adaptive_entropy": False,
    "learning_rate": 1e-6,
    "max_grad_norm": 1.0,
}
EPS = 1e-4  # what TRL adds to a standard deviation
REFUSED = {  # an option that must have its default, and why
    "min_p": "draws from another distribution than the policy that trains",
    "repetition_penalty": "draws from another distribution than the policy that trains",
    "generation_kwargs": "may change the distribution that is drawn from",
    "sync_ref_model": "moves the reference of the KL penalty, which stays here",
    "off_policy_mask_threshold": "drops completions by how far the policy has moved",
    "multi_objective_aggregation": "standardises rewards that are one outcome here",
    "use_adaptive_entropy": "changes the entropy bonus as the run goes on",
}
AGGREGATES = {  # loss_type: token weights
    "dapo": aggregate.token_mean,
    "cispo": aggregate.token_mean,
    "grpo": aggregate.sequence_mean,
}
LOSS_FIX = {  # loss_type without a counterpart: why, and the nearest that has one
    "bnpo": ("divides by the tokens of each micro-batch, so its size matters", "dapo"),
    "luspo": ("weighs a completion by its length", "grpo"),
    "sapo": ("has a soft clip", "grpo"),
    "vespo": ("weighs completions by a gamma density of their ratio", "cispo"),
}


@dataclasses.dataclass(frozen=True)
class Conversion:
    """A recipe converted from TRL, with options and details that it leaves out.

    Attributes:
        fields: arguments of `testbed.embedded`.
        unread: options that were given and have no counterpart.
        remarks: sentences about what is not the same, word for word.
    """

    fields: Mapping[str, Any]
    unread: tuple[str, ...]
    remarks: tuple[str, ...]

    def config(self) -> Config:
        """The recipe on the embedded task.

        Raises:
            ConfigError: what `Config` raises.
        """
        return embedded(**self.fields)


def of_trl(given: Mapping[str, Any]) -> Conversion:
    """The recipe of a `GRPOConfig` of TRL, by its names; one process is assumed.

    With binary rewards, TRL's advantages are (r - q) / (s + 1e-4), s the standard
    deviation of a group with ddof 1; the token losses are summed and divided by the
    tokens of the batch (`dapo`, the default), of the completion (`grpo`), or by
    `max_completion_length` (`dr_grpo`).

    Args:
        given: options by name; those that are missing have TRL's default.

    Raises:
        ConfigError: an option has a wrong type, changes the objective and has no
            counterpart, or is probably misspelt.
    """
    _check_names(given)
    options = {
        name: _typed(name, given.get(name, default))
        for name, default in DEFAULTS.items()
    }
    for name, why in REFUSED.items():
        if options[name] != DEFAULTS[name]:
            raise _refusal(name, options[name], why, DEFAULTS[name])
    _check_reward_weights(options["reward_weights"])
    remarks = list[str]()
    sampling, update, steps = _batch(options, remarks)
    if sampling.off_policy:
        remarks.append("top_k and top_p truncate, and neither program corrects that")
    fields: dict[str, Any] = {
        "sampling": sampling,
        "update": update,
        "advantage": _advantage(options),
        "loss": _loss(options),
        "aggregate": _aggregate(options),
        "kl": _kl(options, remarks),
        "entropy_bonus": _entropy_bonus(options, remarks),
        "optimizer": partial(optax.adamw, learning_rate=options["learning_rate"]),
    }
    if steps:
        fields["steps"] = steps
    if options["mask_truncated_completions"]:
        fields |= {"gate": gate.overlong, "correct": correct.none}
    if options["top_entropy_quantile"] < 1:
        share = options["top_entropy_quantile"]
        fields["modulate"] = partial(modulate.forking_tokens, share=share)
        remarks.append("the entropy threshold is that of the update, not a micro-batch")
    rows = sampling.prompts * sampling.group_size
    remarks.append(f"one process is assumed, so a step draws {rows} completions")
    unread = tuple(sorted(name for name in given if name not in DEFAULTS))
    return Conversion(fields, unread, tuple(remarks))


def read_trl(path: Path) -> Conversion:
    """The recipe of a YAML or JSON file with options of a `GRPOConfig`.

    Raises:
        ConfigError: the file cannot be read, is no mapping, or as `of_trl`.
    """
    try:
        given = yaml.safe_load(files.read(path))
    except OSError as error:
        fix = f"({error.strerror}); name a file with options of a GRPOConfig"
        raise ConfigError(f"{path} cannot be read {fix}.") from error
    except (ValueError, RecursionError, yaml.YAMLError) as error:
        why = " ".join(str(error).split())
        fix = f"({why}); write NAME: VALUE on each line"
        raise ConfigError(f"{path} is no YAML {fix}.") from error
    if not isinstance(given, dict) or not all(isinstance(key, str) for key in given):
        raise ConfigError(
            f"{path} holds {type(given).__name__}, and options have names; write "
            "NAME: VALUE on each line."
        )
    with refusals(of=str(path)):
        return of_trl(given)


def _check_names(given: Mapping[str, Any]) -> None:
    """Check that no name is nearly one that decides something."""
    for name in given:
        near = difflib.get_close_matches(name, DEFAULTS, 1, cutoff=0.9)
        if near and name not in DEFAULTS:
            raise ConfigError(
                f"{name}={given[name]} is no option; did you mean {near[0]}?"
            )


def _check_reward_weights(weights: Any) -> None:
    """Check that there is one reward at most, and that it counts as it is."""
    if weights is None or weights == [1]:
        return
    listed = isinstance(weights, list) and weights
    if not listed or any(type(weight) not in (int, float) for weight in weights):
        raise ConfigError(
            f"reward_weights={weights!r} must be a list of numbers; write "
            "reward_weights: [1.0], or leave it out."
        )
    why = "multiplies the reward, which is the outcome here"
    if len(weights) > 1:
        why = (
            "adds up several rewards, as graders.weighted of a config does, and w(p) "
            "is of one outcome"
        )
    raise _refusal("reward_weights", weights, why, None)


def _typed(name: str, value: Any) -> Any:
    """The value, as a number where the default is one; YAML reads 1e-6 as text."""
    default = DEFAULTS[name]
    numbers = ("epsilon_high", "delta", "generation_batch_size", "steps_per_generation")
    if name == "scale_rewards" and isinstance(value, bool):
        return "group" if value else "none"
    if name in numbers and value is None:
        return None
    if name in numbers or type(default) in (int, float):
        whole = type(default) is int or name in numbers[2:]
        try:
            number = math.nan if isinstance(value, bool) else float(value)
        except (OverflowError, TypeError, ValueError):
            number = math.nan
        kind, fits = "a number, finite and at least 0", 0 <= number < math.inf
        if whole:
            kind = "a whole number below 2**31"
            fits = number.is_integer() and abs(number) < 2**31
        if not fits:
            raise ConfigError(
                f"{name}={value!r} must be {kind}; leave it out for the default, "
                f"{default}."
            )
        return int(number) if whole else number
    if type(default) in (bool, str) and type(value) is not type(default):
        raise ConfigError(
            f"{name}={value!r} must be a {type(default).__name__}; leave it out for "
            f"the default, {default}."
        )
    return value


def _refusal(name: str, value: Any, why: str, fix: Any) -> ConfigError:
    """The error of an option that cannot be converted."""
    shown = "null" if fix is None else str(fix).lower() if fix in (True, False) else fix
    return ConfigError(
        f"{name}={value} {why}, and has no counterpart; write {name}: {shown}."
    )


def _batch(
    options: Mapping[str, Any], remarks: list[str]
) -> tuple[Sampling, Update, int]:
    """Sampling, updates of a step, and steps (0: not said).

    A remark is added where TRL divides an update by tokens of other completions.
    """
    for name in (
        *("num_generations", "per_device_train_batch_size", "num_iterations"),
        *("gradient_accumulation_steps", "max_completion_length"),
        *("generation_batch_size", "steps_per_generation"),
    ):
        least = 2 if name == "num_generations" else 1
        if options[name] is not None and options[name] < least:
            raise ConfigError(
                f"{name}={options[name]} must be at least {least}; write {name}: "
                f"{least}."
            )
    group, rows = options["num_generations"], options["per_device_train_batch_size"]
    added = options["gradient_accumulation_steps"]
    if None not in (options["generation_batch_size"], options["steps_per_generation"]):
        raise ConfigError(
            f"generation_batch_size={options['generation_batch_size']} and "
            f"steps_per_generation={options['steps_per_generation']} say the same; "
            "leave one out."
        )
    drawn = options["generation_batch_size"] or rows * (
        options["steps_per_generation"] or added
    )
    if drawn % rows or drawn % group:
        raise ConfigError(
            f"generation_batch_size={drawn} must be a multiple of "
            f"per_device_train_batch_size={rows} and of num_generations={group}; write "
            f"generation_batch_size: {math.lcm(rows, group)}."
        )
    batches, epochs = drawn // rows, options["num_iterations"]
    if batches % added and (added % batches or epochs > 1):
        raise ConfigError(
            f"gradient_accumulation_steps={added} is no part of the {batches} batches "
            f"of a generation; write gradient_accumulation_steps: {batches}."
        )
    if batches != added and options["loss_type"] in ("dapo", "cispo"):
        remarks.append(
            "an update divides by its own tokens, TRL by "
            f"{added / batches:g} times those of a generation batch"
        )
    # An update may span several generations of one policy: they are one step here.
    drawn *= max(1, added // batches)
    minibatches = max(1, batches // added)
    top_k, top_p = max(options["top_k"], 0), options["top_p"]
    sampling = Sampling(
        prompts=drawn // group,
        group_size=group,
        max_tokens=options["max_completion_length"],
        temperature=options["temperature"],
        top_k=top_k,
        top_p=top_p,
        off_policy=off_policy.none if top_k > 0 or top_p < 1 else None,
    )
    clip = options["max_grad_norm"] or float("inf")
    update = Update(epochs=epochs, minibatches=minibatches, clip_norm=clip)
    return sampling, update, -(-max(options["max_steps"], 0) // (epochs * minibatches))


def _advantage(options: Mapping[str, Any]) -> Callable[..., Any]:
    """Credit in the group by `scale_rewards`."""
    scale = options["scale_rewards"]
    if scale == "group":
        return partial(advantage.standardised, eps=EPS, bessel=True)
    if scale == "none":
        return advantage.group_mean
    if scale == "batch":
        why = "divides by the deviation of the batch what is centred on the group"
        raise _refusal("scale_rewards", scale, why, "none")
    raise ConfigError(
        f"scale_rewards={scale} is none of group, batch and none; write "
        "scale_rewards: group."
    )


def _loss(options: Mapping[str, Any]) -> Callable[..., Any]:
    """Loss of a token by `loss_type` and `importance_sampling_level`."""
    low, high = options["epsilon"], options["epsilon_high"]
    high = low if high is None else high
    kind, level = options["loss_type"], options["importance_sampling_level"]
    if level not in ("token", "sequence"):
        raise ConfigError(
            f"importance_sampling_level={level} is neither token nor sequence; write "
            "importance_sampling_level: token."
        )
    if kind == "cispo":
        if level == "sequence":
            why = "is not that of CISPO, whose ratio is that of a token"
            raise _refusal("importance_sampling_level", level, why, "token")
        if high < 1:
            why = "is the largest weight of a token in CISPO, and would cap ratios at 1"
            raise _refusal("epsilon_high", high, why, 5.0)
        return partial(loss.cispo, low=1.0, high=high - 1)
    if level == "sequence":
        if options["delta"] is not None:
            why = "clips ratios of completions from above"
            raise _refusal("delta", options["delta"], why, None)
        return partial(loss.gspo, low=low, high=high)
    delta = options["delta"]
    if delta is not None and delta < 1 + high:
        why = f"is below 1 + epsilon_high, {1 + high:g}, so caps rewarded tokens too"
        raise _refusal("delta", delta, why, None)
    return partial(loss.clipped_ratio, low=low, high=high, dual=delta)


def _aggregate(options: Mapping[str, Any]) -> Callable[..., Any]:
    """Token weights by `loss_type`."""
    kind = options["loss_type"]
    if kind == "dr_grpo":
        length = options["max_completion_length"]
        return partial(aggregate.constant_length, length=length)
    if kind in LOSS_FIX:
        raise _refusal("loss_type", kind, *LOSS_FIX[kind])
    if kind not in AGGREGATES:
        known = ", ".join([*AGGREGATES, "dr_grpo"])
        raise ConfigError(
            f"loss_type={kind} is not known; write one of {known}, such as "
            "loss_type: dapo."
        )
    if kind == "grpo" and options["mask_truncated_completions"]:
        why = "counts completions without tokens in the mean of loss_type grpo"
        raise _refusal("mask_truncated_completions", True, why, False)
    return AGGREGATES[kind]


def _kl(options: Mapping[str, Any], remarks: list[str]) -> KL | None:
    """Penalty to the reference; a remark is added where the estimator differs.

    TRL multiplies k3 by the ratio unless told otherwise. At ratio 1 the gradient of
    that is (logp - logp_ref) times the score, which is the gradient of k2.
    """
    beta, corrected = options["beta"], options["use_bias_correction_kl"]
    if not beta:
        return None
    if not corrected:
        return KL(estimator=loss.k3, coefficient=beta)
    if options["importance_sampling_level"] == "sequence":
        why = "multiplies the KL of a token by the ratio of its completion"
        raise _refusal("use_bias_correction_kl", True, why, False)
    remarks.append(
        "k3 times the ratio became k2, which has the same gradient at ratio 1"
    )
    return KL(estimator=loss.k2, coefficient=beta)


def _entropy_bonus(options: Mapping[str, Any], remarks: list[str]) -> float:
    """Loss per nat of entropy; a remark is added where TRL averages it in parts."""
    bonus = options["entropy_coef"]
    if bonus and AGGREGATES.get(options["loss_type"]) is not aggregate.token_mean:
        why = "is averaged over tokens, and the loss of loss_type is not"
        raise _refusal("entropy_coef", bonus, why, 0.0)
    if bonus and options["top_entropy_quantile"] < 1:
        why = "is over the tokens that top_entropy_quantile keeps, here over all"
        raise _refusal("entropy_coef", bonus, why, 0.0)
    if bonus and options["gradient_accumulation_steps"] > 1:
        remarks.append("entropy is averaged over an update, in TRL over a micro-batch")
    return bonus
