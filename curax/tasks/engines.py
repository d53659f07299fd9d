"""Two libraries that make ids of text, behind one face, and the files they read.

`encode` makes control tokens of control words, `begins=False` puts nothing before the
text, `opening` is what begins a prompt.
"""

import abc
import json
import re
from collections.abc import Iterable, Iterator, Mapping
from functools import cached_property
from itertools import chain, groupby, takewhile
from pathlib import Path
from typing import Any

from curax.settings import files

NAMED = ("bos_token", "eos_token", "pad_token")
# Unicode gives no meaning to these, so a cut can be marked by one that no text holds.
MARKS = range(0xF0000, 0x10FFFE)
SPACE = "▁"  # how sentencepiece writes a space
MODEL_BYTES = 2**28  # of a tokenizer; the largest ones have a tenth of it


class Spelled:
    """Where control tokens are spelled out in a text, by start, the longest of each."""

    def __init__(self, words: Iterable[str]):
        self.words = frozenset(filter(None, words))
        self.lengths = sorted({len(word) for word in self.words}, reverse=True)
        firsts = sorted({word[0] for word in self.words})
        self.first = re.compile("|".join(map(re.escape, firsts)) or "(?!)")

    def __call__(self, text: str) -> Iterator[tuple[int, str]]:
        """Each start, and what is spelled there."""
        for start in (match.start() for match in self.first.finditer(text)):
            parts = (text[start : start + length] for length in self.lengths)
            if word := next((part for part in parts if part in self.words), ""):
                yield start, word


def is_text(added: str) -> bool:
    """Whether an added token that is not special is but a way to write text."""
    return len(added) == 1 or not added.replace(SPACE, " ").strip()


class Engine(abc.ABC):
    """What both have in common."""

    path: Path
    ids: dict[str, int]  # of every token
    control: dict[str, int]
    hidden: set[int]
    words: dict[str, str]
    opening: list[int]

    @abc.abstractmethod
    def encode(self, text: str, *, begins: bool = True) -> list[int]:
        """The ids of a text."""

    @abc.abstractmethod
    def decode(self, ids: list[int]) -> str:
        """The text of ids."""

    @cached_property
    def spelled(self) -> Spelled:
        """Where a text spells out a control token."""
        return Spelled(self.control)

    @cached_property
    def guarded(self) -> frozenset[int]:
        """The ids that no text may get; unknown characters may get theirs."""
        unknown = self.encode(chr(MARKS[-1]))
        return frozenset(self.control.values()) - set(unknown)


class Fast(Engine):
    """A `tokenizer.json`, run by the library tokenizers."""

    def __init__(self, path: Path):
        from tokenizers import Tokenizer as Core

        self.path, self.words = path, {}
        try:
            data = files.read(path, most=MODEL_BYTES)
        except (OSError, ValueError) as error:
            raise unreadable(path, error) from error
        self.core = self._run(Core.from_buffer, data)
        self.core.no_truncation()
        self.core.no_padding()
        self.ids = self.core.get_vocab()
        added = self.core.get_added_tokens_decoder()
        self.hidden = {i for i, token in added.items() if token.special}
        self.control = {
            token.content: i
            for i, token in added.items()
            if token.special or not is_text(token.content)
        }
        # What begins a text shows on any text that is not empty in tokens.
        texts = (t for t in chain("x", self.ids) if self.encode(t))
        example = self._run(self.core.encode, next(texts, ""))
        pairs = zip(example.ids, example.special_tokens_mask, strict=True)
        self.opening = [i for i, _ in takewhile(lambda pair: pair[1], pairs)]

    def encode(self, text: str, *, begins: bool = True) -> list[int]:
        """The ids of a text."""
        core = self.core if begins or not text else self.inner
        return self._run(core.encode, text, add_special_tokens=False).ids

    def decode(self, ids: list[int]) -> str:
        """The text of ids."""
        return self._run(self.core.decode, ids, skip_special_tokens=False)

    def _run(self, function: Any, *args: Any, **options: Any) -> Any:
        """What the library does; it panics, or raises what has no narrower class."""
        try:
            return function(*args, **options)
        except BaseException as error:
            if isinstance(error, KeyboardInterrupt | SystemExit | MemoryError):
                raise
            raise unreadable(self.path, error) from error

    @cached_property
    def inner(self) -> Any:
        """The same, but it puts no space before a text."""
        whole = json.loads(self.core.to_str())
        steps = {k: _no_space_before(whole[k]) for k in ("normalizer", "pre_tokenizer")}
        if all(whole[key] == step for key, step in steps.items()):
            return self.core
        return self._run(type(self.core).from_str, json.dumps(whole | steps))


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


