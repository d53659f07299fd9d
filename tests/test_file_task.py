"""Files of problems as a task: prompts by id, two sides, solutions, outcomes."""

import dataclasses
import json
import os
import random
import re
from functools import cache, partial
from types import SimpleNamespace

import numpy as np
import pytest
import small
import words
from outputs import message
from test_folder import lines
from words import asked, tokenizer

from curax.commands import demo
from curax.config import ConfigError
from curax.models import pretrained
from curax.runs import memory_io
from curax.settings import errors
from curax.step.build import task_of
from curax.tasks import byte_pairs, file_task, text
from curax.verify import graders

USUAL = {"grader": graders.numbers, "max_prompt_tokens": 64}


def task(there=None, **options):
    return file_task.task(**words.files(there) | USUAL | options)


@cache
def usual():
    return task(max_trace_tokens=16)


def read(name):
    return lines(words.folder() / name)


def split(folder, train, held_out):
    """Write the files of a task to a folder; the path of what it trains on."""
    folder.mkdir(exist_ok=True)
    demo.write_lines(folder / "test.jsonl", held_out)
    return demo.write_lines(folder / "train.jsonl", train)


@pytest.mark.parametrize("side", ["train", "test"])
def test_a_prompt_is_a_line_of_the_file_in_the_chat_template(side):
    records = read(f"{side}.jsonl")
    make = usual().prompts if side == "train" else usual().held_out
    ids = np.int32([3, 0, 99, 3])
    prompts = make(ids)
    np.testing.assert_array_equal(prompts.id, ids)
    for i, number in enumerate(ids):
        want = (
            f"<|im_start|>user\n{records[number]['question']}<|im_end|>\n"
            "<|im_start|>assistant\n"
        )
        assert asked(prompts)[i] == want
        # Padding is on the left.
        assert (np.diff(prompts.mask[i].astype(int)) >= 0).all()
        assert prompts.mask[i, -1]
    assert prompts.tokens.dtype == prompts.target.dtype == np.int32


def test_all_prompts_have_one_width_and_none_is_cut():
    lengths = [len(tokenizer().chat(turn(r))) for r in read("train.jsonl")]
    lengths += [len(tokenizer().chat(turn(r))) for r in read("test.jsonl")]
    prompts = usual().prompts(np.int32([0]))
    assert prompts.tokens.shape[1] == max(lengths)


def turn(record):
    return [{"role": "user", "content": record["question"]}]


def test_prompts_can_be_plain_or_have_a_system_turn_and_a_template():
    plain = task(chat=False, system="Add.", template="Q: {question} {x} \\boxed{}\nA:")
    question = read("train.jsonl")[0]["question"]
    want = f"Add.\n\nQ: {question} {{x}} \\boxed{{}}\nA:"
    assert asked(plain.prompts(np.int32([0]))) == [want]
    told = task(system="Add.").prompts(np.int32([0]))
    (shown,) = asked(told)
    assert shown.startswith("<|im_start|>system\nAdd.<|im_end|>\n<|im_start|>")


@pytest.mark.long
def test_the_template_is_told_whether_to_think(tmp_path):
    byte_pairs.tokenizer(tmp_path, ["2 + 2 = 4"], vocab_size=300)
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    thinks = "{{ enable_thinking is defined and enable_thinking }}"
    config["chat_template"] = thinks + " {{ messages[0].content }}"
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    question = read("train.jsonl")[0]["question"]
    for thinking, want in ((None, "False"), (False, "False"), (True, "True")):
        made = task(tokenizer=str(tmp_path), thinking=thinking, max_prompt_tokens=512)
        tokens = made.prompts(np.int32([0]))
        assert text.load(tmp_path).decode(tokens.tokens[0][tokens.mask[0]]) == (
            f"{want} {question}"
        )


