"""How published data sets lay a problem out: a record in, a `Problem` out.

A layout is a function of one record. `detect` knows the published ones by their keys;
`fields` reads a record of any other kind by the names of its fields. All records of a
file have one layout: `of_file` says which.
"""

import ast
import contextlib
import dataclasses
import json
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from math import isfinite
from typing import Any

_BOXES = re.compile(r"\\(?:boxed|fbox)(?![A-Za-z])\s*")
_CALCULATOR = re.compile(r"<<[^<>]*>>")
# The first and the last words of what stands around a question of DAPO-Math-17k.
_BEFORE = re.compile(
    r"\A\s*Solve the following math problem step by step\.[^\n]*?"
    r"is the answer to the problem\."
)
_BEHIND = re.compile(r"Remember to put your answer on its own line after [^\n]*\s*\Z")

# What a problem with a boxed answer is asked as. Supervised training, reinforcement
# learning and evaluation ask alike, or each unlearns the prompts of the other.
STEP_BY_STEP = (
    "{question}\nReason step by step, and put the final answer within \\boxed{}."
)


class LayoutError(ValueError):
    """A record does not hold what its layout says. Its text is one sentence."""


@dataclasses.dataclass(frozen=True)
class Problem:
    """What a task is made of, whatever its file calls it. No text of it is empty."""

    question: str
    answer: str | None = None  # what a verifier compares with
    solution: str | None = None  # worked out
    level: str | None = None  # of difficulty, as "5"
    subject: str | None = None
    hints: tuple[str | None, ...] = ()  # by level, the weakest first; None: missing


Record = Mapping[str, Any]
Layout = Callable[[Record], Problem]


def gsm8k(record: Record) -> Problem:
    """Of GSM8K: the answer stands behind the last #### of the worked solution.

    It loses its thousands commas and dollar signs; the solution keeps that line and
    loses the notes, as <<48/2=24>>, that were meant for a calculator.

    References:
        Cobbe et al. 2021, "Training Verifiers to Solve Math Word Problems",
        arXiv:2110.14168.
    """
    text = _needed(record, "answer")
    _, mark, answer = text.rpartition("####")
    answer = re.sub("[,$]", "", answer).strip()
    if not mark or not answer:
        raise _wrong(f"answer={_short(text)} has no result behind ####")
    return Problem(
        question=_asked(record, "question"),
        answer=answer,
        solution=_CALCULATOR.sub("", text),
    )


def math(record: Record) -> Problem:
    r"""Of MATH and its 500: the answer is a field, or in the solution's last \boxed{}.

    A level is published as "Level 5" or as 5; both give "5".

    References:
        Hendrycks et al. 2021, "Measuring Mathematical Problem Solving With the MATH
        Dataset", arXiv:2103.03874.
    """
    answer, solution = _optional(record, "answer"), _optional(record, "solution")
    if answer is None:
        solution = _needed(record, "solution")
        answer = last_boxed(solution)
    if answer is None:
        raise _wrong(f"solution={_short(solution)} has no answer in a \\boxed{{}}")
    level = _optional(record, "level")
    return Problem(
        question=_asked(record, "problem"),
        answer=answer,
        solution=solution,
        level=level and level.removeprefix("Level ").strip(),
        subject=_optional(record, "subject", "type"),
    )


def aime(record: Record) -> Problem:
    """Of AIME: an integer, by some published as text of three digits (033 is 33)."""
    answer = _needed(record, "answer", "Answer")
    if re.fullmatch("[0-9]+", answer):
        answer = answer.lstrip("0") or "0"
    return Problem(
        question=_asked(record, "problem", "Problem"),
        answer=answer,
        solution=_optional(record, "solution", "Solution"),
    )


def dapo_math(record: Record) -> Problem:
    """Of DAPO-Math-17k and others in its form: a chat, and the truth for its reward.

    The question is the last message. The published instructions around it are taken
    off, for a task brings its own. A truth that is a list of one is that one.

    References:
        Yu et al. 2025, "DAPO: An Open-Source LLM Reinforcement Learning System at
        Scale", arXiv:2503.14476.
    """
    chat, name = _at(record, "prompt"), "prompt"
    if isinstance(chat, list | tuple):
        name = f"prompt.{max(len(chat) - 1, 0)}.content"
    wrapped = _asked(record, name)
    question = _BEHIND.sub("", _BEFORE.sub("", wrapped)).strip()
    if not question:
        raise _wrong(f"{name}={_short(wrapped)} has no question in its instructions")
    name = "reward_model.ground_truth"
    return Problem(
        question=question, answer=_text(_only(_at(record, name), name), name)
    )


