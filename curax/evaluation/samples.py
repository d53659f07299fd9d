"""Sampling of completions for evaluation, and the file of JSON lines that keeps them.

    problems -> prompts -> completions -> outcomes -> a block of lines per problem

The key of a completion is a function of the problem's digest, the slot and the seed. So
an evaluation can be resumed where its file ends, and completions depend neither on the
batch size nor on the number of problems.
"""

import dataclasses
import itertools
import json
import math
import os
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from curax import hint, reward, rollout, update
from curax.arrays.keys import stage_key
from curax.config import ConfigError
from curax.evaluation.questions import Questions
from curax.processes import peers
from curax.runs.folder import append_rows, write_errors
from curax.runs.policies import Policy
from curax.step import draw, drivers
from curax.step.records import Request, Subject
from curax.step.validation import held_out
from curax.types import Prompts, Rollouts, Weights
from curax.verify import answers, graders

DIGITS = 5  # of a confidence; more depend on the row's place in its batch


@dataclasses.dataclass(frozen=True, kw_only=True)
class SamplingSpec:
    """Sampling options of an evaluation.

    Attributes:
        n: sampled completions per problem.
        greedy: also decode a greedy completion per problem.
        temperature: divides the logits of sampled completions.
        top_k: number of likeliest tokens that are drawn from; 0: all.
        top_p: probability mass of the likeliest tokens that are drawn from.
        max_tokens: length at which a completion is cut off.
        seed: seed of all random keys.
        batch: problems per batch.
        slots: completions decoded at a time; 0: all of a batch.
        confidence: number of likeliest tokens in the confidence of a token; 0: no
            confidence is measured.
        window: tokens over which confidence is averaged.
    """

    n: int
    greedy: bool
    temperature: float
    top_k: int
    top_p: float
    max_tokens: int
    seed: int
    batch: int
    slots: int
    confidence: int = 0
    window: int = 2048

    @property
    def completions(self) -> list[tuple[bool, int]]:
        """(greedy, slot) of each completion of a problem, in the order of the file."""
        return [(True, 0)] * self.greedy + [(False, slot) for slot in range(self.n)]


class Completion(NamedTuple):
    """A completion of a problem."""

    number: int  # of the problem
    greedy: bool
    slot: int
    tokens: np.ndarray  # [T] int, the end token included
    finished: bool
    confidence: dict[str, float] | None  # by score, nats; None: not measured
    row: int = 0  # among the greedy or the sampled ones of its batch


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Examined(Subject):
    """A policy and its questions, and how completions are sampled; static."""

    spec: SamplingSpec


class Timed(drivers.Hosted):
    """Hosted driver of an evaluation.

    Attributes:
        compile_s: seconds of tracing and compiling so far.
    """

    def __init__(self):
        """Compile nothing."""
        super().__init__()
        self.compile_s = 0.0
        self._compiled: dict[Any, Any] = {}

    def call(self, function: Callable, parts: Subject, *args: Any) -> Any:
        """As `Hosted.call`; what is compiled is timed apart."""
        leaves, structure = jax.tree.flatten(args)
        shapes = tuple((jnp.shape(leaf), jnp.result_type(leaf)) for leaf in leaves)
        key = function, parts, structure, shapes
        if key not in self._compiled:
            start, program = time.monotonic(), self.jitted(function, parts)
            self._compiled[key] = program.lower(*args).compile()
            self.compile_s += time.monotonic() - start
        return self._compiled[key](*args)

    def log(self, verdicts: reward.Verdicts) -> None:
        """Log nothing: reasons stand in the samples file."""


class Batch(NamedTuple):
    """Completions of some problems, which are being graded."""

    completions: list[Completion]  # ordered by problem and slot
    begun: dict[bool, drivers.Begun]  # by greedy


