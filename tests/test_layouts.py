"""Layouts: problems out of records as they are published; what is said of others."""

import copy
import dataclasses
import json
import pickle
from functools import partial
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from curax.tasks import layouts
from curax.tasks.layouts import LayoutError, Problem

MEND = (
    "; mend the record, name its fields with layouts.fields, or --set "
    "task.on_error=skip."
)
# The published first and last words; nothing depends on those between.
BEFORE = (
    "Solve the following math problem step by step. End with Answer: $Answer (and no "
    "more) where $Answer is the answer to the problem.\n\n"
)
BEHIND = '\n\nRemember to put your answer on its own line after "Answer:".'
QUESTION = "A crate holds 12 pears.\n\nHow many do 96 crates hold?"

GSM8K = {
    "question": "A baker fills 48 trays with 25 rolls. How many rolls is that?\n",
    "answer": "He fills 48 trays.\nThat is 48*25=<<48*25=1200>>1200 rolls.\n#### 1,200",
}
GSM8K_PROBLEM = Problem(
    question="A baker fills 48 trays with 25 rolls. How many rolls is that?",
    answer="1200",
    solution="He fills 48 trays.\nThat is 48*25=1200 rolls.\n#### 1,200",
)
MATH = {
    "problem": "Find $x$ with $2x=3$.",
    "level": "Level 5",
    "type": "Algebra",
    "solution": r"Not $\boxed{3}$, but half of it: $x=\boxed{\frac{3}{2}}$.",
}
MATH_PROBLEM = Problem(
    question="Find $x$ with $2x=3$.",
    answer=r"\frac{3}{2}",
    solution=MATH["solution"],
    level="5",
    subject="Algebra",
)
MATH_500 = {
    "problem": "Find $x$ with $2x=3$.",
    "solution": r"Halve it: \boxed{1.5}",
    "answer": r"\frac{3}{2}",
    "subject": "Algebra",
    "level": 5,
    "unique_id": "test/algebra/1.json",
}
MATH_500_PROBLEM = dataclasses.replace(MATH_PROBLEM, solution=MATH_500["solution"])
AIME = {
    "id": 3,
    "problem": "Find the remainder.",
    "solution": r"It is $\boxed{033}$.",
    "answer": "033",
    "url": "https://example.org",
    "year": "2024",
}
AIME_PROBLEM = Problem("Find the remainder.", "33", r"It is $\boxed{033}$.")
CAPITAL = {"ID": "2024-I-4", "Problem": "Add.", "Solution": "So.", "Answer": 33}
BARE = {"problem": "Add.", "solution": r"\fbox{2}"}
DAPO = {
    "data_source": "math_dapo",
    "prompt": [{"role": "user", "content": f"{BEFORE}{QUESTION}{BEHIND}"}],
    "ability": "MATH",
    "reward_model": {"ground_truth": "1152", "style": "rule"},
    "extra_info": {"index": "9a9b6eb4"},
}
DAPO_PROBLEM = Problem(QUESTION, "1152")

PUBLISHED = [
    (layouts.gsm8k, GSM8K, GSM8K_PROBLEM),
    (layouts.gsm8k, GSM8K | {"annotation": "", "short_answer": "1"}, GSM8K_PROBLEM),
    (layouts.math, MATH, MATH_PROBLEM),
    (layouts.math, MATH_500, MATH_500_PROBLEM),
    (layouts.math, BARE, Problem("Add.", "2", r"\fbox{2}")),
    (layouts.aime, AIME, AIME_PROBLEM),
    (layouts.aime, CAPITAL, Problem("Add.", "33", "So.")),
    (layouts.aime, {"problem": "Add.", "answer": 0}, Problem("Add.", "0")),
    (layouts.dapo_math, DAPO, DAPO_PROBLEM),
]
# Of benchmarks, which are read by name: their keys are those of others too.
NAMED = [
    (layouts.aime, {"question": "Add.", "answer": "033"}, Problem("Add.", "33")),
    (layouts.contest, {"question": "Add.", "answer": 27.0}, Problem("Add.", "27")),
    (
        layouts.olympiad,
        {"question": "Add.", "final_answer": ["$2$"], "subfield": "Algebra"},
        Problem("Add.", "$2$", subject="Algebra"),
    ),
    (
        layouts.olympiad,
        {"problem": "Add.", "answer": "2", "subfield": None},
        Problem("Add.", "2"),
    ),
]
for_every_publication = pytest.mark.parametrize(("layout", "record", "want"), PUBLISHED)


