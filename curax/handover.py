"""What an engine is: handed a policy, asked for completions, checked, asked again.

    hand over (a folder, a version) -> ask (token ids, a seed) -> completions, checked

Parameters go as a folder that both sides see. A completion is taken as it is or not at
all: what fails, is impossible or was drawn by other parameters is asked for again, and
then missing. `curax.step.outside` has the part of a step.
"""

import abc
import contextlib
import hashlib
import logging
import math
import os
import secrets
import shutil
import socket
import tempfile
import threading
import time
import weakref
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from curax.models import written
from curax.processes import peers
from curax.settings.config_types import is_below
from curax.settings.errors import WorkError, exhausted, frames
from curax.settings.groups import Fields
from curax.types import Task
from curax.verify.serve import error_line, printable, short

PAUSE = 2.0  # seconds between two looks for an engine that does not answer
ROUNDING = 1e-4  # nats by which a log-prob may be above 0
LOWEST = -3.4e38  # of a log-prob that float32 holds


class EngineError(WorkError, RuntimeError):
    """The engine draws nothing more. The message begins a sentence."""


class ClosingError(EngineError):
    """The engine does not answer, and the run stops before it does."""


class AbsentError(Exception):
    """The engine does not answer now; the message is the reason."""


ABSENT = AbsentError, ConnectionError  # what a call that is not answered raises
# What reading a reply of another shape raises.
SHAPES = TypeError, KeyError, IndexError, ValueError, AttributeError


class Ask(NamedTuple):
    """A completion to draw."""

    tokens: list[int]  # of its context
    seed: int  # in [0, 2^31), of its prompt and member


class Limits(NamedTuple):
    """How completions are drawn."""

    max_tokens: int
    temperature: float
    end: tuple[int, ...]  # tokens that end a completion, and are part of it
    vocabulary: int
    top_k: int = 0  # 0: all tokens
    top_p: float = 1.0
    most_kept: int = 0  # tokens of a kept set that there is room for; 0: none is asked


class Completion(NamedTuple):
    """A completion as an engine gives it."""

    tokens: list[int]
    logp: list[float]  # nats, of the distribution drawn from, after temperature
    finished: bool  # False: cut off at `max_tokens`
    versions: frozenset[str | None] = frozenset()  # of the parameters that drew it;
    # empty: the engine does not say
    kept: Sequence[Sequence[int]] = ()  # ids that top-k and top-p left, for each token


class Source(NamedTuple):
    """The parameters that must draw."""

    step: int  # steps that had made them
    mark: Any  # an object that these parameters alone have
    params: Callable[[], Any]  # all of them, on this host
    config: Fields
    task: Task


class Drawn(NamedTuple):
    """Completions in the order of their rows, and what it took."""

    completions: list[Completion | None]  # None: missing
    counts: Mapping[str, float]  # by name behind "engine/"
    reason: str | None  # why any is missing, the commonest; None: none is


