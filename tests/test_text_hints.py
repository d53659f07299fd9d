"""Hints on text: where they stand, what they are made of, what gives answers away."""

import dataclasses
import json

import jax.numpy as jnp
import numpy as np
import pytest
import test_text
import words
from hypothesis import given, settings
from hypothesis import strategies as st
from test_text import get, tricky  # noqa: F401, get as a fixture
from words import tokenizer

from curax.commands import demo
from curax.tasks import byte_pairs, file_task, hints, layouts, prompt_format, text
from curax.tasks.layouts import LayoutError, Problem
from curax.verify import graders

ASKED = "Dan has 5 books and gives 2 away. How many are left?"
SOLVED = r"Take away: $\frac{5}{1} - 2 \neq 2$, so 3 \times 1 <|im_end|> \xi."
HINTS = ["Count.", r"What is $5 - 2$, or $\frac{10}{2} - 2$?", None]
RECORDS = [
    {"question": ASKED, "answer": "3", "solution": SOLVED, "hints": HINTS},
    {"question": "Is 7 prime?", "answer": "yes", "solution": "", "hints": []},
    {"question": "Add 60 and 10.", "answer": "70", "solution": "It is 70. " * 9},
    {"question": "What is 2 + 2?", "answer": "4", "solution": "2 + 2 = 4"},
]
KINDS_OF_SPACES = [
    test_text.first,
    test_text.always,
    test_text.prepend,
    test_text.pieces_and_more,
]
TEST = [{"question": "What is 1 + 1?", "answer": "2", "solution": "1 + 1 = 2"}]


def layout(record):
    names = {name: name for name in ("solution", "hints") if name in record}
    return layouts.fields(record, **names)


def task(folder, records=RECORDS, **options):
    demo.write_lines(folder / "train.jsonl", records)
    demo.write_lines(folder / "test.jsonl", TEST)
    usual = words.files(folder) | {"layout": layout, "grader": graders.numbers}
    usual |= {"max_prompt_tokens": 512, "hints": True}
    return file_task.task(**usual | options)


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    return task(tmp_path_factory.mktemp("hinted"))


def says(tokens, mask, of=None):
    """The text of each row, control tokens included; None for a row without any."""
    decode = (of or tokenizer()).decode
    if np.ndim(tokens) > 1:
        return [says(*row, of) for row in zip(tokens, mask, strict=True)]
    assert np.ndim(tokens) == np.ndim(mask) == 1
    return decode(tokens[mask], control=True) if mask.any() else None


def ids_of(*texts, width=None, of=None):
    """Right-padded rows with poison where nothing stands."""
    rows = [(of or tokenizer()).encode(t, begins=False) if t else [] for t in texts]
    tokens, mask = prompt_format.padded_rows(
        rows, width or max(map(len, rows)), pad=10**6, left=False
    )
    return tokens, mask


# ----- what gives an answer away

