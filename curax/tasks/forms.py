"""Problems as rows of tokens: prompts, solutions, reference answers."""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import numpy as np

from curax.tasks import text
from curax.tasks.layouts import Problem


@dataclasses.dataclass(frozen=True, kw_only=True)
class Form:
    """How a problem becomes a prompt, and its reference solution a completion.

    Attributes:
        tokenizer: of the checkpoint.
        chat: as a turn of the checkpoint's chat template, or as plain text. None: as a
            turn where there is a template.
        system: the system turn; None: none, or what the template puts there.
        template: the prompt or turn, with the question in place of `{question}`.
        thinking: what the template is told as `enable_thinking`; None: nothing.
        trace: the completion to imitate, with what the file holds in place of
            `{solution}` and `{answer}`.
        reference: the answer to be found likely, likewise; None: there is none.
    """

    tokenizer: text.Tokenizer
    chat: bool | None = None
    system: str | None = None
    template: str = "{question}"
    thinking: bool | None = None
    trace: str = "{solution}"
    reference: str | None = None

    def __post_init__(self) -> None:
        if "{question}" not in self.template:
            raise ValueError(
                f"task.template={self.template!r} does not say where the question "
                "stands; put {question} into it."
            )
        if self.chat and self.tokenizer.template is None:
            raise ValueError(
                f"task.chat=True, and {self.tokenizer.path} has no chat template; set "
                "task.chat to False."
            )

    def prompt(self, problem: Problem) -> list[int]:
        """Tokens of the prompt, up to where the completion begins."""
        return self.asked(self._question(problem), system=self.system)

    def asked(self, said: str, *, system: str | None) -> list[int]:
        """Tokens of any text in the place of a prompt, behind a system turn."""
        if not self.in_turns:
            before = f"{system}\n\n" if system else ""
            return self.tokenizer.prompt(before + said)
        return self.tokenizer.chat(_turns(said, system), options=self._told)

    def tail(self, problem: Problem) -> int:
        """Tokens of the prompt behind the place of a hint.

        In a chat that place is the end of the user's turn; in plain text it is the end
        of the question, and so of the prompt if `template` has nothing behind it. The
        prompt's tokens are not cut: where one holds that end and more, as `?` and a
        line break may be one token, the place is behind that token.

        Raises:
            ValueError: the chat template does not show the turn.
        """
        if self.in_turns:
            turns = _turns(self._question(problem), self.system)
            return self.tokenizer.tail(turns, options=self._told)
        behind = self.tokenizer.encode(
            self.template.rpartition("{question}")[2], begins=False
        )
        return text.same_end(self.prompt(problem), behind)

    def completion(self, problem: Problem) -> list[int]:
        """Tokens of the reference solution and the end; none where there is none."""
        said = _filled(self.trace, problem)
        return [] if said is None else [*self.tokenizer.encode(said), self.end]

    def answer(self, problem: Problem) -> list[int]:
        """Tokens of the reference answer, as behind other text, and the end.

        None where the file does not hold what is in it.
        """
        said = None if self.reference is None else _filled(self.reference, problem)
        if said is None:
            return []
        return [*self.tokenizer.encode(said, begins=False), self.end]

    @property
    def described(self) -> dict[str, Any]:
        """What prompts look like, as `Task.prompt_form`."""
        return {
            "template": self.template,
            "system": self.system,
            "chat": self.in_turns,
            "thinking": self.thinking if self.in_turns else None,
        }

    @property
    def in_turns(self) -> bool:
        """Whether a chat template is used."""
        return self.tokenizer.template is not None if self.chat is None else self.chat

    @functools.cached_property
    def end(self) -> int:
        """The token that ends what is imitated.

        Raises:
            ValueError: the tokenizer names none.
        """
        name = self.tokenizer.words.get("eos_token")
        if name is not None:
            return self.tokenizer.engine.ids[name]
        if not self.tokenizer.end:
            raise ValueError(
                f"{self.tokenizer.path} names no token that ends a completion; give "
                "tokenizer_config.json an eos_token."
            )
        return self.tokenizer.end[0]

    def _question(self, problem: Problem) -> str:
        return self.template.replace("{question}", problem.question)

    @property
    def _told(self) -> dict[str, Any]:
        """The options of the chat template."""
        return {} if self.thinking is None else {"enable_thinking": self.thinking}


def _turns(said: str, system: str | None) -> list[dict[str, str]]:
    turns = [] if system is None else [{"role": "system", "content": system}]
    return [*turns, {"role": "user", "content": said}]


def _filled(said: str, problem: Problem) -> str | None:
    """A text with what the file holds in it; None where the file does not."""
    for name in ("solution", "answer"):
        value = getattr(problem, name)
        if value is None and f"{{{name}}}" in said:
            return None
        said = said.replace(f"{{{name}}}", str(value))
    return said


def padded(
    rows: Sequence[Sequence[int]], width: int, *, pad: int, left: bool
) -> tuple[Any, Any]:
    """`[n, width]` int32 tokens and their mask; padding is on the left or right."""
    tokens = np.full((len(rows), width), pad, np.int32)
    mask = np.zeros((len(rows), width), bool)
    for i, row in enumerate(rows):
        if row:
            place = slice(width - len(row), width) if left else slice(0, len(row))
            tokens[i, place], mask[i, place] = row, True
    return tokens, mask