def test_no_question_is_on_both_sides(tmp_path):
    records = list(demo.problems(count=40))
    spaced = dict(records[3], question=records[3]["question"].replace(" ", "  "))
    more = [*records[30:], spaced, records[7]]
    split(tmp_path, [*records[:30], records[0]], more)
    made = task(tmp_path)
    assert (made.num_prompts, made.num_held_out) == (28, 12)
    assert "28 of 31 problems (1 asked before, 2 held out)" in made.summary
    left, held = asked(made.prompts(np.arange(28))), asked(made.held_out(np.arange(12)))
    assert len({" ".join(q.split()) for q in left + held}) == 40
    # Those of the file that are not asked are not trained on either.
    fewer = task(tmp_path, num_held_out=5)
    assert (fewer.num_prompts, fewer.num_held_out) == (28, 5)


def test_without_a_second_file_some_are_held_out_whatever_their_order(tmp_path):
    records = list(demo.problems(count=50))
    sides = []
    for name, shuffle in (("a", False), ("b", True)):
        if shuffle:
            random.Random(0).shuffle(records)
        (tmp_path / name).mkdir()
        demo.write_lines(tmp_path / name / "train.jsonl", records)
        made = task(tmp_path / name, held_out=None, num_held_out=7)
        assert (made.num_prompts, made.num_held_out) == (43, 7)
        sides.append({*asked(made.held_out(np.arange(7)))})
        assert not sides[-1] & {*asked(made.prompts(np.arange(43)))}
    assert sides[0] == sides[1]
    default = task(tmp_path / "a", held_out=None)
    assert default.num_held_out == 5


@pytest.mark.parametrize("asked_for", [0, 1, 7])
def test_one_problem_is_not_held_out_of_itself(tmp_path, asked_for):
    demo.write_lines(tmp_path / "train.jsonl", demo.problems(count=1))
    with pytest.raises(ValueError, match=r"one usable problem, .* task\.held_out\.$"):
        task(tmp_path, held_out=None, num_held_out=asked_for)


def test_a_trace_is_the_solution_and_the_end():
    records, ids = read("train.jsonl"), np.int32([5, 2])
    tokens, mask = usual().traces(None, usual().prompts(ids))
    assert tokens.shape == (2, 16)
    for i, number in enumerate(ids):
        row = tokens[i][mask[i]]
        assert tokenizer().decode(row[:-1], control=True) == records[number]["solution"]
        assert row[-1] == tokenizer().end[0] == usual().end[0]
        assert (np.diff(mask[i].astype(int)) <= 0).all()


def test_a_solution_that_is_too_long_is_not_imitated_and_not_cut(tmp_path):
    records = list(demo.problems(count=40))
    for record in records[::3]:
        record["solution"] = f"First of all: {record['solution']}"
    split(tmp_path, records[:30], records[30:])
    lengths = [len(tokenizer().encode(r["solution"])) + 1 for r in records[:30]]
    limit = min(lengths[::3]) - 1
    made = task(tmp_path, max_trace_tokens=limit)
    assert "; 20 solutions to imitate." in made.summary
    _, mask = made.traces(None, made.prompts(np.arange(30)))
    kept = np.where(np.array(lengths) <= limit, lengths, 0)
    np.testing.assert_array_equal(mask.sum(-1), kept)
    assert not mask[::3].any()
    shortest = min(lengths)
    with pytest.raises(ValueError, match=rf"the shortest has {shortest}\)"):
        task(tmp_path, max_trace_tokens=shortest - 1)
    for record in records:
        del record["solution"]
    demo.write_lines(tmp_path / "train.jsonl", records[:30])
    with pytest.raises(
        ValueError, match=r"^no problem .* task\.trace='\{solution\}' na"
    ):
        task(tmp_path, max_trace_tokens=16)


