"""Tasks of reasoning-gym: procedurally generated problems with their verifier."""

import difflib
from collections.abc import Mapping
from functools import partial
from typing import Any

from curax.settings.config_types import CheckpointPath, Count, Natural, Positive, Seed
from curax.settings.declared import declares
from curax.settings.packages import install
from curax.tasks import file_task, sources
from curax.tasks.layouts import Problem
from curax.tasks.prompt_format import PromptFormat
from curax.types import Task
from curax.verify import graders
from curax.verify.workers import Workers


class GeneratedRecords(sources.Records):
    """The items of a reasoning-gym data set, a function of its seed, made when read."""

    def __init__(self, dataset: str, size: int, seed: int, options: Mapping[str, Any]):
        """Create the data set.

        Raises:
            ValueError: there is no such data set, or it refuses the options.
        """
        try:
            import reasoning_gym
            from reasoning_gym.factory import DATASETS
        except ImportError as error:
            raise ValueError(
                "task.dataset needs reasoning-gym, which is not installed; run "
                f"{install('gym')}."
            ) from error
        if dataset not in DATASETS:
            near = difflib.get_close_matches(dataset, DATASETS, 1, cutoff=0)
            raise ValueError(
                f"task.dataset={dataset!r} is no task of reasoning-gym; name one of "
                f"its gallery, {near[0]!r} for example."
            )
        self.name = f"reasoning-gym {dataset}, seed {seed}"
        try:
            self._items: Any = reasoning_gym.create_dataset(
                dataset, size=size, seed=seed, **options
            )
        except (TypeError, AssertionError, ValueError) as error:
            raise ValueError(
                f"task.options of {dataset}: {' '.join(str(error).split())}; change "
                "what it names."
            ) from error

    def __len__(self) -> int:
        return len(self._items)

    def where(self, i: int) -> str:
        """The seed and the item."""
        return f"{self.name}, item {i}"

    def read(self, start: int, stop: int) -> list[Mapping[str, Any] | sources.Broken]:
        """Items `start` to `stop`."""
        return [self._items[i] for i in range(start, stop)]


def layout(record: Mapping[str, Any]) -> Problem:
    """The problem of an item; its answer is the whole item, as its verifier expects."""
    return Problem(question=record["question"], answer=dict(record))  # pyright: ignore[reportArgumentType]


@declares(tokenizer="tokenizer", prompt_tokens="max_prompt_tokens")
def task(
    *,
    dataset: str,
    options: tuple[tuple[str, Any], ...] = (),
    tokenizer: CheckpointPath | None = None,
    size: Count = 10_000,
    num_held_out: Count = 256,
    seed: Seed = 0,
    chat: bool | None = None,
    system: str | None = None,
    template: str = "{question}\nGive the final answer within <answer></answer>.",
    thinking: bool | None = None,
    max_prompt_tokens: Count = 1024,
    workers: Count = 2,
    deadline: Positive = 5.0,
    memory_mb: Natural = 2048,
) -> Task:
    """The task of a reasoning-gym data set, graded in [0, 1] by its own verifier.

    Args:
        dataset: its name in reasoning-gym.
        options: of the data set, as pairs of name and value.
        tokenizer: folder of a checkpoint, or a name on the hub; None: the `path` of
            the model.
        size: problems to train on, repeated questions included.
        num_held_out: held-out problems, generated from another seed; their questions
            are removed from the training problems.
        seed: of the problems.
        chat: as `file_task.task`, and so are the options that follow.
        system: the system turn.
        template: the prompt.
        thinking: the template's `enable_thinking`.
        max_prompt_tokens: longer prompts are left out and counted.
        workers: processes that grade.
        deadline: seconds for one completion.
        memory_mb: memory of one process.

    Raises:
        ValueError: in a sentence, for an option.
    """
    prompt_format = PromptFormat(
        tokenizer=file_task.load_tokenizer(tokenizer),
        chat=chat,
        system=system,
        template=template,
        thinking=thinking,
    )
    problem_set = partial(
        file_task.ProblemSet,
        layout=layout,
        prompt_format=prompt_format,
        longest=max_prompt_tokens,
        on_error="raise",
    )
    training = problem_set(GeneratedRecords(dataset, size, seed, dict(options)))
    testing = GeneratedRecords(dataset, num_held_out, seed + 1, dict(options))
    training, testing = file_task.without_overlap(training, problem_set(testing), 0)
    grader = partial(graders.reasoning_gym_score, dataset=dataset)
    pool = Workers(grader, count=workers, deadline=deadline, memory_mb=memory_mb)
    return file_task.FileTask(
        format=prompt_format, training=training, testing=testing, workers=pool
    ).task()
