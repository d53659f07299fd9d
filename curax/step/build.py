"""Components of a run, built from its config."""

from collections.abc import Iterator

from curax import update
from curax.config import Config, kept_of, option, options, rows_of
from curax.settings.config_paths import Place
from curax.settings.declared import declared
from curax.step.methods import hints, pilots, queries, references, refill
from curax.step.records import Components, Method
from curax.types import Task


def build(config: Config) -> Components:
    """Components of a run: its config with task, model, optimizer and methods called.

    Raises:
        ValueError: if a combination is impossible, in a sentence.
    """
    task, methods = task_of(config), methods_of(config)
    for method in methods:
        for sentence in method.needs(config, task) if method.needs else ():
            raise ValueError(sentence)
    for sentence in _lacks(config, task):
        raise ValueError(sentence)
    sizes = config.sampling
    return Components(
        config=config,
        task=task,
        model=config.model(vocab_size=task.vocab_size),
        tx=update.transformation(config.optimizer, config.update.clip_norm),
        rows=rows_of(config),
        train_rows=min(
            rows_of(config),
            sizes.prompts * kept_of(config),
        ),
        methods=methods,
    )


def task_of(config: Config) -> Task:
    """The config's task; without a tokenizer of its own, with the model's."""
    path = option(config.model, "path")
    named = options(config.task)
    if path is not None and "tokenizer" in named and named["tokenizer"] is None:
        return config.task(tokenizer=path)
    return config.task()


def methods_of(config: Config) -> tuple[Method, ...]:
    """Methods that a config uses, in the order in which they take part in a step.

    Those that its fields enable, and those that its functions declare.
    """
    reflection, pilot = config.reflection, config.pilot
    named = (
        (queries.METHOD, reflection and reflection.queries),
        (references.METHOD, reflection),
        (pilots.method(pilot.every if pilot else 1), pilot),
        (refill.METHOD, config.sampling.rounds > 1),
        (hints.METHOD, config.hint),
    )
    own = (
        declared(place.value, "method", None)
        for _, place in Place(config).walk()
        if callable(place.value)
    )
    found = [method for method, is_set in named if is_set]
    return tuple(dict.fromkeys([*found, *(method for method in own if method)]))


def _lacks(config: Config, task: Task) -> Iterator[str]:
    """Sentences about what the config needs and the task does not have."""
    chunks = config.sampling.chunks
    if config.warm_start and task.traces is None:
        yield (
            "warm_start needs traces to imitate and the task has none; set it to None."
        )
    if chunks > 1 and task.on_device:
        yield (
            f"sampling.chunks={chunks} lets the host verify beside the device, and "
            "this task is verified on the device; set sampling.chunks to 1."
        )
    if config.seeds > 1 and not task.on_device:
        yield (
            f"seeds={config.seeds} cannot run side by side on a task that is verified "
            "on the host; set seeds to 1."
        )
    elif config.seeds > 1 and task.in_files:
        yield (
            f"seeds={config.seeds} cannot run side by side on a task whose prompts the "
            "host reads; set seeds to 1."
        )
    if config.evaluation.prompts > task.num_held_out:
        yield (
            f"evaluation.prompts={config.evaluation.prompts} are more than the task "
            f"holds out; set evaluation.prompts to at most {task.num_held_out}."
        )
