"""Word problems in plain English, generated, and a teacher with bad habits.

    Ann has 3 bags with 6 coins in each. Ben is 9 years old. She loses 4 of them.
    How many coins does she have now?           3 * 6 = 18, 18 - 4 = 14, #### 14

A problem has one to three steps, and may have a number that does not matter. All are
functions of integer seeds. The policy, its tokenizer and its files are those of real
checkpoints; only the English is small.
"""

import itertools
import random
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple

from curax.settings.config_types import CheckpointPath, Count, Fraction, Positive, Seed
from curax.settings.declared import declares
from curax.tasks import byte_pairs, file_task, layouts, text
from curax.tasks.hints import HintWriter
from curax.tasks.prompt_format import PromptFormat
from curax.tasks.records import of_items
from curax.types import Task
from curax.verify import graders
from curax.verify.workers import pool

MOST_STEPS = 3
LARGEST = 20  # number in a text
RESULT = 99  # largest number in a solution
MAX_PROMPT_TOKENS, MAX_TRACE_TOKENS = 96, 52
VOCABULARY = 512  # ids of the tokenizer at most
LEARNT_FROM = 2000  # problems, of the tokenizer
UNSEEN = ("problems", "forms", "numbers")  # what held-out problems alone have

WOMEN = ("Ann", "Cleo", "Eve", "Gina", "Ida", "Kim")
MEN = ("Ben", "Dan", "Finn", "Hugo", "Jon", "Leo")
THINGS = (
    *("apples", "books", "cards", "coins", "dice", "eggs"),
    *("marbles", "nuts", "pens", "shells", "stamps", "toys"),
)


class Form(NamedTuple):
    """A sentence with places for names and numbers, and how the teacher reads it."""

    text: str
    misread: float  # how often the teacher takes the wrong operation, or is distracted
    held_out: bool = False  # only in held-out problems


START = (
    Form("{name} has {a} {thing}.", 0),
    Form("There are {a} {thing} in the bag of {name}.", 0),
    Form("{name} has a box with {a} {thing} in it.", 0),
    Form("In the box of {name} there are {a} {thing}.", 0, held_out=True),
)
PACKED = (
    Form("{name} has {k} bags with {a} {thing} in each.", 0.2),
    Form("{name} has {k} boxes, and there are {a} {thing} in each box.", 0.5),
    Form("There are {a} {thing} in each of the {k} bags of {name}.", 0.6, True),
)
GAIN = (
    Form("{She} buys {b} more.", 0.05),
    Form("{She} finds {b} {thing}.", 0.1),
    Form("{friend} gives {b} {thing} to {name}.", 0.4),
    Form("{name} buys {b} more {thing}.", 0.05, held_out=True),
)
LOSS = (
    Form("{She} loses {b} of them.", 0.05),
    Form("{She} gives {b} {thing} to {friend}.", 0.3),
    Form("{She} sells {b} of the {thing}.", 0.4),
    Form("{friend} buys {b} of them from {name}.", 0.9),
    Form("{She} gives {b} of them to {friend}.", 0.3, held_out=True),
)
SHARE = (
    Form("{She} shares them equally among {k} friends.", 0.3),
    Form("{She} puts equally many of them into each of {k} bags.", 0.6),
    Form("{She} shares the {thing} equally among {k} boxes.", 0.6, held_out=True),
)
ASIDE = (
    Form("{friend} is {b} years old.", 0.1),
    Form("The bus of {friend} takes {b} minutes.", 0.2),
    Form("{name} read {b} pages in a book.", 0.5),
    Form("{friend} has {b} {other}.", 0.9),
    Form("{name} is {b} years old.", 0.1, held_out=True),
)
IN_ALL = (
    Form("How many {thing} does {she} have now?", 0),
    Form("How many {thing} does {name} have in the end?", 0),
    Form("How many {thing} are there now?", 0, held_out=True),
)
EACH = (
    Form("How many {thing} are in each share?", 0),
    Form("How many {thing} are there in each?", 0, held_out=True),
)
SO = "So"  # before an answer that is a sentence
ADVICE = {"+": "Add", "-": "Take away", "*": "Multiply by", "/": "Divide by"}
LEVELS = 3  # of hints
TAKEN_FOR = {"+": "-", "-": "+", "*": "+", "/": "-"}  # what a sign is misread as
FORGETS = 0.1  # the last of several steps
SLIP, CARRY_SLIP = 0.03, 0.12  # of a sum or product; where a digit is carried


