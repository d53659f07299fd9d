"""Sampling of completions for evaluation, and the file of JSON lines that keeps them.

    problems -> prompts -> completions -> outcomes -> a block of lines per problem

The key of a completion is a function of the digest of the problem, member and seed. So
an evaluation can be resumed where its file ends, and completions depend neither on the
batch size nor on the number of problems.
"""

import contextlib
import dataclasses
import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from curax import rollout
from curax.arrays.keys import stage_key
from curax.config import ConfigError
from curax.evaluate.questions import Questions
from curax.runs import reading
from curax.runs.policies import Policy
from curax.runs.rows import Appended
from curax.settings import files
from curax.settings.config_types import present
from curax.step import draw, drivers
from curax.step.types import Request, Subject
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
        how: how sampled completions are drawn.
        seed: seed of all random keys.
        batch: problems per batch.
        confidence: number of likeliest tokens in the confidence of a token; 0: no
            confidence is measured.
        window: tokens over which confidence is averaged.
    """

    n: int
    greedy: bool
    how: rollout.Settings
    seed: int
    batch: int
    confidence: int = 0
    window: int = 2048

    @property
    def completions(self) -> list[tuple[bool, int]]:
        """(greedy, member) of the completions of a problem, as in the file."""
        return [(True, 0)] * self.greedy + [(False, member) for member in range(self.n)]


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Examined(Subject):
    """A policy and its questions, and how completions are sampled; static."""

    spec: SamplingSpec


class Timed(drivers.Hosted):
    """Hosted driver of an evaluation, whose file has the reasons for what is missing.

    Attributes:
        compile_s: seconds of tracing and compiling so far.
    """

    logs = False

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


class Batch(NamedTuple):
    """Completions of some problems, which are being graded; by greedy, True or False.

    Row c n + s is member s of the problem at place c, n completions each.
    """

    numbers: Sequence[int]  # of the problems
    begun: dict[bool, drivers.Begun]
    confidence: dict[bool, Any]  # scores of every row, nats; empty: not measured


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
        slots = _round_up(spec.how.slots, shards)
        how = dataclasses.replace(spec.how, slots=slots)
        self._examined = Examined(
            task=questions.task,
            model=policy.model,
            spec=dataclasses.replace(spec, how=how),
        )

    def __call__(self, numbers: Sequence[int]) -> Batch:
        """Completions of at most `batch` problems; a host grades them meanwhile."""
        # The last batch is padded with rows that do not exist.
        filled = [*numbers, *itertools.repeat(numbers[0], self.batch - len(numbers))]
        digests = [self._questions.digests[number] for number in filled]
        words = np.frombuffer(b"".join(digests), "<u4").reshape(len(filled), -1)
        exists = np.arange(self.batch) < len(numbers)
        with self._policy.context():
            return self._begun(numbers, np.asarray(filled, np.int32), words, exists)

    def _begun(
        self, numbers: Sequence[int], ids: np.ndarray, *which: np.ndarray
    ) -> Batch:
        drive, examined, state = self.drive, self._examined, self._state
        batch, prefix = Batch(numbers, {}, {}), None
        prompts = drive.call_task(held_out, examined, ids)
        for kind, ask in ((True, greedy), (False, sampled)):
            if not (self._spec.greedy if kind else self._spec.n):
                continue
            request = drive.call(ask, examined, prompts, *which)
            prefix = prefix or drive.call(draw.prefill, examined, state, request)
            request = dataclasses.replace(request, prefix=prefix)
            begun = batch.begun[kind] = drive.begin(examined, state, request)
            if self._spec.confidence:
                args = state, request, begun.rollouts
                batch.confidence[kind] = drive.call(confidences, examined, *args)
        return batch

    def rows(self, batch: Batch) -> Iterator[dict[str, Any]]:
        """Rows of the samples file for a batch; waits until it is graded."""
        found = {}
        for kind, begun in batch.begun.items():
            (verdicts,) = self.drive.verdicts([begun])
            arrays = jax.device_get((begun.rollouts, verdicts.outcome))
            found[kind] = *arrays, verdicts
        confidence = jax.device_get(batch.confidence)
        for (place, number), (kind, member) in itertools.product(
            enumerate(batch.numbers), self._spec.completions
        ):
            rollouts, outcome, verdicts = found[kind]
            n = place * (1 if kind else self._spec.n) + member
            tokens = rollouts.tokens[n][rollouts.written[n]]
            scores = confidence[kind]._asdict().items() if confidence else ()
            told = {name: round(float(score[n]), DIGITS) for name, score in scores}
            yield {
                "problem": number,
                "digest": self._questions.digests[number].hex(),
                "greedy": kind,
                "slot": member,
                **self._questions.metadata(number),
                **said(self._questions, tokens, outcome[n], verdicts.why(n)),
                "length_tokens": int(rollouts.mask[n].sum()),
                "finished": bool(rollouts.finished[n]),
                **({"confidence_nats": told} if told else {}),
            }


def said(
    questions: Questions, tokens: np.ndarray, outcome: float, missing: str
) -> dict[str, Any]:
    """Text of a completion with its answer, its outcome and the reason for that.

    Args:
        questions: set of the question that was asked.
        tokens: of the completion, the end token included.
        outcome: NaN where missing.
        missing: reason why it is, if it is.
    """
    text, states = questions.text(tokens), questions.task.states
    lacks, silent = np.isnan(outcome), states is not None and not states(text)
    reason = graders.NO_ANSWER if silent and outcome == 0 else None
    return {
        "text": text,
        "answer": None if silent else answers.final_answer(text, last_number=True),
        "outcome": None if lacks else float(outcome),
        "reason": missing if lacks else reason,
    }


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
    spec = parts.spec
    key = stage_key(jnp.uint32(spec.seed), jnp.int32(0), "samples")
    keys = jnp.broadcast_to(key, exists.shape)
    for word in jnp.moveaxis(words, -1, 0):
        keys = jax.vmap(jax.random.fold_in)(keys, word)
    request = draw.plain(prompts, spec.n, keys, spec.how)
    rows = present(request.rows)
    there = dataclasses.replace(rows, exists=exists[rows.prompt])
    return dataclasses.replace(request, rows=there)


def greedy(
    parts: Examined, prompts: Prompts, words: jax.Array, exists: jax.Array
) -> Request:
    """Request for the greedy completions of a batch, as `sampled`."""
    how = dataclasses.replace(parts.spec.how, temperature=0)
    spec = dataclasses.replace(parts.spec, n=1, how=how)
    return sampled(dataclasses.replace(parts, spec=spec), prompts, words, exists)


def confidences(
    parts: Examined, state: Weights, request: Request, rollouts: Rollouts
) -> Any:
    """`[N]` confidence scores of completions, at the temperature drawn with."""
    return rollout.confidences(
        draw.policy(parts, state),
        state.params,
        request.contexts,
        rollouts,
        prefix=request.prefix,
        temperature=request.how.temperature or 1.0,
        k=parts.spec.confidence,
        window=parts.spec.window,
    )


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
                    row = files.object_of(line) or {}
                    wrong = "not a JSON object"
                    if row:
                        fields = reading.EVALUATED
                        wrong = reading.wrong_field(row, fields, all_of=True)
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
        self._file = Appended(self.path, ends[-1])
        return len(ends) - 1

    def write(self, rows: Sequence[dict[str, Any]]) -> None:
        """Append rows of complete blocks, all or none.

        Raises:
            NotWrittenError: disk full; no row is written.
        """
        self._file.write(rows)

    def close(self) -> None:
        """Flush to the disk (fsync) and close.

        Raises:
            NotWrittenError: it cannot be written.
        """
        with contextlib.closing(self._file):
            self._file.sync()


def _round_up(count: int, multiple: int) -> int:
    """The smallest multiple of `multiple` that is at least `count`."""
    return -(-count // multiple) * multiple
