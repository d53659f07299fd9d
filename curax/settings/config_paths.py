"""Dotted names in a tree of dataclasses and functions: describe, compare, set, check.

A dotted name is that of a field (`sampling.group_size`), an option of a function
(`loss.high`), an option of an option (`objective.f.alpha`) or an entry of a tuple
(`gate.gates.0.delta`). Only the standard library is imported.
"""

import ast
import copy
import dataclasses
import difflib
import functools
import importlib
import importlib.util
import inspect
import math
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from curax.settings import functions
from curax.settings.config_types import (
    ConfigError,
    Function,
    alternatives,
    entry_kind,
    field_types,
    groups_in,
    has_functions,
    infer_type,
    is_array,
    item_kinds,
    matches,
    out_of_range,
    type_phrase,
)

UNSET: Any = object()  # the value of an option without a default
OF_FILE = "config_"  # prefix of the module name of a config file


class Place(NamedTuple):
    """A node of the tree: its value and the annotation of its place."""

    value: Any
    kind: Any = Any  # annotation

    def children(self) -> dict[str, "Place"]:
        """Child nodes by the next part of their dotted name."""
        node = self.value
        if _is_dataclass(node):
            known = field_types(type(node))
            names = [field.name for field in dataclasses.fields(node)]
            return {n: Place(getattr(node, n), known.get(n, Any)) for n in names}
        if callable(node):
            return _options(node)
        if isinstance(node, tuple | list):
            pairs = zip(node, item_kinds(self.kind, len(node)), strict=False)
            return {str(i): Place(*pair) for i, pair in enumerate(pairs)}
        if isinstance(node, dict):
            kind = entry_kind(self.kind) or Any
            return {str(key): Place(value, kind) for key, value in node.items()}
        return {}

    def walk(self, name: str = "") -> Iterator[tuple[str, "Place"]]:
        """Yield (dotted name, node) of this node and all below it."""
        yield name, self
        for key, inner in self.children().items():
            yield from inner.walk(_join(name, key))

    def replaced(self, children: Mapping[str, Any]) -> Any:
        """The value with some children replaced, by the names of `children`."""
        node = self.value
        if _is_dataclass(node):
            return dataclasses.replace(node, **children)
        if callable(node):
            return functools.partial(node, **children)
        if node is None or isinstance(node, dict):  # none: of a dictionary to be
            named = {str(key): key for key in node or {}}
            return (node or {}) | {named.get(k, k): v for k, v in children.items()}
        remade = getattr(type(node), "_make", type(node))  # a named tuple has _make
        return remade(children.get(str(i), value) for i, value in enumerate(node))

    def owner(self, name: str) -> str:
        """Name of this node in messages: the function's, else the dotted name."""
        if callable(self.value) and not _is_dataclass(self.value):
            return full_name(self.value).removeprefix("curax.")
        return name or "the config"


def options(function: Function) -> dict[str, Any]:
    """Options of a function by name: values bound by `partial`, else defaults."""
    inner = Place(function).children().items()
    return {key: place.value for key, place in inner if place.value is not UNSET}


def option(function: Function, name: str, default: Any = None) -> Any:
    """An option of a function; `default` where it has no such option."""
    return options(function).get(name, default)


def unbound(function: Any) -> Any:
    """A function without the options bound by `partial`."""
    return function.func if isinstance(function, functools.partial) else function


def full_name(function: Any) -> str:
    """Module and qualified name of a function, without bound options."""
    function = unbound(function)
    named = function if hasattr(function, "__qualname__") else type(function)
    home = named.__module__
    return f"{home}{':' if home.endswith('.py') else '.'}{named.__qualname__}"


# Trees as JSON


def describe(tree: Any) -> Any:
    """A tree as JSON values in a stable order, with every default.

    A function is `{"function": full name, option: value, ...}`. Variables of a closure
    are not visible: bind options with `partial` instead.
    """
    inner = Place(tree).children().items()
    shown = {k: describe(p.value) for k, p in inner if p.value is not UNSET}
    if callable(tree):
        return {"function": full_name(tree)} | shown
    if isinstance(tree, tuple | list):
        return list(shown.values())
    if isinstance(tree, dict) or _is_dataclass(tree):
        return shown
    if is_array(tree):
        return tree.tolist()
    finite = isinstance(tree, float) and math.isfinite(tree)
    if tree is None or finite or isinstance(tree, bool | int | str):
        return tree
    # JSON has neither inf nor nan, and an address would change from run to run.
    return repr(tree) if " at 0x" not in repr(tree) else full_name(tree)