class Step(NamedTuple):
    """An operation on what there is so far, one of `+ - * /`, and its sentence."""

    sign: str
    number: int
    form: Form


@dataclass(frozen=True, kw_only=True)
class WordProblem:
    """A problem: a number, steps from it on, and maybe a number that does not matter.

    Attributes:
        begins: sentence of the first number, which is that of `steps[0]` if it packs.
        first: the first number.
        steps: what happens, in the order of the text.
        aside: the number that does not matter, with its sentence; None: there is none.
        place: number of sentences before it.
        asks: sentence of the question.
        words: names and things, by their places in a form.
    """

    begins: Form
    first: int
    steps: tuple[Step, ...]
    aside: Step | None
    place: int
    asks: Form
    words: Mapping[str, str]

    @property
    def numbers(self) -> list[int]:
        """The numbers in the text; a distractor's last."""
        steps = [*self.steps, *([self.aside] if self.aside else [])]
        return [self.first, *(step.number for step in steps)]

    def question(self) -> str:
        """The text of the problem."""
        packs = self.steps[0].number if self.steps[0].sign == "*" else 0
        said = [self.begins.text.format(a=self.first, k=packs, **self.words)]
        for step in self.steps:
            if step.sign != "*":
                number = {"b": step.number, "k": step.number}
                said.append(step.form.text.format(**number, **self.words))
        if self.aside:
            form, number = self.aside.form, self.aside.number
            said.insert(self.place, form.text.format(b=number, **self.words))
        return " ".join([*said, self.asks.text.format(**self.words)])

    def orders(self) -> Iterator[tuple[Step, ...]]:
        """The orders of the steps that lead to the answer, that of the text first.

        What is packed comes first and what is shared last; gains and losses between
        them change places where there is never less than nothing.
        """
        changes = [step for step in self.steps if step.sign in "+-"]
        before = tuple(step for step in self.steps if step.sign == "*")
        behind = tuple(step for step in self.steps if step.sign == "/")
        for order in dict.fromkeys(itertools.permutations(changes)):
            steps = (*before, *order, *behind)
            if all(0 <= n <= RESULT for n in results(self.first, steps)):
                yield steps

    def answer(self) -> int:
        """The right answer."""
        return results(self.first, self.steps)[-1]

    def hints(self) -> list[str]:
        """Sentences that name the first steps, by level: `Begin with 6. Take away 4.`

        Level l of L names max(1, round(l / L of them)), the last all; none says what
        comes out.
        """
        said = [f"Begin with {self.first}."]
        said += [f"{ADVICE[step.sign]} {step.number}." for step in self.steps]
        counts = map(self.named, range(1, LEVELS + 1))
        return [" ".join(said[: 1 + count]) for count in counts]

    def named(self, level: int) -> int:
        """How many steps the hint of a level names; 0: there is no hint."""
        return min(level, max(1, round(level / LEVELS * len(self.steps))))

    def sentence(self, number: int) -> str:
        """An answer in words, as it follows others: `Ann has 14 coins.`"""
        shared = self.steps[-1].sign == "/"
        form = "there are {n} {thing} in each." if shared else "{name} has {n} {thing}."
        return form.format(n=number, **self.words)


def results(first: int, steps: Sequence[Step]) -> list[int]:
    """What there is after each step; -1 for a quotient that is no integer."""
    found, now = [], first
    for sign, number, _ in steps:
        now = applied(now, sign, number)
        found.append(now)
    return found


def applied(now: int, sign: str, number: int) -> int:
    """A number after a step; -1 for a quotient that is no integer."""
    if sign == "/":
        return -1 if now % number else now // number
    return {"+": now + number, "-": now - number, "*": now * number}[sign]