def fields(
    record: Record,
    *,
    question: str = "question",
    answer: str | None = "answer",
    solution: str | None = None,
    level: str | None = None,
    subject: str | None = None,
    hints: str | None = None,
) -> Problem:
    """Of any record, by the names of its fields.

    Args:
        record: of a file.
        question: dotted path, as `question`, `reward_model.ground_truth` or
            `prompt.0.content`.
        answer: likewise; None if there is none.
        solution: likewise; what stands there may be null or empty, here and below.
        level: likewise.
        subject: likewise.
        hints: likewise, of a list of texts by level, the weakest first; null or empty
            ones are missing.

    Returns:
        The texts at these places; numbers as text, but for the question.

    Raises:
        LayoutError: there is no such place, or something else stands there.
    """

    def maybe(name: str | None) -> str | None:
        value = None if name is None else _at(record, name)
        return None if name is None or _is_blank(value) else _text(value, name)

    return Problem(
        question=_asked(record, question),
        answer=None if answer is None else _needed(record, answer),
        solution=maybe(solution),
        level=maybe(level),
        subject=maybe(subject),
        hints=() if hints is None else _texts(_at(record, hints), hints),
    )


def detect(record: Record) -> Problem:
    """Of whichever published layout the record has, by its keys; the first of

    - `dapo_math`: prompt and reward_model;
    - `gsm8k`: question and answer, with #### in it;
    - `fields`: question and answer, with solution, level, subject and hints, a list of
      texts, if so named;
    - `math`: problem and solution, with level, type or subject;
    - `aime`: problem and answer, both small or both capital;
    - `math`: problem and solution.

    Raises:
        LayoutError: it has none, or not what that layout says.
    """
    layout = _published(record)
    if layout is not None:
        return layout(record)
    for question, others in (
        ("prompt", ["reward_model"]),
        ("question", ["answer"]),
        ("problem", ["answer", "solution"]),
    ):
        if question in record and not {*others} & {*record}:
            verb = "is" if len(others) == 1 else "are"
            raise _wrong(
                f"{' and '.join(others)} {verb} missing, the record has "
                f"{_inside(record)}"
            )
    raise LayoutError(
        f"a record with {_inside(record)} is not laid out as gsm8k, math, aime or "
        "dapo_math; name its fields with layouts.fields."
    )


def _published(record: Record) -> Layout | None:
    """The layout of `detect`, by the keys of a record."""
    worked = "####" in str(record.get("answer"))
    for needed, some, layout in (
        ({"prompt", "reward_model"}, set(), dapo_math),
        ({"question", "answer"}, set(), gsm8k if worked else _plain),
        ({"problem", "solution"}, {"level", "type", "subject"}, math),
        ({"problem", "answer"}, set(), aime),
        ({"Problem", "Answer"}, set(), aime),
        ({"problem", "solution"}, set(), math),
    ):
        if needed <= set(record) and (not some or some & set(record)):
            return layout
    return None


def of_file(records: Iterable[Record]) -> Layout:
    """The layout of a file by some of its records: what `detect` finds in most of them.

    It is the first of those that are found as often. All records are held to it, so
    that one of another layout is no problem of a strange kind, but broken. `detect`
    where it finds none.
    """
    layouts = (_published(record) for record in records)
    found = Counter(layout for layout in layouts if layout is not None)
    return Held(found.most_common(1)[0][0]) if found else detect


@dataclasses.dataclass(frozen=True)
class Held:
    """A layout for all records of a file; another layout's record is told as one."""

    layout: Layout

    def __call__(self, record: Record) -> Problem:
        """The problem of a record."""
        if self.layout is _plain and "####" in str(record.get("answer")):
            raise _wrong(
                f"answer={_short(record['answer'])} has a result behind ####, and most "
                "of its file has not"
            )
        try:
            return self.layout(record)
        except LayoutError:
            other = _published(record)
            # Question and answer are the keys of two layouts: there it says more.
            if other in (None, self.layout) or {other, self.layout} == {gsm8k, _plain}:
                raise
            raise _wrong(
                f"it is laid out as {_name(other)}, and most of its file as "
                f"{_name(self.layout)}"
            ) from None


def _name(layout: Any) -> str:
    return "fields" if layout is _plain else layout.__name__


def _plain(record: Record) -> Problem:
    """Fields that are called what they are."""
    more = [name for name in ("solution", "level", "subject") if record.get(name)]
    with contextlib.suppress(LayoutError):  # it may be anything that is called so
        more += ["hints"] if _texts(record.get("hints"), "hints") else []
    return fields(record, **{name: name for name in more})


