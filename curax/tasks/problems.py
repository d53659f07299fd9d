"""Problems with answers, read from files: prompts, reference solutions, a grader.

    file -> records -> layout -> Problem -> chat template -> tokens

Files are scanned once, when the task is built: what is asked twice, what is too long
and, if wished, what is broken is left out and counted. Afterwards a prompt is read and
tokenised when it is needed, by its id, so that a run holds numbers and no text.
"""

import copy
import functools
import sys
import time
import zlib
from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np

from curax.settings.config_types import Count, Function, Natural, Positive
from curax.tasks import layouts, sources, text
from curax.tasks.forms import Form, padded
from curax.tasks.hints import WORDS, Tutor
from curax.tasks.layouts import Problem
from curax.types import Prompts, Task
from curax.verify import graders
from curax.verify.workers import Workers

CACHED = 4096  # problems that stay read, those used last
EVERY_S = 5.0  # between two lines about a scan that takes long


class Side:
    """The problems of one file that can be asked, by number."""

    def __init__(
        self,
        records: sources.Records,
        layout: layouts.Layout,
        form: Form,
        *,
        longest: int,
        on_error: str,
    ):
        """Scan the file; a layout that is to be detected is that of the whole file.

        Raises:
            ValueError: nothing in it can be asked, or a record is broken.
        """
        layout = sources.settled(records, layout)
        self._records, self._layout, self._form = records, layout, form
        index = sources.scan(
            records,
            layout,
            lambda problem: len(form.prompt(problem)),
            longest=longest,
            on_error=on_error,
            told=Told(records.name),
        )
        self.rows, self.digests = np.asarray(index.rows), list(index.digests)
        self.counts, self.longest = dict(index.counts), index.longest
        self.problem = functools.lru_cache(CACHED)(self._problem)

    def __len__(self) -> int:
        return len(self.rows)

    def _problem(self, number: int) -> Problem:
        return self._layout(self._records[int(self.rows[number])])

    def only(self, which: Sequence[int], **counts: int) -> "Side":
        """These alone, by their numbers here; `counts` are told as well."""
        some = copy.copy(self)
        some.rows = self.rows[np.asarray(which, np.int64)]
        some.digests = [self.digests[i] for i in which]
        some.counts = self.counts | counts
        some.problem = functools.lru_cache(CACHED)(some._problem)
        return some

    def told(self) -> str:
        """What was found, in words."""
        found = f"{self._records.name}: {len(self)} of {self.counts['read']} problems"
        reasons = {
            "duplicate": "asked before",
            "too_long": "too long",
            "broken": "broken",
            "held_out": "held out",
        }
        out = [
            f"{self.counts[name]} {words}"
            for name, words in reasons.items()
            if self.counts.get(name)
        ]
        return f"{found} ({', '.join(out)})" if out else found


class Told:
    """Says how far a scan has come, if it takes long."""

    def __init__(self, name: str):
        """Nothing is said yet."""
        self._name, self._last = name, time.monotonic()

    def __call__(self, done: int, total: int) -> None:
        """So many records are read."""
        if time.monotonic() - self._last > EVERY_S:
            self._last = time.monotonic()
            print(f"{self._name}: {done} of {total} read", file=sys.stderr, flush=True)


