"""The settings of a run: frozen dataclasses that check themselves, and functions.

A config is the composition of a run: one function per stage, each with its options
bound by `functools.partial`, so that a default lives once, in a signature. Whatever
stands in a config has a dotted name, be it a field (`sampling.group_size`), an option
of a function (`loss.high`), an option of an option (`objective.f.alpha`) or an entry
of a tuple (`gate.gates.0.delta`); errors, `override`, `describe` and `changes` all
use that name. Only the standard library is imported here.
"""

import dataclasses
import difflib
import itertools
import json
import math
import sys
import traceback
import types
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from curax.settings.config_paths import (
    OF_FILE,
    ConfigError,
    Place,
    assigned,
    changes,
    describe,
    fields_of,
    option,
    options,
    rebuilt,
    wrong_options,
    wrong_values,
)
from curax.settings.config_types import (
    Count,
    Devices,
    Function,
    Magnitude,
    Natural,
    Positive,
    Seed,
    Share,
)
from curax.settings.declared import declared
from curax.settings.packages import missing

__all__ = [
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
    "changes",
    "describe",
    "fields_of",
    "largest_group",
    "least_group",
    "load",
    "module_of",
    "option",
    "options",
    "override",
    "recalled",
    "recipes",
    "rows_of",
    "transferred",
    "truncates",
    "updates_of",
]


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How completions are drawn."""

    group_size: Count = 8  # G, completions per prompt at most
    prompts: Count = 16  # B, prompts per step
    budget: Natural = 0  # completions per step, pilots included; 0: G for each prompt
    max_tokens: Count = 64  # T, tokens per completion at most
    temperature: Positive = 1.0  # divides the logits; greedy decoding cannot train
    top_k: Natural = 0  # tokens drawn from, the likeliest; 0: all
    top_p: Share = 1.0  # probability mass drawn from, the likeliest; 1: all
    accept_truncation: bool = False  # train on what top_k or top_p cut off, uncorrected
    slots: Natural = 0  # completions decoded at a time; 0: every row of the step
    rounds: Count = 1  # draws of prompts to refill groups the gate closed; 1: no refill
    parts: Count = 1  # of a draw; the host verifies one while the next is drawn


@dataclass(frozen=True, kw_only=True)
class Stop:
    """When a prompt draws no more completions."""

    rule: Function  # of curax.stop: (outcome, exists) -> met
    round_size: Count = 8  # completions of a prompt between two tests of the rule


@dataclass(frozen=True, kw_only=True)
class Pilot:
    """Completions drawn to learn how hard prompts are; they do not train."""

    draws: Count  # completions per prompt
    norm: Function | None = None  # a rule of curax.score; None: all norms are equal
    accepted: bool = True  # norms of right completions only, False: of all
    root_mean_square: bool = True  # of the norms, False: their mean


@dataclass(frozen=True, kw_only=True)
class Writing:
    """How the policy writes hints for its own prompts."""

    max_tokens: Count = 512  # tokens of one writing, which holds hints of all levels
    temperature: Magnitude = 1.0  # divides the logits
    tries: Count = 3  # writings of a prompt until one can be read, each with its key


@dataclass(frozen=True, kw_only=True)
class Hint:
    """Prompts that collapsed are asked again, with a hint. Evaluation never has any."""

    source: Function  # of curax.hint: what hints say
    levels: Count = 3  # L, strengths of a hint, the weakest first
    width: Count = 512  # H, tokens of a hint at most, its introduction included
    writing: Writing | None = None  # None: the policy writes none
    trigger: Function  # of curax.hint: (outcome, exists) -> groups that collapsed
    gate: Magnitude = (
        0.0  # chance of a mixed group that ends the search; 0: any mixed one
    )
    controller: Function | None = None  # the level of the next visit, (level, pass
    # rate) -> level; None: each visit begins without a hint and tries level by level
    most: Share = 0.5  # of the prompts of a step that may be hinted
    credit: Function | None = None  # of curax.hint: trains without the hint, and how
    # that is undone; None: with the hint, as drawn


@dataclass(frozen=True, kw_only=True)
class Queries:
    """Which prompts are worth training on, looked at before they are trained on."""

    every: Count = 10  # steps from one look to the next
    candidates: Count = 2  # prompts looked at for each that is wanted
    draws: Count = 8  # completions of each
    keep: Function  # of curax.reflect: which of the candidates stay
    carried: Magnitude = 0.1  # of what is wanted that comes from the look before


@dataclass(frozen=True, kw_only=True)
class Reflection:
    """Reward by how likely completions make the reference answer: R3, no verifier."""

    weights: Function  # of curax.reflect: spread of log-probs to weights of tokens
    clip_nats: Positive = 8.0  # log-probs below count as -clip_nats in the spread
    leave_one_out: bool = False  # a completion has no say in its own weights
    baseline: Function | None = None  # of curax.reflect: what a masked thought explains
    scorer_every: Natural = 1  # steps from one copy of the policy to the next, that
    # scores: 1 is the policy itself, 0 the one RL starts from
    answers: bool = False  # tokens behind the thought get the credit of the reward too
    length: Function | None = None  # (length, wanted) -> reward of an answer's length
    length_weight: Magnitude = 1.0  # of that reward, in nats per token
    rubric: Function | None = None  # of curax.reflect: what an unfit answer does
    direct: Magnitude = 0.0  # weight of the gradient through the reference itself
    queries: Queries | None = None  # None: every prompt in turn


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """How often, and how precisely, the policy is measured on held-out prompts."""

    every: Count = 50  # steps from one evaluation to the next
    prompts: Count = 256  # held-out prompts
    samples: Count = 8  # completions per prompt
    distance: bool = False  # measure the KL to the policy RL starts from, kept for it
    confidence: Natural = 0  # likeliest tokens that tell how sure one was; 0: not asked
    window: Count = 2048  # tokens over which that is averaged
    format: Function | None = None  # text -> kind, an integer; None: first four tokens


@dataclass(frozen=True, kw_only=True)
class WarmStart:
    """Supervised steps on solved examples, before any reinforcement learning."""

    steps: Count  # optimizer updates
    rows: Count  # traces per step
    micro_batches: Count = 1  # gradients added up per update; changes memory only
    optimizer: Function  # () -> optax transformation
    clip_norm: Positive = 1.0  # largest global norm of a gradient; inf: no clipping


@dataclass(frozen=True, kw_only=True)
class Update:
    """How the rows of a step become optimizer updates."""

    epochs: Count = 1  # passes over the rows of a step
    minibatches: Count = 1  # optimizer updates per pass
    micro_batches: Count = 1  # gradients added up per update; changes memory only
    clip_norm: Positive = 1.0  # largest global norm of a gradient; inf: no clipping
    length_buckets: Count = 1  # lengths T, T/2, ... that micro-batches are cut to
    vocab_chunk: Natural = 0  # vocabulary entries per log-prob chunk; 0: all at once
    patience: Count = 5  # steps in a row without a finite gradient that end the run


@dataclass(frozen=True, kw_only=True)
class Memory:
    """The difficulty memory: discounted Beta counts per prompt id."""

    half_life: Positive = 6.6  # visits to a prompt that halve what came before
    load: str | None = None  # memory.jsonl of another run, to begin with
    prior: tuple[Positive, Positive] = (1.0, 1.0)  # counts (solved, failed) before any


@dataclass(frozen=True, kw_only=True)
class Mesh:
    """Devices along each axis of the mesh; -1, of one axis: what the others leave."""

    data: Devices = 1  # devices that share out the rows and copy the parameters
    fsdp: Devices = 1  # devices that share out the rows and the parameters
    tensor: Devices = 1  # devices that share out each layer


@dataclass(frozen=True, kw_only=True)
class Logging:
    """What a run leaves behind, and how often."""

    every: Count = 10  # steps per jitted chunk: how often the host gets metrics
    rollout_prompts: Natural = 2  # prompts per step whose completions are written
    checkpoint_every: Count = 50  # steps between checkpoints; evaluated steps get one
    keep: Count = 2  # checkpoints kept, the latest; the best is kept as well
    drift_nats: Positive | None = None  # sampler against trainer, more warns; None:
    # 1e-4 where both compute in float32 on a CPU, 0.2 elsewhere


@dataclass(frozen=True, kw_only=True)
class KL:
    """A penalty for leaving the reference policy, the one RL starts from."""

    estimator: Function  # (logp, logp_ref) -> nats per token
    coefficient: Magnitude  # loss per nat


@dataclass(frozen=True, kw_only=True)
class Config:
    """A run. Functions that a stage needs have no default: a recipe names each.

    Raises:
        ConfigError: when built, naming the first field that is wrong and a fix.
    """

    task: Function  # prompts and their reward
    model: Function  # the policy network
    sampling: Sampling = Sampling()
    pilot: Pilot | None = None  # None: difficulty is what the memory knows
    stop: Stop | None = None  # None: every prompt draws what it was allocated
    allocate: Function  # completions per prompt
    objective: Function  # weight f'(p) per prompt
    claim: Function | None = None  # f(p) that it states, for xray; None: objective.f
    gate: Function  # which completions may train
    downsample: Function  # which of them do, at most its option m per prompt
    correct: Function  # how the selection is undone; said by every recipe
    pool_statistics: bool = True  # advantages see all drawn, False: only those kept
    advantage: Function  # credit per completion
    modulate: Function  # multiplier per token
    hint: Hint | None = None  # None: prompts are never hinted
    reflection: Reflection | None = None  # None: the task's verifier gives outcomes
    loss: Function  # loss per token
    aggregate: Function  # weight per token
    shape_reward: Function | None = None  # changes the reward, never the outcome
    kl: KL | None = None  # None: no reference policy
    entropy_bonus: Magnitude = 0.0  # loss per nat of entropy, subtracted
    optimizer: Function  # () -> optax transformation
    update: Update = Update()
    warm_start: WarmStart | None = None  # None: start from the initial parameters
    evaluation: Evaluation = Evaluation()
    memory: Memory = Memory()
    mesh: Mesh = Mesh()
    logging: Logging = Logging()
    steps: Natural = 200  # RL steps; 0: the warm start is all
    seed: Seed = 0  # every random draw of the run follows from it
    seeds: Count = 1  # runs side by side, of seed, seed + 1, ...
    staged: bool = False  # step from the host although the reward is a JAX function

    def __post_init__(self) -> None:
        place = Place(self)
        values, bound = wrong_values(place), wrong_options(place, _STAGES)
        for wrong in itertools.chain(values, bound, _conflicts(self)):
            raise ConfigError(wrong)


def load(path: str | Path) -> Config:
    """The config that a Python file returns from its `get_config()`.

    Args:
        path: of the file; or the name of one in configs/, such as grpo.

    Raises:
        ConfigError: the file is missing, is not Python, fails, or returns no Config.
    """
    path = _file(Path(path))
    # Compiled here, not imported: no bytecode is left beside the file, and an edit
    # within the same second is seen.
    module = types.ModuleType(module_of(path))
    module.__file__ = str(path)
    sys.modules[module.__name__] = module
    try:
        exec(compile(path.read_bytes(), path, "exec"), module.__dict__)
        if not hasattr(module, "get_config"):
            raise ConfigError("no get_config(); define one that returns a Config.")
        config = module.get_config()
        if not isinstance(config, Config):
            kind = type(config).__name__
            raise ConfigError(f"get_config() returned a {kind}; return a Config.")
    except Exception as error:
        frames = traceback.extract_tb(error.__traceback__)
        lines = [frame.lineno for frame in frames if frame.filename == str(path)]
        text = " ".join(str(error).split()) or "no message"
        if isinstance(error, SyntaxError) and error.filename == str(path):
            lines, text = [error.lineno], error.msg
        where = f"{path}:{lines[-1]}" if lines else str(path)
        if needed := missing(error):
            text = needed
        elif not isinstance(error, ConfigError):
            text = f"{type(error).__name__}: {text.rstrip('.')}; mend that line."
        raise ConfigError(f"{where}: {text}") from error
    return config


def recipes() -> dict[str, Path]:
    """The files in configs/ by their names: of this folder, else beside the package."""
    for folder in (Path("configs"), Path(__file__).parents[1] / "configs"):
        if files := {file.stem: file for file in sorted(folder.glob("*.py"))}:
            return files
    return {}


def _file(path: Path) -> Path:
    """The config file that is meant.

    Raises:
        ConfigError: there is none.
    """
    if path.is_file():
        return path
    known = recipes() if path.name == str(path) and path.suffix in ("", ".py") else {}
    if path.stem in known:
        return known[path.stem]
    if near := difflib.get_close_matches(path.stem, known, 3):
        fix = f"did you mean {' or '.join(near)}?"
        raise ConfigError(f"{path}: there is no such file, nor recipe; {fix}")
    files = sorted(file.name for file in path.parent.glob("*.py"))
    near = " or ".join(difflib.get_close_matches(path.name, files, 3, cutoff=0))
    fix = f"did you mean {near}?" if near else "no Python file is beside it either."
    raise ConfigError(f"{path}: there is no such file; {fix}")


def module_of(path: str | Path) -> str:
    """What the module of a config file is called."""
    return OF_FILE + Path(path).stem.replace(".", "_")


def transferred(recipe: Config, *, max_tokens: int, **fields: Any) -> Config:
    """A recipe on another task: its stages stay, and so do its numbers of completions.

    Lengths in tokens that its stages name (`aggregate.length`, `shape_reward`,
    `hint.width`) go with `sampling.max_tokens`. The warm start is not taken over.

    Args:
        recipe: of a file in configs/.
        max_tokens: of a completion on the other task.
        **fields: of `Config`, in place of the recipe's.
    """
    before = recipe.sampling.max_tokens
    config = dataclasses.replace(recipe, **{"warm_start": None, **fields})
    now: dict[str, Any] = {}
    for name in ("aggregate.length", "shape_reward.max_tokens", "shape_reward.margin"):
        stage, _, key = name.partition(".")
        if getattr(recipe, stage) and stage not in fields:
            now[name] = option(getattr(recipe, stage), key)
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
    """The config that a run wrote into its folder as config.json.

    Raises:
        ConfigError: there is none, or it cannot be read, or names a function that is
            not there.
    """
    try:
        return rebuilt(json.loads(Path(path).read_text()), Config)
    except OSError as error:
        raise ConfigError(
            f"{path} cannot be read ({error.strerror}); name the folder of a run."
        ) from error
    except (ValueError, TypeError) as error:
        raise ConfigError(f"{path}: {error}") from error


def override(config: Config, assignments: Iterable[str] | Mapping[str, Any]) -> Config:
    """The config with values set by dotted name, all of them before it is checked.

    Args:
        config: what to start from.
        assignments: `NAME=VALUE` strings, the value a Python literal, true, false,
            none, inf or else text; or a mapping from names to values, which may be
            arrays where numbers are, so that a run can be vmapped over magnitudes.

    Raises:
        ConfigError: an unknown name, a value of the wrong type, or a config that does
            not pass its checks.
    """
    return dataclasses.replace(assigned(config, assignments, recipes, ALIASES))


# What other programs call a field, by the last part of its name, or the last two.
ALIASES = {
    "adv_estimator": "advantage",
    "advantage_estimator": "advantage",
    "batch_size": "sampling.prompts",
    "beta": "kl.coefficient",
    "clip": "loss.high",
    "clip_range": "loss.high",
    "clip_ratio": "loss.high",
    "clip_ratio_c": "loss.dual",
    "clip_ratio_high": "loss.high",
    "clip_ratio_low": "loss.low",
    "entropy_coef": "entropy_bonus",
    "entropy_coeff": "entropy_bonus",
    "epsilon": "loss.high",
    "epsilon_high": "loss.high",
    "epsilon_low": "loss.low",
    "eval_every": "evaluation.every",
    "eval_every_n_steps": "evaluation.every",
    "eval_steps": "evaluation.every",
    "grad_clip": "update.clip_norm",
    "gradient_accumulation_steps": "update.micro_batches",
    "importance_sampling_level": "loss",
    "kl_coef": "kl.coefficient",
    "kl_coeff": "kl.coefficient",
    "kl_loss_coef": "kl.coefficient",
    "kl_loss_mode": "kl.estimator",
    "kl_loss_type": "kl.estimator",
    "log_every": "logging.every",
    "logging_steps": "logging.every",
    "loss_agg_mode": "aggregate",
    "loss_algo": "loss",
    "loss_mode": "loss",
    "loss_type": "aggregate",
    "lr": "optimizer.learning_rate",
    "mask_truncated_completions": "gate",
    "max_completion_length": "sampling.max_tokens",
    "max_grad_norm": "update.clip_norm",
    "max_length": "sampling.max_tokens",
    "max_new_tokens": "sampling.max_tokens",
    "max_num_gen_batches": "sampling.rounds",
    "max_num_seqs": "sampling.slots",
    "max_response_length": "sampling.max_tokens",
    "max_steps": "steps",
    "max_tokens_to_generate": "sampling.max_tokens",
    "mini_batches": "update.minibatches",
    "norm_adv_by_std_in_grpo": "advantage",
    "num_epochs": "update.epochs",
    "num_generations": "sampling.group_size",
    "num_generations_eval": "evaluation.samples",
    "num_iterations": "update.epochs",
    "num_samples": "sampling.group_size",
    "num_steps": "steps",
    "per_device_train_batch_size": "sampling.prompts",
    "ppo_epochs": "update.epochs",
    "rollout.n": "sampling.group_size",
    "rollout_n": "sampling.group_size",
    "rollouts": "sampling.group_size",
    "save_every": "logging.checkpoint_every",
    "save_freq": "logging.checkpoint_every",
    "save_steps": "logging.checkpoint_every",
    "scale_rewards": "advantage",
    "test_freq": "evaluation.every",
    "top_entropy_quantile": "modulate",
    "total_steps": "steps",
    "total_training_steps": "steps",
    "train_batch_size": "sampling.prompts",
}


# The stages called with arrays alone; other functions may be given keywords as well.
_STAGES = (
    *("objective", "gate", "downsample", "correct", "advantage", "modulate"),
    *("loss", "aggregate"),
)


def _conflicts(config: Config) -> Iterator[str]:
    """Fields that are right one by one, and wrong together."""
    if config.staged and config.seeds > 1:
        fix = "set seeds to 1 or staged to False"
        yield f"seeds={config.seeds} cannot run side by side with staged=True; {fix}."
    yield from _uncorrected(config)
    rest = [
        f.name for f in dataclasses.fields(Mesh) if getattr(config.mesh, f.name) < 0
    ]
    if len(rest) > 1:
        both = " and ".join(f"mesh.{name}=-1" for name in rest)
        yield f"{both} cannot both be what the others leave; set mesh.{rest[0]} to 1."
    sizes = config.sampling
    group, prompts = sizes.group_size, sizes.prompts
    kept = option(config.downsample, "m", group)
    parts = (config.update.minibatches, config.update.micro_batches)
    numbers = (group, prompts, sizes.budget, kept, *parts)
    if not all(isinstance(count, int) for count in numbers):
        return
    if kept < 1:
        yield f"downsample.m={kept} must be at least 1; set downsample.m to 1."
    if kept > group:
        yield (
            f"sampling.group_size={group} cannot keep downsample.m={kept} completions; "
            f"set downsample.m to at most {group}."
        )
    draws = config.pilot.draws if config.pilot else 0
    if rows_of(config) > group * prompts:
        yield (
            f"sampling.budget={sizes.budget} is more than sampling.group_size={group} "
            f"completions of sampling.prompts={prompts}, pilots apart; set it to at "
            f"most {(group + draws) * prompts}."
        )
    if rows_of(config) < 1:
        yield (
            f"pilot.draws={draws} for "
            f"sampling.prompts={prompts} leave nothing of the budget to train on; set "
            f"pilot.draws to at most {(rows_of(config) - 1) // prompts + draws}."
        )
    least = option(config.allocate, "least", 0)
    if isinstance(least, int) and least > rows_of(config) // prompts:
        yield (
            f"allocate.least={least} for each of {prompts} prompts is more than the "
            f"{rows_of(config)} completions of a step; set allocate.least to at most "
            f"{rows_of(config) // prompts}."
        )
    if isinstance(sizes.parts, int) and rows_of(config) % sizes.parts:
        near = max(n for n in range(1, sizes.parts) if rows_of(config) % n == 0)
        yield (
            f"sampling.parts={sizes.parts} must divide the {rows_of(config)} "
            f"completions of a step; set sampling.parts to {near}."
        )
    warm = config.warm_start
    if warm and isinstance(warm.rows, int) and isinstance(warm.micro_batches, int):
        near = math.gcd(warm.rows, warm.micro_batches)
        if warm.rows % warm.micro_batches:
            yield (
                f"warm_start.micro_batches={warm.micro_batches} must divide "
                f"warm_start.rows={warm.rows}; set warm_start.micro_batches to {near}."
            )
    also = {"sampling.rounds": sizes.rounds > 1, "sampling.budget": sizes.budget > 0}
    for name, is_set in (also | {"pilot": config.pilot is not None}).items():
        if config.stop and is_set:
            yield (
                f"stop decides how much each prompt draws, and so does {name}; set one "
                "of them to its default."
            )
    if config.stop and sizes.parts > 1:
        yield (
            f"sampling.parts={sizes.parts} takes a prompt's completions apart, and "
            "stop counts them together; set sampling.parts to 1."
        )
    how = config.hint
    if how and sizes.rounds > 1:
        yield (
            f"sampling.rounds={sizes.rounds} gives the place of a dead group to "
            "another prompt, and hint asks the same one again; set sampling.rounds to "
            "1 or hint to None."
        )
    if how and how.controller and how.gate != 0:
        yield (
            "hint.gate ends a search within a visit, and hint.controller sets the "
            "level between visits; set one of them to its default."
        )
    if config.reflection:
        others = {"hint": how, "stop": config.stop, "pilot": config.pilot}
        others["shape_reward"] = config.shape_reward
        for name, is_set in others.items():
            if is_set:
                yield (
                    f"reflection gives rewards by itself and knows nothing of {name}; "
                    f"set {name} to None."
                )
        for name, value in {"rounds": sizes.rounds, "parts": sizes.parts}.items():
            if value > 1:
                yield (
                    f"sampling.{name}={value} follows what a verifier says, and "
                    f"reflection asks none; set sampling.{name} to 1."
                )
        queries = config.reflection.queries
        if queries and queries.carried > 1:
            yield (
                f"reflection.queries.carried={queries.carried} is more than there is; "
                "set reflection.queries.carried to 1.0."
            )
    rows = min(rows_of(config), prompts * kept)
    # What a correction calls by these names is said elsewhere in the config.
    must = {"rows": (rows / prompts, "the rows trained per prompt")}
    must["limit"] = (group, "the most that a prompt draws")
    for name, place in Place(config.correct).walk("correct"):
        value, (right, what) = place.value, must.get(name.rpartition(".")[2], (0, ""))
        if what and isinstance(value, int | float) and value != right:
            yield f"{name}={value} must be {what}, {right:g}; set {name} to {right:g}."
    if rows % math.prod(parts):
        divisors = [size for size in range(1, rows + 1) if rows % size == 0]
        pairs = [(a, b) for a in divisors for b in divisors if rows % (a * b) == 0]
        a, b = min(pairs, key=lambda p: abs(p[0] - parts[0]) + abs(p[1] - parts[1]))
        yield (
            f"update.minibatches={parts[0]} times update.micro_batches={parts[1]} must "
            f"divide the {rows} rows trained per step; set them to {a} and {b}."
        )
    yield from _too_small_groups(config, kept)


def _uncorrected(config: Config) -> Iterator[str]:
    """Departures from the policy gradient that no stage of the config undoes."""
    sizes, update = config.sampling, config.update
    if config.steps and truncates(config) and not sizes.accept_truncation:
        name, whole = (
            ("top_p", 1.0)
            if type(sizes.top_k) is int and not sizes.top_k
            else ("top_k", 0)
        )
        yield (
            f"sampling.{name}={getattr(sizes, name)} draws from another distribution "
            "than the policy that trains, and nothing corrects that bias; set "
            f"sampling.{name} to {whole}, or accept the bias with "
            "sampling.accept_truncation=True."
        )
    several = update.epochs != 1 or update.minibatches != 1
    if several and not declared(config.loss, "has_ratio", True):
        called = Place(config.loss).owner("loss")
        yield (
            f"update.epochs={update.epochs} times update.minibatches="
            f"{update.minibatches} are {updates_of(config)} updates per batch, and "
            f"{called} has no ratio that corrects those behind the first; set both to "
            "1, or loss to loss.clipped_ratio."
        )


def _too_small_groups(config: Config, kept: int) -> Iterator[str]:
    """Stages to which the largest group of the config is too small to learn from."""
    drawn, fix = largest_group(config), "sampling.group_size"
    if drawn < config.sampling.group_size:
        fix = "sampling.budget"
    sees = {"gate": (drawn, fix), "advantage": (drawn, fix)}
    if not config.pool_statistics and kept < drawn:
        sees["advantage"] = kept, "downsample.m"
    for stage, (group, field) in sees.items():
        least, called = least_group(getattr(config, stage), stage)
        if group >= least:
            continue
        now, to = option(config.downsample, "m"), least
        if field != "downsample.m":
            now = getattr(config.sampling, field.partition(".")[2])
        if field == "sampling.budget":
            pilots = config.pilot.draws if config.pilot else 0
            to = (least + pilots) * config.sampling.prompts
        yield (
            f"{field}={now} gives {called} groups of {group}, and it learns nothing "
            f"from fewer than {least}; set {field} to at least {to}."
        )


def least_group(function: Function, name: str) -> tuple[int, str]:
    """The smallest group that teaches a stage anything, and what in it says so."""
    least, called = 1, ""
    for _, place in Place(function).walk(name):
        if callable(place.value):
            needs = declared(place.value, "least_group", 1)
            needs = option(place.value, needs) if isinstance(needs, str) else needs
            if isinstance(needs, int) and needs > least:
                least, called = needs, place.owner(name)
    return least, called


def largest_group(config: Config) -> int:
    """Completions of a prompt that gets as many as any may."""
    sizes = config.sampling
    if declared(config.allocate, "equal_groups", False) and not config.stop:
        return min(sizes.group_size, -(-rows_of(config) // sizes.prompts))
    return min(sizes.group_size, rows_of(config))


def truncates(config: Config) -> bool:
    """Whether completions are drawn from less than the whole policy."""
    sizes = config.sampling
    whole = type(sizes.top_k) is int and sizes.top_k == 0
    return not (whole and type(sizes.top_p) in (int, float) and sizes.top_p >= 1)


def updates_of(config: Config) -> int:
    """Optimizer updates per step."""
    return config.update.epochs * config.update.minibatches


def rows_of(config: Config) -> int:
    """N, completions drawn per step of which some may train: the budget but pilots."""
    sizes, pilot = config.sampling, config.pilot
    budget = sizes.budget or sizes.prompts * sizes.group_size
    return budget - (pilot.draws * sizes.prompts if pilot else 0)