def rebuild(description: Any, kind: Any = Any, name: str = "") -> Any:
    """The tree of a description, with functions imported by name.

    Args:
        description: result of `describe`, read from JSON or not.
        kind: annotation of the node; a dataclass for the description of one.
        name: dotted name of the node, for messages.

    Raises:
        ConfigError: a function cannot be imported.
    """
    if isinstance(description, list):
        kinds = item_kinds(kind, len(description))
        pairs = zip(description, kinds, strict=True)
        return tuple(rebuild(d, k, _join(name, i)) for i, (d, k) in enumerate(pairs))
    if isinstance(description, str) and float in alternatives(kind):
        return float(description)  # JSON has neither inf nor nan
    if not isinstance(description, dict):
        return description
    if "function" not in description:
        classes = groups_in(kind)
        known = field_types(classes[0]) if classes else {}
        parts = {
            key: rebuild(part, known.get(key, Any), _join(name, key))
            for key, part in description.items()
        }
        return classes[0](**parts) if classes else parts
    function = _imported(description["function"], name)
    default, places = describe(function), Place(function).children()
    bound = {
        key: rebuild(part, places.get(key, Place(None)).kind, _join(name, key))
        for key, part in description.items()
        if key != "function" and (key not in default or part != default[key])
    }
    return functools.partial(function, **bound) if bound else function


def _imported(function: str, place: str) -> Callable[..., Any]:
    """The function of a name that stands at a place.

    Raises:
        ConfigError: there is no such function.
    """
    try:
        return functions.named(function)
    except functions.NotFoundError as error:
        raise ConfigError(f"{place}: {function} {error}") from error


def changes(old: Any, new: Any) -> list[tuple[str, Any, Any]]:
    """Differences of two descriptions as (dotted name, old, new); absent is None.

    A function that the config file defines is the same after that file is renamed.
    """
    before, after = flat(old), flat(new)
    pairs = [(name, before.get(name), after.get(name)) for name in after | before]
    return [(name, was, now) for name, was, now in pairs if was != now]


def flat(description: Any) -> dict[str, Any]:
    """Values of a description by dotted name; a function stands at its own."""
    return dict(_leaves("", description))


def _leaves(name: str, tree: Any) -> Iterator[tuple[str, Any]]:
    """(dotted name, value) of all leaves; a function is the leaf at its own name."""
    if not tree or not isinstance(tree, dict | list):
        yield name, tree
        return
    for key, part in tree.items() if isinstance(tree, dict) else enumerate(tree):
        if key == "function":
            yield name, re.sub(rf"^{OF_FILE}[^.]*\.", "config.", str(part))
        else:
            yield from _leaves(_join(name, key), part)


# Checks


def wrong_values(place: Place, name: str = "") -> Iterator[str]:
    """Sentences about values out of range and fields of a wrong type; arrays pass."""
    for key, inner in place.children().items():
        (value, kind), field = inner, _join(name, key)
        # Annotations of user functions may be wrong: only `assign` relies on them.
        if not (callable(place.value) or matches(value, kind)):
            words, example = type_phrase(kind)
            example = (value,) if matches((value,), kind) else example
            fix = f"set {field} to {example}, for example" if example else "give one"
            yield f"{field}={value!r} must be {words}; {fix}."
        if bounds := out_of_range(value, kind):
            fix = f"set {field} to {bounds.nearest(value)}"
            yield f"{field}={value!r} must be {bounds}; {fix}."
        yield from wrong_values(inner, field)


