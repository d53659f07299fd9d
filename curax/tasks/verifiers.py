"""Tasks of verifiers: a taskset's prompts, and its environment as that of turns.

    task=partial(verifiers.task, taskset="my_taskset", tokenizer=DIR)

An episode of verifiers is a completion. It runs in a process of its own, and asks its
policy for turns: what it asks with are the tokens so far, so what it has put behind a
turn is what the policy reads next. Tokens that were drawn stay as they are, or the
completion is missing.
"""

import dataclasses
import functools
import json
import math
import os
import shutil
import time
from collections.abc import Sequence
from typing import Any

from curax.settings.config_types import CheckpointPath, Count, Positive
from curax.settings.declared import declares
from curax.tasks import environments, file_task, text
from curax.tasks.verifiers_process import Asked, Ended, Episode, Side
from curax.types import Answer, HostEnvironment, Task, Turn
from curax.verify.serve import printable, short

PYTHON = "VERIFIERS_PYTHON"  # environment variable of the interpreter
AT_ONCE = 64  # episodes that are asked for their prompts at the same time
MAKE = "python3 -m venv .venv-verifiers && .venv-verifiers/bin/pip install verifiers"


@declares(
    tokenizer="tokenizer", prompt_tokens="max_prompt_tokens", environment="taskset"
)
def task(
    *,
    taskset: str,
    config: dict[str, Any] | None = None,
    tokenizer: CheckpointPath | None = None,
    size: Count = 1000,
    num_held_out: Count = 100,
    max_prompt_tokens: Count = 1024,
    renderer: str | None = None,
    rendering: dict[str, Any] | None = None,
    python: str | None = None,
    deadline: Positive = 120.0,
) -> Task:
    """The task of a taskset of verifiers, played by its own environment.

    Args:
        taskset: its name, a module that can be imported where verifiers is installed.
        config: of its environment as verifiers has it, such as
            `{"agent": {"harness": {"id": "null"}}}`; options of the taskset itself are
            those below `"taskset"`.
        tokenizer: folder of a checkpoint, or a name on the hub; None: the `path` of
            the model.
        size: tasks that are taken, the first ones.
        num_held_out: of these the last ones, which are held out.
        max_prompt_tokens: longer prompts are left out and counted.
        renderer: what makes tokens of a conversation, by its name in verifiers; None:
            the chat template, whose later turns are put behind the tokens that were
            drawn.
        rendering: options of the renderer; without one, variables of the template.
        python: interpreter of the environment of Python that has verifiers; None: the
            environment variable VERIFIERS_PYTHON.
        deadline: seconds for the answers to all turns of a round; what takes longer is
            missing.

    Raises:
        ValueError: in a sentence, for an option.
    """
    spoken = file_task.load_tokenizer(tokenizer)
    setup = {
        "taskset": taskset,
        "config": config or {},
        "tokenizer": str(spoken.path.absolute()),
        "ends": spoken.end,
        "renderer": renderer,
        "rendering": rendering or {},
        "size": size,
    }
    side, rows = asked(interpreter(python), json.dumps(setup), deadline)
    if num_held_out >= len(rows):
        raise ValueError(
            f"task.num_held_out={num_held_out} of the {len(rows)} tasks of {taskset} "
            f"leaves none to train on; set it to at most {len(rows) - 1}."
        )
    first = len(rows) - num_held_out
    fit = [n for n, row in enumerate(rows) if len(row) <= max_prompt_tokens]
    sides = [n for n in fit if n < first], [n for n in fit if n >= first]
    if not all(sides):
        shortest = min(map(len, rows))
        raise ValueError(
            f"task.max_prompt_tokens={max_prompt_tokens} leaves no task of {taskset} "
            f"to train on, or none that is held out (the shortest prompt has "
            f"{shortest} tokens); raise it."
        )
    return Played(taskset, spoken, side, rows, sides, deadline).task()


def interpreter(python: str | None) -> str:
    """The interpreter that has verifiers.

    Raises:
        ValueError: none is named, or it cannot be run.
    """
    named = python or os.environ.get(PYTHON)
    if not named:
        raise ValueError(
            f"task.python names no Python that has verifiers; run {MAKE}, and set "
            f"task.python or {PYTHON} to .venv-verifiers/bin/python."
        )
    found = shutil.which(named)
    if not found:
        raise ValueError(
            f"task.python={named!r} is no program that can be run; name the Python of "
            "an environment that has verifiers, as .venv-verifiers/bin/python."
        )
    return os.path.abspath(found)


@functools.cache
def asked(python: str, setup: str, deadline: float) -> tuple[Side, list[list[int]]]:
    """The process of a taskset, and the prompts of its tasks.

    A prompt is what an episode asks with first; episodes are ended there. The same
    options have one process.

    Raises:
        ValueError: there is none, in a sentence.
    """
    of = json.loads(setup)
    name, side = of["taskset"], Side(python, of)
    try:
        count = side.start()
        return side, prompts_of(side, count, name, deadline)
    except RuntimeError as error:
        side.end()
        raise ValueError(_refused(name, python, str(error))) from None
    except BaseException:
        side.end()
        raise


