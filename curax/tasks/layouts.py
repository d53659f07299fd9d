"""Layouts of published data sets: functions of a record that return a `Problem`.

`detect` chooses among the published layouts by the keys of a record; `fields` reads any
other record by the names of its fields. All records of a file have one layout, that of
`majority_layout`.
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
_THOUSANDS = re.compile(r"(?<=[0-9]),(?=[0-9]{3}(?![0-9]))")
_CALCULATOR = re.compile(r"<<[^<>]*>>")
# The instructions before and after a question of DAPO-Math-17k.
_BEFORE = re.compile(
    r"\A\s*Solve the following math problem step by step\.[^\n]*?"
    r"is the answer to the problem\."
)
_BEHIND = re.compile(r"Remember to put your answer on its own line after [^\n]*\s*\Z")

# The prompt for problems with a boxed answer. Supervised training, reinforcement
# learning and evaluation share it, or each unlearns the prompts of the other.
STEP_BY_STEP = (
    "{question}\nReason step by step, and put the final answer within \\boxed{}."
)


class LayoutError(ValueError):
    """A record does not hold what its layout says. Its text is one sentence."""


@dataclasses.dataclass(frozen=True)
class Problem:
    """A question with its answer, solution and metadata; no text is empty."""

    question: str
    answer: str | None = None  # the right one, for the verifier
    solution: str | None = None  # the steps that lead to the answer
    level: str | None = None  # of difficulty, as "5"
    subject: str | None = None
    hints: tuple[str | None, ...] = ()  # by level, the weakest first; None: missing


Record = Mapping[str, Any]
Layout = Callable[[Record], Problem]


def gsm8k(record: Record) -> Problem:
    """The problem of a record of GSM8K, whose answer follows the last ####.

    The answer loses thousands commas and dollar signs; the solution keeps that line and
    loses calculator annotations, as <<48/2=24>>.

    References:
        Cobbe et al. 2021, "Training Verifiers to Solve Math Word Problems",
        arXiv:2110.14168.
    """
    text = _required(record, "answer")
    _, mark, answer = text.rpartition("####")
    answer = _THOUSANDS.sub("", answer).replace("$", "").strip()
    if not mark or not answer:
        raise _layout_error(f"answer={_short(text)} has no result behind ####")
    return Problem(
        question=_question(record, "question"),
        answer=answer,
        solution=_CALCULATOR.sub("", text),
    )


def math(record: Record) -> Problem:
    r"""The problem of a record of MATH or MATH-500.

    The answer is a field, or else stands in the last \boxed{} of the solution.

    A level is published as "Level 5" or as 5; both give "5".

    References:
        Hendrycks et al. 2021, "Measuring Mathematical Problem Solving With the MATH
        Dataset", arXiv:2103.03874.
    """
    answer, solution = _optional(record, "answer"), _optional(record, "solution")
    if answer is None:
        solution = _required(record, "solution")
        answer = last_boxed(solution)
    if answer is None:
        raise _layout_error(
            f"solution={_short(solution)} has no answer in a \\boxed{{}}"
        )
    level = _optional(record, "level")
    return Problem(
        question=_question(record, "problem"),
        answer=answer,
        solution=solution,
        level=level and level.removeprefix("Level ").strip(),
        subject=_optional(record, "subject", "type"),
    )


def aime(record: Record) -> Problem:
    """The problem of a record of AIME; an answer as 033 becomes 33."""
    answer = _required(record, "answer", "Answer")
    if re.fullmatch("[0-9]+", answer):
        answer = answer.lstrip("0") or "0"
    return Problem(
        question=_question(record, "problem", "Problem", "question"),
        answer=answer,
        solution=_optional(record, "solution", "Solution"),
    )


def contest(record: Record) -> Problem:
    """The problem of a record of AMC 2023 or Minerva: a question and its answer."""
    return Problem(
        question=_question(record, "question", "problem"),
        answer=_required(record, "answer"),
        solution=_optional(record, "solution"),
    )


def olympiad(record: Record) -> Problem:
    """The problem of a record of OlympiadBench: its answer is a list of one text.

    References:
        He et al. 2024, "OlympiadBench: A Challenging Benchmark for Promoting AGI with
        Olympiad-Level Bilingual Multimodal Scientific Problems", arXiv:2402.14008.
    """
    names = ("final_answer", "answer")
    name = next((name for name in names if name in record), names[0])
    return Problem(
        question=_question(record, "question", "problem"),
        answer=_text(_only(_at(record, name), name), name),
        subject=_optional(record, "subfield"),
    )


def dapo_math(record: Record) -> Problem:
    """The problem of a record of DAPO-Math-17k: a chat and a ground truth.

    The question is the last message without the published instructions around it, as a
    task adds its own. A ground truth that is a list of one text is that text.

    References:
        Yu et al. 2025, "DAPO: An Open-Source LLM Reinforcement Learning System at
        Scale", arXiv:2503.14476.
    """
    chat, name = _at(record, "prompt"), "prompt"
    if isinstance(chat, list | tuple):
        name = f"prompt.{max(len(chat) - 1, 0)}.content"
    wrapped = _question(record, name)
    question = _BEHIND.sub("", _BEFORE.sub("", wrapped)).strip()
    if not question:
        raise _layout_error(
            f"{name}={_short(wrapped)} has no question in its instructions"
        )
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
    """The problem of any record, by the names of its fields.

    Args:
        record: of a file.
        question: dotted path, as `question`, `reward_model.ground_truth` or
            `prompt.0.content`.
        answer: likewise; None: there is none.
        solution: likewise; here and below the value may be null or empty, and None says
            that there is none.
        level: likewise.
        subject: likewise.
        hints: likewise, of a list of texts by level, the weakest first; null or empty
            ones are missing.

    Returns:
        The texts of these fields; numbers become text, but for the question.

    Raises:
        LayoutError: a field is missing or holds something else.
    """

    def maybe(name: str | None) -> str | None:
        value = None if name is None else _at(record, name)
        return None if name is None or _is_blank(value) else _text(value, name)

    return Problem(
        question=_question(record, question),
        answer=None if answer is None else _required(record, answer),
        solution=maybe(solution),
        level=maybe(level),
        subject=maybe(subject),
        hints=() if hints is None else _texts(_at(record, hints), hints),
    )


def detect(record: Record) -> Problem:
    """The problem of a record in a published layout, chosen by its keys; the first of

    - `dapo_math`: prompt and reward_model;
    - `gsm8k`: question and answer, with #### in it;
    - `fields`: question and answer, with solution, level, subject and hints, a list of
      texts, if so named;
    - `math`: problem and solution, with level, type or subject;
    - `aime`: problem and answer, both small or both capital;
    - `math`: problem and solution.

    Raises:
        LayoutError: the record has none of these, or not what its layout says.
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
            raise _layout_error(
                f"{' and '.join(others)} {verb} missing, the record has "
                f"{_contents(record)}"
            )
    raise LayoutError(
        f"a record with {_contents(record)} is not laid out as gsm8k, math, aime or "
        "dapo_math; name its fields with layouts.fields."
    )