@pytest.mark.long
def test_a_trace_may_be_written_from_the_answer_too():
    made = task(trace="{solution}; \\boxed{{answer}}", max_trace_tokens=32)
    tokens, mask = made.traces(None, made.prompts(np.int32([0])))
    record = read("train.jsonl")[0]
    want = f"{record['solution']}; \\boxed{{{record['answer']}}}"
    assert tokenizer().decode(tokens[0][mask[0]]) == want
    assert task().traces is None


def test_outcomes_are_those_of_the_problem_that_was_asked():
    made = usual()
    prompts, held = made.prompts(np.int32([4, 9])), made.held_out(np.int32([4, 9]))
    records = [read("train.jsonl")[i] for i in (4, 9)]
    records += [read("test.jsonl")[i] for i in (4, 9)]
    targets = [*prompts.target, *held.target]
    right = [tokenizer().encode(f"so #### {r['answer']}") for r in records]
    wrong = [tokenizer().encode(f"so #### {r['answer']}1") for r in records]
    end = [made.end[0]]
    said = [[*r, *end] for r in right] + [np.array(w, np.int32) for w in wrong]
    assert made.verify_all(targets * 2, said) == [1.0] * 4 + [0.0] * 4
    assert made.verify(targets[2], right[2]) == 1.0


def unsure(prompt, completion, answer):
    if completion == "crash":
        raise ValueError(f"{prompt[:3]} {answer}")
    return None


def test_the_grader_gets_question_text_and_answer_and_may_fail():
    made = task(grader=unsure)
    target = made.prompts(np.int32([0])).target[0]
    record = read("train.jsonl")[0]
    said = [tokenizer().encode(word) for word in ("crash", "other")]
    why, none = made.verify_all([target, target], said)
    want = f"ValueError: {record['question'][:3]} {record['answer']}"
    assert why == f"error: {want}"
    assert none == "none"


def test_the_mark_changes_with_questions_and_their_order(tmp_path):
    records = list(demo.problems(count=12))
    marks = set()
    for i, some in enumerate([records, records[::-1], records[:-1]]):
        split(tmp_path / str(i), some[:10], some[10:])
        made = task(tmp_path / str(i))
        assert made.fingerprint == task(tmp_path / str(i)).fingerprint
        marks.add(made.fingerprint)
    assert len(marks) == 3


def test_the_mark_changes_with_answers_and_solutions_and_not_with_the_place(tmp_path):
    records, marks = list(demo.problems(count=12)), set()
    for name, changed in (("a", {}), ("b", {}), ("c", {"answer": "0"})):
        split(tmp_path / name, records[:10], [records[10], records[11] | changed])
        marks.add(task(tmp_path / name).fingerprint)
    assert len(marks) == 2


def test_a_file_that_is_rewritten_is_told_and_the_run_keeps_what_it_read(
    tmp_path, capsys
):
    records = list(demo.problems(count=12))
    split(tmp_path, records[:10], records[10:])
    made = task(tmp_path)
    os.utime(tmp_path / "train.jsonl", ns=(1, 1))  # touched is not changed
    before = made.prompts(np.int32(range(9)))
    assert capsys.readouterr().err == ""
    demo.write_lines(tmp_path / "train.jsonl", records[9::-1])
    after = made.prompts(np.int32(range(9)))
    said = capsys.readouterr().err
    assert f"{tmp_path / 'train.jsonl'} is not what it was when this run read" in said
    np.testing.assert_array_equal(after.tokens, before.tokens)
    right = tokenizer().encode(f"so #### {records[8]['answer']}")
    assert made.verify(after.target[8], right) == 1.0
    made.held_out(np.int32([0]))
    assert capsys.readouterr().err == ""
    assert task(tmp_path).fingerprint != made.fingerprint  # so it is not resumed


