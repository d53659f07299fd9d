"""Completions of problems: drawn, graded, and kept in a file of JSON lines.

    problems -> prompts -> completions -> outcomes -> a block of lines per problem

What is drawn for a problem depends on its digest, the slot and the seed; on nothing
else but the policy and how is sampled. So an evaluation that was stopped goes on where
its file ends, and one with other batches, or fewer problems, draws the same.
"""

import contextlib
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
from curax.evaluation.questions import Questions
from curax.runs.folder import NotWrittenError
from curax.runs.policies import Policy
from curax.step import mesh as meshes
from curax.types import Contexts, Model, Plan
from curax.verify import answers

DIGITS = 5  # of a score: more of them depend on where in a batch a row lies


@dataclasses.dataclass(frozen=True, kw_only=True)
class How:
    """How completions are drawn.

    Attributes:
        n: sampled completions per problem.
        greedy: whether there is a greedy one as well.
        temperature: divides the logits of the sampled ones.
        top_k: likeliest tokens drawn from; 0: all.
        top_p: mass of the likeliest tokens drawn from.
        max_tokens: at which a completion is cut off.
        seed: of all draws.
        batch: problems at a time.
        slots: completions decoded at a time; 0: all of a batch.
        confidence: likeliest tokens of which the confidence of a token is made; 0: none
            is told.
        window: tokens over which it is averaged.
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
    def each(self) -> list[tuple[bool, int]]:
        """Of every completion of a problem, whether it is greedy, and its slot."""
        return [(True, 0)] * self.greedy + [(False, slot) for slot in range(self.n)]


class Completion(NamedTuple):
    """One that was drawn."""

    number: int  # of the problem
    greedy: bool
    slot: int
    tokens: np.ndarray  # the end included
    finished: bool
    confidence: dict[str, float] | None  # by score, nats; None: not told


class Drawer:
    """Draws completions of some questions, always with one program.

    Attributes:
        batch: problems at a time, at most.
        compile_s: seconds that tracing and compiling took; 0 until something is drawn.
    """

    def __init__(self, policy: Policy, questions: Questions, how: How):
        """Nothing is compiled yet."""
        self._policy, self._questions, self._how = policy, questions, how
        shards = 1
        if policy.mesh:
            shards = policy.mesh.shape["data"] * policy.mesh.shape["fsdp"]
        self.batch = _up(how.batch, shards)
        self.compile_s = 0.0
        self._compiled: Callable[..., Any] | None = None
        self._draw = jax.jit(
            partial(
                drawn,
                policy.model,
                how=dataclasses.replace(how, slots=_up(how.slots, shards)),
                end=questions.end,
                pad=questions.pad,
            )
        )

    def __call__(self, numbers: Sequence[int]) -> list[Completion]:
        """Completions of at most `batch` problems, in the order of `How.each`."""
        # The last batch is filled up with what is not drawn.
        filled = [*numbers, *itertools.repeat(numbers[0], self.batch - len(numbers))]
        tokens, mask = self._questions.prompts(filled)
        digests = [self._questions.digests[number] for number in filled]
        words = np.frombuffer(b"".join(digests), "<u4").reshape(len(filled), -1)
        exists = np.arange(self.batch) < len(numbers)
        with meshes.use(self._policy.mesh):
            said = self._drawn(self._policy.params, tokens, mask, words, exists)
        parts = jax.device_get(said)
        found = []
        for (c, number), (greedy, slot) in itertools.product(
            enumerate(numbers), self._how.each
        ):
            tokens, mask, finished, sure = parts[greedy]
            row = c * (1 if greedy else self._how.n) + slot
            own = tokens[row][mask[row]]
            told = sure and {
                name: round(float(each[row]), DIGITS)
                for name, each in sure._asdict().items()
            }
            found.append(
                Completion(number, greedy, slot, own, bool(finished[row]), told)
            )
        return found

    def _drawn(self, *args: Any) -> Any:
        """What the program gives; it is compiled first, which is timed apart."""
        if self._compiled is None:
            start = time.monotonic()
            self._compiled = self._draw.lower(*args).compile()
            self.compile_s = time.monotonic() - start
        return self._compiled(*args)


def drawn(
    model: Model,
    params: Any,
    tokens: jax.Array,
    mask: jax.Array,
    words: jax.Array,
    exists: jax.Array,
    *,
    how: How,
    end: tuple[int, ...],
    pad: int,
) -> dict[bool, tuple[Any, ...]]:
    """Completions of a batch of prompts.

    Args:
        model: the policy.
        params: its parameters.
        tokens: `[C, P]` int32, the prompts.
        mask: `[C, P]` bool.
        words: `[C, W]` uint32, what each problem's key is made of.
        exists: `[C]` bool.
        how: to draw.
        end: tokens that end a completion.
        pad: token behind the end.

    Returns:
        For the greedy ones (True) and the sampled ones: tokens `[N, T]`, mask, finished
        and scores of confidence, or None; the rows of a prompt one behind the other.
    """
    count = tokens.shape[0]
    contexts = Contexts(tokens=tokens, mask=mask)
    prefix = rollout.prefill(model, params, contexts)
    key = stage_key(jnp.uint32(how.seed), jnp.int32(0), "samples")
    keys = jnp.broadcast_to(key, (count,))
    for word in jnp.moveaxis(words, -1, 0):
        keys = jax.vmap(jax.random.fold_in)(keys, word)

    def sample(each: int, temperature: float) -> tuple[Any, ...]:
        context = jnp.repeat(jnp.arange(count, dtype=jnp.int32), each)
        plan = Plan(
            # All rows are of one "prompt", whose number would enter the keys; what a
            # row is conditioned on is its context, and every row has its own key.
            prompt=jnp.zeros_like(context),
            slot=jnp.tile(jnp.arange(each, dtype=jnp.int32), count),
            context=context,
            exists=exists[context],
        )
        said = rollout.sample(
            model,
            params,
            contexts,
            plan,
            keys[context],
            max_tokens=how.max_tokens,
            end=end,
            pad=pad,
            temperature=temperature,
            top_k=how.top_k,
            top_p=how.top_p,
            slots=how.slots,
            prefix=prefix,
        )
        sure = None
        if how.confidence:
            sure = update.confidences(
                model,
                params,
                contexts,
                said,
                prefix=prefix,
                temperature=temperature or 1.0,
                k=how.confidence,
                window=how.window,
            )
        return said.tokens, said.mask, said.finished, sure

    found = {True: sample(1, 0)} if how.greedy else {}
    return found | ({False: sample(how.n, how.temperature)} if how.n else {})


def rows(
    questions: Questions, completions: Sequence[Completion]
) -> Iterator[dict[str, Any]]:
    """What the file holds of completions; here they are graded."""
    numbers = [one.number for one in completions]
    said = questions.graded(numbers, [one.tokens for one in completions])
    for one, verdict in zip(completions, said, strict=True):
        text, missing = questions.text(one.tokens), isinstance(verdict, str)
        yield {
            "problem": one.number,
            "digest": questions.digests[one.number].hex(),
            "greedy": one.greedy,
            "slot": one.slot,
            **questions.about(one.number),
            "text": text,
            "answer": answers.final_answer(text, last_number=True),
            "outcome": None if missing else verdict,
            "reason": verdict if missing else None,
            "length_tokens": len(one.tokens),
            "finished": one.finished,
            **({"confidence_nats": one.confidence} if one.confidence else {}),
        }


class Samples:
    """A file that grows by whole blocks, one per problem, in the order of problems."""

    def __init__(self, path: Path, digests: Sequence[bytes], how: How):
        """Nothing is touched.

        Args:
            path: of the file, there or not.
            digests: of the problems that are asked.
            how: is drawn for each.
        """
        self.path, self._how = path, how
        self._digests = [digest.hex() for digest in digests]

    def blocks(self) -> Iterator[tuple[int, list[dict[str, Any]]]]:
        """Where each whole block ends, and its rows, up to what does not fit."""
        if not self.path.exists():
            return
        end, size = 0, len(self._how.each)
        with self.path.open("rb") as lines:
            for number, digest in enumerate(self._digests):
                block = list(itertools.islice(lines, size))
                found = [_row(line) for line in block]
                names = [(r.get("greedy"), r.get("slot")) for r in found]
                here = all(
                    (r.get("problem"), r.get("digest")) == (number, digest)
                    for r in found
                )
                if names != self._how.each or not here:
                    return
                end += sum(map(len, block))
                yield end, found

    def open(self) -> int:
        """Open to append; what is behind the last whole block is cut off.

        Returns:
            How many problems are done.

        Raises:
            NotWrittenError: no leave.
        """
        ends = [0, *(end for end, _ in self.blocks())]
        with self._told():
            self._file = self.path.open("ab", buffering=0)
            self._file.truncate(ends[-1])
        return len(ends) - 1

    def write(self, found: Sequence[dict[str, Any]]) -> None:
        """Append whole blocks.

        Raises:
            NotWrittenError: no room; then none of them is written.
        """
        text = "".join(json.dumps(row) + "\n" for row in found).encode()
        with self._told():
            end = self._file.seek(0, os.SEEK_END)
            try:
                while text:
                    text = text[self._file.write(text) :]
            except OSError:
                self._file.truncate(end)
                raise

    def close(self) -> None:
        """Wait until all is on the disk.

        Raises:
            NotWrittenError: it cannot be.
        """
        with self._told(), self._file:
            os.fsync(self._file.fileno())

    @contextlib.contextmanager
    def _told(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise NotWrittenError(
                f"{self.path} cannot be written ({error.strerror})"
            ) from error


def _row(line: bytes) -> dict[str, Any]:
    """A row; an empty one of what a killed process has left of it."""
    try:
        found = json.loads(line) if line.endswith(b"\n") else {}
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


def _up(count: int, multiple: int) -> int:
    """The next multiple."""
    return -(-count // multiple) * multiple