def _published(record: Record) -> Layout | None:
    """The layout that `detect` chooses for a record; None: there is none."""
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


def majority_layout(records: Iterable[Record]) -> Layout:
    """The layout that `detect` chooses for most of some records of a file.

    Of equally frequent ones it is the first; `detect` where no record has one. Records
    of another layout are broken.
    """
    layouts = (_published(record) for record in records)
    found = Counter(layout for layout in layouts if layout is not None)
    return FileLayout(found.most_common(1)[0][0]) if found else detect


@dataclasses.dataclass(frozen=True)
class FileLayout:
    """One layout for all records of a file; records of another layout are errors."""

    layout: Layout

    def __call__(self, record: Record) -> Problem:
        """The problem of a record."""
        if self.layout is _plain and "####" in str(record.get("answer")):
            raise _layout_error(
                f"answer={_short(record['answer'])} has a result behind ####, and most "
                "of its file has not"
            )
        try:
            return self.layout(record)
        except LayoutError:
            other = _published(record)
            # Two layouts share the keys question and answer: the first error says more.
            if other in (None, self.layout) or {other, self.layout} == {gsm8k, _plain}:
                raise
            raise _layout_error(
                f"it is laid out as {_name(other)}, and most of its file as "
                f"{_name(self.layout)}"
            ) from None


def _name(layout: Any) -> str:
    return "fields" if layout is _plain else layout.__name__


def _plain(record: Record) -> Problem:
    """The problem of a record whose fields have the names that `fields` gives them."""
    more = ("solution", "level", "subject")
    more = [x for x in more if record.get(x) or type(record.get(x)) is int]
    with contextlib.suppress(LayoutError):  # the field may hold anything
        more += ["hints"] if _texts(record.get("hints"), "hints") else []
    return fields(record, **{name: name for name in more})