GIVEN_AWAY = [
    ("the answer is 70", "70"),
    (r"\boxed{70}", "70"),
    ("The ANSWER  is\n $70$.", "70"),
    ("the answer is 70", " $70$. "),
    ("so that x = 70 is the answer", "70"),
    ("= 70 is the answer", "70"),
    ("70 students is the right answer", "70"),
    ("#### 70", "70"),
    ("answer: **70**", "70"),
    ("Answer = 70", "70"),
    ("the final answer should be 70 students", "70"),
    ("the answer, which is 70, is even", "70"),
    ("the answers are 70 and 71", "70"),
    ("The final result equals 70", "70"),
    ("the answer is 70%", "70"),
    ("the answer is -5", "5"),
    ("the answer is 7.0", "7"),
    ("the answer is no", "No"),
    ("x = 5 is the solution", "5"),
    (r"\boxed { x = 70 }", "70"),
    (r"$\boxed 70$", "70"),
    (r"\fbox{70}", "70"),
    (r"\boxed{\text{70 students}}", "70"),
    (r"first \boxed{70} and then \boxed{1}", "70"),
    (r"you get \boxed{70", "70"),
    ("the answer is (A)", "A"),
    ("Answer: b", "B"),
    ("the answer is A because it is", "A"),
    # Longer answers, anywhere.
    ("there are 1,200 rolls", "1200"),
    ("there are 1200 rolls", "1,200"),
    (r"there are 1{,}200 rolls", "1200"),
    (r"there are $1\,200$ rolls", "1200"),
    (r"in 1, 200 of them", "200"),
    ("so it is  144.", "144"),
    ("12*12=144", "144"),
    (r"and add $\dfrac12$ to it", r"\frac{1}{2}"),
    ("the answer is 0.5", r"\frac{1}{2}"),
    ("It is Paris!", "paris"),
    ("It is _Paris_", "Paris"),
    ("the answer is (A)", "(A)"),
    ("look at x=12", "x = 12"),
    (r"at the point $( 3, 4 )$", "(3,4)"),
    (r"that is \( \pi \)", r"\pi"),
]
KEPT = [
    ("70 students", "70"),
    ("There are 70 students. Find the answer!", "70"),
    ("", "70"),
    ("the answer is 700", "70"),
    ("the answer is 7.5", "7"),
    ("the answer is 2.7", "7"),
    ("the answer is not 70", "70"),
    ("70 is not the answer", "70"),
    ("the answer is below 70", "70"),
    ("What is 7 times 10? Then the answer is near. 70 more", "70"),
    (r"\boxed{170}", "70"),
    ("Divide by 2, then the answer follows", "2"),
    ("the answer is a number", "A"),
    ("the answer is a multiple of 3", "a"),
    ("1440 eggs", "144"),
    ("144.5 eggs", "144"),
    ("3.144 eggs", "144"),
    ("in 1, 200 of them", "1200"),
    ("x144", "144"),
    ("parisian", "paris"),
    (r"\pink", r"\pi"),
    ("It is Paris", "London"),
    ("70", "700"),
    ("the answer is", "$$"),
]


@pytest.mark.parametrize(("hint", "gold"), GIVEN_AWAY)
def test_a_hint_that_gives_the_answer_away_leaks(hint, gold):
    """SAGE 10."""
    assert hints.leaks(hint, gold)
    assert hints.leaks(f"Look here:\n{hint}\nSo much.", gold)


@pytest.mark.parametrize(("hint", "gold"), KEPT)
def test_a_hint_that_keeps_the_answer_secret_does_not(hint, gold):
    """SAGE 10."""
    assert not hints.leaks(hint, gold)


gold = st.integers(0, 10**6).map(str) | st.sampled_from(["B", "no", "left", r"\pi"])
around = st.sampled_from(["", "Think first.", "Add 3 and 4.", r"As $\xi \neq 1$,"])


@settings(max_examples=30)
@given(gold, around, st.sampled_from(["the answer is {}", r"\boxed{{{}}}", "{}"]))
def test_case_space_and_dollars_do_not_hide_an_answer(gold, before, said):
    if said == "{}":
        spellings = {f"{before} {gold} of them": len(gold) > 2}
    else:
        spellings = {f"{before} {said.format(gold)}": True}
    for hint, leaks in spellings.items():
        for other in (hint, hint.replace(" ", " \n "), hint.replace(gold, f"${gold}$")):
            assert hints.leaks(other, gold) == leaks
            if "\\" not in gold:  # commands have a case
                assert hints.leaks(other, gold.swapcase()) == leaks


# ----- hints between tags


@pytest.mark.parametrize(
    ("said", "want"),
    [
        ("<hint1>a</hint1>\n<hint2> b\n</hint2><hint3>c</hint3>", ["a", "b", "c"]),
        ("<hint2>b</hint2> then <hint1>a</hint1>", ["a", "b", None]),
        ("<think><hint1>no</hint1></think><hint1>yes</hint1>", ["yes", None, None]),
        ("<hint1>a<hint2>b</hint2></hint1>", [None, "b", None]),
        ("<hint1>a</hint2><hint2>b</hint2>", [None, "b", None]),
        ("<hint1>open <hint1>closed</hint1>", ["closed", None, None]),
        ("<hint1>a</hint1><hint1>...</hint1>", ["a", None, None]),
        ("<hint1> \n</hint1><hint3>c", [None] * 3),
        ("<hint1>a < b > c, <hint>, </hint></hint1>", ["a < b > c, <hint>, </hint>"]),
        ("<hint10>no</hint10><hint4>nor</hint4>", [None] * 3),
        ('{"hint1": "a"}', [None] * 3),
        ("", [None] * 3),
    ],
)
def test_hints_stand_between_their_tags(said, want):
    assert hints.parse_hints(said, 3) == [*want, *[None] * (3 - len(want))]


