"""Two tokenizer libraries, `tokenizers` and `sentencepiece`, behind one interface.

A backend also reads the files next to the vocabulary that name added and special
tokens.
"""

import abc
import contextlib
import json
import re
from collections.abc import Iterable, Iterator, Mapping
from functools import cached_property
from itertools import chain, groupby, takewhile
from pathlib import Path
from typing import Any

from curax.settings import files
from curax.settings.packages import missing

NAMED_TOKENS = ("bos_token", "eos_token", "pad_token")
# Private-use characters: a cut is marked by one that the text does not contain.
PRIVATE_USE = range(0xF0000, 0x10FFFE)
SPACE = "▁"  # how sentencepiece writes a space
MODEL_BYTES = 2**28  # of a tokenizer file, at most; published ones have a tenth
GROWTH = 16  # characters that rules may make of one, on average
SOME = 64  # characters of which any length may be made


class WordFinder:
    """Finds the words of a set in a text: at each start the longest one."""

    def __init__(self, words: Iterable[str]):
        self.words = frozenset(filter(None, words))
        self.lengths = sorted({len(word) for word in self.words}, reverse=True)
        firsts = sorted({word[0] for word in self.words})
        self.first = re.compile("|".join(map(re.escape, firsts)) or "(?!)")

    def __call__(self, text: str) -> Iterator[tuple[int, str]]:
        """Each start and its word, overlapping ones included."""
        for start in (match.start() for match in self.first.finditer(text)):
            parts = (text[start : start + length] for length in self.lengths)
            if word := next((part for part in parts if part in self.words), ""):
                yield start, word


def is_text(added: str) -> bool:
    """Whether an added token is plain text: one character, or a run of spaces."""
    return len(added) == 1 or not added.replace(SPACE, " ").strip()


class Backend(abc.ABC):
    """A tokenizer library with one vocabulary.

    Attributes:
        path: file of the vocabulary.
        ids: id of every token.
        control: id of every control token: special, or added and not plain text.
        hidden: ids of special tokens, which a decoded completion does not show.
        named_tokens: tokens by their names, as `eos_token`.
        prefix: ids that begin every prompt.
    """

    path: Path
    ids: dict[str, int]
    control: dict[str, int]
    hidden: set[int]
    named_tokens: dict[str, str]
    prefix: list[int]

    @abc.abstractmethod
    def encode(self, text: str, *, begins: bool = True) -> list[int]:
        """The ids of a text, in which control words become control tokens.

        Args:
            text: without what begins a prompt.
            begins: False: it follows other text, so no space is put before it.
        """

    @abc.abstractmethod
    def decode(self, ids: list[int]) -> str:
        """The text of ids, control tokens included."""

    @abc.abstractmethod
    def normalized(self, text: str) -> str:
        """The text that is cut into tokens."""

    @property
    def rules(self) -> list[str]:
        """The texts in rules that change a text before or after it is cut."""
        return []

    @cached_property
    def find_control(self) -> WordFinder:
        """Finder of the control words in a text."""
        return WordFinder(self.control)

    @cached_property
    def forbidden(self) -> frozenset[int]:
        """The ids of control tokens, but for the one of unknown characters."""
        unknown = self.encode(chr(PRIVATE_USE[-1]))
        return frozenset(self.control.values()) - set(unknown)


