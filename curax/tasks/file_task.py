"""A task on a file of problems with answers: prompts, reference solutions, a grader.

    file -> records -> layout -> Problem -> chat template -> tokens

A file is read once, when the task is built: repeated questions, prompts that are too
long and, on request, broken records are left out and counted. Of the others their texts
are kept, which are tokenised when they are needed.
"""

import dataclasses
import sys
import time
import zlib
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np

from curax.settings.config_types import (
    CheckpointPath,
    Count,
    DataPath,
    Function,
    Natural,
    Positive,
    present,
)
from curax.settings.declared import declares
from curax.tasks import environments, layouts, sources, text
from curax.tasks.hints import WORDS, HintWriter
from curax.tasks.layouts import Problem
from curax.tasks.prompt_format import PromptFormat
from curax.tasks.sources import ProblemSet
from curax.types import Answer, HostEnvironment, Prompts, Task, Terms, Turn
from curax.verify import graders
from curax.verify.workers import Pool, pool

ANSWER_TOKENS = 512  # of an environment, at most
ALIKE = 8  # prompts of different questions that are not all the same
REPORT_SECONDS = 5.0  # between two lines about a slow scan


class ScanProgress:
    """Prints how many records are read, every few seconds of a slow scan."""

    def __init__(self, name: str):
        """Start the clock.

        Args:
            name: of the file.
        """
        self._name, self._last = name, time.monotonic()

    def __call__(self, done: int, total: int) -> None:
        """Report `done` of `total` records."""
        if time.monotonic() - self._last > REPORT_SECONDS:
            self._last = time.monotonic()
            print(f"{self._name}: {done} of {total} read", file=sys.stderr, flush=True)


def usable(
    records: sources.Records,
    layout: layouts.Layout,
    prompt_format: PromptFormat,
    *,
    longest: int,
    on_error: str,
) -> ProblemSet:
    """The usable problems of a file, whose prompts have at most `longest` tokens.

    `layouts.detect` is resolved to one layout for all of it.

    Raises:
        ValueError: no record is usable, one is broken and `on_error` is "raise", or
            different questions make one prompt.
    """
    shown = (
        "let task.template or the chat template of "
        f"{prompt_format.tokenizer.template_file} show the question."
    )

    def length(problem: Problem) -> int:
        if not prompt_format.may_fit(problem.question, longest):
            return longest + 1
        if length := len(prompt_format.prompt(problem)):
            return length
        raise ValueError(f"its prompt has no token; {shown}")

    found = sources.scan(
        records,
        sources.resolved_layout(records, layout),
        length,
        longest=longest,
        on_error=on_error,
        progress=ScanProgress(records.name),
    )
    first = [*map(prompt_format.prompt, found.problems[:ALIKE])]
    if len(first) > 1 and all(prompt == first[0] for prompt in first):
        raise ValueError(
            f"{records.name}: the first {len(first)} questions differ, and their "
            f"prompts do not; {shown}"
        )
    return found