FORMULAS = r"\frac{1}{2} \times \neq \xi \beta \sqrt{2} \underline{x} \\ \n \u0041"


@given(st.lists(st.text(st.sampled_from(FORMULAS + '\n<>"你{}')), max_size=3))
def test_hints_come_back_byte_for_byte(said):
    """SAGE 10."""
    written = "".join(f"<hint{i}>\n{t}\n</hint{i}>\n" for i, t in enumerate(said, 1))
    want = [t.strip() if any(map(str.isalnum, t)) else None for t in said]
    assert hints.parse_hints(f"Well:\n{written}", 3) == [
        *want,
        *[None] * (3 - len(said)),
    ]


# ----- where a hint stands


@pytest.mark.parametrize(
    "kind", [test_text.chatml, test_text.thinking, test_text.pieces]
)
@settings(max_examples=20)
@given(said=tricky)
def test_a_hint_stands_behind_the_text_and_before_the_end_of_the_turn(get, kind, said):  # noqa: F811
    said = f"{said.replace('▁', '')}."
    turns = [{"role": "user", "content": said}]
    tokenizer = get(kind)
    ids, tail = tokenizer.chat(turns), tokenizer.tail(turns)
    before, behind = ids[: len(ids) - tail], ids[len(ids) - tail :]
    assert tokenizer.decode(before, control=True) == f"<|im_start|>user\n{said}"
    after = "<|im_end|>\n<|im_start|>assistant\n"
    assert tokenizer.decode(behind, control=True) == after


@pytest.mark.parametrize("kind", KINDS_OF_SPACES)
@pytest.mark.parametrize("said", ["the end", "then <think>", "a ", "thin"])
def test_where_tokenizers_put_spaces_it_stands_there_too(get, kind, said):  # noqa: F811
    tokenizer, turns = get(kind), [{"role": "user", "content": said}]
    ids, tail = tokenizer.chat(turns), tokenizer.tail(turns)
    assert tokenizer.decode(ids[: len(ids) - tail]).endswith(f"[INST] {said.strip()}")
    assert tokenizer.decode(ids[len(ids) - tail :]).strip() == "[/INST]"


def test_white_space_that_a_template_takes_off_is_behind_the_place(tmp_path):
    trimmed = test_text.templated(tmp_path, "{{ messages[0].content | trim }} A:")
    turns = [{"role": "user", "content": "Q? \n "}]
    ids = trimmed.chat(turns)
    assert trimmed.decode(ids[-trimmed.tail(turns) :]) == " A:"


def test_a_template_that_cuts_the_text_has_no_place(tmp_path):
    odd = test_text.templated(tmp_path / "odd", "{{ messages[0].content[:10] }} A:")
    with pytest.raises(ValueError, match="does not show the last message as it is"):
        task(tmp_path, tokenizer=str(odd.path))
    task(tmp_path, tokenizer=str(odd.path), hints=False)


def together(folder):
    """A tokenizer without a chat template, to which ? and a line break are one."""
    byte_pairs.tokenizer(folder, [], vocab_size=259, chat=False)
    core = json.loads((folder / "tokenizer.json").read_text())
    core["pre_tokenizer"]["use_regex"] = False
    core["model"]["vocab"]["?Ċ"] = 259
    core["model"]["merges"] += [["?", "Ċ"]]
    (folder / "tokenizer.json").write_text(json.dumps(core))
    return text.load(folder)


@pytest.mark.parametrize(
    ("template", "before", "behind"),
    [
        ("{question}", "Is 7 prime?", ""),
        ("Q: {question}", "Q: Is 7 prime?", ""),
        ("Q: {question} A:", "Q: Is 7 prime?", " A:"),
        ("{question}\nA:", "Is 7 prime?\n", "A:"),
        ("{question}\n", "Is 7 prime?\n", ""),
        ("{question} or {question}!\n", "Is 7 prime? or Is 7 prime?", "!\n"),
    ],
)
def test_in_plain_text_it_stands_behind_the_question(
    tmp_path, template, before, behind
):
    form = prompt_format.PromptFormat(tokenizer=together(tmp_path), template=template)
    problem = Problem("Is 7 prime?")
    ids = form.prompt(problem)
    place = len(ids) - form.tail(problem)
    assert form.tokenizer.decode(ids[:place]) == before
    assert form.tokenizer.decode(ids[place:]) == behind


