"""Question sets of an evaluation: problems of a file, or a task's held-out prompts."""

import dataclasses
import hashlib
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from curax.tasks import file_task, sources
from curax.tasks.prompt_format import PromptFormat
from curax.types import HostEnvironment, Prompts, Task
from curax.verify.workers import Pool

CHUNK = 256  # held-out prompts of a task made by one call


@dataclasses.dataclass(frozen=True, kw_only=True)
class Questions:
    """A set of P numbered prompts: those that a task holds out and grades.

    Attributes:
        name: source of the questions.
        task: task whose held-out prompts they are; its verifier grades completions.
        digests: `[P]` bytes that identify each question independent of its number.
        contents: checksums of questions and answers, as bytes; empty: there are none.
        left_out: number of questions that are left out, by reason.
        text: decoded text of the tokens of a completion, as the grader gets it.
        metadata: question, gold answer, level and subject of a number; None where
            unknown.
    """

    name: str
    task: Task
    digests: Sequence[bytes]
    contents: bytes = b""
    left_out: Mapping[str, int] = dataclasses.field(default_factory=dict)
    text: Callable[[np.ndarray], str]
    metadata: Callable[[int], dict[str, str | None]]

    def __len__(self) -> int:
        return len(self.digests)

    def prompts(self, numbers: Sequence[int]) -> tuple[Any, Any]:
        """`[C, W]` tokens, left-padded to a fixed width, and their mask."""
        prompts = _held_out(self.task, numbers)
        return np.asarray(prompts.tokens), np.asarray(prompts.mask)


def of_file(
    side: sources.ProblemSet,
    form: PromptFormat,
    name: str,
    workers: Pool | None,
    states: Callable[[str], bool] | None = None,
    environment: HostEnvironment | None = None,
) -> Questions:
    """Problems of a file in a prompt form, graded by worker processes.

    Args:
        side: the problems.
        form: prompt form.
        name: of the file.
        workers: grade (question, completion, answer); None: an environment does.
        states: whether a completion states an answer that the grader reads; None:
            nobody knows.
        environment: answers turns.
    """
    task = file_task.FileTask(
        format=form,
        training=side.subset([]),
        testing=side,
        workers=workers,
        environment=environment,
        states=states,
    ).task()

    def metadata(number: int) -> dict[str, str | None]:
        problem = side.problems[number]
        return {
            "question": problem.question,
            "gold": problem.answer,
            "level": problem.level,
            "subject": problem.subject,
        }

    return Questions(
        name=name,
        task=task,
        digests=side.digests,
        contents=side.contents,
        left_out={k: n for k, n in side.counts.items() if k != "read"},
        text=lambda tokens: form.tokenizer.decode(tokens.tolist()),
        metadata=metadata,
    )


def of_task(task: Task, name: str) -> Questions:
    """The held-out prompts of a task, graded by its verifier; digests are of tokens."""
    asked: list[np.ndarray] = []
    for start in range(0, task.num_held_out, CHUNK):
        numbers = range(start, min(start + CHUNK, task.num_held_out))
        prompts = _held_out(task, numbers)
        asked += [t[m] for t, m in zip(prompts.tokens, prompts.mask, strict=True)]

    def metadata(number: int) -> dict[str, str | None]:
        question = task.decode(asked[number])
        return {"question": question, "gold": None, "level": None, "subject": None}

    return Questions(
        name=name,
        task=task,
        digests=[
            hashlib.blake2b(tokens.astype("<i4").tobytes(), digest_size=16).digest()
            for tokens in asked
        ],
        text=task.decode,
        metadata=metadata,
    )


def _held_out(task: Task, numbers: Sequence[int]) -> Prompts:
    """Held-out prompts of a task with these numbers, on the host."""
    ids = np.asarray(numbers, np.int32)
    return jax.device_get(task.held_out(ids if task.in_files else jnp.asarray(ids)))


# ----- files


def held_out_problems(
    options: Mapping[str, Any], own: PromptFormat, form: PromptFormat, longest: int
) -> sources.ProblemSet:
    """The held-out problems of a run of `file_task.task`, whatever they are asked in.

    Args:
        options: all options of its task.
        own: prompt form of the run, in which it left out what was too long.
        form: prompt form in which they are asked.
        longest: tokens; what is longer in this form is left out.

    Raises:
        ValueError: all are.
    """
    count, layout = options["num_held_out"], options["layout"]
    if apart := options["held_out"] is not None:
        records = sources.open_records(options["held_out"], split="test")
        layout = options["held_out_layout"] or layout
    else:
        records = sources.open_records(options["train"])
    side = partial(file_task.usable, records, layout, on_error=options["on_error"])
    most = options["max_prompt_tokens"]
    tested = side(own, longest=most)
    if apart:
        tested = tested.subset(range(count or len(tested)))
    else:
        tested = file_task.split_by_digest(tested, count)[1]
    if (form, longest) == (own, most):
        return tested
    asked, kept = side(form, longest=longest), {*tested.digests}
    kept = [i for i, digest in enumerate(asked.digests) if digest in kept]
    if not kept:
        raise ValueError(
            f"all problems that the run holds out are longer than {longest} tokens in "
            "this form; set --max-prompt-tokens higher, or leave --template out."
        )
    return asked.subset(kept)
