"""The settings of a run: frozen dataclasses that check themselves, and functions.

A config is the composition of a run: one function per stage, each with its options
bound by `functools.partial`, so that a default lives once, in a signature. Whatever
stands in a config has a dotted name, be it a field (`sampling.group_size`), an option
of a function (`loss.high`), an option of an option (`objective.f.alpha`) or an entry
of a tuple (`gate.gates.0.delta`); errors, `override`, `describe` and `changes` all
use that name. Only the standard library is imported here.
"""

import ast
import copy
import dataclasses
import difflib
import functools
import inspect
import itertools
import math
import sys
import traceback
import types
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, NamedTuple


class ConfigError(ValueError):
    """A config is wrong. Its text is one sentence: name, value, rule, nearest fix."""


class Range(NamedTuple):
    """Where a number lies: from `low`, itself only if `closed`, to `high`."""

    low: float
    high: float = math.inf
    closed: bool = True

    def holds(self, value: float) -> bool:
        """Whether `value` lies inside; NaN never does."""
        above = self.low <= value if self.closed else self.low < value
        return above and value <= self.high

    def nearest(self, value: float) -> float:
        """The bound next to a value outside; one above it if the bound is open."""
        lowest = self.low if self.closed else min(self.low + 1, self.high)
        return self.high if value > self.high else lowest

    def __str__(self) -> str:
        text = f"at least {self.low}" if self.closed else f"greater than {self.low}"
        return text if self.high == math.inf else f"{text} and at most {self.high}"


