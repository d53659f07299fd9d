"""Graders: functions of prompt, completion and right answer that return an outcome.

A grader is a plain function `(prompt, completion, answer) -> float | None`, in [0, 1];
None is a missing outcome, which is not 0. Options are bound with `functools.partial`.
A function set as its attribute `start` is called once in each worker process, so that
imports do not count as time of a check.
"""

import dataclasses
import difflib
import inspect
import logging
import re
import signal
import threading
from collections.abc import Callable, Mapping
from decimal import Decimal
from functools import lru_cache, partial
from typing import Any, NamedTuple, TypeVar

from curax.settings.config_paths import options, unbound
from curax.settings.config_types import Function
from curax.settings.declared import declared, declares
from curax.verify import answers, sizes
from curax.verify.http import http as http
from curax.verify.judge import judge as judge
from curax.verify.unicode_math import as_latex

LONGEST = 2000  # characters of an answer; longer ones are wrong
SIDES = 16  # constants in an equation; one with more is wrong
HUGE = 10.0**7  # decimal logarithm beyond which a number equals no cheap one
NO_ANSWER = "no answer stated"  # the reason of such a completion, which is wrong
SILENT = (  # the end of a sentence, where that is most of them
    "state no answer that the grader reads, no box, `#### `, `Answer:` or `The answer "
    "is`; where the last number is the answer take the grader graders.numbers, else "
    "ask for a box in the system message or the template"
)
GALLERY = "https://github.com/open-thought/reasoning-gym/blob/main/GALLERY.md"
CACHED = 2**14  # verdicts of math-verify that are kept, and parsed answers

_T = TypeVar("_T")
_ANGLES = re.compile(r"\\(?:sin|cos|tan|cot|sec|csc)(?![A-Za-z])")
_DEGREES = re.compile(r"([0-9]+(?:\.[0-9]+)?) *\^ *(?:\{ *\\circ *\}|\\circ)")
_PRODUCT = re.compile(r"(?<=[0-9]\))(?=\(-?[0-9.]+\))")
_TAGGED = re.compile(r"<answer>((?:(?!</?answer>).)*)</answer>", re.DOTALL)


class WeightedTerms(NamedTuple):
    """The terms of a weighted grader, its options checked."""

    terms: Mapping[str, Callable[..., Any]]
    weights: Mapping[str, float]
    outcome: str


@declares(other_terms=True)
def weighted(
    prompt: str,
    completion: str,
    answer: Any,
    *,
    terms: Mapping[str, Function],
    weights: Mapping[str, float],
    outcome: str,
) -> float | None:
    """The outcome by a grader of several terms: that of the term that is declared.

    A run trains on the weighted sum of all of them,

        reward = sum over names k of weights[k] * terms[k](prompt, completion, answer) ,

    which `shape_reward` gets in place of the outcome. Each term is graded in processes
    of its own, and its mean is logged as `term/NAME`.

    Args:
        prompt: for the terms.
        completion: likewise.
        answer: likewise.
        terms: graders by name.
        weights: of the terms, by the same names; 0: logged, and never trained on.
        outcome: name of the term that gates, stops, pass rates and evaluations see.
    """
    return terms[outcome](prompt, completion, answer)


def terms_of(grader: Callable[..., Any]) -> WeightedTerms | None:
    """The terms of a weighted grader; None: it is another.

    Raises:
        ValueError: its options do not fit each other, in a sentence.
    """
    if unbound(grader) is not weighted:
        return None
    found = options(grader)
    terms, weights = found.get("terms") or {}, found.get("weights") or {}
    wrong, outcome = None, found.get("outcome") or ""
    if not (isinstance(terms, Mapping) and isinstance(weights, Mapping)):
        raise ValueError(
            "graders.weighted has terms or weights that are no mapping; give both by "
            "name, {'right': ...}."
        )
    names = ", ".join(terms) or "none"
    if {*terms} != {*weights}:
        wrong = f"weights of {', '.join(weights) or 'none'}, and terms {names}; give "
        wrong += "each term one weight"
    elif outcome not in terms:
        wrong = f"outcome={outcome!r} and terms {names}; set it to the name of one"
    elif not all(map(_is_weight, weights.values())):
        wrong = f"weights {dict(weights)}; make them finite numbers"
    elif not all(map(callable, terms.values())):
        wrong = f"terms {names} of which not all are graders; name functions"
    elif any(unbound(term) is weighted for term in terms.values()):
        wrong = "a term that is weighted itself; list its terms in its place"
    if wrong:
        raise ValueError(f"graders.weighted has {wrong}.")
    return WeightedTerms(terms, weights, outcome)


def _is_weight(value: Any) -> bool:
    """Whether a value is a number that float32 holds."""
    number = isinstance(value, int | float) and not isinstance(value, bool)
    return number and abs(value) < 3e38