def solution(
    first: int,
    steps: Sequence[Step],
    said: Sequence[int] | None = None,
    sentence: Callable[[int], str] | None = None,
) -> str:
    """The worked solution that takes these steps: a line for each, and the answer.

    A product is written with the number of packs first.

    Args:
        first: number that the steps begin from.
        steps: in the order in which they are taken.
        said: what is said to come out of each; None: what does.
        sentence: the answer in words, behind `SO`; None: the number, behind `####`.
    """
    said = results(first, steps) if said is None else said
    lines = []
    for now, step, result in zip([first, *said[:-1]], steps, said, strict=True):
        sides = [step.number, now] if step.sign == "*" else [now, step.number]
        lines.append(f"{sides[0]} {step.sign} {sides[1]} = {result}")
    last = f"{SO} {sentence(said[-1])}" if sentence else f"#### {said[-1]}"
    return "\n".join([*lines, last])


def is_unseen(number: int) -> bool:
    """Whether only held-out problems may give this number: 7, 16."""
    return number % 9 == 7


def problem(
    seed: int, *, steps: int, distractors: float = 0.5, unseen: str | None = None
) -> WordProblem:
    """The problem of a seed.

    Args:
        seed: any integer.
        steps: operations, 1 to `MOST_STEPS`.
        distractors: share of problems with a number that does not matter.
        unseen: of a held-out problem what training problems never have: `forms`, all
            sentences are held-out ones; `numbers`, one number or more is; otherwise
            None.
    """
    made = random.Random(f"{seed} {steps} {distractors} {unseen}")
    while True:
        found = _attempt(made, steps, made.random() < distractors, unseen == "forms")
        fits = all(0 < n <= RESULT for n in results(found.first, found.steps))
        if fits and any(map(is_unseen, found.numbers)) == (unseen == "numbers"):
            return found


def _attempt(
    made: random.Random, steps: int, distracts: bool, held_out: bool
) -> WordProblem:
    """A problem whose numbers may not fit."""

    def pick(forms: Sequence[Form]) -> Form:
        return made.choice([form for form in forms if form.held_out == held_out])

    chosen: list[Step] = []
    packs = made.random() < 0.3
    shares = made.random() < 0.2 and (steps > packs)
    begins = pick(PACKED if packs else START)
    if packs:
        chosen.append(Step("*", made.randint(2, 5), begins))
    for _ in range(steps - packs - shares):
        sign, forms = made.choice((("+", GAIN), ("-", LOSS)))
        chosen.append(Step(sign, made.randint(2, 9), pick(forms)))
    if shares:
        chosen.append(Step("/", made.randint(2, 5), pick(SHARE)))
    people = made.sample(WOMEN + MEN, 2)
    she = "she" if people[0] in WOMEN else "he"
    thing, other = made.sample(THINGS, 2)
    words = {"name": people[0], "friend": people[1], "she": she, "She": she.title()}
    return WordProblem(
        begins=begins,
        first=made.randint(2, 9 if packs else LARGEST),
        steps=tuple(chosen),
        aside=Step("+", made.randint(2, LARGEST), pick(ASIDE)) if distracts else None,
        place=made.randint(0, len(chosen) + (not packs)),
        asks=pick(EACH if shares else IN_ALL),
        words=words | {"thing": thing, "other": other},
    )


def taught(
    word_problem: WordProblem, seed: int, *, sentences: bool = False, level: int = 0
) -> str:
    """The worked solution that the teacher writes, mostly wrong.

    The teacher is distracted, takes the wrong operation, forgets the last step and
    makes slips, each with a probability that depends on the sentence or the digits; so
    some problems are mostly solved and some hardly ever. Steps come in any order that
    leads to the answer.

    Args:
        word_problem: to solve.
        seed: of what goes wrong.
        sentences: whether the answer is one, or a number.
        level: of the hint that the teacher has read, whose steps come first and are
            taken as it says; 0: none.
    """
    made = random.Random(f"teacher {seed}")
    named = word_problem.named(level)
    known, every = word_problem.steps[:named], word_problem.steps
    orders = [order for order in word_problem.orders() if order[:named] == known]
    steps, whole = [*made.choice(orders)], named == len(every)
    if len(steps) > 1 and not whole and made.random() < FORGETS:
        steps.pop()
    aside = word_problem.aside
    if aside and not whole and made.random() < aside.form.misread:
        steps.insert(made.randint(named, len(steps)), aside)
    said, now = [], word_problem.first
    for i, step in enumerate(steps):
        free = step is not aside and i >= named
        if free and made.random() < step.form.misread:
            step = step._replace(sign=TAKEN_FOR[step.sign])
        if applied(now, step.sign, step.number) < 0:
            step = step._replace(sign="+")
        steps[i], now = step, applied(now, step.sign, step.number)
        before = said[-1] if said else word_problem.first
        if made.random() < (CARRY_SLIP if carries(before, step) else SLIP):
            now = abs(now + made.choice((-10, -1, 1, 10)))
        said.append(now)
    words = word_problem.sentence if sentences else None
    return solution(word_problem.first, steps, said, words)