def test_a_hinted_prompt_is_the_plain_one_but_for_the_hint(tmp_path, made):
    ids = np.arange(4)
    prompts = made.prompts(ids)
    plain = task(tmp_path, hints=False)
    for name in ("tokens", "mask", "id", "target"):
        np.testing.assert_array_equal(
            getattr(prompts, name), getattr(plain.prompts(ids), name)
        )
    assert plain.hinting is None
    assert plain.prompts(ids).tail is None
    assert prompts.tail.dtype == np.int32
    hint = made.hinting.wrap(*ids_of("Count.", "", "Add.", "Add."))
    for i, record in enumerate(RECORDS):
        row = prompts.tokens[i][prompts.mask[i]].tolist()
        block = hint[0][i][hint[1][i]].tolist()
        place = len(row) - prompts.tail[i]
        said = tokenizer().decode([*row[:place], *block, *row[place:]], control=True)
        introduced = f"\n\nHint:\n{'Count.' if i == 0 else 'Add.'}" if i != 1 else ""
        assert said == (
            f"<|im_start|>user\n{record['question']}{introduced}<|im_end|>\n"
            "<|im_start|>assistant\n"
        )


def test_words_stand_around_hints_that_are_there(tmp_path):
    made = task(tmp_path, hint_words="\nPsst: {hint} <|im_end|> {hint}!")
    tokens, mask = ids_of("Count.", "", "Add both.", "", "", "One.", width=20)
    shaped = tokens.reshape(3, 2, 20), mask.reshape(3, 2, 20)
    some, there = made.hinting.wrap(*shaped)
    want = [f"\nPsst: {t} <|im_end|> {{hint}}!" for t in ("Count.", "Add both.")]
    last = [None, "\nPsst: One. <|im_end|> {hint}!"]
    assert says(some, there) == [[want[0], None], [want[1], None], last]
    assert not set(some[there].tolist()) & set(tokenizer().backend.control.values())
    assert (some[~there] == tokenizer().pad).all()
    assert (np.diff(there.astype(int)) <= 0).all()  # right-padded
    wider, _ = made.hinting.wrap(*ids_of("Count.", width=31))
    assert wider.shape[-1] - 31 == some.shape[-1] - 20


# ----- what hints are made of


def test_a_solution_is_what_the_file_says_and_never_the_answer(made):
    tokens, mask = made.hinting.solution(made.prompts(np.int32([2, 1, 0])))
    assert says(tokens, mask) == [RECORDS[2]["solution"].strip(), None, SOLVED]
    assert tokens.dtype == np.int32
    # Without an end, control words in it are text.
    assert tokens[2][mask[2]].tolist() == tokenizer().encode(SOLVED, begins=False)
    width = max(len(tokenizer().encode(r["solution"].strip())) for r in RECORDS)
    assert tokens.shape == (3, width)


def test_hints_are_asked_for_with_question_and_solution_by_a_tutor(made):
    asked = made.hinting.writing_contexts(made.prompts(np.int32([3, 1, 0])))
    said = says(asked.tokens, asked.mask)
    assert said[1] is None
    assert not asked.mask[1].any()
    system, user = hints.hint_request(RECORDS[3]["question"], RECORDS[3]["solution"], 3)
    assert said[0] == (
        f"<|im_start|>system\n{system}<|im_end|>\n<|im_start|>user\n{user}<|im_end|>\n"
        "<|im_start|>assistant\n"
    )
    assert user == "Problem:\nWhat is 2 + 2?\n\nSolution:\n2 + 2 = 4"
    assert SOLVED in said[2]
    counts = [(row == tokenizer().end[0]).sum() for row in asked.tokens[[0, 2]]]
    assert counts == [2, 2]
    assert asked.mask[0, -1]  # left-padded
    assert (np.diff(asked.mask.astype(int)) >= 0).all()
    one = made.hinting.writing_contexts(made.prompts(np.int32([1])))
    assert one.tokens.shape[1] == asked.tokens.shape[1]
    assert len(asked.tokens[2][asked.mask[2]]) <= asked.tokens.shape[1]


