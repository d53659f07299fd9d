"""Question sets of an evaluation: problems of a file, or a task's held-out prompts."""

import abc
import hashlib
import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from curax.tasks import file_task, sources
from curax.tasks.prompt_format import PromptFormat, padded_rows
from curax.types import Prompts, Task
from curax.verify.workers import Verdict

CHUNK = 256  # held-out prompts of a task made by one call


class Questions(abc.ABC):
    """A set of P numbered prompts and the grader of their completions.

    Attributes:
        name: source of the questions.
        digests: `[P]` bytes that identify each question independent of its number.
        contents: checksums of questions and answers, as bytes; empty: there are none.
        left_out: number of questions that are left out, by reason.
        end: tokens that end a completion.
        pad: padding token after the end.
        states: whether a completion states an answer that the grader reads; None:
            nobody knows.
    """

    name: str
    digests: Sequence[bytes]
    contents: bytes = b""
    left_out: Mapping[str, int]
    end: tuple[int, ...]
    pad: int
    states: Callable[[str], bool] | None = None

    def __len__(self) -> int:
        return len(self.digests)

    @abc.abstractmethod
    def prompts(self, numbers: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
        """`[C, W]` tokens, left-padded to a fixed width, and their mask."""

    @abc.abstractmethod
    def metadata(self, number: int) -> dict[str, str | None]:
        """Question, gold answer, level and subject; None where unknown."""

    @abc.abstractmethod
    def text(self, tokens: np.ndarray) -> str:
        """The decoded text of a completion, as the grader gets it."""

    @abc.abstractmethod
    def grade(
        self, numbers: Sequence[int], completions: Sequence[np.ndarray]
    ) -> Sequence[Verdict]:
        """The outcome of each completion, or the reason why it is missing."""


class FileQuestions(Questions):
    """Problems of a file in a prompt form, graded by worker processes."""

    def __init__(
        self,
        side: file_task.ProblemSet,
        form: PromptFormat,
        name: str,
        grade: Callable[[Sequence[tuple[str, str, Any]]], Sequence[Verdict]],
        states: Callable[[str], bool] | None = None,
    ):
        """Bind problems, prompt form, name and grader; nothing is read."""
        self._side, self._form, self._grade = side, form, grade
        self.states = states
        self.name, self.digests = name, side.digests
        self.contents = side.contents.tobytes()
        self.left_out = {k: n for k, n in side.counts.items() if k != "read"}
        self.end, self.pad = form.tokenizer.end, form.tokenizer.pad

    def prompts(self, numbers):
        """As `Questions.prompts`."""
        rows = [self._form.prompt(self._side.problem(number)) for number in numbers]
        return self._form.padded(rows, self._side.longest, left=True)

    def metadata(self, number):
        """As `Questions.metadata`."""
        problem = self._side.problem(number)
        return {
            "question": problem.question,
            "gold": problem.answer,
            "level": problem.level,
            "subject": problem.subject,
        }

    def text(self, tokens):
        """As `Questions.text`."""
        return self._form.tokenizer.decode(tokens.tolist())

    def grade(self, numbers, completions):
        """As `Questions.grade`."""
        checks = []
        for number, tokens in zip(numbers, completions, strict=True):
            problem = self._side.problem(number)
            checks.append((problem.question, self.text(tokens), problem.answer))
        return self._grade(checks)


class TaskQuestions(Questions):
    """The held-out prompts of a task, graded by its verifier."""

    def __init__(self, task: Task, name: str):
        """Make all held-out prompts; their digests are of tokens."""
        self._task, self.name = task, name
        self.left_out = {}
        self.end, self.pad = task.end, task.pad
        parts = []
        for start in range(0, task.num_held_out, CHUNK):
            stop = min(start + CHUNK, task.num_held_out)
            ids = np.arange(start, stop, dtype=np.int32)
            parts.append(jax.device_get(task.held_out(_ids(task, ids))))
        self._prompts: Prompts = jax.tree.map(
            lambda *some: np.concatenate(some), *parts
        )
        self.digests = [
            hashlib.blake2b(
                tokens[mask].astype("<i4").tobytes(), digest_size=16
            ).digest()
            for tokens, mask in zip(
                self._prompts.tokens, self._prompts.mask, strict=True
            )
        ]

    def prompts(self, numbers):
        """As `Questions.prompts`."""
        at = np.asarray(numbers)
        return np.asarray(self._prompts.tokens)[at], np.asarray(self._prompts.mask)[at]

    def metadata(self, number):
        """As `Questions.metadata`."""
        tokens, mask = self.prompts([number])
        question = self._task.decode(tokens[0][mask[0]])
        return {"question": question, "gold": None, "level": None, "subject": None}

    def text(self, tokens):
        """As `Questions.text`."""
        return self._task.decode(tokens)

    def grade(self, numbers, completions):
        """As `Questions.grade`."""
        width = max(map(len, completions))
        tokens, mask = padded_rows(
            [list(one) for one in completions], width, pad=self.pad, left=False
        )
        targets = jax.tree.map(
            lambda leaf: leaf[np.asarray(numbers)], self._prompts.target
        )
        if self._task.on_device:
            args = jax.tree.map(jnp.asarray, (targets, tokens, mask))
            return [
                _as_verdict(outcome) for outcome in self._task.verify(*args).tolist()
            ]
        each = [jax.tree.map(lambda x, i=i: x[i], targets) for i in range(len(tokens))]
        if self._task.verify_all:
            return [_as_verdict(o) for o in self._task.verify_all(each, [*completions])]
        return [self._verify_one(*pair) for pair in zip(each, completions, strict=True)]

    def _verify_one(self, target: Any, tokens: np.ndarray) -> Verdict:
        try:
            return _as_verdict(self._task.verify(target, tokens))
        except Exception as error:  # a user's verifier may raise anything
            return f"error: {type(error).__name__}: {error}"


def _as_verdict(outcome: Any) -> Verdict:
    """An outcome as float, a reason as it is, and "none" for None or NaN."""
    if isinstance(outcome, str):
        return outcome
    return "none" if outcome is None or math.isnan(outcome) else float(outcome)


def _ids(task: Task, ids: np.ndarray) -> Any:
    """Prompt ids as the task takes them: numpy for tasks of files, else a JAX array."""
    return ids if task.in_files else jnp.asarray(ids)


# ----- files


def held_out_problems(
    options: Mapping[str, Any], form: PromptFormat
) -> file_task.ProblemSet:
    """The held-out problems of a run of `file_task.task`.

    Args:
        options: all options of its task.
        form: prompt form.
    """
    side = partial(
        file_task.ProblemSet,
        prompt_format=form,
        longest=options["max_prompt_tokens"],
        on_error=options["on_error"],
    )
    count = options["num_held_out"]
    if options["held_out"] is None:
        whole = side(sources.open_records(options["train"]), options["layout"])
        return file_task.split_by_digest(whole, count)[1]
    records = sources.open_records(options["held_out"], split="test")
    tested = side(records, options["held_out_layout"] or options["layout"])
    return tested.subset(range(count or len(tested)))
