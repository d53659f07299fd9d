"""Components of a run, built from its config."""

import dataclasses
import inspect
from collections import Counter
from collections.abc import Iterator, Sequence
from functools import partial

from curax import reward, update
from curax.config import Config, ConfigError
from curax.handover import Engine
from curax.settings import errors
from curax.settings.config_paths import Place, full_name, option, unbound, wrong_options
from curax.settings.conflicts import Table, right_by_rewards, said
from curax.settings.declared import declared
from curax.settings.sizes import checkpoint_of, kept_of, rows_of
from curax.step import callbacks
from curax.step.methods import hints, pilots, prefixes, queries, references, refill
from curax.step.types import Components, Method
from curax.types import Environment, HostEnvironment, Task


def build(config: Config, task: Task | None = None) -> Components:
    """Components of a run: its config with task, model, optimizer and methods called.

    Args:
        config: of the run.
        task: in place of what the config's gives; None: that, of functions that
            programs can call where several seeds run side by side.

    Raises:
        ValueError: if a combination is impossible, in a sentence.
    """
    task, methods = task or task_of(config), methods_of(config)
    if config.seeds > 1:
        try:
            task = callbacks.inside(task)
        except ValueError as error:
            raise ValueError(f"seeds={config.seeds}, but {error}") from error
    for sentence in _clashes(config, methods):
        raise ValueError(sentence)
    for method in methods:
        for sentence in _conflicts(method, config, task):
            raise ValueError(sentence)
    for sentence in (*_lacks(config, task), *said(_environment(config, task))):
        raise ValueError(sentence)
    sizes = config.sampling
    return Components(
        config=config,
        task=task,
        model=config.model(vocab_size=task.vocab_size),
        tx=update.transformation(config.optimizer, config.update.clip_norm),
        rows=rows_of(config),
        train_rows=min(rows_of(config), sizes.prompts * kept_of(config)),
        methods=methods,
    )


def with_engine(parts: Components) -> Components:
    """The components with the engine of their config, for a run that trains.

    What only measures draws by curax's own sampler.

    Raises:
        ValueError: an option of the engine is wrong, in a sentence.
        ConfigError: the function gives no engine, or lacks an option.
    """
    make = parts.config.sampling.engine
    if make is None:
        return parts
    try:
        inspect.signature(make).bind()
    except TypeError as error:
        raise ConfigError(
            f"sampling.engine={full_name(make)}: {error}; set it, as one sets "
            "sampling.engine.url=http://127.0.0.1:8000."
        ) from error
    except ValueError:  # native code has no signature
        pass
    if not isinstance(made := make(), Engine):
        raise ConfigError(
            f"sampling.engine={full_name(make)} gives a {type(made).__name__}; name a "
            "function that gives a handover.Engine."
        )
    return dataclasses.replace(parts, engine=made)


def task_of(config: Config) -> Task:
    """The config's task; without a tokenizer of its own, with the model's.

    Raises:
        ConfigError: an option that it needs is not set.
    """
    task, path = config.task, checkpoint_of(config)
    name = declared(task, "tokenizer", None)
    if path is not None and name and option(task, name) is None:
        task = partial(task, **{name: path})
    for wrong in wrong_options(Place({"task": task}), ["task"]):
        raise ConfigError(wrong)
    return task()


def check_weights(config: Config, *, resumed: bool = False) -> None:
    """Check that the checkpoint that a model begins from has weights.

    Args:
        config: config of the run.
        resumed: from a checkpoint of the run, which lacks them beside adapters alone.

    Raises:
        ConfigError: they are missing or damaged.
    """
    check = declared(config.model, "check_weights", None)
    if check and (not resumed or option(config.model, "lora_rank")):
        with errors.config_errors(config):
            check(checkpoint_of(config))


def methods_of(config: Config) -> tuple[Method, ...]:
    """Methods that a config uses, in the order in which they take part in a step.

    Those that its fields enable, then those that it names. Pilots stand before hints:
    they are drawn in contexts without any. The order of the others has no effect: two
    that share a hook exclude each other, or keep a state and add metrics in it.

    Raises:
        ConfigError: a function that it names gives something else.
    """
    reflection, pilot = config.reflection, config.pilot
    built_in = (
        (queries.METHOD, reflection and reflection.queries),
        (references.METHOD, reflection),
        (pilots.method(pilot.every if pilot else 1), pilot),
        (refill.METHOD, config.sampling.attempts > 1),
        (hints.METHOD, config.hint),
    )
    found = [method for method, is_set in built_in if is_set]
    for number, make in enumerate(config.methods):
        found.append(made := make())
        if not isinstance(made, Method):
            raise ConfigError(
                f"methods.{number}={full_name(make)} gives a {type(made).__name__}; "
                "name a function that gives a step.types.Method."
            )
    return tuple(found)