@declares(
    tokenizer="tokenizer",
    prompt_tokens="max_prompt_tokens",
    trace_tokens="max_trace_tokens",
    environment="environment",
)
def task(
    *,
    tokenizer: CheckpointPath | None = None,
    train: DataPath,
    held_out: DataPath | None = None,
    num_held_out: Natural = 0,
    layout: Function = layouts.detect,
    held_out_layout: Function | None = None,
    chat: bool | None = None,
    system: str | None = None,
    template: str = "{question}",
    thinking: bool | None = None,
    trace: str = "{solution}",
    max_prompt_tokens: Count = 1024,
    max_trace_tokens: Natural = 0,
    hints: bool = False,
    hints_file: DataPath | None = None,
    hint_levels: Count = 3,
    hint_words: str = WORDS,
    max_hint_prompt_tokens: Count = 4096,
    reference: str | None = None,
    delimiter: str = "",
    on_error: str = "raise",
    grader: Function = graders.mathematics,
    environment: Function | None = None,
    max_answer_tokens: Count = ANSWER_TOKENS,
    workers: Count = 2,
    deadline: Positive = 5.0,
    memory_mb: Count = 2048,
) -> Task:
    """The task of a file of problems, verified on the host by worker processes.

    A prompt's id is the number of its problem in `train`; its target is that number, or
    for a held-out prompt the number of training problems plus its own.

    Args:
        tokenizer: folder of a checkpoint or its name on the hub, for its tokenizer and
            chat template; None: the `path` of the model.
        train: file of problems: JSON lines, parquet, several of one of these, or a
            folder of array_record; or a name on the hub, as
            `owner/name:data/train-*.parquet`.
        held_out: file of held-out problems; their questions are removed from `train`.
            None: some of `train`, chosen by a digest of the question.
        num_held_out: held-out problems; 0: all of the file, or a tenth of `train`.
        layout: record to `Problem`, of `curax.tasks.layouts`; `layouts.detect` is
            resolved once for each file.
        held_out_layout: of the held-out file; None: the same.
        chat: ask as a turn of the chat template; None: where there is one.
        system: the system turn.
        template: the prompt, with the question in place of `{question}`.
        thinking: the template's `enable_thinking`.
        trace: the completion to imitate, with fields of the problem in place of
            `{solution}` and `{answer}`.
        max_prompt_tokens: longer prompts are left out and counted.
        max_trace_tokens: longer traces are not imitated; 0: none is, so there can be no
            warm start.
        hints: prompts can be hinted, by solutions, by hints that the policy writes from
            a solution, and by hints of a file, each where there are any.
        hints_file: file of records with `question` and `hints`, a list of texts by
            level, the weakest first; None: the hints in the records of `train`.
        hint_levels: levels of hints, in files and when the policy writes them.
        hint_words: introduction of a hint at the end of the user's text, with the hint
            in place of `{hint}`.
        max_hint_prompt_tokens: the policy writes no hint where the request for it, with
            question and solution, is longer.
        reference: answer whose likelihood is the reward, with fields of the problem in
            place of `{solution}` and `{answer}`; None: there is none.
        delimiter: end of the thinking part of a completion, as `</think>`; control
            words in it are control tokens. Empty: completions have no such part.
        on_error: where records are broken, `raise` before the run begins, or `skip` and
            count them.
        grader: `(question, completion, answer) -> outcome in [0, 1] or None`, of
            `curax.verify.graders` or at the top level of a file of one's own.
        environment: `() -> types.Environment` of functions of Python, at the top level
            of a file of one's own, in place of a grader: it answers turns of a
            completion, which are text, and gives its outcome. Its target is the
            problem's answer.
        max_answer_tokens: of what the environment says to a turn; more is cut off.
        workers: worker processes; graders that ask a server need none.
        deadline: seconds per completion, or turn; beyond, the outcome is missing.
        memory_mb: MiB per worker; beyond, the outcome is missing.

    Raises:
        ValueError: in a sentence, for a file, a record or an option.
    """
    if on_error not in ("raise", "skip"):
        raise ValueError(f"task.on_error={on_error!r} must be 'raise' or 'skip'.")
    if hints_file is not None and not hints:
        raise ValueError(
            f"task.hints_file={hints_file!r} is not read without task.hints=True; set "
            "that, or leave the file out."
        )
    prompt_format = PromptFormat(
        tokenizer=load_tokenizer(tokenizer),
        chat=chat,
        system=system,
        template=template,
        thinking=thinking,
        trace=trace,
        reference=reference,
    )
    read = partial(
        usable,
        prompt_format=prompt_format,
        longest=max_prompt_tokens,
        on_error=on_error,
    )
    training = read(sources.open_records(train), layout)
    if held_out is None:
        training, testing = split_by_digest(training, num_held_out)
    else:
        records = sources.open_records(held_out, split="test")
        testing = read(records, held_out_layout or layout)
        training, testing = without_overlap(training, testing, num_held_out)
    writer = None
    if hints:
        writer = HintWriter(
            prompt_format,
            training.problems,
            words=hint_words,
            levels=hint_levels,
            longest=max_hint_prompt_tokens,
            file=hints_file,
            on_error=on_error,
        )
    processes = {"count": workers, "deadline": deadline, "memory_mb": memory_mb}
    files = {"format": prompt_format, "training": training, "testing": testing}
    files |= {"max_trace_tokens": max_trace_tokens, "hint_writer": writer}
    if environment is not None:
        how = prompt_format, max_answer_tokens
        world = environments.of_text(environment, *how, **processes)
        return FileTask(environment=world, delimiter=delimiter, **files).task()
    made = partial(pool, **processes)
    sums = graders.terms_of(grader)
    terms = {name: made(term) for name, term in sums.terms.items()} if sums else {}
    return FileTask(
        workers=terms[sums.outcome] if sums else made(grader),
        sums=sums,
        terms=terms,
        delimiter=delimiter,
        states=graders.statement(grader),
        **files,
    ).task()