class Pieces(Engine):
    """A sentencepiece model, and tokens that were added to it later."""

    def __init__(self, path: Path, config: Mapping[str, Any]):
        from sentencepiece import SentencePieceProcessor
        from sentencepiece.sentencepiece_model_pb2 import ModelProto  # pyright: ignore[reportAttributeAccessIssue]

        self.path = path
        try:
            model = ModelProto.FromString(files.read(path, most=MODEL_BYTES))
            self.core = SentencePieceProcessor(model_proto=model.SerializeToString())
        except Exception as error:  # of three libraries
            raise unreadable(path, error) from error
        model.normalizer_spec.add_dummy_prefix = False
        self.inner = SentencePieceProcessor(model_proto=model.SerializeToString())
        pieces = list(enumerate(model.pieces))
        kinds = type(model).SentencePiece
        flags = _flags(path.parent / "tokenizer_config.json", config)
        later = _later(path.parent / "added_tokens.json")
        later |= {token["content"]: i for i, token in flags.items()}
        self.ids = {piece.piece: i for i, piece in pieces} | later
        control = {i for i, piece in pieces if piece.type == kinds.CONTROL}
        user = {i for i, piece in pieces if piece.type == kinds.USER_DEFINED}
        unknown = {i for i, piece in pieces if piece.type == kinds.UNKNOWN}
        listed = _listed(path.parent / "tokenizer_config.json", config)
        flagged = {i for i, token in flags.items() if token.get("special")}
        self.hidden = control | flagged | {self.ids[w] for w in listed if w in self.ids}
        added = {i for w, i in self.ids.items() if i >= len(pieces) or i in user}
        self.control = {
            word: i
            for word, i in self.ids.items()
            if i in self.hidden | unknown or (i in added and not is_text(word))
        }
        # The library does not print control tokens, and knows none that were added.
        self.names = {i: w for w, i in self.ids.items() if i in control | added - user}
        given = zip(NAMED, ("bos_id", "eos_id", "pad_id"), strict=True)
        own = {name: getattr(self.core, of)() for name, of in given}
        self.words = {n: model.pieces[i].piece for n, i in own.items() if i >= 0}
        words = self.words | words_of(path.parent / "tokenizer_config.json")
        bos = self.ids.get(words.get("bos_token", ""))
        begins = config.get("add_bos_token", "bos_token" in config)
        if not isinstance(begins, bool | None):
            raise ValueError(
                f"{path.parent / 'tokenizer_config.json'}: add_bos_token="
                f"{short(begins)} must be true or false; correct it."
            )
        self.opening = [bos] if begins and bos is not None else []

    def encode(self, text: str, *, begins: bool = True) -> list[int]:
        """The ids of a text."""
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
        """The text of ids."""
        text = ""
        known = (i for i in ids if i < len(self.core) or i in self.names)
        for named, group in groupby(known, self.names.__contains__):
            run = list(group)
            # Only the first space of all is one that was put there.
            core = self.inner if text else self.core
            text += "".join(self.names[i] for i in run) if named else core.decode(run)
        return text


# Files


def _later(path: Path) -> dict[str, int]:
    """Tokens that were added to a model, with their ids."""
    found = json_of(path)
    for word, i in found.items():
        if type(i) is not int or i < 0:
            raise ValueError(
                f"{path}: {short(word)} has {short(i)} for an id; write an integer of "
                "at least 0."
            )
    return found


def _flags(path: Path, config: Mapping[str, Any]) -> dict[int, dict[str, Any]]:
    """What a config says of added tokens, by their ids."""
    found = config.get("added_tokens_decoder")
    found = {} if found is None else found
    good = isinstance(found, dict) and all(
        re.fullmatch("[0-9]{1,9}", i)
        and isinstance(token, dict)
        and isinstance(token.get("content"), str)
        and isinstance(token.get("special"), bool | None)
        for i, token in found.items()
    )
    if not good:
        raise ValueError(
            f"{path}: added_tokens_decoder={short(found)} must hold objects with a "
            "text as content, and true or false as special, by their ids; correct it."
        )
    return {int(i): token for i, token in found.items()}


def _listed(path: Path, config: Mapping[str, Any]) -> list[str]:
    """The texts of a config's `additional_special_tokens`."""
    found = config.get("additional_special_tokens")
    found = [] if found is None else found
    entries = found if isinstance(found, list) else [None]
    words = [one.get("content") if isinstance(one, dict) else one for one in entries]
    texts = [word for word in words if isinstance(word, str)]
    if len(texts) < len(words):
        raise ValueError(
            f"{path}: additional_special_tokens={short(found)} must be a list of "
            "texts; correct it."
        )
    return texts


def json_of(path: Path) -> dict[str, Any]:
    """The object in a JSON file; an empty one where there is no file."""
    if not path.exists():
        return {}
    try:
        found = files.json_of(files.read(path))
        if not isinstance(found, dict):
            raise ValueError("it holds no object")
    except (OSError, ValueError) as error:
        raise unreadable(path, error) from error
    return found


def unreadable(path: Path, error: BaseException) -> ValueError:
    """The error to raise for a file."""
    fix = "copy it from the checkpoint again"
    return ValueError(f"{path} cannot be read: {reason(error)}; {fix}.")


def reason(error: BaseException) -> str:
    """What an error says, in one line."""
    said = " ".join(str(getattr(error, "message", None) or error)[:1000].split())
    said = "".join(one if one.isprintable() else "?" for one in said)
    return f"{type(error).__name__}: {said}".rstrip(". ")


def short(value: Any) -> str:
    """A value as Python writes it, cut where it is long."""
    return files.cut(repr(value))


def words_of(path: Path) -> dict[str, str]:
    """The tokens that have a name in a config, `eos_token` for example."""
    words = {}
    for name, value in json_of(path).items():
        word = value.get("content") if isinstance(value, dict) else value
        if name.endswith("_token") and isinstance(word, str):
            words[name] = word
        elif name in NAMED and value is not None:
            raise ValueError(
                f"{path}: {name}={short(value)} is no text; write the token."
            )
    return words
