"""The fields of a config as text: value, default, where it came from, what it means.

Only the standard library is imported.
"""

import ast
import dataclasses
import functools
import inspect
import io
import json
import re
import sys
import textwrap
import tokenize
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from curax.settings.config_paths import (
    UNSET,
    Place,
    describe,
    full_name,
    functions_for,
    options,
    unbound,
)

WIDTH = 88  # characters of a line
INDENT = " " * 6


class Field(NamedTuple):
    """A field of a config, or an option of a function in it."""

    name: str  # dotted
    value: Any
    default: Any  # UNSET: there is none
    comment: str  # what it means; empty where the source does not say
    functions: Sequence[str] = ()  # that it may be set to, of its stage


def fields(config: Any) -> list[Field]:
    """All fields of a config, and all options of its functions, in their order.

    The meaning of a field is the comment behind it, that of an option is its line in
    the docstring of the function.
    """
    return list(_below("", Place(config)))


def _below(name: str, place: Place) -> Iterator[Field]:
    """The fields below a node."""
    node = place.value
    maker, notes = node, dict[str, str]()
    if dataclasses.is_dataclass(node):
        maker, notes = type(node), comments(type(node))
    elif callable(node):
        maker, notes = unbound(node), arguments(unbound(node))
    defaults = options(maker) if callable(maker) else {}
    for key, part in place.children().items():
        if part.value is UNSET:
            continue
        here = f"{name}.{key}" if name else key
        if not _is_group(part.value):
            default = defaults.get(key, UNSET)
            others = functions_for(here, part) if part.value else ()
            yield Field(here, part.value, default, notes.get(key, ""), others)
        if _is_group(part.value) or callable(part.value):
            yield from _below(here, part)


def _is_group(node: Any) -> bool:
    """Whether a node has no value of its own: a dataclass, or a list of functions."""
    if isinstance(node, list | tuple):
        return any(callable(part) or _is_group(part) for part in node)
    return dataclasses.is_dataclass(node)


@functools.cache
def comments(kind: type) -> dict[str, str]:
    """The comment behind each field of a class, with the lines that go on with it."""
    source = textwrap.dedent(inspect.getsource(kind))
    found, code = {}, set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            found[token.start[0]] = token.string.lstrip("# ")
        elif token.string.strip():
            code |= {*range(token.start[0], token.end[0] + 1)}
    result: dict[str, str] = {}
    for base in filter(dataclasses.is_dataclass, kind.__bases__):
        result |= comments(base)
    (body,) = ast.parse(source).body
    assert isinstance(body, ast.ClassDef)
    for node in body.body:
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            line = node.end_lineno or node.lineno
            words = [found.get(line, "")]
            while (line := line + 1) in found and line not in code:
                words.append(found[line])
            result[node.target.id] = " ".join(filter(None, words))
    return result


@functools.cache
def arguments(function: Any) -> dict[str, str]:
    """The meaning of each argument, from the section Args of a docstring."""
    text = inspect.getdoc(function) or ""
    _, begun, rest = text.partition("\nArgs:\n")
    if not begun:
        return {}
    section = re.split(r"\n(?=\S)", rest)[0]
    item = r"^( {2,4})\*{0,2}(\w+)(?: \([^)]*\))?: ?(.*(?:\n\1 +\S.*)*)"
    return {
        name: " ".join(meaning.split())
        for _, name, meaning in re.findall(item, section, re.M)
    }


def shown(value: Any) -> str:
    """A value as `--set` takes it; a function by its name."""
    if value is UNSET:
        return "not set"
    if callable(value):
        name = full_name(value)
        package, short = name.split(".")[0], name.split(".")[-1]
        if getattr(sys.modules.get(package), short, None) is unbound(value):
            return f"{package}.{short}"
        return name.removeprefix("curax.")
    if value is None or isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str) and not (value.isprintable() and value == value.strip()):
        return json.dumps(value, ensure_ascii=False)
    if isinstance(value, str | int | float):
        return str(value) or '""'
    return json.dumps(describe(value))


def source(field: Field, assigned: Iterable[str]) -> str:
    """Where the value came from: `--set`, default or recipe."""
    if any(
        field.name == name or name.startswith(f"{field.name}.") for name in assigned
    ):
        return "--set"
    return "default" if _same(field.value, field.default) else "recipe"


def _same(value: Any, default: Any) -> bool:
    if callable(value) and callable(default):
        return unbound(value) == unbound(default)
    return default is not UNSET and describe(value) == describe(default)


def resolved(config: Any, assigned: Iterable[str]) -> str:
    """Lines `name = value  # source` of all fields.

    Args:
        config: config of a run.
        assigned: dotted names set by `--set`.
    """
    assigned = list(assigned)
    lines = [
        (f"{f.name} = {shown(f.value)}", source(f, assigned)) for f in fields(config)
    ]
    width = min(max(len(line) for line, _ in lines), 64)
    return "\n".join(f"{line:<{width}}  # {came}" for line, came in lines)


def explained(config: Any) -> str:
    """All fields with their values, what they mean, and their defaults if others."""
    lines = []
    for field in fields(config):
        lines.append(f"  {field.name}={shown(field.value)}")
        text = field.comment
        if field.default is not UNSET and not _same(field.value, field.default):
            text = f"{text} (default: {shown(field.default)})".strip()
        if field.functions:
            text = f"{text}; {', '.join(field.functions)}, or one of yours"
        if text:
            wrap = textwrap.TextWrapper(
                WIDTH, initial_indent=INDENT, subsequent_indent=INDENT
            )
            lines += wrap.wrap(text)
    return "\n".join(lines)