def last_boxed(text: str) -> str | None:
    r"""The content of the last \boxed{...} or \fbox{...} with balanced braces.

    Escaped braces, \{ and \}, do not count. The content of a box without braces, as
    `$\boxed 2$`, ends at a space or dollar sign. None without a box, or where the last
    one is empty.
    """
    return next(boxed_contents(text), None) or None


def boxed_contents(text: str) -> Iterator[str]:
    """The contents of the closed boxes of a text, the last first; see `last_boxed`."""
    for box in reversed(list(_BOXES.finditer(text))):
        rest = text[box.end() :]
        word = re.split(r"[\s$]", rest, maxsplit=1)[0].rstrip(".,")
        inside = _braced(rest) if rest.startswith("{") else word
        if inside is not None:
            yield inside.strip()


def _braced(text: str) -> str | None:
    """The text between the brace it begins with and the closing one, if there is."""
    depth = 0
    for part in re.finditer(r"\\.|[{}]", text):
        depth += {"{": 1, "}": -1}.get(part[0], 0)
        if depth == 0:
            return text[1 : part.start()]
    return None


def _only(value: Any, name: str) -> Any:
    """The only entry of a list, or of a list written as text; else the value."""
    entries = value
    if isinstance(value, str) and value.lstrip().startswith(("['", '["')):
        for read in (json.loads, ast.literal_eval):
            try:
                entries = read(value)
                break
            except (ValueError, SyntaxError):  # it only begins like a list
                continue
    if not isinstance(entries, list | tuple):
        return value
    if len(entries) != 1:
        raise _layout_error(
            f"{name}={_short(value)} has {len(entries)} answers, not one"
        )
    return entries[0]


def _required(record: Record, *names: str) -> str:
    """The text at the first of the names that the record has."""
    name = next((name for name in names if name in record), names[0])
    return _text(_at(record, name), name)


def _question(record: Record, *names: str) -> str:
    """As `_required`; a number is no question."""
    name = next((name for name in names if name in record), names[0])
    value = _at(record, name)
    if type(value) in (int, float):
        raise _layout_error(f"{name} is {_short(value)}, which is no text")
    return _text(value, name)


def _optional(record: Record, *names: str) -> str | None:
    """The first text that is not blank at any of the names; None: there is none."""
    filled = (name for name in names if not _is_blank(record.get(name)))
    name = next(filled, None)
    return None if name is None else _text(record[name], name)


def _at(record: Record, name: str) -> Any:
    """The value at a dotted path."""
    value: Any = record
    parts = name.split(".")
    for i, part in enumerate(parts):
        if isinstance(value, Mapping) and part in value:
            value = value[part]
        elif isinstance(value, list | tuple) and part in map(str, range(len(value))):
            value = value[int(part)]
        else:
            above = ".".join(parts[:i]) or "the record"
            raise _layout_error(f"{name} is missing, {above} has {_contents(value)}")
    return value


def _text(value: Any, name: str) -> str:
    """A text that is not empty; numbers become text."""
    if type(value) is float and value.is_integer():
        value = int(value)
    if type(value) is int or (type(value) is float and isfinite(value)):
        value = str(value)
    if not isinstance(value, str) or not value.strip():
        kind = "empty" if _is_blank(value) else f"{_short(value)}, which is no text"
        raise _layout_error(f"{name} is {kind}")
    try:
        value.encode()
    except UnicodeEncodeError:  # JSON can write one half of a pair of surrogates
        raise _layout_error(f"{name}={_short(value)} has half a character") from None
    return value.strip()


def _texts(value: Any, name: str) -> tuple[str | None, ...]:
    """The texts of a list, None for blank ones; no text for a blank value."""
    if _is_blank(value):
        return ()
    if not isinstance(value, list | tuple):
        raise _layout_error(f"{name} is {_short(value)}, which is no list of texts")
    return tuple(
        None if _is_blank(one) else _text(one, f"{name}.{i}")
        for i, one in enumerate(value)
    )


def _is_blank(value: Any) -> bool:
    return value is None or (isinstance(value, str) and not value.strip())


def _contents(value: Any) -> str:
    """The keys or the length of a value, in words, for a message."""
    if isinstance(value, Mapping):
        return f"the keys {', '.join(map(str, value))}" if value else "no keys"
    if isinstance(value, list | tuple):
        return f"{len(value)} entries"
    return _short(value)


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:40]}...{text[-17:]}"


def _layout_error(found: str) -> LayoutError:
    return LayoutError(
        f"{found}; mend the record, name its fields with layouts.fields, or --set "
        "task.on_error=skip."
    )
