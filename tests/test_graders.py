"""What a completion is worth: numbers, mathematics, tasks of reasoning-gym."""

import json
import signal
import threading
import time
from functools import partial
from pathlib import Path

import pytest
from contracts import name
from hypothesis import given
from hypothesis import strategies as st

from curax.verify import graders

ALL = [
    graders.exact,
    graders.numbers,
    graders.mathematics,
    partial(graders.mathematics, last_number=True, seconds=1.0),
]
TOWER = "9^{9^{9^{9}}}"

# Completion, answer; worth by `numbers`, by `mathematics`.
WORTH = [
    (r"so \boxed{5}", "5", 1.0, 1.0),
    (r"so \boxed{5}", 5, 1.0, 1.0),
    (r"so \boxed{5}", "6", 0.0, 0.0),
    (r"so \boxed{\frac12}", 0.5, 1.0, 1.0),
    (r"so \boxed{1e-7}", 1e-7, 1.0, 1.0),
    (r"so \boxed{10^{-7}}", 1e-7, 1.0, 1.0),
    ("#### 1,234", "1234", 1.0, 1.0),
    ("it is 5", "5", 1.0, 0.0),
    ("no idea", "5", 0.0, 0.0),
    ("", "5", 0.0, 0.0),
    (r"\boxed{5}", "3 + 2 is 5, so\n#### 5", 1.0, 1.0),
    (r"\boxed{5}", r"we get \boxed{5}.", 1.0, 1.0),
    (r"\boxed{(x+1)^2}", "x^2 + 2x + 1", 0.0, 1.0),
    (r"\boxed{(x+1)^2}", "x^2 + 2x + 2", 0.0, 0.0),
    (r"\boxed{2\sqrt{3}}", r"\sqrt{12}", 0.0, 1.0),
    (r"\boxed{\{2, 1\}}", r"\{1, 2\}", 0.0, 1.0),
    (r"\boxed{7 \text{ or } 8}", "7", 0.0, 0.0),
    (r"\boxed{5 cm}", "5", 0.0, 1.0),
    (r"\boxed{0.333333}", r"\frac{1}{3}", 0.0, 1.0),
    (r"\boxed{\text{Evelyn}}", "Evelyn", 1.0, 1.0),
    (r"\boxed{\text{no}}", r"\text{yes}", 0.0, 0.0),
    (r"\boxed{}}{{", "5", 0.0, 0.0),
    (r"Answer: }{ x", "x", 0.0, 0.0),
    (r"\boxed{\frac{}{}}", "5", 0.0, 0.0),
    (rf"\boxed{{{'9' * 2001}}}", "9" * 2001, 0.0, 0.0),
    (rf"\boxed{{{'9' * 2000}}}", "9" * 2000, 1.0, 1.0),
    (rf"\boxed{{{'9' * 2000}}}", "9" * 1999, 0.0, 0.0),
]


@pytest.mark.parametrize(("completion", "answer", "number", "mathematics"), WORTH)
def test_a_completion_has_its_worth(completion, answer, number, mathematics):
    assert graders.numbers("", completion, answer) == number
    assert graders.mathematics("", completion, answer) == mathematics
    told = graders.mathematics("", completion, answer, last_number=True)
    assert told == max(number, mathematics)


@pytest.mark.parametrize(
    ("completion", "answer", "worth"),
    [(" a b\n", "a b", 1.0), ("5", 5, 1.0), ("5.0", 5, 0.0), ("A", "a", 0.0)],
)
def test_exact_forgives_blanks_around_the_answer_alone(completion, answer, worth):
    assert graders.exact("", completion, answer) == worth


@pytest.mark.parametrize("grade", ALL, ids=name)
@given(st.text(), st.integers())
def test_every_grader_gives_a_share_whatever_the_text(grade, text, answer):
    worth = grade("prompt", text, answer)
    assert 0.0 <= worth <= 1.0
    assert type(worth) is float
    assert grade("another prompt", text, answer) == worth


@pytest.mark.parametrize("grade", ALL, ids=name)
@pytest.mark.parametrize("answer", [None, True, {}, ["5"]], ids=repr)
def test_an_answer_that_is_neither_text_nor_number_is_refused(grade, answer):
    kind = type(answer).__name__
    with pytest.raises(ValueError, match=f"^the answer is a {kind}; give text or a nu"):
        grade("", r"\boxed{5}", answer)


@pytest.mark.parametrize("grade", ALL[1:], ids=name)
@pytest.mark.parametrize("answer", ["", " \n"])
def test_an_empty_answer_is_refused(grade, answer):
    with pytest.raises(ValueError, match="the answer is empty; give text"):
        grade("", r"\boxed{5}", answer)


@pytest.fixture
def alarm():
    """Nothing may be left of the timer, nor of its handler."""
    before = signal.getsignal(signal.SIGPROF)
    yield
    assert signal.getsignal(signal.SIGPROF) is before
    assert signal.getitimer(signal.ITIMER_PROF) == (0.0, 0.0)


# Raised inside a callback of the garbage collector, it is swallowed, and rings again.
swallowed = pytest.mark.filterwarnings(
    "ignore::pytest.PytestUnraisableExceptionWarning"
)


