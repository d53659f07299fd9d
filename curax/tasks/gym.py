"""Tasks of reasoning-gym: procedurally generated problems with their verifier.

curax train gsm8k_qwen3_0p6b --workdir runs/chain_sum --set task=gym.task
    task.dataset=chain_sum task.options.max_terms=4 model.path=DIR
"""

from collections.abc import Mapping
from functools import partial
from typing import Any

from curax.settings.config_paths import unknown_option
from curax.settings.config_types import CheckpointPath, Count, Natural, Positive, Seed
from curax.settings.declared import declares
from curax.tasks import file_task, records
from curax.tasks.layouts import Problem
from curax.tasks.prompt_format import PromptFormat
from curax.types import Task
from curax.verify import graders
from curax.verify.workers import Workers


def generated(
    dataset: str, size: int, seed: int, options: Mapping[str, Any]
) -> records.Records:
    """The items of a reasoning-gym data set, a function of its seed.

    Raises:
        ValueError: there is no such data set, or it refuses the options.
    """
    known = graders.gym_options(dataset)
    for name in sorted(options.keys() - known):
        shown = f"task.options.{name}={options[name]}"
        raise ValueError(unknown_option(shown, dataset, name, known))
    import reasoning_gym

    name = f"reasoning-gym {dataset}, seed {seed}"
    try:
        items: Any = reasoning_gym.create_dataset(
            dataset, size=size, seed=seed, **options
        )
    except Exception as error:  # each data set checks its options in its own way
        text = " ".join(str(error).split()) or type(error).__name__
        raise ValueError(
            f"task.options of {dataset}: {text}; change what it names."
        ) from error

    return records.of_items(name, items)


def layout(record: Mapping[str, Any]) -> Problem:
    """The problem of an item; its answer is the whole item, as its verifier expects."""
    return Problem(question=record["question"], answer=dict(record))  # pyright: ignore[reportArgumentType]


@declares(tokenizer="tokenizer", prompt_tokens="max_prompt_tokens")
def task(
    *,
    dataset: str,
    options: dict[str, Any] | None = None,
    tokenizer: CheckpointPath | None = None,
    size: Count = 10_000,
    num_held_out: Count = 512,
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
        options: of the data set, by name; None: as it has them.
        tokenizer: folder of a checkpoint, or a name on the hub; None: the `path` of
            the model.
        size: problems to train on, repeated questions included.
        num_held_out: held-out problems, generated from seeds behind those of the
            others; their questions are removed from the training problems.
        seed: of the problems; item i has the seed `seed + i`.
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
    options = options or {}
    training, testing = file_task.generated(
        generated(dataset, size, seed, options),
        generated(dataset, num_held_out, seed + size, options),
        layout=layout,
        prompt_format=prompt_format,
        longest=max_prompt_tokens,
    )
    grader = partial(graders.reasoning_gym_score, dataset=dataset)
    pool = Workers(grader, count=workers, deadline=deadline, memory_mb=memory_mb)
    return file_task.FileTask(
        format=prompt_format, training=training, testing=testing, workers=pool
    ).task()