def _clashes(config: Config, methods: Sequence[Method]) -> Iterator[str]:
    """Sentences about methods that cannot go together, or not with an option."""
    for name, count in Counter(method.name for method in methods).items():
        if count > 1:
            yield (
                f"{count} methods are called {name}, the key of their states; give "
                "each a name of its own."
            )
    for role in ("choose", "grade"):
        names = sorted(method.name for method in methods if getattr(method, role))
        if len(names) > 1:
            yield (
                f"{' and '.join(names)} both have {role}, of which a step has one; use "
                "one of these methods."
            )
    sizes = config.sampling
    in_parts = {  # option: whether it is set, and the fix
        f"sampling.attempts={sizes.attempts}": (
            sizes.attempts > 1,
            "sampling.attempts to 1",
        ),
        f"sampling.chunks={sizes.chunks}": (sizes.chunks > 1, "sampling.chunks to 1"),
        "stop": (config.stop is not None, "stop to None"),
        "hint": (config.hint is not None, "hint to None"),
    }
    for method in methods:
        for name, (is_set, mended) in in_parts.items():
            if method.grade and is_set:
                yield (
                    f"{name} needs outcomes of parts of a draw, and {method.name} "
                    f"grades whole draws; set {mended}."
                )
        if method.grade and sizes.engine:
            yield (
                "sampling.engine may leave completions missing, and "
                f"{method.name} gives each an outcome; set sampling.engine to None."
            )
        if method.choose and sizes.ahead:
            yield (
                f"sampling.ahead={sizes.ahead} draws the next prompts of the data "
                f"before a step ends, and {method.name} chooses them by what it "
                "brought; set sampling.ahead to 0."
            )
        if method.choose and sizes.attempts > 1:
            yield (
                f"sampling.attempts={sizes.attempts} asks for the next prompts of the "
                f"data, and {method.name} chooses them; set sampling.attempts to 1."
            )


def _conflicts(method: Method, config: Config, task: Task) -> Iterator[str]:
    """Sentences about fields and a task with which a method cannot run."""
    if method.grade and task.terms:
        without = "reflection to None" if config.reflection else "methods without it"
        yield (
            f"{method.name} grades in place of the verifier, and the terms of "
            f"graders.weighted would not be asked; set {without}, or task.grader to "
            "one of them."
        )
    if method.conflicts:
        yield from said(method.conflicts(config, task))


def _environment(config: Config, task: Task) -> Table:
    """Of an environment: what else judges, and what knows of no turns."""
    given, hint = task.environment is not None, config.hint
    own = hint and declared(hint.source, "method", None) is prefixes.method
    return [
        (
            not given and task.verify is None,
            "task.verify=None leaves outcomes to an environment and the task has none; "
            "set task.verify or task.environment.",
        ),
        (
            given and task.verify is not None,
            "task.environment gives outcomes, and task.verify would not be asked; set "
            "verify of the task to None.",
        ),
        (
            given and not isinstance(task.environment, Environment | HostEnvironment),
            f"task.environment is a {type(task.environment).__name__}; let the task "
            "give a types.Environment, or what curax.tasks.environments makes.",
        ),
        (
            isinstance(task.environment, Environment) and not task.on_device,
            "task.environment is a JAX function, and the task says that the host "
            "verifies; set on_device of the task to True.",
        ),
        (
            isinstance(task.environment, HostEnvironment) and task.on_device,
            "task.environment is asked from the host, and the task says that it is on "
            "the device; set on_device of the task to False.",
        ),
        (
            given and config.sampling.engine is not None,
            "sampling.engine draws one turn and knows nothing of task.environment; set "
            "sampling.engine to None.",
        ),
        (
            given and config.reflection is not None,
            "reflection splits a completion at the end of its thought, and "
            "task.environment at turns; set reflection to None.",
        ),
        (
            given and hint and hint.writing is not None,
            "hint.writing has the policy write hints, which task.environment would "
            "answer; set hint.writing to None.",
        ),
        (
            given and own,
            "hint.source=own_prefix cuts completions, which hold what task.environment "
            "said; set hint.source to hint.reference_prefix.",
        ),
        (
            given and unbound(config.shape_reward) is reward.soft_overlong,
            "shape_reward=reward.soft_overlong counts the tokens of the policy, and "
            "sampling.max_tokens those of task.environment too; set shape_reward to "
            "None.",
        ),
        (
            given and config.evaluation.confidence > 0,
            f"evaluation.confidence={config.evaluation.confidence} is averaged over "
            "tokens in a row, between which task.environment writes; set "
            "evaluation.confidence to 0.",
        ),
    ]


def _lacks(config: Config, task: Task) -> Iterator[str]:
    """Sentences about what the config needs and the task does not have."""
    chunks = config.sampling.chunks
    if config.warm_start and task.traces is None:
        yield (
            "warm_start needs traces to imitate and the task has none; set it to None."
        )
    if task.on_device and task.terms:
        yield (
            "the terms of a reward are graded on the host, and this task is verified "
            "on the device; set on_device of the task to False."
        )
    if task.terms:
        why = "task.grader adds terms to; set it to one of these"
        yield from right_by_rewards(config, why)
    if chunks > 1 and task.on_device:
        yield (
            f"sampling.chunks={chunks} lets the host verify beside the device, and "
            "this task is verified on the device; set sampling.chunks to 1."
        )
    if config.evaluation.prompts > task.num_held_out:
        yield (
            f"evaluation.prompts={config.evaluation.prompts} are more than the task "
            f"holds out; set evaluation.prompts to at most {task.num_held_out}."
        )
