"""Text to token ids and back, by the tokenizer of a Hugging Face checkpoint.

    "2 + 2 = ?"  ->  <|im_start|> user ... 2 + 2 = ? <|im_end|> ... assistant  ->  ids

Vocabulary, chat template and the tokens that end a completion are the checkpoint's.
One rule is stricter: text never becomes a control token. A prompt that contains
`<|im_end|>` is encoded as ordinary tokens which spell it, and only the chat template
makes control tokens, or a form of the task that is no turn of one. To that end such a
word is cut after its first character by a mark, a character that the text does not
contain, and its parts are encoded apart.

A control token is any token that was added to the vocabulary (`<think>` is one), but
for single characters and runs of spaces, by which some tokenizers write text.
"""

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import islice, pairwise, takewhile
from pathlib import Path
from typing import Any

from curax import hub
from curax.settings import files
from curax.tasks import child, sandbox
from curax.tasks.tokenizer_backends import (
    MODEL_BYTES,
    NAMED_TOKENS,
    PRIVATE_USE,
    Backend,
    json_of,
    make,
    named_tokens,
    short,
    unreadable,
    vocabulary,
)

MAX_VOCAB = 2**24  # ids, as of a model of `curax.models`
TRY_SECONDS = 5.0  # in which a small tokenizer is tried; one of 14 MB took 2 s of 12
_TRIED: set[tuple[Any, ...]] = set()  # tokenizers that may be run