@swallowed
@pytest.mark.usefixtures("alarm")
@pytest.mark.parametrize("claim", ["(x+1)^{5000}", "x^{2}(x+1)^{4000}"])
def test_what_takes_too_long_is_missing_and_not_wrong(claim):
    begin = time.process_time()
    grade = partial(graders.mathematics, seconds=0.2)
    assert grade("", rf"\boxed{{{claim}}}", "7") is None
    assert 0.1 < time.process_time() - begin < 2.0
    begin = time.process_time()  # remembered
    assert grade("", rf"no, \boxed{{{claim}}}", "7") is None
    assert time.process_time() - begin < 0.1


TABLE = Path(__file__).with_name("data") / "answers.jsonl"


@swallowed
@pytest.mark.usefixtures("alarm")
def test_answers_are_worth_what_a_mathematician_says():
    """`open`: two would differ; then any worth will do, as long as it comes."""
    rows = [json.loads(line) for line in TABLE.read_text().splitlines()]
    assert len(rows) > 400
    worth = {"right": [1.0], "wrong": [0.0], "open": [0.0, 1.0, None]}
    failed = []
    for row in rows:
        completion = rf"so it is \boxed{{{row['claim']}}}."
        got = graders.mathematics("", completion, row["gold"], seconds=5.0)
        by_numbers = graders.numbers("", completion, row["gold"])
        deceived = by_numbers > 0 and row["verdict"] == "wrong"
        if got not in worth[row["verdict"]] or deceived:
            failed.append(f"{row}: mathematics {got}, numbers {by_numbers}")
    assert not failed, "\n".join(failed)


@pytest.mark.usefixtures("alarm")
@pytest.mark.parametrize(
    ("gold", "claim", "worth"),
    [
        ("7", TOWER, 0.0),
        ("7", "(10^{10})!", 0.0),
        ("x", "((9!)!)!", 0.0),
        (TOWER, "7", 0.0),
        ("1", r"\frac{(10^{10})!}{(10^{10})!}", None),
        ("7", "x + (10^{10})!", None),
        (TOWER, "9^{9^{9^{8}}}", None),
    ],
)
def test_what_has_more_digits_than_memory_is_not_computed(gold, claim, worth):
    begin = time.process_time()
    assert graders.mathematics("", rf"\boxed{{{claim}}}", gold) == worth
    assert time.process_time() - begin < 1.0


@swallowed
@pytest.mark.usefixtures("alarm")
def test_an_alarm_that_is_swallowed_rings_again():
    ended = []

    def spin():
        try:
            while True:
                pass
        finally:
            ended.append(True)

    class Swallows:
        def __del__(self):
            spin()

    def work():
        Swallows()
        spin()

    begin = time.process_time()
    assert graders._within(0.2, work) is None
    assert len(ended) == 2
    assert time.process_time() - begin < 2.0


@pytest.mark.usefixtures("alarm")
def test_the_same_is_not_asked_twice_of_math_verify():
    graders._equal.cache_clear()
    for _ in range(8):
        assert graders.mathematics("", r"\boxed{2\sqrt{7}}", r"\sqrt{28}") == 1.0
    assert graders._equal.cache_info().misses == 1


@pytest.mark.usefixtures("alarm")
def test_an_error_inside_leaves_no_timer_behind():
    with pytest.raises(ZeroDivisionError):
        graders._within(60.0, lambda: 1 // 0)


def test_algebra_needs_the_main_thread_and_numbers_do_not():
    said = []

    def work():
        said.append(graders.mathematics("", r"\boxed{5}", "5.0"))
        try:
            graders.mathematics("", r"\boxed{x + x + x}", "3x")
        except ValueError as error:
            said.append(str(error))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert said == [
        1.0,
        "mathematics needs the main thread to stop what takes too long; call it there, "
        "or through curax.verify.workers.",
    ]


@pytest.fixture(scope="module")
def entry():
    gym = pytest.importorskip("reasoning_gym")
    return gym.create_dataset("chain_sum", size=1, seed=3)[0]


@pytest.mark.parametrize(
    ("form", "worth"),
    [
        ("{}", 1.0),
        ("I think <answer> {} </answer> it is", 1.0),
        ("<answer>no</answer> <answer>{}</answer> 8", 1.0),
        ("<answer> <answer>{}</answer>", 1.0),
        (r"so \boxed{{{}}}", 1.0),
        ("Answer: {}.", 1.0),
        (r"<answer>1{}</answer> \boxed{{{}}}", 0.0),
        ("1{}", 0.0),
    ],
)
def test_a_task_of_reasoning_gym_judges_by_itself(entry, form, worth):
    said = form.format(entry["answer"], entry["answer"])
    grade = partial(graders.reasoning_gym_score, dataset="chain_sum")
    assert (grade("", said, entry) == 1.0) is (worth == 1.0)


@pytest.mark.usefixtures("entry")
def test_a_task_that_is_not_there_is_named_with_the_nearest():
    with pytest.raises(
        ValueError, match=r"'chain_sun' is none .*; did you mean chain_sum or"
    ):
        graders.reasoning_gym_score("", "5", {}, dataset="chain_sun")