def outcome_of(grader: Callable[..., Any]) -> Callable[..., Any]:
    """The grader of the outcome: the declared term of a weighted one, else itself."""
    sums = terms_of(grader)
    return sums.terms[sums.outcome] if sums else grader


def statement(grader: Callable[..., Any]) -> Callable[[str], bool] | None:
    """Whether a completion states an answer that a grader reads.

    Args:
        grader: with options bound or not.

    Returns:
        A function of the completion; None where the grader does not declare it.
    """
    grader = outcome_of(grader)
    rule = declared(grader, "states", None)
    names = inspect.signature(rule).parameters if rule else ()
    return rule and partial(
        rule, **{n: x for n, x in options(grader).items() if n in names}
    )


def _states(completion: str, *, last_number: bool = False) -> bool:
    return answers.final_answer(completion, last_number=last_number) is not None


def exact(prompt: str, completion: str, answer: Any) -> float:
    """1.0 if the completion equals the answer but for outer white space, else 0.0."""
    return float(completion.strip() == _text(answer).strip())


@declares(states=partial(_states, last_number=True))
def numbers(prompt: str, completion: str, answer: Any) -> float:
    """1.0 if the final answer equals the right one by `answers.matches`, else 0.0.

    The final answer is that of `answers.final_answer`, or else the last number. Where
    `matches` is undecided the outcome is 0.0: this grader is for numeric answers.
    """
    claim = answers.final_answer(completion, last_number=True)
    if claim is None or len(claim) > LONGEST:
        return 0.0
    return float(answers.matches(_gold(answer), claim) is True)


def _load_math_verify() -> None:
    """Import math-verify, and have it build its tables."""
    logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns of `None` below
    for gold, claim in ((r"\frac{x}{2}", r"0.5x"), ("(x+1)^2", "x^2+2x+1")):
        _equal(gold, claim, 60.0)


@declares(package="math_verify", states=_states)
def mathematics(
    prompt: str,
    completion: str,
    answer: Any,
    *,
    seconds: float = 2.0,
    last_number: bool = False,
) -> float | None:
    r"""1.0 if the final answer equals the right one, 0.0 if not or if there is none.

    Equality is decided by `answers.matches` where it can, else by math-verify, which
    needs the main thread of a process.

    Args:
        prompt: not used.
        completion: its final answer is that of `answers.final_answer`.
        answer: text or a number; of a whole solution, its final answer is taken.
        seconds: processor time of math-verify, at most.
        last_number: whether the last number is the answer where nothing else is.

    Returns:
        The outcome; None where math-verify exceeds its time, or would have to compute a
        number of millions of digits.

    Raises:
        ValueError: the answer is empty or of another type, or algebra is needed outside
            the main thread.
    """
    gold = _gold(answer)
    claim = answers.final_answer(completion, last_number=last_number)
    if claim is None or len(claim) > LONGEST:
        return 0.0
    equal = answers.matches(gold, claim)
    large = [text for text in (gold, claim) if sizes.costly(text)]
    if equal is None and len(large) == 1 and sizes.log10(large[0]) > HUGE:
        equal = False
    elif equal is None and not large:
        equal = _equal(gold, claim, seconds)
    return None if equal is None else float(equal)


vars(mathematics)["start"] = _load_math_verify


def reasoning_gym_score(
    prompt: str, completion: str, answer: dict[str, Any], *, dataset: str
) -> float:
    """The score of reasoning-gym's own verifier, from 0.0 to 1.0.

    Args:
        prompt: not used.
        completion: its answer is the content of the last `<answer>...</answer>`, else
            that of `answers.final_answer`, else all of it.
        answer: the entry of the data set that the prompt was made from.
        dataset: name of the task.

    Raises:
        ValueError: there is no such task.
    """
    tagged = answers.last_match(_TAGGED, completion)
    claim = tagged[1] if tagged else answers.final_answer(completion) or completion
    return float(_scorer(dataset)(answer=claim.strip(), entry=answer))


def _load_reasoning_gym() -> None:
    import reasoning_gym  # noqa: F401


vars(reasoning_gym_score)["start"] = _load_reasoning_gym


@lru_cache(CACHED)
def _scorer(dataset: str) -> Callable[..., float]:
    import reasoning_gym

    gym_options(dataset)
    return reasoning_gym.get_score_answer_fn(dataset)


