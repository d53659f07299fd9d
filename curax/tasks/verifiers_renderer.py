"""How `tasks.verifiers` has conversations rendered; imported beside verifiers alone.

The chat template of a checkpoint is applied once, to what begins a conversation. What
comes later is put behind the tokens that were drawn, which stay as they are: text that
is encoded again may be other tokens, which the policy never drew.
"""

from typing import Any

from renderers.base import RenderedTokens  # pyright: ignore[reportMissingImports]
from renderers.configs import DefaultRendererConfig  # pyright: ignore[reportMissingImports]
from renderers.default import DefaultRenderer  # pyright: ignore[reportMissingImports]

BEFORE = [{"role": "user", "content": "?"}, {"role": "assistant", "content": "?"}]


class Config(DefaultRendererConfig):
    """Options of the renderer; those that it does not name are the template's."""

    ends: tuple[int, ...] = ()  # tokens that end a turn of the policy
    _internal_fields = DefaultRendererConfig._internal_fields | {"ends"}


class Appending(DefaultRenderer):
    """The chat template of any checkpoint, with new turns put behind drawn tokens."""

    config_class = Config

    def get_stop_token_ids(self) -> list[int]:
        """Tokens that end a turn: those of the checkpoint's files, all of them."""
        return sorted({*super().get_stop_token_ids(), *self.config.ends})

    def bridge_to_next_turn(
        self,
        previous_prompt_ids: list[int],
        previous_completion_ids: list[int],
        new_messages: list[Any],
        *,
        tools: list[Any] | None = None,
    ) -> RenderedTokens | None:
        """All tokens so far, then those of new messages, up to the next turn.

        New tokens are what the template puts behind the end of an assistant's turn;
        None where it does not end one by a token that ends a completion.
        """
        ends = {*self.get_stop_token_ids()}
        roles = [message.get("role") or "" for message in new_messages]
        if "assistant" in roles or not ends & {*previous_completion_ids[-1:]}:
            return None
        try:
            # Templates show thoughts of the last turn alone: what is before others
            # is not what it was at the end, but has as many ends of turns.
            asked = self._apply(BEFORE[:1], tools=tools, add_generation_prompt=True)
            number = sum(token in ends for token in asked)
            numbers = range(1, len(new_messages) + 1)
            parts = [[*BEFORE, *new_messages[:n]] for n in numbers]
            sizes = [len(self._apply(part, tools=tools)) for part in parts]
            every = [*BEFORE, *new_messages]
            whole = self._apply(every, tools=tools, add_generation_prompt=True)
        except Exception:  # whatever a template raises
            return None
        places = [place for place, token in enumerate(whole) if token in ends]
        if number >= len(places):
            return None
        begin = places[number] + 1
        of: list[int] = []  # the message that each new token is of
        for number, size in enumerate(sizes):
            of += [number] * (size - begin - len(of))
        of += [-1] * (len(whole) - begin - len(of))
        old = [*previous_prompt_ids, *previous_completion_ids]
        return RenderedTokens(
            token_ids=[*old, *whole[begin:]],
            message_indices=[-1] * len(old) + of,
            message_roles=roles,
        )