@dataclass(frozen=True)
class Tokenizer:
    """The tokenizer of a checkpoint, compared and pickled by its path.

    Attributes:
        path: the checkpoint directory.
        size: all ids are below this, those of added tokens included.
        pad: id that fills rows up; it may be that of a token in use.
        end: ids that end a completion, ascending.
        bos: the id that begins a text; None: there is none.
        template: the chat template; None: there is none.
        template_file: file of the chat template, or where one would be put.
        named_tokens: tokens by their names, as `bos_token`, for the chat template.
        hidden: ids that `decode` leaves out.
        backend: the library that encodes and decodes.
    """

    path: Path
    size: int
    pad: int
    end: tuple[int, ...]
    bos: int | None
    template: str | None = field(repr=False)
    template_file: Path = field(repr=False)
    named_tokens: Mapping[str, str] = field(repr=False, compare=False)
    hidden: frozenset[int] = field(repr=False, compare=False)
    backend: Backend = field(repr=False, compare=False)

    def __reduce__(self):
        return load, (self.path,)

    @cached_property
    def longest_token(self) -> int:
        """Characters of the longest token."""
        return max(map(len, self.backend.ids), default=0)

    def encode(self, text: str, *, begins: bool = True) -> list[int]:
        """The ids of ordinary text, none of them a control token's.

        Args:
            text: any text.
            begins: whether the text begins a prompt; False: it follows other
                text, so that no space is put before it.

        Raises:
            ValueError: half a character (a lone surrogate), or one that the tokenizer
                knows as a control token only.
        """
        (mark,) = _marks([text], 1)
        return self._ids("" if begins else mark, self._cut(text, mark), mark=mark)

    def filled(
        self, form: str, fields: Mapping[str, str], *, begins: bool = True
    ) -> list[int]:
        """The ids of a form with a text in place of each `{name}`, filled in once.

        As in a chat template, control words of the form are control tokens, and texts
        have none. A form without such words gives what `encode` of the whole gives.

        Args:
            form: of the prompt or the trace; its author knows the tokenizer.
            fields: texts by name.
            begins: as of `encode`.

        Raises:
            ValueError: as `encode`.
        """
        (mark,) = _marks([form, *fields.values()], 1)
        words = [*self.backend.find_control(form)]
        if not words:
            return self.encode(put(form, fields), begins=begins)
        cut = {name: self._cut(text, mark) for name, text in fields.items()}
        if len([*self.backend.find_control(put(form, cut))]) > len(words):
            # One word more, of a text and what is beside it: there it is cut, too.
            cut = {name: f"{mark}{text}{mark}" for name, text in cut.items()}
        return self._ids("" if begins else mark, put(form, cut), mark=mark)

    def control(self, text: str) -> list[int]:
        """The ids of text that follows other text, control words as control tokens."""
        return self.backend.encode(text, begins=False)

    def decode(self, ids: Iterable[int], *, control: bool = False) -> str:
        """The text of token ids.

        Args:
            ids: token ids; unknown ones are left out.
            control: whether special tokens and those in `end` are shown. Added tokens
                that are not special, as `</think>` mostly, always are.
        """
        hidden = () if control else self.hidden
        known = (i for i in map(int, ids) if 0 <= i < self.size)
        return self.backend.decode([i for i in known if i not in hidden])

    def prompt(self, text: str) -> list[int]:
        """The ids of a plain-text prompt: the tokenizer's prefix, then the text.

        Raises what `encode` raises.
        """
        return [*self.backend.prefix, *self.encode(text)]

    def chat(
        self, messages: Sequence[Mapping[str, str]], *, options: Mapping[str, Any] = {}
    ) -> list[int]:
        """The ids of a conversation in the chat template, up to the model's turn.

        Equal to `apply_chat_template(..., add_generation_prompt=True)` of transformers
        if no message spells out a control token.

        Args:
            messages: `role` and `content` of each, and other fields of the template.
            options: variables of the template, `enable_thinking` for example, as JSON.
                To one that reads the clock it is always the same day, but most such
                read `date_string` instead if it is given.

        Raises:
            ValueError: there is no template, it fails, or takes too much time or
                memory; a message is not text, or one that `encode` refuses; JSON cannot
                hold an option.
        """
        rendered, mark, _ = self._rendered(messages, options)
        return self._ids(rendered, mark=mark)

    def tail(
        self, messages: Sequence[Mapping[str, str]], *, options: Mapping[str, Any] = {}
    ) -> int:
        """Number of the ids of `chat` after the text of the last message.

        A token that holds the end of that text and more does not count.

        Args:
            messages: as of `chat`.
            options: likewise.

        Raises:
            ValueError: what `chat` raises; the template does not show that text.
        """
        rendered, mark, place = self._rendered(messages, options, ends=True)
        _, found, behind = rendered.rpartition(place)
        if not found:
            raise ValueError(
                f"{self.template_file}: the chat template does not show the last "
                "message as it is, so that nothing can be put behind it; correct it."
            )
        suffix = self._ids(mark, behind, mark=mark)
        return common_suffix_length(self.chat(messages, options=options), suffix)

    def _rendered(
        self,
        messages: Sequence[Mapping[str, str]],
        options: Mapping[str, Any],
        *,
        ends: bool = False,
    ) -> tuple[str, str, str]:
        """The rendered conversation, the mark of its cuts, and a second mark.

        If `ends`, the second mark stands at the end of the last message, before any
        white space, which templates may strip.
        """
        if self.template is None:
            raise ValueError(
                f"{self.path} has no chat template; use prompt, or add a "
                f"{self.template_file.name}."
            )
        for i, message in enumerate(messages):
            for name in dict.fromkeys(["role", "content", *message]):
                if not isinstance(value := message.get(name), str):
                    raise ValueError(
                        f"message {i}: {name}={value!r} is no text; give a string."
                    )
        for name in {"messages", "add_generation_prompt"} & options.keys():
            raise ValueError(f"options: {name} is set by chat itself; leave it out.")
        texts = [text for message in messages for text in message.values()]
        mark, place = _marks([self.template, _as_json(options), *texts], 2)
        cut = [{k: self._cut(v, mark) for k, v in m.items()} for m in messages]
        if ends:
            text = cut[-1]["content"]
            end = len(text.rstrip())
            cut[-1]["content"] = text[:end] + place + text[end:]
        context = {"tools": None, "documents": None, **self.named_tokens, **options}
        more = {"messages": cut, "add_generation_prompt": True}
        reply = child.ask("render", self.template, {**context, **more})
        if error := reply.get("error"):
            at = f", line {reply['line']}" if reply.get("line") else ""
            raise ValueError(
                f"{self.template_file}{at}: the chat template fails with {error}; give "
                "it the messages and options it asks for, or correct it."
            )
        return reply["text"], mark, place

    def _cut(self, text: str, mark: str) -> str:
        """The text with a mark inside everything that would be a control token."""
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise ValueError(
                f"character {error.start} of a text is {text[error.start]!a}, half a "
                "character; remove it."
            ) from error
        places = [
            0,
            *(start + 1 for start, _ in self.backend.find_control(text)),
            len(text),
        ]
        parts = [text[a:b] for a, b in pairwise(places)]
        return mark.join(self._cut_normalized(part, mark) for part in parts)

    def _cut_normalized(self, text: str, mark: str) -> str:
        """The text with marks inside what normalization makes a control token.

        It makes `<s>` of wide letters, for example. The place is found by bisection.
        """
        if self.backend.forbidden.isdisjoint(self.backend.encode(text)):
            return text
        if len(text) == 1:
            raise ValueError(
                f"{text!a} in a text is a control token of {self.path}, which has no "
                "other way to write it; remove it from the text."
            )
        half = len(text) // 2
        halves = (text[:half], text[half:])
        return mark.join(self._cut_normalized(part, mark) for part in halves)

    def _ids(self, *texts: str, mark: str) -> list[int]:
        """The ids of text with marks; no token crosses a mark."""
        first, *rest = "".join(texts).split(mark)
        ids = self.backend.encode(first)
        for part in rest:
            # Up to the template's next control token it is the inside of a text.
            inside = next(self.backend.find_control(part), (len(part), ""))[0]
            ids += self.backend.encode(part[:inside], begins=False)
            ids += self.backend.encode(part[inside:])
        return ids


