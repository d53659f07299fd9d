"""The config of a run: frozen dataclasses with checks, and one function per stage.

Options of a function are bound by `functools.partial`, so a default stands once, in a
signature. Every value has a dotted name: a field (`sampling.group_size`), an option of
a function (`loss.high`), an option of an option (`objective.f.alpha`) or an entry of a
tuple (`gate.gates.0.delta`). Errors, `override`, `describe` and `changes` use these
names. Only the standard library is imported.
"""

import dataclasses
import difflib
import itertools
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from curax.settings import files, functions
from curax.settings.config_paths import (
    OF_FILE,
    ConfigError,
    Place,
    assign,
    changes,
    describe,
    fields_of,
    option,
    options,
    rebuild,
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
from curax.settings.declared import RIGHT, declared
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
    "corrects_sampling",
    "declared_option",
    "describe",
    "fields_of",
    "file_of",
    "kept_of",
    "largest_group",
    "least_group",
    "load",
    "made_by",
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


Made = TypeVar("Made")


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """Sampling of completions."""

    group_size: Count = 8  # G, completions per prompt at most
    prompts: Count = 16  # B, prompts per step
    budget: Natural = 0  # completions per step, pilots included; 0: G for each prompt
    max_tokens: Count = 64  # T, tokens per completion at most
    temperature: Positive = 1.0  # divides the logits; greedy decoding cannot train
    top_k: Natural = 0  # number of likeliest tokens that are drawn from; 0: all
    top_p: Share = 1.0  # mass of the likeliest tokens that are drawn from; 1: all
    correct: Function | None = None  # of curax.correct: weights of tokens, policy over
    # what was drawn from; None: all are 1, and top_k and top_p are refused
    slots: Natural = 0  # completions decoded at a time; 0: every row of the step
    cache_gib: Magnitude = 0.0  # GiB of a device that keys and values may take: as many
    # slots as there is room for, and rows wait for one; 0: what `slots` take
    rounds: Count = 1  # draws of prompts to refill groups the gate closed; 1: no refill
    chunks: Count = 1  # of a draw; the host verifies one while the next is drawn


@dataclass(frozen=True, kw_only=True)
class Stop:
    """Stopping rule for the completions of a prompt."""

    rule: Function  # of curax.stop: (outcome, exists) -> met
    round_size: Count = 8  # completions of a prompt between two tests of the rule

    def conflicts(self, config: "Config") -> Iterator[str]:
        """Sentences about other options that also decide how much a prompt draws."""
        sizes = config.sampling
        others = {
            "sampling.rounds": sizes.rounds > 1,
            "sampling.budget": sizes.budget > 0,
            "pilot": config.pilot is not None,
        }
        for name, is_set in others.items():
            if is_set:
                yield (
                    f"stop decides how much each prompt draws, and so does {name}; set "
                    "one of them to its default."
                )
        if sizes.chunks > 1:
            yield (
                f"sampling.chunks={sizes.chunks} takes a prompt's completions apart, "
                "and stop counts them together; set sampling.chunks to 1."
            )


@dataclass(frozen=True, kw_only=True)
class Pilot:
    """Pilot completions, drawn to estimate pass rates; they do not train."""

    draws: Count  # completions per prompt
    every: Count = 1  # steps between copies of the policy that draws them; 1: the
    # policy itself, so that no allocation is ever stale
    norm: Function | None = None  # gradient norm of curax.score; None: all are equal
    accepted: bool = True  # average norms of right completions only; False: of all
    root_mean_square: bool = True  # root mean square of the norms; False: their mean

    def conflicts(self, config: "Config") -> Iterator[str]:
        """A sentence if pilots use up the budget."""
        rows, prompts = rows_of(config), config.sampling.prompts
        if rows < 1:
            yield (
                f"pilot.draws={self.draws} for "
                f"sampling.prompts={prompts} leave nothing of the budget to train on; "
                f"set pilot.draws to at most {(rows - 1) // prompts + self.draws}."
            )


@dataclass(frozen=True, kw_only=True)
class Writing:
    """Hints written by the policy for its own prompts."""

    max_tokens: Count = 512  # tokens of one writing, which has hints of all levels
    temperature: Magnitude = 1.0  # divides the logits
    tries: Count = 3  # attempts per prompt until a writing can be parsed
    frozen: bool = False  # written by the policy RL starts from, kept beside the policy


@dataclass(frozen=True, kw_only=True)
class Hint:
    """Hints for collapsed groups, which are drawn again; evaluation has no hints."""

    source: Function  # of curax.hint: text of the hints
    levels: Count = 3  # L, strengths of a hint, the weakest first
    width: Count = 512  # H, tokens of a hint at most, its introduction included
    writing: Writing | None = None  # None: the policy writes no hints
    trigger: Function  # of curax.hint: (outcome, exists) -> collapsed groups
    stop_probability: Magnitude = 0.0  # of a mixed group, at the share of right ones,
    # that ends the search; 0: any mixed group does
    controller: Function | None = None  # (level, pass rate) -> level of the next visit;
    # None: each visit starts without a hint and raises the level until a group opens
    most: Share = 0.5  # largest share of the prompts of a step that get hints
    credit: Function | None = None  # of curax.hint: reweights to train without the
    # hint; None: train with the hint, as drawn

    def conflicts(self, config: "Config") -> Iterator[str]:
        """Sentences about other options that replace groups or choose hint levels."""
        rounds = config.sampling.rounds
        if rounds > 1:
            yield (
                f"sampling.rounds={rounds} gives the place of a dead group to "
                "another prompt, and hint asks the same one again; set sampling.rounds "
                "to 1 or hint to None."
            )
        if self.controller and self.stop_probability != 0:
            yield (
                "hint.stop_probability ends a search within a visit, and "
                "hint.controller sets the level between visits; set one of them to "
                "its default."
            )


@dataclass(frozen=True, kw_only=True)
class Queries:
    """Selection of prompts by probing candidates before they are trained on."""

    every: Count = 10  # steps between probes
    candidates: Count = 2  # candidates per prompt that is selected
    draws: Count = 8  # completions per candidate
    keep: Function  # of curax.reflect: which candidates are kept
    carried: Magnitude = 0.1  # share of the selection carried over from the last probe


@dataclass(frozen=True, kw_only=True)
class Reflection:
    """Reward by the log-prob of the reference answer after the thought: R3."""

    weights: Function  # of curax.reflect: spread of log-probs -> weights of tokens
    clip_nats: Positive = 8.0  # log-probs are clipped at -clip_nats in the spread
    leave_one_out: bool = False  # weights of a completion leave its own log-probs out
    baseline: Function | None = None  # of curax.reflect: log-prob with a masked thought
    scorer_every: Natural = 1  # steps between copies of the policy that score; 1: the
    # policy itself, 0: the one RL starts from
    answers: bool = False  # tokens after the thought get the credit of the reward too
    length: Function | None = None  # (length, wanted) -> reward of an answer's length
    length_weight: Magnitude = 1.0  # weight of that reward, nats per token
    rubric: Function | None = None  # of curax.reflect: effect of an unfit answer
    direct: Magnitude = 0.0  # weight of the gradient through the reference log-prob
    keep: Function | None = None  # of curax.reflect: groups that train, judged by their
    # own completions; None: all
    queries: Queries | None = None  # None: all prompts in turn

    def conflicts(self, config: "Config") -> Iterator[str]:
        """Sentences about options that need a verifier, which R3 replaces."""
        for name in ("hint", "stop", "pilot", "shape_reward"):
            if getattr(config, name):
                yield (
                    f"reflection gives rewards by itself and knows nothing of {name}; "
                    f"set {name} to None."
                )
        for name in ("rounds", "chunks"):
            value = getattr(config.sampling, name)
            if value > 1:
                yield (
                    f"sampling.{name}={value} follows what a verifier says, and "
                    f"reflection asks none; set sampling.{name} to 1."
                )
        if self.keep and declared(self.keep, "remembers", False):
            yield (
                "reflection.keep judges each step by itself, and this rule remembers "
                "steps before; set reflection.keep to reflect.null_test or "
                "reflect.percentile."
            )
        if self.keep and declared_option(self.keep, "ranks") is not None:
            yield (
                "reflection.keep does not rank the tokens of references; set "
                "reflection.keep.hardest to None, or use reflection.queries."
            )
        if self.queries and self.queries.carried > 1:
            yield (
                f"reflection.queries.carried={self.queries.carried} is more than there "
                "is; set reflection.queries.carried to 1.0."
            )


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """Evaluation of the policy on held-out prompts during training."""

    every: Count = 50  # steps from one evaluation to the next
    prompts: Count = 256  # held-out prompts
    samples: Count = 8  # completions per prompt
    k: Natural = 0  # of pass@k, estimated from these samples; 0: not measured
    distance: bool = False  # measure the KL to the policy RL starts from, which is kept
    confidence: Natural = 0  # k of the confidence of a token; 0: not measured
    window: Count = 2048  # tokens over which confidence is averaged
    format: Function | None = None  # text -> kind, an integer; None: first four tokens

    def conflicts(self) -> Iterator[str]:
        """A sentence if pass@k needs more samples than are drawn."""
        if self.k > self.samples:
            yield (
                f"evaluation.k={self.k} completions cannot be drawn from "
                f"evaluation.samples={self.samples}; set evaluation.k to at most "
                f"{self.samples}."
            )


@dataclass(frozen=True, kw_only=True)
class WarmStart:
    """Supervised fine-tuning on solved examples before RL."""

    steps: Count  # optimizer updates
    rows: Count  # traces per step
    micro_batches: Count = 1  # gradients added up per update; changes memory only
    optimizer: Function  # () -> optax transformation
    clip_norm: Positive = 1.0  # largest global norm of a gradient; inf: no clipping

    def conflicts(self, config: "Config") -> Iterator[str]:
        """A sentence if micro-batches do not divide the rows."""
        del config
        rows, parts = self.rows, self.micro_batches
        if isinstance(rows, int) and isinstance(parts, int) and rows % parts:
            yield (
                f"warm_start.micro_batches={parts} must divide "
                f"warm_start.rows={rows}; set warm_start.micro_batches to "
                f"{math.gcd(rows, parts)}."
            )


@dataclass(frozen=True, kw_only=True)
class Update:
    """Optimizer updates from the rows of a step."""

    epochs: Count = 1  # passes over the rows of a step
    minibatches: Count = 1  # optimizer updates per pass
    micro_batches: Count = 1  # gradients added up per update; changes memory only
    tokens_per_micro_batch: Natural = 0  # tokens that each shard of the rows scores at
    # a time, in the warm start too; micro-batches follow, packed on CPUs and TPUs, and
    # on GPUs in float32. 0: micro_batches says it
    clip_norm: Positive = 1.0  # largest global norm of a gradient; inf: no clipping
    length_buckets: Count = 1  # lengths T, T/2, ... that micro-batches are cut to
    token_chunk: Natural = 0  # tokens whose logits exist at a time, on each shard of
    # the rows; 0: those of a micro-batch
    patience: Count = 5  # steps in a row without a finite gradient that stop the run


@dataclass(frozen=True, kw_only=True)
class Memory:
    """The difficulty memory: discounted Beta counts per prompt id."""

    half_life: Positive = 6.6  # visits of a prompt that halve earlier counts
    load: str | None = None  # memory.jsonl of another run to start from
    prior: tuple[Positive, Positive] = (1.0, 1.0)  # prior counts (solved, failed)


AXES = ("data", "fsdp", "tensor")  # of a mesh


@dataclass(frozen=True, kw_only=True)
class Mesh:
    """Devices along each axis of the mesh; one axis may be -1: all that are left."""

    data: Devices = 1  # rows are sharded, parameters replicated
    fsdp: Devices = 1  # rows and parameters are sharded
    tensor: Devices = 1  # each layer is sharded
    cut_sampler: bool = False  # sampling leaves layers sharded over fsdp and gathers
    # them at every token: for models that do not fit otherwise

    def conflicts(self) -> Iterator[str]:
        """A sentence if several axes are -1, the devices that others leave."""
        rest = [name for name in AXES if getattr(self, name) < 0]
        if len(rest) > 1:
            both = " and ".join(f"mesh.{name}=-1" for name in rest)
            fix = f"set mesh.{rest[0]} to 1"
            yield f"{both} cannot both be what the others leave; {fix}."


DASHBOARDS = ("tensorboard", "wandb", "trackio", "mlflow")


@dataclass(frozen=True, kw_only=True)
class Logging:
    """Logging and checkpoints."""

    every: Count = 10  # steps per jitted chunk, after which the host gets metrics
    rollout_prompts: Natural = 2  # prompts per step whose completions are written
    checkpoint_every: Count = 50  # steps between checkpoints; evaluated steps get one
    keep: Count = 2  # latest checkpoints that are kept, beside the best
    drift_nats: Positive | None = None  # log-prob difference of sampler and trainer
    # that raises an alarm; None: 1e-4 for float32 on a CPU, 0.2 elsewhere
    dashboards: tuple[str | Function, ...] = ("tensorboard",)  # that show the run too:
    # tensorboard, wandb, trackio, mlflow, or functions like these of runs.dashboards

    def conflicts(self) -> Iterator[str]:
        """A sentence about a dashboard that is unknown or named twice."""
        named = [one for one in self.dashboards if isinstance(one, str)]
        for one in named:
            if one not in DASHBOARDS:
                near = difflib.get_close_matches(one, DASHBOARDS, 1, cutoff=0)
                yield (
                    f"logging.dashboards names {one!r}; there are "
                    f"{', '.join(DASHBOARDS)}, so name for example {near[0]}."
                )
            if named.count(one) > 1:
                yield f"logging.dashboards names {one} twice; name it once."


@dataclass(frozen=True, kw_only=True)
class KL:
    """KL penalty to the reference policy, the one RL starts from."""

    estimator: Function  # (logp, logp_ref) -> nats per token
    coefficient: Magnitude  # loss per nat


@dataclass(frozen=True, kw_only=True)
class Config:
    """Config of a run. Stages have no default: a recipe, or its test bed, names each.

    Raises:
        ConfigError: on construction; the message names the first wrong field and a fix.
    """

    task: Function  # prompts and their verifier
    model: Function  # the policy network
    sampling: Sampling = Sampling()
    pilot: Pilot | None = None  # None: pass rates are those of the memory
    stop: Stop | None = None  # None: every prompt draws what it was allocated
    allocate: Function  # completions per prompt
    objective: Function  # weight f'(p) per prompt
    claim: Function | None = None  # stated f(p) of a paper, for xray; None: objective.f
    gate: Function  # which completions may train
    downsample: Function  # which of them train, at most its option m per prompt
    correct: Function  # weights that undo the bias of the selection
    pool_statistics: bool = True  # advantages use all completions drawn; False: kept
    advantage: Function  # credit per completion
    modulate: Function  # multiplier per token
    hint: Hint | None = None  # None: no hints
    reflection: Reflection | None = None  # None: the task's verifier gives outcomes
    loss: Function  # loss per token
    aggregate: Function  # weight per token
    shape_reward: Function | None = None  # outcome -> reward; the outcome is unchanged
    kl: KL | None = None  # None: no reference policy
    entropy_bonus: Magnitude = 0.0  # loss per nat of entropy, subtracted
    optimizer: Function  # () -> optax transformation
    update: Update = Update()
    warm_start: WarmStart | None = None  # None: start from the initial parameters
    evaluation: Evaluation = Evaluation()
    memory: Memory = Memory()
    mesh: Mesh = Mesh()
    logging: Logging = Logging()
    steps: Natural = 200  # RL steps; 0: the warm start alone
    seed: Seed = 0  # seed of every random draw
    seeds: Count = 1  # runs side by side, with seeds seed, seed + 1, ...
    staged: bool = False  # use the staged loop although the verifier is a JAX function

    def __post_init__(self) -> None:
        place = Place(self)
        values, bound = wrong_values(place), wrong_options(place, _STAGES)
        for wrong in itertools.chain(values, bound, _conflicts(self)):
            raise ConfigError(wrong)


def load(path: str | Path) -> Config:
    """Load the config that a Python file returns from its `get_config()`.

    Args:
        path: Python file, or the name of a recipe in configs/, such as grpo.

    Raises:
        ConfigError: the file is missing, is not Python, fails, or returns no Config.
    """
    file = file_of(Path(path))
    _loading.append(file)
    try:
        return made_by(file, "get_config", Config)
    finally:
        _loading.pop()


_loading: list[Path] = []  # files whose get_config() has not returned


def made_by(
    path: Path, function: str, kind: type[Made], source: bytes | None = None
) -> Made:
    """Return value of a function in a Python file, checked to be of a class.

    Args:
        path: Python file, which exists.
        function: name of a function without arguments.
        kind: class of what it returns.
        source: what the file would hold, if it does not exist yet.

    Raises:
        ConfigError: the file is not Python, fails, or returns something else.
    """
    wanted = f"{'an' if kind.__name__[0] in 'AEIO' else 'a'} {kind.__name__}"
    try:
        module = functions.executed(path, module_of(path), source)
        if not hasattr(module, function):
            raise ConfigError(f"no {function}(); define one that returns {wanted}.")
        made = getattr(module, function)()
        if not isinstance(made, kind):
            found = type(made).__name__
            raise ConfigError(f"{function}() returned a {found}; return {wanted}.")
    except Exception as error:
        where, text = functions.failure(path, error)
        if needed := missing(error):
            text = needed
        elif isinstance(error, ConfigError):
            text = f"{text}."
        else:
            text = f"{type(error).__name__}: {text}; mend that line."
        raise ConfigError(f"{where}: {text}") from error
    return made


_HERE = Path(__file__).resolve().parent
SHIPPED = next(  # the folder of recipes, in a wheel or in a clone
    folder / "configs"
    for folder in (_HERE, _HERE.parent)
    if (folder / "configs").is_dir() or folder != _HERE
)


def recipes() -> dict[str, Path]:
    """Files of recipes by name: those of ./configs, then those of curax.

    A file of ./configs stands in place of one of curax that has its name, but not for
    itself: a name that it loads while it is loaded is that of another file.
    """
    found: dict[str, Path] = {}
    for folder in (Path("configs"), SHIPPED):
        for file in sorted(folder.glob("[!_]*.py")):
            own = any(file.samefile(other) for other in _loading if file.is_file())
            if file.is_file() and not own:
                found.setdefault(file.stem, file)
    return found


def is_shipped(path: Path) -> bool:
    """Whether a file is a recipe of curax."""
    return path.resolve().parent == SHIPPED


def file_of(path: Path) -> Path:
    """The config file of a path or a recipe name.

    Raises:
        ConfigError: there is none; the message has the nearest names.
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
    """Module name of a config file."""
    return OF_FILE + Path(path).stem.replace(".", "_")


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
    try:
        found = files.json_of(files.read(Path(path)))
        return rebuild(found, Config)
    except OSError as error:
        raise ConfigError(
            f"{path} cannot be read ({error.strerror}); name the folder of a run."
        ) from error
    except (ValueError, TypeError) as error:
        raise ConfigError(f"{path}: {error}") from error


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
    "ppo_max_token_len_per_gpu": "update.tokens_per_micro_batch",
    "rollout.n": "sampling.group_size",
    "rollout_is": "sampling.correct",
    "rollout_is_threshold": "sampling.correct",
    "rollout_n": "sampling.group_size",
    "rollouts": "sampling.group_size",
    "sampling.parts": "sampling.chunks",
    "sampler_is": "sampling.correct",
    "save_every": "logging.checkpoint_every",
    "save_freq": "logging.checkpoint_every",
    "save_steps": "logging.checkpoint_every",
    "scale_rewards": "advantage",
    "test_freq": "evaluation.every",
    "top_entropy_quantile": "modulate",
    "total_steps": "steps",
    "total_training_steps": "steps",
    "train_batch_size": "sampling.prompts",
    "vllm_importance_sampling_clip_max": "sampling.correct",
    "vllm_importance_sampling_correction": "sampling.correct",
    "vllm_importance_sampling_mode": "sampling.correct",
    "vocab_chunk": "update.token_chunk",
}


# Stages called without keywords, so that all their options must be bound.
_STAGES = (
    *("objective", "gate", "downsample", "correct", "advantage", "modulate"),
    *("loss", "aggregate"),
)


def _conflicts(config: Config) -> Iterator[str]:
    """Sentences about fields that are valid one by one and impossible together."""
    if config.staged and config.seeds > 1:
        fix = "set seeds to 1 or staged to False"
        yield f"seeds={config.seeds} cannot run side by side with staged=True; {fix}."
    yield from _uncorrected(config)
    yield from _right_twice(config)
    yield from config.mesh.conflicts()
    yield from config.evaluation.conflicts()
    yield from config.logging.conflicts()
    sizes, update = config.sampling, config.update
    numbers = (sizes.group_size, sizes.prompts, sizes.budget, kept_of(config))
    numbers += (update.minibatches, update.micro_batches)
    numbers += (update.tokens_per_micro_batch,)
    if not all(isinstance(count, int) for count in numbers):
        return
    yield from _too_many(config)
    for part in (
        *(config.pilot, config.warm_start, config.stop, config.hint),
        config.reflection,
    ):
        if part:
            yield from part.conflicts(config)
    yield from _said_elsewhere(config)
    yield from _sized_twice(config)
    yield from _undivided(config)
    yield from _too_small_groups(config, kept_of(config))


def _too_many(config: Config) -> Iterator[str]:
    """Sentences about options that need more completions than a step has."""
    sizes, kept, rows = config.sampling, kept_of(config), rows_of(config)
    group, prompts = sizes.group_size, sizes.prompts
    draws = config.pilot.draws if config.pilot else 0
    if kept < 1:
        yield f"downsample.m={kept} must be at least 1; set downsample.m to 1."
    if kept > group:
        yield (
            f"sampling.group_size={group} cannot keep downsample.m={kept} completions; "
            f"set downsample.m to at most {group}."
        )
    if rows > group * prompts:
        yield (
            f"sampling.budget={sizes.budget} is more than sampling.group_size={group} "
            f"completions of sampling.prompts={prompts}, pilots apart; set it to at "
            f"most {(group + draws) * prompts}."
        )
    least = declared_option(config.allocate, "floor", 0)
    if isinstance(least, int) and least > rows // prompts > 0:
        yield (
            f"allocate.least={least} for each of {prompts} prompts is more than the "
            f"{rows} completions of a step; set allocate.least to at most "
            f"{rows // prompts}."
        )
    if isinstance(sizes.chunks, int) and rows > 0 and rows % sizes.chunks:
        near = max(n for n in range(1, sizes.chunks) if rows % n == 0)
        yield (
            f"sampling.chunks={sizes.chunks} must divide the {rows} "
            f"completions of a step; set sampling.chunks to {near}."
        )


def _said_elsewhere(config: Config) -> Iterator[str]:
    """Sentences about options of corrections that contradict sizes of the config."""
    prompts = config.sampling.prompts
    must = {
        "rows_per_prompt": (
            min(rows_of(config) / prompts, kept_of(config)),
            "the rows trained per prompt",
        ),
        "most_draws": (config.sampling.group_size, "the most that a prompt draws"),
    }
    for name, place in Place(config.correct).walk("correct"):
        for argument, (right, what) in must.items() if callable(place.value) else ():
            own = declared(place.value, argument, None)
            value = option(place.value, own) if own else right
            if isinstance(value, int | float) and value != right:
                full = f"{name}.{own}"
                fix = f"set {full} to {right:g}"
                yield f"{full}={value} must be {what}, {right:g}; {fix}."


def _right_twice(config: Config) -> Iterator[str]:
    """A sentence if two functions would call different completions right."""
    found = {"curax.settings.declared.RIGHT": RIGHT} if config.hint else {}
    for name, place in Place(config).walk():
        if callable(place.value) and (own := declared(place.value, "right_above", "")):
            found[f"{name}.{own}"] = option(place.value, own)
    known = {n: x for n, x in found.items() if isinstance(x, int | float)}
    for (one, mine), (other, its) in itertools.pairwise(known.items()):
        if mine != its:
            yield (
                f"{other}={its} and {one}={mine} call different completions right; set "
                f"{other} to {mine}."
            )


def _sized_twice(config: Config) -> Iterator[str]:
    """Sentences about micro-batches whose number and size are both given."""
    tokens, warm = config.update.tokens_per_micro_batch, config.warm_start
    counts = {"update.micro_batches": config.update.micro_batches}
    if warm:
        counts["warm_start.micro_batches"] = warm.micro_batches
    for name, count in counts.items():
        if tokens and isinstance(count, int) and count > 1:
            yield (
                f"{name}={count} and update.tokens_per_micro_batch={tokens} both say "
                f"how large a micro-batch is; set {name} to 1, or "
                "update.tokens_per_micro_batch to 0."
            )


def _undivided(config: Config) -> Iterator[str]:
    """A sentence if updates do not divide the rows trained per step."""
    parts = (config.update.minibatches, config.update.micro_batches)
    rows = min(rows_of(config), config.sampling.prompts * kept_of(config))
    if rows % math.prod(parts):
        divisors = [size for size in range(1, rows + 1) if rows % size == 0]
        pairs = [(a, b) for a in divisors for b in divisors if rows % (a * b) == 0]
        a, b = min(pairs, key=lambda p: abs(p[0] - parts[0]) + abs(p[1] - parts[1]))
        yield (
            f"update.minibatches={parts[0]} times update.micro_batches={parts[1]} must "
            f"divide the {rows} rows trained per step; set them to {a} and {b}."
        )


def _uncorrected(config: Config) -> Iterator[str]:
    """Sentences about biases of the policy gradient that no stage corrects."""
    sizes, update = config.sampling, config.update
    if config.steps and truncates(config) and sizes.correct is None:
        name, whole = (
            ("top_p", 1.0)
            if type(sizes.top_k) is int and not sizes.top_k
            else ("top_k", 0)
        )
        yield (
            f"sampling.{name}={getattr(sizes, name)} draws from another distribution "
            "than the policy that trains, and nothing corrects that bias; set "
            "sampling.correct=correct.truncated_ratio (TIS), correct.masked_ratio "
            "(MIS) or correct.icepop, correct.none to leave the bias, or "
            f"sampling.{name}={whole}."
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
    """Sentences about stages that need larger groups than the config has."""
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
        now, to = kept, least
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
    """Smallest group with a gradient under a stage, and the function that needs it."""
    least, called = 1, ""
    for _, place in Place(function).walk(name):
        if callable(place.value):
            needs = declared(place.value, "least_group", 1)
            needs = option(place.value, needs) if isinstance(needs, str) else needs
            if isinstance(needs, int) and needs > least:
                least, called = needs, place.owner(name)
    return least, called


def largest_group(config: Config) -> int:
    """Largest number of completions that a prompt can get."""
    sizes = config.sampling
    if declared(config.allocate, "equal_groups", False) and not config.stop:
        return min(sizes.group_size, -(-rows_of(config) // sizes.prompts))
    return min(sizes.group_size, rows_of(config))


def declared_option(function: Function, name: str, default: Any = None) -> Any:
    """The option of a function that it declares under this name; else `default`."""
    own = declared(function, name, None)
    return default if own is None else option(function, own, default)


def checkpoint_of(config: Config) -> Any:
    """Folder or name on the hub that the model begins from; None: random numbers."""
    return declared_option(config.model, "checkpoint")


def kept_of(config: Config) -> Any:
    """m, the largest number of completions of a prompt that train."""
    return declared_option(config.downsample, "keeps", config.sampling.group_size)


def corrects_sampling(config: Config) -> bool:
    """Whether tokens are weighed by the policy over what they were drawn from."""
    rule = config.sampling.correct
    return rule is not None and not declared(rule, "constant", False)


def truncates(config: Config) -> bool:
    """Whether top_k or top_p truncates the policy's distribution."""
    sizes = config.sampling
    whole = type(sizes.top_k) is int and sizes.top_k == 0
    return not (whole and type(sizes.top_p) in (int, float) and sizes.top_p >= 1)


def updates_of(config: Config) -> int:
    """Optimizer updates per step."""
    return config.update.epochs * config.update.minibatches


def cache_bytes(config: Config) -> float:
    """Bytes of a device that the cache of one seed's draw may take; 0: any."""
    return config.sampling.cache_gib * 2**30 / config.seeds


def rows_of(config: Config) -> int:
    """N, completions drawn per step without pilots."""
    sizes, pilot = config.sampling, config.pilot
    budget = sizes.budget or sizes.prompts * sizes.group_size
    return budget - (pilot.draws * sizes.prompts if pilot else 0)
