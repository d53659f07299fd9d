"""What an evaluation asks: the problems of a file, or what a task holds out."""

import abc
import hashlib
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from curax.tasks import file_task, sources
from curax.tasks.layouts import Layout
from curax.tasks.prompt_format import PromptFormat, padded_rows
from curax.types import Prompts, Task
from curax.verify.workers import Verdict

CHUNK = 256  # held-out prompts of a task that are made at a time
LEFT_OUT = ("duplicate", "too_long", "broken")


class Questions(abc.ABC):
    """Prompts by number, and what a completion of each is worth.

    Attributes:
        name: where they come from.
        digests: `[P]`, which name each question for ever, whatever its number.
        left_out: how many are not asked, by reason.
        end: tokens that end a completion.
        pad: token behind the end.
    """

    name: str
    digests: Sequence[bytes]
    left_out: Mapping[str, int]
    end: tuple[int, ...]
    pad: int

    def __len__(self) -> int:
        return len(self.digests)

    @abc.abstractmethod
    def prompts(self, numbers: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
        """`[C, P]` tokens, padded on the left, and their mask; P is always the same."""

    @abc.abstractmethod
    def about(self, number: int) -> dict[str, str | None]:
        """Question, gold answer, level and subject; None where not known."""

    @abc.abstractmethod
    def text(self, tokens: np.ndarray) -> str:
        """A completion as its grader reads it."""

    @abc.abstractmethod
    def graded(
        self, numbers: Sequence[int], completions: Sequence[np.ndarray]
    ) -> Sequence[Verdict]:
        """The outcome of each completion, or why it is missing."""


class OfFile(Questions):
    """The problems of a file, asked in a form, and graded by worker processes."""

    def __init__(
        self,
        side: file_task.ProblemSet,
        form: PromptFormat,
        name: str,
        grade: Callable[[Sequence[tuple[str, str, Any]]], Sequence[Verdict]],
    ):
        """Nothing is read that was not read for `side`."""
        self._side, self._form, self._grade = side, form, grade
        self.name, self.digests = name, side.digests
        self.left_out = {key: side.counts.get(key, 0) for key in LEFT_OUT}
        self.end, self.pad = form.tokenizer.end, form.tokenizer.pad

    def prompts(self, numbers):
        """As `Questions.prompts`."""
        rows = [self._form.prompt(self._side.problem(number)) for number in numbers]
        return self._form.padded(rows, self._side.longest, left=True)

    def about(self, number):
        """As `Questions.about`."""
        asked = self._side.problem(number)
        return {
            "question": asked.question,
            "gold": asked.answer,
            "level": asked.level,
            "subject": asked.subject,
        }

    def text(self, tokens):
        """As `Questions.text`."""
        return self._form.tokenizer.decode(tokens.tolist())

    def graded(self, numbers, completions):
        """As `Questions.graded`."""
        checks = []
        for number, tokens in zip(numbers, completions, strict=True):
            asked = self._side.problem(number)
            checks.append((asked.question, self.text(tokens), asked.answer))
        return self._grade(checks)


class OfTask(Questions):
    """The held-out prompts of any task, graded by its own verifier."""

    def __init__(self, task: Task, name: str):
        """All prompts are made, to know them by their tokens."""
        self._task, self.name = task, name
        self.left_out = {}
        self.end, self.pad = task.end, task.pad
        parts = []
        for start in range(0, task.num_held_out, CHUNK):
            stop = min(start + CHUNK, task.num_held_out)
            ids = np.arange(start, stop, dtype=np.int32)
            parts.append(jax.device_get(task.held_out(_own(task, ids))))
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

    def about(self, number):
        """As `Questions.about`."""
        tokens, mask = self.prompts([number])
        question = self._task.decode(tokens[0][mask[0]])
        return {"question": question, "gold": None, "level": None, "subject": None}

    def text(self, tokens):
        """As `Questions.text`."""
        return self._task.decode(tokens)

    def graded(self, numbers, completions):
        """As `Questions.graded`."""
        width = max(map(len, completions))
        tokens, mask = padded_rows(
            [list(one) for one in completions], width, pad=self.pad, left=False
        )
        targets = jax.tree.map(
            lambda leaf: leaf[np.asarray(numbers)], self._prompts.target
        )
        if self._task.on_device:
            args = jax.tree.map(jnp.asarray, (targets, tokens, mask))
            return [_verdict(outcome) for outcome in self._task.verify(*args).tolist()]
        each = [jax.tree.map(lambda x, i=i: x[i], targets) for i in range(len(tokens))]
        if self._task.verify_all:
            return [_verdict(o) for o in self._task.verify_all(each, [*completions])]
        return [self._one(*pair) for pair in zip(each, completions, strict=True)]

    def _one(self, target: Any, tokens: np.ndarray) -> Verdict:
        try:
            return _verdict(self._task.verify(target, tokens))
        except Exception as error:  # of anybody's verifier
            return f"error: {type(error).__name__}: {error}"


def _verdict(said: Any) -> Verdict:
    """What a verifier says, with its ways to say nothing in one word."""
    if isinstance(said, str):
        return said
    return "none" if said is None or math.isnan(said) else float(said)


def _own(task: Task, ids: np.ndarray) -> Any:
    """Ids where the task wants them."""
    return ids if task.in_files else jnp.asarray(ids)


# ----- of files


def opened(
    path: str,
    form: PromptFormat,
    *,
    layout: Layout,
    longest: int,
    on_error: str,
) -> file_task.ProblemSet:
    """The problems of a file.

    Raises:
        ValueError: in a sentence, if it cannot be read or a record is broken.
    """
    records = sources.open_records(Path(path), split="test")
    return file_task.ProblemSet(
        records, layout, form, longest=longest, on_error=on_error
    )


def held_out(options: Mapping[str, Any], form: PromptFormat) -> file_task.ProblemSet:
    """What a run of `file_task.task` holds out.

    Args:
        options: of its task, all of them.
        form: how to ask.
    """

    def side(records: sources.Records, layout: Layout) -> file_task.ProblemSet:
        longest, on_error = options["max_prompt_tokens"], options["on_error"]
        return file_task.ProblemSet(
            records, layout, form, longest=longest, on_error=on_error
        )

    count = options["num_held_out"]
    if options["held_out"] is None:
        whole = side(sources.open_records(options["train"]), options["layout"])
        return file_task.split_by_digest(whole, count)[1]
    records = sources.open_records(options["held_out"], split="test")
    tested = side(records, options["held_out_layout"] or options["layout"])
    return tested.subset(range(count or len(tested)))
