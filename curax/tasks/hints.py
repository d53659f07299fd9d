r"""Hints for problems: asked for, read, kept from giving the answer away, as tokens.

    <hint1>Look at the last digit.</hint1> ...  ->  texts by level  ->  [B, L, S] ids

Hints travel between tags, as plain text: a format with escapes of its own would eat the
backslashes of formulas, and take the first letter of `\frac` and `\neq` with them.

References:
    Liao et al. 2026, "Self-Hinting Language Models Enhance Reinforcement Learning",
    arXiv:2602.03143: hints by level, and the roles of tutor and student in a prompt.
"""

import re
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from curax.tasks import layouts, sources
from curax.tasks.forms import Form, padded
from curax.tasks.layouts import Problem
from curax.types import Contexts, Hinting, Prompts
from curax.verify import answers

WORDS = "\n\nHint:\n{hint}"
SHORT = 2  # characters of an answer that is found in many texts by accident
STRENGTHS = (
    "names the idea to think of, and nothing else",
    "says which method to use, and what to watch for on the way",
    "leads through most of the steps, and stops before the last ones",
)

# What gives an answer away, and what may stand between that and the answer.
_CLAIM = (
    r"(?:\banswers?\b|\bsolutions?\b|####|\\(?:boxed|fbox)"
    r"|\bfinal (?:result|value|number|count|amount|total)\b)"
)
_MARK = r"[^\w.;!?]|_"
_LINK = (
    r"\b(?:is|are|was|be|being|becomes?|will|would|should|must|has|have|can|only|equals?"
    r"|comes?|works?|turns|out|to|of|as|gets?|thus|therefore|then|hence|so|exactly|just"
    r"|simply|precisely|indeed|clearly|namely|which|that|this|it|you|we|the|number"
    r"|value)\b"
)
_VERB = r"\b(?:is|are|was|as|be|being|gives?|makes?|becomes?)\b"
_RIGHT = (
    r"\b(?:the|an?|your|our|its|this|that|final|right|correct|desired|required|wanted"
    r"|exactly|indeed|thus|therefore|then|hence)\b"
)
_COMMAS = re.compile(
    r"(?<=[0-9])(?:,(?:\\!)?|\{,\}|\\[,;: ])(?=[0-9]{3}(?![0-9]))"  # 1,200 is 1200
)


def leaks(hint: str, gold: str) -> bool:
    r"""Whether a hint gives the answer away.

    It does if a grader finds the right answer in it, in a box or where an answer is
    stated. It also does if it says that answer anywhere, as a whole word or number; but
    answers of one or two characters stand in many texts by accident, and count only in
    a box or where it is said that they are the answer. How it is spelled does not
    count: letter case, white space, dollar signs, commas between thousands, and what
    `answers.normalized` undoes.

    Args:
        hint: the text.
        gold: the right answer.

    Returns:
        Whether it leaks: for 70, "the answer is 70" and `\boxed{70}` do, "70 students"
        does not. An empty answer is given away by nothing.
    """
    said, right = _spelled(hint), _spelled(gold)
    if not right:
        return False
    boxes = list(layouts.boxes(hint))
    claims = filter(None, [*boxes, answers.final_answer(hint)])
    if any(answers.same(gold, claim) for claim in claims):
        return True
    whole = _whole(right)
    if len(right) > SHORT:
        return re.search(whole, said, re.IGNORECASE) is not None
    claimed = rf"{_CLAIM}(?:{_MARK}|{_LINK}){{0,24}}{whole}"
    after = rf"{whole}(?: [a-z]+){{0,2}}(?:{_MARK})*{_VERB}"
    after += rf"(?:{_MARK}|{_RIGHT}){{0,16}}{_CLAIM}"
    texts = [(claimed, said), (after, said), *((whole, _spelled(b)) for b in boxes)]
    return any(re.search(form, text, re.IGNORECASE) for form, text in texts)


def _spelled(text: str) -> str:
    return answers.normalized(_COMMAS.sub("", text))


def _whole(word: str) -> str:
    """A pattern of a word or number that is no part of a longer one."""
    before = r"(?<![^\W_])(?<![0-9]\.)" if word[0].isalnum() else ""
    behind = r"(?![^\W_])(?!\.[0-9])" if word[-1].isalnum() else ""
    if word in ("A", "a"):  # a small one before a word is an article
        return rf"{before}(?:(?-i:A)|a(?! [a-z])){behind}"
    return f"{before}{re.escape(word)}{behind}"


def parsed(text: str, levels: int) -> list[str | None]:
    """The hints in what was written, by level.

    Of each level the last that stands between `<hint1>` and `</hint1>`, and so on, with
    no other tag inside, and with a letter or digit in it; byte for byte, but for white
    space around it. None where there is none.
    """
    found: list[str | None] = []
    for level in range(1, levels + 1):
        inside = rf"<hint{level}>((?:(?!</?hint[0-9]+>).)*)</hint{level}>"
        said = (match[1].strip() for match in re.finditer(inside, text, re.DOTALL))
        some = [one for one in said if any(map(str.isalnum, one))]
        found.append(some[-1] if some else None)
    return found