def last_boxed(text: str) -> str | None:
    r"""What the last \boxed{...} or \fbox{...} with balanced braces holds.

    Braces that TeX prints, \{ and \}, do not count. A box without braces, as in
    `$\boxed 2$`, holds what follows it up to a space or dollar sign. None if there is
    no box, or nothing in the last.
    """
    return next(boxes(text), None) or None


def boxes(text: str) -> Iterator[str]:
    """What the boxes of a text hold, the last first; those that are not closed do not.

    See `last_boxed`.
    """
    for box in reversed(list(_BOXES.finditer(text))):
        rest = text[box.end() :]
        inside = _braced(rest) if rest.startswith("{") else _word(rest)
        if inside is not None:
            yield inside.strip()


def _word(text: str) -> str:
    return re.split(r"[\s$]", text, maxsplit=1)[0].rstrip(".,")


def _braced(text: str) -> str | None:
    """What stands between the brace `text` begins with and the one that closes it."""
    depth = 0
    for part in re.finditer(r"\\.|[{}]", text):
        depth += {"{": 1, "}": -1}.get(part[0], 0)
        if depth == 0:
            return text[1 : part.start()]
    return None


def _only(value: Any, name: str) -> Any:
    """The one entry of a list, or of a list written as text; else the value itself."""
    entries = value
    if isinstance(value, str) and value.lstrip().startswith(("['", '["')):
        for read in (json.loads, ast.literal_eval):
            try:
                entries = read(value)
                break
            except (ValueError, SyntaxError):  # so far it only looks like a list
                continue
    if not isinstance(entries, list | tuple):
        return value
    if len(entries) != 1:
        raise _wrong(f"{name}={_short(value)} has {len(entries)} answers, not one")
    return entries[0]


def _needed(record: Record, *names: str) -> str:
    """The text at the first of the names that the record has."""
    name = next((name for name in names if name in record), names[0])
    return _text(_at(record, name), name)


def _asked(record: Record, *names: str) -> str:
    """Likewise, of a question: a number is none."""
    name = next((name for name in names if name in record), names[0])
    value = _at(record, name)
    if type(value) in (int, float):
        raise _wrong(f"{name} is {_short(value)}, which is no text")
    return _text(value, name)


def _optional(record: Record, *names: str) -> str | None:
    """Likewise, None if there is nothing at any of them."""
    filled = (name for name in names if not _is_blank(record.get(name)))
    name = next(filled, None)
    return None if name is None else _text(record[name], name)


def _at(record: Record, name: str) -> Any:
    """What stands at a dotted path."""
    value: Any = record
    parts = name.split(".")
    for i, part in enumerate(parts):
        if isinstance(value, Mapping) and part in value:
            value = value[part]
        elif isinstance(value, list | tuple) and part in map(str, range(len(value))):
            value = value[int(part)]
        else:
            above = ".".join(parts[:i]) or "the record"
            raise _wrong(f"{name} is missing, {above} has {_inside(value)}")
    return value


def _text(value: Any, name: str) -> str:
    """A text that is not empty; a number is written as one."""
    if type(value) is float and value.is_integer():
        value = int(value)
    if type(value) is int or (type(value) is float and isfinite(value)):
        value = str(value)
    if not isinstance(value, str) or not value.strip():
        kind = "empty" if _is_blank(value) else f"{_short(value)}, which is no text"
        raise _wrong(f"{name} is {kind}")
    try:
        value.encode()
    except UnicodeEncodeError:  # JSON can write one half of a pair of surrogates
        raise _wrong(f"{name}={_short(value)} has half a character") from None
    return value.strip()


def _texts(value: Any, name: str) -> tuple[str | None, ...]:
    """The texts of a list, None for what is blank; none of them if that is blank."""
    if _is_blank(value):
        return ()
    if not isinstance(value, list | tuple):
        raise _wrong(f"{name} is {_short(value)}, which is no list of texts")
    return tuple(
        None if _is_blank(one) else _text(one, f"{name}.{i}")
        for i, one in enumerate(value)
    )


def _is_blank(value: Any) -> bool:
    return value is None or (isinstance(value, str) and not value.strip())


def _inside(value: Any) -> str:
    """What there is where something was looked for, in words."""
    if isinstance(value, Mapping):
        return f"the keys {', '.join(map(str, value))}" if value else "no keys"
    if isinstance(value, list | tuple):
        return f"{len(value)} entries"
    return _short(value)


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:40]}...{text[-17:]}"


def _wrong(found: str) -> LayoutError:
    return LayoutError(
        f"{found}; mend the record, name its fields with layouts.fields, or --set "
        "task.on_error=skip."
    )