def gym_options(dataset: str) -> set[str]:
    """Names of the options of a data set of reasoning-gym, size and seed apart.

    Raises:
        ValueError: there is no such data set.
        ModuleNotFoundError: reasoning-gym is not installed.
    """
    from reasoning_gym.factory import DATASETS

    known = sorted(DATASETS.keys() - {"composite"})  # a mixture, in Python alone
    if dataset not in known:
        near = difflib.get_close_matches(dataset, known, 3, cutoff=0.4)
        guess = f"did you mean {' or '.join(near)}?" if near else f"see {GALLERY}."
        raise ValueError(
            f"task.dataset={dataset!r} is none of the {len(known)} data sets of "
            f"reasoning-gym; {guess}"
        )
    _, settings = DATASETS[dataset]
    return {field.name for field in dataclasses.fields(settings)} - {"size", "seed"}


def _text(answer: Any) -> str:
    if isinstance(answer, str):
        return answer
    if isinstance(answer, int | float) and not isinstance(answer, bool):
        return f"{Decimal(str(answer)):f}"
    kind = type(answer).__name__
    raise ValueError(f"the answer is a {kind}; give text or a number.")


def _gold(answer: Any) -> str:
    """The right answer as text; of a whole solution, its final answer."""
    text = _text(answer)
    gold = answers.final_answer(text) or as_latex(text).strip()
    if not gold:
        raise ValueError("the answer is empty; give text or a number.")
    return gold


@lru_cache(CACHED)
def _equal(gold: str, claim: str, seconds: float) -> bool | None:
    """The verdict of math-verify, None if it takes too long; cached in either case."""
    return _within(seconds, lambda: _consistent(gold, claim) and _verified(gold, claim))


def _consistent(gold: str, claim: str) -> bool:
    """Whether all constants in each equation of a claim are equal, and equal to gold.

    Of `4 = 3` and `x = 4 = 3` math-verify compares the last side alone.
    """
    items = answers.list_items(claim)
    *names, value = answers.equation_sides(gold)
    known = [value] if len(items) == 1 and all(map(answers.is_name, names)) else []
    for item in items:
        sides = answers.equation_sides(item)
        constants = [*known, *sides] if len(sides) > 1 else []
        constants = list(filter(answers.is_constant, constants))
        if len(constants) > SIDES:
            return False
        if not all(_same(constants[0], other) for other in constants[1:]):
            return False
    return True


def _same(one: str, other: str) -> bool:
    equal = answers.same(one, other)
    return _verified(one, other) if equal is None else equal


def _verified(gold: str, claim: str) -> bool:
    """The verdict of math-verify; it drops degrees, and reads inequalities as sets."""
    from math_verify import verify

    one, other = _radians(gold, beside=claim), _radians(claim, beside=gold)
    return verify(
        _parsed(one), _parsed(other), allow_set_relation_comp=True, timeout_seconds=None
    )


def _radians(text: str, *, beside: str) -> str:
    """A text with degrees as radians, in functions of angles or beside pi."""
    if _ANGLES.search(text) or (r"\pi" in beside and r"\pi" not in text):
        return _DEGREES.sub(r"(\\frac{\1\\pi}{180})", text)
    return text


@lru_cache(CACHED)
def _parsed(text: str) -> list[Any]:
    from math_verify import parse

    text = _PRODUCT.sub(r"\\cdot ", text)
    # None is allowed, whatever the annotation says.
    found = parse(rf"\boxed{{{text}}}", parsing_timeout=None)  # pyright: ignore[reportArgumentType]
    return [one if isinstance(one, str) else _with_i(one) for one in found]


def _with_i(expression: Any) -> Any:
    """An expression with the imaginary unit for i, unless i is an index of a sum."""
    import sympy

    named = [symbol for symbol in expression.free_symbols if symbol.name == "i"]
    return expression.subs(dict.fromkeys(named, sympy.I)) if named else expression


class _LateError(BaseException):
    """Processor time is over. Not an Exception, as sympy and its parser catch these."""


def _within(seconds: float, function: Callable[[], _T]) -> _T | None:
    """The result of a function, None if it needs more processor time.

    Processor time does not depend on the load of the machine. math-verify reports its
    own timeouts as "not equal".
    """
    if threading.current_thread() is not threading.main_thread():
        raise ValueError(
            "mathematics needs the main thread to stop what takes too long; call it "
            "there, or through curax.verify.workers."
        )
    late = False

    def stop(*_: object) -> None:
        nonlocal late
        late = True
        raise _LateError

    before = signal.signal(signal.SIGPROF, stop)
    result = None
    try:
        try:
            # Again and again: an error raised while a callback of the garbage collector
            # runs, or a `__del__`, is swallowed there.
            signal.setitimer(signal.ITIMER_PROF, seconds, seconds)
            result = function()
        finally:
            signal.setitimer(signal.ITIMER_PROF, 0)
    except _LateError:
        pass
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)  # the other may have been interrupted
        signal.signal(signal.SIGPROF, before)
    return None if late else result