def wrong_options(place: Place, complete: Sequence[str]) -> Iterator[str]:
    """Sentences about options that are positional, unknown, or required and unset.

    Args:
        place: root node.
        complete: top-level names whose functions are called without more keywords.
    """
    for name, inner in place.walk():
        function = inner.value
        if not callable(function) or _is_dataclass(function):
            continue
        owner, (bound, parameters) = inner.owner(name), _signature(function)
        if isinstance(function, functools.partial) and function.args:
            yield f"{name} binds options of {owner} by position; bind them by name."
        takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
        known = {k: p for k, p in inner.children().items() if k in parameters}
        for key in bound if parameters and not takes_any else ():
            if key not in known:
                yield unknown_option(f"{name}.{key}={bound[key]}", owner, key, known)
        for key in known if name.split(".")[0] in complete else ():
            if known[key].value is UNSET:
                fix = f"set {name}.{key}, or bind it with "
                fix += f"functools.partial(..., {key}=...)"
                yield f"{name}.{key} is not set, but {owner} needs it; {fix}."


# Assignments


class _Edit(NamedTuple):
    """An assignment to a dotted name."""

    shown: str  # NAME=VALUE
    readings: list[Any]  # possible values of VALUE; the first that matches is taken
    files: Callable[[], Iterable[str]]
    alias: str | None  # what the end of the name is called here


def assign(
    tree: Any,
    assignments: Iterable[str] | Mapping[str, Any],
    files: Callable[[], Iterable[str]] = tuple,
    aliases: Mapping[str, str] = {},
) -> Any:
    """A copy of a dataclass with values set by dotted name, before its own checks.

    Args:
        tree: dataclass to copy.
        assignments: `NAME=VALUE` strings, or a mapping from names to values.
        files: names of recipes, for messages.
        aliases: names used by other programs and their dotted names, for messages.

    Raises:
        ConfigError: an unknown name, a value of the wrong type, or one that undoes
            what was assigned before it.
    """
    draft = copy.copy(tree)
    before: dict[str, str] = {}  # name -> NAME=VALUE

    def edit(name: str, value: object, readings: list[Any]) -> _Edit:
        *_, last = parts = name.split(".")
        alias = aliases.get(".".join(parts[-2:])) or aliases.get(last)
        return _Edit(f"{name}={value}", readings, files, alias)

    for name in assignments:
        if isinstance(assignments, Mapping):
            value = assignments[name]
            this = edit(name, value, [value])
        else:
            text, sign, value = (part.strip() for part in name.partition("="))
            if not (text and sign):
                fix = "write --set NAME=VALUE, for example --set steps=200"
                if text in files():
                    fix = "name the recipe in front of --set"
                raise ConfigError(f"{name!r} sets nothing; {fix}.")
            name, this = text, edit(text, value, [_literal(value), value])
        field, value = _assign_below("", Place(draft), name.split("."), this)
        object.__setattr__(draft, field, value)
        _check_kept(Place(draft), name, this.shown, before)
        before[name] = this.shown
    return draft


def _check_kept(place: Place, name: str, shown: str, before: Mapping[str, str]) -> None:
    """Check that an assignment does not undo one before it to a part of its value.

    Raises:
        ConfigError: it does, and its value has that part too.
    """
    lost = [one for one in before if one.startswith(f"{name}.")]
    there = {at for at, _ in place.walk()} if lost else ()
    for one in lost:
        if one in there:
            raise ConfigError(
                f"{shown} begins {name} anew and would undo {before[one]}, which "
                f"stands before it; set {name} first, or leave one out."
            )


def _assign_below(
    name: str, place: Place, path: list[str], edit: _Edit
) -> tuple[str, Any]:
    """(child, new value of it) of an assignment to a path below a node."""
    key, *deeper = path
    if entry := entry_kind(place.kind):  # any name can be set
        place = Place(dict(place.value or {}), place.kind)
    inner = place.children()
    if entry:
        inner.setdefault(key, Place(UNSET, entry))
    if key not in inner:
        known = [n for n, _ in place.walk(name)]
        below = [n for n in known if n == edit.alias or n.endswith(f".{key}")]
        if edit.alias and edit.alias.partition(".")[0] in inner:  # of a group of none
            below = below or [edit.alias]
        if place.value is None and (fix := _fix_of_none(name, key, place.kind)):
            raise ConfigError(f"{edit.shown}: {name} is none in this config; {fix}.")
        owner = place.owner(name)
        raise ConfigError(unknown_option(edit.shown, owner, key, inner, below))
    name, part = _join(name, key), inner[key]
    if not deeper:
        return key, _new_value(name, part, edit)
    changed = dict([_assign_below(name, part, deeper, edit)])
    try:
        return key, part.replaced(changed)
    except (TypeError, ValueError) as error:  # raised by the part's own checks
        raise ConfigError(f"{edit.shown}: {error}") from error