def prompts_of(side: Side, count: int, name: str, deadline: float) -> list[list[int]]:
    """The first request of an episode of each task.

    Raises:
        ValueError: an episode has none.
    """
    rows: list[list[int]] = []
    progress = file_task.ScanProgress(name)
    while len(rows) < count:
        numbers = range(len(rows), min(len(rows) + AT_ONCE, count))
        episodes = [side.begin(number, 0) for number in numbers]
        end = time.monotonic() + deadline
        for number, episode in zip(numbers, episodes, strict=True):
            said = episode.next(end)
            if isinstance(said, Ended):
                side.close([one.name for one in episodes])
                why = said.fault or "the episode has ended"
                raise ValueError(
                    f"task {number} of {name} asks the policy for nothing "
                    f"({_line(why)}); correct the taskset or task.config, or raise "
                    "task.deadline where it is slow."
                )
            rows.append(said.tokens)
        side.close([one.name for one in episodes])
        progress(len(rows), count)
    return rows


@dataclasses.dataclass(frozen=True)
class Played:
    """The functions of a `Task` on a taskset.

    Attributes:
        name: of the taskset.
        tokenizer: of the checkpoint.
        side: runs its episodes.
        rows: prompts of all tasks, as tokens.
        sides: numbers of the tasks to train on, and of those that are held out.
        deadline: seconds.
    """

    name: str
    tokenizer: text.Tokenizer
    side: Side
    rows: list[list[int]]
    sides: tuple[list[int], list[int]]
    deadline: float

    def task(self) -> Task:
        """The task; targets of its prompts are the numbers of the tasks."""
        training, testing = ({n: self.rows[n] for n in side} for side in self.sides)
        used, count = len(training) + len(testing), len(self.rows)
        out = f" ({count - used} too long)" if used < count else ""
        world = HostEnvironment(
            answer=self.answer, start=self.start, closed=self.side.close
        )
        return environments.posed(
            self.tokenizer,
            training,
            testing,
            world,
            summary=f"{self.name}: {used} of {count} tasks{out}, of which "
            f"{len(testing)} are held out.",
        )

    def start(self) -> None:
        """Start the process, if it runs no more.

        Raises:
            RuntimeError: it does not start, in a sentence.
        """
        try:
            self.side.start()
        except RuntimeError as error:
            raise RuntimeError(_refused(self.name, "its Python", str(error))) from None

    def answer(self, turns: list[Turn]) -> Sequence[Answer | str]:
        """What episodes put behind turns, as `HostEnvironment.answer`.

        All of them go on at the same time.
        """
        episodes = [self._episode(turn) for turn in turns]
        end = time.monotonic() + self.deadline
        pairs = [*zip(turns, episodes, strict=True)]
        said = [
            one if isinstance(one, str) else self._written(t, one, end)
            for t, one in pairs
        ]
        end = time.monotonic() + self.deadline
        answers = [
            one if isinstance(one, str) else self._answer(one, end) for one in said
        ]
        over = [
            one.name
            for one, answer in zip(episodes, answers, strict=True)
            if isinstance(one, Episode) and (isinstance(answer, str) or answer.done)
        ]
        self.side.close(over)
        return answers

    def _episode(self, turn: Turn) -> Episode | str:
        """The episode of a turn; it begins with the first."""
        if turn.state is not None:
            return self.side.episode(turn.state) or "crash"
        try:
            return self.side.begin(int(turn.target), turn.key)
        except RuntimeError as error:
            return f"crash: {_line(str(error))}"

    def _written(self, turn: Turn, episode: Episode, end: float) -> Episode | str:
        """The same, once it knows the turn; a reason, where it wants another."""
        if turn.state is None:
            first = episode.next(end)
            if isinstance(first, Ended):
                return first.fault or "error: the episode has asked for nothing"
            if first.tokens != self.rows[int(turn.target)]:
                return (
                    "error: the episode asks with another prompt than before, and a "
                    "task must have one"
                )
            episode.hold(first)
        episode.write(turn.tokens)
        return episode

    def _answer(self, episode: Episode, end: float) -> Answer | str:
        """What comes behind a turn."""
        said, row = episode.next(end), episode.row
        if isinstance(said, Asked):
            if said.trace != episode.trace:
                return (
                    "error: another agent of the episode, or another attempt, asks the "
                    "policy, and a completion has one"
                )
            if said.tokens[: len(row)] != row:
                pairs = enumerate(zip(row, said.tokens, strict=False))
                at = next((n for n, (a, b) in pairs if a != b), len(said.tokens))
                return (
                    f"error: the episode asks with another history, from token {at} of "
                    f"{len(row)} on, than the policy has read and written"
                )
            episode.hold(said)
            return Answer(episode.name, said.tokens[len(row) :], False, 0.0, {})
        if said.fault:
            return _line(said.fault)
        reward = said.rewards.get(episode.trace)
        if reward is not None and not math.isfinite(reward):
            return f"error: a reward of {reward}"
        return Answer(None, [], True, math.nan if reward is None else reward, {})


def _line(words: str) -> str:
    """Words of the other side, for a reason."""
    return printable(short(words))


def _refused(name: str, python: str, fault: str) -> str:
    """The sentence about a taskset that cannot be loaded."""
    if fault.startswith("task.python="):
        return fault
    if "No module named 'verifiers'" in fault:
        command = f"{python} -m pip install verifiers"
        return f"verifiers is not installed for {python}; run {command}."
    return (
        f"task.taskset={name!r} cannot be loaded ({printable(short(fault))}); correct "
        "task.taskset or task.config, or put its folder on PYTHONPATH."
    )