def task(
    *,
    tokenizer: str | None = None,
    train: str,
    held_out: str | None = None,
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
    hints_file: str | None = None,
    hint_levels: Count = 3,
    hint_words: str = WORDS,
    max_hint_prompt_tokens: Count = 4096,
    reference: str | None = None,
    delimiter: str = "",
    on_error: str = "raise",
    grader: Function = graders.mathematics,
    workers: Count = 2,
    deadline: Positive = 5.0,
    memory_mb: Count = 2048,
) -> Task:
    """The task. A prompt is a line of a file; its id is its number among those kept.

    Args:
        tokenizer: folder of a checkpoint; its tokenizer and chat template are taken.
            None: the `path` of the model.
        train: file of problems: JSON lines, parquet, several of one of these, or a
            folder of array_record.
        held_out: file of held-out problems. None: some of `train` are held out, chosen
            by a digest of the question, whatever their order. No question is on both
            sides: what is held out does not train.
        num_held_out: held-out problems; 0: all of the file, or a tenth of `train`.
        layout: record to problem, of `curax.tasks.layouts`; that of `layouts.detect` is
            decided once for each file.
        held_out_layout: of the held-out file; None: the same.
        chat: ask as a turn of the chat template; None: where there is one.
        system: the system turn.
        template: what is asked, with the question in place of `{question}`.
        thinking: the template's `enable_thinking`.
        trace: what is imitated, with what the file has in place of `{solution}` and
            `{answer}`.
        max_prompt_tokens: longer prompts are left out and counted.
        max_trace_tokens: longer solutions are not imitated; 0: none is, and there can
            be no warm start.
        hints: prompts can be hinted, by solutions, by hints that the policy writes when
            shown one, and by hints of a file, each where there are any.
        hints_file: file of records with `question` and `hints`, a list of texts by
            level, the weakest first; None: hints are those in the records of `train`.
        hint_levels: levels of hints, in files and when the policy writes them.
        hint_words: what introduces a hint at the end of the user's text, with the hint
            in place of `{hint}`.
        max_hint_prompt_tokens: hints are not asked for where question and solution
            take more.
        reference: an answer whose likelihood is the reward, with what the file has in
            place of `{solution}` and `{answer}`; None: there is none.
        delimiter: what ends the thinking in a completion, as `</think>`; control words
            in it are control tokens. Empty: nothing does.
        on_error: `raise`: a broken record ends the run before it begins; `skip`: it is
            left out and counted.
        grader: `(question, completion, answer) -> outcome in [0, 1] or None`, in
            worker processes; of `curax.verify.graders`, or a function of one's own at
            the top level of a file.
        workers: processes that grade.
        deadline: seconds for one completion; then its outcome is missing.
        memory_mb: memory of one process; beyond it, an outcome is missing.

    Returns:
        The task; it is verified on the host.

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
    form = Form(
        tokenizer=text.load(named(tokenizer)),
        chat=chat,
        system=system,
        template=template,
        thinking=thinking,
        trace=trace,
        reference=reference,
    )
    side = partial(Side, form=form, longest=max_prompt_tokens, on_error=on_error)
    learnt = side(sources.open_records(train), layout)
    if held_out is None:
        learnt, tested = divided(learnt, num_held_out or -(-len(learnt) // 10))
    else:
        records = sources.open_records(held_out, split="test")
        tested = side(records, held_out_layout or layout)
        learnt, tested = apart(learnt, tested, num_held_out)
    tutor = None
    if hints:
        tutor = Tutor(
            form,
            learnt.problem,
            len(learnt),
            words=hint_words,
            levels=hint_levels,
            longest=max_hint_prompt_tokens,
            file=hints_file,
            on_error=on_error,
        )
    return assembled(
        form,
        learnt,
        tested,
        max_trace_tokens=max_trace_tokens,
        judges=Workers(grader, count=workers, deadline=deadline, memory_mb=memory_mb),
        tutor=tutor,
        delimiter=delimiter,
    )


def named(tokenizer: str | None) -> str:
    """The folder of the tokenizer, which the model may have to name."""
    if tokenizer is None:
        raise ValueError("task.tokenizer names no folder; name that of a checkpoint.")
    return tokenizer


def divided(side: Side, count: int) -> tuple[Side, Side]:
    """One file in two, to learn and to test: of the smallest digests `count` test.

    Raises:
        ValueError: none would be left to learn.
    """
    if count >= len(side):
        raise ValueError(
            f"task.num_held_out={count} of the {len(side)} problems in task.train "
            f"leaves none to train on; set it to at most {len(side) - 1}."
        )
    order = sorted(range(len(side)), key=side.digests.__getitem__)
    tested = side.only(sorted(order[:count]))
    return side.only(sorted(order[count:]), held_out=count), tested


def apart(learnt: Side, tested: Side, count: int) -> tuple[Side, Side]:
    """What is held out is not trained on; the first `count` of it test, 0: all.

    What the file holds beyond them is kept out of training all the same.

    Raises:
        ValueError: there are fewer, or none would be left to learn.
    """
    if count > len(tested):
        raise ValueError(
            f"task.num_held_out={count} are more than the {len(tested)} problems in "
            f"task.held_out; set it to at most {len(tested)}."
        )
    held = {*tested.digests}
    kept = [i for i, digest in enumerate(learnt.digests) if digest not in held]
    if not kept:
        raise ValueError(
            "every problem in task.train is in task.held_out too; name another file."
        )
    tested = tested.only(range(count or len(tested)))
    return learnt.only(kept, held_out=len(learnt) - len(kept)), tested


def assembled(
    form: Form,
    learnt: Side,
    tested: Side,
    *,
    max_trace_tokens: int,
    judges: Workers,
    tutor: Tutor | None = None,
    delimiter: str = "",
) -> Task:
    """The task of two sides.

    A prompt's target is its number in `learnt`, or behind all of them in `tested`.

    Args:
        form: of prompts and completions.
        learnt: what is trained on.
        tested: what is held out.
        max_trace_tokens: longer solutions are not imitated; 0: none is.
        judges: give outcomes of (question, completion, answer).
        tutor: makes hints; None: there are none.
        delimiter: ends the thinking in a completion; empty: nothing does.
    """
    tokenizer, width = form.tokenizer, max(learnt.longest, tested.longest)

    def problem(target: Any) -> Problem:
        number = int(target)
        if number < len(learnt):
            return learnt.problem(number)
        return tested.problem(number - len(learnt))

    def prompts(ids: Any, *, first: int) -> Prompts:
        ids = np.asarray(ids, np.int32)
        asked = [problem(first + i) for i in ids]
        rows = [form.prompt(of) for of in asked]
        tokens, mask = padded(rows, width, pad=tokenizer.pad, left=True)
        tail: Any = None
        if tutor is not None:
            tail = np.array([form.tail(of) for of in asked], np.int32)
        return Prompts(tokens=tokens, mask=mask, id=ids, target=first + ids, tail=tail)

    def traces(_: Any, prompts: Prompts) -> tuple[Any, Any]:
        rows = [form.completion(problem(target)) for target in prompts.target]
        rows = [row if len(row) <= max_trace_tokens else [] for row in rows]
        return padded(rows, max_trace_tokens, pad=tokenizer.pad, left=False)

    def answers(prompts: Prompts) -> tuple[Any, Any]:
        rows = [form.answer(problem(target)) for target in np.asarray(prompts.target)]
        return padded(rows, longest_answer, pad=tokenizer.pad, left=False)

    def verify_all(targets: list[Any], completions: list[Any]) -> Sequence[Any]:
        checks = []
        for target, tokens in zip(targets, completions, strict=True):
            asked = problem(target)
            said = tokenizer.decode([int(token) for token in tokens])
            checks.append((asked.question, said, asked.answer))
        return judges.grade(checks)

    told = f"{learnt.told()}; held out: {tested.told()}"
    if max_trace_tokens:
        lengths = [len(form.completion(learnt.problem(i))) for i in range(len(learnt))]
        some = sum(0 < length <= max_trace_tokens for length in lengths)
        if not some:
            raise ValueError(
                f"none of the {len(learnt)} problems to train on has a solution of at "
                f"most task.max_trace_tokens={max_trace_tokens} tokens (the shortest "
                f"has {min(filter(None, lengths), default=0)}); set it higher, or to 0."
            )
        told += f"; {some} solutions to imitate"
    longest_answer = 0
    if form.reference is not None:
        longest_answer = max(
            len(form.answer(problem(i))) for i in range(len(learnt) + len(tested))
        )
        if longest_answer == 0:
            raise ValueError(
                f"no problem has what task.reference={form.reference!r} names; name "
                "it in task.layout, or set task.reference to None."
            )
    if tutor is not None:
        told += f"; {tutor.told}"
    return Task(
        vocab_size=tokenizer.size,
        pad=tokenizer.pad,
        end=tokenizer.end,
        num_prompts=len(learnt),
        num_held_out=len(tested),
        prompts=partial(prompts, first=0),
        held_out=partial(prompts, first=len(learnt)),
        traces=traces if max_trace_tokens else None,
        verify=lambda target, tokens: verify_all([target], [tokens])[0],
        on_device=False,
        decode=lambda tokens: tokenizer.decode([int(t) for t in tokens], control=True),
        in_files=True,
        verify_all=verify_all,
        start=judges.start,
        told=told + ".",
        hinting=tutor and tutor.hinting,
        reference=None if form.reference is None else answers,
        delimiter=tuple(tokenizer.control(delimiter)),
        prompt_form=form.described,
        mark=zlib.crc32(b"".join([*learnt.digests, b"|", *tested.digests])),
    )