@pytest.mark.parametrize(("layout", "record", "want"), PUBLISHED + NAMED)
def test_a_published_record_is_read(layout, record, want):
    before = copy.deepcopy(record)
    assert layout(record) == want
    assert record == before


@for_every_publication
def test_a_published_layout_is_known_by_its_keys(layout, record, want):
    assert layouts.detect(record) == want
    assert layouts.detect(dict(reversed(record.items()))) == want


@for_every_publication
def test_columns_that_hold_nothing_are_as_good_as_none(layout, record, want):
    optional = {"solution", "level", "type", "subject"} - set(record)
    assert layout(record | dict.fromkeys(optional)) == want


def error_of(layout, record):
    with pytest.raises(LayoutError) as caught:
        layout(record)
    again = pickle.loads(pickle.dumps(caught.value))
    assert str(again) == str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize(
    ("layout", "record", "name"),
    [
        (layouts.gsm8k, GSM8K, "question"),
        (layouts.gsm8k, GSM8K, "answer"),
        (layouts.math, MATH, "problem"),
        (layouts.math, MATH, "solution"),
        (layouts.aime, AIME, "problem"),
        (layouts.aime, AIME, "answer"),
        (layouts.olympiad, {"question": "Add.", "final_answer": ["1"]}, "final_answer"),
        (layouts.dapo_math, DAPO, "prompt"),
    ],
)
def test_a_field_that_is_missing_empty_or_no_text_is_named(layout, record, name):
    without = {key: value for key, value in record.items() if key != name}
    keys = ", ".join(without)
    said = f"{name} is missing, the record has the keys {keys}{MEND}"
    assert error_of(layout, without) == said
    for empty in (None, "", " \n"):
        assert error_of(layout, record | {name: empty}) == f"{name} is empty{MEND}"
    said = f"{name} is {{'a': 1}}, which is no text{MEND}"
    assert error_of(layout, record | {name: {"a": 1}}) == said
    said = f"{name} is True, which is no text{MEND}"
    assert error_of(layout, record | {name: True}) == said


# GSM8K


@pytest.mark.parametrize(
    ("behind", "answer"),
    [
        (" 42", "42"),
        ("42\n", "42"),
        (" 1,234,567", "1234567"),
        (" $18.50", "18.50"),
        (" -7", "-7"),
        (" 3/4", "3/4"),
        (" $12,345.60", "12345.60"),
        (" (3, 4)", "(3, 4)"),
        (" 12,5", "12,5"),
        (" 1, 2000", "1, 2000"),
    ],
)
def test_the_result_of_gsm8k_loses_thousands_commas_and_dollars_only(behind, answer):
    said = f"First #### 1, but then\n####{behind}"
    assert layouts.gsm8k(GSM8K | {"answer": said}).answer == answer


@pytest.mark.parametrize("answer", ["No mark.", "A mark. ####", "#### $", "# 42"])
def test_gsm8k_needs_a_result(answer):
    said = f"answer={answer!r} has no result behind ####{MEND}"
    assert error_of(layouts.gsm8k, GSM8K | {"answer": answer}) == said


def test_only_notes_for_a_calculator_are_taken_out_of_a_solution():
    answer = "1 < 2 and 3 << 4.<<1+1=2>> <<3*4=12>>12>>2\n#### 2"
    got = layouts.gsm8k(GSM8K | {"answer": answer}).solution
    assert got == "1 < 2 and 3 << 4. 12>>2\n#### 2"


# MATH


