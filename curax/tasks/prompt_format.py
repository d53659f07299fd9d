"""Problem to token ids: prompt, trace to imitate, reference answer; padded rows."""

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from curax.tasks import text
from curax.tasks.layouts import Problem


@dataclasses.dataclass(frozen=True, kw_only=True)
class PromptFormat:
    """The prompt, trace and reference answer of a problem, as token ids.

    Attributes:
        tokenizer: of the checkpoint.
        chat: whether a prompt is a turn of the chat template; None: where there is one.
        system: the system turn; None: none, or what the template puts there.
        template: the prompt or turn, with the question in place of `{question}`. Words
            that are control tokens are these in a prompt, and text in a turn; so they
            are in `trace`, and never in what is filled in.
        thinking: the template's `enable_thinking`; None: the template decides.
        trace: the completion to imitate, with fields of the problem in place of
            `{solution}` and `{answer}`.
        reference: the reference answer, likewise; None: there is none.
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
        """The ids of a problem's prompt, up to where the completion begins."""
        if self.uses_chat:
            return self.encode_turn(self._question(problem), system=self.system)
        fields = {"question": problem.question}
        form = self.template
        if self.system:
            form, fields = "{system}\n\n" + form, {"system": self.system} | fields
        return [*self.tokenizer.backend.prefix, *self.tokenizer.filled(form, fields)]

    def encode_turn(self, content: str, *, system: str | None) -> list[int]:
        """The ids of a user turn after a system turn; of plain text without a chat."""
        if not self.uses_chat:
            before = f"{system}\n\n" if system else ""
            return self.tokenizer.prompt(before + content)
        return self._chat(_messages(content, system))

    def reply(self, content: str, longest: int) -> list[int]:
        """The ids of an answer to a turn of the policy, up to its next turn.

        In a chat it is a turn of the user's, with what the template puts around it; in
        plain text it is the text alone.

        Args:
            content: text; never a control token.
            longest: tokens of it that are kept.

        Raises:
            ValueError: what `encode` and `chat` of a tokenizer raise; the template ends
                turns of the policy by no token that ends a completion.
        """
        ids = self.tokenizer.encode(content, begins=False)
        if len(ids) > longest:
            ids = ids[:longest]
            content = self.tokenizer.decode(ids)
        if not self.uses_chat:
            return ids
        before = _messages("?", self.system)
        asked = self._chat(before)
        said = {"role": "assistant", "content": "?"}
        whole = self._chat([*before, said, {"role": "user", "content": content}])
        ends = [i for i, token in enumerate(whole) if token in self.tokenizer.end]
        number = sum(token in self.tokenizer.end for token in asked)
        if len(ends) <= number:
            raise ValueError(
                f"{self.tokenizer.template_file}: the chat template ends no turn of "
                "the assistant by a token that ends a completion, so nothing can be "
                "put behind it; correct it, or set task.chat to False."
            )
        return whole[ends[number] + 1 :]

    def may_fit(self, text: str, tokens: int) -> bool:
        """Whether a text may have so few tokens; one that has not is not encoded.

        No token has more characters than the longest of the vocabulary. Text that a
        tokenizer drops, as white space, counts too.
        """
        return len(text) <= tokens * self.tokenizer.longest_token

    def tail(self, problem: Problem) -> int:
        """Number of the prompt's tokens after the place where a hint is inserted.

        In a chat that place is the end of the user's text; in plain text it is the end
        of the question. Tokens are not cut: where one holds that end and more, as `?`
        and a line break may be one token, the place is after that token.

        Raises:
            ValueError: the chat template does not show the turn.
        """
        if self.uses_chat:
            turns = _messages(self._question(problem), self.system)
            return self.tokenizer.tail(turns, options=self._template_options)
        behind = self.template.rpartition("{question}")[2]
        suffix = self.tokenizer.filled(behind, {}, begins=False)
        return text.common_suffix_length(self.prompt(problem), suffix)

    def trace_ids(self, problem: Problem) -> list[int]:
        """The ids of the trace and the end; empty where the problem lacks a field."""
        fields = _fields(self.trace, problem)
        if fields is None:
            return []
        return [*self.tokenizer.filled(self.trace, fields), self.end]

    def reference_ids(self, problem: Problem) -> list[int]:
        """The ids of the reference answer as it follows other text, and the end.

        Empty where there is none, or where the problem lacks a field of it.
        """
        form = self.reference
        fields = None if form is None else _fields(form, problem)
        if form is None or fields is None:
            return []
        whole = text.put(form, fields)
        return [*self.tokenizer.encode(whole, begins=False), self.end]

    def padded(
        self, rows: Sequence[Sequence[int]], width: int, *, left: bool = False
    ) -> tuple[Any, Any]:
        """Rows of ids as `[n, width]` tokens and mask; see `padded_rows`."""
        return padded_rows(rows, width, pad=self.tokenizer.pad, left=left)

    @property
    def description(self) -> dict[str, Any]:
        """The options that prompts depend on, as `Task.prompt_form`."""
        return {
            "template": self.template,
            "system": self.system,
            "chat": self.uses_chat,
            "thinking": self.thinking if self.uses_chat else None,
        }

    @property
    def uses_chat(self) -> bool:
        """Whether a chat template is used."""
        return self.tokenizer.template is not None if self.chat is None else self.chat

    @functools.cached_property
    def end(self) -> int:
        """The end-of-sequence token of traces and reference answers.

        Raises:
            ValueError: the tokenizer names none.
        """
        name = self.tokenizer.named_tokens.get("eos_token")
        if name is not None:
            return self.tokenizer.backend.ids[name]
        if not self.tokenizer.end:
            raise ValueError(
                f"{self.tokenizer.path} names no token that ends a completion; give "
                "tokenizer_config.json an eos_token."
            )
        return self.tokenizer.end[0]

    def _chat(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        return self.tokenizer.chat(messages, options=self._template_options)

    def _question(self, problem: Problem) -> str:
        return self.template.replace("{question}", problem.question)

    @property
    def _template_options(self) -> dict[str, Any]:
        return {} if self.thinking is None else {"enable_thinking": self.thinking}


def _messages(content: str, system: str | None) -> list[dict[str, str]]:
    messages = [] if system is None else [{"role": "system", "content": system}]
    return [*messages, {"role": "user", "content": content}]


def _fields(form: str, problem: Problem) -> dict[str, str] | None:
    """The fields of the problem that a form names; None where the problem lacks one."""
    fields = dict[str, str]()
    for name in ("solution", "answer"):
        if f"{{{name}}}" in form:
            if (value := getattr(problem, name)) is None:
                return None
            fields[name] = value
    return fields


def padded_rows(
    rows: Sequence[Sequence[int]], width: int, *, pad: int, left: bool
) -> tuple[Any, Any]:
    """`[n, width]` int32 tokens and bool mask; padded on the left or on the right."""
    tokens = np.full((len(rows), width), pad, np.int32)
    mask = np.zeros((len(rows), width), bool)
    for i, row in enumerate(rows):
        if row:
            place = slice(width - len(row), width) if left else slice(0, len(row))
            tokens[i, place], mask[i, place] = row, True
    return tokens, mask