class Sampler:
    """Samples completions of a question set, by one program for each kind.

    Attributes:
        batch: problems per call at most, a multiple of the mesh's data shards.
        drive: driver that draws and grades.
    """

    def __init__(self, policy: Policy, questions: Questions, spec: SamplingSpec):
        """Bind policy, questions and options; compilation is at the first call."""
        self._policy, self._questions, self._spec = policy, questions, spec
        shards = 1
        if policy.mesh:
            shards = policy.mesh.shape["data"] * policy.mesh.shape["fsdp"]
        self.batch = _round_up(spec.batch, shards)
        self.drive = Timed()
        self._state = Weights(params=policy.params)
        self._examined = Examined(
            task=questions.task,
            model=policy.model,
            spec=dataclasses.replace(spec, slots=_round_up(spec.slots, shards)),
        )

    @property
    def compile_s(self) -> float:
        """Seconds of tracing and compiling; 0 before the first call."""
        return self.drive.compile_s

    def __call__(self, numbers: Sequence[int]) -> Batch:
        """Completions of at most `batch` problems; a host grades them meanwhile."""
        # The last batch is padded with rows that do not exist.
        filled = [*numbers, *itertools.repeat(numbers[0], self.batch - len(numbers))]
        digests = [self._questions.digests[number] for number in filled]
        words = np.frombuffer(b"".join(digests), "<u4").reshape(len(filled), -1)
        exists = np.arange(self.batch) < len(numbers)
        with self._policy.context():
            drawn = self._drawn(np.asarray(filled, np.int32), words, exists)
        begun = {kind: one for kind, (one, _) in drawn.items()}
        parts = peers.fetch(
            {
                kind: (one.rollouts.tokens, one.rollouts.mask, one.rollouts.finished)
                for kind, one in begun.items()
            }
        )
        scores = peers.fetch({kind: score for kind, (_, score) in drawn.items()})
        result = []
        for (c, number), (kind, slot) in itertools.product(
            enumerate(numbers), self._spec.completions
        ):
            tokens, mask, finished = parts[kind]
            row = c * (1 if kind else self._spec.n) + slot
            own, ended = tokens[row][mask[row]], bool(finished[row])
            told = scores[kind] and {
                name: round(float(score[row]), DIGITS)
                for name, score in scores[kind]._asdict().items()
            }
            result.append(Completion(number, kind, slot, own, ended, told, row))
        return Batch(result, begun)

    def _drawn(self, ids: np.ndarray, *which: np.ndarray) -> dict[bool, tuple]:
        """What was begun, and confidence scores or None, by greedy."""
        drive, examined, state = self.drive, self._examined, self._state
        kinds = {True: greedy} if self._spec.greedy else {}
        kinds |= {False: sampled} if self._spec.n else {}
        prompts, prefix, drawn = drive.call_task(held_out, examined, ids), None, {}
        for kind, ask in kinds.items():
            request = drive.call(ask, examined, prompts, *which)
            prefix = prefix or drive.call(draw.prefill, examined, state, request)
            request = dataclasses.replace(request, prefix=prefix)
            begun, score = drive.begin(examined, state, request), None
            if self._spec.confidence:
                args = state, request, begun.rollouts
                score = drive.call(confidences, examined, *args)
            drawn[kind] = begun, score
        return drawn

    def rows(self, batch: Batch) -> list[dict[str, Any]]:
        """Rows of the samples file for a batch; waits until it is graded."""
        verdicts = {kind: self.drive.verdicts(one) for kind, one in batch.begun.items()}
        found: list[float | str] = []
        for one in batch.completions:
            outcome, reasons = verdicts[one.greedy]
            value = float(outcome[one.row])
            missing = math.isnan(value)
            found.append(reasons.get(one.row, reward.NONE) if missing else value)
        return list(graded_rows(self._questions, batch.completions, found))


def sampled(
    parts: Examined, prompts: Prompts, words: jax.Array, exists: jax.Array
) -> Request:
    """Request for the sampled completions of a batch of C prompts.

    Args:
        parts: policy, questions and options.
        prompts: C of them.
        words: `[C, W]` uint32, digest of each problem, folded into its key.
        exists: `[C]` bool, False on padding.
    """
    each = parts.spec.n, parts.spec.temperature
    return _asked(parts, prompts, words, exists, *each)


def greedy(
    parts: Examined, prompts: Prompts, words: jax.Array, exists: jax.Array
) -> Request:
    """Request for the greedy completions of a batch, as `sampled`."""
    return _asked(parts, prompts, words, exists, 1, 0)


def _asked(
    parts: Examined,
    prompts: Prompts,
    words: jax.Array,
    exists: jax.Array,
    each: int,
    temperature: float,
) -> Request:
    spec, count = parts.spec, prompts.tokens.shape[0]
    key = stage_key(jnp.uint32(spec.seed), jnp.int32(0), "samples")
    keys = jnp.broadcast_to(key, (count,))
    for word in jnp.moveaxis(words, -1, 0):
        keys = jax.vmap(jax.random.fold_in)(keys, word)
    plan = draw.even(count, each)
    return Request(
        prompts=prompts,
        contexts=hint.none(prompts),
        plan=dataclasses.replace(plan, exists=exists[plan.prompt]),
        key=keys,
        group=each,
        how=rollout.Settings(
            max_tokens=spec.max_tokens,
            end=parts.task.end,
            pad=parts.task.pad,
            temperature=temperature,
            top_k=spec.top_k,
            top_p=spec.top_p,
            slots=spec.slots,
        ),
    )


def confidences(
    parts: Examined, state: Weights, request: Request, rollouts: Rollouts
) -> Any:
    """`[N]` confidence scores of completions, at the temperature drawn with."""
    return update.confidences(
        draw.policy(parts, state),
        state.params,
        request.contexts,
        rollouts,
        prefix=request.prefix,
        temperature=request.how.temperature or 1.0,
        k=parts.spec.confidence,
        window=parts.spec.window,
    )