def test_there_are_as_many_levels_as_are_wanted():
    for levels in range(1, 6):
        system, _ = hints.hint_request("Q", "S", levels)
        tags = [f"<hint{i}>...</hint{i}>" for i in range(1, levels + 1)]
        assert system.endswith("\n".join(["", *tags]))
        assert f"{levels} levels" in system
        lines = [line for line in system.split("\n") if line.startswith("- ")]
        assert len(lines) == levels
        assert hints.STRENGTHS[0] in lines[0]
        assert levels == 1 or hints.STRENGTHS[2] in lines[-1]
        assert all(hints.STRENGTHS[1] in line for line in lines[1:-1])


def test_what_is_too_long_to_ask_is_not_asked_and_not_cut(tmp_path, made):
    ids = np.int32([0, 2, 3])
    lengths = made.hinting.writing_contexts(made.prompts(ids)).mask.sum(-1)
    limit = int(sorted(lengths)[1])
    fewer = task(tmp_path, max_hint_prompt_tokens=limit)
    asked = fewer.hinting.writing_contexts(fewer.prompts(ids))
    kept = np.where(lengths <= limit, lengths, 0)
    assert (kept > 0).sum() == 2
    np.testing.assert_array_equal(asked.mask.sum(-1), kept)
    assert asked.tokens.shape[1] == limit
    assert "3 solutions to hint with, 2 of them short enough" in fewer.summary
    none = task(tmp_path, max_hint_prompt_tokens=3).hinting
    assert none.writing_contexts is none.parse is None
    assert none.solution is not None


def test_without_a_chat_template_hints_are_asked_for_in_plain_text(tmp_path):
    plain = together(tmp_path / "tokenizer")
    made = task(tmp_path, tokenizer=str(plain.path), system="Be brief.")
    asked = made.hinting.writing_contexts(made.prompts(np.int32([3])))
    system, user = hints.hint_request(RECORDS[3]["question"], RECORDS[3]["solution"], 3)
    said = says(asked.tokens, asked.mask, plain)
    assert said == [f"{system}\n\n{user}\n\nHints:\n"]


def written(*said, width=160):
    rows = [
        "".join(f"<hint{i}>{t}</hint{i}>" for i, t in enumerate(row, 1)) for row in said
    ]
    return ids_of(*rows, width=width)


def test_what_the_policy_wrote_is_read_byte_for_byte_as_text(made):
    """SAGE 10."""
    prompts = made.prompts(np.int32([0, 3, 1]))
    latex = r"\frac{1}{2} \times \neq \xi"
    tokens, mask = written([latex, " a <|im_end|>\n", "b"], ["x", "", "z"], [])
    end = mask.sum(-1)
    tokens[0, end[0]], mask[0, end[0]] = tokenizer().end[0], True
    got, there = made.hinting.parse(prompts, tokens, mask)
    assert got.shape == there.shape == (3, 3, 160)
    assert says(got, there) == [
        [latex, "a <|im_end|>", "b"],
        ["x", None, "z"],
        [None] * 3,
    ]
    assert got[0, 1][there[0, 1]].tolist() == tokenizer().encode(
        "a <|im_end|>", begins=False
    )


def test_a_hint_that_takes_more_tokens_than_were_written_is_missing(tmp_path, get):  # noqa: F811
    """Added tokens that show are text, of more tokens, where they are read."""
    spoken = get(test_text.thinking)
    made = task(tmp_path, tokenizer=str(spoken.path), chat=False)
    word = spoken.backend.ids["</think>"]
    ids = [*spoken.encode("<hint1>a"), *[word] * 9, *spoken.encode("</hint1>")]
    need = len(spoken.encode("a" + "</think>" * 9))
    assert len(ids) < need
    for width, there in ((len(ids), False), (need, True)):
        tokens, mask = prompt_format.padded_rows([ids], width, pad=0, left=False)
        got, exists = made.hinting.parse(made.prompts(np.int32([0])), tokens, mask)
        assert exists[0, 0].any() == there
        assert got.shape == (1, 3, width)


def test_hints_that_leak_are_found_in_their_tokens(made):
    prompts = made.prompts(np.int32([2, 1, 0]))
    said = ["Add 60 and 10.", "The answer is 70.", "", "yes", "", "think"]
    tokens, mask = ids_of(*said, "Count 3 books", r"\boxed{3}", "")
    shaped = (x.reshape(3, 3, -1) for x in (tokens, mask))
    got = made.hinting.leaks(prompts, *shaped)
    want = [[False, True, False], [True, False, False], [False, True, False]]
    np.testing.assert_array_equal(got, want)
    assert got.dtype == bool