class TokenizersBackend(Backend):
    """A `tokenizer.json`, run by the library `tokenizers`."""

    def __init__(self, path: Path):
        try:
            from tokenizers import Tokenizer as Core
        except ImportError as error:
            needed = missing(error) or f"{error}."
            raise ValueError(f"{path} cannot be read: {needed}") from error
        self.path, self.named_tokens = path, {}
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
        self.prefix = [i for i, _ in takewhile(lambda pair: pair[1], pairs)]

    def encode(self, text: str, *, begins: bool = True) -> list[int]:
        """As `Backend.encode`."""
        core = self.core if begins or not text else self.inner
        return self._run(core.encode, text, add_special_tokens=False).ids

    def decode(self, ids: list[int]) -> str:
        """As `Backend.decode`."""
        return self._run(self.core.decode, ids, skip_special_tokens=False)

    def normalized(self, text: str) -> str:
        """As `Backend.normalized`."""
        rules = self.core.normalizer
        return text if rules is None else self._run(rules.normalize_str, text)

    def _run(self, function: Any, *args: Any, **options: Any) -> Any:
        """Call the library, which panics or raises bare exceptions."""
        try:
            return function(*args, **options)
        except BaseException as error:
            if isinstance(error, KeyboardInterrupt | SystemExit | MemoryError):
                raise
            raise unreadable(self.path, error) from error

    @property
    def rules(self) -> list[str]:
        """As `Backend.rules`."""
        steps = (self.core.normalizer, self.core.pre_tokenizer, self.core.decoder)
        return [*_texts([json.loads(s.__getstate__()) for s in steps if s])]

    @cached_property
    def inner(self) -> Any:
        """The tokenizer without the step that puts a space before a text."""
        whole = json.loads(self.core.to_str())
        steps = {k: _no_space_before(whole[k]) for k in ("normalizer", "pre_tokenizer")}
        if all(whole[key] == step for key, step in steps.items()):
            return self.core
        return self._run(type(self.core).from_str, json.dumps(whole | steps))


def _texts(value: Any) -> Iterator[str]:
    """All texts in a JSON value, cut if long."""
    if isinstance(value, str):
        yield value[:1024]
    elif isinstance(value, dict | list):
        for part in value.values() if isinstance(value, dict) else value:
            yield from _texts(part)


def _no_space_before(step: Any) -> Any:
    """A step of a `tokenizer.json` that puts no space before a text."""
    if isinstance(step, list):
        return [_no_space_before(part) for part in step]
    if not isinstance(step, dict):
        return step
    if step.get("type") == "Prepend":
        return {"type": "Sequence", "normalizers": []}
    never = {"add_prefix_space": False, "prepend_scheme": "never"}
    step = {key: _no_space_before(part) for key, part in step.items()}
    return step | {key: value for key, value in never.items() if key in step}


class SentencePieceBackend(Backend):
    """A sentencepiece model and the tokens that config files add to it."""

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
        flags = _added_token_flags(path.parent / "tokenizer_config.json", config)
        added_later = _added_tokens(path.parent / "added_tokens.json")
        added_later |= {token["content"]: i for i, token in flags.items()}
        self.ids = {piece.piece: i for i, piece in pieces} | added_later
        control = {i for i, piece in pieces if piece.type == kinds.CONTROL}
        user = {i for i, piece in pieces if piece.type == kinds.USER_DEFINED}
        unknown = {i for i, piece in pieces if piece.type == kinds.UNKNOWN}
        listed = _additional_special(path.parent / "tokenizer_config.json", config)
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
        given = zip(NAMED_TOKENS, ("bos_id", "eos_id", "pad_id"), strict=True)
        own = {name: getattr(self.core, of)() for name, of in given}
        self.named_tokens = {n: model.pieces[i].piece for n, i in own.items() if i >= 0}
        named = self.named_tokens | named_tokens(path.parent / "tokenizer_config.json")
        bos = self.ids.get(named.get("bos_token", ""))
        begins = config.get("add_bos_token", "bos_token" in config)
        if not isinstance(begins, bool | None):
            raise ValueError(
                f"{path.parent / 'tokenizer_config.json'}: add_bos_token="
                f"{short(begins)} must be true or false; correct it."
            )
        self.prefix = [bos] if begins and bos is not None else []

    def encode(self, text: str, *, begins: bool = True) -> list[int]:
        """As `Backend.encode`."""
        ids, done = [], 0
        for start, word in chain(self.find_control(text), [(len(text), "")]):
            if start < done:  # inside the last one
                continue
            core = self.core if begins and not done else self.inner
            ids += core.encode(text[done:start])
            ids += [self.control[word]] if word else []
            done = start + len(word)
        return ids

    def decode(self, ids: list[int]) -> str:
        """As `Backend.decode`."""
        text = ""
        known = (i for i in ids if i < len(self.core) or i in self.names)
        for named, group in groupby(known, self.names.__contains__):
            run = list(group)
            # Only the first space of all is one that was put there.
            core = self.inner if text else self.core
            text += "".join(self.names[i] for i in run) if named else core.decode(run)
        return text

    def normalized(self, text: str) -> str:
        """As `Backend.normalized`."""
        return self.core.normalize(text)