@pytest.mark.parametrize(
    ("text", "inside"),
    [
        (r"\boxed{2}", "2"),
        (r"\boxed{ 2 }.", "2"),
        (r"\fbox{2}", "2"),
        (r"\boxed{1} or \fbox{2}", "2"),
        (r"\fbox{1} or \boxed{2}", "2"),
        (r"\boxed{\frac{1}{\sqrt{2}}}}", r"\frac{1}{\sqrt{2}}"),
        (r"\boxed{\{1, 2\}}", r"\{1, 2\}"),
        (r"\boxed{\left\{ 1 \right.}", r"\left\{ 1 \right."),
        (r"\boxed{a \\}", r"a \\"),
        (r"\boxed{1} and \boxed{2", "1"),
        (r"\boxed{1} and \boxed{\}", "1"),
        (r"\boxed{\boxed{2}}", "2"),
        (r"\boxed {2}", "2"),
        (r"$\boxed 2$.", "2"),
        (r"$\boxed 2.5$.", "2.5"),
        (r"It is \boxed 2.", "2"),
        (r"\boxed2 is it", "2"),
        (r"\boxed\frac{1}{2}$", r"\frac{1}{2}"),
        ("\\boxed{1\n+ 2}", "1\n+ 2"),
        (r"\boxed{2} in a \boxedstyle{3}", "2"),
        (r"\boxed{1} then \boxed{ }", None),
        (r"\boxed{1", None),
        (r"\boxed", None),
        ("2", None),
        ("", None),
    ],
)
def test_the_last_box_that_is_closed_counts(text, inside):
    assert layouts.last_boxed(text) == inside


balanced = st.recursive(
    st.text("ab+ ", max_size=4) | st.sampled_from([r"\{", r"\}", r"\\", r"\frac"]),
    lambda inner: st.lists(inner, max_size=3).map(lambda x: "{" + "".join(x) + "}"),
    max_leaves=8,
)


@given(st.lists(balanced).map("".join), balanced, st.text("ab{} ", max_size=8))
def test_a_box_holds_all_that_stands_in_its_braces(before, inside, behind):
    want = inside.strip() or None
    assert layouts.last_boxed(rf"{before}\boxed{{{inside}}}{behind}") == want


def test_math_needs_an_answer():
    record = MATH | {"solution": "It is clear.", "answer": ""}
    said = f"solution='It is clear.' has no answer in a \\boxed{{}}{MEND}"
    assert error_of(layouts.math, record) == said


@pytest.mark.parametrize(
    ("level", "want"),
    [("Level 1", "1"), ("1", "1"), (1, "1"), (1.0, "1"), ("Level ?", "?"), ("", None)],
)
def test_a_level_is_published_in_two_ways(level, want):
    assert layouts.math(MATH | {"level": level}).level == want


# AIME


@pytest.mark.parametrize(
    ("answer", "want"),
    [
        ("033", "33"),
        ("000", "0"),
        ("204", "204"),
        (204, "204"),
        (33.0, "33"),
        (r"336^\circ", r"336^\circ"),
        ("0.50", "0.50"),
    ],
)
def test_an_integer_of_aime_has_no_leading_zeros(answer, want):
    assert layouts.aime(AIME | {"answer": answer}).answer == want


# DAPO


def of_dapo(prompt: Any = DAPO["prompt"], truth: Any = "1152"):
    return DAPO | {"prompt": prompt, "reward_model": {"ground_truth": truth}}


@pytest.mark.parametrize(
    "content",
    [
        QUESTION,
        f" {QUESTION}\n",
        f"{BEFORE}{QUESTION}",
        f"{QUESTION}{BEHIND}",
        f"{BEFORE}{QUESTION}{BEHIND}\n",
        f"{BEFORE}{QUESTION}{BEHIND[:-1]}, and without a box.",
    ],
)
def test_instructions_are_taken_off_where_there_are_any(content):
    for prompt in (content, [{"role": "user", "content": content}]):
        assert layouts.dapo_math(of_dapo(prompt)) == DAPO_PROBLEM


@pytest.mark.parametrize(
    "question",
    [
        "Of what is it so? What is the answer to the problem.\nOf what?",
        f"Is {BEHIND.strip()}\nan order?",
        f"Why say {BEFORE.strip()}",
    ],
)
def test_a_question_keeps_what_only_sounds_like_an_instruction(question):
    assert layouts.dapo_math(of_dapo(question)).question == question
    for between in ("\n\n", " "):
        wrapped = f"{BEFORE.strip()}{between}{question}{BEHIND}"
        assert layouts.dapo_math(of_dapo(wrapped)).question == question


def test_the_question_is_the_last_message():
    chat = [{"role": "system", "content": "Be brief."}, *DAPO["prompt"]]
    assert layouts.dapo_math(of_dapo(chat)) == DAPO_PROBLEM