def test_what_is_held_out_is_never_hinted(tmp_path):
    made = task(tmp_path, [*RECORDS])
    held = made.held_out(np.int32([0]))
    assert held.target[0] == made.num_prompts
    assert not made.hinting.solution(held)[1].any()
    assert not made.hinting.writing_contexts(held).mask.any()
    assert not made.hinting.from_file(held)[1].any()


# ----- hints of a file


def test_hints_may_stand_in_the_records(made):
    got, there = made.hinting.from_file(made.prompts(np.int32([3, 0])))
    assert says(got, there) == [[None] * 3, HINTS]
    assert got.shape[-1] == max(len(tokenizer().encode(h)) for h in HINTS if h)
    assert "1 with hints of a file" in made.summary


def test_hints_may_stand_in_a_file_of_their_own(tmp_path):
    some = [
        {"question": f" {ASKED.replace(' ', '  ')}", "hints": ["", r"Take \xi."]},
        {"question": "What is 2 + 2?", "hints": ["Two twos."]},
        {"question": "Asked of nobody.", "hints": ["one", "two", "three"]},
    ]
    file = demo.write_lines(tmp_path / "hints.jsonl", some)
    made = task(tmp_path, hints_file=str(file))
    got, there = made.hinting.from_file(made.prompts(np.int32([0, 1, 3])))
    want = [[None, r"Take \xi.", None], [None] * 3, ["Two twos.", None, None]]
    assert says(got, there) == want
    own = task(tmp_path, hints_file=str(demo.write_lines(file, some[1:])))
    got, there = own.hinting.from_file(own.prompts(np.int32([0])))
    assert says(got, there) == [HINTS]
    # Without solutions these are all there is.
    bare = [{k: v for k, v in r.items() if k != "solution"} for r in RECORDS]
    alone = task(tmp_path, bare, hints_file=str(file)).hinting
    assert alone.solution is alone.writing_contexts is alone.parse is None
    assert task(tmp_path, RECORDS[1:]).hinting.from_file is None


def test_the_mark_changes_with_the_hints_of_a_file(tmp_path, capsys):
    some = {"question": ASKED, "hints": ["One.", "Two."]}
    file = demo.write_lines(tmp_path / "hints.jsonl", [some])
    made = task(tmp_path, hints_file=str(file))
    assert made.fingerprint == task(tmp_path, hints_file=str(file)).fingerprint
    made.prompts(np.int32([0]))
    assert capsys.readouterr().err == ""
    demo.write_lines(file, [some | {"hints": ["One.", "Three."]}])
    made.prompts(np.int32([0]))
    assert f"{file} is not what it was when this run read it" in capsys.readouterr().err
    assert made.fingerprint != task(tmp_path, hints_file=str(file)).fingerprint


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("{", "not a JSON object"),
        ('{"question": "Q"}', "hints is missing, the record has the keys question"),
        ('{"hints": ["a"]}', "question is missing"),
        ('{"question": "Q", "hints": "a"}', "hints is 'a', which is no list of texts"),
        ('{"question": "Q", "hints": [[]]}', r"hints\.0 is \[\], which is no text"),
        (
            '{"question": "Q", "hints": ["a", "b", "c", "d"]}',
            "the question 'Q' has hints of 4 levels, more than task.hint_levels=3; ",
        ),
    ],
)
def test_a_broken_line_of_hints_is_named_or_skipped(tmp_path, line, said):
    good = {"question": "What is 2 + 2?", "hints": ["Two twos."]}
    file = demo.write_lines(tmp_path / "hints.jsonl", [good])
    file.write_text(f"{file.read_text()}{line}\n")
    with pytest.raises(ValueError, match=rf"{file}:2: {said}") as caught:
        task(tmp_path, hints_file=str(file))
    assert "\n" not in str(caught.value)
    made = task(tmp_path, hints_file=str(file), on_error="skip")
    assert "2 with hints of a file (1 broken)" in made.summary
    assert made.hinting.from_file(made.prompts(np.int32([3])))[1].any()