Function = Callable[..., Any]
Count = Annotated[int, Range(1)]
Natural = Annotated[int, Range(0)]
Seed = Annotated[int, Range(0, 2**32 - 1)]
Magnitude = Annotated[float, Range(0.0)]
Positive = Annotated[float, Range(0.0, closed=False)]
Share = Annotated[float, Range(0.0, 1.0, closed=False)]


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How completions are drawn."""

    group_size: Count = 8  # G, completions per prompt at most
    prompts: Count = 16  # B, prompts per step
    max_tokens: Count = 64  # T, tokens per completion at most
    temperature: Positive = 1.0  # divides the logits; greedy decoding cannot train
    top_k: Natural = 0  # tokens drawn from, the likeliest; 0: all
    top_p: Share = 1.0  # probability mass drawn from, the likeliest; 1: all
    slots: Natural = 0  # completions decoded at a time; 0: every row of the step
    rounds: Count = 1  # draws of prompts to refill groups the gate closed; 1: no refill


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """How often, and how precisely, the policy is measured on held-out prompts."""

    every: Count = 50  # steps from one evaluation to the next
    prompts: Count = 256  # held-out prompts
    samples: Count = 8  # completions per prompt


@dataclass(frozen=True, kw_only=True)
class WarmStart:
    """Supervised steps on solved examples, before any reinforcement learning."""

    steps: Count  # optimizer updates
    rows: Count  # traces per step
    optimizer: Function  # () -> optax transformation
    clip_norm: Positive = 1.0  # largest global norm of a gradient; inf: no clipping


@dataclass(frozen=True, kw_only=True)
class Update:
    """How the rows of a step become optimizer updates."""

    epochs: Count = 1  # passes over the rows of a step
    minibatches: Count = 1  # optimizer updates per pass
    micro_batches: Count = 1  # gradients added up per update; changes memory only
    clip_norm: Positive = 1.0  # largest global norm of a gradient; inf: no clipping
    vocab_chunk: Natural = 0  # vocabulary entries per log-prob chunk; 0: all at once


@dataclass(frozen=True, kw_only=True)
class Memory:
    """The difficulty memory: discounted Beta counts per prompt id."""

    discount: Share = 0.9  # factor on earlier counts, each time a prompt is drawn
    prior: tuple[Positive, Positive] = (1.0, 1.0)  # counts (solved, failed) before any


@dataclass(frozen=True, kw_only=True)
class Mesh:
    """Devices along each axis of the mesh."""

    data: Count = 1  # devices that share out the rows and copy the parameters
    fsdp: Count = 1  # devices that share out the rows and the parameters
    tensor: Count = 1  # devices that share out each layer


@dataclass(frozen=True, kw_only=True)
class Logging:
    """What a run leaves behind, and how often."""

    every: Count = 10  # steps per jitted chunk: how often the host gets metrics
    rollout_prompts: Natural = 2  # prompts per step whose completions are written
    checkpoint_every: Count = 50  # steps from one checkpoint to the next
    keep: Count = 2  # checkpoints kept, the latest


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
    allocate: Function  # completions per prompt
    objective: Function  # weight f'(p) per prompt
    gate: Function  # which completions may train
    downsample: Function  # which of them do, at most its option m per prompt
    correct: Function  # how the selection is undone; said by every recipe
    pool_statistics: bool = True  # advantages see all drawn, False: only those kept
    advantage: Function  # credit per completion
    modulate: Function  # multiplier per token
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
    steps: Count = 200  # RL steps
    seed: Seed = 0  # every random draw of the run follows from it
    seeds: Count = 1  # runs side by side, of seed, seed + 1, ...
    staged: bool = False  # step from the host although the reward is a JAX function

    def __post_init__(self) -> None:
        values = _wrong_values("", Place(self))
        for wrong in itertools.chain(values, _wrong_options(self), _conflicts(self)):
            raise ConfigError(wrong)


def load(path: str | Path) -> Config:
    """The config that a Python file returns from its `get_config()`.

    Raises:
        ConfigError: the file is missing, is not Python, fails, or returns no Config.
    """
    path = Path(path)
    if not path.is_file():
        files = sorted(file.name for file in path.parent.glob("*.py"))
        near = " or ".join(difflib.get_close_matches(path.name, files, 3, cutoff=0))
        fix = f"did you mean {near}?" if near else "no Python file is beside it either."
        raise ConfigError(f"{path}: there is no such file; {fix}")
    # Compiled here, not imported: no bytecode is left beside the file, and an edit
    # within the same second is seen.
    module = types.ModuleType(f"config_{path.stem}")
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
        if not isinstance(error, ConfigError):
            text = f"{type(error).__name__}: {text.rstrip('.')}; mend that line."
        raise ConfigError(f"{where}: {text}") from error
    return config


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
    draft = copy.copy(config)
    for name in assignments:
        if isinstance(assignments, Mapping):
            edit = _Edit(f"{name}={assignments[name]}", [assignments[name]])
        else:
            text, sign, value = (part.strip() for part in name.partition("="))
            if not (text and sign):
                fix = "write --set NAME=VALUE, for example --set steps=200"
                raise ConfigError(f"{name!r} sets nothing; {fix}.")
            name, edit = text, _Edit(f"{text}={value}", [_literal(value), value])
        field, value = _edit_inside("", Place(draft), name.split("."), edit)
        object.__setattr__(draft, field, value)
    return dataclasses.replace(draft)


def options(function: Function) -> dict[str, Any]:
    """The options of a function by name: bound by `partial`, or else the default."""
    inner = _places(Place(function)).items()
    return {key: place.value for key, place in inner if place.value is not _UNSET}


def option(function: Function, name: str, default: Any = None) -> Any:
    """One option of a function; `default` where it has none of that name."""
    return options(function).get(name, default)


def describe(config: Config) -> dict[str, Any]:
    """The config with every default resolved, ready for JSON, in a stable order.

    A function is `{"function": its full name}` and its options. What a closure holds
    cannot be seen: bind options with `partial` instead.
    """
    return _described(Place(config))


def changes(old: dict[str, Any], new: dict[str, Any]) -> list[tuple[str, Any, Any]]:
    """Where two descriptions differ: (dotted name, old, new); absent counts as None."""
    before, after = dict(_leaves("", old)), dict(_leaves("", new))
    pairs = [(name, before.get(name), after.get(name)) for name in after | before]
    return [(name, was, now) for name, was, now in pairs if was != now]


def fields_of(config: Config) -> list[str]:
    """The dotted names of all functions and values that `describe` shows."""
    return [name for name, _ in _leaves("", describe(config))]


# The stages called with arrays alone; other functions may be given keywords as well.
_STAGES = ["objective", "gate", "downsample", "correct", "advantage", "modulate"]
_STAGES += ["loss", "aggregate"]


def _wrong_values(name: str, place: "Place") -> Iterator[str]:
    """Fields of the wrong type or out of range; arrays may be traced, and pass."""
    for key, (value, kind) in _places(place).items():
        field = _join(name, key)
        if not _suits(value, kind):
            words, example = _words(kind)
            fix = f"set {field} to {example}, for example" if example else "give one"
            yield f"{field}={value!r} must be {words}; {fix}."
        for bounds in getattr(kind, "__metadata__", ()):
            if not _is_array(value) and not bounds.holds(value):
                fix = f"set {field} to {bounds.nearest(value)}"
                yield f"{field}={value!r} must be {bounds}; {fix}."
        if not callable(value):
            yield from _wrong_values(field, Place(value, kind))


def _wrong_options(config: Config) -> Iterator[str]:
    """Options that have no name, that do not exist, or that a stage still needs."""
    for name, place in _walk("", Place(config)):
        function = place.value
        if not _is_function(function):
            continue
        owner, bound, parameters = _owner(name, place), *_signature(function)
        if isinstance(function, functools.partial) and function.args:
            yield f"{name} binds options of {owner} by position; bind them by name."
        takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
        known = {k: p for k, p in _places(place).items() if k in parameters}
        for key in bound if parameters and not takes_any else ():
            if key not in known:
                yield _unknown(f"{name}.{key}={bound[key]}", owner, key, known)
        for key in known if name.split(".")[0] in _STAGES else ():
            if known[key].value is _UNSET:
                fix = f"bind it with functools.partial(..., {key}=...)"
                yield f"{name}.{key} is not set, but {owner} needs it; {fix}."


def _conflicts(config: Config) -> Iterator[str]:
    """Fields that are right one by one, and wrong together."""
    if config.staged and config.seeds > 1:
        fix = "set seeds to 1 or staged to False"
        yield f"seeds={config.seeds} cannot run side by side with staged=True; {fix}."
    group, prompts = config.sampling.group_size, config.sampling.prompts
    kept = option(config.downsample, "m", group)
    parts = (config.update.minibatches, config.update.micro_batches)
    if not all(isinstance(count, int) for count in (group, prompts, kept, *parts)):
        return
    if kept < 1:
        yield f"downsample.m={kept} must be at least 1; set downsample.m to 1."
    if kept > group:
        yield (
            f"sampling.group_size={group} cannot keep downsample.m={kept} completions; "
            f"set downsample.m to at most {group}."
        )
    rows = prompts * kept
    if rows % math.prod(parts):
        sizes = [size for size in range(1, rows + 1) if rows % size == 0]
        pairs = [(a, b) for a in sizes for b in sizes if rows % (a * b) == 0]
        a, b = min(pairs, key=lambda p: abs(p[0] - parts[0]) + abs(p[1] - parts[1]))
        yield (
            f"update.minibatches={parts[0]} times update.micro_batches={parts[1]} must "
            f"divide the {rows} rows trained per step; set them to {a} and {b}."
        )


_UNSET: Any = object()  # the value of an option that has none
_FUNCTION: Any = typing.get_origin(Function)
_SEQUENCES = (tuple, list, Sequence)
_WORDS: dict[Any, tuple[str, Any]] = {
    int: ("an integer", 1),
    float: ("a number", 0.1),
    bool: ("true or false", True),
    str: ("text", "word"),
    tuple: ("a tuple", (1.0, 1.0)),
    Sequence: ("a tuple", (1.0, 1.0)),
    type(None): ("none", None),
    _FUNCTION: ("a function", None),
}


class Place(NamedTuple):
    """Whatever has a dotted name: what stands there, and what may."""

    value: Any
    kind: Any = Any  # annotation


class _Edit(NamedTuple):
    shown: str  # NAME=VALUE
    readings: list[Any]  # what the value may mean; the first that suits is taken


def _places(place: Place) -> dict[str, Place]:
    """The places inside a place, by the next part of their dotted name."""
    node = place.value
    if _is_dataclass(node):
        kinds, names = _hints(type(node)), [f.name for f in dataclasses.fields(node)]
        return {n: Place(getattr(node, n), kinds.get(n, Any)) for n in names}
    if callable(node):
        (bound, parameters), found = _signature(node), {}
        for name, p in parameters.items():
            default = _UNSET if p.default is p.empty else p.default
            optional = p.kind is p.POSITIONAL_OR_KEYWORD and default is not _UNSET
            if p.kind is p.KEYWORD_ONLY or optional or name in bound:
                stated = p.annotation is not p.empty and type(p.annotation) is not str
                kind = p.annotation if stated else _kind_of(default)
                found[name] = Place(bound.get(name, default), kind)
        return found | {k: Place(v) for k, v in bound.items() if k not in found}
    if isinstance(node, tuple | list):
        pairs = zip(node, _item_kinds(place.kind, len(node)), strict=False)
        return {str(i): Place(*pair) for i, pair in enumerate(pairs)}
    if isinstance(node, dict):
        return {str(key): Place(value) for key, value in node.items()}
    return {}


def _walk(name: str, place: Place) -> Iterator[tuple[str, Place]]:
    yield name, place
    for key, inner in _places(place).items():
        yield from _walk(_join(name, key), inner)


def _join(name: str, key: object) -> str:
    return f"{name}.{key}" if name else str(key)


def _is_dataclass(value: Any) -> bool:
    return dataclasses.is_dataclass(value) and not isinstance(value, type)


def _is_array(value: Any) -> bool:
    return hasattr(value, "shape") and hasattr(value, "dtype")


def _is_function(value: Any) -> bool:
    return callable(value) and not _is_dataclass(value)


@functools.cache
def _hints(cls: type) -> dict[str, Any]:
    try:
        return typing.get_type_hints(cls, include_extras=True)
    except Exception:  # an annotation may be unreadable
        return {}


def _signature(function: Any) -> tuple[dict[str, Any], dict[str, inspect.Parameter]]:
    """The keywords bound to a function, and its parameters before they were."""
    partial = isinstance(function, functools.partial)
    target, bound = (function.func, function.keywords) if partial else (function, {})
    for eval_str in (True, False):
        try:
            signature = inspect.signature(target, eval_str=eval_str)
            return bound, dict(signature.parameters)
        except Exception:  # an annotation may be unreadable; a builtin may have none
            continue
    return bound, {}


def _name_of(function: Any) -> str:
    if isinstance(function, functools.partial):
        return _name_of(function.func)
    named = function if hasattr(function, "__qualname__") else type(function)
    return f"{named.__module__}.{named.__qualname__}"


def _owner(name: str, place: Place) -> str:
    """What messages call the thing that has options, or has none."""
    if _is_function(place.value):
        return _name_of(place.value).removeprefix("curax.")
    return name or "the config"


def _members(kind: Any) -> list[Any]:
    """The alternatives of an annotation, without metadata."""
    parts = typing.get_args(kind)
    if typing.get_origin(kind) is Annotated:
        return _members(parts[0])
    if typing.get_origin(kind) in (typing.Union, types.UnionType):
        members = [member for part in parts for member in _members(part)]
        # A union of array-likes names bool too, but no magnitude is one.
        return [m for m in members if not (m is bool and float in members)]
    return [kind]


def _item_kinds(kind: Any, length: int) -> list[Any]:
    for member in _members(kind):
        parts, origin = typing.get_args(member), typing.get_origin(member)
        if origin is tuple and parts[1:] != (...,):
            return list(parts)
        if origin in _SEQUENCES:
            return [parts[0]] * length
    return [Any] * length


def _kind_of(value: Any) -> Any:
    """What may stand where no annotation says so: more of the same."""
    if value is None or value is _UNSET:
        return Any
    if type(value) is tuple and value:
        return types.GenericAlias(tuple, tuple(map(_kind_of, value)))
    return _FUNCTION if callable(value) else float if _is_array(value) else type(value)


def _suits(value: Any, kind: Any) -> bool:
    """Whether a value may stand where the annotation is; arrays may for numbers."""

    def suits_member(member: Any) -> bool:
        origin = typing.get_origin(member) or member
        if member in (int, float) or _is_array(member):
            number = type(value) in (int, float if member is not int else int)
            return number or _is_array(value)
        if origin in _SEQUENCES:
            if not isinstance(value, tuple | list) or not isinstance(value, origin):
                return False
            kinds = _item_kinds(member, len(value))
            return len(kinds) == len(value) and all(map(_suits, value, kinds))
        protocol = getattr(origin, "_is_protocol", False)  # isinstance may refuse it
        known = isinstance(origin, type) and not protocol
        return member is Any or (known and isinstance(value, origin))

    return any(map(suits_member, _members(kind)))


def _words(kind: Any) -> tuple[str, Any]:
    """An annotation in words, and an example."""
    kinds = [typing.get_origin(member) or member for member in _members(kind)]
    kinds = [k for k in kinds if not (k is int and float in kinds)]
    plain = [k for k in kinds if k in _WORDS or dataclasses.is_dataclass(k)] or kinds
    known = [_WORDS.get(k, (f"a {getattr(k, '__name__', k)}", None)) for k in plain]
    return " or ".join(words for words, _ in known), known[0][1]


def _literal(text: str) -> Any:
    words = {"true": True, "false": False, "none": None, "inf": math.inf}
    if text.lower() in words:
        return words[text.lower()]
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        return text


def _unknown(
    shown: str, owner: str, key: str, known: Iterable[str], below: Sequence[str] = ()
) -> str:
    near = below or difflib.get_close_matches(key, known, 1)
    guess = f"did you mean {near[0]!r}? It" if near else "it"
    has = ", ".join(sorted(known)) or "none"
    return f"{shown}: {owner} has no option {key!r}; {guess} has {has}."


def _edit_inside(
    name: str, place: Place, path: list[str], edit: _Edit
) -> tuple[str, Any]:
    """Which place inside this one an assignment changes, and to what."""
    key, *deeper = path
    inner = _places(place)
    if key not in inner:
        below = [n for n, _ in _walk(name, place) if n.endswith(f".{key}")]
        raise ConfigError(_unknown(edit.shown, _owner(name, place), key, inner, below))
    name, part = _join(name, key), inner[key]
    if not deeper:
        return key, _replacement(name, part, edit)
    node = part.value
    changed = dict([_edit_inside(name, part, deeper, edit)])
    if _is_dataclass(node):
        try:
            return key, dataclasses.replace(node, **changed)
        except (TypeError, ValueError) as error:  # its own check, or a field it fixes
            raise ConfigError(f"{edit.shown}: {error}") from error
    if callable(node):
        return key, functools.partial(node, **changed)
    if isinstance(node, dict):
        return key, {k: changed.get(str(k), v) for k, v in node.items()}
    remade = getattr(type(node), "_make", type(node))  # a named tuple has _make
    return key, remade(changed.get(str(i), v) for i, v in enumerate(node))


def _replacement(name: str, place: Place, edit: _Edit) -> Any:
    now, kind = place
    is_set = now is not None and now is not _UNSET
    if is_set and (kind is Any or not _suits(now, kind)):
        kind = _kind_of(now)
    kinds = _members(kind)
    for value in edit.readings:
        relist = isinstance(now, tuple) and isinstance(value, list)
        new: Any = tuple(value) if relist else value
        if _suits(new, kind):
            widen = type(new) is int and float in kinds and int not in kinds
            return float(new) if widen and abs(new) < 2**1023 else new
    inside = [part.value for _, part in _walk(name, place)]
    if any(callable(part) or _is_dataclass(part) for part in inside):
        reach = ", ".join(_join(name, key) for key in _places(place)) or "none"
        raise ConfigError(
            f"{edit.shown}: functions and groups of options are chosen in the config "
            f"file; --set reaches single options, here {reach}."
        )
    words, example = _words(kind)
    state = "it is not set" if now is _UNSET else f"it is {now} now"
    raise ConfigError(
        f"{edit.shown}: expected {words} ({state}); "
        f"write for example --set {name}={now if is_set else example}."
    )


def _described(place: Place) -> Any:
    value, inner = place.value, _places(place)
    shown = {k: _described(p) for k, p in inner.items() if p.value is not _UNSET}
    if callable(value):
        return {"function": _name_of(value)} | shown
    if isinstance(value, tuple | list):
        return list(shown.values())
    if isinstance(value, dict) or _is_dataclass(value):
        return shown
    if _is_array(value):
        return value.tolist()
    finite = isinstance(value, float) and math.isfinite(value)
    if value is None or finite or isinstance(value, bool | int | str):
        return value
    # JSON has neither inf nor nan, and an address would change from run to run.
    return repr(value) if " at 0x" not in repr(value) else _name_of(value)


def _leaves(name: str, tree: Any) -> Iterator[tuple[str, Any]]:
    """What a description holds, by dotted name; a function goes by its place's."""
    if not tree or not isinstance(tree, dict | list):
        yield name, tree
        return
    for key, part in tree.items() if isinstance(tree, dict) else enumerate(tree):
        yield from _leaves(name if key == "function" else _join(name, key), part)