class Engine(abc.ABC):
    """What draws in place of curax's own sampler, given by `sampling.engine`.

    An engine of one's own has `version`, `load` and `complete`. A ConnectionError of
    theirs is an AbsentError.

    Attributes:
        name: for messages.
        adapters: whether it loads adapters of its model; else they are merged.
    """

    name = "sampling.engine"
    adapters = False

    def __init__(self, *, folder: str = "", wait: float = 600.0, tries: int = 3):
        """Set up the hand-over; nothing is sent.

        Args:
            folder: in which parameters are handed over, under this name for the engine
                too; "": one of temporary files.
            wait: seconds for an engine that does not answer to come back.
            tries: times that a completion is asked for.
        """
        # Versions of other processes are others; those of a run begin alike.
        self._token, self._begins = secrets.token_hex(4), "curax-"
        self._folder, self._wait, self._tries = folder, wait, tries
        self._whole: Path | None = None  # the folder of the parameters that draw
        self._folders: list[Path] = []  # all that were written and not removed
        # A loop of one's own closes nothing: then the process does as it ends.
        weakref.finalize(self, _remove_all, self._folders, os.getpid())
        self._of: tuple[int, Any] | None = None  # their step, and their mark
        self._count, self._adapter = 0, False
        self._lock, self._closed = threading.Lock(), threading.Event()
        self._leaving = threading.Event()

    @abc.abstractmethod
    def version(self, wanted: str, *, adapter: bool) -> str | None:
        """The version it draws by; for adapters `wanted`, if it has these.

        Raises:
            AbsentError: it does not answer.
        """

    @abc.abstractmethod
    def load(self, folder: Path, version: str, *, adapter: bool) -> None:
        """Draw by the parameters of a folder, under a version, from now on.

        Raises:
            AbsentError: it does not answer.
            EngineError: it refuses them.
        """

    @abc.abstractmethod
    def complete(
        self, asks: Sequence[Ask], how: Limits, version: str
    ) -> list[Completion | str]:
        """A completion of each row, in order, or the reason why there is none.

        Raises:
            AbsentError: it does not answer; all are asked for again.
        """

    def start(self, config: Fields) -> None:
        """Check that a run can use it; whether it answers is not asked.

        Raises:
            RuntimeError: in a sentence.
        """
        if peers.count() > 1:
            raise RuntimeError(
                f"{self.name} is asked by a run of one process, and there are "
                f"{peers.count()}; start one, or set sampling.engine to None."
            )
        if not written.is_possible(config):
            raise RuntimeError(
                f"{self.name} gets the policy as a checkpoint of Hugging Face, which "
                "has no format for this model; take one of curax.models, or set "
                "sampling.engine to None."
            )

    def follow(self, workdir: Path) -> None:
        """Remove what was handed over by a process of the same run that was killed.

        The folder of a run is locked, so none of it is of a process that lives.
        """
        there, host = workdir.stat(), socket.gethostname()
        whose = f"{host} {workdir.resolve()} {there.st_dev} {there.st_ino}"
        digest = hashlib.blake2b(os.fsencode(whose), digest_size=8).hexdigest()
        self._begins = f"curax-{digest}-"
        for before in ("", "."):  # of those that are not yet whole
            for left in self._home().glob(f"{before}{self._begins}*"):
                shutil.rmtree(left, ignore_errors=True)

    def close(self) -> None:
        """Wait for no engine any more, and remove what was handed over."""
        self._closed.set()
        self.leave()
        self._remove(None)

    def leave(self) -> None:
        """Wait no more where it does not answer; one that does may go on."""
        self._leaving.set()

    def draw(self, asks: Sequence[Ask], how: Limits, source: Source) -> Drawn:
        """Completions by the parameters of a source, and by no others.

        Raises:
            EngineError: the engine did not come back, refuses the parameters, or gives
                other than a reply for each row.
        """
        found: dict[int, Completion] = {}
        counts, reasons = defaultdict[str, float](float), Counter[str]()
        with self._lock:
            for _ in range(self._tries):
                rest = [n for n in range(len(asks)) if n not in found]
                if not rest:
                    break
                self._check_open()
                version = self._ready(source, counts)
                replies = self._replies([asks[n] for n in rest], how, version)
                now = self._version_now(version)
                for n, reply in zip(rest, replies, strict=True):
                    if isinstance(reply, str):
                        reasons[self.quoted(reply)] += 1
                    elif what := fault(reply, how, version, now):
                        reasons[self.quoted(what)] += 1
                    else:  # whatever an engine says of an end at the last token
                        ended = reply.tokens[-1] in how.end
                        found[n] = reply._replace(finished=ended)
                counts["requests"] += len(rest)
        missing = len(asks) - len(found)
        counts["again"] = counts["requests"] - len(asks)
        counts["missing"] = missing
        reason = reasons.most_common(1)[0][0] if missing else None
        if missing:
            logging.getLogger("curax").warning(
                "The engine gave no completion for %d rows (%s); they are missing.",
                missing,
                reason,
            )
        return Drawn([found.get(n) for n in range(len(asks))], counts, reason)

    def _replies(self, asks: Sequence[Ask], how: Limits, version: str) -> list[Any]:
        """As `complete`, one for each row."""
        try:
            with self._errors_as_sentences():
                given = self.complete(asks, how, version)
                replies = [] if given is None else [*given]
        except ABSENT as error:
            return [self.quoted(str(error))] * len(asks)
        if len(replies) != len(asks):
            raise EngineError(
                f"{self.name} gives {len(replies)} completions of {len(asks)} that are "
                "asked for, and must give one of each, or why there is none"
            )
        return replies

    def _version_now(self, version: str) -> str | None:
        try:
            return self._version(version)
        except ABSENT:
            return None

    def _version(self, wanted: str) -> str | None:
        """As `version`; a reply of another shape is none."""
        try:
            with self._errors_as_sentences(but=SHAPES):
                return self.version(wanted, adapter=self._adapter)
        except SHAPES as error:
            what = f"a reply about its version that is none ({type(error).__name__})"
            raise AbsentError(what) from error

    @contextlib.contextmanager
    def _errors_as_sentences(
        self, but: tuple[type[Exception], ...] = ()
    ) -> Iterator[None]:
        """Turn what a method raises unasked into an EngineError with its line."""
        try:
            yield
        except (EngineError, *ABSENT, *but):
            raise
        except Exception as error:
            if exhausted(error):
                raise
            last, what = frames(error)[-1], self.quoted(error_line(error))
            where = f"{last.filename}:{last.lineno}"
            raise EngineError(f"{self.name} fails at {where} ({what})") from error

    def quoted(self, text: str) -> str:
        """A text with words of the engine, as one line of a message."""
        return printable(short(text))

    def _check_open(self) -> None:
        """Raise an EngineError once the run ends."""
        if self._closed.is_set():
            raise EngineError(f"{self.name} is asked no more, as the run ends")

    def _remove(self, but: Path | None) -> None:
        """Remove all folders that were handed over but one."""
        for folder in [one for one in self._folders if one != but]:
            shutil.rmtree(folder, ignore_errors=True)
            self._folders.remove(folder)

    def _ready(self, source: Source, counts: dict[str, float]) -> str:
        """The version of the source, once the engine draws by it."""
        end, said = time.monotonic() + self._wait, False
        while True:
            try:
                return self._handed_over(source, counts)
            except ABSENT as error:
                why = self.quoted(str(error))
                if time.monotonic() >= end:
                    raise EngineError(
                        f"{self.name} has not answered for {self._wait:g} s ({why})"
                    ) from error
                if not said:
                    logging.getLogger("curax").warning(
                        "The engine does not answer (%s); waiting for it.", why
                    )
                said = True
            if self._leaving.wait(min(PAUSE, self._wait)):
                raise ClosingError(f"{self.name} is not waited for, as the run ends")

    def _handed_over(self, source: Source, counts: dict[str, float]) -> str:
        """The version of the source; its folder is written and loaded if need be."""
        start = time.perf_counter()
        if self._whole is None or self._of is None or not self._is_of(source):
            self._count += 1
            self._whole = self._written(source)
            self._folders.append(self._whole)
            self._of = source.step, weakref.ref(source.mark)
            if self._closed.is_set():  # meanwhile
                self._remove(None)
            self._check_open()
        folder = self._whole
        assert folder
        version = folder.name
        if self._version(version) == version:
            return version
        with self._errors_as_sentences():
            self.load(folder, version, adapter=self._adapter)
        if (now := self._version(version)) != version:
            raise EngineError(
                f"{self.name} has loaded {folder} and says that it draws by "
                f"{self.quoted(repr(now))}"
            )
        self._remove(folder)
        size = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
        took = time.perf_counter() - start
        counts["hand_over_bytes"] += size
        counts["hand_over_s"] += took
        logging.getLogger("curax").info(
            "The engine draws by %s, %d bytes in %.3f s.", version, size, took
        )
        return version

    def _home(self) -> Path:
        """The folder in which parameters are handed over."""
        there = os.path.expanduser(self._folder or tempfile.gettempdir())
        return Path(there).absolute()

    def _written(self, source: Source) -> Path:
        """A new folder with the parameters of a source, of which it is the name."""
        home = self._home()
        name = f"{self._begins}{self._token}-{self._count}-step-{source.step}"
        config, task = source.config, source.task
        self._adapter = self.adapters and written.has_adapters(config)
        try:
            home.mkdir(parents=True, exist_ok=True)
            written.write(
                home / name, config, task, source.params(), adapter=self._adapter
            )
        except OSError as error:
            raise EngineError(
                f"{home / name} cannot be written ({error.strerror or error})"
            ) from error
        return home / name

    def _is_of(self, source: Source) -> bool:
        """Whether the folder holds the parameters of a source."""
        assert self._of
        step, mark = self._of
        return step == source.step and mark() is source.mark


