r"""Hints of a task on files: requested, parsed, checked for the answer, as token ids.

    <hint1>Look at the last digit.</hint1> ...  ->  texts by level  ->  [B, L, S] ids

The policy writes hints between tags, as plain text: JSON would read the backslashes of
formulas as escapes, and lose the first letter of `\frac` and `\neq`.

References:
    Liao et al. 2026, "Self-Hinting Language Models Enhance Reinforcement Learning",
    arXiv:2602.03143: hints by level, and the roles of tutor and student in a prompt.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from curax.settings.config_types import present
from curax.tasks import layouts, sources
from curax.tasks.layouts import Problem
from curax.tasks.prompt_format import PromptFormat
from curax.types import Contexts, Hinting, Prompts
from curax.verify import answers

WORDS = "\n\nHint:\n{hint}"
SHORT = 2  # characters; answers as short stand in many texts by accident
STRENGTHS = (
    "names the idea to think of, and nothing else",
    "says which method to use, and what to watch for on the way",
    "leads through most of the steps, and stops before the last ones",
)

# Phrases that state an answer, and what may stand between them and the answer.
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
    r"""Whether a hint contains the right answer.

    It does if a grader finds the answer in it, in a box or where an answer is stated,
    or if the answer stands anywhere in it as a whole word or number. Answers of one or
    two characters stand in many texts by accident, and count only in a box or where
    they are stated to be the answer. Letter case, white space, dollar signs, commas
    between thousands, and what `answers.normalized` undoes make no difference.

    Args:
        hint: the text.
        gold: the right answer.

    Returns:
        Whether it leaks: for 70, "the answer is 70" and `\boxed{70}` do, "70 students"
        does not. False for an empty answer.
    """
    given, right = _comparable(hint), _comparable(gold)
    if not right:
        return False
    boxes = list(layouts.boxed_contents(hint))
    claims = filter(None, [*boxes, answers.final_answer(hint)])
    if any(answers.same(gold, claim) for claim in claims):
        return True
    whole = _whole_word(right)
    if len(right) > SHORT:
        return re.search(whole, given, re.IGNORECASE) is not None
    claimed = rf"{_CLAIM}(?:{_MARK}|{_LINK}){{0,24}}{whole}"
    after = rf"{whole}(?: [a-z]+){{0,2}}(?:{_MARK})*{_VERB}"
    after += rf"(?:{_MARK}|{_RIGHT}){{0,16}}{_CLAIM}"
    texts = [
        (claimed, given),
        (after, given),
        *((whole, _comparable(b)) for b in boxes),
    ]
    return any(re.search(pattern, text, re.IGNORECASE) for pattern, text in texts)


def _comparable(text: str) -> str:
    return answers.normalized(_COMMAS.sub("", text))


def _whole_word(word: str) -> str:
    """A pattern that matches a word or number, but not as part of a longer one."""
    before = r"(?<![^\W_])(?<![0-9]\.)" if word[0].isalnum() else ""
    behind = r"(?![^\W_])(?!\.[0-9])" if word[-1].isalnum() else ""
    if word in ("A", "a"):  # a small one before a word is an article
        return rf"{before}(?:(?-i:A)|a(?! [a-z])){behind}"
    return f"{before}{re.escape(word)}{behind}"


def parse_hints(text: str, levels: int) -> list[str | None]:
    """The hints in a completion, by level; None where there is none.

    The hint of level 1 is the last text between `<hint1>` and `</hint1>` that holds a
    letter or digit and no other hint tag, without white space around it; of level 2
    that between `<hint2>` and `</hint2>`, and so on.
    """
    found: list[str | None] = []
    for level in range(1, levels + 1):
        inside = rf"<hint{level}>((?:(?!</?hint[0-9]+>).)*)</hint{level}>"
        texts = (match[1].strip() for match in re.finditer(inside, text, re.DOTALL))
        hints = [hint for hint in texts if any(map(str.isalnum, hint))]
        found.append(hints[-1] if hints else None)
    return found


def hint_request(question: str, solution: str, levels: int) -> tuple[str, str]:
    """System and user text of the prompt that requests hints of all levels."""
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


def excess_hints(problem: Problem, levels: int) -> str | None:
    """Sentence about a problem with more than `levels` hints; None for others."""
    if len(problem.hints) <= levels:
        return None
    return (
        f"the question {problem.question[:40]!r} has hints of {len(problem.hints)} "
        f"levels, more than task.hint_levels={levels}; set that higher."
    )


class HintWriter:
    """The functions of `types.Hinting` for the problems of a task, of numpy arrays.

    The target of a prompt is the number of its problem; problems behind those to train
    on are held out and have no hints.
    """

    def __init__(
        self,
        prompt_format: PromptFormat,
        problems: Sequence[Problem],
        *,
        longest: int,
        words: str = WORDS,
        levels: int = 3,
        file: str | None = None,
        on_error: str = "raise",
    ):
        """Measure the longest request, solution and hint of all training problems.

        Args:
            prompt_format: of prompts.
            problems: to train on.
            longest: tokens of a request for hints, at most; longer ones are not made.
            words: introduction of a hint, with the hint in place of `{hint}`.
            levels: L, levels of hints.
            file: of records with `question` and `hints`, a list of texts by level;
                None: the hints are those in the problems' own records.
            on_error: "raise" at a broken record of that file, or "skip" it.

        Raises:
            ValueError: in a sentence, for an option, the chat template or a record; or
                no problem has a solution or a hint.
        """
        if "{hint}" not in words:
            raise ValueError(
                f"task.hint_words={words!r} does not say where the hint stands; put "
                "{hint} into it."
            )
        self._format, self._training, count = prompt_format, problems, len(problems)
        self._levels, self._longest = levels, longest
        self._before, _, self._behind = words.partition("{hint}")
        self._filed: dict[bytes, tuple[str | None, ...]] = {}  # by digest of a question
        self._file: sources.ProblemSet | None = None
        requests, solutions, hints, broken = [], [], [0], 0
        if file is not None:
            index = sources.scan(
                sources.open_records(file),
                self._of_record,
                self._longest_hint,
                longest=2**31,
                on_error=on_error,
            )
            self._file, found = index, (one.hints for one in index.problems)
            self._filed = dict(zip(index.digests, found, strict=True))
            hints, broken = [index.longest], index.counts["broken"]
        self._hinted = 0
        for one in problems:
            requests.append(len(self._request(one)))
            solutions.append(len(self._ids(one.solution)))
            hints.append(self._longest_hint(one))
            self._hinted += any(self._hints(one))
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
        self._request_width, self._solution_width = max(requests), max(solutions)
        self._hint_width = max(hints)
        asked, solved = (sum(map(bool, lengths)) for lengths in (requests, solutions))
        self.summary = (
            f"{solved} solutions to hint with, {asked} of them short enough to ask for "
            f"hints, {self._hinted} with hints of a file"
        )
        if broken:
            self.summary += f" ({broken} broken)"
        prompt_format.tail(problems[0])  # raises where the template hides the turn

    @property
    def contents(self) -> bytes:
        """Hints of each problem where there is a file of them; empty without one."""
        hints = [self._hints(one) for one in self._training]
        return repr(hints).encode("utf-8", "replace") if self._file else b""

    def warn_of_changes(self) -> None:
        """As `ProblemSet.warn_of_changes`, of the file of hints, if there is one."""
        if self._file:
            self._file.warn_of_changes()

    @property
    def hinting(self) -> Hinting:
        """The functions; None for those that have nothing to give."""
        can_ask = self._request_width > 0
        return Hinting(
            solution=self.solution if self._solution_width else None,
            wrap=self.wrap,
            leaks=self.leaks,
            writing_contexts=self.ask if can_ask else None,
            parse=self.read if can_ask else None,
            from_file=self.filed if self._hinted else None,
        )

    def solution(self, prompts: Prompts) -> tuple[Any, Any]:
        """Reference solutions, `[B, S]` tokens and mask; an answer alone is none."""
        rows = [self._ids(one and one.solution) for one in self._problems(prompts)]
        return self._format.padded(rows, self._solution_width)

    def wrap(self, tokens: Any, mask: Any) -> tuple[Any, Any]:
        """Hints `[..., S]` between the words of their introduction, `[..., S']`."""
        rows = [*map(self._wrapped, _row_ids(tokens, mask))]
        *shape, width = np.shape(mask)
        padded = self._format.padded(rows, width + len(self._wrapped([0])) - 1)
        return _reshaped(padded, shape)

    def shown(self, read: Mapping[str, str], _: Any, prompts: Prompts) -> Contexts:
        """Contexts of traces: each prompt with the hint of its question in `read`.

        A hint stands where `types.Hinting` puts one, before the prompt's tail.
        """
        rows = []
        for one in map(present, self._problems(prompts)):
            ids, hint = self._format.prompt(one), self._ids(read[one.question])
            place = len(ids) - self._format.tail(one)
            rows.append([*ids[:place], *self._wrapped(hint), *ids[place:]])
        longest = self._wrapped([0] * self._hint_width)
        width = np.shape(prompts.tokens)[-1] + len(longest)
        tokens, mask = self._format.padded(rows, width, left=True)
        return Contexts(tokens=tokens, mask=mask)

    def leaks(self, prompts: Prompts, tokens: Any, mask: Any) -> Any:
        """`[B, L]` bool, which hints `[B, L, S]` contain the answer; see `leaks`."""
        shape, rows = np.shape(mask)[:-1], _row_ids(tokens, mask)
        problems, decode = self._problems(prompts), self._format.tokenizer.decode
        golds = [one and one.answer for one in problems for _ in range(shape[1])]
        found = [
            bool(row and gold) and leaks(decode(row), str(gold))
            for gold, row in zip(golds, rows, strict=True)
        ]
        return np.array(found, bool).reshape(shape)

    def ask(self, prompts: Prompts) -> Contexts:
        """Contexts that request hints; empty rows where there is no request."""
        rows = [self._request(one) for one in self._problems(prompts)]
        tokens, mask = self._format.padded(rows, self._request_width, left=True)
        return Contexts(tokens=tokens, mask=mask)

    def read(self, prompts: Prompts, tokens: Any, mask: Any) -> tuple[Any, Any]:
        """The hints `[B, L, T]` in completions `[B, T]`; none of over T ids."""
        decode, width = self._format.tokenizer.decode, np.shape(mask)[-1]
        rows: list[list[int]] = []
        for row in _row_ids(tokens, mask):
            for hint in parse_hints(decode(row), self._levels):
                try:
                    ids = self._ids(hint)
                except ValueError:  # a character that the tokenizer cannot encode
                    ids = []
                rows.append(ids if len(ids) <= width else [])
        shape = (len(np.asarray(prompts.target)), self._levels)
        return _reshaped(self._format.padded(rows, width), shape)

    def filed(self, prompts: Prompts) -> tuple[Any, Any]:
        """Hints `[B, L, S]` of the file, or in the problems' own records."""
        rows: list[list[int]] = []
        for one in self._problems(prompts):
            hints = map(self._ids, () if one is None else self._hints(one))
            rows += [*hints, *[[]] * self._levels][: self._levels]
        shape = (len(np.asarray(prompts.target)), self._levels)
        return _reshaped(self._format.padded(rows, self._hint_width), shape)

    def _problems(self, prompts: Prompts) -> list[Problem | None]:
        """The problem of each prompt, None for held-out ones."""
        targets, some = map(int, np.asarray(prompts.target)), self._training
        return [some[i] if i < len(some) else None for i in targets]

    def _wrapped(self, hint: list[int]) -> list[int]:
        """The ids of a hint between the words of its introduction; none of none."""
        if not hint:
            return []
        return [*self._ids(self._before), *hint, *self._ids(self._behind)]

    def _ids(self, text: str | None) -> list[int]:
        return self._format.tokenizer.encode(text or "", begins=False)

    def _request(self, problem: Problem | None) -> list[int]:
        """The ids that request hints; empty without a solution, or if too long."""
        if problem is None or problem.solution is None:
            return []
        system, user = hint_request(problem.question, problem.solution, self._levels)
        if not self._format.may_fit(user, self._longest):
            return []
        user = user if self._format.uses_chat else f"{user}\n\nHints:\n"
        ids = self._format.encode_turn(user, system=system)
        return ids if len(ids) <= self._longest else []

    def _of_record(self, record: layouts.Record) -> Problem:
        """The question and the hints of a record of a file of hints."""
        problem = layouts.fields(record, answer=None, hints="hints")
        if error := excess_hints(problem, self._levels):
            raise layouts.LayoutError(error)
        return problem

    def _hints(self, problem: Problem) -> tuple[str | None, ...]:
        """The hints of a problem by level; of its own record if in no file."""
        return self._filed.get(sources.digest(problem.question), problem.hints)

    def _longest_hint(self, problem: Problem) -> int:
        if error := excess_hints(problem, self._levels):
            raise ValueError(error)
        return max(map(len, map(self._ids, problem.hints)), default=0)


def _row_ids(tokens: Any, mask: Any) -> list[list[int]]:
    """The ids of each row of `[..., S]` where the mask is True, rows in order."""
    tokens, mask = np.asarray(tokens), np.asarray(mask)
    where = np.ndindex(mask.shape[:-1])
    return [tokens[place][mask[place]].tolist() for place in where]


def _reshaped(padded: tuple[Any, Any], shape: Sequence[int]) -> tuple[Any, Any]:
    """Tokens and mask `[n, S]` as `[*shape, S]`."""
    tokens, mask = (x.reshape(*shape, x.shape[-1]) for x in padded)
    return tokens, mask