def load_tokenizer(folder: str | None) -> text.Tokenizer:
    """The tokenizer of a checkpoint; ValueError for None, a model without a path."""
    if folder is None:
        raise ValueError("task.tokenizer names no folder; name that of a checkpoint.")
    return text.load(folder)


def split_by_digest(problems: ProblemSet, count: int) -> tuple[ProblemSet, ProblemSet]:
    """Training and held-out problems of one file, whatever its order.

    Held out are the `count` problems with the smallest digests; 0: a tenth of all.

    Raises:
        ValueError: no problem would be left to train on.
    """
    count = count or -(-len(problems) // 10)
    if len(problems) == 1:
        raise ValueError(
            "task.train has one usable problem, which cannot be held out and trained "
            "on; name a file with more, or one to hold out as task.held_out."
        )
    if count >= len(problems):
        raise ValueError(
            f"task.num_held_out={count} of the {len(problems)} problems in task.train "
            f"leaves none to train on; set it to at most {len(problems) - 1}."
        )
    order = sorted(range(len(problems)), key=problems.digests.__getitem__)
    testing = problems.subset(sorted(order[:count]))
    return problems.subset(sorted(order[count:]), held_out=count), testing


def without_overlap(
    training: ProblemSet, testing: ProblemSet, count: int
) -> tuple[ProblemSet, ProblemSet]:
    """Training problems whose questions are not held out, and `count` held-out ones.

    The first `count` problems of `testing` are kept, 0: all; the questions of all of
    them are removed from `training`.

    Raises:
        ValueError: `testing` has fewer, or no problem is left to train on.
    """
    if count > len(testing):
        raise ValueError(
            f"task.num_held_out={count} are more than the {len(testing)} problems in "
            f"task.held_out; set it to at most {len(testing)}."
        )
    held_out = {*testing.digests}
    kept = [i for i, digest in enumerate(training.digests) if digest not in held_out]
    if not kept:
        raise ValueError(
            "every problem in task.train is in task.held_out too; name another file."
        )
    testing = testing.subset(range(count or len(testing)))
    return training.subset(kept, held_out=len(training) - len(kept)), testing


def generated(
    training: sources.Records,
    testing: sources.Records,
    *,
    layout: layouts.Layout,
    prompt_format: PromptFormat,
    longest: int,
) -> tuple[ProblemSet, ProblemSet]:
    """Training and held-out problems of generated records; no question is in both.

    Raises:
        ValueError: no problem is usable, or none is left to train on.
    """
    read = partial(
        usable,
        layout=layout,
        prompt_format=prompt_format,
        longest=longest,
        on_error="raise",
    )
    sides = read(training), read(testing)
    if {*sides[0].digests} <= {*sides[1].digests}:
        raise ValueError(
            f"all {len(sides[0])} problems to train on are among the {len(sides[1])} "
            "held out; set task.num_held_out lower, or task.size higher."
        )
    return without_overlap(*sides, 0)


@dataclasses.dataclass(frozen=True, kw_only=True)
class FileTask:
    """The functions of a `Task` on training and held-out problems, of numpy arrays.

    The target of a prompt is the number of its problem; numbers of `testing` continue
    those of `training`.

    Attributes:
        format: of prompts and completions.
        training: problems to train on.
        testing: held-out problems.
        workers: grade (question, completion, answer); None: an environment does.
        environment: answers turns, of which the target is the problem's answer.
        max_trace_tokens: longer traces are not imitated; 0: none is.
        teacher: writes the solution that is imitated; None: it is the problem's.
        hint_writer: makes hints; None: there are none.
        delimiter: ends the thinking part of a completion; empty: nothing does.
        states: of `Task`.
        sums: weights of the terms of the reward; None: it is the outcome.
        terms: workers of each term, `workers` among them.
    """

    format: PromptFormat
    training: ProblemSet
    testing: ProblemSet
    workers: Pool | None = None
    environment: HostEnvironment | None = None
    max_trace_tokens: int = 0
    teacher: Callable[[Problem], str] | None = None
    hint_writer: HintWriter | None = None
    delimiter: str = ""
    states: Callable[[str], bool] | None = None
    sums: graders.WeightedTerms | None = None
    terms: Mapping[str, Pool] = dataclasses.field(default_factory=dict)

    def task(self) -> Task:
        """The task."""
        tokenizer = self.format.tokenizer
        training, testing = self.training, self.testing
        writer, summary, references = self.hint_writer, self._summary(), None
        if self.format.reference is not None:
            references = partial(self.references, width=self._longest_answer())
        return Task(
            vocab_size=tokenizer.size,
            pad=tokenizer.pad,
            end=tokenizer.end,
            num_prompts=len(training),
            num_held_out=len(testing),
            prompts=partial(self.prompts, first=0),
            held_out=partial(self.prompts, first=len(training)),
            traces=self.traces if self.max_trace_tokens else None,
            verify=self.verify if self.workers else None,
            on_device=False,
            decode=lambda tokens: tokenizer.decode(map(int, tokens), control=True),
            in_files=True,
            verify_all=self.verify_all if self.workers else None,
            environment=self.environment
            and dataclasses.replace(self.environment, answer=self.answer_turns),
            start=self.start,
            summary=summary,
            hinting=writer and writer.hinting,
            reference=references,
            delimiter=tuple(tokenizer.control(self.delimiter)),
            states=self.states,
            terms=self.sums
            and Terms(
                weights=self.sums.weights,
                outcome=self.sums.outcome,
                verify_all=self.verify_terms,
            ),
            prompt_form=self.format.description,
            tokenizer=tokenizer.path,
            fingerprint=zlib.crc32(
                b"".join(
                    [*training.digests, b"|", *testing.digests]
                    + [side.contents for side in (training, testing)]
                    + [writer.contents if writer else b""]
                )
            ),
        )

    def prompts(self, ids: Any, *, first: int) -> Prompts:
        """The prompts of problems `first + ids`, left-padded; `tail` only with hints.

        Args:
            ids: `[B]` integers.
            first: target of id 0.
        """
        for read in (self.training, self.testing, self.hint_writer):
            if read is not None:
                read.warn_of_changes()
        ids = np.asarray(ids, np.int32)
        problems = [self._problem(first + i) for i in ids]
        width = max(self.training.longest, self.testing.longest)
        rows = [self.format.prompt(problem) for problem in problems]
        tokens, mask = self.format.padded(rows, width, left=True)
        tail: Any = None
        if self.hint_writer is not None:
            tail = np.fromiter(map(self.format.tail, problems), np.int32)
        return Prompts(tokens=tokens, mask=mask, id=ids, target=first + ids, tail=tail)

    def traces(self, _: Any, prompts: Prompts) -> tuple[Any, Any]:
        """Completions to imitate, `[B, T]` tokens and mask; empty where too long."""
        most, problems = self.max_trace_tokens, map(self._problem, prompts.target)
        rows = map(self._trace_ids, problems)
        return self.format.padded([r if len(r) <= most else [] for r in rows], most)

    def references(self, prompts: Prompts, *, width: int) -> tuple[Any, Any]:
        """Reference answers, `[B, width]` tokens and mask; empty where missing."""
        problems = map(self._problem, np.asarray(prompts.target))
        return self.format.padded([*map(self.format.reference_ids, problems)], width)

    def verify(self, target: Any, tokens: Any) -> Any:
        """The outcome of a completion, as `verify_all`."""
        return self.verify_all([target], [tokens])[0]

    def answer_turns(self, turns: list[Turn]) -> Sequence[Answer | str]:
        """What the environment says to turns, as `HostEnvironment.answer`."""
        told = [t._replace(target=self._problem(t.target).answer) for t in turns]
        return present(self.environment).answer(told)

    def verify_all(self, targets: list[Any], completions: list[Any]) -> Sequence[Any]:
        """The outcome of each completion, or the reason why there is none."""
        return present(self.workers).grade(self._checks(targets, completions))

    def verify_terms(
        self, targets: list[Any], completions: list[Any]
    ) -> dict[str, Sequence[Any]]:
        """What each term of the reward gives, or the reason why it gives nothing."""
        checks = self._checks(targets, completions)
        return {name: workers.grade(checks) for name, workers in self.terms.items()}

    def start(self) -> None:
        """Start the pools.

        Raises:
            RuntimeError: they do not start, in a sentence.
        """
        every = self.terms.values() or [self.workers or self.environment]
        for one in every:
            if make_ready := present(one).start:
                make_ready()

    def _checks(
        self, targets: list[Any], completions: list[Any]
    ) -> list[tuple[str, str, Any]]:
        """Question, completion as text, and answer of each completion."""
        checks = []
        for target, tokens in zip(targets, completions, strict=True):
            problem = self._problem(target)
            completion = self.format.tokenizer.decode(map(int, tokens))
            checks.append((problem.question, completion, problem.answer))
        return checks

    def _problem(self, target: Any) -> Problem:
        number, first = int(target), len(self.training)
        if number < first:
            return self.training.problems[number]
        return self.testing.problems[number - first]

    def _trace_ids(self, problem: Problem) -> list[int]:
        """The ids of the completion to imitate; empty where there is none."""
        if self.teacher is not None:
            problem = dataclasses.replace(problem, solution=self.teacher(problem))
        return self.format.trace_ids(problem)

    def _longest_answer(self) -> int:
        """Tokens of the longest reference answer.

        Raises:
            ValueError: no problem has one.
        """
        every = [*self.training.problems, *self.testing.problems]
        longest = max(len(self.format.reference_ids(problem)) for problem in every)
        if longest == 0:
            raise ValueError(
                f"no problem has what task.reference={self.format.reference!r} names; "
                "name it in task.layout, or set task.reference to None."
            )
        return longest

    def _summary(self) -> str:
        """Sentence that summarises the files.

        Raises:
            ValueError: there is no trace, or none is short enough.
        """
        training, most = self.training, self.max_trace_tokens
        summary = f"{training.summary()}; held out: {self.testing.summary()}"
        if most:
            lengths = [len(self._trace_ids(problem)) for problem in training.problems]
            some = sum(0 < length <= most for length in lengths)
            if not any(lengths):
                raise ValueError(
                    f"no problem to train on has what task.trace={self.format.trace!r} "
                    "names; name it in task.layout, or set task.max_trace_tokens to 0."
                )
            if not some:
                raise ValueError(
                    f"none of the {len(training)} problems to train on has a solution "
                    f"of at most task.max_trace_tokens={most} tokens (the shortest "
                    f"has {min(filter(None, lengths))}); set it higher, or "
                    "to 0."
                )
            summary += f"; {some} solutions to imitate"
        if self.hint_writer is not None:
            summary += f"; {self.hint_writer.summary}"
        return summary + "."