def _new_value(name: str, place: Place, edit: _Edit) -> Any:
    """Value of an assignment, converted to the type of its node.

    Raises:
        ConfigError: the value has another type, or the node is a function or group.
    """
    now, kind = place
    is_set = now is not None and now is not UNSET
    if is_set and (kind is Any or not matches(now, kind)):
        kind = infer_type(now)
    kinds = alternatives(kind)
    for value in (*edit.readings, *_listed(edit.readings)):
        relist = isinstance(now, tuple) and isinstance(value, list)
        new: Any = tuple(value) if relist else value
        if matches(new, kind):
            widen = type(new) is int and float in kinds and int not in kinds
            return float(new) if widen and abs(new) < 2**1023 else new
    text = str(edit.readings[-1])
    if _NAME.fullmatch(text) and _takes_function(place):
        return _function(name, now, text, edit)
    names = [part.strip() for part in text.split(",")]
    if all(map(_NAME.fullmatch, names)) and has_functions(item_kinds(kind, 1)[0]):
        return tuple(_imported(one, edit.shown) for one in names)
    below = [part.value for _, part in place.walk()]
    if any(callable(part) or _is_dataclass(part) for part in below):
        reach = ", ".join(_join(name, key) for key in place.children()) or "none"
        raise ConfigError(
            f"{edit.shown}: a function is set by its dotted name, a group of options "
            f"in the config file{_suggestion(name, now, edit)}; options here are "
            f"{reach}."
        )
    words, example = type_phrase(kind)
    state = "it is not set" if now is UNSET else f"it is {now} now"
    raise ConfigError(
        f"{edit.shown}: expected {words} ({state}); "
        f"write for example --set {name}={now if is_set else example}."
    )


def _listed(readings: Sequence[Any]) -> Iterator[tuple[Any, ...]]:
    """Tuples that a value may stand for: of the words between commas, of it alone."""
    if isinstance(readings[-1], str):
        yield tuple(word.strip() for word in readings[-1].split(","))
    yield (readings[0],)


_NAME = re.compile(r".+[.:][A-Za-z_]\w*")  # of a function, with its module or file


def _takes_function(place: Place) -> bool:
    """Whether the value of a node is a function, or may be one."""
    now = place.value
    return (callable(now) and not _is_dataclass(now)) or has_functions(place.kind)


def _function(name: str, now: Any, text: str, edit: _Edit) -> Callable[..., Any]:
    """The function that an assignment names, which has to be one for its place.

    Options without a default keep the values that the function before it had.

    Raises:
        ConfigError: there is no such function, or it is one of another stage.
    """
    found = _imported(text, edit.shown)
    home, theirs = home_of(name, now), str(getattr(unbound(found), "__module__", ""))
    stage = theirs.startswith("curax.") and theirs.count(".") == 1
    if stage and theirs != home and home in sys.modules:
        raise ConfigError(
            f"{edit.shown}: {name} takes a function of {home}, as "
            f"{', '.join(_alike(sys.modules[home], unbound(now)))}, or one of yours."
        )
    (before, _), (_, takes) = _signature(now), _signature(found)
    needs = {key for key, p in takes.items() if p.default is p.empty}
    kept = {key: value for key, value in before.items() if key in needs}
    return functools.partial(found, **kept) if kept else found


def home_of(name: str, now: Any) -> str:
    """Module whose functions a node may be set to; of the present one, else its name's.

    Args:
        name: dotted name of the node.
        now: its value.
    """
    function = unbound(now)
    of = function.__module__ if inspect.isfunction(function) else ""
    return of if of.startswith("curax.") else f"curax.{name.rpartition('.')[2]}"


def functions_for(name: str, place: Place) -> list[str]:
    """Functions of its stage that a node may be set to, as `--set` takes them.

    They take the arrays of the present function; all of the stage, where it is none.
    """
    now, short = place.value and unbound(place.value), name.rpartition(".")[2]
    home = f"curax.{short}"
    if not (_takes_function(place) and home == home_of(name, now)):
        return []
    there = importlib.util.find_spec(home)
    scope = there and importlib.import_module(home)  # no present function may have it
    return [f"{short}.{key}" for key in _alike(scope, now)]