def carries(now: int, step: Step) -> bool:
    """Whether a step carries or borrows a digit, or is a product or quotient."""
    digits = applied(now % 10, step.sign, step.number % 10)
    return step.sign in "*/" or not 0 <= digits < 10


def records(
    count: int,
    *,
    seed: int = 0,
    least_steps: int = 1,
    most_steps: int = MOST_STEPS,
    distractors: float = 0.5,
    unseen: str | None = None,
    sentences: bool = False,
    hinted: float = 0.0,
) -> Iterator[dict[str, Any]]:
    """Problems as records of a file, with as many of each number of steps.

    Args:
        count: how many; some may ask the same.
        seed: record i is the problem of `seed + i`.
        least_steps: of a problem.
        most_steps: likewise.
        distractors: as `problem`, and so is `unseen`.
        unseen: what training problems never have.
        sentences: whether answers of the teacher are sentences, or numbers.
        hinted: share of which the teacher has read a hint.

    Yields:
        Question, answer, solution, which is right, `taught`, the teacher's, level, the
        number of steps, the answer as a sentence, and hints by level; `read`, the hint
        that the teacher has read, where there is one.
    """
    for i in range(seed, seed + count):
        steps = least_steps + i % (most_steps - least_steps + 1)
        made = problem(i, steps=steps, distractors=distractors, unseen=unseen)
        drawn = random.Random(f"hint {i}")
        level = drawn.randint(1, LEVELS) if drawn.random() < hinted else 0
        yield {
            "question": made.question(),
            "answer": str(made.answer()),
            "solution": solution(made.first, made.steps),
            "taught": taught(made, i, sentences=sentences, level=level),
            "level": str(steps),
            "sentence": made.sentence(made.answer()),
            "hints": made.hints(),
        } | ({"read": made.hints()[level - 1]} if level else {})


@cache
def _folder() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="curax-words-")


@cache
def own_tokenizer(*, pieces: bool) -> text.Tokenizer:
    """The tokenizer of word problems, learnt from some of them: the same each time.

    Its files are in a folder of this process. Each digit is a token.

    Args:
        pieces: SentencePiece's, in place of byte pairs over bytes.

    Raises:
        ImportError: `tokenizers` is not installed.
    """
    form = "user\n{question}\nassistant\n{taught}"
    learnt = (form.format_map(record) for record in records(LEARNT_FROM))
    there = Path(_folder().name)
    if pieces:
        return byte_pairs.pieces(there / "pieces", learnt, vocab_size=VOCABULARY)
    return byte_pairs.tokenizer(there, learnt, vocab_size=VOCABULARY, digits=True)