def vocabulary(folder: Path) -> Path:
    """The file of a tokenizer in a folder.

    Raises:
        ValueError: there is none, or more than one.
    """
    if (folder / "tokenizer.json").exists():
        return folder / "tokenizer.json"
    models = [folder / "tokenizer.model"]
    if not models[0].exists():
        models = sorted(folder.glob("*.model"))
    if len(models) != 1:
        raise ValueError(
            f"{folder} holds neither tokenizer.json nor tokenizer.model, and "
            f"{len(models)} *.model; copy the checkpoint's tokenizer there."
        )
    return models[0]


def make(folder: Path) -> Backend:
    """The tokenizer in a folder.

    Raises:
        ValueError: something is missing or unreadable.
    """
    file = vocabulary(folder)
    if file.name == "tokenizer.json":
        return TokenizersBackend(file)
    return SentencePieceBackend(file, json_of(folder / "tokenizer_config.json"))


def probe(folder: Path) -> None:
    """Make a tokenizer and run it on texts that its rules may make much of.

    Each printable character many times, all others of the first plane, every text in
    its own rules, and all tokens to decode.

    Raises:
        ValueError: it cannot be read, or makes long texts of short ones.
    """
    backend = make(folder)
    plane = [chr(i) for i in range(0xD800) if chr(i).isprintable()]
    texts = [one * SOME + "\n" for one in plane[:95]]
    texts += ["".join(plane[i : i + SOME]) for i in range(95, len(plane), SOME)]
    for text in (*texts, *backend.rules):
        with contextlib.suppress(ValueError):  # of a text that it cannot encode
            backend.encode(text)
        _check_growth(backend, len(text), len(backend.normalized(text)))
    decoded = backend.decode(sorted(set(backend.ids.values())))
    _check_growth(backend, sum(map(len, backend.ids)), len(decoded))


def _check_growth(backend: Backend, before: int, after: int) -> None:
    if after > GROWTH * (before + SOME):
        raise ValueError(
            f"{backend.path} makes a text of {after} characters of one of {before}; "
            "take another checkpoint's."
        )


# Files


def _added_tokens(path: Path) -> dict[str, int]:
    """The ids of the tokens in an `added_tokens.json`."""
    found = json_of(path)
    for word, i in found.items():
        if type(i) is not int or i < 0:
            raise ValueError(
                f"{path}: {short(word)} has {short(i)} for an id; write an integer of "
                "at least 0."
            )
    return found


def _added_token_flags(
    path: Path, config: Mapping[str, Any]
) -> dict[int, dict[str, Any]]:
    """A config's `added_tokens_decoder`: content and flags of added tokens by id."""
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


def _additional_special(path: Path, config: Mapping[str, Any]) -> list[str]:
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
    """The error of a file that cannot be read, as one sentence."""
    fix = "copy it from the checkpoint again"
    return ValueError(f"{path} cannot be read: {error_line(error)}; {fix}.")


def error_line(error: BaseException) -> str:
    """The class and message of an error, printable and in one line."""
    text = " ".join(str(getattr(error, "message", None) or error)[:1000].split())
    text = "".join(one if one.isprintable() else "?" for one in text)
    return f"{type(error).__name__}: {text}".rstrip(". ")


def short(value: Any) -> str:
    """The repr of a value, shortened if long."""
    return files.cut(repr(value))


def named_tokens(path: Path) -> dict[str, str]:
    """The tokens that a config names, `eos_token` for example, by name."""
    named = {}
    for name, value in json_of(path).items():
        word = value.get("content") if isinstance(value, dict) else value
        if name.endswith("_token") and isinstance(word, str):
            named[name] = word
        elif name in NAMED_TOKENS and value is not None:
            raise ValueError(
                f"{path}: {name}={short(value)} is no text; write the token."
            )
    return named