def test_a_difficulty_memory_knows_prompts_from_files():
    made = dataclasses.replace(usual(), num_prompts=50)
    names = memory_io.prompt_keys(made)
    assert len({*names}) == 50
    assert names == memory_io.prompt_keys(made)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"template": "question"}, "put {question} into it"),
        ({"on_error": "ignore"}, "must be 'raise' or 'skip'"),
        ({"tokenizer": None}, "task.tokenizer names no folder"),
        ({"held_out": None, "num_held_out": 1000}, "set it to at most 999"),
        ({"num_held_out": 101}, "set it to at most 100"),
        ({"max_prompt_tokens": 3}, "none is left"),
        ({"train": "nowhere.jsonl"}, "nowhere.jsonl does not exist"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_a_wrong_option_is_told_in_a_sentence(options, said):
    with pytest.raises(ValueError, match=said) as caught:
        task(**options)
    assert str(caught.value).endswith(".")
    assert "\n" not in str(caught.value)


def test_training_on_what_is_held_out_is_refused(tmp_path):
    split(tmp_path, demo.problems(count=3), demo.problems(count=3))
    with pytest.raises(ValueError, match=r"every problem in task\.train"):
        task(tmp_path)


def test_a_chat_without_a_template_is_refused(tmp_path):
    byte_pairs.tokenizer(tmp_path, ["1 + 1"], vocab_size=300, chat=False)
    with pytest.raises(ValueError, match=r"has no chat template; set task\.chat to F"):
        task(tokenizer=str(tmp_path), chat=True)
    plain = task(tokenizer=str(tmp_path), max_prompt_tokens=512)
    row = plain.prompts(np.int32([0]))
    question = read("train.jsonl")[0]["question"]
    assert text.load(tmp_path).decode(row.tokens[0][row.mask[0]]) == question


PARTS = "{% for one in messages[0].content %}{{ one.text }}{% endfor %}"
SAME = "the first 8 questions differ, and their prompts do not; let task.template"


@pytest.mark.parametrize(
    ("template", "said"),
    [
        # As one that looks for parts of a message where there is a text.
        (PARTS, "train.jsonl:1: its prompt has no token; let"),
        ("Answer: {{ messages[0].text }}", f"train.jsonl: {SAME}"),
    ],
    ids=["no token", "no question"],
)
def test_a_chat_template_that_asks_nothing_is_refused(tmp_path, template, said):
    byte_pairs.tokenizer(tmp_path, ["1 + 1"], vocab_size=300)
    (tmp_path / "chat_template.jinja").write_text(template)
    assert said in message(ValueError, task, tokenizer=str(tmp_path))


def test_a_broken_line_is_named_or_skipped_and_counted(tmp_path):
    records = list(demo.problems(count=6))
    path = split(tmp_path, records[:4], records[4:])
    path.write_text(path.read_text() + '{"question": \n')
    with pytest.raises(ValueError, match=rf"{path}:5: not a JSON object"):
        task(tmp_path)
    assert "4 of 5 problems (1 broken)" in task(tmp_path, on_error="skip").summary


def test_of_many_broken_lines_all_that_are_named_are_told_by_a_run(tmp_path):
    records = list(demo.problems(count=6))
    path = split(tmp_path, records[:4], records[4:])
    path.write_text(path.read_text() + "{\n" * 12)
    with pytest.raises(ConfigError) as caught, errors.config_errors(small.get_config()):
        task(tmp_path)
    first, *others, last = str(caught.value).splitlines()
    assert first.endswith("skip. 12 of 16 records are broken, also")
    assert [line.partition(": ")[0] for line in others] == [
        f"{path}:{number}" for number in range(6, 15)
    ]
    assert last == "and 2 more."


def box(prompt, completion, answer, *, of="boxed"):
    """Whether a completion has a box."""
    return float(f"\\{of}" in completion)


def two_terms(**options):
    usual = {
        "terms": {"right": graders.numbers, "box": box},
        "weights": {"right": 1.0, "box": 0.25},
        "outcome": "right",
    }
    return partial(graders.weighted, **usual | options)


def test_a_weighted_grader_has_an_outcome_and_terms_of_their_own():
    made = task(grader=two_terms())
    gold = read("train.jsonl")[0]["answer"]
    said = [f"It is \\boxed{{{gold}}}", f"so {gold}", "\\boxed{no}"]
    tokens = [np.int32(tokenizer().encode(text)) for text in said]
    targets = [made.prompts(np.int32([0])).target[0]] * len(said)
    assert made.verify_all(targets, tokens) == [1.0, 1.0, 0.0]
    assert made.terms.verify_all(targets, tokens) == {
        "right": [1.0, 1.0, 0.0],
        "box": [1.0, 0.0, 1.0],
    }
    assert made.terms.outcome == "right"
    assert made.terms.weights == {"right": 1.0, "box": 0.25}
    assert made.states is not None  # of the outcome


WRONG = {
    "weights of right, and terms right, box; give each term one weight": {
        "weights": {"right": 1.0}
    },
    "outcome='form' and terms right, box; set it to the name of one": {
        "outcome": "form"
    },
    "weights {'right': 1.0, 'box': inf}; make them finite numbers": {
        "weights": {"right": 1.0, "box": float("inf")}
    },
    "weights {'right': 1.0, 'box': 1e+39}; make them finite numbers": {
        "weights": {"right": 1.0, "box": 1e39}  # in float32 it is not
    },
    "weights {'right': 1.0, 'box': None}; make them finite numbers": {
        "weights": {"right": 1.0, "box": None}
    },
    "terms or weights that are no mapping; give both by name, {'right': ...}": {
        "weights": [1.0, 0.25]
    },
    "terms right, box of which not all are graders; name functions": {
        "terms": {"right": graders.numbers, "box": 3}
    },
    "a term that is weighted itself; list its terms in its place": {
        "terms": {"right": graders.numbers, "box": two_terms()}
    },
}


@pytest.mark.first(2)
@pytest.mark.parametrize("wrong", WRONG)
def test_a_weighted_grader_whose_options_do_not_fit_is_refused(wrong):
    with pytest.raises(
        ValueError, match=f"^{re.escape(f'graders.weighted has {wrong}')}"
    ):
        task(grader=two_terms(**WRONG[wrong]))


def test_a_question_that_cannot_be_short_enough_is_not_encoded(tmp_path, monkeypatch):
    records = list(demo.problems(count=6))
    records[1]["question"] = "1 + 1 = ? " * 200_000
    split(tmp_path, records[:4], records[4:])
    encoded, encode = [], text.Tokenizer.chat

    def chat(self, messages, **options):
        encoded.append(len(messages[-1]["content"]))
        return encode(self, messages, **options)

    monkeypatch.setattr(text.Tokenizer, "chat", chat)
    assert "3 of 4 problems (1 too long)" in task(tmp_path).summary
    assert max(encoded) < 100


def test_a_layout_is_decided_for_a_file_and_told_by_line_where_it_is_not_kept(tmp_path):
    records = list(demo.problems(count=6))
    worked = [record | {"answer": record["solution"]} for record in records[:4]]
    path = split(tmp_path, [*worked, records[0]], records[4:])
    said = rf"{path}:5: answer='\d+' has no result behind ####"
    with pytest.raises(ValueError, match=said):
        task(tmp_path)
    assert "4 of 5 problems (1 broken)" in task(tmp_path, on_error="skip").summary


def test_the_tokenizer_may_be_that_of_the_model():
    given = words.files() | USUAL
    config = SimpleNamespace(
        model=partial(pretrained.model, path=given.pop("tokenizer")),
        task=partial(file_task.task, **given),
    )
    assert task_of(config).vocab_size == tokenizer().size  # pyright: ignore[reportArgumentType]
    config.model = lambda: None
    with pytest.raises(ValueError, match=r"task\.tokenizer names no folder"):
        task_of(config)  # pyright: ignore[reportArgumentType]