@pytest.mark.parametrize(
    ("truth", "want"),
    [
        ("34", "34"),
        (34, "34"),
        ("-3.50", "-3.50"),
        ('["34"]', "34"),
        ("['34']", "34"),
        (["34"], "34"),
        ([34], "34"),
        (json.dumps([r"\frac{1}{2}"]), r"\frac{1}{2}"),
        ("[0, 1]", "[0, 1]"),
        ("['a", "['a"),
        ('["a"] and more', '["a"] and more'),
    ],
)
def test_a_truth_may_be_a_list_of_one(truth, want):
    assert layouts.dapo_math(of_dapo(truth=truth)).answer == want


@pytest.mark.parametrize(
    ("record", "said"),
    [
        (of_dapo([]), "prompt.0.content is missing, prompt has 0 entries"),
        (of_dapo([{"a": 1}]), "prompt.0.content is missing, prompt.0 has the keys a"),
        (of_dapo(["Add."]), "prompt.0.content is missing, prompt.0 has 'Add.'"),
        (
            of_dapo(BEFORE),
            "prompt='Solve the following math problem step b... to the problem.' has "
            "no question in its instructions",
        ),
        (of_dapo(truth=None), "reward_model.ground_truth is empty"),
        (of_dapo(truth=[]), "reward_model.ground_truth=[] has 0 answers, not one"),
        (
            of_dapo(truth='["1", "2"]'),
            'reward_model.ground_truth=\'["1", "2"]\' has 2 answers, not one',
        ),
        (
            DAPO | {"reward_model": None},
            "reward_model.ground_truth is missing, reward_model has None",
        ),
    ],
)
def test_what_is_wrong_with_a_chat_is_said(record, said):
    assert error_of(layouts.dapo_math, record) == said + MEND


# Fields by name

ODD = {
    "chat": [{"text": "Add."}, {"text": "Now."}],
    "gold": {"value": 2, "how": "So."},
    "grade": 3,
    "of": None,
}


def test_fields_are_found_by_dotted_paths():
    layout = partial(
        layouts.fields,
        question="chat.1.text",
        answer="gold.value",
        solution="gold.how",
        level="grade",
        subject="of",
    )
    assert layout(ODD) == Problem("Now.", "2", "So.", "3", None)


def test_of_fields_a_question_and_an_answer_are_read_if_nothing_else_is_said():
    assert layouts.fields(GSM8K) == Problem(
        GSM8K["question"].strip(), GSM8K["answer"].strip()
    )
    assert layouts.fields({"question": "Add."}, answer=None) == Problem("Add.")


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("what", "what is missing, the record has the keys chat, gold, grade, of"),
        ("gold.what", "gold.what is missing, gold has the keys value, how"),
        ("chat.2.text", "chat.2.text is missing, chat has 2 entries"),
        ("chat.text", "chat.text is missing, chat has 2 entries"),
        ("chat.-1.text", "chat.-1.text is missing, chat has 2 entries"),
        ("grade.0", "grade.0 is missing, grade has 3"),
        ("of", "of is empty"),
    ],
)
def test_a_path_that_leads_nowhere_is_named_with_what_there_is(name, said):
    assert error_of(partial(layouts.fields, question=name), ODD) == said + MEND
    at = partial(layouts.fields, question="chat.0.text", answer=name)
    assert error_of(at, ODD) == said + MEND
    if name != "of":
        at = partial(at, answer=None, solution=name)
        assert error_of(at, ODD) == said + MEND


@pytest.mark.parametrize("value", [float("nan"), float("inf"), [], {}, b"2", False])
def test_what_is_neither_text_nor_a_number_is_said(value):
    said = f"answer is {value!r}, which is no text{MEND}"
    assert error_of(layouts.fields, {"question": "Add.", "answer": value}) == said


@pytest.mark.parametrize(
    ("value", "want"), [(2, "2"), (-2.0, "-2"), (2.5, "2.5"), (10**400, f"{10**400}")]
)
def test_a_number_is_written_as_text(value, want):
    assert layouts.fields({"question": "Add.", "answer": value}).answer == want


def test_half_a_character_is_no_text():
    record = json.loads(r'{"question": "Add \ud83d.", "answer": "2"}')
    said = f"question='Add \\ud83d.' has half a character{MEND}"
    assert error_of(layouts.fields, record) == said
    whole = json.loads(r'{"question": "Add \ud83d\ude00.", "answer": "2"}')
    assert layouts.fields(whole).question == "Add \N{GRINNING FACE}."