def _alike(scope: Any, now: Any) -> list[str]:
    """Names of the functions of a module that take the arrays of one of them."""
    known = functions.functions_of(scope) if scope else []
    if getattr(now, "__module__", "") != getattr(scope, "__name__", None):
        return known
    return [key for key in known if _arrays(getattr(scope, key)) == _arrays(now)]


def _arrays(function: Callable[..., Any]) -> list[str]:
    """Names of the arguments that a function takes by their places."""
    every = inspect.signature(function).parameters.values()
    return [one.name for one in every if one.kind == one.POSITIONAL_OR_KEYWORD]


def _suggestion(name: str, now: Any, edit: _Edit) -> str:
    """Text on how to set a function or recipe given by its short name; may be empty."""
    text, fixes = str(edit.readings[-1]).lower(), []
    if callable(now):
        home, _, _ = full_name(now).rpartition(".")
        scope = sys.modules.get(home)
        known = functions.functions_of(scope) if scope else []
        short = home.rpartition(".")[2]
        near = difflib.get_close_matches(text.removeprefix(f"{short}."), known, 1)
        fixes += [f"write {name}={short}.{key}" for key in near]
    if text in (known := list(edit.files())):
        fixes += [f"start from --config {text}"]
    elif not fixes:
        near = difflib.get_close_matches(text, known, 1)
        fixes += [f"start from --config {key}" for key in near]
    return "".join(f", {fix}" for fix in (" or ".join(fixes),) if fix)


def _literal(text: str) -> Any:
    """Value of a Python literal, true, false, none or inf; other text as it is."""
    words = {"true": True, "false": False, "none": None, "inf": math.inf}
    if text.lower() in words:
        return words[text.lower()]
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        return text


def unknown_option(
    shown: str, owner: str, key: str, known: Iterable[str], below: Sequence[str] = ()
) -> str:
    """Sentence about an unknown option, with the nearest known name."""
    near = below or difflib.get_close_matches(key, known, 1)
    has = f"it has {', '.join(sorted(known)) or 'none'}."
    guess = f"did you mean {near[0]!r}?" if near else has
    return f"{shown}: {owner} has no option {key!r}; {guess}"


def _fix_of_none(name: str, key: str, kind: Any) -> str:
    """How to get an option of a function or group that is none; empty for others."""
    for group in groups_in(kind):
        fields = inspect.signature(group).parameters.values()
        needed = [f.name for f in fields if f.default is f.empty or f.name == key]
        bound = ", ".join(f"{option}=..." for option in needed)
        return f"write {name}={group.__name__}({bound}) in its file"
    return f"name a function for {name} in its file" if has_functions(kind) else ""


# Functions


def _signature(function: Any) -> tuple[dict[str, Any], dict[str, inspect.Parameter]]:
    """Keywords bound to a function, and the parameters of the unbound function."""
    partial = isinstance(function, functools.partial)
    target, bound = (function.func, function.keywords) if partial else (function, {})
    for eval_str in (True, False):
        try:
            signature = inspect.signature(target, eval_str=eval_str)
            return bound, dict(signature.parameters)
        except Exception:  # an annotation may be unreadable; a builtin may have none
            continue
    return bound, {}


def _options(function: Any) -> dict[str, Place]:
    """Options of a function as nodes: keyword-only, with a default, or bound."""
    (bound, parameters), nodes = _signature(function), {}
    for name, p in parameters.items():
        default = UNSET if p.default is p.empty else p.default
        optional = p.kind is p.POSITIONAL_OR_KEYWORD and default is not UNSET
        if p.kind is p.KEYWORD_ONLY or optional or name in bound:
            stated = p.annotation is not p.empty and type(p.annotation) is not str
            like = Any if default is UNSET else infer_type(default)
            kind = p.annotation if stated else like
            nodes[name] = Place(bound.get(name, default), kind)
    return nodes | {k: Place(v) for k, v in bound.items() if k not in nodes}


def _is_dataclass(value: Any) -> bool:
    return dataclasses.is_dataclass(value) and not isinstance(value, type)


def _join(name: str, key: object) -> str:
    return f"{name}.{key}" if name else str(key)