def _remove_all(folders: list[Path], process: int) -> None:
    """Remove folders, unless by a fork of the process that wrote them."""
    if os.getpid() == process:
        for folder in folders:
            shutil.rmtree(folder, ignore_errors=True)


def fault(given: Any, how: Limits, version: str, now: str | None = None) -> str | None:
    """Why a reply cannot be a completion that was asked for; None: it can.

    Args:
        given: the reply.
        how: what was asked for.
        version: of the parameters that had to draw it.
        now: that the engine had afterwards, where the completion does not say.
    """
    if not isinstance(given, Completion):
        return f"{type(given).__name__} in place of a completion"
    try:
        return impossible(given, how, version, now)
    except (TypeError, ValueError, AttributeError, OverflowError) as error:
        return f"a completion whose fields are others ({error_line(error)})"


def impossible(
    given: Completion, how: Limits, version: str, now: str | None
) -> str | None:
    """Why a completion cannot be one that was asked for, as `fault`."""
    tokens, logp = given.tokens, given.logp
    others = [one for one in given.versions or {now} if one != version]
    if others:
        return f"drawn by {others[0]!r} and not by {version!r}"
    if len(logp) != len(tokens):
        return f"{len(tokens)} tokens with {len(logp)} log-probs"
    if not 0 < len(tokens) <= how.max_tokens:
        return f"{len(tokens)} tokens of at most {how.max_tokens}"
    if not all(is_below(token, how.vocabulary) for token in tokens):
        return "a token that is not in the vocabulary"
    if not all(math.isfinite(one) and LOWEST <= one <= ROUNDING for one in logp):
        return "a log-prob that is not finite, or above 0"
    if how.most_kept and (what := unfit(given, how)):
        return what
    if any(token in how.end for token in tokens[:-1]):
        return "tokens behind the end"
    ended = tokens[-1] in how.end
    if given.finished and not ended:
        return "an end that is none of the task's"
    if not given.finished and len(tokens) < how.max_tokens:
        return f"cut off after {len(tokens)} tokens of {how.max_tokens}"
    return None


def unfit(given: Completion, how: Limits) -> str | None:
    """Why kept sets cannot be those of a completion; None: they can."""
    if len(given.kept) != len(given.tokens):
        return f"{len(given.tokens)} tokens with {len(given.kept)} kept sets"
    for token, logp, kept in zip(given.tokens, given.logp, given.kept, strict=True):
        if token not in kept:
            return "a token that is not in its kept set"
        if not all(is_below(one, how.vocabulary) for one in kept):
            return "a kept token that is not in the vocabulary"
        if len(set(kept)) != len(kept):
            return "a kept set that has a token twice"
        if len(kept) > how.most_kept:
            return f"{len(kept)} kept tokens, and there is room for {how.most_kept}"
        if len(kept) == 1 and logp < -ROUNDING:
            return "the log-prob of an only kept token, below 0"
    return None