@declares(tokenizer="tokenizer", prompt_tokens="max_prompt_tokens")
def task(
    *,
    tokenizer: CheckpointPath | None = None,
    pieces: bool = False,
    size: Count = 14_400,
    num_held_out: Count = 512,
    seed: Seed = 0,
    least_steps: Count = 1,
    most_steps: Count = MOST_STEPS,
    distractors: Fraction = 0.5,
    unseen: str = UNSEEN[0],
    hints: bool = False,
    hinted_traces: Fraction = 0.0,
    sentences: bool = False,
    max_prompt_tokens: Count = MAX_PROMPT_TOKENS,
    max_trace_tokens: Count = MAX_TRACE_TOKENS,
    workers: Count = 2,
    deadline: Positive = 5.0,
    memory_mb: Count = 2048,
) -> Task:
    """The task of generated word problems, graded by their last number.

    The warm start imitates the teacher. Hints are right solutions, for
    `hint.reference_prefix`, or sentences that name steps, for `hint.from_file`.

    Args:
        tokenizer: folder of a checkpoint, or a name on the hub; None: the `path` of
            the model, or where that has none, the tokenizer of word problems.
        pieces: the tokenizer of word problems is SentencePiece's, in place of byte
            pairs over bytes.
        size: problems to train on, repeated questions included.
        num_held_out: held-out problems, of seeds behind those of the others; their
            questions are removed from the training problems.
        seed: of the problems.
        least_steps: of a problem.
        most_steps: likewise, up to 3.
        distractors: share of problems with a number that does not matter.
        unseen: what only held-out problems have: `problems`, nothing but that they are
            others; `forms`, their sentences; `numbers`, one of their numbers or more.
        hints: prompts can be hinted.
        hinted_traces: share of the solutions imitated that follow a hint, a sentence or
            more; without them a policy that knows nothing else cannot read hints.
        sentences: answers are sentences, as `Ann has 14 coins.`, behind the word `So`,
            which ends a thought; the right ones are references.
        max_prompt_tokens: longer prompts are left out and counted.
        max_trace_tokens: longer solutions are not imitated.
        workers: processes that grade.
        deadline: seconds for one completion.
        memory_mb: memory of one process.

    Raises:
        ValueError: in a sentence, for an option.
    """
    if not least_steps <= most_steps <= MOST_STEPS:
        raise ValueError(
            f"task.most_steps={most_steps} must be at least task.least_steps="
            f"{least_steps} and at most {MOST_STEPS}; set both to {MOST_STEPS} or less."
        )
    if unseen not in UNSEEN:
        raise ValueError(f"task.unseen={unseen!r} must be one of {', '.join(UNSEEN)}.")
    if pieces and tokenizer:
        raise ValueError(
            f"task.pieces=True is of a tokenizer learnt here, and {tokenizer} has its "
            "own; set task.pieces=False."
        )
    if sentences and hints:
        raise ValueError(
            "task.hints=True are solutions whose answers are numbers, which are not "
            "those of task.sentences=True; set one of them to False."
        )
    if hinted_traces and not hints:
        raise ValueError(
            f"task.hinted_traces={hinted_traces} needs task.hints=True; set that too."
        )
    own = text.load(tokenizer) if tokenizer else own_tokenizer(pieces=pieces)
    prompt_format = PromptFormat(
        tokenizer=own,
        reference=" {solution}" if sentences else None,
    )
    steps = {"least_steps": least_steps, "most_steps": most_steps}
    drawn = partial(records, distractors=distractors, sentences=sentences, **steps)
    learnt = [*drawn(size, seed=seed, hinted=hinted_traces)]
    asked = [*drawn(num_held_out, seed=seed + size, unseen=unseen)]
    training, testing = file_task.generated(
        of_items("word problems", learnt),
        of_items("word problems, held out", asked),
        layout=partial(
            layouts.fields,
            solution="sentence" if sentences else "solution",
            level="level",
            hints="hints" if hints else None,
        ),
        prompt_format=prompt_format,
        longest=max_prompt_tokens,
    )
    solved = {record["question"]: record["taught"] for record in learnt}
    read = {record["question"]: record.get("read", "") for record in learnt}
    writer = None
    if hints:
        longest = 2 * max_prompt_tokens
        writer = HintWriter(
            prompt_format, training.problems, longest=longest, levels=LEVELS
        )
    made = file_task.FileTask(
        format=prompt_format,
        training=training,
        testing=testing,
        workers=pool(
            graders.numbers, count=workers, deadline=deadline, memory_mb=memory_mb
        ),
        max_trace_tokens=max_trace_tokens,
        teacher=lambda problem: solved[problem.question],
        hint_writer=writer,
        delimiter=SO if sentences else "",
    ).task()
    if writer is None or not hinted_traces:
        return made
    return replace(made, trace_contexts=partial(writer.shown, read))