def test_a_layout_names_hints_and_detects_lists_of_texts():
    record = {"question": "Q", "answer": "A"}
    for some, want in (([" a ", None, ""], ("a", None, None)), (None, ()), ([], ())):
        given = record | {"clues": {"all": some}, "hints": some}
        problem = Problem("Q", "A", hints=want)
        assert layouts.fields(given, hints="clues.all") == problem
        assert layouts.detect(given) == problem
    for other in ("a", [["a"]], {"a": 1}):
        with pytest.raises(LayoutError, match=r"no list of texts|no text"):
            layouts.fields(record | {"hints": other}, hints="hints")
        assert layouts.detect(record | {"hints": other}) == Problem("Q", "A")


# ----- options


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"hint_words": "Hint:"}, r"task\.hint_words='Hint:' does not say .* \{hint\}"),
        ({"hints": False, "hints_file": "x"}, "is not read without task.hints=True"),
        ({"hints_file": "nowhere.jsonl"}, "nowhere.jsonl does not exist"),
        ({"hint_levels": 2}, r"has hints of 3 levels, more than task\.hint_levels=2"),
        ({"layout": layouts.fields}, "none of the 4 problems to train on has a sol"),
        ({"reference": "{solution}", "layout": layouts.fields, "hints": False}, "no p"),
    ],
    ids=["words", "file", "nowhere", "levels", "solutions", "reference"],
)
def test_a_wrong_option_of_hints_is_told_in_a_sentence(tmp_path, options, said):
    with pytest.raises(ValueError, match=said) as caught:
        task(tmp_path, **options)
    assert str(caught.value).endswith(".")
    assert "\n" not in str(caught.value)


def test_a_file_of_other_questions_is_refused(tmp_path):
    file = demo.write_lines(tmp_path / "h.jsonl", [{"question": "Q", "hints": ["a"]}])
    bare = [{k: v for k, v in r.items() if k != "hints"} for r in RECORDS]
    with pytest.raises(ValueError, match="has hints for none of the 4 problems"):
        task(tmp_path, bare, hints_file=str(file))


# ----- answers to be found likely


def test_a_reference_is_the_answer_in_its_context_and_one_end(tmp_path, made):
    assert made.reference is None
    assert made.delimiter == ()
    scored = task(tmp_path, hints=False, reference="\nSo {answer} <|im_end|>.")
    prompts = scored.prompts(np.int32([2, 1]))
    tokens, mask = scored.reference(prompts)
    want = [f"\nSo {RECORDS[i]['answer']} <|im_end|>.<|im_end|>" for i in (2, 1)]
    assert says(tokens, mask) == want
    assert [(row == tokenizer().end[0]).sum() for row in tokens] == [1, 1]
    held = scored.reference(scored.held_out(np.int32([0])))
    assert says(*held) == ["\nSo 2 <|im_end|>.<|im_end|>"]
    assert held[0].shape[1] == tokens.shape[1]
    from_solution = task(tmp_path, hints=False, reference="{solution}")
    _, mask = from_solution.reference(from_solution.prompts(np.arange(4)))
    assert mask.any(-1).tolist() == [True, False, True, True]


@pytest.mark.parametrize("kind", [test_text.thinking, test_text.pieces_and_more])
def test_a_delimiter_is_control_tokens_or_text_behind_other_text(tmp_path, get, kind):  # noqa: F811
    spoken = get(kind)
    word = "</think>" if kind is test_text.thinking else "<think>"
    thinks = task(tmp_path, hints=False, tokenizer=str(spoken.path), delimiter=word)
    assert thinks.delimiter == (spoken.backend.ids[word],)
    told = task(tmp_path, hints=False, tokenizer=str(spoken.path), delimiter="\nSo:")
    assert list(told.delimiter) == spoken.encode("\nSo:", begins=False)
    assert spoken.decode(told.delimiter) == "\nSo:"
    scored = task(tmp_path, tokenizer=str(spoken.path), reference="{answer}")
    tokens, mask = scored.reference(scored.prompts(np.int32([1])))
    assert tokens[mask][:-1].tolist() == spoken.encode("yes", begins=False)
    tokens, mask = scored.hinting.solution(scored.prompts(np.int32([3])))
    assert tokens[mask].tolist() == spoken.encode("2 + 2 = 4", begins=False)


def test_prompts_of_the_device_are_read_as_well(made):
    prompts = made.prompts(np.int32([0]))
    moved = dataclasses.replace(prompts, target=jnp.asarray(prompts.target))
    for make in (made.hinting.solution, made.hinting.from_file):
        for one, two in zip(make(prompts), make(moved), strict=True):
            np.testing.assert_array_equal(one, two)