def load(path: str | Path) -> Tokenizer:
    """The tokenizer of a checkpoint in the layout of Hugging Face.

    It is read from `tokenizer.json`, or else `tokenizer.model` or the only `*.model`;
    and, where they exist, `tokenizer_config.json`, `special_tokens_map.json`,
    `config.json`, `generation_config.json`, and `chat_template.jinja`, which precedes
    the template in `tokenizer_config.json`.

    Args:
        path: the directory, or a name on the hub.

    Returns:
        The tokenizer. `end` holds the end tokens that any of these files names.

    Raises:
        ValueError: something is missing or unreadable.
    """
    path = hub.checkpoint(path, weights=False)
    if not path.is_dir():
        raise ValueError(f"{path} is no directory; name that of a checkpoint.")
    config = json_of(path / "tokenizer_config.json")
    _try(path)
    backend = make(path)
    size = 1 + max(backend.ids.values(), default=-1)
    if size > MAX_VOCAB:
        raise ValueError(
            f"{backend.path} has the id {size - 1}, but all must be below {MAX_VOCAB}; "
            "copy it from the checkpoint again."
        )
    named = backend.named_tokens | named_tokens(path / "special_tokens_map.json")
    named |= named_tokens(path / "tokenizer_config.json")
    ids = {}
    for name in named.keys() & set(NAMED_TOKENS):
        if named[name] not in backend.ids:
            raise ValueError(
                f"{path}: {name}={short(named[name])} is no token of "
                f"{backend.path.name}; name one that is in tokenizer_config.json."
            )
        ids[name] = backend.ids[named[name]]
    configs = [path / "config.json", path / "generation_config.json"]
    ends = {i for file in configs for i in _end_ids(file, size)}
    end = tuple(sorted(ends | {i for n, i in ids.items() if n == "eos_token"}))
    special = (backend.ids[token] for token in named.values() if token in backend.ids)
    template, template_file = _template(path, config)
    return Tokenizer(
        path=path,
        size=size,
        pad=ids.get("pad_token", end[0] if end else 0),
        end=end,
        bos=ids.get("bos_token"),
        template=template,
        template_file=template_file,
        named_tokens=named,
        hidden=frozenset({*backend.hidden, *end, *special}),
        backend=backend,
    )


def common_suffix_length(a: Sequence[int], b: Sequence[int]) -> int:
    """Length of the longest common suffix."""
    pairs = zip(reversed(a), reversed(b), strict=False)
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))


# Files of a checkpoint


def _try(folder: Path) -> None:
    """Try a tokenizer in the child process, once for each state of its file.

    Raises:
        ValueError: it cannot be read, or takes too much time or memory.
    """
    file = vocabulary(folder)
    status = file.stat()
    state = (str(file.absolute()), status.st_ino, status.st_mtime_ns, status.st_size)
    if state in _TRIED:
        return
    size = min(status.st_size, MODEL_BYTES)
    reply = child.ask(
        "probe",
        str(folder.absolute()),
        seconds=TRY_SECONDS + size / 2**21,
        space=sandbox.SPACE + 16 * size,
    )
    if error := reply.get("error"):
        raise ValueError(f"{file} fails with {error}; take another checkpoint's.")
    if said := reply.get("said"):
        raise ValueError(said.replace(str(folder.absolute()), str(folder)))
    _TRIED.add(state)


def _template(path: Path, config: Mapping[str, Any]) -> tuple[str | None, Path]:
    """The chat template or None, and the file that holds it or would hold it."""
    file = path / "chat_template.jinja"
    if file.exists():
        try:
            return files.read(file).decode(), file
        except (OSError, ValueError) as error:
            raise unreadable(file, error) from error
    template = config.get("chat_template")
    if template is None:
        return None, file
    if isinstance(template, list):
        named = [t for t in template if isinstance(t, dict)]
        texts = [t.get("template") for t in named if t.get("name") == "default"]
        template = texts[0] if texts else None
    file = path / "tokenizer_config.json"
    if not isinstance(template, str):
        raise ValueError(
            f"{file}: chat_template must be a text, or a list of named ones with "
            '"default" among them; correct it.'
        )
    return template, file


def _end_ids(path: Path, size: int) -> list[int]:
    """The `eos_token_id` of a model's config, as a list of checked ids."""
    value = json_of(path).get("eos_token_id")
    ids = value if isinstance(value, list) else [] if value is None else [value]
    for i in ids:
        if type(i) is not int or not 0 <= i < size:
            raise ValueError(
                f"{path}: eos_token_id={short(value)} must hold ids of the tokenizer, "
                f"which are below {size}; correct it."
            )
    return ids


def _as_json(options: Mapping[str, Any]) -> str:
    """The options of a template as JSON text."""
    try:
        return json.dumps(dict(options), ensure_ascii=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise ValueError(
            f"options: {error}; give the template what JSON can hold."
        ) from None


def put(form: str, fields: Mapping[str, str]) -> str:
    """The form with fields in place of their names, in one pass: they may have some."""
    if not fields:
        return form
    names = "|".join(re.escape(f"{{{name}}}") for name in fields)
    return re.sub(names, lambda found: fields[found[0][1:-1]], form)


def _marks(texts: Iterable[str], count: int) -> list[str]:
    """The first `count` private-use characters that are in none of the texts."""
    used = set().union(*texts)
    return list(islice((c for c in map(chr, PRIVATE_USE) if c not in used), count))
