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
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from functools import cached_property, lru_cache
from itertools import chain, groupby, pairwise, takewhile
from pathlib import Path
from typing import Any

START, END, PAD = "<|im_start|>", "<|im_end|>", "<|endoftext|>"
TURNS = """\
{% for message in messages %}
<|im_start|>{{ message.role }}
{{ message.content }}<|im_end|>
{% endfor %}
{% if add_generation_prompt %}
<|im_start|>assistant
{% endif %}"""
NAMED = ("bos_token", "eos_token", "pad_token")
# Unicode gives no meaning to these, so a cut can be marked by one that no text holds.
MARKS = range(0xF0000, 0x10FFFE)
SPACE = "▁"  # how sentencepiece writes a space


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

    def encode(self, text: str) -> list[int]:
        """The ids of ordinary text; none of them is a control token's.

        Raises:
            ValueError: half a character (a lone surrogate), or one that the tokenizer
                knows as a control token only.
        """
        mark = _mark([text])
        return self._ids(self._cut(text, mark), mark)

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
            options: given to the template as they are, `enable_thinking` for example.
                A template may read the clock; `date_string` fixes it in most that do.

        Raises:
            ValueError: there is no template or it fails; a message is not text, or one
                that `encode` refuses.
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
        given = json.dumps(dict(options), ensure_ascii=False, default=str)
        mark = _mark([self.template, given, *said])
        cut = [{k: self._cut(v, mark) for k, v in m.items()} for m in messages]
        context = {"tools": None, "documents": None, **self.words, **options}
        try:
            rendered = _compiled(self.template).render(
                context, messages=cut, add_generation_prompt=True
            )
        except Exception as error:  # a template may fail in any way that code may
            line = getattr(error, "lineno", None)  # of what cannot be parsed
            raise ValueError(
                f"{self.template_file}{f', line {line}' if line else ''}: the chat "
                f"template fails with {_reason(error)}; give it the messages and "
                "options it asks for, or correct it."
            ) from error
        return self._ids(rendered, mark)

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

    def _ids(self, text: str, mark: str) -> list[int]:
        """The ids of text with marks: nothing is read across a mark."""
        first, *rest = text.split(mark)
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
    config = _json(path / "tokenizer_config.json")
    engine = _engine(path, config)
    words = engine.words | _words(path / "special_tokens_map.json")
    words |= _words(path / "tokenizer_config.json")
    named = {}
    for name in words.keys() & set(NAMED):
        if words[name] not in engine.ids:
            raise ValueError(
                f"{path}: {name}={words[name]!r} is no token of {engine.path.name}; "
                "name one that is in tokenizer_config.json."
            )
        named[name] = engine.ids[words[name]]
    size = 1 + max(engine.ids.values(), default=-1)
    files = [path / "config.json", path / "generation_config.json"]
    ends = {i for file in files for i in _ends(file, size)}
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