def graded_rows(
    questions: Questions,
    completions: Sequence[Completion],
    verdicts: Sequence[float | str],
) -> Iterator[dict[str, Any]]:
    """Yield the row of each completion in the samples file.

    Args:
        questions: that were asked.
        completions: of them.
        verdicts: outcome of each, or the reason why it is missing.
    """
    for one, verdict in zip(completions, verdicts, strict=True):
        text, missing = questions.text(one.tokens), isinstance(verdict, str)
        states = questions.task.states
        silent = verdict == 0 and states and not states(text)
        yield {
            "problem": one.number,
            "digest": questions.digests[one.number].hex(),
            "greedy": one.greedy,
            "slot": one.slot,
            **questions.metadata(one.number),
            "text": text,
            "answer": answers.final_answer(text, last_number=True),
            "outcome": None if missing else verdict,
            "reason": verdict if missing else graders.NO_ANSWER if silent else None,
            "length_tokens": len(one.tokens),
            "finished": one.finished,
            **({"confidence_nats": one.confidence} if one.confidence else {}),
        }


class SamplesFile:
    """An append-only file of rows in blocks, one block per problem, in their order."""

    def __init__(self, path: Path, digests: Sequence[bytes], spec: SamplingSpec):
        """Set path, problems and options; no file is opened.

        Args:
            path: samples file, which may be missing.
            digests: digests of the problems, in order.
            spec: sampling options, which give the rows of a block.
        """
        self.path, self._spec = path, spec
        self._digests = [digest.hex() for digest in digests]

    def blocks(self) -> Iterator[tuple[int, list[dict[str, Any]]]]:
        """Yield (byte offset of its end, rows) of each complete block.

        What is behind them, of a process that was killed while it wrote, is not read.

        Raises:
            ConfigError: a line of a complete block is not the row that it should be.
        """
        if not self.path.exists():
            return
        end, names = 0, self._spec.completions
        with self.path.open("rb") as lines:
            for number, digest in enumerate(self._digests):
                block = list(itertools.islice(lines, len(names)))
                if len(block) < len(names) or not block[-1].endswith(b"\n"):
                    return
                rows: list[dict[str, Any]] = []
                for i, (line, name) in enumerate(zip(block, names, strict=True)):
                    row = _parsed_row(line)
                    wrong = _row_error(row)
                    ours = {"problem": number, "digest": digest}
                    ours |= {"greedy": name[0], "slot": name[1]}
                    if not wrong and row | ours != row:
                        wrong = f"it is no completion of problem {number}"
                    if wrong:
                        place = f"{self.path}:{number * len(names) + i + 1}"
                        raise ConfigError(
                            f"{place}: {wrong}; bring the line back, or name another "
                            "--out."
                        )
                    rows.append(row)
                end += sum(map(len, block))
                yield end, rows

    def open(self) -> int:
        """Open for appending; bytes after the last complete block are cut off.

        Returns:
            Number of problems that are done.

        Raises:
            NotWrittenError: no permission.
        """
        ends = [0, *(end for end, _ in self.blocks())]
        with write_errors(self.path):
            self._file = self.path.open("ab", buffering=0)
            self._file.truncate(ends[-1])
        return len(ends) - 1

    def write(self, rows: Sequence[dict[str, Any]]) -> None:
        """Append rows of complete blocks, all or none.

        Raises:
            NotWrittenError: disk full; no row is written.
        """
        append_rows(self._file, self.path, rows)

    def close(self) -> None:
        """Flush to the disk (fsync) and close.

        Raises:
            NotWrittenError: it cannot be written.
        """
        with write_errors(self.path), self._file:
            os.fsync(self._file.fileno())


def _parsed_row(line: bytes) -> dict[str, Any]:
    """The JSON object of a line; empty for any other line."""
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        return {}
    return row if isinstance(row, dict) else {}


# What `graded_rows` writes and results are computed from.
_ROW: dict[str, Any] = {
    "problem": int,
    "digest": str,
    "greedy": bool,
    "slot": int,
    "level": str | None,
    "subject": str | None,
    "answer": str | None,
    "outcome": int | float | None,
    "reason": str | None,
    "length_tokens": int,
    "finished": bool,
}


def _row_error(row: dict[str, Any]) -> str | None:
    """Why a row of a samples file is not valid; None if it is."""
    if not row:
        return "not a JSON object"
    for name, kind in _ROW.items():
        value = row.get(name)
        flag = isinstance(value, bool) and kind is not bool
        if name not in row or flag or not isinstance(value, kind):
            return f"{name} is {json.dumps(value)[:40]}"
    outcome = row["outcome"]
    if outcome is None or 0 <= outcome <= 1:
        return None
    return f"outcome is {outcome}, which is not from 0 to 1"


def _round_up(count: int, multiple: int) -> int:
    """The smallest multiple of `multiple` that is at least `count`."""
    return -(-count // multiple) * multiple
