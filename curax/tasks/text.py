"""Text to token ids and back, by the tokenizer of a Hugging Face checkpoint.

    "2 + 2 = ?"  ->  <|im_start|> user ... 2 + 2 = ? <|im_end|> ... assistant  ->  ids

What a checkpoint directory says is taken from it: how text is cut into tokens, the chat
template, which tokens end a completion. Only one thing is stricter here: text is never
more than text. A prompt may spell out `<|im_end|>`; its encoding then spells it out
too, in ordinary tokens, and only the chat template makes control tokens. To that end
such a word is cut after its first character, and the parts are encoded separately.

A control token is any token that was added to the vocabulary (`<think>` is one), but
for single characters and runs of spaces: these are how some tokenizers write text.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice, pairwise, takewhile
from pathlib import Path
from typing import Any

from curax.settings import files
from curax.tasks.engines import (
    MARKS,
    NAMED,
    Fast,
    Pieces,
    json_of,
    short,
    unreadable,
    words_of,
)
from curax.tasks.templates import TemplateError, render

MOST_IDS = 2**24  # as many as a vocabulary of `curax.models` may have


@dataclass(frozen=True)
class Tokenizer:
    """The tokenizer of a checkpoint; equal and picklable by its path.

    Attributes:
        path: the checkpoint directory.
        size: ids are below this, those of added tokens too.
        pad: what fills rows up; nothing depends on its being a token of its own.
        end: ids that end a completion, in order; the model stops at any of them.
        bos: the id that begins a text, where there is one.
        template: the chat template, where there is one.
    """

    path: Path
    size: int
    pad: int
    end: tuple[int, ...]
    bos: int | None
    template: str | None = field(repr=False)
    template_file: Path = field(repr=False)
    words: Mapping[str, str] = field(repr=False, compare=False)  # for the template
    hidden: frozenset[int] = field(repr=False, compare=False)  # not shown by decode
    engine: Any = field(repr=False, compare=False)

    def __reduce__(self):
        return load, (self.path,)

    def encode(self, text: str, *, begins: bool = True) -> list[int]:
        """The ids of ordinary text; none of them is a control token's.

        Args:
            text: whatever it spells out.
            begins: as at the beginning; False: as it is read behind other text, where
                no tokenizer puts a space before it.

        Raises:
            ValueError: half a character (a lone surrogate), or one that the tokenizer
                knows as a control token only.
        """
        (mark,) = _marks([text], 1)
        return self._ids("" if begins else mark, self._cut(text, mark), mark=mark)

    def control(self, text: str) -> list[int]:
        """The ids of text behind other text; control words in it are control tokens."""
        return self.engine.encode(text, begins=False)

    def decode(self, ids: Iterable[int], *, control: bool = False) -> str:
        """The text that ids stand for.

        Args:
            ids: token ids; those that stand for nothing are left out.
            control: show what is hidden otherwise: special tokens and those in `end`.
                Added tokens that are not special, `</think>` mostly, always show.
        """
        hidden = () if control else self.hidden
        known = (i for i in map(int, ids) if 0 <= i < self.size)
        return self.engine.decode([i for i in known if i not in hidden])

    def prompt(self, text: str) -> list[int]:
        """The ids of a text that a base model is to go on with.

        It begins as the tokenizer begins a text, with `bos` if that is its way, and
        nothing ends it. Raises what `encode` raises.
        """
        return [*self.engine.opening, *self.encode(text)]

    def chat(
        self,
        messages: Sequence[Mapping[str, str]],
        *,
        options: Mapping[str, Any] = {},
    ) -> list[int]:
        """The ids of a conversation in the chat template, up to where the model speaks.

        Equal to `apply_chat_template(..., add_generation_prompt=True)` of transformers
        if no message spells out a control token.

        Args:
            messages: `role` and `content` of each, and what else the template reads.
            options: given to the template as JSON has them, `enable_thinking` for
                example. A template may read the clock; `date_string` fixes it in most
                that do.

        Raises:
            ValueError: there is no template, it fails, or takes too much time or
                memory; a message is not text, or one that `encode` refuses; JSON cannot
                hold an option.
        """
        rendered, mark, _ = self._rendered(messages, options)
        return self._ids(rendered, mark=mark)

    def tail(
        self,
        messages: Sequence[Mapping[str, str]],
        *,
        options: Mapping[str, Any] = {},
    ) -> int:
        """How many of the ids of `chat` stand behind the text of the last message.

        Where a token holds the end of that text and more, those behind that token.

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
        return same_end(
            self.chat(messages, options=options), self._ids(mark, behind, mark=mark)
        )

    def _rendered(
        self,
        messages: Sequence[Mapping[str, str]],
        options: Mapping[str, Any],
        *,
        ends: bool = False,
    ) -> tuple[str, str, str]:
        """The conversation in the template, the mark of its cuts, and another mark.

        The other stands at the end of the last message if its end is asked for, before
        white space, which templates may take off.
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
        said = [text for message in messages for text in message.values()]
        given = _as_json(options)
        mark, place = _marks([self.template, given, *said], 2)
        cut = [{k: self._cut(v, mark) for k, v in m.items()} for m in messages]
        if ends:
            text = cut[-1]["content"]
            end = len(text.rstrip())
            cut[-1]["content"] = text[:end] + place + text[end:]
        context = {"tools": None, "documents": None, **self.words, **options}
        more = {"messages": cut, "add_generation_prompt": True}
        try:
            rendered = render(self.template, {**context, **more})
        except TemplateError as error:
            at = f", line {error.line}" if error.line else ""
            raise ValueError(
                f"{self.template_file}{at}: the chat template fails with {error}; give "
                "it the messages and options it asks for, or correct it."
            ) from None
        return rendered, mark, place

    def _cut(self, text: str, mark: str) -> str:
        """The text with marks inside all that would become a control token."""
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise ValueError(
                f"character {error.start} of a text is {text[error.start]!a}, half a "
                "character; remove it."
            ) from error
        places = [0, *(start + 1 for start, _ in self.engine.spelled(text)), len(text)]
        parts = [text[a:b] for a, b in pairwise(places)]
        return mark.join(self._apart(part, mark) for part in parts)

    def _apart(self, text: str, mark: str) -> str:
        """The same for text that spells no control token, yet may be read as one.

        Normalization makes `<s>` of wide letters, too. Halving finds the place.
        """
        if self.engine.guarded.isdisjoint(self.engine.encode(text)):
            return text
        if len(text) == 1:
            raise ValueError(
                f"{text!a} in a text is a control token of {self.path}, which has no "
                "other way to write it; remove it from the text."
            )
        half = len(text) // 2
        return mark.join(self._apart(t, mark) for t in (text[:half], text[half:]))

    def _ids(self, *texts: str, mark: str) -> list[int]:
        """The ids of text with marks: nothing is read across a mark."""
        first, *rest = "".join(texts).split(mark)
        ids = self.engine.encode(first)
        for part in rest:
            # Up to the next control token, the template's, it goes on inside a text.
            inside = next(self.engine.spelled(part), (len(part), ""))[0]
            ids += self.engine.encode(part[:inside], begins=False)
            ids += self.engine.encode(part[inside:])
        return ids


def load(path: str | Path) -> Tokenizer:
    """The tokenizer of a checkpoint in the layout of Hugging Face.

    Read are `tokenizer.json`, or else `tokenizer.model` or the only `*.model`; and, if
    they are there, `tokenizer_config.json`, `special_tokens_map.json`, `config.json`,
    `generation_config.json`, and `chat_template.jinja`, which goes before the template
    in `tokenizer_config.json`.

    Args:
        path: the directory.

    Returns:
        The tokenizer. `end` is what any of the files names as end of a text.

    Raises:
        ValueError: something is missing or unreadable.
    """
    path = Path(path)
    if not path.is_dir():
        raise ValueError(f"{path} is no directory; name that of a checkpoint.")
    config = json_of(path / "tokenizer_config.json")
    engine = _engine(path, config)
    size = 1 + max(engine.ids.values(), default=-1)
    if size > MOST_IDS:
        raise ValueError(
            f"{engine.path} has the id {size - 1}, but all must be below {MOST_IDS}; "
            "copy it from the checkpoint again."
        )
    words = engine.words | words_of(path / "special_tokens_map.json")
    words |= words_of(path / "tokenizer_config.json")
    named = {}
    for name in words.keys() & set(NAMED):
        if words[name] not in engine.ids:
            raise ValueError(
                f"{path}: {name}={short(words[name])} is no token of "
                f"{engine.path.name}; name one that is in tokenizer_config.json."
            )
        named[name] = engine.ids[words[name]]
    configs = [path / "config.json", path / "generation_config.json"]
    ends = {i for file in configs for i in _ends(file, size)}
    end = tuple(sorted(ends | {i for n, i in named.items() if n == "eos_token"}))
    special = (engine.ids[word] for word in words.values() if word in engine.ids)
    template, template_file = _template(path, config)
    return Tokenizer(
        path=path,
        size=size,
        pad=named.get("pad_token", end[0] if end else 0),
        end=end,
        bos=named.get("bos_token"),
        template=template,
        template_file=template_file,
        words=words,
        hidden=frozenset({*engine.hidden, *end, *special}),
        engine=engine,
    )


def same_end(ids: Sequence[int], others: Sequence[int]) -> int:
    """How many ids at the end of both are the same."""
    pairs = zip(reversed(ids), reversed(others), strict=False)
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))


# Files of a checkpoint


def _engine(path: Path, config: Mapping[str, Any]) -> Fast | Pieces:
    if (path / "tokenizer.json").exists():
        return Fast(path / "tokenizer.json")
    models = [path / "tokenizer.model"]
    if not models[0].exists():
        models = sorted(path.glob("*.model"))
    if len(models) != 1:
        raise ValueError(
            f"{path} holds neither tokenizer.json nor tokenizer.model, and "
            f"{len(models)} *.model; copy the checkpoint's tokenizer there."
        )
    return Pieces(models[0], config)


def _template(path: Path, config: Mapping[str, Any]) -> tuple[str | None, Path]:
    """The chat template, and the file it is from or may be put in."""
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


def _ends(path: Path, size: int) -> list[int]:
    """What a model's config names as the ids that end a completion."""
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
    """The options of a template, written out."""
    try:
        return json.dumps(dict(options), ensure_ascii=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise ValueError(
            f"options: {error}; give the template what JSON can hold."
        ) from None


def _marks(texts: Iterable[str], count: int) -> list[str]:
    """So many characters that are in none of the texts."""
    held = set().union(*texts)
    return list(islice((mark for mark in map(chr, MARKS) if mark not in held), count))