def plea(question: str, solution: str, levels: int) -> tuple[str, str]:
    """What asks for hints of all levels: of the system, and of the user."""
    strengths = [STRENGTHS[0]] + [STRENGTHS[1]] * (levels - 2) + [STRENGTHS[2]]
    lines = [f"- Hint {i} {what}." for i, what in enumerate(strengths[:levels], 1)]
    tags = [f"<hint{i}>...</hint{i}>" for i in range(1, levels + 1)]
    system = "\n".join(
        [
            "You are a tutor. You know a problem and a solution of it, and a student "
            f"who is stuck asks you for help. Write hints of {levels} levels, from the "
            "weakest to the strongest:",
            *lines,
            "Each hint says what the one before it says, and goes further; the student "
            "sees only one of them. Give ideas rather than recipes, in words that the "
            "student knows. Keep the final answer secret: no hint states it, or "
            "anything that is as good as it.",
            "Write nothing but the hints, as plain text between these tags, each tag "
            "once:",
            *tags,
        ]
    )
    return system, f"Problem:\n{question}\n\nSolution:\n{solution}"


class Filed:
    """Hints of a file of their own, found by the question. No text is held."""

    def __init__(
        self,
        path: str,
        longest: Callable[[Problem], int],
        *,
        levels: int,
        on_error: str,
    ):
        """Scan it.

        Args:
            path: of records with `question` and `hints`, a list of texts by level.
            longest: tokens of the longest of a problem's hints.
            levels: of hints at most.
            on_error: "raise" a broken record, or "skip" it.

        Raises:
            ValueError: nothing in it can be used, or a record is broken.
        """
        self._records = sources.open_records(path)
        self._levels = levels
        index = sources.scan(
            self._records, self._hints, longest, longest=2**31, on_error=on_error
        )
        self._rows = dict(zip(index.digests, index.rows.tolist(), strict=True))
        self.longest = index.longest

    def __call__(self, problem: Problem) -> tuple[str | None, ...]:
        """The hints by level; those of the problem's own record where it has none."""
        row = self._rows.get(sources.digest(problem.question))
        return problem.hints if row is None else self._hints(self._records[row]).hints

    def _hints(self, record: layouts.Record) -> Problem:
        problem = layouts.fields(record, answer=None, hints="hints")
        if wrong := too_many(problem, self._levels):
            raise layouts.LayoutError(wrong)
        return problem


def too_many(problem: Problem, levels: int) -> str | None:
    """What is said of more hints than there are levels; None where there are not."""
    if len(problem.hints) <= levels:
        return None
    return (
        f"the question {problem.question[:40]!r} has hints of {len(problem.hints)} "
        f"levels, more than task.hint_levels={levels}; set that higher."
    )


