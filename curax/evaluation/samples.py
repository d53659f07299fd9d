"""Sampling of completions for evaluation, and the file of JSON lines that keeps them.

    problems -> prompts -> completions -> outcomes -> a block of lines per problem

The key of a completion is a function of the problem's digest, the slot and the seed. So
an evaluation can be resumed where its file ends, and completions depend neither on the
batch size nor on the number of problems.
"""

import dataclasses
import itertools
import json
import os
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from curax import rollout, update
from curax.arrays.keys import stage_key
from curax.config import ConfigError
from curax.evaluation.questions import Questions
from curax.runs.folder import append_rows, write_errors
from curax.runs.policies import Policy
from curax.types import Contexts, Model, Plan
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


class Sampler:
    """Samples completions of a question set with one compiled program.

    Attributes:
        batch: problems per call at most, a multiple of the mesh's data shards.
        compile_s: seconds of tracing and compiling; 0 before the first call.
    """

    def __init__(self, policy: Policy, questions: Questions, spec: SamplingSpec):
        """Bind policy, questions and options; compilation is at the first call."""
        self._policy, self._questions, self._spec = policy, questions, spec
        shards = 1
        if policy.mesh:
            shards = policy.mesh.shape["data"] * policy.mesh.shape["fsdp"]
        self.batch = _round_up(spec.batch, shards)
        self.compile_s = 0.0
        self._compiled: Callable[..., Any] | None = None
        self._draw = jax.jit(
            partial(
                sample_batch,
                policy.model,
                spec=dataclasses.replace(spec, slots=_round_up(spec.slots, shards)),
                end=questions.end,
                pad=questions.pad,
            )
        )

    def __call__(self, numbers: Sequence[int]) -> list[Completion]:
        """Completions of at most `batch` problems, ordered by problem and slot."""
        # The last batch is padded with rows that do not exist.
        filled = [*numbers, *itertools.repeat(numbers[0], self.batch - len(numbers))]
        tokens, mask = self._questions.prompts(filled)
        digests = [self._questions.digests[number] for number in filled]
        words = np.frombuffer(b"".join(digests), "<u4").reshape(len(filled), -1)
        exists = np.arange(self.batch) < len(numbers)
        with self._policy.context():
            out = self._call_compiled(self._policy.params, tokens, mask, words, exists)
        parts = jax.device_get(out)
        result = []
        for (c, number), (greedy, slot) in itertools.product(
            enumerate(numbers), self._spec.completions
        ):
            tokens, mask, finished, confidence = parts[greedy]
            row = c * (1 if greedy else self._spec.n) + slot
            own = tokens[row][mask[row]]
            scores = confidence and {
                name: round(float(score[row]), DIGITS)
                for name, score in confidence._asdict().items()
            }
            result.append(
                Completion(number, greedy, slot, own, bool(finished[row]), scores)
            )
        return result

    def _call_compiled(self, *args: Any) -> Any:
        """Call the program; the first call compiles it and sets `compile_s`."""
        if self._compiled is None:
            start = time.monotonic()
            self._compiled = self._draw.lower(*args).compile()
            self.compile_s = time.monotonic() - start
        return self._compiled(*args)


def sample_batch(
    model: Model,
    params: Any,
    tokens: jax.Array,
    mask: jax.Array,
    words: jax.Array,
    exists: jax.Array,
    *,
    spec: SamplingSpec,
    end: tuple[int, ...],
    pad: int,
) -> dict[bool, tuple[Any, ...]]:
    """Greedy and sampled completions of a batch of C prompts.

    Args:
        model: policy.
        params: parameters of the policy.
        tokens: `[C, P]` int32, prompts.
        mask: `[C, P]` bool.
        words: `[C, W]` uint32, digest of each problem, folded into its key.
        exists: `[C]` bool, False on padding.
        spec: sampling options.
        end: tokens that end a completion.
        pad: padding token after the end.

    Returns:
        By greedy, True and False: `[N, T]` tokens, `[N, T]` mask, `[N]` finished and
        confidence scores or None; N = C for greedy and C n for sampled completions,
        those of a prompt adjacent.
    """
    count = tokens.shape[0]
    contexts = Contexts(tokens=tokens, mask=mask)
    prefix = rollout.prefill(model, params, contexts)
    key = stage_key(jnp.uint32(spec.seed), jnp.int32(0), "samples")
    keys = jnp.broadcast_to(key, (count,))
    for word in jnp.moveaxis(words, -1, 0):
        keys = jax.vmap(jax.random.fold_in)(keys, word)

    def sample(each: int, temperature: float) -> tuple[Any, ...]:
        context = jnp.repeat(jnp.arange(count, dtype=jnp.int32), each)
        plan = Plan(
            # The prompt number enters the keys of `sample`; it is 0 for all rows here,
            # since every row has a key of its own problem already.
            prompt=jnp.zeros_like(context),
            slot=jnp.tile(jnp.arange(each, dtype=jnp.int32), count),
            context=context,
            exists=exists[context],
        )
        rollouts = rollout.sample(
            model,
            params,
            contexts,
            plan,
            keys[context],
            max_tokens=spec.max_tokens,
            end=end,
            pad=pad,
            temperature=temperature,
            top_k=spec.top_k,
            top_p=spec.top_p,
            slots=spec.slots,
            prefix=prefix,
        )
        scores = None
        if spec.confidence:
            scores = update.confidences(
                model,
                params,
                contexts,
                rollouts,
                prefix=prefix,
                temperature=temperature or 1.0,
                k=spec.confidence,
                window=spec.window,
            )
        return rollouts.tokens, rollouts.mask, rollouts.finished, scores

    result = {True: sample(1, 0)} if spec.greedy else {}
    return result | ({False: sample(spec.n, spec.temperature)} if spec.n else {})


def graded_rows(
    questions: Questions, completions: Sequence[Completion]
) -> Iterator[dict[str, Any]]:
    """Grade completions, and yield the row of each in the samples file."""
    numbers = [one.number for one in completions]
    verdicts = questions.grade(numbers, [one.tokens for one in completions])
    for one, verdict in zip(completions, verdicts, strict=True):
        text, missing = questions.text(one.tokens), isinstance(verdict, str)
        silent = verdict == 0 and questions.states and not questions.states(text)
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
