"""Stand-in for a file task: a task of equal shapes that needs no files."""

import dataclasses
from functools import partial
from typing import Any

import numpy as np

from curax import hub
from curax.config import Config, override
from curax.models import families
from curax.settings.sizes import checkpoint_of, declared_option
from curax.types import HostEnvironment, Prompts, Task

PROBLEMS = 2**16  # of the stand-in; the difficulty memory has a few numbers for each


def without_files(config: Config) -> Config:
    """The config with a file task replaced by a stand-in of equal shapes.

    Neither problems nor tokenizer are read: prompts are as long as the task allows, the
    vocabulary is that of the model's config.json. Of a model on the hub no weights are
    downloaded. Other tasks stay, and so does a task
    whose hints or references decide shapes.

    Raises:
        ValueError: in a sentence, if config.json cannot be read.
    """
    path, longest = (
        checkpoint_of(config),
        declared_option(config.task, "prompt_tokens"),
    )
    if path is None or longest is None or config.hint or config.reflection:
        return config
    place = hub.checkpoint(path, weights=False)
    config = override(config, {"model.path": str(place)})
    found = families.read(place / "config.json")
    shaped = partial(task, vocab_size=found["vocab_size"], prompt_tokens=longest)
    traces = declared_option(config.task, "trace_tokens", 0)
    turns = declared_option(config.task, "environment") is not None
    shaped = partial(shaped, trace_tokens=traces, turns=turns)
    return dataclasses.replace(config, task=shaped)


def task(
    *, vocab_size: int, prompt_tokens: int, trace_tokens: int = 0, turns: bool = False
) -> Task:
    """A task with a host verifier and empty prompts, for its shapes alone.

    Args:
        vocab_size: V.
        prompt_tokens: P.
        trace_tokens: of a completion to imitate; 0: there is none.
        turns: whether an environment of the host answers, in place of the verifier.
    """

    def prompts(ids: Any) -> Prompts:
        ids = np.asarray(ids, np.int32)
        shape = (len(ids), prompt_tokens)
        return Prompts(
            tokens=np.zeros(shape, np.int32),  # pyright: ignore[reportArgumentType]
            mask=np.ones(shape, bool),  # pyright: ignore[reportArgumentType]
            id=ids,  # pyright: ignore[reportArgumentType]
            target=ids,
        )

    def traces(_: Any, prompts: Prompts) -> tuple[Any, Any]:
        shape = (prompts.id.shape[0], trace_tokens)
        return np.zeros(shape, np.int32), np.ones(shape, bool)

    return Task(
        vocab_size=vocab_size,
        pad=0,
        end=(1,),
        num_prompts=PROBLEMS,
        num_held_out=PROBLEMS,
        prompts=prompts,
        held_out=prompts,
        traces=traces if trace_tokens else None,
        verify=None if turns else lambda target, tokens: 0.0,
        environment=HostEnvironment(answer=lambda _: []) if turns else None,
        on_device=False,
        decode=str,
        in_files=True,
    )
