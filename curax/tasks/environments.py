"""Environments of Python, whose turns are answered in worker processes.

    make() -> types.Environment(reset, observe, measure), once in each worker
    Turn -> (state, key, target, turn) -> worker -> Answer, or why there is none

A state goes to the worker and comes back with the answer, pickled, so any worker may
answer any turn, and one that hangs or crashes loses one completion alone. It is never
unpickled here.
"""

import dataclasses
import math
import zlib
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np

from curax.settings.declared import declared
from curax.tasks.prompt_format import PromptFormat, padded_rows
from curax.tasks.text import Tokenizer
from curax.types import (
    Answer,
    HostEnvironment,
    Prompts,
    Task,
    Turn,
)
from curax.verify import workers
from curax.verify.serve import ENVIRONMENT, STATE_BYTES, TOKENS, short

# Of an answer: its state in base64; its tokens, of 12 bytes at most, as characters are.
LINE = 2 * STATE_BYTES + 12 * TOKENS


def answered(verdict: Any) -> Answer:
    """What a worker says to a turn; its tokens may be text.

    Raises:
        ValueError: it is no answer.
    """
    match verdict:
        case {
            "state": str(state),
            "tokens": str() | list() as tokens,
            "done": bool(done),
            "reward": float(reward),
            "found": dict(found),
        }:
            numbers = isinstance(tokens, str) or all(type(t) is int for t in tokens)
            floats = all(type(value) is float for value in found.values())
            if numbers and floats and len(tokens) <= TOKENS and not math.isinf(reward):
                return Answer(state, tokens, done, reward, found)  # pyright: ignore[reportArgumentType]
    raise ValueError("no answer")


ANSWERING = workers.Kind(ENVIRONMENT, answered, LINE, twice=False)


def integers(tokens: str | list[int]) -> list[int]:
    """The same list; ValueError for text, which has no tokenizer."""
    if isinstance(tokens, str):
        raise ValueError(f"{tokens[:40]!r} is text, and turns of this task are tokens")
    return tokens


def outcome_between(lowest: float, highest: float) -> Callable[[float], float]:
    """The outcome of a sum of rewards: 0 at the lowest, 1 at the highest, clipped.

    Raises:
        ValueError: in a sentence, unless the first is below the second.
    """
    if not lowest < highest:
        raise ValueError(
            f"task.environment.lowest={lowest} must be below highest={highest}."
        )
    return lambda total: min(max((total - lowest) / (highest - lowest), 0.0), 1.0)


def in_workers(
    make: Callable[..., Any],
    *,
    count: int = 2,
    deadline: float = 5.0,
    memory_mb: int = 2048,
    text: bool = False,
) -> HostEnvironment:
    """An environment of Python, in processes of its own.

    Args:
        make: `() -> types.Environment` of functions of Python, itself a function at the
            top level of a module or config file, or a partial of one. Names of what is
            measured are declared, by `declares(measures=...)`.
        count: processes.
        deadline: seconds per turn.
        memory_mb: MiB per process, beyond its imports.
        text: whether turns and answers are text, not lists of integers.

    Raises:
        ValueError: as `Workers`.
    """
    pool = workers.Workers(
        make, count=count, deadline=deadline, memory_mb=memory_mb, kind=ANSWERING
    )

    def answer(turns: list[Turn]) -> Sequence[Answer | str]:
        said = pool.ask([tuple(turn) for turn in turns])
        return said if text else [_written(one, integers) for one in said]

    def openings(targets: list[Any]) -> Sequence[Answer | str]:
        return pool.ask([(None, 0, target, None) for target in targets])

    return HostEnvironment(
        answer=answer,
        start=pool.start,
        measures=tuple(declared(make, "measures", ())),
        openings=openings,
    )


def of_text(
    make: Callable[..., Any], form: PromptFormat, longest: int, **processes: Any
) -> HostEnvironment:
    """An environment of Python whose turns and answers are text.

    Args:
        make: as of `in_workers`; or what declares itself a `server`, and makes a
            `HostEnvironment` of text, which needs no processes.
        form: of prompts; in a chat answers are turns of the user's.
        longest: tokens of an answer that are kept.
        processes: as of `in_workers`.
    """
    if declared(make, "server", False):
        world: HostEnvironment = make()
    else:
        world = in_workers(make, text=True, **processes)

    def write(tokens: str | list[int]) -> list[int]:
        if not isinstance(tokens, str):
            raise ValueError(
                f"observe gives {short(repr(tokens))} as tokens, and turns of this "
                "task are text"
            )
        return form.reply(tokens, longest=longest)

    def answer(turns: list[Turn]) -> Sequence[Answer | str]:
        spoken = form.tokenizer.decode
        said = world.answer([t._replace(tokens=spoken(t.tokens)) for t in turns])
        return [_written(one, write) for one in said]

    return dataclasses.replace(world, answer=answer)


def posed(
    spoken: Tokenizer,
    training: Mapping[int, list[int]],
    testing: Mapping[int, list[int]],
    environment: HostEnvironment,
    **more: Any,
) -> Task:
    """The task of an environment that poses its own problems.

    Args:
        spoken: the tokenizer.
        training: tokens of prompts by their target, which the environment knows.
        testing: likewise of those that are held out.
        environment: answers turns.
        more: fields of `Task`.
    """
    width = max(len(row) for side in (training, testing) for row in side.values())

    def prompts(ids: Any, *, side: Mapping[int, list[int]]) -> Prompts:
        ids, known = np.asarray(ids, np.int32), [*side]
        target = np.asarray(known, np.int32)[ids]
        rows = [side[n] for n in target.tolist()]
        tokens, mask = padded_rows(rows, width, pad=spoken.pad, left=True)
        return Prompts(tokens=tokens, mask=mask, id=ids, target=target)  # pyright: ignore[reportArgumentType]

    return Task(
        vocab_size=spoken.size,
        pad=spoken.pad,
        end=spoken.end,
        num_prompts=len(training),
        num_held_out=len(testing),
        prompts=partial(prompts, side=training),
        held_out=partial(prompts, side=testing),
        on_device=False,
        decode=lambda tokens: spoken.decode(map(int, tokens), control=True),
        in_files=True,
        start=environment.start,
        tokenizer=spoken.path,
        fingerprint=zlib.crc32(repr([training, testing]).encode()),
        environment=environment,
        **more,
    )


def _written(said: Any, write: Callable[[Any], list[int]]) -> Answer | str:
    if not isinstance(said, Answer):
        return said
    try:
        return said._replace(tokens=write(said.tokens))
    except ValueError as error:
        return f"error: {' '.join(str(error).split())}"
