"""The parts of a run: its config, with the functions called that make its objects."""

import dataclasses

import optax

from curax import update
from curax.config import Config, option, options, rows_of
from curax.settings.declared import declared
from curax.types import Model, Task


@dataclasses.dataclass(frozen=True, kw_only=True)
class Parts:
    """A config with its functions called: what every step needs, all of it static."""

    config: Config
    task: Task
    model: Model
    tx: optax.GradientTransformation
    rows: int  # N, completions drawn at most, pilots apart
    train_rows: int  # M, completions trained per step


def task_of(config: Config) -> Task:
    """The task. Where it names no tokenizer, it is that of the model's checkpoint."""
    path = option(config.model, "path")
    named = options(config.task)
    if path is not None and "tokenizer" in named and named["tokenizer"] is None:
        return config.task(tokenizer=path)
    return config.task()


def build(config: Config) -> Parts:
    """Call the config's task, model and optimizer.

    Raises:
        ValueError: if a combination is impossible, in a sentence.
    """
    task, sizes = task_of(config), config.sampling
    unequal = not declared(config.allocate, "equal_groups", False) or sizes.budget
    if sizes.rounds > 1 and unequal:
        raise ValueError(
            f"sampling.rounds={sizes.rounds} replaces whole groups and needs groups of "
            "one size; set allocate to allocate.uniform, sampling.budget to 0 or "
            "sampling.rounds to 1."
        )
    if sizes.rounds > 1 and config.pilot:
        raise ValueError(
            f"sampling.rounds={sizes.rounds} replaces whole groups and knows no "
            "pilots; set pilot to None or sampling.rounds to 1."
        )
    if config.warm_start and task.traces is None:
        raise ValueError(
            "warm_start needs traces to imitate and the task has none; set it to None."
        )
    if sizes.parts > 1 and task.on_device:
        raise ValueError(
            f"sampling.parts={sizes.parts} lets the host verify beside the device, and "
            "this task is verified on the device; set sampling.parts to 1."
        )
    if config.seeds > 1 and not task.on_device:
        raise ValueError(
            f"seeds={config.seeds} cannot run side by side on a task that is verified "
            "on the host; set seeds to 1."
        )
    if config.hint:
        hinting = task.hinting
        if hinting is None:
            raise ValueError(
                "hint needs a task that can give hints and this one cannot; set hint "
                "to None, or the task's option for hints."
            )
        if config.hint.writing and hinting.ask is None:
            raise ValueError(
                "hint.writing asks the policy for hints, and this task does not know "
                "how; set hint.writing to None and choose another hint.source."
            )
    if config.reflection and (task.reference is None or not task.delimiter):
        raise ValueError(
            "reflection needs reference answers, and a delimiter that ends the "
            "thought, and this task has none; set reflection to None or choose another "
            "task."
        )
    if config.evaluation.prompts > task.num_held_out:
        raise ValueError(
            f"evaluation.prompts={config.evaluation.prompts} are more than the task "
            f"holds out; set evaluation.prompts to at most {task.num_held_out}."
        )
    return Parts(
        config=config,
        task=task,
        model=config.model(vocab_size=task.vocab_size),
        tx=update.transformation(config.optimizer, config.update.clip_norm),
        rows=rows_of(config),
        train_rows=min(
            rows_of(config),
            sizes.prompts * option(config.downsample, "m", sizes.group_size),
        ),
    )