class Tutor:
    """Makes hints for the problems of a task, as tokens; see `types.Hinting`.

    Problems are known by their numbers, the targets of prompts. Those that are not
    below `count` are held out, and never hinted.
    """

    def __init__(
        self,
        form: Form,
        problem: Callable[[int], Problem],
        count: int,
        *,
        words: str,
        levels: int,
        longest: int,
        file: str | None,
        on_error: str,
    ):
        """Look through all problems, to know the longest of everything.

        Args:
            form: of prompts.
            problem: by its number.
            count: problems to train on.
            words: what introduces a hint, with the hint in place of `{hint}`.
            levels: of hints.
            longest: tokens of what asks for hints; hints are not asked by longer ones.
            file: of hints, see `Filed`; None: those in the problems' own records.
            on_error: what is done about a broken record of that file.

        Raises:
            ValueError: in a sentence, for an option, the chat template or a record;
                there is nothing to make hints of.
        """
        if "{hint}" not in words:
            raise ValueError(
                f"task.hint_words={words!r} does not say where the hint stands; put "
                "{hint} into it."
            )
        self._form, self._problem, self._count = form, problem, count
        self._levels, self._longest = levels, longest
        self._before, _, self._behind = words.partition("{hint}")
        self._file = None
        if file is not None:
            self._file = Filed(
                file, self._longest_hint, levels=levels, on_error=on_error
            )
        pleas, solutions, hints = [], [], [self._file.longest if self._file else 0]
        self._hinted = 0
        for of in map(problem, range(count)):
            pleas.append(len(self._plea(of)))
            solutions.append(len(self._ids(of.solution)))
            hints.append(self._longest_hint(of))
            self._hinted += any(self._hints(of))
        if file and not self._hinted:
            raise ValueError(
                f"{file} has hints for none of the {count} problems to train on; name "
                "another file."
            )
        if not any(solutions) and not self._hinted:
            raise ValueError(
                f"none of the {count} problems to train on has a solution or a hint; "
                "name them in task.layout or task.hints_file, or set task.hints to "
                "False."
            )
        self._width = {"plea": max(pleas), "solution": max(solutions)}
        self._width |= {"hint": max(hints)}
        asked, solved = (sum(map(bool, some)) for some in (pleas, solutions))
        self.told = (
            f"{solved} solutions to hint with, {asked} of them short enough to ask for "
            f"hints, {self._hinted} with hints of a file"
        )
        form.tail(problem(0))  # the chat template may have no place for them

    @property
    def hinting(self) -> Hinting:
        """The functions, of numpy arrays."""
        can_ask = self._width["plea"] > 0
        return Hinting(
            solution=self.solution if self._width["solution"] else None,
            wrap=self.wrap,
            leaks=self.leaks,
            ask=self.ask if can_ask else None,
            read=self.read if can_ask else None,
            filed=self.filed if self._hinted else None,
        )

    def solution(self, prompts: Prompts) -> tuple[Any, Any]:
        """The reference solutions; an answer is none."""
        rows = [self._ids(of and of.solution) for of in self._of(prompts)]
        return self._padded(rows, self._width["solution"])

    def wrap(self, tokens: Any, mask: Any) -> tuple[Any, Any]:
        """Hints with their introduction."""
        before, behind = map(self._ids, (self._before, self._behind))
        rows = [[*before, *row, *behind] if row else [] for row in _rows(tokens, mask)]
        *shape, width = np.shape(mask)
        made = self._padded(rows, width + len(before) + len(behind))
        return _shaped(made, shape)

    def leaks(self, prompts: Prompts, tokens: Any, mask: Any) -> Any:
        """Which hints give the answer away."""
        shape, rows = np.shape(mask)[:-1], _rows(tokens, mask)
        golds = [of and of.answer for of in self._of(prompts) for _ in range(shape[1])]
        found = [
            bool(row and gold) and leaks(self._form.tokenizer.decode(row), str(gold))
            for gold, row in zip(golds, rows, strict=True)
        ]
        return np.array(found, bool).reshape(shape)

    def ask(self, prompts: Prompts) -> Contexts:
        """What asks for hints; rows without any token do not."""
        rows = [self._plea(of) for of in self._of(prompts)]
        tokens, mask = self._padded(rows, self._width["plea"], left=True)
        return Contexts(tokens=tokens, mask=mask)

    def read(self, prompts: Prompts, tokens: Any, mask: Any) -> tuple[Any, Any]:
        """The hints in what was written, none longer in tokens than all of that."""
        decode, width = self._form.tokenizer.decode, np.shape(mask)[-1]
        rows: list[list[int]] = []
        for row in _rows(tokens, mask):
            for hint in parsed(decode(row), self._levels):
                try:
                    ids = self._ids(hint)
                except ValueError:  # a character that the tokenizer has no text for
                    ids = []
                rows.append(ids if len(ids) <= width else [])
        shape = (len(np.asarray(prompts.target)), self._levels)
        return _shaped(self._padded(rows, width), shape)

    def filed(self, prompts: Prompts) -> tuple[Any, Any]:
        """The hints of the file, or in the problems' own records."""
        rows: list[list[int]] = []
        for of in self._of(prompts):
            some = map(self._ids, () if of is None else self._hints(of))
            rows += [*some, *[[]] * self._levels][: self._levels]
        shape = (len(np.asarray(prompts.target)), self._levels)
        return _shaped(self._padded(rows, self._width["hint"]), shape)

    def _of(self, prompts: Prompts) -> list[Problem | None]:
        """The problems, None for those that are held out."""
        targets = map(int, np.asarray(prompts.target))
        return [self._problem(i) if i < self._count else None for i in targets]

    def _ids(self, text: str | None) -> list[int]:
        return self._form.tokenizer.encode(text or "", begins=False)

    def _padded(
        self, rows: list[list[int]], width: int, *, left: bool = False
    ) -> tuple[Any, Any]:
        return padded(rows, width, pad=self._form.tokenizer.pad, left=left)

    def _plea(self, of: Problem | None) -> list[int]:
        """What asks for hints; nothing where there is no solution, or it is long."""
        if of is None or of.solution is None:
            return []
        system, user = plea(of.question, of.solution, self._levels)
        user = user if self._form.in_turns else f"{user}\n\nHints:\n"
        asked = self._form.asked(user, system=system)
        return asked if len(asked) <= self._longest else []

    def _hints(self, of: Problem) -> tuple[str | None, ...]:
        return self._file(of) if self._file else of.hints

    def _longest_hint(self, of: Problem) -> int:
        if wrong := too_many(of, self._levels):
            raise ValueError(wrong)
        return max(map(len, map(self._ids, of.hints)), default=0)


def _rows(tokens: Any, mask: Any) -> list[list[int]]:
    """The ids of rows `[..., S]` that are there, one row after the other."""
    tokens, mask = np.asarray(tokens), np.asarray(mask)
    where = np.ndindex(mask.shape[:-1])
    return [tokens[place][mask[place]].tolist() for place in where]


def _shaped(made: tuple[Any, Any], shape: Sequence[int]) -> tuple[Any, Any]:
    """Rows, as many as a shape says."""
    tokens, mask = (x.reshape(*shape, x.shape[-1]) for x in made)
    return tokens, mask