def train(
    path: str | Path, texts: Iterable[str], *, vocab_size: int, chat: bool = True
) -> Tokenizer:
    """A small tokenizer for texts like these, written to a directory.

    Byte pairs over bytes, so every text comes back exactly. The same texts give the
    same files.

    Args:
        path: the directory; it is made if it is not there.
        texts: what to learn from.
        vocab_size: number of ids, control tokens included; fewer if the texts repeat
            too little. At least 259.
        chat: with a chat template, of `<|im_start|>` turns that end in `<|im_end|>`;
            otherwise `<|endoftext|>` ends a completion.

    Returns:
        The tokenizer; `<|endoftext|>` is its pad.

    Raises:
        ValueError: `vocab_size` is too small, or the directory cannot be written.
    """
    from tokenizers import Tokenizer as Fast
    from tokenizers import decoders, models, pre_tokenizers, trainers

    path, least = Path(path), 256 + len((PAD, START, END))
    if vocab_size < least:
        raise ValueError(
            f"vocab_size={vocab_size} cannot hold all bytes and the control tokens; "
            f"set it to at least {least}."
        )
    core = Fast(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[PAD, START, END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    core.train_from_iterator(texts, trainer)
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "eos_token": END if chat else PAD,
        "pad_token": PAD,
        "chat_template": TURNS if chat else None,
    }
    written = {"tokenizer.json": core.to_str(pretty=True)}
    written["tokenizer_config.json"] = json.dumps(config, indent=1) + "\n"
    try:
        path.mkdir(parents=True, exist_ok=True)
        for name, text in written.items():
            (path / name).write_text(text, "utf-8")
    except OSError as error:
        raise ValueError(
            f"{path} cannot be written: {error.strerror}; name another directory."
        ) from error
    return load(path)


# Engines: two libraries behind one face. `encode` makes control tokens of control
# words, `begins=False` puts nothing before the text, `opening` is what begins a prompt.


class _Spelled:
    """Where control tokens are spelled out in a text, by start, the longest of each."""

    def __init__(self, words: Iterable[str]):
        self.words = frozenset(words)
        self.lengths = sorted({len(word) for word in self.words}, reverse=True)
        firsts = sorted({word[0] for word in self.words})
        self.first = re.compile("|".join(map(re.escape, firsts)) or "(?!)")

    def __call__(self, text: str) -> Iterator[tuple[int, str]]:
        for start in (match.start() for match in self.first.finditer(text)):
            parts = (text[start : start + length] for length in self.lengths)
            if word := next((part for part in parts if part in self.words), ""):
                yield start, word


def _is_text(added: str) -> bool:
    """Whether an added token that is not special is but a way to write text."""
    return len(added) == 1 or not added.replace(SPACE, " ").strip()


class _Engine:
    """What both have in common."""

    path: Path
    ids: dict[str, int]  # of every token
    control: dict[str, int]
    hidden: set[int]
    words: dict[str, str]
    opening: list[int]

    def encode(self, text: str, *, begins: bool = True) -> list[int]:
        raise NotImplementedError

    @cached_property
    def spelled(self) -> _Spelled:
        return _Spelled(self.control)

    @cached_property
    def guarded(self) -> frozenset[int]:
        """The ids that no text may get; unknown characters may get theirs."""
        unknown = self.encode(chr(MARKS[-1]))
        return frozenset(self.control.values()) - set(unknown)


class _Fast(_Engine):
    """A `tokenizer.json`, run by the library tokenizers."""

    def __init__(self, path: Path):
        from tokenizers import Tokenizer as Fast

        self.path, self.words = path, {}
        try:
            self.core = Fast.from_file(str(path))
        except Exception as error:  # the library has no narrower one
            raise _unreadable(path, error) from error
        self.core.no_truncation()
        self.core.no_padding()
        self.ids = self.core.get_vocab()
        added = self.core.get_added_tokens_decoder()
        self.hidden = {i for i, token in added.items() if token.special}
        self.control = {
            token.content: i
            for i, token in added.items()
            if token.special or not _is_text(token.content)
        }
        # What begins a text shows on any text that is not empty in tokens.
        texts = (t for t in chain("x", self.ids) if self.encode(t))
        example = self.core.encode(next(texts, ""))
        pairs = zip(example.ids, example.special_tokens_mask, strict=True)
        self.opening = [i for i, _ in takewhile(lambda pair: pair[1], pairs)]

    def encode(self, text: str, *, begins: bool = True) -> list[int]:
        core = self.core if begins or not text else self.inner
        return core.encode(text, add_special_tokens=False).ids

    def decode(self, ids: list[int]) -> str:
        return self.core.decode(ids, skip_special_tokens=False)

    @cached_property
    def inner(self) -> Any:
        """The same, but it puts no space before a text."""
        whole = json.loads(self.core.to_str())
        steps = {k: _no_space_before(whole[k]) for k in ("normalizer", "pre_tokenizer")}
        if all(whole[key] == step for key, step in steps.items()):
            return self.core
        return type(self.core).from_str(json.dumps(whole | steps))


def _no_space_before(step: Any) -> Any:
    """A step of a `tokenizer.json` without what it puts before a text."""
    if isinstance(step, list):
        return [_no_space_before(part) for part in step]
    if not isinstance(step, dict):
        return step
    if step.get("type") == "Prepend":
        return {"type": "Sequence", "normalizers": []}
    never = {"add_prefix_space": False, "prepend_scheme": "never"}
    step = {key: _no_space_before(part) for key, part in step.items()}
    return step | {key: value for key, value in never.items() if key in step}


class _Pieces(_Engine):
    """A sentencepiece model, and tokens that were added to it later."""

    def __init__(self, path: Path, config: Mapping[str, Any]):
        from sentencepiece import SentencePieceProcessor
        from sentencepiece.sentencepiece_model_pb2 import ModelProto  # pyright: ignore[reportAttributeAccessIssue]

        self.path = path
        try:
            model = ModelProto.FromString(path.read_bytes())
            self.core = SentencePieceProcessor(model_proto=model.SerializeToString())
        except Exception as error:  # of three libraries
            raise _unreadable(path, error) from error
        model.normalizer_spec.add_dummy_prefix = False
        self.inner = SentencePieceProcessor(model_proto=model.SerializeToString())
        pieces = list(enumerate(model.pieces))
        kinds = type(model).SentencePiece
        later = _json(path.parent / "added_tokens.json")
        flags = config.get("added_tokens_decoder") or {}
        later |= {token["content"]: int(i) for i, token in flags.items()}
        self.ids = {piece.piece: i for i, piece in pieces} | later
        control = {i for i, piece in pieces if piece.type == kinds.CONTROL}
        user = {i for i, piece in pieces if piece.type == kinds.USER_DEFINED}
        unknown = {i for i, piece in pieces if piece.type == kinds.UNKNOWN}
        listed = config.get("additional_special_tokens") or []
        flagged = {int(i) for i, token in flags.items() if token.get("special")}
        self.hidden = control | flagged | {self.ids[w] for w in listed if w in self.ids}
        added = {i for w, i in self.ids.items() if i >= len(pieces) or i in user}
        self.control = {
            word: i
            for word, i in self.ids.items()
            if i in self.hidden | unknown or (i in added and not _is_text(word))
        }
        # The library does not print control tokens, and knows none that were added.
        self.names = {i: w for w, i in self.ids.items() if i in control | added - user}
        given = zip(NAMED, ("bos_id", "eos_id", "pad_id"), strict=True)
        own = {name: getattr(self.core, of)() for name, of in given}
        self.words = {n: model.pieces[i].piece for n, i in own.items() if i >= 0}
        words = self.words | _words(path.parent / "tokenizer_config.json")
        bos = self.ids.get(words.get("bos_token", ""))
        begins = config.get("add_bos_token", "bos_token" in config)
        self.opening = [bos] if begins and bos is not None else []

    def encode(self, text: str, *, begins: bool = True) -> list[int]:
        ids, done = [], 0
        for start, word in chain(self.spelled(text), [(len(text), "")]):
            if start < done:  # inside the last one
                continue
            core = self.core if begins and not done else self.inner
            ids += core.encode(text[done:start])
            ids += [self.control[word]] if word else []
            done = start + len(word)
        return ids

    def decode(self, ids: list[int]) -> str:
        text = ""
        known = (i for i in ids if i < len(self.core) or i in self.names)
        for named, group in groupby(known, self.names.__contains__):
            run = list(group)
            # Only the first space of all is one that was put there.
            core = self.inner if text else self.core
            text += "".join(self.names[i] for i in run) if named else core.decode(run)
        return text


# Files of a checkpoint


def _engine(path: Path, config: Mapping[str, Any]) -> _Fast | _Pieces:
    if (path / "tokenizer.json").exists():
        return _Fast(path / "tokenizer.json")
    models = [path / "tokenizer.model"]
    if not models[0].exists():
        models = sorted(path.glob("*.model"))
    if len(models) != 1:
        raise ValueError(
            f"{path} holds neither tokenizer.json nor tokenizer.model, and "
            f"{len(models)} *.model; copy the checkpoint's tokenizer there."
        )
    return _Pieces(models[0], config)


def _json(path: Path) -> dict[str, Any]:
    """The object in a JSON file; an empty one where there is no file."""
    if not path.exists():
        return {}
    try:
        found = json.loads(path.read_text("utf-8"))
        if not isinstance(found, dict):
            raise ValueError("it holds no object")
    except (OSError, ValueError) as error:
        raise _unreadable(path, error) from error
    return found


def _template(path: Path, config: Mapping[str, Any]) -> tuple[str | None, Path]:
    """The chat template, and the file it is from or may be put in."""
    file = path / "chat_template.jinja"
    if file.exists():
        try:
            return file.read_text("utf-8"), file
        except (OSError, ValueError) as error:
            raise _unreadable(file, error) from error
    template = config.get("chat_template")
    if template is None:
        return None, file
    if isinstance(template, list):
        named = [dict(t) for t in template]
        template = {t.get("name"): t.get("template") for t in named}.get("default")
    file = path / "tokenizer_config.json"
    if not isinstance(template, str):
        raise ValueError(
            f"{file}: chat_template must be a text, or a list of named ones with "
            '"default" among them; correct it.'
        )
    return template, file


def _words(path: Path) -> dict[str, str]:
    """The tokens that have a name in a config, `eos_token` for example."""
    words = {}
    for name, value in _json(path).items():
        word = value.get("content") if isinstance(value, dict) else value
        if name.endswith("_token") and isinstance(word, str):
            words[name] = word
        elif name in NAMED and value is not None:
            raise ValueError(f"{path}: {name}={value!r} is no text; write the token.")
    return words


def _ends(path: Path, size: int) -> list[int]:
    """What a model's config names as the ids that end a completion."""
    value = _json(path).get("eos_token_id")
    ids = value if isinstance(value, list) else [] if value is None else [value]
    for i in ids:
        if type(i) is not int or not 0 <= i < size:
            raise ValueError(
                f"{path}: eos_token_id={value!r} must hold ids of the tokenizer, which "
                f"are below {size}; correct it."
            )
    return ids


def _unreadable(path: Path, error: Exception) -> ValueError:
    fix = "copy it from the checkpoint again"
    return ValueError(f"{path} cannot be read: {_reason(error)}; {fix}.")


def _reason(error: Exception) -> str:
    """What an error says, in one line."""
    text = " ".join(str(getattr(error, "message", None) or error).split())
    return f"{type(error).__name__}: {text}".rstrip(". ")


# Templates


def _mark(texts: Iterable[str]) -> str:
    """A character that is in none of the texts."""
    held = set().union(*texts)
    return next(mark for mark in map(chr, MARKS) if mark not in held)


@lru_cache(maxsize=8)
def _compiled(template: str) -> Any:
    """A chat template in a sandbox: it makes text, and reaches nothing else."""
    from jinja2 import TemplateError, nodes
    from jinja2.ext import Extension, loopcontrols
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(Extension):
        """`{% generation %}` says which text is the model's: that stays as it is."""

        tags = {"generation"}  # noqa: RUF012 - as the library has it

        def parse(self, parser):
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return nodes.Scope(body, lineno=line)

    def raise_exception(message):
        raise TemplateError(message)

    def tojson(value, ensure_ascii=False, **form):
        # The library's own escapes what HTML needs escaped, and no tokenizer does.
        return json.dumps(value, ensure_ascii=ensure_ascii, **form)

    sandbox = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols]
    )
    sandbox.filters["tojson"] = tojson
    sandbox.globals["raise_exception"] = raise_exception
    sandbox.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return sandbox.from_string(template)