def test_a_long_value_is_shortened_where_it_is_shown():
    said = error_of(layouts.gsm8k, GSM8K | {"answer": "a" * 1000})
    assert "answer='aaa" in said
    assert len(said) < 200


# Which layout


@pytest.mark.parametrize(
    ("record", "keys"),
    [
        ({"instruction": "Add.", "output": "2"}, "the keys instruction, output"),
        ({"Problem": "Add.", "answer": "2"}, "the keys Problem, answer"),
        ({}, "no keys"),
    ],
)
def test_keys_that_fit_no_layout_are_named(record, keys):
    assert error_of(layouts.detect, record) == (
        f"a record with {keys} is not laid out as gsm8k, math, aime or dapo_math; name "
        "its fields with layouts.fields."
    )


def test_a_question_with_a_plain_answer_is_read_by_the_names_of_its_fields():
    record = {"question": "1 + 1?", "answer": "2"}
    assert layouts.detect(record) == layouts.Problem(question="1 + 1?", answer="2")
    assert layouts.detect(record | {"level": 0}).level == "0"
    more = record | {"solution": "1 + 1 = 2", "level": "easy", "subject": None}
    want = layouts.Problem(
        question="1 + 1?", answer="2", solution="1 + 1 = 2", level="easy"
    )
    assert layouts.detect(more) == want


@pytest.mark.parametrize(
    ("record", "said"),
    [
        ({"question": "Add."}, "answer is missing, the record has the keys question"),
        (
            {"problem": "Add.", "level": 5},
            "answer and solution are missing, the record has the keys problem, level",
        ),
        ({"prompt": "Add."}, "reward_model is missing, the record has the keys prompt"),
    ],
)
def test_a_question_without_what_belongs_to_it_is_said_to_lack_it(record, said):
    assert error_of(layouts.detect, record) == said + MEND


@pytest.mark.parametrize(
    ("layout", "record"),
    [
        (layouts.gsm8k, GSM8K | {"question": 7}),
        (layouts.fields, {"question": 7, "answer": 2}),
        (layouts.math, MATH | {"problem": 7}),
        (layouts.aime, CAPITAL | {"Problem": 7}),
        (layouts.dapo_math, of_dapo(7)),
        (layouts.dapo_math, of_dapo([{"role": "user", "content": 7}])),
    ],
)
def test_a_question_is_no_number(layout, record):
    assert error_of(layout, record).endswith(f" is 7, which is no text{MEND}")


PLAIN = {"question": "1 + 1?", "answer": "2"}


@pytest.mark.parametrize(
    ("records", "layout"),
    [
        ([GSM8K], layouts.gsm8k),
        ([PLAIN, GSM8K, GSM8K], layouts.gsm8k),
        ([GSM8K, PLAIN, PLAIN], layouts._plain),
        ([PLAIN, GSM8K], layouts._plain),
        ([MATH, AIME, MATH_500, {}], layouts.math),
        ([AIME, MATH, AIME], layouts.aime),
        ([DAPO], layouts.dapo_math),
    ],
)
def test_a_file_has_the_layout_of_most_of_its_records(records, layout):
    held = layouts.majority_layout(records)
    assert held == layouts.FileLayout(layout)
    for record in records:
        if layouts._published(record) is layout:
            assert held(record) == layout(record)


def test_of_a_file_that_has_none_each_record_says_what_it_lacks():
    assert layouts.majority_layout([{"question": "Add."}, {}]) is layouts.detect
    assert layouts.majority_layout([]) is layouts.detect


def test_an_answer_of_gsm8k_among_plain_ones_is_told():
    held = layouts.majority_layout([PLAIN, PLAIN, GSM8K])
    said = "answer='A.\\n#### 7' has a result behind ####, and most of its file has not"
    assert error_of(held, PLAIN | {"answer": "A.\n#### 7"}) == said + MEND


def test_a_record_of_another_layout_is_told_as_one():
    said = "it is laid out as {}, and most of its file as {}" + MEND
    assert error_of(layouts.FileLayout(layouts.aime), BARE) == said.format(
        "math", "aime"
    )
    assert error_of(layouts.FileLayout(layouts.math), PLAIN) == said.format(
        "fields", "math"
    )
    assert error_of(layouts.FileLayout(layouts._plain), AIME) == said.format(
        "aime", "fields"
    )
